"""What a run is about to learn from: your own data in a few lines, with what looks like a mistake in it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seqboat.console import format_bytes
from seqboat.data.store import Skips

if TYPE_CHECKING:
    from seqboat.own.task import OwnTask

FEW_ROWS = 20
"""Training rows below which a class is hard to learn."""
LISTED = 20
"""Classes to list; the others are only counted."""


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """A user's data before training."""

    sources: tuple[tuple[str, int, int], ...]
    """what was read: its name, the number of files, and their size in bytes"""
    unit: str
    """what splits are counted in"""
    sizes: dict[str, int]
    """by split"""
    documents: dict[str, int] | None = None
    """texts by themselves that share the sequences of a batch, by split; None where there are none"""
    classes: dict[str, int] | None = None
    """training rows (tagging: tokens) of each class"""
    counted: str = "rows"
    """what `classes` counts"""
    numbers: dict[str, float] | None = None
    """mean, std, least and most of the numbers to predict"""
    lengths: dict[str, Any] | None = None
    """median and longest, the number of rows that are cut to `limit`, their share and that of the tokens cut"""
    skipped: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """skipped records by reason"""
    first_skipped: str | None = None
    warnings: tuple[str, ...] = ()
    """what looks like a mistake"""

    def as_record(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """A few lines for people."""
        read = [
            f"{name} ({f'{files:,} files, ' if files > 1 else ''}{format_bytes(size)})"
            for name, files, size in self.sources
        ]
        sizes = ", ".join(f"{count:,} {split}" for split, count in self.sizes.items())
        lines = [heading("data", ", ".join(read) or "in memory"), heading(self.unit, sizes)]
        if self.documents is not None:
            counts = ", ".join(f"{count:,} {split}" for split, count in self.documents.items())
            lines.append(
                heading(
                    "documents", f"{counts}; packed without padding, none sees another (--data.documents)"
                )
            )
        if self.classes is not None:
            listed = [f"{label} {count:,}" for label, count in list(self.classes.items())[:LISTED]]
            more = len(self.classes) - len(listed)
            rest = f", and {more:,} more" if more > 0 else ""
            of = "" if self.counted == "rows" else f" ({self.counted})"
            lines.append(heading("classes", f"{len(self.classes):,}{of}: {', '.join(listed)}{rest}"))
        if self.numbers is not None:
            lines.append(heading("numbers", ", ".join(f"{k} {v:.4g}" for k, v in self.numbers.items())))
        if self.lengths is not None:
            found = self.lengths
            text = f"median {found['median']:,}, longest {found['longest']:,} {found['unit']}"
            if found["truncated"]:
                text += (
                    f"; {found['truncated']:,} rows ({found['rows']:.1%}) are cut to {found['limit']:,}, which loses "
                    f"{found['tokens']:.1%} of all {found['unit']} (--set max_length=N)"
                )
            lines.append(heading("lengths", text))
        if self.skipped:
            why = ", ".join(
                f"{count:,} {kind}" for kind, count in sorted(self.reasons.items(), key=lambda pair: -pair[1])
            )
            lines.append(
                heading(
                    "skipped", f"{count_text(self.skipped)}: {why}; the first: {self.first_skipped or '-'}"
                )
            )
        return [*lines, *(heading("warning", warning) for warning in self.warnings)]


def describe(task: OwnTask, split: str) -> DataSummary:
    """What a task trains on, and on what it is scored.

    Args:
        task: reads its data now, unless it did before.
        split: the held-out one.
    """
    config, facts = task.config, task.facts
    data: dict[str, Any] = {name: task.dataset(name) for name in dict.fromkeys(("train", split))}  # type: ignore[arg-type]
    whole = getattr(data["train"], "whole", data["train"])
    rows = getattr(data["train"], "numbers", np.arange(len(whole)))
    held_out = {"val": config.val, "test": config.test or config.val}.get(split)
    paths = [Path(path) for path in dict.fromkeys((config.train, held_out)) if path]
    targets = [whole.targets[i] for i in rows]
    classes = numbers = None
    labels = task.labels
    if labels is not None and targets:
        flat = np.stack(targets) if np.ndim(targets[0]) and task.kind != "tag" else None
        counts = (
            np.bincount(
                np.concatenate([np.atleast_1d(t) for t in targets]).astype(int), minlength=len(labels)
            )
            if flat is None
            else flat.sum(axis=0).astype(int)
        )
        order = np.argsort(-counts, kind="stable")
        classes = {labels[i]: int(counts[i]) for i in order}
    elif labels is None:
        wanted = np.array(targets, np.float64) * facts["target_std"] + facts["target_mean"]
        numbers = {
            "mean": float(wanted.mean()),
            "std": float(wanted.std()),
            "least": float(wanted.min()),
            "most": float(wanted.max()),
        }
    lengths = None
    if not task.fixed_length:
        sizes = np.array([whole.sizes[i] for i in rows])
        over = sizes[sizes > task.max_length]
        patch = int(facts.get("patch", 1))
        lengths = {
            "median": int(np.median(sizes)) * patch,
            "longest": int(sizes.max()) * patch,
            "truncated": len(over),
            "limit": task.max_length * patch,
            "rows": len(over) / len(sizes),
            "tokens": float((over - task.max_length).sum() / sizes.sum()),
            "unit": task.source.unit,
        }
    tagging = task.kind == "tag"
    return DataSummary(
        sources=tuple((path.name, *_size(path)) for path in paths),
        unit="rows",
        sizes={name: len(part) for name, part in data.items()},
        classes=classes,
        counted="tokens" if tagging else "rows",
        numbers=numbers,
        lengths=lengths,
        warnings=() if classes is None else tuple(class_warnings(classes, 0 if tagging else FEW_ROWS)),
        **skip_fields(task.skips),
    )


def _size(path: Path) -> tuple[int, int]:
    """Number of files and their size in bytes."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return len(files), sum(file.stat().st_size for file in files)


def heading(name: str, text: str) -> str:
    """A line with its name in front.

    >>> heading("rows", "90 train")
    'rows        90 train'
    """
    return f"{name:<11} {text}"


def count_text(count: int) -> str:
    """A number of records in words."""
    return f"{count:,} record{'' if count == 1 else 's'}"


def skip_fields(skips: Skips) -> dict[str, Any]:
    """The fields of a summary about skipped records."""
    return {
        "skipped": skips.count,
        "reasons": dict(skips.reasons),
        "first_skipped": skips.first if skips.listed else None,
    }


def class_warnings(classes: Mapping[str, int], few: int = FEW_ROWS) -> list[str]:
    """What looks like a mistake in the classes of a table.

    Args:
        classes: training rows of each.
        few: rows below which a class is hard to learn.
    """
    found = []
    for alike in near_duplicates(classes):
        names = " and ".join(f"{label!r} ({classes[label]:,})" for label in alike)
        found.append(f"{names} look alike but are different classes: rename one if they mean the same")
    rare = {label: count for label, count in classes.items() if count < few}
    if rare:
        listed = ", ".join(f"{label!r} ({count:,})" for label, count in list(rare.items())[:8])
        rest = f" and {len(rare) - 8:,} more" if len(rare) > 8 else ""
        have, them = ("class has", "it") if len(rare) == 1 else ("classes have", "them")
        found.append(
            f"{len(rare):,} {have} fewer than {few} training rows, too few to learn well: {listed}{rest}; "
            f"add rows or merge {them} with another class"
        )
    return found


def near_duplicates(labels: Mapping[str, int]) -> list[list[str]]:
    """Labels that differ only in case, spacing, hyphens or punctuation at the end, or that are the same number.

    >>> near_duplicates({"Praise": 3, "bug": 5, "praise.": 1, "1": 2, "1.0": 2, "-1": 4})
    [['Praise', 'praise.'], ['1', '1.0']]
    """
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault(_simplified(label), []).append(label)
    return [group for group in groups.values() if len(group) > 1]


def _simplified(label: str) -> str:
    try:
        return f"number {float(label)!r}"
    except ValueError:
        pass
    text = unicodedata.normalize("NFKC", label).casefold().strip()
    joined = re.sub(r"(?<=\w)[\s_-]+(?=\w)", " ", text)
    return joined.rstrip(".,;:!?") or text
