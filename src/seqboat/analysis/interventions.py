"""What attention contributes: the score of a run when its routers are overridden.

    as it is            the routers decide
    layer i off         no token attends in layer i; all other layers decide as usual
    only layer i        layer i decides as usual, no token attends anywhere else
    all off             the state-space layers alone
    all on              every token attends, within its working memory
    threshold p         tokens attend where the probability of activation is above p, in every layer

The output of attention is still scaled by the confidence of the router, also for forced tokens: below a half for a
token that would have been skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seqboat.analysis.traces import Site, sites
from seqboat.core.checks import require
from seqboat.plotting import Style, Theme, dress, legend, line_style, new_figure, style_of
from seqboat.run import Run
from seqboat.tasks.task import Batch, Split, Task
from seqboat.training.evaluate import Evaluation, evaluate
from seqboat.training.parallel import World

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class Intervention(NamedTuple):
    """One way to override the routers."""

    name: str
    active: tuple[bool | None, ...]
    """per layer: forced on, forced off, or None for the router's decision"""
    threshold: float | None = None


class InterventionResult(NamedTuple):
    """The score under one intervention."""

    setting: Intervention
    metrics: dict[str, float]
    activation: list[float | None]
    """activation rate of each layer's attention"""
    error: float | None = None
    """standard error over the examples of the task's metric"""
    change_error: float | None = None
    """standard error of the difference from the unchanged model, which was scored on the same examples"""

    @property
    def rate(self) -> float:
        """Mean activation rate of the layers that have a router."""
        known = [rate for rate in self.activation if rate is not None]
        return sum(known) / len(known)

    def as_record(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "setting": self.setting.name,
            "threshold": self.setting.threshold,
            **self.metrics,
            "standard_error": self.error,
            "change_standard_error": self.change_error,
            "activation": self.activation,
        }


class ExampleScores:
    """The sums and counts of every example, to tell how much a score would differ with other examples.

    Args:
        task: scores.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._sums: dict[int, dict[str, Tensor]] = {}

    def add(self, numbers: Sequence[int], batch: Batch, logits: Tensor) -> None:
        """Add a batch; a batch of other examples follows, or the same ones of another evaluation."""
        for row, number in enumerate(numbers):
            one = Batch(*(None if part is None else part[row : row + 1] for part in batch))  # type: ignore[arg-type]
            scores = self.task.score(SimpleNamespace(logits=logits[row : row + 1]), one)
            self._sums[number] = {name: value.cpu() for name, value in scores.items()}

    def without_each(self, metric: str) -> NDArray[np.float64]:
        """The metric of all examples but one, for each example."""
        rows = [self._sums[number] for number in sorted(self._sums)]
        totals = {name: torch.stack([row[name] for row in rows]).sum(dim=0) for name in rows[0]}
        found = [
            self.task.summarize({name: total - row[name] for name, total in totals.items()})[metric]
            for row in rows
        ]
        return np.array(found)


def standard_error(values: NDArray[np.float64]) -> float | None:
    """The standard error of a metric from its values without each example (the jackknife); None if unknown.

    >>> round(standard_error(np.array([2.5, 2.0, 1.5])), 4)  # of the mean of 1, 2 and 3
    0.5774
    """
    count = len(values)
    if count < 2 or not np.isfinite(values).all():
        return None
    return float(np.sqrt((count - 1) / count * np.square(values - values.mean()).sum()))


def settings_of(found: Sequence[Site | None], thresholds: Sequence[float] = THRESHOLDS) -> list[Intervention]:
    """The interventions to try on a model; the unchanged model comes first."""
    routed = [number for number, site in enumerate(found) if site is not None]
    require(len(routed) > 0, "no layer of this run has a router: there is nothing to turn off")
    for threshold in thresholds:
        require(0 <= threshold <= 1, f"thresholds must be between 0 and 1, got {threshold:g}")

    def forced(one: bool | None, others: bool | None, chosen: int | None = None) -> tuple[bool | None, ...]:
        return tuple(one if number == chosen else others for number in range(len(found)))

    settings = [Intervention("as it is", forced(None, None))]
    settings += [Intervention(f"layer {i + 1} off", forced(False, None, i)) for i in routed]
    if len(routed) > 1:
        settings += [Intervention(f"only layer {i + 1}", forced(None, False, i)) for i in routed]
    settings += [Intervention("all off", forced(False, False)), Intervention("all on", forced(True, True))]
    settings += [Intervention(f"threshold {p:g}", forced(None, None), p) for p in thresholds]
    return settings


@contextmanager
def decided(found: Sequence[Site | None], setting: Intervention) -> Iterator[None]:
    """Apply an intervention inside a `with` block."""
    with ExitStack() as stack:
        for site, forced in zip(found, setting.active, strict=True):
            if site is None:
                continue
            stack.enter_context(
                site.sma.override(
                    active=None if forced is None else {site.module: forced},
                    threshold=None if setting.threshold is None else {site.module: setting.threshold},
                )
            )
        yield


def intervene(
    run: Path | str,
    split: Split = "val",
    limit: int | None = None,
    *,
    thresholds: Sequence[float] = THRESHOLDS,
    which: str = "best",
    batch_size: int | None = None,
    fields: Sequence[str] = (),
    device: torch.device | None = None,
    progress: Callable[[InterventionResult, int, int], None] | None = None,
) -> tuple[list[InterventionResult], str, int]:
    """Score a run under every intervention, on the same examples.

    Args:
        run: the run's folder, or one checkpoint in it.
        split: of its task.
        limit: maximum number of examples, a fixed random sample.
        thresholds: to try, for all layers at once.
        which: "best" or "latest".
        batch_size: examples per batch; by default that of the run.
        fields: overrides of the data settings, as arguments `--data.x=value`.
        device: where to compute; the CPU by default.
        progress: called after every intervention with the number done and the total.

    Returns:
        The results, the name of the task's metric, and the number of examples.
    """
    source = Run(run, which, fields)
    model, config, task = source.model, source.config, source.task
    world = World(0, 1, device or torch.device("cpu"))
    model.to(world.device)
    found = sites(model)
    settings = settings_of(found, thresholds)
    outcomes: list[InterventionResult] = []
    usual: NDArray[np.float64] | None = None
    options = {
        "batch_size": batch_size or config.evaluation.batch_size,
        "limit": limit,
        "carry_state": config.training.carry_state,
    }
    for done, setting in enumerate(settings, start=1):
        result, values = scored(model, task, split, setting, world, **options)
        change = None if usual is None else standard_error(values - usual)
        usual = values if usual is None else usual
        outcomes.append(
            InterventionResult(setting, result.metrics, result.activation, standard_error(values), change)
        )
        if progress is not None:
            progress(outcomes[-1], done, len(settings))
    return outcomes, task.metric, result.examples


def scored(
    model: nn.Module, task: Task, split: Split, setting: Intervention, world: World, **options: Any
) -> tuple[Evaluation, NDArray[np.float64]]:
    """The scores under one intervention, and the metric without each example; options are those of `evaluate`."""
    found, scores = sites(model), ExampleScores(task)
    modules = [None if site is None else site.column for site in found]
    with decided(found, setting):
        result = evaluate(model, task, split, world, modules=modules, observe=scores.add, **options)
    return result, scores.without_each(task.metric)


# what attention contributed, in one line


class Contribution(NamedTuple):
    """What attention contributes to the score of a model: on against off, on the same examples."""

    rate: float
    """mean rate of activation of the layers that have a router"""
    score: float
    """of the model as it is"""
    without: float
    """with no token attending"""
    error: float | None
    """standard error of their difference over the examples, which both scored; None if unknown"""
    metric: str

    @property
    def change(self) -> float:
        """What turning attention off does to the score."""
        return self.without - self.score

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the change."""
        return (
            None if self.error is None else (self.change - 1.96 * self.error, self.change + 1.96 * self.error)
        )

    @property
    def idle(self) -> bool:
        """Whether tokens attend and nothing shows that it matters."""
        return self.rate > 0.1 and self.interval is not None and self.interval[0] <= 0 <= self.interval[1]

    def __str__(self) -> str:
        share = self.metric in FRACTIONS
        scale, unit = (100.0, "points") if share else (1.0, self.metric)
        around = "" if self.error is None else f" +- {1.96 * scale * self.error:.{1 if share else 3}f}"
        line = f"attention: {100 * self.rate:.{0 if self.rate >= 0.1 else 1}f} % of tokens"
        line += f"; without it {scale * self.change:+.{1 if share else 3}f}{around} {unit}"
        return f"{line}; nothing shows that attention matters here" if self.idle else line


FRACTIONS = ("accuracy", "f1", "balanced_accuracy", "auroc")
"""Metrics that are told in points."""


def contribution(
    model: nn.Module,
    task: Task,
    split: Split = "val",
    *,
    batch_size: int,
    limit: int | None = None,
    carry_state: bool = False,
    device: torch.device | None = None,
) -> Contribution | None:
    """What attention contributes to the score of a model; None if no layer has a router.

    Args:
        model: in eval mode or not; its mode is kept.
        task: scores.
        split: of the task.
        batch_size: examples per batch.
        limit: maximum number of examples, a fixed random sample.
        carry_state: as the run was trained.
        device: where to compute; the model's by default.
    """
    found = sites(model)
    if not any(site is not None for site in found):
        return None
    world = World(0, 1, device or next(model.parameters()).device)
    options = {"batch_size": batch_size, "limit": limit, "carry_state": carry_state}
    free, off = Intervention("", (None,) * len(found)), Intervention("", (False,) * len(found))
    with_it, usual = scored(model, task, split, free, world, **options)
    without, values = scored(model, task, split, off, world, **options)
    rates = [rate for rate in with_it.activation if rate is not None]
    rate = sum(rates) / max(len(rates), 1)
    metric = task.metric
    error = standard_error(values - usual)
    return Contribution(rate, with_it.metrics[metric], without.metrics[metric], error, metric)


# the picture


def intervention_figure(
    outcomes: Sequence[InterventionResult], metric: str, theme: Theme = "light"
) -> Figure:
    """The score under every forced decision, and the score and the activation as the threshold moves.

    Args:
        outcomes: from `intervene`: the unchanged model first, drawn as a line with a band of one standard error.
        metric: name of the score.
        theme: light or dark.
    """
    score, error = outcomes[0].metrics[metric], outcomes[0].error
    forced = [outcome for outcome in outcomes[1:] if outcome.setting.threshold is None]
    moved = [o for o in outcomes if o.setting.threshold is not None and np.isfinite(o.metrics[metric])]
    moved.sort(key=lambda outcome: outcome.setting.threshold or 0.0)
    style = style_of(theme)
    figure = new_figure(9.6, max(2.9, 1.1 + 0.3 * len(forced)), style)
    left, right = figure.subplots(1, 2)
    rows = np.arange(len(forced))
    left.errorbar(
        [outcome.metrics[metric] for outcome in forced],
        rows,
        xerr=[outcome.error or 0.0 for outcome in forced],
        capsize=3,
        elinewidth=1.2,
        **{**line_style(style, 0), "ls": "none", "ms": 7},
    )
    _draw_usual(left.axvline, left.axvspan, style, score, error)
    left.set_yticks(rows, [outcome.setting.name for outcome in forced])
    left.set_ylim(len(forced) - 0.4, -0.6)
    left.set_xlabel(f"{metric} ± standard error")
    dress(left, style, "x")
    places = [outcome.setting.threshold for outcome in moved]
    if places:
        drawn = right.errorbar(
            places,
            [outcome.metrics[metric] for outcome in moved],
            yerr=[outcome.error or 0.0 for outcome in moved],
            capsize=3,
            elinewidth=1.2,
            label=metric,
            **line_style(style, 0),
        )
        band = _draw_usual(right.axhline, right.axhspan, style, score, error)
        active = right.twinx()
        rates = [outcome.rate for outcome in moved]
        (line,) = active.plot(places, rates, label="tokens that attend", **line_style(style, 1))
        active.set_ylim(-0.02, 1.02)
        active.set_ylabel("tokens that attend")
        active.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        dress(active, style, None)
        active.patch.set_visible(False)
        active.spines["right"].set_visible(True)
        # below the axes: curves may be anywhere inside
        legend(
            right,
            style,
            handles=[drawn, line, band],
            labels=[metric, "tokens that attend", "unchanged"],
            loc="upper center",
            bbox_to_anchor=(0.5, -0.2),
            ncols=3,
        )
    right.set_xlabel("threshold of the probability")
    right.set_ylabel(metric)
    dress(right, style)
    return figure


def _draw_usual(line: Any, span: Any, style: Style, score: float, error: float | None) -> Any:
    """The score of the unchanged model, with a band of one standard error; returns the line."""
    if error:
        span(score - error, score + error, color=style.faint, alpha=0.5, lw=0, zorder=0)
    return line(score, color=style.ink, lw=1, ls="--")
