"""A layer of an S4D model against its recurrence, token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mixer_cases import enliven
from seqboat.mixers import MIXERS
from seqboat.mixers.ssm import S4DLayerConfig, SSMLayer
from seqboat.ssm.diagonal import as_complex
from seqboat.ssm.s4d import S4D, S4DConfig, initial_poles

CORE = S4DConfig(d_state=6, block=8)
CONFIGS = {
    "legs": S4DLayerConfig(ssm=CORE),
    "lin-post": S4DLayerConfig(ssm=replace(CORE, init="lin"), prenorm=False, norm="rms"),
    "inv-sigmoid": S4DLayerConfig(ssm=replace(CORE, init="inv"), gate="sigmoid"),
    "causal": S4DLayerConfig(ssm=CORE, causal=True),
    "published": S4DLayerConfig(ssm=replace(CORE, init="inv-lin", rule="bilinear")),
    "published-causal": S4DLayerConfig(ssm=replace(CORE, init="inv-lin", rule="bilinear"), causal=True),
}


def recurrence(core: S4D, x: Tensor) -> Tensor:
    """(time, dim): x' = A x + u, y = 2 Re(C x), with u held constant during a step."""
    total = core.skip * x
    for direction in range(core.directions):
        poles = torch.complex(-core.log_real[direction].exp(), core.imag[direction])
        dt = core.log_dt[direction].exp()[:, None]
        if core.config.rule == "zoh":
            decay = torch.exp(dt * poles)
            drive = (decay - 1) / poles
        else:
            decay = (1 + dt * poles / 2) / (1 - dt * poles / 2)
            drive = dt / (1 - dt * poles / 2)
        read = as_complex(core.c[direction])
        state, outputs = torch.zeros_like(poles), []
        for token in x if direction == 0 else x.flip(0):
            state = decay * state + drive * token[:, None]
            outputs.append(2 * (read * state).sum(dim=-1).real)
        one = torch.stack(outputs)
        total = total + (one if direction == 0 else one.flip(0))
    return total


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def layer_by_hand(layer: SSMLayer, x: Tensor) -> Tensor:
    """One sequence (time, dim) by the equations of the layer."""
    core = layer.ssm
    assert isinstance(core, S4D)
    hidden = gelu(recurrence(core, layer.norm(x) if layer.config.prenorm else x))
    out = hidden @ layer.out.weight.T + layer.out.bias
    if layer.config.gate == "glu":
        out = out[:, : layer.d_model] / (1 + torch.exp(-out[:, layer.d_model :]))
    else:
        out = hidden / (1 + torch.exp(-out))
    return x + out if layer.config.prenorm else layer.norm(x + out)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_its_recurrence(name: str) -> None:
    torch.manual_seed(0)
    layer = enliven(CONFIGS[name].build(5))
    x = torch.randn(2, 21, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 21, 5, dtype=torch.float64)
    parameters = {"x": x, **dict(layer.named_parameters())}
    results = []
    for y in (layer(x).y, torch.stack([layer_by_hand(layer, row) for row in x])):
        grads = torch.autograd.grad((y * weight).sum(), list(parameters.values()))
        results.append((y, dict(zip(parameters, grads, strict=True))))
    torch.testing.assert_close(results[0][0], results[1][0])
    for key, grad in results[1][1].items():
        torch.testing.assert_close(results[0][1][key], grad, msg=key)


@pytest.mark.parametrize("causal", [False, True])
def test_half_of_the_kernels_start_inverse_and_half_linear(causal: bool) -> None:
    """As published: the two directions of a bidirectional layer, or the halves of the channels."""
    core = S4DConfig(d_state=8, init="inv-lin").build(6, causal)
    found = torch.complex(-core.log_real.exp(), core.imag).flatten(0, 1)
    half = len(found) // 2
    for part, name in ((found[:half], "inv"), (found[half:], "lin")):
        torch.testing.assert_close(part, initial_poles(name, 8).to(found.dtype).expand_as(part))  # type: ignore[arg-type]


def test_defaults_are_those_of_the_paper() -> None:
    config = MIXERS["s4d"]()
    assert config == S4DLayerConfig(ssm=S4DConfig(d_state=64, init="legs", dt_min=0.001, dt_max=0.1))
    assert not config.causal and config.gate == "glu"


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="gate must be one of glu, sigmoid; got 'tanh'"):
        S4DLayerConfig(gate="tanh")  # type: ignore[arg-type]
    layer = S4DLayerConfig(ssm=CORE).build(4)
    with pytest.raises(ValueError, match="this S4D layer is bidirectional: only causal layers carry a state"):
        layer.init_state(2)


def test_dropout_falls_in_training_only() -> None:
    torch.manual_seed(0)
    layer = S4DLayerConfig(ssm=CORE, dropout=0.5).build(8)
    x = torch.randn(1, 9, 8)
    assert not layer(x).y.equal(layer(x).y)
    assert layer.eval()(x).y.equal(layer(x).y)
