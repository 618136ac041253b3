"""Several processes as one: who this process is, sums over all of them, and models spread over them.

Processes are started by `torchrun` or `accelerate launch`; both say in the environment how many there are. With one
process every function here does nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqboat.checks import require
from seqboat.core.nn import batch_norms


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
        """The rows of all processes, in the order of their ranks; every process must have as many."""
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

    def agree(self, error: Exception | None) -> None:
        """Raise the first process's error in all of them."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        box = [error]
        dist.broadcast_object_list(box, src=0)
        if box[0] is not None:
            raise box[0]


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


@contextlib.contextmanager
def join(device: str = "auto") -> Iterator[World]:
    """Join the processes that this one was started with, until the end of the block."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    place = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if size == 1:
        yield World(0, 1, place)
        return
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield World(rank, size, place)
    finally:
        dist.destroy_process_group()


class Spread(NamedTuple):
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


def spread(model: nn.Module, world: World, method: str) -> Spread:
    """Copy a model to all processes (ddp) or spread its parameters over them (fsdp).

    Every parameter gets a gradient in every step, also where a layer activates no token, so no process ever waits
    for a parameter that another one did not use. Batch norms take the moments of all processes' tokens together.
    """
    if world.size == 1:
        return Spread(model, model)
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
        return Spread(model, model)
    return Spread(nn.parallel.DistributedDataParallel(model), model)
