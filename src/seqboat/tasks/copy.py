"""Copy: which tokens stood between the blanks, in order? Selective copying, a diagnostic that learns in a minute.

    inputs    _ 7 _ _ 3 _ 9 _ _ ? ? ?        tokens scattered among blanks, then one question mark per token
    targets   . . . . . . . . . 7 3 9        the tokens in the order they came

The places differ from example to example, so a model that treats all places alike cannot solve it; it has to choose
by content. After Jing et al. (2019) and Gu and Dao (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seqboat.checks import check_positive, require
from seqboat.tasks.base import IGNORE, SPLITS, Dataset, Example, Split, Task
from seqboat.tasks.recall import show_targets

BLANK = 0
QUESTION = 1


@dataclass(frozen=True, kw_only=True)
class CopyTaskConfig:
    """Selective copying."""

    length: int = 64
    """Tokens per example."""
    tokens: int = 8
    """Tokens to copy."""
    vocab: int = 16
    """Token ids: the blank, the question mark, and the tokens to copy."""
    train_size: int = 20_000
    """Training examples."""
    eval_size: int = 1_000
    """Examples of each other split."""
    seed: int = 0
    """Of the examples; splits never share one."""

    def __post_init__(self) -> None:
        for name in ("length", "tokens", "train_size", "eval_size"):
            check_positive(name, getattr(self, name))
        check_positive("seed", self.seed, least=0)
        check_positive("vocab", self.vocab, least=3)
        require(
            self.length >= 2 * self.tokens,
            f"length must be at least {2 * self.tokens} for {self.tokens} tokens and questions, got {self.length}",
        )

    def build(self) -> CopyTask:
        return CopyTask(self)


def draw_copy(config: CopyTaskConfig, split: Split, index: int) -> Example:
    """An example; the same for the same configuration, split and number.

    >>> example = draw_copy(CopyTaskConfig(length=10, tokens=3), "train", 0)
    >>> example.inputs.tolist()
    [0, 0, 0, 2, 3, 0, 2, 1, 1, 1]
    >>> example.target[-3:].tolist()
    [2, 3, 2]
    """
    random = np.random.default_rng([config.seed, SPLITS.index(split), index])
    inputs = np.full(config.length, BLANK, dtype=np.int64)
    targets = np.full(config.length, IGNORE, dtype=np.int64)
    start = config.length - config.tokens
    places = np.sort(random.choice(start, config.tokens, replace=False))
    tokens = random.integers(2, config.vocab, size=config.tokens)
    inputs[places], inputs[start:], targets[start:] = tokens, QUESTION, tokens
    return Example(inputs, targets)


class _Drawn(Dataset):
    def __init__(self, config: CopyTaskConfig, split: Split) -> None:
        self.config = config
        self.split = split

    def __len__(self) -> int:
        return self.config.train_size if self.split == "train" else self.config.eval_size

    def __getitem__(self, index: int) -> Example:
        require(0 <= index < len(self), f"index must be in [0, {len(self)}), got {index}")
        return draw_copy(self.config, self.split, index)

    def lengths(self) -> NDArray[np.int64]:
        return np.full(len(self), self.config.length, dtype=np.int64)


class CopyTask(Task):
    """Selective copying."""

    name = "copy"
    kind = "lm"
    fixed_length = True

    def __init__(self, config: CopyTaskConfig | None = None) -> None:
        self.config = config or CopyTaskConfig()
        self.vocab = self.config.vocab
        self.classes = self.config.vocab
        self.max_length = self.config.length

    def dataset(self, split: Split) -> Dataset:
        self.check_split(split)
        return _Drawn(self.config, split)

    def show(self, example: Example) -> str:
        assert isinstance(example.target, np.ndarray)
        return show_targets(example.inputs, example.target, BLANK)
