"""Second derivatives and `torch.func` for operations with hand-written backward passes.

A hand-written backward pass is fast because it stores less, works in place and is never differentiated itself. Each
such operation therefore has a plain form, a chain of ordinary PyTorch operators, which replaces it in two cases:

- inside a transform of `torch.func` (grad, vmap, jvp, ...): see `transformed`;
- in a backward pass with `create_graph=True`, whose gradients can be differentiated again: see `gradients_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

transformed = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` is active, so that the plain form must run."""


def vectorized(x: Tensor) -> bool:
    """Whether a tensor is batched by `torch.func.vmap`: then no shape and no branch may depend on its values."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def differentiates_again() -> bool:
    """Inside a backward pass: whether its gradients will be differentiated again (`create_graph=True`)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def gradients_of(
    plain: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Any], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Differentiable gradients of the inputs of `plain`.

    Args:
        plain: the plain form of the operation.
        inputs: its arguments, as saved in the forward pass; arguments that are not tensors get None.
        grads: of its outputs; None where there is none.
    """
    # aliases: one input may depend on another, and only the partial derivatives belong to this operation
    aliases = [part.view_as(part) if isinstance(part, Tensor) else part for part in inputs]
    outputs = plain(*aliases)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    used = [
        (out, grad)
        for out, grad in zip(outputs, grads, strict=True)
        if grad is not None and out.requires_grad
    ]
    wanted = [part for part in aliases if isinstance(part, Tensor) and part.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if used:
        found = torch.autograd.grad(
            [out for out, _ in used], wanted, [grad for _, grad in used], create_graph=True, allow_unused=True
        )
    rest = iter(found)
    return tuple(next(rest) if isinstance(part, Tensor) and part.requires_grad else None for part in aliases)
