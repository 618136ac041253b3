"""The gated attention unit from tokens to output, a few blocks at a time, with its own backward pass.

Chained operators would hold a dozen arrays of the size of the active tokens at once: gates, values, weighted
sums, their gradients. Here everything between the two projections exists only for the blocks at hand, in the
cache of a core: kept for the backward pass are the tokens, their projection before bias and activation, and the
weighted sums. The mathematics is that of `GAU` and `attention.banded`, and is tested against them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.ops.attention import (
    AttentionName,
    Band,
    BandScores,
    RollingSums,
    attention_weights,
    grad_scores_of,
    scores_at_once,
)
from seqboat.ops.precision import full_precision

_silu_backward = torch.ops.aten.silu_backward


Z, GATE, VALUE = range(3)


class _Columns(NamedTuple):
    """What belongs to z, gate and value."""

    z: Tensor
    gate: Tensor
    value: Tensor


def _columns(x: Tensor, d_z: int, dim: int) -> _Columns:
    """Views of the parts of a projection, or of its weights."""
    d_v = (x.shape[dim] - d_z) // 2
    return _Columns(*x.split([d_z, d_v, d_v], dim=dim))


class _Blocks:
    """Queries, keys, values and gates of some blocks, from the projection before its activation."""

    def __init__(
        self, band: Band, before: _Columns, gamma: Tensor, beta: Tensor, begin: int, end: int
    ) -> None:
        size, tokens = band.size, band.tokens
        first, last = (begin - band.before) * size, (end + band.after) * size
        low, high = max(first, 0), min(last, tokens)
        self.rows = slice(begin * size, min(end * size, tokens))
        z = F.silu(before.z[low:high])
        key = torch.addcmul(beta[1], z, gamma[1])
        value = F.silu(before.value[low:high])
        query = torch.addcmul(beta[0], z[self.rows.start - low : self.rows.stop - low], gamma[0])
        self.gate = F.silu(before.gate[self.rows])
        around = (0, 0, low - first, last - high)
        self.keys = band.windows(F.pad(key, around) if any(around) else key, end - begin)
        self.values = band.windows(F.pad(value, around) if any(around) else value, end - begin)
        self.queries = self.in_blocks(query, band)

    def in_blocks(self, rows: Tensor, band: Band) -> Tensor:
        """(rows, dim) as (blocks, size, dim), the last block filled up with zeros."""
        missing = -rows.shape[0] % band.size
        return (F.pad(rows, (0, 0, 0, missing)) if missing else rows).unflatten(0, (-1, band.size))


@torch.library.custom_op("seqboat::gated_attention", mutates_args=())
@full_precision
def _gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    group: Tensor,
    position: Tensor | None,
    table: Tensor | None,
    left: int,
    right: int,
    kind: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, d_v = x.shape[0], out_weight.shape[1]
    band = Band(tokens, left, right, scores_at_once(x))
    before = torch.addmm(bias, x, weight.t())
    score = BandScores(band, group, position, table, scale, x.dtype)
    summed = x.new_empty(tokens, d_v)
    y = x.new_empty(tokens, out_weight.shape[0])
    columns = _columns(before, gamma.shape[1], 1)
    for begin, end in band.parts():
        part = _Blocks(band, columns, gamma, beta, begin, end)
        scores, _ = score(begin, end, part.queries, part.keys)
        weights, rows = attention_weights(scores, kind), summed[part.rows]
        if len(rows) == (end - begin) * band.size:
            torch.bmm(weights, part.values, out=rows.unflatten(0, (end - begin, band.size)))
        else:
            rows.copy_(torch.bmm(weights, part.values).flatten(0, 1)[: len(rows)])
        torch.addmm(out_bias, part.gate.mul_(rows), out_weight.t(), out=y[part.rows])
    return y, before, summed


@_gated.register_fake
def _(x, weight, bias, gamma, beta, out_weight, *rest):  # type: ignore[no-untyped-def]
    tokens = x.shape[0]
    return (
        x.new_empty(tokens, out_weight.shape[0]),
        x.new_empty(tokens, weight.shape[0]),
        x.new_empty(tokens, out_weight.shape[1]),
    )


@torch.library.custom_op("seqboat::gated_attention_backward", mutates_args=())
@full_precision
def _gated_backward(
    grad: Tensor,
    before: Tensor,
    summed: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    out_weight: Tensor,
    group: Tensor,
    position: Tensor | None,
    table: Tensor | None,
    left: int,
    right: int,
    kind: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_z, d_v = gamma.shape[1], out_weight.shape[1]
    band = Band(x.shape[0], left, right, scores_at_once(x))
    score = BandScores(band, group, position, table, scale, x.dtype)
    columns, weights_of = _columns(before, d_z, 1), _columns(weight, d_z, 0)
    # channel by channel, as the scan is: whoever puts the tokens back among all others adds along the channels
    dx = x.new_empty(x.shape[1], x.shape[0])
    dweight, dbias = torch.zeros_like(weight), weight.new_zeros(weight.shape[0])
    dweights_of, dbiases_of = _columns(dweight, d_z, 0), _columns(dbias, d_z, 0)
    dgamma, dbeta = torch.zeros_like(gamma), torch.zeros_like(beta)
    dout_weight, dout_bias = torch.zeros_like(out_weight), grad.sum(dim=0)
    # gradients of queries, keys and values exist for the blocks at hand and those around them
    dqueries, dkeys, dvalues = (RollingSums(band, x, dim) for dim in (d_z, d_z, d_v))
    dstatic = torch.zeros_like(score.static)
    dtable = x.new_zeros(0 if table is None else table.shape[0])

    def project_back(rows: slice, which: int, above: Tensor) -> None:
        """Take the gradient of an activation through it and through the projection; the gate's comes first."""
        below = _silu_backward(above, columns[which][rows])
        place, beta = dx[:, rows], 0 if which == GATE else 1
        place.addmm_(weights_of[which].t(), below.t(), beta=beta)
        dweights_of[which].addmm_(below.t(), x[rows])
        dbiases_of[which].add_(below.sum(dim=0))

    def finish(first: int, last: int) -> None:
        """Blocks first .. last of the keys have met all their queries."""
        rows = slice(first * band.size, min(last * band.size, band.tokens))
        if rows.stop <= rows.start:
            return
        dquery, dkey, dvalue = (sums.rows(rows) for sums in (dqueries, dkeys, dvalues))
        z = F.silu(columns.z[rows])
        for i, above in enumerate((dquery, dkey)):
            dbeta[i].add_(above.sum(dim=0))
            dgamma[i].add_(torch.linalg.vecdot(above, z, dim=0))
        dz = torch.addcmul(dquery * gamma[0], dkey, gamma[1])
        project_back(rows, Z, dz)
        project_back(rows, VALUE, dvalue)

    def meet(begin: int, end: int) -> None:
        """Queries of blocks begin .. end meet their keys; a function, so that nothing of it outlives it."""
        part = _Blocks(band, columns, gamma, beta, begin, end)
        above = grad[part.rows]
        rows = summed[part.rows]
        dgated = torch.mm(above, out_weight)
        dout_weight.addmm_(above.t(), part.gate * rows)
        project_back(part.rows, GATE, dgated * rows)
        dsummed = part.in_blocks(dgated.mul_(part.gate), band)
        del part.gate
        scores, index = score(begin, end, part.queries, part.keys)
        weights = attention_weights(scores, kind)
        if kind == "softmax":
            scores = weights  # its gradient needs the weights only
        dweights = torch.bmm(dsummed, part.values.transpose(1, 2))
        dscores = grad_scores_of(scores, weights, dweights, kind)
        del scores, dweights
        if index is not None:
            dtable.index_add_(0, index.view(-1), dscores.view(-1))
        elif table is not None:
            dstatic.add_(dscores.sum(dim=0))
        dvalues.add(weights, dsummed)
        del weights
        dkeys.add(dscores, part.queries, scale)
        dqueries.at_hand(end - begin).baddbmm_(dscores, part.keys, beta=0, alpha=scale)

    done = 0
    for begin, end in band.parts():
        meet(begin, end)
        finish(done, max(end - band.before, done))
        done = max(end - band.before, done)
        for sums in (dqueries, dkeys, dvalues):
            sums.roll(end - begin)
    finish(done, band.blocks)
    if table is not None and position is None:
        dtable.index_add_(0, score.distance[score.inside], dstatic[score.inside])
    return dx.t(), dweight, dbias, dgamma, dbeta, dout_weight, dout_bias, dtable


@_gated_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad, before, summed, x, weight, bias, gamma, beta, out_weight, group, position, table, *rest
):
    return (
        x.new_empty(x.shape[1], x.shape[0]).t(),
        torch.empty_like(weight),
        weight.new_empty(weight.shape[0]),
        torch.empty_like(gamma),
        torch.empty_like(beta),
        torch.empty_like(out_weight),
        grad.new_empty(grad.shape[1]),
        x.new_empty(0) if table is None else torch.empty_like(table),
    )


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, bias, gamma, beta, out_weight, _, group, position, table, *rest = inputs
    _, before, summed = output
    ctx.save_for_backward(before, summed, x, weight, bias, gamma, beta, out_weight, group, position, table)
    ctx.rest = rest
    ctx.mark_non_differentiable(before, summed)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    *tensors, table = ctx.saved_tensors
    if grad is None:
        return (None,) * 14
    grads = _gated_backward(grad.contiguous(), *tensors, table, *ctx.rest)
    return *grads[:7], None, None, None if table is None else grads[7], *(None,) * 4


_gated.register_autograd(_backward, setup_context=_save)


def gated_attention(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    group: Tensor,
    *,
    left: int,
    right: int,
    kind: AttentionName,
    scale: float,
    table: Tensor | None = None,
    position: Tensor | None = None,
) -> Tensor:
    """A gated attention unit on packed tokens, each seeing its neighbours of the same group.

    Args:
        x: (tokens, dim), contiguous.
        weight, bias: of the projection to z, gate and value, (d_z + 2 d_v, dim).
        gamma, beta: (2, d_z), scale and shift of query and key.
        out_weight, out_bias: of the projection back, (dim, d_v).
        group, left, right, kind, scale, table, position: as in `attention.banded`.
    """
    y, _, _ = _gated(
        x, weight, bias, gamma, beta, out_weight, out_bias, group, position, table, left, right, kind, scale
    )  # fmt: skip
    return y
