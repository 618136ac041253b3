"""Data as MEGA and the published implementation process them, as the same arrays that our tasks make.

    lra/listops, lra/imdb-4000     src-bin and label-bin: dict.txt, {train,valid,test}.{bin,idx}
    lra/aan                        the same, and src1-bin with the second documents
    lra/cifar10, pathfinder, ...   input/*.src and label/*.label
    speech_commands                processed_data/raw/{train,val,test}_{X,y}.pt
    enwik8_data_bin                dict.txt, {train,valid,test}.{bin,idx}

Every sequence of tokens ends with </s>, which is not stored; `data.end_token` puts it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import require
from seqboat.data.published.dictionary import END, label_symbols, read_dictionary
from seqboat.data.published.indexed import IndexedSequences
from seqboat.data.published.pickles import PickledFile
from seqboat.data.store import Skips

SPLITS = {"train": "train", "val": "valid", "test": "test"}
"""Published names of our splits."""


def is_binarized(folder: Path) -> bool:
    """Whether a folder has token sequences with a class each."""
    return (folder / "src-bin" / "dict.txt").is_file()


def dictionary(folder: Path) -> tuple[tuple[str, ...], Path]:
    """The symbols of a folder's tokens, and the file that has them."""
    path = folder / "src-bin" / "dict.txt"
    return read_dictionary(path), path


def read_labels(folder: Path, split: str, classes: int) -> list[int | None]:
    """The class of each sequence of a split; None where there is no single one."""
    path = folder / "label-bin" / "dict.txt"
    require(path.is_file(), f"there is no file {path}")
    numbers = label_symbols(read_dictionary(path), classes, path)
    found: list[int | None] = []
    for ids in IndexedSequences(folder / "label-bin" / split):
        kept = ids[ids != END]
        found.append(numbers.get(int(kept[0])) if len(kept) == 1 else None)
    return found


class Translation:
    """From published token ids to our tokens, each a few bytes.

    Args:
        contents: of each id; ids without a content make a sequence bad.
    """

    def __init__(self, contents: Mapping[int, bytes]) -> None:
        self.contents = dict(contents)
        self.single = all(len(content) <= 1 for content in contents.values())
        size = max(contents) + 1
        self.known, self.kept = np.zeros(size, bool), np.zeros(size, bool)
        self.table = np.zeros(size, np.uint8)
        for place, content in contents.items():
            self.known[place] = True
            if len(content) == 1:
                self.kept[place], self.table[place] = True, content[0]

    def __call__(self, ids: NDArray[np.int64]) -> bytes:
        """The tokens of a sequence, without the </s> at its end; a ValueError names an id without a meaning."""
        if len(ids) and ids[-1] == END:
            ids = ids[:-1]
        self.check(ids)
        if self.single:
            return self.table[ids[self.kept[ids]]].tobytes()
        return b"".join(self.contents[place] for place in ids.tolist())

    def check(self, ids: NDArray[np.int64]) -> None:
        """Refuse ids without a meaning."""
        inside = (ids >= 0) & (ids < len(self.known))
        bad = ids[~(inside & self.known[np.where(inside, ids, 0)])]
        require(not len(bad), f"token id {bad[:1].tolist()} has no meaning in the dictionary")


def read_sequences(
    folder: Path, part: str, split: str, translate: Translation
) -> Iterator[tuple[int, bytes | None, str]]:
    """Number, tokens and (where there are none) trouble of each sequence.

    Args:
        folder: of the data set.
        part: src-bin or src1-bin.
        split: train, valid or test.
        translate: to our tokens.
    """
    for number, ids in enumerate(IndexedSequences(folder / part / split), start=1):
        try:
            tokens = translate(ids)
        except ValueError as error:
            yield number, None, str(error)
        else:
            yield (number, tokens, "") if tokens else (number, None, "empty sequence")


def read_examples(
    folder: Path,
    split: str,
    classes: int,
    translate: Translation,
    skips: Skips,
    parts: tuple[str, ...] = ("src-bin",),
) -> Iterator[tuple[tuple[bytes, ...], int]]:
    """The sequences of each example of a split, and its class; bad examples are left out and counted.

    Args:
        folder: of the data set.
        split: train, valid or test.
        classes: number of classes.
        translate: to our tokens.
        skips: counts what is left out.
        parts: folders of the first and of the second sequences.
    """
    labels = read_labels(folder, split, classes)
    for part in parts:
        count = len(IndexedSequences(folder / part / split))
        require(
            count == len(labels),
            f"{folder / part / split} has {count:,} sequences, {folder / 'label-bin' / split} {len(labels):,}",
        )
    streams = [read_sequences(folder, part, split, translate) for part in parts]
    for label, *rows in zip(labels, *streams, strict=True):
        number = rows[0][0]
        trouble = next((row[2] for row in rows if row[2]), "" if label is not None else "no single label")
        if trouble or label is None:
            skips.add(f"{split}.bin", f"sequence {number}", trouble)
        else:
            yield tuple(row[1] or b"" for row in rows), label


def samples_folder(folder: Path) -> Path | None:
    """Where processed clips are, if a folder has any."""
    for place in (folder, folder / "raw", folder / "processed_data" / "raw"):
        if (place / "train_X.pt").is_file():
            return place
    return None


def read_samples(folder: Path, split: str, samples: int) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
    """Clips (count, samples), which stay on disk, and their classes."""
    path = folder / f"{split}_X.pt"
    clips, labels = PickledFile(path).array(), PickledFile(folder / f"{split}_y.pt").array()
    require(
        clips.dtype.kind == "f" and clips.shape == (len(labels), 1, samples) and labels.ndim == 1,
        f"{path} must hold clips of shape ({len(labels)}, 1, {samples}), got {clips.dtype} of shape {clips.shape}",
    )
    require(labels.dtype.kind == "i", f"{folder / f'{split}_y.pt'} must hold classes, got {labels.dtype}")
    return clips[:, 0], np.asarray(labels, np.int64)
