"""What the command line and Python share: from a table to a trained model in a folder."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from seqboat.core.checks import check_choice, require
from seqboat.data.files import write_text
from seqboat.data.store import Skips
from seqboat.own.describe import heading
from seqboat.own.fit import FitConfig, Progress, Result, attention_line, fit
from seqboat.own.inputs import NOTHING
from seqboat.own.records import Values, check_is_archive
from seqboat.own.tables import is_table, read_table
from seqboat.own.task import ClassifyTaskConfig, OwnTask, OwnTaskConfig, RegressTaskConfig, TagTaskConfig
from seqboat.training import checkpoint as ck
from seqboat.training.config import RunConfig
from seqboat.training.record import commit, versions
from seqboat.training.settings_io import override, to_dict, to_json, unknown_message

TASKS: dict[str, type[OwnTaskConfig]] = {
    "classify": ClassifyTaskConfig,
    "regress": RegressTaskConfig,
    "tag": TagTaskConfig,
}
FEW_NUMBERS = 20
"""Different whole numbers up to which a column of numbers holds classes."""
KEPT_EVERY = 20.0
"""Seconds between two writes of the best model so far."""


class Session(NamedTuple):
    """A trained model with its task."""

    task: OwnTask
    result: Result


def split_settings(
    settings: Sequence[str] | Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Settings by name, as `name=value`: those of the fit, those of the task, and others for the configuration.

    A name without a dot is found wherever it is: `max_length` is the task's, `lr` the optimizer's.
    """
    from seqboat.recipes.own import classify

    pairs = settings.items() if isinstance(settings, Mapping) else [_pair(setting) for setting in settings]
    of_fit, of_task, others = {}, {}, []
    fit_names = {field.name for field in fields(FitConfig)}
    task_names = {field.name for kind in TASKS.values() for field in fields(kind)}
    known = to_dict(classify())
    places = {
        name: f"{group}.{name}" for group in ("training", "model", "optimizer") for name in known[group]
    }
    for name, value in pairs:
        short = name.removeprefix("task.").removeprefix("data.")
        if name in fit_names:
            of_fit[name] = value
        elif short in task_names:
            of_task[short] = value
        elif name == "task":
            check_choice("task", value, tuple(TASKS))
            of_fit["task"] = value
        elif "." in name or name in ("seed",):
            others.append(f"--{name}={value}")
        elif name in places:
            others.append(f"--{places[name]}={value}")
        else:
            names = [*fit_names, *task_names, *places, "task", "seed"]
            raise ValueError(unknown_message("--set", name, names))
    return of_fit, of_task, others


def _pair(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    require(bool(equals), f"--set needs name=value, got {setting!r}")
    return name.strip(), value


def fit_config(of_fit: Mapping[str, Any], **given: Any) -> FitConfig:
    """The settings of a fit from words or values."""
    values: dict[str, Any] = {}
    for name, value in of_fit.items():
        if name == "task":
            continue
        if isinstance(value, str) and name != "clock":
            try:
                value = json.loads(value.lower())
            except ValueError:
                raise ValueError(f"--set {name}={value}: expected a number, true or false") from None
        values[name] = value
    return FitConfig(**{**given, **values})


class Look(NamedTuple):
    """What a table holds, as far as its columns say."""

    task: str
    why: str
    text_column: str | None


def look_at(
    path: Path,
    target: str,
    *,
    text: str | None = None,
    channels: Sequence[str] = (),
    file: str | None = None,
    encoding: str = "utf-8",
    delimiter: str | None = None,
) -> Look:
    """Which task a column asks for, and where the texts are."""
    if not is_table(path):
        check_is_archive(path)
        return Look("classify", "folders are classes", None)
    skips = Skips(most=1.0)
    numbers: set[float] = set()
    every_number, count = True, 0
    spaces: dict[str, list[int]] = {}
    first: Mapping[str, Any] | None = None
    nested = words = 0
    for row in itertools.islice(read_table(path, skips, encoding, delimiter), 1_000_000):
        first = first or row.values
        if target not in row.values:
            continue
        value = row.values[target]
        if isinstance(value, list):
            nested += any(isinstance(item, list | dict) for item in value)
            words += any(isinstance(item, str) for item in value)
            every_number = False
        elif not (value is None or (isinstance(value, str) and value.strip().lower() in NOTHING)):
            count += 1
            number = _as_number(value)
            every_number = every_number and number is not None
            if number is not None and len(numbers) <= 10 * FEW_NUMBERS:
                numbers.add(number)
        if count <= 1000:
            for name, other in row.values.items():
                if isinstance(other, str) and name != target:
                    spaces.setdefault(name, []).append(other.count(" "))
    column = f"column {target!r}"
    text_column = text
    if first is not None and text is None and not channels and file is None:
        text_column = _text_column(path, first, target, spaces)
    listed = first is not None and isinstance(first.get(text_column or ""), list)
    if nested or (words and (listed or channels)):
        return Look("tag", f"{column} holds a list of tags or spans", text_column)
    if words:
        return Look("labels", f"{column} holds lists of labels", text_column)
    whole = all(number == int(number) for number in numbers if math.isfinite(number))
    if every_number and numbers and (not whole or len(numbers) > FEW_NUMBERS):
        some = f"more than {10 * FEW_NUMBERS:,}" if len(numbers) > 10 * FEW_NUMBERS else f"{len(numbers):,}"
        return Look(
            "regress", f"{column} holds {some} different numbers (--set task=classify: classes)", text_column
        )
    return Look("classify", f"{column} holds classes", text_column)


def _as_number(value: Any) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def _text_column(
    path: Path, first: Mapping[str, Any], target: str, spaces: Mapping[str, Sequence[int]]
) -> str:
    """The column of texts or lists, where no option names it."""
    others = [name for name in first if name != target]
    if "text" in others:
        return "text"
    if len(others) == 1:
        return others[0]
    lists = [name for name in others if isinstance(first[name], list)]
    if len(lists) == 1:
        return lists[0]
    means = {name: sum(found) / len(found) for name, found in spaces.items() if name in others and found}
    best = max(means, key=lambda name: means[name], default="")
    if best and means[best] >= 2:
        return best
    listed = ", ".join(others[:20])
    raise ValueError(
        f"{path}: which column is the input? --text NAME for texts, --series ID --channels A B for numbers; it has "
        f"{listed or 'no other column'}"
    )


def configure(
    config: OwnTaskConfig, values: Values | None, settings: Sequence[str]
) -> tuple[OwnTask, RunConfig]:
    """The task of a configuration, which reads its training data now, and the configuration of a run on it.

    Args:
        config: of the task.
        values: in memory, instead of files.
        settings: any of the run, as `--group.name=value`.
    """
    from seqboat.recipes.own import for_kind, for_task

    given = override(for_kind(config), settings)
    assert isinstance(given.task, OwnTaskConfig)
    task = OwnTask(given.task, values)
    return task, override(for_task(given, task), [s for s in settings if not s.startswith("--task.")])


def learn(
    task: OwnTask,
    config: RunConfig,
    settings: FitConfig,
    *,
    started: float,
    out: Path | None = None,
    tell: Callable[[str], None],
    show: Callable[[Progress], None],
) -> Session:
    """Fit, and keep the best model so far in a folder."""
    last = 0.0

    def keep(snapshot: Callable[[], Result]) -> None:
        nonlocal last
        if out is not None and time.monotonic() - last > KEPT_EVERY:
            last = time.monotonic()
            write_run(out, task, snapshot())

    result = fit(
        task, config, settings, started=started, tell=tell, show=show, keep=keep if out is not None else None
    )
    if out is not None:
        write_run(out, task, result)
    return Session(task, result)


def write_run(
    folder: Path, task: OwnTask, result: Result, estimator: Mapping[str, Any] | None = None
) -> None:
    """Write a model as a run: `predict`, `eval`, `report`, `explain` and `export` take it."""
    folder.mkdir(parents=True, exist_ok=True)
    prints = {split: task.fingerprint(split) for split in ("train", "val")}
    config, metric = result.config, task.metric
    best = result.record["score"][metric]
    state = {
        "progress": {"step": result.steps, "best": best, "best_step": result.steps, "finished": True},
        "config": to_dict(config),
        "classes": task.classes,
        "labels": task.labels,
        "facts": dict(task.facts),
        "data": prints if task.config.train else {},
        "versions": versions(),
    }
    store = ck.CheckpointStore(folder, 1)
    store.save(result.steps, {ck.MODEL: ck.model_tensors(result.model, True)}, state, best=True)
    parameters = sum(p.numel() for p in result.model.parameters())
    about = {
        "seed": config.seed,
        "parameters": parameters,
        "versions": versions(),
        "commit": commit(),
        "fingerprints": prints,
        **result.record,
        "estimator": estimator,
    }
    write_text(folder / "config.json", to_json(config))
    write_text(folder / "run.json", json.dumps(_finite(about), indent=1) + "\n")


def _finite(value: Any) -> Any:
    """Plain data that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def closing_lines(record: Mapping[str, Any]) -> list[str]:
    """How it ended: score, baselines, what was kept, what attention did."""
    metric = record["score"]["metric"]
    lines = []
    beside = record.get("baselines")
    listed = ""
    if beside:
        listed = "; " + ", ".join(f"{name} {scores[metric]:.4g}" for name, scores in beside["scores"].items())
    lines.append(heading("score", f"val {metric} {record['score'][metric]:.4g}{listed}"))
    kept = record["kept"]
    if kept == "baseline":
        why = "the network adds nothing to it that can be told from chance"
        lines.append(heading("kept", f"the baseline alone ({beside['kept'] if beside else ''}): {why}"))
    elif "gain" in record:
        gain = record["gain"]
        lines.append(
            heading(
                "kept",
                f"{kept}: validation loss better by {gain['loss']:.3g} +- {gain['error']:.1g}",
            )
        )
    minutes = f", {record['seconds']:.0f} s" if "seconds" in record else ""
    lines.append(heading("trained", f"{record['steps']:,} steps on {record['rows']:,} rows{minutes}"))
    return [*lines, attention_line(record.get("attention"))]


def with_columns(config: OwnTaskConfig, **columns: Any) -> OwnTaskConfig:
    """A configuration with the columns that are given."""
    return replace(config, **{name: value for name, value in columns.items() if value is not None})
