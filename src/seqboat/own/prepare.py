"""Copy your own files to arrays: a table, or a folder with a folder for each class."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqboat.console import Advance
from seqboat.core.checks import require
from seqboat.data.sources import Source, check_name, read_file
from seqboat.data.store import Prepared, RaggedWriter, Skips, Staging
from seqboat.data.tables import TABLE_SUFFIXES, check_known, is_table, read_records
from seqboat.own.inputs import INPUTS, Input
from seqboat.tasks.task import SPLITS

if TYPE_CHECKING:
    from seqboat.own.targets import Target
    from seqboat.own.task import OwnTaskConfig

PART_NAMES = {
    "train": 0,
    "training": 0,
    "val": 1,
    "valid": 1,
    "validation": 1,
    "dev": 1,
    "test": 2,
    "testing": 2,
}
"""What a column of splits may say."""


COLUMNS = ("text_column", "label_column", "second_column", "file_column", "series_column")
"""Settings that name a column."""


class OwnRecord(NamedTuple):
    """A record that was read: its input and its other values."""

    place: str
    """its place in the file, for messages"""
    line: int
    stored: NDArray[Any]
    second: NDArray[Any] | None
    values: Mapping[str, Any]


def input_name(config: OwnTaskConfig) -> str:
    """The kind of input that a task reads: as it says, or by what its training data looks like."""
    if config.input != "auto":
        return config.input
    if config.channels:
        return "series"
    if config.tokenizer:
        return "tokens"
    path = Path(config.train)
    if config.file_column is not None:
        return _first_kind(path, _named_files(path, config))
    if path.is_file() and is_table(path):
        return "text"
    require(
        path.exists(), f"{path} does not exist: expected a table, or a folder with a folder for each class"
    )
    check_known(path)
    require(
        path.is_dir() or Source(path).kind() != "file",
        f"{path}: the name of a table must end in {', '.join(TABLE_SUFFIXES)} (text may be .gz, .xz or .bz2)",
    )
    return _first_kind(path, (member.name for member in Source(path).members(_is_known)))


def _named_files(path: Path, config: OwnTaskConfig) -> Iterator[str]:
    assert config.file_column is not None
    for record in read_records(path, (config.file_column,), Skips(most=1.0)):
        yield str(record.values[config.file_column])


def _kind_of(name: str) -> str | None:
    suffix = PurePosixPath(name).suffix.lower()
    return next((kind for kind, entry in INPUTS.items() if suffix in entry.suffixes), None)


def _is_known(name: str) -> bool:
    return _kind_of(name) is not None


def _first_kind(path: Path, names: Iterable[str]) -> str:
    for name in names:
        if kind := _kind_of(name):
            return kind
    known = ", ".join(suffix for entry in INPUTS.values() for suffix in entry.suffixes)
    raise ValueError(
        f"{path} has no file to learn from: expected names that end in {known}, in a folder for each class"
    )


def read_own(
    path: Path, source: Input, config: OwnTaskConfig, skips: Skips, label: str | None
) -> Iterator[OwnRecord]:
    """The records of a table or of a folder; bad ones are counted and left out.

    Args:
        path: of the table or folder.
        source: reads the inputs.
        config: of the task.
        skips: the policy for bad records.
        label: the column that every record needs besides its inputs; None if there are no labels.
    """
    if path.is_dir() or not is_table(path):
        yield from _read_folder(path, source, config, skips)
    elif config.series_column is not None:
        yield from _read_steps(path, source, config, skips, label)
    else:
        yield from _read_table(path, source, config, skips, label)


def _records(
    path: Path, columns: tuple[str, ...], config: OwnTaskConfig, skips: Skips, label: str | None
) -> Any:
    wanted = (*columns, *((label,) if label is not None else ()))
    return read_records(
        path,
        tuple(dict.fromkeys(wanted)),
        skips,
        label=label,
        encoding=config.encoding,
        delimiter=config.delimiter,
        flags={getattr(config, name): f"--data.{name}" for name in COLUMNS if getattr(config, name)},
    )


def _read_table(
    path: Path, source: Input, config: OwnTaskConfig, skips: Skips, label: str | None
) -> Iterator[OwnRecord]:
    columns = source.columns if config.file_column is None else (config.file_column,)
    if config.second_column is not None:
        columns = (*columns, config.second_column)
    for record in _records(path, columns, config, skips, label):
        place = f"line {record.line}"
        try:
            if config.file_column is None:
                stored = source.read(record.values)
            else:
                stored = source.read_file(_named_content(path, str(record.values[config.file_column])))
            second = (
                None if config.second_column is None else source.read(record.values, config.second_column)
            )
        except ValueError as error:
            skips.add(path.name, place, str(error))
            continue
        yield OwnRecord(place, record.line, stored, second, record.values)


def _named_content(table: Path, name: str) -> bytes:
    check_name(table, name)
    return read_file(table.parent / name)


def _read_steps(
    path: Path, source: Input, config: OwnTaskConfig, skips: Skips, label: str | None
) -> Iterator[OwnRecord]:
    """Series of a table with one row per time; the rows of a series stand together, the last one has its target."""
    assert config.series_column is not None
    seen: set[str] = set()
    steps: list[NDArray[Any]] = []
    name, first = "", 0
    last: Mapping[str, Any] = {}

    def finish() -> Iterator[OwnRecord]:
        if steps:
            yield OwnRecord(f"series {name}", first, np.concatenate(steps), None, last)
            steps.clear()

    for record in _records(path, source.columns, config, skips, label):
        try:
            step = source.read(record.values)
        except ValueError as error:
            skips.add(path.name, f"line {record.line}", str(error))
            continue
        found = str(record.values[config.series_column])
        if found != name or not steps:
            yield from finish()
            require(
                found not in seen,
                f"{path.name}, line {record.line}: series {found!r} was there before: sort the table by "
                f"{config.series_column!r}",
            )
            seen.add(found)
            name, first = found, record.line
        steps.append(step)
        last = record.values
    yield from finish()


def _read_folder(path: Path, source: Input, config: OwnTaskConfig, skips: Skips) -> Iterator[OwnRecord]:
    suffixes = type(source).suffixes
    require(
        bool(suffixes),
        f"{path}: {source.name} inputs are rows of a table (CSV, TSV, JSONL or Parquet), not files in a folder",
    )
    files = Source(path)
    count = 0
    for member in files.members(lambda name: PurePosixPath(name).suffix.lower() in suffixes):
        count += 1
        try:
            stored = source.read_file(member.read())
        except ValueError as error:
            skips.add(path.name, member.name, str(error))
            continue
        values = {"file": member.name}
        if len(member.parts) > 1:
            values[config.label_column] = member.parts[-2]
        yield OwnRecord(member.name, count, stored, None, values)


class _Splits:
    """What decides about the split of each record."""

    def __init__(self, config: OwnTaskConfig, staging: Staging) -> None:
        self.config = config
        given = {"part": config.split_column, "group": config.group_column, "time": config.time_column}
        self.name, self.column = next(
            ((name, column) for name, column in given.items() if column is not None), ("", "")
        )
        dtypes = {"part": np.uint8, "group": np.uint64, "time": np.float64, "": np.uint8}
        self.array = staging.array(self.name, dtypes[self.name]) if self.name else None
        self.waiting: list[Any] = []

    def read(self, values: Mapping[str, Any]) -> Any:
        if self.array is None:
            return None
        value = values.get(self.column)
        require(value is not None and str(value).strip() != "", f"empty {self.column!r}")
        text = str(value).strip()
        if self.name == "part":
            require(
                text.lower() in PART_NAMES,
                f"{self.column!r} must be one of {', '.join(SPLITS)}, got {text[:40]!r}",
            )
            return PART_NAMES[text.lower()]
        if self.name == "group":
            return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")
        return read_time(text)

    def append(self, value: Any) -> None:
        if self.array is not None:
            self.waiting.append(value)
            if len(self.waiting) == 4096:
                self.flush()

    def flush(self) -> None:
        if self.array is not None:
            self.array.append(np.array(self.waiting, self.array.dtype))
            self.waiting.clear()


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


def prepare_own(
    path: Path,
    source: Input,
    target: Target,
    config: OwnTaskConfig,
    staging: Staging,
    skips: Skips,
    advance: Advance,
) -> Prepared:
    """Copy records to arrays, in bounded memory."""
    inputs = RaggedWriter(staging, "inputs", source.dtype)
    seconds = None if config.second_column is None else RaggedWriter(staging, "second", source.dtype)
    target.open(staging)
    splits = _Splits(config, staging)
    label = config.label_column
    rows = size = 0
    for record in read_own(path, source, config, skips, label):
        try:
            wanted = target.read(record.values, record.stored)
            part = splits.read(record.values)
        except ValueError as error:
            skips.add(path.name, record.place, str(error))
            continue
        try:
            target.append(wanted, record.line)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        splits.append(part)
        inputs.append(record.stored)
        if seconds is not None and record.second is not None:
            seconds.append(record.second)
        rows += 1
        size += record.stored.nbytes
        if size >= 1 << 22:
            advance(size)
            size = 0
    splits.flush()
    extra = target.close()
    require(rows > 0 or skips.count > 0, f"{path} has no rows")
    skips.check(rows)
    return Prepared({"rows": rows}, {**extra, "input": dict(source.extra)})
