"""Figure 3: the fraction of tokens that attend, by layer and task."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from seqboat.analysis.measures import measure
from seqboat.analysis.traces import load_examples
from seqboat.paper.published import LRA_TASKS, OBSERVED_SEQUENCES
from seqboat.paper.tables import Make, Pictures, Record, Records, table
from seqboat.paper.target import ObservedTarget, OnProgress
from seqboat.paper.trial import Scale, Trial, table_run
from seqboat.training.evaluate import Windows

IDLE = 0.001
"""Activation rate below which a layer counts as working without attention."""


def observe_layers(
    run: Path,
    device: torch.device,
    progress: OnProgress | None = None,
    sequences: int = OBSERVED_SEQUENCES,
    reading: Windows | None = None,
) -> Record:
    """Activation rate and attention span of every layer: mean and std over sequences; None without a router."""
    examples = load_examples(run, "val", sequences, reading=reading)
    measures = measure(examples, "val", weighted=False, reading=reading, device=device, progress=progress)
    return {
        "sequences": measures.sequences,
        "rates": [layer and [layer.rate.mean, layer.rate.std] for layer in measures.layers],
        "spans": [layer and layer.span and [layer.span.mean, layer.span.std] for layer in measures.layers],
    }


class ActivationTarget(ObservedTarget):
    """Rates of all layers, and whether the upper ones attend more than the lower ones."""

    def observe(self, run: Path, device: torch.device, progress: OnProgress | None = None) -> Record:
        return observe_layers(run, device, progress)

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        trials, found = self.trials(scale), self.found(scale, records)
        lines = []
        for model in dict.fromkeys(trial.title for trial in trials):
            own = [trial for trial in trials if trial.title == model]
            lines += _table(model, own, found)
        return [*lines, *pictures.show(_draw(trials, found))]


def _table(model: str, trials: Sequence[Trial], records: Records) -> list[str]:
    ran = [trial for trial in trials if records[trial.name]]
    if not ran:
        return [f"{model}: not run.", ""]
    layers = max(len(records[trial.name][0]["rates"]) for trial in ran)
    rows, idle, upward = [], [], []
    for trial in trials:
        name = trial.task_title
        if not records[trial.name]:
            rows.append([name, *("-" for _ in range(layers)), "not run", "-"])
            continue
        rates = [rate for rate in records[trial.name][0]["rates"] if rate is not None]
        half = len(rates) // 2
        lower, upper = (
            statistics.mean(r[0] for r in part) for part in (rates[:half], rates[len(rates) - half :])
        )
        shown = [f"{100 * mean:.1f} ± {100 * std:.1f}" for mean, std in rates]
        rows.append(
            [name, *shown, *["-"] * (layers - len(shown)), f"{100 * lower:.1f}", f"{100 * upper:.1f}"]
        )
        idle += [f"{name} layer {i}" for i, (mean, _) in enumerate(rates, start=1) if mean < IDLE]
        if upper > lower:
            upward.append(name)
    head = [f"{model}, active %", *(f"layer {i}" for i in range(1, layers + 1)), "lower half", "upper half"]
    return [
        *table(head, rows),
        f"- The upper half of the layers attends more than the lower one in {len(upward)} of {len(ran)} tasks"
        + (f": {', '.join(upward)}." if upward else "."),
        "- Layers in which fewer than one token in a thousand attends, so that the state-space layer works alone: "
        + (f"{', '.join(idle)}." if idle else "none."),
        "",
    ]


def _draw(trials: Sequence[Trial], records: Records) -> Make:
    from seqboat.figures import activation_figure

    panels: dict[str, dict[str, Any]] = {}
    for trial in trials:
        if records[trial.name]:
            rates = [rate or (None, None) for rate in records[trial.name][0]["rates"]]
            tasks = panels.setdefault(trial.title, {})
            tasks[trial.task_title] = [mean for mean, _ in rates], [std for _, std in rates]
    return lambda theme: activation_figure(panels, theme=theme)


def _runs(scale: Scale) -> tuple[Trial, ...]:
    return (
        *(table_run("lra", "seqboat-full", task, scale) for task in LRA_TASKS),
        *(table_run("lra", "seqboat", task, scale) for task in LRA_TASKS),
        table_run("speech", "seqboat", "speech", scale),
        table_run("enwik8", "seqboat", "enwik8", scale),
    )


ACTIVATION = ActivationTarget(
    name="activation",
    title="Activation by layer and task",
    where="figure 3",
    about="Fraction of the tokens that attend in each layer: mean and standard deviation over "
    f"{OBSERVED_SEQUENCES} sequences of the validation split. The paper shows SeqBoat-full on the Long Range Arena; "
    "SeqBoat and the other tasks are ours.",
    small=_runs("small"),
    paper=_runs("paper"),
)
