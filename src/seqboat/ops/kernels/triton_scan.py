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

import triton
import triton.language as tl

from seqboat.ops.kernels.triton_states import (
    advance,
    drive_state,
    load_boundary,
    load_decay,
    load_pair,
    load_power,
    load_state,
    read_state,
    span_of,
    store_state,
    times,
)

PLAIN = tl.constexpr(0)
SILU = tl.constexpr(1)
SILU_GRADIENT = tl.constexpr(2)
"""What `outputs` writes: y, SiLU(y), or the gradient of y given that of SiLU(y)."""


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
    x, log_decay, drive, read, skip, entering, lengths, grad, y, time, dim, states, chunks,
    MODE: tl.constexpr, BIDIRECTIONAL: tl.constexpr, HAS_LENGTHS: tl.constexpr, PARTS: tl.constexpr,
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
        if MODE == SILU:
            result = result / (1 + tl.exp(-result))
        if MODE == SILU_GRADIENT:
            gate = 1 / (1 + tl.exp(-result))
            above = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
            result = above * gate * (1 + result * (1 - gate))
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
