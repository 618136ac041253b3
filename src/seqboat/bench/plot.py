"""A plot of a sweep: time and memory against the swept field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from seqboat.bench.candidates import candidate_title
from seqboat.bench.layers import LayerRow
from seqboat.data.files import replacing

_MARKERS = "os^Dv<>PX*"
_DASHES = ("-", "--", ":", "-.")


def swept(rows: Sequence[LayerRow]) -> str:
    """The field of the settings with the most values, for the x axis."""
    return max(("length", "window", "rate"), key=lambda field: len({getattr(row, field) for row in rows}))


def plot(rows: Sequence[LayerRow], path: Path) -> None:
    """Time and memory per step, one line per candidate, both axes logarithmic.

    The x axis is the length, or the window or activation rate if that was swept.
    Lines differ in marker and dashes as well as in color.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    axis = swept(rows)
    places = sorted({getattr(row, axis) for row in rows if getattr(row, axis)})
    words = {
        "length": "tokens per sequence",
        "window": "working memory, tokens",
        "rate": "fraction of active tokens",
    }
    # other swept fields give separate lines
    others = [f for f in words if f != axis and len({getattr(row, f) for row in rows}) > 1]

    def line(row: LayerRow) -> str:
        return ", ".join([candidate_title(row.candidate), *(f"{f} {getattr(row, f)}" for f in others)])

    modes = list(dict.fromkeys(row.mode for row in rows))
    panels: list[tuple[str, Callable[[LayerRow], float]]] = [
        ("seconds per step", lambda row: row.seconds.median if row.seconds is not None else 0.0),
        ("peak memory, MiB", lambda row: (row.memory or 0) / 2**20),
    ]
    # a logarithmic axis needs at least one value
    panels = [panel for panel in panels if any(panel[1](row) > 0 for row in rows)]
    figure, axes = pyplot.subplots(
        len(panels), len(modes), figsize=(5.2 * len(modes), 3.5 * len(panels)), squeeze=False, sharex=True,
        layout="constrained",
    )  # fmt: skip
    for i, (quantity, value) in enumerate(panels):
        for j, mode in enumerate(modes):
            for k, label in enumerate(dict.fromkeys(map(line, rows))):
                own = [r for r in rows if line(r) == label and r.mode == mode and value(r) > 0]
                own = sorted((r for r in own if getattr(r, axis)), key=lambda row: float(getattr(row, axis)))
                # an empty line keeps colors the same in all panels
                style = _MARKERS[k % len(_MARKERS)] + _DASHES[k // len(_MARKERS) % len(_DASHES)]
                axes[i][j].plot(
                    [getattr(r, axis) for r in own], [value(r) for r in own], style, ms=5, label=label
                )
            axes[i][j].set(ylabel=quantity, title=mode if i == 0 else None)
            axes[-1][j].set(xlabel=words[axis])
            if not any(len(drawn.get_xdata()) for drawn in axes[i][j].lines):
                continue  # zero has no logarithm
            axes[i][j].set(xscale="log", yscale="log")
            axes[i][j].set_xticks(places, [f"{place:,g}" for place in places])
            axes[i][j].xaxis.set_minor_locator(NullLocator())
            axes[i][j].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes[i][j].yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            axes[i][j].yaxis.set_minor_formatter(NullFormatter())
            axes[i][j].grid(True, which="both", alpha=0.3)
    axes[0][0].legend(fontsize="small")
    with replacing(path) as stage:
        figure.savefig(stage, format="png", dpi=130)
    pyplot.close(figure)
