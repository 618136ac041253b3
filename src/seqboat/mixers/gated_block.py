"""What surrounds the layers of this folder: a norm before each block, residual connections, a gated block.

x = x + mix(norm(x)) W,   x = x + (SiLU(norm(x) W_1) * norm(x) W_2) W_3        the latter if there is one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, check_rate
from seqboat.core.mixer import Direction, check_direction
from seqboat.core.nn import NORMS, Norm, NormName, make_norm
from seqboat.core.settings import Settings


@dataclass(frozen=True, kw_only=True)
class GatedConfig(Settings):
    """What the layers of this folder have in common."""

    directions: ClassVar[tuple[Direction, ...]] = ("causal",)

    ffn: bool = True
    """Whether a gated feed-forward block follows each layer."""
    d_ff: int | None = None
    """Its hidden width; 8/3 of the model's by default."""
    causal: bool = True
    """Always true: the layer has no bidirectional form."""
    norm: NormName = "rms"
    """The norm before each block."""
    dropout: float = 0.0
    """Rate of dropout on the outputs of both blocks."""

    def __post_init__(self) -> None:
        check_direction(self, self.causal, "its state holds what came before")
        if self.d_ff is not None:
            check_positive("d_ff", self.d_ff)
        check_choice("norm", self.norm, NORMS)
        check_rate("dropout", self.dropout)


class GatedFeedForward(nn.Module):
    """Two linear maps multiplied with each other, one of them after SiLU, and a third one (SwiGLU)."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(d_model, 2 * d_hidden, bias=False)
        self.out = nn.Linear(d_hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.hidden(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class GatedBlock(nn.Module):
    """Norms, output projection, residual connections and feed-forward block of one layer.

    Args:
        d_model: width of the model.
        d_inner: width of what the layer computes.
        config: of the layer.
    """

    def __init__(self, d_model: int, d_inner: int, config: GatedConfig) -> None:
        super().__init__()
        self.config, self.d_model = config, d_model
        self.norm: Norm = make_norm(config.norm, d_model)
        self.out = nn.Linear(d_inner, d_model, bias=False)
        if config.ffn:
            self.ffn_norm: Norm = make_norm(config.norm, d_model)
            self.ffn = GatedFeedForward(d_model, config.d_ff or max(8 * d_model // 3, 1))

    def open(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """What the layer reads, from (..., d_model)."""
        return self.norm(x, mask)

    def close(self, x: Tensor, mixed: Tensor, mask: Tensor | None) -> Tensor:
        """(..., d_model) of the inputs and what the layer computed from them, (..., d_inner)."""
        y = x + self._drop(self.out(mixed)).to(x.dtype)
        if not self.config.ffn:
            return y
        return y + self._drop(self.ffn(self.ffn_norm(y, mask))).to(x.dtype)

    def closing_norm(self) -> Norm:
        """The norm at the end of a stack."""
        return make_norm(self.config.norm, self.d_model)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x
