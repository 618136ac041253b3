"""enwik8: which byte comes next? The first 10^8 bytes of English Wikipedia, section 4.3 of the paper.

    inputs     <  m  e  d  i  a  w  i  k
    targets    m  e  d  i  a  w  i  k  i        scored in bits per byte

Training reads 90 million bytes in segments, validation and test the next 5 million each; every byte of a split but
its first is a target exactly once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from seqboat.core.checks import check_positive, require
from seqboat.data.download import RemoteFile
from seqboat.data.fairseq import END, IndexedSequences, Translation, byte_symbols, read_dictionary
from seqboat.data.fairseq import SPLITS as PUBLISHED_SPLITS
from seqboat.data.sources import Source, read_file
from seqboat.data.store import Prepared, Skips, Staging
from seqboat.tasks.segments import LongTextTask, check_window
from seqboat.tasks.stored import DatasetInfo, StoredTask, StoredTaskConfig
from seqboat.tasks.task import Dataset, Split

SIZE = 100_000_000
SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
BORDERS = {"train": (0.0, 0.9), "val": (0.9, 0.95), "test": (0.95, 1.0)}


@dataclass(frozen=True, kw_only=True)
class Enwik8TaskConfig(StoredTaskConfig):
    """Byte-level language modeling of Wikipedia."""

    segment: int = 8192
    """Scored bytes per example."""
    context: int = 0
    """Bytes of unscored context at the beginning of each evaluation example."""
    window: int | None = None
    """Bytes in an evaluation example, including its context; by default a segment plus the context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("segment", self.segment)
        check_window(self.window, self.context)

    def build(self) -> Enwik8Task:
        return Enwik8Task(self)

    @classmethod
    def datasets(cls) -> Mapping[str, DatasetInfo]:
        return DATASETS


class Enwik8Task(StoredTask, LongTextTask):
    """Byte-level language model of Wikipedia."""

    name = "enwik8"

    def __init__(self, config: Enwik8TaskConfig | None = None) -> None:
        settings = config or Enwik8TaskConfig()
        super().__init__(settings)
        self.cut(settings.segment, settings.context, settings.window)

    def borders(self, split: Split) -> tuple[int, int]:
        size = len(self.store["bytes"])
        start, end = (round(fraction * size) for fraction in BORDERS[split])
        return start, end

    def whole(self, split: Split) -> Dataset:
        return self.segments(split)


def prepare(source: Source, staging: Staging, skips: Skips) -> Prepared:
    """Read `enwik8`, raw or compressed (zip, gz, bz2, xz), or a folder that holds it."""
    if source.kind() == "folder" and (source.path / "dict.txt").is_file():
        return _prepare_binarized(source, staging)
    content = b""
    if source.kind() == "file":
        content = read_file(source.path)
    elif source.kind() == "zip":
        content = b"".join(member.read() for member in source.members(lambda name: name == "enwik8"))
    else:
        for name in ("enwik8", "enwik8.zip", "enwik8.xz", "enwik8.gz"):
            if (source.path / name).is_file():
                return prepare(Source(source.path / name), staging, skips)
    require(len(content) > 0, f"{source} does not contain enwik8: expected the file enwik8 or enwik8.zip")
    require(len(content) == SIZE, f"{source} has {len(content):,} bytes, expected {SIZE:,}: it is not enwik8")
    got = hashlib.sha256(content).hexdigest()
    require(got == SHA256, f"{source} is not enwik8: sha256 is {got}, expected {SHA256}")
    staging.put("bytes", np.frombuffer(content, np.uint8))
    return Prepared(
        {split: round(end * SIZE) - round(start * SIZE) for split, (start, end) in BORDERS.items()}
    )


def _prepare_binarized(source: Source, staging: Staging) -> Prepared:
    """Read bytes as numbers, in lines: each </s> is a line break, but for one that ends a split inside of a line."""
    folder = source.path
    path = folder / "dict.txt"
    translate = Translation({**byte_symbols(read_dictionary(path), path), END: b"\n"})
    require(translate.single, f"{path}: every symbol must be a byte")
    writer, digest = staging.array("bytes", np.uint8), hashlib.sha256()
    counts = {}
    for split, name in PUBLISHED_SPLITS.items():
        start, end = (round(fraction * SIZE) for fraction in BORDERS[split])
        lines = IndexedSequences(folder / name)
        counts[split] = end - start
        require(
            lines.tokens in (end - start, end - start + 1),
            f"{folder / name}.bin has {lines.tokens:,} bytes of text, expected {end - start:,}: it is not enwik8",
        )
        for ids in lines.blocks(end - start):
            translate.check(ids)
            text = translate.table[ids]
            digest.update(text.tobytes())
            writer.append(text)
    got = digest.hexdigest()
    require(got == SHA256, f"{source} is not enwik8: sha256 is {got}, expected {SHA256}")
    return Prepared(counts)


DATASETS = {
    "enwik8": DatasetInfo(
        task=Enwik8TaskConfig(),
        title="the first 100,000,000 bytes of English Wikipedia",
        license="CC BY-SA and GFDL",
        size=100_000_000,
        get="enwik8.zip from https://mattmahoney.net/dc/textdata.html",
        folders=("enwik8", "enwik8_data_bin"),
        remote=RemoteFile(
            name="enwik8.zip",
            urls=("https://mattmahoney.net/dc/enwik8.zip", "https://data.deepai.org/enwik8.zip"),
            bytes=36_445_475,
            digest="sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        ),
        read=prepare,
    ),
}
"""Data sets of this task, by the names of their prepared folders."""
