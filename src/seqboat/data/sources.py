"""Sources of raw data: a folder, a tar or zip archive, or a single file, all read as named members.

Archives are never unpacked to disk: members are read one after another. An archive with suspicious content (paths
that leave it, links, devices, a thousandfold expansion) is rejected as a whole. Limits apply to the bytes actually
decompressed, including headers, not only to the sizes that an archive claims.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from seqboat.core.checks import require
from seqboat.data.files import open_regular

MAX_RATIO = 200
"""Largest expansion of an archive; text compresses about tenfold at most."""
MAX_BYTES = 64 << 30
"""Largest unpacked size of an archive or a file."""
MAX_HEADER = 1 << 20
"""Largest size of the headers of an archive member, in bytes."""
MAX_MEMBERS = 500_000
"""Largest number of members of a zip archive, whose directory is read at once; a tar archive may have more."""
MAX_DIRECTORY = 1 << 27
"""Largest directory of a zip archive, in bytes."""
CHUNK = 1 << 16
_SLACK = 1 << 20
"""Bytes exempt from MAX_RATIO: an archive of empty files has a huge ratio."""
_BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, RuntimeError)
"""What the standard library raises on damaged archives (RuntimeError: an encrypted zip)."""
_OPENERS: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}


class Member(NamedTuple):
    """One file of a source."""

    name: str
    """its path inside the source, with forward slashes"""
    read: Callable[[], bytes]
    """returns its content; in an archive, only valid until the next member is read"""

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

    def __init__(self, path: Path, unpickle: bool = False) -> None:
        require(path.exists(), f"{path} does not exist")
        require(
            path.is_dir() or path.is_file(), f"{path} is not a file or a folder: it is a pipe or a device"
        )
        self.path = path
        self.unpickle = unpickle
        """whether pickles of tensors may be read; nothing in them is run"""
        self.current = ""
        """name of the last member yielded"""

    def __str__(self) -> str:
        return str(self.path)

    @property
    def label(self) -> str:
        """The origin as recorded in a manifest: the name alone, since paths reveal the machine and its user."""
        return self.path.name

    def members(self, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Member]:
        """All files whose names are wanted: sorted by name in a folder, in stored order in an archive."""
        kinds = {"folder": self._folder, "zip": self._zip, "tar": self._tar, "file": self._file}
        with naming(self.path):
            for member in kinds[self.kind()](wanted):
                self.current = member.name
                yield member
        self.current = ""

    def kind(self) -> str:
        """folder, zip, tar or file: detected from the content, not from the name."""
        if self.path.is_dir():
            return "folder"
        with open_regular(self.path) as file:
            head = file.read(512)
        require(len(head) > 0, f"{self.path} is empty")
        require(not looks_like_html(head), f"{self.path} is a web page, not data: the download went wrong")
        if head.startswith(b"PK\x03\x04"):
            return "zip"
        with open_stream(self.path) as stream:
            head = stream.read(512)
        return "tar" if _is_tar_header(head) else "file"

    def _file(self, wanted: Callable[[str], bool]) -> Iterator[Member]:
        if wanted(self.path.name):
            yield Member(self.path.name, self.path.read_bytes)

    def _folder(self, wanted: Callable[[str], bool]) -> Iterator[Member]:
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and wanted(name):
                yield Member(name, path.read_bytes)

    def _tar(self, wanted: Callable[[str], bool]) -> Iterator[Member]:
        with open_stream(self.path) as stream, tarfile.open(fileobj=_Forward(stream), mode="r:") as archive:  # type: ignore[call-overload]
            end = 0
            while member := archive.next():
                archive.members = []  # otherwise tarfile keeps all headers in memory
                check_name(self.path, member.name)
                require(
                    member.isfile() or member.isdir(),
                    f"{self.path}: member {member.name!r} is a link or a device: refused",
                )
                settings = sum(len(key) + len(value) for key, value in archive.pax_headers.items())
                require(
                    member.offset_data - end <= MAX_HEADER and settings <= MAX_HEADER,
                    f"{self.path}: the headers of {member.name[:100]!r} have more than {MAX_HEADER:,} bytes: refused",
                )
                end = member.offset_data + member.size
                stream.budget.check(end)
                if member.isfile() and wanted(member.name):
                    opened = archive.extractfile(member)
                    assert opened is not None
                    yield Member(member.name, partial(self._read, opened, member.size))
            self._check_end(archive, stream)

    def _check_end(self, archive: tarfile.TarFile, stream: Bounded) -> None:
        """Reject an archive with data after its last member, or without an end mark.

        tarfile takes a damaged header for the end and stops before the checksum of a compressed file.
        """
        marked = stream.tell() >= archive.offset + tarfile.BLOCKSIZE
        require(marked, f"{self.path} is damaged or truncated: it has no end mark")
        while rest := stream.read(CHUNK):
            require(not any(rest), f"{self.path} is damaged: no member begins at byte {archive.offset:,}")

    def _zip(self, wanted: Callable[[str], bool]) -> Iterator[Member]:
        budget = _Budget(self.path)
        with _ZipFile(self.path) as file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                check_name(self.path, member.filename)
                mode = member.external_attr >> 16
                require(
                    not mode or stat.S_ISREG(mode) or stat.S_ISDIR(mode) or not stat.S_IFMT(mode),
                    f"{self.path}: member {member.filename!r} is a link or a device: refused",
                )
                budget.spend(member.file_size)
                if not member.is_dir() and wanted(member.filename):
                    yield Member(member.filename, partial(self._read_zipped, archive, member))

    def _read_zipped(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
        # zipfile decompresses other methods without a limit
        require(
            member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED),
            f"{self.path}: member {member.filename!r} is not compressed with deflate: pack it again",
        )
        with naming(self.path), archive.open(member) as opened:
            return self._read(opened, member.file_size)

    def _read(self, opened: IO[bytes], size: int) -> bytes:
        """Read a member in small steps, so that a false size cannot exhaust memory."""
        content = bytearray()
        with naming(self.path):
            while part := opened.read(CHUNK):
                content += part
                require(
                    len(content) <= size,
                    f"{self.path}: a member is larger than the archive declares: refused",
                )
        return bytes(content)


class naming:
    """A context that turns errors from damaged files into ValueErrors that name the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _BROKEN):
            raise ValueError(f"{self.path} is damaged or truncated: {error}") from error


def check_name(archive: object, name: str) -> None:
    """Reject a member whose path would leave the folder it is unpacked to."""
    path = PurePosixPath(name.replace("\\", "/"))
    climbs = path.is_absolute() or ".." in path.parts or (len(name) > 1 and name[1] == ":")
    require(not climbs, f"{archive}: member {name!r} points outside of the archive: refused")
    require("\0" not in name, f"{archive}: member {name!r} has an impossible name: refused")


class _Budget:
    """How many more bytes an archive may unpack to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.limit = min(MAX_BYTES, MAX_RATIO * path.stat().st_size + _SLACK)
        self.spent = 0

    def spend(self, size: int) -> None:
        self.spent += size
        self.check(self.spent)

    def check(self, size: int) -> None:
        require(
            size <= self.limit,
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


class Bounded(io.RawIOBase):
    """A forward-only file, decompressed within a budget; errors name the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.budget = _Budget(path)
        with open_regular(path) as file:
            head = file.read(6)
        opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), open_regular)
        self.stream: IO[bytes] = opener(path)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.budget.spent

    def readinto(self, buffer: Any, /) -> int:
        with naming(self.path):
            part = self.stream.read(min(len(buffer), CHUNK))
        self.budget.spend(len(part))
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
        super().close()


class _ZipFile(io.FileIO):
    """A zip archive as zipfile reads it: the directory at once, contents in small pieces."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self.path = path

    def read(self, size: int | None = -1, /) -> bytes:
        size = -1 if size is None else size
        require(size <= MAX_DIRECTORY, f"{self.path} has a directory of {size:,} bytes: refused")
        content = super().read(size) or b""
        if size > CHUNK:
            # the entry of every member begins with these bytes
            count = content.count(b"PK\x01\x02")
            require(
                count <= MAX_MEMBERS, f"{self.path} has {count:,} members, more than {MAX_MEMBERS:,}: refused"
            )
        return content


class _Forward:
    """A stream as tarfile needs it: `read` returns all bytes requested, and `seek` only moves forward.

    tarfile reads whole headers, and contents in the small steps of `Source._read`.
    """

    def __init__(self, stream: Bounded) -> None:
        self.stream = stream

    def tell(self) -> int:
        return self.stream.tell()

    def seek(self, place: int) -> int:
        skipped = place - self.stream.tell()
        require(skipped >= 0, f"{self.stream.path} is damaged: its members overlap")
        while skipped and (part := self.stream.read(min(skipped, CHUNK))):
            skipped -= len(part)
        return self.stream.tell()

    def read(self, size: int) -> bytes:
        require(size <= MAX_HEADER, f"{self.stream.path} has a header of {size:,} bytes: refused")
        content = b""
        while len(content) < size and (part := self.stream.read(size - len(content))):
            content += part
        return content


def open_stream(path: Path) -> Bounded:
    """Open a file for reading within the limits, decompressed if its content is gzip, bzip2 or xz."""
    return Bounded(path)


def read_file(path: Path) -> bytes:
    """The whole content of a file, decompressed if need be, within the limits for archives."""
    with open_stream(path) as stream:
        content = bytearray()
        while part := stream.read(CHUNK):
            content += part
    return bytes(content)


def looks_like_html(head: bytes) -> bool:
    """Whether a file begins like a web page."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    return start.startswith((b"<!doctype html", b"<html", b"<head"))


def bad_text(text: bytes) -> str | None:
    """What is wrong with a text, if anything."""
    if not text.strip():
        return "empty text"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start}"
    return None
