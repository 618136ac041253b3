"""Parts of layers with a matrix as their state, one token at a time, and comparisons with gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from mixer_cases import assert_near
from seqboat.core.nn import EPS


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + EPS).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def convolved(layer: Any, inputs: list[Tensor]) -> Tensor:
    """The newest token after the convolution, from all tokens so far."""
    last = inputs[::-1][: layer.taps]
    return sum(layer.conv_weight[layer.taps - 1 - age] * u for age, u in enumerate(last))


def with_block(layer: Any, x: Tensor) -> Tensor:
    """The feed-forward block on one token."""
    if not layer.config.ffn:
        return x
    gate, value = (layer.block.ffn.hidden.weight @ normed(x, layer.block.ffn_norm.weight)).chunk(2)
    return x + layer.block.ffn.out.weight @ (silu(gate) * value)


def assert_same_with_gradients(
    layer: Any, x: Tensor, results: Sequence[Tensor], tolerance: float = 1e-9
) -> None:
    """Both results and their gradients agree, by the inputs and by every parameter."""
    weight = torch.randn_like(x)
    parameters = {"x": x, **dict(layer.named_parameters())}
    assert_near(results[0], results[1], tolerance, "y")
    first, second = (
        torch.autograd.grad((y * weight).sum(), list(parameters.values()), retain_graph=True) for y in results
    )
    for key, one, two in zip(parameters, first, second, strict=True):
        assert_near(one, two, tolerance, key)


@contextmanager
def in_double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What casts to float32 casts to float64: transformers widens to no more than float32."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch, "float32", torch.float64)
        yield
