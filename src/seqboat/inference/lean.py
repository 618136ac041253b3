"""A lean step: language models that read one token per sequence at a time, with as few operations as possible.

    lean = lean_model(model, capacity=1)        # None where only the general step applies
    lean.join(state)                            # of one or several sequences
    logits = lean.step(tokens)                  # (sequences, vocab)
    state = lean.leave(0)                       # a value again, as `LanguageModel.step` takes it

`LanguageModel.step` serves every case: masks, budgets, overrides, autocast, gradients, any mixer. It checks its
arguments, folds coefficients and builds states anew at each of them, which costs several times what a short product
costs. Here weights are folded once, the router is a row of a product that is needed anyway, states are overwritten
in place, and what all layers need is computed once per token. The general step remains the reference: both give the
same numbers up to rounding (`tests/test_lean.py`).

There is no lean step in bf16 or fp16.

Weights are copied when they are folded: a change of the model afterwards has no effect on a lean step. Overrides and
hooks do (`LeanModel.applies`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.nn import EPS, LayerNorm, Norm
from seqboat.inference.attention import LeanAttention, fits
from seqboat.inference.base import Decision, LeanLayer, Token, fold_router, is_plain_router
from seqboat.inference.products import Product, is_plain, make_head, make_product
from seqboat.inference.ssm import LeanKernel, lean_kernel
from seqboat.layers.packing import PackedModule
from seqboat.layers.policy import Policy, policies
from seqboat.layers.routers import AlwaysActive
from seqboat.layers.seqboat import SeqBoat, SeqBoatState
from seqboat.layers.sma import SMAState
from seqboat.layers.variants import SeqBoatThenFFN
from seqboat.mixers.ssm import SSMLayer
from seqboat.models.backbone import Backbone, BackboneState
from seqboat.models.heads import LanguageModel
from seqboat.ops.positions import sinusoids
from seqboat.ssm.diagonal import StateSpace


def lean_norm(norm: Norm) -> Callable[[Tensor], Tensor]:
    """A norm without the cost of calling a module."""
    if type(norm) is LayerNorm:
        weight, bias = norm.weight, norm.bias
        shape = (norm.weight.shape[0],) if norm.affine else None
        return lambda x: F.layer_norm(x, shape or x.shape[-1:], weight, bias, EPS)
    return norm.forward


class LeanSSMLayer(LeanLayer):
    """A layer that is a state-space kernel and a gate."""

    def __init__(self, layer: SSMLayer, kernel: LeanKernel) -> None:
        self.kernel = kernel
        self.norm, self.prenorm = lean_norm(layer.norm), layer.config.prenorm
        self.out, _ = make_product(layer.out)
        self.glu = layer.config.gate == "glu"

    def __call__(self, x: Tensor, token: Token) -> Tensor:
        hidden = F.gelu(self.kernel(self.norm(x) if self.prenorm else x))
        out = self.out(hidden)
        y = F.glu(out) if self.glu else out.sigmoid_().mul_(hidden)
        y.add_(x)
        return y if self.prenorm else self.norm(y)

    def put(self, row: int, state: Any, source: int) -> None:
        self.kernel.put(row, state, source)

    def get(self, rows: list[int], seen: Tensor) -> Any:
        return self.kernel.get(rows)

    def move(self, source: int, target: int) -> None:
        self.kernel.move(source, target)


class LeanSeqBoat(LeanLayer):
    """A SeqBoat layer: kernel, router, attention and dense branch."""

    def __init__(self, layer: SeqBoat, kernel: LeanKernel, capacity: int) -> None:
        self.kernel, self.d_model = kernel, layer.d_model
        self.norm, self.prenorm = lean_norm(layer.norm), layer.config.prenorm
        self.after_silu = layer.norm.after_silu
        sma = layer.sma
        self.router = sma.policy.router
        self.folded = fold_router(sma.policy)
        self.always = type(self.router) is AlwaysActive
        more = None if self.folded is None else (self.folded.weight, self.folded.bias)
        self.dense, self.joined = make_product(layer.linear, more)
        self.units: list[LeanAttention | nn.Module] = [
            LeanAttention(unit, capacity) if isinstance(unit, PackedModule) else unit  # type: ignore[arg-type]
            for unit in sma.units.values()
        ]
        self.spent = [[0] * len(self.units) for _ in range(capacity)]
        self._fit(1, layer.linear.weight)

    def _fit(self, rows: int, like: Tensor) -> None:
        """Make room for the outputs of as many rows: the dense branch, and the log-odds of a router beside it."""
        modules = len(self.units) if self.joined else 0
        with torch.inference_mode(False), torch.no_grad():
            self.room = like.new_empty(rows, self.d_model + modules)
        self.y, self.logits = self.room.split_with_sizes((self.d_model, modules), dim=1)

    def __call__(self, x: Tensor, token: Token) -> Tensor:
        batch = len(x)
        if batch != len(self.room):
            self._fit(batch, x)
        hidden = F.silu(self.kernel(self.norm(x) if self.prenorm else x), inplace=True)
        self.dense(hidden, self.room)
        decisions = self._decide(hidden)
        y = self.y.add_(x)
        for number, (unit, (rows, weights)) in enumerate(zip(self.units, decisions, strict=True)):
            if not rows:
                continue
            everyone = len(rows) == batch
            index = None if everyone else torch.tensor(rows, device=x.device)
            tokens = hidden if index is None else hidden.index_select(0, index)
            if isinstance(unit, LeanAttention):
                turn = None
                if unit.rotates:
                    turn = token.turn(unit.d_z)
                    turn = turn if index is None else turn.index_select(0, index)
                out = unit(tokens, rows, token.seen, turn, batch)
            else:
                out = unit(tokens)
            for row in rows:
                self.spent[row][number] += 1
            if batch == 1:
                y.add_(out, alpha=weights[0])
                continue
            scale = torch.tensor(weights, dtype=y.dtype, device=y.device)[:, None]
            if index is None:
                y.addcmul_(out, scale)
            else:
                y.index_add_(0, index, out.mul_(scale))
        return F.silu(y, inplace=True) if self.prenorm else self.after_silu(y)

    def _decide(self, hidden: Tensor) -> list[Decision]:
        if self.folded is not None:
            logits = self.logits
            if not self.joined:
                logits = F.linear(hidden, self.folded.weight, self.folded.bias)
            return self.folded.decide(logits.tolist())
        if self.always:
            finite = hidden.sum(dim=1).isfinite().tolist()
            rows = [row for row, yes in enumerate(finite) if yes]
            return [(rows, [1.0] * len(rows)) for _ in self.units]
        active, probs = (part.tolist() for part in self.router(hidden))
        found = []
        for number in range(len(self.units)):
            rows = [row for row, yes in enumerate(active) if yes[number]]
            found.append((rows, [probs[row][number] for row in rows]))
        return found

    def put(self, row: int, state: SeqBoatState, source: int) -> None:
        self.kernel.put(row, state.ssm, source)
        memory: SMAState = state.sma
        for unit, part in zip(self.units, memory.modules, strict=True):
            if isinstance(unit, LeanAttention):
                unit.put(row, part, source)
        self.spent[row] = memory.spent[source].tolist()

    def get(self, rows: list[int], seen: Tensor) -> SeqBoatState:
        modules = tuple(unit.get(rows) if isinstance(unit, LeanAttention) else None for unit in self.units)
        spent = torch.tensor([self.spent[row] for row in rows], device=seen.device)
        return SeqBoatState(self.kernel.get(rows), SMAState(modules, seen.clone(), spent))

    def move(self, source: int, target: int) -> None:
        self.kernel.move(source, target)
        for unit in self.units:
            if isinstance(unit, LeanAttention):
                unit.move(source, target)
        self.spent[target] = list(self.spent[source])


class LeanThenFFN(LeanLayer):
    """A SeqBoat layer and a feed-forward block after it."""

    def __init__(self, layer: SeqBoatThenFFN, inner: LeanSeqBoat) -> None:
        self.inner, self.close = inner, layer.close

    def __call__(self, x: Tensor, token: Token) -> Tensor:
        return self.close(self.inner(x, token), None)

    def put(self, row: int, state: SeqBoatState, source: int) -> None:
        self.inner.put(row, state, source)

    def get(self, rows: list[int], seen: Tensor) -> SeqBoatState:
        return self.inner.get(rows, seen)

    def move(self, source: int, target: int) -> None:
        self.inner.move(source, target)


def lean_layer(layer: nn.Module, capacity: int) -> LeanLayer | None:
    """A layer in lean steps; None for kinds that have no such form."""
    if isinstance(layer, SeqBoatThenFFN):
        inner = lean_layer(layer.layer, capacity)
        return LeanThenFFN(layer, inner) if isinstance(inner, LeanSeqBoat) else None
    if type(layer) not in (SeqBoat, SSMLayer):
        return None
    assert isinstance(layer, SeqBoat | SSMLayer)
    if isinstance(layer, SeqBoat):
        sma = layer.sma
        parts = [unit for unit in sma.units.values() if isinstance(unit, PackedModule)]
        if not is_plain(layer.linear) or not is_plain_router(sma.policy.router):
            return None
        if sma.policy.steered and fold_router(sma.policy) is None:
            return None
        if sma.form != "paper":
            return None
        if sma.combine != "sum" or sma.straight_through or not all(fits(part) for part in parts):
            return None
    elif not is_plain(layer.out):
        return None
    if layer.ssm.skip.dtype not in (torch.float32, torch.float64):
        return None
    kernel = lean_kernel(layer.ssm, capacity) if isinstance(layer.ssm, StateSpace) else None
    if kernel is None:
        return None
    return LeanSeqBoat(layer, kernel, capacity) if isinstance(layer, SeqBoat) else LeanSSMLayer(layer, kernel)


class LeanBackbone:
    """A stack of layers, from token ids to the outputs of the last layer; made by `lean_backbone`.

    Args:
        backbone: its weights are copied.
        layers: its layers in lean form.
        capacity: sequences that fit.
    """

    def __init__(self, backbone: Backbone, layers: Sequence[LeanLayer], capacity: int) -> None:
        self.backbone, self.layers, self.capacity = backbone, list(layers), capacity
        self.policies = policies(backbone)
        weight = backbone.embedding.weight
        self.factor = math.sqrt(backbone.config.d_model) if backbone.config.scaled_embedding else 1.0
        self.table = weight * self.factor
        self.scale = backbone.position_scale.clone() if backbone.absolute_positions else None
        norm = backbone.norm
        self.norm = None if norm is None else lean_norm(norm) if isinstance(norm, Norm) else norm
        self.seen: list[int] = []
        """tokens that each sequence has read"""

    def __len__(self) -> int:
        return len(self.seen)

    @property
    def applies(self) -> bool:
        """Whether nothing has been put on the model that only the general step heeds, such as an override."""
        return all(map(_stands_alone, self.policies)) and not torch.is_autocast_enabled(
            self.table.device.type
        )

    @torch.no_grad()
    def join(self, state: BackboneState, rows: Sequence[int] | None = None) -> None:
        """Take over some sequences of a state, or all; they come after those that are here already."""
        chosen = range(len(state.seen)) if rows is None else rows
        batch = len(chosen)
        require(
            len(self) + batch <= self.capacity,
            f"there is room for {self.capacity} sequences, not for {len(self) + batch}",
        )
        require(
            len(state.layers) == len(self.layers),
            f"state of another model: it has {len(state.layers)} layers, the model {len(self.layers)}",
        )
        for source in chosen:
            for layer, part in zip(self.layers, state.layers, strict=True):
                layer.put(len(self.seen), part, source)
            self.seen.append(int(state.seen[source]))

    @torch.no_grad()
    def state(self, rows: Sequence[int] | None = None) -> BackboneState:
        """The states of some sequences, or of all, as values."""
        chosen = list(range(len(self)) if rows is None else rows)
        seen = torch.tensor([self.seen[row] for row in chosen], device=self.table.device)
        return BackboneState(tuple(layer.get(chosen, seen) for layer in self.layers), seen)

    @torch.no_grad()
    def leave(self, row: int) -> BackboneState:
        """Give up a sequence and return its state; the last sequence takes its place."""
        state, last = self.state([row]), len(self) - 1
        if row != last:
            for layer in self.layers:
                layer.move(last, row)
            self.seen[row] = self.seen[last]
        self.seen.pop()
        return state

    def read(self, tokens: Tensor) -> Tensor:
        """As `step`, where the caller takes care of gradients."""
        x = F.embedding(tokens, self.table)
        token = Token(self.seen, x.dtype, x.device)
        if self.scale is not None:
            here = torch.tensor(self.seen, device=x.device)
            x = x + (sinusoids(here, x.shape[-1]) * self.scale).to(x.dtype)
        for layer in self.layers:
            x = layer(x, token)
        self.seen = [seen + 1 for seen in self.seen]
        return x if self.norm is None else self.norm(x)

    def step(self, tokens: Tensor) -> Tensor:
        """Read one token of each sequence, (sequences,) ids; returns (sequences, d_model)."""
        require(
            tokens.shape == (len(self),),
            f"tokens must have shape ({len(self)},), one per sequence, got {tuple(tokens.shape)}",
        )
        # the fastest way to call operators; what it returns may not enter a graph, a copy may
        with torch.inference_mode():
            y = self.read(tokens)
        return y.clone()


class LeanModel(LeanBackbone):
    """A language model; made by `lean_model`."""

    def __init__(self, backbone: Backbone, layers: Sequence[LeanLayer], capacity: int) -> None:
        super().__init__(backbone, layers, capacity)
        self.head: Product = make_head(backbone.embedding)

    def read(self, tokens: Tensor) -> Tensor:
        """As `step`; returns the scores of the next token, (sequences, vocab)."""
        return self.head(super().read(tokens))


def _stands_alone(policy: Policy) -> bool:
    return policy.alone


def _reason(backbone: Backbone) -> str | None:
    """Why only the general step serves a stack as it is now; None if nothing does."""
    if not backbone.causal or backbone.config.vocab is None or backbone.lead is not None:
        return "it is not a causal stack on token ids"
    if backbone.training:
        return "it is in training mode"
    if torch.is_autocast_enabled(backbone.embedding.weight.device.type):
        return "autocast is on"
    if not is_plain(backbone.embedding):
        return "its embedding is not a plain one"
    if any(part._forward_hooks or part._forward_pre_hooks for part in backbone.modules()):
        return "a module has hooks"
    if not all(map(_stands_alone, policies(backbone))):
        return "decisions are limited by a budget or taken by hand"
    return None


def _lean_layers(backbone: Backbone, capacity: int) -> list[LeanLayer] | None:
    check_positive("capacity", capacity)
    if _reason(backbone) is not None:
        return None
    found = []
    for layer in backbone.layers:
        lean = lean_layer(layer, capacity)
        if lean is None:
            return None
        found.append(lean)
    return found


@torch.no_grad()
def lean_backbone(backbone: Backbone, capacity: int = 1) -> LeanBackbone | None:
    """A stack in lean steps, with the weights that it has now; None where only the general step applies.

    Args:
        backbone: causal, on token ids, in eval mode.
        capacity: sequences that fit.
    """
    layers = _lean_layers(backbone, capacity)
    return None if layers is None else LeanBackbone(backbone, layers, capacity)


@torch.no_grad()
def lean_model(model: LanguageModel, capacity: int = 1) -> LeanModel | None:
    """A language model in lean steps; see `lean_backbone`."""
    if type(model) is not LanguageModel or model._forward_hooks or model._forward_pre_hooks:
        return None
    layers = _lean_layers(model.backbone, capacity)
    return None if layers is None else LeanModel(model.backbone, layers, capacity)
