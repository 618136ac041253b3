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
    x: Tensor, tables: BlockTables, bidirectional: bool, place: Tensor, group: Tensor, reach: int
) -> Tensor:
    """Run a layer over documents, in ordinary operators.

    Args:
        x: (1, time, dim), document after document.
        tables: from `block_tables`.
        bidirectional: whether the tables hold two directions.
        place: (time,), where each token goes in the blocks.
        group: (blocks,), the document of each block.
        reach: blocks of the longest document, or more.

    Returns:
        (1, time, dim), laid out channel by channel in memory.
    """
    mix, enter, leave, decay = tables
    block, blocks, dim = enter.shape[1], group.shape[0], x.shape[2]
    spread = x.new_zeros(blocks * block, dim).index_copy(0, place, x[0])
    inputs = to_channels(spread[None], block)
    u = as_states(by_block(torch.bmm(inputs, enter), 1, blocks)[0], decay)
    half = decay.shape[-1] // 2 if bidirectional else decay.shape[-1]
    states = carry_documents(u[..., :half], decay[:, :half], group, reach)
    if bidirectional:
        right = carry_documents(u[..., half:].flip(0), decay[:, half:], group.flip(0), reach)
        states = torch.cat([states, right.flip(0)], dim=-1)
    outputs = torch.baddbmm(torch.bmm(inputs, mix), by_channel(as_pairs(states)[None]), leave)
    return outputs.view(dim, blocks * block).index_select(1, place).t()[None]


def carry_documents(u: Tensor, decay: Tensor, group: Tensor, reach: int) -> Tensor:
    """The states that enter each block, s_{k+1} = decay * s_k + u_k, from zero at the first block of a document.

    Args:
        u: (blocks, dim, states), real or complex.
        decay: (dim, states).
        group: (blocks,), the document of each block.
        reach: blocks of the longest document, or more.
    """
    states = _from_before(u, group, 1)
    step = 1
    while step < min(reach - 1, u.shape[0] - 1):
        states = states + decay * _from_before(states, group, step)
        step, decay = 2 * step, decay * decay
    return states


def _from_before(x: Tensor, group: Tensor, step: int) -> Tensor:
    """x of the block `step` blocks earlier; zeros if that is another document, whatever it holds."""
    same = (group[step:] == group[:-step])[:, None, None]
    moved = torch.where(same, x[:-step], x.new_zeros(()))
    return torch.cat([x.new_zeros(step, *x.shape[1:]), moved])
