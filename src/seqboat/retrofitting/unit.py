"""One module that runs only on the tokens that a router picks, and its threshold."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.core.layout import front
from seqboat.core.mixer import Routing
from seqboat.layers.budget import rate_loss
from seqboat.layers.routers import Router
from seqboat.layers.sma import Packed, pack

Steering = Literal["controller", "loss"]
"""How the rate is kept: by thresholds that follow the batches, or by a term of the loss."""
Kind = Literal["tokens", "sequence", "block"]
"""How to run a module: on packed tokens, on each sequence's active tokens, or like that with a residual inside."""

MOMENTUM = 0.9
"""Weight of the old threshold in the running average, after the first batches."""


class Call:
    """The current call of the model, as its modules need to know it."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        """(batch, time) bool: True on real tokens; None if all are"""
        self.real_count = 0
        self.units = 1
        """the retrofitted modules"""
        self.tracking = False
        """whether to update thresholds in evaluation mode too"""

    def real(self, x: Tensor) -> Tensor | None:
        """The mask of x (batch, time, dim), if there is one."""
        return self.mask if self.mask is not None and self.mask.shape == x.shape[:2] else None


class Slots(NamedTuple):
    """The active tokens of each sequence, moved to its front."""

    place: Tensor
    """(batch, slots): positions in the sequence; after the last active token, those of inactive ones"""
    real: Tensor | None
    """(batch, slots) bool: False after the last active token of a sequence; None if all are True"""

    def take(self, x: Tensor) -> Tensor:
        """Gather (batch, slots, ...) from (batch or 1, time, ...)."""
        x = x.expand(self.place.shape[0], *x.shape[1:])
        index = self.place.view(*self.place.shape, *(1,) * (x.dim() - 2))
        return x.gather(1, index.expand(-1, -1, *x.shape[2:]))

    def put(self, y: Tensor, base: Tensor) -> Tensor:
        """`base` (batch, time, dim), with active tokens replaced by their slots of y (batch, slots, dim)."""
        index = self.place[..., None].expand_as(y)
        if self.real is not None:
            y = torch.where(self.real[..., None], y, base.gather(1, index))
        return base.scatter(1, index, y)


def find_slots(active: Tensor, per_sequence: Tensor, width: int, count: int) -> Slots:
    """The slots of (batch, time) decisions.

    Args:
        active: the decisions.
        per_sequence: (batch,), number of active tokens in each sequence.
        width: slots per sequence.
        count: total number of active tokens.
    """
    order = front(active).order
    assert order is not None
    if count == active.shape[0] * width:
        return Slots(order[:, :width], None)
    return Slots(order[:, :width], torch.arange(width, device=active.device) < per_sequence[:, None])


def slot_mask(mask: Any, x: Tensor, slots: Slots) -> Tensor | None:
    """The attention mask between slots, (batch, heads or 1, slots, slots); None if attention is right without one.

    Args:
        mask: of the tokens, (batch, heads or 1, time, time), bool or additive; None if every token sees all.
        x: (batch, time, dim), the tokens.
        slots: where they were moved.
    """
    require(
        mask is None or (isinstance(mask, Tensor) and mask.dim() == 4),
        "attention_mask must be None or (batch, heads, queries, keys), as for the attention implementations "
        f"eager and sdpa; got {describe(mask)}",
    )
    place, real = slots
    lowest = torch.finfo(x.dtype).min
    if mask is None:
        if real is None:
            return None
        # added to the scores, which every attention implementation understands; an unused slot sees all keys: a
        # softmax must not be empty
        hidden = real[:, :, None] & ~real[:, None, :]
        return torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill_(hidden, lowest)[:, None]
    batch, time, _ = x.shape
    mask = mask.expand(batch, mask.shape[1], time, mask.shape[3])
    mask = mask.gather(2, place[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))
    mask = mask.gather(3, place[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1))
    if real is not None:
        no, yes = (False, True) if mask.dtype == torch.bool else (torch.finfo(mask.dtype).min, 0.0)
        mask = mask.masked_fill(~real[:, None, None, :], no).masked_fill(~real[:, None, :, None], yes)
    return mask


def describe(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class Halfway(NamedTuple):
    """A block of BERT's layout between its halves."""

    tokens: Tensor
    """the block's input: its active tokens, packed or in slots; all of them if all are active"""
    probs: Tensor
    """their probabilities"""
    where: Packed | Slots | None
    """where they came from; None if all are active"""


class SparseUnit(nn.Module):
    """Runs its owner, a module, on the tokens that a router picks.

    Args:
        owner: the module; it is not a child of this one.
        kind: how to run it.
        router: decides for one module.
        budget: how the fraction of active tokens is kept.
        call: of the whole model.
        second: where the owner is only the first half of a block, as in BERT's layout: the module that takes the
            owner's output and the block's input, projects, adds and normalizes; it is not a child of this one.
        substitute: a cheap module in the place of the owner (or of both halves) for inactive tokens.
    """

    threshold: Tensor
    updates: Tensor

    def __init__(
        self,
        owner: nn.Module,
        kind: Kind,
        router: Router,
        budget: Steering,
        call: Call,
        second: nn.Module | None = None,
        substitute: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.substitute = substitute
        self.kind: Kind = kind
        self.budget: Steering = budget
        self.rate = 1.0
        # in a tuple, so that the owner does not become a child of its own child
        self._owner = (owner,)
        self._second = (second,)
        self._before = owner.__dict__.get("forward")
        self._halfway: Halfway | None = None
        self._names = [
            name
            for name, parameter in inspect.signature(owner.forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        self.call = call
        self.register_buffer("threshold", torch.tensor(0.5))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.pending: Tensor | None = None
        self.routing: Routing | None = None
        self.activated = self.seen = 0

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The owner's original forward."""
        owner = self._owner[0]
        if self._before is not None:
            return self._before(*args, **kwargs)
        if type(owner).forward is nn.Sequential.forward:
            # a Sequential runs all its children, including this one
            (x,) = args
            for part in owner.children():
                x = x if part is self else part(x)
            return x
        return type(owner).forward(owner, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the owner on active tokens; others get what `skipped` says."""
        require(
            len(args) <= len(self._names),
            f"a retrofitted module takes named arguments, got {len(args)} for {', '.join(self._names)}",
        )
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        x = given.pop(self._names[0], None)
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError(f"a retrofitted module takes (batch, time, dim), got {describe(x)}")
        routing = self.route(x)
        return (
            self.run_tokens(x, given, routing)
            if self.kind == "tokens"
            else self.run_sequence(x, given, routing)
        )

    def route(self, x: Tensor) -> Routing:
        """Decide on (batch, time, dim); both parts of the routing are (batch, time)."""
        real = self.call.real(x)
        if self.rate == 1.0 and not torch.is_grad_enabled() and not self.tracking:
            ones = x.new_ones(x.shape[:2])
            return self.note(Routing(ones.bool(), ones), real)
        # normalized: where the module's input is not, the size of a token is meaningless
        token = F.rms_norm(x.detach() if self.rate == 1.0 else x, x.shape[-1:])
        probs: Tensor = self.router(token).probs[..., 0]
        threshold = self.threshold
        if self.tracking:
            seen = probs.detach() if real is None else probs.detach()[real]
            # a token that is not finite is never active, and is not counted
            self.pending = torch.nanquantile(seen.flatten(), 1 - self.rate) if seen.numel() else None
            # routers change faster than a running average: in training, every batch has its own threshold
            threshold = threshold if self.pending is None else self.pending
        # at rate 1 everything runs as before, padding included
        active = torch.ones_like(probs, dtype=torch.bool) if self.rate == 1.0 else probs >= threshold
        if real is not None and self.rate < 1.0:
            active = active & real
        return self.note(Routing(active, probs), real)

    @property
    def tracking(self) -> bool:
        """Whether the threshold follows the batches; with the budget "loss" it stays that of rate 1."""
        wanted = self.training and (self.budget == "controller" or self.rate == 1.0)
        return wanted or self.call.tracking

    @torch.no_grad()
    def follow(self) -> None:
        """Update the threshold from the last batch.

        Not done while a batch runs: gradient checkpointing runs it twice, and both runs must decide alike.
        """
        if self.pending is not None:
            self.updates += 1
            weight = (1 / self.updates).clamp(min=1 - MOMENTUM)
            moved = torch.lerp(self.threshold, self.pending.to(self.threshold.dtype), weight)
            self.threshold.copy_(torch.where(moved.isfinite(), moved, self.threshold))
            self.pending = None

    def rate_error(self) -> Tensor:
        """Squared difference of the last call's rate and the budget; its gradient reaches every probability."""
        assert self.routing is not None
        active, probs = self.routing
        routing = Routing(active[..., None], probs[..., None])
        return rate_loss(routing, probs.new_tensor(self.rate), self.call.real(probs))

    def auxiliary_loss(self) -> Tensor | None:
        """This module's part of `Retrofit.loss` if the budget is "loss"; for `seqboat.extra_loss`."""
        if self.budget != "loss" or self.routing is None:
            return None
        return self.rate_error() / self.call.units

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseUnit:
        """Move or convert all but the threshold: in half precision many probabilities would tie with it."""
        threshold = self.threshold
        super()._apply(fn, recurse)
        self.threshold = threshold.to(self.threshold.device)
        return self

    def note(self, routing: Routing, real: Tensor | None) -> Routing:
        self.routing = routing
        self.seen += routing.active.numel() if real is None else self.call.real_count
        return routing

    def skipped(self, x: Tensor) -> Tensor:
        """What tokens (..., dim) get that do not run the owner: nothing or the substitute's output is added."""
        added = None if self.substitute is None else self.substitute(x)
        if self.halved:
            norm = self.norm
            x = x if added is None else x + added
            return x if norm is None else norm(x)
        if self.kind == "block":
            return x if added is None else x + added
        return torch.zeros_like(x) if added is None else added

    def gate(self, y: Tensor, probs: Tensor, tokens: Tensor) -> Tensor:
        """y unchanged; the probability gets the gradient of probs * y + (1 - probs) * skipped(tokens)."""
        if not torch.is_grad_enabled():
            return y
        nothing = (probs - probs.detach())[..., None].to(y.dtype)
        return y + nothing * (y - self.skipped(tokens.detach()).detach())

    def join(self, x: Tensor, y: Tensor, packed: Packed) -> Tensor:
        """(batch, time, dim): the packed results y of active tokens, and what the others get."""
        if self.substitute is None and not self.halved:
            return packed.add(torch.zeros_like(x, dtype=y.dtype), y)
        flat = x.reshape(-1, x.shape[-1])
        idle = torch.ones(flat.shape[0], dtype=torch.bool, device=x.device).index_fill(0, packed.flat, False)
        place = idle.nonzero_static(size=flat.shape[0] - y.shape[0]).squeeze(1)
        parts = torch.cat([y, self.skipped(flat.index_select(0, place)).to(y.dtype)])
        return torch.empty_like(parts).index_copy(0, torch.cat([packed.flat, place]), parts).view(x.shape)

    @property
    def halved(self) -> bool:
        """Whether the owner is the first half of a block."""
        return self._second[0] is not None

    @property
    def inside_residual(self) -> bool:
        """Whether the residual connection is part of what the router decides on."""
        return self.halved or self.kind == "block"

    @property
    def norm(self) -> nn.Module | None:
        """The norm that ends a block of two halves."""
        assert self._second[0] is not None
        found = [part for part in self._second[0].children() if isinstance(part, nn.LayerNorm)]
        return found[0] if len(found) == 1 else None

    def finish(self, hidden: Tensor, x: Tensor) -> Tensor:
        """The second half of a block, on the tokens that took the first.

        Args:
            hidden: what the first half returned for the active tokens.
            x: (batch, time, dim), the block's input.
        """
        second, halfway = self._second[0], self._halfway
        assert second is not None and halfway is not None, "the second half of a block ran without the first"
        self._halfway = None
        tokens, probs, where = halfway
        y = self.check_output(type(second).forward(second, hidden, tokens), tokens)
        if isinstance(where, Packed):
            return self.join(x, self.gate(y[0], probs, tokens[0]), where)
        y = self.gate(y, probs, tokens)
        return y if where is None else where.put(y, self.skipped(x).to(y.dtype))

    def run_tokens(self, x: Tensor, kwargs: dict[str, Any], routing: Routing) -> Tensor:
        """Run the owner on all active tokens of the batch as one packed sequence."""
        require(
            not any(isinstance(value, Tensor) for value in kwargs.values()),
            'a token-wise module takes one tensor; select this one as "sequence"',
        )
        packed = pack(routing.active)
        count = packed.flat.shape[0]
        self.activated += min(count, self._real_count(x))
        if count == x.shape[0] * x.shape[1]:
            y = self.original(x, **kwargs)
            if self.halved:
                self._halfway = Halfway(x, routing.probs, None)
                return y
            return self.gate(self.check_output(y, x), routing.probs, x)
        tokens = packed.take(x)[None]
        probs = routing.probs.flatten()[packed.flat]
        y = self.original(tokens, **kwargs)
        if self.halved:
            self._halfway = Halfway(tokens, probs, packed)
            return y
        return self.join(x, self.gate(self.check_output(y, tokens)[0], probs, tokens[0]), packed)

    def run_sequence(self, x: Tensor, kwargs: dict[str, Any], routing: Routing) -> Any:
        """Run the owner on the active tokens of each sequence, moved to its front."""
        require(
            kwargs.get("position_bias") is None,
            "a retrofitted module cannot have a position bias: it is between all tokens",
        )
        batch, time, _ = x.shape
        per_sequence = routing.active.sum(dim=1)
        # the only sync with the device
        count, width = torch.stack([per_sequence.sum(), per_sequence.max()]).tolist()
        self.activated += min(count, self._real_count(x))
        # where nothing is active, an unused slot, so that every weight gets a gradient
        width = max(width, min(1, time))
        slots = None if count == batch * time else find_slots(routing.active, per_sequence, width, count)
        tokens = x if slots is None else slots.take(x)
        if slots is not None:
            for key in ("position_embeddings", "position_ids"):
                if isinstance(kwargs.get(key), tuple):
                    kwargs[key] = tuple(map(slots.take, kwargs[key]))
                elif kwargs.get(key) is not None:
                    kwargs[key] = slots.take(kwargs[key])
            kwargs["attention_mask"] = slot_mask(kwargs.get("attention_mask"), x, slots)
        out = self.original(tokens, **kwargs)
        y, others = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
        self.check_output(y, tokens)
        probs = routing.probs if slots is None else slots.take(routing.probs)
        if self.halved:
            self._halfway = Halfway(tokens, probs, slots)
        else:
            y = self.gate(y, probs, tokens)
        if slots is not None:
            y = y if self.halved else slots.put(y, self.skipped(x).to(y.dtype))
            # attention weights are between slots, not between tokens
            others = None if others is None else (None,) * len(others)
        return y if others is None else (y, *others)

    def check_output(self, y: Any, x: Tensor) -> Tensor:
        require(
            isinstance(y, Tensor) and y.shape == x.shape,
            f"a retrofitted module must return the shape it takes, {tuple(x.shape)}, got {describe(y)}",
        )
        return y

    def _real_count(self, x: Tensor) -> int:
        return x.shape[0] * x.shape[1] if self.call.real(x) is None else self.call.real_count
