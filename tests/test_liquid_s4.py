"""Liquid-S4 against its equations by loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mixer_cases import enliven
from seqboat.mixers import MIXERS
from seqboat.mixers.ssm import LiquidS4LayerConfig
from seqboat.ssm.diagonal import as_complex
from seqboat.ssm.liquid_s4 import LiquidS4, LiquidS4Config

BASE = LiquidS4Config(d_state=6, block=8)
CONFIGS = {
    "pb-2": BASE,
    "pb-4": replace(BASE, order=4),
    "kb-2": replace(BASE, kernel="kb"),
    "kb-3": replace(BASE, kernel="kb", order=3),
    "linear": replace(BASE, order=1),
}


def recurrence(core: LiquidS4, x: Tensor) -> Tensor:
    """(time, dim): one state per order, token by token."""
    total = core.skip * x
    poles = torch.complex(-core.log_real.exp(), core.imag)
    decay = torch.exp(core.log_dt.exp()[:, None] * poles)
    drive = (decay - 1) / poles * as_complex(core.b)
    for direction in range(core.directions):
        read = as_complex(core.c[direction])
        tokens = x if direction == 0 else x.flip(0)
        outputs = [torch.zeros_like(token) for token in tokens]
        for order in range(1, core.order + 1):
            state = torch.zeros_like(poles)
            for t in range(len(tokens)):
                together = torch.ones_like(tokens[0])
                for age in range(order):
                    together = together * (tokens[t - age] if t >= age else 0)
                if order > 1 and core.config.kernel == "pb":
                    state = torch.zeros_like(poles)
                state = decay * state + drive**order * together[:, None]
                outputs[t] = outputs[t] + 2 * (read * state).sum(dim=-1).real
        one = torch.stack(outputs)
        total = total + (one if direction == 0 else one.flip(0))
    return total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_its_equations(name: str, causal: bool) -> None:
    torch.manual_seed(0)
    core = enliven(CONFIGS[name].build(4, causal))
    with torch.no_grad():
        core.b.mul_(20)  # else powers of Bbar are too small to see
    x = torch.randn(2, 19, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    parameters = {"x": x, **dict(core.named_parameters())}
    results = []
    for y in (core(x).y, torch.stack([recurrence(core, row) for row in x])):
        grads = torch.autograd.grad((y * weight).sum(), list(parameters.values()))
        results.append((y, dict(zip(parameters, grads, strict=True))))
    torch.testing.assert_close(results[0][0], results[1][0])
    for key, grad in results[1][1].items():
        torch.testing.assert_close(results[0][1][key], grad, msg=key)


def test_second_order_is_the_liquid_system_between_two_tokens() -> None:
    """Two tokens of x_t = (Abar + Bbar u_t) x_{t-1} + Bbar u_t have no products but of successive inputs."""
    torch.manual_seed(0)
    core = enliven(replace(BASE, kernel="kb").build(4, causal=True))
    u = torch.randn(2, 4, dtype=torch.float64)
    poles = torch.complex(-core.log_real.exp(), core.imag)
    decay = torch.exp(core.log_dt.exp()[:, None] * poles)
    drive = (decay - 1) / poles * as_complex(core.b)
    first = drive * u[0, :, None]
    second = (decay + drive * u[1, :, None]) * first + drive * u[1, :, None]
    read = as_complex(core.c[0])
    expected = torch.stack([2 * (read * s).sum(dim=-1).real for s in (first, second)]) + core.skip * u
    torch.testing.assert_close(core(u[None]).y[0], expected)


def test_defaults_are_those_of_the_paper() -> None:
    expected = LiquidS4LayerConfig(ssm=LiquidS4Config(d_state=64, order=2, kernel="pb"), gate="glu")
    assert MIXERS["liquid-s4"]() == expected


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="kernel must be one of kb, pb; got 'polyb'"):
        LiquidS4Config(kernel="polyb")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="order must be an integer >= 1, got 0"):
        LiquidS4Config(order=0)
