"""Attention on active tokens: banded on the packed array, or dense on padded rows.

Appendix A.2 of the paper. Three attention functions f in O = f(Q K^T * scale + bias) V:

    softmax    the usual one
    relu2      max(s, 0)^2
    laplace    (1 + erf((s - mu) / (sigma sqrt 2))) / 2, with mu = sqrt(1/2), sigma = sqrt(1 / (4 pi))

`banded` serves the working memory: blocks of queries against the neighbouring blocks of keys, which are views of
one array, a few blocks at a time. `dense` serves full and chunked attention on (groups, slots). Both keep only
their inputs for the backward pass and compute the scores again there, so memory is linear in the number of active
tokens.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.precision import full_precision

AttentionName = Literal["softmax", "relu2", "laplace"]
ATTENTIONS = ("softmax", "relu2", "laplace")

SCORES_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""How many scores are held at a time: what fits in a core's cache, or fills a GPU (docs/performance.md)."""

LAPLACE_MU = math.sqrt(0.5)
LAPLACE_SIGMA = math.sqrt(0.25 / math.pi)

HIDDEN = -1e30
"""Score of a key that a query must not see: exp of it is zero, and rows without any key stay finite."""


def attention_weights(scores: Tensor, kind: str) -> Tensor:
    """The attention function on biased scores; hidden keys have the score HIDDEN."""
    if kind == "softmax":
        return torch.softmax(scores, dim=-1)
    if kind == "relu2":
        return F.relu(scores).square()
    return 0.5 * torch.erfc((LAPLACE_MU - scores) * (1 / (LAPLACE_SIGMA * math.sqrt(2))))


def _grad_scores(scores: Tensor, weights: Tensor, grad_weights: Tensor, kind: str) -> Tensor:
    """Gradient of the scores from that of the weights."""
    if kind == "softmax":
        # one pass per row: (grad - sum(grad * weights)) * weights
        return torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    if kind == "relu2":
        return grad_weights.mul_(F.relu(scores)).mul_(2)
    density = ((scores - LAPLACE_MU) / LAPLACE_SIGMA).square_().mul_(-0.5).exp_()
    return grad_weights.mul_(density).mul_(1 / (LAPLACE_SIGMA * math.sqrt(2 * math.pi)))


def _dropout_mask(weights: Tensor, rate: float, seed: int) -> Tensor:
    """Scale of every weight: zero for dropped ones. The same seed gives the same mask again."""
    generator = torch.Generator(device=weights.device).manual_seed(seed)
    keep = torch.rand(weights.shape, generator=generator, device=weights.device) >= rate
    return keep.to(weights.dtype).mul_(1 / (1 - rate))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _bmm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """A batched product written where it belongs, unless that has another type."""
    if out.dtype == a.dtype:
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a, b))


class _Band:
    """The geometry of a banded product: n blocks of queries, each with `left` + 1 + `right` blocks of keys."""

    def __init__(self, tokens: int, left: int, right: int, device: str = "cpu") -> None:
        reach = max(left, right)
        # blocks of a quarter of the reach waste few products; below 16 or above 128 the products get slow
        self.size = min(128, max(16, 1 << max(reach // 2, 1).bit_length() - 1))
        self.left, self.right = left, right
        self.before = -(-left // self.size)
        self.after = -(-right // self.size)
        self.blocks = -(-tokens // self.size)
        self.tokens = tokens
        self.width = (self.before + 1 + self.after) * self.size
        self.at_once = max(1, SCORES_AT_ONCE.get(device, 1 << 22) // (self.size * self.width))

    def queries(self, x: Tensor, fill: float = 0) -> Tensor:
        """(tokens, ...) to (blocks, size, ...)."""
        pad = (0, 0) * (x.dim() - 1) + (0, self.blocks * self.size - self.tokens)
        return F.pad(x, pad, value=fill).view(self.blocks, self.size, *x.shape[1:])

    def keys(self, x: Tensor, fill: float = 0) -> Tensor:
        """(tokens, ...) to (blocks, width, ...), overlapping views of one padded array."""
        pad = (0, 0) * (x.dim() - 1) + (
            self.before * self.size,
            (self.blocks + self.after) * self.size - self.tokens,
        )
        padded = F.pad(x, pad, value=fill)
        step = padded.stride(0)
        return padded.as_strided(
            (self.blocks, self.width, *x.shape[1:]), (self.size * step, *padded.stride())
        )

    def gather_buffer(self, x: Tensor) -> Tensor:
        """Zeros (blocks of keys, size, dim) in which gradients of keys are summed."""
        blocks = self.before + self.blocks + self.after
        return x.new_zeros(blocks, self.size, x.shape[-1], dtype=_wide(x[:0]).dtype)

    def ungather(self, buffer: Tensor) -> Tensor:
        """The (tokens, dim) inside such a buffer."""
        flat = buffer.view(-1, buffer.shape[-1])
        return flat[self.before * self.size :][: self.tokens]

    def distance(self, device: torch.device) -> Tensor:
        """(size, width): key minus query, in places of the packed array; the same in every block."""
        query = torch.arange(self.size, device=device)[:, None]
        key = torch.arange(self.width, device=device) - self.before * self.size
        return key - query


def _band_scores(
    band: _Band,
    part: slice,
    queries: Tensor,
    keys: Tensor,
    groups: tuple[Tensor, Tensor],
    static: Tensor,
    places: tuple[Tensor, Tensor] | None,
    table: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """Biased scores of some blocks, HIDDEN where a key is out of reach or of another group."""
    q, k = _wide(queries[part]), _wide(keys[part])
    scores = torch.baddbmm(static.expand(q.shape[0], -1, -1), q, k.transpose(1, 2), alpha=scale)
    index = None
    if places is not None and table is not None:
        reach = (table.shape[0] - 1) // 2
        index = places[1][part][:, None, :] - places[0][part][:, :, None]
        index = index.add_(reach).clamp_(0, 2 * reach)
        scores += table.index_select(0, index.view(-1)).view(index.shape)
    _hide_other_groups(scores, groups[0][part], groups[1][part])
    return scores, index


def _hide_other_groups(scores: Tensor, query_group: Tensor, key_group: Tensor) -> None:
    """Write HIDDEN where query and key belong to different groups."""
    if scores.device.type != "cpu":
        scores.masked_fill_(query_group[:, :, None] != key_group[:, None, :], HIDDEN)
        return
    # most blocks lie inside one group: only those in which the group of the keys changes need a look
    mixed = (key_group[:, 1:] != key_group[:, :-1]).any(dim=1).nonzero().squeeze(1)
    for block in mixed.tolist():
        other = query_group[block, :, None] != key_group[block]
        scores[block].masked_fill_(other, HIDDEN)


def _band_setup(
    band: _Band,
    group: Tensor,
    position: Tensor | None,
    table: Tensor | None,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, Tensor], Tensor, tuple[Tensor, Tensor] | None]:
    """What the scores of all blocks share: groups of queries and keys, the static bias, positions."""
    device = group.device
    group = group.to(torch.int32)
    # padding belongs to no group: -1 among the keys, -2 among the queries
    groups = (band.queries(group, -2), band.keys(group, -1))
    distance = band.distance(device)
    inside = (distance >= -band.left) & (distance <= band.right)
    static = torch.zeros(distance.shape, dtype=dtype, device=device)
    if table is not None and position is None:
        reach = (table.shape[0] - 1) // 2
        static = table[(distance + reach).clamp(0, 2 * reach)].to(dtype)
    static = torch.where(inside, static, HIDDEN)
    places = None
    if table is not None and position is not None:
        position = position.to(torch.int32)
        places = (band.queries(position), band.keys(position))
    return groups, static, places


@torch.library.custom_op("seqboat::banded", mutates_args=())
@full_precision
def _banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Tensor,
    position: Tensor | None,
    table: Tensor | None,
    left: int,
    right: int,
    kind: str,
    scale: float,
    dropout: float,
    seed: int,
) -> Tensor:
    tokens = q.shape[0]
    band = _Band(tokens, left, right, q.device.type)
    wide = _wide(q[:0]).dtype
    table = None if table is None else table.to(wide)
    groups, static, places = _band_setup(band, group, position, table, wide)
    queries, keys, values = band.queries(q), band.keys(k), band.keys(v)
    out = torch.empty(band.blocks, band.size, v.shape[1], dtype=v.dtype, device=v.device)
    for begin in range(0, band.blocks, band.at_once):
        part = slice(begin, begin + band.at_once)
        scores, _ = _band_scores(band, part, queries, keys, groups, static, places, table, scale)
        weights = attention_weights(scores, kind)
        if dropout > 0:
            weights.mul_(_dropout_mask(weights, dropout, seed + begin))
        _bmm_into(out[part], weights, _wide(values[part]))
    return out.view(-1, v.shape[1])[:tokens].clone()


@_banded.register_fake
def _(q, k, v, group, position, table, left, right, kind, scale, dropout, seed):  # type: ignore[no-untyped-def]
    return v.new_empty(q.shape[0], v.shape[1])


@torch.library.custom_op("seqboat::banded_backward", mutates_args=())
@full_precision
def _banded_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Tensor,
    position: Tensor | None,
    table: Tensor | None,
    left: int,
    right: int,
    kind: str,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = q.shape[0]
    band = _Band(tokens, left, right, q.device.type)
    wide = _wide(q[:0]).dtype
    bias = None if table is None else table.to(wide)
    groups, static, places = _band_setup(band, group, position, bias, wide)
    queries, keys, values = band.queries(q), band.keys(k), band.keys(v)
    grads = band.queries(grad)
    grad_q = torch.empty(band.blocks, band.size, q.shape[1], dtype=wide, device=q.device)
    grad_k, grad_v = band.gather_buffer(k), band.gather_buffer(v)
    grad_static = static.new_zeros(static.shape)
    grad_table = static.new_zeros(table.shape[0] if table is not None else 0)
    for begin in range(0, band.blocks, band.at_once):
        part = slice(begin, begin + band.at_once)
        scores, index = _band_scores(band, part, queries, keys, groups, static, places, bias, scale)
        weights = attention_weights(scores, kind)
        above = _wide(grads[part])
        count = above.shape[0]
        grad_weights = torch.bmm(above, _wide(values[part]).transpose(1, 2))
        dropped = weights
        if dropout > 0:
            scale_of = _dropout_mask(weights, dropout, seed + begin)
            dropped = weights * scale_of
            grad_weights.mul_(scale_of)
        grad_scores = _grad_scores(scores, weights, grad_weights, kind)
        if table is not None and index is not None:
            grad_table.index_add_(0, index.view(-1), grad_scores.view(-1))
        elif table is not None:
            grad_static += grad_scores.sum(dim=0)
        grad_q[part] = torch.bmm(grad_scores, _wide(keys[part])).mul_(scale)
        # neighbouring blocks share keys: each segment of a block's keys is summed where it belongs
        here = _wide(queries[part])
        for segment in range(band.before + 1 + band.after):
            columns = slice(segment * band.size, (segment + 1) * band.size)
            target = slice(begin + segment, begin + segment + count)
            grad_v[target].baddbmm_(dropped[:, :, columns].transpose(1, 2), above)
            grad_k[target].baddbmm_(grad_scores[:, :, columns].transpose(1, 2), here, alpha=scale)
    if table is not None and position is None:
        reach = (table.shape[0] - 1) // 2
        index = (band.distance(q.device) + reach).clamp(0, 2 * reach)
        inside = static > HIDDEN / 2
        grad_table.index_add_(0, index[inside], grad_static[inside])
    return (
        grad_q.view(-1, q.shape[1])[:tokens].to(q.dtype, copy=True),
        band.ungather(grad_k).to(k.dtype, copy=True),
        band.ungather(grad_v).to(v.dtype, copy=True),
        grad_table.to(q.dtype if table is None else table.dtype),
    )


@_banded_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad, q, k, v, group, position, table, left, right, kind, scale, dropout, seed
):
    # contiguous like the real ones, whatever the layout of the inputs
    like = q.new_empty(0) if table is None else table.new_empty(table.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), like


def _save_banded(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, group, position, table, *rest = inputs
    ctx.save_for_backward(q, k, v, group, position, table)
    ctx.rest = rest


def _backward_banded(ctx, grad):  # type: ignore[no-untyped-def]
    *tensors, table = ctx.saved_tensors
    dq, dk, dv, dtable = _banded_backward(grad.contiguous(), *tensors, table, *ctx.rest)
    return dq, dk, dv, None, None, dtable if table is not None else None, *(None,) * 6


_banded.register_autograd(_backward_banded, setup_context=_save_banded)


def banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Tensor,
    *,
    left: int,
    right: int,
    kind: AttentionName = "softmax",
    scale: float = 1.0,
    table: Tensor | None = None,
    position: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of each token of a packed array to its neighbours of the same group.

    Args:
        q, k: (tokens, d_z).
        v: (tokens, d_v).
        group: (tokens,); a token sees only keys of its own group, and groups are contiguous.
        left, right: how many places before and after itself a token sees.
        kind: the attention function.
        scale: multiplies the products of queries and keys.
        table: (2 * reach + 1,), bias per distance key - query, the ends serving all larger distances.
        position: (tokens,), what distances are measured in; places of the packed array by default.
        dropout: rate of weights dropped.
    """
    return _banded(q, k, v, group, position, table, left, right, kind, scale, dropout, _draw_seed(dropout))


def _draw_seed(dropout: float) -> int:
    """A seed from the global generator, for a mask that two passes can make alike."""
    return int(torch.randint(0, 2**62, (1,)).item()) if dropout > 0 else 0


def _dense_part(
    part: slice,
    q: Tensor,
    k: Tensor,
    query_slot: Tensor,
    key_slot: Tensor,
    query_position: Tensor,
    key_position: Tensor,
    scale: Tensor,
    table: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """Biased scores of some queries of every group."""
    scores = torch.bmm(_wide(q[:, part]) * scale[:, part, None], _wide(k).transpose(1, 2))
    index = None
    if table is not None:
        reach = (table.shape[0] - 1) // 2
        index = key_position[:, None, :] - query_position[:, part, None]
        index = index.add_(reach).clamp_(0, 2 * reach)
        scores += table.index_select(0, index.view(-1)).view(index.shape)
    hidden = (key_slot < 0)[:, None, :]
    if causal:
        hidden = hidden | (key_slot[:, None, :] > query_slot[:, part, None])
    return scores.masked_fill_(hidden, HIDDEN), index


def _dense_parts(q: Tensor, k: Tensor) -> list[slice]:
    row = max(1, q.shape[0] * k.shape[1])
    at_once = max(1, SCORES_AT_ONCE.get(q.device.type, 1 << 22) // row)
    return [slice(begin, begin + at_once) for begin in range(0, q.shape[1], at_once)]


@torch.library.custom_op("seqboat::dense", mutates_args=())
@full_precision
def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_slot: Tensor,
    key_slot: Tensor,
    query_position: Tensor,
    key_position: Tensor,
    scale: Tensor,
    table: Tensor | None,
    kind: str,
    causal: bool,
    dropout: float,
    seed: int,
) -> Tensor:
    wide = _wide(q[:0]).dtype
    bias = None if table is None else table.to(wide)
    out = v.new_empty(*q.shape[:2], v.shape[2])
    for part in _dense_parts(q, k):
        scores, _ = _dense_part(
            part, q, k, query_slot, key_slot, query_position, key_position, scale, bias, causal
        )
        weights = attention_weights(scores, kind)
        if dropout > 0:
            weights.mul_(_dropout_mask(weights, dropout, seed + part.start))
        out[:, part] = torch.bmm(weights, _wide(v))
    return out


@_dense.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return v.new_empty(*q.shape[:2], v.shape[2])


@torch.library.custom_op("seqboat::dense_backward", mutates_args=())
@full_precision
def _dense_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_slot: Tensor,
    key_slot: Tensor,
    query_position: Tensor,
    key_position: Tensor,
    scale: Tensor,
    table: Tensor | None,
    kind: str,
    causal: bool,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = _wide(q[:0]).dtype
    bias = None if table is None else table.to(wide)
    grad_q = torch.empty(q.shape, dtype=wide, device=q.device)
    grad_k = torch.zeros(k.shape, dtype=wide, device=q.device)
    grad_v = torch.zeros(v.shape, dtype=wide, device=q.device)
    grad_table = torch.zeros(0 if bias is None else bias.shape[0], dtype=wide, device=q.device)
    for part in _dense_parts(q, k):
        scores, index = _dense_part(
            part, q, k, query_slot, key_slot, query_position, key_position, scale, bias, causal
        )
        weights = attention_weights(scores, kind)
        above = _wide(grad[:, part])
        grad_weights = torch.bmm(above, _wide(v).transpose(1, 2))
        dropped = weights
        if dropout > 0:
            scale_of = _dropout_mask(weights, dropout, seed + part.start)
            dropped = weights * scale_of
            grad_weights.mul_(scale_of)
        grad_scores = _grad_scores(scores, weights, grad_weights, kind)
        if index is not None:
            grad_table.index_add_(0, index.view(-1), grad_scores.view(-1))
        scaled = grad_scores * scale[:, part, None]
        grad_q[:, part] = torch.bmm(scaled, _wide(k))
        grad_k.baddbmm_(scaled.transpose(1, 2), _wide(q[:, part]))
        grad_v.baddbmm_(dropped.transpose(1, 2), above)
    return (
        grad_q.to(q.dtype),
        grad_k.to(k.dtype),
        grad_v.to(v.dtype),
        grad_table.to(q.dtype if table is None else table.dtype),
    )


@_dense_backward.register_fake
def _(grad, q, k, v, query_slot, key_slot, query_position, key_position, scale, table, *rest):  # type: ignore[no-untyped-def]
    # contiguous like the real ones, whatever the layout of the inputs
    like = q.new_empty(0) if table is None else table.new_empty(table.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), like


def _save_dense(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, kind, causal, dropout, seed = inputs
    ctx.save_for_backward(*tensors)
    ctx.rest = kind, causal, dropout, seed


def _backward_dense(ctx, grad):  # type: ignore[no-untyped-def]
    *tensors, table = ctx.saved_tensors
    dq, dk, dv, dtable = _dense_backward(grad.contiguous(), *tensors, table, *ctx.rest)
    none = (None,) * 5
    return dq, dk, dv, *none, dtable if table is not None else None, *(None,) * 4


_dense.register_autograd(_backward_dense, setup_context=_save_dense)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query_slot: Tensor,
    key_slot: Tensor,
    query_position: Tensor,
    key_position: Tensor,
    scale: Tensor,
    table: Tensor | None,
    kind: AttentionName,
    causal: bool,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of every query to every real key of its group.

    Args:
        q: (groups, queries, d_z).
        k: (groups, keys, d_z).
        v: (groups, keys, d_v).
        query_slot: (groups, queries), place of a query in its compressed sequence.
        key_slot: (groups, keys), likewise; negative where there is no key.
        query_position, key_position: what the distances of the bias are measured in.
        scale: (groups, queries), multiplies the products.
        table: (2 * reach + 1,), bias per distance, or None.
        kind: the attention function.
        causal: whether a query sees no key behind itself.
        dropout: rate of weights dropped.
    """
    return _dense(
        q, k, v, query_slot, key_slot, query_position, key_position, scale, table, kind, causal,
        dropout, _draw_seed(dropout),
    )  # fmt: skip
