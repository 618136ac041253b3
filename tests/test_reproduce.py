"""Experiments run by name, resumed, collected, and written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import seqboat.reproduce as reproduce
from seqboat.cli import main
from seqboat.config import RunConfig
from seqboat.recipes import RECIPES
from seqboat.reproduce import TARGETS, Job, Target, Trial, collect, estimate, plan, run_job
from seqboat.results import add_records, read_records
from seqboat.tasks import TASKS
from small_runs import Spy, ToyConfig, small_run


def toy_small(mixer: Any = None) -> RunConfig:
    """A toy.

    Cut: everything but
    the toy.
    """
    return small_run()


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target of two runs that take a second, known by name."""
    monkeypatch.setitem(TASKS, "toy", ToyConfig)
    monkeypatch.setitem(RECIPES, "toy-small", toy_small)
    made = Target(
        name="toys",
        title="Toys",
        where="table 0",
        about="Toys.",
        small=(
            Trial(name="toy", title="Toy", recipe="toy-small", seeds=2, minutes=1.0, paper="99 %"),
            Trial(
                name="fast", title="Fast", recipe="toy-small", arguments=("--optimiser.lr=0.03",), minutes=2.0
            ),
        ),
        paper=(Trial(name="toy", title="Toy", recipe="toy-small"),),
    )
    monkeypatch.setitem(TARGETS, "toys", made)
    return made


@pytest.mark.parametrize("name", list(TARGETS))
def test_every_trial_has_a_configuration(name: str) -> None:
    for scale in ("small", "paper"):
        trials = TARGETS[name].trials(scale)
        assert len({trial.name for trial in trials}) == len(trials)
        for trial in trials:
            assert trial.config(3).seed == 3
            assert (trial.minutes is None) == (scale == "paper"), (
                "only small runs are estimated for two cores"
            )


def test_runs_are_planned_run_and_collected(target: Target, tmp_path: Path) -> None:
    jobs = plan(target, "small", tmp_path)
    assert [(job.trial.name, job.seed, job.finished) for job in jobs] == [
        ("toy", 0, False),
        ("toy", 1, False),
        ("fast", 0, False),
    ]
    assert estimate(jobs) == (4.0, 0)
    assert estimate(plan(target, "paper", tmp_path)) == (0.0, 1)
    assert run_job(jobs[2], Spy()).exit_code == 0
    again = plan(target, "small", tmp_path)
    assert [job.finished for job in again] == [False, False, True]
    assert estimate(again) == (2.0, 0)
    record = collect(again[2])
    assert record["command"] == "seqboat train toy-small --optimiser.lr=0.03 --seed=0"
    assert record["metric"] == "accuracy" and 0 <= record["test"] <= 1
    assert [step for step, _ in record["curve"]] == [12, 24]
    assert len(record["activation"]) == 2 and record["minutes"] > 0
    json.dumps(record)


def test_a_score_is_kept_until_the_run_changes(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plan(target, "small", tmp_path)[2]
    run_job(job, Spy())
    first = collect(job)
    monkeypatch.setattr(reproduce, "evaluate_run", lambda *a, **k: pytest.fail("scored twice"))
    assert collect(job) == first
    kept = job.folder / reproduce.TEST
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "step": 1}))
    with pytest.raises(pytest.fail.Exception, match="scored twice"):
        collect(job)


def test_a_run_with_other_settings_is_not_taken(target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "small" / "fast" / "seed-0"
    run_job(plan(target, "small", tmp_path)[0]._replace(folder=folder), Spy())
    with pytest.raises(
        ValueError, match=r"seed-0 was made with other settings: optimiser.lr is 0.03, it was 0.01"
    ):
        plan(target, "small", tmp_path)


def test_the_page_holds_every_record_and_says_what_was_not_run(target: Target, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "results.md"
    jobs = plan(target, "small", tmp_path)
    for job in jobs[:2]:
        run_job(job, Spy())
    one, two = (collect(job) for job in jobs[:2])
    add_records(page, [one])
    # a record of the same run takes the place of the older one
    records = add_records(page, [{**one, "test": 0.5}, {**two, "test": 0.7}])
    assert read_records(page) == records and len(records) == 2
    text = page.read_text()
    assert "| Toy | 99 % | 60.0 % ± 14.1 | 0, 1 |" in text
    assert "| Fast | - | not run |" in text
    assert "- **Toy.** Cut: everything but the toy." in text
    assert "`seqboat train toy-small --optimiser.lr=0.03`" in text
    assert "Not run here. `seqboat reproduce toys --scale paper` runs it: `seqboat train toy-small`." in text
    assert (page.parent / "images" / "results-toys-small.png").stat().st_size > 5000


def test_records_that_are_not_records_are_refused(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    for content in ("[1]", '{"a": 1}', "[", '[{"target": "lra"}]'):
        page.with_suffix(".json").write_text(content)
        with pytest.raises(ValueError, match=r"results.json does not hold results"):
            add_records(page, [])


def test_the_command(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    assert "lra          Long Range Arena (table 1)" in capsys.readouterr().out
    out = ["--out", str(tmp_path / "runs")]
    assert main(["reproduce", "toys", "--dry-run", *out]) == 0
    text = capsys.readouterr().out
    assert "seqboat train toy-small --optimiser.lr=0.03 --seed=0: 24 steps" in text
    assert "about 4 minutes on two cores" in text
    assert not (tmp_path / "runs").exists()
    assert main(["reproduce", "toys", "--seeds", "1", *out]) == 0
    assert "wrote" in capsys.readouterr().out
    assert main(["reproduce", "toys", *out, "--collect", "--page", str(tmp_path / "page.md")]) == 0
    assert len(read_records(tmp_path / "page.md")) == 2
    for wrong, message in (
        (["reproduce", "lar"], "target 'lar' is unknown; expected some of lra"),
        (["reproduce", "toys", "--seeds", "0"], "--seeds must be an integer >= 1, got 0"),
        (["reproduce", "diagnostics", "--scale", "paper"], "diagnostics has nothing to run at --scale paper"),
    ):
        assert main([*wrong, *out]) == 2
        assert message in capsys.readouterr().err


def test_an_interrupted_run_ends_the_command_with_its_code(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Job] = []

    def stopped(job: Job) -> Any:
        seen.append(job)
        return reproduce.Outcome(130, 7, None, "stopped by SIGINT after step 7; --resume goes on")

    monkeypatch.setattr(reproduce, "run_job", stopped)
    assert main(["reproduce", "toys", "--out", str(tmp_path)]) == 130
    assert len(seen) == 1 and "stopped by SIGINT after step 7" in capsys.readouterr().err
