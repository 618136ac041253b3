"""What a run says before its first step: its data, what simple models reach on it, and how long it will take."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from seqboat.console import format_seconds
from seqboat.own.summary import count_text, heading
from seqboat.tasks.task import Dataset, Task
from seqboat.training.config import RunConfig
from seqboat.training.evaluate import evaluate
from seqboat.training.loader import Part, Plan, batches
from seqboat.training.parallel import World, parallelize
from seqboat.training.step import Stepper, finite_or_none

TIMED = 3
"""Steps that are timed, spread over the first epoch, after one that is not."""


class Duration(NamedTuple):
    """How long a run will take."""

    steps: int
    step: float
    """seconds"""
    evaluations: int
    evaluation: float
    """seconds"""

    @property
    def total(self) -> float:
        """Seconds."""
        return self.steps * self.step + self.evaluations * self.evaluation

    def line(self) -> str:
        """One line for people."""
        step = f"{self.step:.2g} s" if self.step >= 0.01 else f"{1000 * self.step:.2g} ms"
        return heading(
            "time",
            f"about {format_seconds(self.total)}: {self.steps:,} steps of {step}, "
            f"{self.evaluations:,} evaluation{'' if self.evaluations == 1 else 's'} of "
            f"{format_seconds(self.evaluation)}",
        )


def describe_data(
    config: RunConfig, task: Task, known: Mapping[str, Any], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Tell what a task's own data holds and what baselines reach; returns both as plain data for the run's record.

    Args:
        config: of the run.
        task: describes its data.
        known: the record of the run so far: baselines in it are not computed again.
        tell: called with every line.
    """
    split = config.evaluation.split
    summary = task.summary(split)
    if summary is None:
        if task.skips is not None and task.skips.count:
            tell(heading("skipped", f"{count_text(task.skips.count)}; the first: {task.skips.first}"))
        return {}
    for line in summary.lines():
        tell(line)
    baselines = known.get("baselines") or {
        "split": split,
        "metric": task.metric,
        "scores": {
            name: {metric: finite_or_none(value) for metric, value in scores.items()}
            for name, scores in task.baselines(split, config.evaluation.limit).items()
        },
    }
    if baselines["scores"]:
        tell(heading("baselines", f"{split} {task.metric}: {baseline_text(baselines)}"))
    return {"data": summary.as_record(), "baselines": baselines}


def baseline_text(baselines: Mapping[str, Any]) -> str:
    """Baselines in one line.

    >>> baseline_text({"metric": "accuracy", "scores": {"majority": {"accuracy": 0.5}}})
    'majority 0.5000'
    """
    metric = baselines["metric"]
    return ", ".join(
        f"{name} {scores[metric]:.4f}"
        for name, scores in baselines["scores"].items()
        if scores.get(metric) is not None
    )


def better_baseline(baselines: Mapping[str, Any], score: float, better: str) -> tuple[str, float] | None:
    """The best baseline, if it is better than a score."""
    metric, sign = baselines["metric"], 1 if better == "higher" else -1
    found = [(name, s[metric]) for name, s in baselines["scores"].items() if s.get(metric) is not None]
    name, best = max(found, key=lambda pair: sign * pair[1], default=("", score))
    return (name, best) if sign * best > sign * score else None


def estimate_duration(
    config: RunConfig,
    task: Task,
    model: nn.Module,
    data: Dataset,
    parts: Callable[[int], list[Part]],
    plan: Plan,
    world: World,
    done: int = 0,
) -> Duration:
    """Time a few steps and an evaluation of a copy of the model.

    Args:
        config: of the run.
        task: of the run.
        model: stays as it is.
        data: to train on.
        parts: the micro-batches of a step.
        plan: the batches of the run.
        world: of one process.
        done: steps that were taken already.
    """
    trial = copy.deepcopy(model)
    stepper = Stepper(config, task, parallelize(trial, world, config.training.distributed), world, plan)
    # batches of an epoch may differ much in length
    numbers = [plan.per_epoch * (2 * i + 1) // (2 * TIMED) for i in range(TIMED)]
    times = []
    for number in [numbers[0], *numbers]:
        micro = list(batches(task, data, "train", iter(parts(number)), 0))
        began = _now(world)
        stepper.step(number, micro, 0, False)
        times.append(_now(world) - began)
    evaluation = config.evaluation
    whole = len(task.dataset(evaluation.split))
    scored = min(evaluation.limit or whole, whole)
    some = min(scored, evaluation.batch_size)
    began = _now(world)
    evaluate(
        trial,
        task,
        evaluation.split,
        world,
        batch_size=evaluation.batch_size,
        limit=some,
        precision=config.training.precision,
        carry_state=config.training.carry_state,
        max_tokens=config.training.max_tokens,
    )
    seconds = (_now(world) - began) * scored / some
    steps = config.schedule.steps - done
    return Duration(steps, statistics.fmean(times[1:]), -(-steps // evaluation.every), seconds)


def _now(world: World) -> float:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter()
