"""Figure 3: the fraction of tokens that attend, by layer and task."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from seqboat.analysis.measures import measure
from seqboat.analysis.traces import load_examples
from seqboat.core.checks import require
from seqboat.paper.published import LRA_TASKS, OBSERVED_SEQUENCES
from seqboat.paper.target import Make, OnProgress, Pictures, Row, Rows, Target, table
from seqboat.paper.trial import Scale, Trial, table_run
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

IDLE = 0.001
"""Activation rate below which a layer counts as working without attention."""


def observe_layers(
    run: Run,
    device: torch.device,
    progress: OnProgress | None = None,
    sequences: int = OBSERVED_SEQUENCES,
    reading: Windows | None = None,
) -> dict[str, Any]:
    """Activation rate and attention span of every layer: mean and std over sequences; None without a router."""
    examples = load_examples(run.path, "val", sequences, reading=reading)
    measures = measure(examples, "val", weighted=False, reading=reading, device=device, progress=progress)
    return {
        "sequences": measures.sequences,
        "rates": [layer and [layer.rate.mean, layer.rate.std] for layer in measures.layers],
        "spans": [layer and layer.span and [layer.span.mean, layer.span.std] for layer in measures.layers],
    }


def rates_of(rows: Sequence[Row]) -> list[Any]:
    """Mean and std of the rate of every layer, as observed of the first seed."""
    rates: list[Any] = rows[0]["observed"]["activation"]["rates"]
    return rates


def show(trials: Sequence[Trial], rows: Rows, pictures: Pictures) -> list[str]:
    """Rates of all layers, and whether the upper ones attend more than the lower ones."""
    lines = []
    for model in dict.fromkeys(trial.title for trial in trials):
        own = [trial for trial in trials if trial.title == model]
        lines += _table(model, own, rows)
    return [*lines, *pictures.show(_draw(trials, rows))]


def _table(model: str, trials: Sequence[Trial], found: Rows) -> list[str]:
    ran = [trial for trial in trials if found[trial.name]]
    if not ran:
        return [f"{model}: not run.", ""]
    layers = max(len(rates_of(found[trial.name])) for trial in ran)
    rows, idle, upward = [], [], []
    for trial in trials:
        name = trial.task_title
        if not found[trial.name]:
            rows.append([name, *("-" for _ in range(layers)), "not run", "-"])
            continue
        rates = [rate for rate in rates_of(found[trial.name]) if rate is not None]
        half = len(rates) // 2
        lower, upper = (
            statistics.mean(r[0] for r in part) for part in (rates[:half], rates[len(rates) - half :])
        )
        shown = [f"{100 * mean:.1f} ± {100 * std:.1f}" for mean, std in rates]
        rows.append(
            [name, *shown, *["-"] * (layers - len(shown)), f"{100 * lower:.1f}", f"{100 * upper:.1f}"]
        )
        idle += [f"{name} layer {i}" for i, (mean, _) in enumerate(rates, start=1) if mean < IDLE]
        if upper > lower:
            upward.append(name)
    head = [f"{model}, active %", *(f"layer {i}" for i in range(1, layers + 1)), "lower half", "upper half"]
    return [
        *table(head, rows),
        f"- The upper half of the layers attends more than the lower one in {len(upward)} of {len(ran)} tasks"
        + (f": {', '.join(upward)}." if upward else "."),
        "- Layers in which fewer than one token in a thousand attends, so that the state-space layer works alone: "
        + (f"{', '.join(idle)}." if idle else "none."),
        "",
    ]


def _draw(trials: Sequence[Trial], found: Rows) -> Make:
    panels: dict[str, dict[str, Any]] = {}
    for trial in trials:
        if found[trial.name]:
            rates = [rate or (None, None) for rate in rates_of(found[trial.name])]
            tasks = panels.setdefault(trial.title, {})
            tasks[trial.task_title] = [mean for mean, _ in rates], [std for _, std in rates]
    return lambda theme: activation_figure(panels, theme=theme)


LayerStats = tuple[Sequence[float | None], Sequence[float | None]]
"""Means and standard deviations of the layers of a model; None where a layer has none."""


def activation_figure(panels: Mapping[str, Mapping[str, LayerStats]], *, theme: Theme = "light") -> Figure:
    """Fraction of the tokens that attend in each layer: a panel per model, a line per task.

    Args:
        panels: by the titles of model and task, (layers,) mean rates and their standard deviations over sequences,
            which are drawn as error bars within 0 and 1.
        theme: light or dark.
    """
    style = style_of(theme)
    figure, row = panels_figure(style, list(panels), 4.9, 3.8)
    titles = list(dict.fromkeys(title for tasks in panels.values() for title in tasks))
    require(len(titles) > 0, "panels must hold at least one task")
    for axes, tasks in zip(row, panels.values(), strict=True):
        most = 1
        for title, (means, std) in tasks.items():
            number = titles.index(title)
            rates, stds = layer_values(f"rates of {title}", means), layer_values(f"stds of {title}", std)
            require(
                rates.shape == stds.shape,
                f"stds of {title} must have the shape of its rates, {rates.shape}, got {stds.shape}",
            )
            most = max(most, len(rates))
            # slightly apart, or error bars would hide each other
            places = np.arange(1, len(rates) + 1) + 0.05 * (number - (len(titles) - 1) / 2)
            error = np.stack([np.minimum(stds, rates), np.minimum(stds, 1 - rates)])
            axes.errorbar(
                places, rates, error, capsize=3, elinewidth=1, label=title, **line_style(style, number)
            )
        dress(axes, style, "y")
        layer_axis(axes, most)
        axes.set_ylim(-0.02, 1.02)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    row[0].set_ylabel("tokens that attend")
    handles: dict[str, Any] = {}
    for axes in row:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    legend(
        row[-1],
        style,
        handles=[handles[title] for title in titles],
        labels=titles,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    return figure


def _runs(scale: Scale) -> tuple[Trial, ...]:
    return (
        *(table_run("lra", "seqboat-full", task, scale) for task in LRA_TASKS),
        *(table_run("lra", "seqboat", task, scale) for task in LRA_TASKS),
        table_run("speech", "seqboat", "speech", scale),
        table_run("enwik8", "seqboat", "enwik8", scale),
    )


ACTIVATION = Target(
    name="activation",
    title="Activation by layer and task",
    where="figure 3",
    about="Fraction of the tokens that attend in each layer: mean and standard deviation over "
    f"{OBSERVED_SEQUENCES} sequences of the validation split. The paper shows SeqBoat-full on the Long Range Arena; "
    "SeqBoat and the other tasks are ours.",
    small=_runs("small"),
    paper=_runs("paper"),
    observe=observe_layers,
    show=show,
)
