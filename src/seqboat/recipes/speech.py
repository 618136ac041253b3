"""Speech Commands, ten words from raw samples: table 2 of the paper, with the settings of its table 4.

What the table leaves open comes from the published script; docs/paper.md lists where the two differ.
"""

from __future__ import annotations

from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import TemperedSoftmaxConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.ssm.diagonal import EMAConfig
from seqboat.tasks.speech import SpeechTaskConfig
from seqboat.training.config import EvaluationConfig, RunConfig, TrainingConfig
from seqboat.training.optim import OptimizerConfig, ScheduleConfig


def speech() -> RunConfig:
    """Speech Commands, 16,000 samples: 200 epochs of about 24,500 clips; 293K parameters.

    The paper's 293K are all parameters but the tables of relative positions. Ours have 257 compressed distances per
    layer, which makes 295K in all.
    """
    return RunConfig(
        task=SpeechTaskConfig(),
        model=BackboneConfig(
            mixer=SeqBoatConfig(
                init="paper",
                form="paper",
                ssm=EMAConfig(d_state=16, truncation=4000),
                router=TemperedSoftmaxConfig(temperature_scale=1.0),
                gau=GAUConfig(
                    d_z=30,
                    d_v=120,
                    attention="relu2",
                    window=256,
                    positions="compressed",
                    max_positions=16_000,
                ),
                norm="batch",
                prenorm=True,
            ),
            d_model=60,
            num_layers=8,
            absolute_positions=True,
            head_bias=False,
            head_init="xavier",
        ),
        optimizer=OptimizerConfig(lr=0.01, weight_decay=0.01, decay="all"),
        schedule=ScheduleConfig(steps=250_000, warmup_steps=10_000),
        training=TrainingConfig(batch_size=20),
        evaluation=EvaluationConfig(every=1225, batch_size=20),
    )


def speech_small() -> RunConfig:
    """Speech Commands at 2,000 averaged samples.

    Cut: averages of eight samples, 22,000 clips seen instead of 5 million, 4 layers of width 48 instead of 8 of
    60, working memory 64, no absolute positions. Changed: the data set's own split by speaker, so that test speakers
    are unseen.
    """
    return RunConfig(
        task=SpeechTaskConfig(pool=8, parts="speaker"),
        model=BackboneConfig(
            mixer=SeqBoatConfig(
                init="paper",
                form="paper",
                ssm=EMAConfig(d_state=16),
                router=TemperedSoftmaxConfig(temperature_scale=1.0),
                gau=GAUConfig(
                    d_z=24,
                    d_v=96,
                    attention="relu2",
                    window=64,
                    positions="compressed",
                    max_positions=2000,
                ),
                norm="batch",
                prenorm=True,
            ),
            d_model=48,
            num_layers=4,
        ),
        optimizer=OptimizerConfig(lr=0.01, weight_decay=0.01),
        schedule=ScheduleConfig(steps=1100, warmup_steps=110),
        training=TrainingConfig(batch_size=20, log_every=20, save_every=200),
        evaluation=EvaluationConfig(every=200, batch_size=20),
    )
