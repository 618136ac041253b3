"""Sparse activation for a model that exists already: chosen modules run only on the tokens that a router picks.

The paper names this as the next step for its mechanism (section 6). `retrofit` changes a model in place: attention
and feed-forward blocks of a decoder of transformers, or any modules of any model, keep their class, name and weights;
each gets a router as a child module, `sparse`, and its `forward` leads through it. At first every token is
active and the outputs are those of before, bit for bit. Then the budget is lowered (`Retrofit.set_rate`) while the
model is tuned.

- The output of an active token is not scaled: what a trained module returns keeps its size. The gradient reaches the
  router as if it had been scaled by the probability (a straight-through estimate of the paper's confidence).
- A token is active if its probability is at least a threshold, a number that belongs to the module. In training it is
  the quantile of the batch that the budget asks for, so that every batch meets it; the running average of these
  quantiles decides in evaluation, where a decision depends on nothing but the token.
- Modules that treat each token alone get the active tokens of the batch as one packed array. Modules that read a
  sequence get each row's active tokens moved to the front, with the positions and the mask of where they came from;
  in cached generation the others leave no keys and values (`sparse_cache`).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.checks import check_choice, check_positive, require
from seqboat.core.budget import Steering
from seqboat.core.routers import ROUTERS, Router, RouterConfig, SigmoidConfig, SigmoidRouter
from seqboat.core.sma import Routing, pack
from seqboat.core.steering import rate_loss
from seqboat.data.files import replacing, write_json

Kind = Literal["tokens", "sequence", "block"]
"""How a module is run: on packed tokens, on each row's active tokens, or so with its residual connection inside."""

CHILD = "sparse"
"""Name under which a module holds its router."""
FORMAT = 1
"""Version of the saved files; a newer one is refused."""
MOMENTUM = 0.9
"""Share of the old threshold in the next one, once there are enough batches to average."""

_PARTS: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "attention": ("sequence", ("self_attn", "attn", "attention", "self_attention")),
    "mlp": ("tokens", ("mlp", "feed_forward", "ffn")),
}
"""What the parts of decoder layers are called in transformers."""


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """The share of active tokens over training: `start`, then a straight line to `final`, then `final`.

    >>> schedule = RateSchedule(final=0.5, begin=100, steps=200)
    >>> [schedule(step) for step in (0, 100, 200, 300, 1000)]
    [1.0, 1.0, 0.75, 0.5, 0.5]
    """

    final: float
    """The share at the end."""
    start: float = 1.0
    """The share at the beginning."""
    begin: int = 0
    """The step at which it begins to move."""
    steps: int
    """Steps from start to final."""

    def __post_init__(self) -> None:
        check_share("start", self.start)
        check_share("final", self.final)
        check_positive("begin", self.begin, least=0)
        check_positive("steps", self.steps)

    def __call__(self, step: int) -> float:
        done = min(max((step - self.begin) / self.steps, 0.0), 1.0)
        return self.start + (self.final - self.start) * done


def check_share(name: str, value: float) -> None:
    """Refuse a share of tokens outside (0, 1]."""
    require(0.0 < value <= 1.0, f"{name} must be in (0, 1], got {value!r}")


class Slots(NamedTuple):
    """The active tokens of each row at its front."""

    place: Tensor
    """(batch, slots): places in the sequence; behind the last active token, places of inactive ones"""
    real: Tensor | None
    """(batch, slots) bool: False behind the last active token of a row; None if there is no such slot"""

    def take(self, x: Tensor) -> Tensor:
        """(batch, slots, ...) of (batch or 1, time, ...)."""
        x = x.expand(self.place.shape[0], *x.shape[1:])
        index = self.place.view(*self.place.shape, *(1,) * (x.dim() - 2))
        return x.gather(1, index.expand(-1, -1, *x.shape[2:]))

    def put(self, y: Tensor, base: Tensor) -> Tensor:
        """(batch, time, dim): `base`, with active tokens replaced by their slot of (batch, slots, dim)."""
        index = self.place[..., None].expand_as(y)
        if self.real is not None:
            y = torch.where(self.real[..., None], y, base.gather(1, index))
        return base.scatter(1, index, y)


class Call:
    """What the model was called with, for the modules inside it."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        """(batch, time) bool: True on real tokens; None if all are"""
        self.real_count = 0
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
        budget: who keeps the share of active tokens.
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
            raise ValueError(f"a retrofitted module takes (batch, time, dim), got {_describe(x)}")
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
        # the size of a token says nothing about it where the module's input is not normalised
        token = F.rms_norm(x.detach() if self.rate == 1.0 else x, x.shape[-1:])
        probs = self.score(token)[..., 0]
        threshold = self.threshold
        if self.tracking:
            seen = probs.detach() if real is None else probs.detach()[real]
            # a token that is not finite is active nowhere, and has no say
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
        """Whether the threshold follows what goes by; a loss can only move it away from where it was at the start."""
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
            moved = torch.lerp(self.threshold, self.pending.float(), weight)
            self.threshold.copy_(torch.where(moved.isfinite(), moved, self.threshold))
            self.pending = None

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
        """On all active tokens of the batch as one row."""
        require(
            not any(isinstance(value, Tensor) for value in kwargs.values()),
            "a module that treats each token alone takes one tensor; wrap this one as a sequence",
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
        """On each row's active tokens, moved to its front."""
        batch, time, _ = x.shape
        name, layer = self._cache(kwargs)
        per_row = routing.active.sum(dim=1)
        if batch * time == 1 and (layer is None or layer.even is not None):
            # one token: either nothing runs or everything does
            count = width = int(per_row)
            longest = shortest = width + (0 if layer is None else layer.even)
        else:
            totals = per_row if layer is None or layer.count is None else per_row + layer.count
            # the one place where the host waits for the device
            sizes = [per_row.sum(), per_row.max(), totals.max(), totals.min()]
            count, width, longest, shortest = torch.stack(sizes).tolist()
        self.activated += min(count, self._real_count(x))
        skip = x if self.kind == "block" else torch.zeros_like(x)
        if count == 0:
            if not torch.is_grad_enabled():
                if layer is not None:
                    layer.seen += time
                return skip if self.kind == "block" else (skip, None)
            width = min(1, time)  # a slot whose output nobody sees, so that every weight has a gradient
        everyone = count == batch * time
        slots = None if everyone else _find_slots(routing.active, per_row, width, count)
        if slots is not None:
            for key in ("position_embeddings", "position_ids"):
                if kwargs.get(key) is not None:
                    kwargs[key] = _take(slots, kwargs[key])
        if layer is not None:
            kwargs[name] = _Appending(kwargs[name], layer)
        if "attention_mask" in kwargs or layer is not None:
            mask = kwargs.get("attention_mask")
            kwargs["attention_mask"] = _mask(mask, x, slots, layer, max(longest, width), shortest == longest)
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
            f"a retrofitted module must return the shape it takes, {tuple(x.shape)}, got {_describe(y)}",
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


def _find_slots(active: Tensor, per_row: Tensor, width: int, count: int) -> Slots:
    order = active.to(torch.int8).sort(dim=1, descending=True, stable=True).indices
    if count == active.shape[0] * width:
        return Slots(order[:, :width], None)
    return Slots(order[:, :width], torch.arange(width, device=active.device) < per_row[:, None])


def _take(slots: Slots, value: Any) -> Any:
    """The slots' part of a (batch or 1, time, ...) tensor, or of each tensor of a tuple."""
    return tuple(slots.take(part) for part in value) if isinstance(value, tuple) else slots.take(value)


def _mask(mask: Any, x: Tensor, slots: Slots | None, layer: Any, longest: int, even: bool) -> Any:
    """The mask of slots: (batch, 1, slots, keys), or None where order alone is enough.

    Args:
        mask: of tokens, (batch, heads or 1, time, seen + time), bool or added to scores; None is causal.
        x: (batch, time, dim), the tokens.
        slots: where they went; None if they stayed.
        layer: of the cache, whose tokens come first; None without a cache.
        longest: keys of the longest row.
        even: whether all rows are as long.
    """
    require(
        mask is None or (isinstance(mask, Tensor) and mask.dim() == 4),
        "attention_mask must be None or (batch, heads, queries, keys), as for the attention implementations "
        f"eager and sdpa; got {_describe(mask)}",
    )
    batch, time, _ = x.shape
    place = torch.arange(time, device=x.device).expand(batch, time) if slots is None else slots.place
    real = None if slots is None else slots.real
    queries, keys, keep = place, place, real
    if layer is not None:
        past = layer.seen
        queries = place + past
        layer.announce(queries, real, longest, even)
        if mask is None and time == 1 and even and slots is None:
            return None  # one token per row, which sees all that its row holds
        if past > 0:  # otherwise the keys are the slots themselves
            keys, keep = layer.visible()
    if mask is None:
        if keys is place:
            return None  # slots keep their order, and no real one sees those behind it
        assert keep is not None
        visible = (keys[:, None, :] <= queries[:, :, None]) & keep[:, None, :]
        return visible[:, None] if real is None else (visible | ~real[:, :, None])[:, None]
    if slots is None and keys is place:
        return mask
    heads, columns = mask.shape[1], mask.shape[3]
    mask = mask.expand(batch, heads, time, columns)
    mask = mask.gather(2, place[:, None, :, None].expand(-1, heads, -1, columns))
    mask = mask.gather(3, keys[:, None, None, :].expand(-1, heads, mask.shape[2], -1))
    if keep is not None:
        hidden = ~keep[:, None, None, :]
        mask = mask.masked_fill(hidden, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)
    if real is not None:
        # a slot whose output nobody sees looks at everything: a row of a softmax must not be empty
        mask = mask.masked_fill(~real[:, None, :, None], True if mask.dtype == torch.bool else 0.0)
    return mask


def _describe(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class Retrofit:
    """A model whose chosen modules run only on the tokens that routers pick; made by `retrofit`.

    The model itself is used as before. This holds what is new: the budget, the statistics, the routers.
    """

    def __init__(
        self,
        model: nn.Module,
        kinds: Mapping[str, Kind],
        d_model: int,
        router: RouterConfig,
        budget: Steering,
    ) -> None:
        self.model = model
        self.kinds = dict(kinds)
        self.d_model, self.router, self.budget = d_model, router, budget
        self.units: dict[str, SparseUnit] = {}
        """by the name of the module"""
        self._frozen: list[nn.Parameter] = []
        self._call = Call()
        for name, kind in self.kinds.items():
            owner = model.get_submodule(name)
            weight = next(owner.parameters(), torch.empty(()))
            unit = SparseUnit(owner, kind, router.build(d_model).to(weight.device), budget, self._call)
            unit.to(weight.device).train(owner.training)
            owner.add_module(CHILD, unit)
            owner.forward = unit.forward
            self.units[name] = unit
        self._signature = inspect.signature(model.forward)
        self._hook = model.register_forward_pre_hook(self._begin, with_kwargs=True)

    @staticmethod
    def of(model: nn.Module) -> Retrofit:
        """What was done to a model: of a copy that has no other handle."""
        for hook in model._forward_pre_hooks.values():
            found = getattr(hook, "__self__", None)
            if isinstance(found, Retrofit):
                return found
        raise ValueError(f"{type(model).__name__} is not retrofitted")

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model runs: thresholds move, and the mask of padding is noted."""
        for unit in self.units.values():
            unit.follow()
        given = self._signature.bind_partial(*args, **kwargs).arguments if args else kwargs
        mask = given.get("attention_mask", given.get("kwargs", {}).get("attention_mask"))
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        self._call.mask = None
        if isinstance(mask, Tensor) and mask.dim() == 2 and isinstance(tokens, Tensor):
            # in cached generation the mask covers the past too
            mask = mask[:, mask.shape[1] - tokens.shape[1] :].bool()
            self._call.real_count = int(mask.sum())
            self._call.mask = mask if self._call.real_count < mask.numel() else None

    @property
    def rate(self) -> float:
        """The share of tokens that every module may activate; 1 leaves the model as it was."""
        return next(iter(self.units.values())).rate

    def set_rate(self, rate: float) -> None:
        """Change the share of active tokens that training aims at, or that `calibrate` sets."""
        check_share("rate", rate)
        for unit in self.units.values():
            if unit.rate != rate:
                # the last batch under the old rate counts still, and then no more
                unit.follow()
                unit.updates.zero_()
                unit.rate = rate

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Mapping[str, Any]]) -> None:
        """Set the thresholds for the present rate from data alone: nothing is learned.

        Later modules see what earlier ones leave out, so several batches are needed until all have settled.

        Args:
            batches: keyword arguments of the model, one call each; it runs in evaluation mode.
        """
        was, self._call.tracking = self.model.training, True
        self.model.eval()
        try:
            for batch in batches:
                self.model(**batch)
            for unit in self.units.values():
                unit.follow()
        finally:
            self._call.tracking = False
            self.model.train(was)

    def loss(self) -> Tensor:
        """How far the shares of the last call are from the budget: mean over modules of the squared difference.

        Add it to the loss of the task (times a weight, 1 or more) where the budget is "loss". Its gradient reaches
        every token's probability, active or not.
        """
        terms = []
        for name, unit in self.units.items():
            require(unit.routing is not None, f"{name} has not run yet: call the model before its loss")
            assert unit.routing is not None
            active, probs = unit.routing
            real = self._call.real(probs)
            terms.append(
                rate_loss(Routing(active[..., None], probs[..., None]), probs.new_tensor(unit.rate), real)
            )
        return torch.stack(terms).mean()

    def rates(self) -> dict[str, float]:
        """The share of tokens that each module activated since `reset_statistics`; padding does not count."""
        return {name: unit.activated / max(unit.seen, 1) for name, unit in self.units.items()}

    def reset_statistics(self) -> None:
        """Begin to count anew."""
        for unit in self.units.values():
            unit.activated = unit.seen = 0

    def routings(self) -> dict[str, Routing]:
        """The decisions of the last call, (batch, time, 1) each."""
        return {
            name: Routing(*(part[..., None] for part in unit.routing))
            for name, unit in self.units.items()
            if unit.routing is not None
        }

    def router_parameters(self) -> list[nn.Parameter]:
        """What the retrofit added: parameters to tune alone, or with a learning rate of their own."""
        return [parameter for unit in self.units.values() for parameter in unit.parameters()]

    def freeze(self) -> None:
        """Keep everything but the routers as it is; `unfreeze` takes this back."""
        mine = {id(parameter) for parameter in self.router_parameters()}
        for parameter in self.model.parameters():
            if id(parameter) not in mine and parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen.append(parameter)

    def unfreeze(self) -> None:
        """Make trainable what `freeze` froze."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen.clear()

    def original_state_dict(self) -> dict[str, Tensor]:
        """The model's weights without the routers: what a model of its class can load.

        >>> retrofitted.model.save_pretrained(folder, state_dict=retrofitted.original_state_dict())  # doctest: +SKIP
        """
        added = tuple(f"{name}.{CHILD}." if name else f"{CHILD}." for name in self.units)
        return {key: value for key, value in self.model.state_dict().items() if not key.startswith(added)}

    def save(self, folder: str | Path) -> None:
        """Write what the retrofit added, retrofit.json and retrofit.safetensors; the model is saved its own way."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{name}.{key}": value.contiguous()
            for name, unit in self.units.items()
            for key, value in unit.state_dict().items()
        }
        names = {config: name for name, config in ROUTERS.items()}
        about = {
            "format": FORMAT,
            "kinds": self.kinds,
            "rates": {name: unit.rate for name, unit in self.units.items()},
            "d_model": self.d_model,
            "router": {"name": names[type(self.router)], **asdict(self.router)},
            "budget": self.budget,
        }
        with replacing(folder / "retrofit.safetensors") as stage:
            save_file(tensors, stage)
        write_json(folder / "retrofit.json", about, indent=2)

    def undo(self) -> None:
        """Give every module its own forward back and remove the routers; weights stay as they are now."""
        self.unfreeze()
        self._hook.remove()
        for name, unit in self.units.items():
            owner = self.model.get_submodule(name)
            if unit._before is None:
                del owner.forward
            else:
                owner.forward = unit._before
            delattr(owner, CHILD)
        self.units.clear()


def retrofit(
    model: nn.Module,
    select: Sequence[str] | Mapping[str, Kind] = ("attention", "mlp"),
    *,
    d_model: int | None = None,
    router: RouterConfig | None = None,
    budget: Steering = "controller",
) -> Retrofit:
    """Make chosen modules of a model sparse, in place. At first all tokens are active, and nothing changes.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
    >>> sparse = retrofit(model, {"1": "tokens"}, d_model=8)
    >>> sparse.set_rate(0.5)
    >>> y = model(torch.randn(2, 5, 8))  # a training step: from here the threshold follows the rate
    >>> sparse.rates().keys()
    dict_keys(['1'])

    Args:
        model: a decoder of transformers, or any module.
        select: parts of a decoder, any of "attention", "mlp", or "block" for whole layers; or patterns of names of
            modules and how to run them: {"model.layers.[13].mlp": "tokens"}. "tokens" are modules that treat each
            token alone; "sequence" are causal modules of (batch, time, dim); "block" are such modules with their
            residual connection inside, whose skipped tokens pass unchanged.
        d_model: width of the tokens; by default what the model's configuration says.
        router: decides; one logit per token by default.
        budget: who keeps the share of active tokens: "controller" moves the thresholds in training, "loss" asks for
            `Retrofit.loss` to be added to the loss.
    """
    check_choice("budget", budget, get_args(Steering))
    require(
        not any(isinstance(part, SparseUnit) for part in model.modules()),
        "model is retrofitted already: call undo() first",
    )
    kinds = find_modules(model, select)
    config = getattr(model, "config", None)
    if d_model is None:
        d_model = getattr(config, "hidden_size", None)
        require(d_model is not None, "d_model must be given: the model has no config.hidden_size")
        assert d_model is not None
    check_positive("d_model", d_model)
    kernel = getattr(config, "_attn_implementation", None)
    require(
        kernel in (None, "eager", "sdpa") or all(kind == "tokens" for kind in kinds.values()),
        f"the model's attention implementation must be eager or sdpa, got {kernel}",
    )
    return Retrofit(model, kinds, d_model, router or SigmoidConfig(), budget)


def find_modules(model: nn.Module, select: Sequence[str] | Mapping[str, Kind]) -> dict[str, Kind]:
    """Names of the modules that `retrofit` would wrap, and how they would be run."""
    require(not isinstance(select, str), f"select must be a sequence or a mapping, got the string {select!r}")
    found: dict[str, Kind] = {}
    if isinstance(select, Mapping):
        names = [name for name, _ in model.named_modules() if name]
        for pattern, kind in select.items():
            check_choice(f"select[{pattern!r}]", kind, get_args(Kind))
            matches = [name for name in names if fnmatchcase(name, pattern)]
            require(len(matches) > 0, f"select: no module of the model is called {pattern!r}")
            found.update(dict.fromkeys(matches, kind))
    else:
        for part in select:
            check_choice("select", part, (*_PARTS, "block"))
        for path, layer in _decoder_layers(model):
            if "block" in select:
                found[path] = "block"
            for part, (kind, _) in _PARTS.items():
                if part in select:
                    found[f"{path}.{_part(layer, part)}"] = kind
        require(
            len(found) > 0,
            f"select: no decoder layers with attention and mlp found in {type(model).__name__}; "
            "name modules by pattern",
        )
    for name, kind in found.items():
        outer = [other for other in found if name.startswith(f"{other}.")]
        require(not outer, f"select: {name} is inside {outer and outer[0]}, which is selected too")
        _check_module(name, model.get_submodule(name), kind)
    return found


def _part(layer: nn.Module, part: str) -> str | None:
    """The name of a part of a decoder layer."""
    return next((name for name in _PARTS[part][1] if isinstance(getattr(layer, name, None), nn.Module)), None)


def _decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (f"{path}.{i}" if path else str(i), layer)
        for path, layers in model.named_modules()
        if isinstance(layers, nn.ModuleList)
        for i, layer in enumerate(layers)
        if all(_part(layer, part) is not None for part in _PARTS)
    ]


def _check_module(name: str, module: nn.Module, kind: Kind) -> None:
    """Refuse modules that cannot be run on some of their tokens."""
    if kind == "tokens":
        return
    for part in module.modules():
        require(
            getattr(part, "is_causal", True) is not False,
            f"{name} must be causal to be run on a part of its tokens, but is_causal is False",
        )
        require(
            getattr(part, "sliding_window", None) is None,
            f"{name} has a sliding window, which counts positions that a sparse module leaves out",
        )


def load_retrofit(model: nn.Module, folder: str | Path) -> Retrofit:
    """Retrofit a model with what `Retrofit.save` wrote, thresholds and rates included.

    Args:
        model: of the same class, with its own weights loaded already.
        folder: that holds retrofit.json and retrofit.safetensors.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    file = folder / "retrofit.json"
    require(file.is_file(), f"{folder} holds no retrofit.json")
    about = json.loads(file.read_text(encoding="utf-8"))
    require(about.get("format") == FORMAT, f"{file} has format {about.get('format')!r}, expected {FORMAT}")
    settings = dict(about["router"])
    router = ROUTERS[settings.pop("name")](**settings)
    made = retrofit(model, about["kinds"], d_model=about["d_model"], router=router, budget=about["budget"])
    tensors = load_file(folder / "retrofit.safetensors")
    for name, unit in made.units.items():
        own = {
            key.removeprefix(f"{name}."): value
            for key, value in tensors.items()
            if key.startswith(f"{name}.")
        }
        unit.load_state_dict(own)
        unit.rate = about["rates"][name]
    return made
