"""How runs are carried out: what may differ from machine to machine without changing the experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from seqboat.core.checks import check_positive, require
from seqboat.training.config import RunConfig, override, split_arguments
from seqboat.training.config.fields import FREE_TO_CHANGE, TrainingConfig
from seqboat.training.plan import estimate

EXPERIMENT = ("batch_size", "bucketing", "carry_state", "carry_segments")
"""Fields of training that belong to the experiment."""
KEPT = tuple(
    field.name
    for field in dataclasses.fields(TrainingConfig)
    if field.name not in EXPERIMENT and f"training.{field.name}" not in FREE_TO_CHANGE
)
"""Fields that a run keeps from its first step on, such as its precision."""
DATA_FOLDER = ("data.data_dir", "task.data_dir")
"""Both names of the setting."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Device, precision, micro-batches and the like of all runs of a command.

    >>> from seqboat.recipes import find_recipe
    >>> Machine(settings=("--training.precision=bf16",)).configure(find_recipe("recall")()).training.precision
    'bf16'
    """

    settings: tuple[str, ...] = ()
    """fields of training, and the data folder, as `seqboat train` takes them"""
    processes: int = 1
    """processes that work on a run, each with its device"""
    memory: float | None = None
    """bytes of a device, for micro-batches that fit; None leaves them as they are"""

    def __post_init__(self) -> None:
        check_positive("processes", self.processes)
        for name, _ in split_arguments(self.settings):
            part, _, field = name.partition(".")
            require(
                (part == "training" and field not in EXPERIMENT) or name in DATA_FOLDER,
                f"only how runs are carried out can be changed (--training.FIELD), got --{name}: "
                "another experiment is a run of `seqboat train`",
            )

    def configure(self, config: RunConfig, before: RunConfig | None = None) -> RunConfig:
        """The configuration of a run on this machine.

        Args:
            config: of the experiment.
            before: of the run so far, if it has begun: it keeps its precision and the like unless they are given.
        """
        if before is not None:
            config = config.replace(training={name: getattr(before.training, name) for name in KEPT})
        config = apply_settings(config, self.settings)
        if before is None and self.memory is not None:
            accumulation = fitting(config, self.processes, self.memory)
            config = config.replace(training={"accumulation": accumulation})
        return config


def apply_settings(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """A configuration with the settings of a machine; tasks that generate their examples need no data folder.

    >>> from seqboat.recipes import find_recipe
    >>> settings = ("--data.data_dir", "elsewhere", "--training.workers=2")
    >>> apply_settings(find_recipe("recall")(), settings).training.workers
    2
    """
    if not hasattr(config.task, "data_dir"):
        kept = [(name, words) for name, words in split_arguments(settings) if name not in DATA_FOLDER]
        settings = [word for name, words in kept for word in (f"--{name}", *words)]
    return override(config, settings)


@cache
def fitting(config: RunConfig, processes: int, memory: float) -> int:
    """Micro-batches per step and process with which a run fits in the memory of each device."""
    count = estimate(config, processes=processes, memory=memory).micro_batches
    batch = config.training.batch_size
    if config.training.carry_state:  # sequences continue from batch to batch: all micro-batches are equal
        while batch % (processes * count):
            count += 1
    return min(count, batch // processes)
