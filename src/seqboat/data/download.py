"""Robust downloads: several mirrors, resumed after an interruption, verified before use.

An unfinished download is called `.NAME.part`; a file under its final name has the expected size and hash.
"""

from __future__ import annotations

import http.client
import os
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from seqboat.console import Advance
from seqboat.core.checks import require
from seqboat.data.files import digest_of
from seqboat.data.sources import MAX_BYTES, looks_like_html
from seqboat.data.store import free_bytes
from seqboat.version import __version__

CHUNK = 1 << 18
ATTEMPTS = 5
"""Connections to a mirror without progress before the next mirror is tried."""
PAUSE = 1.0
"""Seconds before the second connection, doubled for each further one."""
TIMEOUT = 30.0
"""Seconds after which a connection that is silent is dropped."""


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file that several mirrors offer."""

    name: str
    """Name of the file."""
    urls: tuple[str, ...]
    """Mirrors, best first."""
    bytes: int | None = None
    """Its size, if known."""
    digest: str | None = None
    """Its hash as "sha256:..." or "md5:...", if known; md5 protects against accidents only."""


class DownloadError(Exception):
    """No mirror had the file; the message says what went wrong at each."""


class _Wrong(Exception):
    """A mirror has the wrong file: no point in retrying."""


def check_file(path: Path, remote: RemoteFile) -> None:
    """Reject a file that is not the expected one."""
    size = path.stat().st_size
    require(
        remote.bytes is None or size == remote.bytes,
        f"{path} has {size:,} bytes, expected {remote.bytes or 0:,}",
    )
    if remote.digest is not None:
        algorithm = remote.digest.partition(":")[0]
        got = f"{algorithm}:{digest_of(path, algorithm)}"
        require(got == remote.digest, f"{path} has {got}, expected {remote.digest}")


def download(
    remote: RemoteFile,
    folder: Path,
    advance: Advance = lambda count: None,
) -> Path:
    """Download a file unless it is already there.

    Args:
        remote: the file.
        folder: where to put it.
        advance: called with the number of bytes received.

    Raises:
        DownloadError: if no mirror has the right file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / remote.name
    if final.exists():
        check_file(final, remote)
        return final
    part = folder / f".{remote.name}.part"
    complaints = []
    for url in remote.urls:
        require(urllib.parse.urlsplit(url).scheme in ("http", "https"), f"not a web address: {url}")
        complaint = _from_mirror(url, remote, part, advance)
        if complaint is None:
            os.replace(part, final)
            return final
        complaints.append(f"{url}: {complaint}")
    raise DownloadError(f"{remote.name} could not be downloaded; " + "; ".join(complaints))


def _from_mirror(url: str, remote: RemoteFile, part: Path, advance: Advance) -> str | None:
    """Download from one mirror; returns what went wrong, or None."""
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _fetch(url, remote, part, advance)
            check_file(part, remote)
            return None
        except (_Wrong, ValueError) as error:
            # the content is wrong, so nothing may be appended to it
            part.unlink(missing_ok=True)
            return str(error)
        except (OSError, http.client.HTTPException) as error:
            if (
                isinstance(error, urllib.error.HTTPError)
                and error.code < 500
                and error.code not in (408, 429)
            ):
                return f"HTTP {error.code} {error.reason}"
            if isinstance(error, urllib.error.URLError) and isinstance(error.reason, socket.gaierror):
                return f"unknown host: {error.reason}"
            arrived = part.stat().st_size if part.exists() else 0
            failures = 1 if arrived > before else failures + 1
            if failures >= ATTEMPTS:
                return f"{type(error).__name__}: {error}"
            time.sleep(min(PAUSE * 2 ** (failures - 1), 60))


def _fetch(url: str, remote: RemoteFile, part: Path, advance: Advance) -> None:
    """One connection: append what is missing; without a hash only from the beginning."""
    have = part.stat().st_size if part.exists() and remote.digest is not None else 0
    if have and have == remote.bytes:
        return
    headers = {"User-Agent": f"seqboat/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        request = urllib.request.Request(url, headers=headers)
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:
            # the part is as long as the file or longer: start over
            part.unlink()
            raise ConnectionError("the mirror has no more bytes than we have") from None
        raise
    with response:
        if have and not (response.status == 206 and _starts_at(response.headers.get("Content-Range"), have)):
            have = 0
        length = response.headers.get("Content-Length")
        end = have + int(length) if length is not None and length.isdigit() else None
        if end is not None and remote.bytes is not None and end != remote.bytes:
            raise _Wrong(f"offers {end:,} bytes, expected {remote.bytes:,}")
        limit = remote.bytes or end or MAX_BYTES
        room = free_bytes(part.parent)
        if end is not None and end - have > room:
            raise _Wrong(f"needs {end - have:,} bytes, but {part.parent} has room for {room:,}")
        with open(part, "ab" if have else "wb") as file:
            while chunk := response.read1(CHUNK):
                if have == 0 and looks_like_html(chunk):
                    raise _Wrong("sent a web page instead of the file")
                have += len(chunk)
                if have > limit:
                    raise _Wrong(f"sent more than the {limit:,} bytes expected")
                file.write(chunk)
                advance(len(chunk))
            file.flush()
            os.fsync(file.fileno())
        if have < (end or remote.bytes or 0):
            raise ConnectionError(f"connection closed after {have:,} of {end or remote.bytes:,} bytes")


def _starts_at(content_range: str | None, start: int) -> bool:
    return content_range is not None and content_range.replace(" ", "").startswith(f"bytes{start}-")
