"""Sparse modular activation of modules: a router wakes each module for the tokens that need it.

Section 3.2 of the paper: y_t = sum_i c_t^i f_i(x)_t over the modules i that token t activates. A module sees
only its active tokens, in order, as one packed array; what it returns is scaled by the router's confidence and
added at the places the tokens came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.checks import require
from seqboat.mixers.base import MixerOutput, RecurrentMixer
from seqboat.padding import Aligned, zero_padding
from seqboat.routers import Router, TemperedSoftmax
from seqboat.sma import PackedModule, Routing, pack


class SMAState(NamedTuple):
    """What sparsely activated modules remember."""

    modules: tuple[Any, ...]
    """one state per module; None for modules that treat every token alone"""
    seen: Tensor
    """(batch,): real tokens so far, activated or not"""


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
        modules: by name; contextual ones are `PackedModule`s, all others are called on (tokens, d_model).
        d_model: width of the tokens.
        router: decides; a tempered softmax by default.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | nn.Module,
        d_model: int,
        router: Router | None = None,
    ) -> None:
        super().__init__()
        named = {"module": modules} if isinstance(modules, nn.Module) else dict(modules)
        require(len(named) > 0, "modules must hold at least one module, got none")
        self.units = nn.ModuleDict(named)
        self.router = router if router is not None else TemperedSoftmax(d_model, len(named))
        require(
            self.router.modules_count == len(named) and self.router.d_model == d_model,
            f"router decides for {self.router.modules_count} modules of width {self.router.d_model}, "
            f"but there are {len(named)} modules of width {d_model}",
        )
        self.d_model = d_model
        contextual = [unit for unit in named.values() if isinstance(unit, PackedModule)]
        self.causal = all(unit.causal for unit in contextual)

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
        rows, out, after, routing = self.activate(x, mask, state)
        y = torch.zeros_like(x) if base is None else base
        y = y.reshape(-1, self.d_model).index_add(0, rows, out.to(y.dtype)).view(y.shape)
        return MixerOutput(y, after, routing)

    def activate(self, x: Tensor, mask: Tensor | None, state: SMAState | None) -> Activated:
        """Route the tokens and run every module on its own, without adding up what they return.

        Args:
            x: (batch, time, d_model), real tokens first in every row.
            mask: (batch, time), True on real tokens.
            state: from an earlier call.
        """
        active, probs = self.router(x)
        if mask is not None:
            active = active & mask[..., None]
            probs = zero_padding(probs, mask)
        routing = Routing(active, probs)
        confidence = routing.confidence.flatten(0, 1)
        before = state.modules if state is not None else (None,) * len(self.units)
        seen = None if state is None else state.seen
        places, outputs, after = [], [], []
        for i, (name, unit) in enumerate(self.units.items()):
            packed = pack(active[..., i], seen)
            tokens = packed.take(x)
            if isinstance(unit, PackedModule):
                out, remembered = unit(tokens, packed, before[i])
            else:
                out, remembered = unit(tokens), None
                self._check_output(name, out)
            scale = confidence[:, i].index_select(0, packed.flat)[:, None]
            places.append(packed.flat)
            outputs.append(out * scale.to(out.dtype))
            after.append(remembered)
        rows = places[0] if len(places) == 1 else torch.cat(places)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if not self.causal:
            return Activated(rows, out, None, routing)
        batch, time = x.shape[:2]
        new = torch.full((batch,), time, device=x.device) if mask is None else mask.sum(dim=1)
        return Activated(rows, out, SMAState(tuple(after), new if seen is None else seen + new), routing)

    def _check_output(self, name: str, out: Tensor) -> None:
        require(
            out.dim() == 2 and out.shape[1] == self.d_model,
            f"module {name!r} must return (tokens, {self.d_model}) for (tokens, {self.d_model}), "
            f"got {tuple(out.shape)}",
        )

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> SMAState:
        return SMAState(
            tuple(
                unit.make_state(batch, dtype, device) if isinstance(unit, PackedModule) else None
                for unit in self.units.values()
            ),
            torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def advance(
        self,
        x: Tensor,
        state: SMAState,
        mask: Tensor | None = None,
        inplace: bool = False,
        base: Tensor | None = None,
    ) -> MixerOutput:
        active, probs = self.router(x)
        if mask is not None:
            active = active & mask[:, None]
            probs = torch.where(mask[:, None], probs, 0)
        routing = Routing(active, probs)
        y = torch.zeros_like(x) if base is None else base
        after = []
        for i, (name, unit) in enumerate(self.units.items()):
            rows = active[:, i].nonzero().squeeze(1)
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
                out, remembered = unit(tokens), None
                self._check_output(name, out)
            after.append(remembered)
            scale = routing.confidence[:, i].index_select(0, rows)[:, None]
            scaled = (out * scale.to(out.dtype)).to(y.dtype)
            y = y + scaled if everyone else y.index_add(0, rows, scaled)
        seen = state.seen + (1 if mask is None else mask.to(state.seen.dtype))
        return MixerOutput(y, SMAState(tuple(after), seen), routing)
