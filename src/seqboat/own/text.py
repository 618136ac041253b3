"""Byte-level language modeling of your own text files.

    notes/*.txt                          any files, as the bytes they hold
    inputs     D  e  a  r     r  e  a
    targets    e  a  r     r  e  a  d    scored in bits per byte

Files are joined in the order of their names, with a blank line between them. Each is a document: short ones share
the sequences of a batch, and no prediction depends on an earlier document. The end of the text is held out: one
part for validation and one for testing.

The last byte before a document, a line end, is its first input: it is predicted as the end of the document before,
and the first byte of the text is predicted from it. So every byte is scored, as if the text were one.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import check_choice, check_positive, require
from seqboat.data.sources import bad_text, read_file
from seqboat.data.store import Skips
from seqboat.own.describe import DataSummary, skip_fields
from seqboat.own.records import digest_of
from seqboat.tasks.byte_counts import score_counts
from seqboat.tasks.segments import LongTextTask, check_window
from seqboat.tasks.task import Dataset, Split

SUFFIXES = (".txt", ".md")
"""Files to search folders for."""
CHUNK = 1 << 20
NOTED = 5
"""Files that are not UTF-8 to tell of."""
LINE_END = 10
Documents = Literal["files", "lines", "joined"]


@dataclass(frozen=True, kw_only=True)
class LMTextTaskConfig:
    """Byte-level language modeling of text files."""

    own_data: ClassVar[bool] = True

    text: tuple[str, ...] = ()
    """Files, folders or patterns such as notes/*.txt; folders are searched for .txt and .md files."""
    segment: int = 1024
    """Scored bytes per example."""
    context: int = 0
    """Bytes of unscored context at the beginning of each evaluation example."""
    window: int | None = None
    """Bytes in an evaluation example, including its context; by default a segment plus the context."""
    holdout: float = 0.05
    """Fraction of the text to hold out for validation, and as much again for testing; both are taken from its end."""
    documents: Documents = "files"
    """What is a text by itself, which knows nothing of those before it: a file, a line, or all files joined."""

    def __post_init__(self) -> None:
        check_positive("segment", self.segment)
        check_choice("documents", self.documents, get_args(Documents))
        check_window(self.window, self.context)
        require(0 < self.holdout < 0.5, f"holdout must be in (0, 0.5), got {self.holdout!r}")
        require(not isinstance(self.text, str), f"text must be a list of files, got {self.text!r}")

    def build(self) -> LMTextTask:
        return LMTextTask(self)


class LMTextTask(LongTextTask):
    """Byte-level language modeling of text files."""

    name = "lmtext"

    def __init__(self, config: LMTextTaskConfig) -> None:
        require(len(config.text) > 0, "--data.text must name at least one file, got none")
        self.config = config
        self.cut(config.segment, config.context, config.window)
        self.skips: Skips = Skips(most=0.5)
        self._joined: Joined | None = None
        self._starts: NDArray[np.int64] | None = None

    @property
    def store(self) -> Mapping[str, NDArray[Any]]:
        """The text as one array `bytes`."""
        return {"bytes": self.joined.text}

    @property
    def joined(self) -> Joined:
        """All files as one text, read when it is first needed."""
        if self._joined is None:
            self._joined = join_texts(find_files(self.config.text), self.skips)
        return self._joined

    def starts(self) -> NDArray[np.int64] | None:
        if self.config.documents == "joined":
            return None
        if self._starts is None:
            lines = self.config.documents == "lines"
            self._starts = line_starts(self.joined.text) if lines else self.joined.starts
        return self._starts

    def borders(self, split: Split) -> tuple[int, int]:
        size = len(self.joined.text)
        held = round(self.config.holdout * size)
        borders = (0, size - 2 * held, size - held, size)
        i = self.splits.index(split)
        start, end = borders[i], borders[i + 1]
        least = math.ceil(1.5 / self.config.holdout)
        require(
            end - start > 1,
            f"{', '.join(self.config.text)}: {size:,} bytes are too few to learn from and to hold some out: "
            f"at least {least:,} are needed",
        )
        return start, end

    def dataset(self, split: Split) -> Dataset:
        return self.segments(split)

    def fingerprint(self, split: Split) -> dict[str, Any]:
        files = find_files(self.config.text)
        return {"source": self.config.text[0], "rows": len(files), "sha256": digest_of(files)}

    def summary(self, split: Split) -> DataSummary:
        files = find_files(self.config.text)
        sizes: dict[str, int] = {name: len(self.text(name)) for name in dict.fromkeys(("train", split))}
        named = self.config.text[0] if len(self.config.text) == 1 else files[0].parent.name or "files"
        name = files[0].name if len(files) == 1 else named
        source = (name, len(files), sum(path.stat().st_size for path in files))
        found = {name: starts for name in sizes if (starts := self.document_starts(name)) is not None}  # type: ignore[arg-type]
        # a split begins inside a document, or with one
        documents = {name: len(starts) + (0 not in starts) for name, starts in found.items()}
        return DataSummary(
            sources=(source,),
            unit="bytes",
            sizes=sizes,
            documents=documents if documents.get("train", 0) > 1 else None,
            warnings=self.joined.notes,
            **skip_fields(self.skips),
        )

    def baselines(self, split: Split, limit: int | None = None) -> dict[str, dict[str, float]]:
        text = self.text(split)
        return score_counts(self.text("train"), text if limit is None else text[: limit * self.scored + 1])


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """The files that match names, folders and patterns, sorted, without duplicates."""
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            some = [p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()]
            require(len(some) > 0, f"{path} contains no .txt or .md file")
        else:
            some = [Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file()] or [path]
            require(some[0].is_file(), f"{pattern} matches no file")
        found.update(some)
    return sorted(found)


class Joined(NamedTuple):
    """Files as one text."""

    text: NDArray[np.uint8]
    starts: NDArray[np.int64]
    """where documents begin"""
    notes: tuple[str, ...]


def join_texts(files: Sequence[Path], skips: Skips) -> Joined:
    """The bytes of files one after the other, whatever they hold; an empty file is skipped."""
    parts: list[NDArray[np.uint8]] = []
    starts: list[int] = []
    notes: list[str] = []
    size = 0
    for path in files:
        content = read_file(path)
        if not content.strip():
            skips.add(path, "the file", "empty text")
            continue
        if parts:
            # a blank line between files, so that the end of one is not read as the middle of a line
            parts.append(np.frombuffer(b"\n\n", np.uint8))
            size += 2
        # a document begins with the line end before it
        starts.append(size - 1 if parts else 0)
        parts.append(np.frombuffer(content, np.uint8))
        size += len(content)
        bad = bad_text(content)
        if bad is not None and len(notes) < NOTED:
            notes.append(f"{path.name} is {bad}: its bytes are learned as they are")
    require(
        bool(parts),
        f"{_named(files)} {'is' if len(files) == 1 else 'are'} empty: there is no text to learn from",
    )
    return Joined(np.concatenate(parts), np.array(starts, np.int64), tuple(notes))


def line_starts(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The line end before each line that is not empty, and the beginning of the text.

    >>> line_starts(np.frombuffer(b"a\\n\\nbc\\nd\\n", np.uint8)).tolist()
    [0, 2, 5]
    """
    found = [np.zeros(min(len(text), 1), np.int64)]
    for begin in range(0, len(text), CHUNK):
        part = np.asarray(text[begin : begin + CHUNK + 1])
        ends = np.flatnonzero((part[:-1] == LINE_END) & (part[1:] != LINE_END))
        found.append(begin + ends[begin + ends > 0])
    return np.concatenate(found)


def _named(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
