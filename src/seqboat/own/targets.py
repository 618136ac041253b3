"""Targets: what a model learns about a record, how it is scored, and how its output becomes an answer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from seqboat.core.checks import require
from seqboat.data.store import ArrayStore, RaggedWriter, Staging
from seqboat.data.tables import MAX_LABEL
from seqboat.own.inputs import Facts
from seqboat.tasks.stored import ragged
from seqboat.tasks.task import Example, Kind, Loss, ratio

if TYPE_CHECKING:
    from seqboat.own.task import OwnTaskConfig

MAX_CLASSES = 1000
"""Largest number of classes; more distinct labels suggest the wrong column."""
COUNTED_LABELS = 100_000
"""Distinct labels to count before giving up on a table."""


class Target(ABC):
    """What is learned. One object writes the targets of a table, or serves those of a task.

    Args:
        config: of the task.
    """

    kind: ClassVar[Kind] = "classify"
    metric: ClassVar[str] = "accuracy"
    better: ClassVar[Literal["higher", "lower"]] = "higher"
    said: ClassVar[tuple[str, ...]]
    """Fields of an answer, besides the probabilities of labels."""

    def __init__(self, config: OwnTaskConfig) -> None:
        self.config = config

    @abstractmethod
    def read(self, values: Mapping[str, Any], stored: NDArray[Any]) -> Any:
        """The target of a record whose stored input is given; a ValueError says what is wrong with it."""

    @abstractmethod
    def open(self, staging: Staging) -> None:
        """Make room for the targets of a table."""

    @abstractmethod
    def append(self, value: Any, line: int) -> None:
        """Add one."""

    def close(self) -> Facts:
        """Write what is waiting; returns what the table's manifest should know."""
        return {}

    def check(self, store: ArrayStore, facts: Facts, path: str) -> None:  # noqa: B027 - numbers are never unknown
        """Refuse a table whose targets a model with these facts does not know."""

    @abstractmethod
    def measure(self, store: ArrayStore, rows: NDArray[np.integer], path: str) -> Facts:
        """Facts about training rows."""

    def outputs(self, facts: Facts) -> int:
        """Outputs of the model, for each sequence or token."""
        return len(facts["labels"])

    @abstractmethod
    def encode(self, store: ArrayStore, facts: Facts, index: int, length: int) -> NDArray[Any] | int:
        """The target of an example, as numbers."""

    def collate(self, examples: Sequence[Example], time: int) -> Tensor:
        """The targets of a batch."""
        return torch.tensor(np.stack([np.asarray(example.target) for example in examples]))

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor, facts: Facts) -> Loss:
        """Summed over what is scored."""

    @abstractmethod
    def score(self, logits: Tensor, targets: Tensor, facts: Facts) -> dict[str, Tensor]:
        """Sums and counts, without the loss."""

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Final metrics from mean scores."""
        return means

    @abstractmethod
    def answer(self, logits: Tensor, facts: Facts) -> dict[str, Any]:
        """What a model says about one sequence, in plain values."""

    def say(self, answer: dict[str, Any]) -> str | None:
        """An answer as text, unless it is a single class."""
        return None

    @abstractmethod
    def spell(self, target: NDArray[Any] | int, facts: Facts) -> str:
        """A target as text, for people."""


def read_label(value: Any) -> str:
    """A label as text."""
    require(not isinstance(value, dict | list), "a label must be a word or a number")
    label = "" if value is None else str(value).encode("utf-8", "replace").decode().strip()
    require(label != "", "empty label")
    require(len(label) <= MAX_LABEL, f"a label of {len(label):,} characters")
    return label


def label_order(label: str) -> tuple[int, float, str]:
    """Numbers before words, each in their own order."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


def too_many_labels(count: str) -> str:
    """What is wrong with a column of too many different labels, and what to do."""
    return (
        f"must have at most {MAX_CLASSES:,} different labels, got {count}: name another column "
        "(--data.label_column), or learn numbers with `seqboat train regress`"
    )


class _Names:
    """Labels, numbered in the order in which they are met."""

    def __init__(self, config: OwnTaskConfig) -> None:
        self.config = config
        self.numbers: dict[str, int] = {}
        self.lines: dict[str, int] = {}

    def number(self, label: str, line: int) -> int:
        if label not in self.numbers:
            require(
                len(self.numbers) < COUNTED_LABELS,
                f"column {self.config.label_column!r} {too_many_labels(f'more than {COUNTED_LABELS:,}')}",
            )
            self.numbers[label] = len(self.numbers)
            self.lines[label] = line
        return self.numbers[label]


class Labeled(Target):
    """A target made of labels, which a table's manifest lists by number, with the line of the first of each."""

    least: ClassVar[int] = 2
    """Different labels that there must be."""

    def open(self, staging: Staging) -> None:
        self._names = _Names(self.config)

    def close(self) -> Facts:
        return {"labels": [[label, line] for label, line in self._names.lines.items()]}

    def check(self, store: ArrayStore, facts: Facts, path: str) -> None:
        for label, line in store.manifest["extra"]["labels"]:
            require(
                label in facts["labels"],
                f"{path}, line {line}: label {label!r} is not among those of {self.config.train}: "
                f"{', '.join(facts['labels'][:20])}",
            )

    def measure(self, store: ArrayStore, rows: NDArray[np.integer], path: str) -> Facts:
        labels = [label for label, _ in store.manifest["extra"]["labels"]]
        column = f"{path}: column {self.config.label_column!r}"
        only = f": {labels[0]!r}" if len(labels) == 1 else ""
        require(
            self.least <= len(labels),
            f"{column} must have at least {self.least} different labels, got {len(labels)}{only} "
            "(--data.label_column names another column)",
        )
        require(len(labels) <= MAX_CLASSES, f"{column} {too_many_labels(f'{len(labels):,}')}")
        return {"labels": sorted(labels, key=label_order)}

    def classes(self, store: ArrayStore, facts: Facts) -> NDArray[np.int64]:
        """The class of each label number of a store."""
        key = (str(store.folder), tuple(facts["labels"]))
        if getattr(self, "_classes", (None, None))[0] != key:
            places = {label: place for place, label in enumerate(facts["labels"])}
            found = np.array([places[label] for label, _ in store.manifest["extra"]["labels"]], np.int64)
            self._classes = (key, found)
        return self._classes[1]


class ClassTarget(Labeled):
    """One class.

    Args:
        config: of the task.
        balanced: whether rare classes count more in the loss.
    """

    said = ("label", "probability")

    def __init__(self, config: OwnTaskConfig, balanced: bool = False) -> None:
        super().__init__(config)
        self.balanced = balanced

    def read(self, values: Mapping[str, Any], stored: NDArray[Any]) -> str:
        return read_label(values.get(self.config.label_column))

    def open(self, staging: Staging) -> None:
        super().open(staging)
        self._array = staging.array("labels", np.uint32)
        self._waiting: list[int] = []

    def append(self, value: Any, line: int) -> None:
        self._waiting.append(self._names.number(value, line))
        if len(self._waiting) == 4096:
            self._flush()

    def _flush(self) -> None:
        self._array.append(np.array(self._waiting, np.uint32))
        self._waiting.clear()

    def close(self) -> Facts:
        self._flush()
        return super().close()

    def measure(self, store: ArrayStore, rows: NDArray[np.integer], path: str) -> Facts:
        facts = super().measure(store, rows, path)
        counts = np.bincount(
            self.classes(store, facts)[store["labels"][rows]], minlength=len(facts["labels"])
        )
        facts["counts"] = counts.tolist()
        if self.balanced:
            facts["weights"] = (counts.sum() / (len(counts) * np.maximum(counts, 1))).tolist()
        return facts

    def encode(self, store: ArrayStore, facts: Facts, index: int, length: int) -> int:
        return int(self.classes(store, facts)[store["labels"][index]])

    def collate(self, examples: Sequence[Example], time: int) -> Tensor:
        return torch.tensor([int(example.target) for example in examples], dtype=torch.int64)

    def loss(self, logits: Tensor, targets: Tensor, facts: Facts) -> Loss:
        weights = facts.get("weights")
        if weights is None:
            return Loss(F.cross_entropy(logits, targets, reduction="sum"), targets.new_tensor(len(targets)))
        weight = logits.new_tensor(weights)
        return Loss(
            F.cross_entropy(logits, targets, weight=weight, reduction="sum"), weight[targets].sum().detach()
        )

    def score(self, logits: Tensor, targets: Tensor, facts: Facts) -> dict[str, Tensor]:
        right = (logits.argmax(dim=-1) == targets).sum()
        return {"accuracy": ratio(right, targets.new_tensor(len(targets)))}

    def answer(self, logits: Tensor, facts: Facts) -> dict[str, Any]:
        probs = logits.double().softmax(dim=-1)
        best = int(probs.argmax())
        return {
            "label": facts["labels"][best],
            "probability": float(probs[best]),
            "probabilities": dict(zip(facts["labels"], probs.tolist(), strict=True)),
        }

    def spell(self, target: NDArray[Any] | int, facts: Facts) -> str:
        return f"{int(target)} ({facts['labels'][int(target)]})"


class LabelsTarget(Labeled):
    """Any number of labels, each there or not.

    Args:
        config: of the task.
        separator: between the labels of a field.
    """

    metric = "f1"
    said = ("labels",)
    least = 1

    def __init__(self, config: OwnTaskConfig, separator: str) -> None:
        super().__init__(config)
        self.separator = separator

    def read(self, values: Mapping[str, Any], stored: NDArray[Any]) -> list[str]:
        value = values.get(self.config.label_column)
        if isinstance(value, list | tuple):
            return [read_label(label) for label in dict.fromkeys(value)]
        words = [] if value is None else str(value).split(self.separator)
        return [read_label(word) for word in dict.fromkeys(words) if word.strip()]

    def open(self, staging: Staging) -> None:
        super().open(staging)
        self._sets = RaggedWriter(staging, "labels", np.uint32)

    def append(self, value: Any, line: int) -> None:
        self._sets.append(np.array([self._names.number(label, line) for label in value], np.uint32))

    def encode(self, store: ArrayStore, facts: Facts, index: int, length: int) -> NDArray[np.float32]:
        there = np.zeros(len(facts["labels"]), np.float32)
        there[self.classes(store, facts)[ragged(store, "labels", index, MAX_CLASSES)]] = 1
        return there

    def loss(self, logits: Tensor, targets: Tensor, facts: Facts) -> Loss:
        each = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")
        return Loss(each.mean(dim=-1).sum(), torch.tensor(len(targets), device=targets.device))

    def score(self, logits: Tensor, targets: Tensor, facts: Facts) -> dict[str, Tensor]:
        said, wanted = logits > 0, targets > 0.5
        both = 2 * (said & wanted).sum()
        right = (said == wanted).all(dim=-1).sum()
        count = torch.tensor(len(targets), device=targets.device)
        return {"f1": ratio(both, said.sum() + wanted.sum()), "exact": ratio(right, count)}

    def answer(self, logits: Tensor, facts: Facts) -> dict[str, Any]:
        probs = logits.double().sigmoid().tolist()
        pairs = zip(facts["labels"], probs, strict=True)
        return {
            "labels": [label for label, p in pairs if p > 0.5],
            "probabilities": dict(zip(facts["labels"], probs, strict=True)),
        }

    def say(self, answer: dict[str, Any]) -> str:
        found = [f"{label} ({answer['probabilities'][label]:.0%})" for label in answer["labels"]]
        return ", ".join(found) or "no label"

    def spell(self, target: NDArray[Any] | int, facts: Facts) -> str:
        found = [label for label, there in zip(facts["labels"], np.asarray(target), strict=True) if there]
        return ", ".join(found) or "no label"


class NumberTarget(Target):
    """A number; learned in units of the training rows' standard deviation, scored in its own."""

    metric = "rmse"
    better = "lower"
    said = ("value",)

    def read(self, values: Mapping[str, Any], stored: NDArray[Any]) -> float:
        value = values.get(self.config.label_column)
        require(value is not None and str(value).strip() != "", "empty label")
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ValueError(f"not a number: {str(value)[:40]!r}") from None
        require(math.isfinite(number), f"not a finite number: {str(value)[:40]!r}")
        return number

    def open(self, staging: Staging) -> None:
        self._array = staging.array("numbers", np.float64)
        self._waiting: list[float] = []

    def append(self, value: Any, line: int) -> None:
        self._waiting.append(value)
        if len(self._waiting) == 4096:
            self._flush()

    def _flush(self) -> None:
        self._array.append(np.array(self._waiting, np.float64))
        self._waiting.clear()

    def close(self) -> Facts:
        self._flush()
        return {}

    def measure(self, store: ArrayStore, rows: NDArray[np.integer], path: str) -> Facts:
        numbers = np.asarray(store["numbers"][rows], np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = float(numbers.mean()), float(numbers.std())
        largest = float(np.abs(numbers).max(initial=0))
        require(
            math.isfinite(mean) and math.isfinite(std),
            f"{path}: {self.config.label_column} holds {largest:g}: a mean of such numbers is not finite; learn "
            "smaller ones, such as their logarithms",
        )
        return {"target_mean": mean, "target_std": std or 1.0}

    def outputs(self, facts: Facts) -> int:
        return 1

    def encode(self, store: ArrayStore, facts: Facts, index: int, length: int) -> NDArray[np.float32]:
        number = float(store["numbers"][index])
        return np.array((number - facts["target_mean"]) / facts["target_std"], np.float32)

    def loss(self, logits: Tensor, targets: Tensor, facts: Facts) -> Loss:
        total = F.mse_loss(logits[:, 0], targets.to(logits.dtype), reduction="sum")
        return Loss(total, torch.tensor(len(targets), device=targets.device))

    def score(self, logits: Tensor, targets: Tensor, facts: Facts) -> dict[str, Tensor]:
        std = facts["target_std"]
        wanted = targets.double()
        error = (logits[:, 0].double() - wanted) * std
        count = torch.tensor(len(targets), device=targets.device)
        return {
            "rmse": ratio(error.square().sum(), count),
            "mae": ratio(error.abs().sum(), count),
            "mean": ratio(std * wanted.sum(), count),
            "square": ratio(std**2 * wanted.square().sum(), count),
        }

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        variance = means.pop("square") - means.pop("mean") ** 2
        error = means["rmse"]
        means["rmse"] = math.sqrt(error)
        means["r2"] = 1 - error / variance if variance > 0 else math.nan
        return means

    def answer(self, logits: Tensor, facts: Facts) -> dict[str, Any]:
        return {"value": float(logits[0].double()) * facts["target_std"] + facts["target_mean"]}

    def say(self, answer: dict[str, Any]) -> str:
        return f"{answer['value']:.6g}"

    def spell(self, target: NDArray[Any] | int, facts: Facts) -> str:
        return f"{float(target) * facts['target_std'] + facts['target_mean']:g}"
