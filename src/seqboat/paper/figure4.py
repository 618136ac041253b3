"""Figure 4: where in an image attention is activated, and with what confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from seqboat.analysis.traces import load_examples, trace
from seqboat.core.checks import require
from seqboat.paper.target import Make, OnProgress, Pictures, Rows, Target
from seqboat.paper.trial import Scale, Trial, table_run
from seqboat.plotting import Theme, new_figure, style_of
from seqboat.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES = 3
"""Images whose confidences are drawn."""
LAST = 2
"""Layers whose confidences are drawn: the last ones."""


def observe(run: Run, device: torch.device, progress: OnProgress | None = None) -> dict[str, Any]:
    """Images, and the confidence of every pixel in all layers."""
    examples = load_examples(run.path, "val", IMAGES)
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


def show(trials: Sequence[Trial], found: Rows, pictures: Pictures) -> list[str]:
    """A figure per task: images, and the confidence of every pixel in the last layers of each model."""
    lines = []
    for task in dict.fromkeys(trial.task for trial in trials):
        own = [trial for trial in trials if trial.task == task]
        missing = [trial.title for trial in own if not found[trial.name]]
        if len(missing) == len(own):
            continue
        title = own[0].task_title
        lines += [f"### {title}", "", *([f"Not run: {', '.join(missing)}.", ""] if missing else [])]
        lines += pictures.show(_draw(own, found), f"-{task}", f"{pictures.title}, {title}")
    return lines


def _draw(trials: Sequence[Trial], found: Rows) -> Make:
    """The models side by side; all of them have seen the same images."""
    maps, images = {}, []
    for trial in trials:
        if found[trial.name]:
            pictures = found[trial.name][0]["observed"]["confidence"]["pictures"]
            images = [picture["input"] for picture in pictures]
            layers = len(pictures[0]["layers"])
            for number in range(max(0, layers - LAST), layers):
                if pictures[0]["layers"][number] is not None:
                    title = f"{trial.title}\nlayer {number + 1}"
                    maps[title] = [picture["layers"][number] for picture in pictures]
    return lambda theme: confidence_maps_figure(images, maps, theme=theme)


def confidence_colors() -> tuple[object, object]:
    """A color map and a norm for confidences from one half to one; the lightest still differs from white."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    shades = colormaps["YlGnBu"](np.linspace(0.22, 0.95, 256))
    return LinearSegmentedColormap.from_list("confidence", list(map(tuple, shades))), Normalize(0.5, 1.0)


def confidence_maps_figure(
    images: Sequence[ArrayLike], maps: Mapping[str, Sequence[ArrayLike]], *, theme: Theme = "light"
) -> Figure:
    """Images, and beside them the confidence of every pixel in some layers; white where it is not activated.

    Args:
        images: (height, width) each, any range; a row of the figure per image.
        maps: by title, one (height, width) of confidences per image, zero where not activated.
        theme: light or dark.
    """
    from matplotlib.cm import ScalarMappable

    style = style_of(theme)
    require(len(images) > 0 and len(maps) > 0, "images and maps must not be empty")
    pictures = [np.asarray(image, dtype=float) for image in images]
    cmap, norm = confidence_colors()
    shade = ScalarMappable(norm=norm, cmap=cmap)  # type: ignore[arg-type]
    columns = 1 + len(maps)
    figure = new_figure(1.75 * columns + 0.9, 1.75 * len(pictures) + 0.4, style)
    grid = figure.subplots(len(pictures), columns, squeeze=False)
    for row, picture in enumerate(pictures):
        grid[row, 0].imshow(picture, cmap="gray", interpolation="nearest")
    grid[0, 0].set_title("input", fontsize=10)
    for column, (title, confidences) in enumerate(maps.items(), start=1):
        require(len(confidences) == len(pictures), f"{title} must hold {len(pictures)} maps")
        grid[0, column].set_title(title, fontsize=10)
        for row, values in enumerate(confidences):
            values = np.asarray(values, dtype=float)
            require(
                values.shape == pictures[row].shape,
                f"maps of {title} must have the shape of their image, {pictures[row].shape}, got {values.shape}",
            )
            colors = shade.to_rgba(values)
            colors[values <= 0] = 1.0
            grid[row, column].imshow(colors, interpolation="nearest")
    for axes in grid.flat:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.title.set_color(style.ink)
        axes.spines[:].set_color(style.faint)
    bar = figure.colorbar(shade, ax=grid, fraction=0.03, pad=0.02, ticks=[0.5, 0.75, 1.0])
    bar.set_label("confidence where activated", color=style.ink, fontsize=9)
    bar.ax.tick_params(colors=style.ink, labelsize=8)
    bar.outline.set_edgecolor(style.faint)
    return figure


def _runs(scale: Scale) -> tuple[Trial, ...]:
    return (
        *(table_run("lra", row, "pathfinder", scale) for row in ("seqboat-full", "seqboat")),
        table_run("lra", "seqboat", "image", scale),
    )


CONFIDENCE = Target(
    name="confidence",
    title="Confidence over images",
    where="figure 4",
    about="Confidence of activation of every pixel in the last two layers of SeqBoat-full and SeqBoat, for three "
    "images of the validation split; white where a pixel does not attend. The paper shows Pathfinder.",
    small=_runs("small"),
    paper=_runs("paper"),
    observe=observe,
    show=show,
)
