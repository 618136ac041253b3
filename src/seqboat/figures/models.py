"""Models against each other: speed against quality, multiples of a baseline, curves, interventions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from seqboat.core.checks import require
from seqboat.figures.style import (
    Style,
    Theme,
    draw_chance,
    dress,
    label_points,
    legend,
    line_style,
    new_figure,
    panels_figure,
    plain_log_ticks,
    style_of,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Point(NamedTuple):
    """One model in a plot of speed against quality."""

    size: int
    """of its memory or of its chunks"""
    speed: float
    score: float
    std: float | None = None
    """of the score over seeds"""


def pareto_front(points: Sequence[Point], faster: Literal["high", "low"] = "high") -> list[Point]:
    """The points that no other one beats in both speed and score.

    >>> [p.size for p in pareto_front([Point(16, 3, 0.5), Point(32, 2, 0.7), Point(64, 1, 0.6)])]
    [16, 32]
    """
    sign = 1 if faster == "high" else -1
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (-sign * p.speed, -p.score)):
        if not front or point.score > front[-1].score:
            front.append(point)
    return front


def tradeoff_figure(
    panels: Mapping[str, Mapping[str, Sequence[Point]]],
    *,
    speed: str,
    score: str,
    faster: Literal["high", "low"] = "high",
    chance: Mapping[str, float] | None = None,
    theme: Theme = "light",
) -> Figure:
    """Speed against quality, a line per family of models, with the memory size beside every point.

    Points on the common front, which none beats in both, have a ring around them.

    Args:
        panels: by title, points of each family.
        speed: label of the horizontal axis.
        score: label of the vertical axis.
        faster: whether high or low values of speed are the fast ones; the fast end is to the right.
        chance: by title, the score of guessing: the vertical axis begins below it.
        theme: light or dark.
    """
    style = style_of(theme)
    figure, row = panels_figure(style, list(panels), 5.0, 3.8)
    for axes, (title, families) in zip(row, panels.items(), strict=True):
        everyone = [point for points in families.values() for point in points]
        require(len(everyone) > 0, "a panel must hold at least one point")
        labels, paths = [], []
        for number, (name, points) in enumerate(families.items()):
            ordered = sorted(points, key=lambda point: point.size)
            look = line_style(style, number)
            error = [point.std or 0.0 for point in ordered]
            axes.errorbar(
                [point.speed for point in ordered],
                [point.score for point in ordered],
                error if any(error) else None,
                capsize=2,
                elinewidth=0.8,
                label=name,
                **look,
            )
            labels += [(str(point.size), point.speed, point.score, look["color"]) for point in ordered]
            paths.append([(point.speed, point.score) for point in ordered])
        front = pareto_front(everyone, faster)
        axes.plot(
            [point.speed for point in front],
            [point.score for point in front],
            ls="none",
            marker="o",
            ms=11,
            mfc="none",
            mec=style.ink,
            mew=0.9,
            label="on the common front",
        )
        dress(axes, style)
        axes.margins(x=0.14, y=0.14)
        if chance is not None and title in chance:
            draw_chance(axes, style, chance[title])
        if faster == "low":
            axes.set_xlim(left=0)
            axes.invert_xaxis()
        axes.set_xlabel(speed)
        axes.set_ylabel(score)
        legend(axes, style, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=len(families) + 1)
        label_points(axes, labels, paths)
    return figure


Scored = tuple[float, float | None]
"""A score and its standard error, None if it is unknown."""


def intervention_figure(
    settings: Mapping[str, Scored],
    thresholds: Mapping[float, tuple[float, float | None, float]],
    *,
    metric: str,
    usual: Scored,
    theme: Theme = "light",
) -> Figure:
    """The score under every forced decision, and the score and the activation as the threshold moves.

    Args:
        settings: score by what was forced, from top to bottom, with its standard error.
        thresholds: score, standard error and mean activation rate by threshold.
        metric: name of the score.
        usual: score of the unchanged model, drawn as a line with a band of one standard error.
        theme: light or dark.
    """
    style = style_of(theme)
    figure = new_figure(9.6, max(2.9, 1.1 + 0.3 * len(settings)), style)
    left, right = figure.subplots(1, 2)
    names = list(settings)
    scores = np.array([score for score, _ in settings.values()], dtype=float)
    rows = np.arange(len(names))
    left.errorbar(
        scores,
        rows,
        xerr=[error or 0.0 for _, error in settings.values()],
        capsize=3,
        elinewidth=1.2,
        **{**line_style(style, 0), "ls": "none", "ms": 7},
    )
    _draw_usual(left.axvline, left.axvspan, style, usual)
    left.set_yticks(rows, names)
    left.set_ylim(len(names) - 0.4, -0.6)
    left.set_xlabel(f"{metric} ± standard error")
    dress(left, style, "x")
    places = sorted(thresholds)
    if places:
        drawn = right.errorbar(
            places,
            [thresholds[t][0] for t in places],
            yerr=[thresholds[t][1] or 0.0 for t in places],
            capsize=3,
            elinewidth=1.2,
            label=metric,
            **line_style(style, 0),
        )
        band = _draw_usual(right.axhline, right.axhspan, style, usual)
        active = right.twinx()
        (line,) = active.plot(
            places, [thresholds[t][2] for t in places], label="tokens that attend", **line_style(style, 1)
        )
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


def _draw_usual(line: Any, span: Any, style: Style, usual: Scored) -> Any:
    """The score of the unchanged model, with a band of one standard error; returns the line."""
    score, error = usual
    if error:
        span(score - error, score + error, color=style.faint, alpha=0.5, lw=0, zorder=0)
    return line(score, color=style.ink, lw=1, ls="--")


CURVES_PER_ROW = 3


def curves_figure(
    panels: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    chance: Mapping[str, float] | None = None,
    theme: Theme = "light",
) -> Figure:
    """Held-out scores during training: a panel per experiment, a line per run; a label has one look in all panels.

    Accuracies have an axis from 0 to 100 %, so that what stays at chance looks like it.

    Args:
        panels: by title, runs with their `metric`, `label` and `curve`, pairs of step and score.
        chance: by title, the score of guessing.
        theme: light or dark.
    """
    require(len(panels) > 0, "panels must not be empty")
    style = style_of(theme)
    columns = min(CURVES_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(3.9 * columns, 2.7 * rows, style)
    labels = list(dict.fromkeys(str(record["label"]) for runs in panels.values() for record in runs))
    for i, (title, runs) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        for record in runs:
            points = np.asarray(record["curve"], dtype=float).reshape(-1, 2)
            look = {**line_style(style, labels.index(str(record["label"]))), "ms": 4}
            axes.plot(*points.T, label=str(record["label"]), **look)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("steps")
        axes.set_ylabel(str(runs[0]["metric"]))
        axes.set_xlim(left=0)
        dress(axes, style)
        if runs[0]["metric"] == "accuracy":
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        if chance is not None and title in chance:
            draw_chance(axes, style, chance[title])
        if len(runs) > 1:
            legend(axes, style)
    return figure


def ratios_figure(
    panels: Mapping[str, Mapping[str, tuple[float | None, float | None]]],
    *,
    reference: str,
    theme: Theme = "light",
) -> Figure:
    """Multiples of a reference, ours as filled marks and the paper's as hollow ones, a line per candidate.

    Args:
        panels: by title and candidate, our multiple and the paper's; None where there is none.
        reference: what has the multiple one.
        theme: light or dark.
    """
    require(len(panels) > 0, "panels must not be empty")
    style = style_of(theme)
    most = max(len(rows) for rows in panels.values())
    figure, row = panels_figure(style, list(panels), 4.6, 1.2 + 0.22 * most)
    for number, (axes, rows) in enumerate(zip(row, panels.values(), strict=True)):
        places = np.arange(len(rows))
        for i, (label, look) in enumerate(
            (("ours", {"marker": "o"}), ("paper", {"marker": "D", "mfc": "none"}))
        ):
            known = [
                (values[i], place) for place, values in zip(places, rows.values(), strict=True) if values[i]
            ]
            axes.plot(
                [value for value, _ in known],
                [place for _, place in known],
                ls="none",
                ms=5.5,
                color=line_style(style, i)["color"],
                label=label,
                **look,
            )
        dress(axes, style)
        axes.axvline(1, color=style.ink, lw=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.2g}x")
        axes.set_yticks(places, list(rows) if number == 0 else [""] * len(rows), fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(f"multiple of {reference}")
        # above the points, which may be anywhere
        legend(axes, style, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.1)
        axes.set_title(axes.get_title(), fontsize=10, loc="left", color=style.ink)
        axes.set_title("")
    return figure


def lines_figure(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    x: str,
    y: str | Mapping[str, str],
    log: Literal["", "x", "y", "both"] = "",
    chance: Mapping[str, float] | None = None,
    fits: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]] | None = None,
    theme: Theme = "light",
) -> Figure:
    """Points that lines connect, a panel per experiment, a line per model with one look in all panels.

    Args:
        panels: by title and model, pairs of x and y.
        x: label of the horizontal axes.
        y: label of the vertical axes, the same for all or by title.
        log: axes that are logarithmic.
        chance: by title, the score of guessing.
        fits: by title and model, fitted lines; then the points are not connected.
        theme: light or dark.
    """
    require(len(panels) > 0, "panels must not be empty")
    style = style_of(theme)
    columns = min(CURVES_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    figure = new_figure(3.9 * columns, 2.9 * rows, style)
    looks = {name: line_style(style, i) for i, name in enumerate(names)}
    handles: dict[str, Any] = {}
    for i, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        for name, points in lines.items():
            ordered = np.asarray(sorted(points), dtype=float).reshape(-1, 2)
            look = looks[name] | ({"ls": "none"} if fits is not None else {})
            (handles[name],) = axes.plot(*ordered.T, **look)
        for name, points in (fits or {}).get(title, {}).items():
            drawn = np.asarray(points, dtype=float).reshape(-1, 2)
            axes.plot(*drawn.T, color=looks[name]["color"], ls=looks[name]["ls"], lw=1.2)
        if log in ("x", "both"):
            axes.set_xscale("log")
            plain_log_ticks(axes.xaxis)
        if log in ("y", "both"):
            axes.set_yscale("log")
            plain_log_ticks(axes.yaxis)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x)
        axes.set_ylabel(y if isinstance(y, str) else y[title])
        dress(axes, style)
        if chance is not None and title in chance:
            draw_chance(axes, style, chance[title])
    _legend_below(figure, handles, 2 * columns, style)
    return figure


def _legend_below(figure: Figure, handles: Mapping[str, Any], most: int, style: Style) -> None:
    """A legend below all panels with as many columns as fit, for which the figure gets as much higher."""
    for columns in range(min(len(handles), most), 0, -1):
        legend = figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=columns,
            fontsize=8,
            frameon=False,
        )
        box = legend.get_window_extent()
        if box.width <= figure.bbox.width or columns == 1:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + box.height / figure.dpi)
    for text in legend.get_texts():
        text.set_color(style.ink)
