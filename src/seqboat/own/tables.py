"""Tables: CSV, TSV, JSON lines and Parquet as records with their place; what cannot be read is counted."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seqboat.core.checks import require
from seqboat.core.extras import check_installed
from seqboat.data.store import Skips

SUFFIXES = {".csv": ",", ".tsv": "\t", ".jsonl": "", ".ndjson": "", ".parquet": ""}
OTHER = {
    ".xlsx": "save the sheet as CSV in UTF-8",
    ".xls": "save the sheet as CSV in UTF-8",
    ".ods": "save the sheet as CSV in UTF-8",
    ".json": "write one object per line, as .jsonl",
    ".gz": "unpack it first",
    ".zip": "unpack it first",
    ".feather": "write it as CSV or Parquet, in pandas with frame.to_csv or frame.to_parquet",
    ".txt": "write it as CSV or Parquet",
}
MAX_FIELD = 1 << 24
"""Characters of a field or bytes of a line beyond which a row is refused."""
SAID = 120
"""Characters of a list of columns in a message."""


class Record(NamedTuple):
    """One row."""

    place: str
    """where it stands, for messages and for answers: "line 7" """
    values: Mapping[str, Any]


def is_table(path: Path) -> bool:
    """Whether a file's name is that of a table."""
    return path.suffix.lower() in SUFFIXES


def read_table(
    path: Path, skips: Skips, encoding: str = "utf-8", delimiter: str | None = None
) -> Iterator[Record]:
    """The rows of a table, one after the other.

    Args:
        path: of the table.
        skips: told about rows that cannot be read.
        encoding: of CSV, TSV and JSON lines.
        delimiter: of CSV.

    Raises:
        ValueError: naming file, place and remedy, where no row of the file can be trusted.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        hint = OTHER.get(suffix, "write it as CSV or Parquet")
        raise ValueError(f"{path} must be a table ({', '.join(SUFFIXES)}): {hint}")
    require(
        path.exists(), f"{path} does not exist: expected a table, or a folder with a folder for each class"
    )
    require(path.is_file(), f"{path} is not a file: expected a table ({', '.join(SUFFIXES)})")
    if suffix == ".parquet":
        yield from _parquet(path, skips)
        return
    try:
        with open(path, encoding="utf-8-sig" if encoding == "utf-8" else encoding, newline="") as file:
            if suffix in (".jsonl", ".ndjson"):
                yield from _lines(file, path, skips)
            else:
                yield from _rows(file, path, skips, delimiter or SUFFIXES[suffix])
    except UnicodeDecodeError as error:
        where = _line_of_bad_byte(path, encoding)
        raise ValueError(
            f"{path}, {where}: not {encoding} ({error.reason}): save it as UTF-8, or name its encoding, such as "
            "--set encoding=latin-1"
        ) from None
    except LookupError as error:
        raise ValueError(f"--set encoding={encoding}: {error}") from None


def _line_of_bad_byte(path: Path, encoding: str) -> str:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode(encoding)
            except UnicodeDecodeError as error:
                return f"line {number}, byte {error.start + 1}"
    return "somewhere"


def _rows(file: Any, path: Path, skips: Skips, delimiter: str) -> Iterator[Record]:
    csv.field_size_limit(MAX_FIELD)
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    before = 0
    try:
        names = [name.strip() for name in next(reader, None) or []]
        require(bool(names), f"{path} is empty: the first line must name the columns")
        if len(set(names)) < len(names) or not all(names):
            twice = next((name for name in names if names.count(name) > 1), "")
            what = f"{twice!r} is there twice" if twice else "one has no name"
            raise ValueError(f"{path}, line 1: every column needs a name of its own, {what}: rename it")
        before = reader.line_num
        for row in reader:
            place, lines, before = f"line {before + 1}", reader.line_num - before, reader.line_num
            if lines > 3 and _swallowed(row, delimiter, len(names)) > 1:
                raise ValueError(
                    f"{path}, {place}: a quote swallows {lines - 1} lines that look like rows: close or double it"
                )
            if row and len(row) != len(names):
                skips.add(path.name, place, f"expected {len(names)} fields, got {len(row)}")
            elif row:
                yield Record(place, dict(zip(names, row, strict=True)))
    except csv.Error as error:
        if "unexpected end" in str(error):
            reason = "a quote is opened that is never closed: close or double it"
        elif "larger than field limit" in str(error):
            reason = f"a field has more than {MAX_FIELD:,} characters: is a quote never closed?"
        else:
            reason = f"{error}: a quote inside a field must be doubled"
        raise ValueError(f"{path}, line {before + 1}: {reason}") from None


def _swallowed(row: Sequence[str], delimiter: str, columns: int) -> int:
    """Lines inside fields that have as many fields as a row."""
    return sum(line.count(delimiter) == columns - 1 for field in row for line in field.split("\n")[1:])


def _lines(file: Any, path: Path, skips: Skips) -> Iterator[Record]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        if number == 1 and line.lstrip()[:1] == "[":
            raise ValueError(f"{path}, line 1: a JSON array: write one object per line")
        try:
            require(len(line) <= MAX_FIELD, f"a line of more than {MAX_FIELD:,} characters")
            values = json.loads(line, object_pairs_hook=_once)
            require(isinstance(values, dict), "not a JSON object")
        except (ValueError, RecursionError) as error:
            known = isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError)
            reason = str(error) if known else "not a JSON object"
            skips.add(
                path.name, f"line {number}", "a number of too many digits" if "digits" in reason else reason
            )
            continue
        yield Record(f"line {number}", values)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:40]!r} is in the object twice")
    return found


def _parquet(path: Path, skips: Skips) -> Iterator[Record]:
    check_installed("pyarrow", "a Parquet file")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not a Parquet file, or it is damaged: {str(error).splitlines()[0]}"
        ) from None
    require(len(set(names)) == len(names), f"{path}: a column is there twice: rename it")
    number = 0
    try:
        for batch in file.iter_batches(1024):
            try:
                rows: Sequence[Any] = batch.to_pylist()
            except UnicodeDecodeError:
                rows = [
                    _parquet_row(batch, i, path, f"row {number + i + 1}", skips) for i in range(len(batch))
                ]
            for values in rows:
                number += 1
                if values is not None:
                    yield Record(f"row {number}", values)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}, after row {number}: {str(error).splitlines()[0]}") from None


def _parquet_row(batch: Any, index: int, path: Path, place: str, skips: Skips) -> dict[str, Any] | None:
    """One row of a batch that has a text that is not UTF-8; None if it is this one."""
    values = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[name] = column[index].as_py()
        except UnicodeDecodeError as error:
            skips.add(path.name, place, f"not UTF-8 at byte {error.start} of column {name[:40]!r}")
            return None
    return values


def check_columns(
    path: Path, values: Mapping[str, Any], wanted: Mapping[str, str], delimiter: str | None = None
) -> None:
    """Refuse a table whose first row lacks a column.

    Args:
        path: of the table.
        values: of its first row.
        wanted: the flag that names it, by column.
        delimiter: that was given.
    """
    for column, flag in wanted.items():
        if column in values:
            continue
        names = list(values)
        other = next((c for c in ";\t|" if len(names) == 1 and c in names[0]), None)
        if other is not None and delimiter is None and path.suffix.lower() == ".csv":
            shown = "\\t" if other == "\t" else other
            raise ValueError(f"{path}: its columns are separated by {shown!r}: --set delimiter='{shown}'")
        there = ", ".join(name[:40] for name in names)[:SAID]
        raise ValueError(f"{path} has no column {column!r} ({flag} names another): it has {there}")
