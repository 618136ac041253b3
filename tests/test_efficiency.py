"""Speed and memory beside the paper's, on layers of a few tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seqboat import tasks
from seqboat.bench.candidates import MIXER_TITLES, Candidate, build
from seqboat.bench.setting import LayerSetting
from seqboat.cli.main import main
from seqboat.mixers import MIXERS
from seqboat.models.cost import count_parameters
from seqboat.paper import layer_efficiency, published
from seqboat.paper.layer_efficiency import LAYER_EFFICIENCY, rate_of, task_setting
from seqboat.paper.mixer_efficiency import MIXER_EFFICIENCY, mixer_candidates
from seqboat.paper.published import EFFICIENCY_MODELS as MODELS
from seqboat.paper.reproduce import plan, run_job
from seqboat.paper.results import add_records, read_records
from seqboat.paper.table6 import BLOCKS, EFFICIENCY, measured_ratio
from seqboat.paper.target import MeasuredTarget
from seqboat.paper.trial import Bench, Trial
from seqboat.training.loop import train
from small_runs import Spy, ToyConfig, small_run

FAST: dict[str, Any] = {"rounds": 1, "warmup": 0, "memory": False}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 64 tokens in sequences of 32."""
    monkeypatch.setattr(layer_efficiency, "TOKENS", 64)
    for name, task in published.EFFICIENCY.items():
        monkeypatch.setitem(published.EFFICIENCY, name, task._replace(length=32))


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


def test_layers_are_those_of_the_recipes() -> None:
    setting = task_setting("pathx", "small", 0.25)
    assert (setting.batch, setting.length, setting.d_model, setting.window) == (1, 16384, 128, 512)
    assert (setting.attention, setting.rate, setting.prenorm) == ("relu2", 0.25, True)
    assert task_setting("listops", "small", 0.5).batch == 4
    assert task_setting("listops", "paper", 0.5).batch == 64
    # the attention function is that of the task in MEGA as well
    assert build(Candidate("mega", "mega", {}), setting).config.attention == "relu2"  # type: ignore[union-attr]


def test_the_rate_is_that_of_a_trained_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "toy", ToyConfig)
    assert rate_of(tmp_path, "text") == (0.5, None)
    train(small_run(), tmp_path / "small" / "text" / "seed-0", display=Spy())
    value, run = rate_of(tmp_path, "text")
    assert 0 <= value <= 1 and run == "small/text/seed-0"


def test_equal_parameters() -> None:
    setting = LayerSetting(length=64, d_model=32, d_z=8, d_v=64, heads=2, window=8)
    wide = {c.label: c for c in mixer_candidates(setting, matched=False)}
    assert {c.name for c in wide.values()} == MIXERS.keys() and next(iter(wide)) == "transformer"
    target = count_parameters(build(wide["seqboat"], setting))
    for candidate in mixer_candidates(setting, matched=True):
        parameters = count_parameters(build(candidate, setting))
        assert abs(parameters / target - 1) < 0.1, candidate.label


@pytest.mark.usefixtures("tiny")
def test_layers_at_the_sizes_of_table_6(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    record = LAYER_EFFICIENCY.measure(LAYER_EFFICIENCY.small_benches[0], "small", tmp_path, **FAST)
    assert list(record["parts"]) == list(published.EFFICIENCY)
    for task, part in record["parts"].items():
        assert [(row["candidate"], row["mode"]) for row in part["rows"]] == [
            (model, mode) for mode in ("training", "inference") for model in MODELS
        ]
        assert part["setting"]["d_model"] == task_setting(task, "small", 0.5).d_model
        assert part["rate"] == {"value": 0.5, "run": None}
    row = record["parts"]["text"]["rows"][3]
    assert row["candidate"] == "seqboat"
    row["ratio"], row["memory_ratio"] = 0.25, 0.125
    record["parts"]["pathx"]["rows"][0] |= {
        "seconds": None,
        "ratio": None,
        "note": "mega would take too long",
    }
    add_records(page, [record])
    text = page.read_text()
    line = next(line for line in text.splitlines() if line.startswith("| SeqBoat |"))
    assert line.split(" | ")[2] == "4.00x (3.61x)"
    assert "0.12x (0.16x)" in text and "left out (1.00x)" in text
    assert "- Left out: mega would take too long." in text and "50%, assumed" in text
    assert (tmp_path / "images" / "results-layer-efficiency-small.svg").stat().st_size > 5000


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


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("matched", [False, True])
def test_every_mixer_is_measured(tmp_path: Path, matched: bool) -> None:
    name = "parameters-4096" if matched else "width-4096"
    bench = Bench(name=name, title="few tokens", minutes=1, length=32, matched=matched)
    record = MIXER_EFFICIENCY.measure(bench, "small", tmp_path, **FAST)
    part = record["parts"]["mixers"]
    assert {row["candidate"] for row in part["rows"]} == MIXERS.keys() | {"transformer, fused"}
    assert all(row["seconds"] is not None for row in part["rows"])
    add_records(tmp_path / "results.md", [record])
    text = (tmp_path / "results.md").read_text()
    assert "| transformer (d_ff" in text if matched else "| transformer | 1" in text
    assert "| seqboat | " in text or matched
    assert "10.4x" in text and "0.05x" in text
    assert f"### All lengths, equal {'parameters' if matched else 'width'}" in text
    assert "| mixer | training speed, 4,096 | training speed, paper | training memory, 4,096 |" in text
    assert (tmp_path / "images" / "results-mixers-efficiency-small.svg").exists() is not matched


def test_what_is_on_the_page_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def measured(target: MeasuredTarget, bench: Bench, scale: str, *rest: Any) -> dict[str, Any]:
        asked.append(bench.name)
        return {"target": "none", "scale": scale, "trial": bench.name, "seed": 0}

    monkeypatch.setattr(MeasuredTarget, "measure", measured)
    out = ["reproduce", "mixers-efficiency", "--out", str(tmp_path), "--only", "width-*"]
    assert main(out) == 0
    assert asked == ["width-1024", "width-4096", "width-16384"]
    assert (
        "width-4096: Speed and memory of every mixer, 4,096 tokens, equal width: to measure"
        in capsys.readouterr().out
    )
    page = tmp_path / "results.md"
    page.with_suffix(".json").write_text(
        page.with_suffix(".json").read_text().replace('"none"', '"mixers-efficiency"')
    )
    assert len(read_records(page)) == 3
    assert main([*out, "--dry-run"]) == 0
    assert "on the page already" in capsys.readouterr().out
    assert main(out) == 0 and len(asked) == 3
    capsys.readouterr()
    assert main([*out, "--again", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("to measure") == 3 and "on the page already" not in shown
    assert main(["reproduce", "mixers-efficiency", "--out", str(tmp_path), "--scale", "paper"]) == 2
    assert "nothing to run at --scale paper" in capsys.readouterr().err
