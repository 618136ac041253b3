"""Are standard seconds worth the same on a busy machine? Training steps of several models beside other processes.

    OMP_NUM_THREADS=1 python benchmarks/standard_seconds.py --data-dir data

For every model and number of busy processes: how much longer a step takes than alone, in seconds of processor time
and in standard seconds (`seqboat.paper.studies.clock`), which the studies of `seqboat reproduce` count. These are
medians over rounds that take all loads in turn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from seqboat.paper.machine import apply_settings
from seqboat.paper.studies.clock import Probe, StandardClock
from seqboat.paper.studies.tables import TABLES
from seqboat.paper.tables import table
from seqboat.training.config import RunConfig
from seqboat.training.planning.pace import step_seconds

TRIALS = (
    "listops-seqboat",
    "listops-transformer",
    "listops-mamba2",
    "enwik8-seqboat",
    "enwik8-mega-chunk",
    "image-s4d",
)
LOADS = (0, 1, 2, 4)
"""Busy processes beside the one that is timed."""


def work() -> None:
    """Keep a core, its caches and the memory busy."""
    torch.set_num_threads(1)
    probe = Probe()
    while True:
        probe()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Other processes that compute."""
    running = [multiprocessing.Process(target=work, daemon=True) for _ in range(processes)]
    for process in running:
        process.start()
    time.sleep(3 if running else 0)  # until they have been imported
    try:
        yield
    finally:
        for process in running:
            process.terminate()
            process.join()


def timed(config: RunConfig, clock: Callable[[], float]) -> float:
    return step_seconds(config, clock, timed=20, untimed=5)


def measure(configs: dict[str, RunConfig], rounds: int) -> dict[tuple[str, int], tuple[float, float]]:
    """Seconds of processor time and standard seconds of a step, by model and load."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for load in LOADS:
            with busy(load):
                for name, config in configs.items():
                    pair = timed(config, time.process_time), timed(config, StandardClock())
                    found.setdefault((name, load), []).append(pair)
    return {
        key: (statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs))
        for key, pairs in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="folder of the data sets")
    parser.add_argument("--rounds", type=int, default=3, help="each with every load")
    arguments = parser.parse_args()
    trials = {trial.name: trial for trial in TABLES.trials}
    settings = [f"--data.data_dir={arguments.data_dir}"]
    configs = {name: apply_settings(trials[name].config(0), settings) for name in TRIALS}
    found = measure(configs, arguments.rounds)
    rows = []
    for name in TRIALS:
        alone = found[name, 0]
        cells = [
            [now / then for now, then in zip(found[name, load], alone, strict=True)] for load in LOADS[1:]
        ]
        rows.append(
            [
                trials[name].title + ", " + trials[name].task_title,
                f"{1000 * alone[0]:.0f} ms",
                *(f"{processor:.2f} -> {standard:.2f}" for processor, standard in cells),
            ]
        )
    head = ["step of", "alone", *(f"{load} busy" for load in LOADS[1:])]
    print("\n".join(table(head, rows)))


if __name__ == "__main__":
    main()
