"""Scores, sums and products that stay in float32 or float64 under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqboat.ops.transforms import transformed


def wide_type(x: Tensor) -> torch.dtype:
    """The dtype of scores and sums: float64 for float64, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """Cast a tensor to the dtype of scores and sums."""
    return x if x.dtype == torch.float64 else x.float()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with torch.autocast(a.device.type, enabled=False):
            return torch.bmm(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        return (
            product(grad, b.transpose(1, 2)) if needs_a else None,
            product(a.transpose(1, 2), grad) if needs_b else None,
        )


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product of (batch, i, j) and (batch, j, k) with autocast off, in the backward pass too."""
    if transformed():
        with torch.autocast(a.device.type, enabled=False):
            return torch.bmm(a, b)
    if a is b:  # the compiler rejects a function that gets the same tensor twice
        b = b.view_as(b)
    result = _Product.apply(a, b)
    assert isinstance(result, Tensor)
    return result
