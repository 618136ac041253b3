"""The common part of tasks that read prepared arrays.

A stored task names its store (a folder in the data folder) and makes examples from its arrays. Splits, subsets and
hold-outs are lists of row indices, so that one prepared folder serves every recipe.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from seqboat.console import Advance
from seqboat.core.checks import check_positive, require
from seqboat.data.download import RemoteFile
from seqboat.data.sources import Source
from seqboat.data.store import ArrayStore, Prepared, Skips, Staging
from seqboat.tasks.task import Dataset, Example, Split, Subset, Task, draw_subset

LRA_FILE = RemoteFile(
    name="lra_release.gz", urls=("https://storage.googleapis.com/long-range-arena/lra_release.gz",)
)
LRA_PAGE = "lra_release.gz (7.7 GB) from https://github.com/google-research/long-range-arena"
FREE = "free to make"
END = 0
"""The id of the end token: padding in ListOps, where it is never an input, and the byte 0 in text."""


@dataclass(frozen=True, kw_only=True)
class StoredTaskConfig:
    """Where the prepared data is, and how much of it to use."""

    data_dir: str = "data"
    """The data folder."""
    store: str = ""
    """Folder of the prepared data in it; by default the name of the task."""
    train_size: int | None = None
    """Number of training examples to use, drawn at random; None uses all."""
    eval_size: int | None = None
    """Number of examples to use of each other split; None uses all."""

    def __post_init__(self) -> None:
        for name in ("train_size", "eval_size"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))

    @classmethod
    def datasets(cls) -> Mapping[str, DatasetInfo]:
        """Data sets that the task can use, by the names of their prepared folders."""
        return {}


@dataclass(frozen=True, kw_only=True)
class SequenceTaskConfig(StoredTaskConfig):
    """Sequences of tokens, truncated to a maximum length."""

    max_length: int = 4096
    """Maximum length in tokens; longer sequences are truncated."""
    end_token: bool = False
    """Whether a token 0 is appended to each sequence, where published data have </s>; no text contains it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("max_length", self.max_length)


Read = Callable[[Source, Staging, Skips], Prepared]
Draw = Callable[[Staging, Mapping[str, int], int, int, Advance], Prepared]


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """A data set that can be prepared."""

    task: StoredTaskConfig
    """Settings of the task that reads it."""
    title: str
    """What it is, in one line."""
    license: str
    """Its license, as far as stated."""
    size: int
    """Approximate size of the prepared arrays."""
    get: str
    """What to get by hand, and from where."""
    folders: tuple[str, ...] = ()
    """Names it may have inside a folder of data sets."""
    remote: RemoteFile | None = None
    """The file to download."""
    read: Read | None = None
    """Turns the distributed files into arrays."""
    draw: Draw | None = None
    """Generates the data."""
    settings: object = None
    """Settings of the generator; unfinished data with other settings is discarded."""
    counts: tuple[int, int, int] | None = None
    """Default number of generated examples for train, val and test."""


def ragged(store: ArrayStore, name: str, index: int, max_length: int) -> NDArray[Any]:
    """A sequence written by `RaggedWriter`, truncated to a length."""
    start, end = (int(i) for i in store[f"{name}.offsets"][index : index + 2])
    return store[f"{name}.tokens"][start : min(end, start + max_length)]


def ragged_lengths(store: ArrayStore, name: str, max_length: int = 2**31 - 1) -> NDArray[np.integer]:
    """The lengths of all sequences after truncation."""
    offsets = store[f"{name}.offsets"]
    # in chunks of small integers: tables can have tens of millions of rows
    lengths = np.empty(len(offsets) - 1, np.int32)
    for start in range(0, len(lengths), 1 << 20):
        part = np.diff(offsets[start : start + (1 << 20) + 1])
        lengths[start : start + len(part)] = np.minimum(part, max_length)
    del offsets
    store.release()
    return lengths


class RaggedDataset(Dataset):
    """Sequences of different lengths with a class each."""

    def __init__(self, store: ArrayStore, name: str, max_length: int) -> None:
        self.store = store
        self.name = name
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.store[f"{self.name}.labels"])

    def __getitem__(self, index: int) -> Example:
        tokens = ragged(self.store, self.name, index, self.max_length)
        return Example(tokens.astype(np.int64), int(self.store[f"{self.name}.labels"][index]))

    def lengths(self) -> NDArray[np.integer]:
        return ragged_lengths(self.store, self.name, self.max_length)


class StoredTask(Task):
    """A task on prepared arrays."""

    def __init__(self, config: StoredTaskConfig) -> None:
        self.config = config
        self._store: ArrayStore | None = None

    @property
    def store(self) -> ArrayStore:
        """The prepared data."""
        if self._store is None:
            self._store = ArrayStore.find(Path(self.config.data_dir), self.store_name)
        return self._store

    @property
    def store_name(self) -> str:
        """The folder of the prepared data in the data folder."""
        return self.config.store or self.name

    def origin(self) -> dict[str, Any]:
        return {key: self.store.manifest[key] for key in ("source", "counts")}

    def fingerprint(self, split: Split) -> dict[str, Any]:
        counts = self.store.manifest["counts"]
        rows = counts.get(split, sum(counts.values()))
        return {"source": self.store_name, "rows": rows, "sha256": self.store.digest}

    def dataset(self, split: Split) -> Dataset:
        self.check_split(split)
        size = self.config.train_size if split == "train" else self.config.eval_size
        return draw_subset(self.whole(split), size)

    @abstractmethod
    def whole(self, split: Split) -> Dataset:
        """All examples of a split."""


class SequenceTask(StoredTask):
    """A task on sequences of tokens."""

    def __init__(self, config: SequenceTaskConfig) -> None:
        super().__init__(config)
        self.cut = config.max_length
        """how many tokens of a stored sequence are used"""
        self.end_token = config.end_token
        self.max_length = self.cut + self.end_token

    def dataset(self, split: Split) -> Dataset:
        examples = super().dataset(split)
        return EndedDataset(examples) if self.end_token else examples

    def read_text(self, text: bytes) -> NDArray[Any]:
        ids = self.read_tokens(text)
        return np.append(ids, END) if self.end_token else ids

    def read_tokens(self, text: bytes) -> NDArray[Any]:
        """The token ids of a text, without an end token."""
        return super().read_text(text)


class EndedDataset(Dataset):
    """Examples with an end token after each sequence."""

    def __init__(self, whole: Dataset) -> None:
        self.examples = whole

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        inputs, target, second, _ = self.examples[index]
        return Example(np.append(inputs, END), target, None if second is None else np.append(second, END))

    def lengths(self) -> NDArray[np.integer]:
        return self.examples.lengths() + 1


def shuffled_rows(count: int, seed: int) -> NDArray[np.int64]:
    """Row numbers in the order of torch's generator, as in published random splits."""
    order: NDArray[np.int64] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()
    return order


HOLD_OUT_SEED = 42
"""The seed of published random splits."""


def hold_out(train: Dataset, split: Split, size: int) -> Dataset:
    """A training set without the examples held out for validation, or those examples.

    The indices are those of a random split with torch's generator and seed 42, as published for Image.
    """
    require(
        0 < size < len(train), f"holdout must be less than the {len(train)} training examples, got {size}"
    )
    order = shuffled_rows(len(train), seed=42).astype(np.int32)
    kept = len(train) - size
    return Subset(train, order[:kept] if split == "train" else order[kept:].copy())
