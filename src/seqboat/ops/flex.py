"""Banded attention through PyTorch's FlexAttention, which fuses it on GPUs.

Wide values do not fit into the shared memory of a GPU, so they are split into heads of at most 128 channels that have
queries and keys in common. Which blocks of keys a block of queries meets follows from the band alone; nothing of the
size tokens x tokens is built. The gradient of the bias table is not deterministic there.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.ops.band import Neighbors
from seqboat.ops.functions import AttentionName

FLEX_ATTENTIONS: tuple[AttentionName, ...] = ("softmax",)
"""The attention functions that FlexAttention computes."""
HEAD = 128
"""Channels of values in a head."""
BLOCK = 128
"""Tokens in a block of the mask."""


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def flex_banded(q: Tensor, k: Tensor, v: Tensor, near: Neighbors, dropout: float = 0.0) -> Tensor:
    """Like `banded`, but softmax only and without dropout. On a CPU it has no gradient; tests compare with it."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    group, position, table, left, right, attention, scale = near
    assert attention in FLEX_ATTENTIONS and not dropout

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = (key - query >= -left) & (key - query <= right)
        return inside & (group[query] == group[key])

    def biased(score: Tensor, _batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert table is not None
        distance = key - query if position is None else position[key] - position[query]
        furthest = (table.shape[0] - 1) // 2
        return score + table[(distance + furthest).clamp(0, 2 * furthest)]

    tokens = q.shape[0]
    if tokens == 0:
        return v + 0 * (q.sum() + k.sum())
    met, numbers = band_blocks(tokens, left, right, q.device)
    mask = BlockMask.from_kv_blocks(
        met[None, None], numbers[None, None], BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(tokens, tokens)
    )
    heads = split_heads(v, HEAD)
    queries, keys = (part.expand(1, heads.shape[1], -1, -1) for part in (q, k))
    arguments = (queries, keys, heads, None if table is None else biased, mask)
    if q.device.type == "cuda":
        return join_heads(_compiled_flex()(*arguments, scale=scale), v)
    with warnings.catch_warnings():
        # not compiled on purpose: this path is for comparison
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
        return join_heads(flex_attention(*arguments, scale=scale), v)


def band_blocks(tokens: int, left: int, right: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries meets, and which ones come first in its row.

    >>> count, numbers = band_blocks(400, 100, 0, torch.device("cpu"))
    >>> count.tolist(), numbers[2].tolist()
    ([1, 2, 2, 2], [1, 2, 3, 0])
    """
    blocks = -(-tokens // BLOCK)
    number = torch.arange(blocks, device=device, dtype=torch.int32)
    first = torch.div(number * BLOCK - left, BLOCK, rounding_mode="floor").clamp(min=0)
    last = torch.div(number * BLOCK + BLOCK - 1 + right, BLOCK, rounding_mode="floor").clamp(max=blocks - 1)
    return last - first + 1, (first[:, None] + number) % max(blocks, 1)


def split_heads(v: Tensor, width: int) -> Tensor:
    """(tokens, d_v) as (1, heads, tokens, width or less), the last head filled up with zeros."""
    tokens, d_v = v.shape
    heads = max(1, -(-d_v // width))
    size = -(-d_v // heads)
    padded = F.pad(v, (0, heads * size - d_v))
    return padded.view(tokens, heads, size).transpose(0, 1)[None]


def join_heads(out: Tensor, v: Tensor) -> Tensor:
    """The inverse of `split_heads`, in the shape of v."""
    return out[0].transpose(0, 1).flatten(1)[:, : v.shape[1]]
