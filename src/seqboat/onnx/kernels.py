"""State-space kernels in a graph: one token at a time, or whole sequences in blocks.

A diagonal kernel is z_t = q z_(t-1) + drive x_t, y_t = Re(sum(read z_t)) + skip x_t. Complex numbers are pairs of
channels (real, imaginary), side by side as in `SSMState`. In blocks of BLOCK tokens,

    y = taps * x inside the block + read q^(r + 1) z at its r-th token, with z from before the block

The taps are a triangular matrix per channel, and a `Scan` carries z from block to block. Powers of q are made in the
graph from its logarithm: a runtime computes them once when it loads the file, which stays small.

S5 has one diagonal system between two matrices. Its inputs and states are complex, so in a sequence each of them is
four channels of a diagonal kernel (`Channels`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch

from seqboat.core.checks import require
from seqboat.onnx.graph import Graph, Value
from seqboat.ssm.conv import EMAConv
from seqboat.ssm.diagonal import Coefficients, DiagonalSSM
from seqboat.ssm.ema import EMA
from seqboat.ssm.s4d import S4D
from seqboat.ssm.s5 import S5

BLOCK = 32
"""Tokens per block."""

Memory = dict[str, Value]
"""The state of a layer by the names of its parts."""


def make_kernel(graph: Graph, kernel: torch.nn.Module) -> Kernel:
    """A state-space kernel as nodes of a graph; ValueError if it has no such form."""
    require(
        type(kernel) in (EMA, EMAConv, S4D, S5),
        f"the state-space kernel {type(kernel).__name__} has no ONNX form; EMA, EMAConv, S4D and S5 have one",
    )
    if isinstance(kernel, EMAConv):
        return ConvKernel(graph, kernel)
    if isinstance(kernel, S5):
        return SharedKernel(graph, kernel)
    assert isinstance(kernel, DiagonalSSM)
    return DiagonalKernel(graph, kernel)


class Kernel(ABC):
    """A kernel as nodes of a graph."""

    @abstractmethod
    def state_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of the parts of a state, without the batch."""

    @abstractmethod
    def step(self, x: Value, state: Memory) -> tuple[Value, Memory]:
        """(batch, dim) to (batch, dim), and the state after the token."""

    @abstractmethod
    def sequence(self, x: Value, lengths: Value | None) -> tuple[Value, Memory]:
        """(batch, time, dim), zeros on padding, to (batch, time, dim), which may hold anything there.

        Args:
            x: the sequence.
            lengths: (batch,), real tokens, if the state after the last of them is wanted.
        """


class DiagonalKernel(Kernel):
    """A diagonal kernel in each channel.

    Args:
        graph: to write to.
        kernel: the kernel.
    """

    def __init__(self, graph: Graph, kernel: DiagonalSSM) -> None:
        self.graph, self.kernel = graph, kernel
        self.d_model, self.d_state = kernel.d_model, kernel.d_state

    def state_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        if self.kernel.truncation is not None:
            return {"history": ("float", (self.kernel.truncation - 1, self.d_model))}
        return {"ssm": ("float", (self.d_model, self.d_state))}

    # one token

    @torch.no_grad()
    def step(self, x: Value, state: Memory) -> tuple[Value, Memory]:
        graph, kernel = self.graph, self.kernel
        skipped = x * graph.weight(kernel.skip, "skip")
        if kernel.truncation is not None:
            joined = graph.concat([state["history"], x.unsqueeze(1)], 1)
            taps = graph.weight(kernel.kernel(kernel.truncation)[0].t().flip(0).contiguous(), "taps")
            after = joined.cut(1, kernel.truncation, 1)
            return (joined * taps).sum(1) + skipped, {"history": after}
        decay, drive, read = (part.detach() for part in kernel.step_coefficients())
        moved = None
        if decay.is_complex():
            moved = graph.weight(paired(-decay.imag, decay.imag), "turn")
            decay = paired(decay.real, decay.real)
            read, drive = paired(read.real, -read.imag), paired(drive.real, drive.imag)
        after = Factors(graph.weight(decay, "decay"), moved).times(state["ssm"], self.d_state, 2)
        after = after + x.unsqueeze(2) * graph.weight(drive, "drive")
        return (after * graph.weight(read, "read")).sum(2) + skipped, {"ssm": after}

    # whole sequences

    @torch.no_grad()
    def sequence(self, x: Value, lengths: Value | None) -> tuple[Value, Memory]:
        graph, kernel = self.graph, self.kernel
        y = x * graph.weight(kernel.skip, "skip")
        if kernel.truncation is not None:
            y, history = convolve(graph, x, y, kernel.kernel(kernel.truncation), lengths)
            return y, {} if history is None else {"history": history}
        blocks = Blocks(graph, x)
        state: Memory = {}
        for direction in range(kernel.directions):
            powers = Powers(graph, kernel, direction)
            inner, states = self.read(blocks, powers, reverse=direction == 1)
            y = y + inner
            if lengths is not None:
                state["ssm"] = self.final(blocks, powers, states, lengths)
        return y, state

    def read(self, blocks: Blocks, powers: Powers, reverse: bool) -> tuple[Value, Value]:
        """The outputs of one direction, and (blocks, dim, states, batch), the states before every block."""
        graph, x = self.graph, blocks.columns  # (dim, BLOCK, batch * blocks)
        ages = np.subtract.outer(np.arange(BLOCK), np.arange(BLOCK))
        ages = ages.T if reverse else ages
        # one place more, which holds a zero
        taps = graph.concat([powers.taps, graph.zeros(self.d_model, 1)], 1)
        inside = taps.take(np.where(ages < 0, BLOCK, ages).tolist(), 1) @ x
        order = np.arange(BLOCK) if reverse else np.arange(BLOCK)[::-1]
        ends = powers.enter.take(order.tolist(), 2) @ x  # (dim, states, batch * blocks)
        ends = ends.reshape(self.d_model, self.d_state, blocks.batch, blocks.count).transpose(3, 0, 1, 2)
        start = graph.zeros(self.d_model, self.d_state, blocks.batch)

        later = powers.later(graph.const(BLOCK, "float"))
        later = Factors(*(None if part is None else part.unsqueeze(2) for part in later))  # type: ignore[arg-type]

        def step(carried: Value, end: Value) -> tuple[Value, Value]:
            return later.times(carried, self.d_state, 1) + end, carried

        _, states = graph.scan(step, start, ends, reverse)
        before = states.transpose(1, 2, 3, 0).reshape(self.d_model, self.d_state, -1)
        read = powers.read.take((order[::-1] + 1).tolist(), 2)  # (dim, states, BLOCK)
        return blocks.rows(inside + read.transpose(0, 2, 1) @ before), states

    def final(self, blocks: Blocks, powers: Powers, states: Value, lengths: Value) -> Value:
        """(batch, dim, states) after the last real token of every sequence."""
        graph, sequence = self.graph, self.graph.range(blocks.batch)
        block = lengths // BLOCK
        rest = lengths - block * BLOCK
        before = states.transpose(0, 3, 1, 2).reshape(-1, self.d_model, self.d_state)
        before = before.take(block * blocks.batch + sequence)
        place = graph.range(BLOCK)
        tokens = blocks.padded.reshape(-1, self.d_model).take(
            (sequence * blocks.time + block * BLOCK).unsqueeze(1) + place
        )  # (batch, BLOCK, dim)
        age = rest.unsqueeze(1) - 1 - place
        enter = powers.enter.transpose(2, 0, 1)  # by age
        enter = graph.concat([enter, graph.zeros(1, self.d_model, self.d_state)], 0)
        found = enter.take(graph.where(age < 0, BLOCK, age)) * tokens.unsqueeze(3)
        later = powers.later(rest.to("float").reshape(-1, 1, 1))
        return found.sum(1) + later.times(before, self.d_state, 2)


class ConvKernel(DiagonalKernel):
    """The moving average with a short convolution; the current token has the skip, not a tap."""

    def __init__(self, graph: Graph, kernel: EMAConv) -> None:
        super().__init__(graph, kernel)
        self.conv = kernel.conv
        own = torch.zeros(kernel.directions, kernel.d_model, 1, dtype=kernel.taps.dtype)
        self.taps = torch.cat([own, kernel.taps.detach().cpu().transpose(1, 2)], dim=2)

    def state_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return super().state_shapes() | {"recent": ("float", (self.conv - 1, self.d_model))}

    def step(self, x: Value, state: Memory) -> tuple[Value, Memory]:
        graph, recent = self.graph, state["recent"]
        y, after = super().step(x, state)
        near = (recent * graph.weight(self.taps[0, :, 1:].t().flip(0).contiguous(), "near")).sum(1)
        joined = graph.concat([recent, x.unsqueeze(1)], 1)
        return y + near, after | {"recent": joined.cut(1, self.conv, 1)}

    def sequence(self, x: Value, lengths: Value | None) -> tuple[Value, Memory]:
        y, after = super().sequence(x, lengths)
        y, recent = convolve(self.graph, x, y, self.taps, lengths)
        return y, after if recent is None else after | {"recent": recent}


def convolve(
    graph: Graph, x: Value, y: Value, taps: torch.Tensor, lengths: Value | None
) -> tuple[Value, Value | None]:
    """Add a convolution of each channel to y, and find the last inputs if there are lengths.

    Args:
        graph: to write to.
        x: (batch, time, dim), zeros on padding.
        y: (batch, time, dim).
        taps: (directions, dim, taps), that of the current token first.
        lengths: (batch,), real tokens.
    """
    directions, dim, size = taps.shape
    channels = x.transpose(0, 2, 1)
    for direction in range(directions):
        pads = [0, size - 1] if direction else [size - 1, 0]
        ordered = taps[direction] if direction else taps[direction].flip(1)
        weight = graph.weight(ordered[:, None].contiguous(), "taps")
        found = graph.op("Conv", channels, weight, group=dim, pads=pads, kernel_shape=[size])
        y = y + found.transpose(0, 2, 1)
    if lengths is None:
        return y, None
    batch, time = x.size(0), x.size(1)
    joined = graph.concat([graph.zeros(batch, size - 1, dim), x], 1)
    first = graph.range(batch) * (time + (size - 1)) + lengths
    place = first.unsqueeze(1) + graph.range(size - 1)
    return y, joined.reshape(-1, dim).take(place)


class SharedKernel(Kernel):
    """S5: one diagonal system for all channels.

    Args:
        graph: to write to.
        kernel: the kernel.
    """

    def __init__(self, graph: Graph, kernel: S5) -> None:
        self.graph, self.kernel = graph, kernel
        self.decay, self.drive = (part.detach() for part in kernel.coefficients())

    def state_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {"ssm": ("float", (self.kernel.d_state,))}

    @torch.no_grad()
    def step(self, x: Value, state: Memory) -> tuple[Value, Memory]:
        graph, kernel, decay = self.graph, self.kernel, self.decay
        factors = Factors(
            graph.weight(paired(decay.real, decay.real), "decay"),
            graph.weight(paired(-decay.imag, decay.imag), "turn"),
        )
        after = factors.times(state["ssm"], kernel.d_state, 1)
        after = after + x @ graph.weight(kernel.enter_matrix(self.drive), "enter")
        leave = kernel.leave_matrix(0, decay.real.dtype)
        y = after @ graph.weight(leave.t(), "leave")
        return y + x * graph.weight(kernel.skip, "skip"), {"ssm": after}

    @torch.no_grad()
    def sequence(self, x: Value, lengths: Value | None) -> tuple[Value, Memory]:
        graph, kernel = self.graph, self.kernel
        channels = Channels(kernel)
        inner = DiagonalKernel(graph, channels)
        enter = kernel.enter_matrix(self.drive).repeat_interleave(2, dim=1)
        blocks, powers = Blocks(graph, x @ graph.weight(enter, "enter")), Powers(graph, channels, 0)
        y, state = x * graph.weight(kernel.skip, "skip"), Memory()
        for direction in range(kernel.directions):
            out, states = inner.read(blocks, powers, reverse=direction == 1)
            real, imaginary = kernel.leave_matrix(direction, enter.dtype).unflatten(1, (-1, 2)).unbind(-1)
            leave = torch.stack([real, imaginary, imaginary, -real], dim=-1).flatten(1)
            y = y + out @ graph.weight(leave.t(), "leave")
            if lengths is not None:
                final = inner.final(blocks, powers, states, lengths).reshape(0, kernel.d_state // 2, 8)
                joined = final @ graph.weight(Channels.state_matrix(), "join")
                state["ssm"] = joined.reshape(0, kernel.d_state)
        return y, state


class Channels(DiagonalSSM):
    """The complex states of S5 as channels with real inputs and outputs, four for each.

    The real part of an input enters the first two and the imaginary part the others; of each two, one returns the
    real part of its state and one the imaginary part.
    """

    def __init__(self, kernel: S5) -> None:
        pairs = kernel.d_state // 2
        super().__init__(4 * pairs, 2, causal=True)
        self.log_decay = kernel.log_coefficients()[0].repeat_interleave(4).view(1, -1, 1)
        self.pairs = pairs

    def coefficients(self) -> Coefficients:
        read = self.log_decay.new_tensor([1, -1j, 1, -1j]).repeat(self.pairs).view(1, -1, 1)
        return Coefficients(self.log_decay, torch.ones_like(read), read)

    @staticmethod
    def state_matrix() -> torch.Tensor:
        """(8, 2): from the states of four channels, as pairs of numbers, to the state that they stand for."""
        matrix = torch.zeros(2, 2, 2, 2)  # part that entered, channel of the two, part of its state, part
        matrix[0, 0, 0, 0] = matrix[0, 0, 1, 1] = matrix[1, 0, 0, 1] = 1
        matrix[1, 0, 1, 0] = -1
        return matrix.view(8, 2)


class Blocks:
    """A sequence (batch, time, dim), cut into blocks: at least one more token than it has."""

    def __init__(self, graph: Graph, x: Value) -> None:
        self.batch, self.real = x.size(0), x.size(1)
        self.count = self.real // BLOCK + 1
        self.time = self.count * BLOCK
        self.dim = x.size(2)
        end = (self.time - self.real).reshape(1)
        pads = graph.concat([graph.const([0, 0, 0, 0], "int"), end, graph.const([0], "int")], 0)
        self.padded = graph.op("Pad", x, pads)
        cut = self.padded.reshape(self.batch, self.count, BLOCK, self.dim)
        self.columns = cut.transpose(3, 2, 0, 1).reshape(self.dim, BLOCK, -1)
        """(dim, BLOCK, batch * blocks)"""

    def rows(self, columns: Value) -> Value:
        """(batch, time, dim) again."""
        cut = columns.reshape(self.dim, BLOCK, self.batch, self.count).transpose(2, 3, 1, 0)
        return cut.reshape(self.batch, self.time, self.dim).cut(0, self.real, 1)


class Powers:
    """What the powers of q are multiplied by, for one direction of a kernel.

    Attributes:
        enter: (dim, states, BLOCK), drive q^k for k from 0 on.
        read: (dim, states, BLOCK + 1), what the states are multiplied by to be read k tokens later.
        taps: (dim, BLOCK).
    """

    def __init__(self, graph: Graph, kernel: DiagonalSSM, direction: int) -> None:
        self.graph = graph
        log_decay, drive, read = (part[direction].detach() for part in kernel.coefficients())
        self.complex = log_decay.is_complex()
        self.log = graph.weight(log_decay.real if self.complex else log_decay, "log_decay")
        self.angle = graph.weight(log_decay.imag, "angle") if self.complex else None
        size = graph.op("Exp", self.log.unsqueeze(2) * self._numbers())
        if self.angle is None:
            gain = graph.weight(drive, "drive").unsqueeze(2)
            self.read = size * graph.weight(read, "read").unsqueeze(2)
            self.enter = (size * gain).cut(0, BLOCK, 2)
            self.taps = (self.read * gain).sum(1).cut(0, BLOCK, 1)
            return
        assert bool((drive == 1).all()), "the drive of complex kernels is one"
        turn = self.angle.unsqueeze(2) * self._numbers()
        real, imag = size * graph.op("Cos", turn), size * graph.op("Sin", turn)
        one, two = (graph.weight(part, "read").unsqueeze(2) for part in (read.real, read.imag))
        found, other = one * real - two * imag, one * imag + two * real
        self.read = self._pair(found, 0.0 - other)
        self.enter = self._pair(real, imag).cut(0, BLOCK, 2)
        self.taps = found.sum(1).cut(0, BLOCK, 1)

    def _numbers(self) -> Value:
        return self.graph.range(BLOCK + 1).to("float")

    def _pair(self, real: Value, imag: Value) -> Value:
        """(dim, states, ...) from the two parts of pairs (dim, pairs, ...)."""
        both = self.graph.concat([real.unsqueeze(2), imag.unsqueeze(2)], 2)
        return both.reshape(0, -1, BLOCK + 1)

    def later(self, steps: Value) -> Factors:
        """What states are multiplied by when `steps` tokens pass, a number or (batch, 1, 1)."""
        graph = self.graph
        size = graph.op("Exp", self.log * steps)
        if self.angle is None:
            return Factors(size, None)
        turn = self.angle * steps
        real, imag = size * graph.op("Cos", turn), size * graph.op("Sin", turn)
        ends = graph.op("Shape", real).cut(0, -1, 0)
        shape = graph.concat([ends, graph.const([-1], "int")], 0)
        pairs = ((real, real), (0.0 - imag, imag))
        kept, moved = (graph.concat([one.unsqueeze(-1), two.unsqueeze(-1)], -1) for one, two in pairs)
        return Factors(graph.op("Reshape", kept, shape), graph.op("Reshape", moved, shape))


class Factors(NamedTuple):
    """A factor of every state."""

    kept: Value
    """(..., dim, states): of the state itself"""
    moved: Value | None
    """of the other part of its pair; None for real numbers"""

    def times(self, z: Value, states: int, axis: int) -> Value:
        """The product with states, which lie along an axis."""
        return z * self.kept if self.moved is None else z * self.kept + swapped(z, states, axis) * self.moved


def swapped(z: Value, states: int, axis: int) -> Value:
    """Pairs along an axis with their real and imaginary parts exchanged."""
    return z.take(np.arange(states).reshape(-1, 2)[:, ::-1].ravel().tolist(), axis)


def paired(real: torch.Tensor, imag: torch.Tensor) -> torch.Tensor:
    """(..., pairs) as (..., 2 pairs), side by side."""
    return torch.stack([real, imag], dim=-1).flatten(-2)
