"""The diagonal state-space scan in Triton: any number of states per channel, real or complex, one or two directions.

    s_t = q s_{t-1} + drive x_t        y_t = Re(read . s_t) + skip x_t

Sequences are cut into chunks. One kernel runs every chunk from zero (`local_states`), one carries the states from
chunk to chunk (`carry_states`), and one runs the chunks again from the states that enter them (`outputs`). The tile
of a program is (states, channels) with channels along the threads, so that the sum over states needs no exchange
between threads, and tokens are read in the layout (batch, time, dim) that the rest of the model has.

The adjoint of the scan is a scan in the other direction, so the same two kernels carry it. Nothing but the inputs is
kept for the backward pass. The gradient of the decay needs states and adjoints of the same token, which run in
opposite directions; instead the derivative r_t = q r_{t-1} + s_{t-1} of the state with respect to q is carried
beside it. Sums over tokens are added up per chunk and then over chunks in a fixed order: gradients are deterministic.

Real numbers have one part, complex ones two; kernels get the parts as separate tiles.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqboat.ops.kernels import attempt
from seqboat.ops.kernels.tuning import launch, power, scratch

WIDTH = tl.constexpr(8)
"""Numbers per complex coefficient in what `decay_table` writes."""
SPLIT = 16
"""States per program in kernels that do not sum over states."""

# coefficients, states, and one token of a walk


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


# the kernels


@triton.jit
def local_states(
    x, log_decay, weight, extra, lengths, out, tangents, time, dim, states, chunks,
    ADJOINT: tl.constexpr, HAS_EXTRA: tl.constexpr, HAS_LENGTHS: tl.constexpr, TANGENT: tl.constexpr,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The states that leave each chunk if it is entered with zeros; with TANGENT, their derivatives too.

    ADJOINT walks in the other direction with conjugate coefficients; `extra` is then what the gradient of the final
    state adds at the last token.
    """
    place = tl.program_id(0)
    batch, chunk = place // chunks, place % chunks
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    direction = tl.program_id(2) // SPLITS
    state = (tl.program_id(2) % SPLITS) * N + tl.arange(0, N)
    first, count, length = span_of(lengths, batch, chunk, time, HAS_LENGTHS, CHUNK)
    q = load_decay(log_decay, direction, dim, states, channel, state, ADJOINT, PARTS)
    w_real, w_imaginary = load_pair(weight, direction, dim, states, channel, state, ADJOINT, PARTS)
    real = tl.zeros((N, BLOCK), dtype=tl.float32)
    imaginary = tl.zeros((N, BLOCK), dtype=tl.float32)
    t_real = tl.zeros((N, BLOCK), dtype=tl.float32)
    t_imaginary = tl.zeros((N, BLOCK), dtype=tl.float32)
    leftward = direction != 0
    if ADJOINT:
        leftward = direction == 0
    begin = tl.where(leftward, first + count - 1, first)
    stride = tl.where(leftward, -dim, dim)
    row = x + (batch.to(tl.int64) * time + begin) * dim + channel
    inside = channel < dim
    if TANGENT:
        for _ in range(count):
            t_real, t_imaginary = advance(t_real, t_imaginary, q, real, imaginary, PARTS)
            real, imaginary = drive_state(real, imaginary, q, w_real, w_imaginary, row, inside, PARTS)
            row += stride
    else:
        for _ in range(count // 4):
            # four loads before the first sum, so that their latencies overlap
            x0 = tl.load(row, mask=inside, other=0.0).to(tl.float32)[None, :]
            x1 = tl.load(row + stride, mask=inside, other=0.0).to(tl.float32)[None, :]
            x2 = tl.load(row + 2 * stride, mask=inside, other=0.0).to(tl.float32)[None, :]
            x3 = tl.load(row + 3 * stride, mask=inside, other=0.0).to(tl.float32)[None, :]
            real, imaginary = advance(real, imaginary, q, w_real * x0, w_imaginary * x0, PARTS)
            real, imaginary = advance(real, imaginary, q, w_real * x1, w_imaginary * x1, PARTS)
            real, imaginary = advance(real, imaginary, q, w_real * x2, w_imaginary * x2, PARTS)
            real, imaginary = advance(real, imaginary, q, w_real * x3, w_imaginary * x3, PARTS)
            row += 4 * stride
        for _ in range(count % 4):
            real, imaginary = drive_state(real, imaginary, q, w_real, w_imaginary, row, inside, PARTS)
            row += stride
    if HAS_EXTRA:
        # the last token is the first of this walk: its gradient has decayed over the others
        ends = ((length - first == count) & (count > 0) & (direction == 0)).to(tl.float32)
        e_real, e_imaginary = load_boundary(extra, batch, dim, states, channel, state, PARTS)
        steps = tl.maximum(count - 1, 0).to(tl.float32)
        p_real, p_imaginary = load_power(
            log_decay, direction, dim, states, channel, state, steps, ADJOINT, PARTS
        )
        e_real, e_imaginary = times(e_real, e_imaginary, p_real, p_imaginary, PARTS)
        real += ends * e_real
        imaginary += ends * e_imaginary
    total = tl.num_programs(0)
    store_state(out, direction, total, place, states, dim, state, channel, real, imaginary, PARTS)
    if TANGENT:
        store_state(
            tangents, direction, total, place, states, dim, state, channel, t_real, t_imaginary, PARTS
        )


@triton.jit
def carry_states(
    values, tangents, log_decay, start, extra, lengths, leaving, time, dim, states, chunks,
    ADJOINT: tl.constexpr, HAS_START: tl.constexpr, HAS_EXTRA: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_LEAVING: tl.constexpr, TANGENT: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn what each chunk adds into the state that enters it, in place, chunk after chunk.

    With TANGENT the derivatives follow, r' = q^C r + C q^(C-1) s. HAS_LEAVING writes what an adjoint passes on to the
    state before the first token.
    """
    batch = tl.program_id(0)
    total = tl.num_programs(0) * chunks
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    direction = tl.program_id(2) // SPLITS
    state = (tl.program_id(2) % SPLITS) * N + tl.arange(0, N)
    q = load_decay(log_decay, direction, dim, states, channel, state, ADJOINT, PARTS, CHUNK)
    d_real = tl.zeros((N, BLOCK), dtype=tl.float32)
    d_imaginary = tl.zeros((N, BLOCK), dtype=tl.float32)
    t_real = tl.zeros((N, BLOCK), dtype=tl.float32)
    t_imaginary = tl.zeros((N, BLOCK), dtype=tl.float32)
    if TANGENT:
        d_real, d_imaginary = load_power(
            log_decay, direction, dim, states, channel, state, CHUNK - 1.0, ADJOINT, PARTS
        )
        d_real *= CHUNK
        d_imaginary *= CHUNK
    real = tl.zeros((N, BLOCK), dtype=tl.float32)
    imaginary = tl.zeros((N, BLOCK), dtype=tl.float32)
    if HAS_START:
        first = (direction == 0).to(tl.float32)
        real, imaginary = load_boundary(start, batch, dim, states, channel, state, PARTS)
        real *= first
        imaginary *= first
    leftward = direction != 0
    if ADJOINT:
        leftward = direction == 0
    chunk = tl.where(leftward, chunks - 1, 0)
    step = tl.where(leftward, -1, 1)
    for _ in range(chunks):
        place = batch * chunks + chunk
        v_real, v_imaginary = load_state(values, direction, total, place, states, dim, state, channel, PARTS)
        if TANGENT:
            u_real, u_imaginary = load_state(
                tangents, direction, total, place, states, dim, state, channel, PARTS
            )
            store_state(
                tangents, direction, total, place, states, dim, state, channel, t_real, t_imaginary, PARTS
            )
            a_real, a_imaginary = times(d_real, d_imaginary, real, imaginary, PARTS)
            t_real, t_imaginary = advance(
                t_real, t_imaginary, q, u_real + a_real, u_imaginary + a_imaginary, PARTS
            )
        store_state(values, direction, total, place, states, dim, state, channel, real, imaginary, PARTS)
        real, imaginary = advance(real, imaginary, q, v_real, v_imaginary, PARTS)
        chunk += step
    if HAS_LEAVING:
        one = load_decay(log_decay, direction, dim, states, channel, state, ADJOINT, PARTS)
        real, imaginary = advance(real, imaginary, one, 0.0, 0.0, PARTS)
        if HAS_EXTRA:
            # a sequence without tokens hands its state on as it is
            length = time
            if HAS_LENGTHS:
                length = tl.load(lengths + batch).to(tl.int32)
            empty = (length == 0).to(tl.float32)
            e_real, e_imaginary = load_boundary(extra, batch, dim, states, channel, state, PARTS)
            real += empty * e_real
            imaginary += empty * e_imaginary
        inside = (channel[None, :] < dim) & (state[:, None] < states)
        # only the first direction has a state before the first token
        inside = inside & (state[:, None] < tl.where(direction == 0, states, 0))
        at = ((batch.to(tl.int64) * dim + channel[None, :]) * states + state[:, None]) * PARTS
        tl.store(leaving + at, real, mask=inside)
        if PARTS == 2:
            tl.store(leaving + at + 1, imaginary, mask=inside)


@triton.jit
def outputs(
    x, log_decay, drive, read, skip, entering, lengths, y, time, dim, states, chunks,
    BIDIRECTIONAL: tl.constexpr, HAS_LENGTHS: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run each chunk from the states that enter it; zeros on padding."""
    place = tl.program_id(0)
    total = tl.num_programs(0)
    batch, chunk = place // chunks, place % chunks
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.arange(0, N)
    inside = channel < dim
    first, count, _ = span_of(lengths, batch, chunk, time, HAS_LENGTHS, CHUNK)
    origin = (batch.to(tl.int64) * time + first) * dim + channel
    if BIDIRECTIONAL:
        q = load_decay(log_decay, 1, dim, states, channel, state, False, PARTS)
        w_real, w_imaginary = load_pair(drive, 1, dim, states, channel, state, False, PARTS)
        r_real, r_imaginary = load_pair(read, 1, dim, states, channel, state, False, PARTS)
        real, imaginary = load_state(entering, 1, total, place, states, dim, state, channel, PARTS)
        at = origin + (count - 1) * dim
        for _ in range(count):
            real, imaginary = drive_state(real, imaginary, q, w_real, w_imaginary, x + at, inside, PARTS)
            # read again below by the thread that wrote it
            tl.store(y + at, read_state(real, imaginary, r_real, r_imaginary, PARTS), mask=inside)
            at -= dim
    q = load_decay(log_decay, 0, dim, states, channel, state, False, PARTS)
    w_real, w_imaginary = load_pair(drive, 0, dim, states, channel, state, False, PARTS)
    r_real, r_imaginary = load_pair(read, 0, dim, states, channel, state, False, PARTS)
    real, imaginary = load_state(entering, 0, total, place, states, dim, state, channel, PARTS)
    passed = tl.load(skip + channel, mask=inside, other=0.0)
    at = origin
    for _ in range(count):
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        real, imaginary = advance(
            real,
            imaginary,
            q,
            w_real * value[None, :],
            w_imaginary * value[None, :],
            PARTS,
        )
        result = read_state(real, imaginary, r_real, r_imaginary, PARTS) + passed * value
        if BIDIRECTIONAL:
            result += tl.load(y + at, mask=inside, other=0.0)
        tl.store(y + at, result, mask=inside)
        at += dim
    for _ in range(tl.minimum(time - first, CHUNK) - count):
        tl.store(y + at, tl.zeros((BLOCK,), dtype=tl.float32), mask=inside)
        at += dim


@triton.jit
def final_states(
    x, log_decay, drive, start, entering, lengths, final, time, dim, states, chunks,
    HAS_START: tl.constexpr, HAS_LENGTHS: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state after the last real token of every sequence, from the chunk that holds it."""
    batch = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.program_id(2) * N + tl.arange(0, N)
    length = time
    if HAS_LENGTHS:
        length = tl.load(lengths + batch).to(tl.int32)
    chunk = tl.maximum(length - 1, 0) // CHUNK
    q = load_decay(log_decay, 0, dim, states, channel, state, False, PARTS)
    w_real, w_imaginary = load_pair(drive, 0, dim, states, channel, state, False, PARTS)
    total = tl.num_programs(0) * chunks
    # what enters the first chunk is the state to start with
    real, imaginary = load_state(
        entering, 0, total, batch * chunks + chunk, states, dim, state, channel, PARTS
    )
    row = x + (batch.to(tl.int64) * time + chunk * CHUNK) * dim + channel
    for _ in range(length - chunk * CHUNK):
        real, imaginary = drive_state(real, imaginary, q, w_real, w_imaginary, row, channel < dim, PARTS)
        row += dim
    inside = (channel[None, :] < dim) & (state[:, None] < states)
    at = ((batch.to(tl.int64) * dim + channel[None, :]) * states + state[:, None]) * PARTS
    tl.store(final + at, real, mask=inside)
    if PARTS == 2:
        tl.store(final + at + 1, imaginary, mask=inside)


@triton.jit
def input_gradients(
    x, log_decay, drive, read, skip, entering, extra, lengths, grad, dx, ddrive, dskip, time, dim,
    states, chunks,
    BIDIRECTIONAL: tl.constexpr, HAS_EXTRA: tl.constexpr, HAS_LENGTHS: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of x, and per chunk those of drive and skip, from the adjoints that enter each chunk."""
    place = tl.program_id(0)
    total = tl.num_programs(0)
    batch, chunk = place // chunks, place % chunks
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.arange(0, N)
    inside = channel < dim
    first, count, length = span_of(lengths, batch, chunk, time, HAS_LENGTHS, CHUNK)
    origin = (batch.to(tl.int64) * time + first) * dim + channel
    if BIDIRECTIONAL:
        # the adjoint of the direction from right to left runs from left to right
        q = load_decay(log_decay, 1, dim, states, channel, state, True, PARTS)
        w_real, w_imaginary = load_pair(drive, 1, dim, states, channel, state, False, PARTS)
        r_real, r_imaginary = load_pair(read, 1, dim, states, channel, state, True, PARTS)
        real, imaginary = load_state(entering, 1, total, place, states, dim, state, channel, PARTS)
        sum_real = tl.zeros((N, BLOCK), dtype=tl.float32)
        sum_imaginary = tl.zeros((N, BLOCK), dtype=tl.float32)
        at = origin
        for _ in range(count):
            real, imaginary = drive_state(real, imaginary, q, r_real, r_imaginary, grad + at, inside, PARTS)
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)[None, :]
            sum_real += real * value
            sum_imaginary += imaginary * value
            below = tl.sum(real * w_real, axis=0)
            if PARTS == 2:
                below += tl.sum(imaginary * w_imaginary, axis=0)
            tl.store(dx + at, below, mask=inside)
            at += dim
        store_state(ddrive, 1, total, place, states, dim, state, channel, sum_real, sum_imaginary, PARTS)
    q = load_decay(log_decay, 0, dim, states, channel, state, True, PARTS)
    w_real, w_imaginary = load_pair(drive, 0, dim, states, channel, state, False, PARTS)
    r_real, r_imaginary = load_pair(read, 0, dim, states, channel, state, True, PARTS)
    real, imaginary = load_state(entering, 0, total, place, states, dim, state, channel, PARTS)
    sum_real = tl.zeros((N, BLOCK), dtype=tl.float32)
    sum_imaginary = tl.zeros((N, BLOCK), dtype=tl.float32)
    sum_skip = tl.zeros((BLOCK,), dtype=tl.float32)
    passed = tl.load(skip + channel, mask=inside, other=0.0)
    e_real = tl.zeros((N, BLOCK), dtype=tl.float32)
    e_imaginary = tl.zeros((N, BLOCK), dtype=tl.float32)
    if HAS_EXTRA:
        ends = (length - first == count).to(tl.float32)
        e_real, e_imaginary = load_boundary(extra, batch, dim, states, channel, state, PARTS)
        e_real *= ends
        e_imaginary *= ends
    at = origin + (count - 1) * dim
    for _ in range(count):
        above = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        real, imaginary = advance(
            real,
            imaginary,
            q,
            r_real * above[None, :],
            r_imaginary * above[None, :],
            PARTS,
        )
        if HAS_EXTRA:
            real += e_real
            imaginary += e_imaginary
            e_real *= 0.0
            e_imaginary *= 0.0
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        sum_real += real * value[None, :]
        sum_imaginary += imaginary * value[None, :]
        sum_skip += above * value
        below = tl.sum(real * w_real, axis=0) + passed * above
        if PARTS == 2:
            below += tl.sum(imaginary * w_imaginary, axis=0)
        if BIDIRECTIONAL:
            below += tl.load(dx + at, mask=inside, other=0.0)
        tl.store(dx + at, below, mask=inside)
        at -= dim
    store_state(ddrive, 0, total, place, states, dim, state, channel, sum_real, sum_imaginary, PARTS)
    tl.store(dskip + place.to(tl.int64) * dim + channel, sum_skip, mask=inside)
    at = origin + count * dim
    for _ in range(tl.minimum(time - first, CHUNK) - count):
        tl.store(dx + at, tl.zeros((BLOCK,), dtype=tl.float32), mask=inside)
        at += dim


@triton.jit
def parameter_gradients(
    x, log_decay, drive, read, entering, tangents, extra, lengths, grad, dlog, dread, time, dim, states,
    chunks,
    HAS_EXTRA: tl.constexpr, HAS_LENGTHS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per chunk, the gradients of log q and read, from states and their derivatives."""
    place = tl.program_id(0)
    total = tl.num_programs(0)
    batch, chunk = place // chunks, place % chunks
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    direction = tl.program_id(2) // SPLITS
    state = (tl.program_id(2) % SPLITS) * N + tl.arange(0, N)
    inside = channel < dim
    first, count, length = span_of(lengths, batch, chunk, time, HAS_LENGTHS, CHUNK)
    q = load_decay(log_decay, direction, dim, states, channel, state, False, PARTS)
    w_real, w_imaginary = load_pair(drive, direction, dim, states, channel, state, False, PARTS)
    real, imaginary = load_state(entering, direction, total, place, states, dim, state, channel, PARTS)
    t_real, t_imaginary = load_state(tangents, direction, total, place, states, dim, state, channel, PARTS)
    read_real = tl.zeros((N, BLOCK), dtype=tl.float32)
    read_imaginary = tl.zeros((N, BLOCK), dtype=tl.float32)
    log_real = tl.zeros((N, BLOCK), dtype=tl.float32)
    log_imaginary = tl.zeros((N, BLOCK), dtype=tl.float32)
    begin = tl.where(direction == 0, first, first + count - 1)
    stride = tl.where(direction == 0, dim, -dim)
    at = (batch.to(tl.int64) * time + begin) * dim + channel
    for _ in range(count):
        t_real, t_imaginary = advance(t_real, t_imaginary, q, real, imaginary, PARTS)
        real, imaginary = drive_state(real, imaginary, q, w_real, w_imaginary, x + at, inside, PARTS)
        above = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        read_real += above * real
        read_imaginary -= above * imaginary
        log_real += above * t_real
        log_imaginary += above * t_imaginary
        at += stride
    # conj(q) conj(read) sum(dy conj(r)), and conj(q) conj(r) times the gradient of the final state
    r_real, r_imaginary = load_pair(read, direction, dim, states, channel, state, False, PARTS)
    log_real, log_imaginary = times(log_real, log_imaginary, r_real, r_imaginary, PARTS)
    if HAS_EXTRA:
        ends = ((length - first == count) & (count > 0) & (direction == 0)).to(tl.float32)
        e_real, e_imaginary = load_boundary(extra, batch, dim, states, channel, state, PARTS)
        e_real, e_imaginary = times(e_real, -e_imaginary, t_real, t_imaginary, PARTS)
        log_real += ends * e_real
        log_imaginary += ends * e_imaginary
    log_real, log_imaginary = advance(log_real, log_imaginary, q, 0.0, 0.0, PARTS)
    store_state(dlog, direction, total, place, states, dim, state, channel, log_real, -log_imaginary, PARTS)
    store_state(dread, direction, total, place, states, dim, state, channel, read_real, read_imaginary, PARTS)


# launches


class Inputs(NamedTuple):
    """The arguments of a scan."""

    x: Tensor
    """(batch, time, dim)"""
    log_decay: Tensor
    """(directions, dim, states), real or complex, as the next two"""
    drive: Tensor
    read: Tensor
    skip: Tensor
    """(dim,)"""
    start: Tensor | None
    """(batch, dim, states), complex ones as (real, imaginary) pairs; one direction only"""
    lengths: Tensor | None
    """(batch,): real tokens, which come first; None for all"""


class _Plan:
    """Inputs as kernels take them, and the sizes of the grids."""

    def __init__(self, inputs: Inputs) -> None:
        x, log_decay, drive, read, skip, start, lengths = inputs
        self.parts = 2 if log_decay.is_complex() else 1
        self.x = x.contiguous()
        self.log_decay, self.drive, self.read = (_as_real(part) for part in (log_decay, drive, read))
        self.skip = skip.contiguous()
        self.start = None if start is None else start.contiguous()
        self.lengths = lengths
        self.batch, self.time, self.dim = x.shape
        self.directions, _, self.states = log_decay.shape
        self.chunk = chunk_for(self.time)
        self.chunks = -(-self.time // self.chunk)
        self.padded = power(self.states)
        self.split = min(self.padded, SPLIT)
        self.splits = self.padded // self.split
        if self.parts == 2:
            self.log_decay = self._decay_table()
        self.numbers = self.time, self.dim, self.states, self.chunks
        self.common = {
            "HAS_LENGTHS": lengths is not None, "PARTS": self.parts, "CHUNK": self.chunk
        }  # fmt: skip

    def _decay_table(self) -> Tensor:
        """Complex decays to the precision that a long memory needs, (directions, dim, states, 8)."""
        count = self.directions * self.dim * self.states
        table = scratch(self.x, count, 8)
        launch(
            decay_table, lambda sizes: (-(-count // sizes["BLOCK"]),),
            self.log_decay, table, count, CHUNK=self.chunk,
        )  # fmt: skip
        return table

    def states_buffer(self) -> Tensor:
        return scratch(self.x, self.directions, self.batch * self.chunks, self.parts, self.states, self.dim)

    def blocks(self, sizes: dict[str, int]) -> int:
        return -(-self.dim // sizes["BLOCK"])

    def by_chunk(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return self.batch * self.chunks, self.blocks(sizes)

    def by_chunk_and_state(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return self.batch * self.chunks, self.blocks(sizes), self.directions * self.splits

    def by_sequence(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return self.batch, self.blocks(sizes), self.directions * self.splits

    def entering(self, tangent: bool = False) -> tuple[Tensor, Tensor | None]:
        """The states that enter each chunk, and their derivatives with respect to q."""
        found, tangents = self.states_buffer(), self.states_buffer() if tangent else None
        launch(
            local_states, self.by_chunk_and_state,
            self.x, self.log_decay, self.drive, None, self.lengths, found, tangents, *self.numbers,
            ADJOINT=False, HAS_EXTRA=False, TANGENT=tangent, SPLITS=self.splits, N=self.split, **self.common,
        )  # fmt: skip
        launch(
            carry_states, self.by_sequence,
            found, tangents, self.log_decay, self.start, None, self.lengths, None, *self.numbers,
            ADJOINT=False, HAS_START=self.start is not None, HAS_EXTRA=False, HAS_LEAVING=False, TANGENT=tangent,
            SPLITS=self.splits, N=self.split, **self.common,
        )  # fmt: skip
        return found, tangents

    def adjoints(self, grad: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The adjoints that enter each chunk, and the gradient of the state to start with."""
        found = self.states_buffer()
        leaving = None if self.start is None else scratch(self.x, *self.start.shape)
        launch(
            local_states, self.by_chunk_and_state,
            grad, self.log_decay, self.read, extra, self.lengths, found, None, *self.numbers,
            ADJOINT=True, HAS_EXTRA=extra is not None, TANGENT=False, SPLITS=self.splits, N=self.split,
            **self.common,
        )  # fmt: skip
        launch(
            carry_states, self.by_sequence,
            found, None, self.log_decay, None, extra, self.lengths, leaving, *self.numbers,
            ADJOINT=True, HAS_START=False, HAS_EXTRA=extra is not None, HAS_LEAVING=leaving is not None,
            TANGENT=False, SPLITS=self.splits, N=self.split, **self.common,
        )  # fmt: skip
        return found, leaving

    def run(self, entering: Tensor) -> Tensor:
        """The outputs."""
        y = scratch(self.x, *self.x.shape)
        launch(
            outputs, self.by_chunk,
            self.x, self.log_decay, self.drive, self.read, self.skip, entering, self.lengths, y,
            *self.numbers, BIDIRECTIONAL=self.directions == 2, N=self.padded, **self.common,
        )  # fmt: skip
        return y


def forward(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """The outputs (batch, time, dim), zeros on padding, and the state after the last real token.

    The state is None for two directions.
    """
    plan = _Plan(inputs)
    entering, _ = plan.entering()
    y = plan.run(entering)
    if plan.directions == 2:
        return y, None
    if plan.time == 0:
        width = plan.states * plan.parts
        return y, inputs.x.new_zeros(
            plan.batch, plan.dim, width
        ) if plan.start is None else plan.start.clone()
    final = scratch(plan.x, plan.batch, plan.dim, plan.states * plan.parts)
    launch(
        final_states, plan.by_sequence,
        plan.x, plan.log_decay, plan.drive, plan.start, entering, plan.lengths, final, *plan.numbers,
        HAS_START=plan.start is not None, N=plan.split, **plan.common,
    )  # fmt: skip
    return y, final


def scan_backward(grad: Tensor, grad_final: Tensor | None, inputs: Inputs) -> tuple[Tensor | None, ...]:
    """The gradients of x, log_decay, drive, read, skip and start, given those of the outputs of `forward`."""
    plan = _Plan(inputs)
    grad = grad.contiguous()
    extra = None if grad_final is None else grad_final.contiguous()
    entering, tangents = plan.entering(tangent=True)
    adjoints, leaving = plan.adjoints(grad, extra)
    has_extra = extra is not None
    dx = scratch(plan.x, *plan.x.shape)
    # gradients of drive, log_decay and read per chunk, added up below
    sums = scratch(plan.x, 3, *adjoints.shape)
    skips = scratch(plan.x, plan.batch * plan.chunks, plan.dim)
    launch(
        input_gradients, plan.by_chunk,
        plan.x, plan.log_decay, plan.drive, plan.read, plan.skip, adjoints, extra, plan.lengths, grad, dx,
        sums[0], skips, *plan.numbers,
        BIDIRECTIONAL=plan.directions == 2, HAS_EXTRA=has_extra, N=plan.padded, **plan.common,
    )  # fmt: skip
    launch(
        parameter_gradients, plan.by_chunk_and_state,
        plan.x, plan.log_decay, plan.drive, plan.read, entering, tangents, extra, plan.lengths, grad,
        sums[1], sums[2], *plan.numbers,
        HAS_EXTRA=has_extra, SPLITS=plan.splits, N=plan.split, **plan.common,
    )  # fmt: skip
    ddrive, dlog, dread = (_as_coefficient(part, plan.parts) for part in sums.sum(dim=2).unbind(0))
    return dx, dlog, ddrive, dread, skips.sum(dim=0), leaving


def chunk_for(time: int) -> int:
    """Tokens per chunk: a thirty-second of the sequence, so that there is enough work for all processors."""
    return min(128, max(16, power(time) // 32))


def _as_real(x: Tensor) -> Tensor:
    """Complex coefficients as (..., 2) real ones, contiguous."""
    return torch.view_as_real(x.resolve_conj()).contiguous() if x.is_complex() else x.contiguous()


def _as_coefficient(sums: Tensor, parts: int) -> Tensor:
    """(directions, parts, states, dim) as (directions, dim, states), complex if there are two parts."""
    turned = sums.permute(0, 3, 2, 1)
    return turned[..., 0] if parts == 1 else torch.complex(turned[..., 0], turned[..., 1])


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        y, final = forward(Inputs(*inputs))
        return y, y.new_zeros(0) if final is None else final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_final: Tensor | None) -> Any:
        inputs = Inputs(*ctx.saved_tensors)
        grad = torch.zeros_like(inputs.x) if grad is None else grad
        last = grad_final if len(inputs.log_decay) == 1 else None
        found = attempt("scan", "triton_scan:scan_backward", inputs.x, grad, last, inputs)
        if found is None:
            raise RuntimeError("the Triton scan failed in its backward pass: set SEQBOAT_KERNELS=scan=torch")
        return *found, None


def scan(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The outputs and the last states, which are empty for two directions; with gradients. See `Inputs`."""
    result: tuple[Tensor, Tensor] = _Scan.apply(*inputs)
    return result
