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

from seqboat.paper.machine import Machine
from seqboat.paper.target import Job, Target
from seqboat.paper.trial import Scale, Trial
from seqboat.training.checkpoint import CheckpointStore
from seqboat.training.config import difference
from seqboat.training.display import Display
from seqboat.training.trainer import RunOutcome, train


def chosen(
    trials: Sequence[Trial], only: Sequence[str], rows: Sequence[str] = (), tasks: Sequence[str] = ()
) -> list[Trial]:
    """Trials whose names are given or match a pattern, of the rows and tasks that are given; all by default."""

    return [
        trial
        for trial in trials
        if _matches(trial.name, only) and _matches(trial.row, rows) and _matches(trial.task, tasks)
    ]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def plan(
    target: Target,
    scale: Scale,
    folder: Path,
    seeds: int | None = None,
    only: Sequence[str] = (),
    rows: Sequence[str] = (),
    tasks: Sequence[str] = (),
    machine: Machine | None = None,
) -> list[Job]:
    """The runs of a target and the progress of each.

    Args:
        target: table or figure.
        scale: of the recipes.
        folder: holds a folder for every trial.
        seeds: how many, instead of each trial's own number.
        only: names of trials, or patterns with * and ?, to leave out all others.
        rows: short names of models, or patterns, likewise.
        tasks: short names of tasks, or patterns, likewise.
        machine: how to run them.

    Raises:
        ValueError: a run in the folder was made with other settings.
    """
    jobs = []
    for trial in chosen(target.trials(scale), only, rows, tasks):
        for seed in range(seeds or trial.seeds):
            run = folder / scale / trial.name / f"seed-{seed}"
            job = Job(target, scale, trial, seed, run, 0, trial.steps, False, machine or Machine())
            jobs.append(refreshed(job))
    return jobs


def refreshed(job: Job) -> Job:
    """The same run with its present progress: another process may have worked on it.

    Raises:
        ValueError: the run was made with other settings.
    """
    found = CheckpointStore(job.folder).newest() if job.folder.is_dir() else None
    if found is None:
        return job._replace(step=0, finished=False)
    before = found.config()
    other = difference(before, job.machine.configure(job.trial.config(job.seed), before))
    if other is not None:
        raise ValueError(f"{job.folder} was made with other settings: {other}; move it away to run it again")
    progress = found.state["progress"]
    return job._replace(step=int(progress["step"]), finished=bool(progress["finished"]))


def run_job(job: Job, display: Display | None = None) -> RunOutcome:
    """Train a run to its end, continuing where it stopped."""
    return train(job.config, job.folder, resume=True, display=display)


def estimate(jobs: Sequence[Job]) -> tuple[float, int]:
    """Processor minutes that the jobs should take, and how many of them have no estimate.

    A run that belongs to several targets counts once.
    """
    known = [job.minutes_left for job in {job.folder: job for job in jobs}.values()]
    return sum(m for m in known if m is not None), sum(m is None for m in known)
