"""Memory and time of a step before it is run, from smaller ones: what would not fit is refused, not tried.

Memory is what a step needs beyond what was there before it: from CUDA's allocator, or, on the CPU, the peak of the
resident set of a process in which nothing else runs.
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
"""Tokens of the shortest sequence from which memory is estimated."""
PILOT = 512
"""Sequences of a batch from which memory is estimated, at most; the rest is in proportion."""
FEWEST = 4
"""Sequences of the smallest batch from which memory is estimated where sequences are short."""


class StepMemory(NamedTuple):
    """Memory of a step, in bytes."""

    estimate: dict[str, int]
    """by mode, from smaller steps"""
    peak: dict[str, int]
    """by mode, measured; modes that would not fit or take too long are missing"""
    seconds: dict[str, float] = {}  # noqa: RUF012 - never changed
    """by mode, how long a step should take, from smaller steps"""


def smaller_steps(setting: LayerSetting) -> tuple[str, list[int], int]:
    """How a setting is approached: by its length, or by its batch where sequences are too short for that.

    Returns:
        The field, its values from the smallest on, each twice the one before and at most a quarter of the whole, and
        the whole.
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
        modes: which.
        available: bytes that may be used.
        whole: whether to measure the whole setting after the estimate.
        slowest: seconds that a step may take, by its estimate.
    """
    # estimates come from the layer as it is: compiled, every size would have to be compiled again
    plain = candidate._replace(overrides={k: v for k, v in candidate.overrides.items() if k != "compiled"})
    # the first call of all loads libraries and starts threads
    tiny = LayerRunner(plain, replace(setting, length=min(setting.length, SHORTEST), batch=1))
    for mode in modes:
        tiny.run(mode)
    field, values, full = smaller_steps(setting)
    pilot = min(setting.batch, PILOT) if field == "length" else setting.batch
    sizes: list[int] = []
    short: dict[str, list[int]] = {mode: [] for mode in modes}
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for value in values:
        # an estimate takes three; then more, while four times the memory is a small part of what there is
        if len(sizes) >= 3 and 16 * max(found[-1] for found in short.values()) >= available:
            break
        sizes.append(value)
        runner = LayerRunner(plain, replace(setting, **{"batch": pilot, field: value}))  # type: ignore[arg-type]
        for mode in modes:
            job = partial(runner.run, mode)
            short[mode].append(extra_peak(job, setting.device))
            # the better of two: an interruption of a short step would grow with the square of the length
            times[mode].append(min(time_rounds({mode: job}, 2, 0, setting.device)[mode]))
        del runner
    estimate: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for mode in modes if len(sizes) >= 3 else ():
        factor = setting.batch / pilot
        nanoseconds = [round(1e9 * t) for t in times[mode][-3:]]
        estimate[mode] = round(factor * extrapolate(sizes[-3:], short[mode][-3:], full))
        seconds[mode] = factor * extrapolate(sizes[-3:], nanoseconds, full) / 1e9
    fitting = [
        mode for mode in modes if estimate.get(mode, 0) <= available and seconds.get(mode, 0.0) <= slowest
    ]
    peak: dict[str, int] = {}
    if whole and fitting:
        layer = LayerRunner(candidate, setting)
        for mode in fitting:
            if candidate.overrides.get("compiled"):
                layer.run(mode)  # the compiler's own memory does not count
            peak[mode] = extra_peak(partial(layer.run, mode), setting.device)
    return StepMemory(estimate, peak, seconds)


def find_memory(
    candidate: Candidate, setting: LayerSetting, modes: Sequence[Mode], measure: bool, slowest: float
) -> StepMemory:
    """Estimates of a candidate, and its peaks if they are asked for; in a separate process on the CPU."""
    free = available_memory(setting.device)
    # input, output and their gradients are the least that any layer needs
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
