"""Tables of IMDB reviews for `seqboat train classify`: three classes by rating (tickets), or two.

    python benchmarks/reviews.py imdb_train.jsonl.xz --out tickets.csv --classes 3 --rows 3000
    python benchmarks/reviews.py imdb_test.jsonl.xz --out tickets-test.csv --classes 3 --rows 1000
    seqboat train classify --data.train tickets.csv --data.test tickets-test.csv

A file has one review per line, with `text` and `rating` (1 to 10), plain or compressed by xz. Three classes: bad (up
to 3), mixed, good (from 8). Two classes: neg (up to 4) and pos (from 7); other reviews are left out. Rows are chosen
and shuffled by a fixed seed.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
from collections import Counter
from pathlib import Path

import numpy as np

CLASSES = {3: ("bad", "mixed", "good"), 2: ("neg", "pos")}


def read_reviews(path: str, classes: int, rows: int | None) -> list[tuple[str, int]]:
    """Texts and class numbers, in random order."""
    with (lzma.open if path.endswith(".xz") else open)(path, "rt", encoding="utf-8") as file:
        reviews = [json.loads(line) for line in file]
    low, high = (4, 7) if classes == 2 else (3, 8)
    found = []
    for number in np.random.default_rng(0).permutation(len(reviews)):
        text, rating = reviews[number]["text"], reviews[number]["rating"]
        if low < rating < high:
            if classes == 2:
                continue
            found.append((text, 1))
        else:
            found.append((text, 0 if rating <= low else classes - 1))
    return found[:rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reviews", help="JSONL file of reviews, may be .xz")
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    parser.add_argument("--classes", type=int, choices=(2, 3), default=3)
    parser.add_argument("--rows", type=int, help="all by default")
    args = parser.parse_args()
    found = read_reviews(args.reviews, args.classes, args.rows)
    names = CLASSES[args.classes]
    with args.out.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("text", "label"))
        table.writerows((text, names[label]) for text, label in found)
    counts = Counter(names[label] for _, label in found)
    print(f"{args.out}: {len(found):,} rows,", ", ".join(f"{name} {counts[name]:,}" for name in names))


if __name__ == "__main__":
    main()
