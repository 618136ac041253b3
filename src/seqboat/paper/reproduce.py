"""Running the paper's experiments: what was run already, what is left to run, and what came out.

    target = TARGETS["lra"]                        (targets.py)
    for job in plan(target, "small", folder):      each run of it, and how far it is
        run_job(job)                               trains, or goes on where it stopped
    record = collect(job)                          numbers of a finished run, as plain data

`results.py` keeps the records and writes them down beside the paper's numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from seqboat.analysis.measures import measure_run
from seqboat.analysis.traces import load_examples, trace
from seqboat.checks import require
from seqboat.data.files import write_json
from seqboat.paper.targets import Bench, Scale, Target, Trial
from seqboat.runs import Run
from seqboat.training.checkpoint import Store
from seqboat.training.config import difference
from seqboat.training.display import Display
from seqboat.training.loop import Outcome, train

Part = TypeVar("Part", Trial, Bench)

TEST = "test.json"
"""In a run's folder: its score on held-out data, so that a second call need not wait for it again."""


class Job(NamedTuple):
    """One run of a trial."""

    target: Target
    scale: Scale
    trial: Trial
    seed: int
    folder: Path
    step: int
    """updates done"""
    steps: int
    finished: bool

    @property
    def minutes_left(self) -> float | None:
        """Minutes of the processor that it should take; None where nobody knows."""
        if self.finished:
            return 0.0
        if self.trial.minutes is None:
            return None
        return self.trial.minutes * (1 - self.step / self.steps)


def chosen(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """Those whose names are given or fit a pattern; all of them if there is no name."""
    return [part for part in parts if not only or any(fnmatchcase(part.name, pattern) for pattern in only)]


def plan(
    target: Target, scale: Scale, folder: Path, seeds: int | None = None, only: Sequence[str] = ()
) -> list[Job]:
    """The runs of a target and how far each is.

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
    """Updates done, and whether that is all."""
    found = Store(run).newest() if run.is_dir() else None
    if found is None:
        return 0, False
    other = difference(found.config(), trial.config(seed))
    if other is not None:
        raise ValueError(f"{run} was made with other settings: {other}; move it away to run it anew")
    progress = found.state["progress"]
    return int(progress["step"]), bool(progress["finished"])


def refreshed(job: Job) -> Job:
    """The same run, and how far it is by now: another process may have worked on it."""
    step, finished = _progress(job.folder, job.trial, job.seed)
    return job._replace(step=step, finished=finished)


def run_job(job: Job, display: Display | None = None) -> Outcome:
    """Train a run to its end, going on where it stopped."""
    return train(job.trial.config(job.seed), job.folder, resume=True, display=display)


def observe(job: Job, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """What the layers of a finished run do on validation data, as plain data: what the figure of its target shows."""
    shown: dict[str, Any]
    if job.target.layout == "confidence":
        shown = {"pictures": _confidence(job.folder)}
    else:
        measures = measure_run(job.folder, "val", OBSERVED, weighted=False, progress=progress)
        shown = {
            "sequences": measures.sequences,
            "rates": [layer and [layer.rate.mean, layer.rate.std] for layer in measures.layers],
            "spans": [
                layer and layer.span and [layer.span.mean, layer.span.std] for layer in measures.layers
            ],
        }
    return _origin(job, _about(job)) | shown


def _about(job: Job) -> dict[str, Any]:
    """What the run wrote down about itself."""
    about: dict[str, Any] = json.loads((job.folder / "run.json").read_text(encoding="utf-8"))
    return about


def _origin(job: Job, about: Mapping[str, Any]) -> dict[str, Any]:
    """What every record says of where it comes from."""
    return {
        "target": job.target.name,
        "scale": job.scale,
        "trial": job.trial.name,
        "seed": job.seed,
        "command": job.trial.command(job.seed),
        "versions": about["versions"],
        "commit": about.get("commit"),
    }


OBSERVED = 100
"""Sequences that figures look at, as in the paper."""
PICTURES = 3
"""Images whose confidences are drawn."""


def _confidence(run: Path) -> list[dict[str, Any]]:
    """A few images and the confidence of their pixels in every layer, (height, width) each."""
    examples = load_examples(run, "val", PICTURES)
    shape = examples.task.picture
    require(shape is not None, f"{run} has no images, but {examples.task.name}")
    found = []
    for sample in trace(examples.model, examples.task.kind, examples.batch(range(len(examples.dataset)))):
        (sequence,) = sample.sequences
        layers = [
            None if layer is None else layer.confidence.reshape(shape).round(3).tolist()
            for layer in sequence.layers
        ]
        inputs = np.asarray(sequence.inputs, dtype=float).reshape(shape).round(3)
        found.append({"input": inputs.tolist(), "layers": layers})
    return found


def collect(job: Job, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """What a finished run showed, as plain data; scores it on held-out data unless that was done before."""
    test = _test_score(job.folder, progress)
    about = _about(job)
    records = Run(job.folder).metrics
    config = job.trial.config(job.seed)
    task = config.build_task()
    scored = [r for r in records if r["split"] == config.evaluation.split]
    first = next(r for r in records if r["split"] == "train")
    return _origin(job, about) | {
        "metric": task.metric,
        "better": task.better,
        "test": test[task.metric],
        "examples": test["examples"],
        "data": task.origin(),
        "activation": test["activation"],
        "curve": [[r["step"], r[task.metric]] for r in scored],
        "first_loss": [first["step"], first["loss"]],
        "last_loss": scored[-1]["loss"],
        "step_seconds": step_seconds(records),
        "parameters": about["parameters"],
        "threads": about.get("threads"),
        "minutes": max(r.get("elapsed", 0.0) for r in records) / 60,
        "processor_minutes": max(r.get("processor", 0.0) for r in records) / 60,
    }


def step_seconds(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Processor seconds of a training step, on average over a run; evaluations and what they save do not count.

    Args:
        records: of metrics.jsonl. None is returned if a record of training does not know its processor time.
    """
    before = spent = 0.0
    steps = 0
    for record in records:
        if record["split"] == "train":
            if "processor" not in record:
                return None
            spent += record["processor"] - before
            steps = record["step"]
        before = record.get("processor", before)
    return spent / steps if steps else None


def _test_score(run: Path, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
    """The score of a run's best checkpoint on its test split, kept in the run's folder."""
    best = Store(run).best()
    path = run / TEST
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if best is not None and known.get("step") == best.step:
            return known
    score = Run(run).evaluate("test", progress=progress)
    score.pop("run")
    write_json(path, score)
    return score


def estimate(jobs: Sequence[Job]) -> tuple[float, int]:
    """Minutes of the processor that the jobs should take, and how many of them have no estimate.

    A run that belongs to several targets counts once.
    """
    known = [job.minutes_left for job in {job.folder: job for job in jobs}.values()]
    return sum(m for m in known if m is not None), sum(m is None for m in known)
