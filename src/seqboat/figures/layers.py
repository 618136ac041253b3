"""What layers do: activation, attention span, probabilities, and activation over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from seqboat.core.checks import require
from seqboat.figures.style import (
    Theme,
    dress,
    layer_axis,
    layer_values,
    legend,
    line_style,
    new_figure,
    panels_figure,
    style_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_activation(axes: Axes, rates: ArrayLike, stds: ArrayLike | None = None) -> None:
    """Bars of the activation rate of each layer, the first layer at the top.

    Args:
        axes: to draw on.
        rates: (layers,), from 0 to 1.
        stds: (layers,), standard deviations over the sequences, drawn as error bars within 0 and 1.
    """
    rates = np.asarray(rates, dtype=float)
    require(rates.ndim == 1, f"rates must have shape (layers,), got {rates.shape}")
    layers = np.arange(1, len(rates) + 1)
    error = None
    if stds is not None:
        stds = np.asarray(stds, dtype=float)
        require(
            stds.shape == rates.shape,
            f"stds must have the shape of rates, {rates.shape}, got {stds.shape}",
        )
        error = np.stack([np.minimum(stds, rates), np.minimum(stds, 1 - rates)])
    axes.barh(
        layers, rates, xerr=error, color="#2c7fb8", edgecolor="0.2", height=0.62, ecolor="0.2", capsize=3
    )
    for layer, rate in zip(layers, rates, strict=True):
        axes.text(
            1.03, float(layer), f"{rate:.0%}", va="center", ha="left", transform=axes.get_yaxis_transform()
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(len(rates) + 0.6, 0.4)
    axes.set_yticks(layers, [f"layer {layer}" for layer in layers])
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("tokens that attend")
    axes.spines[["top", "right"]].set_visible(False)


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


def histogram_figure(
    layers: Mapping[str, tuple[Sequence[int], Sequence[int]] | None], *, theme: Theme = "light"
) -> Figure:
    """How probable activation was: a panel per layer, activated tokens hatched.

    Args:
        layers: by title, activated and all tokens in equal bins of the probability from 0 to 1; None without router.
        theme: light or dark.
    """
    style = style_of(theme)
    figure, row = panels_figure(style, list(layers), 2.7, 2.5)
    for axes, counts in zip(row, layers.values(), strict=True):
        if counts is None:
            axes.text(0.5, 0.5, "no router", ha="center", color=style.ink, transform=axes.transAxes)
        else:
            active, total = (np.asarray(count, dtype=float) for count in counts)
            whole = max(total.sum(), 1)
            edges = np.linspace(0, 1, len(total) + 1)
            bars = {
                "x": edges[:-1],
                "width": np.diff(edges),
                "align": "edge",
                "edgecolor": style.ink,
                "lw": 0.5,
            }
            axes.bar(height=active / whole, color=style.lines[0], hatch="///", label="activated", **bars)
            axes.bar(
                height=(total - active) / whole, bottom=active / whole, color=style.faint, label="not", **bars
            )
            axes.set_title(f"{axes.get_title()}\n{active.sum() / whole:.1%} active", fontsize=9)
            axes.set_ylim(0, 1.05 * float(total.max()) / whole or 1)
        dress(axes, style, "y")
        axes.set_xlim(0, 1)
        axes.set_xlabel("probability of activation")
    row[0].set_ylabel("fraction of tokens")
    return figure


def training_figure(points: Sequence[Mapping[str, Any]], *, theme: Theme = "light") -> Figure:
    """Activation rate of every layer over training.

    Args:
        points: with `step` and `activation`, (layers,) rates or None, in order; `split` "train" or another one.
        theme: light or dark.
    """
    style = style_of(theme)
    require(len(points) > 0, "points must not be empty")
    figure = new_figure(6.4, 3.4, style)
    axes = figure.add_subplot()
    held = [point for point in points if point.get("split") != "train"]
    train = [point for point in points if point.get("split") == "train"] or held
    for layer in range(len(points[0]["activation"])):
        look = line_style(style, layer)
        steps, rates = _series(train, layer)
        if not len(steps):
            continue
        axes.plot(steps, rates, color=look["color"], ls=look["ls"], lw=1.3)
        axes.plot(*_series(held, layer), **{**look, "ls": "none"})
        axes.plot([], [], label=f"layer {layer + 1}", **look)
    dress(axes, style)
    axes.set_xlim(left=0)
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("steps (markers: evaluations)")
    axes.set_ylabel("tokens that attend")
    if axes.get_legend_handles_labels()[0]:
        legend(axes, style, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _series(points: Sequence[Mapping[str, Any]], layer: int) -> tuple[Any, Any]:
    known = [(point["step"], point["activation"][layer]) for point in points]
    found = np.array([pair for pair in known if pair[1] is not None], dtype=float).reshape(-1, 2)
    return found[:, 0], found[:, 1]
