"""The answers of a run on its page: baselines, scores of every class, confusions and the worst errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seqboat.report.page import Chart, Html, element, explained, figure, score_unit, spell, table
from seqboat.report.record import Numbers
from seqboat.tasks.outcomes import macro_f1

MATRIX_CLASSES = 24
"""Classes up to which a confusion matrix is drawn."""

CLASS_HEADS = {
    "class": "the label",
    "precision": "fraction of the predictions of this class that are right",
    "recall": "fraction of the examples of this class that were found",
    "F1": "2 · precision · recall / (precision + recall); the mean below weights all classes equally",
    "count": "examples of this class (tagging: tokens)",
    "predicted": "how often the class was predicted",
}
ERROR_HEADS = {
    "example": "its index in the split, counted from 0",
    "label": "the correct answer",
    "predicted": "the answer of the model",
    "probability": "the model's probability for its answer",
    "input": "beginning of the input",
}


def baseline_tile(numbers: Numbers) -> tuple[str, str, str] | None:
    """The best of the baselines as a tile; None without any."""
    found = numbers.get("baselines")
    if not isinstance(found, Mapping) or not found.get("scores"):
        return None
    metric, unit = found["metric"], score_unit(found["metric"])
    scores = {name: s[metric] for name, s in found["scores"].items() if s.get(metric) is not None}
    if not scores:
        return None
    best = (max if numbers["better"] == "higher" else min)(scores, key=lambda name: scores[name])
    others = [f"{name} {spell(score, unit)}" for name, score in scores.items() if name != best]
    return best, spell(scores[best], unit), "; ".join([f"baseline, {metric} on {found['split']}", *others])


def scores_section(outcomes: Mapping[str, Any]) -> tuple[Html | None, dict[str, Chart]]:
    """Scores of every class, confusions and the worst errors, with their charts; None if there is nothing to say."""
    parts: list[Html] = []
    charts: dict[str, Chart] = {}
    classes = outcomes.get("classes")
    if classes:
        parts.append(element("div", element("h2", "Classes"), _class_table(classes), class_="card"))
    confusion = outcomes.get("confusion")
    if classes and confusion and len(confusion) <= MATRIX_CLASSES:
        charts["confusion"] = confusion_chart([row["label"] for row in classes], confusion)
        parts.append(figure("confusion", charts["confusion"]))
    elif outcomes.get("confused"):
        rows = [[pair["label"], pair["predicted"], spell(pair["count"])] for pair in outcomes["confused"]]
        content = table(["label", "predicted", "count"], rows, "Most frequent confusions", words=(1,))
        parts.append(element("div", element("h2", "Most frequent confusions"), content, class_="card"))
    if outcomes.get("worst"):
        parts.append(
            element("div", element("h2", "Worst errors"), _error_table(outcomes["worst"]), class_="card")
        )
    return (element("section", *parts, id="scores") if parts else None), charts


def _class_table(classes: list[dict[str, Any]]) -> Html:
    keys = ("precision", "recall", "f1")
    rows = [
        [
            row["label"],
            *(spell(row[k], "percent") for k in keys),
            spell(row["count"]),
            spell(row["predicted"]),
        ]
        for row in classes
    ]
    rows.append(["mean", "", "", spell(macro_f1(classes), "percent"), "", ""])
    content = table(list(CLASS_HEADS), rows, "Scores of every class", about=CLASS_HEADS)
    return element("div", content, explained(CLASS_HEADS))


def confusion_chart(labels: list[str], confusion: list[list[int]]) -> Chart:
    """Labels by predictions: color by the fraction of the label, numbers are counts."""
    totals = [sum(row) for row in confusion]
    return {
        "type": "matrix",
        "title": "Confusion matrix",
        "about": "Rows are labels, columns are predictions. Numbers count examples (tagging: tokens); color shows "
        "their fraction of the row.",
        "label": "label",
        "unit": "percent",
        "rows": labels,
        "columns": labels,
        "values": [
            [count / total if total else None for count in row]
            for row, total in zip(confusion, totals, strict=True)
        ],
        "texts": [[spell(count) for count in row] for row in confusion],
    }


def _error_table(worst: list[dict[str, Any]]) -> Html:
    heads = dict(ERROR_HEADS)
    labeled = any(error["label"] is not None for error in worst)
    sure = any("probability" in error for error in worst)
    if not labeled:
        del heads["label"]
    if not sure:
        del heads["probability"]
    rows = []
    for error in worst:
        row: list[object] = [spell(error["example"])]
        row += [error["label"]] if labeled else []
        row.append(error["predicted"])
        row += [spell(error.get("probability"), "percent")] if sure else []
        rows.append([*row, error["input"]])
    names = list(heads)
    words = [i for i, name in enumerate(names) if name in ("label", "predicted", "input")]
    return element("div", table(names, rows, "Worst errors", words=words, about=heads), explained(heads))
