"""Several processes as one: the rank of this process, sums over all of them, and models spread over them.

Processes are started by `torchrun`, `accelerate launch` or `launch`, which say in the environment how many there are.
With one process every function here does nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.core.nn import batch_norms
from seqboat.training.signals import STOP_SIGNALS

T = TypeVar("T")


class World(NamedTuple):
    """The processes of a run."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of all processes, in the order of their ranks; every process must have the same number."""
        if self.size == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def gather(self, items: list[Any]) -> list[Any]:
        """The items of all processes, in the order of their ranks."""
        if self.size == 1:
            return items
        parts: list[list[Any]] = [[] for _ in range(self.size)]
        dist.all_gather_object(parts, items)
        return [item for part in parts for item in part]

    def broadcast(self, value: Any) -> Any:
        """The first process's value."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def agree(self, error: Exception | None) -> None:
        """Raise the first process's error in all of them."""
        error = self.broadcast(error)
        if error is not None:
            raise error


class _Total(torch.autograd.Function):
    """A sum over all processes, of which every process has the gradients of all."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return total(gradients[0])


@torch.compiler.disable
def total(values: Tensor) -> Tensor:
    """The sum over all processes, differentiable: a value counts in the loss of every process."""
    return cast(Tensor, _Total.apply(values))


def choose_device(name: str, local_rank: int = 0, what: str = "training.device") -> torch.device:
    """The device of a name; "auto" takes a GPU if there is one. Messages call the setting `what`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{what} must be auto, cpu or cuda, got {name!r}") from error
    if device.type == "cuda":
        require(torch.cuda.is_available(), f"{what} is {name}, but there is no GPU")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
    return device


class ProcessesError(Exception):
    """A process of the run does not answer: the message names its rank."""


@contextlib.contextmanager
def join(device: str = "auto", timeout: float = 120.0) -> Iterator[World]:
    """Join the processes that this one was started with, until the end of the block.

    Args:
        device: of this process.
        timeout: seconds to wait for another process.

    Raises:
        ProcessesError: naming the processes that do not answer within the timeout.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    place = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if size == 1:
        yield World(0, 1, place)
        return
    limit = timedelta(seconds=timeout)
    store, rank, size = next(dist.rendezvous("env://", rank, size, timeout=limit))
    dist.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        store=dist.PrefixStore("run", store),
        rank=rank,
        world_size=size,
        timeout=limit,
    )
    try:
        yield World(rank, size, place)
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in _LOST):
            raise
        found = within(min(timeout, 10.0) + 5, lambda: _silent_ranks(store, rank, size, min(timeout, 10.0)))
        # the store of a frozen rank 0 does not answer at all
        silent = ", ".join(map(str, [0] if found is None else found)) or "unknown"
        raise ProcessesError(
            f"rank {rank} of {size} waited more than {timeout:g} s or lost its connection: no answer from rank "
            f"{silent}"
        ) from error
    finally:
        within(10.0, dist.destroy_process_group)


_LOST = ("timed out", "timeout", "connection closed", "connection reset", "connection refused", "broken pipe")
"""Words in the errors of torch.distributed about processes that do not answer."""


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """The result of a call that may block for ever; None if it takes longer or fails."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _silent_ranks(store: dist.Store, rank: int, size: int, patience: float) -> list[int]:
    """Ranks that do not notice the failure too. The store lives in rank 0, or in the launcher."""
    try:
        store.set_timeout(timedelta(seconds=patience))
        store.set(f"noticed/{rank}", "yes")
        ends = time.monotonic() + patience
        while True:
            silent = [other for other in range(size) if not store.check([f"noticed/{other}"])]
            if not silent or time.monotonic() > ends:
                return silent
            time.sleep(0.2)
    except RuntimeError:
        return [0]


def launched() -> bool:
    """Whether this process is one of several that were started together."""
    return "WORLD_SIZE" in os.environ


def launch(command: Sequence[str], processes: int, poll: float = 0.1) -> int:
    """Run a command in several processes of this machine, as ranks of one run, and return its exit code.

    Signals that stop a run are passed on to all of them. When one fails, the others are ended too.

    Args:
        command: of every process.
        processes: how many to start.
        poll: seconds between looks at them.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # several processes that take all cores each would slow one another down
    threads = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // processes, 1))}
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    old = {}
    with contextlib.suppress(ValueError):  # not in the main thread
        old = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    try:
        for rank in range(processes):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # a separate session: a Ctrl-C of the terminal arrives once, through this process
            ranks.append(
                subprocess.Popen(
                    list(command), env={**threads, **os.environ, **shared, **place}, start_new_session=True
                )
            )
        while any(process.poll() is None for process in ranks) and not any(p.returncode for p in ranks):
            time.sleep(poll)
        return _end(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
        for number, handler in old.items():
            signal.signal(number, handler)


def _end(ranks: list[subprocess.Popen[bytes]], patience: float = 30.0) -> int:
    """Wait for processes of which one has ended, and return the exit code of the run."""
    ends = time.monotonic() + patience
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(ends - time.monotonic(), 0))
    for process in ranks:
        if process.poll() is None:
            process.kill()
            process.wait()
    codes = [process.returncode for process in ranks]
    # rank 0 knows how the run ended, unless it was only ended for lack of another
    return codes[0] or next((code for code in codes if code), 0)


class ParallelModel(NamedTuple):
    """A model as the processes see it."""

    run: nn.Module
    """what is called in training"""
    module: nn.Module
    """what has the parameters under their own names"""

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Gradients are added up over the processes only after the last micro-batch."""
        if isinstance(self.run, nn.parallel.DistributedDataParallel):
            with contextlib.nullcontext() if last else self.run.no_sync():
                yield
        else:
            if hasattr(self.run, "set_requires_gradient_sync"):
                cast(Any, self.run).set_requires_gradient_sync(last)
            yield


def parallelize(model: nn.Module, world: World, method: str) -> ParallelModel:
    """Copy a model to all processes (ddp) or spread its parameters over them (fsdp).

    Every parameter gets a gradient in every step, also where a layer activates no token, so no process ever waits
    for a parameter that another one did not use. Batch norms take the moments of all processes' tokens together.
    """
    if world.size == 1:
        return ParallelModel(model, model)
    for norm in batch_norms(model):
        norm.total = total
    if method == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(world.device.type, (world.size,))
        backbone = cast(Any, model).backbone
        for layer in backbone.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return ParallelModel(model, model)
    return ParallelModel(nn.parallel.DistributedDataParallel(model), model)


def gather_shards(value: Tensor) -> Tensor:
    """A tensor that may be sharded over processes, in one piece; every process must call this."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def shard_like(value: Tensor, target: Tensor) -> Tensor:
    """A whole tensor on the device of another, sharded over processes as that one is."""
    if hasattr(target, "full_tensor"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(target, DTensor)
        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    return value.to(target.device)
