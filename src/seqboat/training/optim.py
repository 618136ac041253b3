"""Optimizers, parameter groups and the learning-rate schedule: appendix A.5 of the paper.

Weight decay pulls a parameter towards zero, which makes sense only where zero means "no effect" and where the
model can make up for it. So it falls on the matrices of linear maps, convolutions and embeddings, and on nothing
else:

- norms and biases: a scale near zero silences a layer, and neither costs capacity;
- state-space parameters: zero is not "no memory" but some rate in the middle (sigmoid(0), exp(0));
- router temperatures: zero is the temperature 1, far from the alpha * sqrt(d) that it starts at;
- tables of relative positions and the scales and shifts of queries and keys: few numbers, read one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from seqboat.checks import check_choice, check_positive, require

OptimizerName = Literal["adamw", "radam"]
OPTIMIZERS = ("adamw", "radam")

MATRICES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
"""Modules whose `weight` is decayed."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters move."""

    name: OptimizerName = "adamw"
    """AdamW, or RAdam with decoupled weight decay."""
    lr: float = 0.001
    """Highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of the averages of gradients and of their squares."""
    eps: float = 1e-8
    """Added to the root of the average square."""
    weight_decay: float = 0.01
    """Decay of matrices, times the learning rate, per step."""
    clip: float | None = 1.0
    """Largest norm of the gradient of all parameters together; None leaves it alone."""

    def __post_init__(self) -> None:
        check_choice("optimizer.name", self.name, OPTIMIZERS)
        require(self.lr > 0, f"optimizer.lr must be positive, got {self.lr!r}")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            f"optimizer.betas must be two numbers in [0, 1), got {self.betas!r}",
        )
        require(self.eps > 0, f"optimizer.eps must be positive, got {self.eps!r}")
        require(self.weight_decay >= 0, f"optimizer.weight_decay must be >= 0, got {self.weight_decay!r}")
        require(
            self.clip is None or self.clip > 0, f"optimizer.clip must be positive or None, got {self.clip!r}"
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How long training takes, and how the learning rate moves: up in a line, then down in a line to zero."""

    steps: int = 1000
    """Updates in all."""
    warmup_steps: int = 100
    """Updates until the learning rate is highest."""
    warmup_from: float = 1e-7
    """Learning rate of the first update."""

    def __post_init__(self) -> None:
        check_positive("schedule.steps", self.steps)
        check_positive("schedule.warmup_steps", self.warmup_steps, least=0)
        require(
            self.warmup_steps <= self.steps,
            f"schedule.warmup_steps must not exceed schedule.steps, got {self.warmup_steps} and {self.steps}",
        )
        require(self.warmup_from >= 0, f"schedule.warmup_from must be >= 0, got {self.warmup_from!r}")


def learning_rate(step: int, highest: float, schedule: ScheduleConfig) -> float:
    """The learning rate of update `step`, the first being 0.

    >>> schedule = ScheduleConfig(steps=6, warmup_steps=2, warmup_from=0.0)
    >>> [learning_rate(step, 1.0, schedule) for step in range(7)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup, steps = schedule.warmup_steps, schedule.steps
    if step < warmup:
        return schedule.warmup_from + (highest - schedule.warmup_from) * step / warmup
    return highest * max(steps - step, 0) / max(steps - warmup, 1)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Decayed and undecayed parameters, each under its name; see the top of this file."""
    decayed: dict[str, nn.Parameter] = {}
    kept: dict[str, nn.Parameter] = {}
    owners = {id(m.weight) for m in model.modules() if isinstance(m, MATRICES)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = decayed if id(parameter) in owners and parameter.dim() > 1 else kept
            group[name] = parameter
    return [
        {"params": list(group.items()), "weight_decay": decay}
        for group, decay in ((decayed, weight_decay), (kept, 0.0))
        if group
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of a model."""
    groups = parameter_groups(model, config.weight_decay)
    if config.name == "radam":
        return torch.optim.RAdam(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, decoupled_weight_decay=True
        )
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = value
