"""The paper's tables and figures: planned, run, collected, written down and drawn."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqboat.analysis.interventions import Intervention, InterventionResult, intervention_figure
from seqboat.analysis.measures import measure_run
from seqboat.analysis.traces import load_examples, trace
from seqboat.cli.main import main
from seqboat.data.files import Lock
from seqboat.mixers import MIXERS
from seqboat.paper import GROUPS, TARGETS, figure3, figure4, figure6, jobs, published, tables123
from seqboat.paper import results as results_module
from seqboat.paper.figure3 import activation_figure
from seqboat.paper.figure4 import confidence_maps_figure
from seqboat.paper.figure5 import Point, pareto_front, tradeoff_figure
from seqboat.paper.figure6 import span_figure
from seqboat.paper.jobs import Job, collect, per_step, plan, run_job, step_memory
from seqboat.paper.results import add_row, check_commits, find_row, read_rows, write_page
from seqboat.paper.table6 import BLOCKS, EFFICIENCY, measured_ratio
from seqboat.paper.target import Pictures, Target
from seqboat.paper.trial import Trial
from seqboat.plotting import STYLES, THEMES, save_figure, write_figure
from seqboat.recipes import RECIPES
from seqboat.run import Run
from seqboat.tasks import TASKS
from seqboat.training.config import RunConfig
from seqboat.training.settings_io import override
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
    made = Target(
        name="toys",
        title="Toys",
        where="table 0",
        about="Toys.",
        small=(
            Trial(name="toy", title="Toy", recipe="toy-small", task="image", seeds=2, paper="90.10 %"),
            Trial(
                name="fast",
                title="Fast",
                recipe="toy-small",
                task="pathx",
                arguments=("--optimizer.lr=0.03",),
                paper="chance",
            ),
        ),
        paper=(Trial(name="toy", title="Toy", recipe="toy-small"),),
        show=tables123.show,
    )
    monkeypatch.setitem(TARGETS, "toys", made)
    return made


def fake_row(trial: str, seed: int = 0, scale: str = "small", **more: Any) -> dict[str, Any]:
    """A row as a run would have left it."""
    cost = {
        "seconds": 0.5, "processor_seconds": 0.4, "memory_mb": 100.0, "eval_examples_per_s": 50.0,
        "parameters": 1234, "processes": 1, "threads": 1, "minutes": 1.0, "processor_minutes": 1.0,
    }  # fmt: skip
    return {
        "trial": trial,
        "scale": scale,
        "seed": seed,
        "commit": "abc1234",
        "versions": {"seqboat": "0", "torch": "0"},
        "device": "cpu",
        "best": 1,
        "score": {"split": "test", "metric": "accuracy", "better": "higher", "value": 0.5, "examples": 9},
        "curve": [[1, 0.5]],
        "activation": [0.25, None],
        "cost": cost,
        "observed": {},
        **more,
    }


def page_of(folder: Path, rows: list[dict[str, Any]], *targets: Target) -> str:
    write_page(folder / "results.md", rows, targets or list(TARGETS.values()))
    return (folder / "results.md").read_text()


# the plan


@pytest.mark.parametrize("name", list(TARGETS))
def test_every_trial_has_a_configuration(name: str) -> None:
    for scale in ("small", "paper"):
        trials = TARGETS[name].trials(scale)
        assert len({trial.name for trial in trials}) == len(trials)
        for trial in trials:
            config = trial.config(3)
            assert config.seed == 3 and config.schedule.steps == trial.steps
            assert trial.baseline is None or trial.baseline in {other.name for other in trials}


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


def test_published_numbers_are_complete() -> None:
    assert published.LRA.keys() <= MIXERS.keys()
    assert (published.LRA["transformer"].speed, published.LRA["transformer"].memory) == (1.0, 1.0)
    for name, row in published.LRA.items():
        scores = [score for score in row.accuracy.values() if score is not None]
        # averages are printed to two digits, some of them rounded to one first
        assert sum(scores) / len(scores) == pytest.approx(row.average, abs=0.02), name
    for task in published.EFFICIENCY.values():
        for block in (task.training, task.memory, task.evaluation):
            assert block.keys() == published.EFFICIENCY_MODELS.keys() and block["mega"] == 1.0
    # the paper repeats some of its speeds: they must agree
    for table, form, model in (("SeqBoat-full", "full", "seqboat-full"), ("SeqBoat", "", "seqboat")):
        for name, score in published.ABLATIONS[table][form].scores.items():
            assert score.speed == published.EFFICIENCY[name].training[model]


def test_rows_and_tasks_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def names(rows: str, tasks: str) -> list[str]:
        chosen = plan([TARGETS["lra"]], "paper", tmp_path, rows=rows.split(","), tasks=tasks.split(","))
        return [job.trial.name for job in chosen]

    assert names("seqboat,s5", "image,text") == ["text-s5", "image-s5", "text", "image"]
    assert names("mega*", "pathx") == ["pathx-mega", "pathx-mega-chunk"]
    out = ["paper", "run", "tables", "--scale", "paper", "--out", str(tmp_path), "--dry-run"]
    for words, message in (
        (["--rows", "s6"], "--rows s6 fits nothing; there are transformer, mega, "),
        (["--tasks", "imag"], "--tasks imag fits nothing; there are listops, text"),
        (["--tasks", "speech", "--rows", "s5"], "--rows and --tasks together fit nothing"),
    ):
        assert main([*out, *words]) == 2
        assert message in capsys.readouterr().err


# runs


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


def test_runs_are_planned_run_and_collected(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan([target], "small", tmp_path)
    assert [(job.trial.name, job.seed, job.finished) for job in found] == [
        ("toy", 0, False),
        ("toy", 1, False),
        ("fast", 0, False),
    ]
    assert run_job(found[2], Spy()).exit_code == 0
    again = plan([target], "small", tmp_path)
    assert [job.finished for job in again] == [False, False, True]
    row = collect(again[2])
    assert row["recipe"] == "toy-small" and row["settings"] == ["--optimizer.lr=0.03"]
    assert row["score"]["metric"] == "accuracy" and 0 <= row["score"]["value"] <= 1
    assert [step for step, _ in row["curve"]] == [12, 24]
    assert len(row["activation"]) == 2 and row["device"] == "cpu"
    cost = row["cost"]
    assert cost["processes"] == 1 and cost["memory_mb"] is None
    assert min(cost["seconds"], cost["processor_seconds"], cost["minutes"], cost["eval_examples_per_s"]) > 0
    json.dumps(row)
    # a run is scored once, and again when it changes
    monkeypatch.setattr(Run, "evaluate", lambda *a, **k: pytest.fail("scored twice"))
    assert collect(again[2], row) == row
    with pytest.raises(pytest.fail.Exception, match="scored twice"):
        collect(again[2], row | {"best": 1})


def test_a_run_with_other_settings_is_not_taken(target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "small" / "fast" / "seed-0"
    run_job(plan([target], "small", tmp_path)[0]._replace(folder=folder), Spy())
    with pytest.raises(
        ValueError, match=r"seed-0 was made with other settings: optimizer.lr is 0.03, it was 0.01"
    ):
        plan([target], "small", tmp_path)


def test_the_command(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    out = ["--out", str(runs)]
    monkeypatch.setitem(TARGETS, "again", dataclasses.replace(target, name="again"))
    assert main(["paper", "run", *out]) == 0
    listed = capsys.readouterr().out
    assert "lra          Long Range Arena (table 1): 0 of 90 done at --scale small" in listed
    assert "toys         Toys (table 0): 0 of 3 done at --scale small" in listed
    assert main(["paper", "run", "toys", "again", "--dry-run", *out]) == 0
    text = capsys.readouterr().out
    assert text.count("  toy ") == 1 and "24 x 2" in text, (
        "the seeds of a trial are one line, in two targets too"
    )
    (fast,) = (line for line in text.splitlines() if line.startswith("  fast "))
    size = sum(p.numel() for p in target.small[1].config(0).build_model().parameters())
    assert f" 24 {size:>11,}  nothing: " in fast and fast.endswith(
        ": seqboat train toy-small --optimizer.lr=0.03"
    )
    assert not runs.exists()
    assert main(["paper", "run", "toys", "--only", "f*", "--seeds", "1", *out]) == 0
    assert "wrote" in capsys.readouterr().out
    assert [row["trial"] for row in read_rows([runs / "results.jsonl"])] == ["fast"]
    assert main(["paper", "run", *out]) == 0
    assert "Toys (table 0): 1 of 3 done at --scale small" in capsys.readouterr().out
    (tmp_path / "file").touch()
    for wrong, message in (
        (["paper", "run", "lar"], "target 'lar' is unknown; expected some of lra"),
        (["paper", "run", "toys", "--seeds", "0"], "--seeds must be an integer >= 1, got 0"),
        (["paper", "run", "toys", "--only", "tay", "f"], "--only tay f fits nothing; there are toy, fast"),
        (["paper", "run", "toys", "--training.batch_size=4"], "only how runs are carried out can be changed"),
        (["paper", "page"], "page needs the results to show"),
        (["paper", "page", str(tmp_path / "none.jsonl")], "there is no"),
        (["paper", "page", "x.jsonl", "--out", str(tmp_path)], f"--out {tmp_path} must be a file"),
        (["paper", "run", "toys", "--out", str(tmp_path / "file")], "file must be a folder, got a file"),
    ):
        assert main([*wrong, *(out if "--out" not in wrong and wrong[1] == "run" else [])]) == 2
        assert message in capsys.readouterr().err


def test_settings_of_the_machine_reach_training(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["paper", "run", "toys", "--only", "fast", "--out", str(tmp_path)]
    flags = ["--device", "cpu", "--training.precision=bf16", "--training.accumulation=4"]
    assert main([*out, *flags, "--training.workers=0"]) == 0
    training = Run(tmp_path / "small" / "fast" / "seed-0").config.training
    assert (training.device, training.precision, training.accumulation) == ("cpu", "bf16", 4)
    # a run keeps what it began with, and refuses something else
    assert main(out) == 0
    capsys.readouterr()
    assert main([*out, "--training.precision=fp32"]) == 2
    assert "other settings: training.precision is 'fp32', it was 'bf16'" in capsys.readouterr().err


def test_a_run_of_another_process_is_left_to_it(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "small" / "fast" / "seed-0"
    taken.mkdir(parents=True)
    with Lock(taken):
        assert main(["paper", "run", "toys", "--seeds", "1", "--out", str(tmp_path)]) == 0
    assert "left to another process" in capsys.readouterr().err
    assert [row["trial"] for row in read_rows([tmp_path / "results.jsonl"])] == ["toy"]


def test_a_run_that_diverges_does_not_keep_others_from_running(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = jobs.run_job

    def run(job: Job) -> Any:
        return (
            real(job) if job.trial.name == "fast" else jobs.RunOutcome(3, 7, None, "the loss was not finite")
        )

    monkeypatch.setattr(jobs, "run_job", run)
    assert main(["paper", "run", "toys", "--seeds", "1", "--out", str(tmp_path)]) == 3
    assert "the loss was not finite; the other runs continue" in capsys.readouterr().err
    assert [row["trial"] for row in read_rows([tmp_path / "results.jsonl"])] == ["fast"]


def test_an_interrupted_run_ends_the_command_with_its_code(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Job] = []

    def stopped(job: Job) -> Any:
        seen.append(job)
        return jobs.RunOutcome(130, 7, None, "stopped by SIGINT after step 7; --resume continues")

    monkeypatch.setattr(jobs, "run_job", stopped)
    assert main(["paper", "run", "toys", "--out", str(tmp_path)]) == 130
    assert len(seen) == 1 and "stopped by SIGINT after step 7" in capsys.readouterr().err


# results


def _add_rows(path: Path, seeds: range) -> None:
    for seed in seeds:
        add_row(path, fake_row("x", seed))


def test_processes_take_turns_at_the_results(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    path = tmp_path / "results.jsonl"
    others = [context.Process(target=_add_rows, args=(path, range(start, start + 15))) for start in (0, 15)]
    for process in others:
        process.start()
    for process in others:
        process.join()
        assert process.exitcode == 0
    assert len(read_rows([path])) == 30


def test_results_of_several_machines_are_read_together(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    add_row(one, fake_row("image", observed={"activation": {"rates": []}}))
    add_row(one, fake_row("text"))
    add_row(two, fake_row("image", observed={"span": {"spans": []}}))
    add_row(two, fake_row("image", 1))
    rows = read_rows([one, two])
    assert [(row["trial"], row["seed"]) for row in rows] == [("image", 0), ("text", 0), ("image", 1)]
    assert rows[0]["observed"].keys() == {"activation", "span"}
    assert find_row(two, "small", "image", 1) == rows[2] and find_row(two, "paper", "image", 1) is None
    # the same run with another commit, or with another number, is an error that names both
    for other in ({"commit": "def5678"}, {"activation": [0.5, None]}):
        add_row(two, fake_row("text", **other))
        with pytest.raises(ValueError, match=r"one.jsonl, line 2 and .*line 3 are of one run, small text 0"):
            read_rows([one, two])
    for line, message in (("{", "line 1 is not JSON"), ("[1]", "line 1 is not a row of results")):
        one.write_text(line)
        with pytest.raises(ValueError, match=message):
            read_rows([one])


def test_rows_come_from_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = results_module.subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    check_commits([fake_row("x", commit=commit)] if commit else [])
    for other, message in (
        (None, "small x 0 was run from no commit"),
        ("abc1234-dirty", "a changed working copy"),
        ("0000000", "not a commit of this history"),
    ):
        with pytest.raises(ValueError, match=message):
            check_commits([fake_row("x", commit=other)])


def test_the_page_has_every_row_and_says_what_was_not_run(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scored(value: float) -> dict[str, Any]:
        return {"score": fake_row("x")["score"] | {"value": value}}

    rows = [fake_row("toy", 0, **scored(0.5)), fake_row("toy", 1, **scored(0.7))]
    text = page_of(tmp_path / "docs", rows, target)
    assert "| ours (paper, full size) | Image | Path-X |" in text
    assert "| Toy | 60.0 % ± 14.1 (90.10 %) | - |" in text and "| Fast | - | - (chance) |" in text
    assert "1 of 2 rows and tasks were run:" in text
    assert "| Toy, Image | 90.10 % | 60.0 % ± 14.1 | -30.1 | 0, 1 |" in text and "| Fast, Path-X" not in text
    assert "- **Image.** Cut: everything but the toy." in text
    assert "Not run here. `seqboat paper run toys --scale paper` runs it: `seqboat train toy-small`." in text
    assert "Made with seqboat 0 at abc1234, torch 0." in text
    with pytest.raises(ValueError, match="a row of toys at scale small cannot be shown: KeyError: 'cost'"):
        page_of(tmp_path, [{k: v for k, v in rows[0].items() if k != "cost"}], target)
    # the command
    add_row(tmp_path / "results.jsonl", rows[0])
    page = ["paper", "page", str(tmp_path / "results.jsonl"), "--out", str(tmp_path / "page.md")]
    assert main(page) == 2 and "was run from abc1234" in capsys.readouterr().err
    monkeypatch.setattr(results_module, "check_commits", lambda rows: None)
    assert main(page) == 0 and "from 1 runs" in capsys.readouterr().out
    assert "| Toy | 50.0 % (90.10 %)" in (tmp_path / "page.md").read_text()


def test_table_6_is_of_whole_training_runs(tmp_path: Path) -> None:
    base = fake_row("text-mega")
    cost = base["cost"] | {"processor_seconds": 0.1, "memory_mb": 20.0, "eval_examples_per_s": 150.0}
    own = fake_row("text", cost=cost)
    assert [measured_ratio(block, [own], [base]) for block in BLOCKS] == pytest.approx([4.0, 0.2, 3.0])
    assert measured_ratio(BLOCKS[0], [own | {"device": "A100"}], [base]) is None, "no comparison"
    text = page_of(tmp_path, [base, own], EFFICIENCY)
    line = next(line for line in text.splitlines() if line.startswith("| SeqBoat |"))
    assert line.split(" | ")[2] == "4.00x (3.61x)" and "0.20x (0.16x)" in text and "3.00x (3.55x)" in text
    assert "100 / 20 / 150" in text and "not run" in text


def test_ablations_have_speeds(tmp_path: Path) -> None:
    slow = fake_row("x")["cost"] | {"processor_seconds": 0.8}
    rows = [fake_row("image-short"), fake_row("image-short-mega", cost=slow)]
    text = page_of(tmp_path, rows, TARGETS["ablation"])
    table = text[text.index("| SeqBoat | Image, ours") :].splitlines()
    line = next(line for line in table[1:] if line.startswith("| SeqBoat |"))
    assert line.split(" | ")[1:5:2] == ["50.0 %", "2.00x"]


def test_layers_of_runs_are_observed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = tuple(
        dataclasses.replace(trial, title="Toy", task=f"toys {trial.name}", size=8, seeds=1)
        for trial in target.small
    )
    shown = []
    for name, module in (("activation", figure3), ("span", figure6)):
        real = TARGETS[name]
        shown.append(dataclasses.replace(real, small=trials, paper=()))
        monkeypatch.setitem(TARGETS, name, shown[-1])
        assert real.show is module.show
    assert main(["paper", "run", "activation", "span", "--out", str(tmp_path), "--only", "toy"]) == 0
    assert capsys.readouterr().out.count("seed 0: ") == 2, "one run, two figures"
    (row,) = read_rows([tmp_path / "results.jsonl"])
    expected = measure_run(tmp_path / "small" / "toy" / "seed-0", "val", 100, weighted=False)
    rates, spans = row["observed"]["activation"]["rates"], row["observed"]["span"]["spans"]
    assert rates == [[m.rate.mean, m.rate.std] for m in expected.layers if m is not None]
    assert [s is None for s in spans] == [m is None or m.span is None for m in expected.layers]
    text = page_of(tmp_path, [row], *shown)
    assert "| Toy, active % | layer 1 | layer 2 | lower half | upper half |" in text
    assert "| toys fast | - | - | not run | - |" in text
    assert "| toys toy, memory | sliding window | layer 1 | layer 2 |" in text and "| 8 | 4 | " in text


def test_layers_without_attention_are_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rates = [[0.0, 0.0], [0.5, 0.1], None, [0.25, 0.0], [0.75, 0.2]]
    rows = [
        fake_row("listops", observed={"activation": {"rates": rates}}),
        fake_row("image", observed={"activation": {"rates": [[0.9, 0.0], [0.2, 0.0]]}}),
    ]
    text = page_of(tmp_path, rows, TARGETS["activation"])
    assert "attends more than the lower one in 1 of 2 tasks: ListOps." in text
    assert "works alone: ListOps layer 1." in text
    assert "| ListOps | 0.0 ± 0.0 | 50.0 ± 10.0 | 25.0 ± 0.0 | 75.0 ± 20.0 | - | 25.0 | 50.0 |" in text
    assert (tmp_path / "images" / "results-activation-small-dark.svg").stat().st_size > 5000


def test_confidences_are_drawn_over_images(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = dataclasses.replace(target.small[1], arguments=("--task.length=3",), task="toys")
    other = dataclasses.replace(trial, name="other", title="Other")
    made = dataclasses.replace(TARGETS["confidence"], small=(other, trial), paper=())
    job = plan([made], "small", tmp_path)[1]
    run_job(job, Spy())
    with pytest.raises(ValueError, match="has no images, but toy"):
        collect(job)
    monkeypatch.setattr(Toy, "picture", (1, 3))
    row = collect(job)
    examples = load_examples(job.folder, "val", 3)
    for i, picture in enumerate(row["observed"]["confidence"]["pictures"]):
        assert picture["input"] == [examples.dataset[i].inputs.tolist()]
        sample = trace(examples.model, "classify", examples.batch([i]))[0]
        for seen, layer in zip(picture["layers"], sample.sequences[0].layers, strict=True):
            assert layer is not None
            np.testing.assert_allclose(seen, [layer.confidence], atol=6e-4)
    text = "\n".join(made.show(made.small, {"fast": [row], "other": []}, Pictures(tmp_path, "maps", "Maps")))
    assert "images/maps-toys.svg" in text and "Not run: Other." in text
    assert made.show is figure4.show


# figures

TASK_RATES: Any = {"ListOps": ([0.0, 0.3, None], [0.0, 0.4, None]), "Text": ([0.9, 0.2], [0.3, 0.1])}
POINTS = {
    "SeqBoat": [Point(64, 3.0, 0.6, 0.01), Point(16, 4.0, 0.5)],
    "MEGA-chunk": [Point(16, 3.5, 0.4), Point(64, 1.0, 0.65)],
}
MAP = np.array([[0.0, 0.5], [0.75, 1.0]])
FIGURES: dict[str, Callable[..., Any]] = {
    "activation": lambda theme: activation_figure({"SeqBoat": TASK_RATES}, theme=theme),
    "maps": lambda theme: confidence_maps_figure([MAP, MAP], {"layer 2": [MAP, MAP]}, theme=theme),
    "tradeoff": lambda theme: tradeoff_figure({"Image": POINTS}, time="s", score="a", theme=theme),
    "span": lambda theme: span_figure(
        {"Pathfinder": {16: ([8.0, None, 90.0], [1.0, None, 20.0]), 32: ([4.0, 5.0], [0.5, 9.0])}},
        local={16: 8},
        theme=theme,
    ),
    "intervention": lambda theme: intervention_figure(
        [
            InterventionResult(Intervention(name, (), threshold), {"acc": score}, [rate], error)
            for name, threshold, score, rate, error in (
                ("as it is", None, 0.6, 0.5, 0.02),
                ("all off", None, 0.1, 0.0, 0.02),
                ("all on", None, 0.4, 1.0, None),
                ("threshold 0.5", 0.5, 0.6, 0.3, 0.03),
                ("threshold 0.1", 0.1, 0.2, 0.9, None),
            )
        ],
        "acc",
        theme=theme,
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_in_both_themes(name: str, tmp_path: Path) -> None:
    """Ink on paper in each theme; vector files name no font and nothing elsewhere."""
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb

    light, dark = write_figure(FIGURES[name], tmp_path / "new" / name, ("svg",))
    assert (light.name, dark.name) == (f"{name}.svg", f"{name}-dark.svg")
    svg = light.read_text(encoding="utf-8")
    assert "<svg" in svg and "font-family" not in svg and 'href="http' not in svg
    assert dark.read_text(encoding="utf-8") != svg
    for theme in THEMES:
        style = STYLES[theme]
        figure = FIGURES[name](theme)
        assert to_rgb(figure.get_facecolor()) == to_rgb(style.paper)
        for axes in figure.axes:
            for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
                assert to_rgb(label.get_color()) == to_rgb(style.ink)


def test_figures_show_what_they_are_given() -> None:
    pytest.importorskip("matplotlib")
    (axes,) = FIGURES["activation"]("light").axes
    lines = [container.lines[0].get_ydata() for container in axes.containers]
    np.testing.assert_array_equal(lines[0], [0.0, 0.3, math.nan])
    np.testing.assert_array_equal(lines[1], [0.9, 0.2])
    bars = axes.containers[1].lines[2][0].get_segments()
    np.testing.assert_allclose([sorted(segment[:, 1]) for segment in bars], [[0.6, 1.0], [0.1, 0.3]])
    axes = FIGURES["span"]("light").axes[0]
    spans = [container.lines[0].get_ydata() for container in axes.containers]
    np.testing.assert_array_equal(spans[0], [8.0, math.nan, 90.0])
    drawn = [list(line.get_ydata()) for line in axes.get_lines()]
    assert [8, 8] in drawn, "the sliding window"
    assert [0.02] in drawn, "a mark where nothing attends"
    colors = FIGURES["maps"]("dark").axes[1].get_images()[0].get_array()
    assert colors[0, 0].tolist() == [1, 1, 1, 1], "white where nothing is active"
    luminance = colors[..., :3] @ np.array([0.299, 0.587, 0.114])
    assert 0.95 > luminance[0, 1] > luminance[1, 0] > luminance[1, 1]
    left, right = FIGURES["intervention"]("light").axes[:2]
    (bars,) = left.containers[0].lines[2]
    np.testing.assert_allclose(bars.get_segments()[0][:, 0], [0.08, 0.12])
    (bars,) = right.containers[0].lines[2]
    np.testing.assert_allclose([s[:, 1] for s in bars.get_segments()], [[0.2, 0.2], [0.57, 0.63]])


def test_the_front_is_what_nobody_beats() -> None:
    points = [point._replace(time=1 / point.time) for family in POINTS.values() for point in family]
    assert [(p.size, p.score) for p in pareto_front(points)] == [(16, 0.5), (64, 0.6), (64, 0.65)]
    same = [Point(1, 2.0, 0.5), Point(2, 2.0, 0.5)]
    assert len(pareto_front(same)) == 1


def test_labels_of_near_points_overlap_neither_each_other_nor_lines() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    near = {"SeqBoat": [Point(16 * 2**i, 5.0 + 0.02 * i, 0.5 + 0.01 * i) for i in range(5)]}
    near["MEGA-chunk"] = [Point(512, 5.05, 0.53), Point(16, 20.0, 0.9)]
    figure = tradeoff_figure({"Image": near}, time="s", score="accuracy", chance={"Image": 0.1})
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert axes.xaxis_inverted() and axes.get_ylim()[0] < 0.1, (
        "an axis that begins at the scores dramatizes them"
    )
    # without the lines that lead to them
    boxes = [Text.get_window_extent(text) for text in axes.texts if text.get_text() != "chance"]
    assert len(boxes) == 7
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: activation_figure({}), "panels must not be empty"),
        (lambda: activation_figure({"x": {"a": ([0.1], [0.1, 0.2])}}), r"stds of a must have the shape"),
        (lambda: activation_figure({"x": TASK_RATES}, theme="blue"), "theme must be one of"),  # type: ignore[arg-type]
        (lambda: confidence_maps_figure([MAP], {"x": [MAP, MAP]}), "x must hold 1 maps"),
        (lambda: confidence_maps_figure([MAP], {"x": [MAP[:1]]}), r"shape of their image, \(2, 2\), got"),
        (lambda: tradeoff_figure({"a": {}}, time="", score=""), "at least one point"),
        (lambda: span_figure({}), "panels must not be empty"),
    ],
)
def test_what_cannot_be_drawn(draw: Callable[[], Any], message: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        draw()


def test_files_of_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    formats = ("svg", "pdf", "png")
    one, two = (write_figure(FIGURES["span"], tmp_path / n, formats, ("light",)) for n in ("a", "b"))
    assert [path.name for path in one] == ["a.svg", "a.pdf", "a.png"]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    with pytest.raises(ValueError, match=r"must end with \.png, \.svg or \.pdf, got 'a.gif'"):
        save_figure(FIGURES["span"]("light"), tmp_path / "a.gif")
