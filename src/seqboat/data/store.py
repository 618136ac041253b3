"""Prepared data: memory-mapped arrays with a manifest, staged in a temporary folder and renamed when complete.

    data/text/manifest.json        format version, source, counts, what was skipped, sha256 of every array
    data/text/train.tokens.npy     ...
    data/.text.partial/            work that is not finished; nobody reads it, the next run continues or replaces it

A folder under its final name is always complete: it is filled under another name, flushed to disk, and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from seqboat.core.checks import require
from seqboat.data.files import Lock, digest_of, flush_folder, read_json, write_json

FORMAT = 1
"""Version of the layout of prepared folders; other versions are not read."""
MANIFEST = "manifest.json"
KEPT_SKIPS = 100
"""Number of skipped records listed in a manifest; the rest are only counted."""
_BUFFER = 1 << 20
"""Bytes of short sequences to collect before writing."""


class MissingData(ValueError):
    """The data of a task is missing; the message says how to get it."""


def free_bytes(folder: Path) -> int:
    """Free space on the disk of a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def used_bytes(path: Path) -> int:
    """Size of a file, or of all files in a folder; 0 if it does not exist."""
    if path.is_file():
        return path.stat().st_size
    return sum(inner.stat().st_size for inner in path.rglob("*") if inner.is_file())


class Skips:
    """Records that were skipped, and why; an error if there are too many."""

    def __init__(self, strict: bool = False, most: float = 0.1) -> None:
        """
        Args:
            strict: raise an error at the first bad record.
            most: largest fraction of bad records to tolerate.
        """
        self.strict = strict
        self.most = most
        self.count = 0
        self.listed: list[dict[str, str]] = []
        self.reasons: dict[str, int] = {}
        """number of skipped records by reason, without the details that differ from record to record"""

    def add(self, file: object, record: object, reason: str) -> None:
        """Skip a record."""
        if self.strict:
            raise ValueError(f"{file}, {record}: {reason}")
        self.count += 1
        self.count_reasons({reason_kind(reason): 1})
        if len(self.listed) < KEPT_SKIPS:
            self.listed.append({"file": str(file), "record": str(record), "reason": reason})

    def count_reasons(self, counts: Mapping[str, int]) -> None:
        """Add numbers of skipped records by reason."""
        for kind, count in counts.items():
            kind = kind if kind in self.reasons or len(self.reasons) < KEPT_SKIPS else "other reasons"
            self.reasons[kind] = self.reasons.get(kind, 0) + count

    def check(self, kept: int) -> None:
        """Raise an error if too many of the `kept + count` records were skipped."""
        if self.count > self.most * (kept + self.count):
            kinds = sorted(self.reasons.items(), key=lambda pair: -pair[1])
            why = f" ({', '.join(f'{n:,} {kind}' for kind, n in kinds[:5])})" if len(kinds) > 1 else ""
            raise ValueError(
                f"{self.count} of {kept + self.count} records are bad{why}; the first: {self.first}"
            )

    @property
    def first(self) -> str:
        """The first record that was skipped, and why."""
        return "{file}, {record}: {reason}".format(**self.listed[0])


def reason_kind(reason: str) -> str:
    """A reason without what differs from record to record.

    >>> reason_kind("not UTF-8 at byte 17"), reason_kind("not a number: '?'"), reason_kind("expected 2 fields")
    ('not UTF-8', 'not a number', 'expected 2 fields')
    """
    kind = re.split(r":|, got | at byte ", reason, maxsplit=1)[0]
    return kind if kind.startswith("expected") else re.sub(r"(?<![\w-])\d[\d,]*", "N", kind)


class ArrayWriter:
    """An .npy file that grows by rows."""

    def __init__(self, path: Path, dtype: DTypeLike, row: tuple[int, ...] = ()) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.row = row
        self.rows = 0
        self.file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by `close`
        self._write_header()
        self.begin = self.file.tell()
        """where the rows begin"""

    def _write_header(self) -> None:
        # NumPy leaves room in it for any number of rows
        shape, kind = (self.rows, *self.row), np.lib.format.dtype_to_descr(self.dtype)
        fields = {"descr": kind, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, fields)

    def append(self, rows: NDArray[np.generic]) -> None:
        """Add rows (n, *row)."""
        require(
            rows.shape[1:] == self.row,
            f"{self.path.name}: rows must have shape {self.row}, got {rows.shape[1:]}",
        )
        self.file.write(np.ascontiguousarray(rows, dtype=self.dtype).tobytes())
        self.rows += len(rows)

    def truncate(self, rows: int) -> None:
        """Drop all rows after the first `rows`."""
        size = self.dtype.itemsize * int(np.prod(self.row, dtype=np.int64))
        self.file.seek(self.begin + rows * size)
        self.file.truncate()
        self.rows = rows

    def close(self) -> None:
        """Write the header and flush to disk."""
        self.file.seek(0)
        self._write_header()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


class Staging:
    """A folder being filled; `finish` renames it to its final name.

    Use it in a `with` block: leaving it without `finish` removes the folder, unless it has a plan to continue by.
    """

    def __init__(self, root: Path, name: str, plan: Mapping[str, object] | None = None) -> None:
        """
        Args:
            root: the data folder.
            name: of the prepared data.
            plan: everything that determines the content. An unfinished folder with the same plan is continued,
                any other is removed.
        """
        self.root = root
        self.name = name
        self.final = root / name
        self.folder = root / f".{name}.partial"
        self.plan = None if plan is None else {"format": FORMAT, **plan}
        self.writers: dict[str, ArrayWriter] = {}
        self.scratches: list[ArrayWriter] = []
        self.ragged: list[RaggedWriter] = []
        self.lock = Lock(root, f".{name}.lock", f"another process is preparing {self.final}")

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True, exist_ok=True)
        restore(self.root, self.name)
        self.lock.acquire()
        plan_file = self.folder / "plan.json"
        if self.folder.exists() and not (self.plan is not None and _read_plan(plan_file) == self.plan):
            shutil.rmtree(self.folder)
        self.folder.mkdir(exist_ok=True)
        if self.plan is not None:
            write_json(plan_file, self.plan, sort_keys=True)
        return self

    def array(self, name: str, dtype: DTypeLike, row: tuple[int, ...] = ()) -> ArrayWriter:
        """A new array to append rows to."""
        writer = ArrayWriter(self.folder / f"{name}.npy", dtype, row)
        self.writers[name] = writer
        return writer

    def scratch(self, name: str, dtype: DTypeLike, row: tuple[int, ...] = ()) -> ArrayWriter:
        """An array for intermediate results, removed by `finish`."""
        writer = ArrayWriter(self.folder / f".{name}.npy", dtype, row)
        self.scratches.append(writer)
        return writer

    def put(self, name: str, array: NDArray[np.generic]) -> None:
        """Write a whole array."""
        self.array(name, array.dtype, array.shape[1:]).append(array)

    def finish(self, source: str, made: Prepared, skips: Skips | None = None) -> Path:
        """Close the arrays, write the manifest, and rename the folder to its final name."""
        skips = skips or Skips()
        for ragged in self.ragged:
            ragged.flush()
        arrays = {}
        for name, writer in self.writers.items():
            writer.close()
            arrays[name] = {
                "bytes": writer.path.stat().st_size,
                "dtype": writer.dtype.str,
                "sha256": digest_of(writer.path),
                "shape": [writer.rows, *writer.row],
            }
        for path in self.folder.iterdir():
            if path.stem not in arrays or path.suffix != ".npy":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        manifest = {
            "format": FORMAT,
            "name": self.name,
            "source": source,
            "counts": dict(made.counts),
            "skipped": skips.count,
            "skipped_records": skips.listed,
            "skipped_reasons": skips.reasons,
            "arrays": arrays,
            "extra": dict(made.extra),
            "notes": list(made.notes),
        }
        write_json(self.folder / MANIFEST, manifest, sort_keys=True)
        flush_folder(self.folder)
        old = self.root / f".{self.name}.old"
        if self.final.exists():
            os.rename(self.final, old)
        os.rename(self.folder, self.final)
        flush_folder(self.root)
        if old.exists():
            shutil.rmtree(old)
        return self.final

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in [*self.writers.values(), *self.scratches]:
            writer.file.close()
        if self.folder.exists() and self.plan is None:
            shutil.rmtree(self.folder)
        self.lock.release(remove=True)


def restore(root: Path, name: str) -> None:
    """Recover from a crash between two renames: the old folder was moved away, the new one not yet in place."""
    final, old = root / name, root / f".{name}.old"
    if old.exists():
        if final.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, final)


def _read_plan(path: Path) -> Any:
    try:
        return read_json(path)
    except ValueError:
        return None


class Arrays(Protocol):
    """Arrays by name."""

    def __getitem__(self, name: str, /) -> NDArray[Any]: ...


READS = 512
"""Reads of an `ArrayStore` after which it unmaps its arrays. Each may map 64 kB around what it reads."""


class ArrayStore:
    """Prepared arrays, opened on first use; cheap to pickle.

    They are mapped into memory, and what was read of them counts as memory of this process. So they are mapped anew
    from time to time: reading all of a large table row by row takes little memory.
    """

    def __init__(self, folder: Path) -> None:
        """Open a prepared folder that `find` has checked."""
        self.folder = folder
        self.manifest: dict[str, Any] = _read_manifest(folder)
        self._open: dict[str, NDArray[np.generic]] = {}
        self._reads = 0

    @classmethod
    def find(cls, root: str | Path, name: str) -> ArrayStore:
        """The prepared data of a task.

        Raises:
            MissingData: if there is none, or none that this version can read.
        """
        folder, old = Path(root) / name, Path(root) / f".{name}.old"
        if not folder.exists() and old.is_dir():
            folder = old  # a process died between two renames; only who prepares data puts it back
        if not (folder / MANIFEST).exists():
            raise MissingData(
                f"{folder} contains no prepared data: run `seqboat paper data prepare {name}`"
                f" (`seqboat paper data list` says what is needed and where to get it)"
            )
        return cls(folder)

    def __getstate__(self) -> dict[str, object]:
        return {"folder": self.folder, "manifest": self.manifest, "_open": {}, "_reads": 0}

    def __getitem__(self, name: str) -> NDArray[Any]:
        self._reads += 1
        if self._reads > READS:
            self.release()
        if name not in self._open:
            require(name in self.manifest["arrays"], f"{self.folder} has no array {name!r}")
            array = np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            entry = self.manifest["arrays"][name]
            require(
                list(array.shape) == entry["shape"] and array.dtype.str == entry["dtype"],
                f"{self.folder / name}.npy does not fit its manifest: prepare it again",
            )
            self._open[name] = array
        return self._open[name]

    def __contains__(self, name: str) -> bool:
        return name in self.manifest["arrays"]

    def release(self) -> None:
        """Unmap the arrays until their next use; an array that somebody holds stays."""
        self._open.clear()
        self._reads = 0

    def verify(self) -> None:
        """Compare every array with its sha256."""
        for name, entry in self.manifest["arrays"].items():
            path = self.folder / f"{name}.npy"
            got = digest_of(path)
            require(
                got == entry["sha256"],
                f"{path} is damaged: sha256 is {got}, expected {entry['sha256']}; prepare it again",
            )

    @cached_property
    def digest(self) -> str:
        """The hash of what was prepared, wherever it lies and whenever it was made."""
        manifest = self.manifest
        arrays = {n: [e["sha256"], e["dtype"], e["shape"]] for n, e in manifest["arrays"].items()}
        # not what the reader knew beforehand
        extra = {k: v for k, v in manifest["extra"].items() if k not in ("stamp", "input")}
        text = json.dumps([arrays, manifest["counts"], extra], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(entry["bytes"] for entry in self.manifest["arrays"].values())


def _read_manifest(folder: Path) -> dict[str, Any]:
    again = f"run `seqboat paper data prepare {folder.name}` again"
    try:
        manifest = read_json(folder / MANIFEST)
    except ValueError as error:
        raise MissingData(f"{error}: {again}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("arrays"), dict):
        raise MissingData(f"{folder / MANIFEST} is not a manifest: {again}")
    if manifest.get("format") != FORMAT:
        raise MissingData(
            f"{folder} was prepared in format {manifest.get('format')}, this version reads {FORMAT}: {again}"
        )
    for name, entry in manifest["arrays"].items():
        path = folder / f"{name}.npy"
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            raise MissingData(f"{path} has {size} bytes, expected {entry['bytes']}: {again}")
    return manifest


class Prepared(NamedTuple):
    """The result of preparing data."""

    counts: Mapping[str, int]
    """examples per split"""
    extra: Mapping[str, object] = MappingProxyType({})
    """further entries for the manifest, such as the mean of the training split"""
    notes: tuple[str, ...] = ()
    """what a user should know about the data"""


class RaggedWriter:
    """Sequences of different lengths, end to end, with their offsets."""

    def __init__(self, staging: Staging, name: str, dtype: DTypeLike = np.uint8) -> None:
        self.tokens = staging.array(f"{name}.tokens", dtype)
        self.offsets = staging.array(f"{name}.offsets", np.int64)
        self.offsets.append(np.zeros(1, np.int64))
        self._waiting = bytearray()
        self._ends: list[int] = []
        self._end = 0
        staging.ragged.append(self)

    def append(self, tokens: NDArray[np.generic] | bytes) -> None:
        """Add one sequence."""
        if not isinstance(tokens, bytes):
            tokens = np.ascontiguousarray(tokens, dtype=self.tokens.dtype).tobytes()
        self._waiting += tokens
        self._end += len(tokens) // self.tokens.dtype.itemsize
        self._ends.append(self._end)
        if len(self._waiting) >= _BUFFER or len(self._ends) >= _BUFFER // 8:
            self.flush()

    def flush(self) -> None:
        """Write the buffered sequences."""
        self.tokens.append(np.frombuffer(bytes(self._waiting), self.tokens.dtype))
        self.offsets.append(np.array(self._ends, np.int64))
        self._waiting.clear()
        self._ends.clear()
