"""Second derivatives and torch.func over every mixer: right, or refused in plain words, never silently wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixer_cases import CASES, D_MODEL, Case
from seqboat import PaddedUnit, SeqBoatConfig, SparseModularActivation
from seqboat.mixers.reformer import ReformerConfig

TIME = 11
"""Tokens: more than a block of any mixer here."""


@pytest.fixture(autouse=True)
def plain_attention() -> Iterator[None]:
    """PyTorch's fused attention supports only first derivatives, and says so; its plain form supports all."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def build(case: Case) -> Any:
    torch.manual_seed(0)
    return case.build().double().eval()


def inputs(batch: int = 2) -> Tensor:
    return torch.randn(batch, TIME, D_MODEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def weights_of(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)


def loss_of(mixer: Any, parameters: dict[str, Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """A loss that is linear in the output: its gradient of the output holds no trace of the input."""
    y = functional_call(mixer, parameters, (x,))[0]
    return (y * weight).sum()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_second_derivatives(case: Case) -> None:
    """The derivative of the gradient along a direction, against central differences of the gradient."""
    mixer, x = build(case), inputs()
    weight = weights_of(x)
    generator = torch.Generator().manual_seed(3)

    def gradient(x: Tensor, create_graph: bool) -> list[Tensor | None]:
        wanted = [x, *mixer.parameters()]
        loss = loss_of(mixer, {}, x, weight)
        return list(torch.autograd.grad(loss, wanted, create_graph=create_graph, allow_unused=True))

    x.requires_grad_()
    found = gradient(x, create_graph=True)
    probes = [None if g is None else torch.randn(g.shape, generator=generator).double() for g in found]
    scalar = sum((g * p).sum() for g, p in zip(found, probes, strict=True) if g is not None and p is not None)
    assert isinstance(scalar, Tensor)
    (second,) = torch.autograd.grad(scalar, x)
    direction = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    step = 1e-5
    sides = []
    for sign in (1, -1):
        moved = (x.detach() + sign * step * direction).requires_grad_()
        values = gradient(moved, create_graph=False)
        sides.append(
            sum((g * p).sum() for g, p in zip(values, probes, strict=True) if g is not None and p is not None)
        )
    expected = (sides[0] - sides[1]) / (2 * step)
    got = (second * direction).sum()
    torch.testing.assert_close(got, torch.as_tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_functional_gradients(case: Case) -> None:
    mixer, x = build(case), inputs()
    parameters = {name: part.detach() for name, part in mixer.named_parameters()}
    weight = weights_of(x)
    got = grad(lambda p: loss_of(mixer, p, x, weight))(parameters)
    mixer.zero_grad()
    loss_of(mixer, {}, x, weight).backward()
    for name, part in mixer.named_parameters():
        expected = torch.zeros_like(part) if part.grad is None else part.grad
        torch.testing.assert_close(got[name], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_directional_derivative(case: Case) -> None:
    mixer, x = build(case), inputs()
    weight, direction = weights_of(x), weights_of(x).flip(0)
    got = jvp(lambda x: loss_of(mixer, {}, x, weight), (x,), (direction,))[1]
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(mixer, {}, x, weight), x)
    torch.testing.assert_close(got, (gradient * direction).sum(), rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_per_example(case: Case) -> None:
    """vmap over examples, each a batch of one; gradients of every parameter for each of them."""
    mixer, x = build(case), inputs(3)
    parameters = {name: part.detach() for name, part in mixer.named_parameters()}
    weight = weights_of(x)

    def one(p: dict[str, Tensor], x: Tensor, weight: Tensor) -> Tensor:
        return loss_of(mixer, p, x[None], weight[None])

    try:
        got = vmap(grad(one), in_dims=(None, 0, 0))(parameters, x, weight)
    except RuntimeError as error:
        # PyTorch has no rule for one operator of S4's kernel, and says so
        assert "Batching rule" in str(error) and "s4-" in str(case), error
        return
    for i in range(len(x)):
        expected = grad(one)(parameters, x[i], weight[i])
        for name in parameters:
            torch.testing.assert_close(got[name][i], expected[name], rtol=1e-9, atol=1e-10)


def test_a_reversible_layer_refuses_second_derivatives() -> None:
    layer = ReformerConfig(reversible=True, prenorm=True, heads=2).build(D_MODEL).double()
    x = inputs().requires_grad_()
    with pytest.raises(RuntimeError, match="only first derivatives: build it with reversible=False"):
        torch.autograd.grad(layer(x).y.sum(), x, create_graph=True)


def test_modules_that_cannot_be_masked_refuse_vmap() -> None:
    unit = PaddedUnit(torch.nn.Identity())
    sparse = SparseModularActivation({"unit": unit}, d_model=D_MODEL, start_active=False).double()
    with pytest.raises(ValueError, match="vmap cannot run over PaddedUnit: use a batch dimension"):
        vmap(lambda x: sparse(x[None])[0])(inputs(3))


def test_a_state_cannot_be_carried_through_vmap() -> None:
    layer = SeqBoatConfig(init="paper", causal=True).build(D_MODEL).double()
    state = layer.init_state(1)
    with pytest.raises(ValueError, match="vmap cannot carry a state"):
        vmap(lambda x: layer(x[None], None, state)[0])(inputs(3))
