"""The summary of a task on your own files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from seqboat.data.store import ArrayStore
from seqboat.own.summary import FEW_ROWS, DataSummary, class_warnings, skip_fields
from seqboat.own.targets import NumberTarget
from seqboat.tasks.stored import ragged_lengths
from seqboat.tasks.task import Split, Subset

if TYPE_CHECKING:
    from seqboat.own.task import OwnDataset, OwnTask

BLOCK = 4096
"""Sequences that are counted at a time."""
ROWS = 1 << 20
"""Labels that are counted at a time."""


def describe(task: OwnTask, split: Split) -> DataSummary:
    """What a task trains on, and on what it is scored.

    Args:
        task: reads its data now, unless it did before.
        split: the held-out one.
    """
    config = task.config
    data = {name: task.dataset(name) for name in dict.fromkeys(("train", split))}
    whole, rows = _rows(data["train"])
    held_out = {"val": config.val, "test": config.test or config.val}.get(split)
    paths = [Path(path) for path in dict.fromkeys((config.train, held_out)) if path is not None]
    sources = tuple((path.name, *_size(path)) for path in paths)
    classes = class_counts(task, whole.store, rows)
    numbers = None
    if isinstance(task.target, NumberTarget):
        wanted = np.asarray(whole.store["numbers"][rows], np.float64)
        numbers = {
            "mean": float(wanted.mean()),
            "std": float(wanted.std()),
            "least": float(wanted.min()),
            "most": float(wanted.max()),
        }
    tagging = task.kind == "tag"
    warnings = [] if classes is None else class_warnings(classes, 0 if tagging else FEW_ROWS)
    return DataSummary(
        sources=sources,
        unit="rows",
        sizes={name: len(part) for name, part in data.items()},
        classes=classes,
        counted="tokens" if tagging else "rows",
        numbers=numbers,
        lengths=_lengths(task, whole, rows),
        warnings=tuple(warnings),
        **skip_fields(task.skips),
    )


def _rows(dataset: Any) -> tuple[OwnDataset, NDArray[np.integer]]:
    """The whole table of a dataset, and its rows in it."""
    if isinstance(dataset, Subset):
        return dataset.whole, dataset.numbers  # type: ignore[return-value]
    return dataset, np.arange(len(dataset))


def _size(path: Path) -> tuple[int, int]:
    """Number of files and their size in bytes."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return len(files), sum(file.stat().st_size for file in files)


def _lengths(task: OwnTask, whole: OwnDataset, rows: NDArray[np.integer]) -> dict[str, int] | None:
    """Lengths of the training inputs, before they are truncated; None where they are all the same."""
    # a tokenizer truncates before anything is stored
    if task.fixed_length or task.source.name == "tokens":
        return None
    width = len(task.facts["mean"]) if task.source.name == "series" else 1
    lengths = ragged_lengths(whole.store, "inputs")[rows] // width
    return {
        "median": int(np.median(lengths)),
        "longest": int(lengths.max()),
        "truncated": int((lengths > task.max_length).sum()),
        "limit": task.max_length,
    }


def class_counts(task: OwnTask, store: ArrayStore, rows: NDArray[np.integer]) -> dict[str, int] | None:
    """How often each label occurs in some rows, most frequent first; None without labels.

    Tags are counted by token.
    """
    labels = task.labels
    if labels is None:
        return None
    classes = task.target.classes(store, task.facts)  # type: ignore[attr-defined]
    if "labels" in store:
        seen = np.zeros(len(classes), np.int64)
        for first in range(0, len(rows), ROWS):
            seen += np.bincount(store["labels"][rows[first : first + ROWS]], minlength=len(classes))
    else:
        name = "labels" if "labels.tokens" in store else "tags"
        seen = _count_ragged(store, name, rows, len(classes))
    counts = np.bincount(classes, weights=seen[: len(classes)], minlength=len(labels)).astype(np.int64)
    order = np.argsort(-counts, kind="stable")
    return {labels[i]: int(counts[i]) for i in order}


def _count_ragged(store: ArrayStore, name: str, rows: NDArray[np.integer], size: int) -> NDArray[np.int64]:
    """How often each number occurs in some of the stored sequences, in bounded memory."""
    offsets, tokens = store[f"{name}.offsets"], store[f"{name}.tokens"]
    wanted = np.zeros(len(offsets) - 1, bool)
    wanted[rows] = True
    counts = np.zeros(size, np.int64)
    for first in range(0, len(wanted), BLOCK):
        ends = np.asarray(offsets[first : first + BLOCK + 1])
        kept = np.repeat(wanted[first : first + BLOCK], np.diff(ends))
        counts += np.bincount(np.asarray(tokens[ends[0] : ends[-1]])[kept], minlength=size)
    return counts
