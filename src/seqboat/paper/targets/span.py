"""Figure 6: how far attention reaches, by layer and size of the working memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqboat.analysis.attention import local_span
from seqboat.paper.published import OBSERVED_SEQUENCES
from seqboat.paper.tables import Make, Pictures, Record, Records, table
from seqboat.paper.targets.activation import observe_layers
from seqboat.paper.targets.base import ObservedTarget, OnProgress
from seqboat.paper.trials import CUT_SHORT, Scale, Trial, memory_sizes


class SpanTarget(ObservedTarget):
    """A table and a panel for each task: a row and a line for every size of memory."""

    def observe(self, run: Path, progress: OnProgress | None = None) -> Record:
        return observe_layers(run, progress)

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        trials, found = self.trials(scale), self.found(scale, records)
        return [*_tables(trials, found), *pictures.show(_draw(trials, found))]


def _tables(trials: Sequence[Trial], records: Records) -> list[str]:
    lines = []
    for task in dict.fromkeys(trial.task for trial in trials):
        own = [trial for trial in trials if trial.task == task]
        layers = max((len(r["spans"]) for trial in own for r in records[trial.name]), default=0)
        rows = []
        for trial in own:
            cells = [str(trial.size), f"{_local_span(trial):.3g}"]
            found = records[trial.name]
            spans = found[0]["spans"] if found else ["not run"] * layers
            rows.append([*cells, *(_span_text(value) for value in spans)])
        head = [f"{task}, memory", "sliding window", *(f"layer {i}" for i in range(1, layers + 1))]
        lines += table(head, rows)
    return lines


def _local_span(trial: Trial) -> float:
    """The span of a window of the trial's size that slides over all tokens."""
    mixer: Any = trial.config(0).model.mixer
    return local_span(trial.size or 0, mixer.causal)


def _span_text(value: Any) -> str:
    """Mean and std; a dash where nothing attends."""
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value[0]:.1f} ± {value[1]:.1f}"


def _draw(trials: Sequence[Trial], records: Records) -> Make:
    from seqboat.figures import span_figure

    panels: dict[str, dict[int, list[float | None]]] = {}
    for trial in trials:
        if records[trial.name]:
            assert trial.size is not None
            spans = [value and value[0] for value in records[trial.name][0]["spans"]]
            panels.setdefault(trial.task, {})[trial.size] = spans
    local = {trial.size: _local_span(trial) for trial in trials if trial.size is not None}
    return lambda theme: span_figure(panels, local=local, theme=theme)


def _runs(scale: Scale) -> tuple[Trial, ...]:
    return tuple(trial for trial in memory_sizes(scale) if trial.title == "SeqBoat")


SPAN = SpanTarget(
    name="span",
    title="Attention span by layer and memory",
    where="figure 6",
    about="Mean distance, in tokens of the original sequence, from a query to the keys that it may see, over "
    f"{OBSERVED_SEQUENCES} sequences of the validation split: the SeqBoat runs of speed against accuracy. A window "
    "that slides over all tokens would reach a quarter of its size (half of it lies on either side), or half of "
    "it in causal layers. The paper shows Pathfinder and enwik8.",
    cut=CUT_SHORT,
    small=_runs("small"),
    paper=_runs("paper"),
)
