"""Predict: answers of a trained run for inputs without labels, in bounded memory.

predictor = Predictor("runs/classify")
predictor.predict(["great film", "a waste"])       # [{"label": "good", "probability": 0.98, ...}, ...]
for answer in predictor.stream("new.csv"): ...     # any table or folder, row by row
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqboat.core.checks import check_positive, require
from seqboat.core.mixer import Routing
from seqboat.data.store import Skips
from seqboat.run import Run
from seqboat.tasks.task import Example, Unlabeled, apply_model

CHUNK_BATCHES = 32
"""Batches that are read before they are sorted by length and computed."""
CHUNK_TOKENS = 1 << 22
"""Tokens after which a chunk ends, however few its records are."""


class _Waiting(NamedTuple):
    """A record that waits for its answer: an input, or what is wrong with it."""

    place: str
    query: Unlabeled | None
    error: str | None = None


class _Collected(Skips):
    """Bad records in the order in which they are met; none is too many."""

    def __init__(self) -> None:
        super().__init__(most=1.0)
        self.waiting: list[_Waiting] = []

    def add(self, file: object, record: object, reason: str) -> None:
        super().add(file, record, reason)
        self.waiting.append(_Waiting(str(record), None, reason))


class Predictor:
    """Answers of a trained run of any task with labels, numbers or tags; language models generate instead.

    Args:
        run: its folder, one checkpoint in it, or a `Run`.
        which: "best" or "latest" checkpoint.
        batch_size: inputs at a time; by default as many as in the run's evaluation.
        device: where to compute; the CPU by default.
        fields: changes to the data, written as the arguments `--data.FIELD=value`: other names of columns.
    """

    def __init__(
        self,
        run: Run | Path | str,
        which: str = "best",
        *,
        batch_size: int | None = None,
        device: torch.device | str = "cpu",
        fields: Sequence[str] = (),
    ) -> None:
        self.run = run if isinstance(run, Run) else Run(run, which, fields)
        task = self.run.task
        require(
            task.kind != "lm",
            f"{self.run} must be a run of a task with labels, numbers or tags to predict, got the language model of "
            f"the task {task.name}: seqboat generate continues texts",
        )
        self.task = task
        if batch_size is not None:
            check_positive("batch_size", batch_size)
        self.batch_size = batch_size or self.run.config.evaluation.batch_size
        self.device = torch.device(device)
        self.model = self.run.model.to(self.device)

    def columns(self, probabilities: bool, activation: bool) -> list[str]:
        """Names of the fields of flat answers, whatever the first one is."""
        labels = self.task.labels if probabilities and self.task.kind != "tag" else None
        each = [f"p({label})" for label in labels or ()]
        return ["row", *self.task.said, *each, *(["activation"] if activation else []), "error"]

    def predict(self, inputs: Iterable[Any], *, activation: bool = False) -> list[dict[str, Any]]:
        """Answers for inputs in memory.

        Args:
            inputs: texts, or series as lists or arrays of numbers; mappings by column name where an input has
                several columns.
            activation: whether to say which fraction of the tokens attended, averaged over the layers.
        """
        return list(self._answers(self._read(inputs), activation))

    def stream(self, path: Path | str, *, activation: bool = False) -> Iterator[dict[str, Any]]:
        """Answers for the rows of a table or the files of a folder, in their order; bad ones have an "error"."""
        return self._answers(self._records(Path(path)), activation)

    def _read(self, inputs: Iterable[Any]) -> Iterator[_Waiting]:
        require(not isinstance(inputs, str | bytes), "inputs must be a list of texts, got one text")
        for number, value in enumerate(inputs):
            yield _Waiting(str(number), self.task.read_input(_plain(value)))

    def _records(self, path: Path) -> Iterator[_Waiting]:
        require(path.exists(), f"{path} does not exist: expected a table, or a folder of files")
        bad = _Collected()
        for place, query in self.task.read_inputs(path, bad):
            yield from bad.waiting
            bad.waiting.clear()
            yield _Waiting(place, query)
        yield from bad.waiting

    def _answers(self, records: Iterable[_Waiting], activation: bool) -> Iterator[dict[str, Any]]:
        chunk: list[_Waiting] = []
        tokens = 0
        for record in records:
            chunk.append(record)
            tokens += 0 if record.query is None else len(record.query.inputs)
            if len(chunk) >= CHUNK_BATCHES * self.batch_size or tokens >= CHUNK_TOKENS:
                yield from self._answer(chunk, activation)
                chunk, tokens = [], 0
        yield from self._answer(chunk, activation)

    @torch.no_grad()
    def _answer(self, chunk: list[_Waiting], activation: bool) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"row": record.place, "error": record.error} for record in chunk]
        good = [(i, record.query) for i, record in enumerate(chunk) if record.query is not None]
        good.sort(key=lambda pair: len(pair[1].inputs))
        for start in range(0, len(good), self.batch_size):
            numbers, queries = zip(*good[start : start + self.batch_size], strict=True)
            for number, answer in zip(numbers, self._batch(queries, activation), strict=True):
                found[number] = {"row": chunk[number].place, **answer}
        return found

    def _batch(self, queries: Sequence[Unlabeled], activation: bool) -> list[dict[str, Any]]:
        task = self.task
        examples = [Example(np.asarray(query.inputs), 0, query.second) for query in queries]
        batch = task.collate_inputs(examples).to(self.device)
        output = apply_model(self.model, task.kind, batch)
        answers = []
        rates = activation_of(output.routings, batch.mask, len(queries)) if activation else None
        for i, query in enumerate(queries):
            logits = output.logits[i]
            if task.kind == "tag":
                logits = logits[: len(query.inputs)]
            try:
                answer = task.answer(logits, query.text)
            except ValueError as error:
                answer = {"error": str(error)}
            if rates is not None and "error" not in answer:
                answer["activation"] = rates[i]
            answers.append(answer)
        return answers


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists, which inputs read."""
    return value.tolist() if isinstance(value, np.ndarray | Tensor) else value


def activation_of(routings: Sequence[Routing | None], mask: Tensor | None, rows: int) -> list[float | None]:
    """Fraction of the tokens of each sequence that attended, averaged over layers; None without routers.

    Of pairs, only the first sequences count.
    """
    rates = []
    for routing in routings:
        if routing is None or routing.active.shape[0] != rows:
            continue
        active = routing.active.double()
        active = active if active.dim() == 2 else active.mean(dim=-1)
        if mask is not None and mask.shape == active.shape:
            rates.append((active * mask).sum(dim=1) / mask.sum(dim=1).clamp_min(1))
        elif mask is None:
            rates.append(active.mean(dim=1))
    if not rates:
        return [None] * rows
    return [float(rate) for rate in torch.stack(rates).mean(dim=0)]
