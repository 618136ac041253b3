"""Speech: which of ten words is said? One second of raw sound, 16,000 samples, section 4.2 of the paper.

    sample    0 ...   2000        4000        6000   ... 15999
              ______ /\\/\\/\\/\\/\\_______ /\\/\\/\\____________         -> 3 ("down")

Speech Commands (Warden, 2018) in the subset SC10: ten words, only clips of exactly 16,000 samples. The published
results use a random 70/15/15 split, in which a speaker can be in several parts; the data set's own split is by
speaker. Both are available.
"""

from __future__ import annotations

import hashlib
import io
import struct
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from seqboat.core.checks import check_choice, check_positive, require
from seqboat.data.download import RemoteFile
from seqboat.data.fairseq import read_samples, samples_folder
from seqboat.data.sources import Source, read_file
from seqboat.data.store import ArrayStore, ArrayWriter, Prepared, Skips, Staging
from seqboat.tasks.image import load_npy
from seqboat.tasks.stored import DatasetInfo, StoredTask, StoredTaskConfig
from seqboat.tasks.task import SPLITS, Dataset, Example, Split, Subset

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
RATE = 16_000
SAMPLES = 16_000
FULL_SCALE = 32_768
"""Full scale of the stored 16-bit samples."""
GRID_CLIPS = 16
"""Processed clips that the scale of their samples is found from."""


@dataclass(frozen=True, kw_only=True)
class SpeechTaskConfig(StoredTaskConfig):
    """Ten spoken words, raw samples."""

    pool: int = 1
    """Average this many samples into one token; 8 gives sequences of 2,000 tokens."""
    parts: Literal["random", "speaker"] = "random"
    """Split the clips at random, 70/15/15 within each word, as published; or by speaker, as the data set does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("pool", self.pool)
        check_choice("parts", self.parts, ("random", "speaker"))
        require(SAMPLES % self.pool == 0, f"pool must divide {SAMPLES}, got {self.pool}")

    def build(self) -> SpeechTask:
        return SpeechTask(self)

    @classmethod
    def datasets(cls) -> Mapping[str, DatasetInfo]:
        return DATASETS


class ClipDataset(Dataset):
    """Clips of one second."""

    def __init__(self, store: ArrayStore, pool: int) -> None:
        self.store = store
        self.pool = pool
        self.mean = float(store.manifest["extra"]["mean"])
        self.std = float(store.manifest["extra"]["std"])

    def __len__(self) -> int:
        return len(self.store["labels"])

    def __getitem__(self, index: int) -> Example:
        return Example(self.to_sequence(self.store["clips"][index]), int(self.store["labels"][index]))

    def to_sequence(self, clip: NDArray[np.int16]) -> NDArray[np.float32]:
        """(tokens, 1): a clip (samples,), averaged and normalized."""
        samples = clip.astype(np.float32) / FULL_SCALE
        samples = samples.reshape(-1, self.pool).mean(axis=1, keepdims=True)
        return (samples - self.mean) / self.std

    def lengths(self) -> NDArray[np.int64]:
        return np.full(len(self), SAMPLES // self.pool, dtype=np.int64)


class SpeechTask(StoredTask):
    """Ten spoken words."""

    name = "speech"
    kind = "classify"
    vocab = None
    classes = len(WORDS)
    labels = WORDS
    fixed_length = True

    def __init__(self, config: SpeechTaskConfig | None = None) -> None:
        self.settings = config or SpeechTaskConfig()
        super().__init__(self.settings)
        self.max_length = SAMPLES // self.settings.pool

    def whole(self, split: Split) -> Dataset:
        clips = ClipDataset(self.store, self.settings.pool)
        given = self.store.manifest["extra"].get("split") == "published"
        require(
            not given or self.settings.parts == "random",
            f"{self.store.folder} holds processed clips without the names of their speakers: use parts 'random'",
        )
        if given or self.settings.parts == "speaker":
            parts = np.asarray(self.store["parts"])
        else:
            parts = random_parts(np.asarray(self.store["labels"]))
        return Subset(clips, np.flatnonzero(parts == SPLITS.index(split)))

    def read_wav(self, content: bytes) -> NDArray[Any]:
        clip = read_wav(content)
        require(len(clip) <= SAMPLES, f"a clip must have at most {SAMPLES} samples, got {len(clip)}")
        return ClipDataset(self.store, self.settings.pool).to_sequence(np.pad(clip, (0, SAMPLES - len(clip))))

    def show(self, example: Example) -> str:
        assert not isinstance(example.target, np.ndarray)
        return f"{example.inputs.shape[0]} samples\n-> {example.target} ({WORDS[example.target]})"


def random_parts(labels: NDArray[Any]) -> NDArray[np.uint8]:
    """The split of each clip (0 train, 1 val, 2 test): random, 70/15/15 within each class."""
    random = np.random.default_rng(0)
    parts = np.zeros(len(labels), np.uint8)
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        held = round(0.15 * len(rows))
        parts[rows[:held]] = 1
        parts[rows[held : 2 * held]] = 2
    return parts


def speaker_part(speaker: str) -> int:
    """The split of a speaker according to the authors of the data set: 10 % val, 10 % test, by a hash of the name."""
    most = 2**27 - 1
    percent = int(hashlib.sha1(speaker.encode()).hexdigest(), 16) % (most + 1) * (100.0 / most)
    return 1 if percent < 10 else 2 if percent < 20 else 0


def prepare(source: Source, staging: Staging, skips: Skips) -> Prepared:
    """Read `speech_commands_v0.02` (a folder or its tar archive) or the compact clips with their index."""
    processed = samples_folder(source.path) if source.kind() == "folder" else None
    if processed is not None:
        require(
            source.unpickle,
            f"{processed} holds pickles of tensors: name --unpickle to have them read; nothing in them is run",
        )
        return _prepare_processed(processed, staging, skips)
    if source.kind() == "folder" and (source.path / "index.tsv").exists():
        labels, parts, other = _read_compact(source.path, staging.array("clips", np.int16, (SAMPLES,)), skips)
    else:
        labels, parts, other = _read_wavs(source, staging, skips)
    require(
        len(labels) > 0, f"{source} contains no clips: expected folders {', '.join(WORDS)} with .wav files"
    )
    staging.put("labels", np.array(labels, np.uint8))
    staging.put("parts", np.array(parts, np.uint8))
    staging.writers["clips"].file.flush()
    mean, std = _moments(staging.writers["clips"], np.array(parts) == 0)
    counts: dict[str, int] = {split: parts.count(i) for i, split in enumerate(SPLITS)}
    return Prepared(counts, {"mean": mean, "std": std, "other_lengths": other})


def _moments(clips: ArrayWriter, rows: NDArray[np.bool_]) -> tuple[float, float]:
    """Mean and std of the chosen clips, as fractions of full scale."""
    samples = np.memmap(clips.path, clips.dtype, "r", offset=clips.begin, shape=(clips.rows, *clips.row))
    total = squares = 0.0
    numbers = np.flatnonzero(rows) if rows.any() else np.arange(clips.rows)
    for start in range(0, len(numbers), 256):
        part = samples[numbers[start : start + 256]].astype(np.float64) / FULL_SCALE
        total += float(part.sum())
        squares += float((part**2).sum())
    count = len(numbers) * SAMPLES
    mean = total / count
    return mean, max((squares / count - mean**2) ** 0.5, 1e-8)


def _read_wavs(source: Source, staging: Staging, skips: Skips) -> tuple[list[int], list[int], int]:
    unsorted = staging.scratch("unsorted", np.int16, (SAMPLES,))
    names: list[tuple[str, str]] = []
    other = 0
    for member in source.members(lambda name: name.endswith(".wav")):
        if len(member.parts) < 2 or member.parts[-2] not in WORDS:
            continue
        try:
            samples = read_wav(member.read())
        except ValueError as error:
            skips.add(source.label, member.name, str(error))
            continue
        if len(samples) == SAMPLES:
            unsorted.append(samples[None])
            names.append((member.parts[-2], member.base))
        else:
            other += 1
    unsorted.close()
    # sorted, because archives list files in any order: every form of the data gives the same arrays
    order = sorted(range(len(names)), key=lambda i: names[i])
    clips = staging.array("clips", np.int16, (SAMPLES,))
    rows = np.load(unsorted.path, mmap_mode="r")
    for i in order:
        clips.append(rows[i : i + 1])
    labels = [WORDS.index(names[i][0]) for i in order]
    parts = [speaker_part(names[i][1].partition("_nohash_")[0]) for i in order]
    return labels, parts, other


def read_wav(content: bytes) -> NDArray[np.int16]:
    """The samples of a 16 kHz, 16 bit, one-channel WAV file.

    Raises:
        ValueError: if it has another format.
    """
    try:
        with wave.open(io.BytesIO(content)) as clip:
            channels, width, rate, count = clip.getparams()[:4]
            require(channels == 1, f"expected one channel, got {channels}")
            require(width == 2, f"expected 16 bit samples, got {8 * width}")
            require(rate == RATE, f"expected {RATE} samples per second, got {rate}")
            require(count > 0, "no samples")
            data = clip.readframes(count)
    except (wave.Error, EOFError, RuntimeError, OverflowError, struct.error) as error:
        # a chunk of wrong size raises a RuntimeError without a message
        raise ValueError(f"not a WAV file: {str(error) or 'truncated, or a chunk of a wrong size'}") from None
    require(len(data) == 2 * count, f"truncated: {len(data) // 2} of {count} samples")
    return np.frombuffer(data, "<i2")


def _is_number(field: str) -> bool:
    return field.isascii() and field.isdigit() and len(field) < 10


def _read_compact(folder: Path, clips: ArrayWriter, skips: Skips) -> tuple[list[int], list[int], int]:
    """Clips as `[2, n, 16000]` bytes: high and low byte of the zigzag-coded difference of adjacent samples."""
    index = read_file(folder / "index.tsv").decode("utf-8", errors="replace").splitlines() or [""]
    want = ["row", "split", "label", "word"]
    require(index[0].split("\t")[:4] == want, f"{folder / 'index.tsv'}: first line must begin with {want}")
    by_split: dict[str, dict[int, tuple[int, int]]] = {split: {} for split in SPLITS}
    for number, line in enumerate(index[1:], start=2):
        row, split, label = [*line.split("\t"), "", "", ""][:3]
        if split not in by_split or not _is_number(row) or not _is_number(label) or int(label) >= len(WORDS):
            skips.add("index.tsv", f"line {number}", f"no such row, split or label: {line[:80]!r}")
        else:
            by_split[split][int(row)] = (number, int(label))
    labels, parts = [], []
    for i, split in enumerate(SPLITS):
        found = sorted(folder.glob(f"{split}.npy*"))
        require(len(found) > 0, f"{folder} has no {split}.npy.xz")
        planes = load_npy(found[0])
        require(
            planes.dtype == np.uint8 and planes.ndim == 3 and planes.shape[::2] == (2, SAMPLES),
            f"{found[0]} must hold uint8 of shape (2, clips, {SAMPLES}), got {planes.dtype} of {planes.shape}",
        )
        rows = sorted(by_split[split])
        require(not rows or rows[-1] < planes.shape[1], f"{found[0]} has fewer clips than index.tsv says")
        for start in range(0, len(rows), 256):
            some = rows[start : start + 256]
            coded = planes[0, some].astype(np.int32) << 8 | planes[1, some]
            steps = (coded >> 1) ^ -(coded & 1)
            clips.append(np.cumsum(steps, axis=1).astype(np.int16))
        labels += [by_split[split][row][1] for row in rows]
        parts += [i] * len(rows)
    return labels, parts, 0


def _prepare_processed(folder: Path, staging: Staging, skips: Skips) -> Prepared:
    """Read normalized clips, one file of tensors per split, back into 16-bit samples.

    All values are step * sample + base; the manifest keeps what turns samples into the same values again.
    """
    clips = staging.array("clips", np.int16, (SAMPLES,))
    labels: list[int] = []
    parts: list[int] = []
    grid: tuple[float, float] | None = None
    for number, split in enumerate(SPLITS):
        values, classes = read_samples(folder, split, SAMPLES)
        grid = grid or find_grid(np.asarray(values[:GRID_CLIPS], np.float64))
        for row, label in enumerate(classes.tolist()):
            if not 0 <= label < len(WORDS):
                skips.add(
                    f"{split}_y.pt", f"clip {row}", f"label must be from 0 to {len(WORDS) - 1}, got {label}"
                )
                continue
            samples = None if grid is None else to_grid(np.asarray(values[row], np.float64), *grid)
            require(
                samples is not None, f"{folder / f'{split}_X.pt'}, clip {row}: these are not 16-bit samples"
            )
            assert samples is not None
            clips.append(samples[None])
            labels.append(label)
            parts.append(number)
    require(grid is not None and len(labels) > 0, f"{folder} contains no clips")
    assert grid is not None
    step, base = grid
    staging.put("labels", np.array(labels, np.uint8))
    staging.put("parts", np.array(parts, np.uint8))
    std = 1 / (FULL_SCALE * step)
    extra = {"mean": -base * std, "std": std, "other_lengths": 0, "split": "published"}
    return Prepared({split: parts.count(i) for i, split in enumerate(SPLITS)}, extra)


def find_grid(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Step and base of values that were 16-bit numbers before they were scaled and shifted, if they were."""
    levels = np.unique(values)
    if len(levels) < 3 or not np.isfinite(levels).all():
        return None
    base, step = float(levels[np.abs(levels).argmin()]), float(np.diff(levels).min())
    # a first guess from the smallest gap, made exact by looking at more and more distant values
    for reach in (16, 256, 4096, 2 * FULL_SCALE):
        near = levels[np.abs(levels - base) <= reach * step] - base
        numbers = np.round(near / step)
        if not numbers.any():
            return None
        step = float((numbers @ near) / (numbers @ numbers))
    return (step, base) if to_grid(levels, step, base) is not None else None


def to_grid(values: NDArray[np.float64], step: float, base: float) -> NDArray[np.int16] | None:
    """The 16-bit numbers that values were made of, if they were."""
    numbers = (values - base) / step
    found = np.round(numbers)
    if not (np.abs(numbers - found) < 0.2).all() or np.abs(found).max() >= FULL_SCALE:
        return None
    return found.astype(np.int16)


DATASETS = {
    "speech": DatasetInfo(
        task=SpeechTaskConfig(),
        title="Speech Commands: one second of one of ten words, 16,000 samples (Warden, 2018)",
        license="CC BY 4.0",
        size=1_120_000_000,
        get="speech_commands_v0.02.tar.gz from https://download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
        folders=("speech_commands_v0.02", "speech_commands_sc10", "speech_commands", "processed_data"),
        remote=RemoteFile(
            name="speech_commands_v0.02.tar.gz",
            urls=(
                "https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
                "https://download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
            ),
            bytes=2_428_923_189,
            digest="sha256:af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
        ),
        read=prepare,
    ),
}
"""Data sets of this task, by the names of their prepared folders."""
