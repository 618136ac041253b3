"""The records of a table, whatever its format."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from seqboat.data.sources import open_stream
from seqboat.data.store import Skips
from seqboat.data.tables.delimited import Lines, delimited_records
from seqboat.data.tables.detect import TABLE_SUFFIXES, Form, detect
from seqboat.data.tables.objects import array_records, line_records, parquet_records


class TableRecord(NamedTuple):
    """A record of a table."""

    line: int
    """the line it begins on, counted from 1; in arrays and Parquet, the number of the record"""
    values: dict[str, Any]
    """strings from delimited text; whatever JSON and Parquet hold otherwise"""


def is_table(path: Path) -> bool:
    """Whether a file's name is that of a table."""
    return any(suffix.lower() in TABLE_SUFFIXES for suffix in path.suffixes)


def bad_text(text: bytes) -> str | None:
    """What is wrong with a text, if anything."""
    if not text.strip():
        return "empty text"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start}"
    return None


def read_records(
    path: Path,
    columns: Sequence[str],
    skips: Skips,
    *,
    label: str | None = None,
    encoding: str | None = None,
    delimiter: str | None = None,
    flags: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[TableRecord]:
    """The records of a table that have all of the columns; others are counted and left out.

    Args:
        path: the table.
        columns: that every record needs; others are read along.
        skips: the policy for bad records; told what was left out.
        label: of the columns, one with few different values, which helps to notice a quote that swallows rows.
        encoding: of the text; detected by default.
        delimiter: of the fields; detected by default.
        flags: the options that name the columns, for messages, by column.

    Raises:
        ValueError: naming the file, where it is no table or has no such column.
    """
    form = detect(path, columns, encoding, delimiter)
    for note in form.notes:
        warnings.warn(note, stacklevel=2)
    for line, values in _open(path, form, columns, label, skips, flags):
        missing = [column for column in columns if column not in values]
        if missing:
            wanted = " and ".join(f"{column!r}" for column in missing)
            there = ", ".join(ascii(name[:40]) for name in list(values)[:10]) or "nothing"
            skips.add(path.name, f"line {line}", f"no {wanted} in it: it has {there}")
        else:
            yield TableRecord(line, values)


def check_encoding(encoding: str) -> None:
    """Refuse an encoding that Python does not know, or that is not one of text."""
    try:
        "".encode(encoding)
    except (LookupError, UnicodeError, ValueError, TypeError):
        raise ValueError(
            f"encoding must be one that Python knows, such as utf-8 or latin-1, got {encoding!r}"
        ) from None


def _open(
    path: Path,
    form: Form,
    columns: Sequence[str],
    label: str | None,
    skips: Skips,
    flags: Mapping[str, str],
) -> Iterator[tuple[int, dict[str, Any]]]:
    if form.kind == "parquet":
        yield from parquet_records(path, columns, flags)
        return
    with open_stream(path) as stream:
        lines = Lines(stream, path.name, skips, form.encoding)
        if form.kind == "array":
            yield from array_records(lines)
        elif form.kind == "lines":
            yield from line_records(lines)
        else:
            yield from delimited_records(lines, form.delimiter, columns, label, flags)
