"""Adaptive attention span (Sukhbaatar et al., 2019): every head learns how far it looks.

    m_z(x) = clamp((R + z - x) / R, 0, 1)                     the mask of a head with span z, at distance x
    a_tr   = m_z(t - r) exp(s_tr) / sum_q m_z(t - q) exp(s_tq)
    s_tr   = q_t^T (k_r + p_{t-r}) / sqrt(d_head)             p: learned embeddings of distances
    loss   = ... + weight / heads * sum of z over all heads   `auxiliary_loss`, which training adds for every layer

What is learned is z / max_span, as in the published code: a step then moves a span by about max_span * lr tokens.
Only the distances that some head of the layer sees are computed and remembered, so time and memory follow the longest
span of the layer (under torch.compile, where sizes have to be known, max_span). Heads look back only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Direction, MixerOutput, check_direction
from seqboat.core.nn import init_linear
from seqboat.core.settings import fill_in
from seqboat.core.state import overwrite
from seqboat.mixers.block import BlockConfig, MultiHead, join_heads
from seqboat.mixers.memory import Fifo, make_fifo, push, relative_shift, resize
from seqboat.ops.attention import HIDDEN, widen


@dataclass(frozen=True, kw_only=True)
class AdaptiveSpanConfig(BlockConfig):
    """Adaptive Span: causal attention in which every head learns how far back it looks."""

    directions: ClassVar[tuple[Direction, ...]] = ("causal",)

    max_span: int = 8192
    """The largest distance that a head can see."""
    ramp: int = 32
    """Tokens over which the mask falls from one to zero."""
    first_span: float = 0.0
    """The span of every head at the beginning of training, in tokens."""
    span_weight: float = 2e-6
    """Loss per token of span; the default is the paper's for its small model of enwik8."""
    shared_distances: bool = False
    """Whether the layers of a model share the embeddings of distances, as in the published code."""

    causal: bool = True
    """Always true: heads look back only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_direction(self, self.causal, "its heads look back only")
        check_positive("max_span", self.max_span)
        check_positive("ramp", self.ramp)
        require(
            0 <= self.first_span <= self.max_span,
            f"first_span must be in 0..max_span = {self.max_span}, got {self.first_span}",
        )
        require(self.span_weight >= 0, f"span_weight must be at least 0, got {self.span_weight}")

    def build(self, d_model: int) -> AdaptiveSpan:
        return AdaptiveSpan(d_model, self)


class _Bounded(torch.autograd.Function):
    """Numbers clamped to [0, 1]; outside of it, only gradients that lead back pass.

    The published code clamps its parameters after every step, which a compiled layer cannot do. With a plain clamp,
    spans that momentum carried out would never come back; if all gradients passed, they would run away.
    """

    @staticmethod
    def forward(ratio: Tensor) -> Tensor:
        return ratio.clamp(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (ratio,) = ctx.saved_tensors
        # optimizers step against the gradient
        inwards = torch.where(ratio < 0, gradient.clamp(max=0), gradient.clamp(min=0))
        return torch.where((ratio < 0) | (ratio > 1), inwards, gradient)


class AdaptiveSpan(MultiHead):
    """One layer with adaptive spans on (batch, time, d_model): attention with a learned span per head."""

    def __init__(self, d_model: int, config: AdaptiveSpanConfig | None = None, **options: Any) -> None:
        config = fill_in(AdaptiveSpanConfig, config, options, self, d_model)
        super().__init__(d_model, config)
        self.config = config
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.distances = nn.Parameter(torch.empty(config.max_span + 1, self.d_head))
        self.span_ratio = nn.Parameter(torch.empty(self.heads))
        # the layer whose embeddings of distances this one uses, in a list so that it is no submodule
        self._owner: list[AdaptiveSpan] = []
        self._reach: tuple[Any, int] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights and distances N(0, 0.02), truncated at two standard deviations; the spans as configured."""
        init_linear(self)
        if not self._owner:
            nn.init.trunc_normal_(self.distances, std=0.02, a=-0.04, b=0.04)
        nn.init.constant_(self.span_ratio, self.config.first_span / self.config.max_span)

    def share(self, first: AdaptiveSpan) -> None:
        """Use the embeddings of distances of `first`, if the configuration says so."""
        if self.config.shared_distances:
            del self.distances
            self._owner.append(first)

    def spans(self) -> Tensor:
        """(heads,): the span z of each head in tokens, in at least float32."""
        bounded: Tensor = _Bounded.apply(widen(self.span_ratio))
        return self.config.max_span * bounded

    def auxiliary_loss(self) -> Tensor | None:
        """What the spans of the layer cost: weight / heads * sum of the spans."""
        return self.config.span_weight * self.spans().mean() if self.config.span_weight else None

    def reach(self, fresh: bool = True) -> int:
        """The largest distance that a head sees now; compiled layers assume the largest possible one.

        Args:
            fresh: look again, which makes the host wait for the device. Otherwise the last result holds until the
                parameter is replaced or changed in place; changes through `.data` go unnoticed.
        """
        ratio = self.span_ratio
        if torch.compiler.is_compiling() or ratio.device.type == "meta":
            return self.config.max_span
        traced = type(ratio) is nn.Parameter and not ratio.is_inference()
        key = (ratio.data_ptr(), ratio._version, ratio.dtype) if traced else None
        if fresh or key is None or self._reach is None or self._reach[0] != key:
            # the only transfer from the device: it determines the window
            longest = self.spans().detach().max().item()
            self._reach = key, min(math.ceil(longest + self.config.ramp) - 1, self.config.max_span)
        return self._reach[1]

    def mix(self, x: Tensor, layout: Layout, state: Fifo | None) -> MixerOutput:
        mask = layout.mask
        batch, time = x.shape[:2]
        # every new sequence looks again, in case the weights changed unnoticed
        reach = self.reach(fresh=state is None)
        counts = None if mask is None else mask.sum(dim=1)
        query, key, value = self.split(self.qkv(self.block.open(x, mask)))
        empty = make_fifo(batch, self.heads, 0, self.d_head, x.dtype, x.device)
        before = resize(empty if state is None else state, reach)
        after, old_and_new, values_too = push(before, key, value, counts)
        if state is None:
            left, total = min(reach, max(time - 1, 0)), torch.zeros(1, 1, dtype=torch.int64, device=x.device)
            keys, values = (F.pad(part, (0, 0, left, 0)) for part in (key, value))
        else:
            left, total = reach, state.total[:, None]
            keys, values = old_and_new.to(key.dtype), values_too.to(value.dtype)
        real = torch.arange(keys.shape[2], device=x.device) - left >= -total
        attended = self._attend(query, keys, values, real, left)
        y = self.block.close(x, join_heads(attended), mask)
        return MixerOutput(clear(y, mask), after)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, real: Tensor, left: int) -> Tensor:
        """Blocks of queries against what they can see.

        Args:
            query: (batch, heads, time, d_head).
            keys, values: (batch, heads, left + time, d_head): they begin `left` tokens before the queries.
            real: (batch or 1, left + time): whether there is such a key.
            left: how many tokens before a query are seen.
        """
        time = query.shape[2]
        # blocks of about half of what they see waste little
        size = min(max(time, 1), max(16, min(128, left // 2)))
        groups = max(-(-time // size), 1)
        width, pad = left + size, groups * size - time
        queries = F.pad(query, (0, 0, 0, pad)).unflatten(2, (groups, size)) * (1 / math.sqrt(self.d_head))
        keys, values = (F.pad(part, (0, 0, 0, pad)) for part in (keys, values))
        visible = F.pad(real, (0, pad)).unfold(1, width, size)[:, None, :, None]
        place = torch.arange(size, device=query.device)[:, None]
        distance = place + left - torch.arange(width, device=query.device)  # query minus key
        visible = visible & (distance <= left) & (distance >= 0)
        falling = torch.arange(left + size - 1, -1, -1, device=query.device)
        by_distance = queries @ self._embed(falling).to(query.dtype).T
        scores = queries @ keys.unfold(2, width, size) + relative_shift(by_distance)
        weights = self._weigh(scores, visible, distance)
        attended = weights.to(values.dtype) @ values.unfold(2, width, size).transpose(-1, -2)
        return attended.flatten(2, 3)[:, :, :time]

    def _embed(self, distance: Tensor) -> Tensor:
        """Embeddings of distances from a query back to a key."""
        table = self._owner[0].distances if self._owner else self.distances
        return table[distance.clamp(0, self.config.max_span)]

    def _weigh(self, scores: Tensor, visible: Tensor, distance: Tensor) -> Tensor:
        """Masked weights of scores (batch, heads, ..., keys)."""
        scores = widen(scores)
        span = self.spans().to(scores.dtype).view(-1, *(1,) * (scores.dim() - 2))
        mask = ((self.config.ramp + span - distance) / self.config.ramp).clamp(0, 1)
        # hidden before the softmax, or a high score out of reach would drown all others
        raised = torch.softmax(scores.masked_fill(~visible | (mask == 0), HIDDEN), dim=-1) * mask
        weights = raised / raised.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(raised.dtype).tiny)
        return self.block.drop(weights)

    def _fresh(self, batch: int, dtype: torch.dtype, device: torch.device) -> Fifo:
        # no slots yet: the first token makes room for what the spans need
        return make_fifo(batch, self.heads, 0, self.d_head, dtype, device)

    @torch.no_grad()
    def step(self, x: Tensor, state: Fifo) -> MixerOutput:
        reach = self.reach(fresh=False)
        query, key, value = self.split(self.qkv(self.block.open(x, None)[:, None]))
        after, keys, values = push(resize(state, reach), key, value, None)
        distance = torch.arange(reach, -1, -1, device=x.device)
        visible = (distance <= state.total[:, None])[:, None, None]
        query = query * (1 / math.sqrt(self.d_head))
        both = keys.to(query.dtype) + self._embed(distance).to(query.dtype)
        weights = self._weigh(query @ both.transpose(-1, -2), visible, distance)
        attended = weights.to(query.dtype) @ values.to(query.dtype)
        y = self.block.close(x, join_heads(attended)[:, 0], None)
        return MixerOutput(y, overwrite(state, after))
