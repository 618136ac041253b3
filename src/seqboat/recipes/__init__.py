"""Recipes: functions that return the configuration of a run. One file per table of the paper.

RECIPES has SeqBoat on every task, `rows.ROWS` the other models of tables 1 to 3, ABLATIONS the rows of the ablations.

A variant is a changed copy: `lra.image().replace(seed=1)`, or `with_mixer(lra.image(), "mega")`.
"""

from __future__ import annotations

import difflib

from seqboat.plugins import load_plugins
from seqboat.recipes import diagnostics, enwik8, lra, speech
from seqboat.recipes import own as your_data
from seqboat.recipes.ablations import ABLATIONS
from seqboat.recipes.base import Recipe, with_mixer
from seqboat.recipes.rows import ROW_RECIPES, ROWS, SMALL_ROWS, Row

RECIPES: dict[str, Recipe] = {
    "lra.listops": lra.listops,
    "lra.listops-small": lra.listops_small,
    "lra.text": lra.text,
    "lra.text-small": lra.text_small,
    "lra.retrieval": lra.retrieval,
    "lra.retrieval-small": lra.retrieval_small,
    "lra.image": lra.image,
    "lra.image-small": lra.image_small,
    "lra.pathfinder": lra.pathfinder,
    "lra.pathfinder-small": lra.pathfinder_small,
    "lra.pathx": lra.pathx,
    "lra.pathx-small": lra.pathx_small,
    "speech": speech.speech,
    "speech-small": speech.speech_small,
    "enwik8": enwik8.enwik8,
    "enwik8-small": enwik8.enwik8_small,
    "demo": diagnostics.demo,
    "recall": diagnostics.recall,
    "copy": diagnostics.copy,
    "needle": diagnostics.needle,
    "classify": your_data.classify,
    "regress": your_data.regress,
    "tag": your_data.tag,
    "lm": your_data.lm,
}
"""Every recipe by the name that commands use."""


def find_recipe(name: str) -> Recipe:
    """A recipe by its name: of RECIPES (with plug-ins), a row (`lra.image/mega`) or an ablation.

    A ValueError suggests the nearest name.

    The row of SeqBoat is the recipe itself, `lra.image/seqboat` or `lra.image`.
    """
    short = name.removesuffix("/seqboat")
    every = RECIPES | ABLATIONS | ROW_RECIPES | SMALL_ROWS
    if short not in every:
        load_plugins()
        every |= RECIPES
    if short in every and not (short != name and "/" in short):
        return every[short]
    # also by the last part alone: image for lra.image
    parts = {whole.rpartition(".")[2]: whole for whole in reversed(every)}
    near = difflib.get_close_matches(name, [*every, *parts], n=1, cutoff=0.6)
    near = [parts.get(found, found) for found in near]
    hint = f"did you mean {near[0]}?" if near else "`seqboat paper list recipes` shows all"
    raise ValueError(f"recipe {name!r} is unknown; {hint}")


__all__ = [
    "ABLATIONS",
    "RECIPES",
    "ROWS",
    "ROW_RECIPES",
    "SMALL_ROWS",
    "Recipe",
    "Row",
    "find_recipe",
    "with_mixer",
]
