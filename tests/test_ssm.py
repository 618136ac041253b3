"""Every state-space kernel against its recurrence by loops, its start, and the layers of pure state-space models."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mixer_cases import enliven
from oracles import assert_same_with_gradients
from seqboat import SeqBoat, SeqBoatConfig
from seqboat.compat.layers import published_config, to_published
from seqboat.mixers import MIXERS
from seqboat.mixers.ssm import LiquidS4LayerConfig, S4DLayerConfig, S4LayerConfig, S5LayerConfig, SSMLayer
from seqboat.recipes import find_recipe
from seqboat.reference import KERNELS
from seqboat.ssm.conv import EMAConv, EMAConvConfig
from seqboat.ssm.diagonal import EMAConfig, S4DConfig, as_complex, initial_poles
from seqboat.ssm.hippo import legs, legs_modes
from seqboat.ssm.liquid_s4 import LiquidS4Config
from seqboat.ssm.s4 import PIECE, S4, S4Config
from seqboat.ssm.s5 import S5Config, parallel_scan
from seqboat.training.settings_io import override, read_config, to_json

DIAGONAL = S4DConfig(d_state=6, block=8)
LIQUID = LiquidS4Config(d_state=6, block=8)
SHARED = S5Config(d_state=8, systems=2)
KERNEL_FORMS: list[Any] = [
    EMAConfig(d_state=3, block=8),
    EMAConfig(d_state=3, truncation=6),
    EMAConvConfig(d_state=3, conv=2, block=8),
    EMAConvConfig(d_state=3, conv=9, truncation=6),
    DIAGONAL,
    replace(DIAGONAL, init="lin"),
    replace(DIAGONAL, init="inv-lin", rule="bilinear"),
    S4Config(d_state=6),
    S4Config(d_state=6, systems=2),
    SHARED,
    LIQUID,
    replace(LIQUID, order=4),
    replace(LIQUID, kernel="kb"),
    replace(LIQUID, kernel="kb", order=3),
    replace(LIQUID, order=1),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 21])
@pytest.mark.parametrize("config", KERNEL_FORMS, ids=str)
def test_equals_its_loop(config: Any, length: int, causal: bool) -> None:
    """Token by token, and the gradients of the inputs and of every parameter."""
    torch.manual_seed(0)
    core = enliven(config.build(4, causal))
    if isinstance(config, LiquidS4Config):
        with torch.no_grad():
            core.b.mul_(20)  # else powers of Bbar are too small to see
    x = torch.randn(2, length, 4, dtype=torch.float64, requires_grad=True)
    params = dict(core.named_parameters())
    expected = torch.stack([KERNELS[type(config)](row, params, config)[0] for row in x])
    assert_same_with_gradients(core, x, [core(x).y, expected])


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def layer_by_hand(layer: SSMLayer, x: Tensor) -> Tensor:
    """One sequence (time, dim) by the equations of the layer."""
    config: Any = layer.config
    params = dict(layer.ssm.named_parameters())
    core = KERNELS[type(config.ssm)](layer.norm(x) if config.prenorm else x, params, config.ssm)[0]
    hidden = gelu(core)
    out = hidden @ layer.out.weight.T + layer.out.bias
    if config.gate == "glu":
        out = out[:, : layer.d_model] / (1 + torch.exp(-out[:, layer.d_model :]))
    else:
        out = hidden / (1 + torch.exp(-out))
    return x + out if config.prenorm else layer.norm(x + out)


@pytest.mark.parametrize(
    "config",
    [
        S4DLayerConfig(ssm=DIAGONAL),
        S4DLayerConfig(ssm=replace(DIAGONAL, init="lin"), prenorm=False, norm="rms"),
        S4DLayerConfig(ssm=replace(DIAGONAL, init="inv"), gate="sigmoid", causal=True),
        S5LayerConfig(ssm=SHARED, norm="layer"),
    ],
    ids=str,
)
def test_a_layer_equals_its_equations(config: Any) -> None:
    torch.manual_seed(0)
    layer = enliven(config.build(5))
    x = torch.randn(2, 21, 5, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(layer, x, [layer(x).y, torch.stack([layer_by_hand(layer, row) for row in x])])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: S4Config(d_state=5), "d_state of S4 must be even (conjugate pairs), got 5"),
        (lambda: S4Config(dt_min=0.2), "must satisfy 0 < dt_min <= dt_max, got 0.2, 0.1"),
        (lambda: S4Config(systems=4).build(6, True), "d_model must be a multiple of systems = 4, got 6"),
        (lambda: S4DLayerConfig(gate="tanh"), "gate must be one of glu, sigmoid; got 'tanh'"),  # type: ignore[arg-type]
        (lambda: S5Config(d_state=8, systems=3), "multiple of 2 * systems = 6 (conjugate pairs), got 8"),
        (lambda: LiquidS4Config(kernel="polyb"), "kernel must be one of kb, pb; got 'polyb'"),  # type: ignore[arg-type]
        (lambda: LiquidS4Config(order=0), "order must be an integer >= 1, got 0"),
        (lambda: EMAConvConfig(conv=1), "conv must be at least 2, got 1; 'ema' has no convolution"),
        (lambda: to_published(EMAConv(8, causal=True)), "the published layer has an EMA, not EMAConv"),
        (
            lambda: published_config(8, SeqBoatConfig(ssm=EMAConvConfig(), init="paper")),
            "the published layer has an EMA, not EMAConvConfig",
        ),
    ],
)
def test_each_names_the_wrong_argument(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_defaults_are_those_of_the_papers() -> None:
    assert MIXERS["s4"]() == S4LayerConfig(ssm=S4Config(d_state=64, dt_min=0.001, dt_max=0.1), gate="glu")
    s4d = S4DConfig(d_state=64, init="legs", dt_min=0.001, dt_max=0.1)
    assert MIXERS["s4d"]() == S4DLayerConfig(ssm=s4d, gate="glu", causal=False)
    s5 = S5Config(d_state=256, systems=8, dt_min=0.001, dt_max=0.1)
    assert MIXERS["s5"]() == S5LayerConfig(ssm=s5, norm="batch", prenorm=True, gate="sigmoid")
    liquid = LiquidS4Config(d_state=64, order=2, kernel="pb")
    assert MIXERS["liquid-s4"]() == LiquidS4LayerConfig(ssm=liquid, gate="glu")


# S4


def make(d_model: int, config: S4Config, causal: bool, seed: int = 0) -> S4:
    """A core with weights drawn in float64, so that it starts at the exact matrices."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return config.build(d_model, causal)
    finally:
        torch.set_default_dtype(before)


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


# S4D and S5


@pytest.mark.parametrize("causal", [False, True])
def test_half_of_the_kernels_start_inverse_and_half_linear(causal: bool) -> None:
    """As published: the two directions of a bidirectional layer, or the halves of the channels."""
    core = S4DConfig(d_state=8, init="inv-lin").build(6, causal)
    found = torch.complex(-core.log_real.exp(), core.imag).flatten(0, 1)
    half = len(found) // 2
    for part, name in ((found[:half], "inv"), (found[half:], "lin")):
        torch.testing.assert_close(part, initial_poles(name, 8).to(found.dtype).expand_as(part))  # type: ignore[arg-type]


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


def test_states_start_as_copies_of_hippo() -> None:
    core = SHARED.build(5, causal=True)
    assert core.imag[:2].equal(core.imag[2:]) and (core.log_real.exp() - 0.5).abs().max() < 1e-6
    # turned by a unitary matrix, of which half of the columns are kept
    wide = S5Config(d_state=256, systems=4).build(400, causal=True)
    for parameter, variance in ((wide.b, 1 / 400), (wide.c, 2 / 256)):
        mean = as_complex(parameter.detach()).abs().square().mean()
        assert float(mean) == pytest.approx(variance, rel=0.05)


@pytest.mark.parametrize("causal", [False, True])
def test_s5_equals_another_implementation(causal: bool) -> None:
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


# Liquid-S4 and the short convolution


def test_second_order_is_the_liquid_system_between_two_tokens() -> None:
    """Two tokens of x_t = (Abar + Bbar u_t) x_{t-1} + Bbar u_t have no products but of successive inputs."""
    torch.manual_seed(0)
    core = enliven(replace(LIQUID, kernel="kb").build(4, causal=True))
    u = torch.randn(2, 4, dtype=torch.float64)
    poles = torch.complex(-core.log_real.exp(), core.imag)
    decay = torch.exp(core.log_dt.exp()[:, None] * poles)
    drive = (decay - 1) / poles * as_complex(core.b)
    first = drive * u[0, :, None]
    second = (decay + drive * u[1, :, None]) * first + drive * u[1, :, None]
    read = as_complex(core.c[0])
    expected = torch.stack([2 * (read * s).sum(dim=-1).real for s in (first, second)]) + core.skip * u
    torch.testing.assert_close(core(u[None]).y[0], expected)


def test_resetting_is_the_same_as_making() -> None:
    torch.manual_seed(3)
    kernel = EMAConv(5, causal=True)
    made = {name: value.clone() for name, value in kernel.state_dict().items()}
    torch.manual_seed(3)
    kernel.reset_parameters()
    for name, value in kernel.state_dict().items():
        # drawn again into other memory, where the last bits may differ
        torch.testing.assert_close(value, made[name], msg=name)


def test_settings(tmp_path: Path) -> None:
    layer = SeqBoat(8, ssm="ema-conv", causal=True, d_state=3)
    assert isinstance(layer.ssm, EMAConv) and layer.ssm.conv == 4 and "conv=4" in repr(layer)
    recipe = find_recipe("recall")()
    config = override(recipe, ["--model.mixer.ssm=ema-conv", "--model.mixer.ssm.conv=3"])
    assert config.model.mixer.ssm == EMAConvConfig(conv=3)  # type: ignore[attr-defined]
    path = tmp_path / "run.json"
    path.write_text(to_json(config))
    assert read_config(path, recipe) == config
