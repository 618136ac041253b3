"""Published checkpoints as runs, and runs as published checkpoints.

Token ids and classes of a published model are lines of dictionaries that lie with its data, ours are those of a task:
bytes, or the tokens of ListOps. Translating a model reorders the rows of its embedding and of its class scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.compat.checkpoint import ARCHITECTURES, PublishedCheckpoint, read_checkpoint, write_checkpoint
from seqboat.compat.models import backbone_config, model_from_published, model_to_published
from seqboat.core.checks import check_choice, require
from seqboat.data.fairseq import (
    END,
    PAD,
    SPECIAL,
    UNKNOWN,
    byte_symbols,
    label_symbols,
    named_symbols,
    read_dictionary,
    write_dictionary,
)
from seqboat.data.files import write_text
from seqboat.recipes import find_recipe
from seqboat.run import Run
from seqboat.tasks.image import ImageTaskConfig
from seqboat.tasks.listops import PARENTHESES, SYMBOLS, TOKENS
from seqboat.tasks.pathfinder import PathfinderTaskConfig
from seqboat.tasks.stored import END as OUR_END
from seqboat.tasks.stored import SequenceTaskConfig
from seqboat.tasks.task import BYTES, Task
from seqboat.training.checkpoint import MODEL, CheckpointStore, model_tensors
from seqboat.training.config import RunConfig
from seqboat.training.record import versions
from seqboat.training.settings_io import to_dict

RECIPES = tuple(ARCHITECTURES.values())
"""Recipes whose task the published implementation has."""
NEWLINE = 10
"""The byte that ends a line, which published language models read as </s>."""


class Imported(NamedTuple):
    """What an import made."""

    folder: Path
    model: nn.Module
    config: RunConfig
    notes: tuple[str, ...]
    """what a user should know"""


class Exported(NamedTuple):
    """What an export wrote."""

    file: Path
    dictionaries: tuple[Path, ...]
    """files of the dictionaries, if none were given"""


class Dictionaries(NamedTuple):
    """Where the symbols of a published model are written down."""

    tokens: Path
    labels: Path | None


def find_dictionaries(data: Path) -> Dictionaries:
    """The dictionaries of a folder of published data, or a dictionary of tokens alone."""
    if data.is_file():
        return Dictionaries(data, None)
    require(data.is_dir(), f"{data} does not exist: expected a folder of published data, or a dict.txt")
    for tokens in (data / "src-bin" / "dict.txt", data / "dict.txt"):
        if tokens.is_file():
            labels = data / "label-bin" / "dict.txt"
            return Dictionaries(tokens, labels if labels.is_file() else None)
    raise ValueError(f"{data} has no dictionary: expected src-bin/dict.txt or dict.txt")


def import_run(
    file: Path | str, folder: Path | str, data: Path | str | None = None, recipe: str | None = None
) -> Imported:
    """Make a run of a published checkpoint. The folder appears only if everything fits.

    Args:
        file: the checkpoint.
        folder: to make; must be empty if it exists.
        data: the folder of published data with the model's dictionaries; needed for models that read tokens.
        recipe: of the same task; by default the name of the architecture tells.
    """
    file, folder = Path(file), Path(folder)
    require(not folder.exists() or not any(folder.iterdir()), f"{folder} must be empty or not exist")
    found = read_checkpoint(file)
    recipe = recipe or found.recipe
    require(
        recipe is not None,
        f"{file}: the architecture {found.settings.get('arch')!r} does not identify the task: choose a recipe "
        f"({', '.join(RECIPES)})",
    )
    assert recipe is not None
    check_choice("recipe", recipe, RECIPES)
    config = find_recipe(recipe)()
    task = config.build_task()
    notes = list(found.notes)
    params, published = dict(found.params), dict(found.config)
    if published["vocab"] is not None:
        require(
            data is not None,
            f"{file} reads token ids: give the folder of its data, whose dictionary says what they mean",
        )
        assert data is not None
        params, more = _to_our_ids(params, published["kind"], task, find_dictionaries(Path(data)))
        published["vocab"] = task.vocab
        notes += more
    try:
        model = model_from_published(params, published, str(file))
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(str(file)) else f"{file}: {message}") from None
    backbone = replace(backbone_config(published), vocab=None)
    config = config.replace(task=_task_settings(config, found), model=backbone, recipe=recipe)
    built = config.build_task()
    fits = built.vocab == published["vocab"] and (
        published["kind"] == "language model" or built.classes == published["classes"]
    )
    kind = {"lm": "language model", "match": "matcher", "classify": "classifier"}[built.kind]
    require(
        fits and kind == published["kind"],
        f"{file} is a {published['kind']} of {published.get('classes', published['vocab'])} classes, "
        f"which is not what the recipe {recipe} needs",
    )
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "config": to_dict(config),
        "classes": built.classes,
        "labels": built.labels,
        "versions": versions(),
    }
    CheckpointStore(folder).save(found.steps, {MODEL: model_tensors(model)}, state, best=True)
    return Imported(folder, model, config, tuple(notes))


def _task_settings(config: RunConfig, found: PublishedCheckpoint) -> Any:
    """The task of a recipe with what a checkpoint says about its data."""
    task: Any = config.task
    if isinstance(task, SequenceTaskConfig):
        return replace(task, end_token=True)
    moments = found.settings.get("pixel_normalization")
    if isinstance(task, ImageTaskConfig | PathfinderTaskConfig) and isinstance(moments, list):
        good = len(moments) == 2 and all(isinstance(number, int | float) for number in moments)
        require(good, f"setting pixel_normalization must be two numbers, got {moments}")
        return replace(task, mean=float(moments[0]), std=float(moments[1]))
    return task


def _token_rows(task: Task, symbols: Sequence[str], where: Path) -> tuple[list[int | None], tuple[str, ...]]:
    """The published id of each of our token ids, None where there is none; and notes."""
    rows: list[int | None]
    if task.name == "listops":
        known = {ours: place for place, ours in named_symbols(symbols, SYMBOLS, where, PARENTHESES).items()}
        rows = [known.get(place) for place in range(len(TOKENS))]
        missing = [
            token for token, row in zip(TOKENS, rows, strict=True) if row is None and token != TOKENS[0]
        ]
        require(not missing, f"{where} has no symbol for {', '.join(missing)}")
        rows[OUR_END] = END
        return rows, ()
    places = {content: place for place, content in byte_symbols(symbols, where).items()}
    rows = [places.get(bytes([byte])) for byte in range(BYTES)]
    rows[NEWLINE if task.kind == "lm" else OUR_END] = END
    long = sum(len(content) > 1 for content in places)
    note = (
        f"{long} characters of the dictionary are more than one byte: the model cannot read them from bytes"
    )
    return rows, (note,) if long else ()


def _to_our_ids(
    params: Mapping[str, Tensor], kind: str, task: Task, dictionaries: Dictionaries
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Parameters with the rows of the embedding and of the class scores in our order."""
    symbols = read_dictionary(dictionaries.tokens)
    rows, notes = _token_rows(task, symbols, dictionaries.tokens)
    ours, name = dict(params), _embedding_name(kind)
    embedding = params[name]
    # classifiers add <CLS> to their dictionary
    require(
        len(embedding) in (len(symbols), len(symbols) + 1),
        f"{dictionaries.tokens} has {len(symbols)} symbols, but the model has {len(embedding)} token ids",
    )
    ours[name] = embedding[torch.tensor([UNKNOWN if row is None else row for row in rows])].clone()
    if kind == "language model":
        ours.pop("decoder.output_projection.weight", None)
        return ours, notes
    scores = "sentence_projection_layer.weight"
    order = _class_order(dictionaries.labels, len(params[scores]))
    ours[scores] = params[scores][order].clone()
    if dictionaries.labels is None:
        notes += ("there is no dictionary of labels (label-bin/dict.txt): classes keep their own order",)
    return ours, notes


def _class_order(labels: Path | None, classes: int) -> Tensor:
    """The published number of each class: the place of its label in the dictionary."""
    if labels is None:
        return torch.arange(classes)
    numbers = {ours: place - len(SPECIAL) for place, ours in _labels(labels, classes).items()}
    require(
        sorted(numbers) == sorted(numbers.values()) == list(range(classes)),
        f"{labels} must have the labels 0 to {classes - 1} once each",
    )
    return torch.tensor([numbers[ours] for ours in range(classes)])


def _labels(path: Path, classes: int) -> dict[int, int]:
    return label_symbols(read_dictionary(path), classes, path)


def _embedding_name(kind: str) -> str:
    return (
        "decoder.embed_tokens.weight"
        if kind == "language model"
        else "encoder.encoder.embed_tokens.embed.weight"
    )


def export_run(
    run: Path | str, file: Path | str, data: Path | str | None = None, which: str = "best"
) -> Exported:
    """Write a run as a published checkpoint.

    Args:
        run: the run's folder, or one checkpoint in it.
        file: to write; must not exist.
        data: the folder of published data whose dictionaries to use; by default new ones are written beside the file.
        which: "best" or "latest" checkpoint.
    """
    file = Path(file)
    require(not file.exists(), f"{file} already exists")
    require(file.absolute().parent.is_dir(), f"the folder {file.parent} does not exist")
    source = Run(run, which)
    task = source.task
    recipe = _recipe_of(task)
    try:
        params, config = model_to_published(source.model.train(False))
    except ValueError as error:
        raise ValueError(f"{run} cannot be exported: {error}") from None
    written: dict[Path, str] = {}
    if config["vocab"] is not None:
        if data is None:
            places = Dictionaries(
                file.with_name(f"{file.name}.dict.txt"), file.with_name(f"{file.name}.labels.txt")
            )
            words = [word for word in _our_symbols(task) if word is not None]
            symbols, order = (*SPECIAL, *words), None
            written[places.tokens] = write_dictionary(words)
            if config["kind"] != "language model" and places.labels is not None:
                written[places.labels] = write_dictionary([str(label) for label in range(config["classes"])])
        else:
            places = find_dictionaries(Path(data))
            symbols, order = read_dictionary(places.tokens), places.labels
        _to_published_ids(params, config, task, symbols, places.tokens, order)
    for path in written:
        require(not path.exists(), f"{path} already exists")
    write_checkpoint(file, params, config, recipe, source.step)
    for path, text in written.items():
        write_text(path, text)
    return Exported(file, tuple(written))


def _recipe_of(task: Task) -> str:
    """The published recipe whose task a task resembles most."""
    for recipe in RECIPES:
        if recipe.rpartition(".")[2] == task.name:
            return recipe
    if task.vocab == BYTES and task.kind == "lm":
        return "enwik8"
    if task.vocab == BYTES and task.kind == "classify":
        return "lra.text"
    raise ValueError(f"the task {task.name} has no published form: there are {', '.join(RECIPES)}")


def _our_symbols(task: Task) -> list[str | None]:
    """How a new dictionary writes our token ids; None for the one that is </s>."""
    if task.name == "listops":
        return [None, *TOKENS[1:]]
    end = NEWLINE if task.kind == "lm" else OUR_END
    return [None if byte == end else str(byte) for byte in range(BYTES)]


def _to_published_ids(
    params: dict[str, Tensor],
    config: dict[str, Any],
    task: Task,
    symbols: Sequence[str],
    where: Path,
    labels: Path | None,
) -> None:
    """Put the rows of the embedding and of the class scores in the order of dictionaries.

    Ids that stand for nothing get the row of a byte that the dictionary does not have, as <unk> gave it on import,
    else zeros; padding has zeros.
    """
    lm = config["kind"] == "language model"
    rows, _ = _token_rows(task, symbols, where)
    name = _embedding_name(config["kind"])
    ours = params[name]
    theirs = ours.new_zeros(len(symbols) + (not lm), ours.shape[1])
    absent = [place for place, row in enumerate(rows) if row is None]
    if absent:
        theirs[:] = ours[absent[0]]
    theirs[PAD] = 0
    for place, row in enumerate(rows):
        if row is not None:
            theirs[row] = ours[place]
    params[name], config["vocab"] = theirs, len(theirs)
    if not lm:
        scores = "sentence_projection_layer.weight"
        order = _class_order(labels, len(params[scores]))
        params[scores] = params[scores][order.argsort()].clone()
