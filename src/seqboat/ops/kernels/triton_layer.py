"""What joins the parts of a layer, as one Triton kernel forward and one backward each.

`route` makes the hidden tokens from the outputs of the state-space layer (SiLU, dropout) and the decisions of the
paper's router about them, while they are in registers. `scatter` adds the residual input, the dense product, and the
outputs of the active tokens, weighted by their confidence. Gradients of parameters are summed per program and then
over programs, in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from seqboat.ops.kernels.triton_pointwise import load_half, sigmoid, silu, silu_slope, store_half

MOST = tl.constexpr(20.0)
"""Bound of the logarithm of the temperature."""


@triton.jit
def load_router(weight, bias, log_temperature, column, dim):
    """Differences of the two options' weights and biases, and the temperature's logarithm as given and as used."""
    inside = column < dim
    difference = tl.load(weight + dim + column, mask=inside, other=0.0) - tl.load(
        weight + column, mask=inside, other=0.0
    )
    given = tl.load(log_temperature)
    return difference, tl.load(bias + 1) - tl.load(bias), given, tl.minimum(tl.maximum(given, -MOST), MOST)


@triton.jit
def load_hidden(x, keep, row, column, tokens, dim, factor, DROPS: tl.constexpr):
    """The inputs, and their hidden tokens: SiLU, with dropout where there is any."""
    before = load_half(x, row, column, tokens, dim, dim)
    hidden = silu(before)
    if DROPS:
        hidden *= factor * load_half(keep, row, column, tokens, dim, dim)
    return before, hidden


@triton.jit
def route(
    x, keep, weight, bias, log_temperature, hidden, probs, active, tokens, dim, factor,
    DROPS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Hidden tokens, the probability of activation, and whether it is above one half."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    difference, shift, _, log = load_router(weight, bias, log_temperature, column, dim)
    _, inner = load_hidden(x, keep, row, column, tokens, dim, factor, DROPS)
    store_half(hidden, row, column, tokens, dim, dim, inner)
    logit = (tl.sum(inner * difference[None, :], axis=1) + shift) * tl.exp(-log)
    probability = sigmoid(logit)
    tl.store(probs + row, probability, mask=row < tokens)
    # a token that is not finite activates nothing
    chosen = tl.where(logit < float("inf"), tl.where(probability > 0.5, 1, 0), 0)
    tl.store(active + row, chosen.to(tl.uint8), mask=row < tokens)


@triton.jit
def route_backward(
    dhidden, dprobs, x, keep, weight, bias, log_temperature, dx, sums, tokens, dim, factor,
    DROPS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and per program those of weight, bias and log_temperature, (programs, 2 dim + 3)."""
    column = tl.arange(0, DIM)
    difference, shift, given, log = load_router(weight, bias, log_temperature, column, dim)
    scale = tl.exp(-log)
    dweight = tl.zeros((DIM,), dtype=tl.float32)
    dbias = tl.zeros((ROWS,), dtype=tl.float32)
    dlog = tl.zeros((ROWS,), dtype=tl.float32)
    for part in range(REPEAT):
        row = (tl.program_id(0) * REPEAT + part) * ROWS + tl.arange(0, ROWS)
        before, inner = load_hidden(x, keep, row, column, tokens, dim, factor, DROPS)
        logit = (tl.sum(inner * difference[None, :], axis=1) + shift) * scale
        probability = sigmoid(logit)
        above = tl.load(dprobs + row, mask=row < tokens, other=0.0) * probability * (1 - probability)
        dlog -= above * logit
        above *= scale
        dbias += above
        dweight += tl.sum(above[:, None] * inner, axis=0)
        below = load_half(dhidden, row, column, tokens, dim, dim) + above[:, None] * difference[None, :]
        below *= silu_slope(before)
        if DROPS:
            below *= factor * load_half(keep, row, column, tokens, dim, dim)
        store_half(dx, row, column, tokens, dim, dim, below)
    own = sums + tl.program_id(0) * (2 * dim + 3)
    tl.store(own + column, -dweight, mask=column < dim)
    tl.store(own + dim + column, dweight, mask=column < dim)
    total = tl.sum(dbias, axis=0)
    tl.store(own + 2 * dim, -total)
    tl.store(own + 2 * dim + 1, total)
    # beyond its bounds the temperature stays the same
    tl.store(own + 2 * dim + 2, tl.where(given == log, tl.sum(dlog, axis=0), 0.0))


@triton.jit
def load_packed(pointer, active, places, row, column, tokens, dim):
    """Rows of the packed array, zeros for inactive tokens; where they are, and which."""
    inside = row < tokens
    taken = tl.load(active + row, mask=inside, other=0) != 0
    place = tl.load(places + row, mask=inside, other=1) - 1
    at = place[:, None].to(tl.int64) * dim + column[None, :]
    mask = taken[:, None] & (column[None, :] < dim)
    return tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32), at, mask


@triton.jit
def scatter(
    product, bias, base, y, probs, active, places, out, tokens, dim,
    HAS_BASE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """product + bias + base, and the packed outputs times their confidence where a token is active."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    result = load_half(product, row, column, tokens, dim, dim)
    result += tl.load(bias + column, mask=column < dim, other=0.0)[None, :]
    if HAS_BASE:
        result += load_half(base, row, column, tokens, dim, dim)
    packed, _, _ = load_packed(y, active, places, row, column, tokens, dim)
    result += packed * tl.load(probs + row, mask=row < tokens, other=0.0)[:, None]
    store_half(out, row, column, tokens, dim, dim, result)


@triton.jit
def scatter_backward(
    grad, y, probs, active, places, dproduct, dy, dprobs, sums, tokens, dim,
    NARROWS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the packed outputs and their confidence, and per program those of the bias, (programs, dim).

    The gradients of product and base are `grad` itself; NARROWS writes it in the type of the product.
    """
    column = tl.arange(0, DIM)
    dbias = tl.zeros((DIM,), dtype=tl.float32)
    for part in range(REPEAT):
        row = (tl.program_id(0) * REPEAT + part) * ROWS + tl.arange(0, ROWS)
        above = load_half(grad, row, column, tokens, dim, dim)
        dbias += tl.sum(above, axis=0)
        if NARROWS:
            store_half(dproduct, row, column, tokens, dim, dim, above)
        packed, at, mask = load_packed(y, active, places, row, column, tokens, dim)
        tl.store(dprobs + row, tl.sum(above * packed, axis=1), mask=row < tokens)
        weight = tl.load(probs + row, mask=row < tokens, other=0.0)
        tl.store(dy + at, above * weight[:, None], mask=mask)
    tl.store(sums + tl.program_id(0) * dim + column, dbias, mask=column < dim)
