"""Launches of the kernels in `triton_layer`. Each takes the arguments of the torch function beside its call."""

from __future__ import annotations

import torch
from torch import Tensor

from seqboat.ops.kernels import triton_layer as kernels
from seqboat.ops.kernels.tuning import CONFIGS, launch, power, scratch

REPEAT = 8
"""Blocks of rows per program of the backward passes: fewer programs leave fewer sums to add up."""


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
        kernels.route, lambda sizes: (-(-tokens // sizes["ROWS"]),),
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
        kernels.route_backward, lambda _: (programs,),
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
        kernels.scatter, lambda sizes: (-(-tokens // sizes["ROWS"]),),
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
        kernels.scatter_backward, lambda _: (programs,),
        grad, y, probs.contiguous(), _bytes(active), places, dproduct, dy, dprobs, sums, tokens, dim,
        NARROWS=narrows, REPEAT=REPEAT, DIM=power(dim),
    )  # fmt: skip
    dbase = None if base is None else grad
    return [grad if dproduct is None else dproduct, sums.sum(dim=0), dbase, dy, dprobs, None, None, None]


def _bytes(x: Tensor | None) -> Tensor | None:
    """Truth values as kernels read them."""
    return None if x is None else x.contiguous().view(torch.uint8)
