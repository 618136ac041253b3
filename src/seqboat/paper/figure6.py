"""Figure 6: how far attention reaches, by layer and size of the working memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from seqboat.analysis.attention import local_span
from seqboat.paper.figure3 import observe_layers
from seqboat.paper.published import OBSERVED_SEQUENCES
from seqboat.paper.tables import Make, Pictures, Record, Records, table
from seqboat.paper.target import ObservedTarget, OnProgress
from seqboat.paper.trial import CUT_SHORT, Scale, Trial, memory_sizes
from seqboat.run import Run
from seqboat.training.evaluate import Windows


class SpanTarget(ObservedTarget):
    """A table and a panel for each task: a row and a line for every size of memory."""

    def observe(self, run: Path, device: torch.device, progress: OnProgress | None = None) -> Record:
        if Run(run).task.kind != "lm":
            return observe_layers(run, device, progress)
        # as many queries as a sequence of 8,192 bytes has, each behind a context of at least 7,000
        reading = Windows()
        scored = reading.window - reading.context
        return observe_layers(run, device, progress, -(-reading.window // scored), reading)

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        trials, found = self.trials(scale), self.found(scale, records)
        return [*_tables(trials, found), *pictures.show(_draw(trials, found))]


def _tables(trials: Sequence[Trial], records: Records) -> list[str]:
    lines = []
    for task in dict.fromkeys(trial.task for trial in trials):
        own = [trial for trial in trials if trial.task == task]
        layers = max((len(r["spans"]) for trial in own for r in records[trial.name]), default=0)
        if not layers:
            lines += [f"{own[0].task_title}: not run.", ""]
            continue
        rows = []
        for trial in own:
            assert trial.size is not None
            cells = [str(trial.size), f"{local_span(trial.size):g}"]
            found = records[trial.name]
            spans = found[0]["spans"] if found else ["not run"] * layers
            rows.append([*cells, *(_span_text(value) for value in spans)])
        head = [
            f"{own[0].task_title}, memory",
            "sliding window",
            *(f"layer {i}" for i in range(1, layers + 1)),
        ]
        lines += table(head, rows)
    return lines


def _span_text(value: Any) -> str:
    """Mean and std; a dash where nothing attends."""
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value[0]:.1f} ± {value[1]:.1f}"


def _draw(trials: Sequence[Trial], records: Records) -> Make:
    from seqboat.figures import span_figure

    panels: dict[str, dict[int, Any]] = {}
    for trial in trials:
        if records[trial.name]:
            assert trial.size is not None
            spans = [value or (None, None) for value in records[trial.name][0]["spans"]]
            panels.setdefault(trial.task_title, {})[trial.size] = (
                [mean for mean, _ in spans],
                [std for _, std in spans],
            )
    local = {trial.size: local_span(trial.size) for trial in trials if trial.size is not None}
    return lambda theme: span_figure(panels, local=local, theme=theme)


def _runs(scale: Scale) -> tuple[Trial, ...]:
    return tuple(trial for task in ("pathfinder", "enwik8") for trial in memory_sizes(task, "seqboat", scale))


SPAN = SpanTarget(
    name="span",
    title="Attention span by layer and memory",
    where="figure 6",
    about="Mean distance, in tokens of the original sequence, from a query to the other keys that it can see. For "
    f"Pathfinder, the mean over {OBSERVED_SEQUENCES} sequences of the validation split; for enwik8, over seven "
    "windows of 8,192 bytes, each with 1,192 queries after a context of 7,000. As in the paper, the reference is "
    "half the size of a window that slides over all tokens.",
    cut=CUT_SHORT,
    small=_runs("small"),
    paper=_runs("paper"),
)
