"""How many steps fit into a given time on this machine.

The number is measured before training and then fixed, so that a run of limited time is an ordinary run: its learning
rate reaches zero on its last step, and it resumes bit for bit.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from seqboat.core.checks import require
from seqboat.training.config import RunConfig
from seqboat.training.display import Display
from seqboat.training.loop import train

TRIAL = 24
"""Steps that are timed."""
UNTIMED = 4
"""Steps before them, which also load libraries and fill caches."""


def fit_minutes(config: RunConfig, minutes: float) -> RunConfig:
    """The configuration with as many steps as fit into some minutes, at most its own; warm-up shrinks alike.

    A short trial run in a temporary folder times the steps. Evaluation is not counted.

    Args:
        config: of the run.
        minutes: that training may take.
    """
    require(minutes > 0, f"minutes must be positive, got {minutes:g}")
    steps = config.schedule.steps
    fitting = int(60 * minutes / max(step_seconds(config), 1e-9))
    if fitting >= steps:
        return config
    fitting = max(fitting, 1)
    warmup = config.schedule.warmup_steps * fitting // steps
    return config.replace(schedule={"steps": fitting, "warmup_steps": warmup})


def step_seconds(
    config: RunConfig,
    clock: Callable[[], float] = time.monotonic,
    *,
    timed: int = TRIAL,
    untimed: int = UNTIMED,
) -> float:
    """Median time of a training step, from a short trial run.

    Args:
        config: of the run.
        clock: which seconds count: those of the wall clock, or of the processor.
        timed: steps that are timed.
        untimed: steps before them.
    """
    steps = untimed + timed
    trial = config.replace(
        schedule={"steps": steps, "warmup_steps": 0},
        training={"log_every": steps, "save_every": steps, "trackers": ()},
        evaluation={"every": steps, "limit": 1},
    )
    times = []
    with tempfile.TemporaryDirectory() as folder:
        train(trial, Path(folder) / "trial", display=Display(), on_step=lambda *_: times.append(clock()))
    return statistics.median(b - a for a, b in zip(times[untimed - 1 :], times[untimed:], strict=False))
