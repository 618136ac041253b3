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
import warnings
from bisect import bisect_left
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.ops.precision import full_precision

AttentionName = Literal["softmax", "relu2", "laplace"]
ATTENTIONS = ("softmax", "relu2", "laplace")

Kernel = Literal["blocks", "flex"]
KERNELS = ("blocks", "flex")

SCORES_AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 26}
"""How many scores are held at a time: what fits in a core's cache, or fills a GPU (docs/performance.md)."""

LAPLACE_MU = math.sqrt(0.5)
LAPLACE_SIGMA = math.sqrt(0.25 / math.pi)

HIDDEN = -1e30
"""Score of a key that a query must not see: exp of it is zero, and rows without any key stay finite."""


def scores_at_once(x: Tensor) -> int:
    """How many scores to hold at a time on the device of x."""
    return SCORES_AT_ONCE["cpu" if x.device.type == "cpu" else "cuda"]


def attention_weights(scores: Tensor, kind: str) -> Tensor:
    """The attention function on biased scores; hidden keys have the score HIDDEN."""
    if kind == "softmax":
        return torch.softmax(scores, dim=-1)
    if kind == "relu2":
        return F.relu(scores).square()
    return 0.5 * torch.erfc((LAPLACE_MU - scores) * (1 / (LAPLACE_SIGMA * math.sqrt(2))))


def grad_scores_of(scores: Tensor, weights: Tensor, grad_weights: Tensor, kind: str) -> Tensor:
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


class Band:
    """The geometry of a banded product: n blocks of queries, each with `left` + 1 + `right` blocks of keys."""

    def __init__(self, tokens: int, left: int, right: int, scores_at_once: int) -> None:
        reach = max(left, right)
        # blocks of a quarter of the reach waste few products; below 16 or above 128 the products get slow
        self.size = min(128, max(16, 1 << max(reach // 2, 1).bit_length() - 1))
        self.left, self.right = left, right
        self.before = -(-left // self.size)
        self.after = -(-right // self.size)
        self.blocks = -(-tokens // self.size)
        self.tokens = tokens
        self.width = (self.before + 1 + self.after) * self.size
        self.at_once = max(1, scores_at_once // (self.size * self.width))

    def parts(self) -> list[tuple[int, int]]:
        """Ranges of blocks that are worked on at a time."""
        starts = range(0, self.blocks, self.at_once)
        return [(begin, min(begin + self.at_once, self.blocks)) for begin in starts]

    def _rows(self, x: Tensor, first: int, last: int, fill: float) -> Tensor:
        """Rows first .. last of (tokens, ...); a view, unless some of them lie outside."""
        inside = x[max(first, 0) : min(last, self.tokens)]
        before, after = max(-first, 0), max(last - self.tokens, 0)
        if before or after:
            inside = F.pad(inside, (0, 0) * (x.dim() - 1) + (before, after), value=fill)
        return inside

    def queries(self, x: Tensor, begin: int, end: int, fill: float = 0) -> Tensor:
        """Blocks begin .. end of (tokens, ...) as (blocks, size, ...)."""
        rows = self._rows(x, begin * self.size, end * self.size, fill)
        return rows.unflatten(0, (end - begin, self.size))

    def keys(self, x: Tensor, begin: int, end: int, fill: float = 0) -> Tensor:
        """What blocks begin .. end may see of (tokens, ...), as (blocks, width, ...): overlapping views."""
        rows = self._rows(x, (begin - self.before) * self.size, (end + self.after) * self.size, fill)
        return self.windows(rows, end - begin)

    def windows(self, rows: Tensor, count: int) -> Tensor:
        """The rows that `count` blocks may see, as (blocks, width, ...): overlapping views."""
        shape = (count, self.width, *rows.shape[1:])
        return rows.as_strided(shape, (self.size * rows.stride(0), *rows.stride()))

    def sums(self, x: Tensor) -> Tensor:
        """A buffer (blocks of keys, size, dim) for gradients of keys; only its first blocks are zeroed."""
        around = self.before + self.after
        buffer = x.new_empty(self.blocks + around, self.size, x.shape[-1])
        buffer[:around].zero_()
        return buffer

    def add_by_key(self, sums: Tensor, begin: int, weights: Tensor, rows: Tensor, scale: float = 1.0) -> None:
        """Add weights^T rows of blocks from `begin` on to the sums of their keys.

        Neighbouring blocks share keys, so each segment of a block's keys goes where it belongs. The last segment
        reaches keys that no block has reached before: it comes first and overwrites, so that the buffer need not
        start from zero.
        """
        count = weights.shape[0]
        last = self.before + self.after
        for segment in range(last, -1, -1):
            columns = slice(segment * self.size, (segment + 1) * self.size)
            target = sums[begin + segment : begin + segment + count]
            beta = 0 if segment == last else 1
            target.baddbmm_(weights[:, :, columns].transpose(1, 2), rows, beta=beta, alpha=scale)

    def tokens_of(self, sums: Tensor) -> Tensor:
        """The (tokens, dim) inside such a buffer."""
        return sums.flatten(0, 1)[self.before * self.size :][: self.tokens]

    def distance(self, device: torch.device) -> Tensor:
        """(size, width): key minus query, in places of the packed array; the same in every block."""
        query = torch.arange(self.size, device=device)[:, None]
        key = torch.arange(self.width, device=device) - self.before * self.size
        return key - query


class RollingSums:
    """Gradients of keys, of the blocks at hand and those around them, moved on from part to part.

    Args:
        band: the geometry.
        like: a tensor of the type and on the device to use.
        dim: of a key.
    """

    def __init__(self, band: Band, like: Tensor, dim: int) -> None:
        self.band, self.around = band, band.before + band.after
        self.first = -band.before
        """block of the keys that lies at the beginning of the buffer"""
        blocks = min(band.at_once, band.blocks) + self.around
        self.buffer = like.new_empty(blocks, band.size, dim)
        self.buffer[: self.around].zero_()

    def add(self, weights: Tensor, rows: Tensor, scale: float = 1.0) -> None:
        """Add weights^T rows of the blocks at hand, as `Band.add_by_key` does."""
        self.band.add_by_key(self.buffer, 0, weights, rows, scale)

    def at_hand(self, count: int) -> Tensor:
        """The sums of the blocks at hand themselves, (blocks, size, dim)."""
        return self.buffer[self.band.before : self.band.before + count]

    def rows(self, rows: slice) -> Tensor:
        """Some rows of the packed array, as a view; they must lie in the buffer."""
        begin = self.first * self.band.size
        return self.buffer.flatten(0, 1)[rows.start - begin : rows.stop - begin]

    def roll(self, count: int) -> None:
        """Move on by so many blocks."""
        self.buffer[: self.around] = self.buffer[count : count + self.around].clone()
        self.first += count


class BandScores:
    """Scores of a few blocks at a time: products, bias, and HIDDEN where a key is out of reach."""

    def __init__(
        self,
        band: Band,
        group: Tensor,
        position: Tensor | None,
        table: Tensor | None,
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        self.band, self.scale, self.table = band, scale, table
        self.group = group.to(torch.int32)
        self.mixed: list[int] | None = None
        """blocks in which the group of the keys changes, where looking costs no wait: most lie inside one group"""
        if group.device.type == "cpu":
            seen = band.keys(self.group, 0, band.blocks, -1)
            self.mixed = (seen[:, 1:] != seen[:, :-1]).any(dim=1).nonzero().squeeze(1).tolist()
        distance = band.distance(group.device)
        self.inside = (distance >= -band.left) & (distance <= band.right)
        static = torch.zeros(distance.shape, dtype=dtype, device=group.device)
        self.reach = 0 if table is None else (table.shape[0] - 1) // 2
        self.position = None
        if table is not None and position is None:
            self.distance = (distance + self.reach).clamp(0, 2 * self.reach)
            static = table[self.distance]
        elif table is not None and position is not None:
            self.position = position.to(torch.int32)
            # a look at the positions spares a pass over the scores, where looking costs no wait
            far = self.reach if position.device.type != "cpu" or not len(position) else position.max()
            self.clamped = bool(position.device.type != "cpu" or far > self.reach)
        self.static = torch.where(self.inside, static, HIDDEN)

    def __call__(self, begin: int, end: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Biased scores (blocks, size, width), and where in the table their biases come from."""
        static = self.static.expand(end - begin, -1, -1)
        scores = torch.baddbmm(static, q, k.transpose(1, 2), alpha=self.scale)
        index = None
        if self.position is not None:
            assert self.table is not None
            key_position = self.band.keys(self.position, begin, end) + self.reach
            query_position = self.band.queries(self.position, begin, end)
            index = key_position[:, None, :] - query_position[:, :, None]
            if self.clamped:
                index.clamp_(0, 2 * self.reach)
            scores += self.table.index_select(0, index.view(-1)).view(index.shape)
        self._hide_other_groups(scores, begin, end)
        return scores, index

    def _hide_other_groups(self, scores: Tensor, begin: int, end: int) -> None:
        """Write HIDDEN where query and key belong to different groups."""
        mixed = self.mixed
        if mixed is not None:
            mixed = mixed[bisect_left(mixed, begin) : bisect_left(mixed, end)]
            if not mixed:
                return
        # padding belongs to no group: -1 among the keys, -2 among the queries
        query_group = self.band.queries(self.group, begin, end, -2)
        key_group = self.band.keys(self.group, begin, end, -1)
        if mixed is None:
            scores.masked_fill_(query_group[:, :, None] != key_group[:, None, :], HIDDEN)
            return
        for block in mixed:
            other = query_group[block - begin, :, None] != key_group[block - begin]
            scores[block - begin].masked_fill_(other, HIDDEN)


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
    band = Band(q.shape[0], left, right, scores_at_once(q))
    dtype = v.dtype
    q, k, v = _wide(q), _wide(k), _wide(v)
    score = BandScores(band, group, position, None if table is None else _wide(table), scale, q.dtype)
    out = torch.empty(q.shape[0], v.shape[1], dtype=v.dtype, device=v.device)
    for begin, end in band.parts():
        scores, _ = score(begin, end, band.queries(q, begin, end), band.keys(k, begin, end))
        weights = attention_weights(scores, kind)
        if dropout > 0:
            weights.mul_(_dropout_mask(weights, dropout, seed + begin))
        values = band.keys(v, begin, end)
        if end * band.size <= band.tokens:
            torch.bmm(weights, values, out=band.queries(out, begin, end))
        else:
            rows = torch.bmm(weights, values).flatten(0, 1)
            out[begin * band.size :] = rows[: band.tokens - begin * band.size]
    return out.to(dtype)


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
    band = Band(q.shape[0], left, right, scores_at_once(q))
    types = q.dtype, k.dtype, v.dtype, q.dtype if table is None else table.dtype
    grad, q, k, v = _wide(grad), _wide(q), _wide(k), _wide(v)
    score = BandScores(band, group, position, None if table is None else _wide(table), scale, q.dtype)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = band.sums(k), band.sums(v)
    grad_static = torch.zeros_like(score.static)
    grad_table = q.new_zeros(0 if table is None else table.shape[0])
    for begin, end in band.parts():
        queries, keys, values = (
            band.queries(q, begin, end),
            band.keys(k, begin, end),
            band.keys(v, begin, end),
        )
        scores, index = score(begin, end, queries, keys)
        weights = attention_weights(scores, kind)
        above = band.queries(grad, begin, end)
        grad_weights = torch.bmm(above, values.transpose(1, 2))
        dropped = weights
        if dropout > 0:
            scale_of = _dropout_mask(weights, dropout, seed + begin)
            dropped = weights * scale_of
            grad_weights.mul_(scale_of)
        grad_scores = grad_scores_of(scores, weights, grad_weights, kind)
        if index is not None:
            grad_table.index_add_(0, index.view(-1), grad_scores.view(-1))
        elif table is not None:
            grad_static += grad_scores.sum(dim=0)
        rows = torch.bmm(grad_scores, keys).flatten(0, 1)
        grad_q[begin * band.size : end * band.size] = rows[: band.tokens - begin * band.size]
        band.add_by_key(grad_v, begin, dropped, above)
        band.add_by_key(grad_k, begin, grad_scores, queries, scale)
    if table is not None and position is None:
        grad_table.index_add_(0, score.distance[score.inside], grad_static[score.inside])
    return (
        grad_q.mul_(scale).to(types[0]),
        band.tokens_of(grad_k).to(types[1]),
        band.tokens_of(grad_v).to(types[2]),
        grad_table.to(types[3]),
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
    kernel: Kernel = "blocks",
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
        kernel: our own products in blocks, or PyTorch's FlexAttention (softmax without dropout).
    """
    if kernel == "flex" and q.shape[0] > 0:
        return _banded_flex(q, k, v, group, left, right, scale, table, position)
    return _banded(q, k, v, group, position, table, left, right, kind, scale, dropout, _draw_seed(dropout))


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _banded_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Tensor,
    left: int,
    right: int,
    scale: float,
    table: Tensor | None,
    position: Tensor | None,
) -> Tensor:
    """`banded` with softmax through FlexAttention: fused on a GPU; on a CPU, without gradients, as a check."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (key - query >= -left) & (key - query <= right)
        return near & (group[query] == group[key])

    def biased(score: Tensor, _batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert table is not None
        distance = key - query if position is None else position[key] - position[query]
        reach = (table.shape[0] - 1) // 2
        return score + table[(distance + reach).clamp(0, 2 * reach)]

    tokens = q.shape[0]
    mask = create_block_mask(visible, None, None, tokens, tokens, device=q.device.type)
    arguments = (q[None, None], k[None, None], v[None, None], None if table is None else biased, mask)
    if q.device.type == "cuda":
        return _compiled_flex()(*arguments, scale=scale)[0, 0]
    with warnings.catch_warnings():
        # uncompiled on purpose: this path is for comparison
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
        return flex_attention(*arguments, scale=scale)[0, 0]


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
    at_once = max(1, scores_at_once(q) // row)
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
        grad_scores = grad_scores_of(scores, weights, grad_weights, kind)
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
