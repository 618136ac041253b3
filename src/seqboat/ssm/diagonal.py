"""State-space layers, equation 2 of the paper: SSM(S) = K * S + D . S.

`StateSpace` is the contract of a kernel. `DiagonalSSM` is that of MD-EMA and S4D,
K[l] = Re(sum_n read_n drive_n q_n^l): a subclass says what q, drive and read are; the class runs them over a
sequence, carries the state, takes single steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Mixer, MixerOutput, check_width
from seqboat.core.nn import Kept, fft_convolve
from seqboat.core.settings import Settings
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
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
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
            token = x if x.dtype in (torch.float32, torch.float64) else x.float()
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
            past = None if state is None else state.history
            kernel = self.kernel(self.truncation)[0]
            y, history = convolve_with_history(x, kernel, layout.mask, past)
            return y + skipped, TruncatedState(history)
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


def convolve_with_history(
    x: Tensor, kernel: Tensor, mask: Tensor | None, history: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Causal convolution of (batch, time, dim) with (dim, taps) that continues from earlier inputs.

    Args:
        x: the sequence, real tokens first.
        kernel: its taps.
        mask: (batch, time), True on real tokens.
        history: (batch, taps - 1, dim), the inputs so far; zeros by default.

    Returns:
        y: (batch, time, dim).
        history: the inputs before the next token.
    """
    past = kernel.shape[1] - 1
    joined = joined_with(x, history, past)
    y = fft_convolve(joined, kernel)[:, past:]
    return y, latest(joined, mask, past)


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
