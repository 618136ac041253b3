"""The record of a run as plain data: settings, speed, curves, held-out scores."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from seqboat.run import Run
from seqboat.training.checkpoint import STATE
from seqboat.training.display import NO_SCORES
from seqboat.training.settings_io import to_dict

POINTS = 160
"""Maximum number of points in a curve; longer ones are averaged in groups."""

Numbers = dict[str, Any]


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
