"""Where raw data comes from: a folder, a tar or zip archive, or a single file, all read as named entries.

Archives are never unpacked to disk: entries are read one after the other, and an archive with anything in it that
an honest one does not have (paths that climb out, links, devices, a thousandfold expansion) is refused as a whole.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from seqboat.checks import require

MAX_RATIO = 200
"""An archive may unpack to so many times its own size; text compresses at most some ten times."""
MAX_BYTES = 64 << 30
"""An archive may unpack to so many bytes, and so may a file."""
_SLACK = 1 << 20
"""Small archives are not judged by their ratio: a folder of empty files has a huge one."""
_BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, RuntimeError)
"""What the standard library raises on damaged archives (RuntimeError: an encrypted zip)."""
_OPENERS: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}


class Entry(NamedTuple):
    """One file of a source."""

    name: str
    """its path inside the source, with forward slashes"""
    read: Callable[[], bytes]
    """its content; of an archive, only until the next entry is asked for"""

    @property
    def base(self) -> str:
        """The last part of the name."""
        return PurePosixPath(self.name).name

    @property
    def parts(self) -> tuple[str, ...]:
        """The name, split at the slashes."""
        return PurePosixPath(self.name).parts


class Source:
    """A folder, an archive or a file."""

    def __init__(self, path: Path) -> None:
        require(path.exists(), f"{path} does not exist")
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def label(self) -> str:
        """What a manifest says about the origin: the name alone, as paths tell about a machine and its user."""
        return self.path.name

    def entries(self, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Entry]:
        """All files whose name is wanted: sorted by name in a folder, in the archive's order in an archive."""
        if self.path.is_dir():
            yield from self._folder(wanted)
            return
        kind = self.kind()
        try:
            if kind == "zip":
                yield from self._zip(wanted)
            elif kind == "tar":
                yield from self._tar(wanted)
            elif wanted(self.path.name):
                yield Entry(self.path.name, self.path.read_bytes)
        except _BROKEN as error:
            raise ValueError(f"{self.path} is damaged or cut short: {error}") from error

    def kind(self) -> str:
        """folder, zip, tar, html or file: found out by looking at the content, not at the name."""
        if self.path.is_dir():
            return "folder"
        with open(self.path, "rb") as file:
            head = file.read(512)
        require(len(head) > 0, f"{self.path} is empty")
        require(not looks_like_html(head), f"{self.path} is a web page, not data: the download went wrong")
        if head.startswith(b"PK\x03\x04"):
            return "zip"
        try:
            with open_stream(self.path) as stream:
                head = stream.read(512)
        except _BROKEN as error:
            raise ValueError(f"{self.path} is damaged or cut short: {error}") from error
        return "tar" if _is_tar_header(head) else "file"

    def _folder(self, wanted: Callable[[str], bool]) -> Iterator[Entry]:
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and wanted(name):
                yield Entry(name, path.read_bytes)

    def _tar(self, wanted: Callable[[str], bool]) -> Iterator[Entry]:
        budget = _Budget(self.path)
        with tarfile.open(self.path, "r:*") as archive:
            for member in archive:
                check_name(self.path, member.name)
                require(
                    member.isfile() or member.isdir(),
                    f"{self.path}: member {member.name!r} is a link or a device: refused",
                )
                budget.spend(member.size)
                if member.isfile() and wanted(member.name):
                    opened = archive.extractfile(member)
                    assert opened is not None
                    yield Entry(member.name, partial(self._guarded, opened.read))
            self._check_end(archive, budget)

    def _check_end(self, archive: tarfile.TarFile, budget: _Budget) -> None:
        """Refuse an archive whose members end before it does, or that ends without saying so.

        tarfile takes a damaged header for the end, and reads no further, where a compressed file has its checksum.
        """
        stream = archive.fileobj
        assert stream is not None
        marked = stream.tell() >= archive.offset + tarfile.BLOCKSIZE
        require(marked, f"{self.path} is damaged or cut short: it has no end mark")
        while rest := stream.read(1 << 20):
            budget.spend(len(rest))
            require(not any(rest), f"{self.path} is damaged: no member begins at byte {archive.offset:,}")

    def _zip(self, wanted: Callable[[str], bool]) -> Iterator[Entry]:
        budget = _Budget(self.path)
        with zipfile.ZipFile(self.path) as archive:
            for member in archive.infolist():
                check_name(self.path, member.filename)
                mode = member.external_attr >> 16
                require(
                    not mode or stat.S_ISREG(mode) or stat.S_ISDIR(mode) or not stat.S_IFMT(mode),
                    f"{self.path}: member {member.filename!r} is a link or a device: refused",
                )
                budget.spend(member.file_size)
                if not member.is_dir() and wanted(member.filename):
                    # the sizes above are claims of the archive; zipfile stops reading at the claimed size
                    yield Entry(member.filename, partial(self._guarded, partial(archive.read, member)))

    def _guarded(self, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except _BROKEN as error:
            raise ValueError(f"{self.path} is damaged or cut short: {error}") from error


def check_name(archive: object, name: str) -> None:
    """Refuse a member whose path leaves the folder it would be unpacked to."""
    path = PurePosixPath(name.replace("\\", "/"))
    climbs = path.is_absolute() or ".." in path.parts or (len(name) > 1 and name[1] == ":")
    require(not climbs, f"{archive}: member {name!r} points outside of the archive: refused")
    require("\0" not in name, f"{archive}: member {name!r} has an impossible name: refused")


class _Budget:
    """How much an archive may still unpack to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.limit = min(MAX_BYTES, MAX_RATIO * path.stat().st_size + _SLACK)
        self.spent = 0

    def spend(self, size: int) -> None:
        self.spent += size
        require(
            self.spent <= self.limit,
            f"{self.path} unpacks to more than {self.limit:,} bytes, {MAX_RATIO} times its size: refused",
        )


def _is_tar_header(head: bytes) -> bool:
    """Whether 512 bytes are the header of a tar member: its checksum counts its own eight bytes as blanks."""
    if len(head) < 512:
        return False
    try:
        claimed = int(head[148:156].strip(b" \0") or b"x", 8)
    except ValueError:
        return False
    return claimed == sum(head[:148]) + 8 * ord(" ") + sum(head[156:512])


def open_stream(path: Path) -> IO[bytes]:
    """A file for reading, decompressed if it is gzip, bzip2 or xz, whatever its name says."""
    with open(path, "rb") as file:
        head = file.read(6)
    for magic, opener in _OPENERS.items():
        if head.startswith(magic):
            stream: IO[bytes] = opener(path, "rb")
            return stream
    return open(path, "rb")


def read_file(path: Path) -> bytes:
    """The content of a file, decompressed if need be, within the limits for archives."""
    budget = _Budget(path)
    parts = []
    try:
        with open_stream(path) as stream:
            while part := stream.read(1 << 22):
                budget.spend(len(part))
                parts.append(part)
    except _BROKEN as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
    return b"".join(parts)


def looks_like_html(head: bytes) -> bool:
    """Whether a file begins as web pages do."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    return start.startswith((b"<!doctype html", b"<html", b"<head"))
