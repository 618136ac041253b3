"""ListOps: nested expressions of MIN, MAX, MED and SM over digits, and the digit each is worth.

    [MAX 4 [MIN 7 3 ] 1 ]  ->  4

The task of Nangia and Bowman (2018) in the parameters of the Long Range Arena, section 4 of the paper. This
module makes expressions, turns them into token ids, and reads and writes the published table, one expression
and its value per line:

    Source                                                Target
    ( ( ( ( [MAX 4 ) ( ( ( [MIN 7 ) 3 ) ] ) ) 1 ) ] )     4

The parentheses of that table bind each operator to its arguments one by one; they say nothing that the brackets
do not, and models never see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import count as numbers
from itertools import islice
from os import PathLike
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqboat.checks import check_positive, require
from seqboat.data.console import Advance
from seqboat.data.files import replacing
from seqboat.data.shards import make_parts
from seqboat.data.sources import Source
from seqboat.data.store import Prepared, RaggedWriter, Skips, Staging
from seqboat.tasks.base import SPLITS, Dataset, Example, Split
from seqboat.tasks.stored import (
    FREE,
    LRA_FILE,
    LRA_PAGE,
    DatasetInfo,
    RaggedDataset,
    StoredTask,
    StoredTaskConfig,
)

DIGITS = tuple("0123456789")
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSE = "]"
TOKENS = ("<pad>", *DIGITS, *OPERATORS, CLOSE)
"""Every token; its place is its id."""
PAD = 0
"""The id of padding."""
CLASSES = 10
"""Values: the digits."""
MAX_DRAWS = 1_000_000
"""Expressions drawn in a row without one to keep, after which the configuration is held to be impossible."""
BLOCK_TOKENS = 20_000_000
"""Tokens that a block of expressions has at most; each block has a separate stream of random numbers."""

_IDS = {token: i for i, token in enumerate(TOKENS)}
_DIGIT, _OPERATOR, _CLOSE = _IDS["0"], _IDS[OPERATORS[0]], _IDS[CLOSE]
_HEADER = "Source\tTarget"
_TABLES = {f"basic_{split}.tsv": split for split in SPLITS}


@dataclass(frozen=True, kw_only=True)
class ListOpsConfig:
    """Which expressions to make; by default those of the Long Range Arena."""

    max_depth: int = 10
    """Depth of the deepest nodes, which are digits; the root has depth 1."""
    max_arguments: int = 10
    """An operator has from 2 to this many arguments, all counts alike."""
    operator_rate: float = 0.25
    """Probability that an argument above the largest depth is an operator, not a digit."""
    longer_than: int = 500
    """Keep expressions of more tokens than this; a digit counts 1, an operator and its closing bracket 2."""
    shorter_than: int = 2000
    """Keep expressions of fewer tokens than this."""

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
    """An expression and what it is worth."""

    tokens: tuple[str, ...]
    """digits, opening operators such as "[MAX", and "]" """
    value: int
    """from 0 to 9"""


class _TooLong(Exception):
    """The expression being drawn has reached a length at which it cannot be kept."""


def _apply(operator: int, values: list[int]) -> int:
    if operator == 0:
        return min(values)
    if operator == 1:
        return max(values)
    if operator == 2:
        values.sort()
        middle = len(values) // 2
        # the integer part of the median: of an even count, the mean of the two in the middle
        return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2
    return sum(values) % 10


def _draw(random: Random, config: ListOpsConfig, depth: int, ids: bytearray) -> int:
    """Append the ids of an operator at this depth and of everything below it; returns its value."""
    # random.random() alone: Python promises that its numbers stay the same for a seed
    uniform = random.random
    operator = int(uniform() * len(OPERATORS))
    count = 2 + int(uniform() * (config.max_arguments - 1))
    ids.append(_OPERATOR + operator)
    values = []
    for _ in range(count):
        if depth + 1 < config.max_depth and uniform() < config.operator_rate:
            values.append(_draw(random, config, depth + 1, ids))
        else:
            digit = int(uniform() * 10)
            ids.append(_DIGIT + digit)
            values.append(digit)
    ids.append(_CLOSE)
    if len(ids) >= config.shorter_than:
        raise _TooLong
    return _apply(operator, values)


def block_size(config: ListOpsConfig) -> int:
    """How many expressions a block has."""
    return max(BLOCK_TOKENS // config.shorter_than, 1)


def _digest(ids: bytes | bytearray) -> bytes:
    """Sixteen bytes that stand for an expression of up to thousands of tokens."""
    return blake2b(ids, digest_size=16).digest()


def _exhausted(found: int, config: ListOpsConfig) -> ValueError:
    return ValueError(
        f"config allows no more than {found} distinct expressions that {MAX_DRAWS:,} draws can find: {config}"
    )


def _iterate_block(seed: int, config: ListOpsConfig, block: int) -> Iterator[tuple[bytearray, int]]:
    """Ids and values of distinct expressions without end, by the random numbers of a block."""
    # the first block continues what a seed has always given; above it all numbers are free
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
        digest = _digest(ids)
        if digest in seen:
            continue
        seen.add(digest)
        misses = 0
        yield ids, value
    raise _exhausted(len(seen), config)


def iterate(seed: int = 0, config: ListOpsConfig | None = None) -> Iterator[Expression]:
    """Distinct expressions without end, the same for the same seed.

    They come in blocks that can be made apart from each other; what an earlier block has is left out. The root is
    always an operator: a digit alone would only be thrown away for its length.

    Raises:
        ValueError: if a million draws in a row bring nothing new of an allowed length.
    """
    config = config or ListOpsConfig()
    seen: set[bytes] = set()
    misses = 0
    for block in numbers():
        for ids, value in islice(_iterate_block(seed, config, block), block_size(config)):
            digest = _digest(ids)
            if digest in seen:
                misses += 1
                if misses >= MAX_DRAWS:
                    raise _exhausted(len(seen), config)
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
    """The tokens of an expression's ids; padding is left out."""
    return tuple(TOKENS[i] for i in ids if i != PAD)


def pad(sequences: Sequence[NDArray[np.uint8]]) -> NDArray[np.int64]:
    """Encoded expressions as rows (batch, time), padded on the right to the longest.

    >>> pad([encode(["1"]), encode(["2", "3"])]).tolist()
    [[2, 0], [3, 4]]
    """
    rows = np.full((len(sequences), max(map(len, sequences), default=0)), PAD, dtype=np.int64)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return rows


def to_source(tokens: Sequence[str]) -> str:
    """An expression as the published table writes it.

    >>> to_source(["[MIN", "3", "7", "]"])
    '( ( ( [MIN 3 ) 7 ) ] )'
    """
    # an operator with its first i arguments is itself bound in parentheses, as is each step up to the bracket
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
    """The tokens of an expression of the published table; parentheses are dropped.

    >>> from_source("( ( ( [MIN 3 ) 7 ) ] )")
    ('[MIN', '3', '7', ']')
    """
    tokens = tuple(token for token in text.split() if token not in ("(", ")"))
    ids = encode(tokens)
    depth = np.cumsum(((ids >= _OPERATOR) & (ids < _CLOSE)).astype(int) - (ids == _CLOSE))
    whole = len(ids) > 0 and depth[-1] == 0 and bool((depth[:-1] > 0).all())
    require(whole, f"tokens must be one whole expression; got {' '.join(tokens)[-40:]!r}")
    return tokens


def format_line(expression: Expression) -> str:
    """One line of the published table, without its end."""
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
    """Write expressions as the published files have them (basic_train.tsv and its like)."""
    with open(path, "w", encoding="ascii", newline="\n") as file:
        file.write(_HEADER + "\n")
        file.writelines(format_line(expression) + "\n" for expression in expressions)


def read_table(path: str | PathLike[str]) -> Iterator[Expression]:
    """Read expressions from a published file.

    Raises:
        ValueError: naming the file and the line that is not as expected.
    """
    with open(path, encoding="ascii", errors="replace") as file:
        header = file.readline().rstrip("\r\n")
        require(header == _HEADER, f"{path}: first line must be {_HEADER!r}, got {header[:40]!r}")
        for number, line in enumerate(file, start=2):
            try:
                yield parse_line(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ListOpsTaskConfig(StoredTaskConfig):
    """The value of an expression."""

    max_length: int = 2000
    """Tokens after which an expression is cut; published ones are shorter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("max_length", self.max_length)

    def build(self) -> ListOpsTask:
        return ListOpsTask(self)

    @classmethod
    def datasets(cls) -> Mapping[str, DatasetInfo]:
        return DATASETS


class ListOpsTask(StoredTask):
    """The value of an expression."""

    name = "listops"
    kind = "classify"
    vocab = len(TOKENS)
    classes = CLASSES
    token_names = TOKENS

    def __init__(self, config: ListOpsTaskConfig | None = None) -> None:
        config = config or ListOpsTaskConfig()
        super().__init__(config)
        self.max_length = config.max_length

    def whole(self, split: Split) -> Dataset:
        return RaggedDataset(self.store, split, self.max_length)

    def show(self, example: Example) -> str:
        return f"{' '.join(decode(example.inputs.tolist()))} -> {example.target}"

    def read_text(self, text: bytes) -> NDArray[Any]:
        return encode(from_source(text.decode("utf-8", errors="replace"))).astype(np.int64)

    def token_classes(self, inputs: NDArray[Any]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        return ("digit", "operator", "bracket"), np.digitize(inputs, (_OPERATOR, _CLOSE)).astype(np.int64)


def prepare(source: Source, staging: Staging, skips: Skips) -> Prepared:
    """Read `basic_{train,val,test}.tsv`, in a folder or the LRA archive."""
    counts: dict[str, int] = {}
    for member in source.members(lambda name: name.rpartition("/")[2] in _TABLES):
        split = _TABLES[member.base]
        require(split not in counts, f"{source} has more than one {member.base}")
        expressions = RaggedWriter(staging, split)
        values = []
        lines = member.read().decode("ascii", errors="replace").splitlines()
        require(lines[:1] == [_HEADER], f"{source}: the first line of {member.name} must be {_HEADER!r}")
        for number, line in enumerate(lines[1:], start=2):
            try:
                expression = parse_line(line)
            except ValueError as error:
                skips.add(member.name, f"line {number}", str(error))
                continue
            expressions.append(encode(expression.tokens))
            values.append(expression.value)
        staging.put(f"{split}.labels", np.array(values, np.uint8))
        counts[split] = len(values)
    for name, split in _TABLES.items():
        require(counts.get(split, 0) > 0, f"{source} holds no expressions for {split}: expected {name}")
    return Prepared(counts)


def prepare_drawn(
    staging: Staging,
    counts: Mapping[str, int],
    seed: int,
    workers: int,
    advance: Advance,
    config: ListOpsConfig,
) -> Prepared:
    """Make the first expressions of a seed, the splits one after the other; finished blocks are kept.

    Blocks are made apart from each other, by any number of processes, and then joined as `iterate` joins them.
    """
    folder = staging.folder / "blocks"
    folder.mkdir(exist_ok=True)
    size, total = block_size(config), sum(counts.values())
    wanted = total
    while True:
        ends = [min(size, wanted - start) for start in range(0, wanted, size)]
        files = [folder / f"{block:06d}-{end}.npz" for block, end in enumerate(ends)]
        missing = [block for block, file in enumerate(files) if not file.exists()]
        advance(sum(ends) - sum(ends[block] for block in missing))
        make_parts(partial(_make_block, files, ends, seed, config), missing, workers, advance)
        fresh = _first_seen(files)
        lacking = total - sum(len(rows) for rows in fresh)
        if lacking <= 0:
            break
        if wanted - total >= MAX_DRAWS:
            raise _exhausted(total - lacking, config)
        # what two blocks have in common is replaced by what comes later
        wanted += max(lacking, wanted // 10)
    stream = _read_blocks(files, fresh)
    for split, number in counts.items():
        expressions = RaggedWriter(staging, split)
        values = []
        for ids, value in islice(stream, number):
            expressions.append(ids)
            values.append(value)
        staging.put(f"{split}.labels", np.array(values, np.uint8))
    return Prepared(dict(counts), {"seed": seed})


def _make_block(
    files: Sequence[Path],
    ends: Sequence[int],
    seed: int,
    config: ListOpsConfig,
    block: int,
    advance: Advance,
) -> None:
    """Write the first expressions of a block."""
    rows, values = [], []
    for ids, value in islice(_iterate_block(seed, config, block), ends[block]):
        rows.append(np.frombuffer(ids, np.uint8))
        values.append(value)
        if len(rows) % 100 == 0:
            advance(100)
    advance(len(rows) % 100)
    lengths = np.array([len(row) for row in rows], np.int64)
    with replacing(files[block]) as stage, open(stage, "wb") as file:
        np.savez(file, tokens=np.concatenate(rows), lengths=lengths, values=np.array(values, np.uint8))


def _read_block(file: Path) -> Iterator[tuple[NDArray[np.uint8], int]]:
    with np.load(file, allow_pickle=False) as arrays:
        tokens, lengths, values = arrays["tokens"], arrays["lengths"], arrays["values"]
    start = 0
    for length, value in zip(lengths.tolist(), values.tolist(), strict=True):
        yield tokens[start : start + length], value
        start += length


def _first_seen(files: Sequence[Path]) -> list[set[int]]:
    """Which expressions of each block no earlier block has."""
    seen: set[bytes] = set()
    fresh = []
    for file in files:
        digests = [_digest(ids.tobytes()) for ids, _ in _read_block(file)]
        fresh.append({row for row, digest in enumerate(digests) if digest not in seen})
        seen.update(digests)
    return fresh


def _read_blocks(files: Sequence[Path], fresh: Sequence[set[int]]) -> Iterator[tuple[NDArray[np.uint8], int]]:
    for file, rows in zip(files, fresh, strict=True):
        yield from (pair for row, pair in enumerate(_read_block(file)) if row in rows)


LISTOPS = ListOpsConfig()
LISTOPS_SMALL = ListOpsConfig(max_depth=5, max_arguments=5, longer_than=9, shorter_than=129)

DATASETS = {
    "listops": DatasetInfo(
        task=ListOpsTaskConfig(),
        title="nested list operations of 500 to 2,000 tokens, ten classes",
        license=FREE,
        size=100_000_000,
        get=f"nothing, it is made; or basic_train.tsv, basic_val.tsv and basic_test.tsv of {LRA_PAGE}",
        folders=("listops-1000", "listops"),
        remote=LRA_FILE,
        read=prepare,
        draw=partial(prepare_drawn, config=LISTOPS),
        settings=LISTOPS,
        counts=(96_000, 2_000, 2_000),
    ),
    "listops-small": DatasetInfo(
        task=ListOpsTaskConfig(store="listops-small"),
        title="list operations of 10 to 128 tokens, for trials",
        license=FREE,
        size=2_300_000,
        get="nothing, it is made",
        draw=partial(prepare_drawn, config=LISTOPS_SMALL),
        settings=LISTOPS_SMALL,
        counts=(40_000, 2_000, 2_000),
    ),
}
"""Data sets of this task, by the names of their prepared folders."""
