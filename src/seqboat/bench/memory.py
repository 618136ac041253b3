"""Estimate memory and time of a step from smaller ones: steps that would not fit are skipped, not tried.

Memory is what a step needs beyond what was in use before: from CUDA's allocator, or, on the CPU, the peak resident
set of a process that runs nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from seqboat.bench.candidates import LOWER_BOUND, Candidate
from seqboat.bench.measure import available_memory, extra_peak, extrapolate, in_child, time_rounds
from seqboat.bench.runners import LayerRunner, LowerBoundRunner
from seqboat.bench.setting import LayerSetting, Mode

SHORTEST = 32
"""Shortest sequence to estimate memory from, in tokens."""
PILOT = 512
"""Largest batch to estimate memory from; larger batches are scaled in proportion."""
FEWEST = 4
"""Smallest batch to estimate memory from, if sequences are short."""


class StepMemory(NamedTuple):
    """Memory of a step, in bytes."""

    estimate: dict[str, int]
    """by mode, estimated from smaller steps"""
    peak: dict[str, int]
    """by mode, measured; without modes that would not fit or take too long"""
    seconds: dict[str, float] = {}  # noqa: RUF012 - never changed
    """by mode, time of a step estimated from smaller steps"""


def smaller_steps(setting: LayerSetting) -> tuple[str, list[int], int]:
    """The smaller steps to estimate from: shorter sequences, or smaller batches if sequences are already short.

    Returns:
        The name of the field, its values in ascending order (each twice the one before, at most a quarter of the full
        value), and the full value.
    """
    short = setting.length < 16 * SHORTEST
    field, value, whole = ("batch", FEWEST, setting.batch) if short else ("length", SHORTEST, setting.length)
    values = []
    while 4 * value <= whole:
        values.append(value)
        value *= 2
    return field, values, whole


def measure_memory(
    candidate: Candidate,
    setting: LayerSetting,
    modes: Sequence[Mode],
    available: int,
    whole: bool = True,
    slowest: float = math.inf,
) -> StepMemory:
    """Estimate the memory of each mode, and measure it if it fits.

    Args:
        candidate: what to measure.
        setting: of the layer.
        modes: to measure.
        available: memory limit in bytes.
        whole: whether to measure the full setting after the estimate.
        slowest: maximum estimated seconds per step.
    """
    # estimated without compiling, which would be repeated for every size
    plain = candidate._replace(overrides={k: v for k, v in candidate.overrides.items() if k != "compiled"})
    # the very first call loads libraries and starts threads
    tiny = LayerRunner(plain, replace(setting, length=min(setting.length, SHORTEST), batch=1))
    for mode in modes:
        tiny.run(mode)
    field, values, full = smaller_steps(setting)
    pilot = min(setting.batch, PILOT) if field == "length" else setting.batch
    sizes: list[int] = []
    short: dict[str, list[int]] = {mode: [] for mode in modes}
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for value in values:
        # an estimate needs three points; take more while they use little of the memory available
        if len(sizes) >= 3 and 16 * max(found[-1] for found in short.values()) >= available:
            break
        sizes.append(value)
        runner = LayerRunner(plain, replace(setting, **{"batch": pilot, field: value}))  # type: ignore[arg-type]
        for mode in modes:
            job = partial(runner.run, mode)
            short[mode].append(extra_peak(job, setting.device))
            # the faster of two: extrapolation would magnify an interruption of a short step
            times[mode].append(min(time_rounds({mode: job}, 2, 0, setting.device)[mode]))
        del runner
    estimate: dict[str, int] = {}
    seconds: dict[str, float] = {}
    # twice the sequences take twice the memory; twice the length may take four times as much
    degree = 1 if field == "batch" else 2
    for mode in modes if len(sizes) >= 3 else ():
        factor = setting.batch / pilot
        nanoseconds = [round(1e9 * t) for t in times[mode][-3:]]
        estimate[mode] = round(factor * extrapolate(sizes[-3:], short[mode][-3:], full, degree))
        seconds[mode] = factor * extrapolate(sizes[-3:], nanoseconds, full, degree) / 1e9
    fitting = [
        mode for mode in modes if estimate.get(mode, 0) <= available and seconds.get(mode, 0.0) <= slowest
    ]
    peak: dict[str, int] = {}
    if whole and fitting:
        layer = LayerRunner(candidate, setting)
        for mode in fitting:
            if candidate.overrides.get("compiled"):
                layer.run(mode)  # the memory of the compiler is not counted
            peak[mode] = extra_peak(partial(layer.run, mode), setting.device)
    return StepMemory(estimate, peak, seconds)


def find_memory(
    candidate: Candidate, setting: LayerSetting, modes: Sequence[Mode], measure: bool, slowest: float
) -> StepMemory:
    """Estimates for a candidate, and its peaks if requested; in a separate process on the CPU."""
    free = available_memory(setting.device)
    # every layer needs at least input, output and their gradients
    least = 4 * setting.tokens * setting.d_model * setting.torch_dtype.itemsize
    if least > free:
        return StepMemory(dict.fromkeys(modes, least), {})
    if candidate.name == LOWER_BOUND:
        products = LowerBoundRunner(setting)
        return StepMemory({mode: products.memory(mode) for mode in modes}, {})
    if not measure and len(smaller_steps(setting)[1]) < 3:
        return StepMemory({}, {})
    arguments = (candidate, setting, modes, free, measure, slowest)
    if setting.device == "cpu":
        return in_child(measure_memory, *arguments)
    return measure_memory(*arguments)
