"""Data that changed since a run was trained on them are noticed by whoever continues or scores the run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqboat.analysis.traces import load_examples
from seqboat.cli.main import main
from seqboat.data.prepare import prepare
from seqboat.own.task import ClassifyTaskConfig
from seqboat.run import Run
from seqboat.tasks.listops import ListOpsTaskConfig
from seqboat.training import checkpoint as ck
from seqboat.training.checkpoint import MODEL, OPTIM, CheckpointStore
from seqboat.training.config import RunConfig
from seqboat.training.trainer import train
from small_runs import Spy, small_run


def write_table(
    path: Path, words: tuple[str, str] = ("good", "bad"), rows: int = 24, first: str = "text 0"
) -> None:
    texts = [first, *(f"text {number}" for number in range(1, rows))]
    path.write_text("text,label\n" + "".join(f"{t},{words[i % 2]}\n" for i, t in enumerate(texts)))


def config_of(folder: Path, steps: int = 2) -> RunConfig:
    task = ClassifyTaskConfig(train=str(folder / "train.csv"), test=str(folder / "test.csv"), max_length=16)
    return small_run(task=task).replace(
        schedule={"steps": steps, "warmup_steps": 0}, evaluation={"every": 1}, training={"save_every": 1}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of one step out of two, on a table."""
    write_table(tmp_path / "train.csv")
    write_table(tmp_path / "test.csv", rows=10)

    class Stop(Exception):
        pass

    def stop(done: int, model: object) -> None:
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        train(config_of(tmp_path), tmp_path / "run", display=Spy(), on_step=stop)
    return tmp_path


def renamed(folder: Path) -> None:
    """The class that came first in the alphabet comes last."""
    write_table(folder / "train.csv", ("good", "poor"))


def shorter(folder: Path) -> None:
    write_table(folder / "train.csv", rows=23)


def other_word(folder: Path) -> None:
    write_table(folder / "train.csv", first="text #")


CHANGES = [
    (renamed, r"train.csv has other classes: 2 without 'bad', there were 2"),
    (shorter, r"train.csv has 23 rows, it had 24"),
    (other_word, r"the content of train.csv has changed"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_run_does_not_go_on_with_other_data(
    folder: Path, change: Callable[[Path], None], message: str
) -> None:
    change(folder)
    with pytest.raises(
        ValueError, match=rf"the data of the split train changed since .*step-1.*: {message}; restore"
    ):
        train(config_of(folder), folder / "run", resume=True, display=Spy())
    write_table(folder / "train.csv")
    assert train(config_of(folder), folder / "run", resume=True, display=Spy()).step == 2


def test_files_that_moved_or_were_touched_are_the_same(folder: Path) -> None:
    (folder / "train.csv").touch()
    shutil.rmtree(folder / "data", ignore_errors=True)
    assert train(config_of(folder), folder / "run", resume=True, display=Spy()).step == 2


def test_a_score_is_of_the_data_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "run"
    assert Run(run).evaluate("test")["examples"] == 10
    write_table(folder / "test.csv", rows=9)
    message = r"the data of the split test are not those of .*step-1: test.csv has 9 rows, it had 10"
    with pytest.raises(ValueError, match=message):
        Run(run).evaluate("test")
    with pytest.raises(ValueError, match=message):
        load_examples(run, "test", 4)
    assert main(["eval", str(run), "--split", "test"]) == 2
    assert "test.csv has 9 rows" in capsys.readouterr().err
    # named on purpose
    assert main(["eval", str(run), "--split", "test", f"--data.test={folder / 'test.csv'}"]) == 0
    # held-out rows of a table that changed may have been trained on
    shorter(folder)
    with pytest.raises(ValueError, match=r"the split val are not those of .*step-1: train.csv has 23 rows"):
        Run(run).evaluate("val")


def test_prepared_data_are_known_by_content(tmp_path: Path) -> None:
    prepare("listops-small", "generate", tmp_path, counts=(20, 10, 10), workers=1)
    task = ListOpsTaskConfig(data_dir=str(tmp_path), store="listops-small", max_length=600)
    config = small_run(task=task).replace(
        schedule={"steps": 1, "warmup_steps": 0}, evaluation={"every": 1}, training={"max_tokens": 1 << 16}
    )
    train(config, tmp_path / "run", display=Spy())
    assert np.isfinite(Run(tmp_path / "run").evaluate("test")["loss"])
    # made again: the same data
    prepare("listops-small", "generate", tmp_path, counts=(20, 10, 10), workers=1, force=True)
    Run(tmp_path / "run").evaluate("test")
    prepare("listops-small", "generate", tmp_path, counts=(20, 10, 10), workers=1, force=True, seed=1)
    with pytest.raises(ValueError, match="the content of listops-small has changed"):
        Run(tmp_path / "run").evaluate("test")


def test_a_reader_beside_a_writer_looks_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is replaced by a newer one between its check and its reading."""
    run = folder / "run"
    store = CheckpointStore(run, keep=1)
    found = store.newest()
    assert found is not None
    tensors = {name: found.tensors(name) for name in (MODEL, OPTIM)}
    state = {key: value for key, value in found.state.items() if key not in ("files", "format")}
    load = ck.load_file

    def race(path: Path) -> Any:
        if not store.path(7).exists():
            store.save(7, tensors, state, best=True)
            shutil.rmtree(path.parent)
        return load(path)

    monkeypatch.setattr(ck, "load_file", race)
    assert Run(run).step == 7 and Run(run).weights.keys() == tensors[MODEL].keys()


def test_a_run_outlives_the_files_that_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner empties the temporary folder while the run trains, and takes the table too."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("TMPDIR", str(scratch))
    write_table(tmp_path / "train.csv")
    write_table(tmp_path / "test.csv", rows=10)

    def clean(done: int, model: object) -> None:
        if done == 1:
            shutil.rmtree(scratch)
            (tmp_path / "train.csv").unlink()

    assert train(config_of(tmp_path, 3), tmp_path / "run", display=Spy(), on_step=clean).step == 3
    found = CheckpointStore(tmp_path / "run").newest()
    assert found is not None and found.step == 3


def test_reading_writes_nothing(tmp_path: Path) -> None:
    """Also not where a process died while it replaced prepared data."""
    prepare("listops-small", "generate", tmp_path, counts=(20, 10, 10), workers=1)
    (tmp_path / "listops-small").rename(tmp_path / ".listops-small.old")
    before = sorted(path.as_posix() for path in tmp_path.rglob("*"))
    task = ListOpsTaskConfig(data_dir=str(tmp_path), store="listops-small", max_length=600).build()
    assert len(task.dataset("train")) == 20
    assert sorted(path.as_posix() for path in tmp_path.rglob("*")) == before
