"""Your own table: a class for every text.

    reviews.csv                          {"text": "great film", "label": "good"}
    text,label                           {"text": "a waste", "label": "bad"}
    great film,good                      ... (JSONL)
    "a waste, really",bad

Texts are read as bytes of UTF-8, so any language works without a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from seqboat.checks import check_positive, require
from seqboat.data.console import Advance
from seqboat.data.copies import prepared_copy
from seqboat.data.store import ArrayStore, Prepared, RaggedWriter, Skips, Staging
from seqboat.data.tables import read_table
from seqboat.tasks.base import BYTES, Dataset, Example, Split, Task
from seqboat.tasks.stored import RaggedDataset, hold_out

MAX_CLASSES = 1000
"""Largest number of classes; more distinct labels suggest the wrong column."""
COUNTED_LABELS = 100_000
"""Distinct labels to count before giving up on a table."""


@dataclass(frozen=True, kw_only=True)
class ClassifyTaskConfig:
    """A class for each text of a table."""

    own_data: ClassVar[bool] = True

    train: str = ""
    """CSV, TSV or JSONL file with a column of texts and a column of labels; may be compressed."""
    val: str | None = None
    """Table to validate on, in the format of `train`; None holds out some of the training rows."""
    test: str | None = None
    """Table to test on, in the format of `train`; None tests on the validation rows."""
    text_column: str = "text"
    """Name of the text column."""
    label_column: str = "label"
    """Name of the label column, which may hold words or numbers."""
    max_length: int = 1024
    """Maximum length in bytes; longer texts are truncated."""
    holdout: float = 0.1
    """Fraction of the training rows to hold out if `val` is None."""
    strict: bool = False
    """Whether a bad row is an error, rather than skipped and counted."""
    data_dir: str = "data"
    """The data folder, for prepared copies of large tables."""

    def __post_init__(self) -> None:
        check_positive("max_length", self.max_length)
        require(0 < self.holdout < 1, f"holdout must be in (0, 1), got {self.holdout!r}")

    def build(self) -> ClassifyTask:
        return ClassifyTask(self)


class TableDataset(RaggedDataset):
    """The texts of a table, with the class of each."""

    def __init__(self, store: ArrayStore, max_length: int, classes: NDArray[np.int64]) -> None:
        """
        Args:
            store: holds the texts and the index of each text's label.
            max_length: in bytes; longer texts are truncated.
            classes: the class of each label index.
        """
        super().__init__(store, "texts", max_length)
        self.classes = classes

    def __getitem__(self, index: int) -> Example:
        example = super().__getitem__(index)
        return example._replace(target=int(self.classes[example.target]))


class ClassifyTask(Task):
    """A class for each text of a table."""

    name = "classify"
    kind = "classify"
    vocab = BYTES
    text_bytes = True

    def __init__(self, config: ClassifyTaskConfig) -> None:
        require(config.train != "", "--data.train must name a CSV, TSV or JSONL file, got none")
        self.config = config
        self.max_length = config.max_length
        self.skips: Skips = Skips(config.strict, most=0.5)
        self._labels: tuple[str, ...] | None = None
        self._stores: dict[str, ArrayStore] = {}

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the training table, sorted; a class is an index into them."""
        if self._labels is None:
            found = self._store(self.config.train).manifest["extra"]["labels"]
            require(
                2 <= len(found) <= MAX_CLASSES,
                f"{self.config.train}: column {self.config.label_column!r} must have from 2 to {MAX_CLASSES} "
                f"different labels, got {len(found)}",
            )
            self._labels = tuple(sorted(found, key=_label_order))
        return self._labels

    @labels.setter
    def labels(self, labels: tuple[str, ...]) -> None:
        self._labels = labels

    @property
    def classes(self) -> int:  # type: ignore[override]
        """Number of distinct labels; reads the training table."""
        return len(self.labels)

    def _store(self, path: str) -> ArrayStore:
        if path not in self._stores:
            config = self.config
            require(Path(path).is_file(), f"{path} is not a file: expected a CSV, TSV or JSONL table")
            columns = {"text": config.text_column, "label": config.label_column, "strict": config.strict}
            make = partial(prepare_table, Path(path), config.text_column, config.label_column)
            self._stores[path] = prepared_copy(config.data_dir, [Path(path)], columns, make, self.skips)
        return self._stores[path]

    def _table(self, path: str) -> TableDataset:
        classes = {label: i for i, label in enumerate(self.labels)}
        store = self._store(path)
        numbers = []
        for label, line in store.manifest["extra"]["labels"].items():
            require(
                label in classes,
                f"{path}, line {line}: label {label!r} is not among those of {self.config.train}: "
                f"{', '.join(self.labels[:20])}",
            )
            numbers.append((line, classes[label]))
        return TableDataset(store, self.max_length, np.array([c for _, c in sorted(numbers)], np.int64))

    def dataset(self, split: Split) -> Dataset:
        self.check_split(split)
        config = self.config
        path = {"train": config.train, "val": config.val, "test": config.test or config.val}[split]
        if path is not None and (split != "train" or config.val is not None):
            return self._table(path)
        whole = self._table(config.train)
        require(len(whole) >= 2, f"{config.train} needs at least 2 rows to hold one out, got {len(whole)}")
        size = min(max(round(config.holdout * len(whole)), 1), len(whole) - 1)
        return hold_out(whole, "train" if split == "train" else "val", size)

    def show(self, example: Example) -> str:
        assert not isinstance(example.target, np.ndarray)
        text = bytes(example.inputs.astype(np.uint8)).decode(errors="replace")
        return f"{text}\n-> {example.target} ({self.labels[example.target]})"


def _label_order(label: str) -> tuple[int, float, str]:
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


def prepare_table(
    path: Path, text_column: str, label_column: str, staging: Staging, skips: Skips, advance: Advance
) -> Prepared:
    """Copy a table to arrays; labels are numbered in order of appearance."""
    texts = RaggedWriter(staging, "texts")
    labels = staging.array("texts.labels", np.uint32)
    first_lines: dict[str, int] = {}
    numbers: dict[str, int] = {}
    waiting: list[int] = []

    def flush() -> None:
        labels.append(np.array(waiting, np.uint32))
        waiting.clear()

    size = 0
    for row in read_table(path, text_column, label_column, skips):
        if row.label not in numbers:
            require(
                len(numbers) < COUNTED_LABELS,
                f"{path}: column {label_column!r} must have from 2 to {MAX_CLASSES} different labels, "
                f"got more than {COUNTED_LABELS:,}",
            )
            numbers[row.label] = len(numbers)
            first_lines[row.label] = row.line
        texts.append(row.text)
        waiting.append(numbers[row.label])
        size += len(row.text)
        if len(waiting) == 4096:
            flush()
            advance(size)
            size = 0
    flush()
    require(len(numbers) > 0 or skips.count > 0, f"{path} has no rows")
    skips.check(labels.rows)
    return Prepared({"rows": labels.rows}, {"labels": first_lines})
