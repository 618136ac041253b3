"""What routers did on a whole split: rates, spans and cost of every layer.

Section 5 of the paper asks how much attention a task needs; the decisions of the routers answer it.

    measures = measure_run("runs/listops", "test", limit=200)
    measures.layers[2].span.mean, measures.to_record()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqboat.analysis.attention import (
    mean_distance,
    tokens_of,
    visible,
    watch,
    weighted_distance,
)
from seqboat.analysis.traces import (
    Examples,
    Flags,
    LayerTrace,
    Numbers,
    Site,
    halves,
    load_examples,
    sequence_trace,
    sites,
    to_array,
)
from seqboat.bench.cost import forward_products, linear_flops
from seqboat.core.checks import require
from seqboat.run import Run
from seqboat.tasks.task import IGNORE, Batch, Split, apply_model
from seqboat.training.evaluate import Windows, evaluation_parts
from seqboat.training.loader import batches
from seqboat.training.parallel import World

BINS = 20
"""Number of bins for probabilities."""
CURVE_POINTS = 200
"""Maximum number of training points in an activation curve, besides evaluations."""


class MeanStd(NamedTuple):
    """Mean and standard deviation over sequences."""

    mean: float
    std: float
    sequences: int
    """number of sequences with a value"""


class Moments:
    """Mean and standard deviation of a stream of numbers (Welford's recurrence)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        """Add one number."""
        self.count += 1
        step = value - self.mean
        self.mean += step / self.count
        self._squares += step * (value - self.mean)

    def summary(self) -> MeanStd | None:
        """Mean and std; None without numbers."""
        return MeanStd(self.mean, (self._squares / self.count) ** 0.5, self.count) if self.count else None


class ActiveCount(NamedTuple):
    """A number of tokens, and how many of them were activated (or otherwise selected)."""

    active: int
    total: int

    @property
    def rate(self) -> float | None:
        """The fraction; None without tokens."""
        return self.active / self.total if self.total else None


class LayerCost(NamedTuple):
    """FLOPs of a layer's matrix products in the forward pass, over all sequences."""

    flops: float
    """with the router's decisions"""
    always: float
    """with every token active"""

    @property
    def fraction(self) -> float:
        """FLOPs relative to the layer with every token active."""
        return self.flops / self.always if self.always else 0.0


class CostCounter:
    """Counts the FLOPs of a layer over sequences of any length."""

    def __init__(self, site: Site) -> None:
        self.site, self.flops, self.always = site, 0, 0

    def add(self, layer: LayerTrace) -> None:
        if self.site.layer is not None:
            active = {part.module: int(part.active.sum()) for part in (layer, *layer.others)}
            length = len(layer.active)
            self.flops += self._count(length, active)
            self.always += self._count(length, dict.fromkeys(active, length))

    def _count(self, length: int, active: Mapping[str, int]) -> int:
        assert self.site.layer is not None
        products = forward_products(self.site.layer, 1, length, active[self.site.module])
        total = sum(product.flops for product in products) + length * self.site.outside
        for name, unit in self.site.sma.units.items():
            if name != self.site.module:
                total += active[name] * linear_flops(unit)
        return total

    def cost(self) -> LayerCost | None:
        return None if self.site.layer is None else LayerCost(self.flops, self.always)


@dataclass(frozen=True, kw_only=True)
class LayerMeasures:
    """What one router did on a split, and what its attention saw."""

    module: str
    """name of the routed module, usually the attention"""
    window: int | None
    """size of its working memory or of its chunks; None if unlimited or without attention"""
    counts: ActiveCount
    """over all tokens"""
    rate: MeanStd
    """fraction of the tokens of a sequence that were activated"""
    active: MeanStd
    """number of activated tokens of a sequence: the paper's activation time"""
    confidence: float | None
    """mean over the activated tokens"""
    temperature: float | None
    """temperature of the router, if it has one"""
    probabilities: tuple[ActiveCount, ...]
    """tokens by probability of activation, BINS bins from 0 to 1"""
    by_class: tuple[ActiveCount, ...]
    """tokens by the kinds that the task defines"""
    span: MeanStd | None
    """mean distance, in original positions, from a query to the other keys it sees; None without any"""
    weighted_span: MeanStd | None
    """the same, with keys weighted by attention; also None if not requested"""
    blind: ActiveCount | None
    """queries whose weights are all zero, which squared ReLU allows: their output is constant"""
    cost: LayerCost | None
    """None if FLOPs are not known for this kind of layer"""
    others: dict[str, ActiveCount]
    """activation of the other modules of the layer"""


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
    """number of sequences; two for each pair"""
    tokens: int
    """number of tokens, without padding and the context of windows"""
    metrics: dict[str, float]
    """metrics on these examples"""
    classes: tuple[str, ...]
    """the kinds of tokens"""
    layers: tuple[LayerMeasures | None, ...]
    """None for layers without a router"""
    training: tuple[dict[str, Any], ...]
    """step, split and activation rates during training, from the metrics of the run"""

    def to_record(self) -> dict[str, Any]:
        """As plain data for JSON: named tuples become dictionaries, with their rates and fractions."""
        record: dict[str, Any] = _plain(self)
        return record


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, ActiveCount):
        return {**value._asdict(), "rate": value.rate}
    if isinstance(value, LayerCost):
        return {**value._asdict(), "fraction": value.fraction}
    if isinstance(value, MeanStd):
        return value._asdict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


class _Tally:
    """Counts of active tokens and of all tokens, in bins."""

    def __init__(self, bins: int) -> None:
        self.counts = np.zeros((2, bins), dtype=np.int64)

    def add(self, places: NDArray[Any], active: Flags) -> None:
        bins = self.counts.shape[1]
        self.counts[0] += np.bincount(places[active], minlength=bins)
        self.counts[1] += np.bincount(places, minlength=bins)

    def per_bin(self) -> tuple[ActiveCount, ...]:
        return tuple(ActiveCount(int(active), int(total)) for active, total in self.counts.T)


class _LayerSums:
    """The running sums of one layer."""

    def __init__(self, site: Site, classes: int) -> None:
        self.site = site
        self.rate, self.active = Moments(), Moments()
        self.span, self.weighted = Moments(), Moments()
        self.confidence = 0.0
        self.blind: list[int] = [0, 0]
        self.probabilities, self.by_class = _Tally(BINS), _Tally(classes)
        self.others: dict[str, _Tally] = {}
        self.products = CostCounter(site)

    def add_tokens(self, layer: LayerTrace, classes: Numbers, counted: Flags) -> None:
        """Add the decisions for the counted tokens of one sequence."""
        active, probs = layer.active[counted], layer.probs[counted]
        if not len(active):
            return
        self.rate.add(int(active.sum()) / len(active))
        self.active.add(float(active.sum()))
        self.confidence += float(probs[active].sum(dtype=np.float64))
        known = np.isfinite(probs)  # nan, from a model that diverged, is in no bin
        self.probabilities.add(np.minimum((probs[known] * BINS).astype(np.int64), BINS - 1), active[known])
        self.by_class.add(classes[counted], active)
        for other in layer.others:
            tally = self.others.setdefault(other.module, _Tally(1))
            tally.add(np.zeros(len(active), dtype=np.int64), other.active[counted])
        self.products.add(layer)

    def add_attention(
        self, tokens: Tensor, position: Tensor, weight: Tensor | None, counted: Flags, weighted: bool
    ) -> None:
        """Add what the queries of one sequence saw."""
        gau = self.site.gau
        assert gau is not None
        asked = torch.from_numpy(counted).to(position.device)[position]
        count = len(position)
        first, end = visible(gau, torch.arange(count, device=position.device), count)
        places = position.double()
        if bool(asked.any()):
            apart = mean_distance(places, first, end)[asked]
            apart = apart[~apart.isnan()]
            if len(apart):
                self.span.add(float(apart.mean()))
        if weighted and bool(asked.any()):
            means = weighted_distance(gau, tokens, position, weight)[asked]
            sighted = means[~means.isnan()]
            self.blind[0] += len(means) - len(sighted)
            self.blind[1] += len(means)
            if len(sighted):
                self.weighted.add(float(sighted.mean()))

    def measures(self) -> LayerMeasures:
        active, total = (int(n) for n in self.by_class.counts.sum(axis=1))
        rate, count = self.rate.summary(), self.active.summary()
        assert rate is not None and count is not None
        gau = self.site.gau
        return LayerMeasures(
            module=self.site.module,
            window=None if gau is None or gau.others is None else gau.window,
            counts=ActiveCount(active, total),
            rate=rate,
            active=count,
            confidence=self.confidence / active if active else None,
            temperature=self.site.temperature,
            probabilities=self.probabilities.per_bin(),
            by_class=self.by_class.per_bin(),
            span=self.span.summary(),
            weighted_span=self.weighted.summary(),
            blind=ActiveCount(*self.blind) if self.blind[1] else None,
            cost=self.products.cost(),
            others={name: tally.per_bin()[0] for name, tally in self.others.items()},
        )


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
    observe: Callable[[Sequence[int], Batch, Tensor], None] | None = None,
) -> Measures:
    """Measure the routers of a model on examples, batch by batch, in memory independent of their number.

    Args:
        examples: from `load_examples`. Every example starts from an empty state, even for a language model.
        split: that they are from.
        batch_size: examples per batch; by default that of the run.
        weighted: whether to measure attention-weighted spans too, which recomputes the attention.
        reading: the windows that the examples were cut into, if any; only scored tokens are counted, not context.
        device: where to compute; the CPU by default.
        progress: called with the number of batches done and the total.
        observe: called with the numbers of the examples of every batch, the batch, and the logits.
    """
    model, config, task, dataset, step = examples
    require(len(dataset) > 0, f"the split {split} must hold at least one example, got none")
    world = World(0, 1, device or torch.device("cpu"))
    model.to(world.device).eval()
    found = sites(model)
    sums: list[_LayerSums | None] = []
    classes: tuple[str, ...] = ()
    totals: dict[str, Tensor] = {}
    sequences = tokens = 0
    watched = [number for number, site in enumerate(found) if site is not None and site.gau is not None]
    parts = evaluation_parts(dataset, batch_size or config.evaluation.batch_size, world, task.fixed_length)
    for done, (part, batch) in enumerate(batches(task, dataset, split, iter(parts)), start=1):
        batch = batch.to(world.device)
        with watch(found, watched) as seen:
            output = apply_model(model, task.kind, batch.joined())
        for name, value in task.score(output, batch).items():
            totals[name] = totals.get(name, torch.zeros(2, dtype=torch.float64)) + value.cpu()
        if observe is not None:
            observe(part.examples, batch, output.logits)
        for half, (inputs, mask, routings) in enumerate(halves(found, batch, output.routings)):
            for row in range(len(inputs)):
                sequence = sequence_trace(found, inputs, mask, routings, row)
                counted = np.ones(len(sequence.inputs), dtype=bool)
                if reading is not None:
                    counted = to_array(batch.targets[row, : len(counted)] != IGNORE)
                classes, kinds = task.token_classes(sequence.inputs)
                if not sums:
                    sums = [site and _LayerSums(site, len(classes)) for site in found]
                sequences += 1
                tokens += int(counted.sum())
                for number, layer in enumerate(sequence.layers):
                    mine = sums[number]
                    if layer is None or mine is None:
                        continue
                    mine.add_tokens(layer, kinds, counted)
                    if number in seen:
                        mine.add_attention(*tokens_of(seen[number][half], row), counted, weighted)
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
        metrics=task.summarize(totals),
        classes=classes,
        layers=tuple(None if mine is None else mine.measures() for mine in sums),
        training=(),
    )


def measure_run(
    run: Path | str,
    split: Split = "test",
    limit: int | None = None,
    *,
    weighted: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Measures:
    """Measure the best checkpoint of a run on one of its splits; `load_examples` and `measure` have more options."""
    measures = measure(load_examples(run, split, limit), split, weighted=weighted, progress=progress)
    return replace(measures, run=str(run), training=tuple(activation_curve(run)))


def activation_curve(run: Path | str) -> list[dict[str, Any]]:
    """Activation rates during training, from metrics.jsonl of a run: all evaluations and some training points."""
    lines = [record for record in Run(run).metrics if isinstance(record.get("activation"), list)]
    train = [record for record in lines if record.get("split") == "train"]
    every = max(1, -(-len(train) // CURVE_POINTS))
    kept = {id(record) for record in train[every - 1 :: every]}
    return [
        {key: record.get(key) for key in ("step", "split", "activation")}
        for record in lines
        if record.get("split") != "train" or id(record) in kept
    ]
