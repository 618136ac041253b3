"""Budgets: how much may be activated. Nothing is limited by default.

The paper lets the loss alone decide how much is activated. A budget caps the fraction of tokens that a module may
take and the number of modules that a token may activate, or adds a term to the loss that pulls the fraction toward a
target.

Limits are counted per sequence, so that no sequence depends on others in the batch. Of n tokens, a fraction allows
floor(fraction * n). `SparseModularActivation.decide` applies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.mixer import Routing
from seqboat.core.settings import Settings

Fractions = float | tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class BudgetConfig(Settings):
    """How much may be activated; nothing is limited by default, as in the paper.

    >>> from seqboat import BudgetConfig, SeqBoat
    >>> layer = SeqBoat(8, budget=BudgetConfig(target=0.25))          # a quarter of the tokens, on average
    >>> SeqBoat(8, target=0.25).config == layer.config
    True
    """

    cap: Fractions = None
    """Largest fraction of each sequence that a module may take: one for all modules, or one for each. The most
    confident tokens of a sequence come first; in causal layers at inference, the earliest."""
    per_token: int | None = None
    """Most modules that one token may activate, the most confident ones; 1 lets a token use only one module."""
    target: Fractions = None
    """Fraction of tokens that each module should take, on average: one for all modules, or one for each."""
    loss_weight: float = 1.0
    """Weight of the squared distance from the target in the loss."""

    def __post_init__(self) -> None:
        for name in ("cap", "target"):
            for value in _each(getattr(self, name)):
                require(0 <= value <= 1, f"budget.{name} must be between 0 and 1, got {value!r}")
            require(getattr(self, name) != (), f"budget.{name} must hold at least one fraction, got none")
        if self.per_token is not None:
            check_positive("budget.per_token", self.per_token)
        require(self.loss_weight >= 0, f"budget.loss_weight must not be negative, got {self.loss_weight!r}")


def _each(value: Fractions) -> tuple[float, ...]:
    """The fractions that are given, if any."""
    return () if value is None else value if isinstance(value, tuple) else (value,)


def per_module(what: str, value: Fractions, count: int) -> tuple[float, ...] | None:
    """One fraction per module, from one for all or one for each; None if there is none."""
    given = _each(value)
    require(
        len(given) in (0, 1, count),
        f"budget.{what} must be one fraction or {count}, one per module; got {len(given)}",
    )
    return None if not given else given * count if len(given) == 1 else given


def limit(
    active: Tensor,
    probs: Tensor,
    allowed: Tensor,
    cap: tuple[float, ...] | None,
    per_token: int | None,
    in_order: bool,
    seen: Tensor | None,
    spent: Tensor | None,
) -> Tensor:
    """What is activated under the limits.

    Args:
        active: (batch, time, modules), from the router.
        probs: the same, of activation.
        allowed: (batch, time, 1) bool, which tokens may be active.
        cap: fraction per module.
        per_token: modules per token.
        in_order: whether the earliest tokens come first under a cap, or the most confident ones.
        seen: (batch,), tokens before this call; none by default.
        spent: (batch, modules), activated tokens before this call; none by default.
    """
    if per_token is not None and per_token < active.shape[2]:
        active = most_confident_modules(active, probs, per_token)
    if cap is None:
        return active
    fractions = torch.tensor(cap, dtype=torch.float64, device=active.device)
    if not in_order:
        return active & largest(torch.where(active, probs, -1.0), allowance(fractions, allowed.sum(dim=1)))
    number = (0 if seen is None else seen[:, None]) + allowed.cumsum(dim=1)[..., 0]
    if spent is None:
        spent = torch.zeros(len(active), active.shape[2], dtype=torch.int64, device=active.device)
    return first_come(active, allowance(fractions, number[..., None]), spent)


def allowance(fraction: Tensor, tokens: Tensor) -> Tensor:
    """How many of the tokens a fraction allows.

    >>> allowance(torch.tensor(0.1, dtype=torch.float64), torch.tensor([9, 10, 30])).tolist()
    [0, 1, 3]
    """
    # 0.29 * 100 is a little less than 29
    return (fraction.double() * tokens + 1e-9).floor().long()


def largest(score: Tensor, count: Tensor) -> Tensor:
    """Mark the `count` (batch, modules) largest scores (batch, time, modules) along time; among equals the first."""
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


def most_confident_modules(active: Tensor, probs: Tensor, count: int) -> Tensor:
    """Keep the `count` most confident active modules of each token; among equal ones the first."""
    score = torch.where(active, probs.detach(), -1.0)
    order = score.argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(active)
    kept = kept.scatter(-1, order[..., :count], True)
    return active & kept


def rate_loss(routing: Routing, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Squared distance of the activation rates from a target, summed over the modules.

    The rate itself has no gradient: the gradient of the mean probability of all tokens, active or not, replaces it.

    Args:
        routing: from a layer's output.
        target: (modules,) or one number.
        mask: (batch, time), True on real tokens.
    """
    active, probs = routing.active, routing.probs
    if mask is None:
        mask = active.new_ones(active.shape[:2])
    total = mask.sum().clamp(min=1)
    rate = (active & mask[..., None]).sum(dim=(0, 1)) / total
    soft = torch.where(mask[..., None], probs, 0).sum(dim=(0, 1)) / total
    error = rate.to(soft.dtype) - target.to(soft)
    return (error.square() + 2 * error * (soft - soft.detach())).sum()


def extra_loss(
    model: nn.Module,
    routings: Sequence[Routing | None] = (),
    masks: Sequence[Tensor | None] = (None,),
) -> Tensor | None:
    """Everything that a model adds to the loss per target; None if it adds nothing.

    Layers whose budget has a target add a term for the decisions they took on a batch; any module may have a method
    `auxiliary_loss()` that returns a term, or None.

    Args:
        model: whose output it is.
        routings: of all layers, from the model's output; of several sequences one after the other. Without them
            budgets add nothing.
        masks: (batch, time) each, one per sequence.

    >>> from seqboat import Classifier, extra_loss
    >>> model = Classifier(vocab=5, d_model=8, num_layers=1, target=0.5)
    >>> out = model(torch.randint(0, 5, (2, 7)))
    >>> loss = out.logits.square().mean() + (extra_loss(model, out.routings) or 0)      # yours, and the model's
    >>> loss.backward()
    """
    terms = [budget_loss(model, routings, masks) if len(routings) else None, auxiliary_loss(model)]
    found = [term for term in terms if term is not None]
    return sum(found[1:], found[0]) if found else None


def auxiliary_loss(model: nn.Module) -> Tensor | None:
    """The part of `extra_loss` that does not depend on decisions: what modules with `auxiliary_loss()` add."""
    terms = [getattr(part, "auxiliary_loss", lambda: None)() for part in model.modules()]
    found = [term for term in terms if term is not None]
    return torch.stack(found).sum() if found else None


def budget_loss(
    model: nn.Module, routings: Sequence[Routing | None], masks: Sequence[Tensor | None] = (None,)
) -> Tensor | None:
    """The part of `extra_loss` that layers add whose budget has a target; arguments as there."""
    known = outer_layers(model)
    if not any(layer.target is not None for layer in known):
        return None
    routed = [routing for routing in routings if routing is not None]
    each = len(routed) // len(masks)
    require(
        each == len(known),
        f"routings must hold {len(known)} x {len(masks)}, one per routed layer and mask; got {len(routed)}",
    )
    terms = []
    for number, (layer, routing) in enumerate(zip(cycle(known), routed, strict=False)):
        if layer.target is not None:
            target = torch.tensor(layer.target, dtype=torch.float64, device=routing.probs.device)
            terms.append(layer.budget.loss_weight * rate_loss(routing, target, masks[number // each]))
    return torch.stack(terms).sum()


def outer_layers(model: nn.Module) -> list[Any]:
    """The layers with a budget whose decisions are part of a model's output: not those inside an active module."""
    if isinstance(getattr(model, "budget", None), BudgetConfig):
        return [model]
    return [layer for part in model.children() for layer in outer_layers(part)]
