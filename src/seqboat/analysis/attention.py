"""What attention sees: the keys of every query, their weights, and how far away they are.

    for pair in attention_weights(examples.model, examples.task.kind, batch, layer=2):
        for attention in pair:                                      one per sequence; None without an attention unit
            positions, weights = attention.seen_by(5)               what the sixth active token looks at

Slots count the active tokens of a sequence, positions all its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.analysis.traces import Floats, Numbers, Site, sites, to_array
from seqboat.core.checks import require
from seqboat.layers.gau import BY_POSITION, GAU
from seqboat.layers.sma import Packed
from seqboat.ops.attention import HIDDEN, weigh_keys, widen
from seqboat.tasks.task import Batch, Kind, apply_model

QUERIES_AT_ONCE = 256
"""Number of queries to compute weights for at a time."""


class SeenTokens(NamedTuple):
    """The inputs of a call to an attention unit."""

    tokens: Tensor
    packed: Packed


@contextmanager
def watch(found: Sequence[Site | None], wanted: Sequence[int]) -> Iterator[dict[int, list[SeenTokens]]]:
    """Record the inputs of the attention units of some layers; for pairs, one record per sequence."""
    seen: dict[int, list[SeenTokens]] = {number: [] for number in wanted}
    with ExitStack() as stack:
        for number in wanted:
            site = found[number]
            if site is None or site.gau is None:
                continue

            def keep(_unit: nn.Module, args: tuple[Any, ...], number: int = number) -> None:
                seen[number].append(SeenTokens(*args[:2]))

            handle = site.gau.register_forward_pre_hook(keep)
            stack.callback(handle.remove)
        yield seen


@dataclass(frozen=True)
class Attention:
    """What the active tokens of a sequence saw in one layer. Slots count active tokens, positions all tokens."""

    positions: Numbers
    """(active,): positions of the active tokens in the sequence"""
    first: Numbers
    """(active,): slot of the first key that each query sees"""
    end: Numbers
    """(active,): slot after the last key that each query sees"""
    weights: Floats
    """(active, maximum keys): weights of the keys from `first` on; zero after the last key"""

    def seen_by(self, slot: int) -> tuple[Numbers, Floats]:
        """Positions of the keys that the query in a slot sees, and their weights."""
        first, end = int(self.first[slot]), int(self.end[slot])
        return self.positions[first:end], self.weights[slot, : end - first]


@torch.no_grad()
def attention_weights(
    model: nn.Module, kind: Kind, batch: Batch, layer: int
) -> list[tuple[Attention | None, ...]]:
    """The keys that every query of a layer saw, and their weights; this recomputes the attention.

    Args:
        model: in eval mode.
        kind: of its task.
        batch: on the model's device.
        layer: index, counted from 0.

    Returns:
        For each sample one entry per sequence (two for a pair); None if the layer has no attention unit.
    """
    found = sites(model)
    require(0 <= layer < len(found), f"layer must be in 0..{len(found) - 1}, got {layer}")
    with watch(found, [layer]) as seen:
        apply_model(model, kind, batch.joined())
    site = found[layer]
    rows = range(len(batch.inputs))
    if site is None or site.gau is None:
        return [(None,) * (1 if batch.second is None else 2) for _ in rows]
    gau = site.gau
    return [tuple(_attention(gau, *tokens_of(call, row)) for call in seen[layer]) for row in rows]


def tokens_of(call: SeenTokens, row: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Active tokens (active, d_model) of one sequence, their positions, and what each counts if they differ."""
    begin, end = call.packed.offsets[row : row + 2].tolist()
    weight = call.packed.weight
    return (
        call.tokens[begin:end],
        call.packed.position[begin:end],
        None if weight is None else weight[begin:end],
    )


def _attention(gau: GAU, tokens: Tensor, position: Tensor, weight: Tensor | None) -> Attention:
    parts = list(weigh(gau, tokens, position, weight))
    width = max(part.weights.shape[1] for part in parts)
    weights = [F.pad(part.weights.float(), (0, width - part.weights.shape[1])) for part in parts]
    first, end = (torch.cat([getattr(part, name) for part in parts]) for name in ("first", "end"))
    return Attention(to_array(position), to_array(first), to_array(end), to_array(torch.cat(weights)))


class SlotWeights(NamedTuple):
    """How some queries of one sequence weigh the keys they see."""

    first: Tensor
    """(queries,): slot of the first key that each sees"""
    end: Tensor
    """(queries,): the slot behind the last one"""
    weights: Tensor
    """(queries, most keys): of the keys from `first` on; zero behind the last"""


def weigh(gau: GAU, tokens: Tensor, position: Tensor, weight: Tensor | None = None) -> Iterator[SlotWeights]:
    """Attention weights of a sequence, in blocks of queries, because weights start out over all keys."""
    query, key, _, _ = gau.project(tokens, position)
    for begin in range(0, max(len(position), 1), QUERIES_AT_ONCE):
        yield weigh_slots(gau, query, key, position, slice(begin, begin + QUERIES_AT_ONCE), weight)


def visible(gau: GAU, slot: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """First slot that queries at these slots see, and the one behind the last, among `count` tokens."""
    left, right = gau.sides
    if gau.config.span == "chunk":
        first = slot // gau.window * gau.window
        return first, slot + 1 if gau.causal else (first + gau.window).clamp(max=count)
    return (slot - left).clamp(min=0), (slot + right + 1).clamp(max=count)


def weigh_slots(
    gau: GAU,
    query: Tensor,
    key: Tensor,
    position: Tensor,
    queries: slice = slice(None),
    weight: Tensor | None = None,
) -> SlotWeights:
    """Attention weights inside one sequence; `GAU.forward` never holds them all.

    Args:
        gau: the attention unit.
        query: (active, d_z), from `GAU.project`, of all active tokens of a sequence.
        key: (active, d_z), likewise.
        position: (active,), their positions in the original sequence.
        queries: which of them to weigh.
        weight: (active,), what each key counts; all alike by default.
    """
    count = len(query)
    slots = torch.arange(count, device=query.device)
    slot = slots[queries]
    first, end = visible(gau, slot, count)
    low, high = (int(first[0]), int(end[-1])) if len(slot) else (0, 0)
    key_slot, query = slots[low:high], query[queries]
    if gau.grows and gau.function.by_keys:
        query = query / (slot + 1 if gau.causal else torch.full_like(slot, max(count, 1)))[:, None]
    else:
        query = query * gau.scale
    key = key[low:high]
    if weight is not None:
        query, key, _ = weigh_keys(query, key, key, weight[low:high], "softmax")
        if gau.function.by_keys:
            query, key = query[:, :-1], key[:, :-1]
    scores = widen(query) @ widen(key).T
    if gau.bias is not None:
        places = position if gau.config.positions in BY_POSITION else slots
        scores = scores + gau.bias(places[low:high] - places[queries][:, None]).to(scores.dtype)
    hidden = (key_slot < first[:, None]) | (key_slot >= end[:, None])
    weights = gau.function.weights(scores.masked_fill(hidden, HIDDEN))
    if weight is not None and gau.function.by_keys:
        weights = weights * weight[low:high].to(weights.dtype)
    most = int((end - first).max()) if len(slot) else 0
    column = (first - low)[:, None] + torch.arange(most, device=slot.device)
    inside = column < (end - low)[:, None]
    column = column.clamp(max=max(high - low - 1, 0))
    return SlotWeights(first, end, torch.where(inside, weights.gather(1, column), 0))


def mean_distance(position: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """(active,): mean distance from each query to the other keys it sees; nan if it sees only itself.

    Args:
        position: (active,) float64, increasing.
        first, end: (active,), from `GAU.visible`.
    """
    sums = F.pad(position.cumsum(dim=0), (1, 0))
    slot = torch.arange(len(position), device=position.device)
    after = torch.minimum(slot + 1, end)
    before = position * (slot - first) - (sums[slot] - sums[first])
    later = sums[end] - sums[after] - position * (end - after)
    return (before + later) / (end - first - 1)


def local_span(window: int) -> float:
    """The span that the paper compares with: half the size of a window that slides over all tokens.

    It is exact for causal windows up to half a token, (window + 1) / 2. A bidirectional window of the same size has
    half of its keys on either side, at a mean distance of about window / 4.
    """
    return window / 2


def weighted_distance(gau: GAU, tokens: Tensor, position: Tensor, weight: Tensor | None = None) -> Tensor:
    """(active,) float64: mean distance to the keys, weighted by attention; nan if all weights are zero.

    Args:
        gau: the attention unit.
        tokens: (active, d_model), of one sequence.
        position: (active,).
        weight: (active,), what each counts; all alike by default.
    """
    found = []
    for asking, (first, _, weights) in zip(
        position.split(QUERIES_AT_ONCE), weigh(gau, tokens, position, weight), strict=True
    ):
        weights = weights.double()
        slot = first[:, None] + torch.arange(weights.shape[1], device=position.device)
        # weights are zero after the last key, so any position will do
        distance = (position[slot.clamp(max=len(position) - 1)] - asking[:, None]).abs().double()
        found.append((weights * distance).sum(dim=1) / weights.sum(dim=1))
    return torch.cat(found)
