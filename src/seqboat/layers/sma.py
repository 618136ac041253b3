"""Sparse modular activation of modules: a router activates each module for the tokens that need it.

Section 3.2 of the paper: y_t = sum_i c_t^i f_i(x)_t over the modules i that token t activates. A module sees
only its active tokens, in order, as one packed array; what it returns is scaled by the router's confidence and
added at the places the tokens came from. The tokens of all modules are gathered at once and added at once,
however many modules there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_choice, require
from seqboat.core.documents import Documents
from seqboat.core.mixer import MixerOutput, RecurrentMixer
from seqboat.core.padding import Aligned
from seqboat.core.state import keep_state, tensors
from seqboat.layers.adapters import as_unit, name_modules
from seqboat.layers.budget import BudgetConfig, RevivalConfig
from seqboat.layers.gau import GAU
from seqboat.layers.packing import Gathered, Packed, PackedModule, Routing, pack_modules
from seqboat.layers.policy import Override, Policy, overridden
from seqboat.layers.routers import ROUTERS, Router, RouterConfig, TemperedSoftmax
from seqboat.layers.watch import Watch

Combine = Literal["sum", "average"]
Form = Literal["gated", "paper"]
SATURATION = 3.0
"""Slope of the gate: it is 1 from a probability of 1/2 + 1/6 on."""


def gate(routing: Routing) -> Tensor:
    """The weight of each token in the gated form: clamp(3 (2p - 1), 0, 1), continuous where a token becomes active.

    Tokens that are active by hand, against the router, count as a whole.

    >>> gate(Routing(torch.tensor([True, True, False]), torch.tensor([0.9, 0.6, 0.4]))).tolist()
    [1.0, 0.6000000238418579, 0.0]
    """
    m = (SATURATION * (2 * routing.probs - 1)).clamp(0, 1)
    return torch.where(routing.active, torch.where(routing.probs < 0.5, 1.0, m), 0.0).to(m.dtype)


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


class SparseModularActivation(RecurrentMixer):
    """Runs modules on the tokens that a router picks for them.

    >>> ffn = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> sparse = SparseModularActivation({"ffn": ffn}, d_model=8)
    >>> y, _, routing = sparse(torch.randn(2, 5, 8))
    >>> y.shape, routing.active.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 5, 1]))

    Args:
        modules: one, several by name, or a list (named "0", "1", ...). Token-wise modules are called on
            (tokens, d_model), the active tokens of the whole batch. Contextual ones are `PackedModule`s
            (`mixers.seqboat.units` has adapters); torch's attention, encoder layers and recurrent nets are wrapped,
            and other modules that mix tokens are refused.
        d_model: width of the tokens; the router's by default.
        router: a router, its configuration, or its name in ROUTERS; a tempered softmax by default.
        combine: whether a token's outputs are summed, or averaged with their confidences as weights.
        straight_through: whether outputs keep their size instead of being scaled by the confidence; the router still
            gets the gradient of the scaled ones.
        budget: how much may be activated.
        revival: what keeps the router alive in training.
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
        straight_through: bool = False,
        budget: BudgetConfig | None = None,
        revival: RevivalConfig | None = None,
        causal: bool | None = None,
        form: Form = "paper",
        start_active: bool = True,
    ) -> None:
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
        self.d_model, self.combine, self.straight_through, self.form = (
            d_model,
            combine,
            straight_through,
            form,
        )
        for unit in named.values():
            if isinstance(unit, GAU):
                unit.weighs = form == "gated"
        can = all(unit.causal for unit in named.values() if isinstance(unit, PackedModule))
        require(can or not causal, "causal needs modules that are causal, but some are not")
        self.causal = can if causal is None else causal
        self.policy = Policy(
            self.router, tuple(named), budget or BudgetConfig(), revival or RevivalConfig(), self.causal
        )
        self.watch = Watch(tuple(named))
        self.recent = Recent()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "router" and "policy" in self._modules:
            self.policy.follow(value)  # a router that replaces the first one decides from then on

    @contextmanager
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
        with overridden(self.policy, given):
            yield

    def forward(
        self,
        x: Tensor,
        mask: Tensor | Aligned | Documents | None = None,
        state: SMAState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        base: Tensor | None = None,
        dense: nn.Linear | None = None,
    ) -> MixerOutput:
        """Run the modules: y = base + dense(x) + sum_i c^i f_i(x).

        Args:
            x: (batch, time, d_model).
            mask: (batch, time), True on real tokens; `Aligned` or `Documents` where there is a base or a dense layer,
                with zeros on the padding of x.
            state: from an earlier call; causal modules only.
            cu_seqlens: where packed documents begin; without a base or a dense layer.
            base: (batch, time, d_model), what the outputs are added to; zeros by default.
            dense: a layer that every token passes through, added as well; none by default.
        """
        if base is None and dense is None:
            return super().forward(x, mask, state, cu_seqlens=cu_seqlens)
        if base is not None and base.shape != x.shape:
            raise ValueError(f"base must have the shape of x, {tuple(x.shape)}, got {tuple(base.shape)}")
        if isinstance(mask, Tensor) or cu_seqlens is not None:
            raise ValueError("with a base or a dense layer, mask must be None or Aligned (or Documents)")
        self.check(x, mask, state)
        documents = mask if isinstance(mask, Documents) else None
        return self.mix(x, None if mask is None else mask.mask, state, base, dense, documents)

    def mix_documents(self, x: Tensor, documents: Documents, state: Any) -> MixerOutput:
        return self.mix(x, documents.mask, state, documents=documents)

    def mix(
        self,
        x: Tensor,
        mask: Tensor | None,
        state: SMAState | None,
        base: Tensor | None = None,
        dense: nn.Linear | None = None,
        documents: Documents | None = None,
    ) -> MixerOutput:
        before, seen, spent = (None, None, None) if state is None else state
        if documents is not None and seen is not None and spent is not None:
            seen, spent = documents.of_first(seen), documents.of_first(spent)
        routing = self.policy(x, mask, seen, spent, documents)
        if self.recent.on and self.training and torch.is_grad_enabled():
            self.recent.add(routing)
        gathered = pack_modules(routing.active, seen, documents)
        weights = self._weights(routing).flatten().index_select(0, gathered.entry)
        if self.form == "gated":
            each = weights.split(gathered.counts)
            parts = tuple(p._replace(weight=w) for p, w in zip(gathered.parts, each, strict=True))
            gathered = gathered._replace(parts=parts)
        watched = self.training and not torch.compiler.is_compiling() and x.numel() > 0
        # one module that is active, as it was before: nothing to notice
        if watched and (len(self.units) > 1 or not gathered.flat.shape[0] or self.watch.inactive[0]):
            self.watch.notice(gathered.counts)
        packed = x.reshape(-1, self.d_model).index_select(0, gathered.flat)
        tokens = [packed] if len(self.units) == 1 else packed.split(gathered.counts)
        outputs, after = [], []
        for i, (name, unit) in enumerate(self.units.items()):
            if isinstance(unit, PackedModule) and unit.causal:
                given = None if before is None else before[i]
                if documents is None or unit.takes_documents:
                    out, remembered = unit(tokens[i], gathered.parts[i], given)
                else:
                    out, remembered = self._run_documents(
                        unit, tokens[i], gathered.parts[i], given, documents
                    )
            else:
                out, remembered = self._run(name, unit, tokens[i], gathered.parts[i]), None
            outputs.append(out)
            after.append(remembered)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        y = self._join(dense, base, x, gathered, out, routing, weights)
        if self.training and self.policy.revival.inactive_gradient:
            self.policy.remember(outputs)
            y = self.policy.attach(y, routing)
        if not self.causal:
            return MixerOutput(y, None, routing)
        batch, time = x.shape[:2]
        if documents is not None:
            new, taken = documents.offsets.diff(), documents.sums(routing.active[0].t()).t()
        else:
            new = torch.full((batch,), time, device=x.device) if mask is None else mask.sum(dim=1)
            taken = routing.active.sum(dim=1)
        if seen is not None and spent is not None:
            new, taken = seen + new, spent + taken
        if documents is not None:
            new, taken = new[documents.last], taken[documents.last]
        return MixerOutput(y, SMAState(tuple(after), new, taken), routing)

    def _join(
        self,
        dense: nn.Linear | None,
        base: Tensor | None,
        x: Tensor,
        gathered: Gathered,
        out: Tensor,
        routing: Routing,
        weights: Tensor,
    ) -> Tensor:
        """base + dense(x), and the weighted outputs of the modules at their tokens."""
        out = out * weights[:, None].to(out.dtype)
        summed = torch.zeros_like(x) if base is None else base
        summed = summed if dense is None else dense(x) + summed
        added = summed.reshape(-1, self.d_model).index_add(0, gathered.flat, out.to(summed.dtype))
        return added.view(x.shape)

    @staticmethod
    def _run_documents(
        unit: PackedModule, tokens: Tensor, packed: Packed, state: Any, documents: Documents
    ) -> tuple[Tensor, Any]:
        """The output and the state of a causal module to which every document is a sequence."""
        if state is not None:
            state = documents.enter(state, unit.make_state(1, tokens.dtype, tokens.device))
        out, after = unit(tokens, packed._replace(documents=None), state)
        return out, documents.leave(after)

    def _run(self, name: str, unit: nn.Module, tokens: Tensor, packed: Packed | None = None) -> Tensor:
        """The output of a module without a state."""
        out = unit(tokens, packed) if isinstance(unit, PackedModule) else unit(tokens)
        if isinstance(unit, PackedModule) and isinstance(out, tuple):
            out = out[0]
        if not isinstance(out, Tensor) or out.shape != tokens.shape:
            found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            wanted = f"(tokens, {self.d_model})"
            raise ValueError(f"module {name!r} must return {wanted} for {wanted}, got {found}")
        return out

    def _weights(self, routing: Routing) -> Tensor:
        """(..., modules): what outputs are multiplied by."""
        weights = routing.confidence
        if self.form == "gated" and self.router.at_half and self.policy.override.confidence is None:
            weights = gate(routing)
        if self.straight_through:
            weights = torch.where(routing.active, weights - weights.detach() + 1, weights)
        if self.combine == "average":
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-12)
        return weights

    @property
    def grows(self) -> bool:
        if not self.causal:
            return False
        # the contract of packed modules: what grows begins with a size of zero
        fresh = self.make_state(1, torch.float32, torch.device("meta"))
        return any(part.numel() == 0 for _, part in tensors(fresh))

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> SMAState:
        return SMAState(
            tuple(
                unit.make_state(batch, dtype, device) if isinstance(unit, PackedModule) else None
                for unit in self.units.values()
            ),
            torch.zeros(batch, dtype=torch.int64, device=device),
            torch.zeros(batch, len(self.units), dtype=torch.int64, device=device),
        )

    def advance(
        self,
        x: Tensor,
        state: SMAState,
        mask: Tensor | None = None,
        inplace: bool = False,
        base: Tensor | None = None,
    ) -> MixerOutput:
        real = None if mask is None else mask[:, None]
        active, probs = self.policy(x[:, None], real, state.seen, state.spent)
        routing = Routing(active[:, 0], probs[:, 0])
        if torch.compiler.is_exporting():
            return self._advance_masked(x, routing, state, mask, base)
        if len(self.units) == 1:
            chosen = [active.view(-1).nonzero().squeeze(1)]
        else:
            chosen = [part.row for part in pack_modules(active).parts]
        if torch.compiler.is_compiling():
            # what follows depends on which sequences are active, even where the compiler may trace through such sizes
            torch._dynamo.graph_break()
        weights = self._weights(routing)
        y = torch.zeros_like(x) if base is None else base
        after = []
        for i, (name, unit) in enumerate(self.units.items()):
            rows = chosen[i]
            if not len(rows) and not torch.is_grad_enabled():
                # in decoding, a module that no token activates costs nothing
                after.append(state.modules[i])
                continue
            all_active = len(rows) == len(x)
            tokens = x if all_active else x.index_select(0, rows)
            if isinstance(unit, PackedModule):
                position = state.seen.index_select(0, rows)
                more: dict[str, Any] = {"weight": weights[:, i].index_select(0, rows)} if unit.weighs else {}
                out, remembered = unit.advance(tokens, rows, position, state.modules[i], inplace, **more)
            else:
                out, remembered = self._run(name, unit, tokens), None
            after.append(remembered)
            scaled = (out * weights[:, i].index_select(0, rows)[:, None].to(out.dtype)).to(y.dtype)
            y = y + scaled if all_active else y.index_add(0, rows, scaled)
        return MixerOutput(y, self._count(state, tuple(after), mask, routing), routing)

    def _advance_masked(
        self, x: Tensor, routing: Routing, state: SMAState, mask: Tensor | None, base: Tensor | None
    ) -> MixerOutput:
        """As `advance`, in a graph of fixed shapes: modules run on every sequence, inactive ones keep their state."""
        y = torch.zeros_like(x) if base is None else base
        everyone = torch.arange(x.shape[0], device=x.device)
        weights, after = self._weights(routing), []
        for i, (name, unit) in enumerate(self.units.items()):
            if isinstance(unit, PackedModule):
                more: dict[str, Any] = {"weight": weights[:, i]} if unit.weighs else {}
                out, remembered = unit.advance(x, everyone, state.seen, state.modules[i], **more)
                remembered = keep_state(routing.active[:, i], remembered, state.modules[i])
            else:
                out, remembered = self._run(name, unit, x), None
            after.append(remembered)
            y = y + (out * weights[:, i : i + 1].to(out.dtype)).to(y.dtype)
        return MixerOutput(y, self._count(state, tuple(after), mask, routing), routing)

    @staticmethod
    def _count(state: SMAState, modules: tuple[Any, ...], mask: Tensor | None, routing: Routing) -> SMAState:
        """The state after one more token."""
        seen = state.seen + (1 if mask is None else mask.to(state.seen.dtype))
        return SMAState(modules, seen, state.spent + routing.active)


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
