"""The block scan over documents that lie behind each other: a state never crosses the border of a document.

Every document begins a new block, so that the tables of `scan` serve unchanged; only the states between the blocks
know of borders. They are carried in doubling steps: after k of them, the state that enters a block holds the last
2^k blocks of its document.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqboat.ops.scan import BlockTables, as_pairs, as_states, by_block, by_channel, to_channels


def scan_documents(
    x: Tensor,
    tables: BlockTables,
    bidirectional: bool,
    place: Tensor,
    group: Tensor,
    reach: int,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a layer over documents, in ordinary operators.

    Args:
        x: (1, time, dim), document after document.
        tables: from `block_tables`.
        bidirectional: whether the tables hold two directions.
        place: (time,), where each token goes in the blocks.
        group: (blocks,), the document of each block.
        reach: blocks of the longest document, or more.
        start: (blocks, dim, states), what the states that enter a block start from; zeros by default.

    Returns:
        y: (1, time, dim), laid out channel by channel in memory.
        spread: (blocks * block, dim), the tokens in blocks.
        states: (blocks, dim, states), the states that enter each block.
    """
    mix, enter, leave, decay = tables
    block, blocks, dim = enter.shape[1], group.shape[0], x.shape[2]
    spread = x.new_zeros(blocks * block, dim).index_copy(0, place, x[0])
    inputs = to_channels(spread[None], block)
    u = as_states(by_block(torch.bmm(inputs, enter), 1, blocks)[0], decay)
    half = decay.shape[-1] // 2 if bidirectional else decay.shape[-1]
    first = None if start is None else as_states(start, decay)
    states = carry_documents(u[..., :half], decay[:, :half], group, reach, first)
    if bidirectional:
        right = carry_documents(u[..., half:].flip(0), decay[:, half:], group.flip(0), reach)
        states = torch.cat([states, right.flip(0)], dim=-1)
    states = as_pairs(states)
    outputs = torch.baddbmm(torch.bmm(inputs, mix), by_channel(states[None]), leave)
    return outputs.view(dim, blocks * block).index_select(1, place).t()[None], spread, states


def state_after(
    spread: Tensor, states: Tensor, tables: BlockTables, log_decay: Tensor, block: Tensor, length: Tensor
) -> Tensor:
    """The states after the last token of some documents, which must not be empty; causal layers only.

    Args:
        spread, states: from `scan_documents`.
        tables: of one direction.
        log_decay: (dim, states).
        block: (documents,), the first block of each.
        length: (documents,), its tokens.
    """
    size = tables.enter.shape[1]
    inside = (length - 1) % size
    last = block + (length - 1) // size
    age = torch.arange(size, device=spread.device)
    places = (last * size + inside)[:, None] - age
    tail = spread.index_select(0, places.clamp(min=0).flatten()).view(*places.shape, -1)
    tail = torch.where((age <= inside[:, None])[..., None], tail, spread.new_zeros(()))
    added = torch.einsum("bld,dln->bdn", tail, tables.enter.flip(1))
    keep = torch.exp(log_decay * (inside + 1)[:, None, None])
    return as_pairs(as_states(states.index_select(0, last), keep) * keep) + added


def carry_documents(
    u: Tensor, decay: Tensor, group: Tensor, reach: int, start: Tensor | None = None
) -> Tensor:
    """The states that enter each block, s_{k+1} = decay * s_k + u_k, anew from the first block of each document.

    Args:
        u: (blocks, dim, states), real or complex.
        decay: (dim, states).
        group: (blocks,), the document of each block.
        reach: blocks of the longest document, or more.
        start: as u, the states that enter first blocks; zeros everywhere else, and by default.
    """
    states = _from_before(u, group, 1)
    if start is not None:
        states = states + start
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
