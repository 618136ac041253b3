"""Experiment trackers, each an optional library that is imported when it is asked for.

All of them get what metrics.jsonl gets. Those that run a server or talk to one do so on their own terms; nothing
here opens a port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from seqboat.core.extras import missing


class Tracker(Protocol):
    """Where metrics go besides the run's own file."""

    def log(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record as `split/name`, one per layer for activation rates."""
    split = record["split"]
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, float):
            flat[f"{split}/{name}"] = value
    for layer, rate in enumerate(record.get("activation", ()), start=1):
        if rate is not None:
            flat[f"{split}/activation/{layer}"] = rate
    return flat


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.writer = _load("torch.utils.tensorboard", "tensorboard").SummaryWriter(
            str(folder / "tensorboard")
        )

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in numbers(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class ServiceTracker:
    """trackio and wandb, which share their interface."""

    def __init__(self, library: str, folder: Path) -> None:
        self.library = _load(library, library)
        self.library.init(project="seqboat", name=folder.name)

    def log(self, record: Mapping[str, Any]) -> None:
        self.library.log(numbers(record), step=record["step"])

    def close(self) -> None:
        self.library.finish()


def _load(module: str, library: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(missing(library, "training.trackers")) from error


def make_trackers(names: Sequence[str], folder: Path) -> list[Tracker]:
    """The trackers of a run."""
    return [TensorBoard(folder) if name == "tensorboard" else ServiceTracker(name, folder) for name in names]
