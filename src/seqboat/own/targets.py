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
from seqboat.own.inputs import Facts
from seqboat.tasks.task import Example, Kind, Loss, ratio

if TYPE_CHECKING:
    from seqboat.own.task import OwnTaskConfig

MAX_CLASSES = 1000
"""Largest number of classes; more distinct labels suggest the wrong column."""
MAX_LABEL = 1000
"""Characters of a label."""
MAX_NUMBER = 1e150
"""Largest size of a number to predict: its square must be a number, too."""


class Target(ABC):
    """What is learned.

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
    def read(self, values: Mapping[str, Any]) -> Any:
        """The target of a record; a ValueError says what is wrong with it."""

    def check(self, values: Sequence[Any], places: Sequence[str], facts: Facts, path: str) -> None:  # noqa: B027
        """Refuse a table whose targets a model with these facts does not know."""

    @abstractmethod
    def measure(self, values: Sequence[Any], path: str) -> Facts:
        """Facts about training rows."""

    def outputs(self, facts: Facts) -> int:
        """Outputs of the model, for each sequence or token."""
        return len(facts["labels"])

    @abstractmethod
    def encode(self, value: Any, facts: Facts, length: int) -> NDArray[Any] | int:
        """The target of an example of `length` tokens, as numbers."""

    def collate(self, examples: Sequence[Example], time: int) -> Tensor:
        """The targets of a batch."""
        return torch.tensor(np.stack([np.asarray(example.target) for example in examples]))

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor, facts: Facts) -> Loss:
        """Summed over what is scored."""

    @abstractmethod
    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(batch,): the loss of each row, without weights of classes."""

    @abstractmethod
    def each(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(batch,): how good each answer is by the metric, for differences: 1 for right, or a squared error."""

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
    require(not (isinstance(value, float) and math.isnan(value)), "empty label (NaN)")
    try:
        label = "" if value is None else str(value).encode("utf-8", "replace").decode().strip()
    except ValueError:
        raise ValueError("a number of too many digits") from None
    require(label != "", "empty label")
    require(len(label) <= MAX_LABEL, f"a label of {len(label):,} characters")
    return label


def label_order(label: str) -> tuple[int, float, str]:
    """Numbers before words, each in their own order."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


class Labeled(Target):
    """A target made of labels."""

    least: ClassVar[int] = 2
    """Different labels that there must be."""

    @abstractmethod
    def named(self, value: Any) -> Sequence[str]:
        """The labels of a target."""

    def check(self, values: Sequence[Any], places: Sequence[str], facts: Facts, path: str) -> None:
        known = set(facts["labels"])
        for value, place in zip(values, places, strict=True):
            for label in self.named(value):
                require(
                    label in known,
                    f"{path}, {place}: label {label!r} is not among those of training: "
                    f"{', '.join(facts['labels'][:20])}",
                )

    def measure(self, values: Sequence[Any], path: str) -> Facts:
        counts: dict[str, int] = {}
        for value in values:
            for label in self.named(value):
                counts[label] = counts.get(label, 0) + 1
        column = f"{path}: column {self.config.label_column!r}"
        only = f": {next(iter(counts))!r}" if len(counts) == 1 else ""
        require(
            self.least <= len(counts),
            f"{column} must have at least {self.least} different labels, got {len(counts)}{only} "
            "(--target names another column)",
        )
        require(
            len(counts) <= MAX_CLASSES,
            f"{column} must have at most {MAX_CLASSES:,} different labels, got {len(counts):,}: name another column "
            "(--target), or learn numbers (--set task=regress)",
        )
        labels = sorted(counts, key=label_order)
        return {"labels": labels, "counts": [counts[label] for label in labels]}


class ClassTarget(Labeled):
    """One class.

    Args:
        config: of the task.
        weights: of classes in the loss: "balanced", numbers by label, or None.
    """

    said = ("label", "probability")

    def __init__(self, config: OwnTaskConfig, weights: str | Mapping[str, float] | None = None) -> None:
        super().__init__(config)
        self.weights = weights

    def read(self, values: Mapping[str, Any]) -> str:
        return read_label(values.get(self.config.label_column))

    def named(self, value: Any) -> Sequence[str]:
        return (value,)

    def measure(self, values: Sequence[Any], path: str) -> Facts:
        facts = super().measure(values, path)
        counts = np.array(facts["counts"])
        if self.weights == "balanced":
            facts["weights"] = (counts.sum() / (len(counts) * np.maximum(counts, 1))).tolist()
        elif isinstance(self.weights, Mapping):
            facts["weights"] = [float(self.weights.get(label, 1.0)) for label in facts["labels"]]
        return facts

    def encode(self, value: Any, facts: Facts, length: int) -> int:
        return int(facts["labels"].index(value))

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

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="none")

    def each(self, logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.argmax(dim=-1) == targets).double()

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

    def read(self, values: Mapping[str, Any]) -> list[str]:
        value = values.get(self.config.label_column)
        if isinstance(value, list | tuple):
            return [read_label(label) for label in dict.fromkeys(value)]
        words = [] if value is None else str(value).split(self.separator)
        return [read_label(word) for word in dict.fromkeys(words) if word.strip()]

    def named(self, value: Any) -> Sequence[str]:
        return list(value)

    def encode(self, value: Any, facts: Facts, length: int) -> NDArray[np.float32]:
        return np.array([label in value for label in facts["labels"]], np.float32)

    def loss(self, logits: Tensor, targets: Tensor, facts: Facts) -> Loss:
        each = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")
        return Loss(each.mean(dim=-1).sum(), torch.tensor(len(targets), device=targets.device))

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")
        return each.mean(dim=-1)

    def each(self, logits: Tensor, targets: Tensor) -> Tensor:
        return ((logits > 0) == (targets > 0.5)).double().mean(dim=-1)

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

    def read(self, values: Mapping[str, Any]) -> float:
        value = values.get(self.config.label_column)
        return read_target_number(value)

    def measure(self, values: Sequence[Any], path: str) -> Facts:
        numbers = np.asarray(values, np.float64)
        std = float(numbers.std())
        return {"target_mean": float(numbers.mean()), "target_std": std if std > 0 else 1.0}

    def outputs(self, facts: Facts) -> int:
        return 1

    def encode(self, value: Any, facts: Facts, length: int) -> NDArray[np.float32]:
        return np.array((value - facts["target_mean"]) / facts["target_std"], np.float32)

    def loss(self, logits: Tensor, targets: Tensor, facts: Facts) -> Loss:
        total = F.mse_loss(logits[:, 0], targets.to(logits.dtype), reduction="sum")
        return Loss(total, torch.tensor(len(targets), device=targets.device))

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return (logits[:, 0] - targets.to(logits.dtype)).square()

    def each(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.losses(logits.double(), targets)

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


def read_target_number(value: Any) -> float:
    """A number to predict; a ValueError says why it is none."""
    require(value is not None and str(value)[:99].strip() != "", "empty label")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise ValueError(f"not a number: {str(value)[:40]!r}") from None
    require(not math.isnan(number), "empty label (NaN)")
    require(
        abs(number) <= MAX_NUMBER,
        f"a number must be between -{MAX_NUMBER:g} and {MAX_NUMBER:g}, got {str(value)[:40]}",
    )
    return number
