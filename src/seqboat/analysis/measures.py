"""What routers did and what attention saw, token by token and as measures of a whole split.

Section 5 of the paper asks how much attention a task needs; its answer is read off the decisions of the routers.

    examples = load_examples("runs/listops", "test", limit=20)      model, configuration, task and examples of a run
    batch = examples.batch(range(4))                                the first four side by side
    for sample in trace(examples.model, examples.task.kind, batch):
        sample.prediction, sample.probs[0]                          the most probable class, and its probability
        for sequence in sample.sequences:                           one, or the two documents of a pair
            for layer in sequence.layers:                           None where a layer has no router
                layer.active, layer.probs, layer.confidence         (length,) each, padding left out
    for pair in attention_weights(examples.model, examples.task.kind, batch, layer=2):
        for attention in pair:                                      one per sequence; None without attention unit
            positions, weights = attention.seen_by(5)               what the sixth active token looks at

    measures = measure_run("runs/listops", "test", limit=200)       rates, spans, occupancy, cost of every layer
    measures.layers[2].span.mean, measures.to_record()

`examples.task` says what tokens are: `modality` ("bytes", "tokens", "image", "wave"), `token_names`, `picture`
(height and width), `labels`, `token_classes`. Layers are counted from 0 here; commands count them from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from seqboat.bench.layers import Setting, forward_products
from seqboat.checks import require
from seqboat.core.sma import Packed, Routing
from seqboat.mixers.seqboat.activation import SparseModularActivation
from seqboat.mixers.seqboat.gau import GAU, RowWeights
from seqboat.mixers.seqboat.layer import SeqBoat
from seqboat.mixers.ssm.base import DiagonalSSM
from seqboat.tasks.base import IGNORE, Batch, Dataset, Kind, Split, Task, apply_model, draw_subset
from seqboat.training.config import RunConfig
from seqboat.training.evaluate import (
    Windows,
    cut_text,
    evaluation_parts,
    find_checkpoint,
    load_model,
    task_of,
)
from seqboat.training.loader import batches
from seqboat.training.metrics import iterate_metrics
from seqboat.training.parallel import World

QUERIES_AT_ONCE = 256
"""Queries that are weighed against all keys at a time."""
RANKED = 5
"""Next tokens of a language model that a trace keeps; of a classifier it keeps all classes."""

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]


# examples of a run


class Examples(NamedTuple):
    """A trained model and what to look at with it."""

    model: nn.Module
    """in eval mode, on the CPU"""
    config: RunConfig
    task: Task
    dataset: Dataset
    """the examples, at most as many as were asked for"""
    step: int
    """of the checkpoint"""

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Some of the examples side by side."""
        return self.task.collate([self.dataset[i] for i in numbers])


def load_examples(
    run: Path | str,
    split: Split = "test",
    limit: int | None = None,
    which: str = "best",
    fields: Sequence[str] = (),
    reading: Windows | None = None,
) -> Examples:
    """The model of a run and examples of one of its splits.

    Args:
        run: the run's folder, or one checkpoint in it.
        split: of the task.
        limit: at most so many examples, drawn at random but always the same; all by default.
        which: "best" or "latest".
        fields: changes of the data, as arguments `--data.x=value`.
        reading: cut a long text into windows with context instead of as the task does.
    """
    checkpoint = find_checkpoint(run, which)
    model, config = load_model(checkpoint.path)
    task = task_of(checkpoint, config, fields)
    task.check_split(split)
    dataset = task.dataset(split) if reading is None else cut_text(task.text(split), reading)
    return Examples(model, config, task, draw_subset(dataset, limit), checkpoint.step)


# where layers route


class Site(NamedTuple):
    """Where a layer decides, and what it shows of that: its attention, or else its first module."""

    sma: SparseModularActivation
    module: str
    """name of the module that is shown"""
    column: int
    """its place among the modules"""
    gau: GAU | None
    """the module itself, if it is the attention unit of the paper"""
    layer: SeqBoat | None
    """the layer it belongs to, if it is the paper's with a diagonal state-space layer"""
    outside: int
    """multiplications and additions per token of linear maps around that layer"""

    @property
    def temperature(self) -> float | None:
        """Of the router's decisions for the module, where the router has one."""
        found = getattr(self.sma.router, "temperature", None)
        if not isinstance(found, Tensor):
            return None
        found = found.detach()
        return float(found[self.column] if found.dim() else found)


def sites(model: nn.Module) -> list[Site | None]:
    """One per layer of a model; None for layers without a router."""
    return [_site(layer) for layer in model.backbone.layers]  # type: ignore[union-attr]


def _site(layer: nn.Module) -> Site | None:
    sma = next((part for part in layer.modules() if isinstance(part, SparseModularActivation)), None)
    if sma is None:
        return None
    units = list(sma.units.items())
    column = next((i for i, (_, unit) in enumerate(units) if isinstance(unit, GAU)), 0)
    name, unit = units[column]
    owner = next((part for part in layer.modules() if isinstance(part, SeqBoat) and part.sma is sma), None)
    counted = owner if owner is not None and isinstance(owner.ssm, DiagonalSSM) else None
    outside = 0 if owner is None else linear_flops(layer) - linear_flops(owner)
    return Site(sma, name, column, unit if isinstance(unit, GAU) else None, counted, outside)


class _Seen(NamedTuple):
    """What an attention unit was called with."""

    tokens: Tensor
    packed: Packed


@contextmanager
def _watch(found: Sequence[Site | None], wanted: Sequence[int]) -> Iterator[dict[int, list[_Seen]]]:
    """Keep what the attention units of some layers are called with, once per sequence of a pair."""
    seen: dict[int, list[_Seen]] = {number: [] for number in wanted}
    with ExitStack() as stack:
        for number in wanted:
            site = found[number]
            if site is None or site.gau is None:
                continue

            def keep(_unit: nn.Module, args: tuple[Any, ...], number: int = number) -> None:
                seen[number].append(_Seen(*args[:2]))

            handle = site.gau.register_forward_pre_hook(keep)
            stack.callback(handle.remove)
        yield seen


# one sample


class LayerTrace(NamedTuple):
    """What the router of a layer decided for the real tokens of a sequence."""

    active: Flags
    """(length,): who was activated"""
    probs: Floats
    """(length,): probability of activation"""
    module: str = "gau"
    """the module that was decided about"""
    others: tuple[LayerTrace, ...] = ()
    """the same for further modules of the layer"""

    @property
    def confidence(self) -> Floats:
        """(length,): the probability where active, zero elsewhere."""
        return np.where(self.active, self.probs, np.float32(0))


class SequenceTrace(NamedTuple):
    """One sequence through all layers."""

    inputs: NDArray[Any]
    """(length,) int64 token ids, or (length, channels) float32 values; no padding"""
    layers: tuple[LayerTrace | None, ...]
    """one per layer; None where there is no router"""


class SampleTrace(NamedTuple):
    """One example through a model."""

    sequences: tuple[SequenceTrace, ...]
    """one, or two of a pair"""
    label: int | Numbers
    """the class; of a language model (length,) the token wanted after each token, or IGNORE"""
    ranked: Numbers
    """(classes,) the most probable first; of a language model (length, at most RANKED)"""
    probs: Floats
    """their probabilities"""
    label_prob: float | Floats
    """probability of the label; of a language model (length,), nan where nothing is wanted"""

    @property
    def prediction(self) -> int | Numbers:
        """The most probable class; of a language model (length,) the most probable next tokens."""
        best = self.ranked[..., 0]
        return int(best) if best.ndim == 0 else best


@torch.no_grad()
def trace(model: nn.Module, kind: Kind, batch: Batch) -> list[SampleTrace]:
    """What a model made of every sample of a batch.

    Args:
        model: in eval mode.
        kind: of its task.
        batch: on the model's device.
    """
    return traces_of(sites(model), kind, batch, apply_model(model, kind, batch))


def traces_of(found: Sequence[Site | None], kind: Kind, batch: Batch, output: Any) -> list[SampleTrace]:
    """As `trace`, from an output that there is already.

    Args:
        found: `sites` of the model.
        kind: of its task.
        batch: what the model was called with.
        output: what it returned.
    """
    probs = torch.softmax(output.logits.float(), dim=-1)
    top = probs.topk(min(RANKED, probs.shape[-1]) if kind == "lm" else probs.shape[-1], dim=-1)
    targets = batch.targets
    chosen = probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    label_probs = torch.where(targets == IGNORE, torch.nan, chosen)
    halves = list(_halves(found, batch, output.routings))
    samples = []
    for row in range(len(batch.inputs)):
        sequences = tuple(_sequence(found, inputs, mask, half, row) for inputs, mask, half in halves)
        cut: Any = slice(len(sequences[0].inputs)) if kind == "lm" else ...
        label, label_prob = _array(targets[row][cut]), _array(label_probs[row][cut])
        samples.append(
            SampleTrace(
                sequences,
                label if kind == "lm" else int(label),
                _array(top.indices[row][cut]),
                _array(top.values[row][cut]),
                label_prob if kind == "lm" else float(label_prob),
            )
        )
    return samples


def _array(x: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = x.cpu().numpy()
    return found


Half = tuple[Tensor, Tensor | None, Sequence[Routing | None]]


def _halves(found: Sequence[Site | None], batch: Batch, routings: Sequence[Routing | None]) -> Iterator[Half]:
    """Inputs, mask and routings of the sequences of a batch: one of each, or the first and then the second."""
    layers = len(found)
    yield batch.inputs, batch.mask, routings[:layers]
    if batch.second is not None:
        yield batch.second, batch.second_mask, routings[layers:]


def _sequence(
    found: Sequence[Site | None],
    inputs: Tensor,
    mask: Tensor | None,
    routings: Sequence[Routing | None],
    row: int,
) -> SequenceTrace:
    real: Any = slice(None) if mask is None else mask[row]
    layers = [
        None if site is None or routing is None else _layer(site, routing, row, real)
        for site, routing in zip(found, routings, strict=True)
    ]
    return SequenceTrace(_array(inputs[row][real]), tuple(layers))


def _layer(site: Site, routing: Routing, row: int, real: Any) -> LayerTrace:
    active, probs = _array(routing.active[row][real]), _array(routing.probs[row][real].float())
    names = list(site.sma.units)
    others = tuple(
        LayerTrace(active[:, i], probs[:, i], name) for i, name in enumerate(names) if i != site.column
    )
    return LayerTrace(active[:, site.column], probs[:, site.column], site.module, others)


# what attention saw


@dataclass(frozen=True)
class Attention:
    """What the active tokens of a sequence saw in one layer. Slots count active tokens, positions all tokens."""

    positions: Numbers
    """(active,): where the active tokens are in the sequence"""
    first: Numbers
    """(active,): slot of the first key that each query sees"""
    end: Numbers
    """(active,): the slot behind the last one"""
    weights: Floats
    """(active, most keys): of the keys from `first` on; zero behind the last"""

    def seen_by(self, slot: int) -> tuple[Numbers, Floats]:
        """Positions that the query in a slot sees, and their weights."""
        first, end = int(self.first[slot]), int(self.end[slot])
        return self.positions[first:end], self.weights[slot, : end - first]


@torch.no_grad()
def attention_weights(
    model: nn.Module, kind: Kind, batch: Batch, layer: int
) -> list[tuple[Attention | None, ...]]:
    """Who saw whom, and with what weight, in one layer; the attention itself is computed a second time.

    Args:
        model: in eval mode.
        kind: of its task.
        batch: on the model's device.
        layer: from 0.

    Returns:
        For each sample one entry per sequence: two of a pair. None where the layer has no attention unit.
    """
    found = sites(model)
    require(0 <= layer < len(found), f"layer must be in 0..{len(found) - 1}, got {layer}")
    with _watch(found, [layer]) as seen:
        apply_model(model, kind, batch)
    site = found[layer]
    rows = range(len(batch.inputs))
    if site is None or site.gau is None:
        return [(None,) * (1 if batch.second is None else 2) for _ in rows]
    gau = site.gau
    return [tuple(_attention(gau, *_row(call, row)) for call in seen[layer]) for row in rows]


def _row(call: _Seen, row: int) -> tuple[Tensor, Tensor]:
    """Active tokens (active, d_model) of one row, and their positions."""
    begin, end = call.packed.offsets[row : row + 2].tolist()
    return call.tokens[begin:end], call.packed.position[begin:end]


def _attention(gau: GAU, tokens: Tensor, position: Tensor) -> Attention:
    parts = list(_weigh(gau, tokens, position))
    width = max(part.weights.shape[1] for part in parts)
    weights = [F.pad(part.weights.float(), (0, width - part.weights.shape[1])) for part in parts]
    first, end = (torch.cat([getattr(part, name) for part in parts]) for name in ("first", "end"))
    return Attention(_array(position), _array(first), _array(end), _array(torch.cat(weights)))


def _weigh(gau: GAU, tokens: Tensor, position: Tensor) -> Iterator[RowWeights]:
    """Weights of the queries of a row, some at a time: before they are cut to what is seen, all keys are there."""
    query, key, _, _ = gau.project(tokens, position)
    for begin in range(0, max(len(position), 1), QUERIES_AT_ONCE):
        yield gau.weigh(query, key, position, slice(begin, begin + QUERIES_AT_ONCE))


# measures of a split

BINS = 20
"""Bins of relative positions, and of probabilities from 0 to 1."""
PLACES = 32
"""Bins of absolute positions, at most."""
CURVE_POINTS = 200
"""Points of training that a curve of activation keeps, at most, besides the evaluations."""


class Spread(NamedTuple):
    """Mean and standard deviation over sequences."""

    mean: float
    std: float
    sequences: int
    """that had a value"""


class Moments:
    """Mean and deviation of a stream of numbers, one after the other (Welford's recurrence)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        """Take one more number."""
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self._squares += step * (value - self.mean)

    def spread(self) -> Spread | None:
        """What they were; None if there were none."""
        return Spread(self.mean, (self._squares / self.count) ** 0.5, self.count) if self.count else None


class Share(NamedTuple):
    """How many tokens of a kind there were, and how many of them were activated (or are what is counted)."""

    active: int
    total: int

    @property
    def rate(self) -> float | None:
        """Their share; None where there were no tokens."""
        return self.active / self.total if self.total else None


class Cost(NamedTuple):
    """Multiplications and additions of a layer's matrix products, forward, over all sequences."""

    flops: float
    """as activated"""
    always: float
    """if every token were active"""

    @property
    def share(self) -> float:
        """Of the products of an always active layer."""
        return self.flops / self.always if self.always else 0.0


@dataclass(frozen=True, kw_only=True)
class LayerMeasures:
    """What one router did on a split, and what its attention saw."""

    module: str
    """the module that was decided about: the attention"""
    window: int | None
    """size of its working memory or of its chunks; None if it sees everything or is no attention unit"""
    share: Share
    """over all tokens"""
    rate: Spread
    """share of the tokens of a sequence that were activated"""
    active: Spread
    """tokens of a sequence that were activated: the paper's activation time"""
    confidence: float | None
    """mean over the activated tokens"""
    temperature: float | None
    """of the router, where it has one"""
    probabilities: tuple[Share, ...]
    """tokens by probability of activation, BINS bins from 0 to 1"""
    by_place: tuple[Share, ...]
    """by position, in bins of `place_width` tokens"""
    by_part: tuple[Share, ...]
    """by position relative to the length of the sequence, BINS bins"""
    by_class: tuple[Share, ...]
    """by the task's kinds of tokens"""
    span: Spread | None
    """mean distance, in original positions, from a query to the keys it may see; None if there never was a query"""
    weighted_span: Spread | None
    """the same, each key counted by its attention weight; None also if not asked for"""
    blind: Share | None
    """queries whose weights are all zero, as squared ReLU can make them: attention gives them a constant"""
    occupancy: Spread | None
    """share of the slots of the working memory that are filled at a query; None if there is no bound"""
    final_occupancy: Spread | None
    """share of the slots that are filled at the end of a sequence"""
    cost: Cost | None
    """None where products are not counted for this kind of layer"""
    others: dict[str, Share]
    """activation of further modules of the layer"""


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What routers did on a split of a run."""

    run: str
    recipe: str
    task: str
    split: str
    step: int
    """of the checkpoint"""
    examples: int
    sequences: int
    """two for each pair"""
    tokens: int
    """that were counted; not padding, and of windows not the context"""
    metrics: dict[str, float]
    """scores on these examples"""
    classes: tuple[str, ...]
    """the kinds of tokens"""
    place_width: int
    """tokens per bin of absolute positions"""
    layers: tuple[LayerMeasures | None, ...]
    """None for layers without a router"""
    training: tuple[dict[str, Any], ...]
    """step, split and activation rates along training, from the run's own record"""

    def to_record(self) -> dict[str, Any]:
        """As plain data for JSON: named tuples become dictionaries with their rates and shares."""
        record: dict[str, Any] = _plain(self)
        return record


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Share):
        return {**value._asdict(), "rate": value.rate}
    if isinstance(value, Cost):
        return {**value._asdict(), "share": value.share}
    if isinstance(value, Spread):
        return value._asdict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


class _Tally:
    """Active and all tokens in bins."""

    def __init__(self, bins: int) -> None:
        self.counts = np.zeros((2, bins), dtype=np.int64)

    def add(self, places: NDArray[Any], active: Flags) -> None:
        bins = self.counts.shape[1]
        self.counts[0] += np.bincount(places[active], minlength=bins)
        self.counts[1] += np.bincount(places, minlength=bins)

    def shares(self) -> tuple[Share, ...]:
        return tuple(Share(int(active), int(total)) for active, total in self.counts.T)


class _LayerSums:
    """The running sums of one layer."""

    def __init__(self, site: Site, classes: int, places: int, place_width: int) -> None:
        self.site, self.place_width = site, place_width
        self.rate, self.active = Moments(), Moments()
        self.span, self.weighted, self.filled, self.final = (Moments() for _ in range(4))
        self.confidence = 0.0
        self.blind: list[int] = [0, 0]
        self.probabilities, self.by_part = _Tally(BINS), _Tally(BINS)
        self.by_place, self.by_class = _Tally(places), _Tally(classes)
        self.others: dict[str, _Tally] = {}
        self.products = _Products(site)

    def add_tokens(self, layer: LayerTrace, classes: Numbers, counted: Flags) -> None:
        """One sequence's decisions; only counted tokens are."""
        active, probs, length = layer.active[counted], layer.probs[counted], len(layer.active)
        if not len(active):
            return
        place = np.arange(length)
        self.rate.add(int(active.sum()) / len(active))
        self.active.add(float(active.sum()))
        self.confidence += float(probs[active].sum(dtype=np.float64))
        known = np.isfinite(probs)  # those of a model that diverged are in no bin
        self.probabilities.add(np.minimum((probs[known] * BINS).astype(np.int64), BINS - 1), active[known])
        self.by_part.add((place * BINS // length)[counted], active)
        last = self.by_place.counts.shape[1] - 1
        self.by_place.add(np.minimum(place // self.place_width, last)[counted], active)
        self.by_class.add(classes[counted], active)
        for other in layer.others:
            tally = self.others.setdefault(other.module, _Tally(1))
            tally.add(np.zeros(len(active), dtype=np.int64), other.active[counted])
        self.products.add(layer)

    def add_attention(self, tokens: Tensor, position: Tensor, counted: Flags, weighted: bool) -> None:
        """What one sequence's queries saw."""
        gau = self.site.gau
        assert gau is not None
        asked = torch.from_numpy(counted).to(position.device)[position]
        count = len(position)
        first, end = gau.visible(torch.arange(count, device=position.device), count)
        places = position.double()
        if bool(asked.any()):
            self.span.add(float((mean_distance(places, first, end))[asked].mean()))
            slots = memory_slots(gau)
            if slots:
                self.filled.add(float(((end - first - 1)[asked].double() / slots).mean()))
        if memory_slots(gau):
            self.final.add(_held(gau, count) / gau.window)
        if weighted and bool(asked.any()):
            means = weighted_distance(gau, tokens, position)[asked]
            sighted = means[~means.isnan()]
            self.blind[0] += len(means) - len(sighted)
            self.blind[1] += len(means)
            if len(sighted):
                self.weighted.add(float(sighted.mean()))

    def measures(self) -> LayerMeasures:
        active, total = (int(n) for n in self.by_part.counts.sum(axis=1))
        rate, count = self.rate.spread(), self.active.spread()
        assert rate is not None and count is not None
        gau = self.site.gau
        return LayerMeasures(
            module=self.site.module,
            window=None if gau is None or gau.config.span == "full" else gau.window,
            share=Share(active, total),
            rate=rate,
            active=count,
            confidence=self.confidence / active if active else None,
            temperature=self.site.temperature,
            probabilities=self.probabilities.shares(),
            by_place=self.by_place.shares(),
            by_part=self.by_part.shares(),
            by_class=self.by_class.shares(),
            span=self.span.spread(),
            weighted_span=self.weighted.spread(),
            blind=Share(*self.blind) if self.blind[1] else None,
            occupancy=self.filled.spread(),
            final_occupancy=self.final.spread(),
            cost=self.products.cost(),
            others={name: tally.shares()[0] for name, tally in self.others.items()},
        )


def memory_slots(gau: GAU) -> int | None:
    """How many tokens besides itself a query can see at most; None where there is no bound."""
    if gau.config.span == "memory":
        return gau.left + gau.right
    return gau.window - 1 if gau.config.span == "chunk" else None


def _held(gau: GAU, count: int) -> int:
    """Tokens in the working memory, or in the last chunk, after so many active ones."""
    if gau.config.span == "memory":
        return min(count, gau.window)
    return (count - 1) % gau.window + 1 if count else 0


def mean_distance(position: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """(active,): mean distance from each query to the keys it may see, itself among them.

    Args:
        position: (active,) float64, increasing.
        first, end: (active,), from `GAU.visible`.
    """
    sums = F.pad(position.cumsum(dim=0), (1, 0))
    slot = torch.arange(len(position), device=position.device)
    after = torch.minimum(slot + 1, end)
    before = position * (slot - first) - (sums[slot] - sums[first])
    behind = sums[end] - sums[after] - position * (end - after)
    return (before + behind) / (end - first)


def local_span(window: int, causal: bool) -> float:
    """The span of a window that slides over all tokens, away from the ends of a sequence.

    >>> local_span(64, causal=True), round(local_span(64, causal=False), 2)
    (32.0, 16.25)
    """
    if causal:
        return window / 2
    side = window // 2
    return side * (side + 1) / (2 * side + 1)


def weighted_distance(gau: GAU, tokens: Tensor, position: Tensor) -> Tensor:
    """(active,) float64: mean distance to the keys, weighted by attention; nan where all weights are zero.

    Args:
        gau: the attention unit.
        tokens: (active, d_model), of one row.
        position: (active,).
    """
    found = []
    for asking, (first, _, weights) in zip(
        position.split(QUERIES_AT_ONCE), _weigh(gau, tokens, position), strict=True
    ):
        weights = weights.double()
        slot = first[:, None] + torch.arange(weights.shape[1], device=position.device)
        # behind the last key weights are zero, whatever the place
        distance = (position[slot.clamp(max=len(position) - 1)] - asking[:, None]).abs().double()
        found.append((weights * distance).sum(dim=1) / weights.sum(dim=1))
    return torch.cat(found)


class _Products:
    """Matrix products of a layer on sequences of any length."""

    def __init__(self, site: Site) -> None:
        self.site, self.flops, self.always = site, 0, 0

    def add(self, layer: LayerTrace) -> None:
        if self.site.layer is not None:
            active = {part.module: int(part.active.sum()) for part in (layer, *layer.others)}
            length = len(layer.active)
            self.flops += self._count(length, active)
            self.always += self._count(length, dict.fromkeys(active, length))

    def _count(self, length: int, active: Mapping[str, int]) -> int:
        setting = Setting(batch=1, length=length, d_model=self.site.sma.d_model)
        assert self.site.layer is not None
        products = forward_products(self.site.layer, setting, active[self.site.module])
        total = sum(product.flops for product in products) + length * self.site.outside
        for name, unit in self.site.sma.units.items():
            if name != self.site.module:
                total += active[name] * linear_flops(unit)
        return total

    def cost(self) -> Cost | None:
        return None if self.site.layer is None else Cost(self.flops, self.always)


def linear_flops(module: nn.Module) -> int:
    """Multiplications and additions per token of all linear maps in a module."""
    return sum(2 * part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


@torch.no_grad()
def measure(
    examples: Examples,
    split: Split,
    *,
    batch_size: int | None = None,
    weighted: bool = True,
    reading: Windows | None = None,
    device: torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Measures:
    """Watch the routers of a model on examples, one batch after the other; memory does not grow with their number.

    Args:
        examples: from `load_examples`. Every example is read from nothing: a language model carries no state.
        split: of which they are.
        batch_size: examples at a time; the run's own by default.
        weighted: whether to measure spans weighted by attention too, for which attention is computed again.
        reading: as the examples were cut; of windows only the scored tokens are counted, not their context.
        device: where to compute; the CPU by default.
        progress: called with the batches done and all.
    """
    model, config, task, dataset, step = examples
    require(len(dataset) > 0, f"the split {split} must hold at least one example, got none")
    world = World(0, 1, device or torch.device("cpu"))
    model.to(world.device).eval()
    found = sites(model)
    width, places = place_bins(task.max_length if reading is None else reading.window)
    sums: list[_LayerSums | None] = []
    classes: tuple[str, ...] = ()
    totals: dict[str, Tensor] = {}
    sequences = tokens = 0
    watched = [number for number, site in enumerate(found) if site is not None and site.gau is not None]
    parts = evaluation_parts(dataset, batch_size or config.evaluation.batch_size, world, task.fixed_length)
    for done, (_, batch) in enumerate(batches(task, dataset, split, iter(parts)), start=1):
        batch = batch.to(world.device)
        with _watch(found, watched) as seen:
            output = apply_model(model, task.kind, batch)
        for name, value in task.score(output, batch).items():
            totals[name] = totals.get(name, torch.zeros(2, dtype=torch.float64)) + value.cpu()
        for half, (inputs, mask, routings) in enumerate(_halves(found, batch, output.routings)):
            for row in range(len(inputs)):
                sequence = _sequence(found, inputs, mask, routings, row)
                counted = np.ones(len(sequence.inputs), dtype=bool)
                if reading is not None:
                    counted = _array(batch.targets[row, : len(counted)] != IGNORE)
                classes, kinds = task.token_classes(sequence.inputs)
                if not sums:
                    sums = [site and _LayerSums(site, len(classes), places, width) for site in found]
                sequences += 1
                tokens += int(counted.sum())
                for number, layer in enumerate(sequence.layers):
                    mine = sums[number]
                    if layer is None or mine is None:
                        continue
                    mine.add_tokens(layer, kinds, counted)
                    if number in seen:
                        mine.add_attention(*_row(seen[number][half], row), counted, weighted)
        if progress is not None:
            progress(done, len(parts))
    return Measures(
        run="",
        recipe=config.recipe,
        task=task.name,
        split=split,
        step=step,
        examples=len(dataset),
        sequences=sequences,
        tokens=tokens,
        metrics=task.summarise(totals),
        classes=classes,
        place_width=width,
        layers=tuple(None if mine is None else mine.measures() for mine in sums),
        training=(),
    )


def place_bins(longest: int) -> tuple[int, int]:
    """Width, a power of two, and number of the bins of absolute positions.

    >>> place_bins(2000), place_bins(20)
    ((64, 32), (1, 20))
    """
    width = 1
    while width * PLACES < longest:
        width *= 2
    return width, -(-longest // width)


def measure_run(
    run: Path | str,
    split: Split = "test",
    limit: int | None = None,
    *,
    which: str = "best",
    fields: Sequence[str] = (),
    batch_size: int | None = None,
    weighted: bool = True,
    reading: Windows | None = None,
    device: torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Measures:
    """Watch the routers of a trained run on one of its splits; see `load_examples` and `measure`."""
    examples = load_examples(run, split, limit, which, fields, reading)
    measures = measure(
        examples,
        split,
        batch_size=batch_size,
        weighted=weighted,
        reading=reading,
        device=device,
        progress=progress,
    )
    return replace(measures, run=str(run), training=tuple(activation_curve(run)))


def activation_curve(run: Path | str) -> list[dict[str, Any]]:
    """Activation rates along training, from metrics.jsonl of a run: all evaluations, and training thinned out."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        return []  # a checkpoint that was packed or named itself has no record
    lines = [record for record in iterate_metrics(path) if isinstance(record.get("activation"), list)]
    train = [record for record in lines if record.get("split") == "train"]
    every = max(1, -(-len(train) // CURVE_POINTS))
    kept = {id(record) for record in train[every - 1 :: every]}
    return [
        {key: record.get(key) for key in ("step", "split", "activation")}
        for record in lines
        if record.get("split") != "train" or id(record) in kept
    ]
