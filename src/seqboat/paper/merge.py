"""One page from the results of several machines.

Each machine runs some rows, tasks or seeds and writes a page with its JSON file; `merge` joins them. Two records of
one run (target, scale, trial and seed) must have the same commit and the same numbers; otherwise they are a conflict.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from seqboat.paper.results import read_records, record_key
from seqboat.paper.tables import Record

Keep = Literal["first", "last"]


class Found(NamedTuple):
    """A record and the page that it comes from."""

    record: Record
    page: Path

    def describe(self) -> str:
        """Its score, commit and page."""
        score = self.record.get("test")
        number = "" if score is None else f"{score:.4f} "
        return f"{number}at {self.record.get('commit') or 'an unknown commit'} ({self.page})"


class Conflict(NamedTuple):
    """Records of one run that differ."""

    records: tuple[Found, ...]

    def describe(self) -> str:
        """The run, and what each page says of it."""
        target, scale, trial, seed = record_key(self.records[0].record)
        return f"{target} {scale} {trial} seed {seed}: " + ", ".join(f.describe() for f in self.records)


class Merged(NamedTuple):
    """All records of several pages."""

    records: list[Record]
    """one for each run; of conflicting ones the one to keep"""
    conflicts: list[Conflict]


def merge(pages: Sequence[Path], keep: Keep = "first") -> Merged:
    """Join the records of several pages.

    Args:
        pages: results.md, or the JSON files beside them.
        keep: which of conflicting records to keep, in the order of the pages.
    """
    found: dict[tuple[str, ...], list[Found]] = {}
    for page in pages:
        if not page.with_suffix(".json").exists():
            raise ValueError(f"there is no {page.with_suffix('.json')} to merge")
        for record in read_records(page):
            same = found.setdefault(record_key(record), [])
            if all(other.record != record for other in same):
                same.append(Found(record, page))
    conflicts = [Conflict(tuple(same)) for same in found.values() if len(same) > 1]
    place = 0 if keep == "first" else -1
    return Merged([same[place].record for same in found.values()], conflicts)
