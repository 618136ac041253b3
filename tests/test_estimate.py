"""Estimates of memory and time: held to what the allocator of a real step reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mixer_cases import shrink
from seqboat.core.mixer import directions_of
from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import AlwaysActiveConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.mixers import MIXERS
from seqboat.models.backbone import BackboneConfig
from seqboat.ops import band, positions
from seqboat.tasks.task import apply_model
from seqboat.training.config import RunConfig
from seqboat.training.planning import estimate as estimates
from seqboat.training.planning.estimate import estimate
from seqboat.training.planning.shapes import Meter, ShapeTensor
from small_runs import ToyConfig, small_run


def run_of(mixer: Any, causal: bool = False, **changes: Any) -> RunConfig:
    """A run of two layers of width 32 on 8 sequences of 64 tokens."""
    task = ToyConfig(length=64, kind="lm" if causal else "classify")
    model = BackboneConfig(mixer=mixer, d_model=32, num_layers=2)
    return small_run(task, model=model).replace(
        training={"accumulation": 1, "batch_size": 8, **changes.pop("training", {})}, **changes
    )


def peak_of_real_step(config: RunConfig, size: int) -> int:
    """What the allocator says that a step takes besides weights and gradients."""
    task = config.build_task()
    model: Any = config.build_model(task).train()
    model.backbone.gradient_checkpointing = config.training.gradient_checkpointing
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = estimates._batch(task, size)
    bf16 = config.training.precision == "bf16"

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = apply_model(model, task.kind, batch)
        task.loss(output, batch).total.backward()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    held = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


REAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "seqboat": (SeqBoatConfig(router=AlwaysActiveConfig()), {}),
    "full": (replace(MIXERS["seqboat-full"](), router=AlwaysActiveConfig()), {}),
    "transformer": (MIXERS["transformer"](), {}),
    "mega": (MIXERS["mega"](), {}),
    "s4d": (MIXERS["s4d"](), {}),
    "bf16": (MIXERS["mega"](), {"precision": "bf16"}),
    "recomputed": (MIXERS["mega"](), {"gradient_checkpointing": True}),
}


@pytest.mark.parametrize("name", REAL)
def test_memory_of_a_real_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(band, "on_cpu", lambda x: False)
    mixer, training = REAL[name]
    config = run_of(shrink(mixer), training=training)
    real = peak_of_real_step(config, 8)
    found = estimate(config).activations
    assert 0.95 * real < found < 1.05 * real, (real, found)


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_can_be_estimated(name: str) -> None:
    causal = "causal" in directions_of(MIXERS[name])
    found = estimate(run_of(shrink(MIXERS[name](causal=causal)), causal))
    assert found.parameters > 0 and found.activations > 64 * 8 * 32 * 4 and found.flops > 0


def test_meter_lets_go_of_what_is_freed() -> None:
    with Meter() as meter:
        x = torch.zeros(100)
        assert isinstance(x, ShapeTensor) and meter.held == 400
        y = x[10:] + 1
        assert meter.held == 760 and meter.peak == 760
        del y
        assert meter.held == 400 and meter.peak == 760


def test_estimates_leave_nothing_behind() -> None:
    positions._known_frequencies.clear()
    layer = SeqBoatConfig(gau=GAUConfig(d_z=32, positions="rotary"), causal=True)
    estimate(run_of(layer, causal=True))
    assert all(type(known) is torch.Tensor for known in positions._known_frequencies.values())
    layer.build(8)(torch.randn(1, 5, 8)).y.sum().backward()
