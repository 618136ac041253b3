"""Parameter groups, optimizers and the schedule."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import XMoEConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.mixers import MIXERS
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import Classifier
from seqboat.ssm.diagonal import S4DConfig
from seqboat.training.optim import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    learning_rate,
    parameter_groups,
    set_learning_rate,
)


def names_by_decay(model: torch.nn.Module) -> tuple[set[str], set[str]]:
    decayed, kept = parameter_groups(model, OptimizerConfig(weight_decay=0.1))
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    groups: Any = (decayed["params"], kept["params"])
    return {name for name, _ in groups[0]}, {name for name, _ in groups[1]}


def test_only_matrices_of_linear_maps_and_embeddings_decay() -> None:
    mixer = SeqBoatConfig(gau=GAUConfig(d_z=4, window=4, max_positions=8), prenorm=True)
    model = Classifier(BackboneConfig(mixer=mixer, d_model=8, num_layers=1, vocab=5), 3)
    decayed, kept = names_by_decay(model)
    layer = "backbone.layers.0."
    assert decayed == {
        "backbone.embedding.weight",
        f"{layer}linear.weight",
        f"{layer}sma.router.logits.weight",
        f"{layer}sma.units.gau.base.weight",
        f"{layer}sma.units.gau.out.weight",
        "head.hidden.weight",
        "head.out.weight",
    }
    assert {
        f"{layer}ssm.delta",
        f"{layer}ssm.skip",
        f"{layer}norm.weight",
        f"{layer}sma.router.log_temperature",
        f"{layer}sma.units.gau.gamma",
        f"{layer}sma.units.gau.bias.table",
        f"{layer}linear.bias",
    } <= kept
    assert decayed | kept == {name for name, _ in model.named_parameters()}


def test_other_layers_and_routers_have_the_same_rule() -> None:
    mixer = SeqBoatConfig(ssm=S4DConfig(), router=XMoEConfig(), norm="batch")
    model = Classifier(BackboneConfig(mixer=mixer, d_model=8, num_layers=1, absolute_positions=True), 3)
    decayed, kept = names_by_decay(model)
    assert "backbone.embedding.weight" in decayed
    layer = "backbone.layers.0."
    assert {
        f"{layer}ssm.log_dt",
        f"{layer}ssm.c",
        f"{layer}sma.router.options",
        "backbone.position_scale",
    } <= kept


def test_frozen_parameters_are_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    decayed, kept = names_by_decay(model)
    assert (decayed, kept) == ({"1.weight"}, {"1.bias"})


@pytest.mark.parametrize("name", ["adamw", "radam"])
def test_decay_shrinks_matrices_and_spares_biases(name: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    before = [p.detach().clone() for p in (model.weight, model.bias)]
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # decoupled: by the factor 1 - lr * weight_decay, whatever the gradient
    torch.testing.assert_close(model.weight.detach(), before[0] * 0.95)
    torch.testing.assert_close(model.bias.detach(), before[1])


def test_the_published_scripts_decay_everything() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    (group,) = parameter_groups(model, OptimizerConfig(weight_decay=0.1, decay="all"))
    names: Any = group["params"]
    assert [name for name, _ in names] == [name for name, _ in model.named_parameters()]
    assert group["weight_decay"] == 0.1


@pytest.mark.parametrize("name", ["s4", "s4d", "s5", "liquid-s4", "h3"])
def test_state_space_parameters_have_their_own_rate_and_no_decay(name: str) -> None:
    layer = MIXERS[name]().build(8)
    config = OptimizerConfig(lr=0.01, ssm_lr=0.001, dt_lr=0.005, decay="all")
    groups: Any = parameter_groups(layer, config)
    rates = {n.rpartition(".")[2]: (g["lr"], g["weight_decay"]) for g in groups for n, _ in g["params"]}
    assert rates["log_dt"] == (0.005, 0.0)
    assert rates["log_real"] == rates["imag"] == (pytest.approx(0.001), 0.0)
    assert rates["c"] == rates["skip"] == (0.01, 0.01)
    assert sum(len(g["params"]) for g in groups) == len(list(layer.parameters()))


def test_separate_rates_follow_the_schedule() -> None:
    layer = MIXERS["s4"]().build(8)
    optimizer = build_optimizer(layer, OptimizerConfig(lr=0.01, ssm_lr=0.001))
    set_learning_rate(optimizer, 0.005)
    rates = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
    # half of the highest, both
    assert rates["out.weight"] == 0.005
    assert rates["ssm.log_dt"] == rates["ssm.b"] == pytest.approx(0.0005)


def test_without_a_separate_rate_all_parameters_have_one() -> None:
    groups: Any = parameter_groups(MIXERS["s4"]().build(8), OptimizerConfig(decay="all"))
    assert len(groups) == 1


def test_adagrad_takes_steps_of_its_own_size() -> None:
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(model, OptimizerConfig(name="adagrad", lr=0.1, weight_decay=0.0))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # the first step divides the gradient by its own size
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_settings_reach_the_optimizer() -> None:
    config = OptimizerConfig(lr=0.3, betas=(0.5, 0.6), eps=1e-3)
    optimizer = build_optimizer(torch.nn.Linear(2, 2), config)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.3, (0.5, 0.6), 1e-3)
    set_learning_rate(optimizer, 0.01)
    assert {g["lr"] for g in optimizer.param_groups} == {0.01}


def test_schedule_meets_its_corners() -> None:
    schedule = ScheduleConfig(steps=400, warmup_steps=24, warmup_from=0.002)
    rates = [learning_rate(step, 0.005, schedule) for step in range(402)]
    assert rates[0] == 0.002 and rates[24] == 0.005 and rates[400] == rates[401] == 0
    assert max(rates) == 0.005
    assert all(a < b for a, b in itertools.pairwise(rates[:25]))
    assert all(a > b for a, b in itertools.pairwise(rates[24:401]))


def test_warmup_of_power_two_is_that_of_the_published_scheduler() -> None:
    """Its formula, with the square of the step: initial + step^2 * (highest - initial) / warmup^2."""
    schedule = ScheduleConfig(steps=125, warmup_steps=25, warmup_from=1e-7, warmup_power=2)
    for step in range(25):
        published = 1e-7 + step**2 * (0.01 - 1e-7) / 25**2
        assert learning_rate(step, 0.01, schedule) == pytest.approx(published)
    assert learning_rate(25, 0.01, schedule) == 0.01


def test_other_shapes_of_decay() -> None:
    def rates(shape: Any) -> list[float]:
        schedule = ScheduleConfig(steps=12, warmup_steps=4, warmup_from=0.0, shape=shape)
        return [learning_rate(step, 1.0, schedule) for step in (2, 4, 8, 12, 16)]

    assert rates("cosine") == pytest.approx([0.5, 1.0, 0.5, 0.0, 0.0])
    assert rates("rsqrt") == pytest.approx([0.5, 1.0, 0.5**0.5, (1 / 3) ** 0.5, 0.5])
    assert rates("constant") == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_schedule_without_warmup_and_all_warmup() -> None:
    assert learning_rate(0, 1.0, ScheduleConfig(steps=4, warmup_steps=0)) == 1.0
    rates = [learning_rate(s, 1.0, ScheduleConfig(steps=4, warmup_steps=4, warmup_from=0)) for s in range(4)]
    assert rates == [0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: OptimizerConfig(name="adam"),  # type: ignore[arg-type]
            "optimizer.name must be one of adamw, radam, adagrad; got 'adam'",
        ),
        (lambda: OptimizerConfig(lr=0), "optimizer.lr must be positive, got 0"),
        (lambda: OptimizerConfig(betas=(0.9, 1.0)), r"optimizer.betas must be two numbers in \[0, 1\)"),
        (lambda: OptimizerConfig(weight_decay=-1), "optimizer.weight_decay must be >= 0, got -1"),
        (lambda: OptimizerConfig(clip=0.0), "optimizer.clip must be positive or None, got 0.0"),
        (lambda: OptimizerConfig(eps=0.0), "optimizer.eps must be positive"),
        (lambda: ScheduleConfig(steps=0), "schedule.steps must be an integer >= 1, got 0"),
        (lambda: ScheduleConfig(steps=5, warmup_steps=6), "must not exceed schedule.steps, got 6 and 5"),
        (lambda: ScheduleConfig(warmup_from=-1.0), "schedule.warmup_from must be >= 0"),
        (lambda: ScheduleConfig(warmup_power=0.0), "schedule.warmup_power must be positive, got 0.0"),
        (lambda: OptimizerConfig(name="adagrad"), "optimizer.weight_decay of adagrad must be 0, got 0.01"),
        (lambda: OptimizerConfig(ssm_lr=0.0), "optimizer.ssm_lr must be positive or None, got 0.0"),
    ],
)
def test_bad_settings_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
