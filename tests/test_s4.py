"""S4 against the dense state-space recurrence, and its start against HiPPO-LegS."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mixer_cases import enliven
from seqboat.mixers import MIXERS
from seqboat.mixers.ssm import S4LayerConfig
from seqboat.ssm.diagonal import as_complex
from seqboat.ssm.hippo import legs, legs_modes
from seqboat.ssm.s4 import PIECE, S4, S4Config


def make(d_model: int, config: S4Config, causal: bool, seed: int = 0) -> S4:
    """A core with weights drawn in float64, so that it starts at the exact matrices."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return config.build(d_model, causal)
    finally:
        torch.set_default_dtype(before)


def dense(core: S4, channel: int) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and C of one channel with every state written out: the pairs, then their conjugates."""
    poles = torch.complex(-core.log_real[channel].exp(), core.imag[channel])
    p, b = (as_complex(part[channel]) for part in (core.p, core.b))
    c = as_complex(core.c[:, channel])
    poles, p, b, c = (torch.cat([part, part.conj()], dim=-1) for part in (poles, p, b, c))
    return torch.diag(poles) - p[:, None] * p.conj(), b, c


def taps(a: Tensor, b: Tensor, c: Tensor, dt: Tensor, length: int) -> Tensor:
    """C Abar^l Bbar, one product after the other, with the bilinear rule."""
    one = torch.eye(len(a), dtype=a.dtype)
    step = torch.linalg.solve(one - dt / 2 * a, one + dt / 2 * a)
    state = torch.linalg.solve(one - dt / 2 * a, dt * b)
    outputs = []
    for _ in range(length):
        outputs.append((c @ state).real)
        state = step @ state
    return torch.stack(outputs, dim=-1)


@pytest.mark.parametrize("length", [1, 2, 63, 200])
def test_kernel_equals_the_hippo_recurrence(length: int) -> None:
    """At the start: 64 states with the real matrices of HiPPO-LegS itself."""
    core = make(5, S4Config(d_state=64), causal=True)
    a, b = legs(64)
    vectors = legs_modes(64).vectors
    kernel = core.kernel(length)[0]
    for channel in range(5):
        c = as_complex(core.c[0, channel])
        real = 2 * (c @ vectors.mH).real
        expected = taps(a, b, real, core.log_dt[channel].exp(), length)
        torch.testing.assert_close(kernel[channel], expected, rtol=0, atol=1e-10)


def test_single_precision_kernel() -> None:
    core = make(4, S4Config(d_state=64), causal=True)
    expected = core.kernel(1000)
    torch.testing.assert_close(core.float().kernel(1000).double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [5, 70])
def test_layer_equals_the_dense_recurrence(causal: bool, length: int) -> None:
    """Away from the start, with gradients: every parameter is in the recurrence."""
    core = enliven(make(3, S4Config(d_state=6), causal))
    x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    parameters = {"x": x, **dict(core.named_parameters())}
    results = []
    for fast in (True, False):
        if fast:
            y = core(x).y
        else:
            channels = []
            for channel in range(3):
                kernel = taps(*dense(core, channel), core.log_dt[channel].exp(), length)
                inputs = x[..., channel]
                total = core.skip[channel] * inputs
                for lag in range(length):
                    total = total + kernel[0, lag] * torch.nn.functional.pad(inputs, (lag, 0))[:, :length]
                    if not causal:
                        total = total + kernel[1, lag] * torch.nn.functional.pad(inputs, (0, lag))[:, lag:]
                channels.append(total)
            y = torch.stack(channels, dim=-1)
        grads = torch.autograd.grad((y * weight).sum(), list(parameters.values()))
        results.append((y, dict(zip(parameters, grads, strict=True))))
    torch.testing.assert_close(results[0][0], results[1][0])
    for key, grad in results[1][1].items():
        torch.testing.assert_close(results[0][1][key], grad, msg=key)


def test_gradients_reach_a_carried_state() -> None:
    core = enliven(make(3, S4Config(d_state=4), causal=True))
    x = torch.randn(2, 2 * PIECE + 9, 3, dtype=torch.float64)
    mask = torch.arange(x.shape[1]) < torch.tensor([[x.shape[1]], [PIECE + 3]])
    weight = torch.randn_like(x) * mask[..., None]
    whole = torch.autograd.grad((core(x, mask).y * weight).sum(), list(core.parameters()))
    first = core(x[:, :50], mask[:, :50])
    second = core(x[:, 50:], mask[:, 50:], first.state)
    y = torch.cat([first.y, second.y], dim=1)
    pieces = torch.autograd.grad((y * weight).sum(), list(core.parameters()))
    for name, one, two in zip(dict(core.named_parameters()), pieces, whole, strict=True):
        torch.testing.assert_close(one, two, msg=name)


def test_hippo_is_normal_plus_rank_one() -> None:
    a, b = legs(8)
    assert a[0].tolist() == [-1, *[0] * 7] and b[1] == 3**0.5
    poles, vectors = legs_modes(8)
    assert (poles.imag > 0).all() and (poles.real == -0.5).all()
    both = torch.cat([vectors, vectors.conj()], dim=1)
    torch.testing.assert_close(both.mH @ both, torch.eye(8, dtype=torch.complex128))
    normal = (both * torch.cat([poles, poles.conj()])) @ both.mH
    torch.testing.assert_close(normal, (a + 0.5 * b[:, None] * b).to(torch.complex128))


def test_channels_share_systems_in_turn() -> None:
    """Two systems for six channels are as six, with the parameters of the two repeated."""
    shared = make(6, S4Config(d_state=4, systems=2), causal=True)
    separate = make(6, S4Config(d_state=4), causal=True)
    with torch.no_grad():
        for name, parameter in separate.named_parameters():
            given = getattr(shared, name)
            parameter.copy_(given if given.shape == parameter.shape else torch.cat([given] * 3))
    torch.testing.assert_close(shared.kernel(9), separate.kernel(9))
    assert shared.b.shape == (2, 2, 2)
    with pytest.raises(ValueError, match="d_model must be a multiple of systems = 4, got 6"):
        S4Config(systems=4).build(6, True)


def test_defaults_are_those_of_the_paper() -> None:
    assert MIXERS["s4"]() == S4LayerConfig(ssm=S4Config(d_state=64, dt_min=0.001, dt_max=0.1), gate="glu")


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"d_state of S4 must be even \(conjugate pairs\), got 5"):
        S4Config(d_state=5)
    with pytest.raises(ValueError, match=r"must satisfy 0 < dt_min <= dt_max, got 0\.2, 0\.1"):
        S4Config(dt_min=0.2)
