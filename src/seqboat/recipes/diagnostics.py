"""Synthetic tasks that train in minutes: tests of recall and memory, and the demo."""

from __future__ import annotations

from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import TemperedSoftmaxConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.ssm.diagonal import EMAConfig
from seqboat.tasks.diagnostics import CopyTaskConfig, NeedleTaskConfig, RecallTaskConfig
from seqboat.tasks.listops import ShortListOpsTaskConfig
from seqboat.tasks.task import TaskConfig
from seqboat.training.config import EvaluationConfig, RunConfig, TrainingConfig
from seqboat.training.optim import OptimizerConfig, ScheduleConfig


def _diagnostic(task: TaskConfig) -> RunConfig:
    """Two layers of width 64, 1,500 steps."""
    mixer = SeqBoatConfig(
        init="paper",
        form="paper",
        ssm=EMAConfig(d_state=4),
        router=TemperedSoftmaxConfig(temperature_scale=1.0),
        gau=GAUConfig(d_z=32, d_v=64, attention="softmax", window=64, positions="original", max_positions=64),
        causal=True,
        norm="layer",
        prenorm=True,
    )
    return RunConfig(
        task=task,
        model=BackboneConfig(mixer=mixer, d_model=64, num_layers=2, scaled_embedding=True),
        optimizer=OptimizerConfig(lr=0.003, weight_decay=0.01),
        schedule=ScheduleConfig(steps=1500, warmup_steps=100),
        training=TrainingConfig(batch_size=64, log_every=50, save_every=500),
        evaluation=EvaluationConfig(every=250, batch_size=200),
    )


def recall() -> RunConfig:
    """Multi-query associative recall: 8 pairs of key and value in 64 tokens; two layers of width 64."""
    return _diagnostic(RecallTaskConfig())


def copy() -> RunConfig:
    """Selective copying: 8 tokens among 56 places; two layers of width 64."""
    return _diagnostic(CopyTaskConfig())


def needle() -> RunConfig:
    """A needle in a haystack of 128 bytes: the number that was given for a key; two layers of width 64."""
    return _diagnostic(NeedleTaskConfig())


def demo() -> RunConfig:
    """Short ListOps expressions, learned in about four minutes on two cores; three layers of width 64.

    Router temperature and learning rate are the paper's for ListOps.
    """
    mixer = SeqBoatConfig(
        init="paper",
        form="paper",
        # half the default block: most expressions are shorter
        ssm=EMAConfig(d_state=8, block=32),
        router=TemperedSoftmaxConfig(temperature_scale=0.3),
        gau=GAUConfig(d_z=32, window=64, positions="original", max_positions=100),
    )
    return RunConfig(
        task=ShortListOpsTaskConfig(),
        model=BackboneConfig(mixer=mixer, d_model=64, num_layers=3),
        optimizer=OptimizerConfig(lr=4e-3, weight_decay=0.01),
        schedule=ScheduleConfig(steps=2800, warmup_steps=280),
        training=TrainingConfig(batch_size=64, bucketing=True, log_every=140, save_every=1400),
        evaluation=EvaluationConfig(every=700, batch_size=200),
    )
