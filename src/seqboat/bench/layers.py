"""Time and memory of layers, side by side in one run.

Candidates take turns in every round, so that other load on the machine affects all of them alike; the tables show
the median and quartiles over the rounds, and the ratio to the first candidate of the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from seqboat.bench.candidates import LOWER_BOUND, Candidate, build
from seqboat.bench.measure import (
    Quartiles,
    available_memory,
    human_bytes,
    human_seconds,
    quartiles,
    time_rounds,
)
from seqboat.bench.memory import SHORTEST, StepMemory, find_memory
from seqboat.bench.runners import Runner, make_runner
from seqboat.bench.setting import MODES, LayerSetting, Mode
from seqboat.bench.tables import (
    Column,
    median_text,
    print_machine,
    print_table,
    quartiles_text,
    ratio_text,
)

if TYPE_CHECKING:
    from rich.console import Console


class LayerRow(NamedTuple):
    """One candidate in one mode under one setting."""

    candidate: str
    mode: str
    batch: int
    length: int
    window: int
    rate: float | None
    """requested activation rate"""
    active: float | None
    """measured activation rate; None without a router"""
    parameters: int
    seconds: Quartiles | None
    """None if skipped"""
    ratio: float | None
    """median time relative to the first candidate"""
    lower_bound_ratio: float | None
    """median time relative to the matmul lower bound, if that was measured"""
    memory: int | None
    """peak memory of the step in bytes"""
    memory_ratio: float | None
    """memory relative to the first candidate"""
    memory_estimate: int | None
    note: str
    """why it was skipped"""


def _memory_text(row: LayerRow) -> str:
    refused = row.seconds is None
    memory = row.memory_estimate if refused else row.memory
    return "" if memory is None else f"~ {human_bytes(memory)}" if refused else human_bytes(memory)


COLUMNS = (
    Column("candidate", lambda row: row.candidate),
    Column("active", lambda row: "" if row.active is None else f"{row.active:.0%}"),
    Column("median", lambda row: median_text(row.seconds) or "refused"),
    Column("quartiles", lambda row: quartiles_text(row.seconds)),
    Column("ratio", lambda row: ratio_text(row.ratio)),
    Column("x lower bound", lambda row: ratio_text(row.lower_bound_ratio)),
    Column("memory", _memory_text),
    Column("ratio", lambda row: ratio_text(row.memory_ratio)),
)
"""Columns of the tables."""
FEW = 3
"""Maximum number of reasons in an error message."""


def print_layers(console: Console, rows: Sequence[LayerRow]) -> None:
    """Print one table per mode and setting, and what was skipped."""
    print_machine(console)
    for _, group in groupby(rows, lambda row: (row.mode, row.batch, row.length, row.window, row.rate)):
        found = list(group)
        first = found[0]
        what = "training step" if first.mode == "training" else first.mode
        rate = "natural rate" if first.rate is None else f"rate {first.rate:g}"
        title = f"{what}, {first.batch} x {first.length} tokens, window {first.window}, {rate}"
        print_table(console, title, COLUMNS, found)
    for note in dict.fromkeys(row.note for row in rows if row.note):
        console.print(f"refused: {note}", highlight=False, soft_wrap=True)


def run_layers(
    candidates: Sequence[Candidate],
    settings: Sequence[LayerSetting],
    modes: Sequence[Mode] = MODES,
    *,
    rounds: int = 5,
    warmup: int = 1,
    memory: bool = True,
    slowest: float = math.inf,
    progress: Callable[[str], None] = lambda message: None,
) -> list[LayerRow]:
    """Measure every candidate under every setting in every mode.

    Args:
        candidates: ratios are relative to the first.
        settings: take turns like the candidates, so that they can be compared too.
        modes: training (forward and backward pass of the layer), inference (forward pass).
        rounds: timed rounds.
        warmup: untimed rounds before them.
        memory: whether to measure the peak memory.
        slowest: maximum seconds per step; candidates with a higher estimate are skipped.
        progress: called with a description of the next step.
    """
    for candidate in candidates:
        for setting in settings:
            if candidate.name != LOWER_BOUND:
                # fail on wrong names and widths before minutes of measuring
                build(candidate, replace(setting, device="cpu", length=min(setting.length, SHORTEST)))
    plans = [_plan(candidates, setting, modes, memory, slowest, progress) for setting in settings]
    if not any(plan.runners for plan in plans):
        notes = [note for plan in plans for note in plan.refused.values()]
        more = f"; and {len(notes) - FEW} more" if len(notes) > FEW else ""
        raise ValueError(f"nothing fits: {'; '.join(notes[:FEW])}{more}")
    rows = []
    for mode in modes:
        # settings take turns too: a machine that slows down must not affect only the last one
        jobs: dict[tuple[int, str], Callable[[], None]] = {
            (i, label): partial(runner.run, mode)
            for i, plan in enumerate(plans)
            for label, runner in plan.runners.items()
            if (label, mode) not in plan.refused
        }
        progress(f"{mode}: {len(jobs)} candidates and settings in turn, {warmup + rounds} rounds")
        times = {
            key: quartiles(values)
            for key, values in time_rounds(jobs, rounds, warmup, settings[0].device).items()
        }
        for i, plan in enumerate(plans):
            rows += _rows(candidates, plan, mode, {label: t for (j, label), t in times.items() if j == i})
    order = {setting: i for i, setting in reversed(list(enumerate(settings)))}
    return [row for _, row in sorted(rows, key=lambda pair: order[pair[0]])]


class _Plan(NamedTuple):
    """What to run under a setting, and what to skip."""

    setting: LayerSetting
    memory: dict[str, StepMemory]
    """by candidate"""
    refused: dict[tuple[str, str], str]
    """reasons, by candidate and mode"""
    runners: dict[str, Runner]
    """by candidate"""


def _plan(
    candidates: Sequence[Candidate],
    setting: LayerSetting,
    modes: Sequence[Mode],
    memory: bool,
    slowest: float,
    progress: Callable[[str], None],
) -> _Plan:
    found: dict[str, StepMemory] = {}
    refused: dict[tuple[str, str], str] = {}
    for candidate in candidates:
        progress(f"{setting.where}: memory of {candidate.label}")
        found[candidate.label] = find_memory(candidate, setting, modes, memory, slowest)
        for mode in modes:
            need = found[candidate.label].estimate.get(mode, 0)
            free = available_memory(setting.device)
            if need > free:
                refused[candidate.label, mode] = (
                    f"{candidate.label} at {setting.where} would need about {human_bytes(need)} for {mode}, "
                    f"{human_bytes(free)} are available"
                )
            elif (long := found[candidate.label].seconds.get(mode, 0.0)) > slowest:
                refused[candidate.label, mode] = (
                    f"{candidate.label} at {setting.where} would take about {human_seconds(long)} for {mode}, "
                    f"{human_seconds(slowest)} are allowed"
                )
    runners = {
        candidate.label: make_runner(candidate, setting)
        for candidate in candidates
        if any((candidate.label, mode) not in refused for mode in modes)
    }
    return _Plan(setting, found, refused, runners)


def _rows(
    candidates: Sequence[Candidate], plan: _Plan, mode: Mode, times: Mapping[str, Quartiles]
) -> list[tuple[LayerSetting, LayerRow]]:
    """The rows of one mode, each with its setting."""
    setting = plan.setting
    bound = next((times.get(c.label) for c in candidates if c.name == LOWER_BOUND), None)
    first = times.get(candidates[0].label)
    first_peak = plan.memory[candidates[0].label].peak.get(mode)
    rows = []
    for candidate in candidates:
        label = candidate.label
        seconds, peak = times.get(label), plan.memory[label].peak.get(mode)
        runner = plan.runners.get(label)
        row = LayerRow(
            candidate=label,
            mode=mode,
            batch=setting.batch,
            length=setting.length,
            window=setting.window,
            rate=setting.rate,
            active=runner.active() if runner is not None and seconds is not None else None,
            parameters=runner.parameters if runner is not None else 0,
            seconds=seconds,
            ratio=_ratio(seconds, first),
            lower_bound_ratio=_ratio(seconds, bound),
            memory=peak,
            memory_ratio=peak / first_peak if peak and first_peak else None,
            memory_estimate=plan.memory[label].estimate.get(mode),
            note=plan.refused.get((label, mode), ""),
        )
        rows.append((setting, row))
    return rows


def _ratio(one: Quartiles | None, other: Quartiles | None) -> float | None:
    return one.median / other.median if one is not None and other is not None else None
