"""Short ListOps expressions that are drawn when they are needed: nothing to prepare, and learnable in minutes.

The stream of different expressions of a seed (`listops.iterate`) is cut into test, validation and training examples,
in this order, so that no expression is in two splits and more training examples leave the others as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from seqboat.checks import check_positive
from seqboat.tasks.base import Dataset, Example, Split, Task
from seqboat.tasks.synthetic.listops import CLASSES, TOKENS, ListOpsConfig, decode, encode, iterate


@dataclass(frozen=True, kw_only=True)
class ShortListOpsTaskConfig:
    """The value of a short expression, drawn when it is needed."""

    max_depth: int = 5
    """Nesting of operators."""
    max_arguments: int = 5
    """Arguments of an operator."""
    min_tokens: int = 10
    """Tokens in the shortest expression."""
    max_tokens: int = 100
    """Tokens in the longest expression."""
    train_size: int = 180_000
    """Training examples."""
    eval_size: int = 2_000
    """Validation examples, and test examples."""
    seed: int = 0
    """Of the expressions."""

    def __post_init__(self) -> None:
        for name in ("max_depth", "max_arguments", "min_tokens", "max_tokens", "train_size", "eval_size"):
            check_positive(name, getattr(self, name))
        check_positive("seed", self.seed, least=0)

    def build(self) -> ShortListOpsTask:
        return ShortListOpsTask(self)


class ShortListOpsTask(Task):
    """The value of a short expression."""

    name = "listops-drawn"
    kind = "classify"
    vocab = len(TOKENS)
    classes = CLASSES
    token_names = TOKENS

    def __init__(self, config: ShortListOpsTaskConfig | None = None) -> None:
        self.config = config or ShortListOpsTaskConfig()
        self.max_length = self.config.max_tokens

    def dataset(self, split: Split) -> Dataset:
        self.check_split(split)
        return _Drawn(self.config, split)

    def show(self, example: Example) -> str:
        return f"{' '.join(decode(example.inputs.tolist()))} -> {example.target}"


class _Drawn(Dataset):
    """The expressions of a split; drawn by each process on first use."""

    def __init__(self, config: ShortListOpsTaskConfig, split: Split) -> None:
        self.config, self.split = config, split

    def __len__(self) -> int:
        return self.config.train_size if self.split == "train" else self.config.eval_size

    def __getitem__(self, index: int) -> Example:
        ids, value = self._expressions[index]
        return Example(ids.astype(np.int64), value)

    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(ids) for ids, _ in self._expressions], dtype=np.int64)

    @property
    def _expressions(self) -> list[tuple[NDArray[np.uint8], int]]:
        return _draw(self.config, self.split)


@lru_cache(maxsize=6)
def _draw(config: ShortListOpsTaskConfig, split: Split) -> list[tuple[NDArray[np.uint8], int]]:
    size = config.eval_size
    first, count = {"test": (0, size), "val": (size, size), "train": (2 * size, config.train_size)}[split]
    expressions = iterate(
        config.seed,
        ListOpsConfig(
            max_depth=config.max_depth,
            max_arguments=config.max_arguments,
            longer_than=config.min_tokens - 1,
            shorter_than=config.max_tokens + 1,
        ),
    )
    return [(encode(e.tokens), e.value) for e in islice(expressions, first, first + count)]
