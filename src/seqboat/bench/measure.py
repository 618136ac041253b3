"""Measuring: time of jobs that take turns, and peak memory of a job.

On the CPU the memory of a job is the peak resident set of a process that runs nothing else, with an allocator that
returns freed memory at once; on CUDA it is the peak that the allocator reports.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from seqboat.plugins import load_plugins
from seqboat.training.record import resident_peak
from seqboat.version import __version__

Key = TypeVar("Key")


class Quartiles(NamedTuple):
    """Median and quartiles over several rounds, in seconds."""

    median: float
    low: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Median and quartiles."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(middle, low, high)


def time_rounds(
    jobs: Mapping[Key, Callable[[], Any]], rounds: int, warmup: int, device: str = "cpu"
) -> dict[Key, list[float]]:
    """Seconds of every job in every round; jobs take turns, and the first `warmup` rounds are dropped."""
    times: dict[Key, list[float]] = {label: [] for label in jobs}
    for turn in range(warmup + rounds):
        for label, job in jobs.items():
            _wait(device)
            begin = time.perf_counter()
            job()
            _wait(device)
            if turn >= warmup:
                times[label].append(time.perf_counter() - begin)
    return times


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def available_memory(device: str = "cpu") -> int:
    """Bytes that can still be allocated on a device."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            found.append(int((group / limit).read_text()) - int((group / used).read_text()))
        except (OSError, ValueError):
            continue  # no such limit
    return max(min(found), 0)


def _status(key: str) -> int | None:
    """An entry of /proc/self/status, in bytes."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _highest() -> int:
    return _status("VmHWM") or resident_peak()


def extra_peak(job: Callable[[], Any], device: str = "cpu") -> int:
    """Peak memory of a job beyond what was in use before, in bytes.

    On the CPU this measures the resident set of the whole process: call it in a separate one (`in_child`), where
    freed memory is returned to the system at once.
    """
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        job()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    # reset the peak resident set; where that is impossible, a lower peak goes unnoticed
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    now = _status("VmRSS") or _highest()
    job()
    return max(_highest() - now, 0)


def _limit_memory() -> None:
    """Let this process ask for no more than is free: it fails by itself before the system has to end something."""
    now = _status("VmSize")
    if now is None:
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (now + available_memory(), hard))


def _child(pipe: Connection, threads: int, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    _limit_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the process that measures has said what is wrong with them
        load_plugins()
    try:
        pipe.send((job(*arguments), None))
    except Exception as error:
        pipe.send((None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))
    pipe.close()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, old in before.items():
            if old is None:
                del os.environ[key]
            else:
                os.environ[key] = old


# without these, glibc keeps freed memory: a step would seem to need less than it does
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def in_child(job: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module-level function in a fresh process whose allocator returns freed memory at once."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with _environment(_GIVE_BACK):
        process = context.Process(
            target=_child, args=(sender, torch.get_num_threads(), job, arguments), daemon=True
        )
        process.start()
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"the measuring process ended with code {process.exitcode}, perhaps out of memory"
        ) from None
    finally:
        receiver.close()
    process.join()
    if error is not None:
        raise RuntimeError(error)
    return result


def machine() -> dict[str, Any]:
    """The hardware and software that the numbers depend on."""
    name = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        pass
    return {
        "seqboat": __version__,
        "torch": torch.__version__,
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def as_record(rows: Sequence[Any], setting: Any, **extra: Any) -> dict[str, Any]:
    """All measurements as plain data for a JSON file."""
    return {"machine": machine(), "setting": asdict(setting), **extra, "rows": [_plain(row) for row in rows]}


def _plain(value: Any) -> Any:
    """Convert named tuples to dictionaries, recursively."""
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def human_seconds(seconds: float) -> str:
    """A duration with its unit."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
