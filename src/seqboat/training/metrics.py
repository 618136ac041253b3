"""metrics.jsonl: one line per record of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def iterate_metrics(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's metrics.jsonl, skipping lines that a crash cut off or damaged."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record
