"""The published command lines of SeqBoat (renll/SeqBoat), field by field beside our recipes and tables 4 and 5.

The values are facts of the published scripts, with the defaults of their architectures filled in. `compare` reads the
same fields from a recipe; `DIFFERENCES` says where the paper, the scripts and ours part, and why.

    print("\\n".join(comparison("lra.image")))
"""

from __future__ import annotations

from typing import Any, NamedTuple

from seqboat.recipes import find_recipe
from seqboat.training.config import RunConfig

COMMON: dict[str, Any] = {
    "--n-dim": 16,
    "--activation-fn": "silu",
    "--adam-betas": (0.9, 0.98),
    "--adam-eps": 1e-8,
    "--attention-dropout": 0.0,
    "--act-dropout": 0.0,
    "--end-learning-rate": 0.0,
    "--lr-scheduler": "linear_decay",
    "--warmup-power": 1,
    "weight decay on": "all",
    "initial weights": "paper",
}
"""The same in all scripts, unless they say otherwise."""
_CLASSIFIER: dict[str, Any] = {
    **COMMON,
    "--optimizer": "adam",
    "--clip-norm": 1.0,
    "--warmup-init-lr": 1e-7,
    "--sen-rep-type": "mp",
    "--classifier-activation-fn": "gelu",
    "classifier width / width": 2,
    "output bias": False,
    "classifier init": "xavier",
}


def _lra(
    layers: int, width: int, d_v: int, d_z: int, alpha: float, attention: str, norm: str, *,
    before: bool = False, dropout: float = 0.0, lr: float, weight_decay: float, batch: int, update_freq: int = 1,
    gpus: int = 1, steps: int, warmup: int, chunk: int = 128, truncation: int = 1024, max_positions: int,
    apos: bool = False, local_pos: bool = False, more: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    return {
        **_CLASSIFIER,
        "--encoder-layers": layers,
        "--encoder-embed-dim": width,
        "--encoder-hidden-dim": d_v,
        "--z-dim": d_z,
        "--init-temp-scale": alpha,
        "--attention-activation-fn": attention,
        "--norm-type": norm,
        "--encoder-normalize-before": before,
        "--dropout": dropout,
        "--lr": lr,
        "--weight-decay": weight_decay,
        "sequences per step": batch * update_freq * gpus,
        "sequences per norm": batch * gpus,
        "--max-update": steps,
        "--warmup-updates": warmup,
        "--chunk-size": chunk,
        "--truncation-length": truncation,
        "--max-positions": max_positions,
        "--add-apos": apos,
        "--local-pos": local_pos,
        **(more or {}),
    }


SCRIPTS: dict[str, dict[str, Any]] = {
    "lra.listops": _lra(
        6, 80, 160, 64, 0.3, "softmax", "layernorm", dropout=0.1, lr=0.004, weight_decay=0.001, batch=64,
        steps=90_000, warmup=27_000, max_positions=2002,
    ),
    "lra.text": _lra(
        4, 128, 256, 64, 0.3, "softmax", "scalenorm", dropout=0.1, lr=0.004, weight_decay=0.01, batch=50,
        steps=25_000, warmup=10_000, max_positions=4002, local_pos=True,
    ),
    "lra.retrieval": _lra(
        6, 128, 256, 64, 0.3, "softmax", "scalenorm", dropout=0.1, lr=0.003, weight_decay=0.04, batch=8,
        update_freq=8, steps=91_960, warmup=10_000, max_positions=4002, more={"--use-nli": True},
    ),
    "lra.image": _lra(
        8, 160, 320, 96, 0.4, "relu2", "batchnorm", before=True, lr=0.01, weight_decay=0.02, batch=50,
        steps=180_000, warmup=9_000, max_positions=1024, apos=True, more={"--pixel-normalization": (0.48, 0.24)},
    ),
    "lra.pathfinder": _lra(
        6, 128, 256, 64, 1.0, "relu2", "batchnorm", before=True, lr=0.01, weight_decay=0.01, batch=128,
        steps=250_000, warmup=50_000, max_positions=1024, apos=True, more={"--pixel-normalization": (0.5, 0.5)},
    ),
    "lra.pathx": _lra(
        4, 128, 256, 64, 1.0, "relu2", "syncbatchnorm", before=True, lr=0.01, weight_decay=0.01, batch=2,
        update_freq=8, gpus=8, steps=125_000, warmup=25_000, chunk=256, truncation=128 * 128,
        max_positions=128 * 128, apos=True,
        more={"--pixel-normalization": (0.5, 0.5), "--warmup-power": 2},
    ),
    "speech": _lra(
        8, 60, 120, 30, 1.0, "relu2", "batchnorm", before=True, lr=0.01, weight_decay=0.01, batch=20,
        steps=250_000, warmup=10_000, truncation=4000, max_positions=16_000, apos=True, local_pos=True,
        more={"split": "random"},
    ),
    "enwik8": {
        **COMMON,
        "--decoder-layers": 14,
        "--decoder-embed-dim": 616,
        "--decoder-hidden-dim": 1232,
        "--decoder-z-dim": 128,
        "--init-temp-scale": 1.0,
        "--attention-activation-fn": "softmax",
        "--normalization-type": "layernorm",
        "--normalize-before": True,
        "--no-affine-final-norm": True,
        "--share-decoder-input-output-embed": True,
        "scaled embedding": True,
        "--rel-pos-bias": "rotary",
        "--decoder-chunk-size": 1024,
        "--truncation-length": 2048,
        "--dropout": 0.15,
        "--optimizer": "radam",
        "--lr": 0.005,
        "--weight-decay": 0.1,
        "--clip-norm": 0.25,
        "--warmup-init-lr": 0.002,
        "--warmup-updates": 24_000,
        "--max-update": 400_000,
        "--tokens-per-sample": 8192,
        "sequences per step": 8,
        "evaluation --max-tokens": 8192,
        "evaluation --context-window": 7000,
    },
}  # fmt: skip
"""Every published command line of tables 4 and 5, by our recipe."""

_TABLE_4 = (
    "--encoder-layers", "--encoder-embed-dim", "--init-temp-scale", "--z-dim", "--encoder-hidden-dim",
    "--attention-activation-fn", "--norm-type", "--encoder-normalize-before", "sequences per step", "--lr",
    "--dropout", "--weight-decay",
)  # fmt: skip
"""Columns of table 4, except for epochs."""
TABLE_4: dict[str, dict[str, Any]] = {
    task: dict(zip(_TABLE_4, row, strict=True))
    for task, row in {
        "lra.listops": (6, 80, 0.3, 64, 160, "softmax", "layernorm", False, 64, 0.004, 0.1, 0.001),
        "lra.text": (4, 128, 0.3, 64, 256, "softmax", "scalenorm", False, 50, 0.004, 0.1, 0.01),
        "lra.retrieval": (6, 128, 0.3, 64, 256, "softmax", "scalenorm", False, 64, 0.003, 0.1, 0.04),
        "lra.image": (8, 160, 0.4, 96, 320, "relu2", "batchnorm", True, 50, 0.01, 0.0, 0.02),
        "lra.pathfinder": (6, 128, 1.0, 64, 256, "relu2", "batchnorm", True, 128, 0.01, 0.0, 0.01),
        "lra.pathx": (6, 128, 1.0, 64, 256, "relu2", "batchnorm", True, 128, 0.01, 0.0, 0.01),
        "speech": (8, 60, 1.0, 30, 120, "relu2", "batchnorm", True, 20, 0.01, 0.0, 0.01),
    }.items()
}
"""Table 4 of the paper."""
TABLE_5: dict[str, Any] = {
    "--tokens-per-sample": 8192, "sequences per step": 8, "--optimizer": "radam", "--lr": 0.005,
    "--warmup-init-lr": 0.002, "--adam-betas": (0.9, 0.98), "--lr-scheduler": "linear_decay", "--weight-decay": 0.1,
    "--dropout": 0.15, "--attention-dropout": 0.0, "--clip-norm": 0.25, "--warmup-updates": 24_000,
    "--max-update": 400_000, "--decoder-layers": 14, "--decoder-embed-dim": 616, "--decoder-z-dim": 128,
    "--decoder-hidden-dim": 1232, "--n-dim": 16, "--init-temp-scale": 1.0, "--decoder-chunk-size": 1024,
}  # fmt: skip
"""Table 5 of the paper."""

NORMS = {"layernorm": "layer", "scalenorm": "scale", "batchnorm": "batch", "syncbatchnorm": "batch"}
"""Our names of norms: ours synchronizes over processes always."""


def _read(config: RunConfig) -> dict[str, Any]:
    """The fields of a command line, from one of our recipes with SeqBoat."""
    mixer: Any = config.model.mixer
    task: Any = config.task
    model, optimizer, schedule, training = config.model, config.optimizer, config.schedule, config.training
    window = mixer.gau.window if mixer.causal else mixer.gau.window // 2
    sequences = training.batch_size
    return {
        **dict.fromkeys(("--encoder-layers", "--decoder-layers"), model.num_layers),
        **dict.fromkeys(("--encoder-embed-dim", "--decoder-embed-dim"), model.d_model),
        **dict.fromkeys(("--encoder-hidden-dim", "--decoder-hidden-dim"), mixer.gau.d_v),
        **dict.fromkeys(("--z-dim", "--decoder-z-dim"), mixer.gau.d_z),
        **dict.fromkeys(("--chunk-size", "--decoder-chunk-size"), window),
        **dict.fromkeys(("--norm-type", "--normalization-type"), mixer.norm),
        **dict.fromkeys(("--encoder-normalize-before", "--normalize-before"), mixer.prenorm),
        "--n-dim": mixer.ssm.d_state,
        "--activation-fn": "silu",
        "--init-temp-scale": mixer.router.temperature_scale,
        "--attention-activation-fn": mixer.gau.attention,
        "--attention-dropout": mixer.gau.attention_dropout,
        "--act-dropout": 0.0,
        "initial weights": mixer.init,
        "--dropout": mixer.dropout if mixer.dropout == model.dropout else None,
        "--truncation-length": mixer.ssm.truncation,
        "--max-positions": mixer.gau.max_positions,
        "--add-apos": bool(model.absolute_positions),
        "--local-pos": mixer.gau.positions == "compressed",
        "--rel-pos-bias": mixer.gau.positions,
        "--sen-rep-type": "mp",
        "--classifier-activation-fn": "gelu",
        "classifier width / width": 2,
        "output bias": model.head_bias,
        "classifier init": model.head_init,
        "--no-affine-final-norm": not model.final_norm_affine,
        "--share-decoder-input-output-embed": True,
        "scaled embedding": model.scaled_embedding,
        "--use-nli": True,
        "--pixel-normalization": (getattr(task, "mean", None), getattr(task, "std", None)),
        "split": getattr(task, "parts", None),
        "--optimizer": optimizer.name.replace("adamw", "adam"),
        "--lr": optimizer.lr,
        "--adam-betas": optimizer.betas,
        "--adam-eps": optimizer.eps,
        "--clip-norm": optimizer.clip,
        "--weight-decay": optimizer.weight_decay,
        "weight decay on": optimizer.decay,
        "--lr-scheduler": {"linear": "linear_decay"}.get(schedule.shape, schedule.shape),
        "--max-update": schedule.steps,
        "--warmup-updates": schedule.warmup_steps,
        "--warmup-init-lr": schedule.warmup_from,
        "--warmup-power": schedule.warmup_power,
        "--end-learning-rate": 0.0,
        "sequences per step": sequences,
        "sequences per norm": sequences // training.accumulation,
        "--tokens-per-sample": getattr(task, "segment", None),
        "evaluation --max-tokens": getattr(task, "window", None),
        "evaluation --context-window": getattr(task, "context", None),
    }


class Line(NamedTuple):
    """One field of a command line."""

    field: str
    paper: Any
    """in tables 4 and 5; None where they do not have it"""
    published: Any
    ours: Any
    reason: str
    """why ours differs from the script; empty if it does not"""

    @property
    def equal(self) -> bool:
        """Whether ours is that of the script."""
        return bool(NORMS.get(str(self.published), self.published) == self.ours)


REASONS: dict[tuple[str, str], str] = {
    (
        "lra.pathx",
        "--encoder-layers",
    ): "the paper and the published instructions have 6; the script alone has 4",
    ("lra.pathx", "--truncation-length"): "None is the whole kernel: as long as the sequence",
    ("lra.pathfinder", "--truncation-length"): "None is the whole kernel: as long as the sequence",
}
"""Why a field differs from its script, by recipe and field."""


def compare(recipe: str) -> list[Line]:
    """A recipe beside its published command line, field by field."""
    ours = _read(find_recipe(recipe)())
    paper = TABLE_5 if recipe == "enwik8" else TABLE_4[recipe]
    return [
        Line(field, paper.get(field), value, ours[field], REASONS.get((recipe, field), ""))
        for field, value in SCRIPTS[recipe].items()
    ]


def comparison(recipe: str) -> list[str]:
    """The same as lines of text."""
    lines = [f"{recipe:34} {'paper':>14} {'script':>16} {'ours':>14}"]
    for field, paper, published, ours, reason in compare(recipe):
        cells = ("" if paper is None else str(paper), str(published), str(ours))
        text = f"{field:34} {cells[0]:>14} {cells[1]:>16} {cells[2]:>14}"
        lines.append(f"{text}  {reason}".rstrip())
    return lines


class Difference(NamedTuple):
    """A place where the paper, the published scripts and ours part."""

    where: str
    paper: str
    scripts: str
    ours: str
    switch: str
    """what to type for another choice"""


_SILENT = "not stated"
DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "weight decay", _SILENT, "all parameters",
        "all parameters at the paper's scale; matrices only in small recipes and your own data, where a scale near "
        "zero would silence a layer",
        "`--optimizer.decay=matrices` or `all`",
    ),
    Difference(
        "Path-X: depth", "6 layers", "4 in the script, 6 in its instructions", "6", "`--model.num_layers=4`",
    ),
    Difference(
        "Path-X: warm-up", _SILENT, "quadratic", "quadratic", "`--schedule.warmup_power=1`",
    ),
    Difference(
        "Path-X: batch norm", "batches of 128", "over 16 images: 8 GPUs with 2 each, 8 micro-batches",
        "over 16 images: 8 micro-batches, synchronized over processes", "`--training.accumulation=1`: over 128",
    ),
    Difference(
        "Retrieval: steps", "40 epochs, which are 91,929 steps", "91,960", "91,960, in micro-batches of 8",
        "`--schedule.steps=92000`",
    ),
    Difference(
        "Text: length", "4,096", "4,000: its data are `imdb-4000`", "4,096", "`--data.max_length=4000`",
    ),
    Difference(
        "bias tables", _SILENT, "2,002 (ListOps) and 4,002 (Text, Retrieval) positions",
        "the same; in the compressed sequence, the 257 distances within the working memory, which are the ones that "
        "the script uses out of its 767",
        "`--model.mixer.gau.max_positions=N`",
    ),
    Difference(
        "lengths in a batch", _SILENT, "batches are not sorted by length", "not sorted, except in small recipes",
        "`--training.bucketing=true`: faster, another order of the data",
    ),
    Difference(
        "Speech: positions", "in the compressed sequence", "also absolute positions on the inputs",
        "both, as in the script", "`--model.absolute_positions=false`",
    ),
    Difference(
        "Speech: split", _SILENT, "random, 70/15/15 within each word",
        "random in the same way, with other clips in each part; the processed data of the published implementation "
        "come with their own split",
        "`--data.parts=speaker`: no speaker in two parts",
    ),
    Difference(
        "enwik8: moving average", _SILENT, "cut after 2,048 taps", "cut after 2,048 taps",
        "`--model.mixer.ssm.truncation=none`: the whole past, by a scan; faster to decode",
    ),
    Difference(
        "enwik8: final norm", _SILENT, "without scale and shift", "without", "`--model.final_norm_affine=true`",
    ),
    Difference(
        "enwik8: vocabulary", "about 200 characters", "205 bytes that occur", "256 bytes", "none",
    ),
    Difference(
        "classifier head", _SILENT, "Xavier weights, no output bias",
        "the same at the paper's scale; truncated N(0, 0.02) with a bias in small recipes",
        "`--model.head_init=normal --model.head_bias=true`",
    ),
    Difference(
        "Sigmoid router (ablation)", "a sigmoid instead of the tempered softmax",
        "a sigmoid with the learned temperature",
        "as in the script at the paper's scale; without temperature in small recipes",
        "`--model.mixer.router.temperature_scale=none` or a number",
    ),
    Difference(
        "S4D (ablation)", "S4D in place of the moving average",
        "16 states, half inverse and half linear, bilinear, cut after 1,024 taps, B learned",
        "as in the script at the paper's scale, with B = 1, which C absorbs; S4D-LegS with 64 states in small "
        "recipes",
        "`--model.mixer.ssm.init`, `.rule`, `.d_state`, `.truncation`",
    ),
    Difference(
        "Gumbel router (ablation)", "temperature max(2 * 0.999995^T, 0.5)", "2 to 0.5 over half of the steps",
        "as in the paper", "`--model.mixer.router.decay=0.9999846`: the script's value for Image",
    ),
    Difference(
        "fully active sequences", "treated like all others", "change how their whole batch is computed",
        "as in the paper: no sequence depends on its batch", "none",
    ),
)  # fmt: skip
"""Every difference that we know of."""
