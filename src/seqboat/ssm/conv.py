"""The moving average with a short convolution: each of the nearest tokens has a separate weight.

    y_t = EMA(x)_t + sum_j taps_j * x_{t-j},   j = 1, ..., conv - 1

Not in the paper. An average blurs the tokens just before the current one, so a layer learns late which token came
before which: associative recall and language depend on it. Mamba and its successors begin every layer with such a
convolution for the same reason. In bidirectional layers the next tokens have taps too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.core.layout import Layout
from seqboat.core.settings import fill_in
from seqboat.ssm.diagonal import EMA, EMAConfig, SSMState, TruncatedState, joined_with, latest


@dataclass(frozen=True, kw_only=True)
class EMAConvConfig(EMAConfig):
    """The moving average with a short convolution, which tells neighboring tokens apart."""

    conv: int = 4
    """Taps of the short convolution: tokens that it sees on one side, the current one included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.conv >= 2, f"conv must be at least 2, got {self.conv!r}; 'ema' has no convolution")

    def build(self, d_model: int, causal: bool) -> EMAConv:
        return EMAConv(d_model, self, causal=causal)


class EMAConvState(NamedTuple):
    """The state of the averages and of the convolution."""

    states: Tensor
    """of the averages: those of `SSMState`, or the history of `TruncatedState`"""
    recent: Tensor
    """(batch, conv - 1, dim): the last inputs, oldest first, zeros before the first token"""


class EMAConv(EMA):
    """The moving average of the paper and a short convolution, on every token."""

    def __init__(
        self, d_model: int, config: EMAConvConfig | None = None, *, causal: bool, **options: Any
    ) -> None:
        config = fill_in(EMAConvConfig, config, options, self, d_model)
        super().__init__(d_model, config, causal=causal)
        self.conv, self.packs = config.conv, False
        self.taps = nn.Parameter(torch.empty(self.directions, config.conv - 1, d_model))
        self._reset_taps()

    def reset_parameters(self) -> None:
        """As the average; taps start at N(0, 0.5)."""
        super().reset_parameters()
        if "taps" in self._parameters:  # not yet while the average is being made
            self._reset_taps()

    def _reset_taps(self) -> None:
        nn.init.trunc_normal_(self.taps, std=0.5, a=-1.0, b=1.0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, conv={self.conv}"

    def read(self, x: Tensor, layout: Layout, state: Any) -> tuple[Tensor, Any]:
        y, after = super().read(x, layout, None if state is None else self._inner(state))
        past, time = self.conv - 1, x.shape[1]
        taps = self.taps.to(x.dtype)
        joined = joined_with(x, None if state is None else state.recent, past)
        for age in range(1, self.conv):
            y = torch.addcmul(y, taps[0, age - 1], joined[:, past - age : past - age + time])
        if self.causal:
            assert after is not None
            return y, EMAConvState(after[0], latest(joined, layout.mask, past))
        ahead = torch.cat([x, x.new_zeros(x.shape[0], past, self.d_model)], dim=1)
        for distance in range(1, self.conv):
            y = torch.addcmul(y, taps[1, distance - 1], ahead[:, distance : distance + time])
        return y, None

    def init_state(self, batch: int) -> Any:
        states = super().init_state(batch)[0]
        return EMAConvState(states, states.new_zeros(batch, self.conv - 1, self.d_model))

    def read_token(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().read_token(x, self._inner(state))
        y = y + (state.recent * self.taps[0].to(x.dtype).flip(0)).sum(dim=1)
        joined = torch.cat([state.recent, x[:, None]], dim=1)
        return y, EMAConvState(after[0], joined[:, 1:])

    def _inner(self, state: EMAConvState) -> SSMState | TruncatedState:
        return SSMState(state.states) if self.truncation is None else TruncatedState(state.states)
