"""The ablations of the paper's appendix E: both tables, in full and as small variants.

A row changes the SeqBoat of a recipe of the Long Range Arena and nothing else (`mixers.seqboat.ablations`): the
steps, the learning rate and the widths stay. The names are `ablations.TASK.ROW`: `ablations.listops.local` in full,
`ablations.listops-small.local` its small variant. The first row of the second table is the recipe itself. Speeds are
multiples of that of MEGA in the same recipe, `ablations.TASK.mega`, with the widths of its SeqBoat.

In full, two rows take the form of the published code: the Sigmoid router has SeqBoat's learned temperature, and S4D
has 16 states, half inverse and half linear. The small variants have our defaults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seqboat.layers.routers import SigmoidConfig
from seqboat.layers.seqboat import SeqBoatConfig, SeqBoatFFNConfig
from seqboat.layers.variants import (
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
from seqboat.mixers.carry import carry_over
from seqboat.mixers.mega import MegaConfig
from seqboat.recipes import lra
from seqboat.recipes.base import Recipe
from seqboat.ssm.diagonal import S4DConfig
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


PUBLISHED_S4D = S4DConfig(d_state=16, init="inv-lin", rule="bilinear", truncation=1024)
"""The kernel of "SSM with S4D" in the published code."""


def _as_published(variant: Any, base: Any) -> Any:
    """The form of a variant in the published code."""
    if isinstance(variant, SeqBoatFullS4DConfig):
        return replace(variant, ssm=PUBLISHED_S4D)
    if isinstance(variant, SeqBoatSigmoidConfig):
        scale = base.router.temperature_scale
        return replace(variant, router=SigmoidConfig(temperature_scale=scale))
    return variant


def _recipe(task: str, form: type, about: str) -> Recipe:
    base = TASKS[task]

    def recipe() -> RunConfig:
        given = base().model.mixer
        own = carry_over(given, form).mixer
        if not task.endswith("-small"):
            own = _as_published(own, given)
        return base().replace(model={"mixer": own})

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
