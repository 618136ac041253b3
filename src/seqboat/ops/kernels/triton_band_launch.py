"""Launches of the kernels in `triton_band`: banded attention, forward, and backward from inputs and output."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqboat.ops.attention import Neighbors
from seqboat.ops.kernels import triton_band as kernels
from seqboat.ops.kernels.registry import interprets
from seqboat.ops.kernels.tuning import is_recording, launch, power, scratch

FUNCTIONS = {"softmax": 0, "relu2": 1, "laplace": 2}

SCORES = 1 << 26
"""Scores held at a time: 256 MB; the speed of other numbers has not been measured."""

ROWS = 64
"""Queries per program of the kernels that sum over queries for the bias table."""


class _Plan:
    """Inputs as kernels take them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> None:
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        if dtype == torch.bfloat16 and interprets() and not is_recording():
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
            near.left, near.right, 1.0, self.furthest,
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
        kernels.attend,
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
            kernels.score_gradients,
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
        kernels.products_by_key,
        lambda sizes: (-(-(last - first) // sizes["KEYS"]), -(-width // sizes["VALUES"])),
        band, source, result, begin, end, first, last, width, source.stride(0), near.left, near.right, 1.0,
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
            kernels.table_by_position, lambda _: (programs,),
            scores, plan.position, plan.group, tables, begin, end, plan.tokens, near.left, near.right, furthest,
            **sizes,
        )  # fmt: skip
        return dtable + tables.sum(dim=0)
    sums = scratch(scores, programs, plan.window)
    launch(
        kernels.table_by_step, lambda _: (programs,),
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
