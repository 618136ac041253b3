"""Banded attention through PyTorch's FlexAttention, which fuses it on GPUs."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from seqboat.ops.band import Neighbors
from seqboat.ops.functions import AttentionName

FLEX_ATTENTIONS: tuple[AttentionName, ...] = ("softmax",)
"""The attention functions that FlexAttention computes."""


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def flex_banded(q: Tensor, k: Tensor, v: Tensor, near: Neighbors, dropout: float = 0.0) -> Tensor:
    """Like `banded`, but softmax only and without dropout. On a CPU it has no gradient; tests compare with it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

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
    mask = create_block_mask(visible, None, None, tokens, tokens, device=q.device.type)
    arguments = (q[None, None], k[None, None], v[None, None], None if table is None else biased, mask)
    if q.device.type == "cuda":
        return _compiled_flex()(*arguments, scale=scale)[0, 0]
    with warnings.catch_warnings():
        # not compiled on purpose: this path is for comparison
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
        return flex_attention(*arguments, scale=scale)[0, 0]
