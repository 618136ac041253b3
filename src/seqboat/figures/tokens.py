"""Confidence token by token: over a text, over images, and the figure of the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from seqboat.core.checks import require
from seqboat.figures.layers import draw_activation
from seqboat.figures.style import Theme, confidence_colors, new_figure, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOKENS_PER_LINE = 30
"""Tokens that fit side by side on a figure of full width and can still be read."""

EDGE = "0.6"


def draw_confidence(axes: Axes, tokens: Sequence[str], confidence: ArrayLike) -> None:
    """A sequence once per layer, each token on the color of its confidence; white where it is not activated.

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

    cmap, norm = confidence_colors()
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
                color = shade.to_rgba(value) if value > 0 else (1.0, 1.0, 1.0, 1.0)
                axes.add_patch(
                    Rectangle(
                        (column, top + layer), 1, 1, facecolor=color, edgecolor=EDGE, lw=0.6, clip_on=False
                    )
                )
                # luminance decides whether dark or light letters can be read
                dark = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] < 0.5
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
    rates: ArrayLike, stds: ArrayLike, tokens: Sequence[str], confidence: ArrayLike, caption: str
) -> Figure:
    """Activation per layer above one sequence colored by confidence.

    Args:
        rates: (layers,), activation rate of each layer.
        stds: (layers,), its standard deviation over sequences.
        tokens: one sequence.
        confidence: (layers, tokens), of that sequence.
        caption: of the lower part.
    """
    from matplotlib.figure import Figure

    layers = len(np.asarray(rates))
    heights = (0.6 + 0.36 * layers, confidence_lines(len(tokens)) * (layers + 0.8) * 0.34)
    figure = Figure(figsize=(11, sum(heights) + 1.5), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    draw_activation(above, rates, stds)
    above.set_title(
        "(a) activation per layer; whiskers: standard deviation over expressions", loc="left", fontsize=11
    )
    draw_confidence(below, tokens, confidence)
    below.set_title(f"(b) {caption}", loc="left", fontsize=11)
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

    style = style_of(theme)
    require(len(images) > 0 and len(maps) > 0, "images and maps must not be empty")
    pictures = [np.asarray(image, dtype=float) for image in images]
    cmap, norm = confidence_colors()
    shade = ScalarMappable(norm=norm, cmap=cmap)  # type: ignore[arg-type]
    columns = 1 + len(maps)
    figure = new_figure(1.75 * columns + 0.9, 1.75 * len(pictures) + 0.4, style)
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
            colors = shade.to_rgba(values)
            colors[values <= 0] = 1.0
            grid[row, column].imshow(colors, interpolation="nearest")
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
