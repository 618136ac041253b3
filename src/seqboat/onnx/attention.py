"""Gated attention in a graph: one token with its memory, or the packed active tokens of a batch.

Whole sequences are packed first: `NonZero` finds the active tokens of all sequences, and nothing is computed for the
others. The packed queries are cut into groups, and each group attends to the keys around it:

    memory, chunk    GROUP queries, and the keys that the first and the last of them may see
    full             all active tokens of one sequence
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from seqboat.core.checks import require
from seqboat.layers.gau import GAU
from seqboat.layers.spans import ChunkSpan, FullSpan, MemorySpan
from seqboat.onnx.graph import Graph, Value
from seqboat.onnx.kernels import Memory
from seqboat.ops.functions import HIDDEN, LAPLACE_MU, LAPLACE_SIGMA
from seqboat.ops.positions import CompressedBias, OriginalBias, frequencies

GROUP = 64
"""Queries of a group."""


class Packed(NamedTuple):
    """The active tokens of a batch: at least one place, of which the first `count` count."""

    source: Value
    """(places,): in the flattened (batch * time) sequence"""
    sequence: Value
    """(places,): which sequence of the batch; -1 behind the last token"""
    position: Value
    """(places,): in its sequence"""
    slot: Value
    """(places,): among the active tokens of its sequence"""
    rank: Value
    """(batch * time,): place of every token; that of the spare place for inactive ones"""
    offsets: Value
    """(batch,): place of the first token of every sequence"""
    counts: Value
    """(batch,)"""
    places: Value


def pack(graph: Graph, active: Value, group: int) -> Packed:
    """Find the active tokens of (batch, time); places are filled up to a multiple of `group`."""
    time, flat = active.size(1), active.reshape(-1)
    found = graph.op("NonZero", flat).reshape(-1)
    count = found.size(0)
    places = graph.op("Max", (count + (group - 1)) // group, graph.const(1, "int")) * group
    counts = active.to("int").sum(1)
    offsets = graph.op("CumSum", counts, graph.const(0, "int"), exclusive=1)
    fill = graph.concat([graph.const([0], "int"), (places - count).reshape(1)], 0)
    index = graph.op("Pad", found, fill)
    sequence = index // time
    place = graph.range(places)
    rank = graph.op("CumSum", flat.to("int"), graph.const(0, "int")) - 1
    return Packed(
        index,
        graph.where(place < count, sequence, -1),
        index - sequence * time,
        place - offsets.take(sequence),
        graph.where(flat, rank, places),
        offsets,
        counts,
        places,
    )


def unpack(graph: Graph, packed: Packed, y: Value, width: int) -> Value:
    """(batch * time, width): packed outputs at the places they came from, zeros elsewhere."""
    return graph.concat([y, graph.zeros(1, width)], 0).take(packed.rank)


def rotations(graph: Graph, position: Value, d_z: int) -> tuple[Value, Value]:
    """Cosines and sines (tokens, d_z / 2) of the rotary embedding at these positions."""
    step = graph.const(frequencies(d_z, torch.device("cpu")).numpy(), "double")
    # reduced to one turn in float64, as everywhere
    angle = (position.to("double").unsqueeze(1) * step) % (2 * math.pi)
    angle = angle.to("float")
    return graph.op("Cos", angle), graph.op("Sin", angle)


class Attention:
    """A gated attention unit as nodes of a graph."""

    def __init__(self, graph: Graph, gau: torch.nn.Module) -> None:
        require(type(gau) is GAU, f"the module {type(gau).__name__} has no ONNX form")
        assert isinstance(gau, GAU)
        self.graph, self.gau, self.span = graph, gau, gau.span
        self.window, self.d_z, self.d_v = gau.window, gau.d_z, gau.d_v
        self.full = isinstance(gau.span, FullSpan)
        self.chunk = isinstance(gau.span, ChunkSpan)
        require(
            type(gau.span) in (MemorySpan, ChunkSpan, FullSpan),
            f"the span {type(gau.span).__name__} has no ONNX form",
        )
        self.original = isinstance(gau.positions, OriginalBias)
        self.compressed = isinstance(gau.positions, CompressedBias)
        # with the span "full", the scale of some functions depends on the number of keys
        scale = gau.function.scale
        self.per_count = self.full and scale(self.d_z, 1.0) != scale(self.d_z, 2.0)

    # parts of both forms

    def _project(self, x: Value, position: Value) -> tuple[Value, Value, Value, Value]:
        """Queries, keys, values and gates of (tokens, d_model); queries are scaled."""
        graph, gau = self.graph, self.gau
        base = graph.silu(graph.linear(gau.base, x, "base"))
        z, gate, value = base.split([self.d_z, self.d_v, self.d_v])
        scale = 1.0 if self.per_count else gau.scale
        factor = torch.tensor([[scale], [1.0]], dtype=torch.float64)
        gamma, beta = (part.detach().cpu().double() * factor for part in (gau.gamma, gau.beta))
        query, key = (z * graph.weight(gamma[i], "gamma") + graph.weight(beta[i], "beta") for i in range(2))
        if gau.positions.rotates:
            turn = rotations(graph, position, self.d_z)
            query, key = self._rotate(query, *turn), self._rotate(key, *turn)
        return query, key, value, gate

    def _rotate(self, x: Value, cos: Value, sin: Value) -> Value:
        even, odd = (part.squeeze(2) for part in x.reshape(-1, self.d_z // 2, 2).split([1, 1], axis=2))
        turned = even * cos - odd * sin, odd * cos + even * sin
        return self.graph.concat([part.unsqueeze(2) for part in turned], 2).reshape(-1, self.d_z)

    def _bias(self, distance: Value) -> Value:
        """The learned bias of every distance `key - query`."""
        assert self.gau.bias is not None
        furthest = self.gau.bias.max_distance
        table = self.graph.weight(self.gau.bias.table, "bias")
        return table.take((distance + furthest).clip(0, 2 * furthest))

    def _weigh(self, scores: Value) -> Value:
        graph, name = self.graph, self.gau.config.attention
        if name == "softmax":
            return graph.op("Softmax", scores, axis=-1)
        if name == "relu2":
            above = graph.op("Relu", scores)
            return above * above
        require(name == "laplace", f"the attention function {name!r} has no ONNX form")
        return (graph.op("Erf", (scores - LAPLACE_MU) * (0.5**0.5 / LAPLACE_SIGMA)) + 1.0) * 0.5

    # one token

    def state_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of the parts of the memory, without the batch."""
        require(
            not self.full,
            'a step has a state of constant size, but the memory of the span "full" grows: '
            "choose --form sequence",
        )
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "keys": ("float", (self.window, self.d_z)),
            "values": ("float", (self.window, self.d_v)),
        }
        if self.original:
            shapes["positions"] = ("int", (self.window,))
        return {**shapes, "total": ("int", ())}

    def step(self, x: Value, active: Value, position: Value, memory: Memory) -> tuple[Value, Memory]:
        """The output (batch, d_model) of one token of every sequence, and the memory; inactive ones change nothing.

        Args:
            x: (batch, d_model).
            active: (batch,).
            position: (batch,).
            memory: its parts.
        """
        graph = self.graph
        query, key, value, gate = self._project(x, position)
        total, keys, values = memory["total"], memory["keys"], memory["values"]
        scores = (keys @ query.unsqueeze(2)).squeeze(2)  # (batch, window)
        own = (query * key).sum(1, keep=True)
        place = graph.range(self.window)
        slot = total.unsqueeze(1)
        if self.gau.bias is not None:
            if self.original:
                distance = memory["positions"] - position.unsqueeze(1)
            else:
                # from the token at each place to this one; the remainder is never negative
                distance = -1 - (slot - 1 - place) % self.window
            scores = scores + self._bias(distance)
            own = own + self._bias(graph.const([0], "int"))
        visible = place < (slot % self.window if self.chunk else slot)
        weights = self._weigh(graph.concat([graph.where(visible, scores, HIDDEN), own], 1))
        past, last = weights.split([self.window, 1])
        attended = (past.unsqueeze(1) @ values).squeeze(1) + last * value
        out = graph.linear(self.gau.out, gate * attended, "out")
        where = graph.concat([graph.range(total.size(0)).unsqueeze(1), (total % self.window).unsqueeze(1)], 1)
        after = {"total": total + active.to("int")}
        fresh = {"keys": key, "values": value, "positions": position}
        for name in memory.keys() - {"total"}:
            wide = active if name == "positions" else active.unsqueeze(1)
            new = graph.where(wide, fresh[name], graph.op("GatherND", memory[name], where))
            after[name] = graph.op("ScatterND", memory[name], where, new)
        return out, after

    # whole sequences

    def sequence(self, x: Value, active: Value, remember: bool) -> tuple[Value, Packed, Memory]:
        """The outputs of the packed tokens, and the memory after them if it is to be kept.

        Args:
            x: (batch * time, d_model).
            active: (batch, time).
            remember: whether the memory is wanted.
        """
        graph = self.graph
        packed = pack(graph, active, 1 if self.full else GROUP)
        query, key, value, gate = self._project(x.take(packed.source), packed.position)
        if self.full:
            attended = self._attend_all(query, key, value, packed, active.size(0))
        else:
            attended = self._attend_near(query, key, value, packed)
        out = graph.linear(self.gau.out, gate * attended, "out")
        return out, packed, self._remember(key, value, packed) if remember else {}

    def _attend_near(self, query: Value, key: Value, value: Value, packed: Packed) -> Value:
        """(places, d_v): every group of queries, and the keys around it."""
        graph = self.graph
        left, right = self._reach()
        width = left + GROUP + right
        groups = packed.places // GROUP
        place = (graph.range(groups) * GROUP - left).unsqueeze(1) + graph.range(width)  # (groups, width)
        inside = (place >= 0) & (place < packed.places)
        place = graph.where(inside, place, 0)
        scores = query.reshape(-1, GROUP, self.d_z) @ key.take(place).transpose(0, 2, 1)
        ours = packed.sequence.reshape(-1, GROUP).unsqueeze(2)
        theirs = graph.where(inside, packed.sequence.take(place), -2).unsqueeze(1)
        apart = (graph.range(width) - left) - graph.range(GROUP).unsqueeze(1)
        visible = ours.equals(theirs) & (apart >= -left) & (apart <= right)
        if self.chunk:
            chunk = packed.slot // self.window
            visible = visible & chunk.reshape(-1, GROUP).unsqueeze(2).equals(chunk.take(place).unsqueeze(1))
        if self.original:
            here = packed.position.reshape(-1, GROUP).unsqueeze(2)
            scores = scores + self._bias(packed.position.take(place).unsqueeze(1) - here)
        elif self.compressed:
            scores = scores + self._bias(apart)
        weights = self._weigh(graph.where(visible, scores, HIDDEN))
        return (weights @ value.take(place)).reshape(-1, self.d_v)

    def _reach(self) -> tuple[int, int]:
        """Slots before and after itself that a query may see."""
        if isinstance(self.span, MemorySpan):
            return self.span.left, self.span.right
        return self.window - 1, 0 if self.gau.causal else self.window - 1

    def _attend_all(self, query: Value, key: Value, value: Value, packed: Packed, batch: Value) -> Value:
        """(places, d_v): every token and all active ones of its sequence."""
        graph, counts = self.graph, packed.counts.unsqueeze(1)
        longest = graph.op("Max", graph.op("ReduceMax", packed.counts, keepdims=0), graph.const(1, "int"))
        slot = graph.range(longest)
        real = slot < counts  # (batch, longest)
        place = graph.where(real, packed.offsets.unsqueeze(1) + slot, 0)
        queries, keys = query.take(place), key.take(place)
        if self.per_count:
            seen = slot + 1 if self.gau.causal else graph.op("Max", counts, graph.const(1, "int"))
            queries = queries / seen.to("float").expand(batch, longest).unsqueeze(2)
        scores = queries @ keys.transpose(0, 2, 1)
        visible = real.unsqueeze(1)
        if self.gau.causal:
            visible = visible & (slot <= slot.unsqueeze(1))
        if self.original:
            position = packed.position.take(place)
            scores = scores + self._bias(position.unsqueeze(1) - position.unsqueeze(2))
        elif self.compressed:
            scores = scores + self._bias(slot - slot.unsqueeze(1))
        weights = self._weigh(graph.where(visible, scores, HIDDEN))
        attended = (weights @ value.take(place)).reshape(-1, self.d_v)
        back = graph.op("Max", packed.sequence, graph.const(0, "int")) * longest + packed.slot
        return attended.take(graph.op("Min", back, batch * longest - 1))

    def _remember(self, key: Value, value: Value, packed: Packed) -> Memory:
        """The memory after all packed tokens, in the form that `step` takes."""
        graph, total = self.graph, packed.counts
        last = total.unsqueeze(1) - 1
        # slot at every place of the ring; negative where none is
        slot = last - (last - graph.range(self.window)) % self.window
        filled = slot >= 0
        place = graph.where(filled, packed.offsets.unsqueeze(1) + slot, 0)
        memory = {
            name: graph.where(filled.unsqueeze(2), part.take(place), 0.0)
            for name, part in (("keys", key), ("values", value))
        }
        if self.original:
            memory["positions"] = graph.where(filled, packed.position.take(place), 0)
        return {**memory, "total": total}
