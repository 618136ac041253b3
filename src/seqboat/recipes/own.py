"""Your own files at byte level: a classifier of texts, and a language model."""

from __future__ import annotations

import math
from dataclasses import replace

from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import TemperedSoftmaxConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.own.task import ClassifyTaskConfig, RegressTaskConfig, TagTaskConfig
from seqboat.own.text import LMTextTaskConfig
from seqboat.ssm.ema import EMAConfig
from seqboat.training.config import EvaluationConfig, RunConfig, TrainingConfig
from seqboat.training.optim import OptimizerConfig, ScheduleConfig

EPOCHS = 1.5
"""How often the rows of a table are read, at least, unless that takes too many steps."""
MOST = 4
"""Times the steps of a recipe that a large table takes at most."""


def for_rows(config: RunConfig, rows: int) -> RunConfig:
    """A recipe for a table with this many training rows: more steps if it is large, as many evaluations.

    >>> [for_rows(classify(), rows).schedule.steps for rows in (3_000, 22_500, 1_000_000)]
    [300, 1055, 1200]
    """
    steps, batch = config.schedule.steps, config.training.batch_size
    wanted = min(max(steps, math.ceil(EPOCHS * rows / batch)), MOST * steps)
    every = math.ceil(config.evaluation.every * wanted / steps)
    return config.replace(schedule={"steps": wanted}, evaluation={"every": every})


def classify() -> RunConfig:
    """A class for each text of a table (--data.train FILE): one layer of width 64, texts of up to 2,048 bytes."""
    return RunConfig(
        task=ClassifyTaskConfig(max_length=2048),
        model=BackboneConfig(
            mixer=SeqBoatConfig(
                ssm=EMAConfig(d_state=8),
                router=TemperedSoftmaxConfig(temperature_scale=0.3),
                gau=GAUConfig(d_z=32, d_v=64, window=64, positions="compressed", max_positions=2048),
                norm="scale",
                dropout=0.1,
            ),
            d_model=64,
            num_layers=1,
            dropout=0.1,
            head_init="xavier",
        ),
        optimizer=OptimizerConfig(lr=0.003, weight_decay=0.01),
        schedule=ScheduleConfig(steps=300, warmup_steps=60),
        training=TrainingConfig(batch_size=32, bucketing=True, save_every=100),
        evaluation=EvaluationConfig(every=50, batch_size=32),
    )


def regress() -> RunConfig:
    """A number for each text of a table (--data.train FILE): the model of `classify`."""
    return replace(classify(), task=RegressTaskConfig(max_length=2048))


def tag() -> RunConfig:
    """A tag for each byte of texts (--data.train FILE): the model of `classify`, with answers for every token."""
    return replace(classify(), task=TagTaskConfig(max_length=2048))


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
