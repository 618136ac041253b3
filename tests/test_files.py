"""Files that are whole or absent, and the lock of a folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from seqboat.data.files import InUse, Lock, digest_of, making_folder, replacing, write_json, write_text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old é")
    with pytest.raises(KeyboardInterrupt), replacing(path) as stage:
        stage.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text(encoding="utf-8") == "old é"
    with replacing(path) as stage:
        stage.write_text("new")
        assert path.read_text(encoding="utf-8") == "old é"
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_content_reaches_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    rename = os.replace

    def spy(source: Path, target: Path) -> None:
        calls.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda handle: calls.append("flush"))
    monkeypatch.setattr(os, "replace", spy)
    write_text(tmp_path / "file", "text")
    assert calls == ["flush", "rename", "flush"]


def test_json_and_checksums(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"b": "é", "a": 1}, sort_keys=True)
    assert path.read_text(encoding="utf-8") == '{\n "a": 1,\n "b": "é"\n}\n'
    assert digest_of(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest_of(path, "md5") == hashlib.md5(path.read_bytes()).hexdigest()


def test_names_of_files_that_are_not_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    write_json(tmp_path / "file.json", {"source": name})
    assert json.loads((tmp_path / "file.json").read_text(encoding="utf-8")) == {"source": name}


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    with Lock(tmp_path):
        with pytest.raises(ValueError, match=rf"is in use by another run \(pid {os.getpid()} on .* since 20"):
            Lock(tmp_path).acquire()
        script = (
            "import sys; from pathlib import Path; from seqboat.data.files import Lock; "
            "Lock(Path(sys.argv[1])).acquire()"
        )
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 1 and f"pid {os.getpid()} on" in done.stderr
    with Lock(tmp_path):
        pass


def test_a_lock_file_that_was_removed_is_noticed(tmp_path: Path) -> None:
    """Whoever removes the file lets a second writer in: the first one stops before it writes again."""
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.acquire()
    first.check()
    first.path.unlink()
    with pytest.raises(InUse, match="in use by another run"):
        first.check()
    second.acquire()
    with pytest.raises(InUse, match=rf"pid {os.getpid()} on"):
        first.check()
    first.release(remove=True)
    second.check()
    second.release(remove=True)
    assert not list(tmp_path.iterdir())


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    """Nor does a process that it forked, as the loader's workers are."""
    script = (
        "import os, sys, time; from pathlib import Path; from seqboat.data.files import Lock; "
        "Lock(Path(sys.argv[1])).acquire(); child = os.fork(); "
        "(print(child, flush=True), os.kill(os.getpid(), 9)) if child else (os.close(1), time.sleep(60))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    try:
        with Lock(tmp_path):
            pass
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.symlink_to("elsewhere")


@pytest.mark.skipif(os.name == "nt", reason="no pipes and devices in folders")
@pytest.mark.parametrize(
    ("kind", "make"),
    [("a pipe", make_pipe), ("a link", make_link), ("a folder", Path.mkdir), ("a device", None)],
)
def test_only_regular_files_are_replaced(
    kind: str, make: Callable[[Path], None] | None, tmp_path: Path
) -> None:
    path = tmp_path / "out" if make else Path(os.devnull)
    if make:
        make(path)
    before = os.lstat(path)
    with (
        pytest.raises(ValueError, match=rf"^--out {path} is {kind}: it must be a file"),
        replacing(path, flag="--out"),
    ):
        raise AssertionError("not reached")
    assert os.lstat(path)[:3] == before[:3]


def test_an_input_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("rows")
    os.link(tmp_path / "in", tmp_path / "same")
    for name in ("in", "same"):
        with (
            pytest.raises(ValueError, match="is the input itself: name another file"),
            replacing(tmp_path / name, [tmp_path / "in"]) as stage,
        ):
            stage.write_text("answers")
    assert (tmp_path / "in").read_text() == "rows"
    with (
        pytest.raises(ValueError, match=r"the folder .*nowhere does not exist"),
        replacing(tmp_path / "nowhere" / "out"),
    ):
        pass


def test_names_of_stages_cannot_be_foreseen(tmp_path: Path) -> None:
    names = set[str]()
    for _ in range(3):
        with replacing(tmp_path / "file") as stage:
            assert stage.lstat().st_size == 0 and not stage.is_symlink()
            names.add(stage.name)
        with making_folder(tmp_path / f"folder-{len(names)}") as folder:
            names.add(folder.name)
    assert len(names) == 6 and not any(str(os.getpid()) in name for name in names)


def test_a_folder_appears_whole_and_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = list[str]()
    sync = os.fsync

    def spy(handle: int) -> None:
        flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    if sys.platform == "linux":
        monkeypatch.setattr(os, "fsync", spy)
    with making_folder(tmp_path / "new") as stage:
        (stage / "inner").mkdir()
        (stage / "inner" / "file").write_text("text")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "inner" / "file").read_text() == "text"
    if sys.platform == "linux":
        assert flushed == ["file", "inner", stage.name, tmp_path.name]
    with pytest.raises(ValueError, match="new already exists"), making_folder(tmp_path / "new"):
        pass
    with pytest.raises(KeyboardInterrupt), making_folder(tmp_path / "other"):
        raise KeyboardInterrupt
    assert [entry.name for entry in tmp_path.iterdir()] == ["new"]


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*answers.csv'"),
        replacing(tmp_path / "answers.csv"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*exported'"),
        making_folder(tmp_path / "exported"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())
