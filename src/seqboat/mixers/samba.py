"""Samba (Ren et al., 2024): recurrent layers and attention over a sliding window in turn, a static hybrid.

    recurrence, feed-forward, window attention, feed-forward, recurrence, ...

The recurrence compresses the whole past, the window recalls the recent tokens exactly. The published models use
Mamba; here it is Mamba-2, or Gated DeltaNet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from seqboat.core.checks import check_positive
from seqboat.core.mixer import Mixer
from seqboat.mixers.delta import GatedDeltaNetConfig
from seqboat.mixers.gated_block import GatedConfig
from seqboat.mixers.mamba2 import Mamba2Config
from seqboat.mixers.window import WindowAttentionConfig


@dataclass(frozen=True, kw_only=True)
class SambaConfig(Mamba2Config):
    """Samba: Mamba-2 layers and attention over a sliding window in turn, a feed-forward block after each.

    >>> from seqboat.mixers import SambaConfig
    >>> layer = SambaConfig().build(64)
    >>> layer.name, layer.causal
    ('Mamba2', True)
    """

    heads: int = 4
    """Attention heads, each of width d_model / heads."""
    window: int = 64
    """Tokens that a token sees in the attention layers, itself included."""
    ffn: bool = True
    """Whether a gated feed-forward block follows each layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("heads", self.heads)
        check_positive("window", self.window)

    def build_layers(self, d_model: int, num_layers: int) -> list[Mixer]:
        """The layers of a stack."""
        return _alternate(self, self.heads, self.window, d_model, num_layers)


@dataclass(frozen=True, kw_only=True)
class SambaDeltaConfig(GatedDeltaNetConfig):
    """Samba with Gated DeltaNet: its layers and attention over a sliding window in turn.

    >>> from seqboat.mixers import SambaDeltaConfig
    >>> layer = SambaDeltaConfig().build(64)
    >>> layer.name, layer.causal
    ('GatedDeltaNet', True)
    """

    window: int = 64
    """Tokens that a token sees in the attention layers, itself included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("window", self.window)

    def build_layers(self, d_model: int, num_layers: int) -> list[Mixer]:
        """The layers of a stack."""
        return _alternate(self, self.heads, self.window, d_model, num_layers)


def _alternate(config: Any, heads: int, window: int, d_model: int, num_layers: int) -> list[Mixer]:
    """Every second layer is attention, beginning with the second."""
    common = {
        name: getattr(config, name) for name in GatedConfig.__dataclass_fields__ if name != "directions"
    }
    attention = WindowAttentionConfig(heads=heads, window=window, **common)
    return [(attention if i % 2 else config).build(d_model) for i in range(num_layers)]
