"""One token of each sequence through a SeqBoat layer, in Triton.

    enter      norm, one step of the state-space layer, SiLU: the hidden token
    project    dense branch, router, and for active tokens z, gate and value
    score      query, key, and the scores of all places of the memory; the key is remembered
    recall     weighted sum of the values, times the gate; the value is remembered
    leave      residual sum with the attention's output, counters; SiLU if the norm came first
    close      norm of SiLU, where the norm comes last

The second axis of programs is the sequence. What the router decided stays on the device: programs of `project`,
`score`, `recall` and `leave` read it and skip what an inactive token does not need. So the host waits for nothing,
and the same launches serve every token.

The memory is a ring with a place for the token itself, as in `seqboat.inference.attention`. Weights, tokens and
memory may be float32, bf16 or fp16; all sums and the states are float32.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from seqboat.ops.kernels.triton_band import HIDDEN, LAPLACE_MU, LAPLACE_SIGMA, RELU2, ROOT_2, SOFTMAX
from seqboat.ops.kernels.triton_pointwise import TURN, sigmoid, silu
from seqboat.ops.kernels.triton_states import advance, load_state, read_state, store_state

SHIFT = tl.constexpr(1)
RMS = tl.constexpr(2)
LAYER = tl.constexpr(3)
"""Kinds of norms: a fixed scale and shift, by root mean square, or with the mean taken off; 0 is none."""

ORIGINAL = tl.constexpr(1)
COMPRESSED = tl.constexpr(2)
"""What the bias measures distances in; 0 is no bias."""


@triton.jit
def load_line(pointer, at, count):
    """A part of a vector, in float32; zeros behind its end."""
    return tl.load(pointer + at, mask=at < count, other=0.0).to(tl.float32)


@triton.jit
def moments(inner, column, dim, eps, NORM: tl.constexpr):
    """What a norm subtracts from a token and multiplies it by."""
    mean = 0.0
    inverse = 1.0
    if NORM == LAYER:
        mean = tl.sum(inner, axis=0) / dim
        inner = tl.where(column < dim, inner - mean, 0.0)
    if NORM >= RMS:
        inverse = 1 / tl.sqrt(tl.sum(inner * inner, axis=0) / dim + eps)
    return mean, inverse


@triton.jit
def apply_linear(vector, weight, bias, out, inputs, outputs, IN: tl.constexpr, OUT: tl.constexpr):
    """Some outputs of a linear layer for one vector; the weight is (outputs, inputs)."""
    sums = tl.zeros((OUT, IN), dtype=tl.float32)
    for begin in range(0, inputs, IN):
        column = begin + tl.arange(0, IN)
        at = out[:, None].to(tl.int64) * inputs + column[None, :]
        inside = (out[:, None] < outputs) & (column[None, :] < inputs)
        tile = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        sums += tile * load_line(vector, column, inputs)[None, :]
    return tl.sum(sums, axis=1) + load_line(bias, out, outputs)


@triton.jit
def place_of(total, row, size, CHUNKED: tl.constexpr):
    """Where the memory keeps the next active token of a sequence, and how many places that token sees."""
    slot = tl.load(total + row)
    place = (slot % size).to(tl.int32)
    count = place + 1 if CHUNKED else tl.minimum(slot + 1, size).to(tl.int32)
    return place, count


@triton.jit
def enter(
    x, norm_weight, norm_bias, coefficients, skip, states, history, seen, hidden, dim, count, past, eps,
    NORM: tl.constexpr, PARTS: tl.constexpr, TRUNCATED: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Hidden tokens SiLU(SSM(norm(x))); states change.

    Coefficients are (4, parts, states, dim): q - 1, drive, read, and what an input still adds after `past` tokens. A
    truncated kernel subtracts that, for the input that it no longer reaches.
    """
    row = tl.program_id(1)
    rows = tl.num_programs(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < dim
    state = tl.arange(0, N)
    token = x + row.to(tl.int64) * dim
    value = load_line(token, channel, dim)
    if NORM > 0:
        column = tl.arange(0, DIM)
        mean, inverse = moments(load_line(token, column, dim), column, dim, eps, NORM)
        value = (value - mean) * inverse * load_line(norm_weight, channel, dim)
        value += load_line(norm_bias, channel, dim)
    q_real, q_imaginary = load_state(coefficients, 0, rows, 0, count, dim, state, channel, PARTS)
    w_real, w_imaginary = load_state(coefficients, 0, rows, 1, count, dim, state, channel, PARTS)
    r_real, r_imaginary = load_state(coefficients, 0, rows, 2, count, dim, state, channel, PARTS)
    real, imaginary = load_state(states, 0, rows, row, count, dim, state, channel, PARTS)
    q = 1.0, q_real, q_imaginary
    line = value[None, :]
    real, imaginary = advance(real, imaginary, q, w_real * line, w_imaginary * line, PARTS)
    summed = read_state(real, imaginary, r_real, r_imaginary, PARTS)
    if TRUNCATED:
        place = (tl.load(seen + row) % past + row.to(tl.int64) * past) * dim
        old = tl.load(history + place + channel, mask=inside, other=0.0)[None, :]
        tl.store(history + place + channel, value, mask=inside)
        tail_real, tail_imaginary = load_state(coefficients, 0, rows, 3, count, dim, state, channel, PARTS)
        real -= tail_real * old
        imaginary -= tail_imaginary * old
    store_state(states, 0, rows, row, count, dim, state, channel, real, imaginary, PARTS)
    summed += load_line(skip, channel, dim) * value
    tl.store(hidden + row.to(tl.int64) * dim + channel, silu(summed), mask=inside)


@triton.jit
def project(
    x, hidden, dense, dense_bias, router, base, base_bias, summed, opened, confidence, dim, width, border,
    DIM: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """x + H W + b in the first programs of a sequence, SiLU of the gated unit's projection in the others.

    Every program works out the decision by itself, from the same numbers in the same order. Router is (dim + 1,):
    weights of the log-odds, and their bias. Confidence is -1 for an inactive token.
    """
    row = tl.program_id(1)
    number = tl.program_id(0)
    token = hidden + row.to(tl.int64) * dim
    column = tl.arange(0, DIM)
    products = load_line(token, column, dim) * load_line(router, column, dim)
    logit = tl.sum(products, axis=0) + tl.load(router + dim)
    # a token that is not finite activates nothing
    chosen = tl.where(logit < float("inf"), tl.where(logit > border, 1, 0), 0)
    if number == 0:
        tl.store(confidence + row, tl.where(chosen == 1, sigmoid(logit), -1.0))
    blocks = tl.cdiv(dim, OUT)
    if number < blocks:
        out = number * OUT + tl.arange(0, OUT)
        result = apply_linear(token, dense, dense_bias, out, dim, dim, IN, OUT)
        at = row.to(tl.int64) * dim
        result += load_line(x + at, out, dim)
        tl.store(summed + at + out, result, mask=out < dim)
    else:
        if chosen == 1:
            out = (number - blocks) * OUT + tl.arange(0, OUT)
            result = silu(apply_linear(token, base, base_bias, out, dim, width, IN, OUT))
            tl.store(opened + row.to(tl.int64) * width + out, result, mask=out < width)


@triton.jit
def turn(opened, scaling, which, column, position, frequency, d_z, ROTARY: tl.constexpr):
    """The query (which 0) or key (1): z times a scale plus a shift, rotated by its position."""
    scale, shift = scaling + 2 * which * d_z, scaling + (2 * which + 1) * d_z
    result = load_line(opened, column, d_z) * load_line(scale, column, d_z) + load_line(shift, column, d_z)
    if ROTARY:
        other = column ^ 1
        partner = load_line(opened, other, d_z) * load_line(scale, other, d_z) + load_line(shift, other, d_z)
        angle = tl.load(frequency + column // 2, mask=column < d_z, other=0.0) * position.to(tl.float64)
        angle = (angle - tl.floor(angle / TURN) * TURN).to(tl.float32)
        sine = tl.where(column % 2 == 0, -tl.sin(angle), tl.sin(angle))
        result = result * tl.cos(angle) + partner * sine
    return result


@triton.jit
def score(
    opened, scaling, frequency, keys, positions, table, seen, total, confidence, scores, d_z, width, size,
    furthest,
    BIAS: tl.constexpr, ROTARY: tl.constexpr, CHUNKED: tl.constexpr, WIDTH_Z: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Biased scores of some places of the memory; the program with the token's own place writes key and position.

    Scaling is (4, d_z): gamma and beta of the query, times the scale of scores, and of the key.
    """
    row = tl.program_id(1)
    first = tl.program_id(0) * KEYS
    if tl.load(confidence + row) >= 0:
        place, count = place_of(total, row, size, CHUNKED)
        if first < count:
            here = tl.load(seen + row)
            column = tl.arange(0, WIDTH_Z)
            token = opened + row.to(tl.int64) * width
            query = turn(token, scaling, 0, column, here, frequency, d_z, ROTARY)
            # as the memory holds it
            key = turn(token, scaling, 1, column, here, frequency, d_z, ROTARY).to(keys.dtype.element_ty)
            at = first + tl.arange(0, KEYS)
            own = at == place
            line = row.to(tl.int64) * size
            known = (at[:, None] < count) & (column[None, :] < d_z)
            tile = tl.load(keys + (line + at[:, None]) * d_z + column[None, :], mask=known, other=0.0)
            tile = tl.where(own[:, None], key[None, :].to(tl.float32), tile.to(tl.float32))
            found = tl.sum(tile * query[None, :], axis=1)
            if BIAS == ORIGINAL:
                away = tl.load(positions + line + at, mask=at < count, other=0) - here
                away = tl.where(own, 0, away)
                entry = tl.minimum(tl.maximum(away + furthest, 0), 2 * furthest)
                found += tl.load(table + entry, mask=at < count, other=0.0)
            if BIAS == COMPRESSED:
                age = tl.where(at > place, place - at + size, place - at)
                entry = tl.maximum(furthest - age, 0)
                found += tl.load(table + entry, mask=at < count, other=0.0)
            tl.store(scores + line + at, found, mask=at < count)
            tl.store(positions + line + at, tl.zeros((KEYS,), dtype=tl.int64) + here, mask=own)
            if (place >= first) & (place < first + KEYS):
                tl.store(keys + (line + place) * d_z + column, key, mask=column < d_z)


@triton.jit
def recall(
    opened, scores, values, total, confidence, attended, d_z, d_v, size,
    FUNCTION: tl.constexpr, CHUNKED: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Gate times the weighted sum of some columns of the values; the token's own value is written to the memory."""
    row = tl.program_id(1)
    if tl.load(confidence + row) >= 0:
        place, count = place_of(total, row, size, CHUNKED)
        column = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
        gate = opened + row.to(tl.int64) * (d_z + 2 * d_v) + d_z
        value = load_line(gate + d_v, column, d_v).to(values.dtype.element_ty)
        line = row.to(tl.int64) * size
        largest = 0.0
        summed = 1.0
        if FUNCTION == SOFTMAX:
            every = tl.arange(0, SIZE)
            known = tl.load(scores + line + every, mask=every < count, other=HIDDEN)
            largest = tl.max(known, axis=0)
            summed = tl.sum(tl.where(every < count, tl.exp(known - largest), 0.0), axis=0)
        sums = tl.zeros((KEYS, VALUES), dtype=tl.float32)
        for begin in range(0, count, KEYS):
            at = begin + tl.arange(0, KEYS)
            found = tl.load(scores + line + at, mask=at < count, other=HIDDEN)
            if FUNCTION == SOFTMAX:
                weights = tl.exp(found - largest)
            elif FUNCTION == RELU2:
                positive = tl.maximum(found, 0.0)
                weights = positive * positive
            else:
                weights = 0.5 + 0.5 * tl.erf((found - LAPLACE_MU) / (LAPLACE_SIGMA * ROOT_2))
            weights = tl.where(at < count, weights, 0.0)
            inside = (at[:, None] < count) & (column[None, :] < d_v)
            tile = tl.load(values + (line + at[:, None]) * d_v + column[None, :], mask=inside, other=0.0)
            own = (at == place)[:, None]
            tile = tl.where(own, value[None, :].to(tl.float32), tile.to(tl.float32))
            sums += weights[:, None] * tile
        result = tl.sum(sums, axis=0) / summed * load_line(gate, column, d_v)
        tl.store(attended + row.to(tl.int64) * d_v + column, result, mask=column < d_v)
        tl.store(values + (line + place) * d_v + column, value, mask=column < d_v)


@triton.jit
def leave(
    summed, attended, out_weight, out_bias, confidence, seen, total, spent, y, dim, d_v,
    ACTIVATE: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """The sum of both branches; one program of each sequence counts its tokens."""
    row = tl.program_id(1)
    out = tl.program_id(0) * OUT + tl.arange(0, OUT)
    at = row.to(tl.int64) * dim
    result = load_line(summed + at, out, dim)
    weight = tl.load(confidence + row)
    if weight >= 0:
        vector = attended + row.to(tl.int64) * d_v
        result += weight * apply_linear(vector, out_weight, out_bias, out, d_v, dim, IN, OUT)
    if ACTIVATE:
        result = silu(result)
    tl.store(y + at + out, result, mask=out < dim)
    if tl.program_id(0) == 0:
        tl.store(seen + row, tl.load(seen + row) + 1)
        more = tl.where(weight >= 0, 1, 0)
        tl.store(total + row, tl.load(total + row) + more)
        tl.store(spent + row, tl.load(spent + row) + more)


@triton.jit
def close(x, norm_weight, norm_bias, y, dim, eps, NORM: tl.constexpr, DIM: tl.constexpr):
    """The norm of SiLU(x)."""
    at = tl.program_id(1).to(tl.int64) * dim
    column = tl.arange(0, DIM)
    inner = silu(load_line(x + at, column, dim))
    mean, inverse = moments(inner, column, dim, eps, NORM)
    result = (inner - mean) * inverse * load_line(norm_weight, column, dim)
    tl.store(y + at + column, result + load_line(norm_bias, column, dim), mask=column < dim)
