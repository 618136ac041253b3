"""Data as MEGA and the published implementation process them, as the same arrays that our tasks make.

    lra/listops, lra/imdb-4000     src-bin and label-bin: dict.txt, {train,valid,test}.{bin,idx}
    lra/aan                        the same, and src1-bin with the second documents
    lra/cifar10, pathfinder, ...   input/*.src and label/*.label
    speech_commands                processed_data/raw/{train,val,test}_{X,y}.pt
    enwik8_data_bin                dict.txt, {train,valid,test}.{bin,idx}

Every sequence of tokens ends with </s>, which is not stored; `data.end_token` puts it back.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqboat.compat.pickles import load_array
from seqboat.core.checks import require, short
from seqboat.data.files import open_regular
from seqboat.data.store import Skips

# Dictionaries of fairseq (`dict.txt`): which token id stands for which symbol.
#
#     <s> <pad> </s> <unk>      ids 0, 1, 2 and 3, not written in the file
#     116 1048576               id 4: the symbol, and how often it was counted
#     101 734003                id 5
#     madeupword0000 0          fills the dictionary up to a multiple of eight
#
# What a symbol means depends on the data. Bytes are written as decimal numbers (as in enwik8, where a line break is
# the end of a line, </s>) or as characters; ListOps has its operators, digits and brackets.

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
"""Symbols that every dictionary begins with."""
PAD, END, UNKNOWN = 1, 2, 3
MAX_BYTES = 16 << 20
"""Bytes of a dictionary that are read at most."""
SPACES = ("<space>", "<SPACE>", "\u2581", "\u0120")
"""How dictionaries of characters write a blank, at which fairseq splits its lines."""
_FILLER = "madeupword"
_FLAG = "#fairseq:overwrite"


def read_dictionary(path: Path) -> tuple[str, ...]:
    """The symbols of a dictionary by id, the special ones included.

    Raises:
        ValueError: naming the file and the line that is wrong.
    """
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    require(len(content) <= MAX_BYTES, f"{path} has more than {MAX_BYTES:,} bytes: it is not a dictionary")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a dictionary: not UTF-8 at byte {error.start}") from None
    symbols = list(SPECIAL)
    places = {symbol: place for place, symbol in enumerate(symbols)}
    # only "\n" ends a line: a symbol may be one of the other separators of Unicode
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], start=1):
        symbol, _, count = line.rstrip().rpartition(" ")
        overwrite = count == _FLAG
        if overwrite:
            symbol, _, count = symbol.rpartition(" ")
        good = symbol and count.isascii() and count.isdigit()
        require(bool(good), f"{path}, line {number}: expected a symbol and a count, got {short(line)}")
        require(symbol not in places or overwrite, f"{path}, line {number}: {short(symbol)} occurs twice")
        places[symbol] = len(symbols)
        symbols.append(symbol)
    return tuple(symbols)


def write_dictionary(symbols: Sequence[str]) -> str:
    """The text of a dictionary with these symbols, after the special ones."""
    return "".join(f"{symbol} 1\n" for symbol in symbols)


def is_filler(symbol: str) -> bool:
    """Whether a symbol stands for nothing that data contain."""
    return symbol in SPECIAL or symbol == "<CLS>" or symbol.startswith(_FILLER)


def byte_symbols(symbols: Sequence[str], where: object) -> dict[int, bytes]:
    """The bytes that each token id stands for; ids that stand for nothing are left out.

    Symbols are decimal numbers up to 255 if all of them are and one has more than one digit, else single characters.

    Args:
        symbols: of a dictionary.
        where: the name of its file, for messages.
    """
    words = {place: symbol for place, symbol in enumerate(symbols) if not is_filler(symbol)}
    require(len(words) > 0, f"{where} has no symbols")
    numbers = all(word.isascii() and word.isdigit() and len(word) < 4 for word in words.values())
    if numbers and any(len(word) > 1 for word in words.values()):
        for word in words.values():
            require(int(word) < 256, f"{where}: symbol {word} is not a byte: it is more than 255")
        return {place: bytes([int(word)]) for place, word in words.items()}
    found = {}
    for place, word in words.items():
        require(
            len(word) == 1 or word in SPACES,
            f"{where}: symbol {short(word)} is neither a byte (a number up to 255), nor a character, nor "
            f"one of {', '.join(SPACES[:3])} for a blank; change its spelling in a copy of the dictionary",
        )
        found[place] = b" " if word in SPACES else word.encode("utf-8", errors="surrogatepass")
    return found


def label_symbols(symbols: Sequence[str], classes: int, where: object) -> dict[int, int]:
    """The class that each token id of a dictionary of labels stands for.

    Labels are numbers, in any order of lines. The published code takes the place in the file instead; where that
    differs, so do the numbers of its classes.
    """
    found = {}
    for place, symbol in enumerate(symbols):
        if is_filler(symbol):
            continue
        good = symbol.isascii() and symbol.isdigit() and len(symbol) < 4 and int(symbol) < classes
        require(good, f"{where}: label {short(symbol)} is not a number from 0 to {classes - 1}")
        found[place] = int(symbol)
    require(len(found) > 0, f"{where} has no labels")
    return found


def named_symbols(
    symbols: Sequence[str], names: Mapping[str, int], where: object, ignored: Collection[str] = ()
) -> dict[int, int]:
    """Our id of each token id whose symbol has a name; ignored symbols are left out.

    Args:
        symbols: of a dictionary.
        names: our ids by name.
        where: the name of the dictionary's file, for messages.
        ignored: symbols that our sequences leave out.
    """
    found = {}
    for place, symbol in enumerate(symbols):
        if not is_filler(symbol) and symbol not in ignored:
            require(symbol in names, f"{where}: symbol {short(symbol)} is none of {', '.join(names)}")
            found[place] = names[symbol]
    return found


# Binarized sequences of fairseq: token ids in `NAME.bin`, their lengths in `NAME.idx`.
#
# Two formats of the index, told apart by their first bytes (all numbers little-endian):
#
#     MMIDIDX 0 0   version 1 (u64), type (u8), count (u64), lengths (count x i32), first bytes (count x i64)
#     TNTIDX 0 0    version 1 (u64), type (u64), element size (u64), count (u64), number of sizes (u64),
#                   offsets into the sizes and into the elements (count + 1 x i64 each), sizes (i64)
#
# In files of the older kind, TNTIDX, all ids are one larger. Both files stay on disk, and all that they say about
# each other is checked: sequences must follow each other without gaps and fill the file of the ids.

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


# Images as text: one image per line of `input/SPLIT.src`, its pixels as numbers from 0 to 255, row after row;
# their classes are the lines of `label/SPLIT.label`.

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


# the data sets

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
    clips, labels = load_array(path), load_array(folder / f"{split}_y.pt")
    require(
        clips.dtype.kind == "f" and clips.shape == (len(labels), 1, samples) and labels.ndim == 1,
        f"{path} must hold clips of shape ({len(labels)}, 1, {samples}), got {clips.dtype} of shape {clips.shape}",
    )
    require(labels.dtype.kind == "i", f"{folder / f'{split}_y.pt'} must hold classes, got {labels.dtype}")
    return clips[:, 0], np.asarray(labels, np.int64)
