"""Attention through FlexAttention and variable-length attention: values in heads, masks from the band."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from seqboat.ops.band import Neighbors
from seqboat.ops.banded import banded
from seqboat.ops.flex import BLOCK, band_blocks, flex_banded, join_heads, split_heads
from seqboat.ops.kernels import varlen
from seqboat.ops.kernels.registry import kernels

LENGTHS = (130, 1, 70, 101)


def inputs(d_z: int, d_v: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    group = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return *(torch.randn(tokens, width, dtype=dtype) for width in (d_z, d_z, d_v)), group  # type: ignore[return-value]


@pytest.mark.parametrize(("d_v", "left", "right"), [(16, 60, 0), (300, 128, 128), (200, 1, 300)])
def test_flex_splits_wide_values(d_v: int, left: int, right: int) -> None:
    q, k, v, group = inputs(8, d_v)
    near = Neighbors(group, torch.arange(len(q)), torch.randn(41), left, right, "softmax", 0.3)
    with torch.no_grad():
        torch.testing.assert_close(flex_banded(q, k, v, near), banded(q, k, v, near), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 128, 129, 1232])
def test_heads_are_joined_as_they_were_split(width: int) -> None:
    v = torch.randn(5, width)
    heads = split_heads(v, 128)
    assert heads.shape[-1] <= 128 and torch.equal(join_heads(heads, v), v)


@pytest.mark.parametrize(("tokens", "left", "right"), [(1, 3, 3), (128, 5, 0), (700, 130, 0), (700, 1, 129)])
def test_blocks_of_the_band_are_those_of_the_dense_mask(tokens: int, left: int, right: int) -> None:
    dense = create_block_mask(
        lambda _b, _h, q, k: (k - q >= -left) & (k - q <= right),
        None, None, tokens, tokens, device="cpu", BLOCK_SIZE=BLOCK,
    )  # fmt: skip
    count, numbers = band_blocks(tokens, left, right, torch.device("cpu"))
    partial, full = dense.kv_num_blocks[0, 0], dense.full_kv_num_blocks
    assert full is not None and torch.equal(count, partial + full[0, 0])
    for row, (some, places) in enumerate(zip(count.tolist(), numbers, strict=True)):
        met = set(dense.kv_indices[0, 0, row, : partial[row]].tolist())
        assert dense.full_kv_indices is not None
        met |= set(dense.full_kv_indices[0, 0, row, : full[0, 0, row]].tolist())
        assert set(places[:some].tolist()) == met


def stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """What torch documents for `varlen_attn`, which has no kernel for CPUs."""
    assert query.shape == key.shape == value.shape and query.shape[2] % 8 == 0 and query.shape[2] <= 256
    assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k) and query.is_contiguous()
    parts = []
    for start, end in pairwise(cu_seq_q.tolist()):
        assert end - start <= max_q == max_k
        q, k, v = (part[start:end].transpose(0, 1) for part in (query, key, value))
        place = torch.arange(end - start)
        step = place - place[:, None]
        seen = (step >= -window_size[0]) & (step <= window_size[1])
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        parts.append((scores.softmax(dim=-1) @ v).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize(("d_z", "d_v"), [(6, 10), (16, 300), (64, 64)])
@pytest.mark.parametrize(("left", "right"), [(20, 0), (8, 8)])
def test_variable_length_attention(
    d_z: int, d_v: int, left: int, right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", stand_in)
    q, k, v, group = (
        x.requires_grad_() if x.is_floating_point() else x for x in inputs(d_z, d_v, torch.float64)
    )
    near = Neighbors(group, None, None, left, right, "softmax", 0.2)
    found, expected = varlen.varlen_banded(q, k, v, near), banded(q, k, v, near)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_what_variable_length_attention_refuses() -> None:
    call: dict[str, Any] = {
        "attention": "softmax",
        "table": False,
        "dropout": 0.0,
        "device": torch.device("cuda"),
        "dtype": torch.bfloat16,
        "d_z": 64,
    }
    assert varlen.refuse(**call) is None
    for change, reason in (
        ({"attention": "relu2"}, "softmax only"),
        ({"table": True}, "bias table"),
        ({"dropout": 0.1}, "dropout"),
        ({"device": torch.device("cpu")}, "cpu tensors"),
        ({"dtype": torch.float32}, "not float32"),
        ({"d_z": 300}, "at most 256"),
    ):
        assert reason in (varlen.refuse(**call | change) or "")
    if not torch.cuda.is_available():
        assert "no GPU" in kernels()["attention"]["implementations"]["varlen"]
