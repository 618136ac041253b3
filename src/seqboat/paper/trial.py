"""What a target of `seqboat paper run` consists of: runs that are trained.

    table_run("lra", "mega", "image", "paper")      one row of table 1 on one task
    table_runs("lra", "small")                      all rows on all tasks
    ablation_run("image", "ffn", "paper")           a row of tables 7 and 8
    memory_sizes("image", "seqboat", "paper")       working memories or chunks of several sizes

At the scale of the paper a run that belongs to several tables and figures is one trial with one name.
"""

from __future__ import annotations

import dataclasses
import shlex
from functools import cache
from typing import Literal

from seqboat.paper.published import ABLATIONS, TITLES, published_score
from seqboat.recipes import ROWS, find_recipe
from seqboat.training.config import RunConfig
from seqboat.training.settings_io import override

Scale = Literal["small", "paper"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One cell of a table: a recipe with some settings, run with one or more seeds.

    Two targets may have the same trial: it is run once.
    """

    name: str
    """fit for the name of a folder; trials of the same name have the same settings"""
    title: str
    """of the model, as in the table"""
    recipe: str
    arguments: tuple[str, ...] = ()
    """settings, as `seqboat train` takes them"""
    seeds: int = 1
    paper: str | None = None
    """the number in the paper for the full-size experiment, in the words of its table"""
    table: str = ""
    """which of several tables it is a row of"""
    row: str = ""
    """short name of the model, for `--rows`"""
    task: str = ""
    """short name of the task, for `--tasks`"""
    baseline: str | None = None
    """name of the trial that its speed is compared with"""
    paper_speed: float | None = None
    """its training speed in the paper, as a multiple of the baseline's"""
    size: int | None = None
    """size of the working memory or chunk, where that is what changes"""
    source: str = ""
    """where its settings come from"""

    @property
    def task_title(self) -> str:
        """The task as tables name it."""
        return TITLES.get(self.task, self.task)

    def config(self, seed: int) -> RunConfig:
        """The configuration of one run."""
        return dataclasses.replace(_configure(self.recipe, self.arguments), seed=seed)

    @property
    def steps(self) -> int:
        """Training steps of one run."""
        return _configure(self.recipe, self.arguments).schedule.steps

    def command(self, seed: int | None = None) -> str:
        """What to type for one run of it."""
        words = ["seqboat", "train", self.recipe, *self.arguments]
        return shlex.join(words if seed is None else [*words, f"--seed={seed}"])


@cache
def _configure(recipe: str, arguments: tuple[str, ...]) -> RunConfig:
    return override(dataclasses.replace(find_recipe(recipe)(), recipe=recipe), arguments)


# tables 1 to 3


def table_run(table: str, row: str, task: str, scale: Scale) -> Trial:
    """A row of table 1 (`lra`), 2 (`speech`) or 3 (`enwik8`) on one task, at full size or as a small variant."""
    entry = ROWS[table][row]
    base = f"lra.{task}" if table == "lra" else task
    small = "-small" if scale == "small" else ""
    own = row == "seqboat"
    return Trial(
        name=task if own else f"{task}-{row}",
        title=entry.title,
        recipe=f"{base}{small}" if own else f"{base}{small}/{row}",
        paper=_published(table, row, task),
        row=row,
        task=task,
        source=entry.source,
    )


def _published(table: str, row: str, task: str) -> str:
    """The number of the paper, in the words of its table."""
    score = published_score(table, row, task)
    if score is None:
        return "chance"
    return f"{score:.2f} {'bits' if table == 'enwik8' else '%'}"


def table_runs(table: str, scale: Scale) -> tuple[Trial, ...]:
    """All rows of table 1, 2 or 3 on all tasks."""
    return tuple(
        table_run(table, row, task, scale) for row, entry in ROWS[table].items() for task in entry.recipes
    )


# short schedules, so that tables of many rows finish on two cores


def short_schedule(steps: int, evaluations: int, *more: str) -> tuple[str, ...]:
    """Settings of a short run: a tenth of the steps is warm-up, as in the small recipes."""
    return (
        f"--schedule.steps={steps}",
        f"--schedule.warmup_steps={steps // 10}",
        f"--evaluation.every={steps // evaluations}",
        "--training.log_every=10",
        *more,
    )


_SHORT = {
    "listops": short_schedule(800, 4),
    "image": short_schedule(600, 3, "--training.batch_size=25", "--evaluation.limit=2000"),
    "pathfinder": short_schedule(500, 5),
    "enwik8": short_schedule(300, 2, "--evaluation.limit=128"),
}
"""Settings of the short runs, by task."""
CUT_SHORT = (
    "Every row of a task has the same short schedule: ListOps 800 steps of the small recipe's 4,600, Image 600 "
    "of 1,800 with batches of 25 images instead of 50 (validated on 2,000), Pathfinder 500 of 2,000, enwik8 300 of "
    "1,800. Such runs are far from converged."
)


def _short_run(task: str, row: str, *, seeds: int = 1, size: int = 0) -> Trial:
    """A small run of a task with a short schedule.

    Args:
        task: of the Long Range Arena, or enwik8.
        row: of the ablations; the recipe's own SeqBoat if empty.
        seeds: how many.
        size: of working memory or chunk, if it is not the recipe's.
    """
    base = task if task == "enwik8" else f"lra.{task}"
    field = "chunk" if row == "mega" else "gau.window"
    return Trial(
        name="-".join(filter(None, (task, "short", row, str(size or "")))),
        title="MEGA" if row == "mega" else "SeqBoat",
        recipe=f"ablations.{task}-small.{row}" if row else f"{base}-small",
        arguments=(*((f"--model.mixer.{field}={size}",) if size else ()), *_SHORT[task]),
        seeds=seeds,
        row=row or "seqboat",
        task=task,
    )


# tables 7 and 8

_AS_IN_TABLE_1 = {"": "seqboat", "full": "seqboat-full", "mega": "mega"}
"""Rows of the ablations that are rows of table 1."""
_ABLATION_SEEDS = {"listops": 3}
"""Seeds of small runs, where there are several."""


def ablation_run(task: str, row: str, scale: Scale) -> Trial:
    """A row of tables 7 and 8, or MEGA, on one task; the rows of table 1 among them are runs of table 1."""
    title = next((rows[row].title for rows in ABLATIONS.values() if row in rows), "MEGA")
    if scale == "small":
        trial = _short_run(task, row, seeds=_ABLATION_SEEDS.get(task, 1))
    elif row in _AS_IN_TABLE_1:
        trial = table_run("lra", _AS_IN_TABLE_1[row], task, "paper")
    else:
        trial = Trial(name=f"{task}-{row}", title=title, recipe=f"ablations.{task}.{row}", row=row, task=task)
    return dataclasses.replace(trial, title=title, row=row or "seqboat", paper=None)


# figures 5 and 6

_SIZES = {
    ("small", "lra"): (16, 32, 64, 128),
    ("paper", "lra"): (16, 32, 64, 128, 256, 512),
    ("small", "enwik8"): (32, 64, 128, 256),
    ("paper", "enwik8"): (256, 512, 1024, 2048),
}
_OWN_SIZE = {("small", "lra"): 64, ("paper", "lra"): 256, ("small", "enwik8"): 128, ("paper", "enwik8"): 1024}
_OWN_CHUNK = 128
"""The size in the recipes: of SeqBoat's memory, and of MEGA's chunks in table 1."""


def memory_sizes(task: str, row: str, scale: Scale) -> tuple[Trial, ...]:
    """SeqBoat with working memories, or MEGA with chunks, of several sizes on one task."""
    key = scale, "enwik8" if task == "enwik8" else "lra"
    table = key[1]
    title = ROWS[table][row].title
    trials = []
    for size in _SIZES[key]:
        own = size == (_OWN_CHUNK if row == "mega-chunk" else _OWN_SIZE[key])
        if scale == "small":
            form = "mega" if row == "mega-chunk" else ""
            # the size of the recipe itself is a run of the ablations as well
            trial = _short_run(task, form, size=0 if own and not form and table == "lra" else size)
        else:
            trial = table_run(table, row, task, scale)
            if not own:
                field = "chunk" if row == "mega-chunk" else "gau.window"
                trial = dataclasses.replace(
                    trial, name=f"{task}-{row}-{size}", arguments=(f"--model.mixer.{field}={size}",)
                )
        seeds = 3 if scale == "paper" and table == "lra" else 1
        trials.append(dataclasses.replace(trial, title=title, row=row, size=size, seeds=seeds, paper=None))
    return tuple(trials)
