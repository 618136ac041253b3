"""Figures of what routers did: activation per layer, confidence, attention span, speed against quality.

After the figures of section 5 of the paper. All take plain numbers, and a theme, light or dark:

    activation_figure({"SeqBoat": {"ListOps": (rates, stds), ...}})         activation per layer and task
    confidence_maps_figure(images, {"layer 3": maps, "layer 4": maps})      confidence over images
    tradeoff_figure({"Image": {"SeqBoat": [Point(...), ...], ...}}, ...)    speed against accuracy by memory size
    span_figure({"Pathfinder": {16: (spans, stds), ...}})                   attention span per layer by memory size
    histogram_figure({"layer 1": (active, total), ...})                     probabilities of activation
    training_figure([{"step": 20, "activation": [...]}, ...])               activation over training
    lines_figure({"Image": {"SeqBoat": [(x, y), ...]}}, x=..., y=...)      any numbers, a line per model
    intervention_figure(...)                                                what a layer's attention contributes

    write_figure(lambda theme: span_figure(panels, theme=theme), "docs/images/span")
                                                                            span.svg, span.png, span-dark.svg, ...

matplotlib comes with the `report` extra and is imported when a figure is drawn. Markers, dashes and hatches repeat
what colors say. Confidences run from light to dark and can be read in gray; white always means "not activated". The
line colors are those of Okabe and Ito, which color-blind readers can tell apart. Axes of accuracy include chance.
"""

from __future__ import annotations

from seqboat.figures.files import FORMATS, save_figure, write_figure
from seqboat.figures.layers import (
    activation_figure,
    draw_activation,
    histogram_figure,
    span_figure,
    training_figure,
)
from seqboat.figures.models import (
    Point,
    curves_figure,
    intervention_figure,
    lines_figure,
    pareto_front,
    ratios_figure,
    tradeoff_figure,
)
from seqboat.figures.style import STYLES, THEMES, Style, Theme
from seqboat.figures.tokens import confidence_lines, confidence_maps_figure, demo_figure, draw_confidence

__all__ = [
    "FORMATS",
    "STYLES",
    "THEMES",
    "Point",
    "Style",
    "Theme",
    "activation_figure",
    "confidence_lines",
    "confidence_maps_figure",
    "curves_figure",
    "demo_figure",
    "draw_activation",
    "draw_confidence",
    "histogram_figure",
    "intervention_figure",
    "lines_figure",
    "pareto_front",
    "ratios_figure",
    "save_figure",
    "span_figure",
    "tradeoff_figure",
    "training_figure",
    "write_figure",
]
