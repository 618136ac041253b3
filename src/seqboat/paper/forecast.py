"""What a run will take and what it lacks, before it starts: the lines of `seqboat reproduce --dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from seqboat.data.store import MissingData
from seqboat.paper.target import Job
from seqboat.training.plan import estimate

HEAD = (
    f"  {'name':26s} {'model':18s} {'task':16s} {'steps':>9s} {'parameters':>11s} "
    f"{'batch':>14s} {'memory':>9s}  missing, and the command"
)


class Forecast(NamedTuple):
    """What a run will take."""

    parameters: int
    batch: int
    """examples per step"""
    micro_batch: int
    """examples at a time on each device: as many as fit"""
    memory: float
    """bytes on each device"""
    missing: list[str]
    """what keeps it from running, or from being the paper's experiment"""


def forecast(job: Job, memory: float) -> Forecast:
    """Estimate a run on devices of a size, without data and without training.

    Args:
        job: the run.
        memory: bytes of each device.
    """
    config = job.config
    found = estimate(config, processes=job.machine.processes, memory=memory)
    missing = []
    if not found.fits:
        missing.append(f"too large: one example at a time needs {found.memory / 1e9:.0f} GB")
    try:
        task = config.build_task()
        task.dataset("train")
        task.dataset(config.evaluation.split)
    except MissingData:
        missing.append("data not prepared")
    if "ours" in job.trial.source:
        missing.append("settings partly ours")
    return Forecast(found.parameters, config.training.batch_size, found.micro_batch, found.memory, missing)


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
        f"{what.parameters:>11,} {f'{what.batch} by {what.micro_batch}':>14s} {what.memory / 1e9:>6.2f} GB  "
        f"{'; '.join([*state, *what.missing]) or 'nothing'}: {trial.command()}"
    )
