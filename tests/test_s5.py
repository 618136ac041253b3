"""S5 against its recurrence by loops, and against the package s5-pytorch where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mixer_cases import enliven
from seqboat.mixers import MIXERS
from seqboat.mixers.ssm import S5LayerConfig, SSMLayer
from seqboat.ssm.diagonal import as_complex
from seqboat.ssm.s5 import S5, S5Config, parallel_scan

SMALL = S5Config(d_state=8, systems=2)


def recurrence(core: S5, x: Tensor) -> Tensor:
    """(time, dim), token by token, with all states and their conjugates."""
    poles = torch.complex(-core.log_real.exp(), core.imag)
    b = as_complex(core.b)
    dt = core.log_dt.exp()
    poles, b, dt = torch.cat([poles, poles.conj()]), torch.cat([b, b.conj()]), torch.cat([dt, dt])
    decay = torch.exp(dt * poles)
    drive = ((decay - 1) / poles)[:, None] * b
    total = core.skip * x
    for direction in range(core.directions):
        c = as_complex(core.c[direction])
        c = torch.cat([c, c.conj()], dim=1)
        state, outputs = torch.zeros_like(poles), []
        for token in x if direction == 0 else x.flip(0):
            state = decay * state + drive @ token.to(drive.dtype)
            outputs.append((c @ state).real)
        one = torch.stack(outputs)
        total = total + (one if direction == 0 else one.flip(0))
    return total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 13])
def test_equals_its_recurrence(causal: bool, length: int) -> None:
    torch.manual_seed(0)
    core = enliven(SMALL.build(5, causal))
    x = torch.randn(2, length, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    parameters = {"x": x, **dict(core.named_parameters())}
    results = []
    for y in (core(x).y, torch.stack([recurrence(core, row) for row in x])):
        grads = torch.autograd.grad((y * weight).sum(), list(parameters.values()))
        results.append((y, dict(zip(parameters, grads, strict=True))))
    torch.testing.assert_close(results[0][0], results[1][0])
    for key, grad in results[1][1].items():
        torch.testing.assert_close(results[0][1][key], grad, msg=key)


@pytest.mark.parametrize("length", range(18))
def test_parallel_scan_equals_the_loop(length: int) -> None:
    torch.manual_seed(length)
    v = torch.randn(2, length, 3, dtype=torch.complex128)
    q = 0.9 * torch.exp(1j * torch.randn(3, dtype=torch.float64))
    for start in (None, torch.randn(2, 3, dtype=torch.complex128)):
        state = torch.zeros(2, 3, dtype=torch.complex128) if start is None else start
        states = []
        for t in range(length):
            state = q * state + v[:, t]
            states.append(state)
        expected = torch.stack(states, dim=1) if states else v
        torch.testing.assert_close(parallel_scan(v, q, start), expected)


def test_layer_gates_its_activations() -> None:
    torch.manual_seed(0)
    layer = enliven(S5LayerConfig(ssm=SMALL, norm="layer").build(4))
    assert isinstance(layer, SSMLayer) and isinstance(layer.ssm, S5)
    x = torch.randn(9, 4, dtype=torch.float64)
    hidden = recurrence(layer.ssm, layer.norm(x))
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    expected = x + hidden / (1 + torch.exp(-(hidden @ layer.out.weight.T + layer.out.bias)))
    torch.testing.assert_close(layer(x[None]).y[0], expected)


def test_defaults_are_those_of_the_paper() -> None:
    config = MIXERS["s5"]()
    assert config.ssm == S5Config(d_state=256, systems=8, dt_min=0.001, dt_max=0.1)
    assert (config.norm, config.prenorm, config.gate) == ("batch", True, "sigmoid")


def test_states_start_as_copies_of_hippo() -> None:
    core = SMALL.build(5, causal=True)
    assert core.imag[:2].equal(core.imag[2:]) and (core.log_real.exp() - 0.5).abs().max() < 1e-6
    # turned by a unitary matrix, of which half of the columns are kept
    wide = S5Config(d_state=256, systems=4).build(400, causal=True)
    for parameter, variance in ((wide.b, 1 / 400), (wide.c, 2 / 256)):
        mean = as_complex(parameter.detach()).abs().square().mean()
        assert float(mean) == pytest.approx(variance, rel=0.05)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"multiple of 2 \* systems = 6 \(conjugate pairs\), got 8"):
        S5Config(d_state=8, systems=3)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_another_implementation(causal: bool) -> None:
    """The weights of s5-pytorch, which keeps both of each conjugate pair and takes the real part."""
    package: Any = pytest.importorskip("s5", reason="the package s5-pytorch is not installed")
    torch.manual_seed(0)
    other = package.S5(6, 8, bidir=not causal)
    ours = S5Config(d_state=16, systems=1).build(6, causal).double()
    other.double()  # leaves complex numbers as they are
    seq = other.seq
    for name, parameter in seq.named_parameters():
        if parameter.is_complex():
            setattr(seq, name, torch.nn.Parameter(parameter.detach().to(torch.complex128)))
    # its 8 states need no conjugates: here each is one of a pair, read at half
    with torch.no_grad():
        ours.log_dt.copy_(seq.log_step.flatten())
        ours.log_real.copy_(torch.log(-seq.Lambda.real))
        ours.imag.copy_(seq.Lambda.imag)
        ours.b.copy_(seq.B)
        c = torch.stack(seq.C.split(8, dim=1)) if not causal else seq.C[None]
        ours.c.copy_(torch.view_as_real(0.5 * c))
        ours.skip.copy_(seq.D)
    x = torch.randn(2, 21, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(x).y, other(x))
