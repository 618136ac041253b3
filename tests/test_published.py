"""The baseline of the benchmarks computes what our layer computes."""

from __future__ import annotations

import pytest
import torch

from published_layer import Published
from seqboat import EMAConfig, GAUConfig, S4DConfig, SeqBoat, SeqBoatConfig


def pair(config: SeqBoatConfig, dtype: torch.dtype) -> tuple:
    """Our layer and the baseline with the same weights, the attention large enough to matter."""
    torch.manual_seed(0)
    ours = SeqBoat(12, config).to(dtype)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "units" in name or "linear" in name or "logits" in name:
                parameter.normal_(std=0.4)
    theirs = Published(12, config).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


CONFIGS = {
    "text": SeqBoatConfig(
        init="paper", ssm=EMAConfig(d_state=4), gau=GAUConfig(d_z=8, window=16, positions="compressed")
    ),
    "original": SeqBoatConfig(init="paper", gau=GAUConfig(d_z=8, window=10, max_positions=20), prenorm=True),
    "relu2": SeqBoatConfig(init="paper", gau=GAUConfig(d_z=8, window=12, attention="relu2"), norm="batch"),
    "laplace": SeqBoatConfig(
        init="paper", gau=GAUConfig(d_z=8, window=12, attention="laplace", positions="none")
    ),
    "causal": SeqBoatConfig(
        init="paper", gau=GAUConfig(d_z=8, window=9, positions="rotary"), causal=True, prenorm=True
    ),
    "causal-original": SeqBoatConfig(init="paper", gau=GAUConfig(d_z=8, window=9), causal=True),
    "truncated": SeqBoatConfig(
        init="paper", ssm=EMAConfig(d_state=4, truncation=7), gau=GAUConfig(d_z=8, window=16)
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padded", [False, True])
def test_published_equals_ours(name: str, padded: bool) -> None:
    ours, theirs = pair(CONFIGS[name], torch.float64)
    x = torch.randn(3, 57, 12, dtype=torch.float64)
    mask = torch.arange(57) < torch.tensor([[57], [31], [3]]) if padded else None
    outputs, grads = [], []
    for layer in (ours, theirs):
        given = x.clone().requires_grad_()
        y = layer(given, mask).y
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
        (y * weights).sum().backward()
        outputs.append(y.detach())
        grads.append({"x": given.grad} | {n: p.grad for n, p in layer.named_parameters()})
    assert 0.02 < ours(x).routing.active.double().mean() < 0.9
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-9, atol=1e-9)
    assert grads[0].keys() == grads[1].keys()
    for key, grad in grads[0].items():
        torch.testing.assert_close(grads[1][key], grad, rtol=1e-8, atol=1e-9, msg=key)


def test_published_equals_ours_in_float32() -> None:
    ours, theirs = pair(CONFIGS["text"], torch.float32)
    x = torch.randn(2, 300, 12)
    # two algorithms of 300 float32 sums each
    torch.testing.assert_close(theirs(x).y, ours(x).y, rtol=1e-5, atol=2e-5)


def test_kernel_of_evaluation_follows_the_weights() -> None:
    ours, theirs = pair(CONFIGS["text"], torch.float64)
    x = torch.randn(2, 20, 12, dtype=torch.float64)
    with torch.no_grad():
        theirs(x)
        for layer in (ours, theirs):
            layer.ssm.gamma.mul_(2)
        torch.testing.assert_close(theirs(x).y, ours(x).y)
        torch.testing.assert_close(theirs(x[:, :9]).y, ours(x[:, :9]).y)


@pytest.mark.parametrize("value", [-50.0, 50.0])
def test_none_and_all_active(value: float) -> None:
    ours, theirs = pair(CONFIGS["original"], torch.float64)
    for layer in (ours, theirs):
        with torch.no_grad():
            layer.sma.router.logits.bias.copy_(torch.tensor([0.0, value]))
            layer.sma.router.logits.weight.zero_()
    x = torch.randn(2, 33, 12, dtype=torch.float64)
    torch.testing.assert_close(theirs(x).y, ours(x).y)


def test_published_refuses_what_it_is_not() -> None:
    with pytest.raises(ValueError, match="EMAConfig"):
        Published(12, SeqBoatConfig(init="paper", ssm=S4DConfig()))
    with pytest.raises(ValueError, match="span"):
        Published(12, SeqBoatConfig(init="paper", gau=GAUConfig(span="full")))
    layer = Published(12, CONFIGS["causal"])
    with pytest.raises(ValueError, match="no state"):
        layer(torch.randn(1, 3, 12), None, layer.init_state(1))
