"""Parts of the results page: tables, scores and figures as lines of Markdown."""

from __future__ import annotations

import html
import importlib.util
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from seqboat.figures import Theme

Record = dict[str, Any]
Records = Mapping[str, Sequence[Record]]
"""Records of a target by the name of their trial."""
Make = Callable[["Theme"], "Figure"]
"""Draws a figure in a theme."""


@contextmanager
def showing(*files: Path) -> Iterator[None]:
    """Name the files behind a page if their records cannot be shown.

    A record that was edited or damaged may lack any field, or have a value of another kind.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        names = ", ".join(map(str, files))
        raise ValueError(f"{names}: a record cannot be shown: {type(error).__name__}: {error}") from error


class Pictures(NamedTuple):
    """Where the figures of a target go."""

    folder: Path
    """of the page"""
    redraw: bool
    """whether existing ones are drawn again"""
    name: str
    """of the files"""
    title: str
    """for readers who do not see it"""

    def show(self, make: Make | None, suffix: str = "", title: str = "") -> list[str]:
        """Draw a figure in all its forms, if need be; returns the lines that show it.

        Args:
            make: draws it in a theme; None if there is nothing to draw.
            suffix: of the file names, where a target has several figures.
            title: if it is not the target's.
        """
        if make is None or importlib.util.find_spec("matplotlib") is None:
            return []
        from seqboat.figures import write_figure

        name = self.name + suffix
        path = self.folder / "images" / name
        if self.redraw or not path.with_suffix(".svg").exists():
            write_figure(make, path)
        text = html.escape(title or self.title)
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="images/{name}-dark.svg">'
        return [f'<picture>{dark}<img alt="{text}" src="images/{name}.svg"></picture>', ""]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table and an empty line."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:], ""]


def score_text(values: Sequence[float], metric: str) -> str:
    """Mean, and std over seeds, in the unit of the paper's tables."""
    mean = statistics.mean(values)
    std = statistics.stdev(values) if len(values) > 1 else math.nan
    if metric == "accuracy":
        return f"{100 * mean:.1f} %" + (f" ± {100 * std:.1f}" if len(values) > 1 else "")
    return f"{mean:.3f} {metric}" + (f" ± {std:.3f}" if len(values) > 1 else "")


def rates_text(activation: Sequence[float | None]) -> str:
    """Activation per layer, in percent."""
    return " ".join("-" if rate is None else f"{100 * rate:.0f}" for rate in activation)


def ratio_text(ratio: float | None, digits: int = 2) -> str:
    """A multiple of something; a dash where there is none."""
    return "-" if ratio is None else f"{ratio:.{digits}f}x"


def on_accelerator(record: Record) -> bool:
    """Whether a run was trained on something else than a CPU."""
    return record.get("device") not in (None, "cpu")


def mean_seconds(records: Sequence[Record]) -> float | None:
    """Seconds of a training step, on average: wall time on a GPU, processor time on a CPU."""
    fields = ["step_wall_seconds" if on_accelerator(r) else "step_seconds" for r in records]
    known = [r[field] for r, field in zip(records, fields, strict=True) if r.get(field)]
    return statistics.mean(known) if known else None


def validation_scores(records: Sequence[Record]) -> list[float]:
    """The best score on the validation split of every run."""
    return [(max if r["better"] == "higher" else min)(score for _, score in r["curve"]) for r in records]
