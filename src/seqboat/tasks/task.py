"""The contract of a task: examples, batches, loss and score. The training loop depends on no specific task.

    config.build() -> Task                     a configuration is plain data; nothing is read yet
    task.dataset("train")[i] -> Example        NumPy arrays, read from memory-mapped files
    task.collate([example, ...]) -> Batch      tensors, padded on the right, with a mask of the real tokens
    task.loss(output, batch) -> Loss           a sum and a count, so that uneven batches average exactly
    task.score(output, batch) -> dict          sums and counts again: add them over batches and processes
    task.summarize(totals) -> dict             the final numbers
    task.read_input(value), task.answer(...)   a new input, and what the model says about it

Four kinds: "classify" (one answer for a sequence), "match" (one answer for a pair of sequences), "tag" (a class for
every token) and "lm" (the next token for every token); `IGNORE` where a token has no target.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, require, short
from seqboat.data.store import Skips
from seqboat.own.describe import DataSummary

Kind = Literal["classify", "match", "tag", "lm"]
Modality = Literal["bytes", "tokens", "image", "wave"]
Split = Literal["train", "val", "test"]

SPLITS: tuple[Split, ...] = ("train", "val", "test")
IGNORE = -100
"""The target of tokens that are not scored."""
BYTES = 256
"""Vocabulary size of byte-level tasks: ids are the bytes. Padding needs no id, the mask marks it."""

BYTE_CLASSES = ("letter", "digit", "punctuation", "space", "line end", "control", "beyond ASCII")
"""Kinds of bytes."""
AMPLITUDE_BORDERS = (0.1, 0.5, 1.0, 2.0)
"""Boundaries between the kinds of real values, in standard deviations."""
AMPLITUDE_CLASSES = ("below 0.1 sd", "0.1 to 0.5 sd", "0.5 to 1 sd", "1 to 2 sd", "above 2 sd")
"""Kinds of real values."""


def _byte_class(byte: int) -> int:
    character = chr(byte)
    if byte >= 128:
        return 6
    if character.isalpha():
        return 0
    if character.isdigit():
        return 1
    if character in "\n\r":
        return 4
    if character in " \t":
        return 3
    return 2 if character.isprintable() else 5


_BYTE_CLASS = np.array([_byte_class(byte) for byte in range(BYTES)], dtype=np.int64)


class Example(NamedTuple):
    """One example, as arrays."""

    inputs: NDArray[Any]
    """(time,) token ids, or (time, channels) real values"""
    target: NDArray[Any] | int
    """the class, or another target of the task; for a language model (time,), the token to predict after each token,
    or IGNORE"""
    second: NDArray[Any] | None = None
    """the other sequence of a pair"""
    starts: NDArray[np.int64] | None = None
    """ascending indices of the tokens that begin a document; None if the example is one sequence"""


class Unlabeled(NamedTuple):
    """An input without a target, to predict for."""

    inputs: NDArray[Any]
    """as in `Example`"""
    second: NDArray[Any] | None = None
    """the other sequence of a pair"""
    text: str | None = None
    """the text of the input, if its answer names spans of characters"""
    cut: int = 0
    """tokens beyond the longest sequence, which were left out"""


class Batch(NamedTuple):
    """Stacked examples, padded on the right."""

    inputs: Tensor
    """(batch, time) int64 token ids, or (batch, time, channels) float32 real values"""
    mask: Tensor | None
    """(batch, time) bool, True on real tokens; None if nothing is padded"""
    targets: Tensor
    """(batch,) int64 classes, (batch, time) int64 tokens or tags with IGNORE, or real values"""
    second: Tensor | None = None
    """(batch, other time): the other sequences of pairs"""
    second_mask: Tensor | None = None
    """(batch, other time)"""
    cu_seqlens: Tensor | None = None
    """(documents + 1,): where packed documents begin in the flattened inputs; None if every sequence is one"""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return Batch(*(t if t is None else t.to(device, non_blocking=non_blocking) for t in self))  # type: ignore[arg-type]

    def joined(self) -> Batch:
        """The same with every sequence as one text, whatever documents it holds, to look at whole sequences."""
        return self._replace(cu_seqlens=None)

    def hidden(self) -> Batch:
        """A batch of the same shape in which every token is padding."""
        mask = self.inputs.new_zeros(self.inputs.shape[:2], dtype=torch.bool)
        second_mask = (
            None if self.second is None else self.second.new_zeros(self.second.shape[:2], dtype=torch.bool)
        )
        return self._replace(mask=mask, second_mask=second_mask)

    @property
    def tokens(self) -> int:
        """Number of tokens that the model computes, including padding."""
        return self.inputs.shape[0] * (
            self.inputs.shape[1] + (0 if self.second is None else self.second.shape[1])
        )


class Loss(NamedTuple):
    """A loss that can be averaged over parts of a batch."""

    total: Tensor
    """sum over the scored targets, with its gradient; float32 at least"""
    scored: Tensor
    """number of scored targets; no gradient"""

    @property
    def mean(self) -> Tensor:
        """The average; 0 with zero gradients if nothing was scored."""
        return self.total / self.scored.clamp_min(1)


class HasLogits(Protocol):
    """The part of a model's output that a task needs."""

    @property
    def logits(self) -> Tensor: ...


class Dataset(ABC):
    """Examples by index. Cheap to create and to send to a worker process: files are opened on first use."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Example: ...

    def lengths(self) -> NDArray[np.integer]:
        """How long each example is, for bucketing."""
        return np.array([len(self[i].inputs) for i in range(len(self))], dtype=np.int64)


class TaskConfig(Protocol):
    """A task's settings: a frozen dataclass of plain values.

    The settings of a task that reads the user's own files, and hence needs no preparation, have a class variable
    `own_data = True`.
    """

    def build(self) -> Task: ...


class Task(ABC):
    """What to learn, and how to score it. Creating a task reads nothing; `dataset` needs the data."""

    name: str
    """Its name in TASKS."""
    kind: Kind
    vocab: int | None
    """Number of token ids; None for real-valued inputs."""
    channels: int = 1
    """Channels of real-valued inputs."""
    classes: int
    """Number of classes; for a language model, the size of its vocabulary."""
    text_bytes: bool = False
    """Whether token ids are the bytes of UTF-8 text."""
    labels: tuple[str, ...] | None = None
    """Names of the classes, if they have any; can be set to those of a trained model."""
    facts: dict[str, Any] | None = None
    """What a model must know about its training data, as plain values; can be set to those of a trained model."""
    max_length: int
    """Length of the longest possible sequence."""
    fixed_length: bool = False
    """Whether all examples have max_length tokens, so that bucketing and padding are unnecessary."""
    expected: Mapping[str, Any] | None = None
    """Fingerprints of the data that a model was trained with, by split; None takes any data."""
    trained: str = "the run"
    """The checkpoint that has them, for messages."""
    skips: Skips | None = None
    """Skipped records, for tasks that read the user's files."""
    token_names: tuple[str, ...] | None = None
    """Names of the token ids, if they are not bytes."""
    picture: tuple[int, int] | None = None
    """Height and width, if a sequence is an image, row by row."""
    metric: str = "accuracy"
    """The metric to select checkpoints by."""
    better: Literal["higher", "lower"] = "higher"
    said: tuple[str, ...] = ("label", "probability")
    """Fields of an answer that `seqboat predict` writes."""
    splits: tuple[Split, ...] = SPLITS

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "summarise" in cls.__dict__ and "summarize" not in cls.__dict__:
            cls.summarize = cls.__dict__["summarise"]  # type: ignore[method-assign]

    @abstractmethod
    def dataset(self, split: Split) -> Dataset:
        """The examples of a split. If data is missing, a ValueError says how to prepare it."""

    def origin(self) -> dict[str, Any] | None:
        """Source and split sizes of the prepared data; None if the task needs no preparation."""
        return None

    def fingerprint(self, split: Split) -> dict[str, Any] | None:
        """What tells the data of a split from any other, as plain values: "source", "rows", "sha256" and "labels".

        None if the configuration alone decides about the data.
        """
        return None

    def check_data(self, split: Split) -> None:
        """Refuse data that is not what a model was trained and selected with."""
        known = (self.expected or {}).get(split)
        if known is not None and (change := data_change(known, self.fingerprint(split))):
            raise ValueError(
                f"the data of the split {split} are not those of {self.trained}: {change}; restore them, or name "
                "others to use (--data.FIELD)"
            )

    def summary(self, split: Split) -> DataSummary | None:
        """What the user's own files hold, for training and this held-out split; None for other data."""
        return None

    def complete(self, model: nn.Module) -> nn.Module:
        """A fresh model with what a task adds to it: nothing by default."""
        return model

    def baselines(self, split: Split, limit: int | None = None) -> dict[str, dict[str, float]]:
        """Metrics that simple models reach on a split, by the name of the model; empty without any.

        Args:
            split: to score.
            limit: score at most this many examples, the same as an evaluation would.
        """
        return {}

    def text(self, split: Split) -> NDArray[Any]:
        """The tokens of a split as one long array; only for tasks on one long text."""
        raise ValueError(f"the task {self.name} is not one long text that could be cut in another way")

    def document_starts(self, split: Split) -> NDArray[np.int64] | None:
        """Indices of the tokens in `text(split)` that begin a document; None if it is one."""
        return None

    def lengths(self, split: Split) -> NDArray[np.integer]:
        """How long each example of a split is, for bucketing."""
        return self.dataset(split).lengths()

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Stack examples into a batch."""
        batch = self.collate_inputs(examples)
        return batch._replace(targets=self.collate_targets(examples, batch.inputs.shape[1]))

    def collate_inputs(self, examples: Sequence[Example]) -> Batch:
        """Stack inputs into a batch without targets."""
        require(len(examples) > 0, "collate needs at least one example, got none")
        inputs, mask = self._pad([e.inputs for e in examples])
        targets = torch.zeros(0, dtype=torch.int64)
        if self.kind != "match":
            cu_seqlens = find_borders([e.starts for e in examples], inputs.shape[1])
            return Batch(inputs, mask, targets, cu_seqlens=cu_seqlens)
        seconds = [e.second for e in examples if e.second is not None]
        require(len(seconds) == len(examples), "every example of a matching task needs a second sequence")
        second, second_mask = self._pad(seconds)
        return Batch(inputs, mask, targets, second, second_mask)

    def collate_targets(self, examples: Sequence[Example], time: int) -> Tensor:
        """The targets of a batch whose inputs are padded to `time` tokens."""
        if self.kind != "lm":
            return torch.tensor([int(e.target) for e in examples], dtype=torch.int64)
        targets = torch.full((len(examples), time), IGNORE, dtype=torch.int64)
        for row, example in zip(targets, examples, strict=True):
            assert isinstance(example.target, np.ndarray)
            row[: len(example.target)] = torch.from_numpy(example.target.astype(np.int64))
        return targets

    def _pad(self, rows: Sequence[NDArray[Any]]) -> tuple[Tensor, Tensor | None]:
        dtype = torch.float32 if self.vocab is None else torch.int64
        time = max(len(row) for row in rows)
        inputs = torch.zeros((len(rows), time, *rows[0].shape[1:]), dtype=dtype)
        for to, row in zip(inputs, rows, strict=True):
            to[: len(row)] = torch.from_numpy(np.ascontiguousarray(row)).to(dtype)
        sizes = torch.tensor([len(row) for row in rows])
        if bool((sizes == time).all()):
            return inputs, None
        return inputs, torch.arange(time) < sizes[:, None]

    def loss(self, output: HasLogits, batch: Batch) -> Loss:
        """Cross-entropy summed over the scored targets, in at least float32."""
        logits, targets = _flatten(output.logits, batch.targets)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        total = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
        return Loss(total, (targets != IGNORE).sum())

    @torch.no_grad()
    def score(self, output: HasLogits, batch: Batch) -> dict[str, Tensor]:
        """Each metric as a float64 tensor (sum, count), to be added over batches and processes."""
        logits, targets = _flatten(output.logits, batch.targets)
        total, scored = self.loss(output, batch)
        right = ((logits.argmax(dim=-1) == targets) & (targets != IGNORE)).sum()
        totals = {"loss": ratio(total, scored), "accuracy": ratio(right, scored)}
        if self.kind == "lm":
            totals["bits"] = ratio(total.double() / math.log(2), scored)
        return totals

    def summarize(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Metrics from summed scores; nan if nothing was counted."""
        return {
            name: float(total) / float(count) if float(count) else math.nan
            for name, (total, count) in totals.items()
        }

    def show(self, example: Example) -> str:
        """An example as human-readable text."""
        parts = [self._spell(example.inputs)]
        if example.second is not None:
            parts.append(self._spell(example.second))
        if not isinstance(example.target, np.ndarray):
            parts.append(f"class {int(example.target)}")
        return "\n".join(parts)

    def say(self, logits: NDArray[Any]) -> str | None:
        """The answer of a model as text, for tasks whose answers are not single classes; None for others.

        Args:
            logits: the output for one sequence.
        """
        return None

    def answer(self, logits: Tensor, text: str | None = None) -> dict[str, Any]:
        """What a model says about one sequence, in plain values; with the fields `said`.

        Args:
            logits: (classes,), or (time, classes) for tags.
            text: that of the input, if `read_input` gave one.
        """
        check_finite(logits)
        labels = self.labels or tuple(str(i) for i in range(logits.shape[-1]))
        probs = logits.double().softmax(dim=-1)
        if self.kind == "tag":
            return {"tags": [labels[int(tag)] for tag in probs.argmax(dim=-1)]}
        best = int(probs.argmax())
        return {
            "label": labels[best],
            "probability": float(probs[best]),
            "probabilities": dict(zip(labels, probs.tolist(), strict=True)),
        }

    def excerpt(self, inputs: NDArray[Any], size: int = 80) -> str:
        """The beginning of a sequence in one line of at most `size` characters."""
        if self.vocab is None:
            return f"{len(inputs):,} {'pixels' if self.picture else 'values'}"
        text = " ".join(self._spell(inputs[: 4 * size]).split())
        return text if len(text) <= size and len(inputs) <= 4 * size else text[: size - 1] + "…"

    def _spell(self, inputs: NDArray[Any]) -> str:
        if self.vocab is not None and self.text_bytes:
            return bytes(inputs.astype(np.uint8)).decode(errors="replace")
        values = inputs.reshape(-1).tolist()
        return " ".join(self.token_names[value] if self.token_names else str(value) for value in values)

    @property
    def modality(self) -> Modality:
        """What a sequence is made of."""
        if self.vocab is not None:
            return "bytes" if self.text_bytes else "tokens"
        return "wave" if self.picture is None else "image"

    def token_classes(self, inputs: NDArray[Any]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Kinds of tokens, for statistics: names of the kinds, and the kind of each token.

        Bytes are grouped by character class, pixels by row, samples by amplitude; any other id is a kind by itself.

        Args:
            inputs: (time,) token ids or (time, channels) values, without padding.
        """
        if self.modality == "bytes":
            return BYTE_CLASSES, _BYTE_CLASS[inputs]
        if self.modality == "tokens":
            assert self.vocab is not None
            names = self.token_names or tuple(str(i) for i in range(self.vocab))
            return names, inputs.astype(np.int64)
        if self.picture is not None:
            height, width = self.picture
            return tuple(f"row {i + 1}" for i in range(height)), np.arange(len(inputs)) // width
        size = np.abs(inputs).max(axis=1) if inputs.ndim > 1 else np.abs(inputs)
        return AMPLITUDE_CLASSES, np.digitize(size, AMPLITUDE_BORDERS).astype(np.int64)

    def read_text(self, text: bytes) -> NDArray[Any]:
        """Inputs from typed text: its bytes, or token ids written as numbers."""
        if self.modality == "bytes":
            return np.frombuffer(text, np.uint8).astype(np.int64)
        if self.vocab is None:
            raise ValueError(f"the task {self.name} reads {self._reads()}, not text")
        try:
            ids = np.array([int(word) for word in text.split()], dtype=np.int64)
        except (ValueError, OverflowError):
            raise ValueError(
                f"a text for the task {self.name} must be numbers from 0 to {self.vocab - 1}"
            ) from None
        bad = ids[(ids < 0) | (ids >= self.vocab)]
        require(not len(bad), f"token ids must be from 0 to {self.vocab - 1}, got {bad[:1].tolist()}")
        return ids

    def read_input(self, value: Any) -> Unlabeled:
        """An input that came from Python, to predict for: by default a text, as `read_text` takes it."""
        if isinstance(value, Mapping):
            value = value.get("text")
        require(isinstance(value, str), f"each input must be a text, got {type(value).__name__}")
        inputs = self.read_text(value.encode())
        require(
            0 < len(inputs) <= self.max_length,
            f"each input must have from 1 to {self.max_length:,} tokens, got {len(inputs):,}",
        )
        return Unlabeled(inputs)

    def read_inputs(self, path: Path, skips: Skips) -> Iterator[tuple[str, Unlabeled]]:
        """Inputs of a file, each with its place: by default a table with a column `text`, or lines of text.

        Args:
            path: of the file.
            skips: told about those that cannot be read.
        """
        for place, value in _texts(path, skips):
            try:
                query = self.read_input(value)
            except ValueError as error:
                skips.add(path.name, place, str(error))
            else:
                yield place, query

    def read_image(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        """Inputs from a grayscale image (height, width)."""
        raise ValueError(f"the task {self.name} reads {self._reads()}, not images")

    def read_wav(self, content: bytes) -> NDArray[Any]:
        """Inputs from a WAV file."""
        raise ValueError(f"the task {self.name} reads {self._reads()}, not sound")

    def _reads(self) -> str:
        return {"bytes": "text", "tokens": "text", "image": "images", "wave": "sound"}[self.modality]

    def check_split(self, split: str) -> None:
        """Reject a split that this task does not have."""
        check_choice("split", split, self.splits)


def _texts(path: Path, skips: Skips) -> Iterator[tuple[str, Any]]:
    """Texts with their places, from the column `text` of a table or from the lines of another file."""
    from seqboat.own.tables import check_columns, is_table, read_table

    if is_table(path):
        for number, record in enumerate(read_table(path, skips)):
            if number == 0:
                check_columns(path, record.values, {"text": "--text"})
            yield record.place, record.values["text"]
        return
    require(path.is_file(), f"{path} must be a table or a file with one text per line")
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            yield f"line {number}", line.rstrip("\r\n")


def apply_model(model: nn.Module, kind: Kind, batch: Batch, state: Any = None) -> Any:
    """Run a model of this kind on a batch; a language model continues from `state`."""
    if kind == "match":
        return model(batch.inputs, batch.second, batch.mask, batch.second_mask)
    packed = {} if batch.cu_seqlens is None else {"cu_seqlens": batch.cu_seqlens}
    if kind == "lm":
        return model(batch.inputs, batch.mask, state, **packed)
    return model(batch.inputs, batch.mask, **packed)


def find_borders(starts: Sequence[NDArray[np.int64] | None], time: int) -> Tensor | None:
    """cu_seqlens of a batch, from the tokens that begin a document in each sequence; None if there are none.

    A sequence that begins a document gets an empty one before it, which takes the state of what came before.

    >>> find_borders([np.array([2]), np.array([0, 3])], 4).tolist()
    [0, 2, 4, 4, 7, 8]
    """
    if all(found is None or not len(found) for found in starts):
        return None
    borders = [
        number * time + np.concatenate([[0], [] if found is None else found])
        for number, found in enumerate(starts)
    ]
    return torch.from_numpy(np.concatenate([*borders, [len(starts) * time]]).astype(np.int64))


def _flatten(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    want = tuple(targets.shape)
    got = tuple(logits.shape[:-1])
    require(got == want, f"logits must have the targets' shape {want} and one more axis, got {got}")
    return logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)


def ratio(total: Tensor, count: Tensor) -> Tensor:
    """A metric as `Task.score` gives it: a sum and a count."""
    return torch.stack([total.double(), count.double()])


def check_finite(logits: Tensor) -> None:
    """Refuse an output that says nothing: softmax and argmax would make a class of it."""
    require(bool(logits.isfinite().all()), "the model's output is not finite (NaN or infinite)")


def data_change(known: Mapping[str, Any], found: Mapping[str, Any] | None) -> str | None:
    """What differs between two fingerprints, in words; None if nothing does.

    >>> data_change({"source": "a.csv", "rows": 3, "sha256": "x"}, {"source": "a.csv", "rows": 2, "sha256": "y"})
    'a.csv has 2 rows, it had 3'
    """
    found = found or {}
    source = found.get("source", known.get("source"))
    old, new = known.get("labels"), found.get("labels")
    if old and new and old != new:
        gone, come = [x for x in old if x not in new], [x for x in new if x not in old]
        change = (
            f"without {short(gone[0])}" if gone else f"with {short(come[0])}" if come else "in another order"
        )
        return f"{source} has other classes: {len(new)} {change}, there were {len(old)}"
    if known.get("rows") != found.get("rows"):
        return f"{source} has {found.get('rows')} rows, it had {known.get('rows')}"
    return None if known.get("sha256") == found.get("sha256") else f"the content of {source} has changed"


class Subset(Dataset):
    """Some examples of a dataset, by index."""

    def __init__(self, whole: Dataset, numbers: NDArray[np.integer]) -> None:
        self.whole = whole
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Example:
        return self.whole[int(self.numbers[index])]

    def lengths(self) -> NDArray[np.integer]:
        return self.whole.lengths()[self.numbers]


def draw_subset(whole: Dataset, size: int | None) -> Dataset:
    """The whole dataset, or a fixed random sample of `size` examples (files are often sorted)."""
    if size is None or size >= len(whole):
        return whole
    check_positive("subset size", size)
    # small integers, of which there can be tens of millions
    every = np.arange(len(whole), dtype=np.int32 if len(whole) < 2**31 else np.int64)
    numbers = np.random.default_rng(0).permutation(every)[:size]
    return Subset(whole, np.sort(numbers).astype(np.int64))
