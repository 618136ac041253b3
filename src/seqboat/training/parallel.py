"""Several processes as one: the rank of this process, sums over all of them, and models spread over them.

Processes are started and supervised by `torchrun` (or another launcher that sets RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT). With one process every function here does nothing.

Tensors travel over NCCL where there are GPUs; objects and control messages always travel over gloo.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.core.nn import batch_norms

TIMEOUT = timedelta(minutes=30)
"""For a collective operation: a rank may score held-out data or write a checkpoint for a long time meanwhile."""
BEAT = 5.0
"""Seconds between two signs of life of a rank."""
SILENCE = 120.0
"""Seconds without a sign of life after which a rank counts as lost."""

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
        require(
            device.index is None or "LOCAL_RANK" not in os.environ or device.index == local_rank,
            f"{what} must be cuda without a number under torchrun, which gives every rank its own, got {name}",
        )
        count = torch.cuda.device_count()
        require(
            device.index is not None or local_rank < count,
            f"there are {count} GPUs, and this is process {local_rank + 1} here: torchrun --nproc-per-node {count}",
        )
        device = torch.device("cuda", local_rank if device.index is None else device.index)
    return device


class ProcessesError(Exception):
    """A process of the run does not answer: the message names its rank."""


@contextlib.contextmanager
def join(device: str = "auto") -> Iterator[World]:
    """Join the processes that this one was started with, until the end of the block.

    Raises:
        ProcessesError: naming the ranks that were lost. A rank that waits for one without hearing of it says so, and
            its process ends.
    """
    rank, size, local = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    place = choose_device(device, local)
    gpu = place.type == "cuda"
    if gpu:
        # before anything else: also what NCCL and torch do without a name happens on the rank's own GPU
        torch.cuda.set_device(place)
    if size == 1:
        yield World(0, 1, place)
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo", device_id=place if gpu else None, timeout=TIMEOUT
    )
    watch = Watch(rank, size)
    try:
        yield World(rank, size, place)
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in _LOST):
            raise
        lost = watch.lost_after_failure()
        raise ProcessesError(f"rank {rank} of {size} lost its connection: {spell_ranks(lost)}") from error
    finally:
        watch.end()
        within(10.0, dist.destroy_process_group)


_LOST = ("timed out", "timeout", "connection closed", "connection reset", "connection refused", "broken pipe")
"""Words in the errors of torch.distributed about processes that do not answer."""


def spell_ranks(ranks: list[int]) -> str:
    """
    >>> spell_ranks([2, 3])
    'no answer from rank 2, 3'
    """
    return f"no answer from rank {', '.join(map(str, ranks)) or 'unknown'}"


def within(seconds: float, call: Callable[[], object]) -> None:
    """Make a call that may block for ever, but do not wait longer than this."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


class Watch:
    """Signs of life of all ranks, kept in the store that they met in.

    A collective operation waits for a lost rank until its timeout, which has to be long. So every rank says that it
    lives, and one that hears nothing of another for SILENCE seconds names it and ends its own process.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        now = time.monotonic()
        self.heard = dict.fromkeys((other for other in range(size) if other != rank), now)
        """when the sign of each other rank changed last"""
        self.asked = now
        """when the store answered last"""
        self.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        """the process of torchrun, without which nobody would end this one"""
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._listen, self._judge)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Leave the store: a thread that is still in there when the process exits takes it down."""
        self._ended.set()
        for thread in self._threads:
            thread.join(10.0)

    def _listen(self) -> None:
        signs: dict[int, bytes] = {}
        attempt, count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), 0
        # whatever fails here, the store does not answer: `_judge` sees that
        with contextlib.suppress(RuntimeError):
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=SILENCE),
            )
            mine = f"{os.getpid()}-{id(self)}"
            while not self._ended.is_set():
                count += 1
                store.set(f"alive/{attempt}/{self.rank}", f"{mine}-{count}")
                for other in self.heard:
                    key = f"alive/{attempt}/{other}"
                    sign = store.get(key) if store.check([key]) else b""
                    if sign != signs.get(other, b""):
                        signs[other], self.heard[other] = sign, time.monotonic()
                self.asked = time.monotonic()
                self._ended.wait(BEAT)

    def lost(self, seconds: float) -> list[int]:
        """Ranks without a sign of life for so long; rank 0 if the store near it does not answer."""
        before = time.monotonic() - seconds
        if self.asked < before:
            return [0] if self.rank else [*self.heard]
        return [other for other, heard in self.heard.items() if heard < before]

    def lost_after_failure(self) -> list[int]:
        """The lost ranks, once an operation failed for lack of one."""
        ends = time.monotonic() + 4 * BEAT
        while not (found := self.lost(2.5 * BEAT)) and time.monotonic() < ends:
            time.sleep(BEAT / 10)
        return found

    def _judge(self) -> None:
        while not self._ended.wait(min(BEAT, 1.0)):
            if self.launcher not in (None, os.getppid()):
                said = f"seqboat: rank {self.rank} of {self.size}: torchrun is gone"
                print(said, file=sys.stderr, flush=True)
                os._exit(1)
            if found := self.lost(SILENCE):
                said = f"seqboat: rank {self.rank} of {self.size}: {spell_ranks(found)} for {SILENCE:g} s"
                print(said, file=sys.stderr, flush=True)
                os._exit(1)


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
    """Copy a model to all processes (ddp) or spread its parameters over all of them (fsdp) or over those of each
    host (hybrid).

    Every parameter gets a gradient in every step, also where a layer activates no token, so no process ever waits
    for a parameter that another one did not use. Batch norms take the moments of all processes' tokens together.
    """
    if world.size == 1:
        return ParallelModel(model, model)
    for norm in batch_norms(model):
        norm.total = total
    if method != "ddp":
        from torch.distributed.fsdp import fully_shard

        mesh = _mesh(world, method)
        for layer in cast(Any, model).backbone.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return ParallelModel(model, model)
    devices = [world.device] if world.device.type == "cuda" else None
    return ParallelModel(nn.parallel.DistributedDataParallel(model, device_ids=devices), model)


def _mesh(world: World, method: str) -> Any:
    """The processes that parameters are sharded over; with "hybrid", the copies of every host come first."""
    from torch.distributed.device_mesh import init_device_mesh

    if method == "fsdp":
        return init_device_mesh(world.device.type, (world.size,))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    require(
        world.size % here == 0,
        f"training.distributed=hybrid needs as many processes on every host, got {world.size} in all, {here} here",
    )
    return init_device_mesh(
        world.device.type, (world.size // here, here), mesh_dim_names=("replicate", "shard")
    )


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
