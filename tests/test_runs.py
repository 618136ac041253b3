"""The one way to a trained run: lazy, consistent, and patient with a run that is still training."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from seqboat.run import Run, SavedFacts
from seqboat.tasks import TASKS, ClassifyTaskConfig
from seqboat.training.checkpoint import MODEL, STATE, CheckpointError, CheckpointStore
from seqboat.training.trainer import train
from small_runs import Spy, ToyConfig, small_run
from test_imports import ONLY_THE_CORE


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", ToyConfig)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "toy", ToyConfig)
        train(small_run(schedule={"steps": 8}, evaluation={"every": 4}), folder, display=Spy())
    return folder


def reseal(step: Path, **changes: object) -> None:
    """Change the state of a checkpoint and make its hashes fit again, as an attacker would."""
    state = json.loads((step / STATE).read_text()) | changes
    del state["sha256"]
    state["files"] = {name: hashlib.sha256((step / name).read_bytes()).hexdigest() for name in state["files"]}
    plain = json.dumps(state, indent=1, sort_keys=True)
    sealed = state | {"sha256": hashlib.sha256(plain.encode()).hexdigest()}
    (step / STATE).write_text(json.dumps(sealed, indent=1, sort_keys=True) + "\n")


def test_everything_comes_from_one_checkpoint(run: Path) -> None:
    found = Run(run, "latest")
    assert found.step == 8 and found.steps == CheckpointStore(run).steps() and str(found) == str(run)
    assert found.checkpoint.path == run / "step-8" and found.folder == run and not found.shipped
    assert found.config.schedule.steps == 8 and found.task.name == "toy"
    assert found.about["seed"] == found.config.seed
    assert [record["step"] for record in found.metrics if record["split"] == "val"] == [4, 8]
    one = Run(run / "step-8")
    assert one.folder == run and one.metrics == found.metrics
    state = dict(one.model.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in found.weights.items())


def test_nothing_is_read_before_it_is_asked_for(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    empty = Run(tmp_path / "run")
    assert empty.steps == [] and empty.metrics == [] and empty.about == {}
    (tmp_path / "run" / "run.json").symlink_to("/dev/zero")
    assert Run(tmp_path / "run").about == {}
    with pytest.raises(ValueError, match="run contains no complete checkpoint"):
        _ = empty.config
    with pytest.raises(ValueError, match="which must be one of best, latest; got 'first'"):
        Run(run, "first")
    with pytest.raises(ValueError, match="only the data can be changed"):
        Run(run, fields=["--seed=1"])


def test_a_reader_is_patient_with_a_run_that_replaces_its_checkpoints(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # flushing to disk would make the writer too slow to get in the way
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    source = Run(run)
    store = CheckpointStore(tmp_path, keep=1)
    state = {key: source.checkpoint.state[key] for key in ("config", "classes", "labels", "versions")}
    weights = {name: value.clone() for name, value in source.weights.items()}
    store.save(0, {MODEL: weights}, state, best=True)
    done = threading.Event()

    def write() -> None:
        step = 0
        while not done.is_set():
            step += 1
            store.save(step, {MODEL: weights}, state, best=True)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen: set[int] = set()
        for number in range(400):
            found = Run(tmp_path, ("best", "latest")[number % 2])
            seen.add(found.step)
            assert torch.equal(found.weights["head.out.weight"], weights["head.out.weight"])
        assert len(seen) > 10, "the writer was too slow to get in the way"
    finally:
        done.set()
        writer.join()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 10**9, r"step-8: the configuration asks for 1,000,000,000 layers"),
        ("d_model", 20_000, r"step-8: the configuration asks for a model far larger than its weights"),
        ("d_model", 10**9, r"step-8: the configuration asks for a model far larger than its weights"),
        ("d_model", 24, r"step-8.model.safetensors: .* must have shape"),
    ],
)
def test_a_configuration_cannot_ask_for_more_than_its_weights(
    run: Path, tmp_path: Path, field: str, value: int, message: str
) -> None:
    copy = _copy(run / "step-8", tmp_path / "step-8")
    config = json.loads((copy / STATE).read_text())["config"]
    config["model"][field] = value
    reseal(copy, config=config)
    with pytest.raises((ValueError, CheckpointError), match=message):
        _ = Run(copy).model


def test_an_impossible_number_of_classes_is_named_with_its_file(run: Path, tmp_path: Path) -> None:
    copy = _copy(run / "step-8", tmp_path / "step-8")
    reseal(copy, classes=-0.5)
    with pytest.raises(
        ValueError, match=r"classes must be an integer >= 1, got -0\.5 \(settings from .*state\.json"
    ):
        _ = Run(copy).model


def test_weights_of_another_model_are_named(run: Path, tmp_path: Path) -> None:
    copy = _copy(run / "step-8", tmp_path / "step-8")
    weights = load_file(copy / MODEL)
    save_file({name: value for name, value in weights.items() if "head" not in name}, copy / MODEL)
    reseal(copy)
    with pytest.raises(CheckpointError, match=r"step-8.model.safetensors: the checkpoint lacks head"):
        _ = Run(copy).model


def _copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for entry in source.iterdir():
        (target / entry.name).write_bytes(entry.read_bytes())
    return target


def test_a_run_loads_with_the_core_libraries_alone() -> None:
    code = (
        ONLY_THE_CORE
        + """
from seqboat.run import Run
found = Run("enwik8-small")
print(found.step, found.config.recipe, found.task.name, found.language_model.training)
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found = Run("enwik8-small")
    assert done.stdout == f"{found.step} {found.config.recipe} enwik8 False\n", done.stderr


@pytest.mark.parametrize("facts", ["labels", [1, 2]])
def test_facts_that_are_no_object_are_refused(facts: Any) -> None:
    with pytest.raises(ValueError, match=r"state\.json: facts must be an object, got"):
        SavedFacts(facts, Path("state.json"))


def test_a_task_keeps_the_file_that_its_facts_come_from() -> None:
    task = ClassifyTaskConfig(train="table.csv").build()
    task.facts = SavedFacts({"input": "text"}, Path("state.json"))
    with pytest.raises(ValueError, match=r"state\.json says nothing about the 'labels' of the data"):
        task.facts["labels"]
