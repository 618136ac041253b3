"""Your own files: tables with stray quotes, records without end, copies in bounded memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from seqboat.cli.main import main
from seqboat.data import copies
from seqboat.data.store import Skips
from seqboat.own.prepare import read_own
from seqboat.tasks import ClassifyTaskConfig, LMTextTaskConfig

HEADER = "text,label\n"


class TableRow(NamedTuple):
    line: int
    text: bytes
    label: str


def read_rows(path: Path, skips: Skips) -> Iterator[TableRow]:
    """The rows of a table of texts and labels, as tasks read them."""
    task = ClassifyTaskConfig(train=str(path), input="text").build()
    for row in read_own(path, task.source, task.config, skips, "label"):
        try:
            yield TableRow(row.line, bytes(row.stored), task.target.read(row.values, row.stored))
        except ValueError as error:
            skips.add(path.name, row.place, str(error))


def read(folder: Path, content: str | bytes, name: str = "rows.csv") -> tuple[list[TableRow], Skips]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    skips = Skips(most=0.5)
    return list(read_rows(path, skips)), skips


def plain_rows(count: int) -> list[str]:
    return [f"row {i},{'ab'[i % 2]}\n" for i in range(count)]


@pytest.mark.parametrize("stray", ['"never closed,a\n', 'x,"a\n', '"closed" too early,a\n'])
@pytest.mark.parametrize("place", [0, 9, 999])
def test_a_stray_quote_costs_one_row(tmp_path: Path, stray: str, place: int) -> None:
    lines = plain_rows(1000)
    lines[place] = stray
    rows, skips = read(tmp_path, HEADER + "".join(lines))
    assert len(rows) == 999 and skips.count == 1
    assert skips.listed[0]["record"] == f"line {place + 2}" and "quote" in skips.listed[0]["reason"]
    assert [row.line for row in rows] == [i + 2 for i in range(1000) if i != place]


def test_stray_quotes_everywhere(tmp_path: Path) -> None:
    lines = plain_rows(3000)
    lines[::10] = ['"open,a\n'] * 300
    rows, skips = read(tmp_path, HEADER + "".join(lines))
    assert (len(rows), skips.count) == (2700, 300)


def test_a_quote_that_a_later_quote_closes_is_refused(tmp_path: Path) -> None:
    for place in (0, 20):
        lines = plain_rows(1000)
        lines[place], lines[place + 500] = '"open,a\n', 'shut",b\n'
        with pytest.raises(
            ValueError, match=rf"rows.csv, line {place + 2}: a quoted field runs over 501 lines"
        ):
            read(tmp_path, HEADER + "".join(lines))


def test_texts_of_many_lines_are_no_fault(tmp_path: Path) -> None:
    poem = "\n".join(f"Roses are red, violet number {i}, and so on" for i in range(50))
    places = "\n".join(f"City {i}, State {i}" for i in range(50))
    content = HEADER + f'first,a\n"{poem}",b\n"{places}",a\n"say ""so""\n\nin two\n\nparts",b\n'
    rows, skips = read(tmp_path, content)
    assert [row.text.decode() for row in rows] == ["first", poem, places, 'say "so"\n\nin two\n\nparts']
    assert [row.line for row in rows] == [2, 3, 53, 103] and skips.count == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", HEADER + "x" * 5000 + ",a\nshort,b\n"),
        ("rows.csv", HEADER + '"' + "x\n" * 2500 + "short,b\n"),
        ("rows.jsonl", '{"text": "' + "x" * 5000 + '", "label": 1}\n{"text": "short", "label": "b"}\n'),
    ],
)
def test_records_that_are_too_long_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    monkeypatch.setattr("seqboat.data.tables.delimited.MAX_RECORD", 1000)
    rows, skips = read(tmp_path, content, name)
    assert [(row.text, row.label) for row in rows] == [(b"short", "b")]
    assert skips.listed[0]["record"] in ("line 1", "line 2") and skips.count >= 1


def test_nested_json_is_a_bad_record(tmp_path: Path) -> None:
    lines = ["[" * 100_000, '{"text": "a", "label": ' + '{"x":' * 50_000, '{"text": "a", "label": [1]}']
    lines += [f'{{"text": "{i}", "label": {i % 2}}}' for i in range(6)]
    rows, skips = read(tmp_path, "\n".join(lines), "rows.jsonl")
    assert len(rows) == 6
    assert [skip["record"] for skip in skips.listed] == ["line 1", "line 2", "line 3"]


def test_labels_without_end(tmp_path: Path) -> None:
    rows, skips = read(tmp_path, HEADER + f"a,{'x' * 1001}\nb,1\n")
    assert len(rows) == 1 and skips.listed[0]["reason"] == "a label of 1,001 characters"


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_no_tables(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("rows.csv", "notes.txt", "enwik8"):
        if kind == "pipe":
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).symlink_to("/dev/zero")
    for arguments, message in (
        (["train", "classify", f"--data.train={tmp_path / 'rows.csv'}"], "is not a file"),
        (["train", "lm", f"--data.text={tmp_path / 'notes.txt'}"], "matches no file"),
        (["paper", "data", "prepare", "enwik8", f"--from={tmp_path / 'enwik8'}"], "a pipe or a device"),
    ):
        where = (
            ["--data-dir", str(tmp_path / "data")]
            if arguments[0] == "data"
            else ["--out", str(tmp_path / "run")]
        )
        assert main([*arguments, *where]) == 2
        error = capsys.readouterr().err
        assert message in error and str(tmp_path) in error


def test_missing_files_are_asked_for_by_their_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "classify"]) == 2
    assert (
        "--data.train must name a table (CSV, TSV, JSONL or Parquet) or a folder" in capsys.readouterr().err
    )
    assert main(["train", "lm"]) == 2
    assert "--data.text must name at least one file" in capsys.readouterr().err


# copies


def make_large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setattr(copies, "SMALL", 100)
    table = folder / "rows.csv"
    table.write_text(HEADER + "".join(plain_rows(100)))
    return table, folder / "data"


def test_a_large_file_is_copied_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, data = make_large(tmp_path, monkeypatch)
    config = ClassifyTaskConfig(train=str(table), data_dir=str(data), holdout=0.5)
    assert len(config.build().dataset("train")) == 50
    (folder,) = (data / "files").iterdir()
    assert folder.name.startswith("rows-") and str(tmp_path) not in (folder / "manifest.json").read_text()
    made = (folder / "manifest.json").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr("seqboat.own.prepare.read_records", None)  # would fail if the table was read
        assert config.build().dataset("train")[3].target in (0, 1)
    assert (folder / "manifest.json").stat().st_mtime_ns == made
    table.write_text(HEADER + "".join(plain_rows(60)) + "x,c\n,c\n")
    task = config.build()
    assert (len(task.dataset("train")), task.labels, task.skips.count) == (31, ("a", "b", "c"), 1)
    assert [path.name for path in (data / "files").iterdir()] == [folder.name]
    # another column is another copy
    other = ClassifyTaskConfig(train=str(table), data_dir=str(data), text_column="label").build()
    assert other.labels == ("a", "b", "c")
    assert len(list((data / "files").iterdir())) == 2


def test_small_files_and_folders_that_cannot_be_written_to_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    table, _ = make_large(tmp_path, monkeypatch)
    (tmp_path / "taken").write_text("a file")
    for small, folder in ((100, tmp_path / "taken"), (1 << 20, tmp_path / "data")):
        monkeypatch.setattr(copies, "SMALL", small)
        dataset = ClassifyTaskConfig(train=str(table), data_dir=str(folder)).build().dataset("train")
        assert len(list((tmp_path / "temporary").iterdir())) == 1
        assert len(dataset) == 90 and dataset[0].inputs[:3].tolist() == list(b"row")
        del dataset
        assert list((tmp_path / "temporary").iterdir()) == []
    assert not (tmp_path / "data").exists()
    with pytest.raises(ValueError, match="has no column"):
        ClassifyTaskConfig(train=str(table), text_column="nope").build().dataset("train")
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_copies_reach_worker_processes_and_survive_them(tmp_path: Path, method: str) -> None:
    (tmp_path / "a.txt").write_text("some text " * 50)
    dataset = LMTextTaskConfig(text=(str(tmp_path / "a.txt"),), segment=10).build().dataset("train")
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        assert bytes(pool.apply(dataset.__getitem__, (0,)).inputs.astype(np.uint8)) == b"some text "
        pool.close()
        pool.join()
    assert bytes(dataset[1].inputs.astype(np.uint8)) == b"some text "


def test_processes_that_want_the_same_copy_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, data = make_large(tmp_path, monkeypatch)
    code = (
        "import sys; from seqboat.data import copies; from seqboat.tasks import ClassifyTaskConfig;"
        "copies.SMALL = 100;"
        "print(len(ClassifyTaskConfig(train=sys.argv[1], data_dir=sys.argv[2]).build().dataset('train')))"
    )
    command = [sys.executable, "-c", code, str(table), str(data)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0] for process in running] == ["90\n"] * 3


def test_a_disk_without_room_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, data = make_large(tmp_path, monkeypatch)
    monkeypatch.setattr(copies, "free_bytes", lambda folder: 10)
    with pytest.raises(ValueError, match=r"rows.csv needs about .* of disk in .*10 bytes are free"):
        ClassifyTaskConfig(train=str(table), data_dir=str(data)).build().dataset("train")


def test_texts_are_checked_across_the_borders_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seqboat.own.text.CHUNK", 3)
    (tmp_path / "a.txt").write_text("déjà vu 日本語 " * 20, encoding="utf-8")
    (tmp_path / "b.txt").write_bytes("日本".encode()[:-1])
    (tmp_path / "c.txt").write_bytes("abc日".encode() + b"\xff")
    (tmp_path / "d.txt").write_bytes(b" \n" * 9)
    for name in ("e.txt", "f.txt", "g.txt"):
        (tmp_path / name).write_text("end")
    task = LMTextTaskConfig(text=(str(tmp_path),)).build()
    # bytes are learned as they are
    whole = [(tmp_path / f"{name}.txt").read_bytes() for name in "abc"]
    assert bytes(task.store["bytes"]) == b"\n\n".join(whole) + b"\n\nend" * 3
    reasons = {Path(skip["file"]).name: skip["reason"] for skip in task.skips.listed}
    assert reasons == {"d.txt": "empty text"}
    assert task.summary("val").warnings == tuple(
        f"{name} is not UTF-8 (from byte {byte} on): its bytes are learned as they are"
        for name, byte in (("b.txt", 3), ("c.txt", 6))
    )


@pytest.mark.parametrize("kind", ["table", "text"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    peaks = []
    for count in (10_000, 50_000):
        if kind == "table":
            path = tmp_path / "rows.csv"
            path.write_text(HEADER + "".join(f"{'word ' * 20}{i},{i % 3}\n" for i in range(count)))
            task: Any = ClassifyTaskConfig(train=str(path), data_dir=str(tmp_path / "data")).build()
        else:
            path = tmp_path / "a.txt"
            path.write_text("some words in a line\n" * (5 * count))
            task = LMTextTaskConfig(text=(str(path),), data_dir=str(tmp_path / "data")).build()
        tracemalloc.start()
        task.dataset("train")[7]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 25e6 and peaks[1] < 2 * peaks[0], peaks


def test_a_table_of_free_text_labels_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqboat.own.targets.COUNTED_LABELS", 50)
    (tmp_path / "rows.csv").write_text(HEADER + "".join(f"a,{i}\n" for i in range(60)))
    with pytest.raises(ValueError, match="must have at most 1,000 different labels, got more than 50"):
        ClassifyTaskConfig(train=str(tmp_path / "rows.csv")).build().dataset("train")


def test_runs_saved_before_there_were_copies_load(tmp_path: Path) -> None:
    from seqboat.training.settings_io import from_dict, to_dict
    from small_runs import small_run

    config = small_run(ClassifyTaskConfig(train="a.csv"))
    plain = json.loads(json.dumps(to_dict(config)))
    del plain["task"]["data_dir"]
    assert from_dict(plain) == config
