"""Image: what is in a gray picture, read pixel by pixel? CIFAR-10 as 1,024 pixels, section 4.1 of the paper.

    row 0     . . : - = + * # ...  \\
    row 1     . : - = + * # % ...   >  1,024 values, (pixel / 255 - 0.48) / 0.24, row after row  -> 6 (frog)
    ...                            /
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import check_positive, require
from seqboat.data.download import RemoteFile
from seqboat.data.fairseq import is_pixel_folder, read_pixels
from seqboat.data.sources import Source, read_file
from seqboat.data.store import ArrayStore, Prepared, Skips, Staging
from seqboat.tasks.stored import (
    HOLD_OUT_SEED,
    DatasetInfo,
    StoredTask,
    StoredTaskConfig,
    hold_out,
    shuffled_rows,
)
from seqboat.tasks.task import Dataset, Example, Split

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PARTS = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE
SHADES = " .:-=+*#%@"


@dataclass(frozen=True, kw_only=True)
class ImageTaskConfig(StoredTaskConfig):
    """Gray CIFAR-10, pixel by pixel."""

    pool: int = 1
    """Average squares of this many pixels per side; 2 gives sequences of 256 tokens."""
    holdout: int = 5000
    """Training images held out for validation, drawn with torch's generator and seed 42, as published."""
    mean: float = 0.48
    """Mean for normalization: subtracted from pixels in [0, 1]."""
    std: float = 0.24
    """Std for normalization: pixels are then divided by it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("holdout", self.holdout)
        check_positive("pool", self.pool)
        require(SIDE % self.pool == 0, f"pool must divide {SIDE}, got {self.pool}")
        require(self.std > 0, f"std must be positive, got {self.std!r}")

    def build(self) -> ImageTask:
        return ImageTask(self)

    @classmethod
    def datasets(cls) -> Mapping[str, DatasetInfo]:
        return DATASETS


class PixelDataset(Dataset):
    """Images as sequences of pixels."""

    def __init__(self, store: ArrayStore, name: str, mean: float, std: float, pool: int = 1) -> None:
        self.store = store
        self.name = name
        self.mean = mean
        self.std = std
        self.pool = pool

    def __len__(self) -> int:
        return len(self.store[f"{self.name}.labels"])

    def __getitem__(self, index: int) -> Example:
        pixels = to_sequence(self.store[f"{self.name}.images"][index], self.mean, self.std, self.pool)
        return Example(pixels, int(self.store[f"{self.name}.labels"][index]))

    def lengths(self) -> NDArray[np.int64]:
        side = self.store[f"{self.name}.images"].shape[1] // self.pool
        return np.full(len(self), side * side, dtype=np.int64)


def to_sequence(image: NDArray[np.uint8], mean: float, std: float, pool: int = 1) -> NDArray[np.float32]:
    """(pixels, 1): an image (height, width) averaged over squares of `pool` pixels per side, row by row."""
    pixels = np.asarray(image, dtype=np.float32)
    if pool > 1:
        height, width = (side // pool for side in pixels.shape)
        pixels = pixels.reshape(height, pool, width, pool).mean(axis=(1, 3))
    return ((pixels.reshape(-1, 1) / 255 - mean) / std).astype(np.float32)


def check_image(pixels: NDArray[np.uint8], side: int) -> None:
    """Reject an image of another size."""
    found = " x ".join(str(size) for size in pixels.shape)
    require(pixels.shape == (side, side), f"the image must be {side} x {side} pixels, got {found}")


class ImageTask(StoredTask):
    """Gray CIFAR-10, pixel by pixel."""

    name = "image"
    kind = "classify"
    vocab = None
    classes = len(CLASSES)
    labels = CLASSES
    fixed_length = True

    def __init__(self, config: ImageTaskConfig | None = None) -> None:
        self.settings = config or ImageTaskConfig()
        super().__init__(self.settings)
        side = SIDE // self.settings.pool
        self.picture = (side, side)
        self.max_length = side**2

    def whole(self, split: Split) -> Dataset:
        part = "test" if split == "test" else "train"
        settings = self.settings
        images = PixelDataset(self.store, part, settings.mean, settings.std, settings.pool)
        return images if split == "test" else hold_out(images, split, settings.holdout)

    def read_image(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        check_image(pixels, SIDE)
        return to_sequence(pixels, self.settings.mean, self.settings.std, self.settings.pool)

    def show(self, example: Example) -> str:
        assert not isinstance(example.target, np.ndarray)
        pixels = example.inputs[:, 0] * self.settings.std + self.settings.mean
        return f"{draw(pixels)}\n-> {example.target} ({CLASSES[example.target]})"


def draw(pixels: NDArray[np.floating]) -> str:
    """A square image in [0, 1] as characters."""
    side = round(len(pixels) ** 0.5)
    shades = (np.clip(pixels, 0, 1) * (len(SHADES) - 1)).round().astype(int).reshape(side, side)
    return "\n".join("".join(SHADES[shade] * 2 for shade in row).rstrip() for row in shades)


def to_gray(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Luma (ITU-R 601) of (n, 3, height, width) in integer arithmetic, as common image libraries compute it."""
    red, green, blue = (images[:, i].astype(np.uint32) for i in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).astype(np.uint8)


def prepare(source: Source, staging: Staging, skips: Skips) -> Prepared:
    """Read CIFAR-10's binary version (a folder or its tar archive) or gray images as .npy (also compressed)."""
    folder = source.path if source.kind() == "folder" else None
    if folder is not None and is_pixel_folder(folder):
        return _prepare_pixels(folder, staging, skips)
    if folder is not None and _npy(folder, "train_images"):
        return _prepare_gray(folder, staging, skips)
    wanted = {name for names in PARTS.values() for name in names}
    found: dict[str, bytes] = {}
    pickled = False
    for member in source.members():
        if member.base in wanted:
            found[member.base] = member.read()
        elif member.base in ("data_batch_1", "test_batch", "batches.meta"):
            pickled = True
    require(
        bool(found) or not pickled,
        f"{source} is the Python version of CIFAR-10, whose pickles could run any code: "
        f"get the binary version, cifar-10-binary.tar.gz, from the same page",
    )
    counts = {}
    for part, names in PARTS.items():
        images, labels = staging.array(f"{part}.images", np.uint8, (SIDE, SIDE)), []
        for name in names:
            require(
                name in found,
                f"{source} has no {name}: expected the folder cifar-10-batches-bin or its archive",
            )
            content = found[name]
            require(
                len(content) > 0 and len(content) % RECORD == 0,
                f"{source}: {name} has {len(content)} bytes, expected a multiple of {RECORD}: it is truncated",
            )
            records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
            good = records[:, 0] < len(CLASSES)
            for row in np.flatnonzero(~good):
                skips.add(
                    name, f"record {row}", f"label must be at most {len(CLASSES) - 1}, got {records[row, 0]}"
                )
            images.append(to_gray(records[good, 1:].reshape(-1, 3, SIDE, SIDE)))
            labels.append(records[good, 0])
        staging.put(f"{part}.labels", np.concatenate(labels))
        counts[part] = images.rows
    return Prepared(counts)


def _npy(folder: Path, stem: str) -> Path | None:
    found = sorted(folder.glob(f"{stem}.npy*"))
    return found[0] if found else None


def load_npy(path: Path) -> NDArray[Any]:
    """An array from a file that may be compressed; pickled objects are rejected."""
    return parse_npy(read_file(path), path)


def parse_npy(content: bytes, name: object) -> NDArray[Any]:
    """An array from the content of an .npy file, which must be as large as its header says."""
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
        shape, fortran, dtype = header(stream)
        start = stream.tell()
        require(
            not dtype.hasobject and math.prod(shape) * dtype.itemsize == len(content) - start, "wrong size"
        )
        array = np.frombuffer(content, dtype, offset=start)
        return array.reshape(shape, order="F" if fortran else "C")
    except (ValueError, EOFError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        # NumPy's message advises allowing pickles
        raise ValueError(f"{name} is not an array of numbers in NumPy's format, or truncated") from error


def _prepare_gray(folder: Path, staging: Staging, skips: Skips) -> Prepared:
    counts = {}
    for part in PARTS:
        paths = [_npy(folder, f"{part}_{what}") for what in ("images", "labels")]
        require(None not in paths, f"{folder} needs {part}_images.npy.xz and {part}_labels.npy.xz")
        images, labels = (load_npy(path) for path in paths if path is not None)
        require(
            images.dtype == np.uint8 and images.shape == (len(labels), SIDE, SIDE),
            f"{paths[0]} must hold uint8 of shape ({len(labels)}, {SIDE}, {SIDE}), "
            f"got {images.dtype} of shape {images.shape}",
        )
        require(
            labels.ndim == 1 and labels.dtype.kind in "iu",
            f"{paths[1]} must hold integers of shape (images,), got {labels.dtype} of shape {labels.shape}",
        )
        values = labels.astype(np.int64)
        good = (values >= 0) & (values < len(CLASSES))
        for row in np.flatnonzero(~good):
            skips.add(
                paths[1], f"row {row}", f"label must be from 0 to {len(CLASSES) - 1}, got {labels[row]}"
            )
        staging.put(f"{part}.images", images[good])
        staging.put(f"{part}.labels", labels[good].astype(np.uint8))
        counts[part] = int(good.sum())
    return Prepared(counts)


def _prepare_pixels(folder: Path, staging: Staging, skips: Skips) -> Prepared:
    """Images as text, whose training and validation parts are those that `hold_out` makes of all training images."""
    unsorted = staging.scratch("unsorted", np.uint8, (SIDE, SIDE))
    labels: list[int] = []
    ends = []
    for split in ("train", "valid"):
        for image, label in read_pixels(folder, split, SIDE, len(CLASSES), skips):
            unsorted.append(image[None])
            labels.append(label)
        ends.append(len(labels))
    unsorted.close()
    kept = ends[0]
    require(0 < kept < len(labels), f"{folder} needs images in train.src and valid.src")
    pixels = np.load(unsorted.path, mmap_mode="r")
    order = np.argsort(shuffled_rows(len(labels), HOLD_OUT_SEED))
    images = staging.array("train.images", np.uint8, (SIDE, SIDE))
    for row in order:
        images.append(pixels[row][None])
    staging.put("train.labels", np.array(labels, np.uint8)[order])
    images, values = staging.array("test.images", np.uint8, (SIDE, SIDE)), []
    for image, label in read_pixels(folder, "test", SIDE, len(CLASSES), skips):
        images.append(image[None])
        values.append(label)
    staging.put("test.labels", np.array(values, np.uint8))
    held = len(labels) - kept
    note = f"{held:,} images are for validation: train with --data.holdout={held} to keep the published split"
    notes = () if held == ImageTaskConfig.holdout else (note,)
    return Prepared({"train": len(labels), "test": len(values)}, notes=notes)


DATASETS = {
    "image": DatasetInfo(
        task=ImageTaskConfig(),
        title="CIFAR-10 in gray: 60,000 images of 32 x 32 pixels, ten classes",
        license="no license stated; cite Krizhevsky (2009)",
        size=61_500_000,
        get="cifar-10-binary.tar.gz (the binary version) from https://www.cs.toronto.edu/~kriz/cifar.html",
        folders=("cifar-10-batches-bin", "cifar10_gray", "cifar10"),
        remote=RemoteFile(
            name="cifar-10-binary.tar.gz",
            urls=(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/cifar-10-binary.tar.gz",
            ),
            bytes=170_052_171,
            digest="sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
        read=prepare,
    ),
}
"""Data sets of this task, by the names of their prepared folders."""
