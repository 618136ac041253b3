"""Figure 5: training time against validation accuracy, with working memories and chunks of several sizes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from seqboat.paper import published
from seqboat.paper.published import CHANCE
from seqboat.paper.tables import (
    Make,
    Pictures,
    Record,
    Records,
    mean_seconds,
    on_accelerator,
    rates_text,
    score_text,
    table,
    validation_scores,
)
from seqboat.paper.target import ScoredTarget
from seqboat.paper.trial import CUT_SHORT, Scale, Trial, memory_sizes


class TradeoffTarget(ScoredTarget):
    """A table and a panel for each task: a row and a point for every size."""

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        trials, found = self.trials(scale), self.found(scale, records)
        return [*_tables(trials, found), *pictures.show(_draw(trials, found))]


def training_hours(record: Record) -> float | None:
    """What all steps of a run took: hours of wall time times GPUs, or processor hours on a CPU."""
    seconds = mean_seconds([record])
    if seconds is None:
        return None
    steps = record["curve"][-1][0]
    return seconds * steps * (record.get("processes", 1) if on_accelerator(record) else 1) / 3600


def _tables(trials: Sequence[Trial], records: Records) -> list[str]:
    lines = []
    for task in dict.fromkeys(trial.task for trial in trials):
        own = [trial for trial in trials if trial.task == task]
        models = list(dict.fromkeys(trial.title for trial in own))
        rows = []
        for size in sorted({trial.size or 0 for trial in own}):
            cells = [str(size)]
            for model in models:
                trial = next(t for t in own if t.title == model and t.size == size)
                found = records[trial.name]
                hours = [hours for hours in map(training_hours, found) if hours is not None]
                cells += [
                    score_text(validation_scores(found), found[0]["metric"]) if found else "not run",
                    f"{statistics.mean(hours):.2g}" if hours else "-",
                    rates_text(found[0]["activation"]) if found else "-",
                ]
            rows.append(cells)
        head = [f"{own[0].task_title}, memory or chunk"]
        for model in models:
            head += [model, "hours", "active %"]
        lines += table(head, rows)
    return lines


def _draw(trials: Sequence[Trial], records: Records) -> Make | None:
    from seqboat.figures import Point, tradeoff_figure

    panels: dict[str, dict[str, list[Point]]] = {}
    gpu = any(on_accelerator(r) for found in records.values() for r in found)
    for trial in trials:
        found = [r for r in records[trial.name] if on_accelerator(r) == gpu]
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
        point.speed for families in panels.values() for points in families.values() for point in points
    )
    unit, factor = ("hours", 1) if slowest >= 2 else ("minutes", 60)
    scaled = {
        task: {
            title: [point._replace(speed=factor * point.speed) for point in points]
            for title, points in families.items()
        }
        for task, families in panels.items()
    }
    return lambda theme: tradeoff_figure(
        scaled,
        speed=f"training, {'GPU' if gpu else 'processor'} {unit} (faster to the right)",
        score="validation accuracy, %",
        faster="low",
        chance=chance,
        theme=theme,
    )


def _runs(scale: Scale) -> tuple[Trial, ...]:
    return tuple(
        trial
        for task in ("image", "pathfinder")
        for row in ("seqboat", "mega-chunk")
        for trial in memory_sizes(task, row, scale)
    )


TRADEOFF = TradeoffTarget(
    name="tradeoff",
    title="Speed against accuracy",
    where="figure 5",
    about="SeqBoat with several sizes of working memory, and MEGA-chunk with several sizes of chunks. Accuracy is "
    "the best on the validation split. Hours are those of all training steps without evaluations: wall time times "
    f"the number of GPUs, or processor time on a CPU. {published.TRADEOFF}",
    cut=f"{CUT_SHORT} Sequences have 256 tokens, so memories of 16 to 128; one seed instead of three.",
    small=_runs("small"),
    paper=_runs("paper"),
)
