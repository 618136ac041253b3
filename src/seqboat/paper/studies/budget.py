"""Equal compute: runs that take the same processor time.

    spend(trial, 0, 60.0, folder, rates=RATES)      a record of one run, as plain data

A budget is standard seconds (`seqboat.paper.studies.clock`) of processor time for training steps; evaluation is not
counted. A quarter of it finds the learning rate: one short run for every candidate, of which the lowest validation
loss decides. The rest trains the model that is scored. The number of steps is fixed before a run from the measured
pace, so that each of them is an ordinary run: its learning rate reaches zero on its last step, and it resumes bit for
bit. Routers that turn off during a run make it faster: if it misses its time, it is repeated with the steps that the
runs so far suggest. The record says how many seconds it took in the end.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqboat.core.state import state_bytes
from seqboat.data.files import read_json, write_json
from seqboat.paper.machine import apply_settings
from seqboat.paper.studies.clock import Probes, StandardClock
from seqboat.paper.tables import Record
from seqboat.paper.target import per_step
from seqboat.paper.trial import Trial
from seqboat.processor import processor_name
from seqboat.run import Run
from seqboat.tasks.task import Split, apply_model
from seqboat.training.config import RunConfig
from seqboat.training.display import Display
from seqboat.training.loop import EXIT_DIVERGED, train
from seqboat.training.planning.pace import step_seconds

RATES = (0.003, 0.01, 0.03)
"""Learning rates to choose from, the same for every model and task."""
SWEEP = 0.25
"""Fraction of a budget that finds the learning rate."""
STEPS = 150
"""Batches are halved until at least this many steps fit into a budget..."""
SMALLEST = 4
"""...but not below this many sequences."""
SAMPLES = (4, 16)
"""Sequences in the batches of the steps that are timed before anything is known."""
TOLERANCE = 0.1
"""Fraction of its time that a run may miss before it is repeated..."""
TRIES = 3
"""...until it has been run this often; the run that comes nearest counts."""
VALIDATED = 4_000
"""Tokens of the validation split that are scored, for each second of a budget..."""
SCORED, SCORED_BY_TOKEN = 25_000, 10_000
"""...and of the test split: more where a sequence counts once than for language models, which score each token."""
EVALUATIONS = 3
"""During the run that is scored."""


class Stopped(Exception):
    """A signal ended a run; the same command continues it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def spend(
    trial: Trial,
    seed: int,
    seconds: float,
    folder: Path,
    *,
    rates: Sequence[float] = (),
    settings: Sequence[str] = (),
    display: Display | None = None,
    known: Record | None = None,
) -> Record:
    """Train and score a model within a budget; returns what it showed.

    A second call in the same folder continues. The first seed finds batch and learning rate for all of them.

    Args:
        trial: recipe and settings.
        seed: of the run.
        seconds: standard ones.
        folder: of all runs of this trial with this budget.
        rates: learning rates to choose from; without any, the whole budget trains with the trial's own.
        settings: of training and data on this machine, by their dotted names.
        display: of every run.
        known: the record of another seed, whose batch and learning rate are used if the folder does not have any: the
            first seed may have run on another machine.
    """
    own = apply_settings(trial.config(0), settings)
    plan = _planned(own, seconds, folder, rates, display or Display(), known)
    config = own.replace(training={"batch_size": plan["batch"]}, optimizer={"lr": plan["lr"]})
    left, pace = _left(seconds, rates), _first_pace(folder, seed, plan)
    tries: list[tuple[float, int, RunConfig, Path, bool]] = []
    taken: list[tuple[int, float]] = []
    for number in range(TRIES):
        fitted = fit_steps(config, left, pace, EVALUATIONS, VALIDATED * seconds)
        fitted = dataclasses.replace(fitted, seed=seed)
        path = folder / f"seed-{seed}{'-again' * number}"
        finished = _train(fitted, path, display or Display())
        pace = (finished and standard_step(Run(path))) or pace
        taken.append((fitted.schedule.steps, pace * fitted.schedule.steps))
        missed = abs(taken[-1][1] - left)
        tries.append((missed, number, fitted, path, finished))
        if missed <= TOLERANCE * left:
            break
        pace = next_pace(taken, left)
    _, number, final, run, done = min(tries)
    plan["found"] = taken[number][1] / taken[number][0]
    write_json(folder / "plan.json", plan)
    record = {
        "seed": seed,
        "budget": seconds,
        "command": _command(trial, final),
        "parameters": None,
        "lr": plan["lr"],
        "sweep": plan["sweep"],
        "batch": plan["batch"],
        "steps": final.schedule.steps,
    }
    return record | (_observe(run, final, seconds) if done else {"diverged": True})


def fit_steps(
    config: RunConfig, seconds: float, step: float, evaluations: int, tokens: float = math.inf
) -> RunConfig:
    """A run with as many steps as fit into a time; a tenth of them is linear warm-up, the rest linear decay.

    Args:
        config: of the run.
        seconds: for training.
        step: seconds of one.
        evaluations: spread evenly over the run, the last of them after its end.
        tokens: of the validation split that are scored, about.
    """
    steps = max(round(seconds / step), 2 * evaluations)
    every = -(-steps // evaluations)
    limit = _examples(config, config.evaluation.split, tokens)
    return config.replace(
        schedule={
            "steps": steps,
            "warmup_steps": max(steps // 10, 1),
            "warmup_from": 1e-7,
            "warmup_power": 1.0,
            "shape": "linear",
        },
        training={"log_every": max(steps // 20, 1), "save_every": every},
        evaluation={"every": every, "limit": limit, "patience": None},
    )


def fit_batch(config: RunConfig, seconds: float) -> tuple[int, float]:
    """The batch size with which STEPS steps fit into a time, the recipe's at most, and seconds of a step.

    A few steps with batches of two sizes are timed: a step costs something, and so does each of its sequences. What
    that promises of a larger batch is timed too: a few steps on a busy machine say little about four times as many
    sequences.
    """
    batch = config.training.batch_size
    few, many = (min(size, batch) for size in SAMPLES)

    def timed(size: int) -> float:
        sized = config.replace(training={"batch_size": size})
        return step_seconds(sized, StandardClock(), timed=3, untimed=2)

    one, two = timed(few), timed(many)
    each = max((two - one) / (many - few), 0.0) if many > few else one / few

    def step(size: int) -> float:
        promised = max(two + each * (size - many), one / 2)
        return timed(size) if size > many and seconds / promised >= STEPS else promised

    while (pace := step(batch)) * STEPS > seconds and batch // 2 >= SMALLEST:
        batch //= 2
    return batch, pace


def next_pace(taken: Sequence[tuple[int, float]], left: float) -> float:
    """Seconds of a step for the next run, from the steps and seconds of the runs so far.

    Two runs tell how much each further step takes, which differs from the mean where routers turn off on the way.

    >>> next_pace([(100, 20.0)], 30.0), next_pace([(100, 20.0), (150, 22.0)], 26.0)
    (0.2, 0.104)
    """
    (steps, seconds), *earlier = sorted(taken[-2:], key=lambda pair: abs(pair[1] - left))
    for other, spent in earlier:
        if (other - steps) * (spent - seconds) > 0:
            fitting = steps + (left - seconds) * (other - steps) / (spent - seconds)
            if fitting > 0:
                return left / fitting
    return seconds / steps


def _first_pace(folder: Path, seed: int, plan: dict[str, Any]) -> float:
    """The pace that a seed starts with, written down: a run that was stopped must continue with as many steps."""
    path = folder / f"pace-{seed}.json"
    if not path.exists():
        write_json(path, plan.get("found", plan["step_seconds"]))
    return float(read_json(path))


def _left(seconds: float, rates: Sequence[float]) -> float:
    """What the search for a learning rate leaves of a budget."""
    return (1 - SWEEP) * seconds if rates else seconds


def _planned(
    config: RunConfig,
    seconds: float,
    folder: Path,
    rates: Sequence[float],
    display: Display,
    known: Record | None,
) -> dict[str, Any]:
    """Batch, learning rate and seconds of a step, as found by the first call or recorded by another seed."""
    path = folder / "plan.json"
    if path.exists():
        found: dict[str, Any] = read_json(path)
        return found
    if known is not None and "slowdown" in known:  # a run that diverged has none
        found = {key: known[key] for key in ("batch", "lr", "sweep", "step_seconds")}
        write_json(path, found)
        return found
    batch, step = _paced(config, _left(seconds, rates), folder / "pace.json")
    config = config.replace(training={"batch_size": batch})
    plan: dict[str, Any] = {"batch": batch, "lr": config.optimizer.lr, "sweep": [], "step_seconds": step}
    if rates:
        paces = []
        for rate in rates:
            tried = config.replace(optimizer={"lr": rate})
            tried = fit_steps(tried, SWEEP * seconds / len(rates), step, 1, VALIDATED * seconds)
            run = folder / f"lr-{rate:g}"
            loss = math.inf
            if _train(tried, run, display):
                finished = Run(run)
                metrics = reversed(finished.metrics)
                loss = next(r["loss"] for r in metrics if r["split"] == tried.evaluation.split)
                paces.append(standard_step(finished) or step)
            plan["sweep"].append([rate, None if loss is None or not math.isfinite(loss) else loss])
        finite = [(loss, rate) for rate, loss in plan["sweep"] if loss is not None]
        # where every candidate diverged, the lowest rate is the best guess
        plan["lr"] = min(finite)[1] if finite else min(rates)
        plan["step_seconds"] = statistics.median(paces) if paces else step
    write_json(path, plan)
    return plan


def _paced(config: RunConfig, seconds: float, path: Path) -> tuple[int, float]:
    """Batch and seconds of a step, measured once: a search that was stopped must continue with as many steps."""
    if path.exists():
        batch, step = read_json(path)
        return int(batch), float(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = fit_batch(config, seconds)
    write_json(path, list(found))
    return found


def _train(config: RunConfig, folder: Path, display: Display) -> bool:
    """Train to the end; False if the run diverged."""
    outcome = train(config, folder, resume=True, display=display, on_step=Probes(folder, config))
    if outcome.exit_code not in (0, EXIT_DIVERGED):
        raise Stopped(f"{folder}: {outcome.message}", outcome.exit_code)
    return outcome.exit_code == 0


def standard_step(run: Run) -> float | None:
    """Standard seconds of a step of a finished run; None if its metrics have no times."""
    seconds = per_step(run.metrics, "processor")
    return None if seconds is None else Probes(run.folder, run.config).standard_step(seconds)


def _observe(folder: Path, config: RunConfig, seconds: float) -> Record:
    """What a finished run showed."""
    run = Run(folder)
    task, metrics, about = run.task, run.metrics, run.about
    tokens = (SCORED_BY_TOKEN if task.kind == "lm" else SCORED) * seconds
    test = run.evaluate("test", limit=_examples(config, "test", tokens))
    step = standard_step(run) or 0.0
    scored = [r for r in metrics if r["split"] == config.evaluation.split]
    trained = [r for r in metrics if r["split"] == "train"]
    return {
        "metric": task.metric,
        "better": task.better,
        "test": test[task.metric],
        "test_loss": test["loss"],
        "examples": test["examples"],
        "activation": test["activation"],
        "curve": [[round(r["step"] * step, 2), r["step"], r[task.metric]] for r in scored],
        "losses": [[r["step"], r["loss"]] for r in trained],
        "training_seconds": step * config.schedule.steps,
        "step_seconds": step,
        "slowdown": Probes(folder, config).slowdown(),
        "tokens_per_second": config.training.batch_size * _tokens(config) / step if step else None,
        "step_memory_mb": kept_memory(run) / 2**20,
        "processor_seconds": max(r.get("processor", 0.0) for r in metrics),
        "state_bytes": state_size(run, task.max_length) if task.kind == "lm" else None,
        "parameters": about["parameters"],
        "threads": about.get("threads"),
        "processor": processor_name(),
        "versions": about["versions"],
        "commit": about.get("commit"),
    }


def kept_memory(run: Run) -> int:
    """Bytes that a training step of a run keeps for its backward pass, beyond the weights."""
    model, task, config = run.model.train(), run.task, run.config
    data = task.dataset("train")
    batch = task.collate([data[index] for index in range(min(config.training.batch_size, len(data)))])
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = task.loss(apply_model(model, task.kind, batch), batch).total
    size = sum(nbytes for place, nbytes in kept.items() if place not in weights)
    del loss  # until here nothing that was kept could be replaced at the same place
    model.eval()
    return size


@torch.inference_mode()
def state_size(run: Run, length: int) -> int:
    """Bytes that a language model carries along after reading this many tokens of one sequence."""
    model: Any = run.model.eval()  # of any token ids, not of bytes only
    return state_bytes(model(torch.zeros(1, length, dtype=torch.long)).state)


def _examples(config: RunConfig, split: Split, tokens: float) -> int:
    """How many examples of a split have this many tokens: a batch at least, all at most."""
    least = config.evaluation.batch_size
    return int(min(max(tokens / _tokens(config), least), len(config.build_task().dataset(split))))


def _tokens(config: RunConfig) -> int:
    """Tokens of an example, at most."""
    task = config.build_task()
    return task.max_length * (2 if task.kind == "match" else 1)


def _command(trial: Trial, config: RunConfig) -> str:
    """What to type for the run that was scored."""
    given = {
        "optimizer.lr": f"{config.optimizer.lr:g}",
        "training.batch_size": config.training.batch_size,
        "schedule.steps": config.schedule.steps,
        "schedule.warmup_steps": config.schedule.warmup_steps,
        "schedule.warmup_from": f"{config.schedule.warmup_from:g}",
        "schedule.shape": config.schedule.shape,
        "evaluation.every": config.evaluation.every,
        "evaluation.limit": config.evaluation.limit,
    }
    return trial.command(config.seed) + " " + shlex.join(f"--{name}={value}" for name, value in given.items())
