"""Files that are whole or absent, their checksums, and a lock that keeps a folder to one process.

    with replacing(path) as stage:    # write to `stage`; `path` appears, complete, when the block ends
        save(stage)

A file is written under another name, flushed to disk and renamed, so that a reader sees the old content or the new
content and never half of either, also after a crash.
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
"""Bytes of a JSON file that are read at most."""


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """The hash of a file's content, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def open_regular(path: Path) -> io.BufferedReader:
    """A file for reading; a pipe or a device, which could be read without end, is refused.

    Raises:
        ValueError: naming what it is instead of a file.
    """
    # without waiting, as opening a pipe would, for a writer
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
        ValueError: naming the file, where it is no JSON, nested too deeply, too large, or no file.
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
    """Make the content of a file survive a crash of the machine."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    if os.name == "nt":
        return  # Windows opens no folders, and keeps names on its own
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write in place of `path`: flushed and renamed when the block ends, removed if it fails."""
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
    """What tells this machine, since it was started, from others; empty where the system does not say.

    Containers on one machine share it, whatever host name they have.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class InUse(ValueError):
    """A folder that another process works in."""


class Lock:
    """Keeps other processes out of a folder while this one lives; the lock of a dead process is taken over.

    On one machine the system tells the dead from the living. A holder on another machine, or in a container that was
    moved, is watched: it touches the lock file every HEARTBEAT seconds, and counts as dead after PATIENCE of them
    without a touch.
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
            busy: how a refusal begins.
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
            # not even opened: closing any handle of the file would give this process's lock back
            raise self._refusal(self._line())
        file = self._open()
        file.seek(0)
        holder = file.read().strip()
        # a lock of the system may not reach other machines
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
        """Refuse to continue if another process has taken the lock over, while this one was suspended for example.

        Raises:
            InUse: naming that process.
        """
        # through the open handle: closing another one would give the lock back
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
                    # of this kind, and not flock: such a lock is not inherited by the workers of the data loader
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # its holder may have removed the file in the meantime: then the lock is on nothing
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
        """Whether the system's lock, which this process now has, also binds the process that wrote this."""
        try:
            owner = json.loads(holder)
            if owner.get("machine"):
                return bool(owner["machine"] == _machine())
            return bool(owner["host"] == socket.gethostname())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False

    def release(self, *, remove: bool = False) -> None:
        """Give the lock back.

        Args:
            remove: the file too.
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
    """Wait until no other process is in such a block for this folder, and keep others waiting."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # gives the lock back
