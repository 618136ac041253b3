"""The ablations of the paper's appendix E: both tables, in full and as small variants.

A row changes the SeqBoat of a recipe of the Long Range Arena and nothing else (`mixers.seqboat.ablations`): the
steps, the learning rate and the widths stay. The names are `ablations.TASK.ROW`: `ablations.listops.local` in full,
`ablations.listops-small.local` its small variant. The first rows are the recipes themselves; their speed is
compared with is MEGA in the same recipe, `ablations.TASK.mega`, with the widths of its SeqBoat.
"""

from __future__ import annotations

from seqboat.mixers.attention.mega import MegaConfig
from seqboat.mixers.carry import carry_over
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
)
from seqboat.mixers.seqboat.layer import SeqBoatConfig, SeqBoatFFNConfig
from seqboat.recipes import lra
from seqboat.recipes.base import MixerChoice, Recipe, choose
from seqboat.training.config import RunConfig

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


def _recipe(task: str, form: type, about: str) -> Recipe:
    base = TASKS[task]

    def recipe(mixer: MixerChoice = None) -> RunConfig:
        own = carry_over(base().model.mixer, form).mixer
        return base(mixer=choose(mixer, own))

    recipe.__doc__ = f"{about} On the recipe lra.{task}."
    return recipe


def _row(task: str, form: type[SeqBoatConfig]) -> Recipe:
    return _recipe(task, form, (form.__doc__ or "").strip())


ABLATIONS: dict[str, Recipe] = {
    f"ablations.{task}.{row}": _row(task, form)
    for task in TASKS
    for row, form in (ROWS if task.startswith("pathfinder") else FULL_ROWS | ROWS).items()
} | {
    f"ablations.{task}.mega": _recipe(task, MegaConfig, "MEGA with the widths of SeqBoat.") for task in TASKS
}
"""Every row of both tables on every task that it was run on, by the name that commands use."""
