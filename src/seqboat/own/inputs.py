"""Inputs: how a record or a file becomes a sequence.

A record is read once into a flat array that is stored (`read`, `read_file`); training turns stored arrays into the
sequences that a model takes (`sequence`), with facts measured on the training rows, such as a mean.
"""

from __future__ import annotations

import io
import math
import struct
import wave
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import require
from seqboat.core.extras import check_installed
from seqboat.data.tables import bad_text
from seqboat.own.carried import pack_tokenizer, unpack_tokenizer
from seqboat.tasks.task import BYTES

if TYPE_CHECKING:
    from seqboat.own.task import OwnTaskConfig

Facts = dict[str, Any]
"""What a model must know about its training data: plain values, stored with the model."""

FULL_SCALE = float(1 << 31)
MAX_SIDE = 10_000
"""Pixels that an image file may have in each direction."""


class Input(ABC):
    """A kind of input.

    Args:
        config: of the task.
    """

    name: ClassVar[str]
    """As in INPUTS."""
    dtype: ClassVar[Any]
    """Of stored arrays."""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Of the files that a folder of such inputs holds."""
    text_bytes: ClassVar[bool] = False
    fixed_length: ClassVar[bool] = False

    def __init__(self, config: OwnTaskConfig) -> None:
        self.config = config
        self.extra: Facts = {}
        """what reading found out and later records have to match"""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a table that it reads."""
        return (self.config.text_column,)

    @property
    def max_length(self) -> int:
        """The longest sequence."""
        return self.config.max_length

    @property
    def picture(self) -> tuple[int, int] | None:
        """Height and width, where a sequence is the pixels of an image."""
        return None

    def vocab(self, facts: Facts) -> int | None:
        """Number of token ids; None for real values."""
        return None

    def channels(self, facts: Facts) -> int:
        """Channels of real values."""
        return 1

    def read(self, values: Mapping[str, Any], column: str | None = None) -> NDArray[Any]:
        """The stored form of a record; a ValueError says what is wrong with it."""
        raise ValueError(f"{self.name} inputs are files in a folder, not rows of a table")

    def read_file(self, content: bytes) -> NDArray[Any]:
        """The stored form of a file; a ValueError says what is wrong with it."""
        raise ValueError(f"{self.name} inputs are rows of a table, not files in a folder")

    def measure(self, rows: Sequence[NDArray[Any]]) -> Facts:
        """Facts about training rows in their stored form."""
        return {}

    @abstractmethod
    def sequence(self, stored: NDArray[Any], facts: Facts) -> NDArray[Any]:
        """(time,) token ids, or (time, channels) values."""


class Text(Input):
    """Text, read as the bytes of UTF-8."""

    name = "text"
    dtype = np.uint8
    suffixes = (".txt", ".md")
    text_bytes = True

    def vocab(self, facts: Facts) -> int:
        return BYTES

    def read(self, values: Mapping[str, Any], column: str | None = None) -> NDArray[Any]:
        column = column or self.config.text_column
        value = values.get(column)
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            value = " ".join(value)
        require(value is not None, "empty text")
        require(isinstance(value, str), f"{column!r} must be a string, got {type(value).__name__}")
        return self.read_file(str(value).encode("utf-8", "surrogateescape"))

    def read_file(self, content: bytes) -> NDArray[Any]:
        if problem := bad_text(content):
            raise ValueError(problem)
        return np.frombuffer(content, np.uint8)

    def sequence(self, stored: NDArray[Any], facts: Facts) -> NDArray[Any]:
        return stored[: self.max_length].astype(np.int64)


class Symbols(Input):
    """Strings over a small alphabet, such as DNA or proteins; case is ignored."""

    name = "symbols"
    dtype = np.uint8

    def vocab(self, facts: Facts) -> int:
        return 1 + len(facts["symbols"])

    def read(self, values: Mapping[str, Any], column: str | None = None) -> NDArray[Any]:
        value = values.get(column or self.config.text_column)
        require(isinstance(value, str) and bool(value.strip()), "empty sequence")
        text = "".join(str(value).split()).upper()
        require(text.isascii(), "symbols must be ASCII")
        return np.frombuffer(text.encode("ascii"), np.uint8)

    def measure(self, rows: Sequence[NDArray[Any]]) -> Facts:
        seen = np.zeros(BYTES, bool)
        for row in rows:
            seen[np.asarray(row)] = True
        return {"symbols": bytes(np.flatnonzero(seen).astype(np.uint8)).decode("ascii")}

    def sequence(self, stored: NDArray[Any], facts: Facts) -> NDArray[Any]:
        # id 0 is for symbols that training never met
        ids = np.zeros(BYTES, np.int64)
        ids[np.frombuffer(facts["symbols"].encode("ascii"), np.uint8)] = 1 + np.arange(len(facts["symbols"]))
        return ids[stored[: self.max_length]]


class Tokens(Input):
    """Text as tokens of a Hugging Face tokenizer."""

    name = "tokens"
    dtype = np.uint32

    def __init__(self, config: OwnTaskConfig) -> None:
        super().__init__(config)
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """Loaded when it is first needed: the one that a run carries, or else by its name."""
        if self._tokenizer is None:
            check_installed("transformers", "--data.tokenizer")
            if packed := self.extra.get("tokenizer"):
                self._tokenizer = unpack_tokenizer(packed)
            else:
                self._tokenizer = self._load(self.config.tokenizer)
        return self._tokenizer

    def _load(self, name: str | None) -> Any:
        require(bool(name), "--data.tokenizer must name a tokenizer: a folder, or a model of the hub")
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(f"tokenizer {name!r} cannot be loaded: {error}") from None

    def vocab(self, facts: Facts) -> int:
        return int(facts["vocab"])

    def read(self, values: Mapping[str, Any], column: str | None = None) -> NDArray[Any]:
        value = values.get(column or self.config.text_column)
        require(isinstance(value, str) and bool(value.strip()), "empty text")
        ids = self.tokenizer(value, truncation=True, max_length=self.max_length)["input_ids"]
        require(len(ids) > 0, "no tokens")
        return np.array(ids, np.uint32)

    def measure(self, rows: Sequence[NDArray[Any]]) -> Facts:
        return {"vocab": len(self.tokenizer), "tokenizer": pack_tokenizer(self.tokenizer)}

    def sequence(self, stored: NDArray[Any], facts: Facts) -> NDArray[Any]:
        return stored[: self.max_length].astype(np.int64)


class Series(Input):
    """Time series with one or more channels and gaps: normalized per channel, gaps filled with the mean.

    If the training data has gaps, each channel comes with an indicator channel: 1 where a value was observed.
    """

    name = "series"
    dtype = np.float32

    @property
    def columns(self) -> tuple[str, ...]:
        config = self.config
        if config.channels:
            return (*((config.series_column,) if config.series_column else ()), *config.channels)
        return (config.text_column,)

    @property
    def width(self) -> int:
        """Numbers at each time."""
        return len(self.config.channels) or int(self.extra["width"])

    def channels(self, facts: Facts) -> int:
        return len(facts["mean"]) * (2 if facts["gaps"] else 1)

    def read(self, values: Mapping[str, Any], column: str | None = None) -> NDArray[Any]:
        if self.config.channels and self.config.series_column:
            return np.array([_number(values.get(name)) for name in self.config.channels], np.float32)
        if self.config.channels:
            parts = [_numbers(values.get(name)) for name in self.config.channels]
            require(len({len(part) for part in parts}) == 1, "channels of different lengths")
            return self._check(np.stack(parts, axis=1))
        return self._check(_matrix(values.get(column or self.config.text_column)))

    def _check(self, matrix: NDArray[np.float32]) -> NDArray[np.float32]:
        require(len(matrix) > 0, "empty series")
        width = self.extra.setdefault("width", matrix.shape[1])
        require(matrix.shape[1] == width, f"expected {width} channels, got {matrix.shape[1]}")
        return matrix.reshape(-1)

    def measure(self, rows: Sequence[NDArray[Any]]) -> Facts:
        width = self.width
        count, total, square = np.zeros(width), np.zeros(width), np.zeros(width)
        gaps = False
        for row in rows:
            part = np.asarray(row, np.float64).reshape(-1, width)
            there = np.isfinite(part)
            gaps = gaps or not bool(there.all())
            part = np.where(there, part, 0.0)
            count += there.sum(axis=0)
            total += part.sum(axis=0)
            square += (part**2).sum(axis=0)
        mean = total / np.maximum(count, 1)
        std = np.sqrt(np.maximum(square / np.maximum(count, 1) - mean**2, 0.0))
        std[std < 1e-12 * np.maximum(np.abs(mean), 1e-300)] = 1.0
        return {"mean": mean.tolist(), "std": std.tolist(), "gaps": gaps, "width": width}

    def sequence(self, stored: NDArray[Any], facts: Facts) -> NDArray[Any]:
        mean, std = np.array(facts["mean"]), np.array(facts["std"])
        require(
            len(stored) % len(mean) == 0, f"expected {len(mean)} channels, got {len(stored)} values in all"
        )
        values = stored.reshape(-1, len(mean))[: self.max_length].astype(np.float64)
        there = np.isfinite(values)
        filled = np.where(there, (np.where(there, values, 0.0) - mean) / std, 0.0)
        if facts["gaps"]:
            filled = np.concatenate([filled, there], axis=1)
        return filled.astype(np.float32)


def _number(value: Any) -> float:
    """A number; NaN for a gap."""
    if value is None or (
        isinstance(value, str) and value.strip().lower() in ("", "na", "nan", "null", "none")
    ):
        return math.nan
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"not a number: {str(value)[:40]!r}") from None
    require(math.isnan(found) or abs(found) < 3e38, f"not a finite number: {str(value)[:40]}")
    return found


def _numbers(value: Any) -> NDArray[np.float32]:
    if isinstance(value, str):
        value = value.replace(",", " ").split()
    require(isinstance(value, list | tuple | np.ndarray), "a series must be a list of numbers")
    return np.array([_number(item) for item in value], np.float32)


def _matrix(value: Any) -> NDArray[np.float32]:
    """(time, channels) from a list of numbers or of lists of numbers."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        rows = [_numbers(row) for row in value]
        require(len({len(row) for row in rows}) == 1, "times with different numbers of channels")
        return np.stack(rows)
    return _numbers(value)[:, None]


class Sound(Input):
    """WAV files with 8 to 32-bit integer samples at one sample rate; channels are averaged."""

    name = "wav"
    dtype = np.float32
    suffixes = (".wav",)

    def read_file(self, content: bytes) -> NDArray[Any]:
        rate, samples = read_sound(content)
        expected = self.extra.setdefault("rate", rate)
        require(rate == expected, f"expected {expected} samples per second as in the first file, got {rate}")
        return samples

    def measure(self, rows: Sequence[NDArray[Any]]) -> Facts:
        count, total, square = 0, 0.0, 0.0
        for row in rows:
            part = np.asarray(row, np.float64)
            count, total, square = count + len(part), total + part.sum(), square + (part**2).sum()
        mean = total / max(count, 1)
        std = math.sqrt(max(square / max(count, 1) - mean**2, 0.0))
        return {"mean": float(mean), "std": float(std) or 1.0, "rate": self.extra["rate"]}

    def sequence(self, stored: NDArray[Any], facts: Facts) -> NDArray[Any]:
        values = np.asarray(stored[: self.max_length], np.float32)
        return ((values - np.float32(facts["mean"])) / np.float32(facts["std"]))[:, None]


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


class Picture(Input):
    """Image files, converted to gray, resized, and read row by row."""

    name = "image"
    dtype = np.uint8
    suffixes = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
    fixed_length = True

    @property
    def max_length(self) -> int:
        return self.config.image_size**2

    @property
    def picture(self) -> tuple[int, int]:
        return self.config.image_size, self.config.image_size

    def read_file(self, content: bytes) -> NDArray[Any]:
        check_installed("PIL", "a folder of images")
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(content)) as image:
                require(
                    max(image.size) <= MAX_SIDE,
                    f"an image of {image.size[0]} x {image.size[1]} pixels is too large",
                )
                return self.resize(np.asarray(image.convert("L"), np.uint8))
        except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"not an image: {error}") from None

    def resize(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The stored form of a gray image (height, width)."""
        from PIL import Image

        side = self.config.image_size
        if pixels.shape == (side, side):
            return pixels.reshape(-1)
        small = Image.fromarray(pixels).resize((side, side), Image.Resampling.BOX)
        return np.asarray(small, np.uint8).reshape(-1)

    def measure(self, rows: Sequence[NDArray[Any]]) -> Facts:
        count, total, square = 0, 0.0, 0.0
        for row in rows:
            part = np.asarray(row, np.float64) / 255
            count, total, square = count + len(part), total + part.sum(), square + (part**2).sum()
        mean = total / max(count, 1)
        std = math.sqrt(max(square / max(count, 1) - mean**2, 0.0))
        return {"mean": float(mean), "std": float(std) or 1.0}

    def sequence(self, stored: NDArray[Any], facts: Facts) -> NDArray[Any]:
        values = np.asarray(stored, np.float32) / 255
        return ((values - np.float32(facts["mean"])) / np.float32(facts["std"]))[:, None]


INPUTS: dict[str, type[Input]] = {
    "text": Text,
    "symbols": Symbols,
    "tokens": Tokens,
    "series": Series,
    "wav": Sound,
    "image": Picture,
}
"""Every kind of input by the name that settings use."""
