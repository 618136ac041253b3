"""Mamba-2 (Dao and Gu, 2024): a state-space layer whose decays, inputs and readouts depend on the token.

    dt_t = softplus(rate_t + bias),   S_t = exp(-dt_t a) S_{t-1} + B_t^T (dt_t x_t),   y_t = C_t S_t + D x_t

Each head has one decay rate a and a width of d_head; all heads share B and C. Sequences are computed in blocks of
matrix products (`ops.matrix_state`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.layout import clear
from seqboat.core.nn import RMSNorm
from seqboat.core.settings import fill_in
from seqboat.mixers.gated import MatrixStateConfig, MatrixStateLayer
from seqboat.ops.matrix_state import gated_sum, gated_sum_step
from seqboat.ops.scan import block_for

D_HEAD = 64
"""Width of a head in the published models."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(MatrixStateConfig):
    """Mamba-2: a state-space layer with decays, inputs and readouts that depend on the token, and a gate."""

    d_state: int = 128
    """States per channel."""
    d_head: int | None = None
    """Channels that share a decay; by default 64, or the largest divisor of expand * d_model below it."""
    ffn: bool = False
    """Whether a gated feed-forward block follows each layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("d_state", self.d_state)
        if self.d_head is not None:
            check_positive("d_head", self.d_head)

    def build(self, d_model: int) -> Mamba2:
        return Mamba2(d_model, self)


class Mamba2(MatrixStateLayer):
    """One Mamba-2 layer on (batch, time, d_model): a gated state-space layer whose decays depend on the token."""

    def __init__(self, d_model: int, config: Mamba2Config | None = None, **options: Any) -> None:
        config = fill_in(Mamba2Config, config, options, self, d_model)
        d_inner = config.expand * d_model
        d_head = config.d_head or max(width for width in range(1, D_HEAD + 1) if d_inner % width == 0)
        require(
            d_inner % d_head == 0, f"expand * d_model must be a multiple of d_head = {d_head}, got {d_inner}"
        )
        channels = d_inner + 2 * config.d_state
        super().__init__(d_model, config, d_inner, channels, heads=d_inner // d_head, rates=1)
        self.config, self.d_head, self.d_state = config, d_head, config.d_state
        self.conv_bias = nn.Parameter(torch.empty(channels))
        self.skip = nn.Parameter(torch.empty(self.heads))
        self.gated_norm = RMSNorm(d_inner)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in the base class; the skip starts at 1, the bias of the convolution as its taps."""
        super().reset_parameters()
        bound = self.taps**-0.5
        nn.init.uniform_(self.conv_bias, -bound, bound)
        nn.init.ones_(self.skip)

    def convolve(self, joined: Tensor, time: int) -> Tensor:
        return super().convolve(joined, time) + self.conv_bias.to(joined.dtype)

    def _parts(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values (..., heads, d_head), keys B and queries C (..., d_state)."""
        value, key, query = u.split([self.d_inner, self.d_state, self.d_state], dim=-1)
        return value.unflatten(-1, (self.heads, self.d_head)), key, query

    def _skip(self, y: Tensor, value: Tensor) -> Tensor:
        return torch.addcmul(y, self.skip.to(y.dtype)[:, None], value).flatten(-2)

    def read(
        self, u: Tensor, rates: Tensor, mask: Tensor | None, memory: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        value, key, query = self._parts(u)
        log_decay, step = (clear(part, mask) for part in self.decay_and_step(rates))
        size = block_for(u.shape[1], self.config.block)
        y, memory = gated_sum(query, key, value * step[..., None], log_decay, memory, size)
        return self._skip(y, value), memory

    def read_token(self, u: Tensor, rates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        value, key, query = self._parts(u)
        log_decay, step = self.decay_and_step(rates)
        y, memory = gated_sum_step(query, key, value * step[..., None], log_decay, memory)
        return self._skip(y, value), memory

    def apply_gate(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.gated_norm(y * F.silu(gate))

    def make_memory(self, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(batch, self.d_state, self.heads, self.d_head, dtype=dtype, device=device)
