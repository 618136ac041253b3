"""Build a model from an untrusted configuration, in no more memory than its weights justify.

A configuration file of a few bytes can ask for a model of terabytes. The header of the weights file says how large
the model really is; building stops at the first tensor that exceeds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

SLACK = 64 << 20
"""Elements beyond those of the weights that building a model may allocate, for tables and scratch space."""


class _Allocations(TorchDispatchMode):
    """Count the elements that factory functions such as `torch.empty` make, and stop at a limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.left = limit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if args and not _tensors(args):
            self.left -= _elements(func.overloadpacket.__name__, args)
            if self.left < 0:
                raise _TooLarge
        return func(*args, **(kwargs or {}))


class _TooLarge(Exception):
    pass


def _tensors(args: Iterable[Any]) -> bool:
    return any(isinstance(part, torch.Tensor) for part in args)


def _elements(name: str, args: tuple[Any, ...]) -> int:
    """How many elements a factory function is asked for."""
    for part in args:
        if isinstance(part, list | tuple):
            return math.prod(part) if all(isinstance(size, int) for size in part) else 0
    numbers = [part for part in args if isinstance(part, int | float) and not isinstance(part, bool)]
    if name == "eye":
        return int(numbers[0] * numbers[-1])
    return int(max((abs(number) for number in numbers), default=0))


def build_within(build: Callable[[], T], elements: int, layers: int, tensors: int, name: str) -> T:
    """Call `build`, but raise a ValueError if the model is far larger than its weights.

    Args:
        build: makes a model.
        elements: number of values in the weights file.
        layers: number of layers that the configuration asks for.
        tensors: number of tensors in the file; every layer has at least one.
        name: of the file or folder, for the message.
    """
    if layers > tensors:
        raise ValueError(
            f"{name}: the configuration asks for {layers:,} layers, the weights have {tensors:,} tensors"
        )
    try:
        with _Allocations(4 * elements + SLACK):
            return build()
    except _TooLarge:
        raise ValueError(
            f"{name}: the configuration asks for a model far larger than its weights of {elements:,} numbers"
        ) from None
