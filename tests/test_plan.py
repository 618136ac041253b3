"""Plans: parameters, and what a step keeps, against a real step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mixer_cases import shrink
from seqboat.core.mixer import directions_of
from seqboat.layers.routers import AlwaysActiveConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.mixers import MIXERS
from seqboat.models.backbone import BackboneConfig
from seqboat.tasks.task import apply_model
from seqboat.training.config import RunConfig
from seqboat.training.plan import GB, estimate, kept_bytes, longest_batch
from small_runs import ToyConfig, small_run


def run_of(mixer: Any, causal: bool = False, **training: Any) -> RunConfig:
    task = ToyConfig(length=64, kind="lm" if causal else "classify")
    model = BackboneConfig(mixer=mixer, d_model=32, num_layers=2)
    return small_run(task, model=model).replace(training={"accumulation": 1, "batch_size": 8, **training})


def held_by(config: RunConfig, size: int) -> int:
    """Bytes of all tensors that the graph of a forward pass holds, found by walking it."""
    task = config.build_task()
    model = config.build_model(task).train()
    own = {p.untyped_storage().data_ptr() for p in model.state_dict(keep_vars=True).values()}
    batch = longest_batch(task, size)
    loss = task.loss(apply_model(model, task.kind, batch), batch).total
    found, todo, seen = {}, [loss.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [child for child, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        for value in [getattr(node, name) for name in names]:
            for tensor in value if isinstance(value, tuple | list) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in own:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("name", ["transformer", "mega", "s4d"])
def test_kept_bytes_of_a_real_step(name: str) -> None:
    config = run_of(shrink(MIXERS[name]()))
    one, more = kept_bytes(config, config.build_task())
    assert one + 7 * more == pytest.approx(held_by(config, 8), rel=0.02)


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_can_be_estimated(name: str) -> None:
    causal = "causal" in directions_of(MIXERS[name])
    config = run_of(shrink(MIXERS[name](causal=causal)), causal)
    found = estimate(config)
    model = config.build_model(config.build_task())
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.kept > 64 * 8 * 32 * 4 and found.micro_batch == 8


def test_micro_batches_fit() -> None:
    config = run_of(replace(shrink(SeqBoatConfig()), router=AlwaysActiveConfig()))
    whole = estimate(config)
    less = estimate(config, memory=whole.memory * 0.6)
    assert less.fits and 1 <= less.micro_batch < 8 and less.micro_batch * less.micro_batches >= 8
    assert not estimate(config, memory=1000).fits
    assert estimate(config, processes=4).micro_batch == 2
    assert "memory" in whole.report() and whole.memory < GB


def test_recomputed_activations_are_not_kept() -> None:
    mixer = shrink(MIXERS["mega"]())
    assert estimate(run_of(mixer, gradient_checkpointing=True)).kept < estimate(run_of(mixer)).kept / 2
