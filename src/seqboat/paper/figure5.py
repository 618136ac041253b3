"""Figure 5: training time against validation accuracy, with working memories and chunks of several sizes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from seqboat.core.checks import require
from seqboat.paper import published
from seqboat.paper.published import CHANCE
from seqboat.paper.target import (
    Make,
    Pictures,
    Row,
    Rows,
    Target,
    mean_seconds,
    on_accelerator,
    rates_text,
    score_text,
    table,
    validation_scores,
)
from seqboat.paper.trial import CUT_SHORT, Scale, Trial, memory_sizes
from seqboat.plotting import (
    Theme,
    draw_chance,
    dress,
    label_points,
    legend,
    line_style,
    panels_figure,
    style_of,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show(trials: Sequence[Trial], rows: Rows, pictures: Pictures) -> list[str]:
    """A table and a panel for each task: a row and a point for every size."""
    return [*_tables(trials, rows), *pictures.show(_draw(trials, rows))]


def training_hours(row: Row) -> float | None:
    """What all steps of a run took: hours of wall time times GPUs, or processor hours on a CPU."""
    seconds = mean_seconds([row])
    if seconds is None:
        return None
    return float(
        seconds * row["curve"][-1][0] * (row["cost"]["processes"] if on_accelerator(row) else 1) / 3600
    )


def _tables(trials: Sequence[Trial], recorded: Rows) -> list[str]:
    lines = []
    for task in dict.fromkeys(trial.task for trial in trials):
        own = [trial for trial in trials if trial.task == task]
        models = list(dict.fromkeys(trial.title for trial in own))
        rows = []
        for size in sorted({trial.size or 0 for trial in own}):
            cells = [str(size)]
            for model in models:
                trial = next(t for t in own if t.title == model and t.size == size)
                found = recorded[trial.name]
                hours = [hours for hours in map(training_hours, found) if hours is not None]
                cells += [
                    score_text(validation_scores(found), found[0]["score"]["metric"]) if found else "not run",
                    f"{statistics.mean(hours):.2g}" if hours else "-",
                    rates_text(found[0]["activation"]) if found else "-",
                ]
            rows.append(cells)
        head = [f"{own[0].task_title}, memory or chunk"]
        for model in models:
            head += [model, "hours", "active %"]
        lines += table(head, rows)
    return lines


def _draw(trials: Sequence[Trial], recorded: Rows) -> Make | None:
    panels: dict[str, dict[str, list[Point]]] = {}
    gpu = any(on_accelerator(r) for found in recorded.values() for r in found)
    for trial in trials:
        found = [r for r in recorded[trial.name] if on_accelerator(r) == gpu]
        hours = [hours for hours in map(training_hours, found) if hours is not None]
        if hours:
            scores = [100 * score for score in validation_scores(found)]
            std = statistics.stdev(scores) if len(scores) > 1 else None
            point = Point(trial.size or 0, statistics.mean(hours), statistics.mean(scores), std)
            panels.setdefault(trial.task_title, {}).setdefault(trial.title, []).append(point)
    if not panels:
        return None
    chance = {trial.task_title: 100 * CHANCE[trial.task] for trial in trials if trial.task in CHANCE}
    slowest = max(
        point.time for families in panels.values() for points in families.values() for point in points
    )
    unit, factor = ("hours", 1) if slowest >= 2 else ("minutes", 60)
    scaled = {
        task: {
            title: [point._replace(time=factor * point.time) for point in points]
            for title, points in families.items()
        }
        for task, families in panels.items()
    }
    return lambda theme: tradeoff_figure(
        scaled,
        time=f"training, {'GPU' if gpu else 'processor'} {unit} (faster to the right)",
        score="validation accuracy, %",
        chance=chance,
        theme=theme,
    )


class Point(NamedTuple):
    """One model in a plot of time against quality."""

    size: int
    """of its memory or of its chunks"""
    time: float
    score: float
    std: float | None = None
    """of the score over seeds"""


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both time and score."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.time, -p.score)):
        if not front or point.score > front[-1].score:
            front.append(point)
    return front


def tradeoff_figure(
    panels: Mapping[str, Mapping[str, Sequence[Point]]],
    *,
    time: str,
    score: str,
    chance: Mapping[str, float] | None = None,
    theme: Theme = "light",
) -> Figure:
    """Time against quality, a line per family of models, with the memory size beside every point.

    Points on the common front, which none beats in both, have a ring around them.

    Args:
        panels: by title, points of each family.
        time: label of the horizontal axis, whose fast end is to the right.
        score: label of the vertical axis.
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
                [point.time for point in ordered],
                [point.score for point in ordered],
                error if any(error) else None,
                capsize=2,
                elinewidth=0.8,
                label=name,
                **look,
            )
            labels += [(str(point.size), point.time, point.score, look["color"]) for point in ordered]
            paths.append([(point.time, point.score) for point in ordered])
        front = pareto_front(everyone)
        axes.plot(
            [point.time for point in front],
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
        axes.set_xlim(left=0)
        axes.invert_xaxis()
        axes.set_xlabel(time)
        axes.set_ylabel(score)
        legend(axes, style, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=len(families) + 1)
        label_points(axes, labels, paths)
    return figure


def _runs(scale: Scale) -> tuple[Trial, ...]:
    return tuple(
        trial
        for task in ("image", "pathfinder")
        for row in ("seqboat", "mega-chunk")
        for trial in memory_sizes(task, row, scale)
    )


TRADEOFF = Target(
    name="tradeoff",
    title="Speed against accuracy",
    where="figure 5",
    about="SeqBoat with several sizes of working memory, and MEGA-chunk with several sizes of chunks. Accuracy is "
    "the best on the validation split. Hours are those of all training steps without evaluations: wall time times "
    f"the number of GPUs, or processor time on a CPU. {published.TRADEOFF}",
    cut=f"{CUT_SHORT} Sequences have 256 tokens, so memories of 16 to 128; one seed instead of three.",
    small=_runs("small"),
    paper=_runs("paper"),
    show=show,
)
