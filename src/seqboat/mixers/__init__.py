"""Sequence layers behind one contract: one architecture, one file, one line in MIXERS.

A layer is made from the width of the tokens and a configuration, or settings by name: `Mega(64, chunk=32)`.
"""

from seqboat.layers.seqboat import SeqBoatConfig, SeqBoatFFNConfig
from seqboat.layers.variants import (
    SeqBoatChunkConfig,
    SeqBoatFullAlwaysConfig,
    SeqBoatFullConfig,
    SeqBoatFullGumbelConfig,
    SeqBoatFullS4DConfig,
    SeqBoatLocal32Config,
    SeqBoatLocalConfig,
    SeqBoatMem32Config,
    SeqBoatMoEConfig,
    SeqBoatSigmoidConfig,
    SeqBoatThenFFNConfig,
)
from seqboat.mixers.adaptive_span import AdaptiveSpanConfig
from seqboat.mixers.bigbird import BigBirdConfig
from seqboat.mixers.delta import GatedDeltaNetConfig
from seqboat.mixers.h3 import H3Config, H3HybridConfig
from seqboat.mixers.linformer import LinformerConfig
from seqboat.mixers.luna import LunaConfig
from seqboat.mixers.mamba2 import Mamba2Config
from seqboat.mixers.mega import MegaChunkConfig, MegaConfig
from seqboat.mixers.performer import PerformerConfig
from seqboat.mixers.reformer import ReformerConfig
from seqboat.mixers.samba import SambaConfig, SambaDeltaConfig
from seqboat.mixers.ssm import LiquidS4LayerConfig, S4DLayerConfig, S4LayerConfig, S5LayerConfig
from seqboat.mixers.transformer import TransformerConfig
from seqboat.mixers.transformer_xl import TransformerXLConfig

MIXERS = {
    "seqboat": SeqBoatConfig,
    "seqboat-gau-ffn": SeqBoatFFNConfig,
    "seqboat-ffn": SeqBoatThenFFNConfig,
    "seqboat-sigmoid": SeqBoatSigmoidConfig,
    "seqboat-moe": SeqBoatMoEConfig,
    "seqboat-local": SeqBoatLocalConfig,
    "seqboat-chunk": SeqBoatChunkConfig,
    "seqboat-mem32": SeqBoatMem32Config,
    "seqboat-local32": SeqBoatLocal32Config,
    "seqboat-full": SeqBoatFullConfig,
    "seqboat-full-always": SeqBoatFullAlwaysConfig,
    "seqboat-full-gumbel": SeqBoatFullGumbelConfig,
    "seqboat-full-s4d": SeqBoatFullS4DConfig,
    "transformer": TransformerConfig,
    "mega": MegaConfig,
    "mega-chunk": MegaChunkConfig,
    "s4d": S4DLayerConfig,
    "s4": S4LayerConfig,
    "s5": S5LayerConfig,
    "liquid-s4": LiquidS4LayerConfig,
    "h3": H3Config,
    "h3-hybrid": H3HybridConfig,
    "mamba2": Mamba2Config,
    "gated-deltanet": GatedDeltaNetConfig,
    "samba": SambaConfig,
    "samba-gdn": SambaDeltaConfig,
    "transformer-xl": TransformerXLConfig,
    "adaptive-span": AdaptiveSpanConfig,
    "linformer": LinformerConfig,
    "performer": PerformerConfig,
    "bigbird": BigBirdConfig,
    "luna": LunaConfig,
    "reformer": ReformerConfig,
}
"""Every mixer by the name that commands use: a configuration class with defaults for every field."""
