"""Launches of the scan kernels in `triton_scan`: forward, and backward from the inputs alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seqboat.ops.kernels import triton_scan as kernels
from seqboat.ops.kernels import triton_states as states
from seqboat.ops.kernels.tuning import launch, power, scratch

SPLIT = 16
"""States per program in kernels that do not sum over states."""


class Inputs(NamedTuple):
    """The arguments of a scan."""

    x: Tensor
    """(batch, time, dim)"""
    log_decay: Tensor
    """(directions, dim, states), real or complex, as the next two"""
    drive: Tensor
    read: Tensor
    skip: Tensor
    """(dim,)"""
    start: Tensor | None
    """(batch, dim, states), complex ones as (real, imaginary) pairs; one direction only"""
    lengths: Tensor | None
    """(batch,): real tokens, which come first; None for all"""


class _Plan:
    """Inputs as kernels take them, and the sizes of the grids."""

    def __init__(self, inputs: Inputs) -> None:
        x, log_decay, drive, read, skip, start, lengths = inputs
        self.parts = 2 if log_decay.is_complex() else 1
        self.x = x.contiguous()
        self.log_decay, self.drive, self.read = (_as_real(part) for part in (log_decay, drive, read))
        self.skip = skip.contiguous()
        self.start = None if start is None else start.contiguous()
        self.lengths = lengths
        self.batch, self.time, self.dim = x.shape
        self.directions, _, self.states = log_decay.shape
        self.chunk = chunk_for(self.time)
        self.chunks = -(-self.time // self.chunk)
        self.padded = power(self.states)
        self.split = min(self.padded, SPLIT)
        self.splits = self.padded // self.split
        if self.parts == 2:
            self.log_decay = self._decay_table()
        self.numbers = self.time, self.dim, self.states, self.chunks
        self.common = {
            "HAS_LENGTHS": lengths is not None, "PARTS": self.parts, "CHUNK": self.chunk
        }  # fmt: skip

    def _decay_table(self) -> Tensor:
        """Complex decays to the precision that a long memory needs, (directions, dim, states, 8)."""
        count = self.directions * self.dim * self.states
        table = scratch(self.x, count, 8)
        launch(
            states.decay_table, lambda sizes: (-(-count // sizes["BLOCK"]),),
            self.log_decay, table, count, CHUNK=self.chunk,
        )  # fmt: skip
        return table

    def states_buffer(self) -> Tensor:
        return scratch(self.x, self.directions, self.batch * self.chunks, self.parts, self.states, self.dim)

    def blocks(self, sizes: dict[str, int]) -> int:
        return -(-self.dim // sizes["BLOCK"])

    def by_chunk(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return self.batch * self.chunks, self.blocks(sizes)

    def by_chunk_and_state(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return self.batch * self.chunks, self.blocks(sizes), self.directions * self.splits

    def by_sequence(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return self.batch, self.blocks(sizes), self.directions * self.splits

    def entering(self, tangent: bool = False) -> tuple[Tensor, Tensor | None]:
        """The states that enter each chunk, and their derivatives with respect to q."""
        found, tangents = self.states_buffer(), self.states_buffer() if tangent else None
        launch(
            kernels.local_states, self.by_chunk_and_state,
            self.x, self.log_decay, self.drive, None, self.lengths, found, tangents, *self.numbers,
            ADJOINT=False, HAS_EXTRA=False, TANGENT=tangent, SPLITS=self.splits, N=self.split, **self.common,
        )  # fmt: skip
        launch(
            kernels.carry_states, self.by_sequence,
            found, tangents, self.log_decay, self.start, None, self.lengths, None, *self.numbers,
            ADJOINT=False, HAS_START=self.start is not None, HAS_EXTRA=False, HAS_LEAVING=False, TANGENT=tangent,
            SPLITS=self.splits, N=self.split, **self.common,
        )  # fmt: skip
        return found, tangents

    def adjoints(self, grad: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The adjoints that enter each chunk, and the gradient of the state to start with."""
        found = self.states_buffer()
        leaving = None if self.start is None else scratch(self.x, *self.start.shape)
        launch(
            kernels.local_states, self.by_chunk_and_state,
            grad, self.log_decay, self.read, extra, self.lengths, found, None, *self.numbers,
            ADJOINT=True, HAS_EXTRA=extra is not None, TANGENT=False, SPLITS=self.splits, N=self.split,
            **self.common,
        )  # fmt: skip
        launch(
            kernels.carry_states, self.by_sequence,
            found, None, self.log_decay, None, extra, self.lengths, leaving, *self.numbers,
            ADJOINT=True, HAS_START=False, HAS_EXTRA=extra is not None, HAS_LEAVING=leaving is not None,
            TANGENT=False, SPLITS=self.splits, N=self.split, **self.common,
        )  # fmt: skip
        return found, leaving

    def run(self, entering: Tensor, mode: int, grad: Tensor | None = None) -> Tensor:
        """The outputs, or what `mode` says."""
        y = scratch(self.x, *self.x.shape)
        launch(
            kernels.outputs, self.by_chunk,
            self.x, self.log_decay, self.drive, self.read, self.skip, entering, self.lengths, grad, y,
            *self.numbers, MODE=mode, BIDIRECTIONAL=self.directions == 2, N=self.padded, **self.common,
        )  # fmt: skip
        return y


def scan(inputs: Inputs, activate: bool) -> tuple[Tensor, Tensor | None]:
    """The outputs (batch, time, dim), with SiLU if `activate`, and the state after the last real token.

    The state is None for two directions.
    """
    plan = _Plan(inputs)
    entering, _ = plan.entering()
    y = plan.run(entering, 1 if activate else 0)
    if plan.directions == 2:
        return y, None
    if plan.time == 0:
        width = plan.states * plan.parts
        return y, inputs.x.new_zeros(
            plan.batch, plan.dim, width
        ) if plan.start is None else plan.start.clone()
    final = scratch(plan.x, plan.batch, plan.dim, plan.states * plan.parts)
    launch(
        kernels.final_states, plan.by_sequence,
        plan.x, plan.log_decay, plan.drive, plan.start, entering, plan.lengths, final, *plan.numbers,
        HAS_START=plan.start is not None, N=plan.split, **plan.common,
    )  # fmt: skip
    return y, final


def scan_backward(
    grad: Tensor, grad_final: Tensor | None, inputs: Inputs, activate: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of x, log_decay, drive, read, skip and start, given those of the outputs of `scan`."""
    plan = _Plan(inputs)
    grad = grad.contiguous()
    extra = None if grad_final is None else grad_final.contiguous()
    entering, tangents = plan.entering(tangent=True)
    if activate:
        grad = plan.run(entering, 2, grad)
    adjoints, leaving = plan.adjoints(grad, extra)
    has_extra = extra is not None
    dx = scratch(plan.x, *plan.x.shape)
    # gradients of drive, log_decay and read per chunk, added up below
    sums = scratch(plan.x, 3, *adjoints.shape)
    skips = scratch(plan.x, plan.batch * plan.chunks, plan.dim)
    launch(
        kernels.input_gradients, plan.by_chunk,
        plan.x, plan.log_decay, plan.drive, plan.read, plan.skip, adjoints, extra, plan.lengths, grad, dx,
        sums[0], skips, *plan.numbers,
        BIDIRECTIONAL=plan.directions == 2, HAS_EXTRA=has_extra, N=plan.padded, **plan.common,
    )  # fmt: skip
    launch(
        kernels.parameter_gradients, plan.by_chunk_and_state,
        plan.x, plan.log_decay, plan.drive, plan.read, entering, tangents, extra, plan.lengths, grad,
        sums[1], sums[2], *plan.numbers,
        HAS_EXTRA=has_extra, SPLITS=plan.splits, N=plan.split, **plan.common,
    )  # fmt: skip
    ddrive, dlog, dread = (_as_coefficient(part, plan.parts) for part in sums.sum(dim=2).unbind(0))
    return dx, dlog, ddrive, dread, skips.sum(dim=0), leaving


def chunk_for(time: int) -> int:
    """Tokens per chunk: a thirty-second of the sequence, so that there is enough work for all processors."""
    return min(128, max(16, power(time) // 32))


def _as_real(x: Tensor) -> Tensor:
    """Complex coefficients as (..., 2) real ones, contiguous."""
    return torch.view_as_real(x.resolve_conj()).contiguous() if x.is_complex() else x.contiguous()


def _as_coefficient(sums: Tensor, parts: int) -> Tensor:
    """(directions, parts, states, dim) as (directions, dim, states), complex if there are two parts."""
    turned = sums.permute(0, 3, 2, 1)
    return turned[..., 0] if parts == 1 else torch.complex(turned[..., 0], turned[..., 1])
