"""Layers in a graph: norms, routers, and the SeqBoat layer with its variants."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from seqboat.core.checks import require
from seqboat.core.nn import EPS, BatchNorm, FeedForward, LayerNorm, Norm
from seqboat.inference.base import fold_router
from seqboat.layers.gau import GAU
from seqboat.layers.policy import Policy
from seqboat.layers.routers import (
    AlwaysActive,
    ExpertChoice,
    PerSequence,
    TemperedSigmoid,
    XMoE,
)
from seqboat.layers.seqboat import SeqBoat
from seqboat.layers.variants import SeqBoatThenFFN
from seqboat.mixers.ssm import SSMLayer
from seqboat.onnx.attention import Attention, pack, unpack
from seqboat.onnx.graph import Graph, Value
from seqboat.onnx.kernels import Memory, make_kernel


class Sequences(NamedTuple):
    """What all layers know about a batch of whole sequences."""

    lengths: Value
    """(batch,): real tokens, which come first"""
    real: Value
    """(batch, time) bool"""
    remember: bool
    """whether the states after the last real tokens are wanted"""

    def clear(self, x: Value) -> Value:
        """(batch, time, dim) with zeros on padding."""
        return x.graph.where(self.real.unsqueeze(2), x, 0.0)


def normalize(graph: Graph, norm: nn.Module, x: Value) -> Value:
    """A norm over the last axis."""
    require(isinstance(norm, Norm), f"the norm {type(norm).__name__} has no ONNX form")
    assert isinstance(norm, Norm)
    if isinstance(norm, BatchNorm):
        scale = torch.rsqrt(norm.running_var.double() + EPS)
        scale = scale * norm.weight.double() if norm.affine else scale
        shift = -norm.running_mean.double() * scale
        shift = shift + norm.bias.double() if norm.affine else shift
        return x * graph.weight(scale, "scale") + graph.weight(shift, "shift")
    if isinstance(norm, LayerNorm):
        if norm.affine:
            weight, bias = graph.weight(norm.weight, "scale"), graph.weight(norm.bias, "shift")
            return graph.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=EPS)
        mean = x - graph.op("ReduceMean", x, graph.const([-1], "int"), keepdims=1)
        return mean / graph.op("Sqrt", _mean_square(graph, mean) + EPS)
    scaled = x / graph.op("Sqrt", _mean_square(graph, x) + EPS)
    return scaled * graph.weight(norm.weight, "scale") if norm.affine else scaled  # type: ignore[arg-type]


def _mean_square(graph: Graph, x: Value) -> Value:
    return graph.op("ReduceMean", x * x, graph.const([-1], "int"), keepdims=1)


class Decisions(NamedTuple):
    """What a router says about (tokens, modules)."""

    active: Value
    probs: Value


@torch.no_grad()
def route(graph: Graph, policy: Policy, x: Value, causal: bool) -> Decisions:
    """The decisions of a policy on (tokens, d_model)."""
    router = policy.router
    if isinstance(router, PerSequence):
        require(
            causal,
            f"{type(router).__name__} picks a fraction of each sequence, which has no ONNX form; "
            "causal models, which compare with a border, have one",
        )
    folded = fold_router(policy)
    require(
        folded is not None or not policy.steered,
        f"a target for the router {type(router).__name__} has no ONNX form",
    )
    if isinstance(router, AlwaysActive):
        total = x.sum(1, keep=True)
        finite = graph.op("Not", graph.op("IsNaN", total)) & graph.op("Not", graph.op("IsInf", total))
        active = finite.expand(x.size(0), router.modules_count)
        return Decisions(active, active.to("float"))
    if isinstance(router, XMoE):
        return _compete(graph, router, x)
    if isinstance(router, ExpertChoice):
        logits = graph.linear(router.logits, x, "router")
        whole = graph.op("ReduceLogSumExp", logits, graph.const([-1], "int"), keepdims=1)
        other = 1.0 - graph.op("Min", graph.op("Exp", logits - whole), graph.const(1 - 1e-6, "float"))
        odds = (logits - whole - graph.op("Log", other)).cut(1, router.modules_count + 1, 1)
        return _above(graph, odds, graph.weight(router.border, "border"))
    if type(router) is TemperedSigmoid:
        odds = graph.linear(router.logits, x, "router") / graph.weight(router.temperature, "temperature")
        return _above(graph, odds, None)
    require(folded is not None, f"the router {type(router).__name__} has no ONNX form")
    assert folded is not None
    weight, bias = graph.weight(folded.weight, "router"), graph.weight(folded.bias, "router.bias")
    odds = graph.op("Gemm", x, weight, bias, transB=1)
    border = None if not any(folded.border) else graph.const(folded.border, "float")
    return _above(graph, odds, border)


def _above(graph: Graph, odds: Value, border: Value | None) -> Decisions:
    probs = graph.sigmoid(odds)
    above = probs > 0.5 if border is None else odds > border
    # a token that is not finite activates nothing
    return Decisions(above & (odds < float("inf")), probs)


def _compete(graph: Graph, router: XMoE, x: Value) -> Decisions:
    token = graph.linear(router.project, x, "router")
    size = graph.op("Sqrt", (token * token).sum(1, keep=True))
    token = token / graph.op("Max", size, graph.const(1e-12, "float"))
    option = nn.functional.normalize(router.options.double(), dim=-1) / router.temperature.double()
    probs = graph.op("Softmax", token @ graph.weight(option.T.contiguous(), "options"), axis=-1)
    best = graph.op("ArgMax", probs, axis=-1, keepdims=1)
    ours = probs.cut(1, router.modules_count + 1, 1)
    number = graph.const(list(range(1, router.modules_count + 1)), "int")
    return Decisions(best.equals(number) & (ours > 0.0), ours)


class Layer:
    """A layer as nodes of a graph: `step` on one token of each sequence, `sequence` on whole ones."""

    def __init__(self, graph: Graph, layer: nn.Module) -> None:
        self.graph = graph
        self.after = layer if isinstance(layer, SeqBoatThenFFN) else None
        inner = layer.layer if isinstance(layer, SeqBoatThenFFN) else layer
        require(
            type(inner) in (SeqBoat, SSMLayer),
            f"the layer {type(inner).__name__} has no ONNX form; SeqBoat and the layers of S4D and S5 have one",
        )
        assert isinstance(inner, SeqBoat | SSMLayer)
        self.layer = inner
        self.kernel = make_kernel(graph, inner.ssm)
        self.units: list[Attention | FeedForward] = []
        if isinstance(inner, SeqBoat):
            form = inner.sma.form
            require(
                form == "paper", f"a layer of the form {form!r} has no ONNX form: export one of form 'paper'"
            )
            sma = inner.sma
            require(
                sma.combine == "sum" and not sma.straight_through,
                "modules whose outputs are averaged or keep their size have no ONNX form",
            )
            require(
                sma.policy.alone, "decisions that a budget limits or that are taken by hand have no ONNX form"
            )
            self.units = [self._unit(unit) for unit in sma.units.values()]

    def _unit(self, unit: nn.Module) -> Attention | FeedForward:
        if isinstance(unit, GAU):
            return Attention(self.graph, unit)
        found = unit[0] if isinstance(unit, nn.Sequential) and isinstance(unit[-1], nn.Dropout) else unit
        require(isinstance(found, FeedForward), f"the module {type(unit).__name__} has no ONNX form")
        assert isinstance(found, FeedForward)
        return found

    def state_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of the parts of the state, without the batch."""
        shapes = self.kernel.state_shapes()
        for unit in self.units:
            if isinstance(unit, Attention):
                shapes |= unit.state_shapes()
        return shapes

    def _open(self, x: Value) -> Value:
        return normalize(self.graph, self.layer.norm, x) if self.layer.config.prenorm else x

    def _gate(self, x: Value, mixed: Value) -> Value:
        """The rest of a layer without attention, on (tokens, dim)."""
        assert isinstance(self.layer, SSMLayer)
        graph, width = self.graph, self.layer.d_model
        hidden = graph.gelu(mixed)
        out = graph.linear(self.layer.out, hidden, "gate")
        if self.layer.config.gate == "glu":
            value, gate = out.split([width, width])
            y = value * graph.sigmoid(gate)
        else:
            y = hidden * graph.sigmoid(out)
        return x + y if self.layer.config.prenorm else normalize(graph, self.layer.norm, x + y)

    def _feed(self, ffn: FeedForward, x: Value) -> Value:
        graph = self.graph
        require(ffn.activation == "silu", f"a feed-forward block with {ffn.activation!r} has no ONNX form")
        return graph.linear(ffn.out, graph.silu(graph.linear(ffn.hidden, x, "ffn")), "ffn.out")

    def _close(self, summed: Value) -> Value:
        """From the sum of all branches to the output of the layer, on (tokens, dim)."""
        graph, config = self.graph, self.layer.config
        y = graph.silu(summed)
        y = y if config.prenorm else normalize(graph, self.layer.norm, y)
        if self.after is None:
            return y
        after = self.after
        added = self._feed(after.ffn, normalize(graph, after.norm, y) if config.prenorm else y)
        return y + added if config.prenorm else normalize(graph, after.norm, y + added)

    def _dense(self, hidden: Value, causal: bool) -> tuple[Value, list[Value], list[Value]]:
        """The dense branch of (tokens, dim), and of every module its decisions (tokens,) and their weights."""
        assert isinstance(self.layer, SeqBoat)
        decisions = route(self.graph, self.layer.sma.policy, hidden, causal)
        count = range(len(self.units))
        active, probs = ([part.take(i, 1) for i in count] for part in decisions)
        return self.graph.linear(self.layer.linear, hidden, "dense"), active, probs

    def step(self, x: Value, seen: Value, state: Memory) -> tuple[Value, Memory, list[Value]]:
        """(batch, dim) to (batch, dim), the state after it, and which sequences were active in each module."""
        graph = self.graph
        mixed, after = self.kernel.step(self._open(x), state)
        if isinstance(self.layer, SSMLayer):
            return self._gate(x, mixed), after, []
        hidden = graph.silu(mixed)
        y, active, probs = self._dense(hidden, True)
        y = y + x
        for unit, chosen, weight in zip(self.units, active, probs, strict=True):
            out, memory = self._run(unit, hidden, chosen, seen, state)
            y = y + graph.where(chosen.unsqueeze(1), out * weight.unsqueeze(1), 0.0)
            after |= memory
        return self._close(y), after, active

    def _run(
        self, unit: Attention | FeedForward, hidden: Value, active: Value, seen: Value, state: Memory
    ) -> tuple[Value, Memory]:
        """A module on one token of each sequence; skipped where no sequence is active."""
        graph = self.graph
        names = list(unit.state_shapes()) if isinstance(unit, Attention) else []
        memory = {name: state[name] for name in names}

        def run() -> list[Value]:
            if isinstance(unit, FeedForward):
                return [self._feed(unit, hidden)]
            out, after = unit.step(hidden, active, seen, memory)
            return [out, *(after[name] for name in names)]

        def skip() -> list[Value]:
            return [graph.zeros(hidden.size(0), self.layer.d_model), *memory.values()]

        some = graph.op("ReduceMax", active.to("int"), keepdims=0) > 0
        out, *parts = graph.branch(some, run, skip)
        return out, dict(zip(names, parts, strict=True))

    def sequence(self, x: Value, about: Sequences) -> tuple[Value, Memory, list[Value]]:
        """(batch, time, dim), zeros on padding, to the same; the final state; (batch, time) active in each module."""
        graph, width = self.graph, self.layer.d_model
        batch, time = x.size(0), x.size(1)
        opened = about.clear(self._open(x)) if self.layer.config.prenorm else x
        mixed, state = self.kernel.sequence(opened, about.lengths if about.remember else None)
        tokens, mixed = x.reshape(-1, width), mixed.reshape(-1, width)
        if isinstance(self.layer, SSMLayer):
            y = self._gate(tokens, mixed)
            return about.clear(y.reshape(batch, time, width)), state, []
        hidden = graph.silu(mixed)
        y, active, probs = self._dense(hidden, self.layer.causal)
        y = y + tokens
        found = []
        for unit, chosen, weight in zip(self.units, active, probs, strict=True):
            real = chosen.reshape(batch, time) & about.real
            found.append(real)
            if isinstance(unit, Attention):
                out, packed, memory = unit.sequence(hidden, real, about.remember)
                state |= memory
            else:
                packed = pack(graph, real, 1)
                out = self._feed(unit, hidden.take(packed.source))
            scaled = out * weight.take(packed.source).unsqueeze(1)
            y = y + unpack(graph, packed, scaled, width)
        return about.clear(self._close(y).reshape(batch, time, width)), state, found
