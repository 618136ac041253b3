"""Banded attention in Triton against the loops of the reference in float64: outputs and all gradients."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from closeness import difference
from seqboat.layers.gau import GAUConfig, PositionsName
from seqboat.ops.attention import FUNCTIONS, AttentionName, Neighbors
from seqboat.ops.kernels.triton_band import attention, attention_backward
from seqboat.reference import MemoryEntry, attend, sees

TOLERANCE = 2e-6


class Case(NamedTuple):
    counts: tuple[int, ...]
    """tokens of each sequence"""
    d_z: int
    d_v: int
    window: int
    causal: bool
    attention: AttentionName
    positions: PositionsName
    furthest: int
    """largest distance in the table"""


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    sequences = rng.choice([1, 2, 4])
    counts = tuple(rng.choice([0, 1, 2, 7, 13, 25, 33]) for _ in range(sequences))
    return Case(
        counts=counts,
        d_z=rng.choice([1, 4, 6, 16, 33]),
        d_v=rng.choice([1, 3, 16, 65, 70]),
        window=rng.choice([1, 2, 3, 8, 21, 100]),
        causal=rng.random() < 0.5,
        attention=rng.choice(["softmax", "softmax", "relu2", "laplace"]),
        positions=rng.choice(["original", "compressed", "none"]),
        furthest=rng.choice([0, 1, 5, 200]),
    )


CASES = [draw(seed) for seed in range(32)] + [
    Case((11, 0, 6), 6, 1232, 4, True, "softmax", "none", 0),
    Case((90, 40), 8, 5, 31, False, "softmax", "original", 300),
    Case((0, 0), 4, 3, 8, True, "softmax", "original", 9),
    Case((), 4, 3, 8, False, "relu2", "compressed", 8),
    Case((40,), 8, 4, 200, True, "laplace", "original", 1000),
]


class Made(NamedTuple):
    tensors: dict[str, Tensor]
    group: Tensor
    position: Tensor
    config: GAUConfig
    near: Neighbors
    scale: float


def make(case: Case, seed: int) -> Made:
    torch.manual_seed(seed)
    tokens = sum(case.counts)
    config = GAUConfig(
        d_z=case.d_z, d_v=case.d_v, window=case.window, attention=case.attention, positions=case.positions
    )
    tensors = {
        "q": torch.randn(tokens, case.d_z),
        "k": torch.randn(tokens, case.d_z),
        "v": torch.randn(tokens, case.d_v),
        "table": 0.5 * torch.randn(2 * case.furthest + 1),
    }
    group = torch.repeat_interleave(
        torch.arange(len(case.counts)), torch.tensor(case.counts, dtype=torch.int64)
    )
    # active tokens: positions with gaps
    gaps = [torch.randint(1, 4, (count,)).cumsum(0) for count in case.counts]
    position = torch.cat([torch.zeros(0, dtype=torch.int64), *gaps])
    left, right = (case.window, 0) if case.causal else (case.window // 2, case.window // 2)
    scale = 1 / case.window if FUNCTIONS[case.attention].by_keys else case.d_z**-0.5
    near = Neighbors(
        group,
        position if case.positions == "original" else None,
        None if case.positions == "none" else tensors["table"],
        left,
        right,
        max(tokens, 1),
        case.attention,
    )
    if case.positions == "none":
        del tensors["table"]
    return Made(tensors, group, position, config, near, scale)


def reference(case: Case, made: Made, tensors: dict[str, Tensor]) -> Tensor:
    """Query by query, with the reference's own loops."""
    outputs, begin = [], 0
    params = {"bias.table": tensors["table"]} if "table" in tensors else {}
    for count in case.counts:
        entries = [
            MemoryEntry(slot, int(made.position[at]), tensors["k"][at], tensors["v"][at])
            for slot, at in enumerate(range(begin, begin + count))
        ]
        for own in entries:
            visible = [entry for entry in entries if sees(own.slot, entry.slot, made.config, case.causal)]
            outputs.append(attend(tensors["q"][begin + own.slot], own, visible, params, made.config))
        begin += count
    return torch.stack(outputs) if outputs else tensors["v"] + 0 * (tensors["q"].sum() + tensors["k"].sum())


@pytest.mark.parametrize("seed", range(len(CASES)), ids=lambda seed: str(CASES[seed])[5:-1])
def test_equals_the_reference(seed: int) -> None:
    case = CASES[seed]
    made = make(case, seed)
    double = {name: part.double().requires_grad_() for name, part in made.tensors.items()}
    expected = reference(case, made, double)
    q, k, v = (made.tensors[name] for name in "qkv")
    q = made.scale * q
    out = attention(q, k, v, made.near)
    assert difference(out, expected) < TOLERANCE
    grad = torch.randn(expected.shape)
    leaves = list(double.values())
    grads = torch.autograd.grad((expected * grad).sum(), leaves, allow_unused=True)
    wanted = dict(zip(double, grads, strict=True))
    dq, *others = attention_backward(grad, out, q, k, v, made.near)
    found = made.scale * dq, *others
    for name, part in zip(("q", "k", "v", "table"), found, strict=True):
        if name in double:
            above = wanted[name]
            above = torch.zeros_like(double[name]) if above is None else above
            assert difference(part, above) < TOLERANCE, name
        else:
            assert part.numel() == 0


@pytest.mark.parametrize("positions", ["original", "compressed"])
def test_table_gradients_are_deterministic(positions: PositionsName) -> None:
    case = Case((70, 30), 4, 5, 16, True, "softmax", positions, 9)
    made = make(case, 3)
    q, k, v = (made.tensors[name] for name in "qkv")
    out = attention(q, k, v, made.near)
    first, second = (attention_backward(torch.ones_like(out), out, q, k, v, made.near) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(dtype: torch.dtype) -> None:
    case = Case((40, 9), 16, 20, 12, True, "softmax", "original", 40)
    made = make(case, 5)
    q, k, v = (made.tensors[name] for name in "qkv")
    expected = attention(q, k, v, made.near)
    out = attention(q.to(dtype), k.to(dtype), v.to(dtype), made.near)
    assert out.dtype == dtype and difference(out.double(), expected.double()) < 2e-2


def test_a_band_in_segments_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from seqboat.ops.kernels import triton_band

    case = Case((90, 60), 4, 5, 9, False, "softmax", "original", 30)
    made = make(case, 7)
    q, k, v = (made.tensors[name] for name in "qkv")
    out = attention(q, k, v, made.near)
    grad = torch.randn_like(out)
    whole = attention_backward(grad, out, q, k, v, made.near)
    monkeypatch.setattr(triton_band, "SCORES", 1)
    parts = attention_backward(grad, out, q, k, v, made.near)
    for a, b in zip(whole, parts, strict=True):
        assert difference(b, a.double()) < TOLERANCE
