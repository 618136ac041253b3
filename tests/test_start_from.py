"""Training that starts from a trained run: the backbone's weights, a new head, rates by depth, freezing."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest
import torch

from seqboat.cli.main import main
from seqboat.models.heads import Classifier
from seqboat.recipes import find_recipe
from seqboat.run import Run, start_from
from seqboat.training.checkpoint import load_start
from seqboat.training.config import RunConfig, override
from seqboat.training.config.fields import StartConfig
from seqboat.training.loop import train
from seqboat.training.optim import build_optimizer, set_learning_rate

TINY = [
    "--data.max_length=32",
    "--model.ngram_buckets=64",
    "--training.batch_size=4",
    "--schedule.warmup_steps=0",
    "--evaluation.every=2",
    "--training.device=cpu",
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text", "label"], *[[f"word {i}", "ab"[i % 2]] for i in range(20)]])
    return path


def started(table: Path, *fields: str) -> RunConfig:
    config = start_from(find_recipe("classify")(), "enwik8-small")
    fields = (*TINY, f"--data.train={table}", f"--data.data_dir={table.parent}", *fields)
    return override(config, [*fields])


def backbone(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.float() for name, value in run.weights.items() if name.startswith("backbone.")}


def test_the_backbone_comes_from_the_run_and_the_head_is_new(table: Path, tmp_path: Path) -> None:
    config = started(table, "--schedule.steps=2", "--start.freeze_steps=2")
    source, out = Run("enwik8-small"), tmp_path / "run"
    assert config.model.mixer == source.config.model.mixer and config.model.ngrams == (4, 6)
    assert train(config, out).exit_code == 0
    found = Run(out, which="latest")
    weights = backbone(found)
    for name, value in backbone(source).items():
        assert torch.equal(weights[name], value), f"{name} was frozen"
    packed = Run(found.pack(tmp_path / "packed"))
    assert found.config.start.run and not packed.config.start.run, "a folder of this machine"
    new = {name for name in found.weights if name not in source.weights}
    assert new == {
        "backbone.ngrams.table.weight",
        *(f"head.{p}" for p in ("hidden.weight", "hidden.bias", "out.weight", "out.bias")),
    }


def test_frozen_weights_thaw_and_a_run_continues_without_its_source(table: Path, tmp_path: Path) -> None:
    config = started(table, "--schedule.steps=4", "--start.freeze_steps=2", "--training.save_every=2")
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert train(config, whole).exit_code == 0
    name = "backbone.layers.0.linear.weight"
    assert torch.equal(Run(whole / "step-2").weights[name], Run("enwik8-small").weights[name].float())
    assert not torch.equal(Run(whole / "step-4").weights[name], Run("enwik8-small").weights[name].float())
    # what a resumed run needs is in its checkpoint
    (out / "x").mkdir(parents=True)
    (out / "x").rmdir()
    for part in (whole / "step-2").iterdir():
        (out / "step-2").mkdir(exist_ok=True)
        (out / "step-2" / part.name).write_bytes(part.read_bytes())
    (out / "latest").write_text("step-2\n")
    assert train(config, out, resume=True).exit_code == 0
    assert torch.equal(Run(out / "step-4").weights[name], Run(whole / "step-4").weights[name])


def test_rates_fall_with_depth() -> None:
    config = start_from(find_recipe("classify")(), "enwik8-small")
    model = config.replace(model={"vocab": 256}).build_model(_BytesTask(), classes=2)  # type: ignore[arg-type]
    start = StartConfig(run="x", lr=0.5, layer_decay=0.5)
    optimizer = build_optimizer(model, config.optimizer, lambda name: start.lr_factor(name, 3))
    rates = {
        name: group["lr"] / config.optimizer.lr
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    found = [rates[f"backbone.layers.{i}.linear.weight"] for i in range(3)]
    assert found == pytest.approx([0.125, 0.25, 0.5])
    assert rates["backbone.embedding.weight"] == pytest.approx(0.0625)
    assert rates["head.out.weight"] == rates["backbone.ngrams.table.weight"] == 1
    set_learning_rate(optimizer, 1.0, frozen=True)
    assert {group["lr"] for group in optimizer.param_groups} == {0.0, 1.0}


class _BytesTask:
    name, kind, vocab, channels, classes = "bytes", "classify", 256, 1, 2


def test_the_command_starts_from_a_run(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", "classify", f"--data.train={table}", "--from", "enwik8-small", "--print-config"])
    printed = capsys.readouterr().out
    assert code == 0 and "d_model: 128" in printed and "enwik8-small" in printed


def test_mistakes_are_named(table: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere is not the folder of a run"):
        start_from(find_recipe("classify")(), "nowhere")
    with pytest.raises(ValueError, match=r"start.layer_decay must be in \(0, 1\], got 0"):
        StartConfig(layer_decay=0)
    with pytest.raises(ValueError, match=r"start.lr must be positive, got 0"):
        StartConfig(lr=0)
    config = override(started(table, "--schedule.steps=2"), ["--model.d_model=32"])
    with pytest.raises(
        ValueError, match=r"enwik8-small: backbone.embedding.weight must have shape \(256, 32\)"
    ):
        train(config, tmp_path / "run")


def test_int8_weights_are_widened() -> None:
    config = start_from(find_recipe("classify")(), "enwik8-medium")
    model = Classifier(dataclasses.replace(config.model, vocab=256), 2)
    fresh = model.state_dict()["backbone.ngrams.table.weight"].clone()
    load_start(model, Run("enwik8-medium").path)
    weights, found = Run("enwik8-medium").weights, model.state_dict()
    name = "backbone.layers.1.linear"
    expected = weights[f"{name}.codes"].float() * weights[f"{name}.scale"][:, None]
    assert torch.equal(found[f"{name}.weight"], expected)
    # n-grams of other lengths stay as they are
    assert torch.equal(found["backbone.ngrams.table.weight"], fresh)
