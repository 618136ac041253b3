"""What a row of a table is: a recipe per task, and where its settings come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from seqboat.models.backbone import MixerConfig
from seqboat.recipes.base import Recipe
from seqboat.training.config import RunConfig
from seqboat.training.optim import OptimizerConfig, ScheduleConfig


class Settings(NamedTuple):
    """What a row changes of a task's recipe: the model and how it is trained."""

    mixer: MixerConfig
    d_model: int
    num_layers: int
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    batch: int
    dropout: float = 0.0
    """on the inputs of the first layer"""
    accumulation: int = 1
    """micro-batches per step"""
    linear_head: bool = False
    """one linear layer with a bias behind the pooled tokens, unless two sequences are compared"""

    def apply(self, base: RunConfig) -> RunConfig:
        """The recipe with these settings, evaluated 100 times during training."""
        head = {"head_hidden": False, "head_bias": True} if self.linear_head else {}
        return base.replace(
            model={
                **head,
                "mixer": self.mixer,
                "d_model": self.d_model,
                "num_layers": self.num_layers,
                "dropout": self.dropout,
                "absolute_positions": None,
            },
            optimizer=self.optimizer,
            schedule=self.schedule,
            training={"batch_size": self.batch, "accumulation": self.accumulation},
            evaluation={"every": max(self.schedule.steps // 100, 1), "batch_size": min(self.batch, 64)},
        )


class Row(NamedTuple):
    """A row of table 1, 2 or 3."""

    title: str
    """as printed in the paper"""
    source: str
    """where its settings were found, and which of them are ours"""
    recipes: Mapping[str, Recipe]
    """by task"""


def make_row(title: str, source: str, bases: Mapping[str, Recipe], settings: Mapping[str, Settings]) -> Row:
    """A row from the recipes of its tasks, with SeqBoat, and what it changes of each."""
    recipes = {task: _recipe(title, task, bases[task], given) for task, given in settings.items()}
    return Row(title, source, recipes)


def _recipe(title: str, task: str, base: Recipe, settings: Settings) -> Recipe:
    def recipe() -> RunConfig:
        config = settings.apply(base())
        return config.replace(model={"mixer": settings.mixer})

    layers = f"{settings.num_layers} layer{'s' * (settings.num_layers > 1)}"
    recipe.__doc__ = (
        f"{title} on {task}: {layers} of width {settings.d_model}, {settings.schedule.steps:,} steps."
    )
    return recipe
