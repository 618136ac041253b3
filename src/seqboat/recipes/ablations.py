"""The ablations of the paper's appendix E: both tables, in full and as small variants.

A row changes the SeqBoat of a recipe of the Long Range Arena and nothing else (`mixers.seqboat.ablations`): the
steps, the learning rate and the widths stay. The names are `ablations.TASK.ROW`: `ablations.listops.local` in full,
`ablations.listops-small.local` its small variant. The first rows are the recipes themselves; their speed is
compared with is MEGA in the same recipe, `ablations.TASK.mega`, with the widths of its SeqBoat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seqboat.mixers.attention.mega import MegaConfig
from seqboat.mixers.seqboat.ablations import (
    SeqBoatChunkConfig,
    SeqBoatFullAlwaysConfig,
    SeqBoatFullConfig,
    SeqBoatFullGumbelConfig,
    SeqBoatFullS4DConfig,
    SeqBoatLocal32Config,
    SeqBoatLocalConfig,
    SeqBoatMem32Config,
    SeqBoatMoEConfig,
    SeqBoatSigmoidConfig,
    SeqBoatThenFFNConfig,
    ablate,
)
from seqboat.mixers.seqboat.layer import SeqBoatConfig, SeqBoatFFNConfig
from seqboat.mixers.ssm.ema import EMAConfig
from seqboat.models.backbone import MixerConfig
from seqboat.recipes import lra
from seqboat.training.config import RunConfig

Recipe = Callable[..., RunConfig]

FULL_ROWS: dict[str, type[SeqBoatConfig]] = {
    "full": SeqBoatFullConfig,
    "full-always": SeqBoatFullAlwaysConfig,
    "full-gumbel": SeqBoatFullGumbelConfig,
    "full-s4d": SeqBoatFullS4DConfig,
}
"""The rows of the table of SeqBoat-full, on Image and ListOps."""

ROWS: dict[str, type[SeqBoatConfig]] = {
    "ffn": SeqBoatThenFFNConfig,
    "gau-ffn": SeqBoatFFNConfig,
    "sigmoid": SeqBoatSigmoidConfig,
    "moe": SeqBoatMoEConfig,
    "local": SeqBoatLocalConfig,
    "chunk": SeqBoatChunkConfig,
    "mem32": SeqBoatMem32Config,
    "local32": SeqBoatLocal32Config,
}
"""The rows of the table of SeqBoat, on Image, ListOps and Pathfinder."""

TASKS: dict[str, Recipe] = {
    "image": lra.image,
    "image-small": lra.image_small,
    "listops": lra.listops,
    "listops-small": lra.listops_small,
    "pathfinder": lra.pathfinder,
    "pathfinder-small": lra.pathfinder_small,
}


def mega_like(base: SeqBoatConfig) -> MegaConfig:
    """MEGA with the widths, the attention function and the norm of a SeqBoat."""
    assert isinstance(base.ssm, EMAConfig)
    return MegaConfig(
        ema=base.ssm,
        d_z=base.gau.d_z,
        d_v=base.gau.d_v,
        attention=base.gau.attention,
        max_positions=base.gau.max_positions,
        causal=base.causal,
        norm=base.norm,
        prenorm=base.prenorm,
        dropout=base.dropout,
        attention_dropout=base.gau.attention_dropout,
    )


def _recipe(task: str, change: Callable[[SeqBoatConfig], MixerConfig], what: str) -> Recipe:
    base = TASKS[task]

    def recipe(mixer: MixerConfig | None = None) -> RunConfig:
        given: Any = base().model.mixer
        return base(mixer=mixer or change(given))

    recipe.__doc__ = f"{what} On the recipe lra.{task}."
    return recipe


def _row(task: str, form: type[SeqBoatConfig]) -> Recipe:
    return _recipe(task, lambda base: ablate(form, base), (form.__doc__ or "").strip())


ABLATIONS: dict[str, Recipe] = {
    f"ablations.{task}.{row}": _row(task, form)
    for task in TASKS
    for row, form in (ROWS if task.startswith("pathfinder") else FULL_ROWS | ROWS).items()
} | {f"ablations.{task}.mega": _recipe(task, mega_like, "MEGA with the widths of SeqBoat.") for task in TASKS}
"""Every row of both tables on every task that it was run on, by the name that commands use."""
