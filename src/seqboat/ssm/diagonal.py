"""State-space layers, equation 2 of the paper: SSM(S) = K * S + D . S.

`StateSpace` is the common part of all of them. `DiagonalSSM` is that of MD-EMA and S4D: kernels of the form
K[l] = Re(sum_n read_n drive_n q_n^l). A subclass says what q, drive and read are; the class runs them over a sequence
(a block scan, or FFT where the kernel is truncated), carries the state, and takes single steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.documents import Documents
from seqboat.core.mixer import MixerOutput, RecurrentMixer, keep_rows
from seqboat.core.nn import fft_convolve
from seqboat.core.padding import zero_padding
from seqboat.core.settings import Settings
from seqboat.ops.document_scan import scan_documents, state_after
from seqboat.ops.kernels import CHOSEN, attempt
from seqboat.ops.scan import BLOCK, block_for, block_tables, final_state, scan

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


class StateSpace(RecurrentMixer):
    """A state-space layer, without norm, activation or residual connection.

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
        check_positive("d_model", d_model)
        self.d_model, self.causal = d_model, causal
        self.directions = 1 if causal else 2
        self.skip = nn.Parameter(torch.empty(d_model))

    def mix(self, x: Tensor, mask: Tensor | None, state: Any) -> MixerOutput:
        with torch.autocast(x.device.type, enabled=False):
            y, after = self.read(x.to(at_least_float32(x.dtype)), mask, state)
        y = y.to(x.dtype)
        return MixerOutput(y if mask is None else torch.where(mask[..., None], y, 0), after)

    def advance(
        self, x: Tensor, state: Any, mask: Tensor | None = None, inplace: bool = False
    ) -> MixerOutput:
        with torch.autocast(x.device.type, enabled=False):
            token = x.to(at_least_float32(x.dtype))
            y, after = self.read_token(token, state, mask)
            y = y + self.skip.to(y.dtype) * token
        return MixerOutput(keep_rows(mask, y.to(x.dtype)), after)

    @abstractmethod
    def read(self, x: Tensor, mask: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """As `mix`, in at least float32: the outputs, with the skip, and the state; padding may hold anything."""

    @abstractmethod
    def read_token(self, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        """As `advance`, in at least float32: the outputs, without the skip, and the state."""


class DiagonalSSM(StateSpace):
    """A diagonal state-space layer.

    Args:
        d_model: channels.
        d_state: real states per channel.
        causal: one direction, or else two whose outputs are added.
        truncation: number of taps after which the kernel is cut.
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
        self.d_state = d_state
        self.truncation, self.block = truncation, block
        self._kept: tuple[Any, tuple[Tensor, ...]] | None = None

    @abstractmethod
    def coefficients(self) -> Coefficients:
        """The layer's q, drive and read, in at least float32."""

    def step_coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, drive and read of the first direction, (dim, states); subclasses may compute q directly."""
        log_decay, drive, read = self.coefficients()
        return torch.exp(log_decay[0]), drive[0], read[0]

    def _between_steps(self, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What depends on the weights alone, kept from one step of decoding to the next.

        It is made again if a weight was replaced or changed in place, and for every new sequence: changes through
        `.data` leave no trace.
        """
        # most kernels have no submodules to walk through
        own = self.parameters() if self._modules else self._parameters.values()
        weights = [weight for weight in own if weight is not None]
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or any(type(w) is not nn.Parameter or w.is_inference() for w in weights)
        ):
            return make()
        key = [(w.data_ptr(), w._version, w.dtype) for w in weights]
        if self._kept is None or self._kept[0] != key:
            self._kept = key, make()
        return self._kept[1]

    def _new_sequence(self) -> None:
        if self._kept is not None and not torch.compiler.is_compiling():
            self._kept = None

    def extra_repr(self) -> str:
        return f"{self.d_model}, d_state={self.d_state}, causal={self.causal}, truncation={self.truncation}"

    def read(
        self, x: Tensor, mask: Tensor | None, state: SSMState | TruncatedState | None
    ) -> tuple[Tensor, SSMState | TruncatedState | None]:
        self._new_sequence()
        skip = self.skip.to(x.dtype)
        if self.truncation is not None:
            if not self.causal:
                return self._convolve(x) + skip * x, None
            assert state is None or isinstance(state, TruncatedState)
            past = None if state is None else state.history
            y, history = convolve_with_history(x, self.kernel(self.truncation)[0], mask, past)
            return y + skip * x, TruncatedState(history)
        assert state is None or isinstance(state, SSMState)
        log_decay, drive, read = self.coefficients()
        start = None if state is None else state.states
        lengths = None if mask is None else mask.sum(dim=1)
        if "scan" in CHOSEN and not torch.compiler.is_compiling():
            given = x, log_decay, drive, read, skip, start, lengths
            found = attempt("scan", "triton_scan:scan", x, *given, states=self.d_state)
            if found is not None:
                return found[0], SSMState(found[1]) if self.causal else None
        tables = block_tables(log_decay, drive, read, skip, block_for(x.shape[1], self.block))
        y, states = scan(x, tables, not self.causal, start)
        if not self.causal:
            return y, None
        return y, SSMState(final_state(x, states, tables, log_decay[0], start, lengths))

    def mix_documents(self, x: Tensor, documents: Documents, state: Any) -> MixerOutput:
        if self.truncation is not None:
            return super().mix_documents(x, documents, state)
        self._new_sequence()
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(at_least_float32(x.dtype))
            log_decay, drive, read = self.coefficients()
            size = block_for(x.shape[1] // max(documents.count, 1), self.block)
            tables = block_tables(log_decay, drive, read, self.skip.to(wide.dtype), size)
            place, group, first, reach = documents.blocks(size)
            lengths, start, begin = documents.offsets.diff(), None, None
            if state is not None:
                # an empty document has no block: its state goes to a spare one
                target = torch.where(lengths > 0, first[:-1], group.shape[0])[documents.first]
                begin = documents.still(state.states)
                shape = (group.shape[0] + 1, *state.states.shape[1:])
                start = wide.new_zeros(shape).index_copy(0, target, state.states)[:-1]
            y, spread, states = scan_documents(wide, tables, not self.causal, place, group, reach, start)
            y = zero_padding(y.to(x.dtype), documents.mask)
            if not self.causal:
                return MixerOutput(y)
            length = lengths[documents.last]
            after = state_after(
                spread, states, tables, log_decay[0], first[documents.last], length.clamp(min=1)
            )
            begin = torch.zeros_like(after) if begin is None else begin
            return MixerOutput(y, SSMState(torch.where((length > 0)[:, None, None], after, begin)))

    def kernel(self, length: int) -> Tensor:
        """The first taps of the convolution kernel, (directions, dim, length), without the skip."""
        log_decay, drive, read = self.coefficients()
        steps = torch.arange(length, device=log_decay.device)
        powers = torch.exp(log_decay[..., None] * steps)
        kernel = torch.einsum("...n,...nl->...l", read * drive, powers)
        return kernel.real if kernel.is_complex() else kernel

    def _convolve(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        assert self.truncation is not None
        kernel = self.kernel(min(self.truncation, time))
        y = fft_convolve(x, kernel[0])
        if not self.causal:
            y = y + fft_convolve(x.flip(1), kernel[1]).flip(1)
        return y

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> SSMState | TruncatedState:
        self._new_sequence()
        dtype = at_least_float32(dtype)
        if self.truncation is not None:
            past = self.truncation - 1
            return TruncatedState(torch.zeros(batch, past, self.d_model, dtype=dtype, device=device))
        return SSMState(torch.zeros(batch, self.d_model, self.d_state, dtype=dtype, device=device))

    def read_token(
        self, x: Tensor, state: SSMState | TruncatedState, mask: Tensor | None
    ) -> tuple[Tensor, SSMState | TruncatedState]:
        if isinstance(state, TruncatedState):
            return self._step_history(x, state, mask)
        return self._step_states(x, state, mask)

    def _step_states(self, x: Tensor, state: SSMState, mask: Tensor | None) -> tuple[Tensor, SSMState]:
        decay, drive, read = self._between_steps(self.step_coefficients)
        before = complex_like(state.states, decay)
        now = torch.addcmul(drive * x[..., None], decay, before)
        y = (read * now).sum(dim=-1)
        return y.real if y.is_complex() else y, SSMState(keep_rows(mask, real_like(now), state.states))

    def _step_history(
        self, x: Tensor, state: TruncatedState, mask: Tensor | None
    ) -> tuple[Tensor, TruncatedState]:
        assert self.truncation is not None
        joined = torch.cat([state.history, x[:, None]], dim=1)
        size = self.truncation
        (taps,) = self._between_steps(lambda: (self.kernel(size)[0].t().flip(0).contiguous(),))
        y = torch.einsum("btd,td->bd", joined, taps)
        return y, TruncatedState(keep_rows(mask, joined[:, 1:], state.history))


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
