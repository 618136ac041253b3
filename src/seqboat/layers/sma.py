"""Sparse modular activation: a router activates each module for the tokens that need it.

Section 3.2 of the paper: y_t = sum_i c_t^i f_i(x)_t over the modules i that token t activates. The active tokens of
the whole batch are packed into one array, sequence after sequence; a module sees only those, in their order.

    decisions  = router(x), limited by the budget, changed by hand
    packed     = pack(active)                    where active tokens are
    y          = base + sum_i add(c_i * f_i(take(x)))

`compress` and `extract` are the paper's operators (listings 1 and 2), on sequences padded to the longest.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, require
from seqboat.core.layout import WHOLE, Documents, Layout, clear, front_places
from seqboat.core.mixer import Mixer, MixerOutput, Routing
from seqboat.layers.budget import BudgetConfig, limit, per_module
from seqboat.layers.routers import ROUTERS, Router, RouterConfig, TemperedSoftmax

Combine = Literal["sum", "average"]
Form = Literal["gated", "paper"]
SATURATION = 3.0
"""Slope of the gate: it is 1 from a probability of 1/2 + 1/6 on."""
DEAD_AFTER = 200
"""Training steps without an activated token after which a router counts as dead."""
REMEDY = (
    'train with a budget with a target, or build the layer with init="scaled", whose routers start active '
    '(docs/layers.md, "Dead routers")'
)


def gate(routing: Routing) -> Tensor:
    """The weight of each token in the gated form: clamp(3 (2p - 1), 0, 1), continuous where a token becomes active.

    Tokens that are active by hand, against the router, count as a whole.

    >>> gate(Routing(torch.tensor([True, True, False]), torch.tensor([0.9, 0.625, 0.4]))).tolist()
    [1.0, 0.75, 0.0]
    """
    m = (SATURATION * (2 * routing.probs - 1)).clamp(0, 1)
    return torch.where(routing.active, torch.where(routing.probs < 0.5, 1.0, m), 0.0).to(m.dtype)


def compress(x: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Move the active positions of each sequence to the front, keeping their order (listing 1).

    Args:
        x: (batch, time, dim).
        active: (batch, time) bool.

    Returns:
        packed: (batch, slots, dim), zeros after the last active token of a sequence.
        slot: (batch, time), where each position went; `slots` for inactive ones.

    >>> x = torch.arange(4.0).view(1, 4, 1)
    >>> packed, slot = compress(x, torch.tensor([[False, True, False, True]]))
    >>> packed.flatten().tolist(), slot.tolist()
    ([1.0, 3.0], [[2, 0, 2, 1]])
    """
    slots = int(active.sum(dim=1).max()) if active.numel() else 0
    # every inactive position points at one spare slot past the end: cut off here, read as zero by extract
    slot = torch.where(active, front_places(active), slots)
    packed = x.new_zeros(x.shape[0], slots + 1, x.shape[-1])
    packed = packed.scatter(1, slot[..., None].expand_as(x), x)
    return packed[:, :slots], slot


def extract(y: Tensor, slot: Tensor) -> Tensor:
    """Put each slot back at the position it came from; zero where nothing was active (listing 2).

    Args:
        y: (batch, slots, dim), one output for each slot.
        slot: (batch, time), from `compress`.

    Returns:
        (batch, time, dim).

    >>> extract(torch.tensor([[[5.0], [6.0]]]), torch.tensor([[2, 0, 2, 1]])).flatten().tolist()
    [0.0, 5.0, 0.0, 6.0]
    """
    return F.pad(y, (0, 0, 0, 1)).gather(1, slot[..., None].expand(-1, -1, y.shape[-1]))


class Packed(NamedTuple):
    """Where the tokens of a packed array came from; sequence after sequence, tokens in their order.

    >>> from seqboat import pack
    >>> packed = pack(torch.tensor([[False, True], [True, True]]))
    >>> packed.flat.tolist(), packed.row.tolist(), packed.position.tolist(), packed.offsets.tolist()
    ([1, 2, 3], [0, 1, 1], [1, 0, 1], [0, 1, 3])
    >>> x = torch.arange(4.0).view(2, 2, 1)
    >>> packed.add(torch.zeros(2, 2, 1), 10 * packed.take(x)).flatten().tolist()
    [0.0, 10.0, 20.0, 30.0]
    """

    flat: Tensor
    """(tokens,): place in the flattened (batch * time) sequence"""
    row: Tensor
    """(tokens,): sequence of the batch, or document"""
    position: Tensor
    """(tokens,): position in the original sequence, counted from its beginning"""
    offsets: Tensor
    """(rows + 1,): where each sequence begins in the packed array"""
    longest: int
    """tokens of the longest sequence, or a bound while a graph is made"""
    weight: Tensor | None = None
    """(tokens,): how much each token counts for those that see it; all alike by default"""

    @property
    def slot(self) -> Tensor:
        """(tokens,): place among the active tokens of the same sequence."""
        return torch.arange(self.flat.shape[0], device=self.flat.device) - self.offsets[self.row]

    def take(self, x: Tensor) -> Tensor:
        """The packed tokens (tokens, dim) of (batch, time, dim)."""
        return x.reshape(-1, x.shape[-1]).index_select(0, self.flat)

    def add(self, base: Tensor, y: Tensor) -> Tensor:
        """Add packed (tokens, dim) to (batch, time, dim) at the places they came from."""
        return base.reshape(-1, base.shape[-1]).index_add(0, self.flat, y).view(base.shape)


def pack(active: Tensor, seen: Tensor | None = None, documents: Documents | None = None) -> Packed:
    """Find the active tokens of a batch. This is the one place where the host waits for the device.

    Args:
        active: (batch, time) bool.
        seen: (batch,), tokens of each sequence before this call; none by default.
        documents: what a batch of 1 is made of.

    >>> packed = pack(torch.tensor([[False, True], [True, True]]))
    >>> packed.flat.tolist(), packed.row.tolist(), packed.offsets.tolist()
    ([1, 2, 3], [0, 1, 1], [0, 1, 3])
    """
    time, listed = active.shape[1], active.reshape(-1)
    if documents is None:
        counts = active.sum(dim=1)
    else:
        counts = F.pad(listed.cumsum(dim=0), (1, 0)).index_select(0, documents.offsets).diff()
    longest = time
    if torch.compiler.is_compiling() or not active.numel() or not counts.numel():
        index = listed.nonzero()
    elif active.device.type == "cpu":
        index, longest = listed.nonzero(), int(counts.amax())
    else:
        # both sizes in one transfer
        size, longest = torch.stack([counts.sum(), counts.amax()]).tolist()
        index = listed.nonzero_static(size=size)
    index = index.squeeze(1)
    if documents is None:
        row = torch.div(index, max(time, 1), rounding_mode="floor")
        position = index - row * time
    else:
        row, position = documents.number[index], documents.position[index]
    if seen is not None:
        position = position + seen[row]
    return Packed(index, row, position, F.pad(counts.cumsum(dim=0), (1, 0)), longest)


class PackedModule(nn.Module, ABC):
    """A contextual module: it sees only its active tokens, and they see each other.

    Token-wise modules need none of this: any nn.Module on (tokens, dim) will do. A module that is not causal only
    needs `forward`, and may return its output without a state.

    >>> from seqboat import PackedModule, SparseModularActivation
    >>> class Count(PackedModule):
    ...     def forward(self, tokens, packed, state=None):      # adds the number of active tokens of the sequence
    ...         return tokens + packed.offsets.diff()[packed.row].unsqueeze(1)
    >>> sparse = SparseModularActivation({"count": Count()}, d_model=4)
    >>> sparse(torch.randn(2, 6, 4)).y.shape
    torch.Size([2, 6, 4])
    """

    causal: bool = False
    grows: bool = False
    """Whether the state grows with the sequence."""
    weighs: bool = False
    """Whether tokens count for others by `Packed.weight`; set by the layer that runs the module."""

    @abstractmethod
    def forward(self, tokens: Tensor, packed: Packed, state: Any = None) -> Tensor | tuple[Tensor, Any]:
        """Process the active tokens of a batch.

        Args:
            tokens: (tokens, dim).
            packed: where they came from.
            state: what the module remembers of the tokens it saw before; None at the beginning.

        Returns:
            (tokens, dim), and the state after the last token (None unless causal).
        """

    def init_state(self, batch: int) -> Any:
        """The state before the first token."""
        raise NotImplementedError(f"{type(self).__name__} carries no state")

    def step(
        self, x: Tensor, active: Tensor, position: Tensor, state: Any, weight: Tensor | None = None
    ) -> Tensor:
        """One token of every sequence; overwrites the state of the active ones.

        Args:
            x: (batch, dim); what comes out for inactive ones is not used.
            active: (batch,) bool.
            position: (batch,), in the original sequence.
            state: of all sequences.
            weight: (batch,), as in `Packed`, where the module weighs.
        """
        raise NotImplementedError(f"{type(self).__name__} carries no state")


class Recent:
    """The decisions of the last forward passes in training, for whoever asked for them; a copy begins anew."""

    def __init__(self) -> None:
        self.on = False
        self.routings: list[Routing] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Recent:
        return Recent()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Recent, ())

    def add(self, routing: Routing) -> None:
        self.routings = [*self.routings[-31:], routing]

    def take(self) -> list[Routing]:
        found, self.routings = self.routings, []
        return found


class SMAState(NamedTuple):
    """What sparsely activated modules remember."""

    modules: tuple[Any, ...]
    """one state per module; None for token-wise modules"""
    seen: Tensor
    """(batch,): real tokens so far, activated or not"""
    spent: Tensor
    """(batch, modules): tokens that each module has taken so far"""


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


class SparseModularActivation(Mixer):
    """Runs modules on the tokens that a router picks for them.

    >>> ffn = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> sparse = SparseModularActivation({"ffn": ffn}, d_model=8)
    >>> y, _, routing = sparse(torch.randn(2, 5, 8))
    >>> y.shape, routing.active.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 5, 1]))

    Args:
        modules: one, several by name, or a list (named "0", "1", ...). Token-wise modules are called on
            (tokens, d_model), the active tokens of the whole batch. Contextual ones are `PackedModule`s
            (`layers.adapters` has some); torch's attention, encoder layers and recurrent nets are wrapped,
            and other modules that mix tokens are refused.
        d_model: width of the tokens; the router's by default.
        router: a router, its configuration, or its name in ROUTERS; a tempered softmax by default.
        combine: whether a token's outputs are summed, or averaged with their confidences as weights.
        budget: how much may be activated.
        causal: whether the layer carries a state and never looks ahead at inference; by default, if all its
            contextual modules do.
        form: what scales the outputs: the router's confidence ("paper"), or a weight that is continuous at the border
            and enters attention too ("gated"; see `SeqBoatConfig.form`).
        start_active: whether a router that is built here starts with every token active; otherwise the initial
            fraction of active tokens depends on the seed, as in the paper.
    """

    packs = True

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | Iterable[nn.Module] | nn.Module,
        d_model: int | None = None,
        router: Router | RouterConfig | str | None = None,
        *,
        combine: Combine = "sum",
        budget: BudgetConfig | None = None,
        causal: bool | None = None,
        form: Form = "paper",
        start_active: bool = True,
    ) -> None:
        from seqboat.layers.adapters import as_unit, name_modules

        super().__init__()
        named = {name: as_unit(name, module) for name, module in name_modules(modules).items()}
        check_choice("combine", combine, get_args(Combine))
        check_choice("form", form, get_args(Form))
        self.units = nn.ModuleDict(named)
        self.router = _make_router(router, d_model, len(named))
        if start_active and self.router is not router:
            self.router.start_active()
        d_model = self.router.d_model if d_model is None else d_model
        require(
            self.router.modules_count == len(named) and self.router.d_model == d_model,
            f"router decides for {self.router.modules_count} modules of width {self.router.d_model}, "
            f"but there are {len(named)} modules of width {d_model}",
        )
        self.d_model, self.combine, self.form, self.names = d_model, combine, form, tuple(named)
        contextual = [unit for unit in named.values() if isinstance(unit, PackedModule)]
        for unit in contextual:
            unit.weighs = form == "gated"
        can = all(unit.causal for unit in contextual)
        require(can or not causal, "causal needs modules that are causal, but some are not")
        self.causal = can if causal is None else causal
        self.budget = budget or BudgetConfig()
        self.cap = per_module("cap", self.budget.cap, len(named))
        self.target = per_module("target", self.budget.target, len(named))
        self.by_hand = NOTHING
        self.recent = Recent()
        self.inactive = [0] * len(named)
        """training steps in a row without an active token, per module"""
        self.warns = True
        """whether to warn of dead routers; `seqboat train` reports them itself"""

    @contextlib.contextmanager
    def override(
        self,
        *,
        active: bool | Mapping[str, bool] | None = None,
        mask: Tensor | Callable[[Routing], Tensor] | None = None,
        threshold: float | Mapping[str, float] | None = None,
        cap: float | Mapping[str, float] | None = None,
        confidence: float | None = None,
    ) -> Iterator[None]:
        """Take decisions by hand, inside a `with` block; blocks may be nested.

        Args:
            active: force every module on or off, or some of them by name. Padding, and tokens that are not finite,
                stay inactive.
            mask: the decisions themselves, bool of shape (batch, time) or (batch, time, modules), with the real
                tokens of every sequence first; or a function that makes them from a `Routing`.
            threshold: activate above this probability instead of by the router's rule.
            cap: largest fraction of tokens that a module may take, instead of the budget's.
            confidence: of every active token, instead of the router's.

        `active` comes last: no mask, threshold or cap changes the modules that it forces.
        """
        given = Override(active=active, mask=mask, threshold=threshold, cap=cap, confidence=confidence)
        given.check(self.names)
        outer = self.by_hand
        self.by_hand = given.over(outer)
        try:
            yield
        finally:
            self.by_hand = outer

    @property
    def alone(self) -> bool:
        """Whether the router's decisions simply stand."""
        return self.cap is None and self.budget.per_token is None and self.by_hand is NOTHING

    def decide(self, x: Tensor, layout: Layout, state: SMAState | None = None) -> Routing:
        """Which tokens of x (batch, time, d_model) activate which modules: router, budget, hand, padding."""
        active, probs = self.router(x)
        selects = self.router.per_sequence and (self.training or not self.causal)
        if self.alone and not selects:
            if layout.mask is None:
                return Routing(active, probs)
            return Routing(active & layout.mask[..., None], clear(probs, layout.mask))
        # a token that is not finite activates nothing, whatever decides
        allowed = x.detach().sum(dim=-1, keepdim=True).isfinite()
        if layout.mask is not None:
            allowed, probs = allowed & layout.mask[..., None], clear(probs, layout.mask)
        confidence, documents = probs.detach(), layout.documents
        if documents is not None:
            # limits are those of each document
            active, confidence, allowed = (documents.spread(p) for p in (active, confidence, allowed))
        if selects:
            active = self.router.select(torch.logit(confidence, eps=1e-6), allowed)
        if self.by_hand.threshold is not None:
            least = confidence.new_tensor(self._by_name(self.by_hand.threshold, -1.0))
            active = torch.where(least < 0, active, confidence > least)
        cap = self.cap
        if self.by_hand.cap is not None:
            cap = tuple(self._by_name(self.by_hand.cap, self.cap or (1.0,) * len(self.names)))
        seen, spent = (None, None) if state is None else state[1:]
        in_order = self.causal and not self.training
        active = limit(
            active & allowed, confidence, allowed, cap, self.budget.per_token, in_order, seen, spent
        )
        if documents is not None:
            active, allowed = documents.collect(active), documents.collect(allowed)
        return self._change(Routing(active, probs), allowed)

    def _by_name(self, value: Any, default: Any) -> list[Any]:
        """One value per module, from one for all or some by name."""
        if not isinstance(value, Mapping):
            return [value] * len(self.names)
        defaults = default if isinstance(default, tuple) else (default,) * len(self.names)
        return [value.get(name, other) for name, other in zip(self.names, defaults, strict=True)]

    def _change(self, routing: Routing, allowed: Tensor) -> Routing:
        """Decisions that are made by hand come last."""
        active, probs = routing
        given = self.by_hand.mask
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
        if self.by_hand.active is not None:
            forced = self._by_name(self.by_hand.active, None)
            columns = [
                active[..., i] if on is None else torch.full_like(active[..., i], on)
                for i, on in enumerate(forced)
            ]
            active = torch.stack(columns, dim=-1)
        if self.by_hand.confidence is not None:
            probs = torch.full_like(probs, self.by_hand.confidence)
        return Routing(active & allowed, probs)

    def weights(self, routing: Routing) -> Tensor:
        """(..., modules): what outputs are multiplied by; outputs of inactive tokens do not exist."""
        gated = self.form == "gated" and self.router.at_half and self.by_hand.confidence is None
        if self.combine == "sum":
            return gate(routing) if gated else routing.probs
        weights = gate(routing) if gated else routing.confidence
        return weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-12)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | Layout | None = None,
        state: SMAState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        base: Tensor | None = None,
    ) -> MixerOutput:
        """Run the modules: y = base + sum_i c^i f_i(x).

        Args:
            x: (batch, time, d_model).
            mask: (batch, time), True on real tokens; the `Layout` of both where there is a base.
            state: from an earlier call; causal modules only.
            cu_seqlens: where packed documents begin; without a base.
            base: (batch, time, d_model), what the outputs are added to; zeros by default.
        """
        if base is None:
            return super().forward(x, mask, state, cu_seqlens=cu_seqlens)
        if base.shape != x.shape:
            raise ValueError(f"base must have the shape of x, {tuple(x.shape)}, got {tuple(base.shape)}")
        if isinstance(mask, Tensor) or cu_seqlens is not None:
            raise ValueError("with a base, mask must be None or a Layout")
        return self.mix(x, mask or WHOLE, state, base)

    def mix(
        self, x: Tensor, layout: Layout, state: SMAState | None, base: Tensor | None = None
    ) -> MixerOutput:
        """As `forward`; outputs are added to `base` (batch, time, d_model), zeros by default."""
        routing = self.decide(x, layout, state)
        if self.recent.on and self.training and torch.is_grad_enabled():
            self.recent.add(routing)
        flat, seen = x.reshape(-1, self.d_model), None if state is None else state.seen
        y = torch.zeros_like(flat) if base is None else base.reshape(-1, self.d_model)
        weights, after = self.weights(routing), []
        for i, (name, unit) in enumerate(self.units.items()):
            packed = pack(routing.active[..., i], seen, layout.documents)
            weight, tokens = weights[..., i].reshape(-1), flat
            everyone = not torch.compiler.is_compiling() and len(packed.flat) == len(flat)
            if not everyone:
                tokens, weight = flat.index_select(0, packed.flat), weight.index_select(0, packed.flat)
            if self.training and not torch.compiler.is_compiling() and len(flat):
                self._watch(i, len(packed.flat))
            if self.form == "gated":
                packed = packed._replace(weight=weight)
            out, memory = self._run(name, unit, tokens, packed, None if state is None else state.modules[i])
            out = (out * weight[:, None].to(out.dtype)).to(y.dtype)
            y = y + out if everyone else y.index_add(0, packed.flat, out)
            after.append(memory)
        y = y.view(x.shape)
        if not self.causal or layout.documents is not None:
            return MixerOutput(y, None, routing)
        new, taken = layout.lengths(x), routing.active.sum(dim=1)
        if state is not None:
            new, taken = state.seen + new, state.spent + taken
        return MixerOutput(y, SMAState(tuple(after), new, taken), routing)

    def _run(
        self, name: str, unit: nn.Module, tokens: Tensor, packed: Packed, state: Any
    ) -> tuple[Tensor, Any]:
        """The output of a module and its state."""
        memory = None
        if isinstance(unit, PackedModule):
            out = unit(tokens, packed, state) if unit.causal else unit(tokens, packed)
            if isinstance(out, tuple):
                out, memory = out
        else:
            out = unit(tokens)
        if not isinstance(out, Tensor) or out.shape != tokens.shape:
            found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            wanted = f"(tokens, {self.d_model})"
            raise ValueError(f"module {name!r} must return {wanted} for {wanted}, got {found}")
        return out, memory

    def _watch(self, i: int, count: int) -> None:
        """Count training steps without an active token, and warn once. The host knows the counts from packing."""
        self.inactive[i] = 0 if count else self.inactive[i] + 1
        if self.inactive[i] == DEAD_AFTER and self.warns:
            warnings.warn(
                f"no token has activated the module {self.names[i]!r} of this layer in {DEAD_AFTER} training "
                f"steps, so neither it nor its router learns; {REMEDY}; seqboat.dead_routers(model) lists "
                "such layers",
                stacklevel=2,
            )

    @property
    def grows(self) -> bool:
        return self.causal and any(getattr(unit, "grows", False) for unit in self.units.values())

    def init_state(self, batch: int) -> SMAState:
        self.require_causal()
        units = [u.init_state(batch) if isinstance(u, PackedModule) else None for u in self.units.values()]
        device = next(self.parameters()).device
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        spent = torch.zeros(batch, len(units), dtype=torch.int64, device=device)
        return SMAState(tuple(units), seen, spent)

    def step(
        self, x: Tensor, state: SMAState, base: Tensor | None = None, logits: Tensor | None = None
    ) -> MixerOutput:
        """One token (batch, d_model) of every sequence.

        Args:
            x: (batch, d_model).
            state: is overwritten.
            base: what outputs are added to, which is overwritten too; zeros by default.
            logits: (batch, modules), the router's log-odds, if they are known and nothing else decides.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.step(x, state, base, logits)
        if logits is None:
            active, probs = self.decide(x[:, None], WHOLE, state)
            routing = Routing(active[:, 0], probs[:, 0])
        else:
            probs = torch.sigmoid(logits)
            routing = Routing((probs > 0.5) & (logits < torch.inf), probs)
        active, y = routing.active, torch.zeros_like(x) if base is None else base
        weights = self.weights(routing)
        # where looking costs nothing, a module that no token activates costs nothing
        looks = x.device.type == "cpu" and not torch.compiler.is_compiling()
        chosen = list(zip(*active.tolist(), strict=True)) if looks and len(x) else None
        for i, unit in enumerate(self.units._modules.values()):
            if chosen is not None and True not in chosen[i]:
                continue
            weight = weights[:, i]
            if isinstance(unit, PackedModule):
                counts = weight if self.form == "gated" else None
                out = unit.step(x, active[:, i], state.seen, state.modules[i], counts)
            else:
                out = unit(x)
            if chosen is not None and False not in chosen[i]:
                y.addcmul_(out, weights[:, i : i + 1].to(out.dtype))
            else:
                y += torch.where(active[:, i : i + 1], out * weight[:, None].to(out.dtype), 0)
        state.seen.add_(1)
        state.spent.add_(active)
        return MixerOutput(y, state, routing)


def _make_router(router: Router | RouterConfig | str | None, d_model: int | None, modules: int) -> Router:
    """The router that the caller asked for."""
    if isinstance(router, Router):
        return router
    require(d_model is not None, "d_model must be given unless the router is built already")
    assert d_model is not None
    if router is None:
        return TemperedSoftmax(d_model, modules)
    if isinstance(router, str):
        check_choice("router", router, tuple(ROUTERS))
        made: Router = ROUTERS[router]().build(d_model, modules)
        return made
    return router.build(d_model, modules)


def sparse_layers(model: nn.Module) -> dict[str, SparseModularActivation]:
    """Every sparsely activated layer of a model, by name, in the order of its layers."""
    return {name: part for name, part in model.named_modules() if isinstance(part, SparseModularActivation)}


def dead_routers(model: nn.Module, after: int = DEAD_AFTER) -> dict[str, int]:
    """Modules that no token has activated for long, with the training steps since one did.

    Args:
        model: any module that holds sparsely activated ones.
        after: training steps without an active token from which on a module is listed.

    Returns:
        Steps by the name of the layer and, where the layer has several modules, of the module
        ("layers.1.sma", "layers.1.sma: ffn"); empty if all is well.

    >>> from seqboat import SparseModularActivation
    >>> layer = SparseModularActivation({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}, d_model=4).train()
    >>> with layer.override(active={"b": False}):
    ...     for _ in range(3):
    ...         _ = layer(torch.ones(1, 2, 4))
    >>> dead_routers(nn.Sequential(layer), after=3)
    {'0: b': 3}
    """
    return {
        name if len(sma.names) == 1 else f"{name}: {unit}": steps
        for name, sma in sparse_layers(model).items()
        for unit, steps in zip(sma.names, sma.inactive, strict=True)
        if steps >= after
    }


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

    >>> from seqboat import SeqBoat, override_activation
    >>> layer = SeqBoat(8)
    >>> with override_activation(layer, active=False):
    ...     print(int(layer(torch.randn(2, 5, 8)).routing.active.sum()))
    0
    """
    known = list(sparse_layers(model).values())
    chosen = range(len(known)) if layers is None else layers
    for number in chosen:
        require(0 <= number < len(known), f"layers must be in 0..{len(known) - 1}, got {number}")
    with contextlib.ExitStack() as stack:
        for number in chosen:
            stack.enter_context(known[number].override(**decisions))
        yield
