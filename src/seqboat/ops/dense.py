"""Dense attention on padded groups: every query sees every key of its group, or every earlier one.

A few queries of every group are scored at a time. As in `banded`, only the inputs are stored for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqboat.ops.band import scores_at_once
from seqboat.ops.banded import fake_gradients
from seqboat.ops.functions import ATTENTIONS, HIDDEN, AttentionName, draw_seed, drop, weigh_back
from seqboat.ops.precision import wide_type, widen

INPUTS = """
    Tensor q, Tensor k, Tensor v, Tensor query_slot, Tensor key_slot, Tensor query_position, Tensor key_position,
    Tensor scale, Tensor? table, str attention, bool causal, float dropout, int seed
""".strip()


class _Groups(NamedTuple):
    """Which keys queries see, and how they are scored; `dense` explains the fields."""

    query_slot: Tensor
    key_slot: Tensor
    query_position: Tensor
    key_position: Tensor
    scale: Tensor
    table: Tensor | None
    attention: str
    causal: bool


def _score(part: slice, q: Tensor, k: Tensor, groups: _Groups) -> tuple[Tensor, Tensor | None]:
    """Biased scores of some queries of every group, and the indices of their biases in the table."""
    scores = torch.bmm(widen(q[:, part]) * groups.scale[:, part, None], widen(k).transpose(1, 2))
    index = None
    if groups.table is not None:
        furthest = (groups.table.shape[0] - 1) // 2
        index = groups.key_position[:, None, :] - groups.query_position[:, part, None]
        index = index.add_(furthest).clamp_(0, 2 * furthest)
        scores += groups.table.to(scores.dtype).index_select(0, index.view(-1)).view(index.shape)
    hidden = (groups.key_slot < 0)[:, None, :]
    if groups.causal:
        hidden = hidden | (groups.key_slot[:, None, :] > groups.query_slot[:, part, None])
    return scores.masked_fill_(hidden, HIDDEN), index


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Ranges of queries that are scored together."""
    per_query = max(1, q.shape[0] * k.shape[1])
    at_once = max(1, scores_at_once(q) // per_query)
    return (slice(begin, begin + at_once) for begin in range(0, q.shape[1], at_once))


@torch.library.custom_op("seqboat::dense", mutates_args=(), schema=f"({INPUTS}) -> Tensor")
def _dense(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    *groups, dropout, seed = rest
    with torch.autocast(q.device.type, enabled=False):
        return _forward(q, k, v, _Groups(*groups), dropout, seed)


def _forward(q: Tensor, k: Tensor, v: Tensor, groups: _Groups, dropout: float, seed: int) -> Tensor:
    function = ATTENTIONS[groups.attention]
    out = v.new_empty(*q.shape[:2], v.shape[2])
    for part in _parts(q, k):
        scores, _ = _score(part, q, k, groups)
        out[:, part] = torch.bmm(drop(function.weights(scores), dropout, seed + part.start), widen(v))
    return out


@_dense.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(*q.shape[:2], v.shape[2])


@torch.library.custom_op(
    "seqboat::dense_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _dense_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *groups, dropout, seed = rest
    with torch.autocast(q.device.type, enabled=False):
        return _backward(grad, q, k, v, _Groups(*groups), dropout, seed)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, groups: _Groups, dropout: float, seed: int
) -> tuple[Tensor, ...]:
    function, wide, table = ATTENTIONS[groups.attention], wide_type(q), groups.table
    grad_q = torch.empty(q.shape, dtype=wide, device=q.device)
    grad_k = torch.zeros(k.shape, dtype=wide, device=q.device)
    grad_v = torch.zeros(v.shape, dtype=wide, device=q.device)
    grad_table = torch.zeros(0 if table is None else table.shape[0], dtype=wide, device=q.device)
    for part in _parts(q, k):
        scores, index = _score(part, q, k, groups)
        above = widen(grad[:, part])
        dropped, grad_scores = weigh_back(function, scores, above, widen(v), dropout, seed + part.start)
        if index is not None:
            grad_table.index_add_(0, index.view(-1), grad_scores.view(-1))
        scaled = grad_scores * groups.scale[:, part, None]
        grad_q[:, part] = torch.bmm(scaled, widen(k))
        grad_k.baddbmm_(scaled.transpose(1, 2), widen(q[:, part]))
        grad_v.baddbmm_(dropped.transpose(1, 2), above)
    table_type = q.dtype if table is None else table.dtype
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_table.to(table_type)


@_dense_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return fake_gradients(q, k, v, _Groups(*rest[:-2]).table)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, attention, causal, dropout, seed = inputs
    ctx.save_for_backward(*tensors)
    ctx.rest = attention, causal, dropout, seed


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, table = ctx.saved_tensors
    dq, dk, dv, dtable = _dense_backward(grad.contiguous(), *tensors, table, *ctx.rest)
    return dq, dk, dv, *(None,) * 5, dtable if table is not None else None, *(None,) * 4


_dense.register_autograd(_differentiate, setup_context=_save)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query_slot: Tensor,
    key_slot: Tensor,
    query_position: Tensor,
    key_position: Tensor,
    scale: float | Tensor,
    table: Tensor | None,
    attention: AttentionName,
    causal: bool,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of every query to every real key of its group.

    Args:
        q: (groups, queries, d_z).
        k: (groups, keys, d_z).
        v: (groups, keys, d_v).
        query_slot: (groups, queries), index of a query in its compressed sequence.
        key_slot: (groups, keys), likewise; negative where there is no key.
        query_position, key_position: coordinates for the distances of the bias.
        scale: multiplies the products of queries and keys; a number, or a tensor that expands to (groups, queries).
        table: (2 * max distance + 1,), bias per distance, or None.
        attention: name of the attention function.
        causal: whether queries see no later keys.
        dropout: rate of attention dropout.
    """
    if not isinstance(scale, Tensor):
        scale = torch.full((1, 1), scale, dtype=wide_type(q), device=q.device)
    groups = _Groups(
        query_slot, key_slot, query_position, key_position, scale.expand(q.shape[:2]), table, attention, causal
    )  # fmt: skip
    return _dense(q, k, v, *groups, dropout, draw_seed(dropout))
