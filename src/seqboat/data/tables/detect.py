"""How a table is written: its kind, encoding and delimiter, from the first megabyte of the file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from seqboat.core.checks import require
from seqboat.data.sources import looks_like_html, open_stream

DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_SUFFIXES = (*DELIMITERS, *JSON_SUFFIXES, ".parquet")
SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers")
BINARY_TABLES = (
    ".feather",
    ".arrow",
    ".orc",
    ".avro",
    ".pkl",
    ".pickle",
    ".h5",
    ".hdf5",
    ".sqlite",
    ".db",
    ".dta",
)
CANDIDATES = (",", ";", "\t", "|")
NAMES = {",": "commas (,)", ";": "semicolons (;)", "\t": "tabs", "|": "vertical bars (|)"}
UNDEFINED_IN_1252 = bytes([0x81, 0x8D, 0x8F, 0x90, 0x9D])
SAMPLE = 1 << 20
"""Bytes that are looked at."""
PROBED = 50
"""Lines that each delimiter is tried on."""

Kind = Literal["delimited", "lines", "array", "parquet"]


class Form(NamedTuple):
    """How a table is written."""

    kind: Kind
    encoding: str = "utf-8"
    delimiter: str = ","
    notes: tuple[str, ...] = ()
    """what a user should know: guesses that could be wrong"""


def detect(
    path: Path, wanted: Sequence[str] = (), encoding: str | None = None, delimiter: str | None = None
) -> Form:
    """Detect how a table is written; a ValueError names the file and says what else it is.

    Args:
        path: of the table.
        wanted: names of columns; a delimiter that gives them is preferred.
        encoding: if it is known.
        delimiter: if it is known.
    """
    require(path.is_file(), f"{path} is not a file: expected a table (CSV, TSV, JSONL or Parquet)")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    with open_stream(path) as stream:
        head = _read(stream, SAMPLE)
    if head.startswith(b"PAR1"):
        return Form("parquet")
    check_known(path)
    require(
        not head.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")),
        f"{path} is a spreadsheet or an archive, not a table: export it as CSV in UTF-8",
    )
    require(".parquet" not in suffixes, f"{path} is not a Parquet file, or it is damaged")
    require(
        any(suffix in TABLE_SUFFIXES for suffix in suffixes),
        f"{path}: the name must end in .csv, .tsv, .jsonl, .json or .parquet (text may be .gz, .xz or .bz2)",
    )
    require(not looks_like_html(head[:512]), f"{path} is a web page, not a table")
    columns = f"; expected a table with the columns {', '.join(wanted)}" if wanted else ""
    require(bool(head.strip()), f"{path} is empty{columns}")
    encoding, notes = _encoding(path, head) if encoding is None else (encoding, ())
    if any(suffix in JSON_SUFFIXES for suffix in suffixes):
        return Form(_json_kind(head.decode(encoding, "replace"), suffixes), encoding, notes=notes)
    if delimiter is not None:
        return Form("delimited", encoding, delimiter, notes)
    expected = next(DELIMITERS[suffix] for suffix in suffixes if suffix in DELIMITERS)
    delimiter = _delimiter(head.decode(encoding, "replace").lstrip("\ufeff"), expected, wanted)
    if delimiter != expected:
        notes += (
            f"{path.name}: fields are separated by {NAMES[delimiter]}, not {NAMES[expected]} "
            "(--data.delimiter names another)",
        )
    return Form("delimited", encoding, delimiter, notes)


def check_known(path: Path) -> None:
    """Refuse kinds of tables that other programs write, with a way out."""
    suffix = path.suffix.lower()
    require(
        suffix not in SPREADSHEETS,
        f"{path} is a spreadsheet: save the sheet as CSV in UTF-8 (in Excel: CSV UTF-8, comma delimited)",
    )
    require(
        suffix not in BINARY_TABLES,
        f"{path}: tables of this kind are not read: write it as CSV or Parquet, in pandas with "
        'frame.to_csv("rows.csv", index=False)',
    )


def _json_kind(text: str, suffixes: Sequence[str]) -> Kind:
    """An array of objects, or one object in each line."""
    text = text.lstrip("\ufeff \t\r\n")
    opened = text.startswith("[") and (".json" in suffixes or text[1:].lstrip().startswith("{"))
    return "array" if opened else "lines"


def _read(stream: object, size: int) -> bytes:
    parts = []
    while size > 0 and (part := stream.read(size)):  # type: ignore[attr-defined]
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _encoding(path: Path, head: bytes) -> tuple[str, tuple[str, ...]]:
    """UTF-8, UTF-16 with its mark, or a guess where most of what is not ASCII is not UTF-8 either."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16", (f"{path.name}: read as UTF-16, as its first bytes say",)
    require(
        b"\0" not in head[:512], f"{path} is not text in UTF-8: save the table as UTF-8, without packing it"
    )
    lines = head.split(b"\n")
    # the last line of a sample may be cut in the middle of a character
    lines = lines[:-1] if len(head) >= SAMPLE else lines
    special = [line for line in lines if not line.isascii()]
    bad = sum(not _is_utf8(line) for line in special)
    if 2 * bad <= len(special):
        return "utf-8", ()
    latin = any(byte in head for byte in UNDEFINED_IN_1252)
    encoding, name = ("latin-1", "Latin-1") if latin else ("cp1252", "Windows-1252")
    note = (
        f"{path.name}: {bad:,} of the first {len(lines):,} lines are not UTF-8; read as {name} "
        "(--data.encoding names another encoding)"
    )
    return encoding, (note,)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _delimiter(text: str, expected: str, wanted: Sequence[str]) -> str:
    """The expected delimiter if it gives the wanted columns, else the best of the others."""
    lines = text.splitlines()[:PROBED]

    def judge(delimiter: str) -> tuple[bool, int, bool]:
        rows = _parse(lines, delimiter)
        columns = rows[0] if rows else []
        equal = sum(len(row) == len(columns) for row in rows)
        regular = len(columns) > 1 and 2 * equal > len(rows)
        return bool(wanted) and set(wanted) <= set(columns), regular * len(columns), delimiter == expected

    best = max(CANDIDATES, key=judge)
    found, columns, _ = judge(best)
    return best if found or (columns > 1 and judge(expected)[1] <= 1) else expected


def _parse(lines: Iterable[str], delimiter: str) -> list[list[str]]:
    rows = []
    reader = csv.reader(lines, delimiter=delimiter)
    while True:
        try:
            rows.append(next(reader))
        except csv.Error:
            continue
        except StopIteration:
            return [row for row in rows if row]
