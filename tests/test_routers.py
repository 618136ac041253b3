"""Routers: decisions by hand, temperatures, noise, extreme values, statistics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_same_numbers
from seqboat.core.mixer import Routing, activation
from seqboat.layers.adapters import PaddedUnit
from seqboat.layers.routers import (
    ROUTERS,
    AlwaysActive,
    GumbelConfig,
    GumbelSoftmax,
    Router,
    SigmoidConfig,
    SigmoidRouter,
    TemperedSigmoid,
    TemperedSoftmax,
    TemperedSoftmaxConfig,
    TopKConfig,
    XMoE,
    XMoEConfig,
    set_training_step,
)
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.layers.sma import SparseModularActivation

every_router = pytest.mark.parametrize("config", ROUTERS.values(), ids=ROUTERS.keys())


def set_linear(layer: nn.Linear, weight: list[list[float]], bias: list[float] | None = None) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias))


def test_tempered_softmax_by_hand() -> None:
    router = TemperedSoftmax(2)
    set_linear(router.logits, [[1.0, 0.0], [0.0, 1.0]], [0.5, 0.0])
    nn.init.constant_(router.log_temperature, math.log(2.0))
    x = torch.tensor([[1.0, 3.0], [3.0, 1.0], [0.0, 0.5]])
    active, probs = router(x)
    # softmax over (skip, activate) of (1.5, 3), (3.5, 1) and the tie (0.5, 0.5), each divided by 2
    expected = torch.softmax(torch.tensor([[1.5, 3.0], [3.5, 1.0], [0.5, 0.5]]) / 2, dim=-1)[:, 1:]
    torch.testing.assert_close(probs, expected)
    assert active.tolist() == [[True], [False], [False]]
    torch.testing.assert_close(router(x).confidence, torch.tensor([[probs[0, 0].item()], [0.0], [0.0]]))


def test_tempered_softmax_of_several_modules() -> None:
    torch.manual_seed(0)
    router = TemperedSoftmax(5, modules=3)
    nn.init.normal_(router.logits.weight)
    nn.init.normal_(router.log_temperature)
    x = torch.randn(4, 7, 5)
    logits = router.logits(x).view(4, 7, 3, 2) / router.log_temperature.exp()[:, None]
    best = logits.softmax(dim=-1)
    active, probs = router(x)
    torch.testing.assert_close(probs, best[..., 1])
    assert active.equal(best.argmax(dim=-1) == 1)


def test_sigmoid_by_hand() -> None:
    router = SigmoidRouter(1)
    set_linear(router.logits, [[2.0]], [-1.0])
    active, probs = router(torch.tensor([[0.0], [0.5], [1.0]]))
    torch.testing.assert_close(probs, torch.sigmoid(torch.tensor([[-1.0], [0.0], [1.0]])))
    assert active.tolist() == [[False], [False], [True]]


def test_sigmoid_with_a_learned_temperature() -> None:
    router = SigmoidConfig(temperature_scale=0.5).build(16)
    assert isinstance(router, TemperedSigmoid) and router.temperature.item() == pytest.approx(2.0)
    with torch.no_grad():
        router.logits.weight.fill_(0.25)
        router.logits.bias.fill_(-1.0)
    # logits 3 and -5, at temperature 2
    active, probs = router(torch.tensor([[1.0] * 16, [-1.0] * 16]))
    torch.testing.assert_close(probs, torch.sigmoid(torch.tensor([[1.5], [-2.5]])))
    assert active.tolist() == [[True], [False]]


@pytest.mark.parametrize("step", [0, 1, 1000, 100_000, 277_258, 277_259, 10_000_000])
def test_gumbel_temperature_falls_with_the_training_step(step: int) -> None:
    layer = SeqBoat(4, SeqBoatConfig(init="paper", router=GumbelConfig()))
    router = layer.sma.router
    assert isinstance(router, GumbelSoftmax)
    set_training_step(layer, step)
    assert float(router.temperature) == pytest.approx(max(2 * 0.999995**step, 0.5), rel=1e-12)
    # the step is saved with the weights
    other = SeqBoat(4, SeqBoatConfig(init="paper", router=GumbelConfig()))
    other.load_state_dict(layer.state_dict())
    assert isinstance(other.sma.router, GumbelSoftmax)
    assert other.sma.router.temperature.equal(router.temperature)


def test_the_training_step_survives_a_change_of_type() -> None:
    router = GumbelSoftmax(4)
    set_training_step(router, 123_457)
    expected = 2 * 0.999995**123_457
    assert float(router.to(torch.bfloat16).temperature) == pytest.approx(expected, rel=1e-9)


@torch.no_grad()
def test_gumbel_noise_in_training_only() -> None:
    router = GumbelSoftmax(3)
    x = torch.zeros(20_000, 3)
    router.eval()
    assert router(x).probs.equal(router(x).probs)
    torch.testing.assert_close(router(x).probs, torch.full((20_000, 1), 0.5))
    router.train()
    torch.manual_seed(0)
    first = router(x)
    assert not first.probs.equal(router(x).probs)
    # the logit is logistic noise divided by the temperature 2: variance pi^2 / 3 / 4, half of it positive
    noise = torch.logit(first.probs.double())
    assert float(first.active.double().mean()) == pytest.approx(0.5, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 12, rel=0.05)


def test_gumbel_at_low_temperature_decides_by_the_noisy_logit() -> None:
    router = GumbelSoftmax(1)
    set_linear(router.logits, [[0.0], [1.0]], [0.0, 0.0])
    set_training_step(router, 10_000_000)
    router.train()
    torch.manual_seed(0)
    rate = float(router(torch.ones(20_000, 1)).active.double().mean())
    # P(u + logistic > 0) = sigmoid(u), whatever the temperature
    assert rate == pytest.approx(1 / (1 + math.exp(-1)), abs=0.02)


def test_xmoe_by_hand() -> None:
    router = XMoE(2, modules=2, d_route=2)
    set_linear(router.project, [[1.0, 0.0], [0.0, 1.0]])
    with torch.no_grad():
        router.options.copy_(torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]]))
    nn.init.constant_(router.log_temperature, math.log(0.5))
    x = torch.tensor([[5.0, 0.0], [0.0, 7.0], [-1.0, 0.0], [3.0, 4.0]])
    cosines = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 1.0], [0.6, 0.8, -0.6]])
    active, probs = router(x)
    torch.testing.assert_close(probs, torch.softmax(cosines / 0.5, dim=-1)[:, 1:])
    assert active.tolist() == [[False, False], [True, False], [False, True], [True, False]]


def best_of_row(score: Tensor, allowed: Tensor, share: float) -> list[int]:
    """The places of the largest scores among the allowed ones, a fraction of these rounded up."""
    places = [t for t in range(len(score)) if allowed[t]]
    count = math.ceil(share * len(places) - 1e-9)
    return sorted(sorted(places, key=lambda t: -float(score[t]))[:count])


@pytest.mark.parametrize("capacity", [0.05, 0.3, 0.5, 1.0])
@torch.no_grad()
def test_a_share_of_each_row(capacity: float) -> None:
    torch.manual_seed(0)
    layer = SparseModularActivation(
        {"one": PaddedUnit(nn.Linear(6, 6)), "two": nn.Linear(6, 6)}, 6, TopKConfig(capacity=capacity)
    )
    nn.init.normal_(layer.router.get_parameter("logits.weight"))
    x, mask = torch.randn(5, 20, 6), torch.rand(5, 20) < torch.tensor([[1.0], [0.7], [0.5], [0.1], [0.0]])
    x[0, 3] = math.nan  # takes no part
    allowed = mask & x.isfinite().all(dim=-1)
    probs = layer.router(x).probs
    for training in (True, False):  # both directions are known in this layer
        active = layer.train(training)(x, mask).routing.active
        for row in range(5):
            for i in range(2):
                chosen = active[row, :, i].nonzero().flatten().tolist()
                assert chosen == best_of_row(probs[row, :, i], allowed[row], capacity)


@torch.no_grad()
def test_causal_layers_learn_the_border_of_the_share() -> None:
    torch.manual_seed(0)
    layer = SparseModularActivation(
        {"one": nn.Linear(6, 6), "two": nn.Linear(6, 6)}, 6, TopKConfig(capacity=0.25)
    ).train()
    assert layer.causal
    nn.init.normal_(layer.router.get_parameter("logits.weight"))
    for _ in range(60):
        layer(torch.randn(16, 64, 6))
    layer.eval()
    x = torch.randn(64, 64, 6)
    out = layer(x)
    rate = out.routing.active.double().mean(dim=(0, 1))
    assert (rate - 0.25).abs().max() < 0.03
    # each token is decided on its own: later ones change nothing
    assert layer(x[:, :10]).routing.active.equal(out.routing.active[:, :10])
    # not moved by looking
    border = layer.router.get_buffer("border").clone()
    layer(x)
    assert layer.router.get_buffer("border").equal(border)


def test_always_active() -> None:
    active, probs = AlwaysActive(3, modules=2)(torch.randn(4, 5, 3))
    assert active.shape == probs.shape == (4, 5, 2)
    assert active.all() and (probs == 1).all()


@every_router
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_single_precision_at_least(config: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    router = config().build(6, 2)
    for parameter in router.parameters():
        nn.init.normal_(parameter)
    router.eval()
    x = torch.randn(3, 4, 6)
    expected = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        inside = router(x)
    assert inside.probs.dtype == torch.float32
    assert_same_numbers(inside.probs, expected.probs)
    assert inside.active.equal(expected.active)
    probs = router.to(dtype)(x.to(dtype)).probs
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("size", [1e4, -1e4, 1e30])
@pytest.mark.parametrize(
    ("config", "log_temperature"),
    [(config, None) for config in ROUTERS.values()]
    + [(config, value) for config in (TemperedSoftmaxConfig, XMoEConfig) for value in (1e3, -1e3)],
)
def test_extreme_logits_and_temperatures(config: Any, size: float, log_temperature: float | None) -> None:
    torch.manual_seed(0)
    router: Router = config().build(6)
    if log_temperature is not None:
        nn.init.constant_(router.get_parameter("log_temperature"), log_temperature)
    x = (size * torch.randn(3, 4, 6)).requires_grad_()
    routing = router(x)
    assert routing.probs.isfinite().all()
    if not list(router.parameters()):
        return
    routing.confidence.sum().backward()
    for name, parameter in router.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert x.grad is not None and x.grad.isfinite().all()


@every_router
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_activates_nothing(config: Any, poison: float) -> None:
    torch.manual_seed(0)
    router: Router = config().build(6, 2).eval()
    x = torch.randn(200, 6)
    clean = router(x).active
    x[::2, 3] = poison
    active = router(x).active
    assert not active[::2].any() and active[1::2].equal(clean[1::2])


@pytest.mark.parametrize("config", [config for name, config in ROUTERS.items() if name != "always-active"])
def test_gradient_of_the_confidence_skips_inactive_tokens(config: Any) -> None:
    torch.manual_seed(0)
    router: Router = config().build(6).double().eval()
    for parameter in router.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    routing = router(x)
    routing.confidence.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum(dim=-1).gt(0).equal(routing.active[:, 0])
    assert routing.active.any() and not routing.active.all()


def test_statistics_by_hand() -> None:
    active = torch.tensor([[[1, 0], [0, 0], [1, 1]], [[1, 0], [1, 0], [0, 0]]]).bool()
    probs = torch.tensor([[[0.9, 0.1], [0.2, 0.3], [0.7, 0.8]], [[0.6, 0.2], [1.0, 0.4], [0.3, 0.3]]])
    whole = activation(Routing(active, probs))
    torch.testing.assert_close(whole.rate, torch.tensor([4 / 6, 1 / 6]))
    torch.testing.assert_close(whole.confidence, torch.tensor([(0.9 + 0.7 + 0.6 + 1.0) / 4, 0.8]))
    torch.testing.assert_close(whole.per_row, torch.tensor([[2 / 3, 1 / 3], [2 / 3, 0.0]]))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    masked = activation(Routing(active, probs), mask)
    torch.testing.assert_close(masked.rate, torch.tensor([2 / 3, 0.0]))
    torch.testing.assert_close(masked.confidence, torch.tensor([0.75, 0.0]))
    torch.testing.assert_close(masked.per_row, torch.tensor([[0.5, 0.0], [1.0, 0.0]]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TemperedSoftmax(0), "d_model must be an integer >= 1, got 0"),
        (lambda: TemperedSoftmax(4, 0), "modules must be an integer >= 1, got 0"),
        (lambda: TemperedSoftmax(4, temperature_scale=0.0), "temperature_scale must be positive, got 0.0"),
        (lambda: GumbelSoftmax(4, floor=0.0), "floor must be positive, got 0.0"),
        (lambda: GumbelSoftmax(4, decay=1.5), r"decay must be in \(0, 1\], got 1.5"),
        (lambda: XMoE(4, d_route=0), "d_route must be an integer >= 1, got 0"),
        (lambda: TopKConfig(capacity=0.0).build(4), "capacity must be above 0 and at most 1, got 0.0"),
    ],
)
def test_errors(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_confidence_reaches_the_output() -> None:
    """The router of a layer learns: its weights get a gradient that is not zero."""
    torch.manual_seed(0)
    for config in ROUTERS.values():
        layer = SeqBoat(8, SeqBoatConfig(init="paper", router=config()))
        x: Tensor = torch.randn(2, 30, 8)
        layer(x).y.square().sum().backward()
        for name, parameter in layer.sma.router.named_parameters():
            assert parameter.grad is not None and parameter.grad.any(), name
