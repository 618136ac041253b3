"""Studies at equal processor time: budgets are kept, runs resume, records add up, pages say what is missing."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqboat.cli.main import main
from seqboat.data.files import Lock
from seqboat.paper.matching import count_of_run
from seqboat.paper.studies import STUDIES, budget
from seqboat.paper.studies import page as page_module
from seqboat.paper.studies.budget import fit_batch, fit_steps, kept_memory, next_pace, spend
from seqboat.paper.studies.in_context import IN_CONTEXT, TESTS, in_context_trials, lines_by_state
from seqboat.paper.studies.page import write_page
from seqboat.paper.studies.run import chosen_cells, first_seed, run_cells
from seqboat.paper.studies.scaling import MODELS, Fit, _prediction, fit_sizes, scaling_trials
from seqboat.paper.studies.store import append_records, read_records
from seqboat.paper.studies.study import Study
from seqboat.paper.studies.tables import (
    FIRST,
    FORMS,
    ORDER,
    SEEDED,
    TABLES,
    by_cell,
    guesses,
    standard_error,
    standing,
)
from seqboat.paper.trial import Trial
from seqboat.processor import processor_name
from seqboat.recipes import RECIPES, ROWS
from seqboat.run import Run
from seqboat.tasks import TASKS
from seqboat.training.config import RunConfig
from small_runs import ToyConfig, small_run

RATES = (0.001, 0.01)


def toy(mixer: Any = None) -> RunConfig:
    """A toy."""
    return small_run()


def show_names(study: Study, records: Any, pictures: Any) -> list[str]:
    return [f"- {r['trial']} {r['seed']} {r['test']:.2f}" for r in records]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Study:
    """Two models whose steps take 0.01 s for eight sequences as far as planning knows, and 0.01 s when they run."""
    monkeypatch.setitem(TASKS, "toy", ToyConfig)
    monkeypatch.setitem(RECIPES, "toy", toy)
    monkeypatch.setattr(budget, "step_seconds", lambda config, *a, **k: 0.01 * config.training.batch_size / 8)
    monkeypatch.setattr(budget, "standard_step", lambda run: 0.01)
    made = Study(
        name="toys",
        title="Toys",
        about="Toys.",
        trials=(
            Trial(name="toy", title="Toy", recipe="toy", seeds=2, row="seqboat", task="toy"),
            Trial(
                name="s4d", title="S4D", recipe="toy", arguments=("--model.mixer=s4d",), row="s4d", task="toy"
            ),
        ),
        budget=0.4,
        rates=RATES,
        command="seqboat reproduce toys",
        show=show_names,
    )
    monkeypatch.setitem(STUDIES, "toys", made)
    return made


def test_a_budget_pays_for_the_search_and_for_the_run(study: Study, tmp_path: Path) -> None:
    record = spend(study.trials[0], 0, 0.4, tmp_path, rates=RATES)
    assert record["batch"] == 4, "batches are halved so that enough steps fit, but not below four sequences"
    # three quarters of 0.4 s are 30 steps of 0.01 s; the two short runs share the last quarter
    assert record["steps"] == 30
    assert [len(Run(tmp_path / f"lr-{rate:g}").metrics) > 0 for rate in RATES] == [True, True]
    # at first a step of four sequences is thought to take half as long as one of eight
    assert Run(tmp_path / "lr-0.001").config.schedule.steps == 10
    rate, loss = min(record["sweep"], key=lambda pair: pair[1])
    assert (record["lr"], len(record["sweep"])) == (rate, 2) and loss > 0
    assert [step for _, step, _ in record["curve"]] == [10, 20, 30]
    assert record["training_seconds"] == pytest.approx(0.3)
    assert 0 <= record["test"] <= 1 and len(record["activation"]) == 2
    config = Run(tmp_path / "seed-0").config
    assert (config.schedule.shape, config.schedule.warmup_steps, config.optimizer.lr) == ("linear", 3, rate)
    assert "--schedule.steps=30 --schedule.warmup_steps=3 --schedule.warmup_from=1e-07" in record["command"]
    json.dumps(record)


def test_other_seeds_take_the_rate_of_the_first(study: Study, tmp_path: Path) -> None:
    first = spend(study.trials[0], 0, 0.4, tmp_path, rates=RATES)
    (tmp_path / "lr-0.01" / "metrics.jsonl").unlink()  # nothing of the search is looked at again
    second = spend(study.trials[0], 1, 0.4, tmp_path, rates=RATES)
    assert [second[k] for k in ("lr", "batch", "steps")] == [first[k] for k in ("lr", "batch", "steps")]
    assert (first["seed"], second["seed"]) == (0, 1) and first["losses"] != second["losses"]


def test_other_seeds_take_the_rate_of_a_record_from_another_machine(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "evidence.md"
    first, _, second = study.cells(0.4)
    run_cells([first], page, tmp_path / "there")
    (record,) = read_records(page)
    # another rate than the search would choose, and another batch
    other = min(RATES) if record["lr"] == max(RATES) else max(RATES)
    append_records(page, [{**record, "lr": other, "batch": 8, "step_seconds": 0.02}])
    assert record["slowdown"] > 0
    monkeypatch.setattr(budget, "fit_batch", lambda *_: pytest.fail("nothing is searched again"))
    run_cells([second], page, tmp_path / "here")
    found = read_records(page)[-1]
    assert (found["seed"], found["lr"], found["batch"], found["sweep"]) == (1, other, 8, record["sweep"])
    # 15 steps of 0.02 s, but here they take 0.01 s
    assert found["steps"] == 30
    assert not list((tmp_path / "here").rglob("lr-*"))


def test_the_first_seed_has_the_same_budget(study: Study) -> None:
    toy, other, _ = study.cells(0.4)
    records = [
        {"study": "toys", "trial": "toy", "budget": budget, "seed": seed}
        for budget, seed in ((0.2, 0), (0.4, 2), (0.4, 1))
    ]
    assert first_seed(toy, records) == records[2] and first_seed(other, records) is None


def test_a_record_of_a_run_that_diverged_does_not_tell_the_rate(study: Study, tmp_path: Path) -> None:
    known = {"seed": 0, "batch": 8, "lr": 7.0, "sweep": [], "diverged": True}
    assert spend(study.trials[0], 1, 0.4, tmp_path, rates=RATES, known=known)["lr"] in RATES


def test_language_models_read_the_same_segments() -> None:
    """Whatever their memory: a model that is scored on other bytes, or with more before them, cannot be compared."""
    trials = [t for t in (*TABLES.trials, *scaling_trials()) if t.recipe.startswith("enwik8")]
    found = {(config.task, config.training, config.evaluation) for t in trials for config in (t.config(0),)}
    ((task, training, _),) = found
    assert (task.segment, task.context, task.window) == (256, 128, 256) and not training.carry_state  # type: ignore[attr-defined]


def test_a_search_that_was_stopped_continues_at_the_pace_that_was_measured(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = spend(study.trials[0], 0, 0.4, tmp_path / "whole", rates=RATES)
    trained = budget._train

    def stopped(config: RunConfig, folder: Path, display: Any) -> bool:
        if folder.name == "lr-0.01":
            raise budget.Stopped("stopped", 143)
        return trained(config, folder, display)

    with monkeypatch.context() as patch:
        patch.setattr(budget, "_train", stopped)
        with pytest.raises(budget.Stopped):
            spend(study.trials[0], 0, 0.4, tmp_path / "halves", rates=RATES)
    monkeypatch.setattr(budget, "step_seconds", lambda *a, **k: 1.0)  # on a machine that is busy by now
    resumed = spend(study.trials[0], 0, 0.4, tmp_path / "halves", rates=RATES)
    assert [resumed[key] for key in ("sweep", "steps", "losses")] == [
        whole[key] for key in ("sweep", "steps", "losses")
    ]


def test_without_rates_the_whole_budget_trains(study: Study, tmp_path: Path) -> None:
    record = spend(study.trials[0], 0, 0.4, tmp_path)
    # a step of four sequences is thought to take 0.005 s; it takes 0.01 s, so the run is repeated with half the steps
    assert Run(tmp_path / "seed-0").config.schedule.steps == 80
    assert Run(tmp_path / "seed-0-again").config.schedule.steps == 40
    assert (record["steps"], record["lr"], record["sweep"]) == (40, 0.01, [])
    assert record["training_seconds"] == pytest.approx(0.4)


def test_of_runs_that_miss_their_time_the_nearest_counts(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pace of this machine keeps changing: 80, 20 and 34 steps take 1.6, 0.05 and 3.4 s."""
    paces = {"seed-0": 0.02, "seed-0-again": 0.0025, "seed-0-again-again": 0.1}
    steps = {}

    def pace(run: Run) -> float:
        steps[run.folder.name] = run.config.schedule.steps
        return paces[run.folder.name]

    with monkeypatch.context() as patch:
        patch.setattr(budget, "standard_step", pace)
        record = spend(study.trials[0], 0, 0.4, tmp_path)
    assert steps == {"seed-0": 80, "seed-0-again": 20, "seed-0-again-again": 34}
    assert record["steps"] == 20


def test_further_steps_may_be_cheaper(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes 0.2 s and 1 ms per step: the second run misses its time too, the third meets it."""
    steps = {}

    def pace(run: Run) -> float:
        steps[run.folder.name] = count = run.config.schedule.steps
        return (0.2 + 0.001 * count) / count

    with monkeypatch.context() as patch:
        patch.setattr(budget, "standard_step", pace)
        record = spend(study.trials[0], 0, 0.4, tmp_path)
        assert steps == {"seed-0": 80, "seed-0-again": 114, "seed-0-again-again": 200}
        assert record["steps"] == 200 and record["training_seconds"] == pytest.approx(0.4)
        # the second seed starts with the pace of the first, and a second call continues both as they began
        assert (
            spend(study.trials[0], 1, 0.4, tmp_path)["steps"] == 200
            and not (tmp_path / "seed-1-again").exists()
        )
        assert spend(study.trials[0], 0, 0.4, tmp_path)["steps"] == 200 and steps["seed-0"] == 80
    assert json.loads((tmp_path / "pace-1.json").read_text()) == pytest.approx(0.4 / 200)


def test_the_next_pace_is_that_of_the_last_run_where_two_say_nothing() -> None:
    assert next_pace([(80, 1.6), (20, 2.0)], 0.4) == 1.6 / 80, "fewer steps took longer"
    assert next_pace([(80, 1.6), (90, 1.61)], 0.4) == 1.6 / 80, "by the difference, no steps would fit"


def test_batches_are_the_recipe_s_if_the_time_suffices(study: Study) -> None:
    # eight sequences take 0.01 s
    config = toy()
    assert fit_batch(config, 1e6) == (8, pytest.approx(0.01))
    assert fit_batch(config, 1.0) == (4, pytest.approx(0.005))


def test_a_step_and_its_sequences_are_timed_apart(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a step's time does not depend on the batch: half a batch takes three quarters of the time."""
    monkeypatch.setattr(
        budget, "step_seconds", lambda config, *a, **k: 0.005 + 0.005 * config.training.batch_size / 8
    )
    assert fit_batch(toy(), 1.0) == (4, pytest.approx(0.0075))


def test_a_batch_is_timed_before_it_is_chosen(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches that take the same time promise that large ones do, too."""
    sizes: list[int] = []

    def busy(config: RunConfig, *args: Any, **options: Any) -> float:
        sizes.append(config.training.batch_size)
        return max(0.01, 0.01 * config.training.batch_size / 16)

    monkeypatch.setattr(budget, "step_seconds", busy)
    config = toy().replace(training={"batch_size": 64})
    assert fit_batch(config, 150 * 0.02) == (32, pytest.approx(0.02))
    assert sizes == [4, 16, 64, 32]


def test_memory_that_a_step_keeps(study: Study, tmp_path: Path) -> None:
    """Every sequence keeps as much as any other; weights are not counted."""
    spend(study.trials[0], 0, 0.4, tmp_path, rates=RATES)
    run = Run(tmp_path / "seed-0")
    sizes = []
    for batch in (4, 8, 12):
        run.config = run.config.replace(training={"batch_size": batch})
        sizes.append(kept_memory(run))
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=0.2) and sizes[1] > sizes[0]
    assert not run.model.training


def test_steps_fill_a_time() -> None:
    config = fit_steps(toy(), 1.0, 0.01, 4)
    assert (config.schedule.steps, config.schedule.warmup_steps, config.evaluation.every) == (100, 10, 25)
    assert fit_steps(toy(), 0.001, 0.01, 4).schedule.steps == 8, "enough for every evaluation"


def test_a_run_that_diverges_is_recorded_as_such(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_train", lambda config, folder, display: False)
    record = spend(study.trials[0], 0, 0.4, tmp_path, rates=RATES)
    assert record["diverged"] and record["sweep"] == [[0.001, None], [0.01, None]] and record["lr"] == 0.001


def test_a_study_runs_once_and_continues(study: Study, tmp_path: Path) -> None:
    page = tmp_path / "evidence.md"
    told: list[str] = []
    cells = study.cells(0.4)
    assert [(c.trial.name, c.seed) for c in cells] == [("toy", 0), ("s4d", 0), ("toy", 1)]
    assert run_cells(cells[:1], page, tmp_path, tell=told.append) == 1
    assert "accuracy" in told[0] and told[0].startswith("Toy, toy, seed 0, 0.4 s")
    # another process works on the second one
    folder = cells[1].folder(tmp_path)
    folder.mkdir(parents=True)
    with Lock(folder):
        assert run_cells(cells, page, tmp_path, tell=told.append) == 1
    assert "left to another process" in told[1]
    assert run_cells(cells, page, tmp_path, tell=told.append) == 1
    assert run_cells(cells, page, tmp_path, tell=told.append) == 0
    assert [(r["trial"], r["seed"]) for r in read_records(page)] == [("toy", 0), ("toy", 1), ("s4d", 0)]


def test_the_command_runs_shows_and_rewrites(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page_module, "STUDIES", {"toys": study})
    page = tmp_path / "docs" / "evidence.md"
    words = ["reproduce", "toys", "--out", str(tmp_path), "--page", str(page), "--device=cpu"]
    assert main([*words, "--dry-run"]) == 0
    assert "0 of 3 runs done" in capsys.readouterr().out and not page.exists()
    assert main([*words, "--only", "toy", "--seeds", "1"]) == 0
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 3 runs done" in shown and "seed 1, 0.4 s: begun" in shown
    text = page.read_text(encoding="utf-8")
    where = f"1 of 3 runs with 0.4 s are finished, on {processor_name()}, where a second was worth "
    assert where in text and " standard seconds; the same command continues." in text and "- toy 0 0." in text
    page.unlink()
    assert main([*words, "--rewrite"]) == 0
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["toys", "--budget", "0"], "--budget must be positive, got 0"),
        (["lra", "--budget", "5"], "--budget works only with a study"),
        (["toys", "lra"], "run other targets separately"),
        (["toys", "--scale", "paper"], "nothing to run at --scale paper"),
        (["toys", "--rows", "mega"], "fits nothing; there are"),
        (["toys", "--processes", "2"], "--processes must be 1"),
    ],
)
def test_wrong_commands_say_what_is_wrong(
    study: Study, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *words, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def _append(path: str, start: int) -> None:
    for seed in range(start, start + 20):
        append_records(
            Path(path), [{"study": "s", "trial": "t", "budget": 1.0, "seed": seed, "x": "y" * 2000}]
        )


def test_processes_add_records_side_by_side(tmp_path: Path) -> None:
    page = tmp_path / "evidence.md"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append, args=(str(page), 20 * i)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(r["seed"] for r in read_records(page)) == list(range(60))
    append_records(page, [{"study": "s", "trial": "t", "budget": 1.0, "seed": 0, "x": "again"}])
    found = {r["seed"]: r["x"] for r in read_records(page)}
    assert len(found) == 60 and found[0] == "again"
    with page.with_suffix(".jsonl").open("a") as file:
        file.write('{"study": "s"}\n')
    with pytest.raises(ValueError, match=r"evidence.jsonl:62 does not hold a record of a study"):
        read_records(page)


# what the studies consist of


def test_the_tables_have_every_row_of_the_paper_and_its_successors() -> None:
    cells = {(trial.row, trial.task) for trial in TABLES.trials}
    assert len(cells) == len(TABLES.trials)
    for rows in ROWS.values():
        assert {(row, task) for row, entry in rows.items() for task in entry.recipes} <= cells
    assert {(row, task) for row in FIRST for task in ORDER} <= cells
    first = TABLES.trials[: len(FIRST)]
    assert [trial.row for trial in first] == list(FIRST) and {trial.task for trial in first} == {"listops"}
    assert {trial.row for trial in TABLES.trials if trial.seeds == 3} == set(SEEDED)


@pytest.mark.parametrize("row", FIRST)
def test_models_of_a_table_have_as_many_parameters(row: str) -> None:
    """Within three percent: the width of some models comes in steps."""
    for task in ("listops", "enwik8"):
        trial = next(t for t in TABLES.trials if (t.row, t.task) == (row, task))
        own = next(t for t in TABLES.trials if (t.row, t.task) == ("seqboat", task))
        assert count_of_run(trial.config(0)) == pytest.approx(count_of_run(own.config(0)), rel=0.03)


@pytest.mark.parametrize("trial", [*in_context_trials(), *scaling_trials()], ids=lambda trial: trial.name)
def test_trials_build(trial: Trial) -> None:
    config = dataclasses.replace(trial, match=False).config(0)
    assert config.model.mixer.causal and config.recipe == trial.recipe  # type: ignore[attr-defined]


def test_tests_of_memory_have_the_chance_that_is_stated() -> None:
    for name, test in TESTS.items():
        trial = next(t for t in in_context_trials() if t.task == name)
        task = trial.config(0).build_task()
        data = task.dataset("val")
        answers = {int(token) for i in range(200) for token in np.atleast_1d(data[i].target) if token >= 0}
        assert len(answers) == pytest.approx(1 / test.chance, abs=1.5), name


def test_each_start_of_seqboat_has_its_own_line() -> None:
    found = {
        trial.name: {"state_bytes": 1024 * (trial.size or 100), "test": 0.5}
        for trial in in_context_trials()
        if trial.task == "recall-8"
    }
    (lines,) = lines_by_state(IN_CONTEXT, found).values()
    windows = {name: sorted(size for size, _ in points) for name, points in lines.items()}
    assert windows["SeqBoat, window"] == windows["SeqBoat, scaled start, window"] == [16, 32, 64]
    assert windows["Transformer"] == [100] and windows["MEGA-chunk"] == [16, 64]
    assert sum(map(len, lines.values())) == len(found)


def test_a_run_of_the_memory_study_is_recorded(tmp_path: Path) -> None:
    """From the command line, with a data folder that this task has no use for."""
    page = tmp_path / "evidence.md"
    command = ["reproduce", "in-context", "--only", "recall-4-seqboat-64", "--budget", "0.2"]
    assert main([*command, "--out", str(tmp_path), "--page", str(page), "--data-dir", str(tmp_path)]) == 0
    (record,) = read_records(page)
    assert record["state_bytes"] > 0 and 0 <= record["test"] <= 1
    assert "recall, 4 pairs in 32" in page.read_text(encoding="utf-8")


def test_scores_are_compared_by_task_and_direction() -> None:
    def record(row: str, task: str, *tests: float) -> list[dict[str, Any]]:
        metric, better = ("bits", "lower") if task == "enwik8" else ("accuracy", "higher")
        return [
            {
                "row": row,
                "task": task,
                "seed": i,
                "test": t,
                "examples": 400,
                "metric": metric,
                "better": better,
            }
            for i, t in enumerate(tests)
        ]

    scores = by_cell(
        [
            *record("seqboat", "listops", 0.5),
            *record("s4d", "listops", 0.4),
            *record("seqboat", "image", 0.5),
            *record("s4d", "image", 0.51),
            *record("seqboat", "enwik8", 2.0, 2.1),
            *record("s4d", "enwik8", 1.0, 1.1),
            *record("seqboat", "text", 0.5),
            {"row": "s4d", "task": "text", "diverged": True},
            *record("seqboat", "pathfinder", 0.53),
            *record("s4d", "pathfinder", 0.49),
            *record("seqboat", "pathx", 0.53),
            *record("s4d", "pathx", 0.6),
        ]
    )
    assert guesses(scores["seqboat", "pathx"], "pathx") and not guesses(scores["s4d", "pathx"], "pathx")
    found = standing(scores, "seqboat", "s4d")
    assert (found.tasks, found.ahead, found.clearly_ahead) == (4, ["listops"], ["listops"]), (
        "pathfinder does not count: both guess"
    )
    assert found.clearly_behind == ["enwik8", "pathx"]
    assert standard_error(scores["seqboat", "listops"]) == pytest.approx(0.025)
    assert standard_error(scores["seqboat", "enwik8"]) == pytest.approx(0.05)


def test_the_best_size_is_inside_or_at_the_edge() -> None:
    falling = fit_sizes([(1e5, 3.0), (1e6, 2.0), (1e7, 1.5)])
    assert falling is not None and not falling.inside and falling.loss == pytest.approx(1.5)
    assert falling.parameters == pytest.approx(1e7) and fit_sizes([(1e5, 3.0), (1e6, 2.0)]) is None


def test_all_forms_of_seqboat_differ_and_have_as_many_parameters() -> None:
    sizes: dict[str, list[int]] = {}
    assert len({trial.command() for trial in TABLES.trials}) == len(TABLES.trials)
    for trial in TABLES.trials:
        if trial.row in ("seqboat", *FORMS):
            with torch.device("meta"):
                model = trial.config(0).build_model()
            sizes.setdefault(trial.task, []).append(sum(p.numel() for p in model.parameters()))
    assert len(sizes) == 8
    for own, *others in sizes.values():
        assert len(others) == len(FORMS) and all(abs(size / own - 1) <= 0.01 for size in others)


def test_cells_are_chosen_by_row_and_task() -> None:
    cells = chosen_cells(TABLES.cells(10.0, 1), rows=["s*"], tasks=["speech"])
    found = {
        "seqboat",
        "seqboat-scaled",
        "seqboat-quarter",
        "seqboat-s4d",
        "seqboat-conv",
        "seqboat-full",
        "s4",
        "s4d",
        "s5",
        "samba",
        "samba-gdn",
    }
    assert {cell.trial.row for cell in cells} == found


@pytest.mark.slow
def test_a_page_of_every_study_is_written_from_records(tmp_path: Path) -> None:
    """Two made-up runs of each study: tables, figures and what is missing."""
    records = []
    for study in (s for s in STUDIES.values() if s.name != "toys"):
        for number, cell in enumerate(study.cells(study.budget)[: 7 * len(study.multiples)]):
            records.append(
                {
                    **study.describe(cell.trial),
                    "budget": cell.budget,
                    "seed": cell.seed,
                    "metric": "accuracy",
                    "better": "higher",
                    "test": 0.5 + 0.01 * number,
                    "examples": 100,
                    "activation": [0.5, None],
                    "curve": [[1.0, 10, 0.4], [2.0, 20, 0.5]],
                    "training_seconds": 2.0,
                    "tokens_per_second": 1000.0,
                    "step_memory_mb": 10.0,
                    "processor_seconds": 3.0,
                    "state_bytes": 2048 * (number + 1),
                    "parameters": 1000 * (number + 1),
                    "lr": 0.001,
                    "sweep": [[0.0003, 1.0], [0.001, 0.9]],
                    "steps": 20,
                    "batch": 4,
                    "versions": {"torch": "2"},
                    "commit": "abc",
                }
            )
    page = tmp_path / "evidence.md"
    append_records(page, records)
    write_page(page)
    text = page.read_text(encoding="utf-8")
    assert "SeqBoat is at or above **MEGA-chunk** on 0 of 1 tasks" in text
    assert "| MEGA-chunk | 0 of 1 (+0, -0) |" in text
    assert "Not run with this budget on any task: Transformer; SeqBoat-full; " in text
    assert "| Transformer | -" not in text and "not run" in text and "abc" in text
    assert "14 of 14 searches chose the largest learning rate" in text
    assert (
        "recall, 8 pairs in 64: SeqBoat (50.0 % (state of 2 kB) with the paper's initial weights, 51.0 % (state of "
        "4 kB) with the library's, 52.0 % (state of 6 kB) with a short convolution too) is below the better of "
        "Mamba-2 55.0 % (state of 12 kB) and Gated " in text
    )
    assert len(list((tmp_path / "images").glob("evidence-*.svg"))) == 2 * 4


@pytest.mark.parametrize(
    "line",
    [
        '{"study": "toys", "trial": "toy", "budget": "much", "seed": 0}',
        '{"study": "toys", "trial": [1], "budget": 1, "seed": 0}',
        '{"study": "toys", "trial": "toy", "budget": 1, "seed": null}',
        '{"a":' * 100_000,
        "7",
    ],
    ids=["budget", "trial", "seed", "nested", "number"],
)
def test_damaged_records_are_refused_with_their_line(line: str, tmp_path: Path) -> None:
    page = tmp_path / "evidence.md"
    append_records(page, [{"study": "toys", "trial": "toy", "budget": 1.0, "seed": 0}])
    with page.with_suffix(".jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"evidence\.jsonl:2 does not hold a record"):
        read_records(page)
    page.with_suffix(".jsonl").write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"evidence\.jsonl cannot be read"):
        read_records(page)


def test_a_record_that_cannot_be_shown_names_its_file(study: Study, tmp_path: Path) -> None:
    page = tmp_path / "evidence.md"
    append_records(page, [{"study": "toys", "trial": "toy", "budget": 1.0, "seed": 0, "test": "high"}])
    with pytest.raises(ValueError, match=r"evidence\.jsonl: a record cannot be shown: ValueError"):
        page_module.write_page(page)


def predicted(*fits: tuple[float, float, bool]) -> str:
    """What budgets of 10, 40, ... s say, by the best loss, its size, and whether that is inside the range."""
    budgets = [10.0 * 4**number for number in range(len(fits))]
    every: dict[tuple[str, float], Fit | None] = {
        (row, seconds): None for row in MODELS for seconds in budgets
    }
    for seconds, fit in zip(budgets, fits, strict=True):
        every["seqboat", seconds] = Fit(*fit, (1.0, 0.0, 0.0))
    return _prediction(budgets, every)[0]


def test_no_number_is_predicted_from_too_far_away() -> None:
    first = 3.0, 1e5, True
    assert "best at about 5 hours of this core" in predicted(first, (2.5, 3e5, True))
    assert "the power 1.66 of the time, which cannot continue, so nothing" in predicted(
        first, (2.5, 1e6, True)
    )
    assert "does not fall with every longer budget, so nothing" in predicted(first, (3.1, 2e5, True))
    assert "more than 10,000 times the longest run" in predicted(first, (2.5, 1.2e5, True))
    assert "more than 10,000 times the longest run" in predicted(first, (2.5, 1.0001e5, True))
    assert "does not grow with the time, so nothing" in predicted(first, (2.5, 0.9e5, True))
    assert "edge of the range but with 40 s (1.00M), so nothing" in predicted(
        (3.0, 1e5, False), (2.5, 1e6, True)
    )
    assert "edge of the range at every budget, so nothing" in predicted((3.0, 1e5, False), (2.5, 1e5, False))


def test_a_prediction_fits_every_budget() -> None:
    # the best size grows with the square root of the time: 39M after 160 s * 97.5**2
    exact = predicted((3.2, 1e5, True), (3.2 * 0.8, 2e5, True), (3.2 * 0.8**2, 4e5, True))
    assert "to the power of -0.16), which misses the losses by up to 0.04 (0.00) bits" in exact
    assert "with the power 0.50 of the time, so 39M parameters would be best at about 18 days" in exact
    assert "and 0.47 bits" in exact, exact
    # one at the edge counts for the loss alone
    edge = predicted((3.2, 1.5e5, False), (3.2 * 0.8, 2e5, True), (3.2 * 0.8**2, 4e5, True))
    assert "with the power 0.50 of the time" in edge and "up to 0.04 (0.00)" in edge
