"""Running the paper's experiments: which runs are finished, which are left, and how long they take.

    target = TARGETS["lra"]
    for job in plan(target, "small", folder):      each run of it, and its progress
        run_job(job)                               trains, or continues where it stopped
        record = target.collect(job)               numbers of the finished run, as plain data

`results.py` keeps the records and writes them down beside the paper's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from seqboat.paper.targets.base import Job, Target
from seqboat.paper.trials import Bench, Scale, Trial
from seqboat.training.checkpoint import CheckpointStore
from seqboat.training.config import difference
from seqboat.training.display import Display
from seqboat.training.loop import RunOutcome, train

Part = TypeVar("Part", Trial, Bench)


def chosen(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """Parts whose names are given or match a pattern; all of them if there is no name."""
    return [part for part in parts if not only or any(fnmatchcase(part.name, pattern) for pattern in only)]


def plan(
    target: Target, scale: Scale, folder: Path, seeds: int | None = None, only: Sequence[str] = ()
) -> list[Job]:
    """The runs of a target and the progress of each.

    Args:
        target: table or figure.
        scale: of the recipes.
        folder: holds a folder for every trial.
        seeds: how many, instead of each trial's own number.
        only: names of trials, or patterns with * and ?, to leave out all others.

    Raises:
        ValueError: a run in the folder was made with other settings.
    """
    jobs = []
    for trial in chosen(target.trials(scale), only):
        for seed in range(seeds or trial.seeds):
            run = folder / scale / trial.name / f"seed-{seed}"
            step, finished = _progress(run, trial, seed)
            jobs.append(Job(target, scale, trial, seed, run, step, trial.steps, finished))
    return jobs


def _progress(run: Path, trial: Trial, seed: int) -> tuple[int, bool]:
    """Steps done, and whether that is all."""
    found = CheckpointStore(run).newest() if run.is_dir() else None
    if found is None:
        return 0, False
    other = difference(found.config(), trial.config(seed))
    if other is not None:
        raise ValueError(f"{run} was made with other settings: {other}; move it away to run it again")
    progress = found.state["progress"]
    return int(progress["step"]), bool(progress["finished"])


def refreshed(job: Job) -> Job:
    """The same run with its present progress: another process may have worked on it."""
    step, finished = _progress(job.folder, job.trial, job.seed)
    return job._replace(step=step, finished=finished)


def run_job(job: Job, display: Display | None = None) -> RunOutcome:
    """Train a run to its end, continuing where it stopped."""
    return train(job.trial.config(job.seed), job.folder, resume=True, display=display)


def estimate(jobs: Sequence[Job]) -> tuple[float, int]:
    """Processor minutes that the jobs should take, and how many of them have no estimate.

    A run that belongs to several targets counts once.
    """
    known = [job.minutes_left for job in {job.folder: job for job in jobs}.values()]
    return sum(m for m in known if m is not None), sum(m is None for m in known)
