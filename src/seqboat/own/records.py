"""Records from outside: rows of a table, series with one row per time, files of a folder, values in memory."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import require
from seqboat.data.sources import Source, check_name, read_file
from seqboat.data.store import Skips
from seqboat.own.inputs import INPUTS, Input
from seqboat.own.tables import OTHER, SUFFIXES, Record, check_columns, is_table, read_table
from seqboat.tasks.task import SPLITS

if TYPE_CHECKING:
    from seqboat.own.targets import Target
    from seqboat.own.task import OwnTaskConfig

PART_NAMES = {
    **{"train": 0, "training": 0},
    **{"val": 1, "valid": 1, "validation": 1, "dev": 1},
    **{"test": 2, "testing": 2},
}
"""What a column of splits may say."""


class Found(NamedTuple):
    """A record, and its input where that is not one of its values."""

    place: str
    """where it stands, for messages: "line 7" """
    values: Mapping[str, Any]
    """every column, so that ids come back with the answers"""
    content: bytes | NDArray[Any] | None = None
    """of a file, or the steps of a series"""


class Reader(Protocol):
    """Where records come from."""

    name: str
    """for messages"""

    def records(self, skips: Skips, label: str | None = None) -> Iterator[Found]:
        """All of them, with the column of labels if it is named; those that cannot be read are skipped."""

    def digest(self) -> str:
        """A hash of the content."""


IN_RUNS = {
    "--text": "--data.text_column",
    "--channels": "--data.channels",
    "--series": "--data.series_column",
}
"""Flags of training that name columns, as the commands on a trained model call them."""


def open_reader(path: Path, source: Input, config: OwnTaskConfig) -> Reader:
    """The reader of a table or of a folder."""
    known = ", ".join(SUFFIXES)
    require(
        path.exists(),
        f"{path} does not exist: expected a table ({known}), or a folder with a folder for each class",
    )
    if path.is_dir() or (not is_table(path) and Source(path).kind() != "file"):
        return Folder(path, source)
    if config.series_column is not None:
        return Steps(path, source, config)
    return Table(path, source, config)


class Table:
    """A table with one row per record."""

    def __init__(self, path: Path, source: Input, config: OwnTaskConfig) -> None:
        self.path, self.source, self.config, self.name = path, source, config, str(path)
        if path.is_file() and hasattr(os, "sysconf"):
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            require(
                path.stat().st_size < memory / 2,
                f"{path} has {path.stat().st_size:,} bytes, more than half of this machine's memory: give fewer rows",
            )

    def rows(self, skips: Skips, label: str | None) -> Iterator[Record]:
        """All rows, once the first one has been found to have the columns."""
        config = self.config
        wanted = {**self.source.columns, **({} if label is None else {label: "--target"})}
        if label is None:
            # new inputs of a trained model: the command has the run's own flags
            wanted = {column: IN_RUNS.get(flag, flag) for column, flag in wanted.items()}
        rows = read_table(self.path, skips, config.encoding, config.delimiter)
        for number, row in enumerate(rows):
            if number == 0:
                check_columns(self.path, row.values, wanted, config.delimiter)
            yield row

    def records(self, skips: Skips, label: str | None = None) -> Iterator[Found]:
        for row in self.rows(skips, label):
            content = None
            if self.config.file_column is not None:
                name = str(row.values.get(self.config.file_column))
                try:
                    check_name(self.path, name)
                    content = read_file(self.path.parent / name)
                except (ValueError, OSError) as error:
                    skips.add(self.path.name, row.place, str(error))
                    continue
            yield Found(row.place, row.values, content)

    def digest(self) -> str:
        return digest_of([self.path])


class Steps(Table):
    """A table with one row per time. The rows of a series stand together; the last one has its target."""

    def records(self, skips: Skips, label: str | None = None) -> Iterator[Found]:
        config, column = self.config, self.config.series_column
        seen: set[str] = set()
        steps: list[NDArray[Any]] = []
        tags: list[Any] = []
        name, last = "", dict[str, Any]()
        for row in self.rows(skips, label):
            try:
                step = self.source.read(row.values)
            except ValueError as error:
                skips.add(self.path.name, row.place, str(error))
                continue
            found = str(row.values.get(column or ""))
            if steps and found != name:
                yield Found(f"series {name}", last, np.concatenate(steps))
                steps, tags = [], []
            if not steps:
                require(
                    found not in seen,
                    f"{self.path}, {row.place}: series {found!r} was there before: sort the table by {column!r}",
                )
                seen.add(found)
                name = found
            steps.append(step)
            last = dict(row.values)
            if config.task_name == "tag" and label is not None:
                tags.append(row.values.get(label))
                last[label] = tags
        if steps:
            yield Found(f"series {name}", last, np.concatenate(steps))


class Folder:
    """A folder or an archive with a folder for each class."""

    def __init__(self, path: Path, source: Input) -> None:
        self.path, self.source, self.name = path, source, str(path)

    def records(self, skips: Skips, label: str | None = None) -> Iterator[Found]:
        suffixes = type(self.source).suffixes
        require(
            bool(suffixes),
            f"{self.path}: {self.source.name} inputs are rows of a table ({', '.join(SUFFIXES)}), not files",
        )
        for member in Source(self.path).members(lambda name: PurePosixPath(name).suffix.lower() in suffixes):
            values = {"file": member.name}
            if label is not None and len(member.parts) > 1:
                values[label] = member.parts[-2]
            yield Found(member.name, values, member.read())

    def digest(self) -> str:
        files = (
            sorted(file for file in self.path.rglob("*") if file.is_file())
            if self.path.is_dir()
            else [self.path]
        )
        return digest_of(files)


class Values:
    """Values in memory.

    Args:
        inputs: texts, lists of words, or arrays (time, channels).
        targets: one for each; None to predict.
        config: of the task, which names the columns.
        groups: one for each, to keep on one side of the split.
    """

    name = "X"

    def __init__(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any] | None,
        config: OwnTaskConfig,
        groups: Sequence[Any] | None = None,
    ) -> None:
        self.inputs, self.targets, self.config, self.groups = inputs, targets, config, groups

    def records(self, skips: Skips, label: str | None = None) -> Iterator[Found]:
        config = self.config
        for number, value in enumerate(self.inputs):
            values = {config.text_column: value}
            if self.targets is not None:
                values[config.label_column] = self.targets[number]
            if self.groups is not None and config.group_column is not None:
                values[config.group_column] = self.groups[number]
            yield Found(f"X[{number}]", values)

    def digest(self) -> str:
        found = hashlib.sha256()
        for number, value in enumerate(self.inputs):
            found.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
            found.update(repr(None if self.targets is None else self.targets[number]).encode())
        return found.hexdigest()


def digest_of(files: Sequence[Path]) -> str:
    """A hash of the content of files."""
    found = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()


def read_input(found: Found, source: Input) -> Any:
    """The input of a record; a ValueError says what is wrong with it."""
    if found.content is None:
        return source.read(found.values)
    return source.read_file(found.content) if isinstance(found.content, bytes) else found.content


class Rows:
    """The rows of a table in memory, as they were read."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.targets: list[Any] = []
        self.places: list[str] = []
        self.deciding: list[Any] = []
        """what decides about the split of each"""

    def __len__(self) -> int:
        return len(self.inputs)


def read_rows(reader: Reader, source: Input, target: Target, config: OwnTaskConfig, skips: Skips) -> Rows:
    """Read records to learn from; bad ones are counted and left out."""
    rows = Rows()
    name = Path(reader.name).name
    for found in reader.records(skips, config.label_column):
        try:
            read = read_input(found, source)
            if rows.inputs and isinstance(read, np.ndarray):
                width = rows.inputs[0].shape[1]
                require(read.shape[1] == width, f"expected {width} channels, got {read.shape[1]}")
            wanted, part = target.read(found.values), decide(found.values, config)
        except ValueError as error:
            skips.add(name, found.place, str(error))
            continue
        rows.inputs.append(read)
        rows.targets.append(wanted)
        rows.places.append(found.place)
        rows.deciding.append(part)
    require(len(rows) > 0 or skips.count > 0, f"{reader.name} has no rows")
    skips.check(len(rows))
    return rows


def decide(values: Mapping[str, Any], config: OwnTaskConfig) -> Any:
    """What a record says about its split; None if nothing does."""
    column = config.split_column or config.group_column or config.time_column
    if column is None:
        return None
    value = values.get(column)
    require(value is not None and str(value).strip() != "", f"empty {column!r}")
    text = str(value).strip()
    if config.split_column is not None:
        require(
            text.lower() in PART_NAMES, f"{column!r} must be one of {', '.join(SPLITS)}, got {text[:40]!r}"
        )
        return PART_NAMES[text.lower()]
    return text if config.group_column is not None else read_time(text)


def read_time(text: str) -> float:
    """A time as a number: a number, or a date with or without a time of day.

    >>> read_time("1970-01-02T00:00:00+00:00")
    86400.0
    """
    try:
        number = float(text)
    except ValueError:
        try:
            return datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            raise ValueError(f"not a number or a date: {text[:40]!r}") from None
    require(math.isfinite(number), f"not a time: {text[:40]!r}")
    return number


def hold_out(
    rows: Rows, classes: Sequence[Any] | None, config: OwnTaskConfig
) -> dict[str, NDArray[np.int64]]:
    """The numbers of the rows of each split, where one table holds all of them.

    Args:
        rows: of the table.
        classes: of the rows, which the splits then have in equal shares; None without classes.
        config: of the task.
    """
    count = len(rows)
    every = np.arange(count)
    where = config.train or "X"
    if config.split_column is not None:
        parts = np.array(rows.deciding)
        found = {str(name): np.flatnonzero(parts == place) for place, name in enumerate(SPLITS)}
        for one, other in (("test", "val"), ("val", "test")):
            found[one] = found[one] if len(found[one]) else found[other]
        for name in SPLITS:
            require(len(found[name]) > 0, f"{where} has no rows for the split {name}")
        return found
    require(count >= 2, f"{where} needs at least 2 rows to hold one out, got {count} sample")
    size = min(max(round(config.holdout * count), 1), count - 1)
    random = np.random.default_rng(0)
    if config.time_column is not None:
        held = np.argsort(np.array(rows.deciding), kind="stable")[count - size :]
    elif config.group_column is not None:
        names, of = np.unique(np.array(rows.deciding, dtype=str), return_inverse=True)
        require(
            len(names) > 1,
            f"{where}: column {config.group_column!r} has one group only, which cannot be held out",
        )
        order = random.permutation(len(names))
        sizes = np.cumsum(np.bincount(of)[order])
        chosen = order[: min(1 + int(np.searchsorted(sizes, size)), len(names) - 1)]
        held = np.flatnonzero(np.isin(of, chosen))
    elif classes is not None:
        # each class in turn gives its share, in a random order
        shuffled = random.permutation(count)
        of = np.unique(np.array(classes, dtype=str), return_inverse=True)[1][shuffled]
        order = np.argsort(of, kind="stable")
        held = shuffled[order][np.floor((np.arange(size) + 0.5) * count / size).astype(np.int64)]
    else:
        held = random.permutation(count)[:size]
    kept = np.setdiff1d(every, held)
    return {"train": kept, "val": np.sort(held), "test": np.sort(held)}


def kind_of_files(path: Path, names: Iterator[str]) -> str:
    """The kind of input that files with these names hold."""
    for name in names:
        suffix = PurePosixPath(name).suffix.lower()
        for kind, entry in INPUTS.items():
            if suffix in entry.suffixes:
                return kind
    known = ", ".join(dict.fromkeys(suffix for entry in INPUTS.values() for suffix in entry.suffixes))
    raise ValueError(
        f"{path} has no file to learn from: expected names that end in {known}, in a folder for each class"
    )


def check_is_table(path: Path) -> None:
    """Refuse a file whose name is not that of a table."""
    require(
        is_table(path),
        f"{path} must be a table ({', '.join(SUFFIXES)}): "
        f"{OTHER.get(path.suffix.lower(), 'write it as CSV or Parquet')}",
    )


def check_is_archive(path: Path) -> None:
    """Refuse a file that is neither a table nor an archive of files."""
    sheets = (".xlsx", ".xls", ".ods", ".json")
    if path.is_file() and (path.suffix.lower() in sheets or Source(path).kind() == "file"):
        check_is_table(path)
