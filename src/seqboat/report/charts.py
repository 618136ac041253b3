"""Chart specifications of a run as plain data: activation of its layers, and training curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seqboat.report.page import Chart, Numbers, score_unit

MODULES = ", the mean over the modules of a layer."
"""Appended to captions: training records the mean for layers with several modules."""


def value_in(layer: Mapping[str, Any] | None, *path: str) -> Any:
    """A value inside a layer's measures; None if any part of the path is missing."""
    found: Any = layer
    for name in path:
        found = None if found is None else found[name]
    return found


def activation_charts(measures: Numbers, layers: Sequence[str]) -> dict[str, Chart]:
    """Charts of the figures in section 5 of the paper, and of the other measures."""
    found = measures["layers"]
    busy = [(name, layer) for name, layer in zip(layers, found, strict=True) if layer is not None]
    names = [name for name, _ in busy]
    charts: dict[str, Chart] = {
        "activation": {
            "type": "bars",
            "title": "Activation per layer",
            "about": "Fraction of the tokens of a sequence that attend; whiskers: standard deviation over sequences.",
            "label": "layer",
            "unit": "percent",
            "most": 1,
            "none": "no router",
            "rows": list(layers),
            "series": [
                {
                    "name": "activated",
                    "values": [value_in(layer, "rate", "mean") for layer in found],
                    "errors": [value_in(layer, "rate", "std") for layer in found],
                }
            ],
        },
        "confidence": _confidence_chart(busy),
    }
    if any(layer["span"] is not None for _, layer in busy):
        charts["span"] = {
            "type": "bars",
            "title": "Attention span",
            "about": "Mean distance, in tokens of the sequence, from a query to the keys it can see, and the same "
            "weighted by attention; whiskers: standard deviation over sequences.",
            "label": "layer",
            "none": "no query",
            "rows": names,
            "series": [
                {
                    "name": title,
                    "values": [value_in(layer, key, "mean") for _, layer in busy],
                    "errors": [value_in(layer, key, "std") for _, layer in busy],
                }
                for title, key in (("visible keys", "span"), ("weighted by attention", "weighted_span"))
            ],
        }
    charts["class"] = _class_chart(measures, busy)
    return charts


def _confidence_chart(busy: Sequence[tuple[str, Numbers]]) -> Chart:
    bins = len(busy[0][1]["probabilities"])
    fractions, active = [], []
    for _, layer in busy:
        total = max(1, sum(part["total"] for part in layer["probabilities"]))
        fractions.append([part["total"] / total for part in layer["probabilities"]])
        active.append([part["active"] / total for part in layer["probabilities"]])
    return {
        "type": "rows",
        "title": "Confidence of the routers",
        "about": "Tokens by the probability that the router assigns to activating them; blue: activated.",
        "unit": "percent",
        "own": True,
        "xlabel": "probability of activation",
        "range": [0, 1],
        "bins": [f"{i / bins:.2f} to {(i + 1) / bins:.2f}" for i in range(bins)],
        "rows": [name for name, _ in busy],
        "values": fractions,
        "active": active,
    }


MATRIX_ROWS = 16
"""Maximum number of token kinds in a matrix; more are drawn as bars along an axis."""


def _class_chart(measures: Numbers, busy: Sequence[tuple[str, Numbers]]) -> Chart:
    classes = measures["classes"]
    present = [i for i in range(len(classes)) if any(layer["by_class"][i]["total"] for _, layer in busy)]
    names = [classes[i] for i in present]
    values = [[layer["by_class"][i]["rate"] for i in present] for _, layer in busy]
    about = "Fraction of the tokens of each kind that attend, in percent."
    if len(present) <= MATRIX_ROWS:
        return {
            "type": "matrix",
            "title": "Activation by kind of token",
            "about": about,
            "label": "kind",
            "unit": "percent",
            "rows": names,
            "columns": [name for name, _ in busy],
            "values": [list(row) for row in zip(*values, strict=True)],
        }
    rows = all(name.startswith("row ") for name in names)
    return {
        "type": "rows",
        "title": "Activation by row of the image" if rows else "Activation by kind of token",
        "about": about,
        "unit": "percent",
        "xlabel": "row" if rows else "kind",
        "range": [1, len(names) + 1],
        "bins": names,
        "rows": [name for name, _ in busy],
        "values": values,
    }


SMOOTHED_FROM = 20
"""Points from which a training curve is also drawn smoothed."""


def _curve(name: str, points: Sequence[Sequence[Any]], noisy: bool) -> list[Chart]:
    """A curve; one that scatters is drawn faintly, with its running mean on top."""
    lines: list[Chart] = [{"name": name, "points": points, "faint": noisy}]
    if noisy and len(points) >= SMOOTHED_FROM:
        lines.append({"name": f"{name}, smoothed", "points": smooth(points), "smooth": True})
    return lines


def smooth(points: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The centered running mean over a tenth of the points; at the ends over those that there are.

    >>> smooth([[step, float(step % 2)] for step in range(20)])[8:11]
    [[8, 0.6666666666666666], [9, 0.3333333333333333], [10, 0.6666666666666666]]
    """
    known = [point for point in points if point[1] is not None]
    reach = max(1, len(known) // 20)
    found = []
    for place, (step, _) in enumerate(known):
        near = [value for _, value in known[max(0, place - reach) : place + reach + 1]]
        found.append([step, sum(near) / len(near)])
    return found


def curve_charts(numbers: Numbers, layers: Sequence[str]) -> dict[str, Chart]:
    charts: dict[str, Chart] = {}
    words = {"train": "training", "val": "validation"}
    for score, parts in numbers["curves"].items():
        if score != "activation":
            charts[f"curve-{score}"] = {
                "type": "lines",
                "title": f"{score[0].upper()}{score[1:]} during training",
                "xlabel": "step",
                "unit": score_unit(score),
                "series": [
                    line
                    for split, points in parts.items()
                    for line in _curve(words.get(split, split), points, split == "train")
                ],
            }
    training = numbers["measures"]["training"]
    records = [r for r in training if r["split"] != "train"] or training
    several = any(layer is not None and layer["others"] for layer in numbers["measures"]["layers"])
    series = []
    for i, name in enumerate(layers):
        values = [[r["step"], r["activation"][i]] for r in records if i < len(r["activation"])]
        points = [point for point in values if point[1] is not None]
        if points:
            series.append({"name": name, "points": points})
    if series:
        charts["curve-activation"] = {
            "type": "lines",
            "title": "Activation during training",
            "about": "Fraction of tokens that are active "
            + ("in held-out data" if records is not training else "in training batches")
            + (MODULES if several else "."),
            "xlabel": "step",
            "unit": "percent",
            "least": 0,
            "series": series,
        }
    return charts
