"""Causal products of linear attention: a running sum of outer products, in blocks.

    y_t = q_t^T S_t,   S_t = S_{t-1} + k_t v_t^T

The sums between blocks are a cumulative sum, the products inside a block a masked matrix product, so time and memory
are linear in the sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Tokens per block: large enough for fast products, small enough that products inside blocks stay cheap."""


def causal_product(query: Tensor, key: Tensor, value: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """y_t for every token, and the sum after the last one.

    Args:
        query, key: (..., time, features); keys of padding are zero.
        value: (..., time, dim).
        sums: (..., features, dim), before the first token.

    >>> one = torch.ones(3, 1)
    >>> y, after = causal_product(one, one, torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(1, 1))
    >>> y.flatten().tolist(), after.item()
    ([1.0, 3.0, 6.0], 6.0)
    """
    time = query.shape[-2]
    size = min(BLOCK, max(time, 1))
    blocks = max(-(-time // size), 1)
    pad = (0, 0, 0, blocks * size - time)
    q, k, v = (F.pad(part, pad).unflatten(-2, (blocks, size)) for part in (query, key, value))
    through = (k.transpose(-1, -2) @ v).cumsum(dim=-3) + sums.unsqueeze(-3)
    before = torch.cat([sums.unsqueeze(-3), through[..., :-1, :, :]], dim=-3)
    y = (q @ k.transpose(-1, -2)).tril() @ v + q @ before
    return y.flatten(-3, -2)[..., :time, :], through[..., -1, :, :]
