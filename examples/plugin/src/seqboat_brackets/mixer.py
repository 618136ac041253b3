"""A mixer: every token sees the mean of the tokens so far.

m_t = mean(norm(x_1), ..., norm(x_t))          bidirectional: the mean of the whole sequence
y_t = x_t + W_2 gelu(W_1 [norm(x_t), m_t])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat import Mixer, MixerOutput
from seqboat.core.layout import Layout, clear
from seqboat.core.nn import make_norm


@dataclass(frozen=True, kw_only=True)
class RunningMeanConfig:
    """Every token sees the mean of the tokens so far."""

    causal: bool = False
    """Whether the layer reads from left to right only, for language models."""
    expansion: int = 2
    """Width of the hidden layer, as a multiple of d_model."""

    def build(self, d_model: int) -> RunningMean:
        return RunningMean(d_model, self)


class RunningMeanState(NamedTuple):
    """What a causal layer remembers."""

    total: Tensor
    """(batch, d_model): sum of the tokens so far"""
    tokens: Tensor
    """(batch,): their number"""


class RunningMean(Mixer):
    """The layer, on (batch, time, d_model)."""

    def __init__(self, d_model: int, config: RunningMeanConfig) -> None:
        super().__init__()
        self.d_model, self.causal = d_model, config.causal
        self.norm = nn.LayerNorm(d_model)
        self.inner = nn.Linear(2 * d_model, config.expansion * d_model)
        self.out = nn.Linear(config.expansion * d_model, d_model)

    def closing_norm(self) -> nn.Module | None:
        return make_norm("layer", self.d_model)

    def mix(self, x: Tensor, layout: Layout, state: RunningMeanState | None) -> MixerOutput:
        """Whole sequences: real tokens come first in each, and the mask of the layout marks them."""
        (batch, time, _), mask, real = x.shape, layout.mask, layout.lengths(x)
        h = clear(self.norm(x), mask)
        if not self.causal:
            mean = (h.sum(dim=1) / real.clamp_min(1)[:, None]).to(x.dtype)[:, None].expand_as(h)
            return MixerOutput(self._finish(x, h, mean, mask))
        before = state or self.init_state(batch)
        places = torch.arange(1, time + 1, device=x.device)
        mean = (before.total[:, None] + h.cumsum(dim=1)) / (before.tokens[:, None] + places)[..., None]
        after = RunningMeanState(before.total + h.sum(dim=1), before.tokens + real)
        return MixerOutput(self._finish(x, h, mean, mask), after)

    def _finish(self, x: Tensor, h: Tensor, mean: Tensor, mask: Tensor | None) -> Tensor:
        y = x + self.out(F.gelu(self.inner(torch.cat([h, mean], dim=-1))))
        return clear(y, mask)

    def init_state(self, batch: int) -> RunningMeanState:
        self.require_causal()
        total = torch.zeros_like(self.out.bias).expand(batch, -1).clone()
        return RunningMeanState(total, torch.zeros(batch, dtype=torch.int64, device=total.device))

    @torch.no_grad()
    def step(self, x: Tensor, state: RunningMeanState) -> MixerOutput:
        """One token per sequence; overwrites the state."""
        h = self.norm(x)
        mean = state.total.add_(h) / state.tokens.add_(1)[:, None]
        return MixerOutput(x + self.out(F.gelu(self.inner(torch.cat([h, mean], dim=-1)))), state)
