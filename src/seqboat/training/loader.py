"""Batches: which examples, in which order, for which process. The order is a pure function of seed and step.

    Plan(count, batch_size, seed, lengths).batch(step) -> the examples of a global batch
    split_batch(batch, parts)[part]                    -> the examples of one process and micro-batch
    batches(task, split, plan, ...)                    -> them as tensors, through 0 or more workers

Nothing remembers a position: resuming is asking for another step, and any number of workers or processes sees the
same global batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from functools import lru_cache
from multiprocessing import ProcessError
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from seqboat.core.checks import check_positive, require
from seqboat.tasks.task import Batch, Dataset, Split, Task
from seqboat.training.signals import ignore_stop_signals

POOL = 50
"""With bucketing, examples are sorted by length inside pools of this many batches."""
TIMEOUT = 120.0
"""Seconds after which a worker that delivers nothing is given up."""


class LoaderError(Exception):
    """Data could not be read: says which dataset, split and record."""


def shuffled(count: int, *key: int) -> NDArray[np.int64]:
    """A permutation of range(count) that depends on the key alone, on every version and platform."""
    # the raw stream of a bit generator is guaranteed to stay; the stream of Generator.permutation is not
    bits = np.random.Philox(np.random.SeedSequence(key))
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64, copy=False)


class Plan:
    """The global batches of a training run.

    Args:
        count: number of examples.
        batch_size: examples per global batch; the last batch of an epoch may be short.
        seed: of the order.
        lengths: (count,), to put examples of similar length together; None for any order.
        streams: whether sequence b of every batch continues sequence b of the batch before, for models that carry
            their state along; examples are then windows of one long text, in its order.
        passage: windows after which streams continue elsewhere, fewer if the text is short: passages of this many
            windows are read in random order. None reads the text from front to end. What is left over at the end of
            the text is not read.

    >>> [batch.tolist() for batch in Plan(8, 2, seed=0, streams=True).epoch(0)]
    [[0, 4], [1, 5], [2, 6], [3, 7]]
    >>> [batch.tolist() for batch in Plan(8, 2, seed=0, streams=True, passage=2).epoch(0)]
    [[0, 6], [1, 7], [2, 4], [3, 5]]
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        seed: int,
        lengths: NDArray[np.integer] | None = None,
        streams: bool = False,
        passage: int | None = None,
    ) -> None:
        check_positive("number of examples", count)
        check_positive("batch_size", batch_size)
        require(
            lengths is None or len(lengths) == count,
            f"lengths must hold one entry for each of {count} examples",
        )
        require(
            not streams or count >= batch_size,
            f"{batch_size} streams need at least as many windows of text, got {count}",
        )
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.lengths, self.streams, self.random = lengths, streams, passage is not None
        self.per_epoch = -(-count // batch_size)
        if streams:
            whole = count // batch_size
            self.passage = min(passage or whole, whole)
            self.per_epoch = count // (batch_size * self.passage) * self.passage
        # the order of an epoch takes time to make and is asked for once per batch
        self._cached = lru_cache(maxsize=2)(self._epoch)

    def epoch(self, number: int) -> list[NDArray[np.int64]]:
        """All batches of an epoch, in their order."""
        return self._cached(number)

    def batch(self, step: int) -> NDArray[np.int64]:
        """The examples of the batch of this step, the first being 0."""
        return self.epoch(step // self.per_epoch)[step % self.per_epoch]

    def starts_anew(self, step: int) -> bool:
        """Whether the streams are somewhere else than at the step before."""
        return step % self.passage == 0

    def _epoch(self, number: int) -> list[NDArray[np.int64]]:
        size = self.batch_size
        if self.streams:
            count = self.count // self.passage
            order = shuffled(count, self.seed, number, 0) if self.random else np.arange(count, dtype=np.int64)
            groups = order[: self.per_epoch // self.passage * size].reshape(-1, size) * self.passage
            return [rows + t for rows in groups for t in range(self.passage)]
        order = shuffled(self.count, self.seed, number, 0)
        if self.lengths is None:
            return [order[i : i + size] for i in range(0, self.count, size)]
        batches = []
        for start in range(0, self.count, POOL * size):
            pool = order[start : start + POOL * size]
            pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        return [batches[i] for i in shuffled(len(batches), self.seed, number, 1)]


class Part(NamedTuple):
    """What one process computes at a time."""

    examples: tuple[int, ...]
    """numbers in the dataset; never empty"""
    counted: bool
    """False for a stand-in: its result is thrown away, it only keeps the processes in step"""


def split_batch(batch: Sequence[int] | NDArray[np.int64], parts: int) -> list[Part]:
    """Cut a global batch into parts, in order, as even as can be; those without an example get a stand-in.

    >>> split_batch([7, 8, 9], 2)
    [Part(examples=(7, 8), counted=True), Part(examples=(9,), counted=True)]
    >>> split_batch([7], 2)
    [Part(examples=(7,), counted=True), Part(examples=(7,), counted=False)]
    """
    pieces = np.array_split(np.asarray(batch, dtype=np.int64), parts)
    first = int(batch[0])
    return [
        Part(tuple(int(i) for i in piece), True) if len(piece) else Part((first,), False) for piece in pieces
    ]


def micro_batches(
    batch: Sequence[int] | NDArray[np.int64],
    processes: int,
    accumulation: int,
    lengths: NDArray[np.integer] | None = None,
    max_tokens: int = 0,
) -> list[list[Part]]:
    """The micro-batches of each process; all processes get as many.

    Args:
        batch: the examples of a global batch.
        processes: how many there are.
        accumulation: micro-batches per process.
        lengths: of all examples, to split micro-batches further that are too large; None never splits.
        max_tokens: of a micro-batch, padding included; no example may be longer.

    >>> micro_batches([0, 1, 2], 1, 1, np.array([2, 9, 3]), 10)
    [[Part(examples=(0, 2), counted=True), Part(examples=(1,), counted=True)]]
    """
    parts = split_batch(batch, processes * accumulation)
    if lengths is not None:
        parts_of = [
            [
                piece
                for part in parts[start : start + accumulation]
                for piece in _split(part, lengths, max_tokens)
            ]
            for start in range(0, len(parts), accumulation)
        ]
        most = max(map(len, parts_of))
        shortest = int(min(batch, key=lambda example: lengths[example]))
        return [mine + [Part((shortest,), False)] * (most - len(mine)) for mine in parts_of]
    return [parts[start : start + accumulation] for start in range(0, len(parts), accumulation)]


def _split(part: Part, lengths: NDArray[np.integer], max_tokens: int) -> list[Part]:
    """Parts of at most `max_tokens`, similar lengths together."""
    if len(part.examples) * max(int(lengths[i]) for i in part.examples) <= max_tokens:
        return [part]
    pieces: list[list[int]] = [[]]
    for example in sorted(part.examples, key=lambda i: lengths[i]):
        if pieces[-1] and (len(pieces[-1]) + 1) * int(lengths[example]) > max_tokens:
            pieces.append([])
        pieces[-1].append(example)
    return [Part(tuple(piece), part.counted) for piece in pieces]


def check_lengths(lengths: NDArray[np.integer], max_tokens: int, split: str) -> None:
    """Refuse an example that is larger than a micro-batch may be, before any memory is taken for it."""
    longest = int(np.argmax(lengths))
    require(
        int(lengths[longest]) <= max_tokens,
        f"{split} example {longest} has {int(lengths[longest]):,} tokens, more than training.max_tokens = "
        f"{max_tokens:,}: cut long examples (task.max_length) or raise training.max_tokens",
    )


class _Failure(NamedTuple):
    """An error on its way from a worker: as a value, so that it arrives as one line."""

    message: str


class _Reader(torch.utils.data.Dataset[Batch | _Failure]):
    """Reads and collates whole batches, in a worker or not."""

    def __init__(self, task: Task, dataset: Dataset, split: str) -> None:
        self.task, self.dataset, self.split = task, dataset, split

    def __getitem__(self, examples: tuple[int, ...]) -> Batch | _Failure:
        where = f"dataset {self.task.name}, split {self.split}"
        rows = []
        for number in examples:
            try:
                rows.append(self.dataset[number])
            except Exception as error:
                return _Failure(f"{where}, record {number}: {type(error).__name__}: {error}")
        try:
            return self.task.collate(rows)
        except Exception as error:
            return _Failure(f"{where}, records {list(examples)}: {type(error).__name__}: {error}")


class Loaded(NamedTuple):
    """A part with its tensors."""

    part: Part
    batch: Batch


def batches(
    task: Task,
    dataset: Dataset,
    split: Split,
    parts: Sequence[Part] | Iterator[Part],
    workers: int = 0,
    timeout: float = TIMEOUT,
    pin_memory: bool = False,
) -> Generator[Loaded]:
    """Read parts in their order.

    Args:
        task: collates.
        dataset: of the split.
        split: for messages.
        parts: may be endless.
        workers: processes that read ahead; 0 reads here.
        timeout: seconds to wait for a worker.
        pin_memory: for faster copies to a GPU.
    """
    asked: list[Part] = []

    def ask() -> Iterator[tuple[int, ...]]:
        for part in parts:
            asked.append(part)
            yield part.examples

    loader = torch.utils.data.DataLoader(
        _Reader(task, dataset, split),
        batch_size=None,
        sampler=ask(),
        num_workers=workers,
        timeout=timeout if workers else 0,
        pin_memory=pin_memory,
        worker_init_fn=ignore_stop_signals,
        # its own generator: making an iterator must not move the global one
        generator=torch.Generator(),
    )
    iterator = iter(loader)
    try:
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError, ProcessError) as error:
                waiting = list(asked[0].examples) if asked else []
                raise LoaderError(
                    f"dataset {task.name}, split {split}, records {waiting}: {first_line(error)}"
                ) from error
            if isinstance(item, _Failure):
                raise LoaderError(item.message)
            yield Loaded(asked.pop(0), item)
    finally:
        if workers:
            with contextlib.suppress(Exception):
                iterator._shutdown_workers()  # type: ignore[attr-defined]
            for worker in getattr(iterator, "_workers", ()):
                if worker.is_alive():  # they ignore SIGTERM
                    worker.kill()
                    worker.join()


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
