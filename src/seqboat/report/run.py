"""What a run did, as numbers and as one HTML page: scores, curves, activation, and samples to explore.

    found = collect(run, split="test")             found.numbers is plain data: what `seqboat report --json` prints
    page = report_page(found)                      the same as a page, with an explorer of samples

Like section 5 of the paper, the page answers "how much attention is needed?" from activations.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqboat.analysis.measures import activation_curve, measure
from seqboat.analysis.traces import load_examples
from seqboat.core.checks import check_positive
from seqboat.report.charts import activation_charts, curve_charts, value_in
from seqboat.report.page import (
    Chart,
    Html,
    Numbers,
    asset,
    day_text,
    element,
    explained,
    figure,
    join,
    score_unit,
    settings_table,
    spell,
    table,
    tiles,
    write_page,
)
from seqboat.report.samples import PAGE_BYTES, PackedSamples, Sample, collect_samples, explorer, pack_samples
from seqboat.run import Run
from seqboat.tasks.outcomes import Outcomes, macro_f1
from seqboat.tasks.task import Split, Task, draw_subset
from seqboat.training.checkpoint import STATE
from seqboat.training.display import NO_SCORES
from seqboat.training.settings_io import to_dict

# settings, speed, curves and held-out scores

POINTS = 160
"""Maximum number of points in a curve; longer ones are averaged in groups."""


def describe_run(run: Path | str, which: str = "best") -> Numbers:
    """Everything in a run's folder as plain data; needs no dataset.

    Args:
        run: the run's folder, or one checkpoint in it.
        which: "best" or "latest".
    """
    source = Run(run, which)
    checkpoint, config, about, records = source.checkpoint, source.config, source.about, source.metrics
    task = config.build_task()
    written = datetime.fromtimestamp((checkpoint.path / STATE).stat().st_mtime, UTC)
    return {
        "run": str(run),
        "name": source.folder.resolve().name,
        "recipe": config.recipe,
        "task": task.name,
        "kind": task.kind,
        "mixer": to_dict(config)["model"]["mixer"]["name"],
        "layers": config.model.num_layers,
        "d_model": config.model.d_model,
        "step": checkpoint.step,
        "steps": config.schedule.steps,
        "date": written.isoformat(timespec="seconds"),
        "seed": config.seed,
        "parameters": about.get("parameters") or _count_parameters(source.weights),
        "versions": about.get("versions") or checkpoint.state.get("versions") or {},
        "commit": about.get("commit"),
        "metric": task.metric,
        "better": task.better,
        "settings": flatten(to_dict(config)),
        "training": _training(records),
        "curves": _curves(records),
        "held_out": _held_out(records, checkpoint.step),
        "baselines": about.get("baselines"),
    }


def _count_parameters(weights: Mapping[str, Tensor]) -> int:
    return sum(part.numel() for part in weights.values() if part.is_floating_point())


def flatten(data: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Settings by their dotted names.

    >>> flatten({"seed": 1, "model": {"d_model": 8}})
    {'seed': 1, 'model.d_model': 8}
    """
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{where}.{key}" if where else key
        flat |= flatten(value, name) if isinstance(value, Mapping) else {name: value}
    return flat


def _training(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Speed, memory and duration of training; None if not recorded."""

    def values(name: str) -> list[float]:
        return [r[name] for r in records if isinstance(r.get(name), int | float)]

    speed, memory = values("tokens_per_s"), values("memory_mb")
    # both count from the beginning of the run
    clock, processor = values("elapsed"), values("processor")
    return {
        "tokens_per_s": statistics.median(speed) if speed else None,
        "memory_mb": max(memory) if memory else None,
        "minutes": max(clock) / 60 if clock else None,
        "processor_minutes": max(processor) / 60 if processor else None,
    }


def _scores(record: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in record.items() if k not in NO_SCORES and isinstance(v, int | float)}


def _curves(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[list[Any]]]]:
    """Points (step, value) by metric and split; activation, with one value per layer, is one of the metrics."""
    curves: dict[str, dict[str, list[list[Any]]]] = {}
    for record in records:
        split = str(record.get("split", "train"))
        found: dict[str, Any] = _scores(record)
        if isinstance(record.get("activation"), list):
            found["activation"] = record["activation"]
        for name, value in found.items():
            curves.setdefault(name, {}).setdefault(split, []).append([record.get("step", 0), value])
    return {name: {split: thin(points) for split, points in parts.items()} for name, parts in curves.items()}


def thin(points: Sequence[Sequence[Any]], most: int = POINTS) -> list[list[Any]]:
    """Reduce to at most `most` points by averaging groups; a group keeps its last step.

    >>> thin([[1, 2.0], [2, 4.0], [3, 6.0], [4, 8.0]], most=2)
    [[2, 3.0], [4, 7.0]]
    """
    size = -(-len(points) // most)
    groups = (
        [points[i : i + size] for i in range(0, len(points), size)] if size > 1 else [[p] for p in points]
    )
    return [[group[-1][0], _mean([p[1] for p in group])] for group in groups]


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], list):
        return [_mean(column) for column in zip(*values, strict=False)]
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def _held_out(records: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any] | None:
    """Held-out scores recorded in training for a checkpoint, or else the last ones."""
    scored = [r for r in records if r.get("split") in ("val", "test")]
    own = [r for r in scored if r.get("step") == step] or scored
    if not own:
        return None
    last = own[-1]
    return {
        "split": last["split"],
        "step": last["step"],
        "scores": _scores(last),
        "activation": last["activation"] if isinstance(last.get("activation"), list) else None,
    }


# scores and activations


class Collected(NamedTuple):
    """A run's numbers, and samples to explore."""

    numbers: Numbers
    """the report as plain data"""
    samples: list[Sample]
    """empty if no layer has a router"""
    task: Task
    """the task, which describes their tokens"""


def collect(
    run: Path | str,
    split: Split = "test",
    samples: int = 20,
    limit: int | None = None,
    *,
    which: str = "best",
    fields: Sequence[str] = (),
    device: torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Collected:
    """Measure a run on one of its splits.

    Args:
        run: the run's folder, or one checkpoint in it.
        split: of its task.
        samples: number of examples for the explorer, spread over the split.
        limit: maximum number of examples to measure, a fixed random sample.
        which: "best" or "latest".
        fields: overrides of the data settings, as arguments `--data.x=value`.
        device: where to compute; the CPU by default.
        progress: called with the number of batches done and the total.
    """
    check_positive("samples", samples, least=0)
    numbers = describe_run(run, which)
    examples = load_examples(run, split, limit, which, fields)
    outcomes = Outcomes(examples.task)
    measures = measure(examples, split, device=device, progress=progress, observe=outcomes.add)
    numbers["outcomes"] = outcomes.result()
    numbers["measures"] = replace(
        measures, run=str(run), training=tuple(activation_curve(Run(run).folder))
    ).to_record()
    routed = any(layer is not None for layer in measures.layers)
    some = examples._replace(dataset=draw_subset(examples.dataset, max(samples, 1)))
    return Collected(numbers, collect_samples(some, samples) if routed else [], examples.task)


# the page


def report_page(found: Collected) -> str:
    """A run as a page."""
    numbers = found.numbers
    measures = numbers["measures"]
    layers = [f"layer {i + 1}" for i in range(len(measures["layers"]))]
    routed = any(layer is not None for layer in measures["layers"])
    charts = activation_charts(measures, layers) if routed else {}
    sections = [("summary", "Summary", _summary(numbers))]
    scores, matrices = scores_section(numbers["outcomes"])
    if scores is not None:
        sections.append(("scores", "Scores", scores))
    if routed:
        pictures = join(figure(key, chart) for key, chart in charts.items())
        content = element(
            "section",
            element("div", element("h2", "Layers"), _layer_table(measures, layers), class_="card"),
            element("div", pictures, class_="charts"),
            id="activation",
        )
        sections.append(("activation", "Activation", content))
    if found.samples:
        sections.append(("explorer", "Explorer", Html(asset("explorer.html"))))
    curves = curve_charts(numbers, layers)
    if curves:
        content = element(
            "section", *(figure(k, c) for k, c in curves.items()), id="training", class_="charts"
        )
        sections.append(("training", "Training", content))
    sections.append(("settings", "Settings", _settings(numbers)))
    title, lead, charts = str(numbers["name"]), _lead(numbers), matrices | charts | curves
    if not found.samples:
        return write_page(title, lead, sections, charts)
    # samples get the space that the rest leaves
    rest = explorer(found.samples, found.task, PackedSamples([], 0, 1.0))
    room = PAGE_BYTES - len(write_page(title, lead, sections, charts, rest).encode())
    packed = pack_samples(found.samples, found.task, room)
    return write_page(
        title, lead, sections, charts, explorer(found.samples, found.task, packed), packed.texts
    )


def _layers(numbers: Numbers) -> str:
    return f"{numbers['layers']} layer{'' if numbers['layers'] == 1 else 's'}"


def _lead(numbers: Numbers) -> str:
    day = day_text(datetime.fromisoformat(numbers["date"]))
    return (
        f"{numbers['recipe'] or numbers['task']} · "
        f"{numbers['mixer']}, {_layers(numbers)} of width {numbers['d_model']} · "
        f"{spell(numbers['parameters'])} parameters · seed {numbers['seed']} · "
        f"step {spell(numbers['step'])} of {spell(numbers['steps'])}, {day} · {numbers['run']}"
    )


def _summary(numbers: Numbers) -> Html:
    measures, training = numbers["measures"], numbers["training"]
    metric, scores = numbers["metric"], measures["metrics"]
    others = ", ".join(f"{k} {spell(v, score_unit(k))}" for k, v in scores.items() if k != metric)
    examples = f"{spell(measures['examples'])} examples"
    if numbers["kind"] == "lm":
        examples += ", each from an empty state"
    items = [
        (
            f"{metric} on {measures['split']}",
            spell(scores.get(metric), score_unit(metric)),
            f"{examples}; {others}" if others else examples,
        )
    ]
    baseline = baseline_tile(numbers)
    if baseline is not None:
        items.append(baseline)
    rates = [layer["counts"]["rate"] for layer in measures["layers"] if layer is not None]
    if rates:
        busy = "mean of the layers with a router" if None in measures["layers"] else "mean of all layers"
        items.append(("activation", spell(statistics.fmean(s or 0.0 for s in rates), "percent"), busy))
    cost = cost_fraction(measures)
    if cost is not None:
        items.append(
            ("implied cost", spell(cost, "percent"), "matrix products, relative to all tokens active")
        )
    items.append(("parameters", spell(numbers["parameters"]), f"{_layers(numbers)} of {numbers['mixer']}"))
    if training["minutes"] is not None:
        speed = f"{spell(training['tokens_per_s'])} tokens/s, {spell(training['memory_mb'])} MB"
        items.append(("training", f"{training['minutes']:.1f} min", speed))
    return element("section", tiles(items), id="summary", aria_label="Summary")


def cost_fraction(measures: Mapping[str, Any]) -> float | None:
    """FLOPs of all measured layers, relative to the same layers with all tokens active."""
    costs = [layer["cost"] for layer in measures["layers"] if layer is not None and layer["cost"] is not None]
    always = sum(cost["always"] for cost in costs)
    return sum(cost["flops"] for cost in costs) / always if always else None


LAYER_HEADS = {
    "layer": "counted from the input",
    "module": "the module that the router activates; rates of the layer's other modules",
    "activated ± std": "fraction of the tokens of a sequence that are activated: mean and standard deviation over "
    "sequences",
    "tokens per sequence": "mean number of activated tokens of a sequence",
    "confidence": "mean probability that the router assigns to the tokens it activates",
    "temperature": "temperature of the router's softmax; high values keep its probabilities close to one half",
    "memory": "how many activated tokens a query can see (the window)",
    "span": "mean distance, in tokens of the sequence, from a query to the keys it can see",
    "weighted span": "the same distance, weighted by attention",
    "cost": "matrix products of the layer, relative to the same layer with all tokens active",
}
"""What the columns of the table of layers mean."""


def _layer_table(measures: Numbers, layers: Sequence[str]) -> Html:
    rows = []
    for name, layer in zip(layers, measures["layers"], strict=True):
        if layer is None:
            rows.append([name, "no router", *["-"] * 8])
            continue
        rate = f"{spell(layer['rate']['mean'], 'percent')} ± {spell(layer['rate']['std'], 'percent')}"
        window = "all" if layer["window"] is None else spell(layer["window"])
        rows.append(
            [
                name,
                ", ".join(
                    [
                        layer["module"],
                        *(f"{k} {spell(v['rate'], 'percent')}" for k, v in layer["others"].items()),
                    ]
                ),
                rate,
                spell(layer["active"]["mean"]),
                spell(layer["confidence"]),
                spell(layer["temperature"]),
                window,
                spell(value_in(layer, "span", "mean")),
                spell(value_in(layer, "weighted_span", "mean")),
                spell(value_in(layer, "cost", "fraction"), "percent"),
            ]
        )
    content = table(list(LAYER_HEADS), rows, "Measures of each layer", words=(1,), about=LAYER_HEADS)
    return element("div", content, explained(LAYER_HEADS))


def _settings(numbers: Numbers) -> Html:
    about = {
        "run": numbers["run"],
        "recipe": numbers["recipe"] or "none",
        "checkpoint": f"step {numbers['step']}, written {numbers['date']}",
        "commit": numbers["commit"] or "unknown",
        **{f"version of {name}": version for name, version in numbers["versions"].items()},
    }
    return element(
        "section",
        element("h2", "Settings"),
        settings_table(about, "The run"),
        element(
            "details",
            element("summary", "All settings of the run"),
            settings_table(numbers["settings"], "All settings"),
        ),
        id="settings",
        class_="card",
    )


# the answers

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
