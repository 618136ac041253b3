"""Budgets and revival: what may be activated, and what keeps routers from dying. Everything is off by default.

The paper lets the loss alone decide how much is activated. A budget caps the fraction of tokens that a module may
take and the number of modules that a token may activate, or steers the fraction toward a target. A revival keeps
routers alive: an inactive token sends its router no gradient, so a module that nothing activates early on may never
be used again.

Limits are counted per sequence, so that no sequence depends on others in the batch. Of n tokens, a fraction allows
floor(fraction * n). `Policy` (`core.policy`) applies them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from seqboat.core.checks import check_choice, check_positive, require
from seqboat.core.settings import Settings

Fractions = float | tuple[float, ...] | None
Priority = Literal["confidence", "order"]
Steering = Literal["controller", "loss"]


def each(value: Fractions) -> tuple[float, ...]:
    """The fractions that are given, if any."""
    return () if value is None else value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True, kw_only=True)
class BudgetConfig(Settings):
    """How much may be activated; nothing is limited by default, as in the paper.

    >>> from seqboat import BudgetConfig, SeqBoat
    >>> layer = SeqBoat(8, budget=BudgetConfig(target=0.25))          # a quarter of the tokens, on average
    >>> SeqBoat(8, target=0.25).config == layer.config
    True
    """

    cap: Fractions = None
    """Largest fraction of each sequence that a module may take: one for all modules, or one for each."""
    priority: Priority = "confidence"
    """Which tokens come first under a cap: the most confident ones of a sequence, or the earliest. Causal layers use
    order at inference in any case; in training, confidence compares with later tokens too."""
    per_token: int | None = None
    """Most modules that one token may activate, the most confident ones; 1 lets a token use only one module."""
    target: Fractions = None
    """Fraction of tokens that each module should take, on average: one for all modules, or one for each."""
    target_by: Steering = "controller"
    """What steers toward the target: a controller that shifts the decisions, or a term of the loss. In training the
    controller meets the target in every batch; at inference it decides by the running average of the last ones."""
    gain: float = 0.5
    """How far the controller moves in a step: this part of the way to where the last step met the target."""
    loss_weight: float = 1.0
    """Weight of the squared error in the loss."""
    anneal_steps: int = 0
    """Training steps over which cap and target fall from 1 to their values."""

    def __post_init__(self) -> None:
        for name in ("cap", "target"):
            for value in each(getattr(self, name)):
                require(0 <= value <= 1, f"budget.{name} must be between 0 and 1, got {value!r}")
            require(getattr(self, name) != (), f"budget.{name} must hold at least one fraction, got none")
        check_choice("budget.priority", self.priority, get_args(Priority))
        check_choice("budget.target_by", self.target_by, get_args(Steering))
        if self.per_token is not None:
            check_positive("budget.per_token", self.per_token)
        require(0 < self.gain <= 1, f"budget.gain must be above 0 and at most 1, got {self.gain!r}")
        require(self.loss_weight >= 0, f"budget.loss_weight must not be negative, got {self.loss_weight!r}")
        check_positive("budget.anneal_steps", self.anneal_steps, least=0)


@dataclass(frozen=True, kw_only=True)
class RevivalConfig(Settings):
    """What keeps routers alive in training; nothing by default, as in the paper.

    >>> from seqboat import RevivalConfig, SeqBoat
    >>> layer = SeqBoat(8, revival=RevivalConfig(warmup_steps=100, noise=0.5))
    >>> layer.config.revival.warmup_steps
    100
    """

    warmup_steps: int = 0
    """Training steps in which every token activates every module, whatever the router and the budget say."""
    noise: float = 0.0
    """Std of the noise on the log-odds of the decisions in training."""
    noise_steps: int = 0
    """Training steps over which the noise falls to nothing; 0 keeps it."""
    floor: float = 0.0
    """Smallest fraction of a sequence that each module takes in training, the most confident tokens."""
    inactive_gradient: bool = False
    """Whether inactive tokens send the router a gradient, as if the module had returned its mean output."""

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "noise_steps"):
            check_positive(f"revival.{name}", getattr(self, name), least=0)
        require(self.noise >= 0, f"revival.noise must not be negative, got {self.noise!r}")
        require(0 <= self.floor <= 1, f"revival.floor must be between 0 and 1, got {self.floor!r}")


def allowance(fraction: Tensor, tokens: Tensor) -> Tensor:
    """How many of the tokens a fraction allows.

    >>> allowance(torch.tensor(0.1, dtype=torch.float64), torch.tensor([9, 10, 30])).tolist()
    [0, 1, 3]
    """
    # 0.29 * 100 is a little less than 29
    return (fraction.double() * tokens + 1e-9).floor().long()


def largest(score: Tensor, count: Tensor) -> Tensor:
    """Mark the `count` largest scores along time; among equal ones the first.

    Args:
        score: (batch, time, modules).
        count: (batch, modules).
    """
    order = score.argsort(dim=1, descending=True, stable=True)
    chosen = torch.arange(score.shape[1], device=score.device)[:, None] < count[:, None]
    return torch.zeros_like(chosen.expand_as(score)).scatter(1, order, chosen.expand_as(order))


def first_come(wants: Tensor, most: Tensor, spent: Tensor) -> Tensor:
    """Grant requests in order, as long as the tokens granted so far stay within what is allowed so far.

    With W requests and A grants up to a token, A = min(A before + request, most), which is W + min(most - W) over
    all tokens so far: no loop over time.

    Args:
        wants: (batch, time, modules) bool.
        most: (batch, time, modules), grants allowed up to each token; must not fall along time.
        spent: (batch, modules), grants before this call.
    """
    if not wants.shape[1]:
        return wants
    requests = wants.cumsum(dim=1)
    spare = torch.maximum(most, spent[:, None]) - requests
    granted = requests + torch.minimum(spare.cummin(dim=1).values, spent[:, None])
    return granted.diff(dim=1, prepend=spent[:, None]) > 0


def at_least(wants: Tensor, least: Tensor, allowed: Tensor) -> Tensor:
    """Add tokens in order wherever those so far fall short of what is due so far.

    Args:
        wants: (batch, time, modules) bool.
        least: (batch, time, modules), tokens due up to each one; rises by at most one along time.
        allowed: (batch, time, 1) bool, which tokens may be added.
    """
    if not wants.shape[1]:
        return wants
    requests = wants.cumsum(dim=1)
    taken = requests + (least - requests).cummax(dim=1).values.clamp(min=0)
    more = taken.diff(dim=1, prepend=torch.zeros_like(taken[:, :1])) > 0
    return wants | (more & allowed)


def most_confident_modules(active: Tensor, probs: Tensor, count: int) -> Tensor:
    """Keep the most confident active modules of each token; among equal ones the first.

    Args:
        active, probs: (batch, time, modules).
        count: how many to keep.
    """
    score = torch.where(active, probs.detach(), -1.0)
    order = score.argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(active)
    kept = kept.scatter(-1, order[..., :count], True)
    return active & kept
