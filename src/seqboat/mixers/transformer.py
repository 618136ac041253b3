"""The Transformer layer (Vaswani et al., 2017): multi-head attention among all tokens, then a feed-forward block.

    O_i = softmax(Q_i K_i^T / sqrt(d_head) + bias_i) V_i     for each head i
    x   = x + (O_1 ... O_heads) W + b,   x = x + W_2 f(W_1 x + b_1) + b_2

with the norm before each block (pre-norm) or after each sum (post-norm). Time grows with the square of the sequence,
memory linearly: PyTorch's `scaled_dot_product_attention` keeps no scores. In decoding, keys and values of all earlier
tokens are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, require
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Mixer, MixerOutput
from seqboat.core.nn import FeedForward, init_linear, make_norm
from seqboat.core.settings import fill_in
from seqboat.core.state import overwrite
from seqboat.mixers.block import BlockConfig, Residual, head_width, join_heads
from seqboat.mixers.memory import Cache, append, extend, make_cache, seen_by_step
from seqboat.ops.attention import rotate, turns

TransformerPositions = Literal["absolute", "rotary", "relative", "none"]
TRANSFORMER_POSITIONS = ("absolute", "rotary", "relative", "none")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(BlockConfig):
    """Transformer: multi-head softmax attention over the whole sequence and a feed-forward block."""

    positions: TransformerPositions = "absolute"
    """Sinusoids added to the inputs of the model, rotary embedding, a learned bias per head and distance, or none."""
    max_positions: int = 4096
    """Distances beyond which the relative bias stays the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("positions", self.positions, TRANSFORMER_POSITIONS)
        check_positive("max_positions", self.max_positions)

    def build(self, d_model: int) -> Transformer:
        return Transformer(d_model, self)


class Transformer(Residual, Mixer):
    """One Transformer layer on (batch, time, d_model): full attention and a feed-forward block."""

    config: TransformerConfig

    def __init__(self, d_model: int, config: TransformerConfig | None = None, **options: Any) -> None:
        super().__init__()
        config = fill_in(TransformerConfig, config, options, self, d_model)
        self.config, self.d_model, self.causal = config, d_model, config.causal
        self.wants_positions = config.positions == "absolute"
        self.heads, self.d_head = config.heads, head_width(d_model, config.heads)
        require(
            config.positions != "rotary" or self.d_head % 2 == 0,
            f"d_model / heads must be even with rotary positions, got {self.d_head}",
        )
        self.norm = make_norm(config.norm, d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.ffn_norm = make_norm(config.norm, d_model)
        self.ffn = FeedForward(d_model, config.d_ff or 4 * d_model, config.activation)
        if config.positions == "relative":
            self.bias = nn.Parameter(torch.empty(config.heads, 2 * config.max_positions - 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights N(0, 0.02), truncated at two standard deviations, biases 0; the relative bias N(0, 0.02)."""
        init_linear(self)
        if self.config.positions == "relative":
            nn.init.trunc_normal_(self.bias, std=0.02, a=-0.04, b=0.04)

    def mix(self, x: Tensor, layout: Layout, state: Cache | None) -> MixerOutput:
        mask = layout.mask
        batch, time = x.shape[:2]
        counts = torch.full((batch,), time, device=x.device) if mask is None else mask.sum(dim=1)
        slot = torch.arange(time, device=x.device)
        slots = slot.expand(batch, -1) if state is None else state.total[:, None] + slot
        query, key, value = self._project(self.open(x, mask), slots)
        after, visible = None, None
        if self.causal and state is None and mask is None:
            after = Cache(key.to(x.dtype), value.to(x.dtype), counts)
        elif self.causal:
            before = self._fresh(batch, x.dtype, x.device) if state is None else state
            after = extend(before, key, value, counts)
        if state is not None:
            assert after is not None
            key, value = after.keys.to(key.dtype), after.values.to(value.dtype)
            visible = (torch.arange(key.shape[2], device=x.device) <= slots[:, :, None])[:, None]
        elif mask is not None and not self.causal:  # padding comes last: causal queries never see it
            # the first key stays visible, so that sequences without a real token have a finite softmax
            visible = (mask | (slot == 0))[:, None, None]
        bias = self._relative(slots if state is not None else slots[:1], key.shape[2])
        attended = self._attend(query, key, value, visible, bias, self.causal and state is None)
        return MixerOutput(clear(self.close(x, join_heads(attended), mask), mask), after)

    def _project(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, time, d_head) of (batch, time, d_model)."""
        parts = self.qkv(x).unflatten(-1, (3, self.heads, self.d_head)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        if self.config.positions == "rotary":
            query, key = rotate(
                torch.stack([query, key]), turns(slots[:, None], self.d_head, query.dtype)
            ).unbind(0)
        return query, key, value

    def _relative(self, slots: Tensor, keys: int) -> Tensor | None:
        """(sequences, heads, queries, keys): the bias of queries at slots (sequences, queries)."""
        if self.config.positions != "relative":
            return None
        furthest = self.config.max_positions - 1
        distance = torch.arange(keys, device=slots.device) - slots[:, :, None]
        return self.bias[:, distance.clamp(-furthest, furthest) + furthest].transpose(0, 1)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor | None,
        bias: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """(batch, heads, queries, d_head) of what is visible; with `causal`, query i sees keys up to i."""
        dropout = self.config.dropout if self.training else 0.0
        given = visible
        if bias is not None:
            if causal:
                visible = torch.ones(bias.shape[2:], dtype=torch.bool, device=bias.device).tril()
                causal = False
            # so low that the weight is zero, yet finite
            least = torch.finfo(query.dtype).min
            given = bias.to(query.dtype)
            given = given if visible is None else given.masked_fill(~visible, least)
            if not query.numel():  # fused attention gives no gradient to the bias of an empty sequence
                return query + 0 * given.sum()
        return F.scaled_dot_product_attention(query, key, value, given, dropout, causal)

    @property
    def grows(self) -> bool:
        return self.causal

    def _fresh(self, batch: int, dtype: torch.dtype, device: torch.device) -> Cache:
        return make_cache(batch, self.heads, self.d_head, self.d_head, dtype, device)

    @torch.no_grad()
    def step(self, x: Tensor, state: Cache) -> MixerOutput:
        query, key, value = self._project(self.open(x, None)[:, None], state.total[:, None])
        after = append(state, key[:, :, 0], value[:, :, 0])
        keys, values, seen = seen_by_step(after)
        # a single sequence needs no mask, which lets the fused attention take its fast path
        visible = None if x.shape[0] == 1 else seen[:, None, None]
        bias = self._relative(state.total[:, None], keys.shape[2])
        attended = self._attend(query, keys.to(query.dtype), values.to(query.dtype), visible, bias, False)
        return MixerOutput(self.close(x, attended.flatten(1), None), overwrite(state, after))
