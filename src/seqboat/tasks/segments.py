"""One long text in segments: the common part of the language-modeling tasks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import check_positive, require
from seqboat.data.store import Arrays
from seqboat.tasks.task import BYTES, IGNORE, Dataset, Example, Split, Task


class SegmentDataset(Dataset):
    """A long text in segments; the target of each token is the next one."""

    def __init__(
        self,
        store: Arrays,
        name: str,
        start: int,
        end: int,
        segment: int,
        context: int = 0,
        whole: bool = False,
        starts: NDArray[np.int64] | None = None,
    ) -> None:
        """
        Args:
            store: holds the array `name`.
            start: index of the first token.
            end: index after the last token.
            segment: targets per example.
            context: tokens of unscored context before each segment.
            whole: whether to drop a last segment that is shorter than the others.
            starts: ascending indices of the tokens that begin a document; None if the text is one.
        """
        require(end - start > 1, f"the text must have at least 2 tokens in each split, got {end - start}")
        self.store = store
        self.name = name
        self.start = start
        self.end = end
        self.segment = segment
        self.context = context
        self.starts = starts
        targets = end - start - 1
        self.count = targets // segment if whole and targets >= segment else -(-targets // segment)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        require(0 <= index < self.count, f"index must be in [0, {self.count}), got {index}")
        first = self.start + index * self.segment
        last = min(first + self.segment, self.end - 1)
        begin = max(self.start, first - self.context)
        tokens = self.store[self.name][begin : last + 1].astype(np.int64)
        targets = tokens[1:].copy()
        targets[: first - begin] = IGNORE
        if self.starts is None:
            return Example(tokens[:-1], targets)
        inside = slice(*np.searchsorted(self.starts, [begin, last]))
        return Example(tokens[:-1], targets, starts=self.starts[inside] - begin)

    def lengths(self) -> NDArray[np.int64]:
        first = self.start + np.arange(self.count) * self.segment
        last = np.minimum(first + self.segment, self.end - 1)
        return last - np.maximum(self.start, first - self.context)


def check_window(window: int | None, context: int) -> None:
    """Reject windows in which nothing would be scored."""
    check_positive("context", context, least=0)
    if window is not None:
        check_positive("window", window)
        require(
            context < window,
            f"context must be less than the window of {window}, got {context}: nothing would be scored",
        )


class LongTextTask(Task):
    """Byte-level language modeling of one long text, of which each split is a part."""

    kind = "lm"
    vocab = BYTES
    text_bytes = True
    classes = BYTES
    metric = "bits"
    better = "lower"
    segment: int
    """Targets per example of the training split."""
    context: int
    """Tokens of unscored context at the beginning of each evaluation example."""
    scored: int
    """Targets per evaluation example."""

    def cut(self, segment: int, context: int, window: int | None) -> None:
        """Set how the text is cut into examples."""
        self.segment, self.context = segment, context
        self.scored = segment if window is None else window - context
        self.max_length = max(segment, self.scored + context)

    @property
    @abstractmethod
    def store(self) -> Arrays:
        """Holds the text as the array `bytes`."""

    @abstractmethod
    def borders(self, split: Split) -> tuple[int, int]:
        """Index of the first byte of a split, and of the byte after its last."""

    def text(self, split: Split) -> NDArray[Any]:
        self.check_split(split)
        start, end = self.borders(split)
        return self.store["bytes"][start:end]

    def starts(self) -> NDArray[np.int64] | None:
        """Ascending indices of the bytes that begin a document; None if the text is one."""
        return None

    def document_starts(self, split: Split) -> NDArray[np.int64] | None:
        starts = self.starts()
        if starts is None:
            return None
        begin, end = self.borders(split)
        return starts[slice(*np.searchsorted(starts, [begin, end]))] - begin

    def segments(self, split: Split) -> Dataset:
        """All examples of a split."""
        self.check_split(split)
        start, end = self.borders(split)
        starts = self.starts()
        if split == "train":
            return SegmentDataset(self.store, "bytes", start, end, self.segment, whole=True, starts=starts)
        return SegmentDataset(self.store, "bytes", start, end, self.scored, self.context, starts=starts)

    def show(self, example: Example) -> str:
        return bytes(example.inputs.astype(np.uint8)).decode(errors="replace")
