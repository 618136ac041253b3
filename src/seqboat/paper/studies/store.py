"""Records of studies: a JSON object per line, one per run, appended by any number of processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seqboat.core.checks import require, short
from seqboat.data.files import open_regular, taking_turns
from seqboat.paper.tables import Record

KEY: dict[str, Any] = {"study": str, "trial": str, "budget": float | int, "seed": int}
"""Fields that say what a record is of, and their types."""


def record_key(record: Record) -> tuple[Any, ...]:
    """What a record is of: study, trial, budget and seed."""
    return tuple(record[key] for key in KEY)


def records_path(page: Path) -> Path:
    """The records behind a page."""
    return page.with_suffix(".jsonl")


def read_records(page: Path) -> list[Record]:
    """The records behind a page, the last of each run; none if there is no page yet."""
    path = records_path(page)
    if not path.exists():
        return []
    try:
        with open_regular(path) as file:
            lines = file.read().decode().split("\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    found: dict[tuple[Any, ...], Record] = {}
    for number, line in enumerate(lines[:-1] if not lines[-1] else lines, 1):
        try:
            record = json.loads(line)
            for key, kind in KEY.items():
                require(isinstance(record[key], kind), f"{key} is {short(record[key])}")
            found[record_key(record)] = record
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}:{number} does not hold a record of a study: {error}") from error
    return list(found.values())


def append_records(page: Path, records: Iterable[Record]) -> None:
    """Add records; processes take turns, and a line is written at once."""
    path = records_path(page)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(rounded(r), ensure_ascii=False) + "\n" for r in records)
    with taking_turns(path.parent), path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def rounded(value: Any, digits: int = 5) -> Any:
    """Plain data with as many significant digits as anybody reads.

    >>> rounded({"a": [1.23456789, 3]})
    {'a': [1.2346, 3]}
    """
    if isinstance(value, dict):
        return {key: rounded(part, digits) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part, digits) for part in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
