"""Tables of objects: JSON lines, JSON arrays and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from seqboat.core.checks import require
from seqboat.core.extras import check_installed
from seqboat.data.tables.delimited import MAX_RECORD, Lines, check_columns

_SPACE = " \t\r\n"
_BATCH = 1024
"""Records of a Parquet file that are in memory at once."""


def line_records(lines: Lines) -> Iterator[tuple[int, dict[str, Any]]]:
    """One object in each line."""
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line.encode("utf-8", "surrogateescape"))
        except UnicodeDecodeError as error:
            lines.skip(lines.number, f"not UTF-8 at byte {error.start}")
            continue
        except json.JSONDecodeError as error:
            lines.skip(lines.number, f"not JSON: {error.msg} at column {error.colno}")
            continue
        except (ValueError, RecursionError):
            lines.skip(lines.number, "not JSON: nested too deeply, or a number that is too long")
            continue
        if isinstance(record, dict):
            yield lines.number, record
        else:
            lines.skip(lines.number, "expected an object in braces")


def array_records(lines: Lines) -> Iterator[tuple[int, dict[str, Any]]]:
    """An array of objects over any number of lines; numbers are those of the objects."""
    decoder = json.JSONDecoder()
    text = _Text(lines)
    require(text.next_character() == "[", f"{lines.name} is not a JSON array of objects")
    text.drop(1)
    number = 0
    while (character := text.next_character()) != "]":
        require(character != "", f"{lines.name} ends in the middle of its JSON array, after {number} records")
        if number:
            require(character == ",", f"{lines.name}: no comma after record {number} of the JSON array")
            text.drop(1)
            require(
                text.next_character() not in ("", "]"),
                f"{lines.name} ends in the middle of its JSON array, after {number} records",
            )
        number += 1
        record = text.decode(decoder, number)
        if isinstance(record, dict):
            yield number, record
        else:
            lines.skip(number, "expected an object in braces")
    text.drop(1)
    require(text.next_character() == "", f"{lines.name}: there is more text after the JSON array")


class _Text:
    """The text of a file as far as it is needed."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.text = ""
        self.place = 0

    def next_character(self) -> str:
        """The next that is not space; "" at the end."""
        while True:
            while self.place < len(self.text):
                if self.text[self.place] not in _SPACE:
                    return self.text[self.place]
                self.place += 1
            if not self._more():
                return ""

    def drop(self, count: int) -> None:
        self.place += count

    def _more(self, least: int = 1 << 16) -> bool:
        more = self.lines.read(least)
        self.text, self.place = self.text[self.place :] + more, 0
        return bool(more)

    def decode(self, decoder: json.JSONDecoder, number: int) -> Any:
        """The value that begins here."""
        self.next_character()
        while True:
            try:
                value, end = decoder.raw_decode(self.text, self.place)
            except (ValueError, RecursionError) as error:
                have = len(self.text) - self.place
                # as much again as there is already, so that a long record is not read over and over
                if isinstance(error, ValueError) and have <= MAX_RECORD and self._more(max(have, 1 << 16)):
                    continue
                raise ValueError(
                    f"{self.lines.name}: record {number} of the JSON array cannot be read"
                ) from None
            # a number at the very end of what was read could continue
            if end < len(self.text) or not isinstance(value, int | float) or not self._more():
                self.place = end
                return value


def parquet_records(
    path: Path, columns: Sequence[str], flags: Mapping[str, str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a Parquet file."""
    check_installed("pyarrow", f"{path.name} (Parquet)")
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            check_columns(path.name, columns, names, flags)
            number = 0
            for batch in file.iter_batches(_BATCH):
                for values in batch.to_pylist():
                    number += 1
                    yield number, values
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None
