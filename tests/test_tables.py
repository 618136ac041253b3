"""Tables of every kind, and what is wrong with them: refused or counted, with the place and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seqboat.data.store import Skips
from seqboat.own.tables import check_columns, read_table

ROWS = [("one, two", "b"), ("drei\nvier", "a"), ('say "five"', "b")]


def read(
    path: Path, content: str | bytes
) -> tuple[list[tuple[str, dict[str, object]]], list[dict[str, str]]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    skips = Skips(most=1.0)
    rows = [(row.place, dict(row.values)) for row in read_table(path, skips)]
    return rows, skips.listed


def test_tables_of_every_kind_are_read_alike(tmp_path: Path) -> None:
    comma = "text,label\n" + '"one, two",b\n"drei\nvier",a\n"say ""five""",b\n'
    tab = "label\textra\ttext\n" + 'b\t1\t"one, two"\na\t2\t"drei\nvier"\nb\t3\t"say ""five"""\n'
    lines = "\n".join(json.dumps({"label": label, "text": text}) for text, label in ROWS)
    tables = {"a.csv": comma.encode("utf-8-sig"), "a.tsv": tab.encode(), "a.jsonl": lines.encode()}
    for name, content in tables.items():
        rows, skipped = read(tmp_path / name, content)
        assert [(values["text"], values["label"]) for _, values in rows] == ROWS and not skipped
    assert [place for place, _ in read(tmp_path / "a.csv", comma)[0]] == ["line 2", "line 3", "line 5"]
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    found = list(read_table(tmp_path / "a.parquet", Skips()))
    assert [(row.values["text"], row.values["label"]) for row in found] == ROWS
    assert found[2].place == "row 3"


def test_a_bad_row_costs_one_row(tmp_path: Path) -> None:
    rows, skipped = read(tmp_path / "a.csv", "text,label\na,1\nshort\nb,2\ntoo,many,fields\n")
    assert [place for place, _ in rows] == ["line 2", "line 4"]
    assert [(skip["record"], skip["reason"]) for skip in skipped] == [
        ("line 3", "expected 2 fields, got 1"),
        ("line 5", "expected 2 fields, got 3"),
    ]
    digits = "1" * 5000
    deep = "[" * 100_000
    rows, skipped = read(
        tmp_path / "a.jsonl",
        f'{{"a": 1}}\nnothing\n[1]\n{{"a": {digits}}}\n{{"a": {deep}}}\n{{"a": 1, "a": 2}}\n\n{{"a": 3}}\n',
    )
    assert [values["a"] for _, values in rows] == [1, 3] and rows[1][0] == "line 8"
    reasons = [skip["reason"] for skip in skipped]
    assert reasons == [
        "not a JSON object",
        "not a JSON object",
        "a number of too many digits",
        "not a JSON object",
        "'a' is in the object twice",
    ]


def test_bad_utf8_in_parquet_is_located(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    buffers = pa.array([b"fine", b"caf\xe9", b"good"], pa.binary()).buffers()
    column = pa.StringArray.from_buffers(3, buffers[1], buffers[2])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    skips = Skips(most=1.0)
    assert [row.values["text"] for row in read_table(tmp_path / "a.parquet", skips)] == ["fine", "good"]
    assert skips.first == "a.parquet, row 2: not UTF-8 at byte 3 of column 'text'"


REFUSED: list[tuple[str, str | bytes, str]] = [
    ("a.csv", "", "a.csv is empty: the first line must name the columns"),
    ("a.csv", "text,text\na,b\n", "line 1: every column needs a name of its own, 'text' is there twice"),
    ("a.csv", "text,\na,b\n", "line 1: every column needs a name of its own, one has no name"),
    ("a.csv", 'text,label\na,1\n"b,2\nc,3\n', "line 3: a quote is opened that is never closed"),
    (
        "a.csv",
        'text,label\na,1\n"b,2\nc,3\nd,4\ne,5\n"f,6\n',
        "a.csv, line 3: .*a quote inside a field must be doubled",
    ),
    (
        "a.csv",
        'text,label\n"a,1\nb,2\nc,3\nd,4\ne",5\n',
        "line 2: a quote swallows 4 lines that look like rows: close or double it",
    ),
    ("a.csv", b"text,label\nfine,1\ncaf\xe9,2\n", r"line 3, byte 4: not utf-8 .* --set encoding=latin-1"),
    ("a.jsonl", b'{"a": "caf\xe9"}\n', "line 1, byte 11: not utf-8"),
    ("a.jsonl", '[{"a": 1}]', "line 1: a JSON array: write one object per line"),
    ("a.json", "[1]", "a.json must be a table .*: write one object per line, as .jsonl"),
    ("a.xlsx", "PK", "a.xlsx must be a table .*: save the sheet as CSV in UTF-8"),
    ("a.csv.gz", "x", "must be a table .*: unpack it first"),
    ("a.parquet", "nothing", "a.parquet is not a Parquet file, or it is damaged"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED, ids=[case[2][:40] for case in REFUSED])
def test_what_cannot_be_trusted_is_refused(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name, content)


def test_columns_are_asked_for_by_their_flags(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with pytest.raises(
        ValueError, match=r"has no column 'text' \(--text names another\): it has body, stars"
    ):
        check_columns(path, {"body": "a", "stars": "1"}, {"text": "--text"})
    with pytest.raises(ValueError, match="separated by ';': --set delimiter=';'"):
        check_columns(path, {"text;label": "a;1"}, {"text": "--text"})
    with pytest.raises(ValueError, match="does not exist"):
        list(read_table(tmp_path / "none.csv", Skips()))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match="is not a file"):
        list(read_table(tmp_path / "folder.csv", Skips()))
