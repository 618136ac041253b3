"""What every target of `seqboat reproduce` can do: say what it consists of, collect a finished run, and show itself.

There are two families: targets that score trained runs, and targets that look at what the layers of trained runs do.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from seqboat.data.files import write_json
from seqboat.paper.machine import Machine
from seqboat.paper.tables import Pictures, Record, Records
from seqboat.paper.trial import Scale, Trial
from seqboat.run import Run
from seqboat.training.checkpoint import CheckpointStore
from seqboat.training.config import RunConfig
from seqboat.training.parallel import choose_device

OnProgress = Callable[[int, int], None]
"""Called with the batches done and all."""

TEST = "test.json"
"""In a run's folder: its score on held-out data, so that a second call need not compute it again."""


class Job(NamedTuple):
    """One run of a trial."""

    target: Target
    scale: Scale
    trial: Trial
    seed: int
    folder: Path
    step: int
    """steps done"""
    steps: int
    finished: bool
    machine: Machine = Machine()

    @property
    def config(self) -> RunConfig:
        """The configuration of the run on this machine."""
        found = CheckpointStore(self.folder).newest() if self.folder.is_dir() else None
        return self.machine.configure(self.trial.config(self.seed), None if found is None else found.config())

    @property
    def device(self) -> torch.device:
        """Where its model is scored and looked at: the device that it is trained on."""
        return choose_device(self.config.training.device)

    @property
    def minutes_left(self) -> float | None:
        """Processor minutes that it should take; None where that is unknown."""
        if self.finished:
            return 0.0
        if self.trial.minutes is None:
            return None
        return self.trial.minutes * (1 - self.step / self.steps)

    def about(self) -> dict[str, Any]:
        """What the run wrote down about itself."""
        return Run(self.folder).about

    def origin(self) -> Record:
        """Where a record of the run comes from."""
        about = self.about()
        return {
            "target": self.target.name,
            "scale": self.scale,
            "trial": self.trial.name,
            "seed": self.seed,
            "command": self.trial.command(self.seed),
            "versions": about["versions"],
            "commit": about.get("commit"),
        }


@dataclass(frozen=True, kw_only=True)
class Target(ABC):
    """A table or figure of the paper."""

    name: str
    title: str
    where: str
    """in the paper"""
    about: str
    """what to look at; a sentence or two for the page"""
    cut: str = ""
    """what the small trials leave out beyond their recipes"""
    small: tuple[Trial, ...] = ()
    paper: tuple[Trial, ...] = ()

    def trials(self, scale: Scale) -> tuple[Trial, ...]:
        """What is trained at one scale."""
        return self.small if scale == "small" else self.paper

    def found(self, scale: Scale, records: Sequence[Record]) -> Records:
        """Records of one scale by the name of their trial; empty for trials that were not run."""
        return {trial.name: [r for r in records if r["trial"] == trial.name] for trial in self.trials(scale)}

    @abstractmethod
    def collect(self, job: Job, progress: OnProgress | None = None) -> Record:
        """What a finished run showed, as plain data."""

    @abstractmethod
    def summarize(self, record: Record) -> str:
        """A record in a few words, for the terminal."""

    @abstractmethod
    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        """Tables and figures as lines of the page.

        Args:
            scale: which of the two sections.
            records: those of the target at this scale; at least one.
            pictures: draws figures.
        """


class ScoredTarget(Target):
    """Shows how well trained models do: their score on the test split, and what training took."""

    def collect(self, job: Job, progress: OnProgress | None = None) -> Record:
        test = _test_score(job, progress)
        about = job.about()
        records = Run(job.folder).metrics
        config = job.config
        task = config.build_task()
        scored = [r for r in records if r["split"] == config.evaluation.split]
        first = next(r for r in records if r["split"] == "train")
        curve = [[r["step"], r[task.metric]] for r in scored]
        return job.origin() | {
            "metric": task.metric,
            "better": task.better,
            "test": test[task.metric],
            "examples": test["examples"],
            "data": task.origin(),
            "activation": test["activation"],
            "curve": curve,
            "first_loss": [first["step"], first["loss"]],
            "last_loss": scored[-1]["loss"],
            "step_seconds": per_step(records, "processor"),
            "step_wall_seconds": per_step(records, "elapsed"),
            "step_memory_mb": step_memory(records),
            "parameters": about["parameters"],
            "threads": about.get("threads"),
            "device": about.get("device"),
            "processes": about.get("processes", 1),
            "minutes": max(r.get("elapsed", 0.0) for r in records) / 60,
            "processor_minutes": max(r.get("processor", 0.0) for r in records) / 60,
        }

    def summarize(self, record: Record) -> str:
        return f"{record['metric']} {record['test']:.4f} on the test split"


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


def _test_score(job: Job, progress: OnProgress | None) -> dict[str, Any]:
    """The score of a run's best checkpoint on its test split, kept in the run's folder."""
    source, path = Run(job.folder), job.folder / TEST
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if known.get("step") == source.step:
            return known
    score = source.evaluate("test", progress=progress, device=job.device)
    score.pop("run")
    write_json(path, score)
    return score


class ObservedTarget(Target):
    """Shows what the layers of trained models do on validation data."""

    def collect(self, job: Job, progress: OnProgress | None = None) -> Record:
        return job.origin() | self.observe(job.folder, job.device, progress)

    def summarize(self, record: Record) -> str:
        return "observed"

    @abstractmethod
    def observe(self, run: Path, device: torch.device, progress: OnProgress | None = None) -> Record:
        """What the figure shows of a run, as plain data."""
