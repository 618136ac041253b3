"""ListOps: nested expressions of MIN, MAX, MED and SM over digits, and the value of each.

    [MAX 4 [MIN 7 3 ] 1 ]  ->  4

The task of Nangia and Bowman (2018) with the parameters of the Long Range Arena, section 4 of the paper: read from
the published table, or generated. The table has one expression and its value per line:

    Source                                                Target
    ( ( ( ( [MAX 4 ) ( ( ( [MIN 7 ) 3 ) ] ) ) 1 ) ] )     4

Its parentheses bind each operator to its arguments one by one; the brackets already say the same, and models never
see the parentheses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import count as numbers
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqboat.console import Advance
from seqboat.core.checks import check_positive, require
from seqboat.data import fairseq as published
from seqboat.data.fairseq import named_symbols
from seqboat.data.files import replacing
from seqboat.data.shards import make_parts
from seqboat.data.sources import Source
from seqboat.data.store import Prepared, RaggedWriter, Skips, Staging
from seqboat.tasks.stored import (
    FREE,
    LRA_FILE,
    LRA_PAGE,
    DatasetInfo,
    RaggedDataset,
    SequenceTask,
    SequenceTaskConfig,
)
from seqboat.tasks.task import SPLITS, Dataset, Example, Split, Task

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


# the task

_TABLES = {f"basic_{split}.tsv": split for split in SPLITS}


@dataclass(frozen=True, kw_only=True)
class ListOpsTaskConfig(SequenceTaskConfig):
    """The value of an expression."""

    max_length: int = 2000
    """Maximum length in tokens; longer expressions are truncated, but published ones are shorter."""

    def build(self) -> ListOpsTask:
        return ListOpsTask(self)

    @classmethod
    def datasets(cls) -> Mapping[str, DatasetInfo]:
        return DATASETS


class ListOpsTask(SequenceTask):
    """The value of an expression."""

    name = "listops"
    kind = "classify"
    vocab = len(TOKENS)
    classes = CLASSES
    token_names = TOKENS

    def __init__(self, config: ListOpsTaskConfig | None = None) -> None:
        super().__init__(config or ListOpsTaskConfig())

    def whole(self, split: Split) -> Dataset:
        return RaggedDataset(self.store, split, self.cut)

    def show(self, example: Example) -> str:
        return f"{' '.join(decode(example.inputs.tolist()))} -> {example.target}"

    def read_tokens(self, text: bytes) -> NDArray[Any]:
        return encode(from_source(text.decode("utf-8", errors="replace"))).astype(np.int64)

    def token_classes(self, inputs: NDArray[Any]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        kinds = np.digitize(inputs, (OPERATOR_ID, CLOSE_ID)).astype(np.int64)
        if self.end_token:
            return ("digit", "operator", "bracket", "end"), np.where(inputs == PAD, 3, kinds)
        return ("digit", "operator", "bracket"), kinds


def prepare(source: Source, staging: Staging, skips: Skips) -> Prepared:
    """Read `basic_{train,val,test}.tsv`, in a folder or the LRA archive, or a folder of binarized expressions."""
    if source.kind() == "folder" and published.is_binarized(source.path):
        return _prepare_binarized(source.path, staging, skips)
    counts: dict[str, int] = {}
    for member in source.members(lambda name: name.rpartition("/")[2] in _TABLES):
        split = _TABLES[member.base]
        require(split not in counts, f"{source} has more than one {member.base}")
        expressions = RaggedWriter(staging, split)
        values = []
        lines = member.read().decode("ascii", errors="replace").splitlines()
        require(lines[:1] == [HEADER], f"{source}: the first line of {member.name} must be {HEADER!r}")
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
        require(counts.get(split, 0) > 0, f"{source} contains no expressions for {split}: expected {name}")
    return Prepared(counts)


def _prepare_binarized(folder: Path, staging: Staging, skips: Skips) -> Prepared:
    symbols, path = published.dictionary(folder)
    contents = {
        place: bytes([ours]) for place, ours in named_symbols(symbols, SYMBOLS, path, PARENTHESES).items()
    }
    contents |= {place: b"" for place, symbol in enumerate(symbols) if symbol in PARENTHESES}
    translate = published.Translation(contents)
    counts = {}
    for split, name in published.SPLITS.items():
        expressions, values = RaggedWriter(staging, split), []
        for (tokens,), value in published.read_examples(folder, name, CLASSES, translate, skips):
            expressions.append(tokens)
            values.append(value)
        staging.put(f"{split}.labels", np.array(values, np.uint8))
        counts[split] = len(values)
    return Prepared(counts)


def prepare_drawn(
    staging: Staging,
    counts: Mapping[str, int],
    seed: int,
    workers: int,
    advance: Advance,
    config: ListOpsConfig,
) -> Prepared:
    """Generate the first expressions of a seed, one split after another; finished blocks are kept.

    Any number of processes make blocks independently; they are then merged as in `iterate`.
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
            raise exhausted(total - lacking, config)
        # duplicates between blocks are replaced by later expressions
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
    for ids, value in islice(iterate_block(seed, config, block), ends[block]):
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
    """The expressions of each block that no earlier block has."""
    seen: set[bytes] = set()
    fresh = []
    for file in files:
        digests = [digest_of_ids(ids.tobytes()) for ids, _ in _read_block(file)]
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
        get=f"nothing, it is generated; or basic_train.tsv, basic_val.tsv and basic_test.tsv of {LRA_PAGE}",
        folders=("listops-1000", "listops"),
        remote=LRA_FILE,
        read=prepare,
        draw=partial(prepare_drawn, config=LISTOPS),
        settings=LISTOPS,
        counts=(96_000, 2_000, 2_000),
    ),
    "listops-small": DatasetInfo(
        task=ListOpsTaskConfig(store="listops-small"),
        title="list operations of 10 to 128 tokens, for quick experiments",
        license=FREE,
        size=2_300_000,
        get="nothing, it is generated",
        draw=partial(prepare_drawn, config=LISTOPS_SMALL),
        settings=LISTOPS_SMALL,
        counts=(40_000, 2_000, 2_000),
    ),
}
"""Data sets of this task, by the names of their prepared folders."""


# Short ListOps expressions, generated on the fly: nothing to prepare, and learnable in minutes.
#
# The stream of distinct expressions of a seed (`iterate`) is divided into test, validation and training examples, in
# this order: no expression is in two splits, and more training examples leave the other splits unchanged.


@dataclass(frozen=True, kw_only=True)
class ShortListOpsTaskConfig:
    """The value of a short expression, generated on the fly."""

    max_depth: int = 5
    """Maximum depth of an expression."""
    max_arguments: int = 5
    """Maximum number of arguments of an operator."""
    min_tokens: int = 10
    """Minimum length of an expression in tokens."""
    max_tokens: int = 100
    """Maximum length of an expression in tokens."""
    train_size: int = 180_000
    """Training examples."""
    eval_size: int = 2_000
    """Validation examples, and as many test examples."""
    seed: int = 0
    """Random seed of the expressions."""

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
    """The expressions of a split, generated by each process on first use."""

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
        return _draw_short(self.config, self.split)


@lru_cache(maxsize=6)
def _draw_short(config: ShortListOpsTaskConfig, split: Split) -> list[tuple[NDArray[np.uint8], int]]:
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
