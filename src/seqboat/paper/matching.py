"""Equal parameter counts: the width of a mixer at which a model is as large as another one.

A mixer with a feed-forward block gets another hidden width (`d_ff`), so that width and depth of the model stay as
they are. Where it has none, or where even the narrowest is too large, the width of the model changes first.
Tables with an entry per position end with the longest sequence of the task, and learned projections along time
(`projected`) are halved until the rest has room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from seqboat.core.checks import check_positive
from seqboat.models.backbone import MixerConfig
from seqboat.models.cost import count_parameters
from seqboat.training.config import RunConfig, change_field

Count = Callable[[Any, int], int]
"""How many parameters something with this mixer and this width has."""
TABLES = ("max_positions", "max_span")
"""Fields of mixers that hold the number of positions with a separate entry."""


@dataclass(frozen=True)
class Match:
    """A mixer and the width of its model, and how near its size comes."""

    mixer: MixerConfig
    """The mixer, with what was changed of it."""
    d_model: int
    """The width of the model."""
    changes: dict[str, int]
    """Fields that were changed, d_model among them, by their dotted names, and their new values."""
    parameters: int
    """How many parameters there are."""
    target: int
    """How many there should be."""

    def report(self) -> str:
        """Both counts in a line."""
        error = (self.parameters - self.target) / self.target
        fields = ", ".join(f"{name} = {value}" for name, value in self.changes.items())
        return f"{self.parameters:,} parameters with {fields}; {self.target:,} to match ({error:+.2%})"


def too_long(config: Any, length: int, names: Collection[str] = TABLES) -> list[str]:
    """Dotted names of the fields with these names, in all parts of a configuration, that exceed a length.

    >>> from seqboat import GAUConfig, SeqBoatConfig
    >>> too_long(SeqBoatConfig(gau=GAUConfig(max_positions=4096)), 512)
    ['gau.max_positions']
    """
    found = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in names and value > length:
            found.append(field.name)
        elif is_dataclass(value):
            found += [f"{field.name}.{name}" for name in too_long(value, length, names)]
    return found


def _changed(config: Any, changes: Mapping[str, int]) -> Any:
    """A configuration with other values of some fields, by their dotted names."""
    for path, value in changes.items():
        config = change_field(config, path, value, "--match-parameters")
    return config


def count_of_run(config: RunConfig) -> int:
    """The number of parameters of a run's model. Two layers tell, where all of them are as large."""
    task = config.build_task()
    if hasattr(config.model.mixer, "build_layers"):  # the layers differ
        return count_parameters(config.build_model(task))
    sizes = [
        count_parameters(config.replace(model={"num_layers": layers}).build_model(task)) for layers in (1, 2)
    ]
    return sizes[0] + (config.model.num_layers - 1) * (sizes[1] - sizes[0])


def match_parameters(config: RunConfig, reference: RunConfig) -> tuple[RunConfig, Match]:
    """Change the width of a run's model so that it has as many parameters as another one.

    Args:
        config: of the run, with any mixer.
        reference: usually the recipe as it is, with SeqBoat.

    Returns:
        The configuration with the new width, and what was found.
    """

    def count(mixer: MixerConfig, d_model: int) -> int:
        return count_of_run(config.replace(model={"mixer": mixer, "d_model": d_model}))

    task = config.build_task()
    mixer: Any = config.model.mixer
    changes = {}
    if task.kind != "lm":  # a text continues where an example ends
        changes = dict.fromkeys(too_long(mixer, task.max_length), task.max_length)
    found = _match(mixer, config.model.d_model, count_of_run(reference), count, changes)
    return config.replace(model={"mixer": found.mixer, "d_model": found.d_model}), found


def match_layer(mixer: MixerConfig, d_model: int, target: int) -> Match:
    """Change the width of a layer so that it has about `target` parameters."""
    check_positive("target", target)
    return _match(mixer, d_model, target, lambda config, width: count_parameters(config.build(width)), {})


def _match(mixer: Any, d_model: int, target: int, count: Count, changes: dict[str, int]) -> Match:
    mixer = _changed(mixer, changes)
    has_ffn = _has_ffn(mixer, d_model, count)
    found = _match_ffn(mixer, d_model, target, count, changes) if has_ffn else None
    while has_ffn and found is None and getattr(mixer, "projected", 1) > 1:
        changes = {**changes, "projected": mixer.projected // 2}
        mixer = _changed(mixer, changes)
        found = _match_ffn(mixer, d_model, target, count, changes)
    if found is not None:
        return found
    step = _step(mixer, d_model, count)
    width, size = _nearest(lambda multiple: count(mixer, multiple * step), target)
    changes = {"d_model": width * step, **changes}
    found = _match_ffn(mixer, width * step, target, count, changes) if has_ffn else None
    return found or Match(mixer, width * step, changes, size, target)


def _has_ffn(mixer: Any, d_model: int, count: Count) -> bool:
    """Whether there is a feed-forward block: its hidden width makes a difference."""
    if "d_ff" not in {field.name for field in fields(mixer)}:
        return False
    return count(replace(mixer, d_ff=1), d_model) != count(replace(mixer, d_ff=2), d_model)


def _match_ffn(mixer: Any, d_model: int, target: int, count: Count, changes: dict[str, int]) -> Match | None:
    """The nearest width of the feed-forward block, unless all else is already too large."""
    first, second = (count(replace(mixer, d_ff=width), d_model) for width in (1, 2))
    if first > target:
        return None
    width = 1 + round((target - first) / (second - first))  # every hidden unit has as many weights
    size = first + (width - 1) * (second - first)
    return Match(replace(mixer, d_ff=width), d_model, {"d_ff": width, **changes}, size, target)


def _step(mixer: Any, d_model: int, count: Count) -> int:
    """The smallest step of widths that the mixer takes, by trying: heads must divide the width, for one."""
    step = getattr(mixer, "heads", 1)
    while step <= d_model:
        try:
            for multiple in (1, 3):
                count(mixer, multiple * step)
        except ValueError:
            step *= 2
        else:
            return int(step)
    raise ValueError(f"no width up to {d_model} suits {type(mixer).__name__}")


def _nearest(count: Callable[[int], int], target: int) -> tuple[int, int]:
    """The value at which a growing count is nearest to a target, and the count there."""
    low = high = 1
    while count(high) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < target else (low, middle)
    sizes = {value: count(value) for value in (low, high)}
    best = min(sizes, key=lambda value: abs(sizes[value] - target))
    return best, sizes[best]
