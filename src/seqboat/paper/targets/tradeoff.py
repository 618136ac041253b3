"""Figure 5: speed against accuracy, with working memories and chunks of several sizes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from seqboat.paper import published
from seqboat.paper.tables import Make, Pictures, Record, Records, mean_seconds, rates_text, score_text, table
from seqboat.paper.targets.base import ScoredTarget
from seqboat.paper.trials import CUT_SHORT, Scale, Trial, memory_sizes


class TradeoffTarget(ScoredTarget):
    """A table and a panel for each task: a row and a point for every size."""

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        trials, found = self.trials(scale), self.found(scale, records)
        return [*_tables(trials, found), *pictures.show(_draw(trials, found))]


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
                seconds = mean_seconds(found)
                cells += [
                    score_text([r["test"] for r in found], found[0]["metric"]) if found else "not run",
                    f"{1000 * seconds:.0f}" if seconds else "-",
                    rates_text(found[0]["activation"]) if found else "-",
                ]
            rows.append(cells)
        head = [f"{task}, memory or chunk"]
        for model in models:
            head += [model, "ms per step", "active %"]
        lines += table(head, rows)
    return lines


def _draw(trials: Sequence[Trial], records: Records) -> Make | None:
    from seqboat.figures import Point, tradeoff_figure

    panels: dict[str, dict[str, list[Point]]] = {}
    for trial in trials:
        found = records[trial.name]
        seconds = mean_seconds(found)
        if seconds:
            scores = [100 * r["test"] for r in found]
            std = statistics.stdev(scores) if len(scores) > 1 else None
            point = Point(trial.size or 0, 1000 * seconds, statistics.mean(scores), std)
            panels.setdefault(trial.task, {}).setdefault(trial.title, []).append(point)
    if not panels:
        return None
    return lambda theme: tradeoff_figure(
        panels, speed="processor ms per step", score="test accuracy, %", faster="low", theme=theme
    )


TRADEOFF = TradeoffTarget(
    name="tradeoff",
    title="Speed against accuracy",
    where="figure 5",
    about="SeqBoat with working memories and MEGA-chunk with chunks of several sizes: accuracy on the test "
    f"split, and processor time per step. {published.TRADEOFF}",
    cut=f"{CUT_SHORT} Sequences have 256 tokens, so memories of 16 to 128; one seed instead of three.",
    small=memory_sizes("small"),
    paper=memory_sizes("paper"),
)
