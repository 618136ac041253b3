"""Running the paper's experiments: which runs are finished, which are left, and what was measured.

    for job in plan([TARGETS["lra"]], "small", folder):     each run, and its progress
        run_job(job)                                        trains, or continues where it stopped
        add_row(folder / "results.jsonl", collect(job))     numbers of the finished run, as plain data

A run that belongs to several targets is one job. How runs are carried out may differ from machine to machine without
changing the experiment: fields of training, as `seqboat train` takes them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch

from seqboat.core.checks import require
from seqboat.data.store import MissingData
from seqboat.paper.target import OnProgress, Row, Target, on_accelerator
from seqboat.paper.trial import Scale, Trial
from seqboat.run import Run
from seqboat.training.checkpoint import CheckpointStore
from seqboat.training.config import FREE_TO_CHANGE, RunConfig, TrainingConfig
from seqboat.training.display import Display
from seqboat.training.parallel import choose_device
from seqboat.training.settings_io import difference, override, split_arguments
from seqboat.training.trainer import RunOutcome, train

EXPERIMENT = ("batch_size", "bucketing", "carry_state", "carry_segments")
"""Fields of training that belong to the experiment."""
KEPT = tuple(
    field.name
    for field in dataclasses.fields(TrainingConfig)
    if field.name not in EXPERIMENT and f"training.{field.name}" not in FREE_TO_CHANGE
)
"""Fields that a run keeps from its first step on, such as its precision."""
DATA_FOLDER = ("data.data_dir", "task.data_dir")
"""Both names of the setting."""


class Job(NamedTuple):
    """One run of a trial."""

    scale: Scale
    trial: Trial
    seed: int
    folder: Path
    targets: tuple[Target, ...]
    """those that show it"""
    settings: tuple[str, ...] = ()
    """how it is carried out"""
    step: int = 0
    """steps done"""
    finished: bool = False

    @property
    def config(self) -> RunConfig:
        """The configuration of the run on this machine."""
        found = CheckpointStore(self.folder).newest() if self.folder.is_dir() else None
        return configure(
            self.trial.config(self.seed), self.settings, None if found is None else found.config()
        )


def check_settings(settings: Sequence[str]) -> None:
    """Refuse settings that would make it another experiment."""
    for name, _ in split_arguments(settings):
        part, _, field = name.partition(".")
        require(
            (part == "training" and field not in EXPERIMENT) or name in DATA_FOLDER,
            f"only how runs are carried out can be changed (--training.FIELD), got --{name}: "
            "another experiment is a run of `seqboat train`",
        )


def configure(config: RunConfig, settings: Sequence[str], before: RunConfig | None = None) -> RunConfig:
    """The configuration of a run on this machine.

    Args:
        config: of the experiment.
        settings: how it is carried out; tasks that generate their examples need no data folder.
        before: of the run so far, if it has begun: it keeps its precision and the like unless they are given.
    """
    if before is not None:
        config = config.replace(training={name: getattr(before.training, name) for name in KEPT})
    if not hasattr(config.task, "data_dir"):
        kept = [(name, words) for name, words in split_arguments(settings) if name not in DATA_FOLDER]
        settings = [word for name, words in kept for word in (f"--{name}", *words)]
    return override(config, settings)


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
    targets: Sequence[Target],
    scale: Scale,
    folder: Path,
    seeds: int | None = None,
    only: Sequence[str] = (),
    rows: Sequence[str] = (),
    tasks: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> list[Job]:
    """The runs of some targets and the progress of each; one that several targets show is run once.

    Args:
        targets: tables and figures.
        scale: of the recipes.
        folder: holds a folder for every trial.
        seeds: how many, instead of each trial's own number.
        only: names of trials, or patterns with * and ?, to leave out all others.
        rows: short names of models, or patterns, likewise.
        tasks: short names of tasks, or patterns, likewise.
        settings: how to run them.

    Raises:
        ValueError: a run in the folder was made with other settings.
    """
    check_settings(settings)
    jobs: dict[Path, Job] = {}
    for target in targets:
        for trial in chosen(target.trials(scale), only, rows, tasks):
            for seed in range(seeds or trial.seeds):
                run = folder / scale / trial.name / f"seed-{seed}"
                if run not in jobs:
                    jobs[run] = refreshed(Job(scale, trial, seed, run, (), tuple(settings)))
                jobs[run] = jobs[run]._replace(targets=(*jobs[run].targets, target))
    return list(jobs.values())


def refreshed(job: Job) -> Job:
    """The same run with its present progress: another process may have worked on it.

    Raises:
        ValueError: the run was made with other settings.
    """
    found = CheckpointStore(job.folder).newest() if job.folder.is_dir() else None
    if found is None:
        return job._replace(step=0, finished=False)
    before = found.config()
    other = difference(before, configure(job.trial.config(job.seed), job.settings, before))
    if other is not None:
        raise ValueError(f"{job.folder} was made with other settings: {other}; move it away to run it again")
    progress = found.state["progress"]
    return job._replace(step=int(progress["step"]), finished=bool(progress["finished"]))


def run_job(job: Job, display: Display | None = None) -> RunOutcome:
    """Train a run to its end, continuing where it stopped."""
    return train(job.config, job.folder, resume=True, display=display)


def missing(job: Job) -> list[str]:
    """What keeps a run from being the paper's experiment, or from running at all."""
    found = []
    try:
        task = job.config.build_task()
        task.dataset("train")
        task.dataset(job.config.evaluation.split)
    except MissingData:
        found.append("data not prepared")
    if "ours" in job.trial.source:
        found.append("settings partly ours")
    return found


def parameters(job: Job) -> int:
    """Parameters of the model of a run, which is not made for that."""
    with torch.device("meta"):
        model = job.config.build_model()
    return sum(parameter.numel() for parameter in model.parameters())


# what a finished run showed


def collect(job: Job, known: Row | None = None, progress: OnProgress | None = None) -> Row:
    """The row of a finished run: its score on held-out data, what it took, and what its targets observe.

    Args:
        job: finished.
        known: its row as it was, of which a part may be missing.
        progress: called while batches are computed.
    """
    run = Run(job.folder)
    device = choose_device(job.config.training.device)
    if known is None or known["best"] != run.step:
        known = _score(job, run, device, progress)
    observed = known["observed"]
    for target in job.targets:
        if target.observe is not None and target.name not in observed:
            observed = observed | {target.name: target.observe(run, device, progress)}
    return known | {"observed": observed}


def _score(job: Job, run: Run, device: torch.device, progress: OnProgress | None) -> Row:
    about, metrics, task = run.about, run.metrics, run.task
    found: Row = {
        "trial": job.trial.name,
        "scale": job.scale,
        "seed": job.seed,
        "recipe": job.trial.recipe,
        "settings": list(job.trial.arguments),
        "commit": about.get("commit"),
        "versions": about["versions"],
        "device": about.get("device"),
        "steps": job.trial.steps,
        "best": run.step,
        "data": about.get("data"),
    }
    now = time.perf_counter if on_accelerator(found) else time.process_time
    began = now()
    score = run.evaluate("test", progress=progress, device=device)
    taken = now() - began
    held = [record for record in metrics if record["split"] == run.config.evaluation.split]
    return found | {
        "score": {
            "split": "test",
            "metric": task.metric,
            "better": task.better,
            "value": score[task.metric],
            "examples": score["examples"],
        },
        "curve": [[record["step"], record[task.metric]] for record in held],
        "activation": score["activation"],
        "cost": {
            "seconds": per_step(metrics, "elapsed"),
            "processor_seconds": per_step(metrics, "processor"),
            "memory_mb": step_memory(metrics),
            "eval_examples_per_s": score["examples"] / taken,
            "parameters": about["parameters"],
            "processes": about.get("processes", 1),
            "threads": about.get("threads"),
            "minutes": max(record.get("elapsed", 0.0) for record in metrics) / 60,
            "processor_minutes": max(record.get("processor", 0.0) for record in metrics) / 60,
        },
        "observed": {},
    }


def per_step(records: Sequence[Mapping[str, Any]], clock: str) -> float | None:
    """Seconds of a training step, averaged over a run, without evaluations and saving.

    Args:
        records: of metrics.jsonl. None is returned if a record of training lacks the clock.
        clock: "elapsed" for wall time, or "processor".
    """
    before = spent = 0.0
    steps = 0
    for record in records:
        if record["split"] == "train":
            if clock not in record:
                return None
            spent += record[clock] - before
            steps = record["step"]
        before = record.get(clock, before)
    return spent / steps if steps else None


def step_memory(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Allocated memory of a training step in MB, averaged over a run; None where it was not recorded."""
    before = 0
    total = 0.0
    for record in records:
        if record["split"] == "train":
            if "step_memory_mb" not in record:
                return None
            total += record["step_memory_mb"] * (record["step"] - before)
            before = record["step"]
    return total / before if before else None
