"""One layer at the sizes of table 6: speed and memory by task, as multiples of MEGA's.

Layers are measured alone, with as many active tokens as in trained models of the same task, and the candidates take
turns. `efficiency` has whole models over whole training runs, as the paper measured them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from seqboat.bench.candidates import Candidate
from seqboat.bench.layers import run_layers
from seqboat.bench.measure import as_record
from seqboat.bench.rates import recorded_activation
from seqboat.bench.setting import MODES, LayerSetting
from seqboat.mixers import SeqBoatConfig
from seqboat.paper.published import EFFICIENCY as PUBLISHED
from seqboat.paper.published import EFFICIENCY_MODELS as MODELS
from seqboat.paper.published import TITLES
from seqboat.paper.tables import Make, Pictures, Record, table
from seqboat.paper.target import MeasuredTarget
from seqboat.paper.trial import Bench, Scale
from seqboat.recipes import find_recipe

TOKENS = 8192
"""Tokens of a small batch; a longer sequence is a batch of one."""
ASSUMED_RATE = 0.5
"""Activation rate where no trained run says otherwise."""

BLOCKS = (
    ("training speed", "training", "training"),
    ("training memory", "training", "memory"),
    ("evaluation speed", "inference", "evaluation"),
)
"""Blocks of table 6: title, mode of the benchmark, field of the published numbers."""


class Rate(NamedTuple):
    """How many tokens attend."""

    value: float
    run: str | None
    """where it was measured; None if it is assumed"""


def rate_of(folder: Path, task: str) -> Rate:
    """The mean activation over the layers of a task's small run, if there is one in the folder."""
    run = folder / "small" / task / "seed-0"
    try:
        layers = recorded_activation(run)
    except (ValueError, OSError):
        return Rate(ASSUMED_RATE, None)
    return Rate(sum(layers) / len(layers), f"small/{task}/seed-0")


def rate_text(rate: Mapping[str, Any]) -> str:
    """A recorded rate, and whether it was assumed."""
    return f"{rate['value']:.0%}{'' if rate['run'] else ', assumed'}"


def task_setting(task: str, scale: Scale, rate: float) -> LayerSetting:
    """The layer of a full-size recipe, with the whole length; small batches where the scale is small."""
    config = find_recipe(f"lra.{task}")()
    mixer = cast(SeqBoatConfig, config.model.mixer)
    length = PUBLISHED[task].length
    assert mixer.gau.d_v is not None
    return LayerSetting(
        batch=max(1, TOKENS // length) if scale == "small" else config.training.batch_size,
        length=length,
        d_model=config.model.d_model,
        d_z=mixer.gau.d_z,
        d_v=mixer.gau.d_v,
        d_state=mixer.ssm.d_state,
        window=mixer.gau.window,
        attention=mixer.gau.attention,
        positions=mixer.gau.positions,
        prenorm=mixer.prenorm,
        rate=rate,
        device="cuda" if scale == "paper" and torch.cuda.is_available() else "cpu",
    )


def find_row(rows: Sequence[Record], candidate: str, mode: str) -> Record:
    """What was measured of a candidate in a mode."""
    return next(row for row in rows if row["candidate"] == candidate and row["mode"] == mode)


def measured_ratio(rows: Sequence[Record], candidate: str, mode: str, kind: str) -> float | None:
    """Speed or memory as a multiple of the first candidate's; None where it was not measured."""
    row = find_row(rows, candidate, mode)
    if kind == "memory":
        return row["memory_ratio"]
    return 1 / row["ratio"] if row["ratio"] else None


def left_out(rows: Sequence[Record]) -> list[str]:
    """Why some rows were not measured, as a list of the page."""
    return [f"- Left out: {note}." for note in dict.fromkeys(row["note"] for row in rows if row["note"])]


class LayerEfficiencyTarget(MeasuredTarget):
    """The three blocks of table 6, ours and the paper's ratios side by side."""

    def bench_options(self) -> dict[str, Any]:
        return {"rounds": 5, "slowest": 60.0}

    def measure_parts(self, bench: Bench, scale: Scale, folder: Path, **options: Any) -> dict[str, Any]:
        rates = {task: rate_of(folder, task) for task in PUBLISHED}
        settings = [task_setting(task, scale, rates[task].value) for task in PUBLISHED]
        rows = run_layers([Candidate(name, name, {}) for name in MODELS], settings, MODES, **options)
        # they come setting by setting
        each = len(MODELS) * len(MODES)
        return {
            task: as_record(rows[i * each : (i + 1) * each], settings[i], rate=rates[task]._asdict())
            for i, task in enumerate(PUBLISHED)
        }

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        parts = records[0]["parts"]
        return [*_tables(parts), *pictures.show(_draw(parts))]


def _tables(parts: Mapping[str, Any]) -> list[str]:
    head = [f"{TITLES[task]} ({PUBLISHED[task].length:,})" for task in parts]
    lines = table(
        ["sizes", *head],
        [
            ["batch", *(str(part["setting"]["batch"]) for part in parts.values())],
            ["active", *(rate_text(part["rate"]) for part in parts.values())],
        ],
    )
    for title, mode, kind in BLOCKS:
        rows = []
        for model, label in MODELS.items():
            cells = [label]
            for task, part in parts.items():
                ours = measured_ratio(part["rows"], model, mode, kind)
                paper = getattr(PUBLISHED[task], kind)[model]
                cells.append(f"{'left out' if ours is None else f'{ours:.2f}x'} ({paper:.2f}x)")
            rows.append(cells)
        lines += table([f"{title}, ours (paper)", *head], rows)
    seconds = [
        [label, *(_milliseconds(part["rows"], model) for part in parts.values())]
        for model, label in MODELS.items()
    ]
    lines += table(["ms per step, training / inference", *head], seconds)
    return lines + left_out([row for part in parts.values() for row in part["rows"]])


def _milliseconds(rows: Sequence[Record], model: str) -> str:
    found = [find_row(rows, model, mode)["seconds"] for mode in MODES]
    return " / ".join("-" if seconds is None else f"{1000 * seconds['median']:.0f}" for seconds in found)


def _draw(parts: Mapping[str, Any]) -> Make:
    from seqboat.figures import ratios_figure

    panels: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    baseline, *others = MODELS
    for title, mode, kind in BLOCKS:
        rows = panels.setdefault(title, {})
        for task, part in parts.items():
            for model in others:
                ours = measured_ratio(part["rows"], model, mode, kind)
                rows[f"{TITLES[task]}, {MODELS[model]}"] = ours, getattr(PUBLISHED[task], kind)[model]
    return lambda theme: ratios_figure(panels, reference=MODELS[baseline], theme=theme)


LAYER_EFFICIENCY = LayerEfficiencyTarget(
    name="layer-efficiency",
    title="Speed and memory of one layer by task",
    where="the sizes of table 6",
    about="Speed of a training step, its peak memory, and speed of inference as multiples of MEGA's, at the "
    "six lengths of the Long Range Arena. One layer of each model is measured, with the widths of the task's recipe, "
    "because all layers of a model are alike. In SeqBoat and SeqBoat-full, as many tokens attend as on average in "
    "the layers of our trained small variant of the task. MEGA-chunk has chunks of 128, and SeqBoat the memory of "
    "its recipe. The paper's ratios are for whole models on GPUs, over all of training.",
    cut="batches of 8,192 tokens, or of one sequence if that is longer; one layer instead of 4 to 8; layer norms.",
    small_benches=(Bench(name="lra-tasks", title="six tasks, four models", minutes=12),),
    paper_benches=(Bench(name="lra-tasks", title="six tasks, four models", minutes=None),),
)
