"""Prepared copies of your own files: read once in bounded memory, then used as memory-mapped arrays.

    data/files/rows-3f1c0a9b2d4e/      the copy of a large table; made again when the table changes, safe to delete

Small files are copied to a temporary folder that is removed with the last user of the copy.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from seqboat.console import Advance, format_bytes, progress
from seqboat.core.checks import require
from seqboat.data.files import taking_turns
from seqboat.data.store import ArrayStore, MissingData, Prepared, Skips, Staging, free_bytes

FOLDER = "files"
"""Folder in the data folder for copies of your own files."""
SMALL = 32 << 20
"""Every process makes a separate copy of files of up to this many bytes."""
_PACKED = {".gz": 10, ".bz2": 10, ".xz": 10}
"""Estimated expansion of a compressed file, in multiples of its size."""

Make = Callable[[Staging, Skips, Advance], Prepared]


def prepared_copy(
    data_dir: str | Path,
    files: Sequence[Path],
    settings: Mapping[str, object],
    make: Make,
    skips: Skips,
) -> ArrayStore:
    """The arrays made from some files: an existing copy, or a new one.

    Args:
        data_dir: the data folder; a temporary folder is used where it cannot be written to.
        files: to read.
        settings: everything else that determines the content.
        make: reads the files and fills the arrays; reports progress in bytes.
        skips: the policy for bad records; records which were skipped.
    """
    size = sum(_expected_bytes(path) for path in files)
    folder = Path(data_dir) / FOLDER
    if size > SMALL and _is_writable(folder):
        with taking_turns(folder):
            store = _find_or_make(folder, files, settings, size, make, skips)
    else:
        temporary = Path(tempfile.mkdtemp(prefix="seqboat-"))
        try:
            store = _find_or_make(temporary, files, settings, size, make, skips)
        except BaseException:
            shutil.rmtree(temporary)
            raise
        weakref.finalize(store, _remove, temporary, os.getpid())
    skips.count += store.manifest["skipped"]
    skips.listed += store.manifest["skipped_records"]
    skips.count_reasons(store.manifest.get("skipped_reasons", {}))
    return store


def _remove(folder: Path, owner: int) -> None:
    # a forked worker has the store too, but does not own the folder
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _expected_bytes(path: Path) -> int:
    return path.stat().st_size * _PACKED.get(path.suffix.lower(), 1)


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _find_or_make(
    folder: Path, files: Sequence[Path], settings: Mapping[str, object], size: int, make: Make, skips: Skips
) -> ArrayStore:
    places = [str(path.absolute()) for path in files]
    stem = re.sub(r"[^A-Za-z0-9]+", "-", files[0].stem).strip("-")[:40] or "file"
    name = f"{stem}-{_digest([places, dict(settings)])[:12]}"
    stamp = _digest([(path.stat().st_size, path.stat().st_mtime_ns) for path in files])
    try:
        store = ArrayStore.find(folder, name)
        if store.manifest["extra"].get("stamp") == stamp:
            return store
    except MissingData:
        pass
    free = free_bytes(folder)
    require(
        size <= free,
        f"reading {files[0]} needs about {format_bytes(size)} of disk in {folder}, {format_bytes(free)} are free: "
        "make room, or choose a folder on another disk (--data.data_dir)",
    )
    mine = Skips(skips.strict, skips.most)
    with Staging(folder, name) as staging, progress(f"reading {files[0].name}", size, "bytes") as advance:
        made = make(staging, mine, advance)
        mine.check(sum(made.counts.values()))
        staging.finish(files[0].name, made._replace(extra={**made.extra, "stamp": stamp}), mine)
    return ArrayStore.find(folder, name)


def _digest(content: object) -> str:
    return blake2b(json.dumps(content).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
