"""The start of training: routers that start active, whatever the seed, and a word when one is dead."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import seqboat
from seqboat import BackboneConfig, Classifier, LanguageModel, SparseModularActivation, dead_routers
from seqboat.layers.routers import ROUTERS, Router, TemperedSoftmax
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.layers.sma import DEAD_AFTER
from seqboat.layers.variants import SeqBoatThenFFNConfig
from seqboat.mixers import MIXERS
from seqboat.recipes import RECIPES
from seqboat.recipes.own import classify, lm
from seqboat.ssm import SSMS
from seqboat.ssm.diagonal import EMA, S4D
from seqboat.ssm.s5 import S5
from seqboat.training.settings_io import override

TARGET = 1.0
"""The fraction of active tokens with which every layer starts."""
FREE = ("tempered-softmax", "sigmoid", "gumbel-softmax")
"""Routers whose fraction of active tokens is not fixed by their rule."""


def rates(model: nn.Module, inputs: torch.Tensor) -> list[float]:
    with torch.no_grad():
        routings = model.eval()(inputs).routings
    return [float(routing.active.float().mean()) for routing in routings]


def models() -> dict[str, BackboneConfig]:
    ours = {"classify": classify().model, "lm": lm().model}
    layers = {
        "default": SeqBoatConfig(),
        "pre-norm": SeqBoatConfig(prenorm=True),
        "ffn": SeqBoatConfig(ffn=True),
    }
    return ours | {
        name: BackboneConfig(mixer=layer, d_model=32, num_layers=3) for name, layer in layers.items()
    }


@pytest.mark.parametrize("name", ["classify", "lm", "default", "pre-norm", "ffn"])
def test_every_layer_starts_at_its_target_for_twenty_seeds(name: str) -> None:
    config = dataclasses.replace(models()[name], vocab=256)
    for seed in range(20):
        torch.manual_seed(seed)
        model = LanguageModel(config) if name == "lm" else Classifier(config, 3)
        found = rates(model, torch.randint(256, (2, 40)))
        assert all(abs(rate - TARGET) <= 0.1 for rate in found), (seed, found)


def test_the_paper_leaves_the_start_to_the_seed() -> None:
    found = []
    for seed in range(8):
        torch.manual_seed(seed)
        layer = SeqBoatConfig(init="paper").build(32).eval()
        found.append(float(layer(1 + torch.randn(2, 40, 32)).routing.active.float().mean()))
    assert min(found) < 0.4 and max(found) > 0.6, found


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_routers_start_active_for_inputs_of_any_size(name: str, size: float) -> None:
    torch.manual_seed(0)
    router = ROUTERS[name]().build(48, 3).eval()
    router.start_active(0.9)
    active, probs = router(torch.randn(500, 48) * size)
    assert active.all()
    assert probs.std() > 0, "tokens must differ, or a budget has nothing to rank"
    if size < 1 and name != "gumbel-softmax":
        assert torch.allclose(probs, torch.full_like(probs, 0.9), atol=0.01)


def test_a_router_that_is_given_stays_as_it_is() -> None:
    router = TemperedSoftmax(8)
    before = {name: value.clone() for name, value in router.state_dict().items()}
    SparseModularActivation(nn.Linear(8, 8), 8, router)
    assert all(torch.equal(before[name], value) for name, value in router.state_dict().items())
    with pytest.raises(ValueError, match=r"confidence must be between 0.5 and 1, got 0.5"):
        router.start_active(0.5)


@pytest.mark.parametrize("ssm", SSMS)
def test_scaled_weights_keep_the_size_of_the_signal(ssm: str) -> None:
    torch.manual_seed(0)
    layer = SeqBoatConfig(ssm=SSMS[ssm]()).build(64)
    attention: Any = layer.sma.units["gau"]
    assert attention.base.weight.std().item() == pytest.approx(64**-0.5 * 0.88, rel=0.1)
    assert (layer.ssm.skip == 1).all()
    assert (attention.gamma == 1).all()
    if isinstance(layer.ssm, EMA):
        assert layer.ssm.gamma.std().item() == pytest.approx(0.25 * 0.88, rel=0.1)
    assert SeqBoatThenFFNConfig().build(64).ffn.hidden.weight.std() > 0.1
    assert SeqBoatThenFFNConfig(init="paper").build(64).ffn.hidden.weight.std() < 0.02


def recipes_of_the_paper() -> list[str]:
    ours = ("classify", "regress", "tag", "lm")
    return [name for name in RECIPES if name not in ours]


@pytest.mark.parametrize("name", recipes_of_the_paper())
def test_recipes_of_the_paper_keep_its_initial_weights(name: str) -> None:
    config = RECIPES[name]()
    assert getattr(config.model.mixer, "init", "paper") == "paper"
    if isinstance(config.model.mixer, SeqBoatConfig):
        other = override(config, ["--model.mixer", "seqboat-local"])
        assert other.model.mixer.init == "paper"  # type: ignore[attr-defined]


def seqboats() -> list[str]:
    return [name for name, form in MIXERS.items() if issubclass(form, SeqBoatConfig)]


def dead_layer() -> nn.Module:
    layer = SeqBoatConfig(ffn=True).build(8).train()
    router: Any = layer.sma.router
    with torch.no_grad():
        router.logits.bias[:2] = torch.tensor([50.0, -50.0])
    return layer


def test_a_layer_warns_once_of_a_dead_router_and_names_the_remedy() -> None:
    model = nn.ModuleList([SeqBoatConfig(ffn=True).build(8), dead_layer()])
    x = torch.randn(1, 3, 8)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(DEAD_AFTER + 20):
            for layer in model:
                assert isinstance(layer, SeqBoat)
                layer.sma(x)
    said = [str(warning.message) for warning in caught]
    assert len(said) == 1
    assert said[0].startswith(
        f"no token has activated the module 'gau' of this layer in {DEAD_AFTER} training steps"
    )
    assert "budget with a target" in said[0]
    assert dead_routers(model) == {"1.sma: gau": DEAD_AFTER + 20}
    assert dead_routers(model, after=DEAD_AFTER + 21) == {}


def test_evaluation_is_not_watched_and_one_active_token_is_enough() -> None:
    layer = dead_layer()
    x = torch.randn(1, 3, 8)
    layer.eval()(x)
    assert dead_routers(layer, after=1) == {}
    layer.train()(x)
    assert list(dead_routers(layer, after=1)) == ["sma: gau"]
    with seqboat.override_activation(layer, active=True):
        layer(x)
    assert dead_routers(layer, after=1) == {}


def test_every_router_has_a_start() -> None:
    for make in ROUTERS.values():
        router = make().build(8, 2)
        assert isinstance(router, Router)
        router.start_active()
        active = router.eval()(torch.randn(4, 8)).active
        assert active.shape == (4, 2)


def test_a_memory_lasts() -> None:
    """Time constants reach the stated memory, and a rare event keeps its size there."""
    log_decay, drive, _ = EMA(4, causal=False, memory=300).coefficients()
    log_decay, drive = log_decay.detach(), drive.detach()
    constants = -1 / log_decay.double()
    assert constants.amin() == pytest.approx(2, rel=1e-5)
    assert constants.amax() == pytest.approx(300, rel=1e-3)
    torch.testing.assert_close(drive**2 + torch.exp(2 * log_decay), torch.ones_like(drive))
    slowest = constants.argmax(dim=-1, keepdim=True)
    assert (torch.exp(150 * log_decay).gather(-1, slowest) >= 0.5).all()


@pytest.mark.parametrize("ssm", ["ema", "ema-conv", "s4d", "s5"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_fresh_gated_layer_remembers(ssm: str, causal: bool) -> None:
    """The longest time constant is half the stated memory or more, the response there a tenth of that at once."""
    torch.manual_seed(0)
    kernel = SeqBoat(64, form="gated", ssm=ssm, causal=causal).ssm
    stated = 256
    if isinstance(kernel, EMA):
        log_decay, drive, read = (part.detach().double() for part in kernel.coefficients())
        assert 0.02 < float((drive / torch.sqrt(1 - torch.exp(2 * log_decay))).abs().mean()) < 0.3
    elif isinstance(kernel, S4D):
        log_decay = kernel.coefficients()[0].detach().real.double()
        read = torch.ones_like(log_decay)
        stated = 1000  # steps from 0.001 to 0.1, real parts of -1/2: from 20 to 2,000 tokens
    else:
        assert isinstance(kernel, S5)
        log_decay = -torch.exp(kernel.log_real + kernel.log_dt).detach().double()
        read, stated = torch.ones_like(log_decay), 1000
    slowest = log_decay.flatten().argmax()
    assert -1 / log_decay.flatten()[slowest] >= stated / 2
    response = read.flatten()[slowest] * torch.exp(log_decay.flatten()[slowest] * torch.tensor([0.0, stated]))
    assert response[1].abs() >= 0.1 * response[0].abs() > 0


def test_a_stated_memory_stays() -> None:
    torch.manual_seed(0)
    gated, paper = (SeqBoat(8, form=form, memory=64).ssm for form in ("gated", "paper"))
    assert isinstance(gated, EMA) and isinstance(paper, EMA)
    torch.testing.assert_close(gated.coefficients()[0], paper.coefficients()[0])
    torch.testing.assert_close(gated.coefficients()[1].abs(), 0.2 * paper.coefficients()[1].abs())
    started = SeqBoat(8, form="gated", init="paper").ssm
    assert isinstance(started, EMA)
    assert (-1 / started.coefficients()[0]).max() < 10
