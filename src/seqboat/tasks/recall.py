"""Recall: which value belongs to this key? Multi-query associative recall, a diagnostic that trains in a minute.

    inputs    A 4 B 3 C 6 _ _ B _ _ A C _        keys and values, then keys again between blanks
    targets   . . . . . . . . 3 . . 4 6 .        the value of each queried key; none elsewhere

With `noise`, the pairs are separated by meaningless tokens, which the model has to ignore.
A state-space model must compress all pairs into its state; attention looks them up. After Arora et al. (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqboat.core.checks import check_positive, require
from seqboat.tasks.drawn import BLANK, DrawnTask, check_drawn, generator
from seqboat.tasks.task import IGNORE, Example, Split


@dataclass(frozen=True, kw_only=True)
class RecallTaskConfig:
    """Multi-query associative recall."""

    length: int = 64
    """Tokens per example."""
    pairs: int = 8
    """Key-value pairs per example; each key is queried once."""
    vocab: int = 64
    """Number of token ids: the blank, then as many keys as values, and with noise as many tokens of noise."""
    noise: float = 0.0
    """Fraction of the blanks that become noise between the pairs: tokens that are neither keys nor values."""
    power: float = 0.01
    """Query positions are drawn with weight position^(power - 1): small powers put queries early, 1 is uniform."""
    train_size: int = 20_000
    """Training examples."""
    eval_size: int = 1_000
    """Validation examples, and as many test examples."""
    seed: int = 0
    """Random seed of the examples; no example is in two splits."""

    def __post_init__(self) -> None:
        check_drawn(self)
        check_positive("pairs", self.pairs)
        require(
            self.length >= 3 * self.pairs,
            f"length must be at least {3 * self.pairs} for {self.pairs} pairs and their questions, got {self.length}",
        )
        require(0 <= self.noise <= 1, f"noise must be in [0, 1], got {self.noise!r}")
        kinds = 3 if self.noise else 2
        require(
            self.keys >= self.pairs,
            f"vocab must be at least {kinds * self.pairs + 1} for {self.pairs} different keys, got {self.vocab}",
        )

    @property
    def keys(self) -> int:
        """How many different keys there are, and as many values."""
        return (self.vocab - 1) // (3 if self.noise else 2)

    def build(self) -> RecallTask:
        return RecallTask(self)


def draw_recall(config: RecallTaskConfig, split: Split, index: int) -> Example:
    """An example, determined by configuration, split and index.

    >>> example = draw_recall(RecallTaskConfig(length=12, pairs=2, vocab=9), "train", 0)
    >>> example.inputs.tolist()
    [3, 6, 1, 5, 3, 0, 0, 0, 1, 0, 0, 0]
    >>> [None if token == IGNORE else token for token in example.target.tolist()]
    [None, None, None, None, 6, None, None, None, 5, None, None, None]
    """
    random = generator(config, split, index)
    half = config.keys
    keys = 1 + random.permutation(half)[: config.pairs]
    values = 1 + half + random.integers(half, size=config.pairs)
    inputs = np.full(config.length, BLANK, dtype=np.int64)
    targets = np.full(config.length, IGNORE, dtype=np.int64)
    noise = round(config.noise * (config.length - 3 * config.pairs))
    start = 2 * config.pairs + noise
    before = 2 * np.arange(config.pairs)
    if noise:
        inputs[:start] = 1 + 2 * half + random.integers(half, size=start)
        # where each pair stands among the tokens of noise
        before = before + np.sort(random.integers(noise + 1, size=config.pairs))
    inputs[before], inputs[before + 1] = keys, values
    weights = np.arange(1, config.length - start + 1, dtype=np.float64) ** (config.power - 1)
    places = start + random.choice(len(weights), config.pairs, replace=False, p=weights / weights.sum())
    inputs[places], targets[places] = keys, values
    return Example(inputs, targets)


class RecallTask(DrawnTask):
    """Multi-query associative recall."""

    name = "recall"

    def __init__(self, config: RecallTaskConfig | None = None) -> None:
        self.config = config or RecallTaskConfig()
        super().__init__(self.config)

    def draw(self, split: Split, index: int) -> Example:
        return draw_recall(self.config, split, index)
