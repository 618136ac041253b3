"""What a study is: trials at one or more budgets, and a section of a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from seqboat.paper.studies.budget import RATES
from seqboat.paper.tables import Pictures, Record
from seqboat.paper.trial import Trial


class Cell(NamedTuple):
    """One run of a study."""

    study: Study
    trial: Trial
    seed: int
    budget: float

    @property
    def key(self) -> tuple[str, str, float, int]:
        """As that of its record."""
        return self.study.name, self.trial.name, self.budget, self.seed

    def folder(self, out: Path) -> Path:
        """Of all its seeds."""
        return out / "studies" / self.study.name / f"{self.trial.name}-{self.budget:g}s"

    def describe(self) -> str:
        """In a few words, for the terminal."""
        where = f", {self.trial.task_title}" if self.trial.task else ""
        return f"{self.trial.title}{where}, seed {self.seed}, {self.budget:g} s"


Show = Callable[["Study", Sequence[Record], Pictures], list[str]]
"""Tables and figures of a study as lines of a page: of all its records, of which there is at least one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A comparison of models at equal processor time."""

    name: str
    title: str
    about: str
    """what to look at; a sentence or two for the page"""
    trials: tuple[Trial, ...]
    """the most important ones first"""
    budget: float
    """seconds, by default"""
    multiples: tuple[float, ...] = (1.0,)
    """of the budget, each with a run of every trial"""
    rates: tuple[float, ...] = RATES
    """learning rates to choose from; none: each trial's own"""
    command: str
    """what to type, without the budget"""
    show: Show

    def cells(self, budget: float, seeds: int | None = None) -> list[Cell]:
        """Every run: first seeds of all trials first, then the other seeds.

        Args:
            budget: seconds.
            seeds: of every trial, instead of each trial's own number.
        """
        most = max(seeds or trial.seeds for trial in self.trials)
        return [
            Cell(self, trial, seed, budget * multiple)
            for seed in range(most)
            for trial in self.trials
            if seed < (seeds or trial.seeds)
            for multiple in self.multiples
        ]

    def describe(self, trial: Trial) -> Mapping[str, object]:
        """What records say about a trial."""
        return {
            "study": self.name,
            "trial": trial.name,
            "row": trial.row,
            "task": trial.task,
            **({} if trial.size is None else {"size": trial.size}),
        }
