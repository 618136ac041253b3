"""Banded attention on packed tokens in Triton.

A program takes a block of queries and walks over the blocks of keys in its window; values wider than a block are cut
into slices, each a program by itself. A token sees keys of its own group only, so sequences, documents and the memory
of an earlier segment need no padding. Scores are never stored by the forward pass.

The backward pass computes them again. Weights and gradients of scores go to a band, (queries, window), which one
kernel multiplies from the other side for keys and values, and another one adds up by distance for the bias table.
All sums have a fixed order: no atomic additions, so gradients are deterministic.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqboat.ops.attention import Neighbors
from seqboat.ops.kernels import interprets
from seqboat.ops.kernels.tuning import launch, power, scratch

SOFTMAX = tl.constexpr(0)
RELU2 = tl.constexpr(1)
LAPLACE = tl.constexpr(2)

HIDDEN = tl.constexpr(-1e30)
LAPLACE_MU = tl.constexpr(0.7071067811865476)
LAPLACE_SIGMA = tl.constexpr(0.28209479177387814)
ROOT_2 = tl.constexpr(1.4142135623730951)
ROOT_2_PI = tl.constexpr(2.5066282746310002)

FUNCTIONS = {"softmax": 0, "relu2": 1, "laplace": 2}

SCORES = 1 << 26
"""Scores held at a time: 256 MB; the speed of other numbers has not been measured."""

ROWS = 64
"""Queries per program of the kernels that sum over queries for the bias table."""


@triton.jit
def load_rows(pointer, row, column, rows, columns, stride):
    """A tile of a matrix; zeros outside."""
    at = row[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(pointer + at, mask=(row[:, None] < rows) & (column[None, :] < columns), other=0.0)


@triton.jit
def store_rows(pointer, row, column, rows, columns, stride, values):
    """Write a tile of a matrix."""
    at = row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(pointer + at, values, mask=(row[:, None] < rows) & (column[None, :] < columns))


@triton.jit
def score(
    queries, k, group_of_query, position_of_query, query, key, group, position, table, tokens, d_z,
    k_stride, left, right, furthest,
    HAS_TABLE: tl.constexpr, HAS_POSITION: tl.constexpr, PRECISION: tl.constexpr, WIDTH_Z: tl.constexpr,
):  # fmt: skip
    """Biased scores of a tile, which of them count, and the keys."""
    keys = load_rows(k, key, tl.arange(0, WIDTH_Z), tokens, d_z, k_stride)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    step = key[None, :] - query[:, None]
    group_of_key = tl.load(group + key, mask=key < tokens, other=-1)
    seen = (step >= -left) & (step <= right) & (group_of_query[:, None] == group_of_key[None, :])
    seen = seen & (key[None, :] < tokens)
    if HAS_TABLE:
        distance = step
        if HAS_POSITION:
            position_of_key = tl.load(position + key, mask=key < tokens, other=0)
            distance = (position_of_key[None, :] - position_of_query[:, None]).to(tl.int32)
        entry = tl.minimum(tl.maximum(distance + furthest, 0), 2 * furthest)
        scores += tl.load(table + entry, mask=seen, other=0.0)
    return tl.where(seen, scores, HIDDEN), seen, keys


@triton.jit
def attend(
    q, k, v, group, position, table, out, tokens, d_z, d_v, q_stride, k_stride, v_stride, left, right,
    furthest,
    FUNCTION: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_POSITION: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH_Z: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Weighted sums of a slice of the values for a block of queries."""
    first = tl.program_id(0) * QUERIES
    query = first + tl.arange(0, QUERIES)
    column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    queries = load_rows(q, query, tl.arange(0, WIDTH_Z), tokens, d_z, q_stride)
    group_of_query = tl.load(group + query, mask=query < tokens, other=-2)
    position_of_query = query
    if HAS_POSITION:
        position_of_query = tl.load(position + query, mask=query < tokens, other=0)
    largest = tl.full((QUERIES,), HIDDEN, dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    sums = tl.zeros((QUERIES, VALUES), dtype=tl.float32)
    low = tl.maximum(first - left, 0) // KEYS * KEYS
    for begin in range(low, tl.minimum(first + QUERIES + right, tokens), KEYS):
        key = begin + tl.arange(0, KEYS)
        scores, seen, _ = score(
            queries, k, group_of_query, position_of_query, query, key, group, position, table,
            tokens, d_z, k_stride, left, right, furthest,
            HAS_TABLE, HAS_POSITION, PRECISION, WIDTH_Z,
        )  # fmt: skip
        if FUNCTION == SOFTMAX:
            higher = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
            shrink = tl.exp(largest - higher)
            total = total * shrink + tl.sum(weights, axis=1)
            sums *= shrink[:, None]
            largest = higher
        elif FUNCTION == RELU2:
            positive = tl.maximum(scores, 0.0)
            weights = positive * positive
        else:
            weights = 0.5 + 0.5 * tl.erf((scores - LAPLACE_MU) / (LAPLACE_SIGMA * ROOT_2))
            weights = tl.where(seen, weights, 0.0)
        values = load_rows(v, key, column, tokens, d_v, v_stride)
        sums += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    if FUNCTION == SOFTMAX:
        sums = sums / tl.maximum(total, 1e-30)[:, None]
    store_rows(out, query, column, tokens, d_v, d_v, sums)


@triton.jit
def score_gradients(
    grad, out, q, k, v, group, position, table, dq, weights_band, scores_band, begin_query, end_query,
    tokens, d_z, d_v, q_stride, k_stride, v_stride, left, right, furthest,
    FUNCTION: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_POSITION: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH_Z: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries; weights and gradients of scores go to the bands."""
    first = begin_query + tl.program_id(0) * QUERIES
    query = first + tl.arange(0, QUERIES)
    z = tl.arange(0, WIDTH_Z)
    queries = load_rows(q, query, z, end_query, d_z, q_stride)
    group_of_query = tl.load(group + query, mask=query < end_query, other=-2)
    position_of_query = query
    if HAS_POSITION:
        position_of_query = tl.load(position + query, mask=query < end_query, other=0)
    low = tl.maximum(first - left, 0) // KEYS * KEYS
    high = tl.minimum(first + QUERIES + right, tokens)
    largest = tl.full((QUERIES,), HIDDEN, dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    inner = tl.zeros((QUERIES,), dtype=tl.float32)
    if FUNCTION == SOFTMAX:
        for begin in range(low, high, KEYS):
            key = begin + tl.arange(0, KEYS)
            scores, seen, _ = score(
                queries, k, group_of_query, position_of_query, query, key, group, position, table,
                tokens, d_z, k_stride, left, right, furthest,
                HAS_TABLE, HAS_POSITION, PRECISION, WIDTH_Z,
            )  # fmt: skip
            higher = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
            total = total * tl.exp(largest - higher) + tl.sum(weights, axis=1)
            largest = higher
        total = tl.maximum(total, 1e-30)
        # the part of the gradient that all weights of a query share
        for slice in range(0, d_v, VALUES):
            column = slice + tl.arange(0, VALUES)
            above = load_rows(grad, query, column, end_query, d_v, d_v).to(tl.float32)
            summed = load_rows(out, query, column, end_query, d_v, d_v).to(tl.float32)
            inner += tl.sum(above * summed, axis=1)
    sums = tl.zeros((QUERIES, WIDTH_Z), dtype=tl.float32)
    window = left + right + 1
    for begin in range(low, high, KEYS):
        key = begin + tl.arange(0, KEYS)
        scores, seen, keys = score(
            queries, k, group_of_query, position_of_query, query, key, group, position, table,
            tokens, d_z, k_stride, left, right, furthest,
            HAS_TABLE, HAS_POSITION, PRECISION, WIDTH_Z,
        )  # fmt: skip
        dweights = tl.zeros((QUERIES, KEYS), dtype=tl.float32)
        for slice in range(0, d_v, VALUES):
            column = slice + tl.arange(0, VALUES)
            above = load_rows(grad, query, column, end_query, d_v, d_v)
            values = load_rows(v, key, column, tokens, d_v, v_stride)
            dweights += tl.dot(above, tl.trans(values), input_precision=PRECISION)
        if FUNCTION == SOFTMAX:
            weights = tl.exp(scores - largest[:, None]) / total[:, None]
            dscores = weights * (dweights - inner[:, None])
        elif FUNCTION == RELU2:
            positive = tl.maximum(scores, 0.0)
            weights = positive * positive
            dscores = 2 * positive * dweights
        else:
            weights = 0.5 + 0.5 * tl.erf((scores - LAPLACE_MU) / (LAPLACE_SIGMA * ROOT_2))
            away = tl.where(seen, (scores - LAPLACE_MU) / LAPLACE_SIGMA, 0.0)
            dscores = tl.exp(-0.5 * away * away) / (LAPLACE_SIGMA * ROOT_2_PI) * dweights
        weights = tl.where(seen, weights, 0.0)
        dscores = tl.where(seen, dscores, 0.0)
        sums += tl.dot(dscores.to(keys.dtype), keys, input_precision=PRECISION)
        place = key[None, :] - query[:, None] + left
        inside = (place >= 0) & (place < window) & (query[:, None] < end_query) & (key[None, :] < tokens)
        at = (query[:, None] - begin_query).to(tl.int64) * window + place
        tl.store(weights_band + at, weights, mask=inside)
        tl.store(scores_band + at, dscores, mask=inside)
    store_rows(dq, query, z, end_query, d_z, d_z, sums)


@triton.jit
def products_by_key(
    band, source, result, begin_query, end_query, begin_key, end_key, width, source_stride, left, right,
    ADD: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """The transpose of a band times (queries, width): gradients of keys and values."""
    first = begin_key + tl.program_id(0) * KEYS
    key = first + tl.arange(0, KEYS)
    column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    sums = tl.zeros((KEYS, VALUES), dtype=tl.float32)
    window = left + right + 1
    low = tl.maximum(first - right, begin_query)
    for begin in range(low, tl.minimum(first + KEYS + left, end_query), QUERIES):
        query = begin + tl.arange(0, QUERIES)
        place = key[:, None] - query[None, :] + left
        inside = (place >= 0) & (place < window) & (query[None, :] < end_query) & (key[:, None] < end_key)
        at = (query[None, :] - begin_query).to(tl.int64) * window + place
        weights = tl.load(band + at, mask=inside, other=0.0)
        rows = load_rows(source, query, column, end_query, width, source_stride)
        sums += tl.dot(weights.to(rows.dtype), rows, input_precision=PRECISION)
    if ADD:
        sums += load_rows(result, key, column, end_key, width, width)
    store_rows(result, key, column, end_key, width, width, sums)


@triton.jit
def table_by_step(
    band, sums, begin_query, end_query, tokens, left, right, ROWS: tl.constexpr, WINDOW: tl.constexpr
):
    """Per program, sums of the band over queries: gradients of biases by distance in the packed array."""
    place = tl.arange(0, WINDOW)
    window = left + right + 1
    found = tl.zeros((WINDOW,), dtype=tl.float32)
    first = begin_query + tl.program_id(0) * ROWS
    for query in range(first, tl.minimum(first + ROWS, end_query)):
        key = query + place - left
        inside = (place < window) & (key >= 0) & (key < tokens)
        at = tl.cast(query - begin_query, tl.int64) * window + place
        found += tl.load(band + at, mask=inside, other=0.0)
    tl.store(sums + tl.program_id(0) * window + place, found, mask=place < window)


@triton.jit
def table_by_position(
    band, position, group, tables, begin_query, end_query, tokens, left, right, furthest,
    ROWS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Per program, gradients of biases by distance in the original sequence, one query after the other.

    The keys of a query have different positions, so all additions of one query go to different entries but those at
    the ends of the table, which hold all larger distances and are summed separately.
    """
    place = tl.arange(0, WINDOW)
    window = left + right + 1
    first = begin_query + tl.program_id(0) * ROWS
    own = tables + tl.program_id(0).to(tl.int64) * (2 * furthest + 1)
    low = tl.zeros((WINDOW,), dtype=tl.float32)
    high = tl.zeros((WINDOW,), dtype=tl.float32)
    for query in range(first, tl.minimum(first + ROWS, end_query)):
        key = query + place - left
        inside = (place < window) & (key >= 0) & (key < tokens)
        here = tl.load(position + query)
        same = tl.load(group + key, mask=inside, other=-1) == tl.load(group + query)
        distance = (tl.load(position + key, mask=inside, other=0) - here).to(tl.int32)
        at = tl.cast(query - begin_query, tl.int64) * window + place
        values = tl.load(band + at, mask=inside & same, other=0.0)
        below, above = distance <= -furthest, distance >= furthest
        low += tl.where(below, values, 0.0)
        high += tl.where(above & (distance > -furthest), values, 0.0)
        between = inside & same & (distance > -furthest) & (distance < furthest)
        entry = own + distance + furthest
        tl.store(entry, tl.load(entry, mask=between, other=0.0) + values, mask=between)
        # the next query may add to the same entries from other threads
        tl.debug_barrier()
    ends = tl.sum(high, axis=0)
    tl.store(own, tl.sum(low, axis=0) + tl.where(furthest == 0, ends, 0.0))
    if furthest > 0:
        tl.store(own + 2 * furthest, ends)


# launches


class _Plan:
    """Inputs as kernels take them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> None:
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        if dtype == torch.bfloat16 and interprets():
            dtype = torch.float32  # the interpreter multiplies no bfloat16
        self.q, self.k, self.v = (_by_rows(part.to(dtype)) for part in (q, k, v))
        self.tokens, self.d_z = q.shape
        nearest = max(min(near.longest, self.tokens) - 1, 1)
        near = near._replace(left=min(near.left, nearest), right=min(near.right, nearest))
        self.near, self.dtype = near, dtype
        self.d_v = v.shape[1]
        self.group = near.group.contiguous()
        self.position = None if near.position is None or near.table is None else near.position.contiguous()
        self.table = None if near.table is None else near.table.detach().float().contiguous()
        self.furthest = 0 if self.table is None else (self.table.shape[0] - 1) // 2
        self.window = near.left + near.right + 1
        self.numbers = (
            self.tokens, self.d_z, self.d_v, self.q.stride(0), self.k.stride(0), self.v.stride(0),
            near.left, near.right, self.furthest,
        )  # fmt: skip
        self.precision = precision(self.q)
        self.sizes = {
            "FUNCTION": FUNCTIONS[near.function],
            "HAS_TABLE": self.table is not None,
            "HAS_POSITION": self.position is not None,
            "PRECISION": self.precision,
            "WIDTH_Z": max(16, power(self.d_z)),
        }


def attention(q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> Tensor:
    """Weighted sums of values, (tokens, d_v)."""
    plan = _Plan(q, k, v, near)
    out = scratch(plan.v, plan.tokens, plan.d_v, dtype=plan.dtype)
    launch(
        attend,
        lambda sizes: (-(-plan.tokens // sizes["QUERIES"]), -(-plan.d_v // sizes["VALUES"])),
        plan.q, plan.k, plan.v, plan.group, plan.position, plan.table, out, *plan.numbers, **plan.sizes,
    )  # fmt: skip
    return out.to(v.dtype)


def attention_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, near: Neighbors
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and the bias table, which is empty without one."""
    plan = _Plan(q, k, v, near)
    grad, out = (part.to(plan.dtype).contiguous() for part in (grad, out))
    dq = scratch(plan.q, plan.tokens, plan.d_z, dtype=plan.dtype)
    rows = max(ROWS, SCORES // plan.window // ROWS * ROWS)
    segments = [(begin, min(begin + rows, plan.tokens)) for begin in range(0, plan.tokens, rows)]
    several = len(segments) != 1
    # segments have keys in common, so their gradients are added up in float32
    dk, dv = (
        torch.zeros(plan.tokens, width, device=q.device) if several
        else scratch(plan.q, plan.tokens, width, dtype=plan.dtype)
        for width in (plan.d_z, plan.d_v)
    )  # fmt: skip
    dtable = torch.zeros(0 if plan.table is None else plan.table.shape[0], device=q.device)
    for begin, end in segments:
        weights = scratch(plan.q, end - begin, plan.window, dtype=plan.dtype)
        # the sums of the table need more digits than the products
        wide = plan.dtype if plan.table is None else torch.float32
        scores = scratch(plan.q, end - begin, plan.window, dtype=wide)
        launch(
            score_gradients,
            partial(_programs, "QUERIES", end - begin),
            grad, out, plan.q, plan.k, plan.v, plan.group, plan.position, plan.table, dq, weights, scores,
            begin, end, *plan.numbers, **plan.sizes,
        )  # fmt: skip
        for band, source, result in ((scores, plan.q, dk), (weights, grad, dv)):
            _by_key(plan, band, source, result, begin, end, several)
        if plan.table is not None:
            dtable = _add_table(plan, scores, begin, end, dtable)
    types = q.dtype, k.dtype, v.dtype, torch.float32 if near.table is None else near.table.dtype
    return tuple(part.to(dtype) for part, dtype in zip((dq, dk, dv, dtable), types, strict=True))


def _programs(name: str, count: int, sizes: dict[str, int]) -> tuple[int, ...]:
    return (-(-count // sizes[name]),)


def _by_key(
    plan: _Plan, band: Tensor, source: Tensor, result: Tensor, begin: int, end: int, add: bool
) -> None:
    near, width = plan.near, source.shape[1]
    first, last = max(begin - near.left, 0), min(end + near.right, plan.tokens)
    launch(
        products_by_key,
        lambda sizes: (-(-(last - first) // sizes["KEYS"]), -(-width // sizes["VALUES"])),
        band, source, result, begin, end, first, last, width, source.stride(0), near.left, near.right,
        ADD=add, PRECISION=plan.precision,
    )  # fmt: skip


def _add_table(plan: _Plan, scores: Tensor, begin: int, end: int, dtable: Tensor) -> Tensor:
    """Add the gradient of the bias table over queries begin .. end."""
    near, furthest = plan.near, plan.furthest
    programs = -(-(end - begin) // ROWS)
    sizes: dict[str, Any] = {"ROWS": ROWS, "WINDOW": power(plan.window)}
    if plan.position is not None:
        tables = torch.zeros(programs, dtable.shape[0], device=scores.device)
        launch(
            table_by_position, lambda _: (programs,),
            scores, plan.position, plan.group, tables, begin, end, plan.tokens, near.left, near.right, furthest,
            **sizes,
        )  # fmt: skip
        return dtable + tables.sum(dim=0)
    sums = scratch(scores, programs, plan.window)
    launch(
        table_by_step, lambda _: (programs,),
        scores, sums, begin, end, plan.tokens, near.left, near.right, **sizes,
    )  # fmt: skip
    steps = sums.sum(dim=0)
    # distances beyond the table belong to its ends
    low, high = max(near.left - furthest, 0), max(near.right - furthest, 0)
    inner = steps[low : plan.window - high].clone()
    inner[0] += steps[:low].sum()
    inner[-1] += steps[plan.window - high :].sum()
    begin_entry = furthest - (near.left - low)
    dtable[begin_entry : begin_entry + len(inner)] += inner
    return dtable


def precision(x: Tensor) -> str:
    """How float32 products are computed: exactly, unless the user allows TF32."""
    return "tf32" if x.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _by_rows(x: Tensor) -> Tensor:
    """The matrix with its columns next to each other."""
    return x if x.stride(1) == 1 else x.contiguous()
