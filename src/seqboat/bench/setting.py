"""The setting of a measurement: sizes of the layer, batch, and sweeps over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from seqboat.core.checks import require
from seqboat.ops.functions import AttentionName
from seqboat.ops.positions import PositionsName

Mode = Literal["training", "inference"]
MODES: tuple[Mode, ...] = ("training", "inference")


@dataclass(frozen=True, kw_only=True)
class LayerSetting:
    """Sizes of a layer and its batch; the defaults are the paper's Text task with half of the tokens active."""

    batch: int = 4
    """Sequences per batch."""
    length: int = 4096
    """Tokens per sequence."""
    d_model: int = 128
    """Width of the layer."""
    d_z: int = 64
    """Width of queries and keys in gated attention."""
    d_v: int = 256
    """Width of values in gated attention."""
    d_state: int = 16
    """States per channel in state-space layers."""
    window: int = 256
    """Size of the working memory in tokens."""
    heads: int = 4
    """Heads in multi-head attention."""
    attention: AttentionName = "softmax"
    """Attention function of gated attention."""
    positions: PositionsName = "compressed"
    """Position scheme of gated attention."""
    causal: bool = False
    """Whether the layer is causal or bidirectional."""
    prenorm: bool = False
    """Whether layers are pre-norm."""
    rate: float | None = 0.5
    """Activation rate to force; None for the routers' decisions."""
    dtype: str = "float32"
    """Dtype of weights and inputs."""
    device: str = "cpu"
    """Device to run on."""
    seed: int = 0
    """Random seed of weights and inputs."""

    def __post_init__(self) -> None:
        for name in ("batch", "length", "d_model", "d_z", "d_v", "d_state", "window", "heads"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.rate is None or 0 <= self.rate <= 1, f"rate must be between 0 and 1, got {self.rate}")
        require(
            isinstance(getattr(torch, self.dtype, None), torch.dtype),
            f"dtype must be a torch type such as float32, got {self.dtype!r}",
        )

    @property
    def tokens(self) -> int:
        """Tokens in the batch."""
        return self.batch * self.length

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a torch object."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def where(self) -> str:
        """Description of the batch, for messages."""
        return f"{self.batch} x {self.length} tokens"


PRESETS = {
    "text": LayerSetting(),
    "enwik8": LayerSetting(
        batch=1, length=8192, d_model=616, d_z=128, d_v=1232, window=1024, heads=11,
        positions="rotary", causal=True, prenorm=True,
    ),
}  # fmt: skip
"""Layers of the paper: LRA's Text, and the language model of enwik8."""


def sweep(
    preset: LayerSetting,
    lengths: Sequence[int],
    windows: Sequence[int],
    rates: Sequence[float | None],
    tokens: int | None,
) -> list[LayerSetting]:
    """Settings for every length, window and rate; the batch size changes to keep the number of tokens.

    >>> [(s.batch, s.length) for s in sweep(LayerSetting(), [1024, 16384], [256], [0.5], 16384)]
    [(16, 1024), (1, 16384)]
    """
    return [
        replace(
            preset,
            length=length,
            batch=max(1, tokens // length) if tokens is not None else preset.batch,
            window=window,
            rate=rate,
        )
        for length in lengths
        for window in windows
        for rate in rates
    ]
