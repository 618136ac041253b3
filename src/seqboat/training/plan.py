"""What a run will take, and what it says before its first step: its data and what simple models reach on it.

    estimate(config).memory                     bytes on each device, for the micro-batches of the configuration
    estimate(config, memory=24e9).micro_batch   the largest micro-batch that fits in 24 GB

What a step keeps for its backward pass is counted on one and on two examples, as long as the task allows, with the
routers of a fresh model; a larger micro-batch keeps in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_positive
from seqboat.own.describe import count_text, heading
from seqboat.tasks.task import Batch, Task, apply_model
from seqboat.training.config import RunConfig
from seqboat.training.evaluate import autocast
from seqboat.training.step import finite_or_none

SPARE = 0.1
"""Fraction of a device's memory that is left to the driver, the workspaces of libraries, and fragmentation."""
GB = 1e9


class Estimate(NamedTuple):
    """What a run will take, on each of its devices."""

    parameters: int
    fixed: int
    """bytes of weights, gradients and the optimizer's averages"""
    kept: int
    """bytes of a micro-batch that its backward pass needs"""
    micro_batch: int
    """examples at a time"""
    micro_batches: int
    """per step"""
    steps: int
    limit: float | None
    """bytes of memory that were asked for"""

    @property
    def memory(self) -> int:
        """Bytes on each device, with a reserve for what is not counted."""
        return round((self.fixed + self.kept) / (1 - SPARE))

    @property
    def fits(self) -> bool:
        """Whether the limit is kept; True without one."""
        return self.limit is None or self.memory <= self.limit

    def report(self) -> str:
        """A few lines for people."""
        return "\n".join(
            [
                heading("parameters", f"{self.parameters:,}"),
                heading("steps", f"{self.steps:,} of {self.micro_batches} x {self.micro_batch} examples"),
                heading(
                    "memory",
                    f"{self.memory / GB:.2f} GB: weights, gradients and optimizer {self.fixed / GB:.2f}, kept for "
                    f"the backward pass {self.kept / GB:.2f}, reserve {SPARE:.0%}",
                ),
            ]
        )


def estimate(config: RunConfig, *, processes: int = 1, memory: float | None = None) -> Estimate:
    """Estimate the memory of a run; takes a few seconds and no data.

    Args:
        config: of the run.
        processes: devices.
        memory: bytes of a device; the largest micro-batch that fits is chosen. By default the micro-batches are those
            of the configuration.
    """
    check_positive("processes", processes)
    task = config.build_task()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in config.build_model(task).parameters())
    shares = processes if config.training.distributed != "ddp" else 1
    # weights, gradients, and two averages of the optimizer; DDP keeps a second copy of the gradients
    fixed = 4 * parameters * 4 // shares + (4 * parameters if shares < processes else 0)
    size = micro_batch_of(config, processes)
    one, more = kept_bytes(config, task)
    if memory is not None:
        size = max(1, min(size, 1 + int((memory * (1 - SPARE) - fixed - one) // max(more, 1))))
    per_process = -(-config.training.batch_size // processes)
    kept = one + (size - 1) * more
    return Estimate(parameters, fixed, kept, size, -(-per_process // size), config.schedule.steps, memory)


def micro_batch_of(config: RunConfig, processes: int) -> int:
    """The largest micro-batch that the settings of a run lead to, in examples."""
    training, task = config.training, config.build_task()
    size = -(-training.batch_size // (processes * training.micro_batches(processes)))
    tokens = task.max_length * (2 if task.kind == "match" else 1)
    if not task.fixed_length and not training.carry_state:
        size = min(size, max(training.max_tokens // tokens, 1))
    return size


def kept_bytes(config: RunConfig, task: Task) -> tuple[int, int]:
    """Bytes that the forward pass keeps for one example, and for each further one."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)  # so that routers choose the same in every estimate
        model: Any = config.build_model(task).train()
        model.backbone.gradient_checkpointing = config.training.gradient_checkpointing
        counts = [_kept(config, task, model, size) for size in (1, 2)]
    return counts[0], counts[1] - counts[0]


def _kept(config: RunConfig, task: Task, model: nn.Module, size: int) -> int:
    """Bytes of the tensors that the backward pass of a micro-batch will read, without the weights."""
    weights = {value.untyped_storage().data_ptr() for value in model.state_dict(keep_vars=True).values()}
    found: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return value

    batch = longest_batch(task, size)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value),
        autocast(torch.device("cpu"), config.training.precision),
    ):
        output = apply_model(model, task.kind, batch)
        loss = task.loss(output, batch)  # noqa: F841 - holds what was kept, so that no address is counted twice
    return sum(found.values())


def longest_batch(task: Task, size: int) -> Batch:
    """A micro-batch of the longest examples, padded where the task's are."""
    shape = (size, task.max_length)
    generator = torch.Generator().manual_seed(0)
    if task.vocab is None:
        inputs = torch.randn(*shape, task.channels, generator=generator)
    else:
        inputs = torch.randint(task.vocab, shape, generator=generator)
    mask = None if task.fixed_length else torch.ones(shape, dtype=torch.bool)
    targets = torch.zeros(shape if task.kind in ("lm", "tag") else (size,), dtype=torch.int64)
    if task.kind != "match":
        return Batch(inputs, mask, targets)
    return Batch(inputs, mask, targets, inputs.clone(), mask)


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
