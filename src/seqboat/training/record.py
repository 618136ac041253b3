"""What a run records besides weights: its folder, metrics.jsonl, memory, versions, trackers."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors
import torch

from seqboat.data.files import read_json, write_text
from seqboat.plugins import found_plugins
from seqboat.training.checkpoint import CheckpointStore
from seqboat.version import __version__

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


TOLD = ("data", "baselines")
"""Entries of run.json about the data, which a resumed run keeps."""


def prepare_folder(folder: Path, resume: bool) -> None:
    """Make a run's folder, or refuse one that cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # a fresh name: a run that was killed here may have left its probe behind
        with tempfile.TemporaryDirectory(prefix=".stage-probe-", dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write to the run's folder {folder}: {error.strerror}") from error
    if not resume and (CheckpointStore(folder).steps() or (folder / "config.json").exists()):
        raise ValueError(
            f"{folder} already holds a run: resume it (--resume) or choose another folder (--out)"
        )


def read_told(folder: Path) -> dict[str, Any]:
    """What a run was told about its data before its first step; empty if it was not."""
    try:
        found = read_json(folder / "run.json")
    except ValueError:
        return {}
    return {key: found[key] for key in TOLD if key in found} if isinstance(found, dict) else {}


def remove_unused(folder: Path, made: Sequence[Path] = ()) -> None:
    """Remove a folder in which nothing but a lock was written, and the folders above that were made for it."""
    with contextlib.suppress(OSError):
        if [entry.name for entry in folder.iterdir()] == ["lock"] and not (folder / "lock").stat().st_size:
            (folder / "lock").unlink()
            folder.rmdir()
            for path in made[1:]:
                path.rmdir()


def versions() -> dict[str, str]:
    """Versions of the libraries that compute, and of the packages of plug-ins."""
    plugins = {plugin.package: plugin.version or "" for plugin in found_plugins() if plugin.package}
    return {
        **plugins,
        "seqboat": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """What computes: "cpu", or the model of a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def commit() -> str | None:
    """The commit of the working copy that this package is in, if it is in one."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


BF16_PRODUCT = "import torch; a = torch.ones(512, 64).bfloat16(); assert float((a @ a.T)[0, 0]) == 64"


def probe_bf16(code: str = BF16_PRODUCT) -> bool:
    """Whether a product of two bf16 matrices survives on this processor, tried in a process of its own.

    Some virtual machines pass on the flags of tile instructions (AMX) without having them: there such a product ends
    the process with an illegal instruction, unless ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 is in its environment.
    """
    return (
        subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, timeout=300).returncode == 0
    )


def processor_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """The model of the processor, as far as the system tells."""
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"


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
        raise ValueError(f"training.trackers needs {library}: pip install {library}") from error


def make_trackers(names: Sequence[str], folder: Path) -> list[Tracker]:
    """The trackers of a run."""
    return [TensorBoard(folder) if name == "tensorboard" else ServiceTracker(name, folder) for name in names]
