"""Text: is a film review positive? Bytes of the reviews of Maas et al. (2011), section 4.1 of the paper.

    "This is a great film, ..."         -> 1
    "I want my two hours back. ..."     -> 0

    bytes   T   h   i   s       i   s       a       g   r   e   a   t
    ids    84 104 105 115  32 105 115  32  97  32 103 114 101  97 116

The data has 25,000 reviews for training, as many for testing, and none for validation. The Long Range Arena
validates on the test reviews; `holdout` holds out training reviews instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from seqboat.core.checks import check_positive, require
from seqboat.data import fairseq as published
from seqboat.data.download import RemoteFile
from seqboat.data.fairseq import byte_symbols
from seqboat.data.sources import Source, bad_text, read_file
from seqboat.data.store import Prepared, RaggedWriter, Skips, Staging
from seqboat.tasks.stored import DatasetInfo, RaggedDataset, SequenceTask, SequenceTaskConfig, hold_out
from seqboat.tasks.task import BYTES, Dataset, Example, Split

PARTS = ("train", "test")


@dataclass(frozen=True, kw_only=True)
class TextTaskConfig(SequenceTaskConfig):
    """Sentiment of film reviews, byte-level."""

    max_length: int = 4096
    """Maximum length in bytes; longer reviews are truncated."""
    holdout: int = 0
    """Training reviews to hold out for validation; 0 validates on the test reviews, as published."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("holdout", self.holdout, least=0)

    def build(self) -> TextTask:
        return TextTask(self)

    @classmethod
    def datasets(cls) -> Mapping[str, DatasetInfo]:
        return DATASETS


class TextTask(SequenceTask):
    """Sentiment of film reviews."""

    name = "text"
    kind = "classify"
    vocab = BYTES
    text_bytes = True
    classes = 2
    labels = ("negative", "positive")

    def __init__(self, config: TextTaskConfig | None = None) -> None:
        config = config or TextTaskConfig()
        super().__init__(config)
        self.holdout = config.holdout

    def whole(self, split: Split) -> Dataset:
        if not self.holdout:
            part = "train" if split == "train" else "test"
            return RaggedDataset(self.store, part, self.cut)
        if split == "test":
            return RaggedDataset(self.store, "test", self.cut)
        return hold_out(RaggedDataset(self.store, "train", self.cut), split, self.holdout)

    def show(self, example: Example) -> str:
        return f"{bytes(example.inputs.astype(np.uint8)).decode(errors='replace')}\n-> {example.target}"


def prepare(source: Source, staging: Staging, skips: Skips) -> Prepared:
    """Read `aclImdb` (folder or tar archive), `imdb_{train,test}.jsonl` (also compressed), or binarized reviews."""
    if source.kind() == "folder" and published.is_binarized(source.path):
        return _prepare_binarized(source.path, staging, skips)
    if source.kind() == "folder" and any(_jsonl(source.path, part) for part in PARTS):
        records = _read_jsonl(source.path, skips)
    else:
        records = _read_reviews(source, skips)
    counts = {}
    for part in PARTS:
        require(
            len(records[part]) > 0,
            f"{source} contains no {part} reviews: expected aclImdb/{part}/pos/*.txt and neg/*.txt, "
            f"or imdb_{part}.jsonl.xz",
        )
        texts = RaggedWriter(staging, part)
        for _, _, text in sorted(records[part]):
            texts.append(text)
        labels = np.array([label for _, label, _ in sorted(records[part])], np.uint8)
        staging.put(f"{part}.labels", labels)
        counts[part] = len(labels)
    return Prepared(counts)


def _prepare_binarized(folder: Path, staging: Staging, skips: Skips) -> Prepared:
    translate = published.Translation(byte_symbols(*published.dictionary(folder)))
    counts = {}
    for part in PARTS:
        texts, labels = RaggedWriter(staging, part), []
        for (text,), label in published.read_examples(folder, part, TextTask.classes, translate, skips):
            texts.append(text)
            labels.append(label)
        staging.put(f"{part}.labels", np.array(labels, np.uint8))
        counts[part] = len(labels)
    return Prepared(counts)


Records = dict[str, list[tuple[str, int, bytes]]]


def _read_reviews(source: Source, skips: Skips) -> Records:
    records: Records = {part: [] for part in PARTS}
    for member in source.members(lambda name: name.endswith(".txt")):
        if len(member.parts) < 3:
            continue
        part, sentiment = member.parts[-3:-1]
        if part not in PARTS or sentiment not in ("pos", "neg"):
            continue
        text = member.read()
        if problem := bad_text(text):
            skips.add(source.label, member.name, problem)
            continue
        records[part].append((member.name.rpartition(f"{part}/")[2], int(sentiment == "pos"), text))
    return records


def _jsonl(folder: Path, part: str) -> Path | None:
    found = sorted(folder.glob(f"imdb_{part}.jsonl*"))
    return found[0] if found else None


def _read_jsonl(folder: Path, skips: Skips) -> Records:
    records: Records = {part: [] for part in PARTS}
    for part in PARTS:
        path = _jsonl(folder, part)
        require(path is not None, f"{folder} has no imdb_{part}.jsonl.xz")
        assert path is not None
        for number, line in enumerate(read_file(path).splitlines(), start=1):
            where = f"line {number}"
            try:
                record = json.loads(line)
                label, text = record["label"], record["text"].encode()
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                skips.add(path.name, where, "not a JSON object with label and text")
                continue
            if label not in (0, 1):
                skips.add(path.name, where, f"label must be 0 or 1, got {label!r}")
            elif problem := bad_text(text):
                skips.add(path.name, where, problem)
            else:
                records[part].append((f"{number:09d}", int(label), text))
    return records


DATASETS = {
    "text": DatasetInfo(
        task=TextTaskConfig(),
        title="50,000 film reviews, positive or negative (Maas et al., 2011)",
        license="no license stated; cite the paper",
        size=66_000_000,
        get="aclImdb_v1.tar.gz from https://ai.stanford.edu/~amaas/data/sentiment/",
        folders=("aclImdb", "imdb", "imdb-4000"),
        remote=RemoteFile(
            name="aclImdb_v1.tar.gz",
            urls=(
                "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
                "https://bj.bcebos.com/dataset/imdb%2FaclImdb_v1.tar.gz",
                "https://d2l-data.s3-accelerate.amazonaws.com/aclImdb_v1.tar.gz",
            ),
            bytes=84_125_825,
            digest="md5:7c2ac02c03563afcf9b574c7e56c153a",
        ),
        read=prepare,
    ),
}
"""Data sets of this task, by the names of their prepared folders."""
