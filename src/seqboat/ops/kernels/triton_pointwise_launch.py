"""Launches of `triton_pointwise` and `triton_layer`, which take the arguments of the torch functions."""

from __future__ import annotations

import torch
from torch import Tensor

from seqboat.ops.kernels import triton_layer as joins
from seqboat.ops.kernels import triton_pointwise as kernels
from seqboat.ops.kernels.tuning import CONFIGS, launch, power, scratch
from seqboat.ops.positions import frequencies

REPEAT = 8
"""Blocks of rows per program of backward passes that sum: fewer programs leave fewer sums to add up."""

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


def _programs(name: str, tokens: int) -> int:
    """Of a kernel that leaves sums per program, which has one configuration only."""
    return -(-tokens // (CONFIGS[name][0].sizes["ROWS"] * REPEAT))


def route(
    x: Tensor,
    keep: Tensor | None,
    rate: float,
    weight: Tensor,
    bias: Tensor,
    log_temperature: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden tokens in `dtype`, probabilities and decisions."""
    x = x.contiguous()
    tokens, dim = x.shape
    hidden = scratch(x, tokens, dim, dtype=dtype)
    probs, active = scratch(x, tokens), scratch(x, tokens, dtype=torch.uint8)
    launch(
        joins.route, lambda sizes: (-(-tokens // sizes["ROWS"]),),
        x, _bytes(keep), weight, bias, log_temperature, hidden, probs, active, tokens, dim, 1 / (1 - rate),
        DROPS=keep is not None, DIM=power(dim),
    )  # fmt: skip
    return hidden, probs, active.view(torch.bool)


def route_backward(
    grads: list[Tensor],
    x: Tensor,
    keep: Tensor | None,
    rate: float,
    weight: Tensor,
    bias: Tensor,
    log_temperature: Tensor,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    x, dhidden, dprobs = x.contiguous(), grads[0].contiguous(), grads[1].contiguous()
    tokens, dim = x.shape
    dx = scratch(x, tokens, dim)
    programs = _programs("route_backward", tokens)
    sums = scratch(x, programs, 2 * dim + 3)
    launch(
        joins.route_backward, lambda _: (programs,),
        dhidden, dprobs, x, _bytes(keep), weight, bias, log_temperature, dx, sums, tokens, dim, 1 / (1 - rate),
        DROPS=keep is not None, REPEAT=REPEAT, DIM=power(dim),
    )  # fmt: skip
    dweight, dbias, dlog = sums.sum(dim=0).split([2 * dim, 2, 1])
    return [dx, None, None, dweight.view(2, dim), dbias, dlog, None]


def scatter(
    product: Tensor,
    bias: Tensor,
    base: Tensor | None,
    y: Tensor,
    probs: Tensor,
    active: Tensor,
    places: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """product + bias + base + what active tokens add."""
    product, y = product.contiguous(), y.contiguous()
    base = None if base is None else base.contiguous()
    tokens, dim = product.shape
    out = scratch(product, tokens, dim, dtype=dtype)
    launch(
        joins.scatter, lambda sizes: (-(-tokens // sizes["ROWS"]),),
        product, bias, base, y, probs.contiguous(), _bytes(active), places, out, tokens, dim,
        HAS_BASE=base is not None, DIM=power(dim),
    )  # fmt: skip
    return out


def scatter_backward(
    grads: list[Tensor],
    product: Tensor,
    bias: Tensor,
    base: Tensor | None,
    y: Tensor,
    probs: Tensor,
    active: Tensor,
    places: Tensor,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    grad, y = grads[0].contiguous(), y.contiguous()
    tokens, dim = grad.shape
    narrows = product.dtype != grad.dtype
    dproduct = scratch(grad, tokens, dim, dtype=product.dtype) if narrows else None
    dy, dprobs = scratch(y, *y.shape, dtype=y.dtype), scratch(probs, tokens)
    programs = _programs("scatter_backward", tokens)
    sums = scratch(grad, programs, dim)
    launch(
        joins.scatter_backward, lambda _: (programs,),
        grad, y, probs.contiguous(), _bytes(active), places, dproduct, dy, dprobs, sums, tokens, dim,
        NARROWS=narrows, REPEAT=REPEAT, DIM=power(dim),
    )  # fmt: skip
    dbase = None if base is None else grad
    return [grad if dproduct is None else dproduct, sums.sum(dim=0), dbase, dy, dprobs, None, None, None]


def _bytes(x: Tensor | None) -> Tensor | None:
    """Truth values as kernels read them."""
    return None if x is None else x.contiguous().view(torch.uint8)
