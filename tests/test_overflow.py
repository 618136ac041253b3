"""Numbers that overflow: no answer is made of them, and no score."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from seqboat.cli.main import main
from seqboat.own.task import ClassifyTaskConfig, RegressTaskConfig
from seqboat.run import Run
from seqboat.tasks import TASKS
from seqboat.training import trainer
from seqboat.training.checkpoint import MODEL, CheckpointStore
from seqboat.training.evaluate import Evaluation
from seqboat.training.trainer import EXIT_DIVERGED, train
from small_runs import Spy, ToyConfig, small_run


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights make NaN of everything."""
    folder = tmp_path_factory.mktemp("diverged")
    rows = "".join(f"text {number},{'ab'[number % 2]}\n" for number in range(24))
    (folder / "train.csv").write_text("text,label\n" + rows)
    config = small_run(task=ClassifyTaskConfig(train=str(folder / "train.csv"), max_length=16)).replace(
        schedule={"steps": 1, "warmup_steps": 0}, evaluation={"every": 1}
    )
    train(config, folder / "run", display=Spy())
    store = CheckpointStore(folder / "run")
    found = store.newest()
    assert found is not None
    tensors = found.tensors(MODEL)
    tensors["head.out.bias"][0] = math.nan
    state = {key: value for key, value in found.state.items() if key not in ("files", "format")}
    store.save(1, {MODEL: tensors}, state, best=True)
    return folder


def test_an_output_that_is_not_finite_is_an_error_with_its_row(
    diverged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = diverged / "answers.csv"
    assert main(["predict", str(diverged / "run"), str(diverged / "train.csv"), "--out", str(out)]) == 0
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24 and all(not row["label"] and not row["probability"] for row in rows)
    assert {row["error"] for row in rows} == {"the model's output is not finite (NaN or infinite)"}
    assert "24 of 24 rows" in capsys.readouterr().err


def test_no_score_is_made_of_it(diverged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^val example \d+: the model's output is not finite"):
        Run(diverged / "run").evaluate("val")
    assert main(["explain", str(diverged / "run"), "--text", "a text"]) == 2
    assert "output for this input is not finite" in capsys.readouterr().err


@pytest.mark.parametrize("large", ["1e308", "-1.7e308", "1e200"])
def test_numbers_too_large_to_learn(large: str, tmp_path: Path) -> None:
    rows = "".join(f"text {number},{number}\n" for number in range(20))
    path = tmp_path / "train.csv"
    path.write_text(f"text,label\n{rows}last,{large}\nother,-{large.lstrip('-')}\n")
    config = small_run(task=RegressTaskConfig(train=str(path), max_length=16))
    with pytest.raises(ValueError, match=r"train.csv: label holds .*: a mean of such numbers is not finite"):
        train(config, tmp_path / "run", display=Spy())


def test_a_run_without_a_finite_score_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "toy", ToyConfig)

    def nothing(*_: Any, **__: Any) -> Evaluation:
        return Evaluation({"loss": math.nan, "accuracy": math.nan}, [None, None], 45)

    monkeypatch.setattr(trainer, "evaluate", nothing)
    spy = Spy()
    outcome = train(small_run(), tmp_path / "run", display=spy)
    assert outcome.exit_code == EXIT_DIVERGED and outcome.message == "no evaluation gave a finite accuracy"
    assert "step 12: accuracy is not finite: nan" in spy.messages
