"""Files that are whole or absent, and the lock of a folder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from seqboat.data.files import InUse, Lock, digest_of, replacing, write_json, write_text


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


def other_machine(folder: Path) -> Path:
    """A lock that a process on another machine wrote."""
    path = folder / "lock"
    path.write_text(
        json.dumps({"pid": 1, "host": "elsewhere.example", "machine": "m", "since": "2026-01-01T00:00:00"})
    )
    return path


def test_a_living_lock_of_another_machine_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lock, "HEARTBEAT", 0.2)
    path = other_machine(tmp_path)
    beat = threading.Timer(0.2, os.utime, (path,))
    beat.start()
    message = (
        r"pid 1 on 'elsewhere.example' since 2026-01-01.*remove .*lock to take over if that process is dead"
    )
    with pytest.raises(ValueError, match=message):
        Lock(tmp_path).acquire()
    beat.join()
    path.unlink()
    with Lock(tmp_path):
        pass


def test_a_dead_lock_of_another_machine_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that was killed and starts again elsewhere, under another host name."""
    monkeypatch.setattr(Lock, "HEARTBEAT", 0.05)
    other_machine(tmp_path)
    with Lock(tmp_path) as lock:
        before = lock.path.stat().st_mtime_ns
        ends = time.monotonic() + 60
        while lock.path.stat().st_mtime_ns == before and time.monotonic() < ends:
            time.sleep(0.01)
        assert lock.path.stat().st_mtime_ns > before  # it beats
        lock.check()
    # on the same machine a dead process needs no waiting, whatever its host name was
    line = json.loads(Lock._line())
    (tmp_path / "lock").write_text(json.dumps({**line, "host": "former-name"}))
    monkeypatch.setattr(Lock, "_beats", lambda self: pytest.fail("waited for a heartbeat"))
    with Lock(tmp_path):
        pass


def test_a_lock_that_was_taken_over_is_noticed(tmp_path: Path) -> None:
    with Lock(tmp_path) as lock:
        other_machine(tmp_path)
        with pytest.raises(ValueError, match=r"in use by another run \(pid 1 on 'elsewhere.example'"):
            lock.check()


def test_a_lock_file_that_its_holder_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Lock(tmp_path, ".name.lock", "busy"), Lock(tmp_path, ".name.lock", "busy")
    first.acquire()
    with pytest.raises(InUse, match="busy"):
        second.acquire()
    first.release(remove=True)
    assert not list(tmp_path.iterdir())
    # the file vanishes between opening and locking: the lock must be on the file that others will open
    stat, calls = os.stat, list[Path]()

    def vanish(path: Path) -> os.stat_result:
        if not calls:
            calls.append(path)
            second.path.unlink()
        return stat(path)

    monkeypatch.setattr(os, "stat", vanish)
    second.acquire()
    monkeypatch.undo()
    script = (
        "import sys; from pathlib import Path; from seqboat.data.files import Lock; "
        "Lock(Path(sys.argv[1]), '.name.lock').acquire()"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and "InUse" in done.stderr
    second.release(remove=True)
