"""Your own files: a class for every row of a table (`classify`), or the next byte of texts (`lmtext`).

    reviews.csv                          {"text": "great film", "label": "good"}      notes/*.txt
    text,label                           {"text": "a waste", "label": "bad"}          any text
    great film,good                      ... (JSONL)
    "a waste, really",bad

Everything is read as bytes of UTF-8, so any language works without a vocabulary.
"""

from __future__ import annotations

import csv
import glob
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqboat.checks import check_positive, require
from seqboat.data.sources import looks_like_html, read_file
from seqboat.data.store import Skips
from seqboat.tasks.base import BYTES, Dataset, Example, Split, Task
from seqboat.tasks.enwik8 import SegmentDataset
from seqboat.tasks.stored import hold_out
from seqboat.tasks.text import bad_text

MAX_CLASSES = 1000
"""More different labels than this mean that the wrong column was named."""
TABLES = {".csv": ",", ".tsv": "\t"}


class Row(NamedTuple):
    """A row of a table of texts."""

    where: str
    """the line it is on"""
    text: bytes
    label: str


@dataclass(frozen=True, kw_only=True)
class ClassifyTaskConfig:
    """A class for each text of a table."""

    own_data: ClassVar[bool] = True

    train: str = ""
    """CSV, TSV or JSONL file with a column of texts and a column of labels; may be compressed."""
    val: str | None = None
    """Like `train`, to validate on; None keeps back a part of the training rows."""
    test: str | None = None
    """Like `train`, to test on; None tests on what is validated on."""
    text_column: str = "text"
    """Name of the column with texts."""
    label_column: str = "label"
    """Name of the column with labels: any words or numbers."""
    max_length: int = 1024
    """Bytes after which a text is cut."""
    holdout: float = 0.1
    """Share of the training rows kept back where `val` is None."""
    strict: bool = False
    """Whether to refuse a table with a bad row, rather than leave the row out and count it."""

    def __post_init__(self) -> None:
        check_positive("max_length", self.max_length)
        require(0 < self.holdout < 1, f"holdout must be in (0, 1), got {self.holdout!r}")

    def build(self) -> ClassifyTask:
        return ClassifyTask(self)


class MemoryDataset(Dataset):
    """Texts with a class each, end to end in one array."""

    def __init__(self, texts: list[bytes], labels: list[int]) -> None:
        self.tokens = np.frombuffer(b"".join(texts), np.uint8)
        self.offsets = np.cumsum([0, *map(len, texts)])
        self.labels = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        tokens = self.tokens[self.offsets[index] : self.offsets[index + 1]]
        return Example(tokens.astype(np.int64), int(self.labels[index]))

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


class ClassifyTask(Task):
    """A class for each text of a table."""

    name = "classify"
    kind = "classify"
    vocab = BYTES
    text_bytes = True

    def __init__(self, config: ClassifyTaskConfig) -> None:
        require(config.train != "", "train must name a CSV, TSV or JSONL file, got none")
        self.config = config
        self.max_length = config.max_length
        self.skips: Skips = Skips(config.strict, most=0.5)
        self._labels: tuple[str, ...] | None = None
        self._read: dict[str, list[Row]] = {}
        self._tables: dict[str, MemoryDataset] = {}

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the training table, sorted; a class is a place in them."""
        if self._labels is None:
            found = {row.label for row in self._rows(self.config.train)}
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
        """How many different labels there are; reads the training table."""
        return len(self.labels)

    def _rows(self, path: str) -> list[Row]:
        # labels and texts of a table come from one reading, which also counts what is left out
        if path not in self._read:
            skips = Skips(self.config.strict, most=0.5)
            rows = list(read_table(path, self.config.text_column, self.config.label_column, skips))
            skips.check(len(rows))
            require(len(rows) > 0, f"{path} has no rows")
            self.skips.count += skips.count
            self.skips.listed += skips.listed
            self._read[path] = rows
        return self._read[path]

    def _table(self, path: str) -> MemoryDataset:
        if path not in self._tables:
            classes = {label: i for i, label in enumerate(self.labels)}
            rows = self._rows(path)
            for row in rows:
                require(
                    row.label in classes,
                    f"{path}, {row.where}: label {row.label!r} is not among those of {self.config.train}: "
                    f"{', '.join(self.labels[:20])}",
                )
            self._tables[path] = MemoryDataset(
                [row.text[: self.max_length] for row in rows], [classes[row.label] for row in rows]
            )
        return self._tables[path]

    def dataset(self, split: Split) -> Dataset:
        self.check_split(split)
        config = self.config
        path = {"train": config.train, "val": config.val, "test": config.test or config.val}[split]
        if path is not None and (split != "train" or config.val is not None):
            return self._table(path)
        whole = self._table(config.train)
        require(len(whole) >= 2, f"{config.train} needs at least 2 rows to keep one back, got {len(whole)}")
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


def read_table(path: str, text_column: str, label_column: str, skips: Skips) -> Iterator[Row]:
    """The rows of a CSV, TSV or JSONL file; rows without a text or a label are counted and left out.

    Raises:
        ValueError: naming the file, where it is no such table or has no such column.
    """
    require(Path(path).is_file(), f"{path} is not a file: expected a CSV, TSV or JSONL table")
    content = read_file(Path(path))
    name = Path(path).name
    require(not looks_like_html(content[:512]), f"{path} is a web page, not a table")
    require(b"\0" not in content[:512], f"{path} is not text in UTF-8: save the table as UTF-8, unpacked")
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if any(suffix in (".jsonl", ".ndjson", ".json") for suffix in suffixes):
        found = _json_rows(name, content, text_column, label_column, skips)
    else:
        delimiter = next((TABLES[suffix] for suffix in suffixes if suffix in TABLES), None)
        require(
            delimiter is not None, f"{path}: the name must end in .csv, .tsv or .jsonl (perhaps .gz or .xz)"
        )
        assert delimiter is not None
        found = _csv_rows(name, content, delimiter, text_column, label_column, skips)
    for row in found:
        if problem := bad_text(row.text):
            skips.add(name, row.where, problem)
        elif not row.label:
            skips.add(name, row.where, "empty label")
        else:
            yield row


def _csv_rows(
    name: str, content: bytes, delimiter: str, text_column: str, label_column: str, skips: Skips
) -> Iterator[Row]:
    # bytes that are not UTF-8 pass through as surrogates, so that one bad row does not end the reading
    text = content.decode("utf-8-sig", errors="surrogateescape")
    limit = csv.field_size_limit(1 << 30)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
        columns = reader.fieldnames or []
        for column in (text_column, label_column):
            require(
                column in columns,
                f"{name} has no column {column!r}; its columns are {', '.join(map(_short, columns)) or 'none'}",
            )
        for record in reader:
            where = f"line {reader.line_num}"
            values = (record[text_column], record[label_column])
            if values[0] is None or values[1] is None or None in record:
                skips.add(name, where, f"expected {len(columns)} fields")
                continue
            yield Row(where, values[0].encode("utf-8", "surrogateescape"), _plain(values[1]))
    except csv.Error as error:
        raise ValueError(f"{name}, line {reader.line_num}: {error}") from None
    finally:
        csv.field_size_limit(limit)


def _short(column: str) -> str:
    return ascii(column if len(column) <= 40 else f"{column[:40]}...")


def _plain(label: str) -> str:
    return label.encode("utf-8", "replace").decode().strip()


def _json_rows(name: str, content: bytes, text_column: str, label_column: str, skips: Skips) -> Iterator[Row]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            record: Any = json.loads(line)
        except ValueError:
            skips.add(name, where, "not JSON in UTF-8")
            continue
        if not isinstance(record, dict) or text_column not in record or label_column not in record:
            skips.add(name, where, f"no {text_column!r} and {label_column!r} in it")
        elif not isinstance(record[text_column], str):
            skips.add(name, where, f"{text_column!r} must be a string")
        else:
            label = record[label_column]
            text = record[text_column].encode("utf-8", "surrogatepass")
            yield Row(where, text, "" if label is None else _plain(str(label)))


@dataclass(frozen=True, kw_only=True)
class LMTextTaskConfig:
    """The next byte of text files."""

    own_data: ClassVar[bool] = True

    text: tuple[str, ...] = ()
    """Files, folders or patterns such as notes/*.txt; folders are searched for .txt and .md files."""
    segment: int = 1024
    """Targets per example."""
    context: int = 0
    """Bytes before each evaluation segment that the model reads without being scored on them."""
    holdout: float = 0.05
    """Share of the bytes kept for validation, and as many again for the test, at the end of the text."""

    def __post_init__(self) -> None:
        check_positive("segment", self.segment)
        check_positive("context", self.context, least=0)
        require(0 < self.holdout < 0.5, f"holdout must be in (0, 0.5), got {self.holdout!r}")
        require(not isinstance(self.text, str), f"text must be a list of files, got {self.text!r}")

    def build(self) -> LMTextTask:
        return LMTextTask(self)


class LMTextTask(Task):
    """The next byte of text files."""

    name = "lmtext"
    kind = "lm"
    vocab = BYTES
    text_bytes = True
    classes = BYTES
    metric = "bits"
    better = "lower"

    def __init__(self, config: LMTextTaskConfig) -> None:
        require(len(config.text) > 0, "text must name at least one file, got none")
        self.config = config
        self.max_length = config.segment + config.context
        self.skips: Skips = Skips(most=0.5)
        self._text: NDArray[np.uint8] | None = None

    def _tokens(self) -> NDArray[np.uint8]:
        if self._text is None:
            parts = []
            for path in find_files(self.config.text):
                content = read_file(path)
                if problem := bad_text(content):
                    self.skips.add(path, "the file", problem)
                else:
                    parts.append(content)
            self.skips.check(len(parts))
            # a blank line between files, so that the end of one is not read as the middle of a line
            self._text = np.frombuffer(b"\n\n".join(parts), np.uint8)
        return self._text

    def text(self, split: Split) -> NDArray[Any]:
        self.check_split(split)
        tokens = self._tokens()
        held = round(self.config.holdout * len(tokens))
        borders = (0, len(tokens) - 2 * held, len(tokens) - held, len(tokens))
        i = self.splits.index(split)
        return tokens[borders[i] : borders[i + 1]]

    def dataset(self, split: Split) -> Dataset:
        tokens = self.text(split)
        training = split == "train"
        context = 0 if training else self.config.context
        return SegmentDataset(
            {"text": tokens}, "text", 0, len(tokens), self.config.segment, context, training
        )

    def show(self, example: Example) -> str:
        return bytes(example.inputs.astype(np.uint8)).decode(errors="replace")


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """The files that names, folders and patterns stand for, sorted, each once."""
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            some = [p for p in path.rglob("*") if p.suffix.lower() in (".txt", ".md") and p.is_file()]
            require(len(some) > 0, f"{path} holds no .txt or .md file")
        else:
            some = [Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file()] or [path]
            require(some[0].is_file(), f"{pattern} matches no file")
        found.update(some)
    return sorted(found)
