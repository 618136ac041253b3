"""Whole layers by Triton kernels against the reference in float64: outputs, states and gradients of parameters."""

from __future__ import annotations

import pytest
import torch

import seqboat
from closeness import difference
from seqboat import EMAConfig, GAUConfig, S4DConfig, SeqBoat, SeqBoatConfig
from seqboat.layers.policy import override_activation
from seqboat.ops.kernels import registry
from seqboat.reference import layer as reference_layer

TOLERANCE = 2e-6
UNUSED = {
    "relu2": {"coefficients", "coefficients_backward"},
    "enwik8": {"norm", "norm_backward"},
}
"""Operations that a layer does not have: coefficients of S4D, and a norm before the layer, are left to torch."""
CONFIGS = {
    "text": SeqBoatConfig(
        ssm=EMAConfig(d_state=4), gau=GAUConfig(d_z=8, d_v=12, window=8, positions="compressed"), norm="scale"
    ),
    "enwik8": SeqBoatConfig(
        ssm=EMAConfig(d_state=4),
        gau=GAUConfig(d_z=8, d_v=12, window=6, positions="rotary"),
        causal=True,
        norm="layer",
        prenorm=True,
    ),
    "relu2": SeqBoatConfig(
        ssm=S4DConfig(d_state=4), gau=GAUConfig(d_z=4, d_v=6, window=5, attention="relu2", max_positions=9)
    ),
    "laplace": SeqBoatConfig(
        ssm=EMAConfig(d_state=2),
        gau=GAUConfig(d_z=4, d_v=6, window=50, attention="laplace"),
        causal=True,
        norm="rms",
    ),
}


@pytest.fixture(autouse=True)
def counted() -> None:
    registry.forget_runs()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_equals_the_reference(name: str) -> None:
    torch.manual_seed(3)
    layer = SeqBoat(6, CONFIGS[name])
    x = torch.randn(1, 21, 6)
    params = {key: value.detach().double() for key, value in layer.named_parameters()}
    leaves = {key: value.requires_grad_() for key, value in params.items()}
    expected = reference_layer(x[0].double(), params, CONFIGS[name])
    with seqboat.using_kernels("triton"):
        found = layer(x)
        grad = torch.randn(found.y.shape)
        (found.y * grad).sum().backward()
    assert found.routing.active[0, :, 0].tolist() == expected.decisions.active
    assert difference(found.y[0], expected.y) < TOLERANCE
    wanted = torch.autograd.grad((expected.y * grad[0]).sum(), list(leaves.values()), allow_unused=True)
    for (key, parameter), above in zip(layer.named_parameters(), wanted, strict=True):
        if above is not None:
            assert parameter.grad is not None, key
            assert difference(parameter.grad, above) < TOLERANCE, key
    ran = {operation for operation, kernel in registry.record().items() if kernel == "triton"}
    assert ran == set(registry.IMPLEMENTATIONS) - {"gather", "decode"} - UNUSED.get(name, set())


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_pieces_equal_the_whole(fraction: float) -> None:
    """The second piece sees the memory and the state of the first."""
    torch.manual_seed(4)
    layer = SeqBoat(6, CONFIGS["enwik8"]).eval()
    x, active = torch.randn(2, 30, 6), torch.rand(2, 30) < fraction
    with override_activation(layer, mask=active):
        expected = layer(x)
    with seqboat.using_kernels("triton"):
        with override_activation(layer, mask=active[:, :17]):
            first = layer(x[:, :17])
        with override_activation(layer, mask=active[:, 17:]):
            second = layer(x[:, 17:], state=first.state)
    joined = torch.cat([first.y, second.y], dim=1)
    assert difference(joined, expected.y) < TOLERANCE
    assert difference(second.state.ssm.states, expected.state.ssm.states) < TOLERANCE
    assert registry.record()["attention"] == "triton"


def test_padding_changes_nothing() -> None:
    torch.manual_seed(5)
    layer = SeqBoat(6, CONFIGS["text"])
    x, lengths = torch.randn(3, 20, 6), torch.tensor([20, 0, 7])
    mask = torch.arange(20) < lengths[:, None]
    expected = layer(x, mask).y
    with seqboat.using_kernels("triton"):
        found = layer(x, mask).y
    assert difference(found, expected) < TOLERANCE
    assert not found[~mask].any()
