"""State-space layers, equation 2 of the paper: SSM(S) = K * S + D . S.

`StateSpace` is the contract of a kernel. `DiagonalSSM` is that of MD-EMA and S4D,
K[l] = Re(sum_n read_n drive_n q_n^l): a subclass says what q, drive and read are; the class runs them over a
sequence, carries the state, takes single steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, check_steps, require
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Mixer, MixerOutput, check_width
from seqboat.core.nn import Kept, fft_convolve
from seqboat.core.settings import Settings, fill_in
from seqboat.ops.kernels import CHOSEN, attempt
from seqboat.ops.scan import (
    BLOCK,
    as_pairs,
    as_states,
    block_for,
    block_tables,
    final_state,
    scan,
    scan_documents,
    scan_short,
)
from seqboat.ssm.hippo import legs_modes

Init = Literal["legs", "lin", "inv", "inv-lin"]
INITS = ("legs", "lin", "inv", "inv-lin")
Rule = Literal["zoh", "bilinear"]
RULES = ("zoh", "bilinear")
Roles = Mapping[str, str]
"""Names of parameters and what optimizers may treat them as."""


@dataclass(frozen=True, kw_only=True)
class SSMConfig(Settings):
    """The configuration of a state-space kernel; `seqboat.ssm.SSMS` lists them."""

    d_state: int
    """Real states: per channel, or in all for kernels that share one system among the channels."""

    def __post_init__(self) -> None:
        check_positive("d_state", self.d_state)

    def build(self, d_model: int, causal: bool) -> StateSpace:
        """The kernel over (batch, time, d_model)."""
        raise NotImplementedError(f"{type(self).__name__} does not say what to build")


class Coefficients(NamedTuple):
    """A diagonal layer, per direction: q = exp(log_decay); real, or complex for half of the states."""

    log_decay: Tensor
    """(directions, dim, states)"""
    drive: Tensor
    """(directions, dim, states)"""
    read: Tensor
    """(directions, dim, states)"""


class SSMState(NamedTuple):
    """The state of a diagonal layer."""

    states: Tensor
    """(batch, dim, states), complex ones as (real, imaginary) pairs; float32 at least"""


class TruncatedState(NamedTuple):
    """The state of a layer with a truncated kernel: the inputs that the kernel still reaches."""

    history: Tensor
    """(batch, truncation - 1, dim), oldest first, zeros before the first token"""


class StateSpace(Mixer):
    """A state-space kernel, without norm, activation or residual connection.

    It computes in at least float32, whatever autocast or the type of the inputs says: rounding errors of a recurrence
    add up.

    Args:
        d_model: channels.
        causal: one direction, or else two whose outputs are added.
    """

    widens = True
    parameter_roles: ClassVar[Roles] = {}
    """Parameters that optimizers may treat separately: "ssm" for poles and inputs, "dt" for step sizes."""

    def __init__(self, d_model: int, causal: bool) -> None:
        super().__init__()
        self.d_model, self.causal = check_width(d_model), causal
        self.directions = 1 if causal else 2
        self.skip = nn.Parameter(torch.empty(d_model))

    def mix(self, x: Tensor, layout: Layout, state: Any) -> MixerOutput:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide if layout.mask is None else clear(wide, layout.mask)
        with torch.autocast(x.device.type, enabled=False):
            y, after = self.read(wide, layout, state)
        y = y.to(x.dtype)
        return MixerOutput(y if layout.mask is None else clear(y, layout.mask), after)

    @abstractmethod
    def read(self, x: Tensor, layout: Layout, state: Any) -> tuple[Tensor, Any]:
        """As `mix`, in at least float32: the outputs, with the skip, and the state; padding may hold anything."""

    @torch.no_grad()
    def step(self, x: Tensor, state: Any) -> MixerOutput:
        with torch.autocast(x.device.type, enabled=False):
            token = x.to(at_least_float32(x.dtype))
            y, after = self.read_token(token, state)
            y = torch.addcmul(y, self.skip.to(y.dtype), token)
        for old, new in zip(state, after, strict=True):
            old.copy_(new)
        return MixerOutput(y.to(x.dtype), state)

    def read_token(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """As `step`, in at least float32: the outputs, without the skip, and the state after the token."""
        raise NotImplementedError(f"{self.name} carries no state")

    def zeros(self, *shape: int) -> Tensor:
        """A part of a state: in the type of the weights, at least float32, on their device."""
        return self.skip.new_zeros(shape, dtype=at_least_float32(self.skip.dtype))


class DiagonalSSM(StateSpace):
    """A diagonal state-space layer, as a block scan.

    Args:
        d_model: channels.
        d_state: real states per channel.
        causal: one direction, or else two whose outputs are added.
        truncation: number of taps after which the kernel is cut; it is a convolution then.
        block: tokens per block of the scan.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int,
        causal: bool,
        truncation: int | None = None,
        block: int = BLOCK,
    ) -> None:
        super().__init__(d_model, causal)
        check_positive("d_state", d_state)
        check_positive("block", block)
        if truncation is not None:
            check_positive("truncation", truncation)
        self.d_state, self.truncation, self.block = d_state, truncation, block
        self.packs = truncation is None
        self._kept = Kept()

    @abstractmethod
    def coefficients(self) -> Coefficients:
        """The layer's q, drive and read, in at least float32."""

    def step_coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, drive and read of the first direction, (dim, states); subclasses may compute q directly."""
        log_decay, drive, read = self.coefficients()
        return torch.exp(log_decay[0]), drive[0], read[0]

    def extra_repr(self) -> str:
        return f"{self.d_model}, d_state={self.d_state}, causal={self.causal}, truncation={self.truncation}"

    def read(self, x: Tensor, layout: Layout, state: Any) -> tuple[Tensor, Any]:
        self._kept.forget()
        skip = self.skip.to(x.dtype)
        if self.truncation is not None:
            return self._convolve(x, layout, state)
        log_decay, drive, read = self.coefficients()
        start = None if state is None else state.states
        documents = layout.documents
        lengths = None if layout.mask is None else layout.lengths(x)
        if documents is None and "scan" in CHOSEN and not torch.compiler.is_compiling():
            given = x, log_decay, drive, read, skip, start, lengths
            found = attempt("scan", "triton_scan:scan", x, *given, states=self.d_state)
            if found is not None:
                return found[0], SSMState(found[1]) if self.causal else None
        time = x.shape[1]
        if documents is not None:
            size = block_for(time // max(len(documents.offsets) - 1, 1), self.block)
            tables = block_tables(log_decay, drive, read, skip, size)
            parts = documents.offsets, documents.number, documents.position, documents.bound
            return scan_documents(x, tables, not self.causal, *parts), None
        short = not torch.compiler.is_compiling() and start is None and 0 < time <= 2 * self.block
        tables = block_tables(log_decay, drive, read, skip, time if short else block_for(time, self.block))
        y, states = scan_short(x, tables) if short else scan(x, tables, not self.causal, start)
        if not self.causal:
            return y, None
        return y, SSMState(final_state(x, states, tables, log_decay[0], start, lengths))

    def _convolve(self, x: Tensor, layout: Layout, state: TruncatedState | None) -> tuple[Tensor, Any]:
        """With a truncated kernel."""
        assert self.truncation is not None
        skipped = self.skip.to(x.dtype) * x
        if self.causal:
            past = self.truncation - 1
            joined = joined_with(x, None if state is None else state.history, past)
            y = fft_convolve(joined, self.kernel(self.truncation)[0])[:, past:]
            return y + skipped, TruncatedState(latest(joined, layout.mask, past))
        ahead, behind = self.kernel(min(self.truncation, x.shape[1]))
        return fft_convolve(x, ahead) + fft_convolve(x.flip(1), behind).flip(1) + skipped, None

    def kernel(self, length: int) -> Tensor:
        """The first taps of the convolution kernel, (directions, dim, length), without the skip."""
        log_decay, drive, read = self.coefficients()
        steps = torch.arange(length, device=log_decay.device)
        powers = torch.exp(log_decay[..., None] * steps)
        kernel = torch.einsum("...n,...nl->...l", read * drive, powers)
        return kernel.real if kernel.is_complex() else kernel

    def init_state(self, batch: int) -> Any:
        self.require_causal()
        self._kept.forget()
        if self.truncation is not None:
            return TruncatedState(self.zeros(batch, self.truncation - 1, self.d_model))
        return SSMState(self.zeros(batch, self.d_model, self.d_state))

    def step(self, x: Tensor, state: Any) -> MixerOutput:
        if torch.is_grad_enabled() or type(state) is not SSMState or x.dtype != state.states.dtype:
            return super().step(x, state)
        decay, drive, read = self._kept.get(self._parameters.values(), self.step_coefficients)
        if not decay.is_complex():
            states = state.states.mul_(decay).addcmul_(drive, x[..., None])
            y = torch.sum(read * states, dim=-1)
        else:
            states = as_states(state.states, decay, view=True)
            states.mul_(decay).addcmul_(drive, x[..., None].to(decay.dtype))
            y = torch.sum(read * states, dim=-1).real
        return MixerOutput(torch.addcmul(y, self._parameters["skip"], x), state)  # type: ignore[arg-type]

    def read_token(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        if isinstance(state, TruncatedState):
            joined = torch.cat([state.history, x[:, None]], dim=1)
            taps = self.kernel(joined.shape[1])[0].t().flip(0)
            return torch.einsum("btd,td->bd", joined, taps), TruncatedState(joined[:, 1:])
        decay, drive, read = self.step_coefficients()
        now = torch.addcmul(drive * x[..., None], decay, as_states(state.states, decay))
        y = (read * now).sum(dim=-1)
        return y.real if y.is_complex() else y, SSMState(as_pairs(now))


@dataclass(frozen=True, kw_only=True)
class EMAConfig(SSMConfig):
    """The multi-dimensional damped moving average, the paper's state-space layer."""

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
    """The multi-dimensional damped moving average (MD-EMA), appendix A.3 of the paper, on every token.

    Each channel is spread over `d_state` averages with different rates, which are read back:

        p = sigmoid(delta),  q = 1 - p * sigmoid(alpha)
        z_t = p * beta * x_t + q * z_{t-1},   y_t = sum(gamma / sqrt(d_state) * z_t) + skip * x_t

    Args:
        d_model: channels.
        config: settings; the defaults if not given.
        causal: one direction, or else two whose outputs are added.
        options: individual settings as keywords, fields of `EMAConfig`.
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
        delta, alpha, beta, gamma = widened(self.delta, self.alpha, self.beta, self.gamma)
        return Coefficients(
            log_decay(delta, alpha), torch.sigmoid(delta) * beta, gamma * (1 / math.sqrt(self.d_state))
        )

    def step_coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        delta, alpha, beta, gamma = (
            part[0] for part in widened(self.delta, self.alpha, self.beta, self.gamma)
        )
        rate = torch.sigmoid(delta)
        decay = torch.addcmul(torch.sigmoid(-delta), rate, torch.sigmoid(-alpha))
        return decay, rate * beta, gamma * (1 / math.sqrt(self.d_state))


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


@dataclass(frozen=True, kw_only=True)
class S4DConfig(SSMConfig):
    """A diagonal state-space layer with complex states."""

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
    """S4D (Gu et al., 2022), a diagonal state-space kernel with complex states, on every token.

    x'(t) = A x(t) + B u(t), y = Re(C x), with A = -exp(log_real) + i imag, B = 1, and a learned step dt per channel:

        q = exp(dt A),   kernel[l] = 2 Re sum_n C_n (q_n - 1) / A_n q_n^l

    with a zero-order hold, or by the bilinear rule q = (1 + dt/2 A) / (1 - dt/2 A) with dt / (1 - dt/2 A) in place of
    (q - 1) / A. Half of the states are kept; their conjugates give the factor 2.

    Args:
        d_model: channels.
        config: settings; the defaults if not given.
        causal: one direction, or else two whose outputs are added.
        options: individual settings as keywords, fields of `S4DConfig`.
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
        log_dt, log_real, imag, c = widened(self.log_dt, self.log_real, self.imag, self.c)
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


def joined_with(x: Tensor, history: Tensor | None, past: int) -> Tensor:
    """(batch, past + time, dim): a sequence after the inputs before it, zeros by default."""
    batch, _, dim = x.shape
    return torch.cat([x.new_zeros(batch, past, dim) if history is None else history, x], dim=1)


def latest(joined: Tensor, mask: Tensor | None, past: int) -> Tensor:
    """The last `past` inputs up to the last real token of every sequence.

    Args:
        joined: (batch, past + time, dim), from `joined_with`.
        mask: (batch, time), True on real tokens, which come first.
        past: how many.
    """
    batch, size, dim = joined.shape
    count = torch.full((batch,), size - past, device=joined.device) if mask is None else mask.sum(dim=1)
    places = count[:, None] + torch.arange(past, device=joined.device)
    return joined.gather(1, places[..., None].expand(-1, -1, dim))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type in which a recurrence on such inputs is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(*parameters: Tensor) -> list[Tensor]:
    """Parameters in at least float32."""
    return [part.to(torch.promote_types(torch.float32, part.dtype)) for part in parameters]


def as_complex(pairs: Tensor) -> Tensor:
    """Parameters (..., 2) as complex numbers (...).

    A copy: a view would need memory that is aligned to whole pairs, and weights in a mapped file are not.
    """
    return torch.complex(*pairs.unbind(dim=-1))


def complex_like(states: Tensor, log_decay: Tensor) -> Tensor:
    """States stored as pairs of real numbers, as complex ones if the decay is complex."""
    if not log_decay.is_complex():
        return states
    return torch.view_as_complex(states.contiguous().unflatten(-1, (states.shape[-1] // 2, 2)))


def real_like(states: Tensor) -> Tensor:
    """Complex states as (real, imaginary) pairs."""
    return torch.view_as_real(states).flatten(-2) if states.is_complex() else states


def check_states_even(d_state: int, what: str) -> None:
    """Complex states come in conjugate pairs."""
    require(d_state % 2 == 0, f"d_state of {what} must be even (conjugate pairs), got {d_state}")
