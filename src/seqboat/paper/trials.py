"""What a target of `seqboat reproduce` consists of: runs that are trained, and benchmarks that are measured."""

from __future__ import annotations

import dataclasses
import shlex
from functools import cache
from typing import Literal

from seqboat.paper.matching import match_parameters
from seqboat.paper.published import ENWIK8, LRA, SPEECH, TITLES
from seqboat.recipes import find_recipe
from seqboat.training.config import RunConfig, override

Scale = Literal["small", "paper"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One row of a table: a recipe with some settings, run with one or more seeds.

    Two targets may have the same trial: it is run once.
    """

    name: str
    """fit for the name of a folder; trials of the same name have the same settings"""
    title: str
    """as in the table"""
    recipe: str
    arguments: tuple[str, ...] = ()
    """settings, as `seqboat train` takes them"""
    match: bool = False
    """whether the model gets as many parameters as the recipe's own"""
    seeds: int = 1
    minutes: float | None = None
    """processor minutes of one seed, about; None where it needs other hardware"""
    paper: str | None = None
    """the number in the paper for the full-size experiment, in the words of its table"""
    table: str = ""
    """which of several tables it is a row of"""
    task: str = ""
    """which of several tasks it is a column of"""
    baseline: str | None = None
    """name of the trial that its speed is compared with"""
    paper_speed: float | None = None
    """its training speed in the paper, as a multiple of the baseline's"""
    size: int | None = None
    """size of the working memory or chunk, where that is what changes"""

    def config(self, seed: int) -> RunConfig:
        """The configuration of one run."""
        return dataclasses.replace(_configure(self.recipe, self.arguments, self.match), seed=seed)

    @property
    def steps(self) -> int:
        """Training steps of one run. Does not wait for widths to be matched."""
        return _configure(self.recipe, self.arguments, False).schedule.steps

    def command(self, seed: int | None = None) -> str:
        """What to type for one run of it."""
        words = ["seqboat", "train", self.recipe, *self.arguments]
        words += ["--match-parameters"] if self.match else []
        return shlex.join(words if seed is None else [*words, f"--seed={seed}"])


@cache
def _configure(recipe: str, arguments: tuple[str, ...], match: bool) -> RunConfig:
    own = find_recipe(recipe)()
    config = override(dataclasses.replace(own, recipe=recipe), arguments)
    return match_parameters(config, own)[0] if match else config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Something that is measured, not trained."""

    name: str
    """unique in its target"""
    title: str
    minutes: float | None
    """on two cores, about; None where it depends on the hardware"""
    length: int | None = None
    """tokens per sequence, where that is what changes"""
    matched: bool = False
    """whether layers have as many parameters as SeqBoat, instead of its width"""


# the runs of tables 1 to 3, which figures look at as well


def paper_runs(scale: Scale, *names: str) -> tuple[Trial, ...]:
    """Runs of tables 1 to 3 by their names, at full size or as small variants for two cores."""
    return tuple(_PAPER_RUNS[name][scale] for name in names)


def _pair(name: str, title: str, recipe: str, paper: str, minutes: float) -> dict[str, Trial]:
    return {
        "small": Trial(name=name, title=title, recipe=f"{recipe}-small", paper=paper, minutes=minutes),
        "paper": Trial(name=name, title=title, recipe=recipe, paper=paper),
    }


_LRA_MINUTES = {"listops": 7, "text": 12, "retrieval": 9, "image": 15, "pathfinder": 11, "pathx": 15}
_PAPER_RUNS = {
    **{
        task: _pair(task, TITLES[task], f"lra.{task}", f"{LRA['seqboat'].accuracy[task]:.2f} %", minutes)
        for task, minutes in _LRA_MINUTES.items()
    },
    "speech": _pair("speech", "Speech Commands", "speech", f"{SPEECH['seqboat'].accuracy:.2f} %", 15),
    "enwik8": _pair("enwik8", "enwik8", "enwik8", f"{ENWIK8['seqboat'].bits:.2f} bits", 15),
}


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
}
"""Settings of the short runs, by task."""
_SHORT_MINUTES = {"listops": 1.6, "image": 3.3, "pathfinder": 5.5}
CUT_SHORT = (
    "Every row of a task has the same short schedule: ListOps 800 steps of the small recipe's 4,600, Image 600 "
    "of 1,800 with batches of 25 images instead of 50 (validated on 2,000), Pathfinder 500 of 2,000. Such runs are "
    "far from converged."
)


def short_run(task: str, row: str, title: str, scale: Scale, *, small_seeds: int = 1, size: int = 0) -> Trial:
    """A run of a task with a short schedule, or the whole one at full size.

    Args:
        task: of the Long Range Arena.
        row: of the ablations; the recipe's own SeqBoat if empty.
        title: in the table.
        scale: of the recipe.
        small_seeds: seeds of a small run.
        size: of working memory or chunk, if it is not the recipe's.
    """
    small = scale == "small"
    suffix = "-small" if small else ""
    field = "chunk" if row == "mega" else "gau.window"
    return Trial(
        name="-".join(filter(None, (task, "short" if small else "full", row, str(size or "")))),
        title=title,
        recipe=f"ablations.{task}{suffix}.{row}" if row else f"lra.{task}{suffix}",
        arguments=(
            *((f"--model.mixer.{field}={size}",) if size else ()),
            *(_SHORT[task] if small else ()),
        ),
        seeds=small_seeds if small else 1,
        minutes=_SHORT_MINUTES[task] * (1.3 if row == "mega" else 1.0) if small else None,
    )


def memory_sizes(scale: Scale) -> tuple[Trial, ...]:
    """SeqBoat and MEGA-chunk with memories and chunks of several sizes on two tasks."""
    small = scale == "small"
    sizes = (16, 32, 64, 128) if small else (16, 32, 64, 128, 256, 512)
    own = 64 if small else 256
    trials = []
    for task in ("image", "pathfinder"):
        for row, title in (("", "SeqBoat"), ("mega", "MEGA-chunk")):
            for size in sizes:
                # the size of the recipe itself is a run of the ablations as well
                changed = 0 if size == own and not row else size
                trial = short_run(task, row, title, scale, size=changed)
                trials.append(
                    dataclasses.replace(trial, task=TITLES[task], size=size, seeds=1 if small else 3)
                )
    return tuple(trials)


def span_runs(scale: Scale) -> tuple[Trial, ...]:
    """SeqBoat with memories of several sizes on Pathfinder and enwik8."""
    small = scale == "small"
    own = 128 if small else 1024
    schedule = short_schedule(300, 2, "--evaluation.limit=128") if small else ()
    trials = [t for t in memory_sizes(scale) if t.title == "SeqBoat" and t.task == TITLES["pathfinder"]]
    for size in (own // 4, own // 2, own, 2 * own):
        if size == own and not small:  # the run of table 3
            trials.append(dataclasses.replace(*paper_runs("paper", "enwik8"), size=size, task="enwik8"))
            continue
        trials.append(
            Trial(
                name=f"enwik8-{'short' if small else 'full'}-{size}",
                title="SeqBoat",
                recipe="enwik8-small" if small else "enwik8",
                arguments=(f"--model.mixer.gau.window={size}", *schedule),
                minutes=3.0 if small else None,
                task="enwik8",
                size=size,
            )
        )
    return tuple(trials)
