"""Sequence layers behind one contract: one architecture, one file, one line in MIXERS."""

from seqboat.mixers.adaptive_span import AdaptiveSpan, AdaptiveSpanConfig
from seqboat.mixers.base import Mixer, MixerOutput, RecurrentMixer
from seqboat.mixers.linformer import Linformer, LinformerConfig
from seqboat.mixers.mega import Mega, MegaChunkConfig, MegaConfig
from seqboat.mixers.s4d import S4DLayerConfig
from seqboat.mixers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.mixers.transformer import Transformer, TransformerConfig
from seqboat.mixers.transformer_xl import TransformerXL, TransformerXLConfig

MIXERS = {
    "seqboat": SeqBoatConfig,
    "transformer": TransformerConfig,
    "mega": MegaConfig,
    "mega-chunk": MegaChunkConfig,
    "s4d": S4DLayerConfig,
    "transformer-xl": TransformerXLConfig,
    "adaptive-span": AdaptiveSpanConfig,
    "linformer": LinformerConfig,
}
"""Every mixer by the name that commands use: a configuration class with defaults for every field."""

__all__ = [
    "MIXERS",
    "AdaptiveSpan",
    "AdaptiveSpanConfig",
    "Linformer",
    "LinformerConfig",
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
    "TransformerXL",
    "TransformerXLConfig",
]
