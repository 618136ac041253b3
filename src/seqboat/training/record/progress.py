"""How far a run is, as its checkpoints know it."""

from __future__ import annotations

import math
from typing import NamedTuple

from seqboat.core.checks import short
from seqboat.training.checkpoint import Checkpoint, CheckpointError
from seqboat.training.precision import LossScale


class TrainingProgress(NamedTuple):
    """What a run knows besides weights; part of every checkpoint."""

    step: int = 0
    best: float | None = None
    best_step: int | None = None
    waited: int = 0
    """evaluations since the best one"""
    skipped: int = 0
    """steps in a row, up to now, that were not applied"""
    skipped_in_all: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    """seconds of training and evaluation, over all processes that worked on the run one after the other"""
    processor: float = 0.0
    """seconds of processor time of the first process, which a busy machine does not stretch"""
    finished: bool = False
    dead: dict[str, int] | None = None
    """modules without an activated token: the step since when; 0 once that was reported"""
    evaluation_due: bool = False
    """whether the evaluation after this step was interrupted and must still happen"""
    loss_scale: tuple[float, int] | None = None
    """of fp16 training: the scale, and the steps since it changed"""


def read_progress(found: Checkpoint, steps: int) -> TrainingProgress:
    """The progress in a checkpoint; CheckpointError if no run of this many steps can have it."""
    try:
        progress = TrainingProgress(**found.state["progress"])
        counts = (progress.waited, progress.skipped, progress.skipped_in_all, progress.tokens)
        sound = (
            type(progress.step) is int
            and found.step == progress.step
            and 0 <= progress.step <= steps
            and (progress.best_step is None or 0 <= progress.best_step <= progress.step)
            and all(type(count) is int and count >= 0 for count in counts)
            and all(math.isfinite(s) and s >= 0 for s in (progress.elapsed, progress.processor))
            and (progress.loss_scale is None or LossScale(*progress.loss_scale).scale > 0)
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{found.path}: its progress does not fit: {error}") from error
    if not sound:
        raise CheckpointError(
            f"{found.path}: its progress is impossible in a run of {steps} steps: {short(progress._asdict())}"
        )
    return progress
