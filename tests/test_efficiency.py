"""Speed and memory beside the paper's, on layers of a few tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqboat import tasks
from seqboat.bench.candidates import MIXER_TITLES
from seqboat.mixers import MIXERS
from seqboat.paper import published
from seqboat.paper.published import EFFICIENCY_MODELS as MODELS
from seqboat.paper.reproduce import plan, run_job
from seqboat.paper.results import add_records
from seqboat.paper.table6 import BLOCKS, EFFICIENCY, measured_ratio
from seqboat.paper.trial import Trial
from small_runs import Spy, ToyConfig, small_run


def test_published_numbers_are_complete() -> None:
    assert published.LRA.keys() <= MIXERS.keys() <= MIXER_TITLES.keys()
    assert (published.LRA["transformer"].speed, published.LRA["transformer"].memory) == (1.0, 1.0)
    for name, row in published.LRA.items():
        scores = [score for score in row.accuracy.values() if score is not None]
        # averages are printed to two digits, some of them rounded to one first
        assert sum(scores) / len(scores) == pytest.approx(row.average, abs=0.02), name
    for task in published.EFFICIENCY.values():
        for block in (task.training, task.memory, task.evaluation):
            assert block.keys() == MODELS.keys() and block["mega"] == 1.0
    # the paper repeats some of its speeds: they must agree
    for table, form, model in (("SeqBoat-full", "full", "seqboat-full"), ("SeqBoat", "", "seqboat")):
        for name, score in published.ABLATIONS[table][form].scores.items():
            assert score.speed == published.EFFICIENCY[name].training[model]


def test_table_6_is_of_whole_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "toy", ToyConfig)
    config = small_run(training={"log_every": 6})
    monkeypatch.setattr(Trial, "config", lambda trial, seed: config)
    jobs = plan(EFFICIENCY, "small", tmp_path, rows=["mega", "seqboat"], tasks=["text"])
    assert [job.trial.row for job in jobs] == ["mega", "seqboat"]
    for job in jobs:
        run_job(job, Spy())
    base, own = (EFFICIENCY.collect(job) for job in jobs)
    assert own["step_seconds"] > 0 and own["examples_per_second"] > 0 and own["step_memory_mb"] is None
    base |= {"step_seconds": 0.4, "step_memory_mb": 100.0, "examples_per_second": 50.0}
    own |= {"step_seconds": 0.1, "step_memory_mb": 20.0, "examples_per_second": 150.0}
    assert [measured_ratio(block, [own], [base]) for block in BLOCKS] == pytest.approx([4.0, 0.2, 3.0])
    other = {**own, "device": "A100"}
    assert measured_ratio(BLOCKS[0], [other], [base]) is None, "other hardware is no comparison"
    add_records(tmp_path / "results.md", [base, own])
    text = (tmp_path / "results.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| SeqBoat |"))
    assert line.split(" | ")[2] == "4.00x (3.61x)" and "0.20x (0.16x)" in text and "3.00x (3.55x)" in text
    assert "100 / 20 / 150" in text and "not run" in text
    assert (tmp_path / "images" / "results-efficiency-small.svg").stat().st_size > 5000
