"""Needle in a haystack, byte by byte: which number was given for this key, anywhere in the text?

    inputs    river a stone likq=83;ght cold mtz=19;orning walk ?kq=8        words, needles, then a question
    targets   .....................................................83        the number, one digit ahead

With one needle it is enough to notice it; with several the model must find the one that the question names. Needles
lie at any depth, inside words too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqboat.core.checks import check_positive, require
from seqboat.tasks.drawn import DrawnTask, check_drawn, generator
from seqboat.tasks.task import IGNORE, Example, Split

WORDS = (
    b"a the and of river stone light cold morning walk tree wind house open over paper green slow voice long "
    b"water under field early road window summer small table quiet"
).split()
"""What the haystack is made of."""
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)
DIGITS = np.frombuffer(b"0123456789", dtype=np.uint8)


@dataclass(frozen=True, kw_only=True)
class NeedleTaskConfig:
    """Needles in a haystack of bytes."""

    length: int = 128
    """Bytes per example, with the question."""
    needles: int = 1
    """Keys with a number each; the question names one of them."""
    key_length: int = 2
    """Letters of a key."""
    digits: int = 2
    """Digits of a number."""
    train_size: int = 20_000
    """Training examples."""
    eval_size: int = 1_000
    """Validation examples, and as many test examples."""
    seed: int = 0
    """Random seed of the examples; no example is in two splits."""

    def __post_init__(self) -> None:
        check_drawn(self)
        for name in ("needles", "key_length", "digits"):
            check_positive(name, getattr(self, name))
        least = self.question + self.needles * self.needle
        require(
            self.length >= least,
            f"length must be at least {least} for {self.needles} needles and a question, got {self.length}",
        )
        require(
            len(LETTERS) ** self.key_length >= self.needles,
            f"key_length must be larger for {self.needles} different keys, got {self.key_length}",
        )

    @property
    def vocab(self) -> int:
        """Bytes."""
        return 256

    @property
    def needle(self) -> int:
        """Bytes of a needle: key, equals sign, number, semicolon."""
        return self.key_length + self.digits + 2

    @property
    def question(self) -> int:
        """Bytes of the question: question mark, key, equals sign, and the number without its last digit."""
        return self.key_length + self.digits + 1

    def build(self) -> NeedleTask:
        return NeedleTask(self)


def draw_needle(config: NeedleTaskConfig, split: Split, index: int) -> Example:
    """An example, determined by configuration, split and index.

    >>> example = draw_needle(NeedleTaskConfig(length=48, needles=2), "train", 0)
    >>> bytes(example.inputs.astype("uint8"))
    b'road long small papewq=30;r vnh=00;oice qui?wq=3'
    >>> bytes(example.target[-2:].astype("uint8"))
    b'30'
    """
    random = generator(config, split, index)
    keys: list[bytes] = []
    while len(keys) < config.needles:
        key = random.choice(LETTERS, config.key_length).tobytes()
        if key not in keys:
            keys.append(key)
    numbers = [random.choice(DIGITS, config.digits).tobytes() for _ in keys]
    asked = int(random.integers(len(keys)))
    size = config.length - config.question - config.needles * config.needle
    text = b""
    while len(text) < size:
        text += WORDS[random.integers(len(WORDS))] + b" "
    cuts = [0, *sorted(random.integers(size + 1, size=len(keys)).tolist()), size]
    parts = [text[: cuts[1]]]
    for i, (key, number) in enumerate(zip(keys, numbers, strict=True)):
        parts += [key + b"=" + number + b";", text[cuts[i + 1] : cuts[i + 2]]]
    answer = numbers[asked]
    whole = b"".join(parts) + b"?" + keys[asked] + b"=" + answer[:-1]
    targets = np.full(config.length, IGNORE, dtype=np.int64)
    targets[-config.digits :] = list(answer)
    return Example(np.frombuffer(whole, dtype=np.uint8).astype(np.int64), targets)


class NeedleTask(DrawnTask):
    """Needles in a haystack of bytes."""

    name = "needle"

    def __init__(self, config: NeedleTaskConfig | None = None) -> None:
        self.config = config or NeedleTaskConfig()
        super().__init__(self.config)

    def draw(self, split: Split, index: int) -> Example:
        return draw_needle(self.config, split, index)

    def show(self, example: Example) -> str:
        assert isinstance(example.target, np.ndarray)
        answer = example.target[example.target != IGNORE]
        above, below = (bytes(part.astype(np.uint8)).decode("ascii") for part in (example.inputs, answer))
        return f"inputs   {above}\ntargets  {below.rjust(len(above))}"
