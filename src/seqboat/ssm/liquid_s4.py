"""Liquid-S4 (Hasani et al., 2023): a state-space layer that also responds to products of successive inputs.

The linear liquid system x_t = (Abar + Bbar u_t) x_{t-1} + Bbar u_t, unrolled, has a term for each set of inputs. Kept
are those of successive inputs up to an order; with w^(1)_t = u_t and w^(p)_t = u_t u_{t-1} ... u_{t-p+1},

    y_t = D u_t + sum_{p = 1 .. order} sum_l C Abar^l Bbar^p w^(p)_{t-l}                              kernel "kb"
    y_t = D u_t + sum_l C Abar^l Bbar u_{t-l} + sum_{p = 2 .. order} C Bbar^p w^(p)_t                 kernel "pb"

"pb", the better one in its paper, does not remember products. Abar is diagonal and the powers of Bbar are taken
entry by entry, so that all orders share one state; besides it, the last order - 1 inputs are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, check_steps
from seqboat.core.layout import Layout
from seqboat.core.settings import fill_in
from seqboat.ops.scan import BLOCK, block_for, block_tables, final_state, scan
from seqboat.ssm.diagonal import (
    Roles,
    SSMConfig,
    StateSpace,
    as_complex,
    at_least_float32,
    check_states_even,
    complex_like,
    joined_with,
    latest,
    real_like,
    widened,
)
from seqboat.ssm.hippo import legs, legs_modes

LiquidKernel = Literal["kb", "pb"]


@dataclass(frozen=True, kw_only=True)
class LiquidS4Config(SSMConfig):
    """A diagonal state-space layer that also responds to products of successive inputs."""

    d_state: int = 64
    """Real states per channel: d_state / 2 conjugate pairs."""
    order: int = 2
    """Largest number of inputs in a product; 1 gives a linear layer."""
    kernel: LiquidKernel = "pb"
    """Whether the state remembers products (kb) or they act at once (pb)."""
    dt_min: float = 0.001
    """Smallest initial step."""
    dt_max: float = 0.1
    """Largest initial step."""
    block: int = BLOCK
    """Tokens per block of the scan."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_states_even(self.d_state, "Liquid-S4")
        check_positive("order", self.order)
        check_choice("kernel", self.kernel, ("kb", "pb"))
        check_positive("block", self.block)
        check_steps(self.dt_min, self.dt_max)

    def build(self, d_model: int, causal: bool) -> LiquidS4:
        return LiquidS4(d_model, self, causal=causal)


class LiquidState(NamedTuple):
    """The state of a causal layer."""

    states: Tensor
    """(batch, dim, states), complex ones as (real, imaginary) pairs; float32 at least"""
    inputs: Tensor
    """(batch, order - 1, dim), the last inputs, oldest first, zeros before the first token"""


class LiquidCoefficients(NamedTuple):
    """The coefficients of one direction, complex, in at least float32."""

    log_decay: Tensor
    """(dim, pairs): the logarithm of Abar"""
    drive: Tensor
    """(order, dim, pairs): the powers of Bbar"""
    read: Tensor
    """(dim, pairs): 2 C"""


class LiquidS4(StateSpace):
    """Liquid-S4 over (batch, time, d_model). The two directions of a bidirectional layer differ in C alone."""

    parameter_roles: ClassVar[Roles] = {"log_dt": "dt", "log_real": "ssm", "imag": "ssm", "b": "ssm"}

    def __init__(
        self, d_model: int, config: LiquidS4Config | None = None, *, causal: bool, **options: Any
    ) -> None:
        config = fill_in(LiquidS4Config, config, options, self, d_model)
        super().__init__(d_model, causal)
        self.config, self.d_state, self.order = config, config.d_state, config.order
        pairs = config.d_state // 2
        self.log_dt = nn.Parameter(torch.empty(d_model))
        self.log_real = nn.Parameter(torch.empty(d_model, pairs))
        self.imag = nn.Parameter(torch.empty(d_model, pairs))
        self.b = nn.Parameter(torch.empty(d_model, pairs, 2))
        self.c = nn.Parameter(torch.empty(self.directions, d_model, pairs, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values.

        log_dt    uniform in [log dt_min, log dt_max]
        poles, b  of the normal part of HiPPO-LegS, the same for every channel
        c         N(0, 1/2) in its real and imaginary part
        skip      N(0, 1)
        """
        nn.init.uniform_(self.log_dt, math.log(self.config.dt_min), math.log(self.config.dt_max))
        poles, vectors = legs_modes(self.d_state)
        b = vectors.mH @ legs(self.d_state)[1].to(vectors.dtype)
        with torch.no_grad():
            self.log_real.copy_(torch.log(-poles.real).expand_as(self.log_real))
            self.imag.copy_(poles.imag.expand_as(self.imag))
            self.b.copy_(torch.view_as_real(b).expand_as(self.b))
        nn.init.normal_(self.c, std=math.sqrt(0.5))
        nn.init.normal_(self.skip)

    def extra_repr(self) -> str:
        return f"{self.d_model}, d_state={self.d_state}, order={self.order}, causal={self.causal}"

    def coefficients(self, direction: int) -> LiquidCoefficients:
        """Abar, the powers of Bbar (zero-order hold) and C."""
        log_dt, log_real, imag, b, c = widened(
            self.log_dt, self.log_real, self.imag, self.b, self.c[direction]
        )
        poles = torch.complex(-torch.exp(log_real), imag)
        log_q = poles * torch.exp(log_dt)[:, None]
        drives = [torch.expm1(log_q) / poles * as_complex(b)]
        for _ in range(1, self.order):
            drives.append(drives[-1] * drives[0])
        return LiquidCoefficients(log_q, torch.stack(drives), 2 * as_complex(c))

    def read(self, x: Tensor, layout: Layout, state: LiquidState | None) -> tuple[Tensor, LiquidState | None]:
        y, after = self._direction(x, layout.mask, state, 0)
        if self.causal:
            return y, after
        # from the right: the padding of a sequence comes first then, and zeros leave a zero state
        other, _ = self._direction(x.flip(1), None, None, 1)
        return y + other.flip(1), None

    def _direction(
        self, x: Tensor, mask: Tensor | None, state: LiquidState | None, direction: int
    ) -> tuple[Tensor, LiquidState]:
        """One direction, from left to right; only the first one has the skip."""
        batch, time, dim = x.shape
        past = self.order - 1
        joined = joined_with(x, None if state is None else state.inputs, past)
        products = [x]
        for age in range(1, self.order):
            products.append(products[-1] * joined[:, past - age : past - age + time])
        log_decay, drive, read = self.coefficients(direction)
        skip = self.skip.to(x.dtype) if direction == 0 else torch.zeros_like(self.skip, dtype=x.dtype)
        remembered = self.order if self.config.kernel == "kb" else 1
        # each order is a separate channel with the same decay and read; the sum of their states is the state
        decays, reads = (part.repeat(remembered, 1)[None] for part in (log_decay, read))
        skips = torch.cat([skip, skip.new_zeros(dim * (remembered - 1))])
        drives = drive[:remembered].flatten(0, 1)[None]
        block = block_for(time, self.config.block)
        tables = block_tables(decays, drives, reads, skips, block)
        start = None
        if state is not None:
            start = torch.cat(
                [state.states, state.states.new_zeros(batch, dim * (remembered - 1), self.d_state)], dim=1
            )
        inputs = torch.cat(products[:remembered], dim=-1)
        y, states = scan(inputs, tables, False, start)
        y = y.unflatten(-1, (remembered, dim)).sum(dim=2)
        for order in range(remembered, self.order):
            y = y + (read * drive[order]).sum(dim=-1).real * products[order]
        lengths = None if mask is None else mask.sum(dim=1)
        after = final_state(inputs, states, tables, decays[0], start, lengths)
        after = after.unflatten(1, (remembered, dim)).sum(dim=1)
        return y, LiquidState(after, latest(joined, mask, past))

    def _fresh(self, batch: int, dtype: torch.dtype, device: torch.device) -> LiquidState:
        dtype = at_least_float32(dtype)
        return LiquidState(
            torch.zeros(batch, self.d_model, self.d_state, dtype=dtype, device=device),
            torch.zeros(batch, self.order - 1, self.d_model, dtype=dtype, device=device),
        )

    def read_token(self, x: Tensor, state: LiquidState) -> tuple[Tensor, LiquidState]:
        log_decay, drive, read = self.coefficients(0)
        now = torch.exp(log_decay) * complex_like(state.states, log_decay) + drive[0] * x[..., None]
        joined = torch.cat([state.inputs, x[:, None]], dim=1)
        at_once = torch.zeros_like(now)
        together = x
        for age in range(1, self.order):
            together = together * joined[:, -1 - age]
            term = drive[age] * together[..., None]
            if self.config.kernel == "kb":
                now = now + term
            else:
                at_once = at_once + term
        y = (read * (now + at_once)).sum(dim=-1).real
        after = LiquidState(real_like(now), joined[:, 1:])
        return y, after
