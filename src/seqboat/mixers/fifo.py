"""Keys and values of the last tokens: the memory of causal layers with a bounded span.

The newest token of every sequence is in the last slot. Sequences may have seen different numbers of tokens: the slots
before the first one are zero and must be hidden from queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Fifo(NamedTuple):
    """A memory of constant size."""

    keys: Tensor
    """(batch, heads, slots, d_head)"""
    values: Tensor
    """(batch, heads, slots, d_head)"""
    total: Tensor
    """(batch,): tokens so far"""


def make_fifo(
    batch: int, heads: int, slots: int, d_head: int, dtype: torch.dtype, device: torch.device
) -> Fifo:
    """The memory before the first token."""
    empty = torch.zeros(batch, heads, slots, d_head, dtype=dtype, device=device)
    return Fifo(empty, empty.clone(), torch.zeros(batch, dtype=torch.int64, device=device))


def resize(fifo: Fifo, slots: int) -> Fifo:
    """The newest `slots` tokens; with empty slots before them where there were fewer."""
    spare = slots - fifo.keys.shape[2]
    if spare == 0:
        return fifo
    return Fifo(F.pad(fifo.keys, (0, 0, spare, 0)), F.pad(fifo.values, (0, 0, spare, 0)), fifo.total)


def push(fifo: Fifo, keys: Tensor, values: Tensor, counts: Tensor | None) -> tuple[Fifo, Tensor, Tensor]:
    """Add the first `counts` of (batch, heads, time, d_head) to each sequence, or all of them.

    Returns:
        The memory afterwards, with as many slots as before; and all keys and values, old ones before new ones: column
        j of a sequence is its token number `fifo.total - slots + j`.
    """
    slots, time = fifo.keys.shape[2], keys.shape[2]
    joined = [
        torch.cat([old, new.to(old.dtype)], dim=2) for old, new in ((fifo.keys, keys), (fifo.values, values))
    ]
    if counts is None:
        after = [part[:, :, time:].clone() for part in joined]
        return Fifo(after[0], after[1], fifo.total + time), joined[0], joined[1]
    column = counts[:, None] + torch.arange(slots, device=counts.device)
    index = column[:, None, :, None].expand(fifo.keys.shape)
    after = [part.gather(2, index) for part in joined]
    return Fifo(after[0], after[1], fifo.total + counts), joined[0], joined[1]


def relative_shift(scores: Tensor) -> Tensor:
    """Move row a of (..., rows, columns) to the left by rows - 1 - a places.

    A product of queries with embeddings of falling distances thereby becomes one of queries and keys. What moves in
    from the right, in the last columns of the first rows, has no meaning.

    >>> relative_shift(torch.arange(6.0).view(2, 3))[:, :2].tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    *batch, rows, columns = scores.shape
    padded = F.pad(scores, (1, 0)).view(*batch, columns + 1, rows)
    return padded[..., 1:, :].reshape(*batch, rows, columns)
