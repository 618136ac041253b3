"""Whole models as graphs, in two forms.

    step       (batch,) tokens and a state to the scores of the next token and the state after it
    sequence   (batch, time) tokens or values and their lengths to scores; language models also give the state after
               the last token, with which `step` continues

`docs/deploy.md` lists the names of inputs and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from seqboat.core.checks import require
from seqboat.models.backbone import Backbone
from seqboat.models.heads import Classifier, LanguageModel, Matcher, Tagger
from seqboat.models.ngrams import MULTIPLIER, NGrams
from seqboat.onnx.attention import Attention
from seqboat.onnx.graph import DEFAULT_OPSET, Graph, Value
from seqboat.onnx.kernels import Memory
from seqboat.onnx.layers import Layer, Sequences, normalize

FORMS = ("step", "sequence")
StateShapes = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of every part of a state by its name, without the batch."""


class GraphModel:
    """A model while it is written to a graph.

    Args:
        model: of the core, in eval mode.
        opset: version of the operators.
    """

    def __init__(self, model: Any, opset: int = DEFAULT_OPSET) -> None:
        require(
            isinstance(model, LanguageModel | Classifier | Tagger | Matcher),
            f"a {type(model).__name__} has no ONNX form",
        )
        require(not model.training, "a model in training mode has no ONNX form: call eval()")
        self.model, self.graph = model, Graph(opset)
        self.backbone: Backbone = model.backbone
        require(self.backbone.lead is None, "a model with a second stream of tokens has no ONNX form")
        self.layers = [Layer(self.graph, layer) for layer in self.backbone.layers]

    # inputs

    def _embed(self, inputs: Value, position: Value, grams: Value | None) -> Value:
        """(..., d_model) of token ids (...) or values (..., channels) at these positions, with their n-grams."""
        graph, backbone, config = self.graph, self.backbone, self.backbone.config
        layer = backbone.embedding
        if isinstance(layer, nn.Linear):
            x = graph.op(
                "MatMul", inputs, graph.op("Transpose", graph.matrix(layer, "embedding"), perm=[1, 0])
            ) + graph.weight(layer.bias, "embedding.bias")
        else:
            x = graph.rows(layer, inputs, "embedding")
        if grams is not None:
            x = x + grams
        if isinstance(layer, nn.Embedding) and config.scaled_embedding:
            x = x * math.sqrt(config.d_model)
        if backbone.absolute_positions:
            x = x + sinusoids(graph, position, config.d_model) * graph.weight(
                backbone.position_scale, "position_scale"
            )
        return x

    def _score(self, y: Value) -> Value:
        """(tokens, vocab) of a language model."""
        return self.graph.op("Gemm", y, self.graph.matrix(self.backbone.embedding, "embedding"), transB=1)

    def _end(self, x: Value) -> Value:
        norm = self.backbone.norm
        return x if norm is None else normalize(self.graph, norm, x)

    # the state

    def state_shapes(self) -> StateShapes:
        """The parts of the state of a step."""
        shapes: StateShapes = {"seen": ("int", ())}
        if self.backbone.ngrams is not None:
            shapes["recent"] = ("int", (self.backbone.ngrams.reach,))
        for number, layer in enumerate(self.layers):
            shapes |= {f"{number}.{name}": kind for name, kind in layer.state_shapes().items()}
        return shapes

    @property
    def remembers(self) -> bool:
        """Whether whole sequences leave a state of constant size."""
        full = (unit.full for layer in self.layers for unit in layer.units if isinstance(unit, Attention))
        return isinstance(self.model, LanguageModel) and not any(full)

    def _give_state(self, seen: Value, recent: Value | None, states: Sequence[Memory]) -> None:
        found = {"seen": seen}
        if recent is not None:
            found["recent"] = recent
        for number, state in enumerate(states):
            found |= {f"{number}.{name}": part for name, part in state.items()}
        for name, (_, shape) in self.state_shapes().items():
            self.graph.output(f"next.{name}", found[name], ["batch", *shape])

    # the two forms

    @torch.no_grad()
    def write_step(self) -> None:
        """One token of every sequence."""
        graph = self.graph
        require(
            isinstance(self.model, LanguageModel),
            f"a {type(self.model).__name__.lower()} reads whole sequences: choose --form sequence",
        )
        shapes = self.state_shapes()
        tokens = graph.input("tokens", "int", ["batch"])
        given = {
            name: graph.input(f"state.{name}", kind, ["batch", *shape])  # type: ignore[arg-type]
            for name, (kind, shape) in shapes.items()
        }
        grams = recent = None
        if self.backbone.ngrams is not None:
            known = graph.concat([given["recent"], (tokens + 1).unsqueeze(1)], 1)
            recent = known.cut(1, self.backbone.ngrams.reach + 1, 1)
            grams = ngrams(graph, self.backbone.ngrams, known).squeeze(1)
        x, states, decisions = self._embed(tokens, given["seen"], grams), [], []
        for number, layer in enumerate(self.layers):
            names = layer.state_shapes()
            x, after, active = layer.step(
                x, given["seen"], {name: given[f"{number}.{name}"] for name in names}
            )
            states.append(after)
            decisions.append(active)
        graph.output("logits", self._score(self._end(x)), ["batch", self.backbone.config.vocab or 0])
        self._give_active(decisions, ["batch"], 1)
        self._give_state(given["seen"] + 1, recent, states)

    @torch.no_grad()
    def write_sequence(self) -> None:
        """Whole sequences."""
        graph, model, width = self.graph, self.model, self.backbone.config.d_model
        if isinstance(model, Matcher):
            parts, decisions = [], []
            for name in ("first", "second"):
                y, about, active, *_ = self._read(name, f"{name}_lengths", f"{name}_time")
                parts.append(self._mean(y, about))
                decisions.append((name, active))
            a, b = parts
            graph.output(
                "logits", self._head(graph.concat([a, b, a * b, a - b], 1)), ["batch", self._classes]
            )
            for name, active in decisions:
                self._give_active(active, ["batch", f"{name}_time"], 2, f"{name}_active")
            return
        name = "tokens" if self._has_ids else "values"
        y, about, active, states, known = self._read(name, "lengths", "time")
        tokens = y.reshape(-1, width)
        batch, time = y.size(0), y.size(1)
        if isinstance(model, Classifier):
            graph.output("logits", self._head(self._mean(y, about)), ["batch", self._classes])
        else:
            lm = isinstance(model, LanguageModel)
            classes = self.backbone.config.vocab or 0 if lm else self._classes
            scores = self._score(tokens) if lm else self._head(tokens)
            graph.output("logits", scores.reshape(batch, time, classes), ["batch", "time", classes])
        self._give_active(active, ["batch", "time"], 2)
        if about.remember:
            recent = None
            if known is not None and self.backbone.ngrams is not None:
                last = about.lengths.unsqueeze(1) + graph.range(self.backbone.ngrams.reach)
                recent = graph.op("GatherElements", known, last, axis=1)
            self._give_state(about.lengths, recent, states)

    @property
    def _has_ids(self) -> bool:
        return self.backbone.config.vocab is not None

    @property
    def _classes(self) -> int:
        return int(self.model.head.out.out_features)

    def _read(
        self, name: str, lengths_name: str, time_name: str
    ) -> tuple[Value, Sequences, list[list[Value]], list[Memory], Value | None]:
        """A batch of sequences through all layers; the last result is what n-grams are made of."""
        graph = self.graph
        shape: list[int | str] = [
            "batch",
            time_name,
            *([] if self._has_ids else [self.backbone.config.channels]),
        ]
        inputs = graph.input(name, "int" if self._has_ids else "float", shape)
        lengths = graph.input(lengths_name, "int", ["batch"])
        time = inputs.size(1)
        position = graph.range(time)
        about = Sequences(lengths, position < lengths.unsqueeze(1), self.remembers)
        if self._has_ids:
            # what stands on padding may be any number
            inputs = graph.where(about.real, inputs, 0)
        known = grams = None
        if self.backbone.ngrams is not None:
            known = graph.op("Pad", inputs + 1, graph.const([0, self.backbone.ngrams.reach, 0, 0], "int"))
            grams = ngrams(graph, self.backbone.ngrams, known)
        x = about.clear(self._embed(inputs, position, grams))
        decisions, states = [], []
        for layer in self.layers:
            x, state, active = layer.sequence(x, about)
            decisions.append(active)
            states.append(state)
        return about.clear(self._end(x)), about, decisions, states, known

    def _mean(self, y: Value, about: Sequences) -> Value:
        """Mean over the real tokens; zero for a sequence without any."""
        count = self.graph.op("Max", about.lengths, self.graph.const(1, "int"))
        return y.sum(1) / count.to("float").unsqueeze(1)

    def _head(self, x: Value) -> Value:
        graph, head = self.graph, self.model.head
        hidden = graph.gelu(graph.linear(head.hidden, x, "head.hidden"))
        return graph.linear(head.out, hidden, "head.out")

    def _give_active(
        self, decisions: Sequence[Sequence[Value]], sizes: list[str], axis: int, name: str = "active"
    ) -> None:
        """(..., layers, modules) bool: which modules every token activated."""
        layers = [
            self.graph.concat([part.unsqueeze(axis) for part in layer], axis).unsqueeze(axis)
            for layer in decisions
            if layer
        ]
        if layers:
            modules = len(decisions[0])
            self.graph.output(name, self.graph.concat(layers, axis), [*sizes, len(layers), modules])

    def build(self, form: str, metadata: Mapping[str, str]) -> Any:
        """The model in one of its forms, as ONNX has it."""
        (self.write_step if form == "step" else self.write_sequence)()
        return self.graph.build(f"seqboat {form}", metadata)


def sinusoids(graph: Graph, position: Value, d_model: int) -> Value:
    """Sinusoidal position embedding (..., d_model)."""
    exponent = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
    step = graph.const((10000.0**-exponent).numpy(), "double")
    angle = ((position.to("double").unsqueeze(-1) * step) % (2 * math.pi)).to("float")
    both = graph.concat([graph.op("Sin", angle), graph.op("Cos", angle)], -1)
    return both.cut(0, d_model, -1)


def ngrams(graph: Graph, layer: NGrams, known: Value) -> Value:
    """(batch, time, d_model): the sum of the embeddings of the n-grams that end at each token.

    `NGrams.places` in 64-bit integers. A shift to the right is a division that rounds down.

    Args:
        graph: to write to.
        layer: of n-grams.
        known: (batch, reach + time), ids + 1 of the tokens and those before them; 0 before the first.
    """
    found: list[Value] = []
    key: Value | None = None
    end = known.size(1)
    for back in range(max(layer.sizes)):
        earlier = known.cut(layer.reach - back, end - back, 1)
        key = (earlier if key is None else key + earlier) * MULTIPLIER
        if back + 1 in layer.sizes:
            mixed = graph.op("BitwiseXor", key, shifted(key, 29)) * MULTIPLIER
            place = shifted(mixed, 32) % layer.buckets + len(found) * layer.buckets
            found.append(graph.rows(layer.table, place, "ngrams"))
    total = found[0]
    for more in found[1:]:
        total = total + more
    return total


def shifted(x: Value, bits: int) -> Value:
    """Integers, shifted to the right."""
    return (x - x % (1 << bits)) // (1 << bits)
