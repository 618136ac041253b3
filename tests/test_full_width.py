"""Every row of tables 1 to 3 trains, is scored and resumes at the width of the paper, on short sequences."""

from __future__ import annotations

import dataclasses
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from seqboat.paper import GROUPS, TARGETS
from seqboat.paper.trial import Trial
from seqboat.recipes import find_recipe
from seqboat.tasks import TASKS
from seqboat.tasks.task import Dataset, Example, Split, Task
from seqboat.training.config import RunConfig
from seqboat.training.trainer import train
from small_runs import Spy

LENGTH = 96
EVERY = {trial.name: trial for name in GROUPS["tables"] for trial in TARGETS[name].paper}


@dataclass(frozen=True, kw_only=True)
class ShortConfig:
    """A task of the paper with short random examples."""

    recipe: str = "lra.image"

    def build(self) -> Short:
        return Short(find_recipe(self.recipe)().build_task())


class Short(Task):
    """Looks like another task, but for its examples; tables of positions keep their length."""

    name = "short"

    def __init__(self, task: Task) -> None:
        for field in (
            "kind",
            "vocab",
            "channels",
            "classes",
            "metric",
            "better",
            "max_length",
            "fixed_length",
        ):
            setattr(self, field, getattr(task, field))

    def dataset(self, split: Split) -> Dataset:
        return ShortData(self)


class ShortData(Dataset):
    def __init__(self, task: Task) -> None:
        self.task = task

    def __len__(self) -> int:
        return 16

    def _sequence(self, random: np.random.Generator) -> Any:
        if self.task.vocab is None:
            return random.normal(size=(LENGTH, self.task.channels)).astype(np.float32)
        return random.integers(0, self.task.vocab, LENGTH)

    def __getitem__(self, index: int) -> Example:
        random = np.random.default_rng(index)
        inputs = self._sequence(random)
        if self.task.kind == "lm":
            return Example(inputs, np.roll(inputs, -1))
        second = self._sequence(random) if self.task.kind == "match" else None
        return Example(inputs, int(random.integers(0, self.task.classes)), second)

    def lengths(self) -> Any:
        return np.full(len(self), LENGTH, dtype=np.int64)


class Killed(Exception):
    """Stands for the death of the process."""


def short_run(trial: Trial) -> RunConfig:
    config = trial.config(0)
    return dataclasses.replace(
        config.replace(
            schedule={"steps": 2, "warmup_steps": 0},
            training={"batch_size": 2, "accumulation": 1, "log_every": 1, "keep": 1, "device": "cpu"},
            evaluation={"every": 1, "batch_size": 2, "limit": 2},
        ),
        task=ShortConfig(recipe=trial.recipe),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_row_trains_is_scored_and_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "short", ShortConfig)
    config = short_run(EVERY[name])
    full = EVERY[name].config(0).model
    assert (config.model.d_model, config.model.num_layers) == (full.d_model, full.num_layers)

    def die(step: int, _model: nn.Module) -> None:
        if step == 2:
            raise Killed

    first, second = Spy(), Spy()
    with pytest.raises(Killed):
        train(config, tmp_path / "run", display=first, on_step=die)
    outcome = train(config, tmp_path / "run", resume=True, display=second)
    shutil.rmtree(tmp_path / "run")
    assert (outcome.exit_code, outcome.step) == (0, 2)
    assert [score["step"] for score in (*first.scores, *second.scores)] == [1, 2]
    metric = config.build_task().metric
    assert all(math.isfinite(score[metric]) for score in (*first.scores, *second.scores))
    assert second.losses == first.losses[1:], "the resumed step is the one that was lost"
