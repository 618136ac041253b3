"""What must not change while the lab is rebuilt; `make_golden.py` stored it once, in one file.

Everything that depends on how the package is laid out stands in the first part of this file ("The lab, as the cases
see it"): whoever moves or renames something changes that part, or adds to GONE, RENAMED and NEW, and never a case or
the fixture.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import itertools
import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from golden_cases import change as changed
from golden_cases import fill, load, text_of

FILE = Path(__file__).parent / "fixtures" / "golden" / "lab.json.xz"

# --- The lab, as the cases see it -----------------------------------------------------------------------------

GONE = (
    "recipe",
    "start",
    "start.*",
    "task.data_dir",
    "task.end_token",
    "model.ngram*",
    "model.mixer.block",
    "model.mixer.implementation",
    "model.mixer.reversible",
    "model.mixer.revival.*",
    "model.mixer.budget.*",
    "model.mixer.gau.kernel",
    "model.mixer.*.method",
    "model.mixer.*.block",
    "training.processes",
    "training.distributed",
    "training.prefetch",
    "training.pin_memory",
    "training.timeout",
)
"""Fields of a run that leave the package: not compared."""
NEW: tuple[str, ...] = (
    "model.mixer.ssm.memory",
    "model.mixer.ema.memory",
    "model.mixer.form",
    "model.mixer.*.form",
    "model.stem",
    "model.pool",
)
"""Fields that came after the fixture was made: not compared."""
RENAMED: dict[str, str] = {}
"""Present names of fields, and those in the fixture."""
REMADE = ("classify", "regress", "tag")
"""Recipes that were made anew: not compared."""
OWN = ("classify", "regress", "tag", "lm")
"""Recipes for own data, whose task is not compared."""


def recipes() -> dict[str, Callable[[], Any]]:
    """Every recipe, row and ablation that stays, by name."""
    from seqboat.recipes import ABLATIONS, RECIPES, ROW_RECIPES, SMALL_ROWS

    every: dict[str, Callable[[], Any]] = RECIPES | ABLATIONS | ROW_RECIPES | SMALL_ROWS
    gone = ("memorize", "enwik8-medium", *REMADE)
    return {name: make for name, make in every.items() if name not in gone and "-tiny" not in name}


def plain(config: Any) -> dict[str, Any]:
    """A run's configuration as dictionaries; parts with several forms have a `name`."""
    data: dict[str, Any] = load("to_dict")(config)
    mixer = data["model"]["mixer"]
    if mixer["name"].startswith("seqboat"):  # variants are SeqBoat with other fields
        if mixer["name"] == "seqboat-ffn":
            mixer["ffn"] = "after"
        elif "ffn" in mixer:
            mixer["ffn"] = "beside" if mixer["ffn"] else "none"
        mixer["name"] = "seqboat"
    return data


def change(name: str, **groups: Any) -> Any:
    """The configuration of a recipe with other values, by group of fields."""
    config = recipes()[name]()
    if hasattr(config.model, "ngrams"):
        groups["model"] = {"ngrams": (), "ngram_dropout": 0.0} | groups.get("model", {})
    mixer = groups["model"].pop("mixer", {})
    task = groups.pop("task", {})
    parts = {"model": {"mixer": changed(config.model.mixer, mixer)}, "task": changed(config.task, task)}
    return config.replace(**groups).replace(**parts)


def prepare_data(name: str, source: str, folder: Path, **options: Any) -> None:
    """Prepare a data set of the paper."""
    load("prepare")(name, source, folder, **options)


def train(config: Any, folder: Path) -> list[float]:
    """Loss of every step."""
    load("train")(config, folder)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["split"] == "train"]


@contextlib.contextmanager
def drawn_models(key: str) -> Iterator[None]:
    """Models that are built for training get weights drawn by their names, in float64."""
    runs = load("RunConfig")
    build = runs.build_model

    def drawn(config: Any, *arguments: Any, **options: Any) -> Any:
        return fill(build(config, *arguments, **options), key).train()

    runs.build_model = drawn
    try:
        yield
    finally:
        runs.build_model = build


def orders() -> dict[str, Any]:
    """Batches of a plan, in several forms."""
    Plan = load("Plan")
    lengths = np.random.RandomState(0).randint(1, 500, 103)
    plans = {
        "plain": Plan(103, 8, 0),
        "seed": Plan(103, 8, 7),
        "buckets": Plan(103, 8, 3, lengths),
        "streams": Plan(103, 8, 1, streams=True),
        "passages": Plan(103, 8, 1, streams=True, passage=3),
        "large": Plan(100_000, 50, 2),
    }
    return {
        name: [
            hash_of(b"".join(np.asarray(batch, "<i8").tobytes() + b"|" for batch in plan.epoch(number)))
            for number in (0, 1, 5)
        ]
        + [plan.batch(3).tolist()[:8], plan.batch(1003).tolist()[:8]]
        for name, plan in plans.items()
    }


def generated() -> dict[str, str]:
    """Hashes of generated data."""
    found = {}
    for name, config, count in (("listops", "LISTOPS", 20), ("listops-small", "LISTOPS_SMALL", 200)):
        for seed in (0, 3):
            drawn = itertools.islice(load("iterate")(seed, load(config)), count)
            lines = "\n".join(load("format_line")(each) for each in drawn)
            found[f"{name}-{seed}"] = hash_of(lines.encode())
    images = (
        ("pathfinder", "PATHFINDER", 40),
        ("pathfinder16", "PATHFINDER16", 40),
        ("pathx", "PATHX", 6),
        ("pathx32", "PATHX32", 20),
    )
    for name, shape, count in images:
        for seed in (0, 3):
            parts = [load("make_image")(seed, index, load(shape)) for index in range(count)]
            data = b"".join(image.tobytes() + bytes([label]) for image, label in parts)
            found[f"{name}-{seed}"] = hash_of(data)
    return found


# --- Cases ----------------------------------------------------------------------------------------------------

STEPS = 20


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def leaves(data: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Every field by its dotted name, except those that are not compared."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{where}{key}"
        if isinstance(value, Mapping):
            found |= leaves(value, f"{name}.")
        elif not any(fnmatch.fnmatch(name, pattern) for pattern in (*GONE, *NEW)):
            found[RENAMED.get(name, name)] = list(value) if isinstance(value, tuple) else value
    return found


def configurations() -> dict[str, dict[str, Any]]:
    """Fields of every recipe."""
    found = {}
    for name, make in recipes().items():
        fields = leaves(plain(make()))
        if name in OWN:
            fields = {key: value for key, value in fields.items() if not key.startswith("task.")}
        found[name] = json.loads(json.dumps(fields))
    return found


def write_table(path: Path, label: Callable[[int], Any]) -> str:
    """Sixty texts with a label each."""
    rows = ["text,label"]
    for i in range(60):
        text = text_of(20 + 7 * (i % 9), seed=i).decode().replace(",", " ").replace("\n", " ")
        rows.append(f"{text},{label(i)}")
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def write_reviews(folder: Path) -> str:
    """Movie reviews as they are distributed."""
    for part in ("train", "test"):
        for number, name in enumerate(("pos", "neg")):
            place = folder / "aclImdb" / part / name
            place.mkdir(parents=True)
            for i in range(12):
                (place / f"{i}_7.txt").write_bytes(text_of(60 + 9 * i, seed=100 + 2 * i + number))
    return str(folder / "aclImdb")


GAU = {"d_z": 8, "d_v": 16, "window": 8}


def _run(name: str, mixer: Mapping[str, Any] | None = None, **groups: Any) -> Any:
    """A recipe of 20 steps, two layers of width 16, without dropout."""
    groups["model"] = {
        "d_model": 16,
        "num_layers": 2,
        "dropout": 0.0,
        "mixer": {"dropout": 0.0, "ssm": {"d_state": 4, "truncation": None}, "gau": GAU, **(mixer or {})},
    } | groups.get("model", {})
    groups["schedule"] = {"steps": STEPS, "warmup_steps": 5}
    training = {"batch_size": 6, "log_every": 1, "save_every": STEPS, "device": "cpu"}
    groups["training"] = training | groups.get("training", {})
    groups["evaluation"] = {"every": STEPS, "batch_size": 6, "limit": 6}
    return change(name, **groups)


def run_listops(folder: Path) -> Any:
    prepare_data("listops-small", "generate", folder, counts=(40, 8, 8), workers=1)
    task = {"data_dir": str(folder), "train_size": None, "eval_size": None}
    training = {"accumulation": 2, "bucketing": True}
    return _run("lra.listops-small", task=task, training=training)


def run_text(folder: Path) -> Any:
    prepare_data("text", write_reviews(folder), folder)
    task = {"data_dir": str(folder), "holdout": 0, "eval_size": None, "max_length": 128}
    return _run("lra.text-small", task=task)


def run_recall(folder: Path) -> Any:
    return _run("recall")


def run_lm(folder: Path) -> Any:
    text = folder / "text.txt"
    text.write_bytes(text_of(8000, seed=5))
    return _run("lm", task={"text": (str(text),), "segment": 48})


RUNS: dict[str, Callable[[Path], Any]] = {
    "listops": run_listops,
    "text": run_text,
    "recall": run_recall,
    "lm": run_lm,
}


SEEDS = {"listops": 6, "text": 1, "recall": 6, "lm": 2}
"""Of weights with which every layer attends to some tokens and not to others."""


def losses(name: str, folder: Path) -> list[float]:
    """Losses of a tiny run in float64, from weights that do not depend on the order in which they are made."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with drawn_models(f"{name}/{SEEDS[name]}"):
            return train(RUNS[name](folder), folder / "run")
    finally:
        torch.set_num_threads(threads)


def stored() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(lzma.decompress(FILE.read_bytes()))
    return data
