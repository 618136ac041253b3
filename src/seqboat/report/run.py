"""What a run did, as numbers and as one HTML page: scores, curves, activation, and samples to explore.

    found = collect(run, split="test")             found.numbers is plain data: what `seqboat report --json` prints
    page = report_page(found)                      the same as a page, with an explorer of samples

Like section 5 of the paper, the page answers "how much attention is needed?" from activations.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from seqboat.analysis.measures import activation_curve, measure
from seqboat.analysis.traces import load_examples
from seqboat.core.checks import check_positive
from seqboat.report.charts import activation_charts, curve_charts, value_in
from seqboat.report.page import (
    Html,
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
from seqboat.report.record import Numbers, describe_run
from seqboat.report.samples import PAGE_BYTES, PackedSamples, Sample, collect_samples, explorer, pack_samples
from seqboat.report.scores import baseline_tile, scores_section
from seqboat.run import Run
from seqboat.tasks.outcomes import Outcomes
from seqboat.tasks.task import Split, Task, draw_subset


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
