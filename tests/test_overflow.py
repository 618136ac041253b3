"""Numbers that overflow: no answer is made of them, and no score."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqboat import Classifier
from seqboat.cli.main import main
from seqboat.mixers import MIXERS
from seqboat.ops.attention import FUNCTIONS, Seen, attend
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
    assert len(rows) == 24 and all(not row["predicted_label"] and not row["probability"] for row in rows)
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
    task = RegressTaskConfig(train=str(path), max_length=16).build()
    # such rows are left out and named: their mean would not be finite
    assert all(np.isfinite(task.dataset("train")[i].target).all() for i in range(len(task.dataset("train"))))
    assert task.skips is not None and task.skips.count == 2
    assert "a number must be between" in task.skips.first and "train.csv" in task.skips.first


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


@pytest.mark.parametrize("name", MIXERS)
def test_a_row_that_overflows_leaves_its_batch_alone(name: str) -> None:
    """In every type, for short and long rows: the others are what they are beside any row."""
    for dtype, large in ((torch.float32, 3e38), (torch.float16, 2e4), (torch.float16, math.inf)):
        for seed, time in ((0, 7), (2, 7), (3, 40)):
            torch.manual_seed(seed)
            model = Classifier(mixer=name, d_model=16, num_layers=2, channels=2, classes=3).to(dtype).eval()
            x = torch.randn(4, time, 2).to(dtype)
            lengths = torch.tensor([time, 3, time, 5])
            mask = torch.arange(time) < lengths[:, None]
            row = seed % 4
            wild = x.clone()
            wild[row] = large
            with torch.no_grad():
                expected, found = model(x, mask).logits, model(wild, mask).logits
            others = [other for other in range(4) if other != row]
            assert found[others].isfinite().all()
            assert (found[others] - expected[others]).abs().max() <= 1e-2 * expected.abs().max()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_a_group_that_overflows_leaves_the_others_alone(function: str, value: float) -> None:
    """Of banded attention, where a block of tokens holds several groups."""
    torch.manual_seed(0)
    counts = torch.tensor([5, 40, 300, 11])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    group = torch.arange(4).repeat_interleave(counts)
    q, k, v = (torch.randn(len(group), size) for size in (4, 4, 8))
    seen = Seen(group, offsets, 300, 20, 20)
    expected = attend(q, k, v, seen, function)
    for part in (q, k, v):
        before = part[7].clone()
        part[7] = value
        found = attend(q, k, v, seen, function)
        part[7] = before
        torch.testing.assert_close(found[group != 1], expected[group != 1])
