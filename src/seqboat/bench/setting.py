"""What a layer is measured with: its sizes, its batch, and the sweep over several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from seqboat.checks import require
from seqboat.ops.functions import AttentionName
from seqboat.ops.positions import PositionsName

Mode = Literal["training", "inference"]
MODES: tuple[Mode, ...] = ("training", "inference")


@dataclass(frozen=True, kw_only=True)
class LayerSetting:
    """A layer and its batch; the defaults are the paper's Text setting with half of the tokens active."""

    batch: int = 4
    """Sequences."""
    length: int = 4096
    """Tokens per sequence."""
    d_model: int = 128
    """Width."""
    d_z: int = 64
    """Width of queries and keys of gated attention."""
    d_v: int = 256
    """Width of its values."""
    d_state: int = 16
    """States per channel of state-space layers."""
    window: int = 256
    """Working memory."""
    heads: int = 4
    """Heads of multi-head attention."""
    attention: AttentionName = "softmax"
    """Attention function of gated attention."""
    positions: PositionsName = "compressed"
    """Positions of our attention unit."""
    causal: bool = False
    """One direction or both."""
    prenorm: bool = False
    """Whether norms come first."""
    rate: float | None = 0.5
    """Fraction of the tokens that routers activate; None for what they decide themselves."""
    dtype: str = "float32"
    """Type of weights and inputs."""
    device: str = "cpu"
    """Where to run."""
    seed: int = 0
    """Seed of weights and inputs."""

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
        """Tokens of the batch."""
        return self.batch * self.length

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def where(self) -> str:
        """Its batch, for messages."""
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
    """Settings of every length, window and rate; the batch shrinks so that the number of tokens stays.

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
