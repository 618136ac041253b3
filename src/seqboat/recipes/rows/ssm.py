"""State-space models: S4, S4D-LegS, S5, Liquid-S4 and H3 with the settings that their authors published.

- S4: the experiments `s4-lra-*-new` and `s4-sc` of HazyResearch/state-spaces. Image ties its matrices to two systems.
- S4D-LegS: the same, which its authors run with this layer.
- S5: the scripts of lindermanlab/S5. Its input matrix sometimes decays or has the global learning rate; ours always
  has the learning rate of the state space, without decay.
- Liquid-S4: the experiments of raminmh/liquid-s4, with kernel "pb" of order 2. Seven states there are three conjugate
  pairs, so that ours has six.
- H3: no settings for the Long Range Arena were found. Ours: sizes and training of S4D, with H3's feed-forward block.

State-space parameters have a separate learning rate and no weight decay, all others decay. The head is linear, except
for Retrieval. Pooling is our mean over all tokens (S4 and Liquid-S4 take the last one on Pathfinder).
"""

from __future__ import annotations

from typing import Any

from seqboat.mixers.h3 import H3Config
from seqboat.mixers.ssm import LiquidS4LayerConfig, S4DLayerConfig, S4LayerConfig, S5LayerConfig
from seqboat.models.backbone import MixerConfig
from seqboat.recipes.rows.base import Settings
from seqboat.ssm.diagonal import S4DConfig
from seqboat.ssm.liquid_s4 import LiquidS4Config
from seqboat.ssm.s4 import S4Config
from seqboat.ssm.s5 import S5Config
from seqboat.training.optim import OptimizerConfig, ScheduleConfig


def _settings(
    mixer: MixerConfig,
    layers: int,
    width: int,
    *,
    lr: float,
    ssm_lr: float,
    weight_decay: float,
    steps: int,
    warmup: int,
    batch: int,
    dt_lr: float | None = None,
) -> Settings:
    """A task's settings: AdamW with cosine decay, no clipping."""
    return Settings(
        mixer,
        width,
        layers,
        OptimizerConfig(
            lr=lr,
            ssm_lr=ssm_lr,
            dt_lr=dt_lr,
            betas=(0.9, 0.999),
            weight_decay=weight_decay,
            decay="all",
            clip=None,
        ),
        ScheduleConfig(steps=steps, warmup_steps=warmup, warmup_from=0.0, shape="cosine"),
        batch,
        linear_head=True,
    )


_LRA: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "listops": (
        8, 128, {"norm": "batch", "prenorm": False},
        {"lr": 0.01, "ssm_lr": 0.001, "dt_lr": 0.01, "weight_decay": 0.05,
         "steps": 80_000, "warmup": 1_000, "batch": 50},
    ),
    "text": (
        6, 256, {"norm": "batch", "prenorm": True},
        {"lr": 0.01, "ssm_lr": 0.001, "dt_lr": 0.01, "weight_decay": 0.05,
         "steps": 50_000, "warmup": 1_000, "batch": 16},
    ),
    "retrieval": (
        6, 256, {"norm": "batch", "prenorm": True},
        {"lr": 0.01, "ssm_lr": 0.001, "dt_lr": 0.01, "weight_decay": 0.05,
         "steps": 50_000, "warmup": 2_500, "batch": 64},
    ),
    "image": (
        6, 512, {"norm": "layer", "prenorm": False, "dropout": 0.1},
        {"lr": 0.01, "ssm_lr": 0.001, "weight_decay": 0.05, "steps": 200_000, "warmup": 1_000, "batch": 50},
    ),
    "pathfinder": (
        6, 256, {"norm": "batch", "prenorm": True},
        {"lr": 0.004, "ssm_lr": 0.001, "weight_decay": 0.03, "steps": 500_000, "warmup": 2_500, "batch": 64},
    ),
    "pathx": (
        6, 256, {"norm": "batch", "prenorm": True},
        {"lr": 0.0005, "ssm_lr": 0.0005, "weight_decay": 0.05, "steps": 500_000, "warmup": 10_000, "batch": 16},
    ),
}  # fmt: skip
"""Layers, width, layer and training of S4 and S4D on the Long Range Arena."""
_PATHX_STEPS: dict[str, Any] = {"dt_min": 0.0001, "dt_max": 0.01}

S4 = {
    task: _settings(
        S4LayerConfig(
            ssm=S4Config(systems=2 if task == "image" else None, **(_PATHX_STEPS if task == "pathx" else {})),
            **layer,
        ),
        layers,
        width,
        **training,
    )
    for task, (layers, width, layer, training) in _LRA.items()
}
S4D = {
    task: _settings(
        S4DLayerConfig(ssm=S4DConfig(**(_PATHX_STEPS if task == "pathx" else {})), **layer),
        layers,
        width,
        **training,
    )
    for task, (layers, width, layer, training) in _LRA.items()
}
H3 = {
    task: _settings(
        H3Config(
            ssm=S4DConfig(init="lin", **(_PATHX_STEPS if task == "pathx" else {})),
            causal=False,
            d_ff=2 * width,
            norm=layer["norm"],
            dropout=layer.get("dropout", 0.0),
        ),
        layers,
        width,
        **training,
    )
    for task, (layers, width, layer, training) in _LRA.items()
}


def _s5(
    d_state: int,
    systems: int,
    layers: int,
    width: int,
    dropout: float = 0.0,
    dt_min: float = 0.001,
    **training: Any,
) -> Settings:
    ssm = S5Config(d_state=d_state, systems=systems, dt_min=dt_min)
    return _settings(S5LayerConfig(ssm=ssm, dropout=dropout), layers, width, **training)


S5 = {
    "listops": _s5(
        16, 8, 8, 128,
        lr=0.003, ssm_lr=0.001, weight_decay=0.04, steps=76_800, warmup=1_920, batch=50,
    ),
    "text": _s5(
        192, 12, 6, 256, 0.1,
        lr=0.004, ssm_lr=0.001, dt_lr=0.004, weight_decay=0.07, steps=17_500, warmup=0, batch=50,
    ),
    "retrieval": _s5(
        256, 16, 6, 128,
        lr=0.002, ssm_lr=0.001, dt_lr=0.002, weight_decay=0.05, steps=91_920, warmup=4_596, batch=32,
    ),
    "image": _s5(
        384, 3, 6, 512, 0.1,
        lr=0.0045, ssm_lr=0.001, weight_decay=0.07, steps=225_000, warmup=900, batch=50,
    ),
    "pathfinder": _s5(
        256, 8, 6, 192, 0.05,
        lr=0.0045, ssm_lr=0.0009, weight_decay=0.03, steps=500_000, warmup=2_500, batch=64,
    ),
    "pathx": _s5(
        256, 16, 6, 128, dt_min=0.0001,
        lr=0.0018, ssm_lr=0.0006, weight_decay=0.06, steps=375_000, warmup=5_000, batch=32,
    ),
}  # fmt: skip


def _liquid(
    d_state: int,
    dt_min: float,
    dt_max: float,
    layers: int,
    width: int,
    layer: dict[str, Any],
    **training: Any,
) -> Settings:
    ssm = LiquidS4Config(d_state=d_state, dt_min=dt_min, dt_max=dt_max)
    return _settings(LiquidS4LayerConfig(ssm=ssm, **layer), layers, width, **training)


_FORWARD: dict[str, Any] = {"norm": "batch", "prenorm": True, "causal": True}

LIQUID_S4 = {
    "listops": _liquid(
        6, 0.002, 0.2, 9, 128, {**_FORWARD, "dropout": 0.01},
        lr=0.002, ssm_lr=0.0009, dt_lr=0.002, weight_decay=0.03, steps=80_000, warmup=1_000, batch=12,
    ),
    "text": _liquid(
        6, 0.002, 0.2, 4, 128, {**_FORWARD, "dropout": 0.1},
        lr=0.003, ssm_lr=0.0009, dt_lr=0.003, weight_decay=0.01, steps=50_000, warmup=1_000, batch=8,
    ),
    "retrieval": _liquid(
        64, 0.001, 0.1, 6, 256, {**_FORWARD, "dropout": 0.2},
        lr=0.005, ssm_lr=0.001, dt_lr=0.005, weight_decay=0.05, steps=50_000, warmup=2_500, batch=16,
    ),
    "image": _liquid(
        512, 0.002, 0.2, 6, 512, {"norm": "layer", "prenorm": False, "dropout": 0.1},
        lr=0.01, ssm_lr=0.001, dt_lr=0.01, weight_decay=0.03, steps=200_000, warmup=1_000, batch=50,
    ),
    "pathfinder": _liquid(
        64, 0.001, 0.1, 6, 256, _FORWARD,
        lr=0.004, ssm_lr=0.001, weight_decay=0.03, steps=500_000, warmup=2_500, batch=4,
    ),
    "pathx": _liquid(
        64, 0.0001, 0.1, 6, 320, _FORWARD,
        lr=0.001, ssm_lr=0.0005, weight_decay=0.05, steps=500_000, warmup=10_000, batch=8,
    ),
}  # fmt: skip

SPEECH = _settings(
    S4LayerConfig(ssm=S4Config(systems=1), norm="batch", prenorm=True, dropout=0.1),
    6,
    128,
    lr=0.01,
    ssm_lr=0.001,
    weight_decay=0.01,
    steps=245_000,
    warmup=1_000,
    batch=20,
)
"""S4 on Speech Commands, 300K parameters: bidirectional with a gated output, which gives the printed size. Ours:
cosine decay instead of cuts on a plateau, and the weight decay."""
