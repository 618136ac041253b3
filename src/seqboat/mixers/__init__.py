"""Sequence layers behind one contract: one architecture, one file, one line in MIXERS."""

from seqboat.mixers.base import Mixer, MixerOutput, RecurrentMixer
from seqboat.mixers.seqboat import SeqBoat, SeqBoatConfig

MIXERS = {
    "seqboat": SeqBoatConfig,
}
"""Every mixer by the name that commands use: a configuration class with defaults for every field."""

__all__ = ["MIXERS", "Mixer", "MixerOutput", "RecurrentMixer", "SeqBoat", "SeqBoatConfig"]
