"""The recipes of bulk answers: a Ray cluster, here of two workers on one machine, and parts of an array of jobs."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seqboat.own.task import ClassifyTaskConfig
from seqboat.predict import Predictor
from seqboat.training.trainer import train
from small_runs import Spy, small_run


@pytest.fixture
def cluster() -> Iterator[None]:
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def recipe(name: str) -> Any:
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[data] and pandas")
@pytest.mark.filterwarnings("ignore")
def test_two_workers_answer_as_one_process(tmp_path: Path, cluster: None) -> None:
    rows = "".join(f"text {number},{'ab'[number % 2]}\n" for number in range(24))
    (tmp_path / "train.csv").write_text("text,label\n" + rows)
    config = small_run(task=ClassifyTaskConfig(train=str(tmp_path / "train.csv"), max_length=16)).replace(
        schedule={"steps": 1, "warmup_steps": 0}, evaluation={"every": 1}
    )
    train(config, tmp_path / "run", display=Spy())
    texts = [f"text {number}" for number in range(3000)]
    (tmp_path / "new.csv").write_text("id,text\n" + "".join(f"{n},{text}\n" for n, text in enumerate(texts)))
    found = (
        recipe("ray_predict").predict(str(tmp_path / "run"), str(tmp_path / "new.csv"), workers=2).take_all()
    )
    assert [row["id"] for row in found] == list(range(3000))
    answers = Predictor(tmp_path / "run").predict(texts)
    assert [row["label"] for row in found] == [answer["label"] for answer in answers]
    probabilities = [answer["probability"] for answer in answers]
    assert [row["probability"] for row in found] == pytest.approx(probabilities, rel=1e-5)


def test_parts_are_put_together_in_the_order_of_the_input(tmp_path: Path) -> None:
    merge = recipe("merge_answers").merge
    rows = [f'{number},"a\ntext {number}",good\n' for number in range(11)]
    parts = [tmp_path / f"part-{place}.csv" for place in range(3)]
    for place, path in enumerate(parts):
        path.write_text("input_row,text,label\n" + "".join(rows[place::3]))
    assert merge(tmp_path / "answers.csv", parts) == 11
    assert (tmp_path / "answers.csv").read_text() == "input_row,text,label\n" + "".join(rows)
    with pytest.raises(ValueError, match="row 1 is in none of the parts"):
        merge(tmp_path / "fewer.csv", [parts[0], parts[2]])
    with pytest.raises(ValueError, match="or row 0 in two"):
        merge(tmp_path / "twice.csv", [*parts, parts[0]])
    with pytest.raises(ValueError, match="is the input itself"):
        merge(parts[0], parts)
    assert not (tmp_path / "fewer.csv").exists() and parts[0].read_text().startswith("input_row,text,label")
