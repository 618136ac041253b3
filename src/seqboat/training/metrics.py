"""metrics.jsonl: one line per record of a run; and the memory of a process, some of its numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from seqboat.data.files import write_text

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]


def resident_peak() -> int:
    """Bytes of memory that this process has held at most; 0 where the system does not tell."""
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class MemoryMeter:
    """The memory of a training process: the most so far, and on a GPU the mean over steps of what each one took.

    Args:
        device: of the process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.most = 0
        """bytes; of a GPU, as far as steps have ended"""
        self.peaks: list[int] = []
        """bytes that the steps since the last reading had allocated at most"""

    def start_step(self) -> None:
        """Forget the peak of what came before, such as an evaluation."""
        if self.device.type == "cuda":
            self.most = max(self.most, torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)

    def end_step(self) -> None:
        """Keep the peak of the step."""
        if self.device.type == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated(self.device))

    def read(self) -> dict[str, float]:
        """The most so far (`memory_mb`), and on a GPU the mean over the steps since the last call."""
        if self.device.type != "cuda":
            return {"memory_mb": resident_peak() / 2**20}
        self.most = max(self.most, *self.peaks)
        mean = sum(self.peaks) / len(self.peaks)
        self.peaks = []
        return {"memory_mb": self.most / 2**20, "step_memory_mb": mean / 2**20}


def iterate_metrics(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's metrics.jsonl, skipping lines that a crash cut off or damaged."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


class MetricsWriter:
    """Appends records; a run continues if they cannot be written."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self.warn = path, warn
        self.failed = False

    def rewind(self, step: int) -> None:
        """Drop the records that come after the checkpoint from which a run resumes."""
        if self.path.exists():
            kept = [r for r in iterate_metrics(self.path) if r.get("step", 0) <= step]
            write_text(self.path, "".join(json.dumps(r) + "\n" for r in kept))

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            if not self.failed:
                self.warn(f"cannot write metrics: {error}")
            self.failed = True
