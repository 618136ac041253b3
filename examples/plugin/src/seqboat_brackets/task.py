"""A task: are the brackets of a sequence balanced?

(()())   balanced
())(()   unbalanced
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import check_positive, require
from seqboat.tasks import SPLITS, Dataset, Example, Split, Task


@dataclass(frozen=True, kw_only=True)
class BracketsTaskConfig:
    """Whether the brackets of a sequence are balanced."""

    pairs: int = 12
    """Pairs of brackets of the longest sequences."""
    train_size: int = 2_000
    """Training examples."""
    eval_size: int = 200
    """Validation examples, and as many test examples."""
    seed: int = 0
    """Random seed of the examples."""

    def __post_init__(self) -> None:
        for name in ("pairs", "train_size", "eval_size"):
            check_positive(name, getattr(self, name))

    def build(self) -> BracketsTask:
        return BracketsTask(self)


def is_balanced(depths: NDArray[Any]) -> bool:
    """Whether brackets close what was opened: no depth below zero, and zero at the end."""
    return bool(depths[-1] == 0 and depths.min() >= 0)


class BracketsTask(Task):
    """Whether the brackets of a sequence are balanced."""

    name = "brackets"
    kind = "classify"
    vocab = 2
    classes = 2
    labels = ("unbalanced", "balanced")
    token_names = ("(", ")")

    def __init__(self, config: BracketsTaskConfig) -> None:
        self.config = config
        self.max_length = 2 * config.pairs

    def dataset(self, split: Split) -> Dataset:
        self.check_split(split)
        return BracketsDataset(self.config, split)

    def read_text(self, text: bytes) -> NDArray[Any]:
        """Inputs of `seqboat predict` and `seqboat explain`."""
        words = text.decode().strip()
        require(set(words) <= {"(", ")"}, f"a text must consist of ( and ), got {words[:20]!r}")
        return np.array([self.token_names.index(word) for word in words], dtype=np.int64)


class BracketsDataset(Dataset):
    """The examples of a split, each drawn from its number: the same on any machine."""

    def __init__(self, config: BracketsTaskConfig, split: Split) -> None:
        self.config, self.split = config, split

    def __len__(self) -> int:
        return self.config.train_size if self.split == "train" else self.config.eval_size

    def __getitem__(self, index: int) -> Example:
        require(0 <= index < len(self), f"index must be from 0 to {len(self) - 1}, got {index}")
        random = np.random.default_rng([self.config.seed, SPLITS.index(self.split), index])
        pairs = int(random.integers(1, self.config.pairs + 1))
        steps = random.permutation(np.repeat([1, -1], pairs))
        if index % 2:  # start after the deepest point: every second sequence is balanced
            steps = np.roll(steps, -int(np.cumsum(steps).argmin()) - 1)
        return Example((steps < 0).astype(np.int64), int(is_balanced(np.cumsum(steps))))
