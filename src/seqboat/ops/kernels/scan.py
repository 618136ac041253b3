"""The diagonal scan as one operation with kernels for devices: `kernel_scan` returns None where torch should run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.ops.kernels.registry import attempt, pick
from seqboat.ops.scan import BLOCK, block_for, block_tables, final_state, scan


def kernel_scan(
    x: Tensor,
    log_decay: Tensor,
    drive: Tensor,
    read: Tensor,
    skip: Tensor,
    start: Tensor | None,
    mask: Tensor | None,
    activate: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """y_t = Re(read . s_t) + skip x_t with s_t = q s_{t-1} + drive x_t; None if torch should compute it.

    Args:
        x: (batch, time, dim).
        log_decay, drive, read: (directions, dim, states), real or complex.
        skip: (dim,).
        start: (batch, dim, states), the state before the first token, complex ones as pairs; one direction only.
        mask: (batch, time), True on real tokens, which come first; None for all.
        activate: whether to apply SiLU to the outputs.

    Returns:
        y: (batch, time, dim), zeros on padding.
        final: (batch, dim, states), the state after the last real token; None for two directions.
    """
    found = None if torch.compiler.is_compiling() else _pick("scan", x, log_decay)
    if found is None:
        return None
    lengths = None if mask is None else mask.sum(dim=1)
    result = attempt("scan", found, x, log_decay, drive, read, skip, start, lengths, activate)
    if result is None:
        return None
    y, final = result
    return y, final if len(log_decay) == 1 else None


def _pick(operation: str, x: Tensor, log_decay: Tensor) -> Any:
    parts = 2 if log_decay.is_complex() else 1
    return pick(operation, device=x.device, dtype=x.dtype, states=log_decay.shape[-1] * parts)


def torch_scan(
    x: Tensor,
    log_decay: Tensor,
    drive: Tensor,
    read: Tensor,
    skip: Tensor,
    start: Tensor | None,
    lengths: Tensor | None,
    activate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same in torch; the final state is empty for two directions."""
    if lengths is not None:
        real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        x = torch.where(real[..., None], x, 0)
    tables = block_tables(log_decay, drive, read, skip, block_for(x.shape[1], BLOCK))
    y, states = scan(x, tables, len(log_decay) == 2, start)
    y = F.silu(y) if activate else y
    if lengths is not None:
        y = torch.where(real[..., None], y, 0)
    if len(log_decay) == 2:
        return y, x.new_zeros(0)
    return y, final_state(x, states, tables, log_decay[0], start, lengths)


SCAN = (
    "Tensor x, Tensor log_decay, Tensor drive, Tensor read, Tensor skip, Tensor? start, Tensor? lengths, "
    "bool activate"
)


@torch.library.custom_op("seqboat::scan", mutates_args=(), schema=f"({SCAN}) -> (Tensor, Tensor)")
def _scan(*inputs: Any) -> tuple[Tensor, Tensor]:
    from seqboat.ops.kernels.triton_scan_launch import Inputs, scan

    *tensors, activate = inputs
    y, final = scan(Inputs(*tensors), activate)
    return y, y.new_zeros(0) if final is None else final


@_scan.register_fake
def _(x, log_decay, drive, read, skip, start, lengths, activate):  # type: ignore[no-untyped-def]
    width = log_decay.shape[2] * (2 if log_decay.is_complex() else 1)
    final = x.new_empty(0) if len(log_decay) == 2 else x.new_empty(x.shape[0], x.shape[2], width)
    return x.new_empty(x.shape), final


@torch.library.custom_op(
    "seqboat::scan_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor? grad_final, {SCAN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _scan_backward(grad: Tensor, grad_final: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    from seqboat.ops.kernels.triton_scan_launch import Inputs, scan_backward

    *tensors, activate = inputs
    *grads, dstart = scan_backward(grad, grad_final, Inputs(*tensors), activate)
    found = [part.contiguous() for part in grads if part is not None]
    return *found, grad.new_zeros(0) if dstart is None else dstart


@_scan_backward.register_fake
def _(grad, grad_final, x, log_decay, drive, read, skip, start, lengths, activate):  # type: ignore[no-untyped-def]
    like = [part.new_empty(part.shape) for part in (x, log_decay, drive, read, skip)]
    return *like, x.new_empty(0) if start is None else x.new_empty(start.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.activate = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    x, log_decay, *_, start, _ = tensors
    if grad is None and grad_final is None:
        return (None,) * 8
    wanted = torch.zeros_like(x) if grad is None else grad
    found = _pick("scan_backward", x, log_decay)
    if found is not None:
        grads = attempt(
            "scan_backward",
            found,
            wanted,
            grad_final if len(log_decay) == 1 else None,
            *tensors,
            ctx.activate,
        )
        if grads is not None:
            return *grads[:5], None if start is None else grads[5], None, None
    return *_torch_gradients(tensors, ctx.activate, wanted, grad_final), None


def _torch_gradients(
    tensors: tuple[Tensor | None, ...], activate: bool, grad: Tensor, grad_final: Tensor | None
) -> list[Tensor | None]:
    """Gradients of the inputs of `torch_scan`."""
    with torch.enable_grad():
        inputs: list[Any] = [None if part is None else part.detach() for part in tensors]
        given = [part for part in inputs if part is not None]
        leaves = [part.requires_grad_() for part in given if part.is_floating_point() or part.is_complex()]
        run: Any = torch_scan
        y, final = run(*inputs, activate)
        outputs, above = ([y], [grad]) if grad_final is None else ([y, final], [grad, grad_final])
        grads = iter(torch.autograd.grad(outputs, leaves, above))
    return [next(grads) if part is not None and part.requires_grad else None for part in inputs]


_scan.register_autograd(_differentiate, setup_context=_save)


def triton_scan(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The scan by Triton kernels, with gradients."""
    result: tuple[Tensor, Tensor] = _scan(*inputs)
    return result


def triton_scan_backward(*inputs: Any) -> tuple[Tensor, ...]:
    """Its gradients by Triton kernels."""
    result: tuple[Tensor, ...] = _scan_backward(*inputs)
    return result
