"""Preparation: archives that attack, downloads that lie, runs that are killed, records that are bad."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
import wave
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqboat.cli.main import main
from seqboat.data import download as downloads
from seqboat.data import sources
from seqboat.data.download import DownloadError, RemoteFile, download
from seqboat.data.prepare import DATASETS, find_dataset, prepare
from seqboat.data.sources import Source, read_file
from seqboat.data.store import MANIFEST, ArrayStore, ArrayWriter, MissingData, Prepared, Skips, Staging

# storage


def make_store(root: Path, rows: int = 3) -> ArrayStore:
    with Staging(root, "thing") as staging:
        staging.put("train.labels", np.arange(rows, dtype=np.int16))
        staging.finish("a test", Prepared({"train": rows}))
    return ArrayStore.find(root, "thing")


def file_pages() -> int:
    """Bytes of mapped files that this process has read and still holds."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_reading_row_by_row_takes_little_memory(tmp_path: Path) -> None:
    """5,000 rows, each in a page of 4 kB of the file; an array that somebody holds stays readable."""
    rows = 5000
    with Staging(tmp_path, "thing") as staging:
        staging.put("train.rows", np.ones((rows, 4096), np.uint8))
        staging.finish("a test", Prepared({"train": rows}))
    store = ArrayStore.find(tmp_path, "thing")
    first, before = store["train.rows"], file_pages()
    assert sum(int(store["train.rows"][row, 0]) for row in range(rows)) == rows
    # without mapping anew: all of it
    assert file_pages() - before < 0.5 * rows * 4096
    assert int(first[rows - 1].sum()) == 4096


def test_arrays_grow_by_rows_and_are_plain_npy_files(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path / "a.npy", np.int16, (2,))
    for part in (np.ones((3, 2)), np.zeros((0, 2)), np.full((1, 2), 7)):
        writer.append(part)
    with pytest.raises(ValueError, match=r"rows must have shape \(2,\), got \(3,\)"):
        writer.append(np.zeros((1, 3)))
    writer.close()
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), [[1, 1]] * 3 + [[7, 7]])


def test_a_store_is_memory_mapped_and_travels_without_its_arrays(tmp_path: Path) -> None:
    store = make_store(tmp_path, rows=100_000)
    assert isinstance(store["train.labels"], np.memmap)
    there = pickle.loads(pickle.dumps(store))
    assert len(pickle.dumps(store)) < 5000
    np.testing.assert_array_equal(there["train.labels"], store["train.labels"])
    with pytest.raises(ValueError, match=r"has no array 'test\.labels'"):
        store["test.labels"]


def test_nothing_is_left_when_preparing_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Staging(tmp_path, "thing") as staging:
        staging.put("train.labels", np.zeros(3))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_the_old_data_stays_until_the_new_is_whole(tmp_path: Path) -> None:
    make_store(tmp_path, rows=3)
    with pytest.raises(RuntimeError), Staging(tmp_path, "thing") as staging:
        staging.put("train.labels", np.zeros(9))
        raise RuntimeError
    assert len(ArrayStore.find(tmp_path, "thing")["train.labels"]) == 3
    assert len(make_store(tmp_path, rows=5)["train.labels"]) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_a_crash_between_the_two_renames_is_repaired(tmp_path: Path) -> None:
    make_store(tmp_path)
    os.rename(tmp_path / "thing", tmp_path / ".thing.old")
    assert len(ArrayStore.find(tmp_path, "thing")["train.labels"]) == 3


def test_two_processes_cannot_prepare_the_same_data(tmp_path: Path) -> None:
    with (
        Staging(tmp_path, "thing"),
        pytest.raises(ValueError, match="another process is preparing"),
        Staging(tmp_path, "thing"),
    ):
        pass


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "train.labels.npy").write_bytes(b"short"), "has 5 bytes, expected"),
        (lambda f: (f / "train.labels.npy").unlink(), "has None bytes, expected"),
        (lambda f: (f / MANIFEST).write_text("{"), "cannot be read"),
        (
            lambda f: (f / MANIFEST).write_text(json.dumps({"format": 99, "arrays": {}})),
            "was prepared in format 99, this version reads 1",
        ),
        (
            lambda f: (f / MANIFEST).unlink(),
            "contains no prepared data: run `seqboat paper data prepare thing`",
        ),
    ],
)
def test_damaged_and_foreign_stores_are_not_read(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    make_store(tmp_path)
    damage(tmp_path / "thing")
    with pytest.raises(MissingData, match=message):
        ArrayStore.find(tmp_path, "thing")


def test_data_of_another_version_is_made_again(tmp_path: Path) -> None:
    counts = (4, 2, 2)
    prepare("pathfinder16", "generate", tmp_path, counts=counts, workers=1)
    manifest = tmp_path / "pathfinder16" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    with pytest.raises(MissingData, match="run `seqboat paper data prepare pathfinder16` again"):
        ArrayStore.find(tmp_path, "pathfinder16")
    prepare("pathfinder16", "generate", tmp_path, counts=counts, workers=1).verify()


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.verify()
    path = tmp_path / "thing" / "train.labels.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: sha256 is"):
        ArrayStore.find(tmp_path, "thing").verify()


def test_skips_are_listed_counted_and_limited() -> None:
    skips = Skips()
    for i in range(150):
        skips.add("a.tsv", f"line {i}", "empty text")
    assert (skips.count, len(skips.listed)) == (150, 100)
    skips.check(10_000)
    with pytest.raises(
        ValueError, match=r"150 of 160 records are bad; the first: a\.tsv, line 0: empty text"
    ):
        skips.check(10)
    with pytest.raises(ValueError, match=r"b\.tsv, line 3: stereo"):
        Skips(strict=True).add("b.tsv", "line 3", "stereo")


KILLED = """
import sys
from seqboat.data import prepare
from seqboat.tasks import pathfinder
pathfinder.SHARD = 20
real = pathfinder._make_shard
def slowly(*arguments):
    made = real(*arguments)
    print("part", flush=True)
    return made
pathfinder._make_shard = slowly
prepare.prepare("pathfinder16", "generate", sys.argv[1], counts=(200, 20, 20), seed=1, workers=1)
print("done", flush=True)
"""


def test_a_killed_run_leaves_nothing_half_prepared_and_the_next_one_continues(tmp_path: Path) -> None:
    def start(folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", KILLED, str(folder)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with start(tmp_path / "killed") as run:
        assert run.stdout is not None
        for _ in range(3):
            assert run.stdout.readline() == "part\n"
        run.send_signal(signal.SIGKILL)
    assert not (tmp_path / "killed" / "pathfinder16").exists()
    with start(tmp_path / "killed") as run:
        lines = run.communicate()[0].split()
    assert lines[-1] == "done"
    assert 1 <= lines.count("part") <= 9
    whole = prepare("pathfinder16", "generate", tmp_path / "whole", counts=(200, 20, 20), seed=1, workers=1)
    again = ArrayStore.find(tmp_path / "killed", "pathfinder16")
    again.verify()
    assert again.manifest == whole.manifest
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["pathfinder16"]


# archives


def add(archive: tarfile.TarFile, name: str, content: bytes = b"x", **fields: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    archive.addfile(info, io.BytesIO(content) if info.isfile() else None)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("../evil.txt", {}, "points outside"),
        ("a/../../evil.txt", {}, "points outside"),
        ("/etc/evil.txt", {}, "points outside"),
        ("C:\\evil.txt", {}, "points outside"),
        ("..\\evil.txt", {}, "points outside"),
        ("link.txt", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd", "size": 0}, "link or a device"),
        ("hard.txt", {"type": tarfile.LNKTYPE, "linkname": "good.txt", "size": 0}, "link or a device"),
        ("device", {"type": tarfile.CHRTYPE, "size": 0}, "link or a device"),
    ],
)
def test_archives_that_climb_out_or_link_are_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        add(archive, "aclImdb/train/pos/0_9.txt")
        add(archive, name, **fields)
    with pytest.raises(ValueError, match=message):
        list(Source(path).members())
    with pytest.raises(ValueError, match=message):
        prepare("text", str(path), tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_zip_archives_are_held_to_the_same(tmp_path: Path) -> None:
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../enwik8", b"x")
    with pytest.raises(ValueError, match="points outside"):
        list(Source(path).members())
    with zipfile.ZipFile(path, "w") as archive:
        link = zipfile.ZipInfo("enwik8")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(ValueError, match="link or a device"):
        list(Source(path).members())


def test_bombs_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = bytes(20 << 20)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("enwik8", zeros)
    with pytest.raises(ValueError, match="200 times its size: refused"):
        list(Source(tmp_path / "bomb.zip").members())
    with tarfile.open(tmp_path / "bomb.tar.xz", "w:xz") as tar:
        add(tar, "aclImdb/train/pos/0_9.txt", zeros)
    with pytest.raises(ValueError, match="200 times its size: refused"):
        list(Source(tmp_path / "bomb.tar.xz").members())
    (tmp_path / "bomb.xz").write_bytes(lzma.compress(zeros))
    with pytest.raises(ValueError, match="200 times its size: refused"):
        read_file(tmp_path / "bomb.xz")
    monkeypatch.setattr(sources, "MAX_BYTES", 1000)
    (tmp_path / "large").write_bytes(bytes(1001))
    with pytest.raises(ValueError, match="unpacks to more than 1,000 bytes"):
        read_file(tmp_path / "large")


def peak_of_reading(path: Path, message: str) -> int:
    """Bytes that refusing an archive takes."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            for member in Source(path).members():
                member.read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def pax_header(size: int) -> bytes:
    """The header of a PAX header that claims this size."""
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, size
    return info.tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize("pack", [bz2.compress, gzip.compress, lzma.compress])
@pytest.mark.parametrize("padding", [0, 1_000_000])
def test_headers_without_end_are_refused(
    tmp_path: Path, pack: Callable[[bytes], bytes], padding: int
) -> None:
    path = tmp_path / "bomb.tar.any"
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        # with something large in it the archive may unpack to much
        add(archive, "good.txt", os.urandom(padding))
    content = whole.getvalue()[: 512 + -(-padding // 512) * 512]
    path.write_bytes(pack(content + pax_header(6 << 30) + bytes(30 << 20)))
    assert peak_of_reading(path, f"{path} has a header of 6,442,450,944 bytes: refused") < 25_000_000
    # many small ones
    path.write_bytes(pack(content + (pax_header(1 << 19) + bytes(1 << 19)) * 40))
    assert peak_of_reading(path, f"{path} (unpacks to more|is damaged|: the headers)") < 60_000_000


def test_a_zip_that_lies_about_sizes_is_refused_in_little_memory(tmp_path: Path) -> None:
    for method, message in (
        (zipfile.ZIP_DEFLATED, "is damaged or truncated: Bad CRC-32"),
        (zipfile.ZIP_BZIP2, ".*is not compressed with deflate"),
        (zipfile.ZIP_LZMA, ".*is not compressed with deflate"),
    ):
        path = tmp_path / "lie.zip"
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("enwik8", bytes(40 << 20))
        content = bytearray(path.read_bytes())
        size = struct.pack("<I", 40 << 20)
        while (place := content.find(size)) >= 0:
            content[place : place + 4] = struct.pack("<I", 1000)
        path.write_bytes(content)
        assert peak_of_reading(path, f"{path}:? {message}") < 10_000_000


def test_a_zip_of_millions_of_members_is_refused_before_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "many.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(2000):
            archive.writestr(f"{i}", b"")
    assert len(list(Source(path).members())) == 2000
    monkeypatch.setattr(sources, "MAX_MEMBERS", 1999)
    assert peak_of_reading(path, f"{path} has 2,000 members, more than 1,999: refused") < 500_000
    monkeypatch.setattr(sources, "MAX_DIRECTORY", 90_000)
    assert peak_of_reading(path, f"{path} has a directory of .* bytes: refused") < 200_000


def test_truncated_archives_and_web_pages_are_named(tmp_path: Path) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        for i in range(20):
            add(archive, f"aclImdb/train/pos/{i}_9.txt", os.urandom(500))
    for share in (0.3, 0.7, 0.98):
        path = tmp_path / "cut.tar.gz"
        path.write_bytes(whole.getvalue()[: int(share * len(whole.getvalue()))])
        with pytest.raises(ValueError, match=r"cut.tar.gz is damaged or truncated"):
            for member in Source(path).members():
                member.read()
    # a checksum at the end of the file stands for every byte before it
    for place in range(40, len(whole.getvalue()), 397):
        damaged = bytearray(whole.getvalue())
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"cut.tar.gz is damaged"):
            for member in Source(path).members():
                member.read()
    page = tmp_path / "aclImdb_v1.tar.gz"
    page.write_bytes(b"\n <!DOCTYPE HTML><html>404</html>")
    with pytest.raises(ValueError, match="is a web page, not data"):
        prepare("text", str(page), tmp_path / "data")
    (tmp_path / "empty.zip").write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        prepare("enwik8", str(tmp_path / "empty.zip"), tmp_path / "data")
    with pytest.raises(MissingData, match=r"nowhere does not exist; get enwik8.zip from https://"):
        prepare("enwik8", str(tmp_path / "nowhere"), tmp_path / "data")


def test_archives_without_a_checksum_must_have_an_end_and_nothing_behind_it(tmp_path: Path) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for i in range(4):
            add(archive, f"{i}.txt", b"x" * 512)
    path = tmp_path / "plain.tar"
    for content, message in (
        (whole.getvalue()[:2048], "plain.tar is damaged or truncated: it has no end mark"),
        (whole.getvalue()[:2148], "plain.tar is damaged or truncated: it has no end mark"),
        (whole.getvalue()[:2560], "plain.tar is damaged or truncated: unexpected end of data"),
        (
            whole.getvalue()[:2048] + b"?" + whole.getvalue()[2049:],
            "is damaged: no member begins at byte 2,048",
        ),
        (whole.getvalue() * 2, "is damaged: no member begins at byte 4,096"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            for member in Source(path).members():
                member.read()
    path.write_bytes(whole.getvalue())
    assert len(list(Source(path).members())) == 4


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_are_recognized_by_their_content(tmp_path: Path, style: int) -> None:
    path = tmp_path / "called.anything"
    with tarfile.open(path, "w:bz2", format=style) as archive:
        add(archive, "folder/name.txt", b"content")
    assert Source(path).kind() == "tar"
    assert [(member.name, member.base, member.read()) for member in Source(path).members()] == [
        ("folder/name.txt", "name.txt", b"content")
    ]
    path.write_bytes(b"just text " * 100)
    assert Source(path).kind() == "file"
    # a header without the mark of the newer styles
    with tarfile.open(path, "w") as archive:
        add(archive, "name.txt", b"content")
    header = bytearray(path.read_bytes())
    header[257:265] = bytes(8)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    path.write_bytes(header)
    assert Source(path).kind() == "tar"


# downloads

CONTENT = np.random.default_rng(0).bytes(400_000)
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


class Server:
    """A web server on this machine whose answers are faults."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append((self.path, self.headers.get("Range")))
                answer = getattr(outer, self.path.strip("/").partition("?")[0])
                answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @staticmethod
    def send(
        handler: BaseHTTPRequestHandler, code: int, body: bytes, length: int | None = None, **more: str
    ) -> None:
        handler.send_response(code)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        for key, value in more.items():
            handler.send_header(key.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    def start_of(self, handler: BaseHTTPRequestHandler) -> int:
        wanted = handler.headers.get("Range")
        return int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0

    def good(self, handler: BaseHTTPRequestHandler) -> None:
        start = self.start_of(handler)
        if start >= len(CONTENT):
            handler.send_error(416)
        elif start:
            where = f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
            self.send(handler, 206, CONTENT[start:], Content_Range=where)
        else:
            self.send(handler, 200, CONTENT)

    def drops(self, handler: BaseHTTPRequestHandler) -> None:
        """Promises the rest, sends 100,000 bytes and hangs up."""
        start = self.start_of(handler)
        rest = CONTENT[start:]
        code = 206 if start else 200
        where = f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
        self.send(handler, code, rest[:100_000], length=len(rest), Content_Range=where)
        handler.close_connection = True

    def truncates(self, handler: BaseHTTPRequestHandler) -> None:
        self.send(handler, 200, CONTENT[:1000])

    def ignores_range(self, handler: BaseHTTPRequestHandler) -> None:
        self.send(handler, 200, CONTENT)

    def wrong_range(self, handler: BaseHTTPRequestHandler) -> None:
        self.send(handler, 206, CONTENT, Content_Range=f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}")

    def page(self, handler: BaseHTTPRequestHandler) -> None:
        self.send(
            handler,
            200,
            b"<!doctype html><title>Sign in</title>".ljust(len(CONTENT)),
            Content_Type="text/html",
        )

    def lies(self, handler: BaseHTTPRequestHandler) -> None:
        self.send(handler, 200, bytes(len(CONTENT)))

    def endless(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(100):
                handler.wfile.write(CONTENT)
        except OSError:
            pass

    def missing(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_error(404)

    def busy(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_error(503)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    # a proxy of the machine must not come between
    monkeypatch.setenv("no_proxy", "*")
    for name, value in {"ATTEMPTS": 2, "PAUSE": 0.001, "TIMEOUT": 5}.items():
        monkeypatch.setattr(downloads, name, value)
    server = Server()
    thread = threading.Thread(target=server.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.server.shutdown()
    server.server.server_close()
    thread.join()


def remote(
    server: Server, *paths: str, digest: str | None = DIGEST, size: int | None = len(CONTENT)
) -> RemoteFile:
    return RemoteFile(
        name="file.bin", urls=tuple(f"{server.url}/{p}" for p in paths), bytes=size, digest=digest
    )


def get(what: RemoteFile, folder: Path) -> bytes:
    arrived: list[int] = []
    path = download(what, folder, arrived.append)
    assert sum(arrived) > 0
    assert [p.name for p in folder.iterdir()] == ["file.bin"]
    return path.read_bytes()


def test_a_good_mirror_and_a_file_that_is_already_there(server: Server, tmp_path: Path) -> None:
    assert get(remote(server, "good"), tmp_path) == CONTENT
    download(remote(server, "missing"), tmp_path)
    assert len(server.requests) == 1
    (tmp_path / "file.bin").write_bytes(b"other")
    with pytest.raises(ValueError, match="has 5 bytes, expected 400,000"):
        download(remote(server, "good"), tmp_path)


def test_dropped_connections_are_resumed_where_they_stopped(server: Server, tmp_path: Path) -> None:
    assert get(remote(server, "drops"), tmp_path) == CONTENT
    assert [wanted for _, wanted in server.requests] == [
        None,
        "bytes=100000-",
        "bytes=200000-",
        "bytes=300000-",
    ]


def test_another_run_continues_a_download(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".file.bin.part").write_bytes(CONTENT[:250_000])
    assert get(remote(server, "good"), tmp_path) == CONTENT
    assert server.requests == [("/good", "bytes=250000-")]


@pytest.mark.parametrize("path", ["ignores_range", "wrong_range"])
def test_servers_that_do_not_resume_are_read_from_the_start(
    server: Server, tmp_path: Path, path: str
) -> None:
    (tmp_path / ".file.bin.part").write_bytes(CONTENT[:250_000])
    assert get(remote(server, path), tmp_path) == CONTENT


def test_a_wrong_beginning_is_thrown_away(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".file.bin.part").write_bytes(bytes(250_000))
    assert get(remote(server, "good", "good?again"), tmp_path) == CONTENT


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_mirrors_are_asked_in_turn(server: Server, tmp_path: Path, size: int | None) -> None:
    bad = ("missing", "busy", "page", "lies", "truncates")
    assert get(remote(server, *bad, "good", size=size), tmp_path) == CONTENT
    assert {path for path, _ in server.requests} == {f"/{name}" for name in (*bad, "good")}


@pytest.mark.parametrize(
    ("path", "digest", "message"),
    [
        ("missing", DIGEST, "HTTP 404"),
        ("busy", DIGEST, "HTTP Error 503"),
        ("page", DIGEST, "sent a web page instead of the file"),
        ("lies", DIGEST, r"has sha256:[0-9a-f]+, expected sha256:"),
        ("truncates", DIGEST, "offers 1,000 bytes, expected 400,000"),
        ("endless", DIGEST, "sent more than the 400,000 bytes expected"),
        ("lies", "md5:" + hashlib.md5(CONTENT).hexdigest(), r"has md5:[0-9a-f]+, expected md5:"),
    ],
)
def test_what_no_mirror_has_is_said_and_nothing_is_left(
    server: Server, tmp_path: Path, path: str, digest: str, message: str
) -> None:
    with pytest.raises(DownloadError, match=message):
        download(remote(server, path, digest=digest), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_a_hash_nothing_is_continued(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".file.bin.part").write_bytes(bytes(1000))
    assert get(remote(server, "good", digest=None, size=None), tmp_path) == CONTENT
    assert server.requests == [("/good", None)]


def test_an_unknown_host_is_not_asked_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fails(host: str, *rest: object, **more: object) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(DownloadError, match=r"https://nowhere\.invalid/a: unknown host"):
        download(RemoteFile(name="a", urls=("https://nowhere.invalid/a",)), tmp_path)
    assert asked == ["nowhere.invalid"]


def test_a_failed_download_says_what_to_get_by_hand(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    monkeypatch.setitem(DATASETS, "enwik8", replace(DATASETS["enwik8"], remote=remote(server, "missing")))
    assert main(["paper", "data", "prepare", "enwik8", "--data-dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert (
        "HTTP 404" in error and "get enwik8.zip from https://mattmahoney.net" in error and "--from" in error
    )


def test_only_web_addresses_are_opened(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a web address: file:///etc/passwd"):
        download(RemoteFile(name="x", urls=("file:///etc/passwd",)), tmp_path)


def test_preparing_from_a_download(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from seqboat.tasks import enwik8

    monkeypatch.setattr(enwik8, "SIZE", len(CONTENT))
    monkeypatch.setattr(enwik8, "SHA256", DIGEST.removeprefix("sha256:"))
    info = replace(DATASETS["enwik8"], remote=remote(server, "missing", "drops"))
    monkeypatch.setitem(DATASETS, "enwik8", info)
    store = prepare("enwik8", "download", tmp_path)
    assert bytes(store["bytes"]) == CONTENT
    assert store.manifest["source"] == "file.bin"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["downloads", "enwik8"]


# the command


def test_list_says_what_is_missing_and_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", "data", "list", "--data-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for name, info in DATASETS.items():
        assert name in out and info.license in out
    assert "aclImdb_v1.tar.gz" in out and "seqboat paper data prepare text --from PATH" in out

    arguments = ["--data-dir", str(tmp_path)]
    assert (
        main(["paper", "data", "prepare", "pathfinder16", "--count", "20,5,5", "--workers", "1", *arguments])
        == 0
    )
    assert "train 20, val 5, test 5" in capsys.readouterr().out
    assert main(["paper", "data", "prepare", "pathfinder16", *arguments]) == 0
    assert "already exists" in capsys.readouterr().out
    again = ["--count", "10,5,5", "--workers", "1", "--force"]
    assert main(["paper", "data", "prepare", "pathfinder16", *again, *arguments]) == 0
    assert "train 10, val 5, test 5" in capsys.readouterr().out
    assert main(["paper", "data", "list", "--json", *arguments]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["pathfinder16"]["state"] == "ready" and rows["pathx"]["state"] == "missing"
    assert rows["pathfinder16"]["counts"] == {"train": 10, "val": 5, "test": 5}
    assert main(["paper", "data", "verify", *arguments]) == 0
    assert "pathfinder16: unchanged since it was prepared" in capsys.readouterr().out
    (tmp_path / "pathfinder16" / "train.images.npy").write_bytes(b"")
    assert main(["paper", "data", "list", *arguments]) == 0
    assert "broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "pathfnder"], "no data set 'pathfnder': did you mean pathfinder?"),
        (["prepare", "text", "--from", "generate"], "text cannot be generated: get aclImdb_v1.tar.gz"),
        (["prepare", "pathx", "--count", "many"], "--count must be three numbers such as 1000,100,100"),
        (["prepare", "pathx", "--count", "5"], "counts must be three numbers"),
        (["prepare", "pathfinder16", "--from", "download"], "pathfinder16 is not distributed"),
        (["show", "text"], "contains no prepared data: run `seqboat paper data prepare text`"),
        (["show", "nothing"], "no task 'nothing' to show"),
        (["show", "copy", "--index", "999999"], "--index must be from 0 to"),
        (["verify", "nothing"], "no data set 'nothing'"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["paper", "data", *arguments, "--data-dir", str(tmp_path / "data")]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and error.startswith("seqboat paper: error:") and "\n" not in error
    assert not (tmp_path / "data").exists() or list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("inner", [".", "some/data"])
def test_a_data_folder_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], inner: str
) -> None:
    (tmp_path / "file").write_text("x")
    where = tmp_path / "file" / inner
    assert (
        main(["paper", "data", "prepare", "pathfinder16", "--count", "5,1,1", "--data-dir", str(where)]) == 2
    )
    assert capsys.readouterr().err == (
        f"seqboat paper: error: the data folder {where} cannot be made: {tmp_path / 'file'} is a file\n"
    )


def full_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["pathx"], "6.6 GB"),
        (["pathx", "--count", "160,20,20"], "6.6 MB"),
        (["speech", "--from", "download"], "3.5 GB"),
        (["enwik8", "--from", "{folder}"], "20.0 kB"),
    ],
)
def test_a_disk_without_room_is_refused_before_anything_is_made(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    needed: str,
) -> None:
    (tmp_path / "enwik8").write_bytes(b"a" * 1000)
    full_disk(monkeypatch, 19_000)
    where = tmp_path / "some" / "data"
    filled = [argument.format(folder=tmp_path / "enwik8") for argument in arguments]
    assert main(["paper", "data", "prepare", *filled, "--data-dir", str(where)]) == 2
    assert capsys.readouterr().err.strip() == (
        f"seqboat paper: error: preparing {arguments[0]} in {where} needs about {needed} of disk, 19.0 kB are free: "
        "make room, or choose a folder on another disk (--data-dir)"
    )
    assert not where.exists()


def test_finished_parts_and_downloads_need_no_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tmp_path / ".pathfinder16.partial" / "shards"
    parts.mkdir(parents=True)
    (parts / "other.npy").write_bytes(b"x" * 20_000)
    full_disk(monkeypatch, 10_000)
    # about 23 kB for the arrays and as much again for the parts, of which 20 kB are there
    with pytest.raises(ValueError, match=r"needs about 26.6 kB of disk, 10.0 kB are free"):
        prepare("pathfinder16", "generate", tmp_path, counts=(70, 10, 10), workers=1)
    full_disk(monkeypatch, 27_000)
    prepare("pathfinder16", "generate", tmp_path, counts=(70, 10, 10), workers=1)

    (tmp_path / "downloads").mkdir()
    with open(tmp_path / "downloads" / ".enwik8.zip.part", "wb") as part:
        part.truncate(36_000_000)
    with pytest.raises(ValueError, match=r"needs about 100.4 MB of disk"):
        prepare("enwik8", "download", tmp_path)


def test_show_prints_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "data", "show", "recall"]) == 0
    assert capsys.readouterr().out.startswith("inputs ")


def test_progress_is_told_in_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from seqboat.console import progress

    moments = iter([0.0, 1.0, 6.0, 7.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    with progress("drawing", 40, "images") as advance:
        for _ in range(3):
            advance(10)
    assert capsys.readouterr().err == "drawing: 20 of 40 images\n"


def test_progress_is_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    from seqboat.console import progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("drawing", 40) as advance:
        advance(40)
    assert "drawing" in capsys.readouterr().err


def test_every_data_set_can_be_made_or_read() -> None:
    for name in DATASETS:
        info = find_dataset(name)
        assert info.draw is not None or (info.read is not None and info.remote is not None)
        assert (info.draw is None) == (info.counts is None)


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def test_the_data_folder_is_in_the_current_one_by_default(tmp_path: Path) -> None:
    with inside(tmp_path):
        assert main(["paper", "data", "prepare", "listops-small", "--count", "30,3,3"]) == 0
    assert (tmp_path / "data" / "listops-small" / MANIFEST).exists()


# bad records


def wav(samples: int = 16_000) -> bytes:
    whole = io.BytesIO()
    with wave.open(whole, "wb") as file:
        file.setparams((1, 2, 16_000, samples, "NONE", ""))
        file.writeframes(np.arange(samples, dtype="<i2").tobytes())
    return whole.getvalue()


def test_a_wav_with_a_wrong_chunk_size_is_named_and_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "speech"
    for word in ("yes", "no"):
        (folder / word).mkdir(parents=True)
        for i in range(10):
            (folder / word / f"{i:08x}_nohash_0.wav").write_bytes(wav())
    good = wav()
    for name, place, value in (("a", 16, 0xFFFFFFF0), ("b", 40, 0x7FFFFFFF)):
        bad = good[:place] + struct.pack("<I", value) + good[place + 4 :]
        (folder / "yes" / f"{name}_nohash_0.wav").write_bytes(bad)
    store = prepare("speech", str(folder), tmp_path / "data")
    assert store.manifest["skipped"] == 2
    for skip in store.manifest["skipped_records"]:
        assert skip["record"].startswith("yes/") and len(skip["reason"]) > 15
    with pytest.raises(ValueError, match=r"speech, yes/a_nohash_0.wav: "):
        prepare("speech", str(folder), tmp_path / "data", strict=True, force=True)


def png(width: int, height: int, color: bool = False) -> bytes:
    image = pytest.importorskip("PIL.Image")
    small = io.BytesIO()
    image.new("RGB" if color else "L", (min(width, 32), min(height, 32))).save(small, "PNG")
    content = bytearray(small.getvalue())
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


def test_huge_and_colored_images_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    (folder / "imgs" / "0").mkdir(parents=True)
    (folder / "metadata").mkdir()
    lines = []
    for i in range(30):
        sides = {7: (60_000, 60_000), 8: (10_000, 10_000)}.get(i, (32, 32))
        (folder / "imgs" / "0" / f"{i}.png").write_bytes(png(*sides, color=i in (3, 4)))
        lines.append(f"imgs/0 {i}.png {i} {i % 2}")
    (folder / "metadata" / "0.npy").write_text("\n".join(lines))
    where = ["--from", str(tmp_path / "pathfinder32"), "--data-dir", str(tmp_path / "data")]
    assert main(["paper", "data", "prepare", "pathfinder", *where]) == 0
    error = capsys.readouterr().err
    assert error.count("2 images are in color and were converted to gray") == 1
    assert "2 records were skipped" in error and "imgs/0/7.png, image: expected 32 x 32 pixels" in error


def test_a_codec_error_in_retrieval_costs_one_pair(tmp_path: Path) -> None:
    for name in ("train", "eval", "test"):
        lines = [f"1.0\t{i}\t{i + 1}\tb'one {i}'\tb'two {i}'" for i in range(20)]
        lines[5] = "1.0\t5\t6\tb'broken \\x1'\tb'two'"
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines))
    store = prepare("retrieval", str(tmp_path), tmp_path / "data")
    assert store.manifest["counts"] == {"train": 19, "val": 19, "test": 19}
    (first, *_) = store.manifest["skipped_records"]
    assert first["record"] == "line 6" and "not a Python bytes literal" in first["reason"]


def test_errors_inside_a_reader_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqboat.tasks import text

    folder = tmp_path / "aclImdb" / "train" / "pos"
    folder.mkdir(parents=True)
    (folder / "0_9.txt").write_text("good")

    def fail(content: bytes) -> str:
        raise IndexError("list index out of range")

    monkeypatch.setattr(text, "bad_text", fail)
    with pytest.raises(ValueError, match=r"aclImdb, train/pos/0_9.txt: IndexError: list index out of range"):
        prepare("text", str(tmp_path / "aclImdb"), tmp_path / "data")


def test_arrays_that_are_smaller_than_they_claim(tmp_path: Path) -> None:
    from seqboat.tasks.image import load_npy

    whole = io.BytesIO()
    np.save(whole, np.arange(6, dtype=np.int16).reshape(2, 3, order="F"))
    path = tmp_path / "a.npy"
    path.write_bytes(whole.getvalue())
    np.testing.assert_array_equal(load_npy(path), np.load(path))
    for content in (
        whole.getvalue().replace(b"(2, 3)", b"(99999999999999, 3)"),
        whole.getvalue()[:-1],
        whole.getvalue().replace(b"'<i2'", b"'|O' "),
        b"not an array",
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.npy is not an array of numbers"):
            load_npy(path)


def test_a_file_with_the_name_of_the_published_one_must_be_it(tmp_path: Path) -> None:
    path = tmp_path / "aclImdb_v1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        add(archive, "aclImdb/train/pos/0_9.txt")
    with pytest.raises(ValueError, match=r"expected 84,125,825: it is not the published file; rename it"):
        prepare("text", str(path), tmp_path / "data")
    path.rename(tmp_path / "mine.tar.gz")
    with pytest.raises(ValueError, match="contains no test reviews"):
        prepare("text", str(tmp_path / "mine.tar.gz"), tmp_path / "data")


def test_what_is_listed_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data-dir", str(tmp_path)]
    for name in ("listops-small", "pathfinder16"):
        assert main(["paper", "data", "prepare", name, "--count", "20,5,5", "--workers", "1", *data]) == 0
        capsys.readouterr()
        assert main(["paper", "data", "show", name, *data]) == 0
        assert "->" in capsys.readouterr().out
    assert main(["paper", "data", "show", "nope", *data]) == 2
    assert "no task 'nope' to show: there are listops, text" in capsys.readouterr().err
    assert main(["paper", "data", "show", "text", *data]) == 2
    assert "seqboat paper data prepare text" in capsys.readouterr().err


ORPHANS = """
import os, sys, time
from functools import partial
from pathlib import Path
from seqboat.data.shards import make_parts

def sleep(folder, part, advance):
    (folder / str(os.getpid())).touch()
    time.sleep(60)

if __name__ == "__main__":
    make_parts(partial(sleep, Path(sys.argv[1])), range(2), 2, print)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script, pids = tmp_path / "orphans.py", tmp_path / "pids"
    script.write_text(ORPHANS)
    pids.mkdir()
    with subprocess.Popen([sys.executable, str(script), str(pids)]) as process:
        deadline = time.monotonic() + 120
        while len(list(pids.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    workers = [path.name for path in pids.iterdir()]
    deadline = time.monotonic() + 30
    while any(Path("/proc", pid).exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2 and not any(Path("/proc", pid).exists() for pid in workers)
