"""A task and a configuration small enough to train in a second, for tests of everything around training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.tasks import TASKS
from seqboat.tasks.listops import HEADER, Expression, format_line
from seqboat.tasks.task import Dataset, Example, Kind, Split, Task
from seqboat.training.config import EvaluationConfig, RunConfig, TrainingConfig
from seqboat.training.display import Display
from seqboat.training.optim import OptimizerConfig, ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """Is the first number odd? Or: what comes next?"""

    count: int = 45
    length: int = 12
    kind: Literal["classify", "match", "lm"] = "classify"
    real: bool = False
    bad: tuple[int, ...] = ()
    """records that raise"""
    nan_from: int | None = None
    """records from this number on hold NaN (real inputs only)"""
    slow: float = 0.0
    """seconds that reading a record takes"""

    def build(self) -> Toy:
        return Toy(self)


class ToyData(Dataset):
    def __init__(self, config: ToyConfig, split: Split) -> None:
        self.config, self.split = config, split

    def __len__(self) -> int:
        return self.config.count

    def __getitem__(self, index: int) -> Example:
        config = self.config
        if index in config.bad and self.split == "train":
            raise OSError("bad sector")
        if config.slow:
            time.sleep(config.slow)
        random = np.random.default_rng([index, ("train", "val", "test").index(self.split)])
        size = int(random.integers(3, config.length + 1))
        numbers = random.integers(0, 8, size)
        if config.kind == "lm":
            return Example(numbers, np.roll(numbers, -1))
        inputs: Any = numbers
        if config.real:
            inputs = numbers[:, None].astype(np.float32)
            if config.nan_from is not None and index >= config.nan_from and self.split == "train":
                inputs[0] = np.nan
        second = random.integers(0, 8, 5) if config.kind == "match" else None
        return Example(inputs, int(numbers[0] % 2), second)

    def lengths(self) -> np.ndarray[Any, Any]:
        whole = dataclasses.replace(self.config, bad=(), slow=0.0)
        data = ToyData(whole, self.split)
        return np.array([len(data[i].inputs) for i in range(len(self))], dtype=np.int64)


class Toy(Task):
    name = "toy"

    def __init__(self, config: ToyConfig) -> None:
        self.config = config
        self.kind: Kind = config.kind
        self.vocab = None if config.real else 8
        self.classes = 8 if config.kind == "lm" else 2
        self.max_length = config.length

    def dataset(self, split: Split) -> Dataset:
        self.check_split(split)
        return ToyData(self.config, split)


def register() -> None:
    """Make the task known to commands and configurations of this process."""
    TASKS["toy"] = ToyConfig


def small_run(task: Any = None, **changes: Any) -> RunConfig:
    """A run of 24 steps with accumulation, dropout and short last batches."""
    task = task or ToyConfig()
    lm = getattr(task, "kind", "lm") == "lm"
    config = RunConfig(
        task=task,
        model=BackboneConfig(
            mixer=SeqBoatConfig(
                init="paper",
                gau=GAUConfig(d_z=4, d_v=8, window=4, max_positions=16),
                causal=lm,
                dropout=0.1,
            ),
            d_model=8,
            num_layers=2,
            dropout=0.1,
        ),
        optimizer=OptimizerConfig(lr=0.01),
        schedule=ScheduleConfig(steps=24, warmup_steps=4),
        training=TrainingConfig(batch_size=8, accumulation=2, bucketing=True, log_every=1, save_every=4),
        evaluation=EvaluationConfig(every=12, batch_size=16),
    )
    return config.replace(**changes)


def without_dropout(config: RunConfig) -> RunConfig:
    """The same run without noise, so that it does not depend on how rows are shared among processes."""
    mixer: Any = config.model.mixer
    return config.replace(
        model={"dropout": 0.0, "mixer": dataclasses.replace(mixer, dropout=0.0)},
    )


class Spy(Display):
    """Keeps what a display is told."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def log(self, record: Any) -> None:
        self.records.append(dict(record))

    def scored(self, record: Any, better: bool) -> None:
        self.scores.append({**record, "better": better})

    def tell(self, message: str) -> None:
        self.messages.append(message)

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records]


def same_tensors(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def numbers_of(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what depends on the machine."""
    skip = ("tokens_per_s", "memory_mb", "step_memory_mb", "seconds", "elapsed", "processor")
    return [{k: v for k, v in record.items() if k not in skip} for record in records]


def write_listops(path: Path, expressions: Iterable[Expression]) -> None:
    """A table in the published format (basic_train.tsv and so on)."""
    lines = [HEADER, *map(format_line, expressions)]
    path.write_text("".join(line + "\n" for line in lines), encoding="ascii", newline="\n")
