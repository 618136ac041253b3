"""Precision of training: autocast, TF32, and the loss scale that keeps small fp16 gradients from vanishing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import torch

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which a model runs; the weights stay in full precision."""
    half = HALVES.get(precision)
    return torch.autocast(device.type, half or torch.bfloat16, enabled=half is not None)


@contextlib.contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """Round the factors of fp32 matrix products on NVIDIA GPUs to TF32 (10 bits of mantissa) if asked to."""
    if precision != "tf32":
        yield
        return
    places: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.allow_tf32 = value


class LossScale(NamedTuple):
    """What an fp16 loss is multiplied with before its backward pass, always a power of two.

    A gradient that overflows halves it, and the step is not applied. After `PATIENCE` steps without an overflow it
    doubles. The state is part of every checkpoint.
    """

    scale: float = 2.0**12
    steps: int = 0
    """since it changed"""

    def after(self, overflow: bool) -> LossScale:
        """The scale of the next step."""
        if overflow:
            return LossScale(self.scale / 2)
        if self.steps + 1 >= PATIENCE:
            return LossScale(min(self.scale * 2, LARGEST))
        return LossScale(self.scale, self.steps + 1)


PATIENCE = 2000
LARGEST = 2.0**24
SMALLEST = 2.0**-10
"""A gradient that overflows at this scale is no matter of precision."""
