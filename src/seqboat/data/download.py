"""Robust downloads: several mirrors, resumed after an interruption, verified before use.

An unfinished download is called `.NAME.part`; a file under its final name has the expected size and hash.
"""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
"""Seconds after which a connection that is silent or below MIN_RATE is dropped."""
MIN_RATE = 1000
"""Bytes per second."""


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


class _Slow(ConnectionError):
    """A connection that is too slow."""


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
            part.with_name(part.name + ".tag").unlink(missing_ok=True)
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
            failures = 1 if arrived > before and not isinstance(error, _Slow) else failures + 1
            if failures >= ATTEMPTS:
                return str(error) if isinstance(error, _Slow) else f"{type(error).__name__}: {error}"
            time.sleep(min(PAUSE * 2 ** (failures - 1), 60))


def _fetch(url: str, remote: RemoteFile, part: Path, advance: Advance) -> None:
    """One connection: append what is missing."""
    have = part.stat().st_size if part.exists() else 0
    if have and have == remote.bytes:
        return
    headers = {"User-Agent": f"seqboat/{__version__}", "Accept-Encoding": "identity"}
    tag_file = part.with_name(part.name + ".tag")
    if have and remote.digest is None:
        # without a hash, only the server can tell that both halves belong to the same file
        known_url, _, tag = (tag_file.read_text() if tag_file.exists() else "").partition(" ")
        have = have if known_url == url and tag else 0
        headers["If-Range"] = tag
    if have:
        headers["Range"] = f"bytes={have}-"
    else:
        headers.pop("If-Range", None)
    try:
        response = _open(urllib.request.Request(url, headers=headers))
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
        if remote.digest is None and not have:
            tag_file.write_text(f"{url} {response.headers.get('ETag', '')}")
        with open(part, "ab" if have else "wb") as file:
            began, since = time.monotonic(), 0
            while chunk := response.read1(CHUNK):
                if have == 0 and looks_like_html(chunk):
                    raise _Wrong("sent a web page instead of the file")
                have += len(chunk)
                if have > limit:
                    raise _Wrong(f"sent more than the {limit:,} bytes expected")
                file.write(chunk)
                advance(len(chunk))
                since += len(chunk)
                if (waited := time.monotonic() - began) >= TIMEOUT:
                    if since < MIN_RATE * waited:
                        raise _Slow(f"only {since:,} bytes in {waited:.0f} seconds")
                    began, since = time.monotonic(), 0
            file.flush()
            os.fsync(file.fileno())
        if have < (end or remote.bytes or 0):
            raise ConnectionError(f"connection closed after {have:,} of {end or remote.bytes:,} bytes")


def _open(request: urllib.request.Request) -> Any:
    """Send a request; the response must begin within twice the timeout, even if it arrives byte by byte."""
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(urllib.request.urlopen(request, timeout=TIMEOUT))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * TIMEOUT)
    if not answer:
        raise _Slow(f"no answer within {2 * TIMEOUT:.0f} seconds")
    found = answer.pop()
    if not isinstance(found, Exception):
        return found
    try:
        raise found
    finally:
        del found  # otherwise this frame keeps the error and its connection alive


def _starts_at(content_range: str | None, start: int) -> bool:
    return content_range is not None and content_range.replace(" ", "").startswith(f"bytes{start}-")
