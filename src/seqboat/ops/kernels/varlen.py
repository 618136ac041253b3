"""Banded attention through torch's attention on sequences of variable length, which runs FlashAttention on GPUs.

It has windows, but no biases, and one width for queries, keys and values. So queries and keys are filled up with
zeros, which changes no product, and values are split into heads of that width that have queries and keys in common.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.ops.band import Neighbors

MOST = 256
"""Widest head of FlashAttention."""
HEAD = 128
"""Preferred width of a head."""


def missing() -> str | None:
    """Why this machine cannot run it; None if it can."""
    try:
        import torch.nn.attention.varlen
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    return None if torch.cuda.is_available() else "no GPU"


def refuse(**call: Any) -> str | None:
    """Why it does not fit a call."""
    if call["attention"] != "softmax":
        return f"variable-length attention computes softmax only, not {call['attention']}"
    if call["table"]:
        return "a bias table"
    if call["dropout"]:
        return "attention dropout"
    if call["device"].type != "cuda":
        return f"no variable-length attention for {call['device'].type} tensors"
    if call["dtype"] not in (torch.bfloat16, torch.float16):
        return (
            f"variable-length attention needs bf16 or fp16, not {str(call['dtype']).removeprefix('torch.')}"
        )
    return f"queries of width {call['d_z']}, at most {MOST}" if call["d_z"] > MOST else None


def varlen_banded(q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> Tensor:
    """As `banded`, for calls that `refuse` accepts. The host waits for the number of sequences."""
    from torch.nn.attention.varlen import varlen_attn

    tokens, d_v = v.shape
    if tokens == 0:
        return v + 0 * (q.sum() + k.sum())
    # FlashAttention wants multiples of 8
    width = -(-max(q.shape[1], min(HEAD, d_v)) // 8) * 8
    heads = -(-d_v // width)
    query, key = (F.pad(part, (0, width - part.shape[1]))[:, None].expand(-1, heads, -1) for part in (q, k))
    value = F.pad(v, (0, heads * width - d_v)).view(tokens, heads, width)
    _, counts = torch.unique_consecutive(near.group, return_counts=True)
    offsets = F.pad(counts.cumsum(dim=0), (1, 0)).to(torch.int32)
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value,
        offsets,
        offsets,
        tokens,
        tokens,
        scale=near.scale,
        window_size=(near.left, near.right),
    )
    assert isinstance(out, Tensor)
    return out.flatten(1)[:, :d_v]
