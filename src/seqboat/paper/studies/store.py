"""Records of studies: a JSON object per line, one per run, appended by any number of processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seqboat.data.files import taking_turns
from seqboat.paper.tables import Record

KEY = ("study", "trial", "budget", "seed")


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
    found: dict[tuple[Any, ...], Record] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            found[record_key(record)] = record
        except (ValueError, KeyError, TypeError) as error:
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
