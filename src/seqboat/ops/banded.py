"""Banded attention on packed tokens: the working memory of the paper.

Each token of a packed array attends to its neighbors of the same group. Only the inputs are stored for the backward
pass, which recomputes the scores, so memory is linear in the number of active tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqboat.ops.band import NEIGHBORS, BandScores, Neighbors, TableGradient, confine
from seqboat.ops.functions import ATTENTIONS, draw_seed, drop, weigh_back
from seqboat.ops.kernels.registry import SEAM, Implementation, attempt, pick
from seqboat.ops.precision import widen

INPUTS = f"Tensor q, Tensor k, Tensor v, {NEIGHBORS}, float dropout, int seed"


@torch.library.custom_op("seqboat::banded", mutates_args=(), schema=f"({INPUTS}) -> Tensor")
def _banded(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    *fields, dropout, seed = rest
    near = Neighbors(*fields)
    with torch.autocast(q.device.type, enabled=False):
        found = _pick("attention", q, v, near, dropout)
        if found is not None:
            out = attempt("attention", found, q, k, v, near)
            if out is not None:
                return out
        return _forward(q, k, v, near, dropout, seed)


def _pick(operation: str, q: Tensor, v: Tensor, near: Neighbors, dropout: float) -> Implementation | None:
    """What computes this call instead of torch."""
    if not SEAM.open and q.device.type == "cpu":
        return None
    return pick(
        operation,
        device=q.device,
        dtype=q.dtype,
        d_z=q.shape[1],
        d_v=v.shape[1],
        attention=near.attention,
        table=near.table is not None,
        dropout=dropout,
        gradient=torch.is_grad_enabled() and (q.requires_grad or v.requires_grad),
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, near: Neighbors, dropout: float, seed: int) -> Tensor:
    dtype = v.dtype
    q, k, v = widen(q), widen(k), widen(v)
    score, function = BandScores(q, near), ATTENTIONS[near.attention]
    band = score.band
    out = torch.empty(q.shape[0], v.shape[1], dtype=v.dtype, device=v.device)
    for begin, end in band.parts:
        scores, _ = score(begin, end, band.queries(q, begin, end), band.keys(k, begin, end))
        weights = drop(function.weights(scores), dropout, seed + begin)
        values = band.keys(v, begin, end)
        if end * band.size <= band.tokens:
            torch.bmm(weights, values, out=band.queries(out, begin, end))
        else:
            rest = torch.bmm(weights, values).flatten(0, 1)
            out[begin * band.size :] = rest[: band.tokens - begin * band.size]
    return out.to(dtype)


@_banded.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(q.shape[0], v.shape[1])


@torch.library.custom_op(
    "seqboat::banded_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor? out, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _banded_backward(
    grad: Tensor, out: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *fields, dropout, seed = rest
    near = Neighbors(*fields)
    with torch.autocast(q.device.type, enabled=False):
        found = None if out is None else _pick("attention_backward", q, v, near, dropout)
        if found is not None:
            grads = attempt("attention_backward", found, grad, out, q, k, v, near)
            if grads is not None:
                return grads

        def run(above: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            return _backward(above, q, k, v, near, dropout, seed)

        return confine(run, grad, (q, k, v), near.group, 3)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, near: Neighbors, dropout: float, seed: int
) -> tuple[Tensor, ...]:
    types = q.dtype, k.dtype, v.dtype, q.dtype if near.table is None else near.table.dtype
    grad, q, k, v = widen(grad), widen(q), widen(k), widen(v)
    score, function = BandScores(q, near), ATTENTIONS[near.attention]
    band, grad_table = score.band, TableGradient(score)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = band.sums(k), band.sums(v)
    for begin, end in band.parts:
        queries, keys, values = (
            band.queries(q, begin, end),
            band.keys(k, begin, end),
            band.keys(v, begin, end),
        )
        scores, index = score(begin, end, queries, keys)
        above = band.queries(grad, begin, end)
        dropped, grad_scores = weigh_back(function, scores, above, values, dropout, seed + begin)
        grad_table.add(grad_scores, index)
        tokens = torch.bmm(grad_scores, keys).flatten(0, 1)
        grad_q[begin * band.size : end * band.size] = tokens[: band.tokens - begin * band.size]
        band.add_by_key(grad_v, begin, dropped, above)
        band.add_by_key(grad_k, begin, grad_scores, queries, near.scale)
    grads = grad_q.mul_(near.scale), band.tokens_of(grad_k), band.tokens_of(grad_v), grad_table.total()
    return tuple(part.to(dtype) for part, dtype in zip(grads, types, strict=True))


@_banded_backward.register_fake
def _(grad: Tensor, out: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return fake_gradients(q, k, v, Neighbors(*rest[:-2]).table)


def fake_gradients(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> tuple[Tensor, ...]:
    """Uninitialized gradients of queries, keys, values and table, contiguous for any layout of the inputs."""
    like = q.new_empty(0) if table is None else table.new_empty(table.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), like


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, group, position, table, *rest = inputs
    # torch recomputes what it needs from the inputs; other kernels read the output
    out = output if SEAM.open or q.device.type != "cpu" else None
    ctx.save_for_backward(out, q, k, v, group, position, table)
    ctx.rest = rest


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    out, *tensors, table = ctx.saved_tensors
    dq, dk, dv, dtable = _banded_backward(grad.contiguous(), out, *tensors, table, *ctx.rest)
    return dq, dk, dv, None, None, dtable if table is not None else None, *(None,) * 6


_banded.register_autograd(_differentiate, setup_context=_save)


def banded(q: Tensor, k: Tensor, v: Tensor, near: Neighbors, dropout: float = 0.0) -> Tensor:
    """Attention of each token of a packed array to its neighbors of the same group.

    Args:
        q, k: (tokens, d_z).
        v: (tokens, d_v).
        near: which keys a token sees, and how they are scored.
        dropout: rate of attention dropout.
    """
    return _banded(q, k, v, *near, dropout, draw_seed(dropout))
