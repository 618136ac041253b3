"""Several runs on one page: their scores, curves, speed, memory and activation, and the settings that differ.

    numbers = collect_comparison([run, other])     plain data: what `seqboat report --compare --json` prints
    page = comparison_page(numbers)

The numbers are those recorded in training, so no data is needed; a split can be scored now instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from seqboat.core.checks import require
from seqboat.report.charts import MODULES
from seqboat.report.page import (
    Chart,
    element,
    explained,
    figure,
    score_unit,
    settings_table,
    spell,
    spell_setting,
    table,
    write_page,
)
from seqboat.report.record import Numbers, describe_run
from seqboat.run import Run
from seqboat.tasks.task import Split
from seqboat.training.display import rate_text

RUN_HEADS = {
    "run": "the part of its folder's name that differs",
    "recipe": "the recipe it was trained with, or its task",
    "mixer": "kind of layer",
    "parameters": "number of trained parameters",
    "step": "training steps before the checkpoint",
    "score": "the task's metric on held-out data",
    "active %": "percent of held-out tokens that each layer activates",
    "tokens/s": "training speed, median of the recorded values",
    "MB": "peak memory of the training process",
    "minutes": "time of training and evaluation",
}
"""What the columns of the table of runs mean."""


def collect_comparison(
    runs: Sequence[Path | str],
    split: Split | None = None,
    limit: int | None = None,
    *,
    which: str = "best",
    fields: Sequence[str] = (),
    device: torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Numbers:
    """Numbers of several runs side by side.

    Args:
        runs: folders of runs, or checkpoints in them; at least two.
        split: to score all of them on now; by default the scores are those recorded in training.
        limit: maximum number of examples to score.
        which: "best" or "latest".
        fields: overrides of the data settings, as arguments `--data.x=value`.
        device: where to score; the CPU by default.
        progress: called with the number of batches done and the total, while a run is scored.
    """
    require(len(runs) > 1, f"--compare needs at least two runs, got {len(runs)}")
    found = []
    for run in runs:
        numbers = describe_run(run, which)
        if split is not None:
            scored = Run(run, which, fields).evaluate(split, limit=limit, progress=progress, device=device)
            numbers["held_out"] = {
                "split": split,
                "step": scored["step"],
                "examples": scored["examples"],
                "scores": {k: v for k, v in scored.items() if isinstance(v, float)},
                "activation": scored["activation"],
            }
        found.append(numbers)
    for numbers, name in zip(found, short_names([str(run) for run in runs]), strict=True):
        numbers["name"] = name
    names = list(dict.fromkeys(name for numbers in found for name in numbers["settings"]))
    missing = object()
    differ = {
        name: [numbers["settings"].get(name) for numbers in found]
        for name in names
        if any(n["settings"].get(name, missing) != found[0]["settings"].get(name, missing) for n in found)
    }
    return {"runs": found, "settings_that_differ": differ}


def short_names(paths: Sequence[str]) -> list[str]:
    """The parts that distinguish paths: without common folders at either end.

    >>> short_names(["runs/listops/seed-0", "runs/text/seed-0"])
    ['listops', 'text']
    """
    parts = [Path(path).parts for path in paths]
    while all(len(p) > 1 for p in parts) and len({p[0] for p in parts}) == 1:
        parts = [p[1:] for p in parts]
    while all(len(p) > 1 for p in parts) and len({p[-1] for p in parts}) == 1:
        parts = [p[:-1] for p in parts]
    names = ["/".join(p) for p in parts]
    # the same run twice is still two columns
    return names if len(set(names)) == len(names) else [f"{i + 1}. {name}" for i, name in enumerate(names)]


def comparison_page(numbers: Numbers) -> str:
    """Several runs on one page."""
    runs = numbers["runs"]
    names = [run["name"] for run in runs]
    charts: dict[str, Chart] = {}
    for score in dict.fromkeys(score for run in runs for score in run["curves"] if score != "activation"):
        series = _overlaid(runs, score)
        if series:
            charts[f"curve-{score}"] = {
                "type": "lines",
                "title": f"{score}, held out"
                if any("val" in r["curves"].get(score, {}) for r in runs)
                else score,
                "xlabel": "step",
                "unit": score_unit(score),
                "series": series,
            }
    charts |= _comparison_bars(runs, names)
    metric_rows = [_comparison_row(run) for run in runs]
    overview = element(
        "section",
        element("h2", "Runs"),
        table(
            list(RUN_HEADS),
            metric_rows,
            "Runs",
            words=(1, 2),
            about=RUN_HEADS,
        ),
        explained(RUN_HEADS),
        id="runs",
        class_="card",
    )
    differ = numbers["settings_that_differ"]
    rows = [
        [name, *(spell_setting(r["settings"][name]) if name in r["settings"] else "-" for r in runs)]
        for name in differ
    ]
    columns = range(1, len(names) + 1)
    shared = {k: v for k, v in runs[0]["settings"].items() if k not in differ}
    settings = element(
        "section",
        element("h2", "Settings that differ"),
        table(["setting", *names], rows, "Settings that differ", words=columns)
        if rows
        else element("p", "None."),
        element(
            "details",
            element("summary", "Common settings"),
            settings_table(shared, "Common settings"),
        ),
        id="settings",
        class_="card",
    )
    pictures = element("section", *(figure(k, c) for k, c in charts.items()), id="charts", class_="charts")
    sections = [
        ("runs", "Runs", overview),
        ("charts", "Charts", pictures),
        ("settings", "Settings", settings),
    ]
    return write_page(f"{len(runs)} runs compared", " · ".join(names), sections, charts)


def _overlaid(runs: Sequence[Numbers], score: str) -> list[dict[str, Any]]:
    """One line per run: held-out scores if there are any, else training scores."""
    series = []
    for run in runs:
        parts = run["curves"].get(score, {})
        points = parts.get("val") or parts.get("test") or parts.get("train")
        if points:
            series.append({"name": run["name"], "points": points})
    return series


def _comparison_row(run: Numbers) -> list[object]:
    held, training = run["held_out"], run["training"]
    score = "-"
    if held is not None and run["metric"] in held["scores"]:
        value = held["scores"][run["metric"]]
        score = f"{spell(value, score_unit(run['metric']))} {run['metric']} ({held['split']})"
    return [
        run["name"],
        run["recipe"] or run["task"],
        run["mixer"],
        spell(run["parameters"]),
        spell(run["step"]),
        score,
        rate_text(held["activation"]) if held and held["activation"] else "-",
        spell(training["tokens_per_s"]),
        spell(training["memory_mb"]),
        spell(training["minutes"]),
    ]


def _comparison_bars(runs: Sequence[Numbers], names: Sequence[str]) -> dict[str, Chart]:
    charts: dict[str, Chart] = {}
    held = [run["held_out"] for run in runs]
    layers = max((len(h["activation"] or []) for h in held if h), default=0)
    if layers and any(rate is not None for h in held if h for rate in h["activation"] or []):
        values = [[*(h["activation"] or [] if h else [])] for h in held]
        charts["activation"] = {
            "type": "matrix",
            "title": "Activation per layer",
            "about": f"Fraction of held-out tokens that are active, in percent{MODULES}",
            "label": "run",
            "unit": "percent",
            "rows": list(names),
            "columns": [f"layer {i + 1}" for i in range(layers)],
            "values": [[*row, *[None] * (layers - len(row))] for row in values],
        }
    for key, title, about in (
        ("tokens_per_s", "Speed of training", "Tokens per second, median of the recorded values."),
        ("memory_mb", "Memory of training", "Maximum recorded, in MB."),
    ):
        if any(run["training"][key] is not None for run in runs):
            charts[key] = {
                "type": "bars",
                "title": title,
                "about": about,
                "label": "run",
                "rows": list(names),
                "series": [{"name": title.lower(), "values": [run["training"][key] for run in runs]}],
            }
    return charts
