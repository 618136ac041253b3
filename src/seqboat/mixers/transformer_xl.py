"""Transformer-XL (Dai et al., 2019): segments with a memory, and relative positions.

    score(i, j) = (q_i + u)^T k_j + (q_i + v)^T W_r R_{i-j}        over sqrt(d_head), R sinusoidal
    j runs over the segment of i up to i, and over the `memory` tokens before that segment

Segments begin at multiples of their length from the start of the sequence, whether it comes in one call, in pieces or
token by token. Time and memory are linear in the sequence; the state has a constant size. Inside one call
gradients flow through the memory; if training carries the state, they end at the call, as in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_positive
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Direction, MixerOutput, check_direction
from seqboat.core.nn import init_linear, sinusoids
from seqboat.core.settings import fill_in
from seqboat.core.state import overwrite
from seqboat.mixers.block import BlockConfig, MultiHead, join_heads
from seqboat.mixers.memory import Fifo, make_fifo, push, relative_shift
from seqboat.ops.attention import HIDDEN, widen


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(BlockConfig):
    """Transformer-XL: causal attention over a segment and a memory of earlier ones, relative positions."""

    directions: ClassVar[tuple[Direction, ...]] = ("causal",)

    segment: int = 512
    """Tokens per segment."""
    memory: int = 512
    """Tokens before its segment that a token sees."""
    causal: bool = True
    """Always true: the layer has no bidirectional form."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_direction(self, self.causal, "its memory holds what came before")
        check_positive("segment", self.segment)
        check_positive("memory", self.memory, least=0)

    def build(self, d_model: int) -> TransformerXL:
        return TransformerXL(d_model, self)


class TransformerXL(MultiHead):
    """One Transformer-XL layer on (batch, time, d_model): causal attention with a memory of earlier segments."""

    def __init__(self, d_model: int, config: TransformerXLConfig | None = None, **options: Any) -> None:
        config = fill_in(TransformerXLConfig, config, options, self, d_model)
        super().__init__(d_model, config)
        self.config = config
        self.slots = config.memory + config.segment
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.relative = nn.Linear(d_model, d_model, bias=False)
        self.content_bias = nn.Parameter(torch.empty(self.heads, self.d_head))
        self.position_bias = nn.Parameter(torch.empty(self.heads, self.d_head))
        self._table = torch.empty(0, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights and both biases of the scores N(0, 0.02), truncated at two standard deviations; other biases 0."""
        init_linear(self)
        for bias in (self.content_bias, self.position_bias):
            nn.init.trunc_normal_(bias, std=0.02, a=-0.04, b=0.04)

    def mix(self, x: Tensor, layout: Layout, state: Fifo | None) -> MixerOutput:
        mask = layout.mask
        counts = None if mask is None else mask.sum(dim=1)
        query, key, value = self.split(self.qkv(self.block.open(x, mask)))
        before = self._fresh(x.shape[0], x.dtype, x.device) if state is None else state
        after, keys, values = push(before, key, value, counts)
        if state is None:
            attended = self._attend_from_start(query, key, value)
        else:
            attended = self._attend(query, keys.to(key.dtype), values.to(value.dtype), state.total)
        y = self.block.close(x, join_heads(attended), mask)
        return MixerOutput(clear(y, mask), after)

    def _attend_from_start(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Of a sequence from its beginning: no memory is longer than the sequence so far."""
        time = key.shape[2]
        size = min(self.config.segment, max(time, 1))
        groups = max(-(-time // size), 1)
        memory = min(self.config.memory, (groups - 1) * size)
        pad = groups * size - time
        keys, values = (F.pad(part, (0, 0, memory, pad)) for part in (key, value))
        place = torch.arange(memory + groups * size, device=key.device) - memory
        attended = self._attend_grid(
            F.pad(query, (0, 0, 0, pad)), keys, values, (place >= 0)[None], size, memory
        )
        return attended[:, :, :time]

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, total: Tensor) -> Tensor:
        """After `total` tokens; keys and values begin `slots` tokens before the queries."""
        size, memory = self.config.segment, self.config.memory
        batch, time = query.shape[0], query.shape[2]
        groups = max(-(-(size - 1 + time) // size), 1)
        inside = total % size
        # sequences move so that their segments begin at the same places
        place = torch.arange(groups * size, device=query.device)
        target = place - inside[:, None]
        target = torch.where((target >= 0) & (target < time), target, time)
        moved = _take(F.pad(query, (0, 0, 0, 1)), target)
        column = torch.arange(memory + groups * size, device=query.device) - inside[:, None]
        real = total[:, None] - memory + column >= 0
        source = (column + size).clamp(max=keys.shape[2] - 1)
        attended = self._attend_grid(moved, _take(keys, source), _take(values, source), real, size, memory)
        back = inside[:, None] + torch.arange(time, device=query.device).expand(batch, -1)
        return _take(attended, back)

    def _attend_grid(
        self, query: Tensor, keys: Tensor, values: Tensor, real: Tensor, size: int, memory: int
    ) -> Tensor:
        """Attention of whole segments.

        Args:
            query: (batch, heads, groups * size, d_head).
            keys, values: (batch, heads, memory + groups * size, d_head).
            real: (batch or 1, memory + groups * size): whether there is such a key.
            size: tokens per segment.
            memory: tokens before a segment that it sees.
        """
        width = memory + size
        groups = query.shape[2] // size
        queries = query.unflatten(2, (groups, size))
        scale = 1 / math.sqrt(self.d_head)
        content = (queries + self.content_bias[:, None, None].to(query.dtype)) * scale
        position = (queries + self.position_bias[:, None, None].to(query.dtype)) * scale
        windows = keys.unfold(2, width, size)  # (batch, heads, groups, d_head, width)
        distances = self._distances(width, query).flip(1)[:, None]
        scores = content @ windows + relative_shift(position @ distances.transpose(-1, -2))
        hidden = torch.ones(size, width, dtype=torch.bool, device=query.device).triu(memory + 1)
        hidden = hidden | ~real.unfold(1, width, size)[:, None, :, None]
        weights = self._weigh(scores, hidden).to(values.dtype)
        attended = weights @ values.unfold(2, width, size).transpose(-1, -2)
        return attended.flatten(2, 3)

    def _distances(self, count: int, like: Tensor) -> Tensor:
        """(heads, count, d_head): embeddings of the distances 0, 1, ... to earlier tokens."""
        return self.relative(self._sinusoids(count).to(like)).unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def _sinusoids(self, count: int) -> Tensor:
        """(count, d_model): cached between calls, as they cost more than a step that uses them."""
        device = self.content_bias.device
        if len(self._table) < count or self._table.device != device:
            with torch.inference_mode(False), torch.no_grad():
                self._table = sinusoids(torch.arange(count, device=device), self.d_model)
        return self._table[:count]

    def _weigh(self, scores: Tensor, hidden: Tensor) -> Tensor:
        weights = torch.softmax(widen(scores).masked_fill(hidden, HIDDEN), dim=-1)
        return self.block.drop(weights)

    def _fresh(self, batch: int, dtype: torch.dtype, device: torch.device) -> Fifo:
        return make_fifo(batch, self.heads, self.slots, self.d_head, dtype, device)

    @torch.no_grad()
    def step(self, x: Tensor, state: Fifo) -> MixerOutput:
        query, key, value = self.split(self.qkv(self.block.open(x, None)[:, None]))
        after, keys, values = push(state, key, value, None)
        distance = torch.arange(self.slots, -1, -1, device=x.device)
        reach = (state.total % self.config.segment + self.config.memory).minimum(state.total)
        hidden = (distance > reach[:, None])[:, None, None]
        scale = 1 / math.sqrt(self.d_head)
        content = (query + self.content_bias[:, None].to(query.dtype)) * scale
        position = (query + self.position_bias[:, None].to(query.dtype)) * scale
        # the query is projected instead of the sinusoids: one product instead of many
        weight = self.relative.weight.unflatten(0, (self.heads, self.d_head)).to(query.dtype)
        table = self._sinusoids(self.slots + 1).flip(0).to(query)
        scores = content @ keys.to(query.dtype).transpose(-1, -2) + position @ weight @ table.T
        attended = self._weigh(scores, hidden).to(query.dtype) @ values.to(query.dtype)
        y = self.block.close(x, join_heads(attended)[:, 0], None)
        return MixerOutput(y, overwrite(state, after))


def _take(x: Tensor, index: Tensor) -> Tensor:
    """(batch, heads, places, d) at the places (batch, n) of each sequence."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
