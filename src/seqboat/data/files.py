"""Atomic file writes, checksums, and a lock that reserves a folder for one process.

    with replacing(path) as stage:    # write to `stage`; `path` appears, complete, when the block ends
        save(stage)

A file is written under another name, flushed to disk and renamed, so that a reader sees the old or the new content,
never half of it, even after a crash.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

try:
    import fcntl
except ImportError:  # not a Unix: there is nothing to lock with
    fcntl = None  # type: ignore[assignment]


MAX_JSON = 64 << 20
"""Largest JSON file that is read, in bytes."""


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """The hash of a file's content, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading; reject pipes and devices, which may never end.

    Raises:
        ValueError: naming what it is instead of a file.
    """
    # nonblocking: opening a pipe would wait for a writer
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path} is not a file: it is a folder, a pipe or a device")
    except BaseException:
        os.close(handle)
        raise
    return open(handle, "rb")


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: if it is not JSON, nested too deeply, too large, or not a file; the message names the file.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_JSON:
                raise ValueError(f"it has {size:,} bytes, more than {MAX_JSON:,}")
            return json.loads(file.read(size))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def flush_file(path: Path) -> None:
    """Flush the content of a file to disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    if os.name == "nt":
        return  # Windows cannot open folders, and flushes entries itself
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk or a quota without room, which come without the name of a file."""


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """A block that writes to a file, which a full disk's error then names."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _stage_of(path: Path) -> Path:
    """A name beside this one that nobody can foresee."""
    return path.with_name(f".{path.name[:100]}-{secrets.token_hex(8)}")


@contextmanager
def replacing(path: Path, inputs: Iterable[Path | str] = (), flag: str = "") -> Iterator[Path]:
    """A temporary path to write to: flushed and renamed to `path` when the block ends, removed if it fails.

    What is there already must be a regular file, and none of the inputs (`check_output`).
    """
    from seqboat.core.checks import check_output  # which needs torch, and this module must not

    check_output(flag, path, inputs)
    stage = _stage_of(path)
    try:
        with naming_full_disk(path):
            # made here, so that a link of this name is not followed
            os.close(os.open(stage, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            yield stage
            flush_file(stage)
        os.replace(stage, path)
    finally:
        stage.unlink(missing_ok=True)
    flush_folder(path.parent)


@contextmanager
def making_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill: flushed and renamed to `folder` when the block ends, removed if it fails.

    Raises:
        ValueError: if there is something at `folder` that is not an empty folder.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ValueError(f"{folder} already exists: name a new folder")
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = _stage_of(folder)
    try:
        with naming_full_disk(folder):
            stage.mkdir()
            yield stage
            for entry in sorted(stage.rglob("*"), reverse=True):
                flush_folder(entry) if entry.is_dir() else flush_file(entry)
            flush_folder(stage)
        if os.name == "nt" and folder.exists():
            folder.rmdir()  # Windows does not replace an empty folder
        os.rename(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    flush_folder(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a file by this text."""
    with replacing(path) as stage:
        stage.write_text(text, encoding="utf-8")


def write_json(path: Path, content: object, *, indent: int = 1, sort_keys: bool = False) -> None:
    """Replace a file by this content as JSON."""
    text = json.dumps(content, indent=indent, ensure_ascii=False, sort_keys=sort_keys)
    if any("\ud800" <= character <= "\udfff" for character in text):
        # bytes of a file name that are not text in this locale
        text = json.dumps(content, indent=indent, sort_keys=sort_keys)
    write_text(path, text + "\n")


class InUse(ValueError):
    """A folder that another process works in."""


class Lock:
    """Keeps other processes out of a folder while this one lives; the lock of a dead process is taken over.

    The operating system holds the lock; on a network file system it depends on the server whether that reaches other
    machines.

    Args:
        folder: to lock.
        name: of the lock file in it, which says who holds the lock.
        busy: how the error message begins.
    """

    def __init__(self, folder: Path, name: str = "lock", busy: str | None = None) -> None:
        self.path = folder.resolve() / name
        self.busy = busy or f"{self.path.parent} is in use by another run"
        self._lock = FileLock(self.path)
        self._file: tuple[int, int] | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            InUse: if another process holds it; the message names that process.
        """
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise self._refusal() from None
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n")
        self._file = self._there()

    def check(self) -> None:
        """Raise if the lock file was removed or replaced, so that another process may have taken the lock.

        Raises:
            InUse: naming that process.
        """
        if self._file is None or self._there() != self._file:
            raise self._refusal()

    def _there(self) -> tuple[int, int] | None:
        """Which file has the name of the lock."""
        with suppress(OSError):
            found = os.stat(self.path)
            return found.st_dev, found.st_ino
        return None

    def _write(self, text: str) -> None:
        # for people alone: Windows does not let a locked file be written to
        with suppress(OSError):
            self.path.write_text(text, encoding="utf-8")

    def _refusal(self) -> InUse:
        try:
            owner = read_json(self.path)
            known = (
                f"pid {int(owner['pid'])} on {owner['host']!r} since {owner.get('since', 'an unknown time')}"
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            known = "an unknown process"
        return InUse(
            f"{self.busy} ({known}); choose another folder, or remove {self.path} to take over if that process is "
            "dead"
        )

    def release(self, *, remove: bool = False) -> None:
        """Release the lock.

        Args:
            remove: whether to remove the file too.
        """
        if self._file is not None and self._there() == self._file:
            self._write("")
            if remove:
                self.path.unlink(missing_ok=True)
        self._file = None
        self._lock.release()

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def taking_turns(folder: Path) -> Iterator[None]:
    """A block that only one process at a time can be in, per folder; others wait."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # releases the lock
