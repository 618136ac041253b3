"""Every row of tables 1, 2 and 3: a recipe for each model on each task.

    ROWS["lra"]["mega-chunk"].recipes["image"]()     the configuration of a run
    find_recipe("lra.image/mega-chunk")()            the same, by the name that commands use

A row has the name of its mixer. `RECIPE/ROW` works with the small variants as well: the row's mixer, with
the settings of that recipe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seqboat.mixers.carry import carry_over
from seqboat.recipes import enwik8, lra, speech
from seqboat.recipes.base import Recipe, with_mixer
from seqboat.recipes.rows import attention, language, mega, ssm
from seqboat.recipes.rows.base import Row, Settings, make_row
from seqboat.training.config import RunConfig

LRA: dict[str, Recipe] = {
    "listops": lra.listops,
    "text": lra.text,
    "retrieval": lra.retrieval,
    "image": lra.image,
    "pathfinder": lra.pathfinder,
    "pathx": lra.pathx,
}
"""The tasks of table 1 and their recipes."""
SMALL: dict[str, Recipe] = {
    "lra.listops-small": lra.listops_small,
    "lra.text-small": lra.text_small,
    "lra.retrieval-small": lra.retrieval_small,
    "lra.image-small": lra.image_small,
    "lra.pathfinder-small": lra.pathfinder_small,
    "lra.pathx-small": lra.pathx_small,
    "speech-small": speech.speech_small,
    "enwik8-small": enwik8.enwik8_small,
}
"""The small variants of all tasks."""
PAPER = "table 4 of the paper and the published scripts"


def _full(base: Recipe) -> Recipe:
    """SeqBoat-full in a recipe of SeqBoat."""

    def recipe() -> RunConfig:
        own = carry_over(base().model.mixer, "seqboat-full").mixer
        return base().replace(model={"mixer": own})

    recipe.__doc__ = f"SeqBoat-full, without a working memory. {(base.__doc__ or '').strip()}"
    return recipe


def _contiguous(base: Recipe) -> Recipe:
    """The recipe of enwik8 with short segments of contiguous text."""

    def recipe() -> RunConfig:
        config = base()
        task: Any = config.task
        # the state is the context
        task = replace(task, segment=language.SEGMENT, context=0, window=None)
        return config.replace(task=task, training={"carry_state": True})

    return recipe


def _lra(title: str, source: str, settings: dict[str, Settings]) -> Row:
    return make_row(title, source, LRA, settings)


_MEGA = "the published scripts of MEGA"
_XFORMERS = "the configurations of the Long Range Arena"

ROWS: dict[str, dict[str, Row]] = {
    "lra": {
        "transformer": _lra(
            "Transformer",
            "sizes published with Luna; ours: Luna's training (ListOps: the configuration of the Long Range Arena)",
            attention.TRANSFORMER,
        ),
        "mega": _lra("MEGA", _MEGA, mega.MEGA),
        "reformer": _lra("Reformer", _XFORMERS, attention.REFORMER),
        "bigbird": _lra("BigBird", _XFORMERS, attention.BIGBIRD),
        "seqboat-full": Row("SeqBoat-full", PAPER, {task: _full(base) for task, base in LRA.items()}),
        "performer": _lra("Performer", _XFORMERS, attention.PERFORMER),
        "linformer": _lra("Linformer", _XFORMERS, attention.LINFORMER),
        "luna": _lra("Luna-256", "the published scripts of Luna; Path-X: ours", attention.LUNA),
        "s4": _lra("S4", "the published experiments of S4", ssm.S4),
        "s4d": _lra("S4D-LegS", "the experiments of S4, which its authors run with this layer", ssm.S4D),
        "s5": _lra("S5", "the published scripts of S5", ssm.S5),
        "liquid-s4": _lra("Liquid-S4", "its published experiments; ours: order 2", ssm.LIQUID_S4),
        "h3": _lra("H3", "ours, after S4D: none were found", ssm.H3),
        "mega-chunk": _lra("MEGA-chunk", f"{_MEGA}, chunks of 128 tokens", mega.MEGA_CHUNK),
        "seqboat": Row("SeqBoat", PAPER, LRA),
    },
    "speech": {
        "s4": make_row(
            "S4",
            "the published experiment of S4; ours: cosine decay, weight decay",
            {"speech": speech.speech},
            {"speech": ssm.SPEECH},
        ),
        "mega-chunk": make_row("MEGA-chunk", _MEGA, {"speech": speech.speech}, {"speech": mega.SPEECH}),
        "seqboat": Row("SeqBoat", PAPER, {"speech": speech.speech}),
    },
    "enwik8": {
        "transformer-xl": make_row(
            "Transformer-XL",
            "its published script",
            {"enwik8": _contiguous(enwik8.enwik8)},
            {"enwik8": language.TRANSFORMER_XL},
        ),
        "adaptive-span": make_row(
            "Adaptive Span",
            "its published script",
            {"enwik8": _contiguous(enwik8.enwik8)},
            {"enwik8": language.ADAPTIVE_SPAN},
        ),
        "mega-chunk": make_row("MEGA-chunk", _MEGA, {"enwik8": enwik8.enwik8}, {"enwik8": mega.ENWIK8}),
        "seqboat": Row("SeqBoat", "table 5 of the paper and the published script", {"enwik8": enwik8.enwik8}),
    },
}
"""Rows in the order of the paper, by table and by the name of their mixer."""

STATE_SPACES = ("s4", "s4d", "s5", "liquid-s4", "h3")
"""Rows whose state-space parameters have a separate learning rate."""


def recipe_name(table: str, row: str, task: str) -> str:
    """The name of a row's recipe: `lra.image/mega-chunk`; that of SeqBoat has none after the task's.

    >>> recipe_name("lra", "mega-chunk", "image"), recipe_name("speech", "seqboat", "speech")
    ('lra.image/mega-chunk', 'speech')
    """
    base = f"lra.{task}" if table == "lra" else task
    return base if row == "seqboat" else f"{base}/{row}"


ROW_RECIPES: dict[str, Recipe] = {
    recipe_name(table, row, task): recipe
    for table, rows in ROWS.items()
    for row, entry in rows.items()
    for task, recipe in entry.recipes.items()
    if row != "seqboat"
}
"""Every row but SeqBoat's on every task, by the name that commands use."""


RIVALS = {
    "mamba2": "Mamba-2",
    "gated-deltanet": "Gated DeltaNet",
    "samba": "Samba",
    "samba-gdn": "Samba with Gated DeltaNet",
}
"""Models that came after the paper, in small recipes only. They read in one direction on every task."""
EVERYWHERE = ("transformer", "seqboat-full", "s4d", "s5", "mega-chunk", *RIVALS)
"""Rows that every small recipe has, whatever the table of its task."""


def small_rows(table: str) -> dict[str, str]:
    """Titles of the rows of a table in its small recipes, SeqBoat last, by the name of their mixer.

    >>> list(small_rows("speech"))[:4]
    ['s4', 'transformer', 'seqboat-full', 's4d']
    """
    own = {row: entry.title for row, entry in ROWS[table].items() if row not in EVERYWHERE}
    common = {row: ROWS["lra"][row].title for row in EVERYWHERE if row not in RIVALS} | RIVALS
    titles = own | common
    return {row: title for row, title in titles.items() if row != "seqboat"} | {"seqboat": "SeqBoat"}


def table_of(name: str) -> tuple[str, str]:
    """Table and task of a small recipe.

    >>> table_of("lra.image-small"), table_of("enwik8-small")
    (('lra', 'image'), ('enwik8', 'enwik8'))
    """
    table, _, task = name.rpartition("-")[0].rpartition(".")
    return table or task, task


def _small(name: str, row: str) -> Recipe:
    """A row in a small recipe: the mixer with the recipe's settings, except for its attention function."""
    base = SMALL[name]
    table, which = table_of(name)

    def recipe() -> RunConfig:
        config = base()
        own: Any = carry_over(config.model.mixer, row).mixer
        if row.startswith("mega"):
            given: Any = ROWS[table][row].recipes[which]().model.mixer
            own = replace(own, attention=given.attention, positions=given.positions)
        config = with_mixer(config, own)
        if row in STATE_SPACES:
            config = config.replace(optimizer={"ssm_lr": min(0.001, config.optimizer.lr)})
        elif row != "seqboat-full":  # the recipe's rate is that of its kernel, which other mixers do not have
            config = config.replace(optimizer={"ssm_lr": None})
        return config

    recipe.__doc__ = f"{small_rows(table)[row]} in the recipe {name}, with its settings."
    return recipe


SMALL_ROWS: dict[str, Recipe] = {
    f"{name}/{row}": _small(name, row)
    for name in SMALL
    for row in small_rows(table_of(name)[0])
    if row != "seqboat"
}
"""The rows as small variants."""
