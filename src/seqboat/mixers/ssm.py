"""Diagonal state-space layers: what MD-EMA and S4D share.

Equation 2 of the paper, SSM(S) = K * S + D . S, for kernels of the form K[l] = Re(sum_n read_n drive_n q_n^l).
A subclass says what q, drive and read are; this class runs them over a sequence (scan or FFT), carries the
state, and takes single steps.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.checks import check_choice, check_positive, require
from seqboat.mixers.base import MixerOutput, RecurrentMixer, keep_rows
from seqboat.nn import fft_convolve
from seqboat.scan import BLOCK, block_tables, final_state, scan

Method = Literal["scan", "fft"]


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


class DiagonalSSM(RecurrentMixer):
    """A diagonal state-space layer, without norm, activation or residual connection.

    Args:
        d_model: channels.
        d_state: real states per channel.
        causal: one direction, or else two whose outputs are added.
        truncation: cut the kernel after so many taps.
        method: "scan" in blocks, or "fft" with the whole kernel, which truncated kernels always use.
        block: tokens per block of the scan.
    """

    widens = True

    def __init__(
        self,
        d_model: int,
        d_state: int,
        causal: bool,
        truncation: int | None = None,
        method: Method = "scan",
        block: int = BLOCK,
    ) -> None:
        super().__init__()
        check_positive("d_model", d_model)
        check_positive("d_state", d_state)
        check_positive("block", block)
        if truncation is not None:
            check_positive("truncation", truncation)
        check_choice("method", method, ("scan", "fft"))
        self.d_model, self.d_state, self.causal = d_model, d_state, causal
        self.truncation, self.method, self.block = truncation, method, block
        self.directions = 1 if causal else 2
        self.skip = nn.Parameter(torch.empty(d_model))

    @abstractmethod
    def coefficients(self) -> Coefficients:
        """The layer's q, drive and read, in float32 at least."""

    def step_coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, drive and read of the first direction, (dim, states); subclasses may know a shorter way to q."""
        log_decay, drive, read = self.coefficients()
        return torch.exp(log_decay[0]), drive[0], read[0]

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, d_state={self.d_state}, causal={self.causal}, "
            f"truncation={self.truncation}, method={self.method}"
        )

    def mix(self, x: Tensor, mask: Tensor | None, state: SSMState | TruncatedState | None) -> MixerOutput:
        with torch.autocast(x.device.type, enabled=False):
            y, after = self._mix(x.to(_at_least_float32(x.dtype)), mask, state)
        y = y.to(x.dtype)
        return MixerOutput(y if mask is None else torch.where(mask[..., None], y, 0), after)

    def _mix(
        self, x: Tensor, mask: Tensor | None, state: SSMState | TruncatedState | None
    ) -> tuple[Tensor, SSMState | TruncatedState | None]:
        skip = self.skip.to(x.dtype)
        if self.truncation is not None:
            if not self.causal:
                return self._convolve(x) + skip * x, None
            assert state is None or isinstance(state, TruncatedState)
            y, history = self._convolve_with_history(x, mask, state)
            return y + skip * x, history
        assert state is None or isinstance(state, SSMState)
        if self.method == "fft":
            y, final = self._fft(x, mask, state)
            return y + skip * x, None if final is None else SSMState(final)
        log_decay, drive, read = self.coefficients()
        # short sequences need no long block
        block = min(self.block, max(8, 1 << max(x.shape[1] - 1, 0).bit_length()))
        tables = block_tables(log_decay, drive, read, skip, block)
        start = None if state is None else state.states
        y, states = scan(x, tables, not self.causal, start)
        if not self.causal:
            return y, None
        lengths = None if mask is None else mask.sum(dim=1)
        return y, SSMState(final_state(x, states, tables, log_decay[0], start, lengths))

    def kernel(self, length: int) -> Tensor:
        """The first taps of the convolution kernel, (directions, dim, length), without the skip."""
        log_decay, drive, read = self.coefficients()
        steps = torch.arange(length, device=log_decay.device)
        powers = torch.exp(log_decay[..., None] * steps)
        kernel = torch.einsum("...n,...nl->...l", read * drive, powers)
        return kernel.real if kernel.is_complex() else kernel

    def _convolve(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        taps = time if self.truncation is None else min(self.truncation, time)
        kernel = self.kernel(taps)
        y = fft_convolve(x, kernel[0])
        if not self.causal:
            y = y + fft_convolve(x.flip(1), kernel[1]).flip(1)
        return y

    def _fft(self, x: Tensor, mask: Tensor | None, state: SSMState | None) -> tuple[Tensor, Tensor | None]:
        """The published way, with a table of (dim, states, time): kept as a second opinion."""
        y = self._convolve(x)
        if not self.causal:
            return y, None
        log_decay, drive, read = (part[0] for part in self.coefficients())
        batch, time = x.shape[:2]
        lengths = torch.full((batch,), time, device=x.device) if mask is None else mask.sum(dim=1)
        age = lengths[:, None] - 1 - torch.arange(time, device=x.device)
        powers = torch.exp(log_decay * age.clamp(min=0)[..., None, None])  # (batch, time, dim, states)
        powers = torch.where((age >= 0)[..., None, None], powers, 0)
        final = torch.einsum("btd,btdn->bdn", x.to(powers.dtype), drive * powers)
        if state is not None:
            begin = _complex_like(state.states, log_decay)
            steps = torch.arange(1, time + 1, device=x.device)
            decayed = torch.einsum("bdn,dnt->btd", begin * read, torch.exp(log_decay[..., None] * steps))
            y = y + (decayed.real if decayed.is_complex() else decayed)
            final = final + begin * torch.exp(log_decay * lengths[:, None, None])
        return y, _real_like(final)

    def _convolve_with_history(
        self, x: Tensor, mask: Tensor | None, state: TruncatedState | None
    ) -> tuple[Tensor, TruncatedState]:
        assert self.truncation is not None
        batch, time, dim = x.shape
        past = self.truncation - 1
        history = x.new_zeros(batch, past, dim) if state is None else state.history
        joined = torch.cat([history, x], dim=1)
        y = self._convolve(joined)[:, past:]
        lengths = torch.full((batch,), time, device=x.device) if mask is None else mask.sum(dim=1)
        places = lengths[:, None] + torch.arange(past, device=x.device)
        return y, TruncatedState(joined.gather(1, places[..., None].expand(-1, -1, dim)))

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> SSMState | TruncatedState:
        dtype = _at_least_float32(dtype)
        if self.truncation is not None:
            past = self.truncation - 1
            return TruncatedState(torch.zeros(batch, past, self.d_model, dtype=dtype, device=device))
        return SSMState(torch.zeros(batch, self.d_model, self.d_state, dtype=dtype, device=device))

    def advance(
        self,
        x: Tensor,
        state: SSMState | TruncatedState,
        mask: Tensor | None = None,
        inplace: bool = False,
    ) -> MixerOutput:
        with torch.autocast(x.device.type, enabled=False):
            token = x.to(_at_least_float32(x.dtype))
            after: SSMState | TruncatedState
            if isinstance(state, TruncatedState):
                y, after = self._step_history(token, state, mask)
            else:
                y, after = self._step_states(token, state, mask)
            y = y + self.skip.to(y.dtype) * token
        return MixerOutput(keep_rows(mask, y.to(x.dtype)), after)

    def _step_states(self, x: Tensor, state: SSMState, mask: Tensor | None) -> tuple[Tensor, SSMState]:
        decay, drive, read = self.step_coefficients()
        before = _complex_like(state.states, decay)
        now = torch.addcmul(drive * x[..., None], decay, before)
        y = (read * now).sum(dim=-1)
        return y.real if y.is_complex() else y, SSMState(keep_rows(mask, _real_like(now), state.states))

    def _step_history(
        self, x: Tensor, state: TruncatedState, mask: Tensor | None
    ) -> tuple[Tensor, TruncatedState]:
        assert self.truncation is not None
        joined = torch.cat([state.history, x[:, None]], dim=1)
        y = torch.einsum("btd,dt->bd", joined, self.kernel(self.truncation)[0].flip(-1))
        return y, TruncatedState(keep_rows(mask, joined[:, 1:], state.history))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _complex_like(states: Tensor, log_decay: Tensor) -> Tensor:
    if not log_decay.is_complex():
        return states
    return torch.view_as_complex(states.contiguous().unflatten(-1, (states.shape[-1] // 2, 2)))


def _real_like(states: Tensor) -> Tensor:
    return torch.view_as_real(states).flatten(-2) if states.is_complex() else states


def check_states_even(d_state: int, what: str) -> None:
    """Complex states come in conjugate pairs."""
    require(d_state % 2 == 0, f"d_state of {what} must be even (conjugate pairs), got {d_state}")
