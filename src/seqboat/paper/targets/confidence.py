"""Figure 4: where in an image attention is activated, and with what confidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from seqboat.analysis.traces import load_examples, trace
from seqboat.checks import require
from seqboat.paper.tables import Make, Pictures, Record
from seqboat.paper.targets.base import ObservedTarget, OnProgress
from seqboat.paper.trials import Scale, paper_runs

IMAGES = 3
"""Images whose confidences are drawn."""
LAST = 4
"""Layers whose confidences are drawn, at most."""
RUNS = ("image", "pathfinder")


class ConfidenceTarget(ObservedTarget):
    """A figure per task: images, and the confidence of every pixel in the last layers."""

    def observe(self, run: Path, progress: OnProgress | None = None) -> Record:
        examples = load_examples(run, "val", IMAGES)
        shape = examples.task.picture
        require(shape is not None, f"{run} has no images, but {examples.task.name}")
        found = []
        for sample in trace(examples.model, examples.task.kind, examples.batch(range(len(examples.dataset)))):
            (sequence,) = sample.sequences
            layers = [
                None if layer is None else layer.confidence.reshape(shape).round(3).tolist()
                for layer in sequence.layers
            ]
            inputs = np.asarray(sequence.inputs, dtype=float).reshape(shape).round(3)
            found.append({"input": inputs.tolist(), "layers": layers})
        return {"pictures": found}

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        lines = []
        for trial in self.trials(scale):
            found = self.found(scale, records)[trial.name]
            if found:
                lines += [f"### {trial.title}", ""]
                lines += pictures.show(_draw(found[0]), f"-{trial.name}", f"{self.title}, {trial.title}")
        return lines


def _draw(record: Record) -> Make:
    from seqboat.figures import confidence_maps_figure

    pictures = record["pictures"]
    layers = len(pictures[0]["layers"])
    maps = {
        f"layer {number + 1}": [picture["layers"][number] for picture in pictures]
        for number in range(max(0, layers - LAST), layers)
        if pictures[0]["layers"][number] is not None
    }
    return lambda theme: confidence_maps_figure([p["input"] for p in pictures], maps, theme=theme)


CONFIDENCE = ConfidenceTarget(
    name="confidence",
    title="Confidence over images",
    where="figure 4",
    about="Confidence of activation of every pixel in the last layers, for three images of the validation "
    "split; white where a pixel does not attend. The paper shows Pathfinder.",
    small=paper_runs("small", *RUNS),
    paper=paper_runs("paper", *RUNS),
)
