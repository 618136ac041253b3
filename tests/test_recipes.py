"""Recipes: epochs, memories, parameter counts, a step of each, and round trips. test_scripts.py has the settings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.mixers import MIXERS
from seqboat.recipes import RECIPES, find_recipe
from seqboat.recipes.base import with_mixer
from seqboat.tasks.task import Batch, Task, apply_model
from seqboat.training.optim import build_optimizer
from seqboat.training.settings_io import from_dict, override, to_dict, to_json

FULL = [name for name in RECIPES if f"{name}-small" in RECIPES]
TABLE = ["--data.train", "train.csv"]
FILES = {"classify": TABLE, "regress": TABLE, "tag": TABLE, "lm": ["--data.text", "notes.txt"]}
FACTS = {
    "input": "bytes",
    "length": 512,
    "longest": 512,
    "labels": ["a", "b"],
    "target_mean": 0.0,
    "target_std": 1.0,
}

# training examples and epochs; steps = examples / batch x epochs, to the nearest thousand where published so
EPOCHS = {
    "lra.listops": (96_000, 60, 90_000, 27_000),
    "lra.text": (25_000, 50, 25_000, 10_000),
    "lra.retrieval": (147_086, 40, 91_960, 10_000),
    "lra.image": (45_000, 200, 180_000, 9_000),
    "lra.pathfinder": (160_000, 200, 250_000, 50_000),
    "lra.pathx": (160_000, 100, 125_000, 25_000),
    "speech": (24_482, 200, 250_000, 10_000),
}
# working memory, cut of the kernel, positions, absolute positions
MEMORY = {
    "lra.listops": (256, 1024, "original", False),
    "lra.text": (256, 1024, "compressed", False),
    "lra.retrieval": (256, 1024, "original", False),
    "lra.image": (256, 1024, "original", True),
    "lra.pathfinder": (256, None, "original", True),
    "lra.pathx": (512, None, "original", True),
    "speech": (256, 4000, "compressed", True),
}


@pytest.mark.parametrize("name", EPOCHS)
def test_steps_are_the_epochs_of_the_table(name: str) -> None:
    examples, epochs, steps, warmup = EPOCHS[name]
    config = RECIPES[name]()
    assert (config.schedule.steps, config.schedule.warmup_steps) == (steps, warmup)
    # the speech recipe's published number of steps is a little above its epochs
    assert steps == pytest.approx(examples / config.training.batch_size * epochs, rel=0.03)


@pytest.mark.parametrize("name", MEMORY)
def test_memory_positions_and_kernels(name: str) -> None:
    config = RECIPES[name]()
    mixer: Any = config.model.mixer
    absolute = bool(config.model.absolute_positions)
    assert (mixer.gau.window, mixer.ssm.truncation, mixer.gau.positions, absolute) == MEMORY[name]
    assert (mixer.gau.span, mixer.ssm.d_state) == ("memory", 16)
    if mixer.gau.positions == "original":
        # every distance inside a sequence has its own entry
        assert mixer.gau.max_positions >= config.build_task().max_length


def meta_model(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        return RECIPES[name]().build_model()


def count(model: torch.nn.Module, leave_out: str = "\0") -> int:
    return sum(p.numel() for n, p in model.named_parameters() if leave_out not in n)


def test_parameters_of_speech_are_those_of_the_paper() -> None:
    """293K counts everything but the tables of relative positions."""
    model = meta_model("speech")
    assert round(count(model, leave_out="gau.bias.table") / 1000) == 293
    assert count(model) - count(model, leave_out="gau.bias.table") == 8 * 257


def test_parameters_of_enwik8_are_those_of_the_paper() -> None:
    """39M, with all 256 bytes as with the 205 that occur."""
    model = meta_model("enwik8")
    assert 38.5e6 < count(model) < 39.5e6
    assert 38.5e6 < count(model) - (256 - 205) * 616 < 39.5e6


@pytest.mark.parametrize("name", [n for n in RECIPES if n.endswith("-small")])
def test_small_variants_are_smaller_and_say_what_was_cut(name: str) -> None:
    recipe = RECIPES[name]
    full = RECIPES[name.removesuffix("-small")]
    assert "Cut: " in (recipe.__doc__ or "")
    assert count(meta_model(name)) < count(meta_model(name.removesuffix("-small"))) / 2
    assert recipe().schedule.steps < full().schedule.steps / 5
    assert type(recipe().task) is type(full().task)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_round_trip(name: str, tmp_path: Path) -> None:
    config = RECIPES[name]()
    assert from_dict(to_dict(config)) == config
    assert from_dict(json.loads(to_json(config))) == config
    assert (RECIPES[name].__doc__ or "").strip()


def synthetic_batch(task: Task, rows: int, time: int) -> Batch:
    """Inputs of the right kind, without any data."""

    def inputs(length: int) -> torch.Tensor:
        if task.vocab is None:
            return torch.randn(rows, length, task.channels)
        return torch.randint(task.vocab, (rows, length))

    if task.kind in ("lm", "tag"):
        return Batch(inputs(time), None, torch.randint(task.classes, (rows, time)))
    second = inputs(time - 1) if task.kind == "match" else None
    return Batch(inputs(time), None, torch.randint(2, (rows,)), second)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "enwik8" else n for n in RECIPES]
)
def test_every_recipe_takes_a_step(name: str) -> None:
    """At full width, on two short sequences."""
    torch.manual_seed(0)
    config = override(RECIPES[name](), FILES.get(name, []))
    task = config.build_task()
    if name in FILES and name != "lm":
        task.facts = FACTS
    model = config.build_model(task)
    optimizer = build_optimizer(model, dataclasses.replace(config.optimizer, lr=0.001))
    batch = synthetic_batch(task, 2, 40 if name == "enwik8" else 100)
    output = apply_model(model, task.kind, batch)
    loss = task.loss(output, batch).mean
    loss.backward()
    assert bool(loss.isfinite())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in FULL if n != "enwik8"])
def test_full_recipes_take_a_step_at_full_length(name: str) -> None:
    torch.manual_seed(0)
    config = RECIPES[name]()
    task = config.build_task()
    model = config.build_model(task)
    batch = synthetic_batch(task, 1, task.max_length)
    loss = task.loss(apply_model(model, task.kind, batch), batch).mean
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("recipe", FULL)
def test_recipes_take_another_mixer(recipe: str) -> None:
    causal = recipe == "enwik8"
    other = SeqBoatConfig(causal=causal, norm="rms")
    assert with_mixer(RECIPES[recipe](), other).model.mixer == other


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_recipe_trains_every_mixer(mixer: str) -> None:
    """A baseline is a mixer in a recipe: each can take the place of ours."""
    torch.manual_seed(0)
    config = override(RECIPES["lra.listops-small"](), ["--model.mixer", mixer])
    task = config.build_task()
    model = config.build_model(task)
    batch = synthetic_batch(task, 2, 33)
    task.loss(apply_model(model, task.kind, batch), batch).mean.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("recipe", ["lm", "enwik8-small"])
def test_language_recipes_take_mixers_whose_state_grows(recipe: str) -> None:
    own: Any = RECIPES[recipe]()
    config: Any = with_mixer(RECIPES[recipe](), "transformer")
    size = own.task.segment
    assert own.training.carry_state and not config.training.carry_state
    assert (config.task.segment, config.task.context, config.task.window) == (size, size // 2, size)
    assert with_mixer(RECIPES[recipe](), "mega-chunk").training.carry_state


def test_unknown_recipes_are_named() -> None:
    with pytest.raises(ValueError, match=r"recipe 'lra.txt' is unknown; did you mean lra.text"):
        find_recipe("lra.txt")
    with pytest.raises(ValueError, match="`seqboat paper list recipes` shows all"):
        find_recipe("0123456789")
