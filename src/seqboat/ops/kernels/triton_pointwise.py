"""Chains of elementwise operations around scan and attention, each as one Triton kernel forward and one backward.

`ema_coefficients` makes decay, drive and read of MD-EMA from its parameters, `open_gates` queries, keys, values and
gates from their projection (with rotary positions if wanted), and `norm` a norm of SiLU. Gradients of parameters are
summed per program and then over programs, in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

TURN = tl.constexpr(6.283185307179586)


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def silu_slope(x):
    gate = sigmoid(x)
    return gate * (1 + x * (1 - gate))


@triton.jit
def ema_coefficients(delta, alpha, beta, gamma, log_decay, drive, read, count, factor, BLOCK: tl.constexpr):
    """log(1 - p a), p beta and gamma * factor, with p = sigmoid(delta) and a = sigmoid(alpha)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    p = sigmoid(tl.load(delta + at, mask=inside, other=0.0))
    minus_delta = tl.load(delta + at, mask=inside, other=0.0)
    other = tl.load(alpha + at, mask=inside, other=0.0)
    taken = p * sigmoid(other)
    # log(1 - t) of a small t keeps its digits if the rounding of 1 - t is divided out
    rest = 1 - taken
    lost = 1 - rest
    slow = tl.log(rest) * tl.where(lost > 0, taken / tl.where(lost > 0, lost, 1.0), 1.0)
    slow = tl.where(lost > 0, slow, -taken)
    fast = tl.log(tl.maximum(sigmoid(-minus_delta) + p * sigmoid(-other), 1.1754943508222875e-38))
    tl.store(log_decay + at, tl.where(taken < 0.5, slow, fast), mask=inside)
    tl.store(drive + at, p * tl.load(beta + at, mask=inside, other=0.0), mask=inside)
    tl.store(read + at, factor * tl.load(gamma + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def ema_coefficients_backward(
    dlog, ddrive, dread, delta, alpha, beta, ddelta, dalpha, dbeta, dgamma, count, factor,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the four parameters."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(delta + at, mask=inside, other=0.0)
    e = tl.load(alpha + at, mask=inside, other=0.0)
    p, a = sigmoid(d), sigmoid(e)
    not_p, not_a = sigmoid(-d), sigmoid(-e)
    decay = tl.maximum(not_p + p * not_a, 1.1754943508222875e-38)
    dtaken = -tl.load(dlog + at, mask=inside, other=0.0) / decay
    above = tl.load(ddrive + at, mask=inside, other=0.0)
    dp = dtaken * a + above * tl.load(beta + at, mask=inside, other=0.0)
    tl.store(ddelta + at, dp * p * not_p, mask=inside)
    tl.store(dalpha + at, dtaken * p * a * not_a, mask=inside)
    tl.store(dbeta + at, above * p, mask=inside)
    tl.store(dgamma + at, factor * tl.load(dread + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def load_half(pointer, row, column, tokens, width, stride):
    """Every second column of a matrix."""
    at = row[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(pointer + at, mask=(row[:, None] < tokens) & (column[None, :] < width), other=0.0).to(
        tl.float32
    )


@triton.jit
def store_half(pointer, row, column, tokens, width, stride, values):
    """Write every second column of a matrix."""
    at = row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(pointer + at, values, mask=(row[:, None] < tokens) & (column[None, :] < width))


@triton.jit
def turn_of(position, frequency, row, pair, tokens, width):
    """Cosine and sine of position * frequency, reduced to one turn in float64."""
    place = tl.load(position + row, mask=row < tokens, other=0).to(tl.float64)
    angle = place[:, None] * tl.load(frequency + pair, mask=2 * pair < width, other=0.0)[None, :]
    angle = (angle - tl.floor(angle / TURN) * TURN).to(tl.float32)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def open_gates(
    before, gamma, beta, position, frequency, q, k, opened, tokens, d_z, d_v,
    ROTARY: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Queries and keys from z in the first programs of a row, SiLU of gates and values in the others."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    width = d_z + 2 * d_v
    if tl.program_id(1) == 0:
        pair = tl.arange(0, HALF)
        even, odd = 2 * pair, 2 * pair + 1
        z0 = silu(load_half(before, row, even, tokens, d_z, width))
        z1 = silu(load_half(before, row, odd, tokens, d_z, width))
        for which in tl.static_range(2):
            scale, shift = gamma + which * d_z, beta + which * d_z
            x0 = z0 * tl.load(scale + even, mask=even < d_z, other=0.0)[None, :]
            x0 += tl.load(shift + even, mask=even < d_z, other=0.0)[None, :]
            x1 = z1 * tl.load(scale + odd, mask=odd < d_z, other=0.0)[None, :]
            x1 += tl.load(shift + odd, mask=odd < d_z, other=0.0)[None, :]
            if ROTARY:
                cosine, sine = turn_of(position, frequency, row, pair, tokens, d_z)
                y0 = x0 * cosine - x1 * sine
                x1 = x1 * cosine + x0 * sine
                x0 = y0
            result = q
            if which == 1:
                result = k
            store_half(result, row, even, tokens, d_z, d_z, x0)
            store_half(result, row, odd, tokens, d_z, d_z, x1)
    else:
        column = (tl.program_id(1) - 1) * COLUMNS + tl.arange(0, COLUMNS)
        values = silu(load_half(before + d_z, row, column, tokens, 2 * d_v, width))
        store_half(opened, row, column, tokens, 2 * d_v, 2 * d_v, values)


@triton.jit
def open_gates_backward(
    dq, dk, dgate, dvalue, before, gamma, position, frequency, dbefore, sums, tokens, d_z, d_v,
    ROTARY: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of the projection, and per program those of gamma and beta, (programs, 4, d_z)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    width = d_z + 2 * d_v
    if tl.program_id(1) == 0:
        pair = tl.arange(0, HALF)
        even, odd = 2 * pair, 2 * pair + 1
        b0 = load_half(before, row, even, tokens, d_z, width)
        b1 = load_half(before, row, odd, tokens, d_z, width)
        z0, z1 = silu(b0), silu(b1)
        dz0 = tl.zeros((ROWS, HALF), dtype=tl.float32)
        dz1 = tl.zeros((ROWS, HALF), dtype=tl.float32)
        own = sums + tl.program_id(0) * 4 * d_z
        for which in tl.static_range(2):
            grad = dq
            if which == 1:
                grad = dk
            x0 = load_half(grad, row, even, tokens, d_z, d_z)
            x1 = load_half(grad, row, odd, tokens, d_z, d_z)
            if ROTARY:
                cosine, sine = turn_of(position, frequency, row, pair, tokens, d_z)
                y0 = x0 * cosine + x1 * sine
                x1 = x1 * cosine - x0 * sine
                x0 = y0
            dz0 += x0 * tl.load(gamma + which * d_z + even, mask=even < d_z, other=0.0)[None, :]
            dz1 += x1 * tl.load(gamma + which * d_z + odd, mask=odd < d_z, other=0.0)[None, :]
            tl.store(own + which * d_z + even, tl.sum(x0 * z0, axis=0), mask=even < d_z)
            tl.store(own + which * d_z + odd, tl.sum(x1 * z1, axis=0), mask=odd < d_z)
            tl.store(own + (2 + which) * d_z + even, tl.sum(x0, axis=0), mask=even < d_z)
            tl.store(own + (2 + which) * d_z + odd, tl.sum(x1, axis=0), mask=odd < d_z)
        store_half(dbefore, row, even, tokens, d_z, width, dz0 * silu_slope(b0))
        store_half(dbefore, row, odd, tokens, d_z, width, dz1 * silu_slope(b1))
    else:
        column = (tl.program_id(1) - 1) * COLUMNS + tl.arange(0, COLUMNS)
        # gates come first, then values
        above = load_half(dgate, row, column, tokens, d_v, d_v)
        late = column - d_v
        at = row[:, None].to(tl.int64) * d_v + late[None, :]
        seen = (row[:, None] < tokens) & (late[None, :] >= 0) & (late[None, :] < d_v)
        above += tl.load(dvalue + at, mask=seen, other=0.0).to(tl.float32)
        below = above * silu_slope(load_half(before + d_z, row, column, tokens, 2 * d_v, width))
        store_half(dbefore + d_z, row, column, tokens, 2 * d_v, width, below)


@triton.jit
def norm(
    x, weight, bias, y, rows, dim, eps,
    ACTIVATE: tl.constexpr, CENTER: tl.constexpr, SCALAR: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Layer norm (CENTER) or norm by root mean square, of SiLU(x) if ACTIVATE."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    inner = load_half(x, row, column, rows, dim, dim)
    if ACTIVATE:
        inner = silu(inner)
    real = column[None, :] < dim
    if CENTER:
        inner = tl.where(real, inner - (tl.sum(inner, axis=1) / dim)[:, None], 0.0)
    inverse = 1 / tl.sqrt(tl.sum(inner * inner, axis=1) / dim + eps)
    result = inner * inverse[:, None]
    if SCALAR:
        result *= tl.load(weight)
    else:
        result *= tl.load(weight + column, mask=column < dim, other=0.0)[None, :]
    if CENTER:
        result += tl.load(bias + column, mask=column < dim, other=0.0)[None, :]
    store_half(y, row, column, rows, dim, dim, result)


@triton.jit
def norm_backward(
    grad, x, weight, dx, sums, rows, dim, eps,
    ACTIVATE: tl.constexpr, CENTER: tl.constexpr, SCALAR: tl.constexpr, REPEAT: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and per program those of weight and bias, (programs, 2, dim)."""
    column = tl.arange(0, DIM)
    real = column[None, :] < dim
    dweight = tl.zeros((DIM,), dtype=tl.float32)
    dbias = tl.zeros((DIM,), dtype=tl.float32)
    for part in range(REPEAT):
        row = (tl.program_id(0) * REPEAT + part) * ROWS + tl.arange(0, ROWS)
        before = load_half(x, row, column, rows, dim, dim)
        above = load_half(grad, row, column, rows, dim, dim)
        inner = before
        if ACTIVATE:
            inner = silu(before)
        if CENTER:
            inner = tl.where(real, inner - (tl.sum(inner, axis=1) / dim)[:, None], 0.0)
        inverse = 1 / tl.sqrt(tl.sum(inner * inner, axis=1) / dim + eps)
        unit = inner * inverse[:, None]
        dweight += tl.sum(above * unit, axis=0)
        dbias += tl.sum(above, axis=0)
        if SCALAR:
            above *= tl.load(weight)
        else:
            above *= tl.load(weight + column, mask=column < dim, other=0.0)[None, :]
        below = above - unit * (tl.sum(above * unit, axis=1) / dim)[:, None]
        if CENTER:
            below -= (tl.sum(above, axis=1) / dim)[:, None]
        below *= inverse[:, None]
        if ACTIVATE:
            below *= silu_slope(before)
        store_half(dx, row, column, rows, dim, dim, below)
    own = sums + tl.program_id(0) * 2 * dim + column
    tl.store(own, dweight, mask=column < dim)
    tl.store(own + dim, dbias, mask=column < dim)
