"""Gated DeltaNet (Yang et al., 2025): a memory of values under keys, which forgets and overwrites.

    S_t = g_t S_{t-1} + b_t k_t^T (v_t - g_t k_t S_{t-1}),   y_t = q_t S_t / sqrt(d_key)

Keys and queries have unit length. Before a value is written, what the memory holds under its key is removed: entirely
if b = 1. The gate g forgets everything at once, as in Mamba-2. Sequences are computed in blocks of matrix products
(`ops.matrix_state`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.core.checks import check_positive
from seqboat.core.layout import clear
from seqboat.core.nn import RMSNorm
from seqboat.core.settings import fill_in
from seqboat.mixers.gated import MatrixStateConfig, MatrixStateLayer
from seqboat.ops.matrix_state import gated_delta, gated_delta_step
from seqboat.ops.scan import block_for

EPS = 1e-6
"""Added to the squared length of keys and queries before the root."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(MatrixStateConfig):
    """Gated DeltaNet: a memory per head in which a token overwrites the value under its key, with decay and gate."""

    heads: int = 4
    """Heads, each with a memory of d_key by expand * d_key."""
    d_key: int | None = None
    """Width of keys and queries of a head; by default those of all heads are 3/4 of the model's width."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("heads", self.heads)
        if self.d_key is not None:
            check_positive("d_key", self.d_key)

    def build(self, d_model: int) -> GatedDeltaNet:
        return GatedDeltaNet(d_model, self)


class GatedDeltaNet(MatrixStateLayer):
    """One Gated DeltaNet layer on (batch, time, d_model): a memory per head in which tokens overwrite values.

    Its inputs are projected in at least float32: scaled to unit length, a short key would magnify rounding errors.
    """

    narrow = False

    def __init__(self, d_model: int, config: GatedDeltaNetConfig | None = None, **options: Any) -> None:
        config = fill_in(GatedDeltaNetConfig, config, options, self, d_model)
        heads = config.heads
        d_key = config.d_key or max(3 * d_model // (4 * heads), 1)
        d_value = config.expand * d_key
        channels = heads * (2 * d_key + d_value)
        super().__init__(d_model, config, heads * d_value, channels, heads, rates=2)
        self.config, self.d_key, self.d_value = config, d_key, d_value
        self.gated_norm = RMSNorm(d_value)
        self.reset_parameters()

    def _parts(self, u: Tensor, rates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values (..., heads, width), logarithms of the decays and rates (..., heads)."""
        width = self.heads * self.d_key
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)) for part in u.split([width, width, self.d_inner], dim=-1)
        )
        query, key = _unit(query) * self.d_key**-0.5, _unit(key)
        rate, decay = rates.chunk(2, dim=-1)
        return query, key, value, self.decay_and_step(decay)[0], torch.sigmoid(rate)

    def read(
        self, u: Tensor, rates: Tensor, mask: Tensor | None, memory: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        *tokens, log_decay, rate = self._parts(u, rates)
        tokens += [clear(log_decay, mask), clear(rate, mask)]
        query, key, value, log_decay, rate = (part.transpose(1, 2) for part in tokens)
        size = block_for(u.shape[1], self.config.block)
        y, memory = gated_delta(query, key, value, log_decay, rate, memory, size)
        return y.transpose(1, 2).flatten(2), memory

    def read_token(self, u: Tensor, rates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        y, memory = gated_delta_step(*self._parts(u, rates), memory)
        return y.flatten(1), memory

    def apply_gate(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.gated_norm(y.unflatten(-1, (self.heads, self.d_value))).flatten(-2) * F.silu(gate)

    def make_memory(self, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(batch, self.heads, self.d_key, self.d_value, dtype=dtype, device=device)


def _unit(x: Tensor) -> Tensor:
    """Vectors (..., dim) scaled to unit length."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + EPS)
