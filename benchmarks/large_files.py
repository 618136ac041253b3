"""Train on files that are larger than the memory they may take.

    python benchmarks/large_files.py --text 5 --table 2        # gigabytes; about 7 GB more for the prepared copies

Generates a text and a table, trains `lm` and `classify` on them for 20 steps, each in a separate process, and prints
the time and the largest amount of memory that the process held. Everything is written to a temporary folder in
`--folder`, which is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

STEPS = 20
BLOCK = 1 << 20


class Measured(NamedTuple):
    """What training on a file took."""

    seconds: float
    megabytes: float
    """resident memory at its largest"""


def words(seed: int) -> Iterator[str]:
    """Words of a small language, without end."""
    draw = random.Random(seed)
    known = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(2000)]
    while True:
        yield draw.choice(known)


def write_text(path: Path, size: int) -> None:
    """A text of about `size` bytes: one block over and over."""
    source = words(0)
    block = ""
    while len(block) < BLOCK:
        block += " ".join(next(source) for _ in range(12)) + ".\n"
    with open(path, "w", encoding="ascii") as file:
        for _ in range(max(size // len(block), 1)):
            file.write(block)


def write_table(path: Path, size: int) -> None:
    """A table of about `size` bytes in rows of about 100, some of them quoted, with three labels."""
    source = words(1)
    block = ""
    while len(block) < BLOCK:
        text = " ".join(next(source) for _ in range(15))
        text = f'"{text}, and ""more"""' if len(block) % 3 == 0 else text
        block += f"{text},{('good', 'bad', 'mixed')[len(text) % 3]}\n"
    with open(path, "w", encoding="ascii") as file:
        file.write("text,label\n")
        for _ in range(max(size // len(block), 1)):
            file.write(block)


def train(recipe: str, flag: str, path: Path, folder: Path) -> Measured:
    """Train a recipe on a file, in another process."""
    command = [sys.executable, "-m", "seqboat", "train", recipe, f"{flag}={path}", f"--out={folder / 'run'}"]
    command += [
        f"--data.data_dir={folder / 'data'}",
        f"--schedule.steps={STEPS}",
        "--schedule.warmup_steps=2",
    ]
    command += [f"--evaluation.every={STEPS}", "--evaluation.limit=64", "--training.save_every=1000"]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    return Measured(time.perf_counter() - start, usage.ru_maxrss / 1024)


def measure(text: int, table: int, folder: Path) -> Iterator[tuple[str, Measured]]:
    """Train on a text and on a table of these sizes in bytes; files are removed as soon as they are not needed."""
    for recipe, flag, name, size, write in (
        ("lm", "--data.text", "text.txt", text, write_text),
        ("classify", "--data.train", "table.csv", table, write_table),
    ):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            path = Path(place) / name
            write(path, size)
            yield recipe, train(recipe, flag, path, Path(place))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=float, default=5.0, metavar="GB", help="size of the text")
    parser.add_argument("--table", type=float, default=2.0, metavar="GB", help="size of the table")
    parser.add_argument("--folder", type=Path, help="where to put the files (default: the system's)")
    options = parser.parse_args()
    for recipe, found in measure(
        int(options.text * 1e9), int(options.table * 1e9), options.folder or Path(tempfile.gettempdir())
    ):
        print(
            f"{recipe}: {found.megabytes:,.0f} MB at most, {found.seconds:.0f} s, {STEPS} steps", flush=True
        )


if __name__ == "__main__":
    main()
