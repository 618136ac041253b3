"""The policy: how the decisions of a router become active tokens.

A `Policy` holds a router and changes which tokens are active, never how confident the router is:

- a budget (`core.budget`) caps what is activated, or steers it toward a target;
- a revival keeps routers from dying in training;
- an override sets decisions by hand, for experiments and at inference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.core.documents import Documents
from seqboat.layers.budget import (
    BudgetConfig,
    Fractions,
    RevivalConfig,
    allowance,
    at_least,
    each,
    first_come,
    largest,
    most_confident_modules,
)
from seqboat.layers.packing import Routing
from seqboat.layers.routers import Router
from seqboat.layers.steering import border_at_rate, follow, rate_loss


@dataclass(frozen=True, kw_only=True)
class Override:
    """Decisions by hand; see `SparseModularActivation.override`."""

    active: bool | Mapping[str, bool] | None = None
    mask: Tensor | Callable[[Routing], Tensor] | None = None
    threshold: float | Mapping[str, float] | None = None
    cap: float | Mapping[str, float] | None = None
    confidence: float | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Override:
        return self  # a value: the copy of a model without an override has none either

    def check(self, names: Sequence[str]) -> None:
        """Refuse names of modules that do not exist, and values out of range."""
        for what in ("active", "threshold", "cap"):
            value = getattr(self, what)
            known = ", ".join(names)
            for name in value if isinstance(value, Mapping) else ():
                require(name in names, f"override of {what}: there is no module {name!r} among {known}")
            for given in value.values() if isinstance(value, Mapping) else [value]:
                fits = given is None or (isinstance(given, bool) if what == "active" else 0 <= given <= 1)
                expected = "true or false" if what == "active" else "between 0 and 1"
                require(fits, f"override of {what} must be {expected}, got {given!r}")

    def over(self, outer: Override) -> Override:
        """This override inside another one: what it leaves open is the outer one's."""
        return replace(outer, **{name: value for name, value in vars(self).items() if value is not None})


NOTHING = Override()


class _InactiveGradient(torch.autograd.Function):
    """The identity of y; backward, the probability of an inactive token gets the gradient of its usual output."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, probs: Tensor, inactive: Tensor, usual: Tensor) -> Tensor:
        ctx.save_for_backward(inactive, usual)
        ctx.dtype = probs.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        inactive, usual = ctx.saved_tensors
        through = (grad @ usual.to(grad.dtype).t()).to(ctx.dtype)
        return grad, torch.where(inactive, through, 0), None, None


USUAL_DECAY = 0.9
"""Decay per training step of the running mean of a module's outputs."""


class Policy(nn.Module):
    """Decides which tokens are active, from what its router wants.

    Args:
        router: says what it wants. Its parameters belong to whoever made it, and keep their names.
        names: of the modules.
        budget, revival: what is limited, and what keeps the router alive.
        causal: whether decisions at inference must not look ahead.
    """

    training_step: Tensor
    shift: Tensor
    tally: Tensor
    usual: Tensor

    def __init__(
        self,
        router: Router,
        names: Sequence[str],
        budget: BudgetConfig,
        revival: RevivalConfig,
        causal: bool,
    ) -> None:
        super().__init__()
        # in a tuple: not a child, whose parameters would get a second name
        self._router = (router,)
        self.names, self.budget, self.revival, self.causal = tuple(names), budget, revival, causal
        self.override = NOTHING
        self.cap = self._per_module("cap", budget.cap)
        self.target = self._per_module("target", budget.target)
        if self.cap is not None:
            require(
                revival.floor <= min(self.cap),
                f"revival.floor must not exceed budget.cap, got {revival.floor} and {min(self.cap)}",
            )
        self.steered = self.target is not None and budget.target_by == "controller"
        require(
            not (self.steered and router.per_sequence),
            f"budget.target cannot steer {type(router).__name__}, which takes a fixed fraction of each sequence",
        )
        self._limited = self.cap is not None or budget.per_token is not None or self.steered
        self._revives = bool(revival.warmup_steps or revival.noise or revival.floor)
        # what is off leaves no trace in a checkpoint
        if revival.warmup_steps or revival.noise_steps or budget.anneal_steps:
            self.register_buffer("training_step", torch.zeros((), dtype=torch.int64))
        if self.steered:
            self.register_buffer("shift", torch.zeros(len(names)))
            zeros = torch.zeros(2, len(names), dtype=torch.float64)
            self.register_buffer("tally", zeros, persistent=False)
        if revival.inactive_gradient:
            self.register_buffer("usual", torch.zeros(len(names), router.d_model))

    def _per_module(self, what: str, value: Fractions) -> tuple[float, ...] | None:
        given, count = each(value), len(self.names)
        require(
            len(given) in (0, 1, count),
            f"budget.{what} must be one fraction or {count}, one per module; got {len(given)}",
        )
        return None if not given else given * count if len(given) == 1 else given

    @property
    def router(self) -> Router:
        """Says what it wants."""
        return self._router[0]

    def follow(self, router: Router) -> None:
        """Take another router; a module set as an attribute would become part of this one."""
        self._router = (router,)

    @property
    def idle(self) -> bool:
        """Whether the router's decisions simply stand."""
        return not self._limited and self.override is NOTHING and not (self.training and self._revives)

    @property
    def alone(self) -> bool:
        """Whether a decision at inference follows from the token alone: from the router and a fixed shift."""
        return self.cap is None and self.budget.per_token is None and self.override is NOTHING

    # what follows from the training step

    def notice_training_step(self, step: int) -> None:
        """Training has reached this step."""
        if hasattr(self, "training_step"):
            self.training_step.fill_(step)

    def _annealed(self, fractions: tuple[float, ...], device: torch.device) -> Tensor:
        """(modules,): the fractions at the current training step."""
        wanted = torch.tensor(fractions, dtype=torch.float64, device=device)
        if not self.budget.anneal_steps:
            return wanted
        done = (self.training_step.double() / self.budget.anneal_steps).clamp(max=1)
        return 1 + (wanted - 1) * done

    def _warm(self) -> Tensor | None:
        """Whether this is a step of the warm-up; None if it cannot be."""
        if not (self.training and self.revival.warmup_steps):
            return None
        return self.training_step < self.revival.warmup_steps

    def _noise(self, like: Tensor) -> Tensor | None:
        if not (self.training and self.revival.noise):
            return None
        noise = torch.randn_like(like) * self.revival.noise
        if self.revival.noise_steps:
            noise = noise * (1 - self.training_step.to(like.dtype) / self.revival.noise_steps).clamp(min=0)
        return noise

    # decisions

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        seen: Tensor | None = None,
        spent: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Routing:
        """Decide which tokens are active.

        Args:
            x: (batch, time, d_model), real tokens first in every sequence.
            mask: (batch, time), True on real tokens.
            seen: (batch,), real tokens before this call; none by default.
            spent: (batch, modules), tokens activated before this call; none by default.
            documents: the packed documents in x, if there are any; each is treated as a sequence.
        """
        router = self.router
        if documents is not None and not (self.idle and not router.per_sequence):
            routing = self(documents.spread(x), documents.real, seen, spent)
            return Routing(documents.collect(routing.active), documents.collect(routing.probs))
        active, probs = router(x)
        selects = router.per_sequence and (self.training or not self.causal)
        if self.idle and not selects:
            if mask is not None:
                active = active & mask[..., None]
                probs = torch.where(mask[..., None], probs, 0)
            return Routing(active, probs)
        # a token that is not finite activates nothing, whatever decides
        allowed = x.detach().sum(dim=-1, keepdim=True).isfinite()
        if mask is not None:
            allowed = allowed & mask[..., None]
            probs = torch.where(mask[..., None], probs, 0)
        confidence = probs.detach()
        active = self._wanted(active, confidence, allowed, selects)
        active = self._limit(active, confidence, allowed, seen, spent)
        return self._by_hand(Routing(active, probs), allowed)

    def _wanted(self, active: Tensor, probs: Tensor, allowed: Tensor, selects: bool) -> Tensor:
        """(batch, time, modules): what the router wants, after shift, noise or another threshold."""
        router = self.router
        shift: Tensor | None = None
        if self.steered:
            shift = self.shift.to(probs.dtype)
            if self.training:
                shift = self._meet_target(router.margin(probs, shift), allowed)
        noise = self._noise(probs)
        if noise is not None:
            shift = noise if shift is None else shift + noise
        if selects:
            score = torch.logit(probs, eps=1e-6)
            active = router.select(score if shift is None else score + shift, allowed)
        elif shift is not None:
            active = router.choose(probs, shift)
        if self.override.threshold is not None:
            thresholds = self._by_name(self.override.threshold, -1.0)
            least = torch.tensor(thresholds, dtype=probs.dtype, device=probs.device)
            active = torch.where(least < 0, active, probs > least)
        return active & allowed

    @torch.no_grad()
    def _meet_target(self, margin: Tensor, allowed: Tensor) -> Tensor:
        """(modules,): the shift that gives these tokens the target; the controller follows it."""
        assert self.target is not None
        tokens = allowed.sum()
        border = border_at_rate(margin, allowed, self._annealed(self.target, margin.device))
        self.tally[0] += torch.where(tokens > 0, tokens * border, 0)
        self.tally[1] += tokens
        return -border.to(margin.dtype)

    def _limit(
        self,
        active: Tensor,
        probs: Tensor,
        allowed: Tensor,
        seen: Tensor | None,
        spent: Tensor | None,
    ) -> Tensor:
        """Apply the limits to what the router wants."""
        by_order = self.budget.priority == "order" or (self.causal and not self.training)
        before = 0 if seen is None else seen[:, None]
        if self.budget.per_token is not None and self.budget.per_token < len(self.names):
            active = most_confident_modules(active, probs, self.budget.per_token)
        if self.training and self.revival.floor:
            active = self._fill(active, probs, allowed, by_order)
        cap = self._cap(probs.device)
        if cap is not None:
            if by_order:
                number = before + allowed.cumsum(dim=1)[..., 0]
                if spent is None:
                    spent = torch.zeros(len(active), len(self.names), dtype=torch.int64, device=active.device)
                active = first_come(active, allowance(cap, number[..., None]), spent)
            else:
                most = allowance(cap, allowed.sum(dim=1))
                active = active & largest(torch.where(active, probs, -1.0), most)
        warm = self._warm()
        return active if warm is None else torch.where(warm, allowed.expand_as(active), active)

    def _fill(self, active: Tensor, probs: Tensor, allowed: Tensor, by_order: bool) -> Tensor:
        """Add tokens until every module takes its minimum."""
        least = torch.tensor(self.revival.floor, dtype=torch.float64, device=active.device)
        if by_order:
            due = allowance(least, allowed.cumsum(dim=1)).expand_as(active)
            return at_least(active, due, allowed)
        missing = allowance(least, allowed.sum(dim=1)) - active.sum(dim=1)
        inactive = allowed & ~active
        return active | (inactive & largest(torch.where(inactive, probs, -1.0), missing))

    def _cap(self, device: torch.device) -> Tensor | None:
        """(modules,): the cap in force, if any."""
        given = self.override.cap
        if given is None:
            return None if self.cap is None else self._annealed(self.cap, device)
        usual = self.cap or (1.0,) * len(self.names)
        return torch.tensor(self._by_name(given, usual), dtype=torch.float64, device=device)

    def _by_name(self, value: Any, default: Any) -> list[Any]:
        """One value per module, from one for all or some by name."""
        if not isinstance(value, Mapping):
            return [value] * len(self.names)
        defaults = default if isinstance(default, tuple) else (default,) * len(self.names)
        return [value.get(name, other) for name, other in zip(self.names, defaults, strict=True)]

    def _by_hand(self, routing: Routing, allowed: Tensor) -> Routing:
        """Decisions that are made by hand come last."""
        active, probs = routing
        given = self.override.mask
        if given is not None:
            mask = given if isinstance(given, Tensor) else given(routing)
            wide = mask[..., None] if mask.dim() == 2 else mask
            fits = wide.dim() == 3 and wide.dtype == torch.bool and wide.shape[-1] in (1, len(self.names))
            require(
                fits and wide.shape[:2] == active.shape[:2],
                f"the mask of an override must be bool of shape {tuple(active.shape[:2])} or "
                f"{tuple(active.shape)}, got {mask.dtype} of shape {tuple(mask.shape)}",
            )
            active = wide.to(active.device).expand_as(active)
        if self.override.active is not None:
            forced = self._by_name(self.override.active, None)
            columns = [
                active[..., i] if on is None else torch.full_like(active[..., i], on)
                for i, on in enumerate(forced)
            ]
            active = torch.stack(columns, dim=-1)
        if self.override.confidence is not None:
            probs = torch.full_like(probs, self.override.confidence)
        return Routing(active & allowed, probs)

    # gradients of inactive tokens

    @torch.no_grad()
    def remember(self, outputs: Sequence[Tensor]) -> None:
        """Keep the mean output of each module, (tokens, d_model) each."""
        if not (self.training and self.revival.inactive_gradient):
            return
        for i, out in enumerate(outputs):
            usual = self.usual[i]
            count = usual.new_ones(out.shape[0]).sum()
            mean = out.to(usual.dtype).sum(dim=0) / count.clamp(min=1)
            mixed = torch.where(usual.any(), USUAL_DECAY * usual + (1 - USUAL_DECAY) * mean, mean)
            usual.copy_(torch.where(count > 0, mixed, usual))

    def attach(self, y: Tensor, routing: Routing) -> Tensor:
        """Let the gradient of y (batch, time, d_model) reach the probabilities of inactive tokens, if wanted."""
        if not (self.training and self.revival.inactive_gradient):
            return y
        return _InactiveGradient.apply(y, routing.probs, ~routing.active, self.usual.clone())

    # between training steps

    @torch.no_grad()
    def update(self) -> None:
        """Let the controller take a step toward the target, from what was wanted since the last one."""
        if not self.steered:
            return
        tally = self.tally.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(tally)
        # no tokens, no border: 0 / 0 is not finite, and the shift stays
        self.shift.copy_(follow(self.shift, -tally[0] / tally[1], self.budget.gain))
        self.tally.zero_()

    def loss(self, routing: Routing, mask: Tensor | None = None) -> Tensor | None:
        """The term of the loss that steers toward the target, if there is one."""
        if self.target is None or self.budget.target_by != "loss":
            return None
        target = self._annealed(self.target, routing.probs.device)
        weight: float | Tensor = self.budget.loss_weight
        warm = self._warm()
        if warm is not None:
            # where everything is active, the rate says nothing about the router
            weight = weight * ~warm
        return weight * rate_loss(routing, target, mask)


def policies(model: nn.Module) -> list[Policy]:
    """Every policy of a model, in the order of its layers."""
    return [part for part in model.modules() if isinstance(part, Policy)]


def outer_policies(model: nn.Module) -> list[Policy]:
    """The policies whose decisions are part of a model's output: not those inside a module that is activated."""
    parts = list(model.children())
    own = [part for part in parts if isinstance(part, Policy)]
    return own or [policy for part in parts for policy in outer_policies(part)]


def update_budgets(model: nn.Module) -> None:
    """Let every controller of a model take a step; call it after each step of the optimizer.

    With several processes, all of them must call it: what they activated is added up.

    Args:
        model: any module that holds sparsely activated ones.

    >>> import torch
    >>> from seqboat import SeqBoat, update_budgets
    >>> layer = SeqBoat(8, target=0.5).train()
    >>> _ = layer(torch.randn(2, 20, 8))
    >>> update_budgets(layer)
    """
    for policy in policies(model):
        policy.update()


@contextlib.contextmanager
def override_activation(
    model: nn.Module, layers: Sequence[int] | None = None, **decisions: Any
) -> Iterator[None]:
    """Take the decisions of a whole model by hand, inside a `with` block.

    Args:
        model: any module that holds sparsely activated ones.
        layers: which of them, counted from 0 in their order; all by default.
        decisions: as in `SparseModularActivation.override`: `active` (True, False, a mask, or these by module),
            `threshold`, `cap` and so on.

    >>> import torch
    >>> from seqboat import SeqBoat, override_activation
    >>> layer = SeqBoat(8)
    >>> with override_activation(layer, active=False):
    ...     print(int(layer(torch.randn(2, 5, 8)).routing.active.sum()))
    0
    """
    known = policies(model)
    chosen = range(len(known)) if layers is None else layers
    for number in chosen:
        require(0 <= number < len(known), f"layers must be in 0..{len(known) - 1}, got {number}")
    with contextlib.ExitStack() as stack:
        for number in chosen:
            stack.enter_context(overridden(known[number], Override(**decisions)))
        yield


@contextlib.contextmanager
def overridden(policy: Policy, override: Override) -> Iterator[None]:
    """Put an override on top of what a policy has, inside a `with` block."""
    override.check(policy.names)
    outer = policy.override
    policy.override = override.over(outer)
    try:
        yield
    finally:
        policy.override = outer
