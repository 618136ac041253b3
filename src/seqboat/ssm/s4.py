"""S4 (Gu et al., 2022): a state-space layer whose matrix is diagonal plus rank one, started at HiPPO-LegS.

Each channel has x'(t) = A x(t) + B u(t), y = C x, with A = diag(poles) - P P*, discretized by the bilinear rule with
a learned step dt:

    Abar = (1 - dt/2 A)^-1 (1 + dt/2 A),   Bbar = (1 - dt/2 A)^-1 dt B,   kernel[l] = C Abar^l Bbar

The kernel comes from its generating function at the roots of unity z, sum_l kernel[l] z^l = C~ (1 - Abar z)^-1 Bbar
with C~ = C (1 - Abar^length), where Woodbury's identity leaves four Cauchy products k_xy(z) = sum_n x_n y_n R_n(z):

    R_n(z) = 1 / ((1 - z) - dt/2 (1 + z) pole_n)
    khat(z) = dt (k_CB - g k_CP k_PB / (1 + g k_PP)),   g = dt/2 (1 + z)

(multiplied by 1 + z throughout, so that z = -1 is no special case). States are kept as one of each conjugate pair, a
pair of real numbers each, in which Abar is a real matrix: its powers carry a state over a piece of the sequence. A
single step needs no matrix, only the diagonal and the rank-one part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_positive, check_steps, require
from seqboat.core.layout import Layout
from seqboat.core.nn import fft_convolve
from seqboat.core.settings import fill_in
from seqboat.ssm.diagonal import (
    Roles,
    SSMConfig,
    SSMState,
    StateSpace,
    as_complex,
    at_least_float32,
    check_states_even,
    complex_like,
    real_like,
    widened,
)
from seqboat.ssm.hippo import legs, legs_modes

PIECE = 64
"""Tokens that a state is carried over at a time, a power of two."""


@dataclass(frozen=True, kw_only=True)
class S4Config(SSMConfig):
    """A state-space layer with a diagonal plus rank-one matrix."""

    d_state: int = 64
    """Real states per channel: d_state / 2 conjugate pairs."""
    systems: int | None = None
    """Separate matrices A and B, which the channels share in turn; None: one for each channel."""
    dt_min: float = 0.001
    """Smallest initial step."""
    dt_max: float = 0.1
    """Largest initial step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_states_even(self.d_state, "S4")
        if self.systems is not None:
            check_positive("systems", self.systems)
        check_steps(self.dt_min, self.dt_max)

    def build(self, d_model: int, causal: bool) -> S4:
        return S4(d_model, self, causal=causal)


class System(NamedTuple):
    """The continuous system, one of each conjugate pair, and its step; in at least float32."""

    dt: Tensor
    """(dim,)"""
    poles: Tensor
    """(dim, pairs)"""
    p: Tensor
    """(dim, pairs)"""
    b: Tensor
    """(dim, pairs)"""
    c: Tensor
    """(directions, dim, pairs)"""


class S4(StateSpace):
    """S4 over (batch, time, d_model). The two directions of a bidirectional layer differ in C alone."""

    parameter_roles: ClassVar[Roles] = {
        "log_dt": "dt",
        "log_real": "ssm",
        "imag": "ssm",
        "p": "ssm",
        "b": "ssm",
    }

    def __init__(self, d_model: int, config: S4Config | None = None, *, causal: bool, **options: Any) -> None:
        config = fill_in(S4Config, config, options, self, d_model)
        super().__init__(d_model, causal)
        self.config, self.d_state = config, config.d_state
        pairs = config.d_state // 2
        self.systems = systems = config.systems or d_model
        require(d_model % systems == 0, f"d_model must be a multiple of systems = {systems}, got {d_model}")
        self.log_dt = nn.Parameter(torch.empty(d_model))
        self.log_real = nn.Parameter(torch.empty(systems, pairs))
        self.imag = nn.Parameter(torch.empty(systems, pairs))
        self.p = nn.Parameter(torch.empty(systems, pairs, 2))
        self.b = nn.Parameter(torch.empty(systems, pairs, 2))
        self.c = nn.Parameter(torch.empty(self.directions, d_model, pairs, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values.

        log_dt         uniform in [log dt_min, log dt_max]
        poles, p, b    of HiPPO-LegS, the same for every channel
        c              N(0, 1/2) in its real and imaginary part
        skip           N(0, 1)
        """
        nn.init.uniform_(self.log_dt, math.log(self.config.dt_min), math.log(self.config.dt_max))
        poles, vectors = legs_modes(self.d_state)
        b = vectors.mH @ legs(self.d_state)[1].to(vectors.dtype)
        with torch.no_grad():
            self.log_real.copy_(torch.log(-poles.real).expand_as(self.log_real))
            self.imag.copy_(poles.imag.expand_as(self.imag))
            self.b.copy_(torch.view_as_real(b).expand_as(self.b))
            self.p.copy_(torch.view_as_real(b / math.sqrt(2)).expand_as(self.p))
        nn.init.normal_(self.c, std=math.sqrt(0.5))
        nn.init.normal_(self.skip)

    def extra_repr(self) -> str:
        return f"{self.d_model}, d_state={self.d_state}, causal={self.causal}"

    def system(self) -> System:
        """The parameters as a system."""
        log_dt, log_real, imag, p, b, c = widened(
            self.log_dt, self.log_real, self.imag, self.p, self.b, self.c
        )
        if self.systems < self.d_model:
            copies = self.d_model // self.systems
            log_real, imag = log_real.repeat(copies, 1), imag.repeat(copies, 1)
            p, b = p.repeat(copies, 1, 1), b.repeat(copies, 1, 1)
        poles = torch.complex(-torch.exp(log_real), imag)
        return System(torch.exp(log_dt), poles, *(as_complex(part) for part in (p, b, c)))

    def read(self, x: Tensor, layout: Layout, state: SSMState | None) -> tuple[Tensor, SSMState | None]:
        batch, time, _ = x.shape
        system = self.system()
        size = 1 << max(time - 1, 0).bit_length()
        # Abar^(2^k) up to the length, and for a state up to the size of a piece
        squarings = max(size, PIECE if self.causal else 1).bit_length()
        powers = _squares(_matrix(system), squarings)
        kernel = _kernel(system, powers[size.bit_length() - 1], size)[..., : max(time, 1)]
        y = fft_convolve(x, kernel[0]) + self.skip.to(x.dtype) * x
        if not self.causal:
            return y + fft_convolve(x.flip(1), kernel[1]).flip(1), None
        lengths = (
            torch.full((batch,), time, device=x.device) if layout.mask is None else layout.mask.sum(dim=1)
        )
        after = _driven(x, lengths, real_like(_drive(system)), powers)
        if state is not None:
            start = state.states.transpose(0, 1)
            y = y + _undriven(start, time, _read_row(system.c[0]), powers)
            after = after + _decayed(start, lengths, powers)
        return y, SSMState(after.transpose(0, 1).contiguous())

    def kernel(self, length: int) -> Tensor:
        """The first taps of the convolution kernel, (directions, dim, length), without the skip."""
        system = self.system()
        size = 1 << max(length - 1, 0).bit_length()
        powers = _squares(_matrix(system), size.bit_length())
        return _kernel(system, powers[-1], size)[..., :length]

    def _fresh(self, batch: int, dtype: torch.dtype, device: torch.device) -> SSMState:
        shape = (batch, self.d_model, self.d_state)
        return SSMState(torch.zeros(shape, dtype=at_least_float32(dtype), device=device))

    def read_token(self, x: Tensor, state: SSMState) -> tuple[Tensor, SSMState]:
        system = self.system()
        before = complex_like(state.states, system.poles)
        now = _step(system, before) + _drive(system) * x[..., None]
        y = 2 * (system.c[0] * now).sum(dim=-1).real
        return y, SSMState(real_like(now))


def _projection(p: Tensor, z: Tensor) -> Tensor:
    """P* z over both of each conjugate pair: a real number (..., dim, 1)."""
    return 2 * (p.conj() * z).sum(dim=-1, keepdim=True).real


def _resolve(system: System, v: Tensor) -> Tensor:
    """(1 - dt/2 A)^-1 v for (..., dim, pairs), by the identity of Sherman and Morrison."""
    half = 0.5 * system.dt[:, None]
    inverse = 1 / (1 - half * system.poles)
    direction = inverse * system.p
    factor = half / (1 + half * _projection(system.p, direction))
    v = inverse * v
    return v - direction * (factor * _projection(system.p, v))


def _step(system: System, z: Tensor) -> Tensor:
    """Abar z for (..., dim, pairs)."""
    half = 0.5 * system.dt[:, None]
    ahead = z + half * (system.poles * z - system.p * _projection(system.p, z))
    return _resolve(system, ahead)


def _drive(system: System) -> Tensor:
    """Bbar, (dim, pairs)."""
    return _resolve(system, system.dt[:, None] * system.b)


def _read_row(c: Tensor) -> Tensor:
    """(..., states): what to multiply the pairs of a state with to get 2 Re(C z)."""
    return 2 * real_like(c.conj().resolve_conj())


def _matrix(system: System) -> Tensor:
    """Abar as a real matrix on pairs, (dim, states, states): a row of states times the matrix is the next."""
    dim, pairs = system.poles.shape
    units = torch.eye(2 * pairs, dtype=system.dt.dtype, device=system.dt.device)
    units = torch.view_as_complex(units.unflatten(-1, (pairs, 2)))[:, None].expand(-1, dim, -1)
    return real_like(_step(system, units)).transpose(0, 1)


def _squares(matrix: Tensor, count: int) -> list[Tensor]:
    """The matrix to the powers 1, 2, 4, ... 2^(count - 1)."""
    powers = [matrix]
    for _ in range(count - 1):
        powers.append(torch.bmm(powers[-1], powers[-1]))
    return powers


def _kernel(system: System, power: Tensor, size: int) -> Tensor:
    """The kernel of `size` taps, a power of two, by Cauchy products; (directions, dim, size).

    Args:
        system: of the layer.
        power: Abar^size.
        size: taps.
    """
    dt, poles, p, b, c = system
    # C~ = C (1 - Abar^size): what the taps after the last one would add
    row = _read_row(c)
    row = row - torch.bmm(power, row.permute(1, 2, 0)).permute(2, 0, 1)
    c = 0.5 * complex_like(row, poles).conj()
    angle = torch.arange(size // 2 + 1, dtype=torch.float64, device=dt.device) * (-math.pi / size)
    cos, sin = angle.cos().to(dt.dtype), angle.sin().to(dt.dtype)
    # with z = exp(2i angle) and pole' = dt/2 pole, (1 - z) - dt/2 (1 + z) pole = -2 exp(i angle) (cos pole' + i sin):
    # x R(pole) + conj(x) R(conj(pole)) = -exp(-i angle) (i sin Re(x) + cos Re(x conj(pole'))) / (real + i imag)
    poles = 0.5 * dt[:, None] * poles
    modulus = poles.abs()[..., None]
    real = (cos * modulus - sin) * (cos * modulus + sin)
    imag = (2 * cos * sin) * poles.real[..., None]
    inverse = 1 / (real * real + imag * imag)  # (dim, pairs, frequencies)
    table = torch.cat([real * inverse, -imag * inverse], dim=-1)
    products = torch.cat([c * b, c * p, (p.conj() * b)[None], (p.conj() * p)[None]])  # (rows, dim, pairs)
    weights = torch.stack([products.real, (products * poles.conj()).real]).permute(2, 0, 1, 3)
    dim, _, rows, pairs = weights.shape
    sums = torch.bmm(weights.reshape(dim, 2 * rows, pairs), table).view(dim, 2, rows, 2, -1)
    first, second = (torch.complex(part[:, :, 0], part[:, :, 1]) for part in sums.unbind(1))
    # (rows, dim, frequencies), without the phase exp(-i angle)
    cauchy = -(torch.complex(torch.zeros_like(sin), sin) * first + cos * second).transpose(0, 1)
    directions = c.shape[0]
    cb, cp, pb, pp = cauchy.split([directions, directions, 1, 1])
    factor = dt[:, None] * cos
    phase = torch.polar(torch.ones_like(angle), -angle).to(cauchy.dtype)
    spectrum = dt[:, None] * phase * (cb - factor * cp * pb / (1 + factor * pp))
    return torch.fft.irfft(spectrum, n=size) if size > 1 else spectrum.real


def _driven(x: Tensor, lengths: Tensor, drive: Tensor, powers: list[Tensor]) -> Tensor:
    """(dim, batch, states): the states after the last real token of sequences from their beginning.

    Args:
        x: (batch, time, dim), zeros after the last real token.
        lengths: (batch,).
        drive: (dim, states).
        powers: of the matrix, up to PIECE at least.
    """
    batch, time, dim = x.shape
    # the zeros move to the front, where they change nothing: every sequence ends with its last real token
    places = (torch.arange(time, device=x.device) + lengths[:, None]) % max(time, 1)
    x = x.gather(1, places[..., None].expand(-1, -1, dim))
    pieces = -(-time // PIECE)
    x = F.pad(x, (0, 0, pieces * PIECE - time, 0))
    enter = drive[:, None]
    for power in powers[: PIECE.bit_length() - 1]:
        enter = torch.cat([torch.bmm(enter, power), enter], dim=1)  # older tokens first
    inputs = x.view(batch, pieces, PIECE, dim).permute(3, 1, 0, 2)  # (dim, pieces, batch, tokens)
    entered = torch.bmm(inputs.reshape(dim, pieces * batch, PIECE), enter)
    state = x.new_zeros(dim, batch, drive.shape[1])
    for piece in entered.unflatten(1, (pieces, batch)).unbind(1):
        state = piece + torch.bmm(state, powers[PIECE.bit_length() - 1])
    return state


def _undriven(start: Tensor, time: int, row: Tensor, powers: list[Tensor]) -> Tensor:
    """(batch, time, dim): what an initial state adds to the outputs.

    Args:
        start: (dim, batch, states).
        time: length of the sequence.
        row: (dim, states), from `_read_row`.
        powers: of the matrix, up to PIECE at least.
    """
    dim, batch, _ = start.shape
    leave = torch.bmm(powers[0], row[..., None])  # (dim, states, tokens)
    for power in powers[: PIECE.bit_length() - 1]:
        leave = torch.cat([leave, torch.bmm(power, leave)], dim=2)
    pieces = []
    for _ in range(0, time, PIECE):
        pieces.append(torch.bmm(start, leave))
        start = torch.bmm(start, powers[PIECE.bit_length() - 1])
    outputs = torch.cat(pieces, dim=2) if pieces else start.new_zeros(dim, batch, 0)
    return outputs[..., :time].permute(1, 2, 0)


def _decayed(start: Tensor, lengths: Tensor, powers: list[Tensor]) -> Tensor:
    """An initial state (dim, batch, states) after `lengths` tokens: the bits of a length say which powers."""
    for bit, power in enumerate(powers):
        taken = ((lengths >> bit) & 1).bool()[:, None]
        start = torch.where(taken, torch.bmm(start, power), start)
    return start
