"""Keys and values that decoding keeps: of every token so far (`Cache`), or of the last ones (`Fifo`).

Slot s of a cache holds the s-th real token of a sequence; in a fifo the newest token is in the last slot. Sequences
may have seen different numbers of tokens: slots without a token are zero and must be hidden from queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Cache(NamedTuple):
    """A memory that grows with the sequence."""

    keys: Tensor
    """(batch, heads, slots, d_key)"""
    values: Tensor
    """(batch, heads, slots, d_value)"""
    total: Tensor
    """(batch,): tokens so far"""


def make_cache(
    batch: int, heads: int, d_key: int, d_value: int, dtype: torch.dtype, device: torch.device
) -> Cache:
    """The cache before the first token."""
    return Cache(
        torch.zeros(batch, heads, 0, d_key, dtype=dtype, device=device),
        torch.zeros(batch, heads, 0, d_value, dtype=dtype, device=device),
        torch.zeros(batch, dtype=torch.int64, device=device),
    )


def extend(cache: Cache, keys: Tensor, values: Tensor, counts: Tensor) -> Cache:
    """Add the first `counts` of (batch, heads, time, d) keys and values to each sequence.

    The result has the slots that its longest sequence needs.
    """
    before, total = cache.total, cache.total + counts
    slots = int(total.max()) if total.numel() else 0
    slot = torch.arange(slots, device=total.device)
    fresh = (slot >= before[:, None]) & (slot < total[:, None])
    source = (slot - before[:, None]).clamp(0, max(keys.shape[2] - 1, 0))

    def join(old: Tensor, new: Tensor) -> Tensor:
        kept = F.pad(old, (0, 0, 0, slots - old.shape[2]))
        if new.shape[2] == 0:
            return kept
        index = source[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
        return torch.where(fresh[:, None, :, None], new.to(old.dtype).gather(2, index), kept)

    return Cache(join(cache.keys, keys), join(cache.values, values), total)


def append(cache: Cache, key: Tensor, value: Tensor, ring: int | None = None) -> Cache:
    """Add one token (batch, heads, d) to each sequence, in place where there is room.

    A cache grows by a quarter at a time, so that most tokens are written without a copy of all earlier ones; its last
    slots are empty. In a ring, which has all of its slots, token s is at slot s modulo its size.
    """
    keys, values, before = cache
    total = before + 1
    need = int(total.max()) if total.numel() and ring is None else 0
    spare = need - keys.shape[2]
    if spare > 0:
        spare += max(16, need // 4)
        keys, values = F.pad(keys, (0, 0, 0, spare)), F.pad(values, (0, 0, 0, spare))
    rows = torch.arange(len(total), device=total.device)
    place = before if ring is None else before % ring
    keys[rows, :, place] = key.to(keys.dtype)
    values[rows, :, place] = value.to(values.dtype)
    return Cache(keys, values, total)


def seen_by_step(cache: Cache) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and the slots that the newest token of each sequence sees, without empty slots at the end."""
    used = int(cache.total.max()) if cache.total.numel() else 0
    slot = torch.arange(used, device=cache.total.device)
    # a sequence without tokens looks at its empty first slot, so that its softmax is finite
    visible = (slot < cache.total[:, None]) | (slot == 0)
    return cache.keys[:, :, :used], cache.values[:, :, :used], visible


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
