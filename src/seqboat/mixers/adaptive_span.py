"""Adaptive attention span (Sukhbaatar et al., 2019): every head learns how far it looks.

    m_z(x) = clamp((R + z - x) / R, 0, 1)                     the mask of a head with span z, at distance x
    a_tr   = m_z(|t - r|) exp(s_tr) / sum_q m_z(|t - q|) exp(s_tq)
    s_tr   = q_t^T (k_r + p_{t-r}) / sqrt(d_head)             p: learned embeddings of distances
    loss   = ... + weight / heads * sum of z over all heads   `auxiliary_loss`, which training adds for every layer

Only the distances that some head of the layer sees are computed and remembered, so time and memory follow the longest
span of the layer. The paper's models look back only; looking ahead as far as back is the obvious other form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.attention import HIDDEN
from seqboat.checks import check_positive, require
from seqboat.mixers.base import MixerOutput, RecurrentMixer, keep_rows
from seqboat.mixers.block import Block, BlockConfig, head_width, join_heads, split_heads, widen
from seqboat.mixers.fifo import Fifo, make_fifo, push, relative_shift, resize
from seqboat.nn import init_linear
from seqboat.padding import zero_padding


@dataclass(frozen=True, kw_only=True)
class AdaptiveSpanConfig(BlockConfig):
    """A layer with learned spans, as in the small model of enwik8."""

    max_span: int = 8192
    """The largest distance that a head can see."""
    ramp: int = 32
    """Tokens over which the mask falls from one to zero."""
    first_span: float = 0.0
    """The span of every head at the beginning of training."""
    span_weight: float = 2e-6
    """The price of a span, per token of it: the paper's for its small model of enwik8."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("max_span", self.max_span)
        check_positive("ramp", self.ramp)
        require(
            0 <= self.first_span <= self.max_span,
            f"first_span must be in 0..max_span = {self.max_span}, got {self.first_span}",
        )
        require(self.span_weight >= 0, f"span_weight must be at least 0, got {self.span_weight}")

    def build(self, d_model: int) -> AdaptiveSpan:
        return AdaptiveSpan(d_model, self)


class AdaptiveSpan(RecurrentMixer):
    """One layer with adaptive spans on (batch, time, d_model)."""

    def __init__(self, d_model: int, config: AdaptiveSpanConfig | None = None) -> None:
        super().__init__()
        config = config or AdaptiveSpanConfig()
        self.config, self.d_model, self.causal = config, d_model, config.causal
        self.heads, self.d_head = config.heads, head_width(d_model, config.heads)
        self.block = Block(d_model, config)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        sides = 1 if config.causal else 2
        self.distances = nn.Parameter(torch.empty(sides * config.max_span + 1, self.d_head))
        self.span = nn.Parameter(torch.empty(self.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights and embeddings of distances N(0, 0.02), truncated at two deviations; the spans as configured."""
        init_linear(self)
        nn.init.trunc_normal_(self.distances, std=0.02, a=-0.04, b=0.04)
        nn.init.constant_(self.span, self.config.first_span)

    def closing_norm(self) -> nn.Module | None:
        return self.block.closing_norm()

    def spans(self) -> Tensor:
        """(heads,): the span z of each head."""
        return self.span.clamp(0, self.config.max_span)

    def auxiliary_loss(self) -> Tensor | None:
        """The price of the layer's spans: weight / heads * sum of the spans."""
        return self.config.span_weight * self.spans().mean() if self.config.span_weight else None

    def reach(self) -> int:
        """The largest distance that a head sees now."""
        if torch.compiler.is_compiling() or self.span.device.type == "meta":
            return self.config.max_span
        # the one look at numbers on the device: it sizes the window
        low, high = torch.stack(self.span.detach().aminmax()).tolist()
        if self.training and (low < 0 or high > self.config.max_span):
            # training may have pushed a span out of its range, from where it would get no gradient
            with torch.no_grad():
                self.span.clamp_(0, self.config.max_span)
        longest = min(max(high, 0.0), self.config.max_span)
        return min(math.ceil(longest + self.config.ramp) - 1, self.config.max_span)

    def mix(self, x: Tensor, mask: Tensor | None, state: Fifo | None) -> MixerOutput:
        batch, time = x.shape[:2]
        reach = self.reach()
        counts = None if mask is None else mask.sum(dim=1)
        query, key, value = self._project(self.block.open(x, mask))
        after = None
        left = min(reach, max(time - 1, 0))
        right = 0 if self.causal else left
        total = torch.zeros((), dtype=torch.int64, device=x.device)
        keys, values = (F.pad(part, (0, 0, left, 0)) for part in (key, value))
        if self.causal:
            empty = make_fifo(batch, self.heads, 0, self.d_head, x.dtype, x.device)
            before = resize(empty if state is None else state, reach)
            after, old_and_new, values_too = push(before, key, value, counts)
            if state is not None:
                left, total = reach, state.total[:, None]
                keys, values = old_and_new.to(key.dtype), values_too.to(value.dtype)
        position = torch.arange(keys.shape[2], device=x.device) - left
        real = position >= -total
        if mask is not None and not self.causal:
            assert counts is not None
            real = real & (position < counts[:, None])
        real = real.expand(1, -1) if real.dim() == 1 else real
        attended = self._attend(query, keys, values, real, left, right)
        y = self.block.close(x, join_heads(attended), mask)
        return MixerOutput(zero_padding(y, mask), after)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, time, d_head)."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return tuple(split_heads(part, self.heads) for part in (query, key, value))  # type: ignore[return-value]

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, real: Tensor, left: int, right: int
    ) -> Tensor:
        """Blocks of queries against what they can see.

        Args:
            query: (batch, heads, time, d_head).
            keys, values: (batch, heads, left + time, d_head): they begin `left` tokens before the queries.
            real: (batch or 1, left + time): whether there is such a key.
            left, right: the farthest tokens that are seen.
        """
        time = query.shape[2]
        # blocks about as long as half of what they see waste little
        size = min(max(time, 1), max(16, min(128, (left + right) // 2)))
        groups = max(-(-time // size), 1)
        width, pad = left + size + right, groups * size - time
        queries = F.pad(query, (0, 0, 0, pad)).unflatten(2, (groups, size)) * (1 / math.sqrt(self.d_head))
        keys, values = (F.pad(part, (0, 0, 0, pad + right)) for part in (keys, values))
        visible = F.pad(real, (0, pad + right)).unfold(1, width, size)[:, None, :, None]
        row = torch.arange(size, device=query.device)[:, None]
        distance = row + left - torch.arange(width, device=query.device)  # query minus key
        visible = visible & (distance <= left) & (distance >= -right)
        falling = torch.arange(left + size - 1, -right - 1, -1, device=query.device)
        by_distance = queries @ self._embed(falling).to(query.dtype).T
        scores = queries @ keys.unfold(2, width, size) + relative_shift(by_distance)
        weights = self._weigh(scores, visible, distance.abs())
        attended = weights.to(values.dtype) @ values.unfold(2, width, size).transpose(-1, -2)
        return attended.flatten(2, 3)[:, :, :time]

    def _embed(self, distance: Tensor) -> Tensor:
        """Embeddings of distances from a query back to a key."""
        side = self.config.max_span
        return self.distances[
            distance.clamp(0 if self.causal else -side, side) + (0 if self.causal else side)
        ]

    def _weigh(self, scores: Tensor, visible: Tensor, distance: Tensor) -> Tensor:
        """Masked weights of scores (batch, heads, ..., keys)."""
        scores = widen(scores)
        span = self.spans().to(scores.dtype).view(-1, *(1,) * (scores.dim() - 2))
        mask = ((self.config.ramp + span - distance) / self.config.ramp).clamp(0, 1)
        # hidden before the softmax, or a high score out of reach would drown all others
        raised = torch.softmax(scores.masked_fill(~visible | (mask == 0), HIDDEN), dim=-1) * mask
        weights = raised / raised.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(raised.dtype).tiny)
        return self.block.drop(weights)

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Fifo:
        # no slots yet: as many as the spans need come with the first token
        return make_fifo(batch, self.heads, 0, self.d_head, dtype, device)

    def advance(
        self, x: Tensor, state: Fifo, mask: Tensor | None = None, inplace: bool = False
    ) -> MixerOutput:
        reach = self.reach()
        query, key, value = self._project(self.block.open(x, mask)[:, None])
        counts = None if mask is None else mask.to(state.total.dtype)
        after, keys, values = push(resize(state, reach), key, value, counts)
        distance = torch.arange(reach, -1, -1, device=x.device)
        visible = (distance <= state.total[:, None])[:, None, None]
        query = query * (1 / math.sqrt(self.d_head))
        both = keys.to(query.dtype) + self._embed(distance).to(query.dtype)
        weights = self._weigh(query @ both.transpose(-1, -2), visible, distance)
        attended = weights.to(query.dtype) @ values.to(query.dtype)
        y = self.block.close(x, join_heads(attended)[:, 0], mask)
        return MixerOutput(keep_rows(mask, y), after)
