"""State-space kernels in single steps: coefficients folded once, states updated in place.

Every class here takes over the state of a kernel (`put`), advances the first rows of its buffers by one token
(`step`), and gives the state back (`get`). Rows are sequences; buffers have room for `capacity` of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from seqboat.ssm.conv import EMAConv, EMAConvState
from seqboat.ssm.diagonal import (
    DiagonalSSM,
    SSMState,
    StateSpace,
    TruncatedState,
    at_least_float32,
    complex_like,
    real_like,
)
from seqboat.ssm.ema import EMA
from seqboat.ssm.liquid_s4 import LiquidS4, LiquidState
from seqboat.ssm.s4 import S4
from seqboat.ssm.s4d import S4D
from seqboat.ssm.s5 import S5, S5State


class LeanKernel(ABC):
    """A kernel that reads one token of each of its first rows at a time."""

    def __init__(self, kernel: StateSpace) -> None:
        self.dtype = at_least_float32(kernel.skip.dtype)
        self.skip = kernel.skip.to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, dim) to (rows, dim), the skip included; the states of these rows change."""
        return self.step(x).addcmul_(self.skip, x)

    @abstractmethod
    def step(self, x: Tensor) -> Tensor:
        """As `__call__`, without the skip."""

    @abstractmethod
    def put(self, row: int, state: Any, source: int) -> None:
        """Take over the state of one sequence of a batch."""

    @abstractmethod
    def get(self, rows: list[int]) -> Any:
        """The state of these rows, as the kernel itself has it."""

    @abstractmethod
    def move(self, source: int, target: int) -> None:
        """Let the state of one row replace that of another."""


class LeanDiagonal(LeanKernel):
    """A diagonal kernel: z = q z + drive x, y = Re(sum(read z)), with the states first and the channels last."""

    def __init__(self, kernel: DiagonalSSM, capacity: int) -> None:
        super().__init__(kernel)
        parts = (part.t().contiguous()[:, None] for part in kernel.step_coefficients())
        self.decay, self.drive, self.read = parts  # (d_state, 1, dim)
        self.unit = not self.decay.is_complex() and bool((self.drive == 1).all())
        """whether the input enters as it is"""
        self.states = self.decay.new_zeros(len(self.decay), capacity, self.decay.shape[2])
        self.now = self.states
        """the states of the rows in use"""
        self.products = torch.empty_like(self.now)

    def _fit(self, rows: int) -> None:
        self.now = self.states[:, :rows]
        with torch.inference_mode(False):
            self.products = torch.empty_like(self.now, memory_format=torch.contiguous_format)

    def step(self, x: Tensor) -> Tensor:
        if len(x) != self.now.shape[1]:
            self._fit(len(x))
        if self.unit:
            torch.addcmul(x, self.now, self.decay, out=self.now)
        else:
            self.now.mul_(self.decay).addcmul_(self.drive, x.to(self.now.dtype))
        y = torch.mul(self.now, self.read, out=self.products).sum(dim=0)
        return y.real.contiguous() if y.is_complex() else y

    def put(self, row: int, state: SSMState, source: int) -> None:
        self.states[:, row] = complex_like(state.states[source], self.decay).t()

    def get(self, rows: list[int]) -> SSMState:
        return SSMState(real_like(self.states[:, rows].permute(1, 2, 0).contiguous()))

    def move(self, source: int, target: int) -> None:
        self.states[:, target] = self.states[:, source]


class Ring:
    """The last inputs of every row. All rows write to the same place, which moves on by one with every token.

    Args:
        capacity: rows.
        size: inputs.
        like: (dim,), whose type and device the inputs have.
    """

    def __init__(self, capacity: int, size: int, like: Tensor) -> None:
        self.inputs = like.new_zeros(capacity, size, len(like))
        self.last = size - 1
        """where the newest input is"""

    def push(self, x: Tensor) -> Tensor:
        """Write one input per row; returns (rows, size, dim)."""
        self.last = (self.last + 1) % self.inputs.shape[1]
        inputs = self.inputs[: len(x)]
        inputs[:, self.last] = x
        return inputs

    def _order(self, size: int) -> Tensor:
        """Places of the newest `size` inputs, oldest first."""
        age = torch.arange(size - 1, -1, -1, device=self.inputs.device)
        return (self.last - age) % self.inputs.shape[1]

    def put(self, row: int, history: Tensor) -> None:
        self.inputs[row] = 0
        self.inputs[row, self._order(len(history))] = history

    def get(self, rows: list[int], size: int) -> Tensor:
        return self.inputs[rows][:, self._order(size)]

    def move(self, source: int, target: int) -> None:
        self.inputs[target] = self.inputs[source]


class LeanTruncated(LeanKernel):
    """A truncated kernel: the inputs that it still reaches, in a ring."""

    def __init__(self, kernel: DiagonalSSM, capacity: int) -> None:
        super().__init__(kernel)
        size = kernel.truncation
        assert size is not None
        taps = kernel.kernel(size)[0].t().flip(0)
        # the taps in the order of the ring are a slice of this, wherever its newest input is
        self.taps = torch.cat([taps, taps])
        self.past = size - 1
        self.ring = Ring(capacity, size, self.skip)

    def step(self, x: Tensor) -> Tensor:
        inputs = self.ring.push(x)
        begin = self.past - self.ring.last
        return (inputs * self.taps[begin : begin + self.past + 1]).sum(dim=1)

    def put(self, row: int, state: TruncatedState, source: int) -> None:
        self.ring.put(row, state.history[source])

    def get(self, rows: list[int]) -> TruncatedState:
        return TruncatedState(self.ring.get(rows, self.past))

    def move(self, source: int, target: int) -> None:
        self.ring.move(source, target)


class LeanEMAConv(LeanKernel):
    """The moving average with a short convolution: the averages, and the last inputs in a ring."""

    def __init__(self, kernel: EMAConv, capacity: int) -> None:
        super().__init__(kernel)
        self.averages = (LeanDiagonal if kernel.truncation is None else LeanTruncated)(kernel, capacity)
        self.kernel, self.past = kernel, kernel.conv - 1
        # as in LeanTruncated; the current input has the skip
        taps = torch.cat([kernel.taps[0].to(self.dtype).flip(0), torch.zeros_like(self.skip)[None]])
        self.taps = torch.cat([taps, taps])
        self.ring = Ring(capacity, kernel.conv, self.skip)

    def step(self, x: Tensor) -> Tensor:
        inputs = self.ring.push(x)
        begin = self.past - self.ring.last
        near = (inputs * self.taps[begin : begin + self.past + 1]).sum(dim=1)
        return self.averages.step(x) + near

    def put(self, row: int, state: EMAConvState, source: int) -> None:
        averages: Any = SSMState if self.kernel.truncation is None else TruncatedState
        self.averages.put(row, averages(state.states), source)
        self.ring.put(row, state.recent[source])

    def get(self, rows: list[int]) -> EMAConvState:
        return EMAConvState(self.averages.get(rows)[0], self.ring.get(rows, self.past))

    def move(self, source: int, target: int) -> None:
        self.averages.move(source, target)
        self.ring.move(source, target)


class LeanS4(LeanKernel):
    """S4, whose matrix is diagonal plus rank one.

    With half = dt/2 and inverse = 1 / (1 - half poles), a step of the undriven system is

        z' = keep z - out a - back b,   a = 2 Re(p* z),   b = 2 Re(p* keep z) - own a

    keep = inverse (1 + half poles), out = half inverse p, own = 2 Re(p* out), and back = out / (1 + own): the two
    halves of the bilinear rule, each a diagonal and a rank-one part.
    """

    def __init__(self, kernel: S4, capacity: int) -> None:
        super().__init__(kernel)
        system = kernel.system()
        half = 0.5 * system.dt[:, None]
        inverse = 1 / (1 - half * system.poles)
        self.keep = inverse * (1 + half * system.poles)
        self.out = half * inverse * system.p
        self.own = 2 * (system.p.conj() * self.out).sum(dim=-1, keepdim=True).real
        self.back = self.out / (1 + self.own)
        self.probe = torch.stack([2 * system.p.conj(), 2 * system.p.conj() * self.keep])  # (2, dim, pairs)
        # the drive passes the second half of the rule
        drive = inverse * (system.dt[:, None] * system.b)
        self.drive = drive - self.back * (2 * (system.p.conj() * drive).sum(dim=-1, keepdim=True).real)
        self.read = 2 * system.c[0]
        shape = (capacity, *system.poles.shape)
        self.states = torch.zeros(shape, dtype=system.poles.dtype, device=system.poles.device)

    def step(self, x: Tensor) -> Tensor:
        states = self.states[: len(x)]
        first, second = (self.probe * states[:, None]).sum(dim=-1, keepdim=True).real.unbind(1)
        second = second - self.own * first
        states.mul_(self.keep).sub_(self.out * first).sub_(self.back * second).add_(self.drive * x[..., None])
        return (self.read * states).sum(dim=-1).real.contiguous()

    def put(self, row: int, state: SSMState, source: int) -> None:
        self.states[row] = complex_like(state.states[source], self.read)

    def get(self, rows: list[int]) -> SSMState:
        return SSMState(real_like(self.states[rows]))

    def move(self, source: int, target: int) -> None:
        self.states[target] = self.states[source]


class LeanS5(LeanKernel):
    """S5: one diagonal system for all channels between two real matrices."""

    def __init__(self, kernel: S5, capacity: int) -> None:
        super().__init__(kernel)
        self.decay, drive = kernel.coefficients()
        self.enter = kernel.enter_matrix(drive).contiguous()
        self.leave = kernel.leave_matrix(0, self.dtype).t().contiguous()
        self.states = torch.zeros(capacity, len(self.decay), dtype=self.decay.dtype, device=self.decay.device)

    def step(self, x: Tensor) -> Tensor:
        states = self.states[: len(x)]
        entered = torch.view_as_complex((x @ self.enter).view(len(x), -1, 2))
        states.mul_(self.decay).add_(entered)
        return torch.view_as_real(states).flatten(1) @ self.leave

    def put(self, row: int, state: S5State, source: int) -> None:
        self.states[row] = complex_like(state.states[source], self.decay)

    def get(self, rows: list[int]) -> S5State:
        return S5State(real_like(self.states[rows]))

    def move(self, source: int, target: int) -> None:
        self.states[target] = self.states[source]


class LeanLiquid(LeanKernel):
    """Liquid-S4: a diagonal kernel, and products of the last inputs."""

    def __init__(self, kernel: LiquidS4, capacity: int) -> None:
        super().__init__(kernel)
        log_decay, drive, read = kernel.coefficients(0)
        self.order, self.remembers = kernel.order, kernel.config.kernel == "kb"
        self.decay, self.drive, self.read = torch.exp(log_decay), drive, read
        self.gain = (read * drive).sum(dim=-1).real.contiguous()
        """(order, dim): what a product of inputs adds to the output at once"""
        self.states = torch.zeros((capacity, *read.shape), dtype=read.dtype, device=read.device)
        self.ring = Ring(capacity, kernel.order, self.skip)

    def step(self, x: Tensor) -> Tensor:
        states = self.states[: len(x)]
        inputs = self.ring.push(x)
        states.mul_(self.decay).addcmul_(self.drive[0], x[..., None].to(states.dtype))
        products, together = [], x
        for age in range(1, self.order):
            together = together * inputs[:, (self.ring.last - age) % self.order]
            products.append(together)
        if self.remembers:
            for drive, together in zip(self.drive[1:], products, strict=True):
                states.addcmul_(drive, together[..., None].to(states.dtype))
        y = (self.read * states).sum(dim=-1).real.contiguous()
        if not self.remembers:
            for gain, together in zip(self.gain[1:], products, strict=True):
                y.addcmul_(gain, together)
        return y

    def put(self, row: int, state: LiquidState, source: int) -> None:
        self.states[row] = complex_like(state.states[source], self.read)
        self.ring.put(row, state.inputs[source])

    def get(self, rows: list[int]) -> LiquidState:
        return LiquidState(real_like(self.states[rows]), self.ring.get(rows, self.order - 1))

    def move(self, source: int, target: int) -> None:
        self.states[target] = self.states[source]
        self.ring.move(source, target)


def lean_kernel(kernel: StateSpace, capacity: int) -> LeanKernel | None:
    """The kernel in single steps; None for kinds that have no such form."""
    if type(kernel) in (EMA, S4D):
        assert isinstance(kernel, DiagonalSSM)
        return (
            LeanDiagonal(kernel, capacity) if kernel.truncation is None else LeanTruncated(kernel, capacity)
        )
    if type(kernel) is EMAConv:
        return LeanEMAConv(kernel, capacity)
    if type(kernel) is S4:
        return LeanS4(kernel, capacity)
    if type(kernel) is S5:
        return LeanS5(kernel, capacity)
    return LeanLiquid(kernel, capacity) if type(kernel) is LiquidS4 else None
