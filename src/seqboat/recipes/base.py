"""What recipes share: the choice of a mixer, and what follows from it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from seqboat.mixers import MIXERS
from seqboat.mixers.carry import carry_over
from seqboat.models.backbone import MixerConfig
from seqboat.plugins import load_plugins
from seqboat.training.config import RunConfig
from seqboat.training.settings_io import unknown_message

Recipe = Callable[..., RunConfig]
MixerChoice = MixerConfig | str | None
"""The mixer of a recipe: a configuration, a name in MIXERS, or None for the recipe's own."""

logger = logging.getLogger("seqboat.recipes")


def choose(mixer: MixerChoice, own: MixerConfig) -> MixerConfig:
    """The mixer to use: a name keeps the settings of the recipe's own mixer and logs those it has no place for."""
    if mixer is None:
        return own
    if not isinstance(mixer, str):
        return mixer
    if mixer not in MIXERS:
        load_plugins()
    if mixer not in MIXERS:
        raise ValueError(unknown_message("mixer", mixer, MIXERS))
    carried = carry_over(own, mixer)
    if line := carried.report():
        logger.warning(line)
    chosen: MixerConfig = carried.mixer
    return chosen


def without_growth(config: RunConfig, mixer: MixerChoice) -> RunConfig:
    """The recipe with this choice of a mixer; if its state would grow with the text, segments are read one by one."""
    return config.by_segments() if mixer is not None and config.carries_growing_state() else config
