"""The ListOps generator against an evaluator that shares none of its code, and the published table."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from seqboat.data.shards import make_parts
from seqboat.data.store import ArrayStore, Staging
from seqboat.tasks import listops
from seqboat.tasks.listops import Expression, ListOpsConfig
from small_runs import write_listops

SMALL = ListOpsConfig(max_depth=5, max_arguments=5, longer_than=9, shorter_than=101)


def evaluate(tokens: Sequence[str]) -> int:
    """A stack machine: push until a bracket closes, then reduce to the value of the innermost operator."""
    stack: list[str | int] = []
    for token in tokens:
        if token != "]":
            stack.append(token if token.startswith("[") else int(token))
            continue
        values: list[int] = []
        while isinstance(stack[-1], int):
            top = stack.pop()
            assert isinstance(top, int)
            values.append(top)
        operator = str(stack.pop())
        results = {
            "[MIN": min(values),
            "[MAX": max(values),
            "[MED": int(statistics.median(values)),
            "[SM": sum(values) % 10,
        }
        stack.append(results[operator])
    (value,) = stack
    assert isinstance(value, int)
    return value


def shape(tokens: Sequence[str]) -> tuple[int, list[int]]:
    """The depth of the deepest node, the root's being 1, and the argument counts of all operators."""
    deepest = 0
    counts: list[int] = []
    open_counts: list[int] = []
    for token in tokens:
        if token == "]":
            counts.append(open_counts.pop())
            continue
        if open_counts:
            open_counts[-1] += 1
        deepest = max(deepest, len(open_counts) + 1)
        if token.startswith("["):
            open_counts.append(0)
    return deepest, counts


def test_values_agree_with_a_stack_machine():
    for config, count in ((SMALL, 900), (ListOpsConfig(), 100)):
        for tokens, value in listops.generate(count, seed=3, config=config):
            assert evaluate(tokens) == value, " ".join(tokens)


@pytest.mark.parametrize("config", [SMALL, ListOpsConfig()])
def test_expressions_keep_to_the_configuration(config: ListOpsConfig):
    expressions = listops.generate(150, seed=1, config=config)
    assert len({e.tokens for e in expressions}) == 150
    depths, counts = [], []
    for tokens, _ in expressions:
        assert config.longer_than < len(tokens) < config.shorter_than
        digits = sum(token.isdigit() for token in tokens)
        assert len(tokens) == digits + 2 * tokens.count("]")  # a digit counts 1, an operator 2
        depth, arguments = shape(tokens)
        depths.append(depth)
        counts.extend(arguments)
    assert max(depths) == config.max_depth
    assert (min(counts), max(counts)) == (2, config.max_arguments)
    assert {token for e in expressions for token in e.tokens} == set(listops.TOKENS[1:])


def test_shares_of_operators_and_argument_counts():
    """Unfiltered, an argument is an operator with the given probability; counts and operators are uniform."""
    config = ListOpsConfig(max_depth=3, max_arguments=4, longer_than=0, shorter_than=10_000)
    roots = [e.tokens for e in listops.generate(3000, seed=5, config=config)]
    inner, arguments = 0, 0
    for tokens in roots:
        depth = 0
        for token in tokens[1:-1]:
            arguments += depth == 0 and token != "]"
            inner += depth == 0 and token.startswith("[")
            depth += 1 if token.startswith("[") else -1 if token == "]" else 0
    # keeping only distinct expressions takes a few short ones away, so the shares are not exactly these
    assert abs(inner / arguments - 0.25) < 0.03
    first = [tokens[0] for tokens in roots]
    assert all(abs(first.count(name) / 3000 - 0.25) < 0.03 for name in listops.OPERATORS)


def test_same_seed_same_expressions():
    assert listops.generate(50, seed=7, config=SMALL) == listops.generate(50, seed=7, config=SMALL)
    assert listops.generate(50, seed=7, config=SMALL) != listops.generate(50, seed=8, config=SMALL)
    first = listops.generate(20, seed=7, config=SMALL)
    assert list(islice(listops.iterate(7, SMALL), 20)) == first
    # the bytes of a seed never change: data made anywhere, by any version, is the same
    assert " ".join(listops.generate(1, seed=0, config=SMALL)[0].tokens) == (
        "[MAX 8 0 3 6 [MAX [MAX [MED 9 8 ] 0 5 1 7 ] 8 9 5 5 ] ]"
    )


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 100 expressions for a configuration that has 3,600, so that blocks have some in common."""
    monkeypatch.setattr(listops, "BLOCK_TOKENS", 1000)


COMMON = ListOpsConfig(max_depth=2, max_arguments=3, longer_than=0, shorter_than=10)


@pytest.mark.usefixtures("short_blocks")
def test_blocks_are_joined_without_repetition() -> None:
    expressions = listops.generate(450, seed=3, config=COMMON)
    assert len(set(expressions)) == 450
    blocks = [
        [Expression(listops.decode(ids), value) for ids, value in islice(stream, 100)]
        for stream in (listops.iterate_block(3, COMMON, block) for block in range(6))
    ]
    assert expressions[:100] == blocks[0]
    assert 100 < len({e for block in blocks[:2] for e in block}) < 200
    # first come, first kept
    assert expressions == list(dict.fromkeys(e for block in blocks for e in block))[:450]


@pytest.mark.usefixtures("short_blocks")
def test_the_first_block_is_the_whole_stream_of_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = listops.generate(100, seed=3, config=COMMON)
    monkeypatch.setattr(listops, "BLOCK_TOKENS", 10**9)
    assert listops.generate(100, seed=3, config=COMMON) == first


@pytest.mark.usefixtures("short_blocks")
def test_prepared_blocks_are_the_expressions_of_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process or two, in one go or interrupted."""
    counts = {"train": 400, "val": 30, "test": 20}

    def run(folder: Path, workers: int) -> dict[str, str]:
        told: list[int] = []
        with Staging(folder, "listops", {"seed": 3}) as staging:
            made = listops.prepare_drawn(staging, counts, 3, workers, told.append, COMMON)
            staging.finish("a test", made)
        assert sum(told) >= 450
        store = ArrayStore.find(folder, "listops")
        return {name: entry["sha256"] for name, entry in store.manifest["arrays"].items()}

    one = run(tmp_path / "one", 1)
    store = ArrayStore.find(tmp_path / "one", "listops")
    expressions = listops.generate(450, seed=3, config=COMMON)
    assert store["val.labels"].tolist() == [value for _, value in expressions[400:430]]
    starts = store["test.offsets"]
    assert listops.decode(store["test.tokens"][starts[4] : starts[5]]) == expressions[434].tokens
    assert run(tmp_path / "two", 2) == one

    real = listops._make_block

    def fails_late(*arguments: Any) -> None:
        if arguments[-2] == 2:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(listops, "_make_block", fails_late)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", 1)
    monkeypatch.setattr(
        listops, "_make_block", lambda *a: real(*a) if a[-2] >= 2 else pytest.fail("made again")
    )
    assert run(tmp_path / "cut", 1) == one


@pytest.mark.usefixtures("short_blocks")
def test_a_configuration_with_too_few_expressions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (listops,):
        monkeypatch.setattr(module, "MAX_DRAWS", 2000)
    tiny = ListOpsConfig(max_depth=2, max_arguments=2, longer_than=0, shorter_than=10)
    with pytest.raises(ValueError, match="no more than 400 distinct"):
        listops.generate(401, config=tiny)
    with pytest.raises(ValueError, match="no more than 400 distinct"), Staging(tmp_path, "tiny") as staging:
        listops.prepare_drawn(staging, {"train": 401}, 0, 1, lambda count: None, tiny)
    assert not list(tmp_path.iterdir())


def test_what_goes_wrong_in_another_process_is_said_in_this_one() -> None:
    # a function that other processes can import, and that refuses every part
    refuse: Any = operator.indexOf
    with pytest.raises(ValueError, match="not in sequence"):
        make_parts(refuse, [(), ()], 2, lambda count: None)  # type: ignore[list-item]


def test_impossible_configurations_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listops, "MAX_DRAWS", 20_000)
    tiny = ListOpsConfig(max_depth=2, max_arguments=2, longer_than=0, shorter_than=100)
    with pytest.raises(ValueError, match="no more than 400 distinct"):
        listops.generate(401, config=tiny)  # four operators on two digits
    for options, message in (
        ({"max_depth": 1}, "max_depth must be an integer >= 2, got 1"),
        ({"max_arguments": 1}, "max_arguments must be"),
        ({"operator_rate": 1.5}, r"operator_rate must be in \[0, 1\], got 1.5"),
        ({"longer_than": 10, "shorter_than": 11}, r"room above longer_than \(10\), got 11"),
    ):
        with pytest.raises(ValueError, match=message):
            ListOpsConfig(**options)
    with pytest.raises(ValueError, match="count must be"):
        listops.generate(-1)


def test_ids():
    tokens = ("[MAX", "4", "[MIN", "7", "3", "]", "1", "]")
    ids = listops.encode(tokens)
    assert ids.min() > listops.PAD == 0
    assert listops.decode(ids) == tokens
    assert listops.decode([*ids[:3].tolist(), 0, 0]) == tokens[:3]
    with pytest.raises(ValueError, match="got '11'"):
        listops.encode(["[MAX", "11", "]"])


def test_published_table(tmp_path: Path):
    expression = Expression(("[MAX", "4", "[MIN", "7", "3", "]", "1", "]"), 4)
    line = "( ( ( ( [MAX 4 ) ( ( ( [MIN 7 ) 3 ) ] ) ) 1 ) ] )\t4"
    assert listops.format_line(expression) == line
    assert listops.parse_line(line + "\r\n") == expression
    expressions = listops.generate(30, seed=2, config=SMALL)
    write_listops(tmp_path / "basic_test.tsv", expressions)
    text = (tmp_path / "basic_test.tsv").read_text()
    assert text.startswith("Source\tTarget\n( (") and text.count("\n") == 31
    assert [listops.parse_line(line) for line in text.splitlines()[1:]] == expressions
    # every operator, argument and bracket after the first part of a list closes one parenthesis
    assert all(text.count(c) == sum(len(e.tokens) - 1 for e in expressions) for c in "()")


def test_broken_lines_are_refused() -> None:
    for line, message in (
        ("( [MIN 3 )", "a line must be an expression, a tab and a digit"),
        ("( ( ( [MIN 3 ) 4 ) ] )\t12", "a line must be"),
        ("( ( ( [MIN 3 ) 4\t3", r"tokens must be one whole expression; got '\[MIN 3 4'"),
        ("[MIN 3 ] 4 ]\t3", "tokens must be one whole expression"),
        ("\t3", "tokens must be one whole expression; got ''"),
        ("( [AVG 3 )\t3", r"tokens must be .* got '\[AVG'"),
    ):
        with pytest.raises(ValueError, match=message):
            listops.parse_line(line)
    with pytest.raises(ValueError, match="not closed"):
        listops.to_source(["[MIN", "3"])
    with pytest.raises(ValueError, match="must begin with"):
        listops.to_source(["3"])
    with pytest.raises(ValueError, match="got 2 more after its end"):
        listops.to_source(["[MIN", "3", "4", "]", "5", "]"])
