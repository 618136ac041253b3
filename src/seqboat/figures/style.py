"""One style for all figures: colors of two themes, lines that differ in color, marker and dashes, axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from seqboat.checks import check_choice, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = get_args(Theme)


class Style(NamedTuple):
    """The colors of a theme."""

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


def style_of(theme: Theme) -> Style:
    check_choice("theme", theme, THEMES)
    return STYLES[theme]


def line_style(style: Style, number: int) -> dict[str, Any]:
    """Color, marker and dashes of the line with this number; all three differ from its neighbors."""
    return {
        "color": style.lines[number % len(style.lines)],
        "marker": _MARKS[number % len(_MARKS)],
        "ls": _STROKES[number % len(_STROKES)],
        "lw": 1.6,
        "ms": 5.5,
        "mec": style.paper,
        "mew": 0.6,
    }


def new_figure(width: float, height: float, style: Style) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor=style.paper)


def dress(axes: Axes, style: Style, grid: Literal["both", "x", "y"] | None = "both") -> None:
    """Give axes the colors of a theme."""
    axes.set_facecolor(style.paper)
    axes.tick_params(which="both", colors=style.ink, labelsize=9)
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(style.ink)
    axes.spines[:].set_color(style.ink)
    axes.spines[["top", "right"]].set_visible(False)
    if grid is not None:
        axes.grid(axis=grid, color=style.faint, lw=0.5)
        axes.set_axisbelow(True)


def legend(axes: Axes, style: Style, **options: Any) -> None:
    legend = axes.legend(fontsize=8, frameon=False, **options)
    for text in (*legend.get_texts(), legend.get_title()):
        text.set_color(style.ink)


def layer_values(what: str, values: Any) -> Any:
    """(layers,) floats; None becomes nan, which is left out of a line."""
    found = np.array([math.nan if value is None else value for value in values], dtype=float)
    require(found.ndim == 1 and len(found) > 0, f"{what} must have shape (layers,), got {found.shape}")
    return found


def layer_axis(axes: Axes, layers: int) -> None:
    axes.set_xlim(0.6, layers + 0.4)
    axes.set_xticks(range(1, layers + 1))
    axes.set_xlabel("layer (1 is next to the input)")


def panels_figure(style: Style, titles: Sequence[str], width: float = 4.6, height: float = 3.4) -> Any:
    """A figure with a row of axes, one per title."""
    require(len(titles) > 0, "panels must not be empty")
    figure = new_figure(width * len(titles), height, style)
    row = figure.subplots(1, len(titles), squeeze=False)[0]
    for axes, title in zip(row, titles, strict=True):
        axes.set_title(title, fontsize=10)
    return figure, row


def confidence_colors() -> tuple[object, object]:
    """A color map and a norm for confidences from one half to one; the lightest still differs from white."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    shades = colormaps["YlGnBu"](np.linspace(0.22, 0.95, 256))
    return LinearSegmentedColormap.from_list("confidence", list(map(tuple, shades))), Normalize(0.5, 1.0)
