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

from seqboat import MixerOutput, RecurrentMixer
from seqboat.core.mixer import keep_rows
from seqboat.core.nn import make_norm
from seqboat.core.padding import zero_padding


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


class RunningMean(RecurrentMixer):
    """The layer, on (batch, time, d_model)."""

    def __init__(self, d_model: int, config: RunningMeanConfig) -> None:
        super().__init__()
        self.d_model, self.causal = d_model, config.causal
        self.norm = nn.LayerNorm(d_model)
        self.inner = nn.Linear(2 * d_model, config.expansion * d_model)
        self.out = nn.Linear(config.expansion * d_model, d_model)

    def closing_norm(self) -> nn.Module | None:
        return make_norm("layer", self.d_model)

    def mix(self, x: Tensor, mask: Tensor | None, state: RunningMeanState | None) -> MixerOutput:
        """Whole sequences: real tokens come first in each, and `mask` marks them."""
        batch, time, _ = x.shape
        h = zero_padding(self.norm(x), mask) if mask is not None else self.norm(x)
        real = mask.sum(dim=1) if mask is not None else torch.full((batch,), time, device=x.device)
        if not self.causal:
            mean = (h.sum(dim=1) / real.clamp_min(1)[:, None]).to(x.dtype)[:, None].expand_as(h)
            return MixerOutput(self._finish(x, h, mean, mask))
        before = state or self.make_state(batch, x.dtype, x.device)
        places = torch.arange(1, time + 1, device=x.device)
        mean = (before.total[:, None] + h.cumsum(dim=1)) / (before.tokens[:, None] + places)[..., None]
        after = RunningMeanState(before.total + h.sum(dim=1), before.tokens + real)
        return MixerOutput(self._finish(x, h, mean, mask), after)

    def _finish(self, x: Tensor, h: Tensor, mean: Tensor, mask: Tensor | None) -> Tensor:
        y = x + self.out(F.gelu(self.inner(torch.cat([h, mean], dim=-1))))
        return y if mask is None else zero_padding(y, mask)

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> RunningMeanState:
        total = torch.zeros(batch, self.d_model, dtype=dtype, device=device)
        return RunningMeanState(total, torch.zeros(batch, dtype=torch.int64, device=device))

    def advance(
        self, x: Tensor, state: RunningMeanState, mask: Tensor | None = None, inplace: bool = False
    ) -> MixerOutput:
        """One token per sequence; sequences outside `mask` pause."""
        h = self.norm(x)
        now = RunningMeanState(state.total + h, state.tokens + 1)
        y = x + self.out(F.gelu(self.inner(torch.cat([h, now.total / now.tokens[:, None]], dim=-1))))
        kept = RunningMeanState(*(keep_rows(mask, new, old) for new, old in zip(now, state, strict=True)))
        return MixerOutput(keep_rows(mask, y), kept)
