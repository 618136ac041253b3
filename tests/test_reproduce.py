"""Experiments run by name, resumed, collected, and written down."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import seqboat.paper.reproduce as reproduce
from seqboat.analysis.measures import measure_run
from seqboat.analysis.traces import load_examples, trace
from seqboat.cli.main import main
from seqboat.data.files import Lock
from seqboat.paper import target as base
from seqboat.paper.figure3 import ActivationTarget
from seqboat.paper.figure4 import ConfidenceTarget
from seqboat.paper.figure6 import SpanTarget
from seqboat.paper.machine import Machine, fitting
from seqboat.paper.reproduce import estimate, plan, run_job
from seqboat.paper.results import add_records, read_records
from seqboat.paper.tables123 import RunsTarget, TableTarget
from seqboat.paper.target import Job, Target, per_step, step_memory
from seqboat.paper.targets import GROUPS, TARGETS
from seqboat.paper.trial import Trial
from seqboat.recipes import RECIPES, find_recipe
from seqboat.run import Run
from seqboat.tasks import TASKS
from seqboat.training.config import RunConfig, override
from seqboat.training.plan import estimate as estimate_run
from small_runs import Spy, Toy, ToyConfig, small_run


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
    made = RunsTarget(
        name="toys",
        title="Toys",
        where="table 0",
        about="Toys.",
        small=(
            Trial(name="toy", title="Toy", recipe="toy-small", seeds=2, minutes=1.0, paper="99 %"),
            Trial(
                name="fast", title="Fast", recipe="toy-small", arguments=("--optimizer.lr=0.03",), minutes=2.0
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
            config = trial.config(3)
            assert config.seed == 3 and config.schedule.steps == trial.steps
            assert trial.baseline is None or trial.baseline in {other.name for other in trials}
            assert trial.minutes is None or scale == "small", "only small runs are estimated for two cores"


def test_trials_of_one_name_are_one_run() -> None:
    for scale in ("small", "paper"):
        found: dict[str, str] = {}
        for target in TARGETS.values():
            for trial in target.trials(scale):
                assert found.setdefault(trial.name, trial.command()) == trial.command()


def test_sizes_of_memory_and_chunk_differ_in_nothing_else() -> None:
    for trials, sizes in ((TARGETS["tradeoff"].small, 4), (TARGETS["tradeoff"].paper, 6)):
        groups: dict[tuple[str, str], list[Trial]] = {}
        for trial in trials:
            groups.setdefault((trial.task, trial.title), []).append(trial)
        assert len(groups) == 4 and {len(group) for group in groups.values()} == {sizes}
        for (_, model), group in groups.items():
            field = "chunk" if model == "MEGA-chunk" else "gau.window"
            first = override(group[0].config(0), [f"--model.mixer.{field}=7"])
            for trial in group:
                config = trial.config(0)
                mixer: Any = config.model.mixer
                assert (mixer.chunk if field == "chunk" else mixer.gau.window) == trial.size, trial.name
                assert override(config, [f"--model.mixer.{field}=7"]).model == first.model


def test_the_ablations_hold_both_tables() -> None:
    for scale in ("small", "paper"):
        trials = TARGETS["ablation"].trials(scale)
        rows = {
            (t.table, t.task): [u.title for u in trials if (u.table, u.task) == (t.table, t.task)]
            for t in trials
        }
        assert {key: len(titles) for key, titles in rows.items()} == {
            ("SeqBoat-full", "image"): 4,
            ("SeqBoat-full", "listops"): 4,
            ("SeqBoat", "image"): 9,
            ("SeqBoat", "listops"): 9,
            ("SeqBoat", "pathfinder"): 9,
            ("", "image"): 1,
            ("", "listops"): 1,
            ("", "pathfinder"): 1,
        }
        seeds = {(trial.task, trial.seeds) for trial in trials}
        assert seeds == {("image", 1), ("listops", 3 if scale == "small" else 1), ("pathfinder", 1)}


def test_seconds_of_a_step_leave_evaluations_out() -> None:
    records: list[dict[str, Any]] = [
        {"step": 10, "split": "train", "processor": 2.0},
        {"step": 20, "split": "train", "processor": 4.0},
        {"step": 20, "split": "val", "processor": 9.0},
        {"step": 25, "split": "skipped"},
        {"step": 30, "split": "train", "processor": 11.0},
        {"step": 30, "split": "val", "processor": 12.0},
    ]
    assert per_step(records, "processor") == pytest.approx(0.2)
    assert per_step([{"step": 10, "split": "train"}, *records], "processor") is None
    assert per_step([], "processor") is None and per_step(records, "elapsed") is None


def test_memory_of_a_step_is_averaged_over_all_steps() -> None:
    records = [
        {"step": 10, "split": "train", "step_memory_mb": 1.0},
        {"step": 10, "split": "val"},
        {"step": 40, "split": "train", "step_memory_mb": 5.0},
    ]
    assert step_memory(records) == pytest.approx(4.0)
    assert step_memory([{"step": 1, "split": "train"}]) is None and step_memory([]) is None


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
    record = target.collect(again[2])
    assert record["command"] == "seqboat train toy-small --optimizer.lr=0.03 --seed=0"
    assert record["metric"] == "accuracy" and 0 <= record["test"] <= 1
    assert [step for step, _ in record["curve"]] == [12, 24]
    assert len(record["activation"]) == 2 and record["minutes"] > 0
    json.dumps(record)


def test_a_score_is_kept_until_the_run_changes(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plan(target, "small", tmp_path)[2]
    run_job(job, Spy())
    first = target.collect(job)
    monkeypatch.setattr(Run, "evaluate", lambda *a, **k: pytest.fail("scored twice"))
    assert target.collect(job) == first
    kept = job.folder / base.TEST
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "step": 1}))
    with pytest.raises(pytest.fail.Exception, match="scored twice"):
        target.collect(job)


def test_a_run_with_other_settings_is_not_taken(target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "small" / "fast" / "seed-0"
    run_job(plan(target, "small", tmp_path)[0]._replace(folder=folder), Spy())
    with pytest.raises(
        ValueError, match=r"seed-0 was made with other settings: optimizer.lr is 0.03, it was 0.01"
    ):
        plan(target, "small", tmp_path)


def test_the_page_holds_every_record_and_says_what_was_not_run(target: Target, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "results.md"
    jobs = plan(target, "small", tmp_path)
    for job in jobs[:2]:
        run_job(job, Spy())
    one, two = (target.collect(job) for job in jobs[:2])
    add_records(page, [one])
    # a record of the same run takes the place of the older one
    records = add_records(page, [{**one, "test": 0.5}, {**two, "test": 0.7}])
    assert read_records(page) == records and len(records) == 2
    text = page.read_text()
    assert "| Toy | 99 % | 60.0 % ± 14.1 | -39.0 | 0, 1 |" in text
    assert "| Fast | - | not run |" in text
    assert "- **Toy.** Cut: everything but the toy." in text
    assert "`seqboat train toy-small --optimizer.lr=0.03`" in text
    assert "Not run here. `seqboat reproduce toys --scale paper` runs it: `seqboat train toy-small`." in text
    assert (page.parent / "images" / "results-toys-small.png").stat().st_size > 5000


def test_the_page_says_which_data_it_was(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = {"source": "my files", "counts": {"test": 1500, "train": 20}}
    monkeypatch.setattr(Toy, "origin", lambda task: origin)
    (job, *_) = plan(target, "small", tmp_path / "runs")
    run_job(job)
    record = target.collect(job)
    assert record["data"] == origin
    add_records(tmp_path / "page.md", [record])
    told = "- **Toy.** Cut: everything but the toy. Data: my files (20 train, 1,500 test); "
    assert f"{told}{record['examples']} of the test split scored." in (tmp_path / "page.md").read_text()


def test_figures_are_drawn_again_only_for_new_records(target: Target, tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    job = plan(target, "small", tmp_path)[2]
    run_job(job, Spy())
    record = target.collect(job)
    add_records(page, [record])
    figure = tmp_path / "images" / "results-toys-small.svg"
    figure.write_text("kept")
    add_records(page, [{"target": "other", "scale": "small", "trial": "x", "seed": 0}])
    assert figure.read_text() == "kept" and "images/results-toys-small.svg" in page.read_text()
    add_records(page, [record])
    assert figure.read_text() != "kept"


def test_layers_of_runs_are_observed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = tuple(
        dataclasses.replace(trial, title="Toy", task=f"toys {trial.name}", size=8, seeds=1)
        for trial in target.small
    )
    for name, kind in (("activation", ActivationTarget), ("span", SpanTarget)):
        made = kind(name=name, title="Toys", where="table 0", about="Toys.", small=trials)
        monkeypatch.setitem(TARGETS, name, made)
    out = ["--out", str(tmp_path), "--only", "toy"]
    assert main(["reproduce", "activation", "span", *out]) == 0
    shown = capsys.readouterr().out
    assert shown.count(": 24 steps") == 1 and "about 1 minutes of one core" in shown, "one run, two figures"
    activation, span = read_records(tmp_path / "results.md")
    expected = measure_run(tmp_path / "small" / "toy" / "seed-0", "val", 100, weighted=False)
    assert activation["rates"] == [[m.rate.mean, m.rate.std] for m in expected.layers if m is not None]
    assert [s is None for s in span["spans"]] == [m is None or m.span is None for m in expected.layers]
    text = (tmp_path / "results.md").read_text()
    assert "| Toy, active % | layer 1 | layer 2 | lower half | upper half |" in text
    assert "| toys fast | - | - | not run | - |" in text
    assert "| toys toy, memory | sliding window | layer 1 | layer 2 |" in text and "| 8 | 4 | " in text
    for name in ("activation", "span"):
        assert (tmp_path / "images" / f"results-{name}-small-dark.png").stat().st_size > 5000


def test_layers_without_attention_are_named(tmp_path: Path) -> None:
    record = {"scale": "small", "seed": 0, "versions": {"seqboat": "0", "torch": "0"}, "commit": None}
    rates = [[0.0, 0.0], [0.5, 0.1], None, [0.25, 0.0], [0.75, 0.2]]
    add_records(
        tmp_path / "results.md",
        [
            {**record, "target": "activation", "trial": "listops", "rates": rates},
            {**record, "target": "activation", "trial": "image", "rates": [[0.9, 0.0], [0.2, 0.0]]},
        ],
    )
    text = (tmp_path / "results.md").read_text()
    assert "attends more than the lower one in 1 of 2 tasks: ListOps." in text
    assert "works alone: ListOps layer 1." in text
    assert "| ListOps | 0.0 ± 0.0 | 50.0 ± 10.0 | 25.0 ± 0.0 | 75.0 ± 20.0 | - | 25.0 | 50.0 |" in text


def test_confidences_are_drawn_over_images(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = dataclasses.replace(target.small[1], arguments=("--task.length=3",), task="toys")
    other = dataclasses.replace(trial, name="other", title="Other")
    made = ConfidenceTarget(name="confidence", title="Toys", where="table 0", about="", small=(other, trial))
    monkeypatch.setitem(TARGETS, "confidence", made)
    job = plan(made, "small", tmp_path)[1]
    run_job(job, Spy())
    with pytest.raises(ValueError, match="has no images, but toy"):
        made.collect(job)
    monkeypatch.setattr(Toy, "picture", (1, 3))
    record = made.collect(job)
    examples = load_examples(job.folder, "val", 3)
    for i, picture in enumerate(record["pictures"]):
        assert picture["input"] == [examples.dataset[i].inputs.tolist()]
        sample = trace(examples.model, "classify", examples.batch([i]))[0]
        for seen, layer in zip(picture["layers"], sample.sequences[0].layers, strict=True):
            assert layer is not None
            np.testing.assert_allclose(seen, [layer.confidence], atol=6e-4)
    add_records(tmp_path / "results.md", [record])
    text = (tmp_path / "results.md").read_text()
    assert "images/results-confidence-small-toys.svg" in text and "Not run: Other." in text
    assert (tmp_path / "images" / "results-confidence-small-toys-dark.svg").stat().st_size > 5000


def test_records_that_are_not_records_are_refused(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    for content in ("[1]", '{"a": 1}', "[", '[{"target": "lra"}]'):
        page.with_suffix(".json").write_text(content)
        with pytest.raises(ValueError, match=r"results.json (does not hold results|cannot be read)"):
            add_records(page, [])


def test_the_command(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "runs")]
    assert main(["reproduce", *out]) == 0
    listed = capsys.readouterr().out
    assert (
        "lra                Long Range Arena (table 1): 0 of 90 done at --scale small, 71 minutes left"
        in listed
    )
    assert "toys               Toys (table 0): 0 of 3 done at --scale small, 4 minutes left" in listed
    assert main(["reproduce", "toys", "--dry-run", *out]) == 0
    text = capsys.readouterr().out
    assert text.count("  toy ") == 1 and "24 x 2" in text, "the seeds of a trial are one line"
    (fast,) = (line for line in text.splitlines() if line.startswith("  fast "))
    size = estimate_run(target.small[1].config(0)).parameters
    assert f" 24 {size:>11,} " in fast and fast.endswith(": seqboat train toy-small --optimizer.lr=0.03")
    assert " 8 by 4 " in fast and " GB  nothing: " in fast
    assert "about 4 minutes of one core" in text
    assert not (tmp_path / "runs").exists()
    assert main(["reproduce", "toys", "--seeds", "1", *out]) == 0
    assert "wrote" in capsys.readouterr().out
    assert main(["reproduce", *out]) == 0
    assert "Toys (table 0): 2 of 3 done at --scale small, 1 minutes left" in capsys.readouterr().out
    assert main(["reproduce", "toys", *out, "--collect", "--page", str(tmp_path / "page.md")]) == 0
    assert len(read_records(tmp_path / "page.md")) == 2
    for wrong, message in (
        (["reproduce", "lar"], "target 'lar' is unknown; expected some of lra"),
        (["reproduce", "toys", "--seeds", "0"], "--seeds must be an integer >= 1, got 0"),
        (["reproduce", "toys", "--only", "tay", "f"], "--only tay f fits nothing; there are toy, fast"),
        (["reproduce", "diagnostics", "--scale", "paper"], "diagnostics has nothing to run at --scale paper"),
        (["reproduce", "toys", "--page", str(tmp_path)], f"--page {tmp_path} must be a file"),
        (["reproduce", "toys", "--page", "results.json"], "--page results.json must be a file such as"),
    ):
        assert main([*wrong, *out]) == 2
        assert message in capsys.readouterr().err


def test_a_run_of_several_targets_is_planned_once(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, "again", dataclasses.replace(target, name="again"))
    assert main(["reproduce", "toys", "again", "--dry-run", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.count("  fast ") == 1 and "about 4 minutes of one core" in text
    (tmp_path / "file").touch()
    assert main(["reproduce", "toys", "--dry-run", "--out", str(tmp_path / "file")]) == 2
    assert "file must be a folder, got a file" in capsys.readouterr().err


def test_part_of_a_target(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)]
    assert main(["reproduce", "toys", "--only", "f*", *out]) == 0
    assert [record["trial"] for record in read_records(tmp_path / "results.md")] == ["fast"]
    assert [job.trial.name for job in plan(target, "small", tmp_path, only=["toy"])] == ["toy", "toy"]
    capsys.readouterr()
    assert main(["reproduce", "toys", "--only", "toy", "--collect", *out]) == 0
    assert "no run is finished" in capsys.readouterr().out


def test_a_run_of_another_process_is_left_to_it(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "small" / "fast" / "seed-0"
    taken.mkdir(parents=True)
    with Lock(taken):
        assert main(["reproduce", "toys", "--seeds", "1", "--out", str(tmp_path)]) == 0
    assert "left to another process" in capsys.readouterr().err
    assert [record["trial"] for record in read_records(tmp_path / "results.md")] == ["toy"]


def _write_records(page: Path, seeds: range) -> None:
    for seed in seeds:
        add_records(page, [{"target": "none", "scale": "small", "trial": "x", "seed": seed}])


def test_processes_take_turns_at_the_page(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    page = tmp_path / "results.md"
    others = [
        context.Process(target=_write_records, args=(page, range(start, start + 15))) for start in (0, 15)
    ]
    for process in others:
        process.start()
    for process in others:
        process.join()
        assert process.exitcode == 0
    assert len(read_records(page)) == 30


def test_a_run_that_diverges_does_not_keep_others_from_running(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = reproduce.run_job

    def run(job: Job) -> Any:
        return (
            real(job)
            if job.trial.name == "fast"
            else reproduce.RunOutcome(3, 7, None, "the loss was not finite")
        )

    monkeypatch.setattr(reproduce, "run_job", run)
    assert main(["reproduce", "toys", "--seeds", "1", "--out", str(tmp_path)]) == 3
    assert "the loss was not finite; the other runs continue" in capsys.readouterr().err
    assert [record["trial"] for record in read_records(tmp_path / "results.md")] == ["fast"]


def test_an_interrupted_run_ends_the_command_with_its_code(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Job] = []

    def stopped(job: Job) -> Any:
        seen.append(job)
        return reproduce.RunOutcome(130, 7, None, "stopped by SIGINT after step 7; --resume continues")

    monkeypatch.setattr(reproduce, "run_job", stopped)
    assert main(["reproduce", "toys", "--out", str(tmp_path)]) == 130
    assert len(seen) == 1 and "stopped by SIGINT after step 7" in capsys.readouterr().err


def test_the_page_is_written_again_from_its_records(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "results.md"
    assert main(["reproduce", "toys", "--only", "fast", "--out", str(tmp_path)]) == 0
    text, records = page.read_text(), page.with_suffix(".json").read_text()
    page.unlink()
    (tmp_path / "images" / "results-toys-small.svg").write_text("old")
    assert main(["reproduce", "--rewrite", "--page", str(page)]) == 0
    assert f"wrote {page} from 1 records" in capsys.readouterr().out
    assert page.read_text() == text and page.with_suffix(".json").read_text() == records
    assert (tmp_path / "images" / "results-toys-small.svg").read_text() != "old"
    assert main(["reproduce", "toys", "--rewrite", "--page", str(page)]) == 2
    assert main(["reproduce", "--rewrite", "--page", str(tmp_path / "none.md")]) == 2
    assert "there is no" in capsys.readouterr().err


def test_rows_and_tasks_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def names(rows: str, tasks: str) -> list[str]:
        chosen = plan(TARGETS["lra"], "paper", tmp_path, rows=rows.split(","), tasks=tasks.split(","))
        return [job.trial.name for job in chosen]

    assert names("seqboat,s5", "image,text") == ["text-s5", "image-s5", "text", "image"]
    assert names("mega*", "pathx") == ["pathx-mega", "pathx-mega-chunk"]
    out = ["reproduce", "tables", "--scale", "paper", "--out", str(tmp_path), "--dry-run"]
    assert main([*out, "--rows", "s6"]) == 2
    assert "--rows s6 fits nothing; there are transformer, mega, " in capsys.readouterr().err
    assert main([*out, "--tasks", "imag"]) == 2
    assert "--tasks imag fits nothing; there are listops, text" in capsys.readouterr().err
    assert main([*out, "--tasks", "speech", "--rows", "s5"]) == 2
    assert "--rows and --tasks together fit nothing" in capsys.readouterr().err


def test_every_row_of_the_tables_has_its_number() -> None:
    """The rows are those of the recipes, the numbers those of the paper."""
    assert [len(TARGETS[name].paper) for name in GROUPS["tables"]] == [90, 3, 4]
    found = {trial.name: trial for name in GROUPS["tables"] for trial in TARGETS[name].paper}
    assert found["image"].paper == "90.10 %" and found["pathx-transformer"].paper == "chance"
    assert found["speech-s4"].paper == "97.50 %" and found["enwik8-transformer-xl"].paper == "1.06 bits"
    assert found["listops-liquid-s4"].command() == "seqboat train lra.listops/liquid-s4"
    for trial in found.values():
        config: Any = trial.config(0)
        assert not (config.training.carry_state and getattr(config.task, "context", 0)), (
            "the state is the context"
        )
    small = {trial.name: trial for name in GROUPS["tables"] for trial in TARGETS[name].small}
    assert small.keys() == found.keys()
    assert small["speech-mega-chunk"].command() == "seqboat train speech-small/mega-chunk"
    assert small["text"].command() == "seqboat train lra.text-small"


def test_figures_look_at_what_the_paper_shows() -> None:
    assert {t.row for t in TARGETS["activation"].paper if t.task == "text"} == {"seqboat-full", "seqboat"}
    shown = [(t.task, t.row) for t in TARGETS["confidence"].paper]
    assert shown[:2] == [("pathfinder", "seqboat-full"), ("pathfinder", "seqboat")]
    sizes = [(t.task, t.size) for t in TARGETS["span"].paper]
    assert sizes[:6] == [("pathfinder", size) for size in (16, 32, 64, 128, 256, 512)]
    assert sizes[6:] == [("enwik8", size) for size in (256, 512, 1024, 2048)]
    tradeoff = TARGETS["tradeoff"].paper
    assert {t.size for t in tradeoff if t.row == "mega-chunk"} == {16, 32, 64, 128, 256, 512}
    assert {t.seeds for t in tradeoff} == {3}
    # runs of table 1 are not trained again
    assert {"image", "pathfinder-mega-chunk"} <= {t.name for t in tradeoff}
    assert {"image", "listops-seqboat-full", "image-mega"} <= {t.name for t in TARGETS["ablation"].paper}


def test_a_table_has_every_row_and_the_details_of_what_was_run(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = tuple(
        dataclasses.replace(trial, seeds=1, task=task, paper=paper)
        for trial, task, paper in zip(target.small, ("image", "pathx"), ("90.10 %", "chance"), strict=True)
    )
    made = TableTarget(name="toys", title="Toys", where="table 0", about="Toys.", small=trials)
    monkeypatch.setitem(TARGETS, "toys", made)
    job = plan(made, "small", tmp_path, only=["toy"])[0]
    run_job(job, Spy())
    record = {**made.collect(job), "test": 0.5}
    assert record["device"] == "cpu" and record["processes"] == 1 and record["step_memory_mb"] is None
    assert record["step_wall_seconds"] > 0
    add_records(tmp_path / "results.md", [record])
    text = (tmp_path / "results.md").read_text()
    assert "| ours (paper, full size) | Image | Path-X |" in text
    assert "| Toy | 50.0 % (90.10 %) | - |" in text and "| Fast | - | - (chance) |" in text
    assert (
        "1 of 2 rows and tasks were run:" in text and "| Toy, Image | 90.10 % | 50.0 % | -40.1 | 0 |" in text
    )
    assert "| Fast, Path-X" not in text


def test_settings_of_the_machine_reach_training(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["reproduce", "toys", "--only", "fast", "--out", str(tmp_path)]
    flags = ["--device", "cpu", "--precision", "bf16", "--accumulation", "4", "--checkpointing"]
    assert main([*out, *flags, "--training.workers=0"]) == 0
    run = Run(tmp_path / "small" / "fast" / "seed-0")
    training = run.config.training
    assert (training.device, training.precision, training.accumulation) == ("cpu", "bf16", 4)
    assert training.gradient_checkpointing and not training.compile
    # a run keeps what it began with, and refuses something else
    assert main([*out, "--collect"]) == 0
    capsys.readouterr()
    assert main([*out, "--precision", "fp32"]) == 2
    assert (
        "was made with other settings: training.precision is 'fp32', it was 'bf16'" in capsys.readouterr().err
    )
    assert main([*out, "--training.batch_size=4"]) == 2
    assert "only how runs are carried out can be changed" in capsys.readouterr().err
    assert main([*out, "--processes", "0"]) == 2
    assert "--processes must be an integer >= 1, got 0" in capsys.readouterr().err
    assert main([*out, "--memory", "0"]) == 2
    assert "--memory must be positive, got 0" in capsys.readouterr().err


def test_micro_batches_fit_in_memory(target: Target, tmp_path: Path) -> None:
    """As many micro-batches as it takes; a run that has begun keeps its own."""
    config = find_recipe("lra.text-small")().replace(model={"num_layers": 1})
    whole = estimate_run(config).memory
    count = fitting(config, 1, whole / 2)
    assert 1 < count <= 32 and fitting(config, 1, 1.01 * whole) == 1
    assert estimate_run(config.replace(training={"accumulation": count})).memory <= whole / 2
    carried = find_recipe("enwik8-small")().replace(model={"num_layers": 1}, training={"batch_size": 6})
    half = fitting(carried, 1, 0.45 * estimate_run(carried).memory)
    assert carried.training.carry_state and half in (3, 6), "all micro-batches are equal"
    machine = Machine(memory=1e4)
    job = plan(target, "small", tmp_path, only=["fast"], machine=machine)[0]
    assert job.config.training.accumulation == 8, "one example at a time"
    begun = job.trial.config(0)
    assert machine.configure(begun, begun).training.accumulation == 2


def _record(trial: str, seed: int, test: float, commit: str = "abc1234") -> dict[str, Any]:
    versions = {"seqboat": "0", "torch": "0"}
    key = {"target": "other", "scale": "paper", "trial": trial, "seed": seed}
    return {**key, "test": test, "commit": commit, "versions": versions}


def test_results_of_several_machines_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one" / "results.md", tmp_path / "two" / "results.md"
    add_records(one, [_record("image", 0, 0.9), _record("text", 0, 0.8)])
    add_records(two, [_record("image", 1, 0.91), _record("text", 0, 0.8)])
    page = ["--page", str(tmp_path / "all.md")]
    command = ["reproduce", "merge", str(one), str(two.with_suffix(".json"))]
    assert main([*command, *page]) == 0
    assert "from 3 records of 2 pages" in capsys.readouterr().out
    merged = read_records(tmp_path / "all.md")
    assert [(r["trial"], r["seed"], r["test"]) for r in merged] == [
        ("image", 0, 0.9),
        ("image", 1, 0.91),
        ("text", 0, 0.8),
    ]
    # the same run with another commit, or with another number, is a conflict
    for other in (_record("text", 0, 0.8, "def5678"), _record("text", 0, 0.7)):
        add_records(two, [other])
        before = (tmp_path / "all.json").read_text()
        assert main([*command, *page]) == 2
        error = capsys.readouterr().err
        assert "conflict: other paper text seed 0: 0.8000 at abc1234 (" in error
        assert (
            f"{other['test']:.4f} at {other['commit']} (" in error and "--keep first or --keep last" in error
        )
        assert (tmp_path / "all.json").read_text() == before
    assert main([*command, *page, "--keep", "last"]) == 0
    assert read_records(tmp_path / "all.md")[2]["test"] == 0.7
    assert main(["reproduce", "merge", *page]) == 2
    assert main(["reproduce", "merge", str(tmp_path / "none.json"), *page]) == 2
    assert "there is no" in capsys.readouterr().err
    assert main(["reproduce", "lra", "--keep", "last"]) == 2
