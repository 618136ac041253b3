"""S5 by the Triton scan against the loops of the reference in float64: outputs, states and gradients."""

from __future__ import annotations

import pytest
import torch

import seqboat
from closeness import difference
from seqboat.core.padding import Aligned
from seqboat.ops.kernels import registry
from seqboat.ssm.reference import s5
from seqboat.ssm.s5 import S5, S5Config, S5State

TOLERANCE = 2e-6


@pytest.mark.parametrize(
    ("causal", "start", "padded", "time"),
    [(True, False, False, 37), (True, True, True, 20), (False, False, False, 19), (True, True, False, 1)],
)
def test_s5_equals_the_reference(causal: bool, start: bool, padded: bool, time: int) -> None:
    torch.manual_seed(time)
    config = S5Config(d_state=8, systems=2)
    layer = S5(3, config, causal=causal)
    x = torch.randn(2, time, 3)
    lengths = [time, time // 2] if padded else [time, time]
    mask = torch.arange(time) < torch.tensor(lengths)[:, None] if padded else None
    begin = S5State(torch.randn(2, 8)) if start else None
    registry.forget_runs()
    with seqboat.using_kernels("triton"):
        found = layer(x, None if mask is None else Aligned(mask), begin)
        grad = torch.randn(found.y.shape)
        loss = (found.y * grad).sum()
        if causal:
            above = torch.randn(found.state.states.shape)
            loss = loss + (found.state.states * above).sum()
        loss.backward()
    assert registry.record()["scan"] == registry.record()["scan_backward"] == "triton"
    params = {name: part.detach().double().requires_grad_() for name, part in layer.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(lengths):
        first = None
        if begin is not None:
            first = torch.view_as_complex(begin.states[row].double().view(-1, 2))
        expected, after = s5(x[row, :length].double(), params, config, first)
        assert difference(found.y[row, :length], expected) < TOLERANCE
        assert not found.y[row, length:].any()
        total = total + (expected * grad[row, :length]).sum()
        if causal:
            assert after is not None
            final = torch.view_as_real(after).flatten()
            assert difference(found.state.states[row], final) < TOLERANCE
            total = total + (final * above[row]).sum()
    wanted = torch.autograd.grad(total, list(params.values()))
    for (name, parameter), above_it in zip(layer.named_parameters(), wanted, strict=True):
        assert parameter.grad is not None, name
        assert difference(parameter.grad, above_it) < TOLERANCE, name
