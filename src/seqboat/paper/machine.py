"""How runs are carried out: what may differ from machine to machine without changing the experiment."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from seqboat.checks import check_positive, require
from seqboat.training.config import RunConfig, override, split_arguments
from seqboat.training.config.fields import FREE_TO_CHANGE, TrainingConfig

EXPERIMENT = ("batch_size", "bucketing", "carry_state")
"""Fields of training that belong to the experiment."""
KEPT = tuple(
    field.name
    for field in dataclasses.fields(TrainingConfig)
    if field.name not in EXPERIMENT and f"training.{field.name}" not in FREE_TO_CHANGE
)
"""Fields that a run keeps from its first step on, such as its precision."""


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

    def __post_init__(self) -> None:
        check_positive("processes", self.processes)
        for name, _ in split_arguments(self.settings):
            part, _, field = name.partition(".")
            require(
                (part == "training" and field not in EXPERIMENT)
                or name in ("data.data_dir", "task.data_dir"),
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
        return override(config, self.settings)
