"""Elementwise Triton kernels against the same in torch in float64: results and all gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import difference
from seqboat.ops.fused import _plain_norm, _plain_open_gates
from seqboat.ops.kernels import triton_pointwise_launch as launches
from seqboat.ops.kernels.layer import plain_route, plain_scatter
from seqboat.ssm.ema import make_coefficients

TOLERANCE = 2e-6


def check(
    run: Callable[..., Any], back: Callable[..., Any], plain: Callable[..., Any], inputs: list[Any]
) -> None:
    leaves = [
        part.double().requires_grad_() if isinstance(part, Tensor) and part.is_floating_point() else part
        for part in inputs
    ]
    leaves = [torch.float64 if part is torch.float32 else part for part in leaves]
    expected, found = plain(*leaves), run(*inputs)
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    found = [found] if isinstance(found, Tensor) else list(found)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if a.dtype == torch.bool else difference(a, b) < TOLERANCE
    grads = [torch.randn(part.shape) for part in found]
    wanted = [part for part in leaves if isinstance(part, Tensor) and part.requires_grad]
    used = [number for number, part in enumerate(expected) if part.requires_grad]
    above = torch.autograd.grad([expected[i] for i in used], wanted, [grads[i].double() for i in used])
    made = [part for part in back(grads, *inputs) if part is not None]
    for a, b in zip(made, above, strict=True):
        assert difference(a, b) < TOLERANCE


@pytest.mark.parametrize("seed", range(4))
def test_coefficients(seed: int) -> None:
    torch.manual_seed(seed)
    # slow and fast averages: the decay is near one and near zero
    parts = [(4.0 if seed else 12.0) * torch.randn(2, 5, 3) for _ in range(2)]
    inputs: list[Any] = [*parts, torch.randn(2, 5, 3), torch.randn(2, 5, 3), 0.3]
    log, *_ = launches.ema_coefficients(*inputs)
    wide: list[Any] = [*(part.double() for part in inputs[:4]), 0.3]
    expected, *_ = make_coefficients(*wide)
    assert ((log - expected) / expected).abs().max() < 1e-5  # of each number, however small
    inputs[:2] = [part.clamp(-3, 3) for part in parts]
    check(launches.ema_coefficients, launches.ema_coefficients_backward, make_coefficients, inputs)


@pytest.mark.parametrize("seed", range(8))
def test_gates(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rotary = seed % 2 == 0
    tokens, d_z, d_v = (
        rng.choice([0, 1, 17, 40]),
        rng.choice([2, 6, 20] if rotary else [1, 3, 16]),
        rng.choice([1, 7, 130]),
    )
    inputs = [
        torch.randn(tokens, d_z + 2 * d_v),
        torch.randn(2, d_z),
        torch.randn(2, d_z),
        torch.randint(0, 100_000, (tokens,)) if rotary else None,
    ]
    check(launches.open_gates, launches.open_gates_backward, _plain_open_gates, inputs)


@pytest.mark.parametrize(
    ("kind", "activate"),
    [("layer", True), ("rms", True), ("rms", False), ("scale", True), ("scale", False)],
)
def test_norms(kind: str, activate: bool) -> None:
    torch.manual_seed(2)
    weight = torch.randn(()) if kind == "scale" else torch.randn(13)
    bias = torch.randn(13) if kind == "layer" else None
    inputs = [torch.randn(3, 25, 13), weight, bias, 1e-5, activate]
    check(launches.norm, launches.norm_backward, _plain_norm, inputs)


@pytest.mark.parametrize("seed", range(6))
def test_route(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokens, dim = rng.choice([1, 5, 33, 70]), rng.choice([1, 3, 8, 33])
    rate = 0.3 if seed % 2 else 0.0
    # a temperature within its bounds, and one beyond, with logits as small
    log_temperature, size = (-25.0, 2e-9) if seed == 5 else (0.4, 1.0)
    inputs = [
        torch.randn(tokens, dim),
        torch.rand(tokens, dim) >= rate if rate else None,
        rate,
        size * torch.randn(2, dim),
        size * torch.randn(2),
        torch.tensor([log_temperature]),
        torch.float32,
    ]
    check(launches.route, launches.route_backward, plain_route, inputs)


def test_a_token_that_is_not_finite_is_not_active() -> None:
    x = torch.tensor([[1.0, 2.0], [torch.inf, 1.0], [torch.nan, 1.0], [3.0, 1.0]])
    weight, bias = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.zeros(2)
    *_, active = launches.route(x, None, 0.0, weight, bias, torch.zeros(1), torch.float32)
    assert active.tolist() == [True, False, False, True]


@pytest.mark.parametrize("seed", range(8))
def test_scatter(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokens, dim = rng.choice([1, 6, 33, 70]), rng.choice([1, 3, 8, 33])
    active = torch.rand(tokens) < (0.0, 0.4, 1.0)[seed % 3]
    inputs = [
        torch.randn(tokens, dim),
        torch.randn(dim),
        torch.randn(tokens, dim) if seed % 2 else None,
        torch.randn(int(active.sum()), dim),
        torch.rand(tokens),
        active,
        active.cumsum(0, dtype=torch.int32),
        torch.float32,
    ]
    check(launches.scatter, launches.scatter_backward, plain_scatter, inputs)


def test_scatter_narrows_the_gradient_of_a_narrow_product() -> None:
    torch.manual_seed(0)
    active = torch.rand(21) < 0.5
    places = active.cumsum(0, dtype=torch.int32)
    product, y = torch.randn(21, 5).half(), torch.randn(int(active.sum()), 5).half()
    inputs: list[Any] = [product, torch.randn(5), torch.randn(21, 5), y, torch.rand(21), active, places]
    wide: list[Any] = [part.double() if part.is_floating_point() else part for part in inputs]
    narrow, exact = [*inputs, torch.float32], [*wide, torch.float64]
    assert difference(launches.scatter(*narrow), plain_scatter(*exact)) < TOLERANCE
    grad = torch.randn(21, 5)
    dproduct, _, dbase, dy, *_ = launches.scatter_backward([grad], *narrow)
    assert dproduct is not None and torch.equal(dproduct, grad.half())
    assert dbase is grad and dy is not None and dy.dtype == torch.float16
