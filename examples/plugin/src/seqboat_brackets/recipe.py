"""A recipe: settings that train our mixer on our task in a few seconds."""

from __future__ import annotations

from seqboat import BackboneConfig
from seqboat.training.config import EvaluationConfig, RunConfig, TrainingConfig
from seqboat.training.optim import OptimizerConfig, ScheduleConfig
from seqboat_brackets.mixer import RunningMeanConfig
from seqboat_brackets.task import BracketsTaskConfig


def brackets() -> RunConfig:
    """Balanced brackets: two layers of width 32, 200 steps."""
    return RunConfig(
        task=BracketsTaskConfig(),
        model=BackboneConfig(
            mixer=RunningMeanConfig(causal=True),
            d_model=32,
            num_layers=2,
        ),
        optimizer=OptimizerConfig(lr=0.005),
        schedule=ScheduleConfig(steps=200, warmup_steps=20),
        training=TrainingConfig(batch_size=32, log_every=50, save_every=100),
        evaluation=EvaluationConfig(every=100, batch_size=100),
    )
