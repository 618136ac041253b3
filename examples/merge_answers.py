"""Put the answers of the jobs of an array together, in the order of the input.

    n=$SLURM_ARRAY_TASK_ID
    seqboat predict RUN new.csv --shard $n/$SLURM_ARRAY_TASK_COUNT --out part-$n.csv
    python -P examples/merge_answers.py answers.csv part-*.csv

The column `input_row` of each part has the number of the row in the input.
"""

from __future__ import annotations

import contextlib
import csv
import heapq
import sys
from collections.abc import Sequence
from pathlib import Path

from seqboat.data.files import replacing
from seqboat.predict import NUMBER


def merge(out: Path, parts: Sequence[Path]) -> int:
    """Write all rows to `out`; returns how many. A ValueError names what is missing or does not fit."""
    with contextlib.ExitStack() as stack:
        tables = [csv.DictReader(stack.enter_context(open(p, newline="", encoding="utf-8"))) for p in parts]
        names = tables[0].fieldnames or []
        for path, table in zip(parts, tables, strict=True):
            if table.fieldnames != names or NUMBER not in names:
                raise ValueError(f"{path} must have the columns of {parts[0]}, and one called {NUMBER}")
        stage = stack.enter_context(replacing(out, parts))
        writer = csv.DictWriter(
            stack.enter_context(open(stage, "w", newline="", encoding="utf-8")), names, lineterminator="\n"
        )
        writer.writeheader()
        count = 0
        # each part is in order
        for row in heapq.merge(*tables, key=lambda row: int(row[NUMBER])):
            if int(row[NUMBER]) != count:
                raise ValueError(f"row {count} is in none of the parts, or row {row[NUMBER]} in two")
            writer.writerow(row)
            count += 1
    return count


if __name__ == "__main__":
    print(f"{merge(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]):,} rows")
