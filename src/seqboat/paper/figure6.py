"""Figure 6: how far attention reaches, by layer and size of the working memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from seqboat.analysis.attention import local_span
from seqboat.paper.figure3 import LayerStats, observe_layers
from seqboat.paper.published import OBSERVED_SEQUENCES
from seqboat.paper.target import Make, OnProgress, Pictures, Row, Rows, Target, table
from seqboat.paper.trial import CUT_SHORT, Scale, Trial, memory_sizes
from seqboat.plotting import (
    Theme,
    dress,
    layer_axis,
    layer_values,
    legend,
    line_style,
    panels_figure,
    style_of,
)
from seqboat.run import Run
from seqboat.training.evaluate import Windows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def observe(run: Run, device: torch.device, progress: OnProgress | None = None) -> dict[str, Any]:
    """Spans of every layer; a language model is read in windows."""
    if run.task.kind != "lm":
        return observe_layers(run, device, progress)
    # as many queries as a sequence of 8,192 bytes has, each behind a context of at least 7,000
    reading = Windows()
    scored = reading.window - reading.context
    return observe_layers(run, device, progress, -(-reading.window // scored), reading)


def show(trials: Sequence[Trial], rows: Rows, pictures: Pictures) -> list[str]:
    """A table and a panel for each task: a row and a line for every size of memory."""
    return [*_tables(trials, rows), *pictures.show(_draw(trials, rows))]


def spans_of(row: Row) -> list[Any]:
    """Mean and std of the span of every layer."""
    spans: list[Any] = row["observed"]["span"]["spans"]
    return spans


def _tables(trials: Sequence[Trial], recorded: Rows) -> list[str]:
    lines = []
    for task in dict.fromkeys(trial.task for trial in trials):
        own = [trial for trial in trials if trial.task == task]
        layers = max((len(spans_of(r)) for trial in own for r in recorded[trial.name]), default=0)
        if not layers:
            lines += [f"{own[0].task_title}: not run.", ""]
            continue
        rows = []
        for trial in own:
            assert trial.size is not None
            cells = [str(trial.size), f"{local_span(trial.size):g}"]
            found = recorded[trial.name]
            spans = spans_of(found[0]) if found else ["not run"] * layers
            rows.append([*cells, *(_span_text(value) for value in spans)])
        head = [
            f"{own[0].task_title}, memory",
            "sliding window",
            *(f"layer {i}" for i in range(1, layers + 1)),
        ]
        lines += table(head, rows)
    return lines


def _span_text(value: Any) -> str:
    """Mean and std; a dash where nothing attends."""
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value[0]:.1f} ± {value[1]:.1f}"


def _draw(trials: Sequence[Trial], recorded: Rows) -> Make:
    panels: dict[str, dict[int, Any]] = {}
    for trial in trials:
        if recorded[trial.name]:
            assert trial.size is not None
            spans = [value or (None, None) for value in spans_of(recorded[trial.name][0])]
            panels.setdefault(trial.task_title, {})[trial.size] = (
                [mean for mean, _ in spans],
                [std for _, std in spans],
            )
    local = {trial.size: local_span(trial.size) for trial in trials if trial.size is not None}
    return lambda theme: span_figure(panels, local=local, theme=theme)


def span_figure(
    panels: Mapping[str, Mapping[int, LayerStats]],
    *,
    local: Mapping[int, float] | None = None,
    theme: Theme = "light",
) -> Figure:
    """Mean distance to the keys that queries see, per layer: a panel per task, a line per memory size.

    A layer in which nothing attends has a hollow mark on the horizontal axis.

    Args:
        panels: by task and memory size, (layers,) spans and their standard deviations over sequences.
        local: by memory size, the span of a sliding window over all tokens: a tick at the right edge.
        theme: light or dark.
    """
    style = style_of(theme)
    figure, row = panels_figure(style, list(panels), 4.9, 3.8)
    every = sorted({size for sizes in panels.values() for size in sizes})
    for axes, sizes in zip(row, panels.values(), strict=True):
        most = max(len(means) for means, _ in sizes.values())
        for size, (means, std) in sorted(sizes.items()):
            spans, stds = layer_values(f"spans of size {size}", means), layer_values("stds", std)
            look = line_style(style, every.index(size))
            places = np.arange(1, len(spans) + 1) + 0.06 * (every.index(size) - (len(every) - 1) / 2)
            error = np.stack([np.minimum(stds, 0.9 * spans), stds])  # a log axis has no zero
            axes.errorbar(places, spans, error, capsize=2, elinewidth=0.8, label=f"{size} slots", **look)
            idle = np.isnan(spans)
            (marks,) = axes.plot(
                places[idle],
                np.full(idle.sum(), 0.02),
                **{**look, "ls": "none", "mfc": "none", "mec": look["color"], "mew": 1.1},
                transform=axes.get_xaxis_transform(),
                clip_on=False,
            )
            marks.set_in_layout(False)
            if local is not None and size in local:
                axes.axhline(local[size], xmin=0.96, color=look["color"], lw=2.2)
        dress(axes, style)
        layer_axis(axes, most)
        axes.set_xlim(0.5, most + 0.8)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        legend(axes, style, title="working memory", title_fontsize=8)
    row[0].set_ylabel("mean distance to the keys, tokens")
    if local:
        figure.supxlabel(
            "at the right edge: half the size, the span of a sliding window; hollow: nothing attends",
            fontsize=8,
            color=style.ink,
        )
    return figure


def _runs(scale: Scale) -> tuple[Trial, ...]:
    return tuple(trial for task in ("pathfinder", "enwik8") for trial in memory_sizes(task, "seqboat", scale))


SPAN = Target(
    name="span",
    title="Attention span by layer and memory",
    where="figure 6",
    about="Mean distance, in tokens of the original sequence, from a query to the other keys that it can see. For "
    f"Pathfinder, the mean over {OBSERVED_SEQUENCES} sequences of the validation split; for enwik8, over seven "
    "windows of 8,192 bytes, each with 1,192 queries after a context of 7,000. As in the paper, the reference is "
    "half the size of a window that slides over all tokens.",
    cut=CUT_SHORT,
    small=_runs("small"),
    paper=_runs("paper"),
    observe=observe,
    show=show,
)
