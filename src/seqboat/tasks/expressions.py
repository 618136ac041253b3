"""The expressions of ListOps: generating them, their token ids, and the published table.

The table has one expression and its value per line:

    Source                                                Target
    ( ( ( ( [MAX 4 ) ( ( ( [MIN 7 ) 3 ) ] ) ) 1 ) ] )     4

Its parentheses bind each operator to its arguments one by one; the brackets already say the same, and models never
see the parentheses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count as numbers
from itertools import islice
from os import PathLike
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import check_positive, require

DIGITS = tuple("0123456789")
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSE = "]"
TOKENS = ("<pad>", *DIGITS, *OPERATORS, CLOSE)
"""All tokens; the id of a token is its index."""
PAD = 0
"""The id of padding."""
CLASSES = 10
"""Number of possible values: the digits."""
MAX_DRAWS = 1_000_000
"""Consecutive rejected expressions after which the configuration counts as impossible."""
BLOCK_TOKENS = 20_000_000
"""Maximum number of tokens in a block of expressions; each block has a separate random stream."""

_IDS = {token: i for i, token in enumerate(TOKENS)}
DIGIT_ID, OPERATOR_ID, CLOSE_ID = _IDS["0"], _IDS[OPERATORS[0]], _IDS[CLOSE]
HEADER = "Source\tTarget"
SYMBOLS = {token: place for token, place in _IDS.items() if place != PAD} | {
    operator[1:]: _IDS[operator] for operator in OPERATORS
}
"""Ids of the symbols of published dictionaries, which may write operators without their bracket."""
PARENTHESES = ("(", ")")
"""Symbols of the table that models never see."""


@dataclass(frozen=True, kw_only=True)
class ListOpsConfig:
    """Which expressions to generate; by default those of the Long Range Arena."""

    max_depth: int = 10
    """Maximum depth; the root has depth 1, and nodes at the maximum depth are digits."""
    max_arguments: int = 10
    """Maximum number of arguments of an operator, drawn uniformly from 2 up."""
    operator_rate: float = 0.25
    """Probability that an argument above the maximum depth is an operator rather than a digit."""
    longer_than: int = 500
    """Keep expressions with more tokens than this; a digit counts 1, an operator with its closing bracket 2."""
    shorter_than: int = 2000
    """Keep expressions with fewer tokens than this."""

    def __post_init__(self) -> None:
        check_positive("max_depth", self.max_depth, least=2)
        check_positive("max_arguments", self.max_arguments, least=2)
        check_positive("longer_than", self.longer_than, least=0)
        check_positive("shorter_than", self.shorter_than)
        require(0 <= self.operator_rate <= 1, f"operator_rate must be in [0, 1], got {self.operator_rate!r}")
        require(
            self.longer_than + 1 < self.shorter_than,
            f"shorter_than must leave room above longer_than ({self.longer_than}), got {self.shorter_than}",
        )


class Expression(NamedTuple):
    """An expression and its value."""

    tokens: tuple[str, ...]
    """digits, opening operators such as "[MAX", and "]" """
    value: int
    """from 0 to 9"""


class _TooLong(Exception):
    """The expression being drawn is already too long to be kept."""


def _apply(operator: int, values: list[int]) -> int:
    if operator == 0:
        return min(values)
    if operator == 1:
        return max(values)
    if operator == 2:
        values.sort()
        middle = len(values) // 2
        # the median rounded down; for an even count, it is the mean of the middle two
        return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2
    return sum(values) % 10


def _draw(random: Random, config: ListOpsConfig, depth: int, ids: bytearray) -> int:
    """Append the ids of an operator at this depth and its arguments; returns its value."""
    # only random.random(), whose numbers Python guarantees to stay the same for a seed
    uniform = random.random
    operator = int(uniform() * len(OPERATORS))
    count = 2 + int(uniform() * (config.max_arguments - 1))
    ids.append(OPERATOR_ID + operator)
    values = []
    for _ in range(count):
        if depth + 1 < config.max_depth and uniform() < config.operator_rate:
            values.append(_draw(random, config, depth + 1, ids))
        else:
            digit = int(uniform() * 10)
            ids.append(DIGIT_ID + digit)
            values.append(digit)
    ids.append(CLOSE_ID)
    if len(ids) >= config.shorter_than:
        raise _TooLong
    return _apply(operator, values)


def block_size(config: ListOpsConfig) -> int:
    """Number of expressions in a block."""
    return max(BLOCK_TOKENS // config.shorter_than, 1)


def digest_of_ids(ids: bytes | bytearray) -> bytes:
    """A 16-byte hash of an expression."""
    return blake2b(ids, digest_size=16).digest()


def exhausted(found: int, config: ListOpsConfig) -> ValueError:
    """The error for a configuration that allows too few expressions."""
    return ValueError(
        f"config allows no more than {found} distinct expressions that {MAX_DRAWS:,} draws can find: {config}"
    )


def iterate_block(seed: int, config: ListOpsConfig, block: int) -> Iterator[tuple[bytearray, int]]:
    """An endless stream of distinct expressions (ids and value) from the random stream of a block."""
    # block 0 uses the seed itself
    random = Random(seed + (block << 64))
    seen: set[bytes] = set()
    misses = 0
    while misses < MAX_DRAWS:
        misses += 1
        ids = bytearray()
        try:
            value = _draw(random, config, 1, ids)
        except _TooLong:
            continue
        if len(ids) <= config.longer_than:
            continue
        digest = digest_of_ids(ids)
        if digest in seen:
            continue
        seen.add(digest)
        misses = 0
        yield ids, value
    raise exhausted(len(seen), config)


def iterate(seed: int = 0, config: ListOpsConfig | None = None) -> Iterator[Expression]:
    """An endless stream of distinct expressions, determined by the seed.

    They come in blocks that can be generated independently; duplicates of earlier blocks are dropped. The root is
    always an operator, since a single digit would be too short.

    Raises:
        ValueError: if a million consecutive draws give no new expression of an allowed length.
    """
    config = config or ListOpsConfig()
    seen: set[bytes] = set()
    misses = 0
    for block in numbers():
        for ids, value in islice(iterate_block(seed, config, block), block_size(config)):
            digest = digest_of_ids(ids)
            if digest in seen:
                misses += 1
                if misses >= MAX_DRAWS:
                    raise exhausted(len(seen), config)
                continue
            seen.add(digest)
            misses = 0
            yield Expression(tuple(TOKENS[i] for i in ids), value)


def generate(count: int, seed: int = 0, config: ListOpsConfig | None = None) -> list[Expression]:
    """The first `count` expressions of a seed.

    >>> small = ListOpsConfig(max_depth=3, max_arguments=3, longer_than=5, shorter_than=12)
    >>> tokens, value = generate(1, seed=1, config=small)[0]
    >>> " ".join(tokens), value
    ('[MAX [MIN 2 0 ] 5 ]', 5)
    """
    check_positive("count", count, least=0)
    return list(islice(iterate(seed, config), count))


def encode(tokens: Iterable[str]) -> NDArray[np.uint8]:
    """The ids of an expression's tokens.

    >>> encode(["[MIN", "3", "7", "]"]).tolist()
    [11, 4, 8, 15]
    """
    try:
        return np.array([_IDS[token] for token in tokens], dtype=np.uint8)
    except KeyError as error:
        raise ValueError(f"tokens must be among {' '.join(TOKENS[1:])}; got {error.args[0]!r}") from None


def decode(ids: Iterable[int]) -> tuple[str, ...]:
    """The tokens of an expression's ids, without padding."""
    return tuple(TOKENS[i] for i in ids if i != PAD)


def to_source(tokens: Sequence[str]) -> str:
    """An expression in the notation of the published table.

    >>> to_source(["[MIN", "3", "7", "]"])
    '( ( ( [MIN 3 ) 7 ) ] )'
    """
    # every prefix of an operator and its arguments is in parentheses
    open_parts: list[list[str]] = []
    done = ""
    for i, token in enumerate(tokens):
        require(done == "", f"tokens must be one expression, got {len(tokens) - i} more after its end")
        if token in OPERATORS:
            open_parts.append([token])
            continue
        require(bool(open_parts), f"tokens must begin with one of {' '.join(OPERATORS)}; got {token!r}")
        open_parts[-1].append(token)
        if token == CLOSE:
            parts = open_parts.pop()
            bound = "( " * (len(parts) - 1) + parts[0] + "".join(f" {part} )" for part in parts[1:])
            if open_parts:
                open_parts[-1].append(bound)
            else:
                done = bound
    require(done != "", "tokens must be one whole expression; its last bracket is not closed")
    return done


def from_source(text: str) -> tuple[str, ...]:
    """The tokens of an expression in the notation of the published table, without parentheses.

    >>> from_source("( ( ( [MIN 3 ) 7 ) ] )")
    ('[MIN', '3', '7', ']')
    """
    tokens = tuple(token for token in text.split() if token not in ("(", ")"))
    ids = encode(tokens)
    depth = np.cumsum(((ids >= OPERATOR_ID) & (ids < CLOSE_ID)).astype(int) - (ids == CLOSE_ID))
    whole = len(ids) > 0 and depth[-1] == 0 and bool((depth[:-1] > 0).all())
    require(whole, f"tokens must be one whole expression; got {' '.join(tokens)[-40:]!r}")
    return tokens


def format_line(expression: Expression) -> str:
    """One line of the published table, without the line end."""
    return f"{to_source(expression.tokens)}\t{expression.value}"


def parse_line(line: str) -> Expression:
    """An expression from one line of the published table."""
    source, tab, target = line.rstrip("\r\n").partition("\t")
    require(
        tab != "" and target in DIGITS,
        f"a line must be an expression, a tab and a digit from 0 to 9; got {line.rstrip()[-40:]!r}",
    )
    return Expression(from_source(source), int(target))


def write_table(path: str | PathLike[str], expressions: Iterable[Expression]) -> None:
    """Write a table in the published format (basic_train.tsv and so on)."""
    with open(path, "w", encoding="ascii", newline="\n") as file:
        file.write(HEADER + "\n")
        file.writelines(format_line(expression) + "\n" for expression in expressions)


def read_table(path: str | PathLike[str]) -> Iterator[Expression]:
    """Read expressions from a published file.

    Raises:
        ValueError: if a line is malformed; the message names file and line.
    """
    with open(path, encoding="ascii", errors="replace") as file:
        header = file.readline().rstrip("\r\n")
        require(header == HEADER, f"{path}: first line must be {HEADER!r}, got {header[:40]!r}")
        for number, line in enumerate(file, start=2):
            try:
                yield parse_line(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
