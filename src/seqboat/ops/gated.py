"""The gated attention unit from tokens to output, a few blocks at a time, with a hand-written backward pass.

Chained operators would hold a dozen arrays of the size of the active tokens at once: gates, values, weighted sums and
their gradients. Here everything between the two projections exists only for the current blocks, in the cache of a
core. The backward pass needs the tokens, their projection before the activation, and the weighted sums. The result
is that of `GAU` with `banded`; tests compare the two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.ops.band import NEIGHBORS, Band, BandScores, Neighbors, RollingSums, TableGradient, confine
from seqboat.ops.banded import plain_banded
from seqboat.ops.functions import ATTENTIONS
from seqboat.ops.fused import plain_gates
from seqboat.ops.positions import turn_pairs
from seqboat.ops.transforms import differentiates_again, gradients_of, transformed

_silu_backward = torch.ops.aten.silu_backward

Z, GATE, VALUE = range(3)


class _Columns(NamedTuple):
    """The columns of z, gate and value."""

    z: Tensor
    gate: Tensor
    value: Tensor


def _columns(x: Tensor, d_z: int, dim: int) -> _Columns:
    """Views of the three parts of a projection, or of its weights."""
    d_v = (x.shape[dim] - d_z) // 2
    return _Columns(*x.split([d_z, d_v, d_v], dim=dim))


class _Kept(NamedTuple):
    """What the backward pass needs besides `Neighbors`."""

    before: Tensor
    """(tokens, d_z + 2 d_v): the projection before its activation"""
    summed: Tensor
    """(tokens, d_v): weighted sums of values"""
    x: Tensor
    weight: Tensor
    gamma: Tensor
    beta: Tensor
    out_weight: Tensor
    turn: Tensor | None
    """(tokens, d_z / 2, 2): rotations of queries and keys"""


def _turned(x: Tensor, turn: Tensor, back: bool = False) -> Tensor:
    """As `turn_pairs`, or by the opposite angles; in one pass, without a gradient."""
    pairs, by = torch.view_as_complex(x.unflatten(-1, (-1, 2))), torch.view_as_complex(turn)
    return torch.view_as_real(pairs * (by.conj() if back else by)).flatten(-2)


class _Blocks:
    """Queries, keys, values and gates of some blocks, from the projection before its activation."""

    def __init__(
        self,
        band: Band,
        before: _Columns,
        gamma: Tensor,
        beta: Tensor,
        turn: Tensor | None,
        begin: int,
        end: int,
    ) -> None:
        self.size = band.size
        low = max((begin - band.before) * band.size, 0)
        seen = slice(low, min((end + band.after) * band.size, band.tokens))
        self.tokens = slice(begin * band.size, min(end * band.size, band.tokens))
        z = F.silu(before.z[seen])
        key = torch.addcmul(beta[1], z, gamma[1])
        value = F.silu(before.value[seen])
        query = torch.addcmul(beta[0], z[self.tokens.start - low : self.tokens.stop - low], gamma[0])
        if turn is not None:
            key, query = _turned(key, turn[seen]), _turned(query, turn[self.tokens])
        self.gate = F.silu(before.gate[self.tokens])
        self.keys, self.values = band.pad_windows(begin, end, key, value)
        self.queries = self.in_blocks(query)

    def in_blocks(self, x: Tensor) -> Tensor:
        """(tokens, dim) as (blocks, size, dim), the last block padded with zeros."""
        missing = -x.shape[0] % self.size
        return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(0, (-1, self.size))


@torch.library.custom_op(
    "seqboat::gated_attention",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor weight, Tensor bias, Tensor gamma, Tensor beta, Tensor out_weight, Tensor out_bias, "
        f"Tensor? turn, {NEIGHBORS}) -> (Tensor, Tensor, Tensor)"
    ),
)
def _gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    turn: Tensor | None,
    *neighbors: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, d_v = x.shape[0], out_weight.shape[1]
    near = Neighbors(*neighbors)
    before = torch.addmm(bias, x, weight.t())
    score, function = BandScores(x, near), ATTENTIONS[near.attention]
    band = score.band
    summed = x.new_empty(tokens, d_v)
    y = x.new_empty(tokens, out_weight.shape[0])
    columns = _columns(before, gamma.shape[1], 1)
    for begin, end in band.parts:
        part = _Blocks(band, columns, gamma, beta, turn, begin, end)
        scores, _ = score(begin, end, part.queries, part.keys)
        weights, sums = function.weights(scores), summed[part.tokens]
        if len(sums) == (end - begin) * band.size:
            torch.bmm(weights, part.values, out=sums.unflatten(0, (end - begin, band.size)))
        else:
            sums.copy_(torch.bmm(weights, part.values).flatten(0, 1)[: len(sums)])
        torch.addmm(out_bias, part.gate.mul_(sums), out_weight.t(), out=y[part.tokens])
    return y, before, summed


@_gated.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, out_weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = x.shape[0]
    return (
        x.new_empty(tokens, out_weight.shape[0]),
        x.new_empty(tokens, weight.shape[0]),
        x.new_empty(tokens, out_weight.shape[1]),
    )


@torch.library.custom_op(
    "seqboat::gated_attention_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor before, Tensor summed, Tensor x, Tensor weight, Tensor gamma, Tensor beta, "
        f"Tensor out_weight, Tensor? turn, {NEIGHBORS}) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _gated_backward(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    kept, near = _Kept(*rest[:8]), Neighbors(*rest[8:])

    def run(above: Tensor, before: Tensor, summed: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return _backward(above, kept._replace(before=before, summed=summed, x=x), near)

    with torch.autocast(grad.device.type, enabled=False):
        return confine(run, grad, kept[:3], near.group, 1)


def _backward(grad: Tensor, kept: _Kept, near: Neighbors) -> tuple[Tensor, ...]:
    before, summed, x, weight, gamma, beta, out_weight, turn = kept
    d_z, d_v = gamma.shape[1], out_weight.shape[1]
    score, function = BandScores(x, near), ATTENTIONS[near.attention]
    band, dtable = score.band, TableGradient(score)
    columns, weights_of = _columns(before, d_z, 1), _columns(weight, d_z, 0)
    # channel by channel, like the scan's output, to which these gradients are added
    dx = x.new_empty(x.shape[1], x.shape[0])
    dweight, dbias = torch.zeros_like(weight), weight.new_zeros(weight.shape[0])
    dweights_of, dbiases_of = _columns(dweight, d_z, 0), _columns(dbias, d_z, 0)
    dgamma, dbeta = torch.zeros_like(gamma), torch.zeros_like(beta)
    dout_weight, dout_bias = torch.zeros_like(out_weight), grad.sum(dim=0)
    # gradients of queries, keys and values exist only for the current blocks and their neighbors
    dqueries, dkeys, dvalues = (RollingSums(band, x, dim) for dim in (d_z, d_z, d_v))

    def project_back(tokens: slice, which: int, above: Tensor) -> None:
        """Propagate a gradient through the activation and the projection; call it for the gate first."""
        below = _silu_backward(above, columns[which][tokens])
        place, beta = dx[:, tokens], 0 if which == GATE else 1
        place.addmm_(weights_of[which].t(), below.t(), beta=beta)
        dweights_of[which].addmm_(below.t(), x[tokens])
        dbiases_of[which].add_(below.sum(dim=0))

    def finish(first: int, last: int) -> None:
        """Finish blocks first .. last of the keys, which have met all their queries."""
        tokens = slice(first * band.size, min(last * band.size, band.tokens))
        if tokens.stop <= tokens.start:
            return
        dquery, dkey, dvalue = (sums.tokens(tokens) for sums in (dqueries, dkeys, dvalues))
        if turn is not None:
            dquery, dkey = (_turned(part, turn[tokens], back=True) for part in (dquery, dkey))
        z = F.silu(columns.z[tokens])
        for i, above in enumerate((dquery, dkey)):
            dbeta[i].add_(above.sum(dim=0))
            dgamma[i].add_(torch.linalg.vecdot(above, z, dim=0))
        dz = torch.addcmul(dquery * gamma[0], dkey, gamma[1])
        project_back(tokens, Z, dz)
        project_back(tokens, VALUE, dvalue)

    def meet(begin: int, end: int) -> None:
        """Score the queries of blocks begin .. end; a function, so that its arrays are freed on return."""
        part = _Blocks(band, columns, gamma, beta, turn, begin, end)
        above = grad[part.tokens]
        sums = summed[part.tokens]
        dgated = torch.mm(above, out_weight)
        dout_weight.addmm_(above.t(), part.gate * sums)
        project_back(part.tokens, GATE, dgated * sums)
        dsummed = part.in_blocks(dgated.mul_(part.gate))
        del part.gate
        scores, index = score(begin, end, part.queries, part.keys)
        weights = function.weights(scores)
        if not function.reads_scores:
            scores = weights
        dweights = torch.bmm(dsummed, part.values.transpose(1, 2))
        dscores = function.grad_scores(scores, weights, dweights)
        del scores, dweights
        dtable.add(dscores, index)
        dvalues.add(weights, dsummed)
        del weights
        dkeys.add(dscores, part.queries, near.scale)
        dqueries.current(end - begin).baddbmm_(dscores, part.keys, beta=0, alpha=near.scale)

    done = 0
    for begin, end in band.parts:
        meet(begin, end)
        finish(done, max(end - band.before, done))
        done = max(end - band.before, done)
        for sums in (dqueries, dkeys, dvalues):
            sums.roll(end - begin)
    finish(done, band.blocks)
    return dx.t(), dweight, dbias, dgamma, dbeta, dout_weight, dout_bias, dtable.total()


@_gated_backward.register_fake
def _(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, _, x, weight, gamma, beta, out_weight, _ = _Kept(*rest[:8])
    table = Neighbors(*rest[8:]).table
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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, gamma, beta, out_weight, out_bias, turn, group, position, table, *rest = inputs
    _, before, summed = output
    ctx.save_for_backward(
        before, summed, x, weight, gamma, beta, out_weight, turn, group, position, table, bias, out_bias
    )
    ctx.rest = rest
    ctx.mark_non_differentiable(before, summed)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    *tensors, table, bias, out_bias = ctx.saved_tensors
    if grad is None:
        return (None,) * 15
    if differentiates_again():
        _, _, x, weight, gamma, beta, out_weight, *near = tensors
        inputs = x, weight, bias, gamma, beta, out_weight, out_bias, *near, table, *ctx.rest
        return gradients_of(_plain_gated, inputs, [grad])
    grads = _gated_backward(grad.contiguous(), *tensors, table, *ctx.rest)
    return *grads[:7], None, None, None, None if table is None else grads[7], *(None,) * 4


_gated.register_autograd(_differentiate, setup_context=_save)


def _plain_gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    turn: Tensor | None,
    *neighbors: Any,
) -> Tensor:
    """`gated_attention` in ordinary operators, which autograd can differentiate any number of times."""
    query, key, value, gate = plain_gates(x, weight, bias, gamma, beta)
    if turn is not None:
        query, key = turn_pairs(query, turn), turn_pairs(key, turn)
    attended = plain_banded(query, key, value, *neighbors, 0.0, 0)
    return torch.addmm(out_bias, gate * attended, out_weight.t())


def gated_attention(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    near: Neighbors,
    turn: Tensor | None = None,
) -> Tensor:
    """A gated attention unit on packed tokens, each of which sees its neighbors of the same group.

    Args:
        x: (tokens, dim), contiguous, float32 or float64; autocast must be off.
        weight, bias: of the projection to z, gate and value, (d_z + 2 d_v, dim).
        gamma, beta: (2, d_z), scale and shift of query and key.
        out_weight, out_bias: of the projection back, (dim, d_v).
        near: which keys a token sees, and how they are scored.
        turn: (tokens, d_z / 2, 2), rotations of queries and keys (`rotations`); they have no gradient.
    """
    if transformed():
        return _plain_gated(x, weight, bias, gamma, beta, out_weight, out_bias, turn, *near)
    return _gated(x, weight, bias, gamma, beta, out_weight, out_bias, turn, *near)[0]
