"""Tasks whose examples are drawn when they are asked for: nothing to prepare, nothing to store.

An example is a function of the configuration, the split and its number; all have the same length, and a target at
some of their tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from seqboat.checks import check_positive, require
from seqboat.tasks.base import IGNORE, SPLITS, Dataset, Example, Split, Task

BLANK = 0
"""The token that means nothing."""


class DrawnConfig(Protocol):
    """What a configuration has to say about the size of the data."""

    @property
    def length(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def train_size(self) -> int: ...
    @property
    def eval_size(self) -> int: ...
    @property
    def seed(self) -> int: ...


def check_drawn(config: DrawnConfig) -> None:
    """Refuse sizes that cannot be."""
    for name in ("length", "train_size", "eval_size"):
        check_positive(name, getattr(config, name))
    check_positive("seed", config.seed, least=0)


def generator(config: DrawnConfig, split: Split, index: int) -> np.random.Generator:
    """The random numbers of an example; splits never share them."""
    return np.random.default_rng([config.seed, SPLITS.index(split), index])


class DrawnTask(Task):
    """Examples by number."""

    kind = "lm"
    fixed_length = True

    def __init__(self, config: DrawnConfig) -> None:
        self.vocab = config.vocab
        self.classes = config.vocab
        self.max_length = config.length
        self.sizes = {split: config.train_size if split == "train" else config.eval_size for split in SPLITS}

    @abstractmethod
    def draw(self, split: Split, index: int) -> Example:
        """An example; the same for the same split and number."""

    def dataset(self, split: Split) -> Dataset:
        self.check_split(split)
        return DrawnDataset(self, split)

    def show(self, example: Example) -> str:
        assert isinstance(example.target, np.ndarray)
        width = len(str(max(int(example.inputs.max()), 1)))
        above, below = (
            " ".join((mark if token == nothing else str(token)).rjust(width) for token in tokens.tolist())
            for tokens, nothing, mark in ((example.inputs, BLANK, "_"), (example.target, IGNORE, "."))
        )
        return f"inputs   {above}\ntargets  {below}"


class DrawnDataset(Dataset):
    """The examples of a split."""

    def __init__(self, task: DrawnTask, split: Split) -> None:
        self.task = task
        self.split = split

    def __len__(self) -> int:
        return self.task.sizes[self.split]

    def __getitem__(self, index: int) -> Example:
        require(0 <= index < len(self), f"index must be in [0, {len(self)}), got {index}")
        return self.task.draw(self.split, index)

    def lengths(self) -> NDArray[np.int64]:
        return np.full(len(self), self.task.max_length, dtype=np.int64)
