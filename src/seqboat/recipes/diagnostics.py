"""Two synthetic tasks that tell in a minute or two whether a model can look things up."""

from __future__ import annotations

from seqboat.config import EvaluationConfig, RunConfig, TrainingConfig
from seqboat.mixers.ema import EMAConfig
from seqboat.mixers.gau import GAUConfig
from seqboat.mixers.seqboat import SeqBoatConfig
from seqboat.model import BackboneConfig, MixerConfig
from seqboat.optim import OptimiserConfig, ScheduleConfig
from seqboat.routers import TemperedSoftmaxConfig
from seqboat.tasks.copy import CopyTaskConfig
from seqboat.tasks.recall import RecallTaskConfig


def _diagnostic_mixer(length: int) -> SeqBoatConfig:
    return SeqBoatConfig(
        ssm=EMAConfig(d_state=4),
        router=TemperedSoftmaxConfig(temperature_scale=1.0),
        gau=GAUConfig(d_z=32, d_v=64, attention="softmax", window=length, max_positions=length),
        causal=True,
        norm="layer",
        prenorm=True,
    )


def recall(mixer: MixerConfig | None = None) -> RunConfig:
    """Multi-query associative recall: 8 pairs of key and value in 64 tokens; two layers of width 64."""
    return RunConfig(
        task=RecallTaskConfig(),
        model=BackboneConfig(
            mixer=mixer or _diagnostic_mixer(64), d_model=64, num_layers=2, scaled_embedding=True
        ),
        optimiser=OptimiserConfig(lr=0.003, weight_decay=0.01),
        schedule=ScheduleConfig(steps=1500, warmup_steps=100),
        training=TrainingConfig(batch_size=64, log_every=50, save_every=500),
        evaluation=EvaluationConfig(every=250, batch_size=200),
    )


def copy(mixer: MixerConfig | None = None) -> RunConfig:
    """Selective copying: 8 tokens among 56 places; two layers of width 64."""
    return RunConfig(
        task=CopyTaskConfig(),
        model=BackboneConfig(
            mixer=mixer or _diagnostic_mixer(64), d_model=64, num_layers=2, scaled_embedding=True
        ),
        optimiser=OptimiserConfig(lr=0.003, weight_decay=0.01),
        schedule=ScheduleConfig(steps=1500, warmup_steps=100),
        training=TrainingConfig(batch_size=64, log_every=50, save_every=500),
        evaluation=EvaluationConfig(every=250, batch_size=200),
    )
