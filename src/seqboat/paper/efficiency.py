"""Speed and memory beside the paper's: its table 6, and every mixer at several lengths.

Layers are measured alone: all layers of a model are alike, so the ratios of models are those of their layers. What
is compared takes turns (`bench.py`), and how many tokens attend is what trained models of the same task settled at.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from seqboat.bench.candidates import OURS, Candidate, configure
from seqboat.bench.layers import run_layers
from seqboat.bench.measure import as_record
from seqboat.bench.rates import recorded_activation
from seqboat.bench.setting import MODES, LayerSetting
from seqboat.mixers import MIXERS, SeqBoatConfig
from seqboat.models.cost import count_parameters
from seqboat.paper.matching import match_layer
from seqboat.paper.targets import Bench, Scale
from seqboat.recipes import find_recipe
from seqboat.training.loop import commit, versions

MODELS = {"mega": "MEGA", "mega-chunk": "MEGA-chunk", "seqboat-full": "SeqBoat-full", "seqboat": "SeqBoat"}
"""The models of table 6; the first is what the others are compared with."""


class Published(NamedTuple):
    """Ratios to MEGA in table 6, in the order of MODELS."""

    training: tuple[float, ...]
    """speed of a training step"""
    memory: tuple[float, ...]
    """of a training step"""
    evaluation: tuple[float, ...]
    """speed of an evaluation step"""


class LRATask(NamedTuple):
    """A column of table 6."""

    title: str
    length: int
    published: Published


TASKS = {
    "listops": LRATask(
        "ListOps",
        2048,
        Published((1.00, 2.07, 1.79, 2.26), (1.00, 0.34, 0.45, 0.20), (1.00, 2.15, 1.70, 2.67)),
    ),
    "text": LRATask(
        "Text",
        4096,
        Published((1.00, 2.42, 2.14, 3.61), (1.00, 0.29, 0.23, 0.16), (1.00, 2.33, 2.47, 3.55)),
    ),
    "retrieval": LRATask(
        "Retrieval",
        4000,
        Published((1.00, 2.66, 2.44, 2.50), (1.00, 0.31, 0.27, 0.23), (1.00, 2.57, 2.59, 2.69)),
    ),
    "image": LRATask(
        "Image",
        1024,
        Published((1.00, 1.39, 1.45, 1.33), (1.00, 0.75, 0.74, 0.74), (1.00, 1.48, 1.52, 1.43)),
    ),
    "pathfinder": LRATask(
        "Pathfinder",
        1024,
        Published((1.00, 1.46, 1.27, 1.31), (1.00, 0.69, 0.68, 0.70), (1.00, 1.50, 1.30, 1.38)),
    ),
    "pathx": LRATask(
        "Path-X",
        16384,
        Published((1.00, 1.36, 1.24, 1.30), (1.00, 0.82, 0.59, 0.89), (1.00, 2.52, 1.95, 1.93)),
    ),
}
"""The columns of table 6 and what the paper measured."""

PUBLISHED_MIXERS = {
    "transformer": (1.0, 1.0),
    "mega": (2.9, 0.31),
    "reformer": (0.8, 0.24),
    "bigbird": (1.1, 0.30),
    "seqboat-full": (6.2, 0.07),
    "performer": (5.7, 0.11),
    "linformer": (5.5, 0.10),
    "luna": (4.9, 0.16),
    "s4": (4.8, 0.14),
    "s4d": (6.1, 0.14),
    "s5": (6.1, 0.14),
    "liquid-s4": (1.2, 0.17),
    "h3": (6.0, 0.24),
    "mega-chunk": (7.0, 0.09),
    "seqboat": (10.4, 0.05),
}
"""Table 1: training speed and memory as multiples of a Transformer's, on Text with 4,096 tokens."""
PUBLISHED_LENGTH = 4096

TOKENS = 8192
"""Of a small batch; a longer sequence is a batch of one."""
ASSUMED_RATE = 0.5
"""Share of tokens that attend where no trained run says otherwise."""
SLOWEST = {"tasks": 60.0, "mixers": 15.0}
"""Seconds that a step may take before it is left out."""
ROUNDS = {"tasks": 5, "mixers": 3}

Progress = Callable[[str], None]


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


def task_setting(task: str, scale: Scale, rate: float) -> LayerSetting:
    """The layer of a full-size recipe, with the whole length; small batches where the scale is small."""
    config = find_recipe(f"lra.{task}")()
    mixer = cast(SeqBoatConfig, config.model.mixer)
    length = TASKS[task].length
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


def mixer_candidates(setting: LayerSetting, matched: bool) -> list[Candidate]:
    """Every mixer at the width of the setting, or as large as SeqBoat; a Transformer by plain equations first."""
    plain = Candidate("transformer", "transformer", {"implementation": "plain"})
    fused = Candidate("transformer, fused", "transformer", {"implementation": "sdpa"})
    others = [Candidate(name, name, {}) for name in MIXERS if name != "transformer"]
    found = [plain, fused, *others]
    if not matched:
        return found
    target = count_parameters(configure(OURS, setting).build(setting.d_model))
    return [_matched(candidate, setting, target) for candidate in found]


def _matched(candidate: Candidate, setting: LayerSetting, target: int) -> Candidate:
    """The candidate with the width at which it has so many parameters."""
    found = match_layer(configure(candidate, setting), setting.d_model, target)
    return candidate._replace(overrides={**candidate.overrides, **found.changes})


def measure(
    bench: Bench,
    target: str,
    scale: Scale,
    folder: Path,
    progress: Progress = lambda message: None,
    **options: Any,
) -> dict[str, Any]:
    """Measure what a row of a target asks for, as plain data.

    Args:
        bench: what.
        target: of which target.
        scale: small batches on the CPU, or those of the recipes on a GPU if there is one.
        folder: of the runs, whose activation is taken.
        progress: is told what comes next.
        options: over those of `bench.run_layers`.
    """
    options = {"rounds": ROUNDS[bench.what], "slowest": SLOWEST[bench.what], **options}
    find = _measure_tasks if bench.what == "tasks" else _measure_mixers
    return {
        "target": target,
        "scale": scale,
        "trial": bench.name,
        "seed": 0,
        "rounds": options["rounds"],
        "parts": find(bench, scale, folder, progress=progress, **options),
        "versions": versions(),
        "commit": commit(),
    }


def _measure_tasks(bench: Bench, scale: Scale, folder: Path, **options: Any) -> dict[str, Any]:
    """Table 6: all tasks and models in turn."""
    rates = {task: rate_of(folder, task) for task in TASKS}
    settings = [task_setting(task, scale, rates[task].value) for task in TASKS]
    rows = run_layers([Candidate(name, name, {}) for name in MODELS], settings, MODES, **options)
    # they come setting by setting
    each = len(MODELS) * len(MODES)
    return {
        task: as_record(rows[i * each : (i + 1) * each], settings[i], rate=rates[task]._asdict())
        for i, task in enumerate(TASKS)
    }


def _measure_mixers(bench: Bench, scale: Scale, folder: Path, **options: Any) -> dict[str, Any]:
    """Every mixer at one length."""
    assert bench.length is not None
    rate = rate_of(folder, "text")
    setting = LayerSetting(batch=max(1, TOKENS // bench.length), length=bench.length, rate=rate.value)
    candidates = mixer_candidates(setting, bench.matched)
    rows = run_layers(candidates, [setting], MODES, **options)
    changes = {candidate.label: candidate.overrides for candidate in candidates}
    return {"mixers": as_record(rows, setting, rate=rate._asdict(), changes=changes)}
