"""The paper's experiments as lists of runs: what there is to run, what was run already, and what came out.

    target = TARGETS["lra"]
    for job in plan(target, "small", folder):      each run of it, and how far it is
        run_job(job)                               trains, or goes on where it stopped
    record = collect(job)                          numbers of a finished run, as plain data

`results.py` keeps the records and writes them down beside the paper's numbers.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from seqboat.checkpoint import Store, write_atomically
from seqboat.config import RunConfig, difference, override
from seqboat.display import Display
from seqboat.evaluate import checkpoint_config, evaluate_run, iterate_metrics
from seqboat.recipes import find_recipe
from seqboat.train import Outcome, train

Scale = Literal["small", "paper"]
TEST = "test.json"
"""In a run's folder: its score on held-out data, so that a second call need not wait for it again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One row of a table: a recipe with some settings, run with one or more seeds."""

    name: str
    """unique, and fit for the name of a folder"""
    title: str
    """as in the table"""
    recipe: str
    arguments: tuple[str, ...] = ()
    """settings, as `seqboat train` takes them"""
    seeds: int = 1
    minutes: float | None = None
    """of one seed on two cores, about; None where it needs other hardware"""
    paper: str | None = None
    """the number in the paper for the full-size experiment, in the words of its table"""

    def config(self, seed: int) -> RunConfig:
        """The configuration of one run."""
        config = dataclasses.replace(find_recipe(self.recipe)(), recipe=self.recipe)
        return override(config, [*self.arguments, f"--seed={seed}"])

    def command(self, seed: int | None = None) -> str:
        """What to type for one run of it."""
        words = ["seqboat", "train", self.recipe, *self.arguments]
        return shlex.join(words if seed is None else [*words, f"--seed={seed}"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A table or figure of the paper."""

    name: str
    title: str
    where: str
    """in the paper"""
    about: str
    """what to look at; a sentence or two for the page"""
    small: tuple[Trial, ...]
    paper: tuple[Trial, ...]

    def trials(self, scale: Scale) -> tuple[Trial, ...]:
        """The rows at one scale."""
        return self.small if scale == "small" else self.paper


def _pair(
    name: str, title: str, recipe: str, paper: str, minutes: float, seeds: int = 1
) -> tuple[Trial, Trial]:
    """A small trial and its full-size twin."""
    return (
        Trial(name=name, title=title, recipe=f"{recipe}-small", paper=paper, minutes=minutes),
        Trial(name=name, title=title, recipe=recipe, paper=paper),
    )


_LRA = (
    _pair("listops", "ListOps", "lra.listops", "61.70 %", 7),
    _pair("text", "Text", "lra.text", "89.60 %", 12),
    _pair("retrieval", "Retrieval", "lra.retrieval", "91.28 %", 9),
    _pair("image", "Image", "lra.image", "90.10 %", 15),
    _pair("pathfinder", "Pathfinder", "lra.pathfinder", "96.35 %", 11),
    _pair("pathx", "Path-X", "lra.pathx", "96.68 %", 15),
)
_SPEECH = _pair("speech", "Speech Commands", "speech", "97.35 %", 15)
_ENWIK8 = _pair("enwik8", "enwik8", "enwik8", "1.02 bits", 15)

TARGETS = {
    target.name: target
    for target in (
        Target(
            name="lra",
            title="Long Range Arena",
            where="table 1",
            about="Accuracy on the test split. The small twins see shorter sequences and a few epochs, so they are "
            "not comparable with the paper's numbers; they show that each task trains and where it attends.",
            small=tuple(small for small, _ in _LRA),
            paper=tuple(full for _, full in _LRA),
        ),
        Target(
            name="speech",
            title="Speech Commands",
            where="table 2",
            about="Accuracy on the test split.",
            small=_SPEECH[:1],
            paper=_SPEECH[1:],
        ),
        Target(
            name="enwik8",
            title="Language modelling",
            where="table 3",
            about="Bits per byte on the test split, read once from front to end with the state carried along.",
            small=_ENWIK8[:1],
            paper=_ENWIK8[1:],
        ),
        Target(
            name="diagnostics",
            title="Diagnostics",
            where="not in the paper",
            about="Associative recall needs attention: the model has to look up which value stood beside a key. A "
            "pure state-space model of the same size has only its state for that.",
            small=(
                Trial(name="recall", title="recall, SeqBoat", recipe="recall", seeds=3, minutes=3),
                Trial(
                    name="recall-s4d",
                    title="recall, pure state-space model (S4D)",
                    recipe="recall",
                    arguments=("--model.mixer=s4d", "--model.d_model=72"),
                    seeds=3,
                    minutes=3,
                ),
                Trial(name="copy", title="selective copy, SeqBoat", recipe="copy", seeds=3, minutes=3),
            ),
            paper=(),
        ),
    )
}
"""Every target of `seqboat reproduce` by its name."""


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
        """How long it should take on two cores; None where nobody knows."""
        if self.finished:
            return 0.0
        if self.trial.minutes is None:
            return None
        return self.trial.minutes * (1 - self.step / self.steps)


def plan(target: Target, scale: Scale, folder: Path, seeds: int | None = None) -> list[Job]:
    """The runs of a target and how far each is.

    Args:
        target: table or figure.
        scale: of the recipes.
        folder: holds a folder for every trial.
        seeds: how many, instead of each trial's own number.

    Raises:
        ValueError: a run in the folder was made with other settings.
    """
    jobs = []
    for trial in target.trials(scale):
        for seed in range(seeds or trial.seeds):
            run = folder / scale / trial.name / f"seed-{seed}"
            config = trial.config(seed)
            step, finished = _progress(run, config)
            jobs.append(Job(target, scale, trial, seed, run, step, config.schedule.steps, finished))
    return jobs


def _progress(run: Path, config: RunConfig) -> tuple[int, bool]:
    """Updates done, and whether that is all."""
    found = Store(run).newest() if run.is_dir() else None
    if found is None:
        return 0, False
    other = difference(checkpoint_config(found), config)
    if other is not None:
        raise ValueError(f"{run} was made with other settings: {other}; move it away to run it anew")
    progress = found.state["progress"]
    return int(progress["step"]), bool(progress["finished"])


def run_job(job: Job, display: Display | None = None) -> Outcome:
    """Train a run to its end, going on where it stopped."""
    return train(job.trial.config(job.seed), job.folder, resume=True, display=display)


def collect(job: Job, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """What a finished run showed, as plain data; scores it on held-out data unless that was done before."""
    test = _test_score(job.folder, progress)
    about = json.loads((job.folder / "run.json").read_text(encoding="utf-8"))
    records = list(iterate_metrics(job.folder / "metrics.jsonl"))
    config = job.trial.config(job.seed)
    task = config.build_task()
    scored = [r for r in records if r["split"] == config.evaluation.split]
    return {
        "target": job.target.name,
        "scale": job.scale,
        "trial": job.trial.name,
        "seed": job.seed,
        "command": job.trial.command(job.seed),
        "metric": task.metric,
        "better": task.better,
        "test": test[task.metric],
        "examples": test["examples"],
        "activation": test["activation"],
        "curve": [[r["step"], r[task.metric]] for r in scored],
        "parameters": about["parameters"],
        "threads": about.get("threads"),
        "minutes": max(r.get("elapsed", 0.0) for r in records) / 60,
        "processor_minutes": max(r.get("processor", 0.0) for r in records) / 60,
        "versions": about["versions"],
        "commit": about.get("commit"),
    }


def _test_score(run: Path, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
    """The score of a run's best checkpoint on its test split, kept in the run's folder."""
    best = Store(run).best()
    path = run / TEST
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if best is not None and known.get("step") == best.step:
            return known
    score = evaluate_run(run, "test", progress=progress)
    score.pop("run")
    write_atomically(path, json.dumps(score, indent=1) + "\n")
    return score


def estimate(jobs: Sequence[Job]) -> tuple[float, int]:
    """Minutes that the jobs should take on two cores, and how many of them have no estimate."""
    known = [job.minutes_left for job in jobs]
    return sum(m for m in known if m is not None), sum(m is None for m in known)
