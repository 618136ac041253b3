"""The Transformer layer (Vaswani et al., 2017): multi-head attention among all tokens, then a feed-forward block.

    O_i = softmax(Q_i K_i^T / sqrt(d_head) + bias_i) V_i     for each head i
    x   = x + (O_1 ... O_heads) W + b,   x = x + W_2 f(W_1 x + b_1) + b_2

with the norm before each block (pre-norm) or after each sum (post-norm). Time and memory grow with the square of
the sequence if scores are materialized ("plain"); `scaled_dot_product_attention` ("sdpa") keeps the memory linear.
In decoding, keys and values of all earlier tokens are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, check_rate, require
from seqboat.core.mixer import MixerOutput, RecurrentMixer, keep_rows
from seqboat.core.nn import (
    ACTIVATIONS,
    NORMS,
    ActivationName,
    FeedForward,
    Norm,
    NormName,
    init_linear,
    make_norm,
)
from seqboat.core.padding import zero_padding
from seqboat.core.settings import Settings, fill_in
from seqboat.mixers.cache import Cache, append, extend, make_cache, seen_by_step
from seqboat.ops.positions import Absolute, OriginalBias, Positions, Rotary

Implementation = Literal["plain", "sdpa"]
TransformerPositions = Literal["absolute", "rotary", "relative", "none"]
TRANSFORMER_POSITIONS: dict[str, Positions] = {
    "absolute": Absolute(),
    "rotary": Rotary(),
    "relative": OriginalBias(),
    "none": Positions(),
}


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Settings):
    """Transformer: multi-head softmax attention over the whole sequence and a feed-forward block.

    >>> from seqboat.mixers import TransformerConfig
    >>> layer = TransformerConfig(causal=True).build(64)
    >>> layer.name, layer.causal
    ('Transformer', True)
    """

    heads: int = 8
    """Attention heads, each of width d_model / heads."""
    d_ff: int | None = None
    """Hidden width of the feed-forward block; four times the model's by default."""
    activation: ActivationName = "relu"
    """The function inside the feed-forward block."""
    implementation: Implementation = "sdpa"
    """Materialized softmax, or PyTorch's fused attention; the results are the same."""
    positions: TransformerPositions = "absolute"
    """Sinusoids added to the inputs of the model, rotary embedding, a learned bias per head and distance, or none."""
    max_positions: int = 4096
    """Distances beyond which the relative bias stays the same."""
    causal: bool = False
    """Whether tokens see no later ones, as in language models."""
    norm: NormName = "layer"
    """The norm of both blocks."""
    prenorm: bool = False
    """Whether the norms come before the blocks instead of after them."""
    dropout: float = 0.0
    """Rate of dropout on attention weights and on the outputs of both blocks."""

    def __post_init__(self) -> None:
        check_positive("heads", self.heads)
        check_positive("max_positions", self.max_positions)
        check_choice("activation", self.activation, tuple(ACTIVATIONS))
        check_choice("implementation", self.implementation, ("plain", "sdpa"))
        check_choice("positions", self.positions, tuple(TRANSFORMER_POSITIONS))
        check_choice("norm", self.norm, NORMS)
        check_rate("dropout", self.dropout)
        if self.d_ff is not None:
            check_positive("d_ff", self.d_ff)

    def build(self, d_model: int) -> Transformer:
        return Transformer(d_model, self)


class KeyVisibility(NamedTuple):
    """What queries see, for either implementation."""

    hidden: Tensor | None
    """(batch or 1, 1, queries or 1, keys) bool: True where a query must not see a key"""
    bias: Tensor | None
    """(batch or 1, heads, queries, keys)"""
    causal: bool
    """whether, besides, query i sees key j only if j <= i"""


class Transformer(RecurrentMixer):
    """One Transformer layer on (batch, time, d_model): full attention and a feed-forward block.

    Args:
        d_model: width of the tokens.
        config: settings; the defaults if not given.
        options: individual settings as keywords, fields of `TransformerConfig`.

    Calling it with x of shape (batch, time, d_model) returns a `MixerOutput` whose y has the same shape.

    >>> import torch
    >>> from seqboat.mixers import Transformer
    >>> Transformer(16, causal=True, heads=2)(torch.randn(2, 100, 16)).y.shape
    torch.Size([2, 100, 16])
    """

    def __init__(self, d_model: int, config: TransformerConfig | None = None, **options: Any) -> None:
        super().__init__()
        config = fill_in(TransformerConfig, config, options, self, d_model)
        check_positive("d_model", d_model)
        require(
            d_model % config.heads == 0,
            f"d_model must be a multiple of heads = {config.heads}, got {d_model}",
        )
        self.config, self.d_model, self.causal = config, d_model, config.causal
        self.positions = TRANSFORMER_POSITIONS[config.positions]
        self.wants_positions = self.positions.added
        self.heads, self.d_head = config.heads, d_model // config.heads
        self.positions.check_width("d_model / heads", self.d_head)
        self.norm: Norm = make_norm(config.norm, d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.ffn_norm: Norm = make_norm(config.norm, d_model)
        self.ffn = FeedForward(d_model, config.d_ff or 4 * d_model, config.activation)
        self.max_distance = self.positions.max_distance(config.max_positions, None)
        if self.max_distance is not None:
            self.bias = nn.Parameter(torch.empty(config.heads, 2 * self.max_distance + 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights N(0, 0.02), truncated at two standard deviations, biases 0; the relative bias N(0, 0.02)."""
        init_linear(self)
        if self.max_distance is not None:
            nn.init.trunc_normal_(self.bias, std=0.02, a=-0.04, b=0.04)

    def closing_norm(self) -> nn.Module | None:
        return make_norm(self.config.norm, self.d_model) if self.config.prenorm else None

    def mix(self, x: Tensor, mask: Tensor | None, state: Cache | None) -> MixerOutput:
        batch, time = x.shape[:2]
        counts = torch.full((batch,), time, device=x.device) if mask is None else mask.sum(dim=1)
        slot = torch.arange(time, device=x.device)
        slots = slot.expand(batch, -1) if state is None else state.total[:, None] + slot
        query, key, value = self._project(self.norm(x, mask) if self.config.prenorm else x, slots)
        after = None
        if self.causal:
            empty = make_cache(batch, self.heads, self.d_head, self.d_head, x.dtype, x.device)
            if state is None and mask is None:
                after = Cache(key.to(x.dtype), value.to(x.dtype), counts)
            else:
                after = extend(empty if state is None else state, key, value, counts)
        if state is None:
            visible = self._visible(slots[:1], slot[None], mask)
        else:
            assert after is not None
            key, value = after.keys.to(key.dtype), after.values.to(value.dtype)
            visible = self._visible_with_past(slots, key.shape[2])
        attended = self._attend(query, key, value, visible).transpose(1, 2).flatten(2)
        return MixerOutput(zero_padding(self._close(x, attended, mask), mask), after)

    def _project(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, time, d_head) of (batch, time, d_model)."""
        parts = self.qkv(x).unflatten(-1, (3, self.heads, self.d_head)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        return *self.positions.rotate(query, key, slots[:, None]), value

    def _relative(self, query_slot: Tensor, key_slot: Tensor) -> Tensor | None:
        """(sequences, heads, queries, keys): the bias of slots (sequences, queries) and (sequences, keys)."""
        furthest = self.max_distance
        if furthest is None:
            return None
        distance = (key_slot[:, None, :] - query_slot[:, :, None]).clamp(-furthest, furthest)
        return self.bias[:, distance + furthest].transpose(0, 1)

    def _visible(self, query_slot: Tensor, key_slot: Tensor, mask: Tensor | None) -> KeyVisibility:
        """Of a sequence from its beginning. Padding comes last: causal queries never see it."""
        bias = self._relative(query_slot, key_slot)
        if self.causal or mask is None:
            return KeyVisibility(None, bias, self.causal)
        # the first key stays visible, so that sequences without a real token have a finite softmax
        first = torch.arange(mask.shape[1], device=mask.device) == 0
        return KeyVisibility(~(mask | first)[:, None, None], bias, False)

    def _visible_with_past(self, query_slot: Tensor, keys: int) -> KeyVisibility:
        key_slot = torch.arange(keys, device=query_slot.device)[None]
        hidden = (key_slot[:, None, :] > query_slot[:, :, None])[:, None]
        return KeyVisibility(hidden, self._relative(query_slot, key_slot), False)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: KeyVisibility) -> Tensor:
        """(batch, heads, queries, d_head)."""
        dropout = self.config.dropout if self.training else 0.0
        hidden, bias, causal = visible
        if causal and (bias is not None or self.config.implementation == "plain"):
            ahead = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
            hidden, causal = ahead, False
        # fused attention gives no gradient to the bias of an empty sequence
        if self.config.implementation == "sdpa" and query.numel():
            given = None if hidden is None else ~hidden
            if bias is not None:
                given = bias.to(query.dtype)
                given = given if hidden is None else given.masked_fill(hidden, _lowest(given))
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=given, dropout_p=dropout, is_causal=causal
            )
        scores = (query * (1 / math.sqrt(self.d_head))) @ key.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        if hidden is not None:
            scores = scores.masked_fill(hidden, _lowest(scores))
        weights = torch.softmax(scores, dim=-1)
        return (F.dropout(weights, dropout) if dropout else weights) @ value

    def _close(self, x: Tensor, attended: Tensor, mask: Tensor | None) -> Tensor:
        """Both residual connections, after the attention of (..., d_model)."""
        y = x + self._drop(self.out(attended))
        if self.config.prenorm:
            return y + self._drop(self.ffn(self.ffn_norm(y, mask)))
        y = self.norm(y, mask)
        return self.ffn_norm(y + self._drop(self.ffn(y)), mask)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    @property
    def grows(self) -> bool:
        return self.causal

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Cache:
        return make_cache(batch, self.heads, self.d_head, self.d_head, dtype, device)

    def advance(
        self, x: Tensor, state: Cache, mask: Tensor | None = None, inplace: bool = False
    ) -> MixerOutput:
        branch = self.norm(x, mask) if self.config.prenorm else x
        query, key, value = self._project(branch[:, None], state.total[:, None])
        after = append(state, key[:, :, 0], value[:, :, 0], mask, inplace)
        keys, values, seen = seen_by_step(after)
        slots = torch.arange(keys.shape[2], device=x.device)[None]
        # a single sequence needs no mask, which lets the fused attention take its fast path
        hidden = None if x.shape[0] == 1 else ~seen[:, None, None]
        visible = KeyVisibility(hidden, self._relative(after.total[:, None] - 1, slots), False)
        attended = self._attend(query, keys.to(query.dtype), values.to(query.dtype), visible)
        return MixerOutput(keep_rows(mask, self._close(x, attended.flatten(1), mask)), after)


def _lowest(scores: Tensor) -> float:
    """A score so low that its weight is zero, yet finite: queries without any key give no NaN."""
    return torch.finfo(scores.dtype).min
