"""Parts of the scan kernels in `triton_scan`: coefficients, states, and one token of a walk.

Tiles are (states, channels). Real numbers have one part, complex ones two, in separate tiles.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_coefficient(pointer, direction, dim, states, channel, state, part, PARTS: tl.constexpr):
    """A (states, channels) tile of (directions, dim, states, parts); zeros outside."""
    place = ((direction * dim + channel[None, :]) * states + state[:, None]) * PARTS + part
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


@triton.jit
def less_one(log, angle, PARTS: tl.constexpr):
    """exp(log + i angle) - 1, to the last digits of the difference.

    A state that lasts for many tokens multiplies the error of its decay by their number, so q itself in float32 is
    not good enough: near one its error is 1e-7, and more with the fast exponential of GPUs. That of q - 1 is as much
    smaller as q is closer to one.
    """
    series = 1 + log * (1 / 9)
    for k in tl.static_range(7):
        series = 1 + log * (1 / (8 - k)) * series
    real = tl.where(log > -0.5, log * series, tl.exp(log) - 1)
    imaginary = tl.zeros_like(real)
    if PARTS == 2:
        imaginary = (1 + real) * tl.sin(angle)
        half = tl.sin(0.5 * angle)
        real = real * tl.cos(angle) - 2 * half * half
    return real, imaginary


@triton.jit
def load_decay(
    pointer, direction, dim, states, channel, state, steps, CONJUGATE: tl.constexpr, PARTS: tl.constexpr
):
    """q to the power of `steps`, less one, from log q; powers of two are exact multiples of the logarithm."""
    log, angle = load_pair(pointer, direction, dim, states, channel, state, CONJUGATE, PARTS)
    return less_one(log * steps, angle * steps, PARTS)


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
def advance(real, imaginary, m_real, m_imaginary, add_real, add_imaginary, PARTS: tl.constexpr):
    """q s + what is added, with m = q - 1: s + (m s + what is added)."""
    change_real, change_imaginary = times(m_real, m_imaginary, real, imaginary, PARTS)
    new_real = real + (change_real + add_real)
    new_imaginary = imaginary
    if PARTS == 2:
        new_imaginary = imaginary + (change_imaginary + add_imaginary)
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
def drive_state(real, imaginary, m_real, m_imaginary, w_real, w_imaginary, row, inside, PARTS: tl.constexpr):
    """One token of a walk: q s + w x."""
    x = tl.load(row, mask=inside, other=0.0).to(tl.float32)[None, :]
    return advance(real, imaginary, m_real, m_imaginary, w_real * x, w_imaginary * x, PARTS)


@triton.jit
def read_state(real, imaginary, r_real, r_imaginary, PARTS: tl.constexpr):
    """Re(read . s): the sum over the states of a tile."""
    product = r_real * real
    if PARTS == 2:
        product -= r_imaginary * imaginary
    return tl.sum(product, axis=0)
