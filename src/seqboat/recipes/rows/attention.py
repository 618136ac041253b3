"""Transformer, Luna-256, Reformer, BigBird, Performer and Linformer on the Long Range Arena.

- Luna-256, and the Transformer that was reported with it: the scripts and sizes of XuezheMax/fairseq-apollo. The
  Transformer has no script there: it takes Luna's training, and on ListOps that of the benchmark.
- The other four: the configurations of google-research/long-range-arena. Where queries and keys are narrower than the
  model there, ours are as wide.
- Path-X: no row solved it. Luna and Transformer take their settings of Pathfinder, the others the benchmark's.

Models classify from the mean over all tokens; the benchmark's read a first token on some tasks.
"""

from __future__ import annotations

import math
from typing import Any

from seqboat.mixers.bigbird import BigBirdConfig
from seqboat.mixers.linformer import LinformerConfig
from seqboat.mixers.luna import LunaConfig
from seqboat.mixers.performer import PerformerConfig
from seqboat.mixers.reformer import ReformerConfig
from seqboat.mixers.transformer import TransformerConfig
from seqboat.models.backbone import MixerConfig
from seqboat.recipes.rows.base import Settings
from seqboat.training.optim import OptimizerConfig, ScheduleConfig

LENGTHS = {
    "listops": 2000,
    "text": 4096,
    "retrieval": 4000,
    "image": 1024,
    "pathfinder": 1024,
    "pathx": 16384,
}
"""Tokens of a sequence."""


def _settings(
    mixer: MixerConfig,
    layers: int,
    width: int,
    *,
    lr: float,
    weight_decay: float,
    steps: int,
    warmup: int,
    batch: int,
    dropout: float,
    shape: Any = "rsqrt",
    accumulation: int = 1,
    clip: float | None = None,
    eps: float = 1e-8,
) -> Settings:
    return Settings(
        mixer,
        width,
        layers,
        OptimizerConfig(lr=lr, weight_decay=weight_decay, decay="all", clip=clip, eps=eps),
        ScheduleConfig(steps=steps, warmup_steps=warmup, shape=shape),
        batch,
        dropout=dropout,
        accumulation=accumulation,
    )


_LUNA: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "listops": (
        1, 512, {"heads": 8, "d_ff": 2048},
        {"lr": 0.0001, "weight_decay": 0.0001, "steps": 5_000, "warmup": 1_000, "batch": 32, "dropout": 0.1},
    ),
    "text": (
        4, 256, {"heads": 4, "d_ff": 1024},
        {"lr": 0.00005, "weight_decay": 0.0001, "steps": 20_000, "warmup": 8_000, "batch": 32, "dropout": 0.3},
    ),
    "retrieval": (
        4, 128, {"heads": 4, "d_ff": 512},
        {"lr": 0.0005, "weight_decay": 0.0001, "steps": 20_000, "warmup": 8_000, "batch": 32, "dropout": 0.1},
    ),
    "image": (
        1, 64, {"heads": 8, "d_ff": 128},
        {"lr": 0.005, "weight_decay": 0.0, "steps": 35_000, "warmup": 4_000, "batch": 256, "dropout": 0.3},
    ),
    "pathfinder": (
        1, 128, {"heads": 4, "d_ff": 128},
        {"lr": 0.001, "weight_decay": 0.0, "steps": 62_500, "warmup": 4_000, "batch": 512, "dropout": 0.2},
    ),
    "pathx": (
        1, 128, {"heads": 4, "d_ff": 128},
        {
            "lr": 0.001, "weight_decay": 0.0, "steps": 62_500, "warmup": 4_000, "batch": 512, "dropout": 0.2,
            "accumulation": 32,
        },
    ),
}  # fmt: skip
"""Layers, width, sizes and training of Luna."""


def _peak(warmup: int) -> float:
    """The highest learning rate of 0.05 / sqrt(step), after this many steps of warm-up."""
    return 0.05 / math.sqrt(warmup)


_BENCHMARK: dict[str, dict[str, Any]] = {
    "listops": {
        "lr": _peak(1_000), "weight_decay": 0.1, "steps": 5_000, "warmup": 1_000, "batch": 32, "dropout": 0.1,
    },
    "text": {
        "lr": _peak(8_000), "weight_decay": 0.1, "steps": 20_000, "warmup": 8_000, "batch": 32, "dropout": 0.1,
    },
    # training ends before the warm-up of 8,000 steps does
    "retrieval": {
        "lr": _peak(8_000) * 5 / 8, "weight_decay": 0.1, "steps": 5_000, "warmup": 5_000, "batch": 32, "dropout": 0.1,
    },
    "image": {
        "lr": 0.0005, "weight_decay": 0.0, "steps": 35_000, "warmup": 175, "batch": 256, "dropout": 0.3,
        "shape": "cosine",
    },
    "pathfinder": {
        "lr": 0.001, "weight_decay": 0.0, "steps": 62_400, "warmup": 312, "batch": 512, "dropout": 0.2,
        "shape": "cosine",
    },
    "pathx": {
        "lr": 0.001, "weight_decay": 0.0, "steps": 500_000, "warmup": 2_500, "batch": 64, "dropout": 0.1,
        "shape": "cosine", "clip": 1.0, "accumulation": 4,
    },
}  # fmt: skip
"""Training of the benchmark's models."""

_TEXTS = {"listops": (4, 512, 8, 1024), "text": (4, 256, 4, 1024), "retrieval": (4, 128, 4, 512)}
"""Layers, width, heads and feed-forward width of all of the benchmark's models."""
_PATHX = {"pathx": (1, 32, 2, 32)}


def _luna(mixer: type, **more: Any) -> dict[str, Settings]:
    return {
        task: _settings(
            mixer(activation="gelu", prenorm=True, dropout=training["dropout"], **sizes, **more),
            layers,
            width,
            **training,
        )
        for task, (layers, width, sizes, training) in _LUNA.items()
    }


def _benchmark(
    mixer: type, sizes: dict[str, tuple[int, int, int, int]], by_task: dict[str, dict[str, Any]] | None = None
) -> dict[str, Settings]:
    rows = {}
    for task, (layers, width, heads, d_ff) in (_TEXTS | sizes | _PATHX).items():
        training, more = _BENCHMARK[task], (by_task or {}).get(task, {})
        made = mixer(
            heads=heads, d_ff=d_ff, activation="gelu", prenorm=True, dropout=training["dropout"], **more
        )
        rows[task] = _settings(made, layers, width, eps=1e-9, **training)
    return rows


LUNA = _luna(LunaConfig, length=256)
TRANSFORMER = _luna(TransformerConfig) | {
    "listops": _benchmark(TransformerConfig, {})["listops"],
}
REFORMER = _benchmark(
    ReformerConfig,
    {"image": (4, 64, 8, 64), "pathfinder": (2, 64, 8, 64)},
    {task: {"hashes": 1, "buckets": 10, "chunk_size": 10} for task in LENGTHS},
)
BIGBIRD = _benchmark(BigBirdConfig, {"image": (1, 128, 1, 128), "pathfinder": (4, 64, 2, 64)})
PERFORMER = _benchmark(
    PerformerConfig,
    {"image": (1, 128, 8, 128), "pathfinder": (4, 32, 8, 32)},
    {"listops": {"features": 2}},
)
LINFORMER = _benchmark(
    LinformerConfig,
    {"image": (1, 128, 8, 128), "pathfinder": (1, 32, 2, 32)},
    {
        task: {"projected": 32 if task == "text" else 16, "max_positions": length}
        for task, length in LENGTHS.items()
    },
)
