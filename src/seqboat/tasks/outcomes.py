"""Which answers of a model were right and wrong: scores of every class, confusions, and the worst errors."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqboat.tasks.task import IGNORE, Batch, Task

WORST = 10
"""Errors to keep."""
MATRIX = 50
"""Classes up to which the whole confusion matrix is kept."""
CONFUSED = 10
"""Pairs of confused classes to keep."""


class Outcomes:
    """Collects the answers of an evaluation, batch by batch.

    Args:
        task: scores and spells; a language model has no outcomes.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.seen = 0
        self._pairs: NDArray[np.int64] | None = None
        """(labels, predictions): how often"""
        self._hits: NDArray[np.int64] | None = None
        """(labels, 3): right, predicted, wanted, for labels that are each there or not"""
        self._worst: list[tuple[float, int, dict[str, Any]]] = []

    @torch.no_grad()
    def add(self, numbers: Sequence[int], batch: Batch, logits: Tensor) -> None:
        """Add a batch.

        Args:
            numbers: of its examples.
            batch: with targets.
            logits: the model's output.
        """
        if self.task.kind == "lm":
            return
        logits, targets = logits.float().cpu(), batch.targets.cpu()
        if self.task.kind == "tag":
            self._add_tags(numbers, batch, logits, targets)
        elif not targets.is_floating_point():
            self._add_classes(numbers, batch, logits, targets)
        elif targets.dim() == 2:
            self._add_labels(numbers, batch, logits, targets)
        else:
            self._add_numbers(numbers, batch, logits, targets)
        self.seen += len(numbers)

    def result(self) -> dict[str, Any]:
        """What was collected, as plain data.

        `classes` has precision, recall, F1 and counts of each class; `confusion` counts labels (rows) by predictions
        (columns), None if there are too many; `confused` lists the most frequent confusions; `worst` lists the worst
        errors.
        """
        found: dict[str, Any] = {}
        if self._pairs is not None:
            right = np.diagonal(self._pairs)
            found["classes"] = self._classes(right, self._pairs.sum(axis=0), self._pairs.sum(axis=1))
            found["confusion"] = self._pairs.tolist() if len(self._pairs) <= MATRIX else None
            found["confused"] = self._confused(self._pairs)
        elif self._hits is not None:
            found["classes"] = self._classes(*self._hits.T)
        if self.seen:
            found["worst"] = [entry for _, _, entry in sorted(self._worst, key=lambda e: (-e[0], -e[1]))]
        return found

    def name(self, label: int) -> str:
        """The name of a class."""
        return self.task.labels[label] if self.task.labels else str(label)

    def _classes(
        self, right: NDArray[np.int64], predicted: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> list[dict[str, Any]]:
        rows = []
        for label, (hits, said, there) in enumerate(zip(right, predicted, wanted, strict=True)):
            rows.append(
                {
                    "label": self.name(label),
                    "precision": float(hits / said) if said else None,
                    "recall": float(hits / there) if there else None,
                    "f1": float(2 * hits / (said + there)) if said + there else None,
                    "count": int(there),
                    "predicted": int(said),
                }
            )
        return rows

    def _confused(self, pairs: NDArray[np.int64]) -> list[dict[str, Any]]:
        wrong = pairs - np.diag(np.diagonal(pairs))
        order = np.argsort(-wrong, axis=None, kind="stable")[:CONFUSED]
        places = [(int(i) // len(pairs), int(i) % len(pairs)) for i in order]
        return [
            {"label": self.name(a), "predicted": self.name(b), "count": int(wrong[a, b])}
            for a, b in places
            if wrong[a, b]
        ]

    def _count(self, labels: Tensor, predictions: Tensor, classes: int) -> None:
        if self._pairs is None:
            self._pairs = np.zeros((classes, classes), np.int64)
        cells = (labels * classes + predictions).numpy()
        self._pairs += np.bincount(cells, minlength=classes**2).reshape(classes, classes)

    def _keep(self, badness: float, number: int, batch: Batch, row: int, entry: dict[str, Any]) -> None:
        """Keep one of the worst errors; only then is its input spelled."""
        # the earlier of two equally bad ones stays
        rank = (badness, -number)
        if len(self._worst) == WORST and rank <= self._worst[0][:2]:
            return
        entry = {"example": number, **entry, "input": self._excerpt(batch, row)}
        if len(self._worst) == WORST:
            heapq.heapreplace(self._worst, (*rank, entry))
        else:
            heapq.heappush(self._worst, (*rank, entry))

    def _excerpt(self, batch: Batch, row: int) -> str:
        parts = [(batch.inputs, batch.mask)]
        if batch.second is not None:
            parts.append((batch.second, batch.second_mask))
        shown = []
        for inputs, mask in parts:
            length = inputs.shape[1] if mask is None else int(mask[row].sum())
            shown.append(self.task.excerpt(inputs[row, :length].cpu().numpy()))
        return " | ".join(shown)

    def _add_classes(self, numbers: Sequence[int], batch: Batch, logits: Tensor, targets: Tensor) -> None:
        probs = logits.double().softmax(dim=-1)
        best, said = probs.max(dim=-1)
        real = targets != IGNORE
        self._count(targets[real], said[real], logits.shape[-1])
        for row in torch.nonzero(real & (said != targets)).flatten().tolist():
            label = int(targets[row])
            chance = float(probs[row, label])
            entry = {
                "label": self.name(label),
                "predicted": self.name(int(said[row])),
                "probability": float(best[row]),
                "label_probability": chance,
            }
            self._keep(-chance, numbers[row], batch, row, entry)

    def _add_labels(self, numbers: Sequence[int], batch: Batch, logits: Tensor, targets: Tensor) -> None:
        said, wanted = logits > 0, targets > 0.5
        hits = torch.stack([(said & wanted).sum(0), said.sum(0), wanted.sum(0)], dim=1).numpy()
        self._hits = hits if self._hits is None else self._hits + hits
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits.double(), targets.double(), reduction="none"
        )
        for row in torch.nonzero((said != wanted).any(dim=1)).flatten().tolist():
            entry = {"label": self._names(wanted[row]), "predicted": self._names(said[row])}
            self._keep(float(loss[row].sum()), numbers[row], batch, row, entry)

    def _names(self, there: Tensor) -> str:
        return ", ".join(self.name(i) for i in torch.nonzero(there).flatten().tolist()) or "no label"

    def _add_numbers(self, numbers: Sequence[int], batch: Batch, logits: Tensor, targets: Tensor) -> None:
        facts = self.task.facts or {}
        mean, std = facts.get("target_mean", 0.0), facts.get("target_std", 1.0)
        for row, number in enumerate(numbers):
            wanted, said = (float(v[row]) * std + mean for v in (targets, logits[:, 0]))
            entry = {"label": number_text(wanted, std), "predicted": number_text(said, std)}
            self._keep(abs(said - wanted), number, batch, row, entry)

    def _add_tags(self, numbers: Sequence[int], batch: Batch, logits: Tensor, targets: Tensor) -> None:
        said, real = logits.argmax(dim=-1), targets != IGNORE
        self._count(targets[real], said[real], logits.shape[-1])
        wrong = ((said != targets) & real).sum(dim=1).tolist()
        for row, number in enumerate(numbers):
            if wrong[row]:
                text = f"{wrong[row]:,} of {int(real[row].sum()):,} tags wrong"
                self._keep(wrong[row], number, batch, row, {"label": None, "predicted": text})


def number_text(value: float, std: float) -> str:
    """A number with the digits that matter among numbers of this standard deviation.

    >>> number_text(-6.6e-07, 57.4), number_text(1234.56789, 57.4)
    ('0', '1234.57')
    """
    return f"{round(value, 3 - math.floor(math.log10(std))) + 0.0:.9g}"


def macro_f1(classes: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean F1 of the classes that occur; None if none does."""
    found = [row["f1"] for row in classes if row["f1"] is not None]
    return sum(found) / len(found) if found else None
