"""Figure 4: where in an image attention is activated, and with what confidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from seqboat.analysis.traces import load_examples, trace
from seqboat.core.checks import require
from seqboat.paper.tables import Make, Pictures, Record, Records
from seqboat.paper.target import ObservedTarget, OnProgress
from seqboat.paper.trial import Scale, Trial, table_run

IMAGES = 3
"""Images whose confidences are drawn."""
LAST = 2
"""Layers whose confidences are drawn: the last ones."""


class ConfidenceTarget(ObservedTarget):
    """A figure per task: images, and the confidence of every pixel in the last layers of each model."""

    def observe(self, run: Path, device: torch.device, progress: OnProgress | None = None) -> Record:
        examples = load_examples(run, "val", IMAGES)
        shape = examples.task.picture
        require(shape is not None, f"{run} has no images, but {examples.task.name}")
        batch = examples.batch(range(len(examples.dataset))).to(device)
        found = []
        for sample in trace(examples.model.to(device), examples.task.kind, batch):
            (sequence,) = sample.sequences
            layers = [
                None if layer is None else layer.confidence.reshape(shape).round(3).tolist()
                for layer in sequence.layers
            ]
            inputs = np.asarray(sequence.inputs, dtype=float).reshape(shape).round(3)
            found.append({"input": inputs.tolist(), "layers": layers})
        return {"pictures": found}

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        trials, found = self.trials(scale), self.found(scale, records)
        lines = []
        for task in dict.fromkeys(trial.task for trial in trials):
            own = [trial for trial in trials if trial.task == task]
            missing = [trial.title for trial in own if not found[trial.name]]
            if len(missing) == len(own):
                continue
            title = own[0].task_title
            lines += [f"### {title}", "", *([f"Not run: {', '.join(missing)}.", ""] if missing else [])]
            lines += pictures.show(_draw(own, found), f"-{task}", f"{self.title}, {title}")
        return lines


def _draw(trials: Sequence[Trial], records: Records) -> Make:
    """The models side by side; all of them have seen the same images."""
    from seqboat.figures import confidence_maps_figure

    maps, images = {}, []
    for trial in trials:
        if records[trial.name]:
            pictures = records[trial.name][0]["pictures"]
            images = [picture["input"] for picture in pictures]
            layers = len(pictures[0]["layers"])
            for number in range(max(0, layers - LAST), layers):
                if pictures[0]["layers"][number] is not None:
                    title = f"{trial.title}\nlayer {number + 1}"
                    maps[title] = [picture["layers"][number] for picture in pictures]
    return lambda theme: confidence_maps_figure(images, maps, theme=theme)


def _runs(scale: Scale) -> tuple[Trial, ...]:
    return (
        *(table_run("lra", row, "pathfinder", scale) for row in ("seqboat-full", "seqboat")),
        table_run("lra", "seqboat", "image", scale),
    )


CONFIDENCE = ConfidenceTarget(
    name="confidence",
    title="Confidence over images",
    where="figure 4",
    about="Confidence of activation of every pixel in the last two layers of SeqBoat-full and SeqBoat, for three "
    "images of the validation split; white where a pixel does not attend. The paper shows Pathfinder.",
    small=_runs("small"),
    paper=_runs("paper"),
)
