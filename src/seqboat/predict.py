"""Predict: answers of a trained model for inputs without labels, in bounded memory.

predictor = Predictor("runs/classify")
predictor.predict(["great film", "a waste"])       # [{"label": "good", "probability": 0.98, ...}, ...]
for values, answer in predictor.stream("new.csv"): ...     # any table or folder, row by row, with its columns
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.mixer import Routing
from seqboat.data.store import Skips
from seqboat.run import Run
from seqboat.tasks.task import Example, Task, Unlabeled, apply_model

CHUNK_BATCHES = 32
"""Batches that are read before they are sorted by length and computed."""
CHUNK_TOKENS = 1 << 22
"""Tokens after which a chunk ends, however few its records are."""

NUMBER = "input_row"
"""Column of answers in parts: the number of the row in the input, from 0."""


class _Waiting(NamedTuple):
    """A record that waits for its answer: an input, or what is wrong with it."""

    values: Mapping[str, Any]
    query: Unlabeled | None
    error: str | None = None


class _Collected(Skips):
    """Bad records in the order in which they are met; none is too many."""

    def __init__(self) -> None:
        super().__init__(most=1.0)
        self.waiting: list[_Waiting] = []

    def add(self, file: object, record: object, reason: str) -> None:
        super().add(file, record, reason)
        self.waiting.append(_Waiting({}, None, f"{record}: {reason}"))


class Predictor:
    """Answers of a trained model of any task with labels, numbers or tags; language models generate instead.

    Args:
        run: its folder, one checkpoint in it, a `Run`, or a task and its model.
        which: "best" or "latest" checkpoint.
        batch_size: inputs at a time; by default as many as in the run's evaluation.
        device: where to compute; the CPU by default.
        fields: changes to the data, written as the arguments `--data.FIELD=value`: other names of columns.
    """

    def __init__(
        self,
        run: Run | Path | str | tuple[Task, nn.Module],
        which: str = "best",
        *,
        batch_size: int | None = None,
        device: torch.device | str = "cpu",
        fields: Sequence[str] = (),
    ) -> None:
        if isinstance(run, tuple):
            self.task, model = run
            usual = 32
        else:
            found = run if isinstance(run, Run) else Run(run, which, fields)
            self.task = found.task
            require(
                self.task.kind != "lm",
                f"{found} must be a run of a task with labels, numbers or tags to predict, got the language model of "
                f"the task {self.task.name}: seqboat generate continues texts",
            )
            model, usual = found.model, found.config.evaluation.batch_size
        if batch_size is not None:
            check_positive("batch_size", batch_size)
        self.batch_size = batch_size or usual
        self.device = torch.device(device)
        self.model = model.to(self.device)

    def columns(self, probabilities: bool, activation: bool = False) -> list[str]:
        """Names of the fields of flat answers, whatever the first one is."""
        labels = self.task.labels if probabilities and self.task.kind != "tag" else None
        each = [f"p({label})" for label in labels or ()]
        return [*self.task.said, *each, *(["activation"] if activation else []), "cut", "error"]

    def predict(self, inputs: Iterable[Any], *, activation: bool = False) -> list[dict[str, Any]]:
        """Answers for inputs in memory.

        Args:
            inputs: texts, or series as lists or arrays of numbers; mappings by column name where an input has
                several columns.
            activation: whether to say which fraction of the tokens attended, averaged over the layers.
        """
        require(not isinstance(inputs, str | bytes), "inputs must be a list of texts, got one text")
        records = (_Waiting({}, self.task.read_input(_plain(value))) for value in inputs)
        return [answer for _, answer in self._answers(records, activation)]

    def stream(
        self, path: Path | str, *, activation: bool = False, shard: tuple[int, int] | None = None
    ) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
        """The columns and the answer of each row of a table or file of a folder, in order; bad ones have an "error".

        Args:
            path: of the table or folder.
            activation: as in `predict`.
            shard: which of how many equal parts to answer: every n-th record, counted from 0, with its number in
                the column `input_row`.
        """
        records = self._records(Path(path))
        if shard is not None:
            part, parts = shard
            records = (
                _numbered(record, number, path)
                for number, record in enumerate(records)
                if number % parts == part
            )
        return self._answers(records, activation)

    def _records(self, path: Path) -> Iterator[_Waiting]:
        require(path.exists(), f"{path} does not exist: expected a table, or a folder of files")
        bad, task = _Collected(), self.task
        queries = getattr(task, "queries", None)
        found: Iterable[tuple[Mapping[str, Any], Unlabeled]]
        if queries is not None:
            found = ((record.values, query) for record, query in queries(path, bad))
        else:
            found = (({"row": place}, query) for place, query in task.read_inputs(path, bad))
        for values, query in found:
            yield from bad.waiting
            bad.waiting.clear()
            yield _Waiting(values, query)
        yield from bad.waiting

    def _answers(
        self, records: Iterable[_Waiting], activation: bool
    ) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
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
    def _answer(
        self, chunk: list[_Waiting], activation: bool
    ) -> list[tuple[Mapping[str, Any], dict[str, Any]]]:
        found: list[dict[str, Any]] = [{"error": record.error} for record in chunk]
        good = [(i, record.query) for i, record in enumerate(chunk) if record.query is not None]
        good.sort(key=lambda pair: len(pair[1].inputs))
        for start in range(0, len(good), self.batch_size):
            numbers, queries = zip(*good[start : start + self.batch_size], strict=True)
            for number, answer in zip(numbers, self._batch(queries, activation), strict=True):
                found[number] = answer
        return [(record.values, answer) for record, answer in zip(chunk, found, strict=True)]

    def _batch(self, queries: Sequence[Unlabeled], activation: bool) -> list[dict[str, Any]]:
        task = self.task
        output = self._run(queries)
        answers = []
        rates = activation_of(*output[1:], len(queries)) if activation else None
        for i, query in enumerate(queries):
            logits = output[0][i]
            if task.kind == "tag":
                logits = logits[: len(query.inputs)]
            try:
                answer = task.answer(logits, query.text)
            except ValueError as error:
                answer = {"error": str(error)}
            if query.cut:
                answer["cut"] = query.cut
            if rates is not None and "error" not in answer:
                answer["activation"] = rates[i]
            answers.append(answer)
        return answers

    def _run(self, queries: Sequence[Unlabeled]) -> tuple[Tensor, Sequence[Routing | None], Tensor | None]:
        """Logits, routings and mask of a batch."""
        examples = [Example(np.asarray(query.inputs), 0, query.second) for query in queries]
        batch = self.task.collate_inputs(examples).to(self.device)
        output = apply_model(self.model, self.task.kind, batch)
        return output.logits, output.routings, batch.mask

    @torch.no_grad()
    def logits(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The scores of inputs in memory: (outputs,), or (time, outputs) of tags."""
        queries = [self.task.read_input(_plain(value)) for value in inputs]
        order = sorted(range(len(queries)), key=lambda i: len(queries[i].inputs))
        found: list[Tensor] = [torch.zeros(0)] * len(queries)
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            scores = self._run([queries[i] for i in numbers])[0].cpu()
            for number, row in zip(numbers, scores, strict=True):
                found[number] = row[: len(queries[number].inputs)] if self.task.kind == "tag" else row
        return found


def _numbered(record: _Waiting, number: int, path: Path | str) -> _Waiting:
    """A record with its number, by which parts are merged; its own columns keep their names."""
    require(NUMBER not in record.values, f"{path} has a column {NUMBER}, which --shard adds: rename it")
    return record._replace(values={NUMBER: number, **record.values})


def _plain(value: Any) -> Any:
    """Tensors as arrays, which inputs read."""
    return value.numpy() if isinstance(value, Tensor) else value


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
