"""Multi-dimensional damped exponential moving average (MD-EMA), appendix A.3 of the paper.

Each channel is spread over `d_state` averages with different rates, which are read back:

    p = sigmoid(delta),  q = 1 - p * sigmoid(alpha)
    z_t = p * beta * x_t + q * z_{t-1},   y_t = sum(gamma / sqrt(d_state) * z_t) + skip * x_t
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqboat.core.settings import fill_in
from seqboat.ops.scan import BLOCK
from seqboat.ssm.diagonal import Coefficients, DiagonalSSM, SSMConfig


@dataclass(frozen=True, kw_only=True)
class EMAConfig(SSMConfig):
    """The multi-dimensional damped moving average, the paper's state-space layer.

    >>> from seqboat import EMAConfig, SeqBoat
    >>> SeqBoat(32, ssm=EMAConfig(d_state=8)).ssm.d_state
    8
    """

    d_state: int = 16
    """Averages per channel (the paper's h)."""
    memory: int | None = None
    """Longest time constant at the start: time constants from 2 to this many tokens, and a drive under which a rare
    event keeps its size. None: the paper's initial values, which forget after about four tokens;
    in a SeqBoat layer of the gated form, 256."""
    truncation: int | None = None
    """Number of taps after which the kernel is cut."""
    block: int = BLOCK
    """Tokens per block of the scan."""

    def build(self, d_model: int, causal: bool) -> EMA:
        return EMA(d_model, self, causal=causal)


class EMA(DiagonalSSM):
    """The multi-dimensional damped moving average of the paper, on every token.

    Args:
        d_model: channels.
        config: settings; the defaults if not given.
        causal: one direction, or else two whose outputs are added.
        options: individual settings as keywords, fields of `EMAConfig`.

    Calling it with x of shape (batch, time, d_model) returns a `MixerOutput` whose y has the same shape.

    >>> import torch
    >>> from seqboat import EMA
    >>> kernel = EMA(8, causal=True, d_state=4)
    >>> first = kernel(torch.randn(2, 100, 8))
    >>> rest = kernel(torch.randn(2, 50, 8), state=first.state)      # continues the sequence
    >>> rest.y.shape
    torch.Size([2, 50, 8])
    """

    def __init__(
        self, d_model: int, config: EMAConfig | None = None, *, causal: bool, **options: Any
    ) -> None:
        config = fill_in(EMAConfig, config, options, self, d_model)
        super().__init__(d_model, config.d_state, causal, config.truncation, config.block)
        self.memory = config.memory
        shape = (self.directions, d_model, config.d_state)
        self.delta = nn.Parameter(torch.empty(shape))
        self.alpha = nn.Parameter(torch.empty(shape))
        self.beta = nn.Parameter(torch.empty(shape))
        self.gamma = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values, all truncated at two standard deviations.

        delta, alpha   N(0, 0.2)
        beta           +1, -1, +1, ... over the states, plus N(0, 0.02)
        gamma, skip    N(0, 1)

        With a memory, time constants are spread evenly in their logarithm over the states, from 2 tokens to the
        memory, and drive = +-sqrt(1 - q^2), so that each average of white noise has a variance of 1.
        """
        for parameter in (self.delta, self.alpha):
            nn.init.trunc_normal_(parameter, std=0.2, a=-0.4, b=0.4)
        nn.init.trunc_normal_(self.beta, std=0.02, a=-0.04, b=0.04)
        with torch.no_grad():
            self.beta[..., 0::2] += 1
            self.beta[..., 1::2] -= 1
        for parameter in (self.gamma, self.skip):
            nn.init.trunc_normal_(parameter, std=1.0, a=-2.0, b=2.0)
        if self.memory is not None:
            self.spread(self.memory)

    @torch.no_grad()
    def spread(self, memory: int) -> None:
        """Start with time constants from 2 tokens to the memory."""
        exponent = torch.linspace(math.log(2), math.log(max(memory, 2)), self.d_state, dtype=torch.float64)
        decay = torch.exp(-torch.exp(-exponent))
        rate = torch.sqrt(1 - decay)  # of the two factors whose product is 1 - q
        for parameter in (self.delta, self.alpha):
            parameter.copy_(torch.logit(rate).expand_as(parameter))
        self.beta.copy_((torch.sqrt(1 - decay**2) / rate) * torch.sign(self.beta))

    def coefficients(self) -> Coefficients:
        delta, alpha, beta, gamma = self._wide_parameters()
        return Coefficients(
            log_decay(delta, alpha), torch.sigmoid(delta) * beta, gamma * (1 / math.sqrt(self.d_state))
        )

    def step_coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        delta, alpha, beta, gamma = (part[0] for part in self._wide_parameters())
        rate = torch.sigmoid(delta)
        decay = torch.addcmul(torch.sigmoid(-delta), rate, torch.sigmoid(-alpha))
        return decay, rate * beta, gamma * (1 / math.sqrt(self.d_state))

    def _wide_parameters(self) -> list[Tensor]:
        parameters = (self.delta, self.alpha, self.beta, self.gamma)
        return [part if part.dtype == torch.float64 else part.float() for part in parameters]


def log_decay(delta: Tensor, alpha: Tensor) -> Tensor:
    """log(1 - sigmoid(delta) * sigmoid(alpha)), accurate near 0 and near minus infinity.

    1 - p * a is close to 1 for slow averages (log1p keeps the digits) and close to 0 for fast ones, where it is
    the sum of two small positive numbers: (1 - p) + p * (1 - a).
    """
    p = torch.sigmoid(delta)
    taken = p * torch.sigmoid(alpha)
    slow = taken < 0.5
    left = torch.sigmoid(-delta) + p * torch.sigmoid(-alpha)
    tiny = torch.finfo(left.dtype).tiny
    # each branch sees harmless numbers where the other one is used: no NaN can reach a gradient
    return torch.where(
        slow,
        torch.log1p(-torch.where(slow, taken, torch.zeros_like(taken))),
        torch.log(torch.where(slow, torch.ones_like(left), left).clamp(min=tiny)),
    )
