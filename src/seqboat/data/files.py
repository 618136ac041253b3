"""Atomic file writes, checksums, and a lock that reserves a folder for one process.

    with replacing(path) as stage:    # write to `stage`; `path` appears, complete, when the block ends
        save(stage)

A file is written under another name, flushed to disk and renamed, so that a reader sees the old or the new content,
never half of it, even after a crash.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to: flushed and renamed to `path` when the block ends, removed if it fails."""
    stage = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        yield stage
        flush_file(stage)
        os.replace(stage, path)
    finally:
        stage.unlink(missing_ok=True)
    flush_folder(path.parent)


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


def _machine() -> str:
    """An id of this machine since its last boot; empty if the system has none.

    Containers on one machine share it, whatever their host names.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class InUse(ValueError):
    """A folder that another process works in."""


class Lock:
    """Keeps other processes out of a folder while this one lives; the lock of a dead process is taken over.

    On one machine the operating system knows whether the holder is alive. A holder on another machine, or in a moved
    container, touches the lock file every HEARTBEAT seconds, and counts as dead after PATIENCE missed heartbeats.
    """

    HEARTBEAT = 5.0
    """Seconds between two touches of the lock file."""
    PATIENCE = 3
    """Heartbeats to wait for a holder on another machine."""

    _held: set[Path] = set()  # noqa: RUF012 - shared on purpose: record locks do not exclude their own process

    def __init__(self, folder: Path, name: str = "lock", busy: str | None = None) -> None:
        """
        Args:
            folder: to lock.
            name: of the lock file in it.
            busy: how the error message begins.
        """
        self.path = folder.resolve() / name
        self.busy = busy or f"{self.path.parent} is in use by another run"
        self._file: Any = None
        self._own = ""
        self._released = threading.Event()

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            InUse: if another process holds it; the message names that process.
        """
        if self.path in self._held:
            # not even opened: closing any handle of the file would release this process's lock
            raise self._refusal(self._line())
        file = self._open()
        file.seek(0)
        holder = file.read().strip()
        # a system lock may not reach other machines
        if holder and not self._is_local(holder) and self._beats():
            file.close()
            raise self._refusal(holder)
        self._own = self._line()
        file.truncate(0)
        file.write(self._own + "\n")
        file.flush()
        self._file = file
        self._held.add(self.path)
        self._released = threading.Event()
        threading.Thread(target=self._beat, args=(self._released,), daemon=True).start()

    def _beat(self, released: threading.Event) -> None:
        while not released.wait(self.HEARTBEAT):
            with suppress(OSError):
                os.utime(self.path)

    def _beats(self) -> bool:
        """Whether another process touches the lock file."""
        seen, ends = os.stat(self.path).st_mtime_ns, time.monotonic() + self.PATIENCE * self.HEARTBEAT
        while time.monotonic() < ends:
            time.sleep(self.HEARTBEAT / 10)
            if os.stat(self.path).st_mtime_ns != seen:
                return True
        return False

    def check(self) -> None:
        """Raise if another process has taken over the lock, for example while this one was suspended.

        Raises:
            InUse: naming that process.
        """
        # through the open handle: closing another one would release the lock
        self._file.seek(0)
        holder = self._file.read().strip()
        if holder != self._own:
            raise self._refusal(holder or "unknown")

    def _open(self) -> Any:
        """The lock file, open and locked."""
        while True:
            file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 - open as long as it is held
            try:
                if fcntl is not None:
                    # a record lock, not flock: workers of the data loader do not inherit it
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # the holder may have removed the file in the meantime: then this locked a deleted file
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    return file
            except FileNotFoundError:
                pass
            except OSError:
                file.seek(0)
                holder = file.read().strip()
                file.close()
                raise self._refusal(holder or "unknown") from None
            file.close()

    @staticmethod
    def _line() -> str:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "machine": _machine(), "since": since}
        return json.dumps(owner)

    def _refusal(self, holder: str) -> InUse:
        try:
            owner = json.loads(holder)
            known = (
                f"pid {int(owner['pid'])} on {owner['host']!r} since {owner.get('since', 'an unknown time')}"
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            known = "an unknown process"
        return InUse(
            f"{self.busy} ({known}); choose another folder, or remove {self.path} to take over if that process is "
            "dead"
        )

    @staticmethod
    def _is_local(holder: str) -> bool:
        """Whether the system lock, which this process now has, also excludes the process that wrote this line."""
        try:
            owner = json.loads(holder)
            if owner.get("machine"):
                return bool(owner["machine"] == _machine())
            return bool(owner["host"] == socket.gethostname())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False

    def release(self, *, remove: bool = False) -> None:
        """Release the lock.

        Args:
            remove: whether to remove the file too.
        """
        if self._file is not None:
            self._released.set()
            self._file.truncate(0)
            if remove:
                self.path.unlink(missing_ok=True)
            self._file.close()
            self._file = None
            self._held.discard(self.path)

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
