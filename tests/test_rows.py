"""Tables 1 to 3: a recipe for every row and task, with the settings of its authors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from seqboat.cli.main import main
from seqboat.cli.train import default_folder
from seqboat.mixers import MIXERS
from seqboat.paper.published import ENWIK8, LRA, LRA_TASKS, SPEECH, published_parameters, published_score
from seqboat.recipes import RECIPES, ROW_RECIPES, ROWS, SMALL_ROWS, find_recipe
from seqboat.recipes.rows import recipe_name
from seqboat.training.settings_io import from_dict, to_dict

PUBLISHED: dict[str, Any] = {"lra": LRA, "speech": SPEECH, "enwik8": ENWIK8}
EVERY = [
    (table, row, task)
    for table, rows in ROWS.items()
    for row, entry in rows.items()
    for task in entry.recipes
]


def count(name: str) -> int:
    with torch.device("meta"):
        model = find_recipe(name)().build_model()
    return sum(p.numel() for p in model.parameters())


def test_every_row_of_the_paper_has_every_task() -> None:
    for table, rows in PUBLISHED.items():
        assert set(ROWS[table]) == set(rows)
        tasks = LRA_TASKS if table == "lra" else (table,)
        assert all(tuple(row.recipes) == tasks and row.title and row.source for row in ROWS[table].values())
    assert len(EVERY) == 15 * 6 + 3 + 4
    assert len(ROW_RECIPES) == len(EVERY) - 8  # SeqBoat's are the recipes themselves


@pytest.mark.parametrize(("table", "row", "task"), EVERY)
def test_rows_are_found_by_name_and_round_trip(table: str, row: str, task: str) -> None:
    config = find_recipe(recipe_name(table, row, task))()
    assert config == ROWS[table][row].recipes[task]()
    assert type(config.model.mixer) is MIXERS[row]
    assert from_dict(to_dict(config)) == config
    base = find_recipe(recipe_name(table, "seqboat", task))()
    assert type(config.task) is type(base.task)
    # every row decays as its authors do: all parameters, or none
    assert config.optimizer.decay == "all" or not config.optimizer.weight_decay
    score = published_score(table, row, task)
    assert score is None or 1 < score < 100


def test_the_row_of_seqboat_is_the_recipe() -> None:
    assert find_recipe("lra.image/seqboat") is RECIPES["lra.image"]
    with pytest.raises(ValueError, match=r"recipe 'lra.image/megachunk' is unknown; did you mean lra.image"):
        find_recipe("lra.image/megachunk")
    with pytest.raises(ValueError, match="unknown"):
        find_recipe("lra.image/mega/seqboat")


@pytest.mark.parametrize("name", SMALL_ROWS)
def test_small_rows_have_the_sizes_of_their_recipe(name: str) -> None:
    base, _, row = name.partition("/")
    config, own = SMALL_ROWS[name](), RECIPES[base]()
    assert type(config.model.mixer) is MIXERS[row]
    same = config.replace(model={"mixer": own.model.mixer}, optimizer={"ssm_lr": None})
    if row in ("transformer", "seqboat-full") and own.training.carry_state:
        task: Any = config.task
        assert (config.training.carry_state, task.context, task.window) == (
            False,
            task.segment // 2,
            task.segment,
        )
        same = same.replace(task=own.task, training={"carry_state": True})
    assert same == own.replace(optimizer={"ssm_lr": None})
    with torch.device("meta"):
        config.build_model()


def test_the_rate_of_a_kernel_stays_with_it() -> None:
    """Path-X's small variant has the kernel of S4D, and so has its SeqBoat-full; MEGA keeps a moving average."""
    rates = {
        row: SMALL_ROWS[f"lra.pathx-small/{row}"]().optimizer.ssm_lr
        for row in ("seqboat-full", "mega", "s4d")
    }
    assert rates == {"seqboat-full": 0.001, "mega": None, "s4d": 0.001}


def test_mega_is_that_of_its_scripts() -> None:
    """Laplace attention on images; Path-X is smaller, has a quadratic warm-up and shares norms over 16 sequences."""
    mega = {task: ROWS["lra"]["mega"].recipes[task]() for task in LRA_TASKS}
    mixers: dict[str, Any] = {task: config.model.mixer for task, config in mega.items()}
    assert [mixers[task].attention for task in LRA_TASKS] == ["softmax"] * 3 + ["laplace"] * 3
    assert [mixers[task].norm for task in LRA_TASKS] == ["layer", "scale", "scale"] + ["batch"] * 3
    pathx = mega["pathx"]
    assert (pathx.model.num_layers, pathx.model.d_model, mixers["pathx"].d_v, mixers["pathx"].d_z) == (
        4,
        64,
        128,
        32,
    )
    assert (pathx.schedule.warmup_power, pathx.training.batch_size // pathx.training.accumulation) == (2, 16)
    assert (mega["listops"].optimizer.lr, mega["listops"].schedule.warmup_steps) == (0.001, 3000)
    for task in LRA_TASKS:
        chunked: Any = ROWS["lra"]["mega-chunk"].recipes[task]().model.mixer
        assert chunked.chunk == 128
        values = {f.name: getattr(chunked, f.name) for f in dataclasses.fields(mixers[task])}
        assert type(mixers[task])(**values | {"chunk": None}) == mixers[task]
    language: Any = ROWS["enwik8"]["mega-chunk"].recipes["enwik8"]().model.mixer
    assert (language.positions, language.chunk, language.causal) == ("rotary", 2048, True)


@pytest.mark.parametrize("row", ["s4", "s4d", "s5", "liquid-s4", "h3"])
def test_state_spaces_learn_slowly_and_do_not_decay(row: str) -> None:
    for task in LRA_TASKS:
        optimizer = ROWS["lra"][row].recipes[task]().optimizer
        assert optimizer.ssm_lr is not None and optimizer.ssm_lr <= optimizer.lr


# parameters of ours, and how far they may be from the printed size
SIZES = {
    ("speech", "s4"): (302_474, 0.01),
    # the sizes of the published script; 300K is printed
    ("speech", "mega-chunk"): (342_774, 0.15),
    ("enwik8", "transformer-xl"): (41_099_264, 0.01),
    ("enwik8", "adaptive-span"): (38_465_696, 0.015),
    ("enwik8", "mega-chunk"): (39_156_224, 0.01),
}


@pytest.mark.parametrize(("table", "row"), SIZES)
def test_sizes_are_those_of_the_paper(table: str, row: str) -> None:
    total, tolerance = SIZES[table, row]
    name = recipe_name(table, row, table)
    assert count(name) == total
    assert total == pytest.approx(published_parameters(table, row), rel=tolerance)


def test_runs_of_rows_stand_beside_those_of_their_recipe() -> None:
    folders = [default_folder(name) for name in (*RECIPES, *ROW_RECIPES, *SMALL_ROWS, "")]
    assert len(set(folders)) == len(folders)
    assert {folder.parent for folder in folders} == {Path("runs")}


def test_rows_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "list", "rows"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ROW_RECIPES)
    assert any(line.startswith("lra.pathx/mega ") and "4 layers of width 64" in line for line in lines)
