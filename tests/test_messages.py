"""What a mistake looks like to a user: one line that says what is wrong and what to do, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest

from seqboat.cli.main import main
from seqboat.core import extras
from seqboat.run import Run
from seqboat.training.trainer import Trainer
from test_own import TINY

ROWS = [(f"café soup {i}", "good" if i % 2 else "bäd") for i in range(30)]
CSV = "text,label\n" + "".join(f"{text},{label}\n" for text, label in ROWS)
LINES = "".join(json.dumps({"text": text, "label": label}, ensure_ascii=False) + "\n" for text, label in ROWS)


def spreadsheet(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as book:
        book.writestr("xl/workbook.xml", "<workbook/>")


FILES: dict[str, str | bytes] = {
    "ok.csv": CSV,
    "latin.csv": CSV.encode("latin-1"),
    "latin.jsonl": LINES.encode("latin-1"),
    "half.jsonl": "".join(
        line if i % 3 == 0 else line[:12] + "\n" for i, line in enumerate(LINES.splitlines(True))
    ),
    "other.jsonl": LINES.replace('"text"', '"body"'),
    "semicolons.csv": CSV.replace(",", ";"),
    "array.json": "[1, 2",
    "fake.parquet": "nothing",
    "frame.feather": "ARROW1",
    "empty.csv": "",
    "header.csv": "text,label\n",
    "no-text.csv": "text,label\n" + ",a\n" * 20,
    "one-label.csv": CSV.replace("bäd", "good"),
    "many-labels.csv": "text,label\n" + "".join(f"a,w{i}\n" for i in range(1001)),
    "words.csv": CSV,
    "twice.csv": "text,text,label\na,b,c\n",
    "columns.csv": "a,b,label\n1,2,x\n2,3,y\n",
    "tiny.txt": "hi",
    "short.txt": "a few words " * 40,
    "empty.txt": "",
}

CLASSIFY = ["train", "classify"]
OWN = ["train"]
MISTAKES: list[tuple[list[str], str]] = [
    ([*OWN, "latin.csv"], r"latin.csv, line 2, byte 4: not utf-8 .*save it as UTF-8, or name its encoding"),
    ([*OWN, "latin.jsonl"], "latin.jsonl, line 1, byte "),
    ([*OWN, "semicolons.csv"], "separated by ';': --set delimiter=';'"),
    ([*OWN, "half.jsonl"], r"20 of 30 records are bad; the first: half.jsonl, line 2: not a JSON object"),
    (
        [*OWN, "other.jsonl", "--text=text"],
        r"has no column 'text' \(--text names another\): it has body, label",
    ),
    (
        [*OWN, "ok.csv", "--text=body"],
        r"ok.csv has no column 'body' \(--text names another\): it has text, label",
    ),
    ([*OWN, "ok.csv", "--target=stars"], r"ok.csv has no column 'stars' \(--target names another\)"),
    ([*OWN, "book.xlsx"], "book.xlsx must be a table .*: save the sheet as CSV in UTF-8"),
    ([*OWN, "frame.feather"], "write it as CSV or Parquet, in pandas with frame.to_csv"),
    ([*OWN, "fake.parquet"], "fake.parquet is not a Parquet file, or it is damaged"),
    ([*OWN, "array.json"], "array.json must be a table .*: write one object per line, as .jsonl"),
    ([*OWN, "empty.csv"], "empty.csv is empty: the first line must name the columns"),
    ([*OWN, "header.csv"], "header.csv has no rows"),
    ([*OWN, "no-text.csv"], "20 of 20 records are bad; the first: no-text.csv, line 2: empty text"),
    (
        [*OWN, "one-label.csv"],
        r"must have at least 2 different labels, got 1: 'good' \(--target names another",
    ),
    ([*OWN, "many-labels.csv"], r"at most 1,000 different labels, got 1,001: .*learn numbers"),
    (
        [*OWN, "words.csv", "--set", "task=regress"],
        "30 of 30 records are bad; .*line 2: not a number",
    ),
    (
        [*OWN, "ok.csv", "--set", "task=tag"],
        "30 of 30 records are bad; .*'label' must be a list",
    ),
    ([*OWN, "twice.csv"], "line 1: every column needs a name of its own, 'text' is there twice"),
    (
        [*OWN, "columns.csv"],
        "which column is the input.*--text NAME for texts, --series ID --channels A B",
    ),
    ([*OWN, "ok.csv", "--series=text"], "a series needs --channels: name the columns with numbers"),
    ([*OWN, "nowhere.csv"], "nowhere.csv does not exist: expected a table, or a folder"),
    ([*OWN, "nothing.csv"], "nothing.csv"),
    ([*OWN, "ok.csv", "--minutes=0"], "minutes must be positive, got 0"),
    ([*OWN, "ok.csv", "--set", "max_lenght=3"], r"--set 'max_lenght' is unknown; did you mean max_length\?"),
    ([*OWN, "ok.csv", "--set", "max_length=x"], "max_length must be an integer"),
    ([*OWN, "ok.csv", "--set", "steps"], "--set needs name=value, got 'steps'"),
    (
        [*OWN, "ok.csv", "--model.d_model=8"],
        "--model.d_model=8: settings of own data are given as --set name=value",
    ),
    (["train", "--target=label"], "--target: name the table first"),
    (CLASSIFY, "--data.train must name a table"),
    (
        [*CLASSIFY, "--data.train=ok.csv", "--model.mixer.gau.window=99999999999999999999"],
        r"window must be less than 2\^63, got 99999999999999999999",
    ),
    (
        ["train", "lm", "--data.text=short.txt"],
        r"short.txt: with training.carry_state, each of the 8 texts of a batch needs a window of tokens, and there",
    ),
    (
        ["train", "lm", "--data.text=short.txt", "--training.carry_segments=0"],
        "carry_segments must be an integer >= 1, got 0",
    ),
    (
        ["train", "lm", "--data.text=tiny.txt"],
        "tiny.txt: 2 bytes are too few to learn from and to hold some out: at least 30 are needed",
    ),
    (
        [*CLASSIFY, "--data.train=ok.csv", "--data.max_lenght=3"],
        r"--data.max_lenght is not a field of this configuration; did you mean --data.max_length\?",
    ),
    ([*CLASSIFY, "--data.max_length=x"], "data.max_length must be an integer or None, got 'x'"),
    (
        ["generate", "--prompt=The", "--temperature=0"],
        "--temperature must be above 0, got 0; --greedy always takes",
    ),
    (["eval", "enwik8-small", "--split=dev"], r"argument --split: invalid choice: 'dev' \(choose from"),
    (["paper", "data", "show", "listops-small"], "run `seqboat paper data prepare listops-small`"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"), MISTAKES, ids=[" ".join(words)[:60] for words, _ in MISTAKES]
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argument in arguments:
        name = argument.partition("=")[2] or argument
        if name in FILES:
            content = FILES[name]
            Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        elif name == "nothing.csv":
            Path(name).mkdir()
        elif name.endswith(".xlsx"):
            spreadsheet(folder / name)
    before = set(folder.iterdir())
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
    said = capsys.readouterr()
    assert code == 2 and said.out == ""
    assert any(line.startswith(f"seqboat {arguments[0]}: error: ") for line in said.err.splitlines()[-1:])
    assert len(notes) <= 1
    text = "\n".join([said.err, *(str(note.message) for note in notes)])
    assert re.search(message, text), text
    # not even an empty runs/
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize("library", sorted(extras.EXTRAS))
def test_missing_libraries_name_the_command_that_installs_them(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    with pytest.raises(ValueError, match=r"this needs .*: pip install 'seqboat\[\w+\]'"):
        extras.check_installed(library, "this")


def test_bytes_that_are_no_text_are_learned_as_they_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("noise.bin").write_bytes(bytes(range(256)) * 4)
    options = [option for option in TINY if "max_length" not in option]
    assert main(["train", "lm", "--data.text=noise.bin", "--data.segment=16", "--out=run", *options]) == 0
    said = capsys.readouterr().out
    assert "warning     noise.bin is not UTF-8 at byte 128: its bytes are learned as they are" in said
    assert re.search(r"baselines   val bits: byte frequencies [78]\.\d+, counts after 3 bytes", said)


def test_a_stopped_run_names_the_command_that_continues_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("ok.csv").write_text(CSV, encoding="utf-8")
    command = ["train", "classify", "--data.train=ok.csv", "--out=my runs/1", *TINY, "--schedule.steps=4"]
    count = 0

    def stop_once(self: Any, result: Any, speed: float) -> None:
        nonlocal count
        count += 1
        if count == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "_log", stop_once)
    assert main([*command, "--training.log_every=1"]) == 130
    *_, told, line = capsys.readouterr().err.splitlines()
    assert told.startswith("stopped by SIGINT after step 2") and told.endswith("my runs/1")
    assert line == "continue with: seqboat train --resume --out 'my runs/1'"
    assert main(["train", "--resume", "--out", "my runs/1"]) == 0
    assert Run("my runs/1", "latest").step == 4


def test_a_second_interrupt_names_it_too(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    Path("ok.csv").write_text(CSV, encoding="utf-8")
    monkeypatch.setattr(Trainer, "_loop", interrupt)
    assert main(["train", "classify", "--data.train=ok.csv", "--out=run", *TINY]) == 130
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "continue with: seqboat train --resume --out run",
        "stopped",
    ]
