"""Language model of enwik8: table 3 of the paper, with the settings of its table 5.

What the table leaves open comes from the published script; docs/paper.md lists where the two differ.
"""

from __future__ import annotations

from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import TemperedSoftmaxConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.ssm.diagonal import EMAConfig
from seqboat.tasks.enwik8 import Enwik8TaskConfig
from seqboat.training.config import EvaluationConfig, RunConfig, TrainingConfig
from seqboat.training.optim import OptimizerConfig, ScheduleConfig


def enwik8() -> RunConfig:
    """enwik8, 8 sequences of 8,192 bytes, 400,000 steps; 39M parameters.

    Evaluation reads windows of 8,192 bytes and scores the last 1,192 of each, so that every byte has at least 7,000
    before it.
    """
    return RunConfig(
        task=Enwik8TaskConfig(segment=8192, context=7000, window=8192),
        model=BackboneConfig(
            mixer=SeqBoatConfig(
                init="paper",
                form="paper",
                ssm=EMAConfig(d_state=16, truncation=2048),
                router=TemperedSoftmaxConfig(temperature_scale=1.0),
                gau=GAUConfig(d_z=128, d_v=1232, attention="softmax", window=1024, positions="rotary"),
                causal=True,
                norm="layer",
                prenorm=True,
                dropout=0.15,
            ),
            d_model=616,
            num_layers=14,
            scaled_embedding=True,
            dropout=0.15,
            final_norm_affine=False,
        ),
        optimizer=OptimizerConfig(name="radam", lr=0.005, weight_decay=0.1, decay="all", clip=0.25),
        schedule=ScheduleConfig(steps=400_000, warmup_steps=24_000, warmup_from=0.002),
        training=TrainingConfig(batch_size=8, log_every=100),
        evaluation=EvaluationConfig(every=5000, batch_size=8, limit=1000),
    )


def enwik8_small() -> RunConfig:
    """enwik8 with 512-byte segments of contiguous text and a carried state.

    Cut: 3 layers of width 128 instead of 14 of 616, segments of 512 bytes instead of 8,192 (but the state is carried
    from one to the next), working memory 128 instead of 1,024, 14 million bytes read instead of 26 billion, no
    dropout; evaluation during training on the first 256 kB of the validation text.
    """
    return RunConfig(
        task=Enwik8TaskConfig(segment=512),
        model=BackboneConfig(
            mixer=SeqBoatConfig(
                init="paper",
                form="paper",
                ssm=EMAConfig(d_state=8),
                router=TemperedSoftmaxConfig(temperature_scale=1.0),
                gau=GAUConfig(d_z=32, d_v=256, attention="softmax", window=128, positions="rotary"),
                causal=True,
                norm="layer",
                prenorm=True,
            ),
            d_model=128,
            num_layers=3,
            scaled_embedding=True,
        ),
        optimizer=OptimizerConfig(name="radam", lr=0.006, weight_decay=0.1, clip=0.25),
        schedule=ScheduleConfig(steps=1800, warmup_steps=50, warmup_from=0.002),
        training=TrainingConfig(batch_size=16, carry_state=True, log_every=20, save_every=300),
        evaluation=EvaluationConfig(every=300, batch_size=16, limit=512),
    )
