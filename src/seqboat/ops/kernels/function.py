"""An operation in torch with kernels beside it: forward and backward are chosen independently of each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqboat.ops.kernels.registry import Implementation, attempt, pick
from seqboat.ops.transforms import differentiates_again, gradients_of, transformed

Plain = Callable[..., Any]


def run_kernel(operation: str, plain: Plain, *inputs: Any, **call: Any) -> Any:
    """The results of an operation: by the kernel that is chosen and fits, or else by `plain`.

    Args:
        operation: its name in the registry.
        plain: computes it in torch, and is what autograd differentiates where no kernel does.
        inputs: its arguments; gradients are those of the floating-point tensors among them.
        call: what kernels need to know besides device and type to refuse.
    """
    if transformed() or torch.compiler.is_compiling():
        return plain(*inputs)
    call |= {"device": inputs[0].device, "dtype": inputs[0].dtype}
    found = pick(operation, **call)
    return plain(*inputs) if found is None else _Kernel.apply(operation, found, plain, call, *inputs)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, operation: str, found: Implementation, plain: Plain, call: dict[str, Any], *inputs: Any
    ) -> Any:
        ctx.about = operation, plain, call
        ctx.places = [place for place, part in enumerate(inputs) if isinstance(part, Tensor)]
        ctx.others = [None if isinstance(part, Tensor) else part for part in inputs]
        ctx.save_for_backward(*(inputs[place] for place in ctx.places))
        results = attempt(operation, found, *inputs)
        return plain(*inputs) if results is None else results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        operation, plain, call = ctx.about
        inputs = list(ctx.others)
        for place, part in zip(ctx.places, ctx.saved_tensors, strict=True):
            inputs[place] = part
        if differentiates_again():
            return None, None, None, None, *gradients_of(plain, inputs, list(grads))
        name = f"{operation}_backward"
        found = pick(name, **call)
        results = None if found is None else attempt(name, found, list(grads), *inputs)
        if results is None:
            with torch.enable_grad():
                leaves = [_leaf(part) for part in inputs]
                outputs = plain(*leaves)
                outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
                wanted = [part for part in leaves if isinstance(part, Tensor) and part.requires_grad]
                # decisions have no gradient
                above = [grad for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
                outputs = [out for out in outputs if out.requires_grad]
                made = iter(torch.autograd.grad(outputs, wanted, above, allow_unused=True))
            results = [
                next(made) if isinstance(part, Tensor) and part.requires_grad else None for part in leaves
            ]
        return None, None, None, None, *results


def _leaf(part: Any) -> Any:
    if not isinstance(part, Tensor):
        return part
    return part.detach().requires_grad_(part.is_floating_point())
