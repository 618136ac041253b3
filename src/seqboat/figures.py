"""Pictures of what routers did: activation per layer, confidence, attention span, speed against quality.

After the figures of section 5 of the paper. All take plain numbers, and a theme, light or dark:

    activation_figure({"ListOps": (rates, deviations), "Text": ...})        activation per layer and task
    confidence_maps_figure(images, {"layer 3": maps, "layer 4": maps})      confidence over images
    tradeoff_figure({"Image": {"SeqBoat": [Point(...), ...], ...}}, ...)    speed against accuracy by memory size
    span_figure({"Pathfinder": {16: spans, 32: spans}})                     attention span per layer by memory size
    histogram_figure({"layer 1": (active, total), ...})                     probabilities of activation
    training_figure([{"step": 20, "activation": [...]}, ...])               activation over training
    intervention_figure(...)                                                what a layer's attention is worth

    write_figure(lambda theme: span_figure(panels, theme=theme), "docs/images/span")
                                                                            span.svg, span.png, span-dark.svg, ...

matplotlib comes with the `report` extra and is imported when a picture is drawn. Whatever a colour says, a marker, a
dash or a hatch says too; confidences run from light to dark, so that a gray print says the same, and white always
means "not activated". The colours of lines are those of Okabe and Ito, which colour-blind people tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from seqboat.checks import check_choice, require
from seqboat.data.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOKENS_PER_LINE = 30
"""Tokens that fit side by side on a figure of full width and can still be read."""

_EDGE = "0.6"


def _confidence_colours() -> tuple[object, object]:
    """A colour map and a norm for confidences from one half to one; the lightest still differs from white."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    shades = colormaps["YlGnBu"](np.linspace(0.22, 0.95, 256))
    return LinearSegmentedColormap.from_list("confidence", list(map(tuple, shades))), Normalize(0.5, 1.0)


def draw_activation(axes: Axes, rates: ArrayLike, deviations: ArrayLike | None = None) -> None:
    """Bars of the activation rate of each layer, the first layer at the top.

    Args:
        axes: to draw on.
        rates: (layers,), from 0 to 1.
        deviations: (layers,), standard deviation over the sequences, drawn as error bars within 0 and 1.
    """
    rates = np.asarray(rates, dtype=float)
    require(rates.ndim == 1, f"rates must have shape (layers,), got {rates.shape}")
    layers = np.arange(1, len(rates) + 1)
    error = None
    if deviations is not None:
        deviations = np.asarray(deviations, dtype=float)
        require(
            deviations.shape == rates.shape,
            f"deviations must have the shape of rates, {rates.shape}, got {deviations.shape}",
        )
        error = np.stack([np.minimum(deviations, rates), np.minimum(deviations, 1 - rates)])
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


def draw_confidence(axes: Axes, tokens: Sequence[str], confidence: ArrayLike) -> None:
    """A sequence once per layer, each token on the colour of its confidence; white where it is not activated.

    Args:
        axes: to draw on.
        tokens: the sequence; it runs over several lines if it is long.
        confidence: (layers, tokens), zero where not activated.
    """
    confidence = np.asarray(confidence, dtype=float)
    require(
        confidence.ndim == 2 and confidence.shape[1] == len(tokens),
        f"confidence must have shape (layers, {len(tokens)}), got {confidence.shape}",
    )
    from matplotlib.cm import ScalarMappable
    from matplotlib.patches import Rectangle

    cmap, norm = _confidence_colours()
    shade = ScalarMappable(norm=norm, cmap=cmap)  # type: ignore[arg-type]
    layers = len(confidence)
    lines = confidence_lines(len(tokens))
    columns = -(-len(tokens) // lines)
    labels = {}
    for line in range(lines):
        top = line * (layers + 0.8)
        for layer in range(layers):
            labels[top + layer + 0.5] = f"layer {layer + 1}"
            for column, i in enumerate(range(line * columns, min((line + 1) * columns, len(tokens)))):
                value = confidence[layer, i]
                colour = shade.to_rgba(value) if value > 0 else (1.0, 1.0, 1.0, 1.0)
                axes.add_patch(
                    Rectangle(
                        (column, top + layer), 1, 1, facecolor=colour, edgecolor=_EDGE, lw=0.6, clip_on=False
                    )
                )
                # luminance decides whether dark or light letters can be read
                dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 0.5
                size = 8.5 if len(tokens[i]) < 3 else 6.5
                axes.text(
                    column + 0.5,
                    top + layer + 0.5,
                    tokens[i],
                    ha="center",
                    va="center",
                    fontsize=size,
                    family="monospace",
                    color="white" if dark else "black",
                )
    axes.set_xlim(0, max(columns, 1))
    axes.set_ylim(lines * (layers + 0.8) - 0.8, 0)
    axes.set_yticks(list(labels), list(labels.values()))
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    assert axes.figure is not None
    bar = axes.figure.colorbar(shade, ax=axes, fraction=0.02, pad=0.015, ticks=[0.5, 0.75, 1.0])
    bar.set_label("confidence")


def confidence_lines(tokens: int) -> int:
    """Lines that a sequence takes."""
    return max(1, -(-tokens // TOKENS_PER_LINE))


def demo_figure(
    rates: ArrayLike, deviations: ArrayLike, tokens: Sequence[str], confidence: ArrayLike, caption: str
) -> Figure:
    """Activation per layer above one sequence coloured by confidence.

    Args:
        rates: (layers,), activation rate of each layer.
        deviations: (layers,), its standard deviation over sequences.
        tokens: one sequence.
        confidence: (layers, tokens), of that sequence.
        caption: of the lower part.
    """
    from matplotlib.figure import Figure

    layers = len(np.asarray(rates))
    heights = (0.6 + 0.36 * layers, confidence_lines(len(tokens)) * (layers + 0.8) * 0.34)
    figure = Figure(figsize=(11, sum(heights) + 1.5), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    draw_activation(above, rates, deviations)
    above.set_title(
        "(a) activation per layer; whiskers: standard deviation over expressions", loc="left", fontsize=11
    )
    draw_confidence(below, tokens, confidence)
    below.set_title(f"(b) {caption}", loc="left", fontsize=11)
    return figure


# one style

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = get_args(Theme)
FORMATS = ("svg", "pdf", "png")


class Style(NamedTuple):
    """The colours of a theme."""

    paper: str
    ink: str
    faint: str
    lines: tuple[str, ...]


STYLES: dict[Theme, Style] = {
    "light": Style(
        "#ffffff",
        "#222222",
        "#d0d0d0",
        ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#4d4d4d", "#7b3f9e"),
    ),
    "dark": Style(
        "#15181c",
        "#e8e8e8",
        "#444a52",
        ("#56b4e9", "#ff8c42", "#2fc79a", "#e5a3cb", "#a5d8f3", "#f0e442", "#bdbdbd", "#b995e0"),
    ),
}
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_STROKES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 2)))


def _style(theme: Theme) -> Style:
    check_choice("theme", theme, THEMES)
    return STYLES[theme]


def _line(style: Style, number: int) -> dict[str, Any]:
    """Colour, marker and dashes of the line with this number; all three differ from its neighbours."""
    return {
        "color": style.lines[number % len(style.lines)],
        "marker": _MARKS[number % len(_MARKS)],
        "ls": _STROKES[number % len(_STROKES)],
        "lw": 1.6,
        "ms": 5.5,
        "mec": style.paper,
        "mew": 0.6,
    }


def _new_figure(width: float, height: float, style: Style) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor=style.paper)


def _dress(axes: Axes, style: Style, grid: Literal["both", "x", "y"] | None = "both") -> None:
    """Give axes the colours of a theme."""
    axes.set_facecolor(style.paper)
    axes.tick_params(which="both", colors=style.ink, labelsize=9)
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(style.ink)
    axes.spines[:].set_color(style.ink)
    axes.spines[["top", "right"]].set_visible(False)
    if grid is not None:
        axes.grid(axis=grid, color=style.faint, lw=0.5)
        axes.set_axisbelow(True)


def _legend(axes: Axes, style: Style, **options: Any) -> None:
    legend = axes.legend(fontsize=8, frameon=False, **options)
    for text in (*legend.get_texts(), legend.get_title()):
        text.set_color(style.ink)


def _numbers(what: str, values: Any) -> Any:
    """(layers,) floats; None becomes nan, which is left out of a line."""
    found = np.array([math.nan if value is None else value for value in values], dtype=float)
    require(found.ndim == 1 and len(found) > 0, f"{what} must have shape (layers,), got {found.shape}")
    return found


def _layer_axis(axes: Axes, layers: int) -> None:
    axes.set_xlim(0.6, layers + 0.4)
    axes.set_xticks(range(1, layers + 1))
    axes.set_xlabel("layer (1 is next to the input)")


def _panels(style: Style, titles: Sequence[str], width: float = 4.6, height: float = 3.4) -> Any:
    """A figure with a row of axes, one per title."""
    require(len(titles) > 0, "panels must not be empty")
    figure = _new_figure(width * len(titles), height, style)
    row = figure.subplots(1, len(titles), squeeze=False)[0]
    for axes, title in zip(row, titles, strict=True):
        axes.set_title(title, fontsize=10)
    return figure, row


# figures of the paper


def activation_figure(
    tasks: Mapping[str, tuple[Sequence[float | None], Sequence[float | None]]], *, theme: Theme = "light"
) -> Figure:
    """Share of the tokens that attend in each layer, a line per task.

    Args:
        tasks: by title, (layers,) mean rates and their standard deviations over sequences; None where a layer has
            no router. Deviations are drawn as error bars within 0 and 1.
        theme: light or dark.
    """
    style = _style(theme)
    require(len(tasks) > 0, "tasks must not be empty")
    figure = _new_figure(6.4, 4.0, style)
    axes = figure.add_subplot()
    most = 1
    for number, (title, (means, deviations)) in enumerate(tasks.items()):
        rates, apart = _numbers(f"rates of {title}", means), _numbers(f"deviations of {title}", deviations)
        require(
            rates.shape == apart.shape,
            f"deviations of {title} must have the shape of its rates, {rates.shape}, got {apart.shape}",
        )
        most = max(most, len(rates))
        # a little beside each other, or error bars would hide each other
        places = np.arange(1, len(rates) + 1) + 0.05 * (number - (len(tasks) - 1) / 2)
        error = np.stack([np.minimum(apart, rates), np.minimum(apart, 1 - rates)])
        axes.errorbar(places, rates, error, capsize=3, elinewidth=1, label=title, **_line(style, number))
    _dress(axes, style, "y")
    _layer_axis(axes, most)
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.set_ylabel("tokens that attend")
    _legend(axes, style, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def confidence_maps_figure(
    images: Sequence[ArrayLike], maps: Mapping[str, Sequence[ArrayLike]], *, theme: Theme = "light"
) -> Figure:
    """Images, and beside them the confidence of every pixel in some layers; white where it is not activated.

    Args:
        images: (height, width) each, any range; a row of the figure per image.
        maps: by title, one (height, width) of confidences per image, zero where not activated.
        theme: light or dark.
    """
    from matplotlib.cm import ScalarMappable

    style = _style(theme)
    require(len(images) > 0 and len(maps) > 0, "images and maps must not be empty")
    pictures = [np.asarray(image, dtype=float) for image in images]
    cmap, norm = _confidence_colours()
    shade = ScalarMappable(norm=norm, cmap=cmap)  # type: ignore[arg-type]
    columns = 1 + len(maps)
    figure = _new_figure(1.75 * columns + 0.9, 1.75 * len(pictures) + 0.4, style)
    grid = figure.subplots(len(pictures), columns, squeeze=False)
    for row, picture in enumerate(pictures):
        grid[row, 0].imshow(picture, cmap="gray", interpolation="nearest")
    grid[0, 0].set_title("input", fontsize=10)
    for column, (title, confidences) in enumerate(maps.items(), start=1):
        require(len(confidences) == len(pictures), f"{title} must hold {len(pictures)} maps")
        grid[0, column].set_title(title, fontsize=10)
        for row, values in enumerate(confidences):
            values = np.asarray(values, dtype=float)
            require(
                values.shape == pictures[row].shape,
                f"maps of {title} must have the shape of their image, {pictures[row].shape}, got {values.shape}",
            )
            colours = shade.to_rgba(values)
            colours[values <= 0] = 1.0
            grid[row, column].imshow(colours, interpolation="nearest")
    for axes in grid.flat:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.title.set_color(style.ink)
        axes.spines[:].set_color(style.faint)
    bar = figure.colorbar(shade, ax=grid, fraction=0.03, pad=0.02, ticks=[0.5, 0.75, 1.0])
    bar.set_label("confidence where activated", color=style.ink, fontsize=9)
    bar.ax.tick_params(colors=style.ink, labelsize=8)
    bar.outline.set_edgecolor(style.faint)
    return figure


class Point(NamedTuple):
    """One model in a plot of speed against quality."""

    size: int
    """of its memory or of its chunks"""
    speed: float
    score: float
    deviation: float | None = None
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
    theme: Theme = "light",
) -> Figure:
    """Speed against quality, a line per family of models, with the memory size beside every point.

    Points on the common front, which none beats in both, have a ring around them.

    Args:
        panels: by title, points of each family.
        speed: label of the horizontal axis.
        score: label of the vertical axis.
        faster: whether high or low values of speed are the fast ones; the fast end is to the right.
        theme: light or dark.
    """
    style = _style(theme)
    figure, row = _panels(style, list(panels), 5.0, 3.8)
    for axes, families in zip(row, panels.values(), strict=True):
        everyone = [point for points in families.values() for point in points]
        require(len(everyone) > 0, "a panel must hold at least one point")
        for number, (name, points) in enumerate(families.items()):
            ordered = sorted(points, key=lambda point: point.size)
            look = _line(style, number)
            error = [point.deviation or 0.0 for point in ordered]
            axes.errorbar(
                [point.speed for point in ordered],
                [point.score for point in ordered],
                error if any(error) else None,
                capsize=2,
                elinewidth=0.8,
                label=name,
                **look,
            )
            for point in ordered:
                axes.annotate(
                    str(point.size),
                    (point.speed, point.score),
                    xytext=(0, 8 if number % 2 == 0 else -14),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    color=look["color"],
                )
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
        _dress(axes, style)
        axes.margins(x=0.12, y=0.18)
        if faster == "low":
            axes.invert_xaxis()
        axes.set_xlabel(speed)
        axes.set_ylabel(score)
        _legend(axes, style)
    return figure


def span_figure(
    panels: Mapping[str, Mapping[int, Sequence[float | None]]],
    *,
    local: Mapping[int, float] | None = None,
    theme: Theme = "light",
) -> Figure:
    """Mean distance to the keys that queries see, per layer, a line per memory size.

    Args:
        panels: by title and memory size, (layers,) spans; None where nothing attends.
        local: by memory size, the span of a sliding window on all tokens, drawn as a thin dotted line.
        theme: light or dark.
    """
    style = _style(theme)
    figure, row = _panels(style, list(panels))
    for axes, sizes in zip(row, panels.values(), strict=True):
        most = 1
        for number, size in enumerate(sorted(sizes)):
            spans = _numbers(f"spans of size {size}", sizes[size])
            most = max(most, len(spans))
            look = _line(style, number)
            axes.plot(np.arange(1, len(spans) + 1), spans, label=str(size), **look)
            if local is not None and size in local:
                axes.axhline(local[size], color=look["color"], ls=(0, (1, 3)), lw=1)
        _dress(axes, style)
        _layer_axis(axes, most)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylabel("mean distance to the keys, tokens")
        _legend(axes, style, title="memory size", title_fontsize=8)
    return figure


# further figures


def histogram_figure(
    layers: Mapping[str, tuple[Sequence[int], Sequence[int]] | None], *, theme: Theme = "light"
) -> Figure:
    """How probable activation was: a panel per layer, activated tokens hatched.

    Args:
        layers: by title, activated and all tokens in equal bins of the probability from 0 to 1; None without router.
        theme: light or dark.
    """
    style = _style(theme)
    figure, row = _panels(style, list(layers), 2.7, 2.5)
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
        _dress(axes, style, "y")
        axes.set_xlim(0, 1)
        axes.set_xlabel("probability of activation")
    row[0].set_ylabel("share of tokens")
    return figure


def training_figure(points: Sequence[Mapping[str, Any]], *, theme: Theme = "light") -> Figure:
    """Activation rate of every layer over training.

    Args:
        points: with `step` and `activation`, (layers,) rates or None, in order; `split` "train" or another one.
        theme: light or dark.
    """
    style = _style(theme)
    require(len(points) > 0, "points must not be empty")
    figure = _new_figure(6.4, 3.4, style)
    axes = figure.add_subplot()
    held = [point for point in points if point.get("split") != "train"]
    train = [point for point in points if point.get("split") == "train"] or held
    for layer in range(len(points[0]["activation"])):
        look = _line(style, layer)
        steps, rates = _series(train, layer)
        if not len(steps):
            continue
        axes.plot(steps, rates, color=look["color"], ls=look["ls"], lw=1.3)
        axes.plot(*_series(held, layer), **{**look, "ls": "none"})
        axes.plot([], [], label=f"layer {layer + 1}", **look)
    _dress(axes, style)
    axes.set_xlim(left=0)
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("updates (markers: evaluations)")
    axes.set_ylabel("tokens that attend")
    if axes.get_legend_handles_labels()[0]:
        _legend(axes, style, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _series(points: Sequence[Mapping[str, Any]], layer: int) -> tuple[Any, Any]:
    known = [(point["step"], point["activation"][layer]) for point in points]
    found = np.array([pair for pair in known if pair[1] is not None], dtype=float).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def intervention_figure(
    settings: Mapping[str, float],
    thresholds: Mapping[float, tuple[float, float]],
    *,
    metric: str,
    usual: float,
    theme: Theme = "light",
) -> Figure:
    """The score under every forced decision, and the score and the activation as the threshold moves.

    Args:
        settings: score by what was forced, from top to bottom.
        thresholds: score and mean activation rate by threshold.
        metric: name of the score.
        usual: score of the model as it is, drawn as a line.
        theme: light or dark.
    """
    style = _style(theme)
    figure = _new_figure(9.6, max(2.6, 0.8 + 0.3 * len(settings)), style)
    left, right = figure.subplots(1, 2)
    names, scores = list(settings), np.array(list(settings.values()), dtype=float)
    rows = np.arange(len(names))
    left.hlines(rows, usual, scores, color=style.lines[0], lw=2.2)
    left.plot(scores, rows, **{**_line(style, 0), "ls": "none", "ms": 7})
    left.axvline(usual, color=style.ink, lw=1, ls="--")
    left.set_yticks(rows, names)
    left.set_ylim(len(names) - 0.4, -0.6)
    left.set_xlabel(f"{metric} (dashed: as it is)")
    _dress(left, style, "x")
    places = sorted(thresholds)
    if places:
        right.plot(places, [thresholds[t][0] for t in places], label=metric, **_line(style, 0))
        right.axhline(usual, color=style.ink, lw=1, ls="--")
        share = right.twinx()
        share.plot(places, [thresholds[t][1] for t in places], label="active", **_line(style, 1))
        share.set_ylim(-0.02, 1.02)
        share.set_ylabel("tokens that attend")
        _dress(share, style, None)
        share.patch.set_visible(False)
        share.spines["right"].set_visible(True)
        lines = [*right.get_lines()[:1], *share.get_lines()]
        _legend(right, style, handles=lines, loc="best")
    right.set_xlabel("threshold of the probability")
    right.set_ylabel(metric)
    _dress(right, style)
    return figure


# files


CURVES_PER_ROW = 3


def curves_figure(panels: Mapping[str, Sequence[Mapping[str, Any]]], *, theme: Theme = "light") -> Figure:
    """Held-out scores during training: a panel per experiment, a line per seed.

    Args:
        panels: by title, runs with their `metric`, `seed` and `curve`, pairs of step and score.
        theme: light or dark.
    """
    require(len(panels) > 0, "panels must not be empty")
    style = _style(theme)
    columns = min(CURVES_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    figure = _new_figure(3.9 * columns, 2.7 * rows, style)
    for i, (title, runs) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        for number, record in enumerate(runs):
            points = np.asarray(record["curve"], dtype=float).reshape(-1, 2)
            look = {**_line(style, number), "ms": 4}
            axes.plot(*points.T, label=f"seed {record['seed']}", **look)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("updates")
        axes.set_ylabel(str(runs[0]["metric"]))
        axes.set_xlim(left=0)
        _dress(axes, style)
        if len(runs) > 1:
            _legend(axes, style)
    return figure


def ratios_figure(
    panels: Mapping[str, Mapping[str, tuple[float | None, float | None]]],
    *,
    reference: str,
    theme: Theme = "light",
) -> Figure:
    """Multiples of a reference, ours as filled marks and the paper's as hollow ones, a line per contender.

    Args:
        panels: by title and contender, our multiple and the paper's; None where there is none.
        reference: what has the multiple one.
        theme: light or dark.
    """
    require(len(panels) > 0, "panels must not be empty")
    style = _style(theme)
    most = max(len(rows) for rows in panels.values())
    figure, row = _panels(style, list(panels), 4.6, 1.2 + 0.22 * most)
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
                color=_line(style, i)["color"],
                label=label,
                **look,
            )
        _dress(axes, style)
        axes.axvline(1, color=style.ink, lw=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axes.set_yticks(places, list(rows) if number == 0 else [""] * len(rows), fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(f"multiple of {reference}")
        _legend(axes, style)
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a picture in the format that its name ends with, under a temporary name first: there is never half of it.

    Args:
        figure: to write.
        path: ends with .png, .svg or .pdf.
    """
    from matplotlib import rc_context

    path = Path(path)
    kind = path.suffix[1:].lower()
    require(kind in FORMATS, f"the name of a picture must end with .png, .svg or .pdf, got {path.name!r}")
    # the same picture gives the same file: no dates, no random names
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    with rc_context({"svg.hashsalt": "seqboat"}), replacing(path) as stage:
        figure.savefig(stage, format=kind, dpi=110, metadata=metadata)


def write_figure(
    make: Callable[[Theme], Figure],
    path: str | Path,
    formats: Sequence[str] = ("svg", "png"),
    themes: Sequence[Theme] = THEMES,
) -> list[Path]:
    """Draw a picture in every theme and write it in every format.

    Args:
        make: draws it in a theme.
        path: without an ending; the dark ones end with -dark.
        formats: of svg, pdf and png.
        themes: light, dark or both.

    Returns:
        The files.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for theme in themes:
        figure = make(theme)
        for kind in formats:
            name = path.name + ("" if theme == "light" else f"-{theme}")
            written.append(path.with_name(f"{name}.{kind}"))
            save_figure(figure, written[-1])
    return written
