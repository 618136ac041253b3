"""Every data set: what it is, where it comes from, and how it becomes prepared arrays."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from seqboat.console import format_bytes, progress
from seqboat.core.checks import check_positive, require
from seqboat.data.download import DownloadError, check_file, download
from seqboat.data.sources import Source
from seqboat.data.store import (
    MANIFEST,
    ArrayStore,
    MissingData,
    Skips,
    Staging,
    free_bytes,
    restore,
    used_bytes,
)
from seqboat.tasks import TASKS
from seqboat.tasks.stored import DatasetInfo, StoredTaskConfig
from seqboat.tasks.task import SPLITS

DOWNLOADS = "downloads"
"""Folder in the data folder for downloaded files."""

EXPANSION = 20
"""Upper bound on the size of prepared arrays, in multiples of the distributed files."""

DATASETS = {
    name: info
    for config in TASKS.values()
    if issubclass(config, StoredTaskConfig)
    for name, info in config.datasets().items()
}
"""Every data set by the name of its prepared folder."""


def find_dataset(name: str) -> DatasetInfo:
    """A data set by name; an unknown name gets the closest match as a suggestion."""
    import difflib

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(DATASETS)}"
        raise ValueError(f"no data set {name!r}: {hint}")
    return DATASETS[name]


def prepare(
    name: str,
    origin: str | None = None,
    root: str | Path = "data",
    *,
    counts: tuple[int, ...] | None = None,
    seed: int = 0,
    workers: int | None = None,
    strict: bool = False,
    force: bool = False,
    unpickle: bool = False,
) -> ArrayStore:
    """Prepare a data set.

    Args:
        name: in DATASETS.
        origin: "generate", "download", or a file or folder to read; by default generate if possible, else download.
        root: the data folder.
        counts: number of examples to generate for train, val and test.
        seed: for generated data.
        workers: processes that generate; one per core by default.
        strict: whether a bad record is an error, rather than skipped and counted.
        force: whether to replace data that is already prepared.
        unpickle: read data that are pickles of tensors, running nothing in them.
    """
    info = find_dataset(name)
    root = Path(root)
    check_folder(root)
    if root.is_dir():
        restore(root, name)
    if not force and (root / name / MANIFEST).exists():
        try:
            return ArrayStore.find(root, name)
        except MissingData:
            pass  # another version, or damaged: replaced once it has been made again
    if origin is None:
        origin = "generate" if info.draw is not None else "download"
    if origin == "generate":
        return _generate(name, info, root, counts, seed, workers)
    require(counts is None, f"counts only apply to what is generated, not to {origin}")
    if origin == "download":
        require(info.remote is not None, f"{name} is not distributed: use --from generate")
        assert info.remote is not None
        have = sum(
            used_bytes(root / DOWNLOADS / file) for file in (info.remote.name, f".{info.remote.name}.part")
        )
        _check_room(name, root, max((info.remote.bytes or 0) - have, 0) + info.size)
        with progress(f"downloading {info.remote.name}", info.remote.bytes, "bytes") as advance:
            try:
                path = download(info.remote, root / DOWNLOADS, advance)
            except DownloadError as error:
                hint = f"get {info.get} by other means, and name the file or folder with --from"
                raise DownloadError(f"{error}; {hint}") from None
    else:
        path = _locate(Path(origin), info)
        _check_published(path, info)
        _check_room(name, root, min(info.size, EXPANSION * used_bytes(path)))
    require(info.read is not None, f"{name} is not distributed: use --from generate")
    assert info.read is not None
    skips = Skips(strict)
    with Staging(root, name) as staging:
        source = Source(path, unpickle)
        try:
            made = info.read(source, staging, skips)
        except (ValueError, LookupError, ArithmeticError, TypeError) as error:
            raise ValueError(_explain(error, source, skips)) from error
        skips.check(sum(made.counts.values()))
        staging.finish(source.label, made, skips)
    return ArrayStore.find(root, name)


def _explain(error: Exception, source: Source, skips: Skips) -> str:
    """The error, with the name of the file."""
    message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    if str(source) not in message:
        message = f"{source}, {source.current}: {message}" if source.current else f"{source}: {message}"
    # the missing part may be what was skipped
    return message + (
        f"; {skips.count} records were skipped, the first: {skips.first}" if skips.count else ""
    )


def check_folder(root: Path) -> None:
    """Reject a data folder that cannot be made or written to."""
    there = root.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    require(there.is_dir(), f"the data folder {root} cannot be made: {there} is a file")
    require(
        os.access(there, os.W_OK), f"the data folder {root} cannot be written to: no permission in {there}"
    )


def _locate(path: Path, info: DatasetInfo) -> Path:
    """The path of the data set, if the given path is a folder of several."""
    if not path.exists():
        raise MissingData(f"{path} does not exist; get {info.get}, and name the file or folder with --from")
    for name in info.folders:
        if path.is_dir() and (path / name).is_dir():
            return path / name
    return path


def _check_published(path: Path, info: DatasetInfo) -> None:
    """Reject a file that has the name of the published one but other content."""
    if info.remote is None or path.name != info.remote.name or not path.is_file():
        return
    Source(path).kind()  # a web page or an empty file gets a better message later
    try:
        check_file(path, info.remote)
    except ValueError as error:
        raise ValueError(f"{error}: it is not the published file; rename it to use it anyway") from None


def _generate(
    name: str, info: DatasetInfo, root: Path, counts: tuple[int, ...] | None, seed: int, workers: int | None
) -> ArrayStore:
    require(info.draw is not None, f"{name} cannot be generated: get {info.get}")
    assert info.draw is not None and info.counts is not None
    counts = info.counts if counts is None else counts
    require(len(counts) == 3, f"counts must be three numbers, for train, val and test; got {len(counts)}")
    for count in counts:
        check_positive("counts", count)
    check_positive("seed", seed, least=0)
    workers = (os.cpu_count() or 1) if workers is None else workers
    check_positive("workers", workers)
    by_split: dict[str, int] = dict(zip(SPLITS, counts, strict=True))
    plan = {"seed": seed, "counts": by_split, "settings": _plain(info.settings)}
    # parts stay until they are merged
    whole = 2 * info.size * sum(counts) // sum(info.counts)
    _check_room(name, root, whole - used_bytes(root / f".{name}.partial"))
    with Staging(root, name, plan) as staging, progress(f"generating {name}", sum(counts)) as advance:
        made = info.draw(staging, by_split, seed, workers, advance)
        staging.finish(f"generated with seed {seed}", made)
    return ArrayStore.find(root, name)


def _check_room(name: str, root: Path, needed: int) -> None:
    """Raise an error if the disk does not have enough space."""
    free = free_bytes(root)
    require(
        needed <= free,
        f"preparing {name} in {root} needs about {format_bytes(needed)} of disk, {format_bytes(free)} are free: "
        "make room, or choose a folder on another disk (--data-dir)",
    )


def _plain(settings: object) -> dict[str, object]:
    """Settings after a round trip through JSON."""
    fields = asdict(settings)  # type: ignore[call-overload]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
