"""Your own data as tasks: classify, regress and tag.

    reviews.csv                          {"text": "great film", "label": "good"}
    text,label                           {"text": "a waste", "label": "bad"}
    great film,good                      ... (JSONL)
    "a waste, really",bad

Texts are read as bytes of UTF-8, so any language works without a vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqboat.core.checks import check_choice, check_positive, require
from seqboat.data.copies import prepared_copy
from seqboat.data.store import ArrayStore, Skips
from seqboat.data.tables.records import check_encoding
from seqboat.own.baselines import score_baselines
from seqboat.own.describe import describe
from seqboat.own.inputs import INPUTS, Facts, Input, Picture
from seqboat.own.prepare import input_name, prepare_own, read_own
from seqboat.own.summary import DataSummary
from seqboat.own.tags import TagTarget, find_spans
from seqboat.own.targets import ClassTarget, LabelsTarget, NumberTarget, Target
from seqboat.tasks.stored import hold_out, ragged_lengths
from seqboat.tasks.task import (
    SPLITS,
    Batch,
    Dataset,
    Example,
    HasLogits,
    Kind,
    Loss,
    Split,
    Subset,
    Task,
    Unlabeled,
    check_finite,
    ratio,
)


@dataclass(frozen=True, kw_only=True)
class OwnTaskConfig:
    """A task on your own files."""

    own_data: ClassVar[bool] = True
    task_name: ClassVar[str]
    """Its name in TASKS."""

    train: str = ""
    """Table with columns of inputs and of labels (CSV, TSV, JSONL, JSON or Parquet), or a folder of class folders."""
    val: str | None = None
    """Data to validate on, in the format of `train`; None holds out some of the training rows."""
    test: str | None = None
    """Data to test on, in the format of `train`; None tests on the validation rows."""
    input: str = "auto"
    """Kind of input: text, symbols, tokens, series, wav or image; auto decides by the data."""
    text_column: str = "text"
    """Name of the column of texts, or of series as lists of numbers."""
    second_column: str | None = None
    """Column of a second text, for tasks on pairs of texts."""
    file_column: str | None = None
    """Column of file names (sound, image or text), relative to the table."""
    series_column: str | None = None
    """Column of series ids, for tables with one row per time step; rows of a series must be adjacent."""
    channels: tuple[str, ...] = ()
    """Columns of the channels of a series."""
    label_column: str = "label"
    """Name of the label column, which may hold words or numbers."""
    tokenizer: str | None = None
    """Folder or name of a Hugging Face tokenizer, for input tokens."""
    max_length: int = 2048
    """Maximum length: bytes of a text, samples of a sound, steps of a series; longer inputs are truncated."""
    image_size: int = 32
    """Height and width to which images are resized."""
    holdout: float = 0.1
    """Fraction of the training rows to hold out if `val` is None."""
    split_column: str | None = None
    """Column that says train, val or test."""
    group_column: str | None = None
    """Column of groups to keep on one side of the split, such as patients or authors."""
    time_column: str | None = None
    """Column of times: the latest rows are held out."""
    encoding: str | None = None
    """Encoding of text tables; None detects it."""
    delimiter: str | None = None
    """Delimiter of CSV; None detects it."""
    strict: bool = False
    """Whether a bad row is an error, rather than skipped and counted."""
    data_dir: str = "data"
    """The data folder, for prepared copies of large tables."""

    def __post_init__(self) -> None:
        check_positive("max_length", self.max_length)
        check_positive("image_size", self.image_size)
        require(0 < self.holdout < 1, f"holdout must be in (0, 1), got {self.holdout!r}")
        check_choice("input", self.input, ("auto", *INPUTS))
        require(
            not isinstance(self.channels, str), f"channels must be a list of columns, got {self.channels!r}"
        )
        ways = [
            name
            for name in ("split_column", "group_column", "time_column")
            if getattr(self, name) is not None
        ]
        require(len(ways) <= 1, f"only one of {' and '.join(ways)} can decide about the split")
        require(not ways or self.val is None, f"{' and '.join(ways)} splits the training rows: leave out val")
        require(
            self.series_column is None or bool(self.channels),
            "series_column needs channels: name the columns with numbers",
        )
        if self.encoding is not None:
            check_encoding(self.encoding)
        require(
            self.delimiter is None or len(self.delimiter) == 1,
            f"delimiter must be one character, got {self.delimiter!r}",
        )

    def target(self) -> Target:
        """What is learned."""
        raise NotImplementedError

    def build(self) -> OwnTask:
        return OwnTask(self)


@dataclass(frozen=True, kw_only=True)
class ClassifyTaskConfig(OwnTaskConfig):
    """A class for each row of a table, or several labels."""

    task_name = "classify"

    label_separator: str | None = None
    """Separator of several labels in one field, such as |; None if each row has one class."""
    class_weights: Literal["none", "balanced"] = "none"
    """Loss weights of the classes: none, or balanced (the same total weight for every class)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("class_weights", self.class_weights, ("none", "balanced"))
        require(self.label_separator != "", "label_separator must not be empty")
        require(
            self.label_separator is None or self.class_weights == "none",
            "class_weights needs one class per row: leave out label_separator",
        )

    def target(self) -> Target:
        if self.label_separator is not None:
            return LabelsTarget(self, self.label_separator)
        return ClassTarget(self, self.class_weights == "balanced")


@dataclass(frozen=True, kw_only=True)
class RegressTaskConfig(OwnTaskConfig):
    """A number for each row of a table."""

    task_name = "regress"

    def target(self) -> Target:
        return NumberTarget(self)


@dataclass(frozen=True, kw_only=True)
class TagTaskConfig(OwnTaskConfig):
    """A tag for each token: spans of a text, or one tag per word or time step."""

    task_name = "tag"

    label_column: str = "tags"
    """Name of the tag column: a list of [start, end, label], or of one tag per word, character or step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.second_column is None, "tags are for one sequence: leave out second_column")

    def target(self) -> Target:
        return TagTarget(self)


class OwnDataset(Dataset):
    """The rows of a prepared table."""

    def __init__(self, store: ArrayStore, source: Input, target: Target, facts: Facts) -> None:
        self.store = store
        self.source = source
        self.target = target
        self.facts = facts
        self.count = int(store.manifest["counts"]["rows"])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        inputs = self.source.sequence(stored_row(self.store, "inputs", index), self.facts)
        second = None
        if "second.tokens" in self.store:
            second = self.source.sequence(stored_row(self.store, "second", index), self.facts)
        return Example(inputs, self.target.encode(self.store, self.facts, index, len(inputs)), second)

    def lengths(self) -> NDArray[np.integer]:
        width = len(self.facts["mean"]) if self.source.name == "series" else 1
        lengths = self._lengths("inputs", width)
        return (
            np.maximum(lengths, self._lengths("second", width)) if "second.tokens" in self.store else lengths
        )

    def _lengths(self, name: str, width: int) -> NDArray[np.integer]:
        return ragged_lengths(self.store, name, self.source.max_length * width) // width


def stored_row(store: ArrayStore, name: str, index: int) -> NDArray[Any]:
    """One of the sequences that `RaggedWriter` wrote."""
    start, end = (int(i) for i in store[f"{name}.offsets"][index : index + 2])
    return store[f"{name}.tokens"][start:end]


class _Rows(Sequence[NDArray[Any]]):
    """Stored rows by number, without reading them all at once."""

    def __init__(self, store: ArrayStore, numbers: NDArray[np.integer]) -> None:
        self.store, self.numbers = store, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return stored_row(self.store, "inputs", int(self.numbers[index]))


class OwnTask(Task):
    """A task on your own files."""

    def __init__(self, config: OwnTaskConfig) -> None:
        require(
            config.train != "",
            "--data.train must name a table (CSV, TSV, JSONL or Parquet) or a folder of class folders, got none",
        )
        self.config = config
        self.name = config.task_name
        self.target = config.target()
        self.skips: Skips = Skips(config.strict, most=0.5)
        self._facts: Facts | None = None
        self._source: Input | None = None
        self._stores: dict[str, ArrayStore] = {}

    # what it is

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """As in `Task`: pairs of sequences are matched."""
        return "match" if self.config.second_column is not None else self.target.kind

    @property
    def metric(self) -> str:  # type: ignore[override]
        return self.target.metric

    @property
    def better(self) -> Literal["higher", "lower"]:  # type: ignore[override]
        return self.target.better

    @property
    def source(self) -> Input:
        """Reads the inputs."""
        if self._source is None:
            name = input_name(self.config) if self._facts is None else self._facts["input"]
            self._source = INPUTS[name](self.config)
            if self._facts is not None:
                self._source.extra.update(self._facts)
        return self._source

    @property
    def text_bytes(self) -> bool:  # type: ignore[override]
        return self.source.text_bytes

    @property
    def max_length(self) -> int:  # type: ignore[override]
        return self.source.max_length

    @property
    def fixed_length(self) -> bool:  # type: ignore[override]
        return self.source.fixed_length

    @property
    def picture(self) -> tuple[int, int] | None:  # type: ignore[override]
        return self.source.picture

    @property
    def vocab(self) -> int | None:  # type: ignore[override]
        return self.source.vocab({} if self.source.text_bytes else self.facts)

    @property
    def channels(self) -> int:  # type: ignore[override]
        return self.source.channels({} if self.source.text_bytes else self.facts)

    @property
    def facts(self) -> Facts:
        """Labels, means and the like of the training rows; reads the training data unless they were set."""
        if self._facts is None:
            store = self._store(self.config.train)
            rows = self._numbers(store, "train")
            require(len(rows) > 0, f"{self.config.train} has no rows to train on")
            facts = self.target.measure(store, rows, self.config.train)
            facts.update(self.source.measure(_Rows(store, rows)))
            self._facts = {**facts, "input": self.source.name}
        return self._facts

    @facts.setter
    def facts(self, facts: Facts | None) -> None:
        # a copy of the same type: facts of a checkpoint name their file where something is missing
        self._facts, self._source = copy.copy(facts), None

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The labels of the training table, sorted; a class is a place in them."""
        found = self.facts.get("labels")
        return None if found is None else tuple(found)

    @labels.setter
    def labels(self, labels: tuple[str, ...] | None) -> None:
        self.facts = {"input": "text", **(self._facts or {}), "labels": list(labels or ())}

    @property
    def classes(self) -> int:  # type: ignore[override]
        """Outputs of the model; reads the training table."""
        return self.target.outputs(self.facts)

    # its data

    def _store(self, path: str) -> ArrayStore:
        if path not in self._stores:
            config = self.config
            place = Path(path)
            require(
                place.exists(),
                f"{path} does not exist: expected a table, or a folder with a folder for each class",
            )
            # each table is read by fresh objects: they remember what they have read
            source = INPUTS[self.source.name](config)
            source.extra.update({} if self._facts is None else self._facts)
            make = partial(prepare_own, place, source, config.target(), config)
            store = prepared_copy(config.data_dir, _files(place), _settings(config, source), make, self.skips)
            self.source.extra.update(store.manifest["extra"]["input"])
            self._stores[path] = store
        return self._stores[path]

    def _numbers(self, store: ArrayStore, split: Split) -> NDArray[np.integer]:
        """The rows of the training table that belong to a split."""
        config = self.config
        count = int(store.manifest["counts"]["rows"])
        if config.val is not None:
            return np.arange(count)
        if config.split_column is not None:
            parts = np.asarray(store["part"])
            place = SPLITS.index(split)
            if split == "test" and not (parts == place).any():
                place = SPLITS.index("val")
            if split == "val" and not (parts == place).any():
                place = SPLITS.index("test")
            return np.flatnonzero(parts == place)
        require(count >= 2, f"{config.train} needs at least 2 rows to hold one out, got {count}")
        size = min(max(round(config.holdout * count), 1), count - 1)
        if config.time_column is not None:
            order = np.argsort(np.asarray(store["time"]), kind="stable")
            return np.sort(order[: count - size] if split == "train" else order[count - size :])
        if config.group_column is not None:
            return _whole_groups(np.asarray(store["group"]), size, split == "train", config)
        whole = _Numbered(count)
        held = hold_out(whole, "train" if split == "train" else "val", size)
        assert isinstance(held, Subset)
        return held.numbers

    def _dataset(self, path: str, numbers: NDArray[np.integer] | None) -> Dataset:
        facts = self.facts
        store = self._store(path)
        self.target.check(store, facts, path)
        whole = OwnDataset(store, self.source, self.target, facts)
        return whole if numbers is None or len(numbers) == len(whole) else Subset(whole, numbers)

    def dataset(self, split: Split) -> Dataset:
        self.check_split(split)
        config = self.config
        path = {"train": config.train, "val": config.val, "test": config.test or config.val}[split]
        if path is not None and (split != "train" or config.val is not None):
            return self._dataset(path, None)
        store = self._store(config.train)
        numbers = self._numbers(store, split)
        require(len(numbers) > 0, f"{config.train} has no rows for the split {split}")
        return self._dataset(config.train, numbers)

    def fingerprint(self, split: Split) -> dict[str, Any]:
        config = self.config
        path = {"train": config.train, "val": config.val, "test": config.test or config.val}[
            split
        ] or config.train
        store = self._store(path)
        rows = store.manifest["counts"]["rows"]
        return {
            "source": Path(path).name,
            "rows": rows,
            "sha256": store.digest,
            "labels": self.facts.get("labels"),
        }

    def summary(self, split: Split) -> DataSummary:
        found = describe(self, split)
        self._release()
        return found

    def baselines(self, split: Split, limit: int | None = None) -> dict[str, dict[str, float]]:
        found = score_baselines(self, split, limit)
        self._release()
        return found

    def _release(self) -> None:
        """Give back the memory of what was read all over the data."""
        for store in self._stores.values():
            store.release()

    def read_inputs(self, path: Path, skips: Skips) -> Iterator[tuple[str, Unlabeled]]:
        """The inputs of a table or folder without labels, in its order."""
        for record in read_own(path, self.source, self.config, skips, None):
            yield record.place, self._unlabeled(record.stored, record.second)

    def read_input(self, value: Any) -> Unlabeled:
        """A text, a series as a list of numbers, or a mapping by column name where an input has several columns."""
        first, second = self.config.text_column, self.config.second_column
        require(
            second is None or isinstance(value, Mapping),
            f"each input must be a mapping with {first!r} and {second!r}: the run compares two texts",
        )
        values = value if isinstance(value, Mapping) else {first: value}
        stored = self.source.read(values)
        return self._unlabeled(stored, None if second is None else self.source.read(values, second))

    def _unlabeled(self, stored: NDArray[Any], second: NDArray[Any] | None) -> Unlabeled:
        other = None if second is None else self.source.sequence(second, self.facts)
        text = bytes(stored).decode() if self._spans else None
        return Unlabeled(self.source.sequence(stored, self.facts), other, text)

    @property
    def _spans(self) -> bool:
        """Whether tags are told as spans of characters."""
        return self.kind == "tag" and self.source.text_bytes

    @property
    def said(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("spans",) if self._spans else self.target.said

    # how it is scored

    def collate_targets(self, examples: Sequence[Example], time: int) -> Tensor:
        return self.target.collate(examples, time)

    def loss(self, output: HasLogits, batch: Batch) -> Loss:
        return self.target.loss(_wide(output.logits), batch.targets, self.facts)

    @torch.no_grad()
    def score(self, output: HasLogits, batch: Batch) -> dict[str, Tensor]:
        logits = _wide(output.logits)
        total, scored = self.target.loss(logits, batch.targets, self.facts)
        return {"loss": ratio(total, scored), **self.target.score(logits, batch.targets, self.facts)}

    def summarize(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        return self.target.summarize(super().summarize(totals))

    def answer(self, logits: Tensor, text: str | None = None) -> dict[str, Any]:
        check_finite(logits)
        found = self.target.answer(_wide(logits), self.facts)
        return found if text is None else {"spans": find_spans(text, found["tags"])}

    def read_text(self, text: bytes) -> NDArray[Any]:
        if self.source.name not in ("symbols", "tokens", "series"):
            return super().read_text(text)
        values = {self.config.text_column: text.decode("utf-8", "replace")}
        return self.source.sequence(self.source.read(values), self.facts)

    def read_wav(self, content: bytes) -> NDArray[Any]:
        if self.source.name != "wav":
            return super().read_wav(content)
        return self.source.sequence(self.source.read_file(content), self.facts)

    def read_image(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        if not isinstance(self.source, Picture):
            return super().read_image(pixels)
        return self.source.sequence(self.source.resize(pixels), self.facts)

    def say(self, logits: NDArray[Any]) -> str | None:
        return self.target.say(self.answer(torch.from_numpy(logits)))

    def show(self, example: Example) -> str:
        parts = [example.inputs] if example.second is None else [example.inputs, example.second]
        shown = [self._spell(part) for part in parts]
        return "\n".join([*shown, f"-> {self.target.spell(example.target, self.facts)}"])

    def _spell(self, inputs: NDArray[Any]) -> str:
        if self.source.name == "symbols":
            letters = "?" + self.facts["symbols"]
            return "".join(letters[int(i)] for i in inputs)
        if inputs.ndim == 2:
            return f"{inputs.shape[0]} values of {inputs.shape[1]} channels"
        return super()._spell(inputs)


class _Numbered(Dataset):
    """Rows of which only the number counts."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        raise NotImplementedError


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _files(path: Path) -> list[Path]:
    """What decides whether a prepared copy is still true."""
    if path.is_file():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file())
    require(len(found) > 0, f"{path} contains no files")
    return found


def _settings(config: OwnTaskConfig, source: Input) -> dict[str, object]:
    """What else decides about a prepared copy."""
    names = [
        "text_column",
        "second_column",
        "file_column",
        "series_column",
        "label_column",
        "split_column",
        "group_column",
        "time_column",
        "encoding",
        "delimiter",
        "strict",
    ]
    settings: dict[str, object] = {name: getattr(config, name) for name in names}
    settings |= {"input": source.name, "task": config.task_name, "channels": list(config.channels)}
    if source.name == "image":
        settings["image_size"] = config.image_size
    if source.name == "tokens":
        settings |= {"tokenizer": config.tokenizer, "max_length": config.max_length}
    if isinstance(config, ClassifyTaskConfig):
        settings["label_separator"] = config.label_separator
    return settings


def _whole_groups(
    groups: NDArray[np.uint64], size: int, train: bool, config: OwnTaskConfig
) -> NDArray[np.integer]:
    """Rows of the groups that are held out, or of the others: by their hash, until there are enough."""
    names, counts = np.unique(groups, return_counts=True)
    require(
        len(names) > 1,
        f"{config.train}: column {config.group_column!r} has one group only, which cannot be held out",
    )
    held = 1 + int(np.searchsorted(np.cumsum(counts), size))
    chosen = np.isin(groups, names[: min(held, len(names) - 1)])
    return np.flatnonzero(~chosen if train else chosen)
