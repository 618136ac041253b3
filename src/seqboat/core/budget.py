"""Budgets, revival and manual control: what stands between the wishes of a router and who is active.

The paper lets the loss alone decide how much is activated. Everything here is off by default. A `Policy` takes what
a router decided and how sure it is of every token, and changes who is active, never how sure the router is:

- a budget caps the share of tokens that a module may take, and the modules that a token may wake, or steers the
  share towards a target;
- a revival keeps routers from dying: an inactive token sends its router no gradient, so that a module which nobody
  wakes in the beginning may sleep forever;
- an override takes the decisions out of the router's hands, for experiments and at inference.

Allowances are counted per row, so that no sequence depends on its batch mates. Of n tokens, a share allows
floor(share * n).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from seqboat.checks import check_choice, check_positive, require
from seqboat.core.routers import Router
from seqboat.core.sma import Routing

Shares = float | tuple[float, ...] | None
Priority = Literal["confidence", "order"]
Steering = Literal["controller", "loss"]


def _each(value: Shares) -> tuple[float, ...]:
    return () if value is None else value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """How much may be activated; nothing is limited by default, as in the paper."""

    cap: Shares = None
    """Most tokens that a module may take, as a share of each sequence: one for all modules, or one for each."""
    priority: Priority = "confidence"
    """Who comes first under a cap: the most confident tokens of a sequence, or the earliest. Causal layers go by
    order at inference in any case; in training, confidence looks at later tokens too."""
    per_token: int | None = None
    """Most modules that one token may wake, the most confident ones; 1 makes the modules exclude each other."""
    target: Shares = None
    """Share of tokens that each module should take, on average: one for all modules, or one for each."""
    target_by: Steering = "controller"
    """What steers towards the target: a controller that shifts the decisions, or a term of the loss. In training the
    controller meets the target in every batch; at inference it decides by what it saw in the last ones."""
    gain: float = 0.5
    """How far the controller goes in a step: this part of the way to where the last step met the target."""
    loss_weight: float = 1.0
    """Weight of the squared error in the loss."""
    anneal_steps: int = 0
    """Training steps over which cap and target fall from 1 to their values."""

    def __post_init__(self) -> None:
        for name in ("cap", "target"):
            for share in _each(getattr(self, name)):
                require(0 <= share <= 1, f"budget.{name} must be between 0 and 1, got {share!r}")
            require(getattr(self, name) != (), f"budget.{name} must hold at least one share, got none")
        check_choice("budget.priority", self.priority, get_args(Priority))
        check_choice("budget.target_by", self.target_by, get_args(Steering))
        if self.per_token is not None:
            check_positive("budget.per_token", self.per_token)
        require(0 < self.gain <= 1, f"budget.gain must be above 0 and at most 1, got {self.gain!r}")
        require(self.loss_weight >= 0, f"budget.loss_weight must not be negative, got {self.loss_weight!r}")
        check_positive("budget.anneal_steps", self.anneal_steps, least=0)


@dataclass(frozen=True, kw_only=True)
class RevivalConfig:
    """What keeps routers alive in training; nothing by default, as in the paper."""

    warmup_steps: int = 0
    """Training steps in which every token activates every module, whatever router and budget say."""
    noise: float = 0.0
    """Standard deviation of noise on the log-odds of the decisions in training."""
    noise_steps: int = 0
    """Training steps over which the noise falls to nothing; 0 keeps it."""
    floor: float = 0.0
    """Least share of the tokens of a sequence that each module takes in training, the most confident ones."""
    inactive_gradient: bool = False
    """Whether inactive tokens send the router a gradient, as if the module had given them its usual output."""

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "noise_steps"):
            check_positive(f"revival.{name}", getattr(self, name), least=0)
        require(self.noise >= 0, f"revival.noise must not be negative, got {self.noise!r}")
        require(0 <= self.floor <= 1, f"revival.floor must be between 0 and 1, got {self.floor!r}")


@dataclass(frozen=True, kw_only=True)
class Override:
    """Decisions by hand; see `SparseModularActivation.override`."""

    active: bool | Mapping[str, bool] | None = None
    mask: Tensor | Callable[[Routing], Tensor] | None = None
    threshold: float | Mapping[str, float] | None = None
    cap: float | Mapping[str, float] | None = None
    confidence: float | None = None

    def check(self, names: Sequence[str]) -> None:
        """Refuse names of modules that do not exist, and shares that are none."""
        for what in ("active", "threshold", "cap"):
            value = getattr(self, what)
            known = ", ".join(names)
            for name in value if isinstance(value, Mapping) else ():
                require(name in names, f"override of {what}: there is no module {name!r} among {known}")
            for share in value.values() if isinstance(value, Mapping) else [value]:
                fits = share is None or (isinstance(share, bool) if what == "active" else 0 <= share <= 1)
                expected = "true or false" if what == "active" else "between 0 and 1"
                require(fits, f"override of {what} must be {expected}, got {share!r}")

    def over(self, outer: Override) -> Override:
        """This override inside another one: what it leaves open is the outer one's."""
        return replace(outer, **{name: value for name, value in vars(self).items() if value is not None})


NOTHING = Override()


def allowance(share: Tensor, tokens: Tensor) -> Tensor:
    """How many of so many tokens a share allows.

    >>> allowance(torch.tensor(0.1, dtype=torch.float64), torch.tensor([9, 10, 30])).tolist()
    [0, 1, 3]
    """
    # 0.29 * 100 is a little less than 29
    return (share.double() * tokens + 1e-9).floor().long()


def largest(score: Tensor, count: Tensor) -> Tensor:
    """Mark the `count` largest scores along time; among equal ones the first.

    Args:
        score: (batch, time, modules).
        count: (batch, modules).
    """
    order = score.argsort(dim=1, descending=True, stable=True)
    chosen = torch.arange(score.shape[1], device=score.device)[:, None] < count[:, None]
    return torch.zeros_like(chosen.expand_as(score)).scatter(1, order, chosen.expand_as(order))


def border_of_share(score: Tensor, allowed: Tensor, share: Tensor) -> Tensor:
    """(modules,): a score that this share of the allowed tokens of a batch exceeds.

    Args:
        score: (batch, time, modules).
        allowed: (batch, time, 1) bool; the result means nothing if there is none.
        share: (modules,).
    """
    if not score.shape[0] * score.shape[1]:
        return share
    ranked = torch.where(allowed, score, -torch.inf).flatten(0, 1).sort(dim=0, descending=True).values
    tokens = allowed.sum()
    count = (share * tokens).round().long()
    # between the last token above and the first below; beyond the ends if all or none should be above
    last, first = (count - 1).clamp(min=0), torch.minimum(count, (tokens - 1).clamp(min=0))
    above, below = (ranked.gather(0, place[None])[0].double() for place in (last, first))
    return (above + below) / 2 + (count == 0).double() - (count == tokens).double()


def first_come(wants: Tensor, most: Tensor, spent: Tensor) -> Tensor:
    """Grant wishes in order, as long as the tokens granted so far stay within what is allowed so far.

    With W wishes and A grants up to a token, A = min(A before + wish, most), which is W + min(most - W) over all
    tokens so far: no loop over time.

    Args:
        wants: (batch, time, modules) bool.
        most: (batch, time, modules), grants allowed up to each token; must not fall along time.
        spent: (batch, modules), grants before this call.
    """
    if not wants.shape[1]:
        return wants
    wishes = wants.cumsum(dim=1)
    spare = torch.maximum(most, spent[:, None]) - wishes
    granted = wishes + torch.minimum(spare.cummin(dim=1).values, spent[:, None])
    return granted.diff(dim=1, prepend=spent[:, None]) > 0


def at_least(wants: Tensor, least: Tensor, allowed: Tensor) -> Tensor:
    """Add tokens in order wherever those so far fall short of what is due so far.

    Args:
        wants: (batch, time, modules) bool.
        least: (batch, time, modules), tokens due up to each one; rises by at most one along time.
        allowed: (batch, time, 1) bool, who may be added.
    """
    if not wants.shape[1]:
        return wants
    wishes = wants.cumsum(dim=1)
    taken = wishes + (least - wishes).cummax(dim=1).values.clamp(min=0)
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


def rate_loss(routing: Routing, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Squared distance of the activation rates from a target, summed over the modules.

    The rate itself has no gradient: that of the mean probability of all tokens, active or not, stands in for it.

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


class _InactiveGradient(torch.autograd.Function):
    """The identity of y; backward, the probability of an inactive token gets the gradient of its usual output."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, probs: Tensor, inactive: Tensor, usual: Tensor) -> Tensor:
        ctx.save_for_backward(inactive, usual)
        ctx.dtype = probs.dtype
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        inactive, usual = ctx.saved_tensors
        through = (grad @ usual.to(grad.dtype).t()).to(ctx.dtype)
        return grad, torch.where(inactive, through, 0), None, None


USUAL_DECAY = 0.9
"""Of the running mean of a module's outputs, per training step."""


class Policy(nn.Module):
    """Decides who is active, from what a router wants.

    Args:
        names: of the modules.
        d_model: width of the tokens.
        budget, revival: what is limited, and what keeps routers alive.
    """

    training_step: Tensor
    shift: Tensor
    tally: Tensor
    usual: Tensor

    def __init__(
        self, names: Sequence[str], d_model: int, budget: BudgetConfig, revival: RevivalConfig
    ) -> None:
        super().__init__()
        self.names, self.budget, self.revival = tuple(names), budget, revival
        self.override = NOTHING
        self.cap = self._shares("cap", budget.cap)
        self.target = self._shares("target", budget.target)
        if self.cap is not None:
            require(
                revival.floor <= min(self.cap),
                f"revival.floor must not exceed budget.cap, got {revival.floor} and {min(self.cap)}",
            )
        self.steered = self.target is not None and budget.target_by == "controller"
        # what is off leaves no trace in a checkpoint
        if revival.warmup_steps or revival.noise_steps or budget.anneal_steps:
            self.register_buffer("training_step", torch.zeros((), dtype=torch.int64))
        if self.steered:
            self.register_buffer("shift", torch.zeros(len(names)))
            zeros = torch.zeros(2, len(names), dtype=torch.float64)
            self.register_buffer("tally", zeros, persistent=False)
        if revival.inactive_gradient:
            self.register_buffer("usual", torch.zeros(len(names), d_model))

    def _shares(self, what: str, value: Shares) -> tuple[float, ...] | None:
        shares, count = _each(value), len(self.names)
        require(
            len(shares) in (0, 1, count),
            f"budget.{what} must be one share or {count}, one per module; got {len(shares)}",
        )
        return None if not shares else shares * count if len(shares) == 1 else shares

    @property
    def idle(self) -> bool:
        """Whether the router's decisions simply stand."""
        return (
            self.cap is None
            and self.budget.per_token is None
            and not self.steered
            and not (self.training and self._revives)
            and self.override is NOTHING
        )

    @property
    def _revives(self) -> bool:
        return bool(self.revival.warmup_steps or self.revival.noise or self.revival.floor)

    # what follows from the training step

    def notice_training_step(self, step: int) -> None:
        """Training has come so far."""
        if hasattr(self, "training_step"):
            self.training_step.fill_(step)

    def _annealed(self, shares: tuple[float, ...], device: torch.device) -> Tensor:
        """(modules,): the shares at the current training step."""
        wanted = torch.tensor(shares, dtype=torch.float64, device=device)
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
        router: Router,
        x: Tensor,
        mask: Tensor | None,
        causal: bool,
        seen: Tensor | None = None,
        spent: Tensor | None = None,
    ) -> Routing:
        """Decide who is active.

        Args:
            router: says what it wants.
            x: (batch, time, d_model), real tokens first in every row.
            mask: (batch, time), True on real tokens.
            causal: whether decisions at inference must not look ahead.
            seen: (batch,), real tokens before this call; none by default.
            spent: (batch, modules), tokens activated before this call; none by default.
        """
        active, probs = router(x)
        selects = router.by_row and (self.training or not causal)
        if self.idle and not selects:
            if mask is not None:
                active = active & mask[..., None]
                probs = torch.where(mask[..., None], probs, 0)
            return Routing(active, probs)
        # a token that is not finite activates nothing, whoever decides
        allowed = x.detach().sum(dim=-1, keepdim=True).isfinite()
        if mask is not None:
            allowed = allowed & mask[..., None]
            probs = torch.where(mask[..., None], probs, 0)
        certain = probs.detach()
        active = self._wishes(router, active, certain, allowed, selects)
        active = self._limit(active, certain, allowed, causal, seen, spent)
        return self._by_hand(Routing(active, probs), allowed)

    def _wishes(
        self, router: Router, active: Tensor, probs: Tensor, allowed: Tensor, selects: bool
    ) -> Tensor:
        """(batch, time, modules): what the router wants, after shift, noise or another threshold."""
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
        """(modules,): the shift that gives these tokens the target; the controller hears of it."""
        assert self.target is not None
        tokens = allowed.sum()
        border = border_of_share(margin, allowed, self._annealed(self.target, margin.device))
        self.tally[0] += torch.where(tokens > 0, tokens * border, 0)
        self.tally[1] += tokens
        return -border.to(margin.dtype)

    def _limit(
        self,
        active: Tensor,
        probs: Tensor,
        allowed: Tensor,
        causal: bool,
        seen: Tensor | None,
        spent: Tensor | None,
    ) -> Tensor:
        """Apply the limits to wishes."""
        wishes = active
        by_order = self.budget.priority == "order" or (causal and not self.training)
        before = 0 if seen is None else seen[:, None]
        if self.budget.per_token is not None and self.budget.per_token < len(self.names):
            active = most_confident_modules(active, probs, self.budget.per_token)
        if self.training and self.revival.floor:
            active = self._raise(active, probs, allowed, by_order)
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
        return active if warm is None else torch.where(warm, allowed.expand_as(wishes), active)

    def _raise(self, active: Tensor, probs: Tensor, allowed: Tensor, by_order: bool) -> Tensor:
        """Add tokens until every module has its least share."""
        share = torch.tensor(self.revival.floor, dtype=torch.float64, device=active.device)
        if by_order:
            due = allowance(share, allowed.cumsum(dim=1)).expand_as(active)
            return at_least(active, due, allowed)
        short = allowance(share, allowed.sum(dim=1)) - active.sum(dim=1)
        sleeping = allowed & ~active
        return active | (sleeping & largest(torch.where(sleeping, probs, -1.0), short))

    def _cap(self, device: torch.device) -> Tensor | None:
        """(modules,): the cap in force, if any."""
        given = self.override.cap
        if given is None:
            return None if self.cap is None else self._annealed(self.cap, device)
        usual = self.cap or (1.0,) * len(self.names)
        shares = self._by_name(given, usual)
        return torch.tensor(shares, dtype=torch.float64, device=device)

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
        """Let the controller take a step towards the target, from what was wanted since the last one."""
        if not self.steered:
            return
        tally = self.tally.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(tally)
        border = tally[0] / tally[1].clamp(min=1)
        moved = torch.where(tally[1] > 0, self.budget.gain * (-border - self.shift), 0)
        self.shift += moved.to(self.shift.dtype)
        self.tally.zero_()

    def loss(self, routing: Routing, mask: Tensor | None = None) -> Tensor | None:
        """The term of the loss that steers towards the target, if there is one."""
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
    """The policies of a model whose decisions are part of its output: not those inside a module that is activated."""
    parts = list(model.children())
    own = [part for part in parts if isinstance(part, Policy)]
    return own or [policy for part in parts for policy in outer_policies(part)]


def update_budgets(model: nn.Module) -> None:
    """Let every controller of a model take a step; call it after each step of the optimiser.

    Of several processes all must call it: what they activated is added up.
    """
    for policy in policies(model):
        policy.update()


def budget_loss(
    model: nn.Module, routings: Sequence[Routing | None], masks: Sequence[Tensor | None] = (None,)
) -> Tensor | None:
    """What budgets add to the loss of a batch; None if they add nothing.

    Args:
        model: whose output it is.
        routings: of all layers, from the model's output; of several sequences one after the other.
        masks: (batch, time) each, one per sequence.
    """
    known = outer_policies(model)
    if not any(policy.target is not None and policy.budget.target_by == "loss" for policy in known):
        return None
    routed = [routing for routing in routings if routing is not None]
    each = len(routed) // len(masks)
    require(
        each == len(known),
        f"routings must hold {len(known)} x {len(masks)}, one per routed layer and mask; got {len(routed)}",
    )
    terms = [
        policy.loss(routing, masks[number // each])
        for number, (policy, routing) in enumerate(zip(cycle(known), routed, strict=False))
    ]
    return torch.stack([term for term in terms if term is not None]).sum()


@contextlib.contextmanager
def override_activation(
    model: nn.Module, layers: Sequence[int] | None = None, **decisions: Any
) -> Iterator[None]:
    """Take the decisions of a whole model by hand, inside a `with` block.

    Args:
        model: any module that holds sparsely activated ones.
        layers: which of them, counted from 0 in their order; all by default.
        **decisions: as in `SparseModularActivation.override`.
    """
    known = policies(model)
    chosen = range(len(known)) if layers is None else layers
    for number in chosen:
        require(0 <= number < len(known), f"layers must lie in 0..{len(known) - 1}, got {number}")
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
