"""Inputs: how a record or a file becomes a sequence of tokens.

A record is read once (`read`, `read_file`). What training has to know about all rows, such as a vocabulary or a mean,
is measured on the training rows and stored with the model; with it, `encode` turns what was read into numbers.
"""

from __future__ import annotations

import io
import math
import re
import struct
import warnings
import wave
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import require
from seqboat.core.extras import check_installed
from seqboat.tasks.task import BYTES

if TYPE_CHECKING:
    from seqboat.own.task import OwnTaskConfig

Facts = dict[str, Any]
"""What a model must know about its training data: plain values, stored with the model."""

WORD = re.compile(r"\w+|[^\w\s]")
KNOWN_WORDS = 30_000
"""Words that have an id of their own: the most frequent of those that training meets twice."""
BUCKETS = 1024
"""Ids that all other words share, by a hash."""
LIMIT = 8_192
"""Tokens of a sequence unless `max_length` says more."""
PATCHED = 128
"""Steps from which on a series is read in patches."""
PATCHES = 512
"""Patches of the longest series, about."""
LARGEST = 1_000.0
"""Standard deviations that a value may differ from the mean; it is moved to there."""
FULL_SCALE = float(1 << 31)
MAX_PIXELS = 50_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
"""Of images, told by their content: others can run programs."""
NOTHING = ("", "na", "nan", "null", "none", "n/a")
"""Words for a gap in a series."""


class Input(ABC):
    """A kind of input.

    Args:
        config: of the task.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Of the files that a folder of such inputs holds."""
    unit: ClassVar[str] = "tokens"
    """What lengths count."""

    def __init__(self, config: OwnTaskConfig) -> None:
        self.config = config

    @property
    def columns(self) -> dict[str, str]:
        """Columns of a table that it reads, with the flags that name them."""
        return self.one_column()

    def one_column(self) -> dict[str, str]:
        """The column of texts or of file names."""
        if self.config.file_column is not None:
            return {self.config.file_column: "--set file_column=NAME"}
        return {self.config.text_column: "--text"}

    def vocab(self, facts: Facts) -> int | None:
        """Number of token ids; None for real values."""
        return None

    def channels(self, facts: Facts) -> int:
        """Channels of real values."""
        return 1

    def read(self, values: Mapping[str, Any]) -> Any:
        """What a record says; a ValueError says what is wrong with it."""
        raise ValueError(
            f"{self.name} inputs are files: name the column of file names (--set file_column=NAME)"
        )

    def read_file(self, content: bytes) -> Any:
        """What a file says; a ValueError says what is wrong with it."""
        raise ValueError(f"{self.name} inputs are rows of a table, not files")

    @abstractmethod
    def measure(self, rows: Sequence[Any], tagging: bool) -> Facts:
        """Facts about training rows.

        Args:
            rows: as they were read.
            tagging: whether every token has an answer.
        """

    @abstractmethod
    def encode(self, read: Any, facts: Facts) -> NDArray[Any]:
        """The whole sequence: (time,) token ids, or (time, channels) values."""

    def spans(self, text: str, facts: Facts) -> list[tuple[int, int]]:
        """Where the tokens of a text begin and end, in characters."""
        raise ValueError(f"tags of {self.name} inputs must be a list, one for each token")

    def size(self, read: Any, facts: Facts) -> int:
        """Tokens of a sequence, before it is cut."""
        return len(self.encode(read, facts))


def _text(values: Mapping[str, Any], column: str) -> str | list[str]:
    value = values.get(column)
    require(value is not None, "empty text")
    if isinstance(value, list | tuple | np.ndarray):
        require(len(value) > 0, "empty list of events")
        require(all(isinstance(word, str) for word in value), f"{column!r} must be a text or a list of words")
        return [str(word) for word in value]
    require(isinstance(value, str), f"{column!r} must be a text, got {type(value).__name__}")
    require(bool(str(value).strip()), "empty text")
    return str(value)


def _decode(content: bytes) -> str:
    require(bool(content.strip()), "empty text")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None


class Words(Input):
    """Words of a text, or events by their names.

    Texts are cut into words and signs, in lower case; lists of words are taken as they are. Words that training met
    twice have ids of their own, others share `BUCKETS` ids by a hash: of the word, or for tags of its shape, which
    says more about a word that nobody knows.
    """

    name = "words"
    suffixes = (".txt", ".md")
    unit = "words"

    def __init__(self, config: OwnTaskConfig) -> None:
        super().__init__(config)
        self._known: tuple[int, dict[str, int]] = (0, {})

    def vocab(self, facts: Facts) -> int:
        return BUCKETS + len(facts["words"])

    def read(self, values: Mapping[str, Any]) -> str | list[str]:
        return _text(values, self.config.text_column)

    def read_file(self, content: bytes) -> str:
        return _decode(content)

    def measure(self, rows: Sequence[Any], tagging: bool) -> Facts:
        facts: Facts = {"lower": not tagging, "shapes": tagging}
        seen: Counter[str] = Counter()
        for row in rows:
            seen.update(split_words(row, facts["lower"]))
        known = [word for word, count in seen.most_common(KNOWN_WORDS) if count > 1]
        total = sum(seen.values())
        facts["known"] = sum(seen[word] for word in known) / max(total, 1)
        facts["letters"] = sum(len(word) * count for word, count in seen.items()) / max(total, 1)
        return {**facts, "words": known}

    def encode(self, read: Any, facts: Facts) -> NDArray[np.int64]:
        known = self._ids(facts)
        words = split_words(read, facts["lower"])
        found = [known.get(word, -1) for word in words]
        for place, number in enumerate(found):
            if number < 0:
                word = shape_of(words[place]) if facts["shapes"] else words[place]
                found[place] = zlib.crc32(word.encode("utf-8", "surrogatepass")) % BUCKETS
        return np.array(found, np.int64)

    def _ids(self, facts: Facts) -> dict[str, int]:
        if self._known[0] != id(facts["words"]):
            numbers = {word: BUCKETS + place for place, word in enumerate(facts["words"])}
            self._known = (id(facts["words"]), numbers)
        return self._known[1]

    def spans(self, text: str, facts: Facts) -> list[tuple[int, int]]:
        return [found.span() for found in WORD.finditer(text)]

    def size(self, read: Any, facts: Facts) -> int:
        return len(split_words(read, False))


def split_words(read: str | Sequence[str], lower: bool) -> list[str]:
    """Words and signs of a text; a list stays as it is.

    >>> split_words("It's 3 o'clock.", lower=True)
    ['it', "'", 's', '3', 'o', "'", 'clock', '.']
    """
    if not isinstance(read, str):
        return list(read)
    return WORD.findall(read.lower() if lower else read)


def shape_of(word: str) -> str:
    """What an unknown word looks like: the kinds of its characters without repetitions, and its end.

    >>> shape_of("Kowalski"), shape_of("B-52")
    ('Aa:ski', 'A-0:-52')
    """
    kinds = "".join("A" if c.isupper() else "a" if c.isalpha() else "0" if c.isdigit() else c for c in word)
    return re.sub(r"(.)\1+", r"\1", kinds) + ":" + word[-3:].lower()


class Bytes(Input):
    """Text as the bytes of UTF-8: for what has no words."""

    name = "bytes"
    suffixes = (".txt", ".md")
    unit = "bytes"

    def vocab(self, facts: Facts) -> int:
        return BYTES

    def read(self, values: Mapping[str, Any]) -> str:
        found = _text(values, self.config.text_column)
        return found if isinstance(found, str) else " ".join(found)

    def read_file(self, content: bytes) -> str:
        return _decode(content)

    def measure(self, rows: Sequence[Any], tagging: bool) -> Facts:
        return {}

    def encode(self, read: Any, facts: Facts) -> NDArray[np.int64]:
        return np.frombuffer(read.encode("utf-8", "replace"), np.uint8).astype(np.int64)

    def spans(self, text: str, facts: Facts) -> list[tuple[int, int]]:
        return [(i, i + 1) for i, c in enumerate(text) for _ in c.encode("utf-8", "replace")]

    def size(self, read: Any, facts: Facts) -> int:
        return len(read.encode("utf-8", "replace"))


class Series(Input):
    """Time series with one or more channels and gaps, in patches of neighboring steps.

    Values are normalized per channel. If the training data has gaps, each channel comes with another one that is 1
    where a value was observed; the value of a gap is the mean.
    """

    name = "series"
    unit = "steps"

    @property
    def columns(self) -> dict[str, str]:
        config = self.config
        if not config.channels:
            return self.one_column()
        found = {} if config.series_column is None else {config.series_column: "--series"}
        return {**found, **dict.fromkeys(config.channels, "--channels")}

    def channels(self, facts: Facts) -> int:
        return len(facts["mean"]) * (2 if facts["gaps"] else 1) * int(facts["patch"])

    def read(self, values: Mapping[str, Any]) -> NDArray[np.float64]:
        config = self.config
        if config.channels and config.series_column:
            return np.array([[_number(values.get(name)) for name in config.channels]])
        if config.channels:
            parts = [_numbers(values.get(name)) for name in config.channels]
            require(len({len(part) for part in parts}) == 1, "channels of different lengths")
            found = np.stack(parts, axis=1)
        else:
            found = _matrix(values.get(config.text_column))
        require(found.size > 0, "empty series")
        return found

    def measure(self, rows: Sequence[Any], tagging: bool) -> Facts:
        width = rows[0].shape[1]
        mean, std, gaps = _scales(rows, width)
        longest = max(len(row) for row in rows)
        patch = 1
        while not tagging and longest >= PATCHED and patch < 64 and (patch < 4 or longest > patch * PATCHES):
            patch *= 2
        return {"mean": mean, "std": std, "gaps": gaps, "patch": patch}

    def encode(self, read: Any, facts: Facts) -> NDArray[np.float32]:
        width, patch = len(facts["mean"]), int(facts["patch"])
        require(read.shape[1] == width, f"expected {width} channels, got {read.shape[1]}")
        there = np.isfinite(read)
        centered = (np.where(there, read, 0.0) - np.array(facts["mean"])) / np.array(facts["std"])
        values = np.where(there, centered.clip(-LARGEST, LARGEST), 0.0)
        if facts["gaps"]:
            values = np.concatenate([values, there], axis=1)
        count = -(-len(values) // patch)
        values = np.pad(values, ((0, count * patch - len(values)), (0, 0)))
        return values.reshape(count, -1).astype(np.float32)

    def size(self, read: Any, facts: Facts) -> int:
        return -(-len(read) // int(facts["patch"]))


def _scales(rows: Sequence[NDArray[np.float64]], width: int) -> tuple[list[float], list[float], bool]:
    """Mean and standard deviation of each channel without what is absurdly far away, and whether there are gaps."""
    gaps = any(not np.isfinite(row).all() for row in rows)
    mean, std = [], []
    for channel in range(width):
        values = np.concatenate([row[:, channel] for row in rows])
        values = values[np.isfinite(values)].clip(-1e150, 1e150)
        if not len(values):
            values = np.zeros(1)
        low, high = np.quantile(values, [0.01, 0.99])
        if high > low:
            reach = 100 * (high - low)
            values = values.clip(low - reach, high + reach)
        found = float(values.std())
        mean.append(float(values.mean()))
        std.append(found if found > 1e-12 * max(abs(mean[-1]), 1e-300) else 1.0)
    return mean, std, gaps


def _number(value: Any) -> float:
    """A number; NaN for a gap."""
    if value is None or (isinstance(value, str) and value.strip().lower() in NOTHING):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    except (TypeError, ValueError):
        raise ValueError(f"not a number: {str(value)[:40]!r}") from None
    require(not math.isinf(found), f"not a finite number: {str(value)[:40]}")
    return found


def _numbers(value: Any) -> NDArray[np.float64]:
    if isinstance(value, str):
        value = value.replace(",", " ").strip("[] \t").split()
    require(isinstance(value, list | tuple | np.ndarray), "a series must be a list of numbers")
    return np.array([_number(item) for item in value], np.float64)


def _matrix(value: Any) -> NDArray[np.float64]:
    """(time, channels) from an array, a list of numbers or of lists of numbers."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        require(value.ndim in (1, 2), f"a series must have the shape (time, channels), got {value.shape}")
        found = value.astype(np.float64).reshape(len(value), -1)
        require(not np.isinf(found).any(), "not a finite number: inf")
        return found
    if (
        isinstance(value, list | tuple | np.ndarray)
        and len(value)
        and isinstance(value[0], list | tuple | np.ndarray)
    ):
        rows = [_numbers(row) for row in value]
        require(len({len(row) for row in rows}) == 1, "times with different numbers of channels")
        return np.stack(rows)
    return _numbers(value)[:, None]


class Sound(Series):
    """WAV files with 8 to 32-bit integer samples at one sample rate; channels are averaged."""

    name = "wav"
    suffixes = (".wav",)
    unit = "samples"

    def __init__(self, config: OwnTaskConfig) -> None:
        super().__init__(config)
        self.rate: int | None = None

    @property
    def columns(self) -> dict[str, str]:
        return self.one_column()

    def read(self, values: Mapping[str, Any]) -> NDArray[np.float64]:
        return Input.read(self, values)

    def read_file(self, content: bytes) -> NDArray[np.float64]:
        rate, samples = read_sound(content)
        self.rate = self.rate or rate
        require(
            rate == self.rate, f"expected {self.rate} samples per second as in the first file, got {rate}"
        )
        return samples[:, None].astype(np.float64)

    def measure(self, rows: Sequence[Any], tagging: bool) -> Facts:
        return {**super().measure(rows, tagging), "rate": self.rate}

    def encode(self, read: Any, facts: Facts) -> NDArray[np.float32]:
        self.rate = facts["rate"]
        return super().encode(read, facts)


def read_sound(content: bytes) -> tuple[int, NDArray[np.float32]]:
    """Sample rate and samples between -1 and 1 of a WAV file of any width; channels are averaged."""
    try:
        with wave.open(io.BytesIO(content)) as clip:
            channels, width, rate, count = clip.getparams()[:4]
            data = clip.readframes(count)
    except (wave.Error, EOFError, RuntimeError, OverflowError, struct.error) as error:
        # a chunk of a wrong size is a RuntimeError without a message
        raise ValueError(f"not a WAV file: {str(error) or 'truncated, or a chunk of a wrong size'}") from None
    require(1 <= width <= 4, f"expected samples of 8 to 32 bits, got {8 * width}")
    require(rate > 0, "no sample rate")
    frames = len(data) // (channels * width)
    require(frames > 0, "no samples")
    raw = np.frombuffer(data[: frames * channels * width], np.uint8).reshape(-1, width)
    wide = np.zeros((len(raw), 4), np.uint8)
    wide[:, 4 - width :] = raw ^ 0x80 if width == 1 else raw
    samples = wide.view("<i4").astype(np.float64).reshape(frames, channels).mean(axis=1) / FULL_SCALE
    return rate, samples.astype(np.float32)


class Picture(Series):
    """Images, converted to gray, resized, and read in squares of 2 x 2 pixels, row by row."""

    name = "image"
    suffixes = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
    unit = "squares"

    @property
    def columns(self) -> dict[str, str]:
        return self.one_column()

    def read(self, values: Mapping[str, Any]) -> NDArray[np.float64]:
        return Input.read(self, values)

    def read_file(self, content: bytes) -> NDArray[np.float64]:
        return self.squares(read_picture(content))

    def squares(self, pixels: NDArray[Any]) -> NDArray[np.float64]:
        """(squares, 4) from a gray image (height, width) with values from 0 to 255."""
        check_installed("PIL", "an image")
        from PIL import Image

        side = self.config.image_size
        small: Any = np.asarray(pixels, np.float32)
        if small.shape != (side, side):
            small = np.asarray(Image.fromarray(small).resize((side, side), Image.Resampling.BOX))
        blocks = small.astype(np.float64).reshape(side // 2, 2, side // 2, 2).transpose(0, 2, 1, 3)
        return blocks.reshape(-1, 4) / 255

    def measure(self, rows: Sequence[Any], tagging: bool) -> Facts:
        return {**super().measure(rows, True), "gaps": False}


def read_picture(content: bytes) -> NDArray[np.float32]:
    """Gray values from 0 to 255 (height, width) of an image in one of FORMATS; those of 16 bits are scaled."""
    check_installed("PIL", "an image")
    from PIL import Image, UnidentifiedImageError

    known = f"expected one of {', '.join(FORMATS)}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the limit is ours
            opened = Image.open(io.BytesIO(content), formats=FORMATS)
        with opened as image:
            width, height = image.size
            require(width * height <= MAX_PIXELS, f"an image of {width} x {height} pixels is too large")
            if image.mode.startswith("I"):
                return (np.asarray(image, np.float32).clip(0, 65535) / 257).astype(np.float32)
            require(image.mode != "F", "an image of real numbers: save it with 8 or 16 bits")
            return np.asarray(image.convert("L"), np.float32)
    except UnidentifiedImageError:
        raise ValueError(f"not an image: {known}") from None
    except (OSError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"not an image: {error}") from None


INPUTS: dict[str, type[Input]] = {
    "words": Words,
    "bytes": Bytes,
    "series": Series,
    "wav": Sound,
    "image": Picture,
}
"""Every kind of input by its name in the facts of a model."""
