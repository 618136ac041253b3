"""What recipes share: another mixer, and what follows from it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from seqboat.models.backbone import MixerConfig
from seqboat.training.config import RunConfig
from seqboat.training.settings_io import from_dict

Recipe = Callable[[], RunConfig]
"""Takes no arguments: a variant is a function that changes the result of another."""

logger = logging.getLogger("seqboat.recipes")


def with_mixer(config: RunConfig, mixer: MixerConfig | str) -> RunConfig:
    """The same with another mixer; if only the new one's state grows with the text, segments are read one by one.

    Args:
        config: of a recipe.
        mixer: a configuration, or a name in MIXERS: it keeps the settings of the mixer before, and those that it has
            no place for are logged.
    """
    if isinstance(mixer, str):
        return from_dict({"model": {"mixer": mixer}}, config, logger.warning)
    changed = config.replace(model={"mixer": mixer})
    grows = changed.carries_growing_state() and not config.carries_growing_state()
    return changed.by_segments() if grows else changed
