"""Images as text: one image per line of `input/SPLIT.src`, its pixels as numbers from 0 to 255, row after row;
their classes are the lines of `label/SPLIT.label`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import require
from seqboat.data.files import open_regular
from seqboat.data.store import Skips

_DIGITS = b"0123456789 \t\r\n"


def is_pixel_folder(folder: Path) -> bool:
    """Whether a folder has images in this form."""
    return (folder / "input" / "train.src").is_file() and (folder / "label").is_dir()


def read_pixels(
    folder: Path, split: str, side: int, classes: int, skips: Skips
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """The images of a split, one at a time, with their classes; bad lines are left out and counted.

    Args:
        folder: with `input` and `label`.
        split: train, valid or test.
        side: height and width of an image.
        classes: number of classes.
        skips: counts what is left out.

    Raises:
        ValueError: naming a file that is missing, or two that do not have as many lines.
    """
    images, labels = folder / "input" / f"{split}.src", folder / "label" / f"{split}.label"
    for path in (images, labels):
        require(path.is_file(), f"there is no file {path}")
    count = side * side
    # three digits and a blank per pixel, and room for other white space
    longest = 8 * count + 64
    with open_regular(images) as pixels, open_regular(labels) as targets:
        number = 0
        while True:
            line, label = pixels.readline(longest), targets.readline(64)
            if not line.strip() and not label.strip():
                require(not line and not label, f"{images}, line {number + 1}: an empty line")
                return
            number += 1
            require(
                bool(line) == bool(label),
                f"{images} and {labels} must have the same number of lines: one ends at {number}",
            )
            require(len(line) < longest, f"{images}, line {number}: more than {count:,} pixels")
            problem = _problem(line, label, count, classes)
            if problem:
                skips.add(f"{split}.src", f"line {number}", problem)
                continue
            values = np.array(line.split(), dtype="S3").astype(np.uint16)
            if int(values.max()) > 255:
                skips.add(
                    f"{split}.src", f"line {number}", f"pixels must be at most 255, got {int(values.max())}"
                )
                continue
            yield values.astype(np.uint8).reshape(side, side), int(label)


def _problem(line: bytes, label: bytes, count: int, classes: int) -> str | None:
    """What is wrong with an image and its class, if anything."""
    if line.translate(None, _DIGITS):
        return "pixels must be numbers"
    words = line.split()
    if len(words) != count:
        return f"expected {count:,} pixels, got {len(words):,}"
    if max(map(len, words)) > 3:
        return "pixels must be at most 255"
    word = label.strip()
    if not word.isdigit() or len(word) > 3 or int(word) >= classes:
        return f"label must be from 0 to {classes - 1}, got {word[:20]!r}"
    return None
