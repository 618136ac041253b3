"""Your own data: classes, numbers and tags of tables, and a language model of text files."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import TemperedSoftmaxConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.own.task import ClassifyTaskConfig, OwnTaskConfig, RegressTaskConfig, TagTaskConfig
from seqboat.own.text import LMTextTaskConfig
from seqboat.ssm.diagonal import EMAConfig
from seqboat.training.config import EvaluationConfig, RunConfig, TrainingConfig
from seqboat.training.optim import OptimizerConfig, ScheduleConfig

if TYPE_CHECKING:
    from seqboat.own.task import OwnTask

EPOCHS = 1.5
"""How often the rows of a table are read, at least, unless that takes too many steps."""
MOST = 4
"""Times the steps of a recipe that a large table takes at most."""
MEMORY = 1_024
"""Longest time constant that a fresh model gets."""
OWN_LR, NUMBERS_LR = 0.003, 0.01
OWN_DROPOUT = 0.1
STEM = 5


def for_task(config: RunConfig, task: OwnTask) -> RunConfig:
    """A recipe of own data adapted to what was read.

    Time constants reach over the longest sequence. Numbers first meet two small convolutions, and learn faster.

    Args:
        config: of a run on own data.
        task: the same task, which has read its training rows.
    """
    mixer, model = config.model.mixer, dict[str, Any]()
    if isinstance(mixer, SeqBoatConfig) and isinstance(mixer.ssm, EMAConfig) and mixer.ssm.memory == MEMORY:
        memory = min(max(task.longest, 8), MEMORY)
        model["mixer"] = replace(mixer, ssm=replace(mixer.ssm, memory=memory))
    if task.vocab is not None:
        return config.replace(model=model)
    if model and not mixer.causal:  # type: ignore[attr-defined]
        model["stem"] = STEM
    if model and config.model.dropout == OWN_DROPOUT:
        # noise hurts where an exact number is wanted; `own.fit` tries it
        model["dropout"] = 0.0
        model["mixer"] = replace(model["mixer"], dropout=0.0)
    lr = NUMBERS_LR if config.optimizer.lr == OWN_LR else config.optimizer.lr
    return config.replace(model=model, optimizer={"lr": lr})


def for_rows(config: RunConfig, rows: int) -> RunConfig:
    """A recipe for a table with this many training rows: more steps if it is large, and as many evaluations.

    >>> [for_rows(classify(), rows).schedule.steps for rows in (3_000, 22_500, 1_000_000)]
    [300, 1055, 1200]
    """
    steps = config.schedule.steps
    wanted = min(max(steps, math.ceil(EPOCHS * rows / config.training.batch_size)), MOST * steps)
    every = math.ceil(config.evaluation.every * wanted / steps)
    return config.replace(schedule={"steps": wanted}, evaluation={"every": every})


def classify() -> RunConfig:
    """A class for each text or series of a table (--data.train FILE): one layer of width 64."""
    return RunConfig(
        task=ClassifyTaskConfig(),
        model=BackboneConfig(
            mixer=SeqBoatConfig(
                ssm=EMAConfig(d_state=8, memory=MEMORY),
                router=TemperedSoftmaxConfig(temperature_scale=0.3),
                gau=GAUConfig(d_z=32, d_v=64, window=64, positions="rotary"),
                norm="scale",
                dropout=0.1,
            ),
            d_model=64,
            num_layers=1,
            dropout=0.1,
            head_init="xavier",
            pool="mean+max",
        ),
        optimizer=OptimizerConfig(lr=OWN_LR, weight_decay=0.01),
        schedule=ScheduleConfig(steps=300, warmup_steps=30),
        training=TrainingConfig(batch_size=32, bucketing=True, save_every=100),
        evaluation=EvaluationConfig(every=50, batch_size=32),
    )


def regress() -> RunConfig:
    """A number for each text or series of a table (--data.train FILE): the model of `classify`."""
    return replace(classify(), task=RegressTaskConfig())


def tag() -> RunConfig:
    """A tag for each word or step (--data.train FILE): the model of `classify`, with answers for every token."""
    return replace(classify(), task=TagTaskConfig())


def for_kind(task: OwnTaskConfig) -> RunConfig:
    """The recipe of a task on own data."""
    recipe = {"classify": classify, "regress": regress, "tag": tag}[task.task_name]
    return replace(recipe(), task=task, recipe=task.task_name)


def lm() -> RunConfig:
    """The next byte of text files (--data.text FILES): three layers of width 128; evaluation carries the state."""
    return RunConfig(
        task=LMTextTaskConfig(segment=512),
        model=BackboneConfig(
            mixer=SeqBoatConfig(
                ssm=EMAConfig(d_state=8),
                router=TemperedSoftmaxConfig(temperature_scale=1.0),
                gau=GAUConfig(d_z=32, d_v=256, window=128, positions="rotary"),
                causal=True,
                norm="layer",
                prenorm=True,
                dropout=0.1,
            ),
            d_model=128,
            num_layers=3,
            scaled_embedding=True,
            dropout=0.1,
        ),
        optimizer=OptimizerConfig(name="radam", lr=0.005, weight_decay=0.1, clip=0.25),
        schedule=ScheduleConfig(steps=2000, warmup_steps=100, warmup_from=0.002),
        training=TrainingConfig(batch_size=8, carry_state=True, carry_segments=1, save_every=200),
        evaluation=EvaluationConfig(every=200, batch_size=8, limit=512),
    )
