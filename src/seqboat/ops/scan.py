"""A diagonal state-space layer as matrix products on blocks of tokens.

A channel with n states s_t = q * s_{t-1} + b * x_t and output y_t = c . s_t has the kernel
k[l] = sum_n c * b * q^l. Inside a block of C tokens that is a Toeplitz matrix; between blocks it is the state.
So, with x_k the k-th block of a channel and s_k the state that enters it,

    y_k     = mix^T x_k + leave^T s_k        mix[i, j]   = k[j - i]      (j >= i)
    s_{k+1} = decay * s_k + enter^T x_k      enter[i, n] = b * q^(C-1-i)
                                             leave[n, j] = c * q^(j+1),  decay = q^C

Time is linear in the sequence, no table is longer than a block, and the state is exact. In a bidirectional
layer the second direction fills the other triangle of `mix`, so one product serves both, and adds states that are
carried from right to left.

Complex states (S4D) travel as pairs of real numbers; only their carry from block to block is complex.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Tokens per block; docs/performance.md has the measurement behind the number."""

SERIAL_BLOCKS = 16
"""Up to this many blocks the state is carried one block at a time; beyond that, in two levels."""


class BlockTables(NamedTuple):
    """A block of C tokens as matrices per channel; n forward states, then n backward states if bidirectional."""

    mix: Tensor
    """(dim, C, C): input i to output j"""
    enter: Tensor
    """(dim, C, states): input i to the states that leave the block"""
    leave: Tensor
    """(dim, states, C): the states that enter the block to output j"""
    decay: Tensor
    """(dim, states): decay of a state over a block; (dim, states / 2) if complex"""


def as_states(u: Tensor, decay: Tensor, view: bool = False) -> Tensor:
    """Pairs of real numbers as complex numbers if the decay is complex; a view of contiguous ones, if it must be."""
    if not decay.is_complex():
        return u
    u = u if view else u.contiguous()
    return torch.view_as_complex(u.unflatten(-1, (u.shape[-1] // 2, 2)))


def as_pairs(s: Tensor) -> Tensor:
    return torch.view_as_real(s).flatten(-2) if s.is_complex() else s


def _carry_serial(
    u: Tensor,
    decay: Tensor,
    states: Tensor,
    start: Tensor | None = None,
    reverse: bool = False,
    axis: int = 1,
) -> Tensor:
    """Fill in the states that enter each block, one block at a time; returns the state after the last."""
    if u.shape[axis] == 0:
        return u.sum(dim=axis) if start is None else start
    # unbind once: indexing costs as much as the sum
    entering, filled = u.unbind(axis), states.unbind(axis)
    if reverse:
        entering, filled = entering[::-1], filled[::-1]
    filled[0].copy_(start) if start is not None else filled[0].zero_()
    for added, (before, after) in zip(entering, pairwise(filled), strict=False):
        torch.addcmul(added, decay, before, out=after)
    return torch.addcmul(entering[-1], decay, filled[-1])


def _carry(
    u: Tensor, decay: Tensor, states: Tensor, start: Tensor | None = None, reverse: bool = False
) -> Tensor:
    """Fill in the states that enter each block, s_{k+1} = decay * s_k + u_k; returns the state after the last.

    Many blocks are carried in two levels: groups of about sqrt(blocks) side by side from zero, then one state
    from group to group, so that the number of small operations grows with the root of the length.

    Args:
        u: (batch, blocks, dim, states), real or complex.
        decay: (dim, states).
        states: as u, to be filled.
        start: (batch, dim, states) or None for zeros.
        reverse: from the last block to the first.
    """
    blocks = u.shape[1]
    if blocks <= SERIAL_BLOCKS:
        return _carry_serial(u, decay, states, start, reverse)
    group = 1 << (blocks.bit_length() // 2)
    whole = blocks // group * group
    # leftover blocks that do not fill a group, one by one
    many, few = (slice(blocks - whole, None), slice(0, blocks - whole))
    if not reverse:
        many, few = slice(0, whole), slice(whole, None)
    grouped = u[:, many].unflatten(1, (whole // group, group))
    local = states[:, many].unflatten(1, (whole // group, group))
    leaving = _carry_serial(grouped, decay, local, reverse=reverse, axis=2)
    heads = torch.empty_like(leaving)
    powers = decay.expand(group, *decay.shape).cumprod(dim=0)  # decay to the power of 1, 2, .. group
    final = _carry_serial(leaving, powers[-1], heads, start, reverse)
    first, rest = (slice(-1, None), slice(0, -1)) if reverse else (slice(0, 1), slice(1, None))
    local[:, :, first].add_(heads[:, :, None])
    local[:, :, rest].addcmul_(powers[:-1].flip(0) if reverse else powers[:-1], heads[:, :, None])
    return _carry_serial(u[:, few], decay, states[:, few], final, reverse)


def by_block(u: Tensor, batch: int, blocks: int) -> Tensor:
    """(dim, batch * blocks, states) to (batch, blocks, dim, states), where the states of a block lie together."""
    return u.transpose(0, 1).contiguous().view(batch, blocks, u.shape[0], u.shape[2])


def by_channel(states: Tensor) -> Tensor:
    """(batch, blocks, dim, states) as (dim, batch * blocks, states)."""
    return states.flatten(0, 1).transpose(0, 1)


def _carry_both(u: Tensor, decay: Tensor, start: Tensor | None, bidirectional: bool) -> Tensor:
    """States that enter each block: from the left, and in the second half of the states from the right."""
    u = as_states(u, decay)
    states = torch.empty_like(u)
    half = decay.shape[-1] // 2 if bidirectional else decay.shape[-1]
    first = None if start is None else as_states(start, decay)
    _carry(u[..., :half], decay[:, :half], states[..., :half], first)
    if bidirectional:
        _carry(u[..., half:], decay[:, half:], states[..., half:], reverse=True)
    return as_pairs(states)


def to_channels(x: Tensor, block: int) -> Tensor:
    """(batch, time, dim) to (dim, batch * blocks, block), the last block padded with zeros."""
    time, dim = x.shape[1:]
    blocks = -(-time // block)
    if blocks * block != time:
        x = F.pad(x, (0, 0, 0, blocks * block - time))
    # block by block: unlike one large transpose, this stays in cache and uses all cores; never a view of x
    turned = x.reshape(-1, block, dim).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return turned.transpose(0, 1)


@torch.library.custom_op("seqboat::block_scan", mutates_args=())
def _block_scan(
    x: Tensor,
    mix: Tensor,
    enter: Tensor,
    leave: Tensor,
    decay: Tensor,
    start: Tensor | None,
    bidirectional: bool,
) -> tuple[Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        batch, time, dim = x.shape
        block = enter.shape[1]
        blocks = -(-time // block)
        inputs = to_channels(x, block)
        states = _carry_both(by_block(torch.bmm(inputs, enter), batch, blocks), decay, start, bidirectional)
        outputs = torch.bmm(inputs, mix)
        outputs.baddbmm_(by_channel(states), leave)
        return outputs.view(dim, batch, blocks * block)[:, :, :time].contiguous(), states.flatten(0, 1)


@_block_scan.register_fake
def _(x, mix, enter, leave, decay, start, bidirectional):  # type: ignore[no-untyped-def]
    batch, time, dim = x.shape
    block = mix.shape[1]
    blocks = -(-time // block)
    return x.new_empty(dim, batch, time), x.new_empty(batch * blocks, dim, leave.shape[1])


@torch.library.custom_op("seqboat::block_scan_backward", mutates_args=())
def _block_scan_backward(
    grad_outputs: Tensor,
    grad_states: Tensor | None,
    x: Tensor,
    states: Tensor,
    mix: Tensor,
    enter: Tensor,
    leave: Tensor,
    decay: Tensor,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        dim, batch, time = grad_outputs.shape
        block = mix.shape[1]
        blocks = -(-time // block)
        states = states.unflatten(0, (batch, blocks))
        # gradients may be stored token by token; the matrix products need them channel by channel
        if grad_outputs.is_contiguous() and time == blocks * block:
            grad = grad_outputs.view(dim, batch * blocks, block)
        else:
            grad = to_channels(grad_outputs.permute(1, 2, 0), block)
        # transposed again rather than saved: x is usually alive anyway, a transposed copy would not be
        inputs = to_channels(x, block)
        grad_mix = torch.bmm(inputs.transpose(1, 2), grad)
        grad_leave = torch.bmm(by_channel(states).transpose(1, 2), grad)
        toward = by_block(torch.bmm(grad, leave.transpose(1, 2)), batch, blocks)
        if grad_states is not None:
            toward = toward + grad_states.view_as(toward)
        # the adjoint of a carry is a carry in the other direction, with the conjugate decay
        seen, toward = as_states(states, decay), as_states(toward, decay)
        keep = decay.conj().resolve_conj()
        half = decay.shape[-1] // 2 if bidirectional else decay.shape[-1]
        back = torch.empty_like(toward)
        first = _carry(toward[..., :half], keep[:, :half], back[..., :half], reverse=True)
        if bidirectional:
            _carry(toward[..., half:], keep[:, half:], back[..., half:])
        grad_decay = (back * seen.conj()).sum(dim=(0, 1))
        grad_entered = by_channel(as_pairs(back))
        grad_enter = torch.bmm(inputs.transpose(1, 2), grad_entered)
        grad_x = torch.bmm(grad, mix.transpose(1, 2))
        grad_x.baddbmm_(grad_entered, enter.transpose(1, 2))
        grad_x = grad_x.view(dim, batch, blocks * block)[:, :, :time].permute(1, 2, 0).contiguous()
        return grad_x, grad_mix, grad_enter, grad_leave, grad_decay, as_pairs(first).contiguous()


@_block_scan_backward.register_fake
def _(grad_outputs, grad_states, x, states, mix, enter, leave, decay, bidirectional):  # type: ignore[no-untyped-def]
    dim, batch, time = grad_outputs.shape
    width = states.shape[2] // 2 if bidirectional else states.shape[2]
    # contiguous like the real ones, for any layout of the tables
    return (
        grad_outputs.new_empty(batch, time, dim),
        mix.new_empty(mix.shape),
        enter.new_empty(enter.shape),
        leave.new_empty(leave.shape),
        decay.new_empty(decay.shape),
        grad_outputs.new_empty(batch, dim, width),
    )


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, mix, enter, leave, decay, start, bidirectional = inputs
    _, states = output
    ctx.save_for_backward(x, states, mix, enter, leave, decay, start)
    ctx.bidirectional, ctx.shape = bidirectional, output[0].shape
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_outputs, grad_states):  # type: ignore[no-untyped-def]
    x, states, mix, enter, leave, decay, start = ctx.saved_tensors
    if grad_outputs is None:
        grad_outputs = states.new_zeros(ctx.shape)
    grads = _block_scan_backward(
        grad_outputs, grad_states, x, states, mix, enter, leave, decay, ctx.bidirectional
    )
    return *grads[:5], None if start is None else grads[5], None


_block_scan.register_autograd(_backward, setup_context=_save)


def _powers(log_decay: Tensor, block: int) -> Tensor:
    """(directions, dim, states, block + 1): decay of a state over 0, 1, .. block tokens."""
    return torch.exp(log_decay[..., None] * torch.arange(block + 1, device=log_decay.device))


def _make_tables(drive: Tensor, read: Tensor, skip: Tensor, powers: Tensor) -> tuple[Tensor, ...]:
    """mix, enter, leave and decay of `BlockTables`."""
    enter = (drive[..., None] * powers[..., :-1]).transpose(-1, -2)
    leave = read[..., None] * powers[..., 1:]
    kernel = torch.einsum("...n,...nl->...l", read * drive, powers[..., :-1])
    if powers.is_complex():
        # states as (real, imaginary) pairs; Re(read * s) takes the imaginary part with a minus
        enter = torch.view_as_real(enter).flatten(-2)
        leave = torch.stack([leave.real, -leave.imag], dim=-2).flatten(-3, -2)
        kernel = kernel.real
    # lags -(block - 1) .. block - 1: the second direction runs from right to left
    ahead = kernel[0]
    if len(kernel) == 2:
        center = ahead[:, :1] + kernel[1][:, :1] + skip[:, None]
        behind = kernel[1][:, 1:].flip(-1)
        enter = torch.cat([enter[0].flip(1), enter[1]], dim=-1)
        leave = torch.cat([leave[0], leave[1].flip(-1)], dim=1)
        decay = torch.cat([powers[0, ..., -1], powers[1, ..., -1]], dim=-1)
    else:
        center = ahead[:, :1] + skip[:, None]
        behind = torch.zeros_like(ahead[:, 1:])
        enter, leave, decay = enter[0].flip(1), leave[0].contiguous(), powers[0, ..., -1].clone()
    return toeplitz(torch.cat([behind, center, ahead[:, 1:]], dim=-1)), enter, leave, decay


def block_tables(log_decay: Tensor, drive: Tensor, read: Tensor, skip: Tensor, block: int) -> BlockTables:
    """Tables of a layer with states s_t = q * s_{t-1} + drive * x_t and output Re(read . s_t) + skip * x_t.

    Args:
        log_decay: (directions, dim, states), the logarithm of q; real or complex.
        drive: (directions, dim, states).
        read: (directions, dim, states).
        skip: (dim,).
        block: tokens per block.
    """
    with torch.autocast(log_decay.device.type, enabled=False):
        return BlockTables(*_make_tables(drive, read, skip, _powers(log_decay, block)))


def block_for(time: int, block: int) -> int:
    """Tokens per block for a sequence of this length: short sequences use shorter blocks.

    A compiled graph serves all lengths, so it always uses the whole block.
    """
    return block if torch.compiler.is_compiling() else min(block, max(8, 1 << max(time - 1, 0).bit_length()))


def toeplitz(taps: Tensor) -> Tensor:
    """(dim, 2 C - 1) taps of lags 1 - C .. C - 1 to (dim, C, C) matrices, input i to output j.

    >>> toeplitz(torch.tensor([[9.0, 8.0, 1.0, 2.0, 3.0]])).tolist()
    [[[1.0, 2.0, 3.0], [8.0, 1.0, 2.0], [9.0, 8.0, 1.0]]]
    """
    size = (taps.shape[1] + 1) // 2
    return taps.unfold(1, size, 1).flip(1)


def scan(
    x: Tensor, tables: BlockTables, bidirectional: bool, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the layer over (batch, time, dim).

    Args:
        x: the sequence, zeros on padding.
        tables: from `block_tables`.
        bidirectional: whether the tables hold two directions.
        start: (batch, dim, states), the state before the first token.

    Returns:
        y: (batch, time, dim).
        states: (batch * blocks, dim, states), the states that enter each block.
    """
    y, states = _block_scan(x, *tables, start, bidirectional)
    # token by token again, by one transpose: everything after the scan works token by token
    return y.flatten(1).t().contiguous().view(x.shape), states


def scan_short(x: Tensor, tables: BlockTables) -> tuple[Tensor, Tensor]:
    """As `scan`, of sequences of one block, from their beginning: no state enters."""
    batch, time, dim = x.shape
    inputs = x.reshape(-1, dim).t().contiguous().view(dim, batch, time)
    y = torch.bmm(inputs, tables.mix).view(dim, -1).t().contiguous().view(batch, time, dim)
    return y, x.new_zeros(batch, dim, tables.leave.shape[1])


def final_state(
    x: Tensor,
    states: Tensor,
    tables: BlockTables,
    log_decay: Tensor,
    start: Tensor | None,
    lengths: Tensor | None,
) -> Tensor:
    """The state after the last real token of every sequence, (batch, dim, states); causal layers only.

    Args:
        x: (batch, time, dim), zeros on padding, real tokens first.
        states: as returned by `scan`.
        tables: of one direction.
        log_decay: (dim, states).
        start: the state that `scan` began with.
        lengths: (batch,) real tokens per sequence; None for all.
    """
    batch, time, dim = x.shape
    block, width = tables.enter.shape[1:]
    before = x.new_zeros(batch, dim, width) if start is None else start
    if time == 0:
        return before
    if lengths is None:
        lengths = torch.full((batch,), time, device=x.device)
    last = (lengths - 1).clamp(min=0)
    # the tokens of the last block that holds a real token, newest first
    age = torch.arange(block, device=x.device)
    inside = last % block
    places = (last[:, None] - age).clamp(min=0)
    tail = x.gather(1, places[..., None].expand(-1, -1, dim))
    tail = torch.where((age <= inside[:, None])[..., None], tail, x.new_zeros(()))
    added = torch.einsum("bld,dln->bdn", tail, tables.enter.flip(1))
    blocks = -(-time // block)
    entered = states.index_select(0, torch.arange(batch, device=x.device) * blocks + last // block)
    keep = torch.exp(log_decay * (inside + 1)[:, None, None])
    carried = as_pairs(as_states(entered, keep) * keep)
    return torch.where((lengths > 0)[:, None, None], carried + added, before)


# documents behind each other: every document begins a new block, so the tables serve unchanged


def scan_documents(
    x: Tensor,
    tables: BlockTables,
    bidirectional: bool,
    offsets: Tensor,
    number: Tensor,
    position: Tensor,
    longest: int,
) -> Tensor:
    """Run the layer over documents (1, time, dim), of which no state crosses a border.

    Args:
        x: the packed sequence.
        tables: from `block_tables`.
        bidirectional: whether the tables hold two directions.
        offsets: (documents + 1,), where each document begins.
        number, position: (time,), the document of each token, and its place in it.
        longest: tokens of the longest document, or a bound.
    """
    mix, enter, leave, decay = tables
    block, dim, time = enter.shape[1], x.shape[2], x.shape[1]
    first = F.pad(((offsets.diff() + block - 1) // block).cumsum(dim=0), (1, 0))
    blocks = time // block + len(offsets)  # a bound, so that the host need not wait
    group = torch.bucketize(torch.arange(blocks, device=x.device), first[1:], right=True)
    place = first[number] * block + position
    spread = x.new_zeros(blocks * block, dim).index_copy(0, place, x[0])
    inputs = to_channels(spread[None], block)
    u = as_states(by_block(torch.bmm(inputs, enter), 1, blocks)[0], decay)
    half, reach = decay.shape[-1] // 2 if bidirectional else decay.shape[-1], -(-longest // block)
    states = carry_documents(u[..., :half], decay[:, :half], group, reach)
    if bidirectional:
        right = carry_documents(u[..., half:].flip(0), decay[:, half:], group.flip(0), reach)
        states = torch.cat([states, right.flip(0)], dim=-1)
    outputs = torch.baddbmm(torch.bmm(inputs, mix), by_channel(as_pairs(states)[None]), leave)
    return outputs.view(dim, blocks * block).index_select(1, place).t()[None]


def carry_documents(u: Tensor, decay: Tensor, group: Tensor, reach: int) -> Tensor:
    """The states that enter each block, s_{k+1} = decay * s_k + u_k, anew from the first block of each document.

    Args:
        u: (blocks, dim, states), real or complex.
        decay: (dim, states).
        group: (blocks,), the document of each block.
        reach: blocks of the longest document, or more.
    """
    states = _from_before(u, group, 1)
    step = 1
    while step < min(reach, u.shape[0]):
        states = states + decay * _from_before(states, group, step)
        step, decay = 2 * step, decay * decay
    return states


def _from_before(x: Tensor, group: Tensor, step: int) -> Tensor:
    """x of the block `step` blocks earlier; zeros if that is another document, whatever it holds."""
    same = (group[step:] == group[:-step])[:, None, None]
    moved = torch.where(same, x[:-step], x.new_zeros(()))
    return torch.cat([x.new_zeros(step, *x.shape[1:]), moved])
