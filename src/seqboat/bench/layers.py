"""Time and memory of layers, side by side in one run.

Candidates take turns in every round, so that other load on the machine affects all of them alike; the tables show
the median and quartiles over the rounds, and the ratio to the first candidate of the same run. Memory is what a step
needs beyond what was in use before: from CUDA's allocator, or, on the CPU, the peak resident set of a process that
runs nothing else. A step that such a process does not survive is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqboat.bench.cost import Product, backward_products, count_parameters, forward_products
from seqboat.bench.measure import (
    Quartiles,
    available_memory,
    extra_peak,
    human_seconds,
    in_child,
    machine,
    quartiles,
    time_rounds,
)
from seqboat.bench.setting import LOWER_BOUND, MODES, OURS, Candidate, LayerSetting, Mode, build, own_setting
from seqboat.console import format_bytes
from seqboat.layers.routers import AlwaysActive
from seqboat.layers.seqboat import SeqBoat

SHORTEST = 32
"""Tokens of the sequences on which candidates are tried before minutes of measuring."""


class Runner(ABC):
    """Something that can be timed in each mode."""

    parameters: int = 0

    @abstractmethod
    def run(self, mode: Mode) -> None:
        """One step."""

    def active(self) -> float | None:
        """The fraction of tokens that were activated."""
        return None


class LayerRunner(Runner):
    """A layer on random inputs."""

    def __init__(self, candidate: Candidate, setting: LayerSetting) -> None:
        self.layer = build(candidate, setting)
        self.parameters = count_parameters(self.layer)
        self._call = self.layer
        if candidate.overrides.get("compiled"):
            from seqboat.models.compile import compile_model  # importing this takes as long as torch itself

            # the first call takes up to a minute; it is one of the warm-up rounds
            self._call = compile_model(self.layer)
        self.x = _inputs(own_setting(candidate, setting)).requires_grad_()
        self.above = torch.randn_like(self.x)

    def run(self, mode: Mode) -> None:
        if mode == "inference":
            self.layer.eval()
            with torch.no_grad():
                self._call(self.x)
            return
        self.x.grad = None
        self.layer.train().zero_grad(set_to_none=True)
        self._call(self.x).y.backward(self.above)

    def active(self) -> float | None:
        with torch.no_grad():
            routing = self.layer.eval()(self.x).routing
        return None if routing is None else float(routing.active.float().mean())


def _inputs(setting: LayerSetting) -> Tensor:
    generator = torch.Generator().manual_seed(setting.seed)
    shape = (setting.batch, setting.length, setting.d_model)
    return torch.randn(shape, generator=generator).to(setting.device, setting.torch_dtype)


class LowerBoundRunner(Runner):
    """Only the matrix products of our layer, with preallocated operands.

    Args:
        setting: of the layer.
        candidate: a SeqBoat layer without a feed-forward block; by default the setting's.
    """

    def __init__(self, setting: LayerSetting, candidate: Candidate = OURS) -> None:
        setting = own_setting(candidate, setting)
        layer = build(candidate, setting)
        assert isinstance(layer, SeqBoat)
        rate = 1.0 if isinstance(layer.sma.router, AlwaysActive) else setting.rate
        if rate is None:
            rate = LayerRunner(candidate, setting).active() or 0.0
        active = setting.batch * round(rate * setting.length)
        self.forward = forward_products(layer, setting.batch, setting.length, active)
        self.backward = backward_products(self.forward)
        self._operands: dict[tuple[int, ...], Tensor] = {}
        self._device, self._dtype = setting.device, setting.torch_dtype

    def products(self, mode: Mode) -> list[Product]:
        """The matrix products of a step."""
        return self.forward + self.backward if mode == "training" else self.forward

    def run(self, mode: Mode) -> None:
        for product in self.products(mode):
            self.multiply(product)

    def multiply(self, product: Product) -> None:
        """Compute one batch of products."""
        with torch.no_grad():
            left, right, out = (self._operand(key) for key in operand_keys(product))
            torch.bmm(left, right, out=out)

    def _operand(self, key: tuple[int, ...]) -> Tensor:
        if key not in self._operands:
            self._operands[key] = torch.randn(key[:3], device=self._device, dtype=self._dtype)
        return self._operands[key]

    def flops(self, mode: Mode) -> int:
        """FLOPs of all products."""
        return sum(product.flops for product in self.products(mode))

    def memory(self, mode: Mode) -> int:
        """Size of all operands, which stay allocated, in bytes."""
        keys = {key for product in self.products(mode) for key in operand_keys(product)}
        return sum(batch * rows * columns for batch, rows, columns, _ in keys) * self._dtype.itemsize


def operand_keys(product: Product) -> list[tuple[int, int, int, int]]:
    """Shapes of both factors and of the result, each with its role."""
    _, batch, rows, inner, columns = product
    return [(batch, rows, inner, 0), (batch, inner, columns, 1), (batch, rows, columns, 2)]


def make_runner(candidate: Candidate, setting: LayerSetting) -> Runner:
    """Make a candidate runnable."""
    return LowerBoundRunner(setting) if candidate.name == LOWER_BOUND else LayerRunner(candidate, setting)


class LayerRow(NamedTuple):
    """One candidate in one mode."""

    candidate: str
    mode: str
    active: float | None
    """measured activation rate; None without a router"""
    parameters: int
    seconds: Quartiles | None
    """None if left out"""
    ratio: float | None
    """median time relative to the first candidate"""
    lower_bound_ratio: float | None
    """median time relative to the matmul lower bound, if that was measured"""
    memory: int | None
    """peak memory of the step in bytes"""
    memory_ratio: float | None
    """memory relative to the first candidate"""
    note: str
    """why it was left out"""


def run_layers(
    candidates: Sequence[Candidate],
    setting: LayerSetting,
    modes: Sequence[Mode] = MODES,
    *,
    rounds: int = 5,
    warmup: int = 1,
    memory: bool = True,
    progress: Callable[[str], None] = lambda message: None,
) -> list[LayerRow]:
    """Measure every candidate in every mode.

    Args:
        candidates: ratios are relative to the first.
        setting: sizes of the layers and of the batch.
        modes: training (forward and backward pass of the layer), inference (forward pass).
        rounds: timed rounds.
        warmup: untimed rounds before them.
        memory: whether to measure the peak memory.
        progress: called with a description of the next step.
    """
    free = available_memory(setting.device)
    # every layer needs at least input, output and their gradients
    least = 4 * setting.tokens * setting.d_model * setting.torch_dtype.itemsize
    if least > free:
        raise ValueError(
            f"{setting.where} need at least {format_bytes(least)}, {format_bytes(free)} are available"
        )
    for candidate in candidates:
        if candidate.name != LOWER_BOUND:
            # fail on wrong names and widths before minutes of measuring
            build(candidate, replace(setting, device="cpu", length=min(setting.length, SHORTEST)))
    peaks: dict[tuple[str, Mode], int] = {}
    left_out: dict[tuple[str, Mode], str] = {}
    for candidate in candidates if memory else ():
        for mode in modes:
            progress(f"memory of {candidate.label}")
            try:
                found = find_memory(candidate, setting, mode)
            except RuntimeError as error:
                left_out[candidate.label, mode] = f"{candidate.label}, {mode}: {error}"
            else:
                peaks[candidate.label, mode] = found
    runners = {
        candidate.label: make_runner(candidate, setting)
        for candidate in candidates
        if any((candidate.label, mode) not in left_out for mode in modes)
    }
    if not runners:
        raise ValueError(f"nothing fits: {next(iter(left_out.values()))}")
    rows = []
    for mode in modes:
        jobs: dict[str, Callable[[], None]] = {
            label: partial(runner.run, mode)
            for label, runner in runners.items()
            if (label, mode) not in left_out
        }
        progress(f"{mode}: {len(jobs)} candidates in turn, {warmup + rounds} rounds")
        times = {
            label: quartiles(values)
            for label, values in time_rounds(jobs, rounds, warmup, setting.device).items()
        }
        bound = next((times.get(c.label) for c in candidates if c.name == LOWER_BOUND), None)
        first, first_peak = times.get(candidates[0].label), peaks.get((candidates[0].label, mode))
        for label in (candidate.label for candidate in candidates):
            seconds, peak, runner = times.get(label), peaks.get((label, mode)), runners.get(label)
            rows.append(
                LayerRow(
                    candidate=label,
                    mode=mode,
                    active=runner.active() if runner is not None and seconds is not None else None,
                    parameters=runner.parameters if runner is not None else 0,
                    seconds=seconds,
                    ratio=_ratio(seconds, first),
                    lower_bound_ratio=_ratio(seconds, bound),
                    memory=peak,
                    memory_ratio=peak / first_peak if peak and first_peak else None,
                    note=left_out.get((label, mode), ""),
                )
            )
    return rows


def _ratio(one: Quartiles | None, other: Quartiles | None) -> float | None:
    return one.median / other.median if one is not None and other is not None else None


def measure_memory(candidate: Candidate, setting: LayerSetting, mode: Mode) -> int:
    """Bytes that a step needs, in this process."""
    runner = LayerRunner(candidate, setting)
    # the very first call loads libraries and starts threads; that of a compiled one, the compiler
    whole = runner if candidate.overrides.get("compiled") else LayerRunner(candidate, _short(setting))
    whole.run(mode)
    return extra_peak(partial(runner.run, mode), setting.device)


def _short(setting: LayerSetting) -> LayerSetting:
    return replace(setting, length=min(setting.length, SHORTEST), batch=1)


def find_memory(candidate: Candidate, setting: LayerSetting, mode: Mode) -> int:
    """Bytes that a step needs; in a separate process on the CPU, whose end is a RuntimeError."""
    if candidate.name == LOWER_BOUND:
        return LowerBoundRunner(setting).memory(mode)
    if setting.device == "cpu":
        return int(in_child(measure_memory, candidate, setting, mode))
    return measure_memory(candidate, setting, mode)


# tables: each column is defined in one place


class Column(NamedTuple):
    """One column: its heading, and its text for a row. A column that is empty in every row is left out."""

    head: str
    cell: Callable[[Any], str]


def print_table(title: str, columns: Sequence[Column], rows: Sequence[Any]) -> None:
    """Print a table: the first column names the rows, the others hold numbers."""
    cells = [[column.head, *(column.cell(row) for row in rows)] for column in columns]
    shown = [column for i, column in enumerate(cells) if i == 0 or any(column[1:])]
    print(f"\n{title}")
    for line in zip(*shown, strict=True):
        widths = [max(map(len, column)) for column in shown]
        numbers = (f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        print("  ".join((f"{line[0]:<{widths[0]}}", *numbers)))


def print_machine() -> None:
    """Print the hardware and software in one line."""
    found = machine()
    where = found["cuda"] or found["cpu"] or "unknown CPU"
    print(f"{where}, {found['threads']} of {found['cores']} cores, torch {found['torch']}")


def median_text(seconds: Quartiles | None) -> str:
    """The median as text; empty if there is none."""
    return "" if seconds is None else human_seconds(seconds.median)


def quartiles_text(seconds: Quartiles | None) -> str:
    """The quartiles relative to the median."""
    if seconds is None:
        return ""
    low, high = seconds.low / seconds.median - 1, seconds.high / seconds.median - 1
    return f"{low:+.0%} {high:+.0%}"


def ratio_text(ratio: float | None) -> str:
    """A ratio as text."""
    return "" if ratio is None else f"{ratio:.2f}x"


COLUMNS = (
    Column("candidate", lambda row: row.candidate),
    Column("active", lambda row: "" if row.active is None else f"{row.active:.0%}"),
    Column("median", lambda row: median_text(row.seconds) or "left out"),
    Column("quartiles", lambda row: quartiles_text(row.seconds)),
    Column("ratio", lambda row: ratio_text(row.ratio)),
    Column("x lower bound", lambda row: ratio_text(row.lower_bound_ratio)),
    Column("memory", lambda row: "" if row.memory is None else format_bytes(row.memory)),
    Column("ratio", lambda row: ratio_text(row.memory_ratio)),
)
"""Columns of the tables."""


def print_layers(rows: Sequence[LayerRow], setting: LayerSetting) -> None:
    """Print one table per mode, and what was left out."""
    print_machine()
    rate = "natural rate" if setting.rate is None else f"rate {setting.rate:g}"
    for mode in dict.fromkeys(row.mode for row in rows):
        what = "training step" if mode == "training" else mode
        title = f"{what}, {setting.where}, window {setting.window}, {rate}"
        print_table(title, COLUMNS, [row for row in rows if row.mode == mode])
    for note in dict.fromkeys(row.note for row in rows if row.note):
        print(f"left out: {note}")
