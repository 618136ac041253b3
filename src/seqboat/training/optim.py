"""Optimizers, parameter groups and the learning-rate schedule: appendix A.5 of the paper.

Weight decay pulls a parameter towards zero. That makes sense where zero means "no effect", which is true of the
matrices of linear maps, convolutions and embeddings. By default only they decay:

- norms and biases: a scale near zero silences a layer, and neither costs capacity;
- state-space parameters: zero is not "no memory" but some rate in the middle (sigmoid(0), exp(0));
- router temperatures: zero is the temperature 1, far from the alpha * sqrt(d) that it starts at;
- tables of relative positions and the scales and shifts of queries and keys: few numbers, read one by one.

The published scripts decay every parameter: `decay="all"`, the setting of the recipes at the paper's scale.

State-space models are trained with a smaller learning rate for the parameters of their dynamics, and without weight
decay there. A module declares such parameters in a class variable `parameter_roles` (`mixers.ssm.base`);
`ssm_lr` and `dt_lr` set their learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from seqboat.core.checks import check_choice, check_positive, require
from seqboat.core.settings import Settings

OptimizerName = Literal["adamw", "radam", "adagrad"]
OPTIMIZERS = ("adamw", "radam", "adagrad")
Decayed = Literal["matrices", "all"]
DECAYED = ("matrices", "all")
Shape = Literal["linear", "cosine", "rsqrt", "constant"]
SHAPES = ("linear", "cosine", "rsqrt", "constant")

MATRICES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
"""Modules whose `weight` decays."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Settings):
    """How parameters are updated."""

    name: OptimizerName = "adamw"
    """AdamW, RAdam with decoupled weight decay, or Adagrad."""
    lr: float = 0.001
    """Highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of the running averages of gradients and of their squares."""
    eps: float = 1e-8
    """Added to the root of the average square."""
    weight_decay: float = 0.01
    """Weight decay per step, times the learning rate."""
    decay: Decayed = "matrices"
    """What weight decay applies to: matrices, or all parameters as in the published scripts."""
    ssm_lr: float | None = None
    """Highest learning rate of state-space parameters, which then have no weight decay; None: `lr`, with decay."""
    dt_lr: float | None = None
    """Highest learning rate of their step sizes; None: `ssm_lr`."""
    clip: float | None = 1.0
    """Largest norm of the gradient of all parameters together; None does not clip."""

    def __post_init__(self) -> None:
        check_choice("optimizer.name", self.name, OPTIMIZERS)
        check_choice("optimizer.decay", self.decay, DECAYED)
        require(self.lr > 0, f"optimizer.lr must be positive, got {self.lr!r}")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            f"optimizer.betas must be two numbers in [0, 1), got {self.betas!r}",
        )
        require(self.eps > 0, f"optimizer.eps must be positive, got {self.eps!r}")
        require(self.weight_decay >= 0, f"optimizer.weight_decay must be >= 0, got {self.weight_decay!r}")
        require(
            self.name != "adagrad" or not self.weight_decay,
            f"optimizer.weight_decay of adagrad must be 0, got {self.weight_decay!r}",
        )
        for name in ("clip", "ssm_lr", "dt_lr"):
            value = getattr(self, name)
            require(value is None or value > 0, f"optimizer.{name} must be positive or None, got {value!r}")

    def rate(self, role: str) -> float | None:
        """The highest learning rate of parameters with a role, "ssm" or "dt"; None: that of all others."""
        return self.dt_lr or self.ssm_lr if role == "dt" else self.ssm_lr


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Settings):
    """How long training takes, and how the learning rate changes: warm-up, then decay."""

    steps: int = 1000
    """Training steps."""
    warmup_steps: int = 100
    """Steps until the learning rate is highest."""
    warmup_from: float = 1e-7
    """Learning rate of the first step."""
    warmup_power: float = 1.0
    """Power of the warm-up: 1 is linear, 2 quadratic."""
    shape: Shape = "linear"
    """Decay after the warm-up: linear or cosine to zero, with the inverse square root of the step, or none."""

    def __post_init__(self) -> None:
        check_positive("schedule.steps", self.steps)
        check_positive("schedule.warmup_steps", self.warmup_steps, least=0)
        require(
            self.warmup_steps <= self.steps,
            f"schedule.warmup_steps must not exceed schedule.steps, got {self.warmup_steps} and {self.steps}",
        )
        require(self.warmup_from >= 0, f"schedule.warmup_from must be >= 0, got {self.warmup_from!r}")
        require(self.warmup_power > 0, f"schedule.warmup_power must be positive, got {self.warmup_power!r}")
        check_choice("schedule.shape", self.shape, SHAPES)


def learning_rate(step: int, highest: float, schedule: ScheduleConfig) -> float:
    """The learning rate of a step; the first is step 0.

    >>> schedule = ScheduleConfig(steps=6, warmup_steps=2, warmup_from=0.0)
    >>> [learning_rate(step, 1.0, schedule) for step in range(7)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    warmup, steps = schedule.warmup_steps, schedule.steps
    if step < warmup:
        return (
            schedule.warmup_from + (highest - schedule.warmup_from) * (step / warmup) ** schedule.warmup_power
        )
    if schedule.shape == "constant":
        return highest
    if schedule.shape == "rsqrt":
        return highest * math.sqrt(max(warmup, 1) / max(step, 1))
    left = max(steps - step, 0) / max(steps - warmup, 1)
    return highest * (left if schedule.shape == "linear" else (1 - math.cos(math.pi * left)) / 2)


def parameter_roles(model: nn.Module) -> dict[int, str]:
    """The roles that modules declare for their parameters, by the parameter's identity."""
    found: dict[int, str] = {}
    for module in model.modules():
        roles: Mapping[str, str] = getattr(module, "parameter_roles", {})
        found |= {id(getattr(module, name)): role for name, role in roles.items()}
    return found


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, object]]:
    """Parameters, each under its name, grouped by weight decay and learning rate; see the top of this file.

    `scale` is the learning rate of a group as a multiple of `config.lr`.
    """
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, MATRICES)}
    roles = parameter_roles(model)
    groups: dict[tuple[float, float], dict[str, nn.Parameter]] = {
        (config.weight_decay, 1.0): {},
        (0.0, 1.0): {},
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        role = roles.get(id(parameter))
        rate = None if role is None else config.rate(role)
        if rate is not None:
            key = (0.0, rate / config.lr)
        else:
            decays = config.decay == "all" or (id(parameter) in matrices and parameter.dim() > 1)
            key = (config.weight_decay if decays else 0.0, 1.0)
        groups.setdefault(key, {})[name] = parameter
    return [
        {
            "params": list(group.items()),
            "weight_decay": decay,
            "lr": config.lr * scale,
            "scale": scale,
        }
        for (decay, scale), group in groups.items()
        if group
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of a model; see `parameter_groups`."""
    groups = parameter_groups(model, config)
    if config.name == "adagrad":
        return torch.optim.Adagrad(groups, lr=config.lr, eps=config.eps)
    if config.name == "radam":
        return torch.optim.RAdam(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, decoupled_weight_decay=True
        )
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every group, in proportion to its highest."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("scale", 1.0)
