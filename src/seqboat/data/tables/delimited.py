"""Delimited text, such as CSV: one record per row, read in bounded memory.

A quote that is never closed turns the rest of a CSV file into one field. Only its row is lost: the row is reported,
and the lines it swallowed are read again as separate rows. If a later quote happens to close it, the field spans many
lines that look like rows; such a table is rejected.
"""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from seqboat.core.checks import require
from seqboat.data.sources import Bounded
from seqboat.data.store import Skips

MAX_RECORD = 1 << 24
"""Longest record in characters; longer ones are skipped."""
MAX_LABEL = 1000
"""Longest label in characters, and most labels to remember."""


class Lines:
    """The lines of a text file with their numbers; some can be put back."""

    def __init__(self, stream: Bounded, name: str, skips: Skips, encoding: str = "utf-8") -> None:
        self.name = name
        self.skips = skips
        # undecodable bytes become surrogates, so that one bad row does not stop the reading
        encoding, errors = ("utf-8-sig", "surrogateescape") if encoding == "utf-8" else (encoding, "replace")
        self._text = io.TextIOWrapper(io.BufferedReader(stream, 1 << 20), encoding, errors=errors, newline="")
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

    def read(self, size: int) -> str:
        """The next characters, whatever the lines are."""
        return self._text.read(size)

    def put_back(self, lines: list[str]) -> None:
        """Return these lines, the last ones returned, once more."""
        self._returned.extendleft(reversed(lines))
        self.number -= len(lines)

    def skip(self, number: int, reason: str) -> None:
        self.skips.add(self.name, f"line {number}", reason)


class _Record:
    """The lines of one record, on their way into the CSV reader."""

    def __init__(self, lines: Lines) -> None:
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


def check_columns(name: str, wanted: Sequence[str], columns: Sequence[str], flags: Mapping[str, str]) -> None:
    """Refuse a table without one of the columns that are needed.

    Args:
        name: of the table.
        wanted: names of the columns.
        columns: that there are.
        flags: the options that name the columns, by column.
    """
    for column in wanted:
        hint = f" ({flags[column]} names another column)" if column in flags else ""
        require(
            column in columns,
            f"{name} has no column {column!r}; its columns are {', '.join(map(_short, columns)) or 'none'}{hint}",
        )


def delimited_records(
    lines: Lines, delimiter: str, wanted: Sequence[str], label: str | None, flags: Mapping[str, str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows as dictionaries, with the line that each begins on."""
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
        check_columns(lines.name, wanted, columns, flags)
        place = None if label is None else columns.index(label)
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
                _check_swallowed(lines.name, first, taken, delimiter, len(columns), place, seen)
            if place is not None and len(seen) < MAX_LABEL and len(fields[place]) <= MAX_LABEL:
                seen.add(fields[place].strip())
            yield first, dict(zip(columns, fields, strict=True))
    finally:
        csv.field_size_limit(limit)


def _check_swallowed(
    name: str, first: int, taken: list[str], delimiter: str, columns: int, place: int | None, seen: set[str]
) -> None:
    """Reject a record of many lines that are mostly valid rows: there is a quote missing or one too many."""
    labels = []
    for line in taken[1:-1]:
        try:
            fields = next(csv.reader([line], delimiter=delimiter, strict=True), [])
        except csv.Error:
            continue
        if len(fields) == columns and (label := fields[place or 0].strip()):
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
