"""Memorize: which value always belongs to this key? All examples share the pairs: the weights must store them.

    inputs    A _ C _ B _ A _        a key, then a blank
    targets   . 4 . 6 . 3 . 4        its value, at the blank

Nothing in the context tells the answer. After Poli et al. (2024), where it measures what a model can memorize.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqboat.core.checks import check_positive, require
from seqboat.tasks.drawn import BLANK, DrawnTask, check_drawn, generator
from seqboat.tasks.task import IGNORE, Example, Split


@dataclass(frozen=True, kw_only=True)
class MemorizeTaskConfig:
    """Pairs of key and value that never change."""

    length: int = 64
    """Tokens per example."""
    vocab: int = 128
    """Number of token ids: the blank, then as many keys as values."""
    train_size: int = 20_000
    """Training examples."""
    eval_size: int = 1_000
    """Validation examples, and as many test examples."""
    seed: int = 0
    """Random seed of the pairs and the examples."""

    def __post_init__(self) -> None:
        check_drawn(self)
        check_positive("vocab", self.vocab, least=3)
        require(self.length >= 2, f"length must be at least 2 for a key and its value, got {self.length}")

    def build(self) -> MemorizeTask:
        return MemorizeTask(self)


def draw_memorize(config: MemorizeTaskConfig, split: Split, index: int) -> Example:
    """An example, determined by configuration, split and index.

    >>> example = draw_memorize(MemorizeTaskConfig(length=8, vocab=7), "train", 0)
    >>> example.inputs.tolist()
    [3, 0, 2, 0, 2, 0, 1, 0]
    >>> [None if token == IGNORE else token for token in example.target.tolist()]
    [None, 5, None, 4, None, 4, None, 6]
    """
    half = (config.vocab - 1) // 2
    values = 1 + half + np.random.default_rng(config.seed).permutation(half)
    random = generator(config, split, index)
    keys = random.integers(half, size=config.length // 2)
    inputs = np.full(config.length, BLANK, dtype=np.int64)
    targets = np.full(config.length, IGNORE, dtype=np.int64)
    end = 2 * len(keys)
    inputs[0:end:2], targets[1:end:2] = 1 + keys, values[keys]
    return Example(inputs, targets)


class MemorizeTask(DrawnTask):
    """Pairs of key and value that never change."""

    name = "memorize"

    def __init__(self, config: MemorizeTaskConfig | None = None) -> None:
        self.config = config or MemorizeTaskConfig()
        super().__init__(self.config)

    def draw(self, split: Split, index: int) -> Example:
        return draw_memorize(self.config, split, index)
