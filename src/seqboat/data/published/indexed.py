"""Binarized sequences of fairseq: token ids in `NAME.bin`, their lengths in `NAME.idx`.

Two formats of the index, told apart by their first bytes (all numbers little-endian):

    MMIDIDX 0 0   version 1 (u64), type (u8), count (u64), lengths (count x i32), first bytes (count x i64)
    TNTIDX 0 0    version 1 (u64), type (u64), element size (u64), count (u64), number of sizes (u64),
                  offsets into the sizes and into the elements (count + 1 x i64 each), sizes (i64)

In files of the older kind, TNTIDX, all ids are one larger. Both files stay on disk, and all that they say about each
other is checked: sequences must follow each other without gaps and fill the file of the ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import require
from seqboat.data.files import open_regular

MAPPED = b"MMIDIDX\x00\x00"
CACHED = b"TNTIDX\x00\x00"
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of token ids by their number in an index."""
BLOCK = 1 << 20
"""Token ids that are read at once."""


class IndexedSequences:
    """Sequences of token ids on disk.

    Args:
        stem: path of both files, without .bin and .idx.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """

    def __init__(self, stem: Path) -> None:
        self.index, self.data = stem.with_name(f"{stem.name}.idx"), stem.with_name(f"{stem.name}.bin")
        for path in (self.index, self.data):
            require(path.is_file(), f"there is no file {path}")
        with open_regular(self.index) as file:
            head = file.read(48)
        if head.startswith(MAPPED):
            self._read_mapped(head)
        elif head.startswith(CACHED):
            self._read_cached(head)
        else:
            raise ValueError(f"{self.index} is not an index of fairseq: it begins with {head[:8]!r}")
        size = self.data.stat().st_size
        wanted = int(self.ends[-1]) * self.dtype.itemsize if len(self.ends) else 0
        require(size == wanted, f"{self.data} has {size:,} bytes, but {self.index.name} says {wanted:,}")
        self._ids: NDArray[Any] = np.memmap(self.data, self.dtype, "r") if size else np.empty(0, self.dtype)

    def _read_mapped(self, head: bytes) -> None:
        require(len(head) >= 26, f"{self.index} is truncated")
        version, kind, count = struct.unpack("<QBQ", head[9:26])
        self._set_type(version, kind)
        self._check_size(26 + 12 * count)
        self.shift = 0
        sizes = self._numbers("<i4", 26, count)
        self.ends = self._sum(sizes)
        first = self._numbers("<i8", 26 + 4 * count, count)
        starts = (self.ends - sizes) * self.dtype.itemsize
        require(bool((first == starts).all()), f"{self.index}: sequences overlap or leave gaps")

    def _read_cached(self, head: bytes) -> None:
        require(len(head) >= 48, f"{self.index} is truncated")
        version, kind, width, count, dims = struct.unpack("<QQQQQ", head[8:48])
        self._set_type(version, kind)
        require(
            width == self.dtype.itemsize,
            f"{self.index}: ids of {self.dtype.itemsize} bytes each, but the element size is {width}",
        )
        require(dims == count, f"{self.index}: {count:,} sequences, but {dims:,} sizes: they are not flat")
        self._check_size(48 + 8 * (2 * (count + 1) + dims))
        self.shift = 1
        axes = self._numbers("<i8", 48, count + 1)
        offsets = self._numbers("<i8", 48 + 8 * (count + 1), count + 1)
        self.ends = self._sum(self._numbers("<i8", 48 + 16 * (count + 1), dims))
        flat = bool((axes == np.arange(count + 1)).all())
        require(flat, f"{self.index}: not every sequence has one size")
        fits = offsets[0] == 0 and bool((offsets[1:] == self.ends).all())
        require(bool(fits), f"{self.index}: sequences overlap or leave gaps")

    def _set_type(self, version: int, kind: int) -> None:
        require(version == 1, f"{self.index} has version {version}, expected 1")
        require(kind in TYPES, f"{self.index}: token ids of type {kind}, expected one of {sorted(TYPES)}")
        self.dtype = np.dtype(TYPES[kind])

    def _check_size(self, wanted: int) -> None:
        size = self.index.stat().st_size
        require(size == wanted, f"{self.index} has {size:,} bytes, but its header says {wanted:,}")

    def _numbers(self, kind: str, offset: int, count: int) -> NDArray[Any]:
        return np.memmap(self.index, kind, "r", offset=offset, shape=(count,)) if count else np.empty(0, kind)

    def _sum(self, sizes: NDArray[Any]) -> NDArray[np.int64]:
        """Where each sequence ends, in ids."""
        require(not len(sizes) or int(sizes.min()) >= 0, f"{self.index}: a sequence of negative length")
        limit = self.data.stat().st_size
        require(
            not len(sizes) or int(sizes.max()) <= limit, f"{self.index}: a sequence is longer than its file"
        )
        return np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        """The token ids of a sequence."""
        start = int(self.ends[number - 1]) if number else 0
        return self._ids[start : int(self.ends[number])].astype(np.int64) - self.shift

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self[number] for number in range(len(self)))

    @property
    def tokens(self) -> int:
        """The number of all token ids."""
        return len(self._ids)

    def blocks(self, end: int) -> Iterator[NDArray[np.int64]]:
        """The token ids of all sequences in a row, in blocks, up to one of them."""
        for start in range(0, end, BLOCK):
            yield self._ids[start : min(start + BLOCK, end)].astype(np.int64) - self.shift
