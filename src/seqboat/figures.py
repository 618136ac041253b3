"""Pictures of what routers did: activation per layer, and tokens coloured by confidence.

After the figures of section 5 of the paper. matplotlib comes with the `report` extra and is imported when a picture
is drawn. Colours run from light to dark with the quantity, so that a gray print says the same; white always means
"not activated".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from seqboat.checks import require

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


CURVES_PER_ROW = 3
_DASHES = ("-", "--", ":", "-.")


def curves_figure(panels: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Held-out scores during training: a panel per experiment, a line per seed.

    Args:
        panels: by title, runs with their `metric`, `seed` and `curve`, pairs of step and score.
    """
    from matplotlib.figure import Figure

    require(len(panels) > 0, "panels must not be empty")
    columns = min(CURVES_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.9 * columns, 2.7 * rows), layout="constrained")
    for i, (title, runs) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        for line, record in enumerate(runs):
            points = np.asarray(record["curve"], dtype=float).reshape(-1, 2)
            dashes = _DASHES[line % len(_DASHES)]
            axes.plot(*points.T, dashes, marker="o", ms=3, color="#2c7fb8", label=f"seed {record['seed']}")
        if len(runs) > 1:
            axes.legend(fontsize=7, frameon=False)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("updates")
        axes.set_ylabel(str(runs[0]["metric"]))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a PNG under a temporary name first, so that there is never half a picture."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png", dpi=110)
    partial.replace(path)
