"""Luna (Ma et al., 2021): two nested attentions through a short second sequence, P.

    Y_P = Attn(P, X),   Y_X = Attn(X, Y_P)            pack the sequence into P, and unpack it again
    P'  = norm(P + Y_P),   X_A = norm(X + Y_X W + b),   X' = norm(X_A + FFN(X_A))

P' is the P of the next layer: the second stream, which begins as parameters. In a stack the model owns these and P
precedes the sequence; a single layer has its own. Causal layers cannot pack what is still to
come: there P stays as it is, and both attentions are running means over the tokens so far,

    w_j = softplus(P k'_j),   a_t = softmax(q_t^T (1/t sum_{j<=t} k_j w_j^T)),   y_t = a_t (1/t sum_{j<=t} w_j v_j^T)

Time and memory are linear in the sequence; the causal state has a constant size. Luna-256 has 256 tokens in P.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_positive
from seqboat.core.mixer import MixerOutput, RecurrentMixer, keep_rows
from seqboat.core.nn import Norm, init_linear, make_norm
from seqboat.core.padding import zero_padding
from seqboat.core.settings import fill_in
from seqboat.mixers.block import Block, BlockConfig, head_width, join_heads, split_heads
from seqboat.mixers.linear import causal_product
from seqboat.ops.functions import HIDDEN
from seqboat.ops.precision import widen


@dataclass(frozen=True, kw_only=True)
class LunaConfig(BlockConfig):
    """Luna: attention through a second, short sequence of learned tokens, in linear time.

    >>> from seqboat.mixers import LunaConfig
    >>> layer = LunaConfig(causal=True).build(64)
    >>> layer.name, layer.causal
    ('Luna', True)
    """

    length: int = 256
    """Tokens of the second sequence."""
    tied: bool = True
    """Whether keys and values are the same projection, as in the published models."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("length", self.length)

    def build(self, d_model: int) -> Luna:
        return Luna(d_model, self)


class LunaState(NamedTuple):
    """The state of a causal layer, of constant size."""

    keys: Tensor
    """(batch, heads, d_head, length): sum of k_j w_j^T"""
    values: Tensor
    """(batch, heads, length, d_head): sum of w_j v_j^T"""
    total: Tensor
    """(batch,): tokens so far"""


class Luna(RecurrentMixer):
    """One Luna layer on (batch, time, d_model): attention through a short second sequence.

    Args:
        d_model: width of the tokens.
        config: settings; the defaults if not given.
        options: individual settings as keywords, fields of `LunaConfig`.

    Calling it with x of shape (batch, time, d_model) returns a `MixerOutput` whose y has the same shape.

    >>> import torch
    >>> from seqboat.mixers import Luna
    >>> Luna(16, heads=2)(torch.randn(2, 100, 16)).y.shape
    torch.Size([2, 100, 16])
    """

    wants_positions = True

    def __init__(self, d_model: int, config: LunaConfig | None = None, **options: Any) -> None:
        super().__init__()
        config = fill_in(LunaConfig, config, options, self, d_model)
        self.config, self.d_model, self.causal = config, d_model, config.causal
        self.heads, self.d_head = config.heads, head_width(d_model, config.heads)
        self.lead = 0 if config.causal else config.length
        self.block = Block(d_model, config)
        self.pack_query = nn.Linear(d_model, d_model)
        self.query = nn.Linear(d_model, d_model)
        # keys and values, in this order; causal layers pack by keys alone
        self.pack = nn.Linear(d_model, d_model if config.tied or config.causal else 2 * d_model)
        self.unpack = nn.Linear(d_model, d_model if config.tied else 2 * d_model)
        self.second: nn.Parameter | None = nn.Parameter(torch.empty(config.length, d_model))
        self.second_norm: Norm | None = make_norm(config.norm, d_model) if config.prenorm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights N(0, 0.02), truncated at two standard deviations, biases 0; second sequence N(0, 1 / d_model)."""
        init_linear(self)
        if self.second is not None:
            nn.init.normal_(self.second, std=self.d_model**-0.5)

    def follow(self) -> None:
        self.second = None
        # after the sum only the next layer sees it, and a layer on its own has none
        self.second_norm = make_norm(self.config.norm, self.d_model)

    def closing_norm(self) -> nn.Module | None:
        return self.block.closing_norm()

    def mix(self, x: Tensor, mask: Tensor | None, state: LunaState | None) -> MixerOutput:
        if self.causal:
            return self._mix_causal(x, mask, state)
        if self.second is not None:
            second = self.second.expand(x.shape[0], -1, -1).to(x.dtype)
            return MixerOutput(self._mix_streams(x, second, mask)[0])
        second, x = x[:, : self.lead], x[:, self.lead :]
        y, second = self._mix_streams(x, second, None if mask is None else mask[:, self.lead :])
        return MixerOutput(torch.cat([second, y], dim=1))

    def _mix_streams(self, x: Tensor, second: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both sequences after this layer."""
        branch, packed_by = self.block.open(x, mask), self._open_second(second)
        visible = None if mask is None else mask[:, None, None]
        packed = self._attend(self.pack_query(packed_by), self.pack(branch), visible)
        attended = self._attend(self.query(branch), self.unpack(packed), None)
        y = zero_padding(self.block.close(x, attended, mask), mask)
        after = second + self.block.drop(packed)
        if self.second_norm is not None and not self.config.prenorm:
            after = self.second_norm(after)
        return y, after.to(x.dtype)

    def _open_second(self, second: Tensor) -> Tensor:
        if self.config.prenorm:
            assert self.second_norm is not None
            return self.second_norm(second)
        return second

    def _keys_and_values(self, given: Tensor) -> tuple[Tensor, Tensor]:
        parts = [split_heads(part, self.heads) for part in given.split(self.d_model, dim=-1)]
        return parts[0], parts[-1]

    def _attend(self, query: Tensor, given: Tensor, visible: Tensor | None) -> Tensor:
        """(batch, queries, d_model) of queries and of keys with values, all (batch, time, d_model or twice that)."""
        key, value = self._keys_and_values(given)
        scale = 1 / math.sqrt(self.d_head)
        scores = widen((split_heads(query, self.heads) * scale) @ key.transpose(-1, -2))
        if visible is not None:
            scores = scores.masked_fill(~visible, HIDDEN)
        weights = self.block.drop(torch.softmax(scores, dim=-1)).to(value.dtype)
        return join_heads(weights @ value)

    def _mix_causal(self, x: Tensor, mask: Tensor | None, state: LunaState | None) -> MixerOutput:
        batch, time = x.shape[:2]
        query, packing, key, value = self._project(self.block.open(x, mask), mask)
        before = self.make_state(batch, query.dtype, x.device) if state is None else state
        count = (before.total[:, None] + 1 + torch.arange(time, device=x.device))[:, None, :, None]
        with torch.autocast(x.device.type, enabled=False):
            scores, keys = causal_product(query, key, packing, before.keys)
            weights = self.block.drop(torch.softmax(scores / count, dim=-1))
            attended, values = causal_product(weights, packing, value, before.values)
            attended = attended / count
        total = before.total + (time if mask is None else mask.sum(dim=1))
        y = self.block.close(x, join_heads(attended.to(x.dtype)), mask)
        return MixerOutput(zero_padding(y, mask), LunaState(keys, values, total))

    def _project(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, packing weights, keys and values (batch, heads, time, ...) of a causal layer."""
        assert self.second is not None
        scale = 1 / math.sqrt(self.d_head)
        second = self._open_second(self.second[None].to(x.dtype))
        by = split_heads(self.pack_query(second), self.heads) * scale
        query = split_heads(self.query(x), self.heads) * scale
        packing = split_heads(self.pack(x), self.heads) @ by.transpose(-1, -2)
        packing = F.softplus(widen(packing), beta=math.log(2.0))
        if mask is not None:
            packing = torch.where(mask[:, None, :, None], packing, 0)
        key, value = self._keys_and_values(self.unpack(x))
        return widen(query), packing, widen(key), widen(value)

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> LunaState:
        wide = torch.promote_types(dtype, torch.float32)  # sums of many terms
        shape = batch, self.heads, self.d_head, self.config.length
        keys = torch.zeros(shape, dtype=wide, device=device)
        total = torch.zeros(batch, dtype=torch.int64, device=device)
        return LunaState(keys, torch.zeros_like(keys.transpose(2, 3).contiguous()), total)

    def advance(
        self, x: Tensor, state: LunaState, mask: Tensor | None = None, inplace: bool = False
    ) -> MixerOutput:
        real = None if mask is None else mask[:, None]
        query, packing, key, value = self._project(self.block.open(x, mask)[:, None], real)
        total = state.total + (1 if mask is None else mask.to(state.total.dtype))
        count = total.clamp(min=1)[:, None, None, None]
        with torch.autocast(x.device.type, enabled=False):
            fresh = key.transpose(-1, -2) @ packing, packing.transpose(-1, -2) @ value
            keys = state.keys.add_(fresh[0]) if inplace else state.keys + fresh[0]
            values = state.values.add_(fresh[1]) if inplace else state.values + fresh[1]
            attended = torch.softmax(query @ keys / count, dim=-1) @ values / count
        y = self.block.close(x, join_heads(attended.to(x.dtype))[:, 0], mask)
        return MixerOutput(keep_rows(mask, y), LunaState(keys, values, total))
