"""Copy: which tokens are between the blanks, in order? Selective copying, a diagnostic that trains in a minute.

    inputs    _ 7 _ _ 3 _ 9 _ _ ? ? ?        tokens scattered among blanks, then one question mark per token
    targets   . . . . . . . . . 7 3 9        the tokens in the order they came

The positions differ from example to example, so a model that treats all positions alike cannot solve it; it has to
select by content. After Jing et al. (2019) and Gu and Dao (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqboat.core.checks import check_positive, require
from seqboat.tasks.drawn import BLANK, DrawnTask, check_drawn, generator
from seqboat.tasks.task import IGNORE, Example, Split

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
    """Validation examples, and as many test examples."""
    seed: int = 0
    """Random seed of the examples; no example is in two splits."""

    def __post_init__(self) -> None:
        check_drawn(self)
        check_positive("tokens", self.tokens)
        check_positive("vocab", self.vocab, least=3)
        require(
            self.length >= 2 * self.tokens,
            f"length must be at least {2 * self.tokens} for {self.tokens} tokens and questions, got {self.length}",
        )

    def build(self) -> CopyTask:
        return CopyTask(self)


def draw_copy(config: CopyTaskConfig, split: Split, index: int) -> Example:
    """An example, determined by configuration, split and index.

    >>> example = draw_copy(CopyTaskConfig(length=10, tokens=3), "train", 0)
    >>> example.inputs.tolist()
    [0, 0, 0, 2, 3, 0, 2, 1, 1, 1]
    >>> example.target[-3:].tolist()
    [2, 3, 2]
    """
    random = generator(config, split, index)
    inputs = np.full(config.length, BLANK, dtype=np.int64)
    targets = np.full(config.length, IGNORE, dtype=np.int64)
    start = config.length - config.tokens
    places = np.sort(random.choice(start, config.tokens, replace=False))
    tokens = random.integers(2, config.vocab, size=config.tokens)
    inputs[places], inputs[start:], targets[start:] = tokens, QUESTION, tokens
    return Example(inputs, targets)


class CopyTask(DrawnTask):
    """Selective copying."""

    name = "copy"

    def __init__(self, config: CopyTaskConfig | None = None) -> None:
        self.config = config or CopyTaskConfig()
        super().__init__(self.config)

    def draw(self, split: Split, index: int) -> Example:
        return draw_copy(self.config, split, index)
