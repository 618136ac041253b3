"""Every data set: what it is, where it comes from, and how it becomes prepared arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from seqboat.checks import check_positive, require
from seqboat.data.console import Advance, format_bytes, progress
from seqboat.data.download import DownloadError, Remote, download
from seqboat.data.sources import Source
from seqboat.data.store import (
    MANIFEST,
    ArrayStore,
    MissingData,
    Prepared,
    Skips,
    Staging,
    free_bytes,
    restore,
    used_bytes,
)
from seqboat.tasks import enwik8, image, retrieval, speech, text
from seqboat.tasks.base import SPLITS
from seqboat.tasks.synthetic import curves, listops, pathfinder

DOWNLOADS = "downloads"
"""Folder in the data folder for files as they are distributed."""

EXPANSION = 20
"""Prepared arrays take at most so many times what the files as distributed do, packed or not."""

LRA = Remote(name="lra_release.gz", urls=("https://storage.googleapis.com/long-range-arena/lra_release.gz",))

Read = Callable[[Source, Staging, Skips], Prepared]
Draw = Callable[[Staging, Mapping[str, int], int, int, Advance], Prepared]


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """A data set that can be prepared."""

    title: str
    """What it is, in one line."""
    licence: str
    """What its owners say about its use."""
    size: int
    """Bytes of the prepared arrays, about."""
    get: str
    """What to get by hand, and from where."""
    folders: tuple[str, ...] = ()
    """Names under which it is found inside a folder of data sets."""
    remote: Remote | None = None
    """What is downloaded."""
    read: Read | None = None
    """Turns files as they are distributed into arrays."""
    draw: Draw | None = None
    """Makes the data."""
    settings: object = None
    """What is drawn; another setting makes another plan."""
    counts: tuple[int, int, int] | None = None
    """Examples that are made by default, for train, val and test."""


def _draw_listops(config: listops.ListOpsConfig) -> Draw:
    def draw(
        staging: Staging, counts: Mapping[str, int], seed: int, workers: int, advance: Advance
    ) -> Prepared:
        return listops.prepare_drawn(staging, counts, seed, config, workers, advance)

    return draw


def _draw_curves(config: curves.PathfinderConfig) -> Draw:
    def draw(
        staging: Staging, counts: Mapping[str, int], seed: int, workers: int, advance: Advance
    ) -> Prepared:
        return pathfinder.prepare_drawn(staging, counts, seed, config, workers, advance)

    return draw


def _read_curves(size: int) -> Read:
    def read(source: Source, staging: Staging, skips: Skips) -> Prepared:
        return pathfinder.prepare_published(source, staging, skips, size)

    return read


LISTOPS = listops.ListOpsConfig()
LISTOPS_SMALL = listops.ListOpsConfig(max_depth=5, max_arguments=5, longer_than=9, shorter_than=129)
_LRA_PAGE = "lra_release.gz (7.7 GB) from https://github.com/google-research/long-range-arena"
_FREE = "free to make"

DATASETS = {
    "listops": DataInfo(
        title="nested list operations of 500 to 2,000 tokens, ten classes",
        licence=_FREE,
        size=100_000_000,
        get=f"nothing, it is made; or basic_train.tsv, basic_val.tsv and basic_test.tsv of {_LRA_PAGE}",
        folders=("listops-1000", "listops"),
        remote=LRA,
        read=listops.prepare,
        draw=_draw_listops(LISTOPS),
        settings=LISTOPS,
        counts=(96_000, 2_000, 2_000),
    ),
    "listops-small": DataInfo(
        title="list operations of 10 to 128 tokens, for trials",
        licence=_FREE,
        size=2_300_000,
        get="nothing, it is made",
        draw=_draw_listops(LISTOPS_SMALL),
        settings=LISTOPS_SMALL,
        counts=(40_000, 2_000, 2_000),
    ),
    "text": DataInfo(
        title="50,000 film reviews, positive or negative (Maas et al., 2011)",
        licence="no licence stated; cite the paper",
        size=66_000_000,
        get="aclImdb_v1.tar.gz from https://ai.stanford.edu/~amaas/data/sentiment/",
        folders=("aclImdb", "imdb"),
        remote=Remote(
            name="aclImdb_v1.tar.gz",
            urls=(
                "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
                "https://bj.bcebos.com/dataset/imdb%2FaclImdb_v1.tar.gz",
                "https://d2l-data.s3-accelerate.amazonaws.com/aclImdb_v1.tar.gz",
            ),
            bytes=84_125_825,
            digest="md5:7c2ac02c03563afcf9b574c7e56c153a",
        ),
        read=text.prepare,
    ),
    "retrieval": DataInfo(
        title="pairs of papers, citing or not (in LRA: of the ACL Anthology Network)",
        licence="none stated; the texts belong to their authors",
        size=250_000_000,
        get=f"new_aan_pairs.train.tsv, .eval.tsv and .test.tsv (folder tsv_data) of {_LRA_PAGE}",
        folders=("tsv_data", "peerread_citation_pairs"),
        remote=LRA,
        read=retrieval.prepare,
    ),
    "image": DataInfo(
        title="CIFAR-10 in gray: 60,000 images of 32 x 32 pixels, ten classes",
        licence="no licence stated; cite Krizhevsky (2009)",
        size=61_500_000,
        get="cifar-10-binary.tar.gz (the binary version) from https://www.cs.toronto.edu/~kriz/cifar.html",
        folders=("cifar-10-batches-bin", "cifar10_gray"),
        remote=Remote(
            name="cifar-10-binary.tar.gz",
            urls=(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/cifar-10-binary.tar.gz",
            ),
            bytes=170_052_171,
            digest="sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
        read=image.prepare,
    ),
    "pathfinder": DataInfo(
        title="200,000 images of 32 x 32 pixels: two dots on one dashed curve?",
        licence=_FREE,
        size=205_000_000,
        get=f"nothing, it is made; or the folder pathfinder32 of {_LRA_PAGE}",
        folders=("pathfinder32", "pathfinder"),
        remote=LRA,
        read=_read_curves(32),
        draw=_draw_curves(curves.PATHFINDER),
        settings=curves.PATHFINDER,
        counts=(160_000, 20_000, 20_000),
    ),
    "pathfinder16": DataInfo(
        title="images of 16 x 16 pixels of the same kind, for trials",
        licence=_FREE,
        size=11_400_000,
        get="nothing, it is made",
        draw=_draw_curves(curves.PATHFINDER16),
        settings=curves.PATHFINDER16,
        counts=(40_000, 2_000, 2_000),
    ),
    "pathx": DataInfo(
        title="200,000 images of 128 x 128 pixels of the same kind",
        licence=_FREE,
        size=3_280_000_000,
        get=f"nothing, it is made; or the folder pathfinder128 of {_LRA_PAGE}",
        folders=("pathfinder128", "pathx"),
        remote=LRA,
        read=_read_curves(128),
        draw=_draw_curves(curves.PATHX),
        settings=curves.PATHX,
        counts=(160_000, 20_000, 20_000),
    ),
    "speech": DataInfo(
        title="Speech Commands: one second of one of ten words, 16,000 samples (Warden, 2018)",
        licence="CC BY 4.0",
        size=1_120_000_000,
        get="speech_commands_v0.02.tar.gz from https://download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
        folders=("speech_commands_v0.02", "speech_commands_sc10"),
        remote=Remote(
            name="speech_commands_v0.02.tar.gz",
            urls=(
                "https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
                "https://download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
            ),
            bytes=2_428_923_189,
            digest="sha256:af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
        ),
        read=speech.prepare,
    ),
    "enwik8": DataInfo(
        title="the first 100,000,000 bytes of English Wikipedia",
        licence="CC BY-SA and GFDL",
        size=100_000_000,
        get="enwik8.zip from https://mattmahoney.net/dc/textdata.html",
        folders=("enwik8",),
        remote=Remote(
            name="enwik8.zip",
            urls=("https://mattmahoney.net/dc/enwik8.zip", "https://data.deepai.org/enwik8.zip"),
            bytes=36_445_475,
            digest="sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        ),
        read=enwik8.prepare,
    ),
}
"""Every data set by the name of its prepared folder."""


def find_dataset(name: str) -> DataInfo:
    """A data set by name; a wrong name is answered with the nearest right one."""
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
) -> ArrayStore:
    """Make the prepared arrays of a data set.

    Args:
        name: in DATASETS.
        origin: "generate", "download", or a file or folder to read; by default what costs no download.
        root: the data folder.
        counts: how many examples to generate for train, val and test.
        seed: of what is generated.
        workers: processes that generate; as many as there are cores by default.
        strict: refuse the first bad record, rather than leave it out and count it.
        force: make it again where it is already there.
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
            pass  # of another version or damaged: made again, and only then replaced
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
        _check_room(name, root, min(info.size, EXPANSION * used_bytes(path)))
    require(info.read is not None, f"{name} is not distributed: use --from generate")
    assert info.read is not None
    skips = Skips(strict)
    with Staging(root, name) as staging:
        source = Source(path)
        try:
            made = info.read(source, staging, skips)
        except ValueError as error:
            if not skips.count:
                raise
            # what is missing may be what was left out
            raise ValueError(
                f"{error}; {skips.count} records were left out, the first: {skips.first}"
            ) from error
        skips.check(sum(made.counts.values()))
        staging.finish(source.label, made, skips)
    return ArrayStore.find(root, name)


def check_folder(root: Path) -> None:
    """Refuse a data folder that cannot be made or written to."""
    there = root.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    require(there.is_dir(), f"the data folder {root} cannot be made: {there} is a file")
    require(
        os.access(there, os.W_OK), f"the data folder {root} cannot be written to: no permission in {there}"
    )


def _locate(path: Path, info: DataInfo) -> Path:
    """The data set itself, where the path is a folder of several."""
    if not path.exists():
        raise MissingData(f"{path} does not exist; get {info.get}, and name the file or folder with --from")
    for name in info.folders:
        if path.is_dir() and (path / name).is_dir():
            return path / name
    return path


def _generate(
    name: str, info: DataInfo, root: Path, counts: tuple[int, ...] | None, seed: int, workers: int | None
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
    # parts stay until they are joined
    whole = 2 * info.size * sum(counts) // sum(info.counts)
    _check_room(name, root, whole - used_bytes(root / f".{name}.partial"))
    with Staging(root, name, plan) as staging, progress(f"generating {name}", sum(counts)) as advance:
        made = info.draw(staging, by_split, seed, workers, advance)
        staging.finish(f"generated with seed {seed}", made)
    return ArrayStore.find(root, name)


def _check_room(name: str, root: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold."""
    free = free_bytes(root)
    require(
        needed <= free,
        f"preparing {name} in {root} needs about {format_bytes(needed)} of disk, {format_bytes(free)} are free: "
        "make room, or choose a folder on another disk (--data-dir)",
    )


def _plain(settings: object) -> dict[str, object]:
    """Settings as JSON gives them back."""
    fields = asdict(settings)  # type: ignore[call-overload]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
