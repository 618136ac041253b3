"""Tables of labeled texts: CSV, TSV and JSONL, possibly compressed, read line by line in bounded memory.

A quote that is never closed turns the rest of a CSV file into one field. Only its row is lost: the row is reported,
and the lines it swallowed are read again as separate rows. If a later quote happens to close it, the field spans many
lines that look like rows; such a table is rejected.
"""

from __future__ import annotations

import csv
import io
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from seqboat.checks import require
from seqboat.data.sources import Bounded, looks_like_html, open_stream
from seqboat.data.store import Skips

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
MAX_RECORD = 1 << 24
"""Longest record in characters; longer ones are skipped."""
MAX_LABEL = 1000
"""Longest label in characters."""


class TableRow(NamedTuple):
    """A row of a table of texts."""

    line: int
    """number of its first line, counted from 1"""
    text: bytes
    label: str


def bad_text(text: bytes) -> str | None:
    """What is wrong with a text, if anything."""
    if not text.strip():
        return "empty text"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start}"
    return None


def read_table(path: Path, text_column: str, label_column: str, skips: Skips) -> Iterator[TableRow]:
    """The rows of a CSV, TSV or JSONL file; rows without a text or a label are counted and skipped.

    Raises:
        ValueError: if it is not such a table or lacks a column; the message names the file.
    """
    require(path.is_file(), f"{path} is not a file: expected a CSV, TSV or JSONL table")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    delimiter = next((DELIMITERS[suffix] for suffix in suffixes if suffix in DELIMITERS), None)
    is_json = any(suffix in JSON_SUFFIXES for suffix in suffixes)
    require(
        is_json or delimiter is not None,
        f"{path}: the name must end in .csv, .tsv or .jsonl (perhaps .gz or .xz)",
    )
    with open_stream(path) as stream:
        head = stream.read(512)
    require(not looks_like_html(head), f"{path} is a web page, not a table")
    require(b"\0" not in head, f"{path} is not text in UTF-8: save the table as UTF-8, unpacked")
    with open_stream(path) as stream:
        lines = _Lines(stream, path.name, skips)
        if is_json:
            found = _json_rows(lines, text_column, label_column)
        else:
            found = _csv_rows(lines, delimiter or "", text_column, label_column)
        for row in found:
            if problem := bad_text(row.text) or _bad_label(row.label):
                skips.add(path.name, f"line {row.line}", problem)
            else:
                yield row


def _bad_label(label: str) -> str | None:
    if not label:
        return "empty label"
    return f"a label of {len(label):,} characters" if len(label) > MAX_LABEL else None


class _Lines:
    """The lines of a text file with their numbers; some can be put back."""

    def __init__(self, stream: Bounded, name: str, skips: Skips) -> None:
        self.name = name
        self.skips = skips
        # bytes that are not UTF-8 become surrogates, so that one bad row does not stop the reading
        self._text = io.TextIOWrapper(
            io.BufferedReader(stream, 1 << 20), "utf-8-sig", errors="surrogateescape", newline=""
        )
        self._returned: deque[str] = deque()
        self.number = 0
        """number of the last line returned"""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._returned:
            self.number += 1
            return self._returned.popleft()
        line = self._text.readline(MAX_RECORD)
        while len(line) == MAX_RECORD and not line.endswith("\n"):
            self.number += 1
            self.skip(self.number, f"a line of more than {MAX_RECORD:,} characters")
            while line and not line.endswith(("\n", "\r")):
                line = self._text.readline(MAX_RECORD)
            line = self._text.readline(MAX_RECORD)
        if not line:
            raise StopIteration
        self.number += 1
        return line

    def put_back(self, lines: list[str]) -> None:
        """Return these lines, the last ones returned, once more."""
        self._returned.extendleft(reversed(lines))
        self.number -= len(lines)

    def skip(self, number: int, reason: str) -> None:
        self.skips.add(self.name, f"line {number}", reason)


class _Record:
    """The lines of one record, on their way into the CSV reader."""

    def __init__(self, lines: _Lines) -> None:
        self.source = lines
        self.lines: list[str] = []
        self.size = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.size > MAX_RECORD:
            raise StopIteration
        line = next(self.source)
        self.lines.append(line)
        self.size += len(line)
        return line

    def take(self) -> tuple[int, list[str]]:
        """The number of the record's first line, and its lines."""
        lines, self.lines, self.size = self.lines, [], 0
        return self.source.number - len(lines) + 1, lines


def _csv_rows(lines: _Lines, delimiter: str, text_column: str, label_column: str) -> Iterator[TableRow]:
    limit = csv.field_size_limit(2 * MAX_RECORD)
    try:
        record = _Record(lines)
        reader = csv.reader(record, delimiter=delimiter, strict=True)
        try:
            columns = next(reader, [])
        except csv.Error as error:
            raise ValueError(
                f"{lines.name}, line 1: the names of the columns cannot be read: {error}"
            ) from None
        for column in (text_column, label_column):
            require(
                column in columns,
                f"{lines.name} has no column {column!r}; "
                f"its columns are {', '.join(map(_short, columns)) or 'none'}",
            )
        places = columns.index(text_column), columns.index(label_column)
        seen: set[str] = set()
        record.take()
        while True:
            try:
                fields = next(reader, None)
            except csv.Error:
                first, taken = record.take()
                lines.skip(first, "a quote that is not closed, or text behind a closing quote")
                lines.put_back(taken[1:])
                # a reader that has reached the end, even of a truncated record, cannot continue
                reader = csv.reader(record, delimiter=delimiter, strict=True)
                continue
            if fields is None:
                return
            first, taken = record.take()
            if not fields:
                continue
            if len(fields) != len(columns):
                lines.skip(first, f"expected {len(columns)} fields")
                continue
            if len(taken) > 3:
                _check_swallowed(lines.name, first, taken, delimiter, len(columns), places[1], seen)
            label = _plain(fields[places[1]])
            if len(seen) < MAX_LABEL and len(label) <= MAX_LABEL:
                seen.add(label)
            yield TableRow(first, fields[places[0]].encode("utf-8", "surrogateescape"), label)
    finally:
        csv.field_size_limit(limit)


def _check_swallowed(
    name: str, first: int, taken: list[str], delimiter: str, columns: int, place: int, seen: set[str]
) -> None:
    """Reject a record of many lines that are mostly valid rows: there is a quote missing or one too many."""
    labels = []
    for line in taken[1:-1]:
        try:
            fields = next(csv.reader([line], delimiter=delimiter, strict=True), [])
        except csv.Error:
            continue
        if len(fields) == columns and (label := _plain(fields[place])):
            labels.append(label)
    known = [label for label in labels if label in seen] if seen else labels
    repeated = bool(seen) or 2 * len(set(labels)) <= len(labels)
    require(
        2 * len(known) <= len(taken) - 2 or not repeated,
        f"{name}, line {first}: a quoted field runs over {len(taken)} lines, from line {first + 1} on most of them "
        "rows by themselves: close the quote, or double it if it belongs to the text",
    )


def _short(column: str) -> str:
    return ascii(column if len(column) <= 40 else f"{column[:40]}...")


def _plain(label: str) -> str:
    return label.encode("utf-8", "replace").decode().strip()


def _json_rows(lines: _Lines, text_column: str, label_column: str) -> Iterator[TableRow]:
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line.encode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError):
            lines.skip(lines.number, "not JSON in UTF-8")
            continue
        if not isinstance(record, dict) or text_column not in record or label_column not in record:
            lines.skip(lines.number, f"no {text_column!r} and {label_column!r} in it")
        elif not isinstance(record[text_column], str):
            lines.skip(lines.number, f"{text_column!r} must be a string")
        elif isinstance(record[label_column], dict | list):
            lines.skip(lines.number, f"{label_column!r} must be a word or a number")
        else:
            label = record[label_column]
            text = record[text_column].encode("utf-8", "surrogatepass")
            yield TableRow(lines.number, text, "" if label is None else _plain(str(label)))
