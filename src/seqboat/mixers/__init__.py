"""Sequence layers behind one contract: one architecture, one file, one line in MIXERS."""

from seqboat.mixers.base import Mixer, MixerOutput, RecurrentMixer
from seqboat.mixers.mega import Mega, MegaChunkConfig, MegaConfig
from seqboat.mixers.s4d import S4DLayerConfig
from seqboat.mixers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.mixers.transformer import Transformer, TransformerConfig

MIXERS = {
    "seqboat": SeqBoatConfig,
    "transformer": TransformerConfig,
    "mega": MegaConfig,
    "mega-chunk": MegaChunkConfig,
    "s4d": S4DLayerConfig,
}
"""Every mixer by the name that commands use: a configuration class with defaults for every field."""

__all__ = [
    "MIXERS",
    "Mega",
    "MegaChunkConfig",
    "MegaConfig",
    "Mixer",
    "MixerOutput",
    "RecurrentMixer",
    "S4DLayerConfig",
    "SeqBoat",
    "SeqBoatConfig",
    "Transformer",
    "TransformerConfig",
]
