"""Launches of the kernels in `triton_pointwise`. Each takes the arguments of the torch function beside its call."""

from __future__ import annotations

from torch import Tensor

from seqboat.ops.kernels import triton_pointwise as kernels
from seqboat.ops.kernels.tuning import CONFIGS, launch, power, scratch
from seqboat.ops.positions import frequencies

REPEAT = 8
"""Blocks of rows per program of the backward pass of a norm: fewer programs leave fewer sums to add up."""

ROWS = {name: CONFIGS[name][0].sizes["ROWS"] for name in ("open_gates_backward", "norm_backward")}
"""Rows per block of the kernels that leave sums per program: these have one configuration only."""


def ema_coefficients(
    delta: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """log_decay, drive and read."""
    parts = [part.contiguous() for part in (delta, alpha, beta, gamma)]
    results = [scratch(delta, *delta.shape) for _ in range(3)]
    count = delta.numel()
    launch(
        kernels.ema_coefficients,
        lambda sizes: (-(-count // sizes["BLOCK"]),),
        *parts,
        *results,
        count,
        factor,
    )
    return results[0], results[1], results[2]


def ema_coefficients_backward(
    grads: list[Tensor], delta: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, factor: float
) -> list[Tensor | None]:
    parts = [part.contiguous() for part in (*grads, delta, alpha, beta)]
    results = [scratch(delta, *delta.shape) for _ in range(4)]
    count = delta.numel()
    launch(
        kernels.ema_coefficients_backward,
        lambda sizes: (-(-count // sizes["BLOCK"]),),
        *parts, *results, count, factor,
    )  # fmt: skip
    return [*results, None]


def open_gates(
    before: Tensor, gamma: Tensor, beta: Tensor, position: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and gate."""
    before = before.contiguous()
    tokens, width = before.shape
    d_z = gamma.shape[1]
    d_v = (width - d_z) // 2
    q, k = (scratch(before, tokens, d_z, dtype=before.dtype) for _ in range(2))
    opened = scratch(before, tokens, 2 * d_v, dtype=before.dtype)
    launch(
        kernels.open_gates,
        lambda sizes: (-(-tokens // sizes["ROWS"]), 1 + -(-2 * d_v // sizes["COLUMNS"])),
        before, gamma.float().contiguous(), beta.float().contiguous(), position, _frequency(position, d_z, before),
        q, k, opened, tokens, d_z, d_v, ROTARY=position is not None, HALF=max(power(d_z) // 2, 1),
    )  # fmt: skip
    gate, value = opened.split([d_v, d_v], dim=1)
    return q, k, value, gate


def open_gates_backward(
    grads: list[Tensor], before: Tensor, gamma: Tensor, beta: Tensor, position: Tensor | None
) -> list[Tensor | None]:
    before = before.contiguous()
    tokens, width = before.shape
    d_z = gamma.shape[1]
    d_v = (width - d_z) // 2
    dq, dk, dvalue, dgate = (part.contiguous() for part in grads)
    dbefore = scratch(before, tokens, width, dtype=before.dtype)
    sums = scratch(before, -(-tokens // ROWS["open_gates_backward"]), 4, d_z)
    launch(
        kernels.open_gates_backward,
        lambda sizes: (-(-tokens // sizes["ROWS"]), 1 + -(-2 * d_v // sizes["COLUMNS"])),
        dq, dk, dgate, dvalue, before, gamma.float().contiguous(), position, _frequency(position, d_z, before),
        dbefore, sums, tokens, d_z, d_v, ROTARY=position is not None, HALF=max(power(d_z) // 2, 1),
    )  # fmt: skip
    dgamma, dbeta = sums.sum(dim=0).to(gamma.dtype).split([2, 2])
    return [dbefore, dgamma, dbeta, None]


def _frequency(position: Tensor | None, d_z: int, like: Tensor) -> Tensor | None:
    return None if position is None else frequencies(d_z, like.device)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, activate: bool) -> Tensor:
    """Norm of x or SiLU(x) over the last dimension: a layer norm if there is a bias, else by root mean square."""
    x = x.contiguous()
    dim = x.shape[-1]
    rows = x.numel() // max(dim, 1)
    y = scratch(x, *x.shape, dtype=x.dtype)
    launch(
        kernels.norm, lambda sizes: (-(-rows // sizes["ROWS"]),), x, weight, bias, y, rows, dim, eps,
        ACTIVATE=activate, CENTER=bias is not None, SCALAR=weight.dim() == 0, DIM=power(dim),
    )  # fmt: skip
    return y


def norm_backward(
    grads: list[Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, activate: bool
) -> list[Tensor | None]:
    x, grad = x.contiguous(), grads[0].contiguous()
    dim = x.shape[-1]
    rows = x.numel() // max(dim, 1)
    dx = scratch(x, *x.shape, dtype=x.dtype)
    sums = scratch(x, -(-rows // (ROWS["norm_backward"] * REPEAT)), 2, dim)
    launch(
        kernels.norm_backward, lambda sizes: (-(-rows // (sizes["ROWS"] * REPEAT)),),
        grad, x, weight, dx, sums, rows, dim, eps,
        ACTIVATE=activate, CENTER=bias is not None, SCALAR=weight.dim() == 0, REPEAT=REPEAT, DIM=power(dim),
    )  # fmt: skip
    if weight.dim() == 0:
        return [dx, sums[:, 0].sum().to(weight.dtype), None, None, None]
    dweight, dbias = sums.sum(dim=0)
    return [dx, dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype), None, None]
