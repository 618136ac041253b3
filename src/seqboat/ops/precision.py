"""Scans, scores and softmax stay in the precision of their inputs, also where autocast is on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def full_precision(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run a function with autocast off: forward in a training step, backward wherever it is called.

    Custom operators resolve the annotations of what this returns in this module, so `Tensor` is imported by name.
    """

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        first = args[0]
        assert isinstance(first, Tensor)
        with torch.autocast(first.device.type, enabled=False):
            return function(*args, **kwargs)

    return run


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
    """The product of (batch, i, j) and (batch, j, k) with autocast off, also in a backward pass inside of it."""
    result = _Product.apply(a, b)
    assert isinstance(result, Tensor)
    return result
