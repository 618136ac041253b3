"""Parts of the scan kernels in `triton_scan`: coefficients, states, and one token of a walk.

Tiles are (states, channels). Real numbers have one part, complex ones two, in separate tiles.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

WIDTH = tl.constexpr(8)
"""Numbers per complex coefficient in what `decay_table` writes."""


@triton.jit
def load_coefficient(pointer, direction, dim, states, channel, state, part, WIDTH: tl.constexpr):
    """A (states, channels) tile of (directions, dim, states, width); zeros outside."""
    place = ((direction * dim + channel[None, :]) * states + state[:, None]) * WIDTH + part
    inside = (channel[None, :] < dim) & (state[:, None] < states)
    return tl.load(pointer + place, mask=inside, other=0.0)


@triton.jit
def load_pair(pointer, direction, dim, states, channel, state, CONJUGATE: tl.constexpr, PARTS: tl.constexpr):
    """Both parts of a coefficient; the second is zero if it is real."""
    real = load_coefficient(pointer, direction, dim, states, channel, state, 0, PARTS)
    imaginary = tl.zeros_like(real)
    if PARTS == 2:
        imaginary = load_coefficient(pointer, direction, dim, states, channel, state, 1, PARTS)
        if CONJUGATE:
            imaginary = -imaginary
    return real, imaginary


# A state that lasts for many tokens multiplies the error of its decay q by their number. So q itself in float32 is
# not good enough: near one its error is 1e-7, and larger with the fast exponential of GPUs. That of q - 1 is as much
# smaller as q is closer to one. A decay is therefore a triple (whole, real, imaginary) with q = whole + real +
# i imaginary, where whole is 0 or 1.


@triton.jit
def decay_table(log_decay, table, count, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Complex log q, and the triples of q and q^CHUNK by float64, (count, WIDTH): done once, as that is slow."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    log = tl.load(log_decay + 2 * at, mask=inside, other=0.0)
    angle = tl.load(log_decay + 2 * at + 1, mask=inside, other=0.0)
    tl.store(table + WIDTH * at, log, mask=inside)
    tl.store(table + WIDTH * at + 1, angle, mask=inside)
    for which in tl.static_range(2):
        steps = 1.0
        if which == 1:
            steps = CHUNK * 1.0
        size, turn = tl.exp(log.to(tl.float64) * steps), angle.to(tl.float64) * steps
        real, imaginary = size * tl.cos(turn), size * tl.sin(turn)
        whole = tl.where(real > 0.5, 1.0, 0.0)
        place = table + WIDTH * at + 2 + 3 * which
        tl.store(place, whole.to(tl.float32), mask=inside)
        tl.store(place + 1, (real - whole).to(tl.float32), mask=inside)
        tl.store(place + 2, imaginary.to(tl.float32), mask=inside)


@triton.jit
def less_one(log):
    """exp(log) - 1, to the last digits of the difference."""
    series = 1 + log * (1 / 9)
    for k in tl.static_range(7):
        series = 1 + log * (1 / (8 - k)) * series
    return tl.where(log > -0.5, log * series, tl.exp(log) - 1)


@triton.jit
def load_decay(
    pointer, direction, dim, states, channel, state, CONJUGATE: tl.constexpr, PARTS: tl.constexpr,
    STEPS: tl.constexpr = 1,
):  # fmt: skip
    """The triple of q^STEPS, of one step or a whole chunk, from log q or the table of complex ones."""
    if PARTS == 1:
        log = load_coefficient(pointer, direction, dim, states, channel, state, 0, 1)
        # a chunk is a power of two, so the product is exact
        real = less_one(log * STEPS)
        return 1.0, real, tl.zeros_like(real)
    else:
        part: tl.constexpr = 2 if STEPS == 1 else 5
        whole = load_coefficient(pointer, direction, dim, states, channel, state, part, WIDTH)
        real = load_coefficient(pointer, direction, dim, states, channel, state, part + 1, WIDTH)
        imaginary = load_coefficient(pointer, direction, dim, states, channel, state, part + 2, WIDTH)
        if CONJUGATE:
            imaginary = -imaginary
        return whole, real, imaginary


@triton.jit
def load_power(
    pointer, direction, dim, states, channel, state, steps, CONJUGATE: tl.constexpr, PARTS: tl.constexpr
):
    """Both parts of q^steps, for any number of steps, to be applied once."""
    stride: tl.constexpr = 1 if PARTS == 1 else WIDTH
    log = load_coefficient(pointer, direction, dim, states, channel, state, 0, stride)
    real = 1 + less_one(log * steps)
    imaginary = tl.zeros_like(real)
    if PARTS == 2:
        angle = load_coefficient(pointer, direction, dim, states, channel, state, 1, stride) * steps
        imaginary = real * tl.sin(angle)
        real *= tl.cos(angle)
        if CONJUGATE:
            imaginary = -imaginary
    return real, imaginary


@triton.jit
def times(a, b, c, d, PARTS: tl.constexpr):
    """(a + ib) (c + id)."""
    real = a * c
    imaginary = b
    if PARTS == 2:
        real = a * c - b * d
        imaginary = a * d + b * c
    return real, imaginary


@triton.jit
def advance(real, imaginary, q, add_real, add_imaginary, PARTS: tl.constexpr):
    """q s + what is added; q is a triple."""
    whole, q_real, q_imaginary = q
    change_real, change_imaginary = times(q_real, q_imaginary, real, imaginary, PARTS)
    new_real = whole * real + (change_real + add_real)
    new_imaginary = imaginary
    if PARTS == 2:
        new_imaginary = whole * imaginary + (change_imaginary + add_imaginary)
    return new_real, new_imaginary


@triton.jit
def span_of(lengths, batch, chunk, time, HAS_LENGTHS: tl.constexpr, CHUNK: tl.constexpr):
    """First token of a chunk, how many of its tokens are real, and the length of the sequence."""
    length = time
    if HAS_LENGTHS:
        length = tl.load(lengths + batch).to(tl.int32)
    first = chunk * CHUNK
    return first, tl.minimum(tl.maximum(length - first, 0), CHUNK), length


@triton.jit
def state_place(direction, total, place, states, dim, state, channel, part, PARTS: tl.constexpr):
    """Where (directions, batch * chunks, parts, states, dim) keeps a tile."""
    line = ((direction * total + place).to(tl.int64) * PARTS + part) * states
    return (line + state[:, None]) * dim + channel[None, :]


@triton.jit
def load_state(pointer, direction, total, place, states, dim, state, channel, PARTS: tl.constexpr):
    """Both parts of the states that enter a chunk."""
    inside = (channel[None, :] < dim) & (state[:, None] < states)
    at = state_place(direction, total, place, states, dim, state, channel, 0, PARTS)
    real = tl.load(pointer + at, mask=inside, other=0.0)
    imaginary = tl.zeros_like(real)
    if PARTS == 2:
        at = state_place(direction, total, place, states, dim, state, channel, 1, PARTS)
        imaginary = tl.load(pointer + at, mask=inside, other=0.0)
    return real, imaginary


@triton.jit
def store_state(
    pointer, direction, total, place, states, dim, state, channel, real, imaginary, PARTS: tl.constexpr
):
    """Write both parts of a tile of states, or of sums over the tokens of a chunk."""
    inside = (channel[None, :] < dim) & (state[:, None] < states)
    at = state_place(direction, total, place, states, dim, state, channel, 0, PARTS)
    tl.store(pointer + at, real, mask=inside)
    if PARTS == 2:
        at = state_place(direction, total, place, states, dim, state, channel, 1, PARTS)
        tl.store(pointer + at, imaginary, mask=inside)


@triton.jit
def load_boundary(pointer, batch, dim, states, channel, state, PARTS: tl.constexpr):
    """Both parts of (batch, dim, states): the state before the first token, or a gradient of the last."""
    return load_pair(pointer, batch, dim, states, channel, state, False, PARTS)


@triton.jit
def drive_state(real, imaginary, q, w_real, w_imaginary, row, inside, PARTS: tl.constexpr):
    """One token of a walk: q s + w x."""
    x = tl.load(row, mask=inside, other=0.0).to(tl.float32)[None, :]
    return advance(real, imaginary, q, w_real * x, w_imaginary * x, PARTS)


@triton.jit
def read_state(real, imaginary, r_real, r_imaginary, PARTS: tl.constexpr):
    """Re(read . s): the sum over the states of a tile."""
    product = r_real * real
    if PARTS == 2:
        product -= r_imaginary * imaginary
    return tl.sum(product, axis=0)
