"""What is printed from files: no control code and no bidirectional override reaches a terminal."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from seqboat.cli.main import main
from seqboat.console import printable
from seqboat.data.files import write_json
from seqboat.training import checkpoint as ck

EVIL = "\x1b]0;owned\x07\u202egood\x9b2J"
# the same as the name of a file, also in a locale without UTF-8
NAME = os.fsdecode(EVIL.encode())
HIDDEN = set("\x1b\x07\u202e\x9b\r")
SMALL = [
    "--model.d_model=8",
    "--model.num_layers=1",
    "--training.batch_size=4",
    "--schedule.steps=2",
    "--schedule.warmup_steps=0",
    "--training.save_every=1",
    "--evaluation.every=2",
]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain Text 1!", "plain Text 1!"),
        ("é 日本 \u00a0 का\u200d", "é 日本 \u00a0 का\u200d"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("\x1b[31m\x9b\x7f\x00", "\\x1b[31m\\x9b\\x7f\\x00"),
        ("\u202e\u2066\u200e\u061c\ufeff", "\\u202e\\u2066\\u200e\\u061c\\ufeff"),
        ("\u2028\udc80", "\\u2028\\udc80"),
    ],
)
def test_what_is_not_text_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    shown.encode()


def test_lines_and_marks() -> None:
    assert printable("a\n\tb\r", lines=True) == "a\n\tb\\r"
    assert printable("a\x1bb\n", lines=True, mark="?") == "a?b\n"
    assert printable(Path("x\x1b")) == "x\\x1b"


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert not HIDDEN & set(out + err), repr(out + err)
    return out + err


def reviews(folder: Path) -> Path:
    for part in ("train", "test"):
        for sentiment in ("pos", "neg"):
            (folder / part / sentiment).mkdir(parents=True)
            for i in range(12):
                (folder / part / sentiment / f"{i}_1.txt").write_text(f"{EVIL} {i}", encoding="utf-8")
    (folder / "train" / "pos" / f"{NAME}.txt").write_bytes(b"\xff")
    return folder


def test_data_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, data = reviews(tmp_path / f"aclImdb{NAME}"), str(tmp_path / "data")
    assert main(["paper", "data", "prepare", "text", "--from", str(source), "--data-dir", data]) == 0
    assert "owned" in shown(capsys)  # the name of the skipped member
    assert main(["paper", "data", "show", "text", "--data-dir", data]) == 0
    assert "owned" in shown(capsys)
    assert main(["paper", "data", "list", "--data-dir", data]) == 0
    assert "owned" in shown(capsys)  # the name of the source
    assert (
        main(
            [
                "paper",
                "data",
                "prepare",
                "text",
                "--from",
                str(tmp_path / NAME),
                "--data-dir",
                data,
                "--force",
            ]
        )
        == 2
    )
    assert "owned" in shown(capsys)


def reseal(folder: Path, **changes: Any) -> None:
    """Change the state of a checkpoint, and its checksum with it."""
    state = {**ck.verify(folder).state, **changes}
    (folder / ck.STATE).write_text(ck._seal(state), encoding="utf-8")


def test_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, other = tmp_path / "rows.csv", tmp_path / "val.csv"
    table.write_text(
        "text,label\n" + "".join(f"row {i},{'ab'[i % 2]}\n" for i in range(20)), encoding="utf-8"
    )
    other.write_text(f"text,label\nrow,{EVIL}\n", encoding="utf-8")
    run = tmp_path / "run"
    assert main(["train", "classify", "--out", str(run), f"--data.train={table}", *SMALL]) == 0
    shown(capsys)
    assert main(["eval", str(run), f"--data.val={other}"]) == 2
    assert "owned" in shown(capsys)  # the label
    shutil.rmtree(run / "step-2")
    reseal(run / "step-1", versions={"torch": EVIL})
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert "written with torch" in shown(capsys)
    (run / "step-2" / NAME).write_text("x")
    (run / "best").write_text("step-2\n")
    with pytest.warns(UserWarning, match="owned") as caught:
        assert main(["eval", str(run)]) == 0
    assert not HIDDEN & set(str(caught[0].message))
    shown(capsys)


def test_the_manifest_of_a_stranger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    write_json(folder / "manifest.json", {"arrays": {}, "format": EVIL})
    assert main(["paper", "data", "list", "--data-dir", str(tmp_path)]) == 0
    assert "owned" in shown(capsys)
    assert json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["format"] == EVIL
