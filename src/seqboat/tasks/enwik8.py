"""enwik8: which byte comes next? The first 10^8 bytes of English Wikipedia, section 4.3 of the paper.

    inputs     <  m  e  d  i  a  w  i  k
    targets    m  e  d  i  a  w  i  k  i        scored in bits per byte

Training reads 90 million bytes in segments, validation and test the next 5 million each; every byte of a split but
its first is a target exactly once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqboat.checks import check_positive, require
from seqboat.data.sources import Source, read_file
from seqboat.data.store import Arrays, Prepared, Skips, Staging
from seqboat.tasks.base import BYTES, IGNORE, Dataset, Example, Split
from seqboat.tasks.stored import StoredTask, StoredTaskConfig

SIZE = 100_000_000
SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
BORDERS = {"train": (0.0, 0.9), "val": (0.9, 0.95), "test": (0.95, 1.0)}


@dataclass(frozen=True, kw_only=True)
class Enwik8TaskConfig(StoredTaskConfig):
    """Byte-level language model of Wikipedia."""

    segment: int = 8192
    """Targets per example."""
    context: int = 0
    """Bytes before each evaluation segment that the model reads without being scored on them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("segment", self.segment)
        check_positive("context", self.context, least=0)

    def build(self) -> Enwik8Task:
        return Enwik8Task(self)


class SegmentDataset(Dataset):
    """A long row of tokens in segments, each with the tokens one place on as targets."""

    def __init__(
        self,
        store: Arrays,
        name: str,
        start: int,
        end: int,
        segment: int,
        context: int = 0,
        whole: bool = False,
    ) -> None:
        """
        Args:
            store: with the array `name`.
            start: first token.
            end: after the last token.
            segment: targets per example.
            context: tokens before each segment that are inputs without targets.
            whole: leave out a last segment that is shorter than the others.
        """
        require(end - start > 1, f"{name} must have at least 2 tokens in each split, got {end - start}")
        self.store = store
        self.name = name
        self.start = start
        self.end = end
        self.segment = segment
        self.context = context
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
        return Example(tokens[:-1], targets)

    def lengths(self) -> NDArray[np.int64]:
        first = self.start + np.arange(self.count) * self.segment
        last = np.minimum(first + self.segment, self.end - 1)
        return last - np.maximum(self.start, first - self.context)


class Enwik8Task(StoredTask):
    """Byte-level language model of Wikipedia."""

    name = "enwik8"
    kind = "lm"
    vocab = BYTES
    text_bytes = True
    classes = BYTES
    metric = "bits"
    better = "lower"

    def __init__(self, config: Enwik8TaskConfig | None = None) -> None:
        self.settings = config or Enwik8TaskConfig()
        super().__init__(self.settings)
        self.max_length = self.settings.segment + self.settings.context

    def text(self, split: Split) -> NDArray[Any]:
        self.check_split(split)
        start, end = self._borders(split)
        return self.store["bytes"][start:end]

    def _borders(self, split: Split) -> tuple[int, int]:
        size = len(self.store["bytes"])
        start, end = (round(share * size) for share in BORDERS[split])
        return start, end

    def whole(self, split: Split) -> Dataset:
        start, end = self._borders(split)
        training = split == "train"
        context = 0 if training else self.settings.context
        return SegmentDataset(self.store, "bytes", start, end, self.settings.segment, context, whole=training)

    def show(self, example: Example) -> str:
        return bytes(example.inputs.astype(np.uint8)).decode(errors="replace")


def prepare(source: Source, staging: Staging, skips: Skips) -> Prepared:
    """Read `enwik8`, raw or compressed (zip, gz, bz2, xz), or a folder that holds it."""
    content = b""
    if source.kind() == "file":
        content = read_file(source.path)
    elif source.kind() == "zip":
        content = b"".join(entry.read() for entry in source.entries(lambda name: name == "enwik8"))
    else:
        for name in ("enwik8", "enwik8.zip", "enwik8.xz", "enwik8.gz"):
            if (source.path / name).is_file():
                return prepare(Source(source.path / name), staging, skips)
    require(len(content) > 0, f"{source} holds no enwik8: expected the file enwik8 or enwik8.zip")
    require(len(content) == SIZE, f"{source} has {len(content):,} bytes, expected {SIZE:,}: it is not enwik8")
    got = hashlib.sha256(content).hexdigest()
    require(got == SHA256, f"{source} is not enwik8: sha256 is {got}, expected {SHA256}")
    staging.put("bytes", np.frombuffer(content, np.uint8))
    return Prepared(
        {split: round(end * SIZE) - round(start * SIZE) for split, (start, end) in BORDERS.items()}
    )
