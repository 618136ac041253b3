"""What a run did, as numbers and as one HTML page: scores, curves, activation, and samples to look into.

    found = collect(run, split="test")             found.numbers is plain data: what `seqboat report --json` prints
    page = report_page(found)                      the same as a page, with an explorer of samples

Section 5 of the paper answers "how much attention is needed?" by looking at activations; so does the page.
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
from seqboat.checks import check_positive
from seqboat.report.page import (
    Chart,
    Html,
    asset,
    day_text,
    element,
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
from seqboat.runs import Run
from seqboat.tasks.base import Split, Task, draw_subset
from seqboat.training.checkpoint import STATE
from seqboat.training.config import to_dict
from seqboat.training.display import NO_SCORES

POINTS = 160
"""Points of a curve; longer ones are averaged in groups of neighbours."""

MODULES = ", the mean over the modules of a layer."
"""What training records of layers that have more than their attention to activate."""

Numbers = dict[str, Any]


# what a run recorded


def describe_run(run: Path | str, which: str = "best") -> Numbers:
    """Everything that a run's folder says about it, without its data.

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
    """Speed, memory and time of training; None for what was not recorded."""

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
    """Points (step, value) by score and split; activation, one value per layer, is among the scores."""
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
    """At most so many points: neighbours are averaged, and stand at the last of their steps.

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
    """Scores of held-out data that training recorded for a checkpoint, or else the last ones."""
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


# one run


class Collected(NamedTuple):
    """A run's numbers, and samples to look into."""

    numbers: Numbers
    """plain data"""
    samples: list[Sample]
    """none if no layer has a router"""
    task: Task
    """what their tokens are"""


def collect(
    run: Path | str,
    split: Split = "test",
    samples: int = 20,
    limit: int | None = None,
    *,
    which: str = "best",
    batch_size: int | None = None,
    fields: Sequence[str] = (),
    device: torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Collected:
    """Watch a run on one of its splits.

    Args:
        run: the run's folder, or one checkpoint in it.
        split: of its task.
        samples: how many examples to keep for the explorer, spread over the split.
        limit: measure only so many examples, drawn at random but always the same.
        which: "best" or "latest".
        batch_size: examples at a time; the run's own by default.
        fields: changes of the data, as arguments `--data.x=value`.
        device: where to compute; the CPU by default.
        progress: called with the batches done and all.
    """
    check_positive("samples", samples, least=0)
    numbers = describe_run(run, which)
    examples = load_examples(run, split, limit, which, fields)
    measures = measure(examples, split, batch_size=batch_size, device=device, progress=progress)
    numbers["measures"] = replace(
        measures, run=str(run), training=tuple(activation_curve(folder_of(run)))
    ).to_record()
    routed = any(layer is not None for layer in measures.layers)
    some = examples._replace(
        model=examples.model.cpu(), dataset=draw_subset(examples.dataset, max(samples, 1))
    )
    return Collected(numbers, collect_samples(some, samples) if routed else [], examples.task)


def folder_of(run: Path | str) -> Path:
    """The folder of a run, also if one of its checkpoints is named."""
    path = Path(run)
    return path.parent if path.name.startswith("step-") else path


def report_page(found: Collected) -> str:
    """A run as a page."""
    numbers = found.numbers
    measures = numbers["measures"]
    layers = [f"layer {i + 1}" for i in range(len(measures["layers"]))]
    routed = any(layer is not None for layer in measures["layers"])
    charts = _activation_charts(measures, layers) if routed else {}
    sections = [("summary", "Summary", _summary(numbers))]
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
    curves = _curve_charts(numbers, layers)
    if curves:
        content = element(
            "section", *(figure(k, c) for k, c in curves.items()), id="training", class_="charts"
        )
        sections.append(("training", "Training", content))
    sections.append(("settings", "Settings", _settings(numbers)))
    title, lead, charts = _title(numbers), _lead(numbers), charts | curves
    if not found.samples:
        return write_page(title, lead, sections, charts)
    # samples get the room that the rest leaves
    rest = explorer(found.samples, found.task, PackedSamples([], 0, 1.0))
    room = PAGE_BYTES - len(write_page(title, lead, sections, charts, rest).encode())
    packed = pack_samples(found.samples, found.task, room)
    return write_page(
        title, lead, sections, charts, explorer(found.samples, found.task, packed), packed.texts
    )


def _title(numbers: Numbers) -> str:
    return str(numbers["recipe"] or numbers["task"])


def _lead(numbers: Numbers) -> str:
    day = day_text(datetime.fromisoformat(numbers["date"]))
    return (
        f"{numbers['mixer']}, {numbers['layers']} layers of width {numbers['d_model']} · "
        f"{spell(numbers['parameters'])} parameters · seed {numbers['seed']} · "
        f"step {spell(numbers['step'])} of {spell(numbers['steps'])}, {day} · {numbers['run']}"
    )


def _summary(numbers: Numbers) -> Html:
    measures, training = numbers["measures"], numbers["training"]
    metric, scores = numbers["metric"], measures["metrics"]
    others = ", ".join(f"{k} {spell(v, score_unit(k))}" for k, v in scores.items() if k != metric)
    examples = f"{spell(measures['examples'])} examples"
    if numbers["kind"] == "lm":
        examples += ", each read from nothing"
    items = [
        (
            f"{metric} on {measures['split']}",
            spell(scores.get(metric), score_unit(metric)),
            f"{examples}; {others}" if others else examples,
        )
    ]
    shares = [layer["counts"]["rate"] for layer in measures["layers"] if layer is not None]
    if shares:
        busy = "mean of the layers with a router" if None in measures["layers"] else "mean of all layers"
        items.append(("activation", spell(statistics.fmean(s or 0.0 for s in shares), "percent"), busy))
    share = cost_fraction(measures)
    if share is not None:
        items.append(("cost implied", spell(share, "percent"), "matrix products, against always active"))
    items.append(
        ("parameters", spell(numbers["parameters"]), f"{numbers['layers']} layers of {numbers['mixer']}")
    )
    if training["minutes"] is not None:
        speed = f"{spell(training['tokens_per_s'])} tokens/s, {spell(training['memory_mb'])} MB"
        items.append(("training", f"{training['minutes']:.1f} min", speed))
    return element("section", tiles(items), id="summary", aria_label="Summary")


def cost_fraction(measures: Mapping[str, Any]) -> float | None:
    """Matrix products of all counted layers, as a share of what they would be if all tokens were active."""
    costs = [layer["cost"] for layer in measures["layers"] if layer is not None and layer["cost"] is not None]
    always = sum(cost["always"] for cost in costs)
    return sum(cost["flops"] for cost in costs) / always if always else None


def _of(layer: Mapping[str, Any] | None, *path: str) -> Any:
    """A value inside a layer's measures; None where any part of the way is missing."""
    found: Any = layer
    for name in path:
        found = None if found is None else found[name]
    return found


def _layer_table(measures: Numbers, layers: Sequence[str]) -> Html:
    rows = []
    for name, layer in zip(layers, measures["layers"], strict=True):
        if layer is None:
            rows.append([name, "no router", *["-"] * 9])
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
                spell(_of(layer, "span", "mean")),
                spell(_of(layer, "weighted_span", "mean")),
                spell(_of(layer, "occupancy", "mean"), "percent"),
                spell(_of(layer, "cost", "fraction"), "percent"),
            ]
        )
    head = [
        "layer",
        "module",
        "activated ± deviation",
        "tokens per sequence",
        "confidence",
        "temperature",
        "memory",
        "span",
        "weighted span",
        "memory filled",
        "cost",
    ]
    return table(head, rows, "What each layer did", words=(1,))


def _activation_charts(measures: Numbers, layers: Sequence[str]) -> dict[str, Chart]:
    """The figures of section 5 of the paper, and what else the measures tell."""
    found = measures["layers"]
    busy = [(name, layer) for name, layer in zip(layers, found, strict=True) if layer is not None]
    names = [name for name, _ in busy]
    charts: dict[str, Chart] = {
        "activation": {
            "type": "bars",
            "title": "Activation per layer",
            "about": "Share of the tokens of a sequence that attend; whiskers: standard deviation over sequences.",
            "label": "layer",
            "unit": "percent",
            "most": 1,
            "none": "no router",
            "rows": list(layers),
            "series": [
                {
                    "name": "activated",
                    "values": [_of(layer, "rate", "mean") for layer in found],
                    "errors": [_of(layer, "rate", "std") for layer in found],
                }
            ],
        },
        "confidence": _confidence_chart(busy),
    }
    if any(layer["span"] is not None for _, layer in busy):
        charts["span"] = {
            "type": "bars",
            "title": "Attention span",
            "about": "Mean distance, in tokens of the sequence, from a query to the keys it may see, and the same "
            "weighted by attention; whiskers: deviation over sequences.",
            "label": "layer",
            "none": "no query",
            "rows": names,
            "series": [
                {
                    "name": title,
                    "values": [_of(layer, key, "mean") for _, layer in busy],
                    "errors": [_of(layer, key, "std") for _, layer in busy],
                }
                for title, key in (("may see", "span"), ("weighted by attention", "weighted_span"))
            ],
        }
    charts["class"] = _class_chart(measures, busy)
    bins = len(busy[0][1]["by_part"])
    charts["position"] = {
        "type": "rows",
        "title": "Activation by position",
        "about": "Share of tokens that attend, from the beginning to the end of a sequence.",
        "unit": "percent",
        "xlabel": "place in the sequence, %",
        "range": [0, 100],
        "bins": [f"{100 * i // bins} to {100 * (i + 1) // bins} %" for i in range(bins)],
        "rows": names,
        "values": [[share["rate"] for share in layer["by_part"]] for _, layer in busy],
    }
    if any(layer["occupancy"] is not None for _, layer in busy):
        charts["occupancy"] = {
            "type": "bars",
            "title": "Working memory in use",
            "about": "Share of its places that are filled when a query looks, and at the end of a sequence.",
            "label": "layer",
            "unit": "percent",
            "most": 1,
            "none": "never used",
            "rows": names,
            "series": [
                {"name": title, "values": [_of(layer, key, "mean") for _, layer in busy]}
                for title, key in (("at a query", "occupancy"), ("at the end", "final_occupancy"))
            ],
        }
    return charts


def _confidence_chart(busy: Sequence[tuple[str, Numbers]]) -> Chart:
    bins = len(busy[0][1]["probabilities"])
    shares, active = [], []
    for _, layer in busy:
        total = max(1, sum(share["total"] for share in layer["probabilities"]))
        shares.append([share["total"] / total for share in layer["probabilities"]])
        active.append([share["active"] / total for share in layer["probabilities"]])
    return {
        "type": "rows",
        "title": "How sure the routers are",
        "about": "Tokens by the probability that the router gives to activating them; blue: activated.",
        "unit": "percent",
        "own": True,
        "xlabel": "probability of activation",
        "range": [0, 1],
        "bins": [f"{i / bins:.2f} to {(i + 1) / bins:.2f}" for i in range(bins)],
        "rows": [name for name, _ in busy],
        "values": shares,
        "active": active,
    }


MATRIX_ROWS = 16
"""Kinds of tokens that a matrix has room for; more are drawn as bars along an axis."""


def _class_chart(measures: Numbers, busy: Sequence[tuple[str, Numbers]]) -> Chart:
    classes = measures["classes"]
    present = [i for i in range(len(classes)) if any(layer["by_class"][i]["total"] for _, layer in busy)]
    names = [classes[i] for i in present]
    values = [[layer["by_class"][i]["rate"] for i in present] for _, layer in busy]
    about = "Share of the tokens of each kind that attend, in percent."
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


def _curve_charts(numbers: Numbers, layers: Sequence[str]) -> dict[str, Chart]:
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
                    {"name": words.get(split, split), "points": points, "faint": split == "train"}
                    for split, points in parts.items()
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
            "about": "Share of tokens that are active "
            + ("in held-out data" if records is not training else "in training batches")
            + (MODULES if several else "."),
            "xlabel": "step",
            "unit": "percent",
            "least": 0,
            "series": series,
        }
    return charts


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
