"""S5 (Smith et al., 2023): one state-space model with many inputs and outputs, run by a parallel scan.

S4 gives each channel separate states; S5 has one diagonal system for all channels,

    x'(t) = diag(poles) x(t) + B u(t),   y(t) = 2 Re(C x(t)) + D * u(t),   B: (states, d_model), C: (d_model, states)

discretized with a zero-order hold and a learned step per state: s_t = q * s_{t-1} + (q - 1) / poles * (B u_t), with
q = exp(dt * poles). The poles start as several copies of the normal part of HiPPO-LegS. The recurrence is computed in
about 2 log2(time) parallel operations, on twice as many numbers as there are states over time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_positive, check_steps, require
from seqboat.core.layout import Layout
from seqboat.core.settings import fill_in
from seqboat.ssm.diagonal import (
    Roles,
    SSMConfig,
    StateSpace,
    as_complex,
    at_least_float32,
    complex_like,
    real_like,
    widened,
)
from seqboat.ssm.hippo import legs_modes


@dataclass(frozen=True, kw_only=True)
class S5Config(SSMConfig):
    """A state-space layer with one system for all channels."""

    d_state: int = 256
    """Real states in all: d_state / 2 conjugate pairs."""
    systems: int = 8
    """Copies of HiPPO-LegS that the states start as; they must divide d_state / 2."""
    dt_min: float = 0.001
    """Smallest initial step."""
    dt_max: float = 0.1
    """Largest initial step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("systems", self.systems)
        require(
            self.d_state % (2 * self.systems) == 0,
            f"d_state of S5 must be a multiple of 2 * systems = {2 * self.systems} (conjugate pairs), "
            f"got {self.d_state}",
        )
        check_steps(self.dt_min, self.dt_max)

    def build(self, d_model: int, causal: bool) -> S5:
        return S5(d_model, self, causal=causal)


class S5State(NamedTuple):
    """The state of a causal layer."""

    states: Tensor
    """(batch, states), complex ones as (real, imaginary) pairs; float32 at least"""


class S5(StateSpace):
    """S5 over (batch, time, d_model). The two directions of a bidirectional layer differ in C alone."""

    parameter_roles: ClassVar[Roles] = {"log_dt": "dt", "log_real": "ssm", "imag": "ssm", "b": "ssm"}

    def __init__(self, d_model: int, config: S5Config | None = None, *, causal: bool, **options: Any) -> None:
        config = fill_in(S5Config, config, options, self, d_model)
        super().__init__(d_model, causal)
        self.config, self.d_state = config, config.d_state
        pairs = config.d_state // 2
        self.log_dt = nn.Parameter(torch.empty(pairs))
        self.log_real = nn.Parameter(torch.empty(pairs))
        self.imag = nn.Parameter(torch.empty(pairs))
        self.b = nn.Parameter(torch.empty(pairs, d_model, 2))
        self.c = nn.Parameter(torch.empty(self.directions, d_model, pairs, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values; V is block-diagonal, with the vectors of HiPPO-LegS.

        log_dt    uniform in [log dt_min, log dt_max]
        poles     of HiPPO-LegS, once per system
        b         V* B with B N(0, 1 / d_model)
        c         C V with C N(0, 1 / d_state) in its real and imaginary part
        skip      N(0, 1)
        """
        systems, size = self.config.systems, self.d_state // self.config.systems
        nn.init.uniform_(self.log_dt, math.log(self.config.dt_min), math.log(self.config.dt_max))
        poles, vectors = legs_modes(size)
        b = torch.empty(systems, size, self.d_model, dtype=torch.float64)
        c = torch.empty(self.directions, self.d_model, systems, size, 2, dtype=torch.float64)
        _lecun_normal(b, self.d_model)
        _lecun_normal(c, self.d_state)
        b = torch.einsum("nm,snd->smd", vectors.conj(), b.to(vectors.dtype)).flatten(0, 1)
        c = torch.einsum("kdsn,nm->kdsm", torch.view_as_complex(c), vectors).flatten(-2)
        with torch.no_grad():
            self.log_real.copy_(torch.log(-poles.real).repeat(systems))
            self.imag.copy_(poles.imag.repeat(systems))
            self.b.copy_(torch.view_as_real(b))
            self.c.copy_(torch.view_as_real(c))
        nn.init.normal_(self.skip)

    def extra_repr(self) -> str:
        return f"{self.d_model}, d_state={self.d_state}, causal={self.causal}"

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """q (pairs,) and (q - 1) / poles * B (pairs, d_model), complex, in at least float32."""
        log_dt, log_real, imag, b = widened(self.log_dt, self.log_real, self.imag, self.b)
        poles = torch.complex(-torch.exp(log_real), imag)
        log_q = poles * torch.exp(log_dt)
        return torch.exp(log_q), (torch.expm1(log_q) / poles)[:, None] * as_complex(b)

    def _enter(self, x: Tensor, drive: Tensor) -> Tensor:
        """(..., d_model) real to (..., pairs) complex, as one real product."""
        matrix = torch.view_as_real(drive).transpose(0, 1).flatten(1)
        return torch.view_as_complex((x @ matrix).unflatten(-1, (self.d_state // 2, 2)))

    def _leave(self, states: Tensor, direction: int) -> Tensor:
        """2 Re(C s): (..., pairs) complex to (..., d_model) real, as one real product."""
        c = self.c[direction].to(states.real.dtype)
        matrix = 2 * torch.stack([c[..., 0], -c[..., 1]], dim=-1).flatten(1)
        return real_like(states) @ matrix.t()

    def read(self, x: Tensor, layout: Layout, state: S5State | None) -> tuple[Tensor, S5State | None]:
        batch, time, _ = x.shape
        q, drive = self.coefficients()
        skipped = self.skip.to(x.dtype) * x
        entered = self._enter(x, drive)
        if not self.causal:
            ahead, behind = parallel_scan(entered, q), parallel_scan(entered.flip(1), q).flip(1)
            return self._leave(ahead, 0) + self._leave(behind, 1) + skipped, None
        start = None if state is None else complex_like(state.states, q)
        states = parallel_scan(entered, q, start)
        before = states.new_zeros(batch, 1, len(q)) if start is None else start[:, None]
        lengths = (
            torch.full((batch,), time, device=x.device) if layout.mask is None else layout.mask.sum(dim=1)
        )
        # the state after n tokens is the n-th, and the one to start with comes first
        index = lengths[:, None, None].expand(-1, 1, len(q))
        after = torch.cat([before, states], dim=1).gather(1, index)[:, 0]
        return self._leave(states, 0) + skipped, S5State(real_like(after))

    def _fresh(self, batch: int, dtype: torch.dtype, device: torch.device) -> S5State:
        return S5State(torch.zeros(batch, self.d_state, dtype=at_least_float32(dtype), device=device))

    def read_token(self, x: Tensor, state: S5State) -> tuple[Tensor, S5State]:
        q, drive = self.coefficients()
        now = q * complex_like(state.states, q) + self._enter(x, drive)
        return self._leave(now, 0), S5State(real_like(now))


def parallel_scan(v: Tensor, q: Tensor, start: Tensor | None = None) -> Tensor:
    """All states s_t = q * s_{t-1} + v_t, by pairs, pairs of pairs, and so on.

    Two steps at once are a step with q^2: the states at odd places follow from half as many inputs
    q * v_{2k} + v_{2k+1}, and those at even places take one more step from them.

    >>> parallel_scan(torch.ones(1, 5, 1), torch.tensor([2.0])).flatten().tolist()
    [1.0, 3.0, 7.0, 15.0, 31.0]

    Args:
        v: (batch, time, states).
        q: (states,).
        start: (batch, states), the state before the first; zeros by default.
    """
    time = v.shape[1]
    if time == 0:
        return v
    if start is not None:
        v = torch.cat([(v[:, 0] + q * start)[:, None], v[:, 1:]], dim=1)
    if time == 1:
        return v
    odd = parallel_scan(torch.addcmul(v[:, 1::2], q, v[:, 0 : time - time % 2 : 2]), q * q)
    even = torch.cat([v[:, :1], torch.addcmul(v[:, 2::2], q, odd[:, : (time - 1) // 2])], dim=1)
    both = torch.stack([even[:, : time // 2], odd], dim=2).flatten(1, 2)
    return both if time % 2 == 0 else torch.cat([both, even[:, -1:]], dim=1)


def _lecun_normal(values: Tensor, inputs: int) -> None:
    """Std 1 / sqrt(inputs) after truncation at two stds of the untruncated normal."""
    # the standard normal truncated at two has this std
    std = 1 / (0.87962566103423978 * math.sqrt(inputs))
    nn.init.trunc_normal_(values, std=std, a=-2 * std, b=2 * std)
