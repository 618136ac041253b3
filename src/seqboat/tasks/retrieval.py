"""Retrieval: does one paper cite the other? Two documents of 4,000 bytes, section 4.1 of the paper.

    first    "Neural machine translation by jointly learning ..."
    second   "Sequence to sequence learning with neural networks ..."     -> 1 (cited)

The Long Range Arena takes pairs of the ACL Anthology Network (147,086 for training). Papers occur in many pairs, so
each text is stored once and a pair is (label, index of the first text, index of the second).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import require
from seqboat.data import fairseq as published
from seqboat.data.fairseq import byte_symbols
from seqboat.data.sources import Source, bad_text, read_file
from seqboat.data.store import ArrayStore, Prepared, RaggedWriter, Skips, Staging
from seqboat.tasks.stored import LRA_FILE, LRA_PAGE, DatasetInfo, SequenceTask, SequenceTaskConfig, ragged
from seqboat.tasks.task import BYTES, SPLITS, Dataset, Example, Split

LRA_NAMES = {"train": "new_aan_pairs.train", "val": "new_aan_pairs.eval", "test": "new_aan_pairs.test"}
KEEP = 16_384
"""Bytes of a document to store; recipes truncate to 4,000."""


@dataclass(frozen=True, kw_only=True)
class RetrievalTaskConfig(SequenceTaskConfig):
    """Does one document cite the other? Byte-level."""

    max_length: int = 4000
    """Maximum length of each document in bytes; longer ones are truncated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_length <= KEEP, f"max_length must be at most {KEEP}, got {self.max_length}")

    def build(self) -> RetrievalTask:
        return RetrievalTask(self)

    @classmethod
    def datasets(cls) -> Mapping[str, DatasetInfo]:
        return DATASETS


class PairDataset(Dataset):
    """Pairs of stored documents."""

    def __init__(self, store: ArrayStore, split: Split, max_length: int) -> None:
        self.store = store
        self.split = split
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.store[f"{self.split}.pairs"])

    def __getitem__(self, index: int) -> Example:
        label, first, second = (int(i) for i in self.store[f"{self.split}.pairs"][index])
        one, two = (ragged(self.store, "documents", i, self.max_length) for i in (first, second))
        return Example(one.astype(np.int64), label, two.astype(np.int64))

    def lengths(self) -> NDArray[np.int64]:
        """The length of the longer document of each pair."""
        sizes = np.minimum(np.diff(self.store["documents.offsets"]), self.max_length)
        return sizes[self.store[f"{self.split}.pairs"][:, 1:]].max(axis=1)


class RetrievalTask(SequenceTask):
    """Citation between two documents."""

    name = "retrieval"
    kind = "match"
    vocab = BYTES
    text_bytes = True
    classes = 2
    labels = ("unrelated", "related")

    def __init__(self, config: RetrievalTaskConfig | None = None) -> None:
        super().__init__(config or RetrievalTaskConfig())

    def whole(self, split: Split) -> Dataset:
        return PairDataset(self.store, split, self.cut)

    def show(self, example: Example) -> str:
        assert example.second is not None
        first, second = (
            bytes(part.astype(np.uint8)).decode(errors="replace") for part in (example.inputs, example.second)
        )
        return f"{first}\n---\n{second}\n-> {example.target}"


class _Documents:
    """Texts, each stored once."""

    def __init__(self, staging: Staging) -> None:
        self.writer = RaggedWriter(staging, "documents")
        self.numbers: dict[bytes, int] = {}

    def number(self, text: bytes) -> int:
        text = text[:KEEP]
        key = blake2b(text, digest_size=16).digest()
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            self.writer.append(text)
        return self.numbers[key]


def prepare(source: Source, staging: Staging, skips: Skips) -> Prepared:
    """Read `new_aan_pairs.{train,eval,test}.tsv` (in a folder or the LRA archive), or documents and pairs."""
    documents = _Documents(staging)
    folder = source.path if source.kind() == "folder" else None
    if folder is not None and published.is_binarized(folder):
        pairs = _read_binarized(folder, documents, skips)
    elif folder is not None and sorted(folder.glob("docs.jsonl*")):
        pairs = _read_compact(folder, documents, skips)
    else:
        pairs = _read_lra(source, documents, skips)
    for split in SPLITS:
        require(
            len(pairs[split]) > 0,
            f"{source} contains no {split} pairs: expected {LRA_NAMES[split]}.tsv, "
            f"or docs.jsonl.xz and pairs_{split}.tsv.xz",
        )
        staging.put(f"{split}.pairs", np.array(pairs[split], np.int32))
    return Prepared(
        {split: len(rows) for split, rows in pairs.items()}, {"documents": len(documents.numbers)}
    )


Pairs = dict[str, list[tuple[int, int, int]]]


def _read_binarized(folder: Path, documents: _Documents, skips: Skips) -> Pairs:
    translate = published.Translation(byte_symbols(*published.dictionary(folder)))
    pairs: Pairs = {split: [] for split in SPLITS}
    for split, name in published.SPLITS.items():
        parts = ("src-bin", "src1-bin")
        for texts, label in published.read_examples(folder, name, 2, translate, skips, parts):
            first, second = (documents.number(text) for text in texts)
            pairs[split].append((label, first, second))
    return pairs


def _read_lra(source: Source, documents: _Documents, skips: Skips) -> Pairs:
    """Lines of label, id, id, text, text; the label is a float and texts are Python bytes literals or plain text."""
    pairs: Pairs = {split: [] for split in SPLITS}
    names = {f"{stem}.tsv": split for split, stem in LRA_NAMES.items()}
    for member in source.members(lambda name: name.rpartition("/")[2] in names):
        kept = pairs[names[member.base]]
        for number, line in _lines(member.read()):
            where = f"line {number}"
            fields = line.split(b"\t")
            if len(fields) != 5:
                skips.add(member.name, where, f"expected 5 fields, got {len(fields)}")
                continue
            label = _label(fields[0])
            try:
                texts = [_unquote(field) for field in fields[3:]]
            except UnicodeError as error:
                skips.add(member.name, where, f"not a Python bytes literal: {error}")
                continue
            problem = next((p for p in map(bad_text, texts) if p), None)
            if label is None:
                skips.add(member.name, where, f"label must be 0 or 1, got {fields[0][:20]!r}")
            elif problem:
                skips.add(member.name, where, problem)
            else:
                kept.append((label, documents.number(texts[0]), documents.number(texts[1])))
    return pairs


def _read_compact(folder: Path, documents: _Documents, skips: Skips) -> Pairs:
    path = sorted(folder.glob("docs.jsonl*"))[0]
    numbers: dict[int, int] = {}
    for number, line in _lines(read_file(path)):
        try:
            record = json.loads(line)
            key, text = int(record["id"]), record["text"].encode()
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            skips.add(path.name, f"line {number}", "not a JSON object with id and text")
            continue
        if problem := bad_text(text):
            skips.add(path.name, f"line {number}", problem)
        else:
            numbers[key] = documents.number(text)
    pairs: Pairs = {split: [] for split in SPLITS}
    for split in SPLITS:
        for table in sorted(folder.glob(f"pairs_{split}.tsv*"))[:1]:
            for number, line in _lines(read_file(table)):
                where = f"line {number}"
                fields = line.split(b"\t")
                if fields[0] == b"label":
                    continue
                label = _label(fields[0])
                ids = [int(field) if field.isdigit() and len(field) < 19 else -1 for field in fields[1:3]]
                if label is None:
                    skips.add(table.name, where, f"label must be 0 or 1, got {fields[0][:20]!r}")
                elif len(ids) != 2 or not all(i in numbers for i in ids):
                    skips.add(table.name, where, "expected label and the ids of two documents")
                else:
                    pairs[split].append((label, numbers[ids[0]], numbers[ids[1]]))
    return pairs


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    # line by line: the published file exceeds a gigabyte, and a list of its lines would take as much again
    for number, line in enumerate(io.BytesIO(content), start=1):
        if line.strip():
            yield number, line.rstrip(b"\r\n")


def _label(field: bytes) -> int | None:
    return {b"0": 0, b"1": 1, b"0.0": 0, b"1.0": 1}.get(field.strip())


def _unquote(field: bytes) -> bytes:
    r"""The text of a field: quoted as in CSV, written as a Python bytes literal such as b'caf\xc3\xa9', or plain."""
    if len(field) >= 2 and field[:1] == field[-1:] == b'"':
        field = field[1:-1].replace(b'""', b'"')
    if len(field) >= 3 and field[:1] == b"b" and field[1:2] in b"'\"" and field[-1:] == field[1:2]:
        inner = field[2:-1].decode("ascii", errors="replace")
        return inner.encode("latin-1", errors="replace").decode("unicode_escape").encode("latin-1", "replace")
    return field


DATASETS = {
    "retrieval": DatasetInfo(
        task=RetrievalTaskConfig(),
        title="pairs of papers, citing or not (in LRA: of the ACL Anthology Network)",
        license="none stated; the texts belong to their authors",
        size=250_000_000,
        get=f"new_aan_pairs.train.tsv, .eval.tsv and .test.tsv (folder tsv_data) of {LRA_PAGE}",
        folders=("tsv_data", "peerread_citation_pairs", "aan"),
        remote=LRA_FILE,
        read=prepare,
    ),
}
"""Data sets of this task, by the names of their prepared folders."""
