"""S4D: a diagonal state-space layer with complex states (Gu et al., 2022), the paper's alternative kernel.

x'(t) = A x(t) + B u(t), y = Re(C x), with diagonal A = -exp(log_real) + i * imag, B = 1, discretized with a
zero-order hold and a learned step dt per channel:

    q = exp(dt * A),   kernel[l] = 2 Re sum_n C_n (q_n - 1) / A_n q_n^l

or by the bilinear rule, q = (1 + dt/2 A) / (1 - dt/2 A) with dt / (1 - dt/2 A) in place of (q - 1) / A. Half of the
states are kept; their conjugates give the factor 2. Reference: "On the Parameterization and Initialization of
Diagonal State Space Models". `S4D` is the bare kernel, which SeqBoat takes as its state-space layer;
`S4DLayerConfig` makes a whole layer of a pure state-space model from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_steps
from seqboat.core.settings import fill_in
from seqboat.ops.scan import BLOCK
from seqboat.ssm.diagonal import (
    Coefficients,
    DiagonalSSM,
    Roles,
    SSMConfig,
    as_complex,
    check_states_even,
)
from seqboat.ssm.hippo import legs_modes

Init = Literal["legs", "lin", "inv", "inv-lin"]
INITS = ("legs", "lin", "inv", "inv-lin")
Rule = Literal["zoh", "bilinear"]
RULES = ("zoh", "bilinear")


@dataclass(frozen=True, kw_only=True)
class S4DConfig(SSMConfig):
    """A diagonal state-space layer with complex states.

    >>> from seqboat import S4DConfig, SeqBoat
    >>> layer = SeqBoat(32, ssm=S4DConfig(dt_max=0.05))
    >>> type(SeqBoat(32, ssm="s4d").ssm) is type(layer.ssm)        # by name, with the defaults
    True
    """

    d_state: int = 64
    """Real states per channel: d_state / 2 conjugate pairs."""
    init: Init = "legs"
    """Initial A: the diagonal part of HiPPO-LegS, linear or inverse frequencies, or half inverse and half linear."""
    rule: Rule = "zoh"
    """Discretization: zero-order hold, or bilinear."""
    dt_min: float = 0.001
    """Smallest initial step."""
    dt_max: float = 0.1
    """Largest initial step."""
    truncation: int | None = None
    """Number of taps after which the kernel is cut."""
    block: int = BLOCK
    """Tokens per block of the scan."""

    def build(self, d_model: int, causal: bool) -> S4D:
        return S4D(d_model, self, causal=causal)


class S4D(DiagonalSSM):
    """S4D, a diagonal state-space kernel with complex states, on every token.

    Args:
        d_model: channels.
        config: settings; the defaults if not given.
        causal: one direction, or else two whose outputs are added.
        options: individual settings as keywords, fields of `S4DConfig`.

    Calling it with x of shape (batch, time, d_model) returns a `MixerOutput` whose y has the same shape.

    >>> import torch
    >>> from seqboat import S4D
    >>> S4D(8, causal=False, d_state=16)(torch.randn(2, 100, 8)).y.shape
    torch.Size([2, 100, 8])
    """

    parameter_roles: ClassVar[Roles] = {"log_dt": "dt", "log_real": "ssm", "imag": "ssm"}

    def __init__(
        self, d_model: int, config: S4DConfig | None = None, *, causal: bool, **options: Any
    ) -> None:
        config = fill_in(S4DConfig, config, options, self, d_model)
        super().__init__(d_model, config.d_state, causal, config.truncation, config.block)
        check_states_even(config.d_state, "S4D")
        check_choice("init", config.init, INITS)
        check_choice("rule", config.rule, RULES)
        check_steps(config.dt_min, config.dt_max)
        self.config = config
        pairs = config.d_state // 2
        shape = (self.directions, d_model, pairs)
        self.log_dt = nn.Parameter(torch.empty(self.directions, d_model))
        self.log_real = nn.Parameter(torch.empty(shape))
        self.imag = nn.Parameter(torch.empty(shape))
        self.c = nn.Parameter(torch.empty(*shape, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values.

        log_dt    uniform in [log dt_min, log dt_max]
        A         by `init`, the same for every channel; "inv-lin": for every channel of each half. The halves of a
                  bidirectional layer are its directions.
        c         N(0, 1/2) in its real and imaginary part
        skip      N(0, 1)
        """
        low, high = math.log(self.config.dt_min), math.log(self.config.dt_max)
        nn.init.uniform_(self.log_dt, low, high)
        names: tuple[Init, ...] = ("inv", "lin") if self.config.init == "inv-lin" else (self.config.init,)
        poles = torch.stack([initial_poles(name, self.config.d_state) for name in names])
        # the kernels of both directions in a row, as in the published code
        count = self.directions * self.d_model
        poles = poles[torch.arange(count, device=poles.device) * len(names) // count].view(self.imag.shape)
        with torch.no_grad():
            self.log_real.copy_(torch.log(-poles.real))
            self.imag.copy_(poles.imag)
        nn.init.normal_(self.c, std=math.sqrt(0.5))
        nn.init.normal_(self.skip)

    def coefficients(self) -> Coefficients:
        log_dt, log_real, imag, c = (
            part if part.dtype == torch.float64 else part.float()
            for part in (self.log_dt, self.log_real, self.imag, self.c)
        )
        poles = torch.complex(-torch.exp(log_real), imag)
        dt = torch.exp(log_dt)[..., None]
        log_q = poles * dt
        if self.config.rule == "zoh":
            read = 2 * as_complex(c) * torch.expm1(log_q) / poles
        else:
            behind = 1 - log_q / 2
            read = 2 * as_complex(c) * dt / behind
            log_q = torch.log((1 + log_q / 2) / behind)
        return Coefficients(log_q, torch.ones_like(read), read)


def initial_poles(init: Init, d_state: int) -> Tensor:
    """The d_state / 2 poles with positive imaginary part, in complex128.

    lin:  A_n = -1/2 + i pi n
    inv:  A_n = -1/2 + i N/pi (N / (2n + 1) - 1)
    legs: eigenvalues of the normal part of the HiPPO-LegS matrix
    """
    pairs = d_state // 2
    n = torch.arange(pairs, dtype=torch.float64)
    if init == "lin":
        return torch.complex(torch.full_like(n, -0.5), math.pi * n)
    if init == "inv":
        return torch.complex(torch.full_like(n, -0.5), d_state / math.pi * (d_state / (2 * n + 1) - 1))
    return legs_modes(d_state).poles
