"""What a table or figure of the paper consists of, and the parts of a page that shows it.

target.trials("small")                            the runs that it needs
target.observe(run, device)                       what it needs of a finished run beyond its score
target.show(trials, rows, pictures)               its tables and figures as lines of a page
"""

from __future__ import annotations

import html
import importlib.util
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from seqboat.paper.trial import Scale, Trial
from seqboat.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from seqboat.plotting import Theme

Row = dict[str, Any]
"""What is known of a run: a line of results.jsonl."""
Rows = Mapping[str, Sequence[Row]]
"""Rows by the name of their trial, one for each seed; empty for trials that were not run."""
Make = Callable[["Theme"], "Figure"]
"""Draws a figure in a theme."""
OnProgress = Callable[[int, int], None]
"""Called with the batches done and all."""
Observe = Callable[[Run, torch.device, OnProgress | None], dict[str, Any]]
"""What a figure shows of a finished run, as plain data."""


class Pictures(NamedTuple):
    """Where the figures of a target go."""

    folder: Path
    """of the page"""
    name: str
    """of the files"""
    title: str
    """for readers who do not see it"""

    def show(self, make: Make | None, suffix: str = "", title: str = "") -> list[str]:
        """Draw a figure in all its forms; returns the lines that show it.

        Args:
            make: draws it in a theme; None if there is nothing to draw.
            suffix: of the file names, where a target has several figures.
            title: if it is not the target's.
        """
        if make is None or importlib.util.find_spec("matplotlib") is None:
            return []
        from seqboat.plotting import write_figure

        name = self.name + suffix
        write_figure(make, self.folder / "images" / name, formats=("svg",))
        text = html.escape(title or self.title)
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="images/{name}-dark.svg">'
        return [f'<picture>{dark}<img alt="{text}" src="images/{name}.svg"></picture>', ""]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A table or figure of the paper."""

    name: str
    title: str
    where: str
    """in the paper"""
    about: str
    """what to look at; a sentence or two for the page"""
    cut: str = ""
    """what the small trials leave out beyond their recipes"""
    small: tuple[Trial, ...] = ()
    paper: tuple[Trial, ...] = ()
    observe: Observe | None = None
    """what it needs of a run beyond its score"""
    show: Callable[[Sequence[Trial], Rows, Pictures], list[str]]
    """tables and figures as lines of the page, from the rows of some trials, of which at least one was run"""

    def trials(self, scale: Scale) -> tuple[Trial, ...]:
        """What is trained at one scale."""
        return self.small if scale == "small" else self.paper


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


def on_accelerator(row: Row) -> bool:
    """Whether a run was trained on something else than a CPU."""
    return row.get("device") not in (None, "cpu")


def mean_seconds(rows: Sequence[Row]) -> float | None:
    """Seconds of a training step, on average: wall time on a GPU, processor time on a CPU."""
    fields = ["seconds" if on_accelerator(row) else "processor_seconds" for row in rows]
    known = [row["cost"][field] for row, field in zip(rows, fields, strict=True) if row["cost"].get(field)]
    return statistics.mean(known) if known else None


def scores_text(rows: Sequence[Row]) -> str:
    """The score on the test split: mean, and std over seeds."""
    return score_text([row["score"]["value"] for row in rows], rows[0]["score"]["metric"])


def validation_scores(rows: Sequence[Row]) -> list[float]:
    """The best score on the validation split of every run."""
    return [
        (max if row["score"]["better"] == "higher" else min)(score for _, score in row["curve"])
        for row in rows
    ]
