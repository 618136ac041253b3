"""Pathfinder and Path-X: are the two dots on the same dashed curve? Pixels in rows, section 4.1 of the paper.

    . . . . . . . . . . . .          . . . . . . . . . . . .
    . O - - - . . . . | . .          . O - - - . . . . | . .
    . . . . . . \\ . . . | .          . . . . . . \\ . . . O .
    . . . - - . . \\ . . | .    1     . . . - - . . \\ . . . .    0
    . . . . . . . . O . . .          . . . . . . . . - . . .

The images of Linsley et al. (2018) as in the Long Range Arena, 200,000 of each size: read from its archive, or drawn
by `curves`. Pathfinder has 32 x 32 pixels, Path-X 128 x 128; pathfinder16 and pathx32 are for quick experiments.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqboat.console import Advance
from seqboat.core.checks import check_positive, require
from seqboat.data.fairseq import SPLITS as SPLIT_NAMES
from seqboat.data.fairseq import is_pixel_folder, read_pixels
from seqboat.data.files import replacing
from seqboat.data.shards import make_parts
from seqboat.data.sources import Source
from seqboat.data.store import ArrayWriter, Prepared, Skips, Staging
from seqboat.tasks.curves import (
    PATHFINDER,
    PATHFINDER16,
    PATHX,
    PATHX32,
    PathfinderConfig,
    make_image,
)
from seqboat.tasks.image import PixelDataset, check_image, draw, parse_npy, to_sequence
from seqboat.tasks.stored import (
    FREE,
    LRA_FILE,
    LRA_PAGE,
    DatasetInfo,
    StoredTask,
    StoredTaskConfig,
    shuffled_rows,
)
from seqboat.tasks.task import SPLITS, Dataset, Example, Split

SHARD = 500
"""Images per shard, the unit of parallel and resumable work."""


@dataclass(frozen=True, kw_only=True)
class PathfinderTaskConfig(StoredTaskConfig):
    """Are two dots on the same curve? Pixel by pixel."""

    size: int = 32
    """Height and width in pixels: 32, or 16 for the small images of pathfinder16."""
    mean: float = 0.5
    """Mean for normalization: subtracted from pixels in [0, 1]."""
    std: float = 0.5
    """Std for normalization: pixels are then divided by it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("size", self.size)
        require(self.std > 0, f"std must be positive, got {self.std!r}")

    def build(self) -> PathfinderTask:
        return PathfinderTask(self)

    @classmethod
    def datasets(cls) -> Mapping[str, DatasetInfo]:
        return DATASETS


@dataclass(frozen=True, kw_only=True)
class PathXTaskConfig(PathfinderTaskConfig):
    """Path-X: the same question at 128 x 128 pixels, 16,384 tokens."""

    size: int = 128
    """Height and width in pixels: 128, or 32 for the small images of pathx32."""

    def build(self) -> PathXTask:
        return PathXTask(self)

    @classmethod
    def datasets(cls) -> Mapping[str, DatasetInfo]:
        return PATHX_DATASETS


class PathfinderTask(StoredTask):
    """Are two dots on the same curve?"""

    name = "pathfinder"
    kind = "classify"
    vocab = None
    classes = 2
    labels = ("two curves", "one curve")
    fixed_length = True

    def __init__(self, config: PathfinderTaskConfig | None = None) -> None:
        self.settings = config or PathfinderTaskConfig()
        super().__init__(self.settings)
        self.picture = (self.settings.size, self.settings.size)
        self.max_length = self.settings.size**2

    @property
    def store_name(self) -> str:
        return self.config.store or (
            "pathfinder" if self.settings.size == 32 else f"pathfinder{self.settings.size}"
        )

    def whole(self, split: Split) -> Dataset:
        got = self.store[f"{split}.images"].shape[1]
        require(
            got == self.settings.size,
            f"{self.store.folder} holds images of size {got}, expected {self.settings.size}",
        )
        return PixelDataset(self.store, split, self.settings.mean, self.settings.std)

    def read_image(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        check_image(pixels, self.settings.size)
        return to_sequence(pixels, self.settings.mean, self.settings.std)

    def show(self, example: Example) -> str:
        return f"{draw(example.inputs[:, 0] * self.settings.std + self.settings.mean)}\n-> {example.target}"


class PathXTask(PathfinderTask):
    """Are two dots on the same curve? In large images."""

    name = "pathx"

    def __init__(self, config: PathXTaskConfig | None = None) -> None:
        super().__init__(config or PathXTaskConfig())

    @property
    def store_name(self) -> str:
        return self.config.store or ("pathx" if self.settings.size == 128 else f"pathx{self.settings.size}")


def prepare_drawn(
    staging: Staging,
    counts: Mapping[str, int],
    seed: int,
    workers: int,
    advance: Advance,
    config: PathfinderConfig,
) -> Prepared:
    """Generate images, one split after another; finished shards of an interrupted run are kept."""
    folder = staging.folder / "shards"
    folder.mkdir(exist_ok=True)
    total = sum(counts.values())
    starts = range(0, total, SHARD)
    missing = [start for start in starts if not _shard(folder, start).exists()]
    advance(sum(min(SHARD, total - start) for start in starts if start not in set(missing)))
    make_parts(partial(_make_part, folder, total, SHARD, seed, config), missing, workers, advance)
    number = 0
    for split, count in counts.items():
        images = staging.array(f"{split}.images", np.uint8, (config.size, config.size))
        labels = staging.array(f"{split}.labels", np.uint8)
        end = number + count
        while number < end:
            start = number - number % SHARD
            rows = np.load(_shard(folder, start), allow_pickle=False)[number - start : end - start]
            images.append(rows[:, 1:].reshape(-1, config.size, config.size))
            labels.append(rows[:, 0])
            number += len(rows)
    return Prepared(dict(counts), {"seed": seed})


def _shard(folder: Path, start: int) -> Path:
    return folder / f"{start:09d}.npy"


def _make_part(
    folder: Path, total: int, size: int, seed: int, config: PathfinderConfig, start: int, advance: Advance
) -> None:
    advance(_make_shard(folder, start, min(start + size, total), seed, config))


def _make_shard(folder: Path, start: int, end: int, seed: int, config: PathfinderConfig) -> int:
    rows = np.empty((end - start, 1 + config.size**2), np.uint8)
    for row, index in zip(rows, range(start, end), strict=True):
        image, row[0] = make_image(seed, index, config)
        row[1:] = image.reshape(-1)
    with replacing(_shard(folder, start)) as stage, open(stage, "wb") as file:
        np.save(file, rows)
    return end - start


def prepare_published(source: Source, staging: Staging, skips: Skips, size: int) -> Prepared:
    """Read folders `imgs` and `metadata` of PNG images, as in the LRA archive; hard images are preferred.

    The split is random, 80/10/10, drawn with torch's generator and seed 42, as published.
    """
    if source.kind() == "folder" and is_pixel_folder(source.path):
        return _prepare_pixels(source.path, staging, skips, size)
    unsorted = staging.scratch("unsorted", np.uint8, (size, size))
    labels, notes = _read_published(source, unsorted, skips, size)
    unsorted.close()
    pixels = np.load(unsorted.path, mmap_mode="r")
    order = shuffled_rows(len(labels), 42)
    held = len(labels) // 10
    borders = {"train": (0, len(labels) - 2 * held), "val": (len(labels) - 2 * held, len(labels) - held)}
    borders["test"] = (len(labels) - held, len(labels))
    counts = {}
    for split in SPLITS:
        rows = order[slice(*borders[split])]
        images = staging.array(f"{split}.images", np.uint8, (size, size))
        for row in rows:
            images.append(pixels[row][None])
        staging.put(f"{split}.labels", labels[rows])
        counts[str(split)] = len(rows)
    return Prepared(counts, notes=notes)


def _prepare_pixels(folder: Path, staging: Staging, skips: Skips, size: int) -> Prepared:
    """Images as text, in the order of the published splits."""
    counts = {}
    for split, name in SPLIT_NAMES.items():
        images, labels = staging.array(f"{split}.images", np.uint8, (size, size)), []
        for image, label in read_pixels(folder, name, size, PathfinderTask.classes, skips):
            images.append(image[None])
            labels.append(label)
        staging.put(f"{split}.labels", np.array(labels, np.uint8))
        counts[split] = len(labels)
    return Prepared(counts)


def _read_published(
    source: Source, pixels: ArrayWriter, skips: Skips, size: int
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Append the images to `pixels`; returns their labels, and notes for the user."""
    from PIL import Image, UnidentifiedImageError

    images: dict[str, Callable[[], bytes]] = {}
    tables_read: dict[str, bytes] = {}
    folder = source.kind() == "folder"
    for member in source.members(lambda name: name.endswith((".png", ".npy"))):
        folders = [part for part in member.parts if part.startswith("pathfinder")]
        if folders and folders[-1] != f"pathfinder{size}":
            continue
        if "metadata" in member.parts:
            tables_read[member.name] = member.read()
        elif member.base.endswith(".png"):
            # files in a folder can be read later; members of an archive must be read now
            images[member.name] = member.read if folder else partial(bytes, member.read())
    hard = {name for name in tables_read if "curv_contour_length_14" in name}
    names = sorted(
        hard or tables_read, key=lambda name: (int(s) if (s := Path(name).stem).isdigit() else -1, name)
    )
    require(
        len(names) > 0,
        f"{source} contains no pathfinder{size} images: expected curv_contour_length_14/imgs/*/*.png and "
        "metadata/*.npy",
    )
    labels: list[int] = []
    in_color = 0
    for name in names:
        root = name.rpartition("metadata/")[0]
        for number, fields in enumerate(_metadata(name, tables_read[name]), start=1):
            where = f"line {number}"
            if len(fields) < 4 or fields[3] not in ("0", "1"):
                skips.add(name, where, f"label must be 0 or 1, got {fields[3:4]}")
                continue
            path = f"{root}{fields[0]}/{fields[1]}"
            if path not in images:
                skips.add(name, where, f"no image {path}")
                continue
            try:
                content = images[path]()
                # before the image library opens it, which would allocate memory for a huge one
                require(png_size(content) == (size, size), f"expected {size} x {size} pixels")
                with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
                    in_color += image.mode not in ("L", "1")
                    pixels.append(np.asarray(image.convert("L"))[None])
            except (ValueError, OSError, SyntaxError, UnidentifiedImageError) as error:
                skips.add(path, "image", str(error))
                continue
            labels.append(int(fields[3]))
    require(
        len(labels) >= 10, f"{source} holds {len(labels)} usable images, expected at least 10 to split them"
    )
    note = f"{in_color:,} images are in color and were converted to gray: published ones are gray"
    return np.array(labels, np.uint8), (note,) if in_color else ()


def png_size(content: bytes) -> tuple[int, int]:
    """Width and height from the header of a PNG image."""
    require(content[:8] == b"\x89PNG\r\n\x1a\n" and content[12:16] == b"IHDR", "not a PNG image")
    require(len(content) >= 24, "truncated")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def _metadata(name: str, content: bytes) -> Iterator[list[str]]:
    """The metadata fields of each image; the files are called .npy, but those of LRA are text."""
    if content.startswith(np.lib.format.MAGIC_PREFIX):
        try:
            rows = parse_npy(content, name)
        except ValueError as error:
            raise ValueError(f"{name} is not a table of strings, or truncated") from error
        require(rows.ndim == 2, f"{name} is not a table of strings: it has {rows.ndim} axes")
        yield from ([str(field) for field in row] for row in rows)
    else:
        yield from (line.split() for line in content.decode("utf-8", "replace").splitlines() if line.strip())


DATASETS = {
    "pathfinder": DatasetInfo(
        task=PathfinderTaskConfig(),
        title="200,000 images of 32 x 32 pixels: two dots on one dashed curve?",
        license=FREE,
        size=205_000_000,
        get=f"nothing, it is generated; or the folder pathfinder32 of {LRA_PAGE}",
        folders=("pathfinder32", "pathfinder"),
        remote=LRA_FILE,
        read=partial(prepare_published, size=32),
        draw=partial(prepare_drawn, config=PATHFINDER),
        settings=PATHFINDER,
        counts=(160_000, 20_000, 20_000),
    ),
    "pathfinder16": DatasetInfo(
        task=PathfinderTaskConfig(size=16),
        title="images of 16 x 16 pixels of the same kind, for quick experiments",
        license=FREE,
        size=11_400_000,
        get="nothing, it is generated",
        draw=partial(prepare_drawn, config=PATHFINDER16),
        settings=PATHFINDER16,
        counts=(40_000, 2_000, 2_000),
    ),
}
"""Data sets of this task, by the names of their prepared folders."""

PATHX_DATASETS = {
    "pathx": DatasetInfo(
        task=PathXTaskConfig(),
        title="200,000 images of 128 x 128 pixels of the same kind",
        license=FREE,
        size=3_280_000_000,
        get=f"nothing, it is generated; or the folder pathfinder128 of {LRA_PAGE}",
        folders=("pathfinder128", "pathx", "path-x"),
        remote=LRA_FILE,
        read=partial(prepare_published, size=128),
        draw=partial(prepare_drawn, config=PATHX),
        settings=PATHX,
        counts=(160_000, 20_000, 20_000),
    ),
    "pathx32": DatasetInfo(
        task=PathXTaskConfig(size=32),
        title="images of 32 x 32 pixels with the curves of pathfinder16, for quick experiments",
        license=FREE,
        size=45_100_000,
        get="nothing, it is generated",
        draw=partial(prepare_drawn, config=PATHX32),
        settings=PATHX32,
        counts=(40_000, 2_000, 2_000),
    ),
}
"""Data sets of Path-X."""
