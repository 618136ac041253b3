"""One module that runs only on the tokens that a router picks, with the threshold that decides."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.checks import require
from seqboat.core.budget import Steering
from seqboat.core.routers import Router, SigmoidRouter
from seqboat.core.sma import Routing, pack
from seqboat.core.steering import follow, rate_loss
from seqboat.retrofitting.slots import describe, find_slots, slot_mask, take_slots

Kind = Literal["tokens", "sequence", "block"]
"""How a module is run: on packed tokens, on the active tokens of each sequence, or so with its residual inside."""

MOMENTUM = 0.9
"""Weight of the old threshold in the next one, once there are enough batches to average."""


class Call:
    """What the model was called with, for the modules inside it."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        """(batch, time) bool: True on real tokens; None if all are"""
        self.real_count = 0
        self.units = 1
        """modules that are retrofitted"""
        self.tracking = False
        """whether thresholds are tracked in evaluation mode too"""

    def real(self, x: Tensor) -> Tensor | None:
        """The mask of x (batch, time, dim), if there is one."""
        return self.mask if self.mask is not None and self.mask.shape == x.shape[:2] else None


class SparseUnit(nn.Module):
    """Runs a module, its owner, on the tokens that a router picks.

    Args:
        owner: the module; it is not a child of this one.
        kind: how it is run.
        router: decides for one module.
        budget: what keeps the fraction of active tokens.
        call: of the whole model.
    """

    threshold: Tensor
    updates: Tensor

    def __init__(self, owner: nn.Module, kind: Kind, router: Router, budget: Steering, call: Call) -> None:
        super().__init__()
        self.router = router
        self.kind: Kind = kind
        self.budget: Steering = budget
        self.rate = 1.0
        # in a tuple, so that the owner does not become a child of its own child
        self._owner = (owner,)
        self._before = owner.__dict__.get("forward")
        self._names = [
            name
            for name, parameter in inspect.signature(owner.forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        self._layer: int | None = None
        self.call = call
        self.register_buffer("threshold", torch.tensor(0.5))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.pending: Tensor | None = None
        self.routing: Routing | None = None
        self.activated = self.seen = 0

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The owner's own forward."""
        owner = self._owner[0]
        if self._before is not None:
            return self._before(*args, **kwargs)
        if type(owner).forward is nn.Sequential.forward:
            # it runs all its children, and this one is among them
            (x,) = args
            for part in owner.children():
                x = x if part is self else part(x)
            return x
        return type(owner).forward(owner, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The owner's forward, for active tokens; zero for others (their input, if the kind is "block")."""
        require(
            len(args) <= len(self._names),
            f"a retrofitted module takes arguments with names, got {len(args)} for {', '.join(self._names)}",
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
        # the size of a token says nothing about it where the module's input is not normalized
        token = F.rms_norm(x.detach() if self.rate == 1.0 else x, x.shape[-1:])
        probs = self.score(token)[..., 0]
        threshold = self.threshold
        if self.tracking:
            seen = probs.detach() if real is None else probs.detach()[real]
            # a token that is not finite is never active, and does not count
            self.pending = torch.nanquantile(seen.flatten(), 1 - self.rate) if seen.numel() else None
            # routers move faster than an average follows: in training every batch meets the rate by itself
            threshold = threshold if self.pending is None else self.pending
        # with no budget everything runs as it used to, padding included
        active = torch.ones_like(probs, dtype=torch.bool) if self.rate == 1.0 else probs >= threshold
        if real is not None and self.rate < 1.0:
            active = active & real
        return self.note(Routing(active, probs), real)

    def score(self, x: Tensor) -> Tensor:
        """The router's probabilities (batch, time, 1)."""
        router = self.router
        plain = not (torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type))
        if plain and isinstance(router, SigmoidRouter) and x.dtype in (torch.float32, torch.float64):
            logits = router.logits
            if x.dtype == logits.weight.dtype:
                # the same in fewer steps: in decoding every one of them counts
                return torch.sigmoid(F.linear(x, logits.weight, logits.bias))
        probs: Tensor = router(x).probs
        return probs

    @property
    def tracking(self) -> bool:
        """Whether the threshold follows the batches; steered by the loss, it stays where it was at rate 1."""
        wanted = self.training and (self.budget == "controller" or self.rate == 1.0)
        return wanted or self.call.tracking

    @torch.no_grad()
    def follow(self) -> None:
        """Move the threshold to where the last batch wanted it.

        Not done while a batch runs: under gradient checkpointing a batch runs twice, and must decide alike.
        """
        if self.pending is not None:
            self.updates += 1
            weight = (1 / self.updates).clamp(min=1 - MOMENTUM)
            self.threshold.copy_(follow(self.threshold, self.pending, weight))
            self.pending = None

    def rate_error(self) -> Tensor:
        """Squared distance of the last call's rate from the budget; its gradient reaches every probability."""
        assert self.routing is not None
        active, probs = self.routing
        routing = Routing(active[..., None], probs[..., None])
        return rate_loss(routing, probs.new_tensor(self.rate), self.call.real(probs))

    def auxiliary_loss(self) -> Tensor | None:
        """This module's part of `Retrofit.loss`, where the budget is "loss"; for `seqboat.extra_loss`."""
        if self.budget != "loss" or self.routing is None:
            return None
        return self.rate_error() / self.call.units

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseUnit:
        """Move or convert all but the threshold: in half precision many tokens would be as probable as it."""
        threshold = self.threshold
        super()._apply(fn, recurse)
        self.threshold = threshold.to(self.threshold.device)
        return self

    def note(self, routing: Routing, real: Tensor | None) -> Routing:
        self.routing = routing
        self.seen += routing.active.numel() if real is None else self.call.real_count
        return routing

    def gate(self, y: Tensor, probs: Tensor, skip: Tensor | float) -> Tensor:
        """y, with the gradient of y scaled by its probability against `skip`."""
        if not torch.is_grad_enabled():
            return y
        nothing = (probs - probs.detach())[..., None].to(y.dtype)
        return y + nothing * (y - skip)

    def run_tokens(self, x: Tensor, kwargs: dict[str, Any], routing: Routing) -> Tensor:
        """On all active tokens of the batch as one sequence."""
        require(
            not any(isinstance(value, Tensor) for value in kwargs.values()),
            "a token-wise module takes one tensor; select this one as a sequence",
        )
        # in decoding, all or nothing is likely: then nothing needs to be found
        packed = pack(routing.active) if x.shape[1] > 1 else None
        count = int(routing.active.sum()) if packed is None else packed.flat.shape[0]
        self.activated += min(count, self._real_count(x))
        if count == x.shape[0] * x.shape[1]:
            y = self.check_output(self.original(x, **kwargs), x)
            return self.gate(y, routing.probs, 0.0)
        if count == 0 and not torch.is_grad_enabled():
            return torch.zeros_like(x)
        packed = packed or pack(routing.active)
        tokens = packed.take(x)[None]
        y = self.check_output(self.original(tokens, **kwargs), tokens)[0]
        y = self.gate(y, routing.probs.flatten()[packed.flat], 0.0)
        return packed.add(torch.zeros_like(x, dtype=y.dtype), y)

    def run_sequence(self, x: Tensor, kwargs: dict[str, Any], routing: Routing) -> Any:
        """On the active tokens of each sequence, moved to its front."""
        batch, time, _ = x.shape
        name, layer = self._cache(kwargs)
        per_sequence = routing.active.sum(dim=1)
        if batch * time == 1 and (layer is None or layer.even is not None):
            # one token: either nothing runs or everything does
            count = width = int(per_sequence)
            longest = shortest = width + (0 if layer is None else layer.even)
        else:
            totals = per_sequence if layer is None or layer.count is None else per_sequence + layer.count
            # the one place where the host waits for the device
            sizes = [per_sequence.sum(), per_sequence.max(), totals.max(), totals.min()]
            count, width, longest, shortest = torch.stack(sizes).tolist()
        self.activated += min(count, self._real_count(x))
        skip = x if self.kind == "block" else torch.zeros_like(x)
        if count == 0:
            if not torch.is_grad_enabled():
                if layer is not None:
                    layer.seen += time
                return skip if self.kind == "block" else (skip, None)
            width = min(1, time)  # a slot whose output is not used, so that every weight has a gradient
        all_active = count == batch * time
        slots = None if all_active else find_slots(routing.active, per_sequence, width, count)
        if slots is not None:
            for key in ("position_embeddings", "position_ids"):
                if kwargs.get(key) is not None:
                    kwargs[key] = take_slots(slots, kwargs[key])
        if layer is not None:
            kwargs[name] = _Appending(kwargs[name], layer)
        if "attention_mask" in kwargs or layer is not None:
            mask = kwargs.get("attention_mask")
            kwargs["attention_mask"] = slot_mask(
                mask, x, slots, layer, max(longest, width), shortest == longest
            )
        tokens = x if slots is None else slots.take(x)
        out = self.original(tokens, **kwargs)
        if layer is not None:
            layer.seen += time
        y, others = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
        self.check_output(y, tokens)
        probs = routing.probs if slots is None else slots.take(routing.probs)
        y = self.gate(y, probs, tokens if self.kind == "block" else 0.0)
        if slots is not None:
            y = slots.put(y, skip.to(y.dtype))
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

    def _cache(self, kwargs: Mapping[str, Any]) -> tuple[str, Any]:
        """The argument that holds transformers' cache, and the layer of it that is the owner's."""
        for name in ("past_key_values", "layer_past", "past_key_value"):
            if kwargs.get(name) is not None:
                from seqboat.retrofitting.cache import sparse_layer

                if self._layer is None:
                    self._layer = _layer_index(self._owner[0])
                return name, sparse_layer(kwargs[name], self._layer)
        return "", None


class _Appending:
    """Stands for transformers' cache while one layer runs on some of its tokens."""

    def __init__(self, cache: Any, layer: Any) -> None:
        self.cache, self.layer = cache, layer

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.layer.update(keys, values)


def _layer_index(owner: nn.Module) -> int:
    """The place of a module's layer in the cache."""
    found: set[Any] = {getattr(part, "layer_idx", None) for part in owner.modules()} - {None}
    require(len(found) == 1, f"{type(owner).__name__} must have one layer_idx to use a cache, found {found}")
    return int(found.pop())
