"""MEGA and MEGA-chunk: the settings of their published scripts (facebookresearch/mega, examples/mega).

Where SeqBoat's recipe adds absolute positions to the inputs, MEGA has none. Its matcher has the features [a, b]; ours
has those of SeqBoat, [a, b, a * b, a - b]. The scripts leave the size of a chunk open on the Long Range Arena: 128
tokens, half of the working memory of SeqBoat.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seqboat.mixers.mega import MegaChunkConfig, MegaConfig
from seqboat.recipes.rows.base import Settings
from seqboat.ssm.diagonal import EMAConfig
from seqboat.training.optim import OptimizerConfig, ScheduleConfig

CHUNK = 128
"""Tokens per chunk on the Long Range Arena."""


def _settings(
    layers: int,
    width: int,
    *,
    lr: float,
    weight_decay: float,
    steps: int,
    warmup: int,
    batch: int,
    power: float = 1.0,
    accumulation: int = 1,
    **mixer: Any,
) -> Settings:
    """A task's settings; the feed-forward block is as wide as the values, twice the model."""
    return Settings(
        MegaConfig(d_v=2 * width, d_ff=2 * width, **mixer),
        width,
        layers,
        OptimizerConfig(lr=lr, weight_decay=weight_decay, decay="all"),
        ScheduleConfig(steps=steps, warmup_steps=warmup, warmup_power=power),
        batch,
        dropout=mixer.get("dropout", 0.0),
        accumulation=accumulation,
    )


_CUT = EMAConfig(d_state=16, truncation=1024)
_IMAGES: dict[str, Any] = {"attention": "laplace", "norm": "batch", "prenorm": True}

MEGA = {
    "listops": _settings(
        6, 80, lr=0.001, weight_decay=0.01, steps=90_000, warmup=3_000, batch=64,
        ema=_CUT, d_z=64, norm="layer", dropout=0.1, max_positions=2002,
    ),
    "text": _settings(
        4, 128, lr=0.004, weight_decay=0.01, steps=25_000, warmup=10_000, batch=50, accumulation=2,
        ema=_CUT, d_z=64, norm="scale", dropout=0.1, max_positions=4002,
    ),
    "retrieval": _settings(
        6, 128, lr=0.003, weight_decay=0.04, steps=91_960, warmup=10_000, batch=64, accumulation=8,
        ema=_CUT, d_z=64, norm="scale", dropout=0.1, max_positions=4002,
    ),
    "image": _settings(
        8, 160, lr=0.01, weight_decay=0.02, steps=180_000, warmup=9_000, batch=50,
        ema=_CUT, d_z=96, max_positions=1024, **_IMAGES,
    ),
    "pathfinder": _settings(
        6, 128, lr=0.01, weight_decay=0.01, steps=250_000, warmup=50_000, batch=128,
        ema=_CUT, d_z=64, max_positions=1024, **_IMAGES,
    ),
    "pathx": _settings(
        4, 64, lr=0.01, weight_decay=0.01, steps=125_000, warmup=25_000, power=2, batch=128, accumulation=8,
        ema=EMAConfig(d_state=16, truncation=4096), d_z=32, max_positions=128 * 128, **_IMAGES,
    ),
}  # fmt: skip
"""MEGA on the Long Range Arena, by task."""


def _in_chunks(settings: Settings, size: int) -> Settings:
    """MEGA-chunk with the settings of MEGA."""
    values = {name: getattr(settings.mixer, name) for name in MegaConfig.__dataclass_fields__}
    return settings._replace(mixer=MegaChunkConfig(**values | {"chunk": size}))


MEGA_CHUNK = {task: _in_chunks(settings, CHUNK) for task, settings in MEGA.items()}
"""MEGA-chunk on the Long Range Arena, by task."""

SPEECH = _in_chunks(
    _settings(
        6, 60, lr=0.01, weight_decay=0.01, steps=250_000, warmup=10_000, batch=20,
        ema=EMAConfig(d_state=16, truncation=1000), d_z=30, max_positions=16_000, **_IMAGES,
    ),
    1000,
)  # fmt: skip
"""MEGA-chunk on Speech Commands, 300K parameters."""


def _language_model() -> Settings:
    given = _settings(
        12, 512, lr=0.005, weight_decay=0.1, steps=400_000, warmup=24_000, batch=8,
        ema=EMAConfig(d_state=16), d_z=128, positions="rotary",
        causal=True, norm="layer", prenorm=True, dropout=0.1,
    )  # fmt: skip
    return _in_chunks(given._replace(optimizer=replace(given.optimizer, clip=0.25)), 2048)


ENWIK8 = _language_model()
"""MEGA-chunk on enwik8, 39M parameters: always 8,192 bytes, where the script varies from two to four chunks. The
script cuts the moving average after 8,192 taps, which no segment exceeds: ours is whole and takes less memory."""
