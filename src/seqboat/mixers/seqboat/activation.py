"""Sparse modular activation of modules: a router wakes each module for the tokens that need it.

Section 3.2 of the paper: y_t = sum_i c_t^i f_i(x)_t over the modules i that token t activates. A module sees
only its active tokens, in order, as one packed array; what it returns is scaled by the router's confidence and
added at the places the tokens came from. The tokens of all modules are gathered at once and added at once,
however many modules there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from seqboat.checks import check_choice, require
from seqboat.core.budget import BudgetConfig, Override, Policy, RevivalConfig, overridden
from seqboat.core.padding import Aligned
from seqboat.core.routers import ROUTERS, Router, RouterConfig, TemperedSoftmax
from seqboat.core.sma import Packed, PackedModule, Routing, pack_modules
from seqboat.mixers.base import Mixer, MixerOutput, RecurrentMixer
from seqboat.ops.fused import take

Combine = Literal["sum", "average"]


class SMAState(NamedTuple):
    """What sparsely activated modules remember."""

    modules: tuple[Any, ...]
    """one state per module; None for modules that treat every token alone"""
    seen: Tensor
    """(batch,): real tokens so far, activated or not"""
    spent: Tensor
    """(batch, modules): tokens that each module has taken so far"""


class Activated(NamedTuple):
    """What the modules returned, before it is added up."""

    rows: Tensor
    """(tokens,): places in the flattened (batch * time) sequence; once per module that a token activated"""
    out: Tensor
    """(tokens, d_model): outputs, scaled by the confidence"""
    state: SMAState | None
    routing: Routing


class SparseModularActivation(RecurrentMixer):
    """Runs modules on the tokens that a router picks for them.

    >>> ffn = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> sparse = SparseModularActivation({"ffn": ffn}, d_model=8)
    >>> y, _, routing = sparse(torch.randn(2, 5, 8))
    >>> y.shape, routing.active.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 5, 1]))

    Args:
        modules: by name; contextual ones are `PackedModule`s (`mixers.seqboat.units` has adapters), all others are
            called on (tokens, d_model).
        d_model: width of the tokens; the router's by default.
        router: decides: a router, its configuration, or its name in ROUTERS; a tempered softmax by default.
        combine: whether a token's outputs are added up, or averaged with their confidences as weights.
        straight_through: whether outputs keep their size instead of being scaled by the confidence; the gradient
            of the router is that of the scaled ones.
        budget: how much may be activated.
        revival: what keeps the router alive in training.
        causal: whether the layer carries a state and never looks ahead at inference; by default, if all its
            contextual modules do.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | nn.Module,
        d_model: int | None = None,
        router: Router | RouterConfig | str | None = None,
        *,
        combine: Combine = "sum",
        straight_through: bool = False,
        budget: BudgetConfig | None = None,
        revival: RevivalConfig | None = None,
        causal: bool | None = None,
    ) -> None:
        super().__init__()
        named = {"module": modules} if isinstance(modules, nn.Module) else dict(modules)
        require(len(named) > 0, "modules must hold at least one module, got none")
        for name, unit in named.items():
            hint = f"module {name!r} is a mixer, which works on whole rows: wrap it in seqboat.MixerUnit"
            require(not isinstance(unit, Mixer), hint)
        check_choice("combine", combine, get_args(Combine))
        self.units = nn.ModuleDict(named)
        self.router = _make_router(router, d_model, len(named))
        d_model = self.router.d_model if d_model is None else d_model
        require(
            self.router.modules_count == len(named) and self.router.d_model == d_model,
            f"router decides for {self.router.modules_count} modules of width {self.router.d_model}, "
            f"but there are {len(named)} modules of width {d_model}",
        )
        self.d_model, self.combine, self.straight_through = d_model, combine, straight_through
        self.policy = Policy(tuple(named), d_model, budget or BudgetConfig(), revival or RevivalConfig())
        require(
            not (self.policy.steered and self.router.by_row),
            f"budget.target cannot steer {type(self.router).__name__}, which takes a fixed share of each row",
        )
        can = all(unit.causal for unit in named.values() if isinstance(unit, PackedModule))
        require(can or not causal, "causal needs modules that are causal, but some are not")
        self.causal = can if causal is None else causal

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
                tokens of every row first; or a function that makes them of a `Routing`.
            threshold: activate above this probability instead of the router's own rule.
            cap: most tokens that a module may take, instead of the budget's.
            confidence: of every active token, instead of the router's.

        Modules that `active` forces come last: no mask, threshold or cap changes them.
        """
        given = Override(active=active, mask=mask, threshold=threshold, cap=cap, confidence=confidence)
        with overridden(self.policy, given):
            yield

    def forward(
        self,
        x: Tensor,
        mask: Tensor | Aligned | None = None,
        state: SMAState | None = None,
        base: Tensor | None = None,
    ) -> MixerOutput:
        """Run the modules.

        Args:
            x: (batch, time, d_model).
            mask: (batch, time), True on real tokens.
            state: from an earlier call; causal modules only.
            base: (batch, time, d_model), what the outputs are added to; zeros by default.
        """
        if base is None:
            return super().forward(x, mask, state)
        require(
            base.shape == x.shape, f"base must have the shape of x, {tuple(x.shape)}, got {tuple(base.shape)}"
        )
        if isinstance(mask, Tensor):
            raise ValueError("with a base, mask must be None or Aligned")
        self.check(x, mask, state)
        return self.mix(x, None if mask is None else mask.mask, state, base)

    def mix(
        self,
        x: Tensor,
        mask: Tensor | None,
        state: SMAState | None,
        base: Tensor | None = None,
    ) -> MixerOutput:
        done = self.activate(x, mask, state)
        y = torch.zeros_like(x) if base is None else base
        y = y.reshape(-1, self.d_model).index_add(0, done.rows, done.out.to(y.dtype)).view(y.shape)
        return MixerOutput(self.attach(y, done.routing), done.state, done.routing)

    def attach(self, y: Tensor, routing: Routing) -> Tensor:
        """Connect the sum of all outputs (batch, time, d_model) with inactive tokens, if the revival asks for it."""
        return self.policy.attach(y, routing)

    def activate(self, x: Tensor, mask: Tensor | None, state: SMAState | None) -> Activated:
        """Route the tokens and run every module on its own, without adding up what they return.

        Args:
            x: (batch, time, d_model), real tokens first in every row.
            mask: (batch, time), True on real tokens.
            state: from an earlier call.
        """
        before, seen, spent = (None, None, None) if state is None else state
        routing = self.policy(self.router, x, mask, self.causal, seen, spent)
        gathered = pack_modules(routing.active, seen)
        together = take(x.reshape(-1, self.d_model), gathered.flat)
        tokens = [together] if len(self.units) == 1 else together.split(gathered.counts)
        outputs, after = [], []
        for i, (name, unit) in enumerate(self.units.items()):
            if isinstance(unit, PackedModule) and unit.causal:
                out, remembered = unit(tokens[i], gathered.parts[i], None if before is None else before[i])
            else:
                out, remembered = self._run(name, unit, tokens[i], gathered.parts[i]), None
            outputs.append(out)
            after.append(remembered)
        self.policy.remember(outputs)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        scale = self._weights(routing).flatten().index_select(0, gathered.entry)
        out = out * scale[:, None].to(out.dtype)
        if not self.causal:
            return Activated(gathered.flat, out, None, routing)
        batch, time = x.shape[:2]
        new = torch.full((batch,), time, device=x.device) if mask is None else mask.sum(dim=1)
        taken = routing.active.sum(dim=1)
        if seen is not None and spent is not None:
            new, taken = seen + new, spent + taken
        return Activated(gathered.flat, out, SMAState(tuple(after), new, taken), routing)

    def _run(self, name: str, unit: nn.Module, tokens: Tensor, packed: Packed | None = None) -> Tensor:
        """What a module that remembers nothing makes of its tokens."""
        out = unit(tokens, packed) if isinstance(unit, PackedModule) else unit(tokens)
        if isinstance(unit, PackedModule) and isinstance(out, tuple):
            out = out[0]
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        require(
            found == tuple(tokens.shape),
            f"module {name!r} must return (tokens, {self.d_model}) for (tokens, {self.d_model}), got {found}",
        )
        return out

    def _weights(self, routing: Routing) -> Tensor:
        """(..., modules): what outputs are multiplied by."""
        weights = routing.confidence
        if self.straight_through:
            weights = torch.where(routing.active, weights - weights.detach() + 1, weights)
        if self.combine == "average":
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-12)
        return weights

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
        active, probs = self.policy(self.router, x[:, None], real, True, state.seen, state.spent)
        routing = Routing(active[:, 0], probs[:, 0])
        if len(self.units) == 1:
            awake = [active.view(-1).nonzero().squeeze(1)]
        else:
            awake = [part.row for part in pack_modules(active).parts]
        if torch.compiler.is_compiling():
            # what follows depends on who is awake, also where the compiler was told to trace through such sizes
            torch._dynamo.graph_break()
        weights = self._weights(routing)
        y = torch.zeros_like(x) if base is None else base
        after = []
        for i, (name, unit) in enumerate(self.units.items()):
            rows = awake[i]
            if not len(rows) and not torch.is_grad_enabled():
                # in decoding, a module that nobody woke costs nothing
                after.append(state.modules[i])
                continue
            everyone = len(rows) == len(x)
            tokens = x if everyone else x.index_select(0, rows)
            if isinstance(unit, PackedModule):
                position = state.seen.index_select(0, rows)
                out, remembered = unit.advance(tokens, rows, position, state.modules[i], inplace)
            else:
                out, remembered = self._run(name, unit, tokens), None
            after.append(remembered)
            scaled = (out * weights[:, i].index_select(0, rows)[:, None].to(out.dtype)).to(y.dtype)
            y = y + scaled if everyone else y.index_add(0, rows, scaled)
        seen = state.seen + (1 if mask is None else mask.to(state.seen.dtype))
        return MixerOutput(y, SMAState(tuple(after), seen, state.spent + routing.active), routing)


def _make_router(router: Router | RouterConfig | str | None, d_model: int | None, modules: int) -> Router:
    """The router that a caller means."""
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
