"""One style for all figures: colors of two themes, lines that differ in color, marker and dashes, axes, files.

    style = style_of("dark")
    figure, (left, right) = panels_figure(style, ["Image", "Text"], 5.0, 3.8)
    left.plot(x, y, label="SeqBoat", **line_style(style, 0))
    dress(left, style)

    write_figure(lambda theme: ..., "docs/images/span")         span.svg, span.png, span-dark.svg, ...

matplotlib is imported when a figure is drawn. Markers, dashes and hatches repeat what colors say. Confidences run
from light to dark and can be read in gray; white always means "not activated". The line colors are those of Okabe and
Ito, which color-blind readers can tell apart. Axes of accuracy include chance. The same figure gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from seqboat.core.checks import check_choice, require
from seqboat.data.files import replacing

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
LEAST_RANGE = 0.2
"""Of an axis of scores above chance."""
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_MARK_SIZES = {"^": 6.5, "v": 6.5, "P": 7.0, "X": 7.0, "*": 9.5}
"""Points; other marks fill their square better and look as large at 5.5."""
_STROKES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 2)))


def style_of(theme: Theme) -> Style:
    check_choice("theme", theme, THEMES)
    return STYLES[theme]


def line_style(style: Style, number: int) -> dict[str, Any]:
    """Color, marker and dashes of the line with this number.

    All three differ from its neighbors. When colors repeat, they come with another marker, which is hollow in every
    second round.
    """
    round_, place = divmod(number, len(style.lines))
    mark, color = _MARKS[(number + round_) % len(_MARKS)], style.lines[place]
    hollow = {"mfc": style.paper, "mec": color, "mew": 1.2}
    return {
        "color": color,
        "marker": mark,
        "ls": _STROKES[number % len(_STROKES)],
        "lw": 1.6,
        "ms": _MARK_SIZES.get(mark, 5.5),
        **(hollow if round_ % 2 else {"mec": style.paper, "mew": 0.4}),
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


def draw_chance(axes: Axes, style: Style, score: float) -> None:
    """The score of guessing as a dotted line; the axis begins below it and ends at least a fifth above it."""
    axes.axhline(score, color=style.ink, lw=0.9, ls=(0, (1, 2)))
    axes.annotate(
        "chance",
        (0.99, score),
        xycoords=("axes fraction", "data"),
        xytext=(0, -2),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=7,
        color=style.ink,
    )
    low, high = axes.get_ylim()
    high = max(high, score + LEAST_RANGE)  # scores near chance should look like chance
    axes.set_ylim(min(low, score - 0.1 * (high - score)), high)


_DIRECTIONS = (90, 270, 0, 180, 45, 135, 225, 315)
_AROUND = [
    (radius * math.cos(math.radians(angle)), radius * math.sin(math.radians(angle)))
    for radius in (10, 14, 20, 28, 38)
    for angle in _DIRECTIONS
]
"""Where a label may stand beside its point, best first, in typographic points."""


def label_points(
    axes: Axes,
    labels: Sequence[tuple[str, float, float, str]],
    paths: Sequence[Sequence[tuple[float, float]]] = (),
) -> None:
    """Write a text in a color beside every (x, y), where it hides no point, no line and no other text.

    The limits of the axes must be final.

    Args:
        axes: to write on.
        labels: text, x, y and color.
        paths: the lines, as the points that they connect.
    """
    figure = axes.figure
    assert figure is not None
    figure.draw_without_rendering()  # type: ignore[union-attr]
    scale = figure.dpi / 72
    points = [axes.transData.transform((x, y)) for _, x, y, _ in labels]
    taken = [(px - 5 * scale, py - 5 * scale, px + 5 * scale, py + 5 * scale) for px, py in points]
    # lines are rows of small boxes
    for path in paths:
        ends = [axes.transData.transform(point) for point in path]
        for (ax, ay), (bx, by) in pairwise(ends):
            steps = max(int(math.hypot(bx - ax, by - ay) / (3 * scale)), 1)
            for i in range(steps + 1):
                px, py = ax + (bx - ax) * i / steps, ay + (by - ay) * i / steps
                taken.append((px - scale, py - scale, px + scale, py + scale))
    frame = axes.get_window_extent()
    for (text, x, y, color), (px, py) in zip(labels, points, strict=True):
        wide, high = (0.5 * scale * size for size in (5.5 * len(text), 10))
        boxes: list[tuple[float, int, tuple[float, float, float, float], tuple[float, float]]] = []
        for dx, dy in _AROUND:
            cx, cy = px + dx * scale, py + dy * scale
            box = (cx - wide, cy - high, cx + wide, cy + high)
            hidden = sum(_overlap(box, other) for other in taken)
            outside = max(0.0, frame.y0 - box[1]) + max(0.0, box[3] - frame.y1)
            boxes.append((hidden + outside * wide, len(boxes), box, (dx, dy)))
        _, _, box, offset = min(boxes)
        taken.append(box)
        far = math.hypot(*offset) > 15
        axes.annotate(
            text,
            (x, y),
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.5, "shrinkB": 3} if far else None,
            xytext=offset,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8,
            color=color,
        )


def _overlap(one: Sequence[float], two: Sequence[float]) -> float:
    """The area that two boxes have in common."""
    wide = min(one[2], two[2]) - max(one[0], two[0])
    high = min(one[3], two[3]) - max(one[1], two[1])
    return max(wide, 0.0) * max(high, 0.0)


FORMATS = ("svg", "pdf", "png")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format of its suffix, atomically.

    Args:
        figure: to write.
        path: ends with .png, .svg or .pdf.
    """
    from matplotlib import rc_context

    path = Path(path)
    kind = path.suffix[1:].lower()
    require(kind in FORMATS, f"the name of a picture must end with .png, .svg or .pdf, got {path.name!r}")
    # no dates and no random names: the same figure gives the same file
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    with rc_context({"svg.hashsalt": "seqboat"}), replacing(path) as stage:
        figure.savefig(stage, format=kind, dpi=110, metadata=metadata)


def write_figure(
    make: Callable[[Theme], Figure],
    path: str | Path,
    formats: Sequence[str] = ("svg", "png"),
    themes: Sequence[Theme] = THEMES,
) -> list[Path]:
    """Draw a figure in every theme and write it in every format.

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
