"""What a run will take and what it lacks, before it starts: the lines of `seqboat reproduce --dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from seqboat.data.store import MissingData
from seqboat.paper.matching import count_of_run
from seqboat.paper.targets.base import Job

HEAD = (
    f"  {'name':26s} {'model':18s} {'task':16s} {'steps':>9s} {'parameters':>11s} "
    f"{'batch':>6s}  missing, and the command"
)


class Forecast(NamedTuple):
    """What a run will take."""

    parameters: int
    batch: int
    """examples per step"""
    missing: list[str]
    """what keeps it from running, or from being the paper's experiment"""


def forecast(job: Job) -> Forecast:
    """Sizes of a run and what it lacks, without data and without training."""
    config = job.config
    missing = []
    try:
        task = config.build_task()
        task.dataset("train")
        task.dataset(config.evaluation.split)
    except MissingData:
        missing.append("data not prepared")
    if "ours" in job.trial.source:
        missing.append("settings partly ours")
    return Forecast(count_of_run(config), config.training.batch_size, missing)


def line(jobs: Sequence[Job], what: Forecast) -> str:
    """The seeds of a trial in a line: progress, sizes, what is missing, and the command."""
    trial = jobs[0].trial
    done = sum(job.finished for job in jobs)
    begun = [job for job in jobs if job.step and not job.finished]
    state = [f"{done} of {len(jobs)} seeds finished"] if done else []
    state += [f"seed {job.seed} continues after step {job.step:,}" for job in begun]
    seeds = f" x {len(jobs)}" if len(jobs) > 1 else ""
    return (
        f"  {trial.name:26s} {trial.title:18s} {trial.task_title:16s} {f'{trial.steps:,}{seeds}':>9s} "
        f"{what.parameters:>11,} {what.batch:>6d}  "
        f"{'; '.join([*state, *what.missing]) or 'nothing'}: {trial.command()}"
    )
