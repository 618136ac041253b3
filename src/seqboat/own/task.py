"""Your own data as tasks: classify, regress and tag.

reviews.csv                          {"text": "great film", "label": "good"}
text,label                           {"text": "a waste", "label": "bad"}
great film,good                      ... (JSON lines)
"a waste, really",bad
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, require
from seqboat.data.sources import Source
from seqboat.data.store import Skips
from seqboat.own.baselines import Offset, build_baseline, constant_scores, fit_baseline
from seqboat.own.describe import DataSummary, describe
from seqboat.own.inputs import INPUTS, LIMIT, Facts, Input, Picture, Words
from seqboat.own.records import (
    Found,
    Reader,
    Rows,
    Values,
    check_is_archive,
    check_is_table,
    hold_out,
    kind_of_files,
    open_reader,
    read_input,
    read_rows,
)
from seqboat.own.tables import is_table, read_table
from seqboat.own.tags import TagTarget, find_spans, tags_of
from seqboat.own.targets import ClassTarget, LabelsTarget, NumberTarget, Target
from seqboat.tasks.task import (
    Batch,
    Dataset,
    Example,
    HasLogits,
    Kind,
    Loss,
    Split,
    Task,
    Unlabeled,
    check_finite,
    draw_subset,
    ratio,
)

KINDS = ("auto", "text", "series", "wav", "image")
LONGEST_WORDS = 15
"""Letters of a word on average beyond which a text has no words."""


@dataclass(frozen=True, kw_only=True)
class OwnTaskConfig:
    """A task on your own files."""

    own_data: ClassVar[bool] = True
    task_name: ClassVar[str]
    """Its name in TASKS."""

    train: str = ""
    """Table with columns of inputs and of labels (CSV, TSV, JSONL or Parquet), or a folder of class folders."""
    val: str | None = None
    """Data to validate on, in the format of `train`; None holds out some of the training rows."""
    test: str | None = None
    """Data to test on, in the format of `train`; None tests on the validation rows."""
    input: str = "auto"
    """Kind of input: text, series, wav or image; auto decides by the data."""
    tokens: str = "words"
    """Tokens of a text: words, or bytes for what has no words."""
    text_column: str = "text"
    """Name of the column of texts, or of series as lists of numbers."""
    file_column: str | None = None
    """Column of file names (sound, image or text), relative to the table."""
    series_column: str | None = None
    """Column of series ids, for tables with one row per time step; rows of a series must be adjacent."""
    channels: tuple[str, ...] = ()
    """Columns of the channels of a series."""
    label_column: str = "label"
    """Name of the label column, which may hold words or numbers."""
    max_length: int | None = None
    """Longest sequence: words or bytes of a text, samples of a sound, steps of a series; longer ones are cut. None
    takes the longest training row, up to 8,192 tokens."""
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
    encoding: str = "utf-8"
    """Encoding of text tables."""
    delimiter: str | None = None
    """Delimiter of CSV; None: a comma."""
    strict: bool = False
    """Whether a bad row is an error, rather than skipped and counted."""

    def __post_init__(self) -> None:
        if self.max_length is not None:
            check_positive("max_length", self.max_length)
        check_positive("image_size", self.image_size, least=2)
        require(self.image_size % 2 == 0, f"image_size must be even, got {self.image_size}")
        require(0 < self.holdout < 1, f"holdout must be in (0, 1), got {self.holdout!r}")
        check_choice("input", self.input, KINDS)
        check_choice("tokens", self.tokens, ("words", "bytes"))
        require(
            not isinstance(self.channels, str), f"channels must be a list of columns, got {self.channels!r}"
        )
        names = ("split_column", "group_column", "time_column")
        ways = [name for name in names if getattr(self, name) is not None]
        require(len(ways) <= 1, f"only one of {' and '.join(ways)} can decide about the split")
        require(not ways or self.val is None, f"{' and '.join(ways)} splits the training rows: leave out val")
        require(
            self.series_column is None or bool(self.channels),
            "a series needs --channels: name the columns with numbers",
        )
        delimiter = self.delimiter
        require(
            delimiter is None or len(delimiter) == 1 or delimiter == "\\t",
            f"delimiter must be one character, got {delimiter!r}",
        )
        if delimiter == "\\t":
            object.__setattr__(self, "delimiter", "\t")

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
        return ClassTarget(self, None if self.class_weights == "none" else self.class_weights)


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
    """Name of the tag column: a list of [start, end, label], or of one tag per word or step."""

    def target(self) -> Target:
        return TagTarget(self)


class OwnDataset(Dataset):
    """Encoded rows.

    Args:
        task: encodes them.
        rows: as they were read.
        path: of the table, for messages.
    """

    def __init__(self, task: OwnTask, rows: Rows, path: str) -> None:
        facts = task.facts
        self.sizes: list[int] = []
        """tokens of each row, before it is cut"""
        self.cut = 0
        """tokens that were cut"""
        self.inputs: list[NDArray[Any]] = []
        self.targets: list[Any] = []
        task.target.check(rows.targets, rows.places, facts, path)
        for read, wanted in zip(rows.inputs, rows.targets, strict=True):
            whole = task.source.encode(read, facts)
            require(len(whole) > 0, f"{path}: a row without tokens")
            inputs = whole[: task.max_length]
            self.sizes.append(len(whole))
            self.cut += len(whole) - len(inputs)
            if isinstance(read, str) and isinstance(task.target, TagTarget):
                wanted = tags_of(wanted, task.source.spans(read, facts))
            self.inputs.append(inputs.astype(np.float32 if inputs.dtype.kind == "f" else np.int32))
            self.targets.append(task.target.encode(wanted, facts, len(inputs)))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Example:
        return Example(self.inputs[index], self.targets[index])

    def lengths(self) -> NDArray[np.integer]:
        return np.array([len(row) for row in self.inputs], np.int64)


class OwnSubset(Dataset):
    """Some of the encoded rows."""

    def __init__(self, whole: OwnDataset, numbers: NDArray[np.integer]) -> None:
        self.whole, self.numbers = whole, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Example:
        return self.whole[int(self.numbers[index])]

    def lengths(self) -> NDArray[np.integer]:
        return self.whole.lengths()[self.numbers]


class OwnTask(Task):
    """A task on your own data.

    Args:
        config: of the task.
        values: in memory, instead of files.
    """

    def __init__(self, config: OwnTaskConfig, values: Values | None = None) -> None:
        self.config, self.values = config, values
        self.name = config.task_name
        self.target = config.target()
        self.skips: Skips = Skips(config.strict, most=0.5)
        self._facts: Facts | None = None
        self._source: Input | None = None
        self._rows: dict[str, Rows] = {}
        self._encoded: dict[str, OwnDataset] = {}
        self._parts: dict[str, NDArray[np.int64]] | None = None
        self._deciding: list[Any] | None = None

    # what it is

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        return self.target.kind

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
            name = self._input_name() if self._facts is None else self._facts["input"]
            self._source = INPUTS[name](self.config)
        return self._source

    @property
    def text_bytes(self) -> bool:  # type: ignore[override]
        return self.source.name == "bytes"

    @property
    def token_names(self) -> tuple[str, ...] | None:  # type: ignore[override]
        words = self.facts.get("words")
        if words is None:
            return None
        return ("□",) * (self.source.vocab(self.facts) - len(words)) + tuple(words)  # type: ignore[operator]

    @property
    def max_length(self) -> int:  # type: ignore[override]
        """The longest sequence, in tokens."""
        return int(self.facts["length"])

    @property
    def fixed_length(self) -> bool:  # type: ignore[override]
        return isinstance(self.source, Picture)

    @property
    def longest(self) -> int:
        """Tokens of the longest training row, or of the limit."""
        return int(self.facts["longest"])

    @property
    def vocab(self) -> int | None:  # type: ignore[override]
        facts = self.facts
        return self.source.vocab(facts)

    @property
    def channels(self) -> int:  # type: ignore[override]
        facts = self.facts
        return self.source.channels(facts)

    @property
    def facts(self) -> Facts:
        """Labels, means and the like of the training rows; reads the training data unless they were set."""
        if self._facts is None:
            rows = self._read(self.config.train)
            numbers = self.parts()["train"] if self.config.val is None else np.arange(len(rows))
            some = [rows.inputs[i] for i in numbers]
            source, tagging = self.source, self.target.kind == "tag"
            measured = source.measure(some, tagging)
            if isinstance(source, Words) and _wordless(measured, some):
                self._source = source = INPUTS["bytes"](self.config)
                measured = source.measure(some, tagging)
            named = [rows.targets[i] for i in numbers] if self.target.metric == "rmse" else rows.targets
            facts = {**measured, **self.target.measure(named, self.config.train or "y")}
            longest = max(source.size(row, facts) for row in some)
            patch = int(facts.get("patch", 1))
            limit = self.config.max_length
            most = LIMIT if limit is None else max(1, limit // patch)
            if tagging:
                facts["spans"] = any(isinstance(row, str) for row in some)
            most = longest if isinstance(source, Picture) else most
            self._facts = {**facts, "input": source.name, "length": most, "longest": min(longest, most)}
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
        self.facts = {
            "input": "bytes",
            "length": LIMIT,
            "longest": LIMIT,
            **(self._facts or {}),
            "labels": list(labels or ()),
        }

    @property
    def classes(self) -> int:  # type: ignore[override]
        """Outputs of the model; reads the training table."""
        return self.target.outputs(self.facts)

    def complete(self, model: nn.Module) -> nn.Module:
        """The model with the baseline that it was trained beside."""
        about = (self._facts or {}).get("baseline")
        if about is not None:
            model.offset = Offset(build_baseline(about, self))
        return model

    # its data

    def _input_name(self) -> str:
        config = self.config
        if config.input != "auto" and config.input != "text":
            return config.input
        if config.channels:
            return "series"
        path = Path(config.train)
        if self.values is None:
            self._check_named()
        if self.values is None and config.input == "auto":
            if config.file_column is not None:
                check_is_table(path)
                rows = read_table(path, Skips(most=1.0), config.encoding, config.delimiter)
                return kind_of_files(path, (str(row.values.get(config.file_column)) for row in rows))
            if not is_table(path):
                require(
                    path.exists(),
                    f"{path} does not exist: expected a table, or a folder with a folder for each class",
                )
                check_is_archive(path)
                members = Source(path).members(lambda name: True)
                return kind_of_files(path, (member.name for member in members))
        return self._kind_of_value(self._first_value())

    def _first_value(self) -> Any:
        """The input of the first record that has one."""
        config, path = self.config, Path(self.config.train)
        if self.values is not None:
            return next(iter(self.values.inputs), None)
        if not is_table(path):
            return ""
        rows = read_table(path, Skips(most=1.0), config.encoding, config.delimiter)
        some = (row.values.get(config.text_column) for row in itertools.islice(rows, 100))
        return next((value for value in some if value is not None), None)

    def _kind_of_value(self, value: Any) -> str:
        if isinstance(value, list | tuple | np.ndarray) and self.config.input != "text":
            first = value[0] if len(value) else 0.0
            return "words" if isinstance(first, str) else "series"
        # lists of words stay what they are
        return "words" if isinstance(value, list | tuple | np.ndarray) else self.config.tokens

    def _check_named(self) -> None:
        require(
            self.config.train != "",
            "--data.train must name a table (CSV, TSV, JSONL or Parquet) or a folder of class folders, got none",
        )

    def reader(self, path: str) -> Reader:
        """Records of the training data or of another table."""
        if path == "" or path == self.config.train:
            if self.values is not None:
                return self.values
            self._check_named()
        return open_reader(Path(path), self.source, self.config)

    def _read(self, path: str) -> Rows:
        if path not in self._rows:
            self._rows[path] = read_rows(self.reader(path), self.source, self.target, self.config, self.skips)
        return self._rows[path]

    def parts(self) -> dict[str, NDArray[np.int64]]:
        """Numbers of the training table's rows in each split."""
        if self._parts is None:
            rows = self._read(self.config.train)
            require(len(rows) > 0, f"{self.config.train or 'X'} has no rows to train on")
            classes = rows.targets if isinstance(self.target, ClassTarget) else None
            self._parts = hold_out(rows, classes, self.config)
            self._deciding = rows.deciding if self.config.group_column else None
        return self._parts

    def groups(self) -> NDArray[Any] | None:
        """Groups of the training rows, which stay together; None without groups."""
        if self._deciding is None:
            return None
        return np.array([self._deciding[i] for i in self.parts()["train"]], dtype=str)

    def encoded(self, path: str) -> OwnDataset:
        """All rows of a table; what was read of it is forgotten."""
        if path not in self._encoded:
            facts = self.facts
            rows = self._read(path)
            require(bool(facts) and len(rows) > 0, f"{path or 'X'} has no rows")
            if path == self.config.train and self.config.val is None:
                self.parts()
            self._encoded[path] = OwnDataset(self, rows, path or "y")
            del self._rows[path]
        return self._encoded[path]

    def dataset(self, split: Split) -> Dataset:
        self.check_split(split)
        config = self.config
        path = {"train": config.train, "val": config.val, "test": config.test or config.val}[split]
        if path is not None and (split != "train" or config.val is not None):
            return self.encoded(path)
        self.parts()
        return OwnSubset(self.encoded(config.train), self.parts()[split])

    def rename(self, labels: Sequence[str]) -> None:
        """Give the classes other names, in their order."""
        facts = self.facts
        names = dict(zip(facts["labels"], labels, strict=True))
        for rows in self._rows.values():
            rows.targets = [names[target] for target in rows.targets]
        self.facts = {**facts, "labels": list(labels)}

    def forget(self) -> None:
        """Let go of the data, and keep what a model needs of it."""
        self.values = None
        self._rows, self._encoded = {}, {}
        self._parts = self._deciding = None

    def fingerprint(self, split: Split) -> dict[str, Any] | None:
        config = self.config
        path = {"train": config.train, "val": config.val, "test": config.test or config.val}[
            split
        ] or config.train
        if path == "" and self.values is None:
            return None
        rows = len(self.encoded(path))
        digest = self.reader(path).digest()
        return {
            "source": Path(path).name or "X",
            "rows": rows,
            "sha256": digest,
            "labels": self.facts.get("labels"),
        }

    def summary(self, split: Split) -> DataSummary:
        return describe(self, split)

    def baselines(self, split: Split, limit: int | None = None) -> dict[str, dict[str, float]]:
        """Metrics of the simple thing and of a constant answer on a split."""
        train, scored = self.dataset("train"), draw_subset(self.dataset(split), limit)
        learn, rows = ([data[i] for i in range(len(data))] for data in (train, scored))
        found = fit_baseline(
            self, [row.inputs for row in learn], [row.target for row in learn], self.groups()
        )
        name, constant = constant_scores(self, [row.target for row in learn])
        totals: dict[str, dict[str, Tensor]] = {name: {}, found.name: {}}
        for start in range(0, len(rows), 64):
            batch = self.collate(rows[start : start + 64])
            scores = found.module(batch.inputs, batch.mask)
            for which, logits in ((name, constant.expand_as(scores)), (found.name, scores)):
                for metric, value in self.score(Scored(logits), batch).items():
                    totals[which][metric] = totals[which].get(metric, 0) + value
        return {which: self.summarize(found) for which, found in totals.items()}

    def read_inputs(self, path: Path, skips: Skips) -> Iterator[tuple[str, Unlabeled]]:
        """The inputs of a table or folder without labels, in its order."""
        for found, query in self.queries(path, skips):
            yield found.place, query

    def queries(self, path: Path, skips: Skips) -> Iterator[tuple[Found, Unlabeled]]:
        """Records to predict for, with their inputs; those that cannot be read are skipped."""
        for found in open_reader(path, self.source, self.config).records(skips):
            try:
                query = self.query(read_input(found, self.source))
            except ValueError as error:
                skips.add(path.name, found.place, str(error))
                continue
            yield found, query

    def query(self, read: Any) -> Unlabeled:
        """An input that was read, in tokens."""
        whole = self.source.encode(read, self.facts)
        require(len(whole) > 0, "no tokens")
        cut = whole[: self.max_length]
        text = read if self.kind == "tag" and isinstance(read, str) else None
        return Unlabeled(cut, None, text, len(whole) - len(cut))

    def read_input(self, value: Any) -> Unlabeled:
        """A text, a series as a list of numbers, or a mapping by column name where an input has several columns."""
        values = value if isinstance(value, Mapping) else {self.config.text_column: value}
        if (
            not isinstance(value, Mapping)
            and self.config.channels
            and isinstance(self.source, INPUTS["series"])
        ):
            plain = copy.copy(self.config)
            object.__setattr__(plain, "channels", ())
            return self.query(INPUTS[self.source.name](plain).read(values))
        return self.query(self.source.read(values))

    @property
    def said(self) -> tuple[str, ...]:  # type: ignore[override]
        spans = (
            self.kind == "tag" and self.source.name in ("words", "bytes") and self.facts.get("spans", False)
        )
        return ("spans",) if spans else self.target.said

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
        if text is None:
            return found
        return {"spans": find_spans(text, found["tags"], self.source.spans(text, self.facts))}

    def read_text(self, text: bytes) -> NDArray[Any]:
        return self.read_input(text.decode("utf-8", "replace")).inputs

    def read_wav(self, content: bytes) -> NDArray[Any]:
        if self.source.name != "wav":
            return super().read_wav(content)
        return self.query(self.source.read_file(content)).inputs

    def read_image(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        if not isinstance(self.source, Picture):
            return super().read_image(pixels)
        return self.query(self.source.squares(pixels)).inputs

    def say(self, logits: NDArray[Any]) -> str | None:
        return self.target.say(self.answer(torch.from_numpy(logits)))

    def show(self, example: Example) -> str:
        return f"{self._spell(example.inputs)}\n-> {self.target.spell(example.target, self.facts)}"

    def _spell(self, inputs: NDArray[Any]) -> str:
        if inputs.ndim == 2:
            return f"{inputs.shape[0]} values of {inputs.shape[1]} channels"
        return super()._spell(inputs)


class Scored(NamedTuple):
    """An output that is only scores."""

    logits: Tensor


def _wordless(facts: Facts, rows: Sequence[Any]) -> bool:
    """Whether texts have no words that repeat: other scripts, symbols, codes."""
    texts = all(isinstance(row, str) for row in rows)
    return texts and len(rows) >= 20 and (facts["known"] < 0.5 or facts["letters"] > LONGEST_WORDS)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
