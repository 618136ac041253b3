"""What surrounds multi-head attention in a layer: norms, residual connections, feed-forward block.

    x = x + attend(x) W + b,   x = x + W_2 f(W_1 x + b_1) + b_2

with the norm before each block (pre-norm) or after each sum (post-norm).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, check_rate, require
from seqboat.core.mixer import Mixer
from seqboat.core.nn import (
    ACTIVATIONS,
    NORMS,
    ActivationName,
    FeedForward,
    Norm,
    NormName,
    init_linear,
    make_norm,
)
from seqboat.core.settings import Settings


@dataclass(frozen=True, kw_only=True)
class BlockConfig(Settings):
    """Heads, and what surrounds them."""

    heads: int = 8
    """Attention heads, each of width d_model / heads."""
    d_ff: int | None = None
    """Hidden width of the feed-forward block; four times the model's by default."""
    activation: ActivationName = "relu"
    """The function inside the feed-forward block."""
    causal: bool = False
    """Whether tokens see no later ones, as in language models."""
    norm: NormName = "layer"
    """The norm of both blocks."""
    prenorm: bool = False
    """Whether the norms come before the blocks instead of after them."""
    dropout: float = 0.0
    """Rate of dropout on attention weights and on the outputs of both blocks."""

    def __post_init__(self) -> None:
        check_positive("heads", self.heads)
        check_choice("activation", self.activation, tuple(ACTIVATIONS))
        check_choice("norm", self.norm, NORMS)
        check_rate("dropout", self.dropout)
        if self.d_ff is not None:
            check_positive("d_ff", self.d_ff)


class Residual(nn.Module):
    """Norms and residual connections around an attention and a feed-forward block."""

    config: BlockConfig
    d_model: int
    norm: Norm
    out: nn.Linear
    ffn_norm: Norm
    ffn: FeedForward

    def open(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """What the attention reads, from (..., d_model)."""
        return self.norm(x, mask) if self.config.prenorm else x

    def close(self, x: Tensor, attended: Tensor, mask: Tensor | None) -> Tensor:
        """Both residual connections, after the attention of (..., d_model)."""
        y = x + self.drop(self.out(attended))
        if self.config.prenorm:
            return y + self.drop(self.ffn(self.ffn_norm(y, mask)))
        y = self.norm(y, mask)
        return self.ffn_norm(y + self.drop(self.ffn(y)), mask)

    def closing_norm(self) -> Norm | None:
        """The norm at the end of a stack."""
        return make_norm(self.config.norm, self.d_model) if self.config.prenorm else None

    def drop(self, x: Tensor) -> Tensor:
        """Dropout, in training."""
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x


class Block(Residual):
    """What surrounds the attention of one layer, in one part."""

    def __init__(self, d_model: int, config: BlockConfig) -> None:
        super().__init__()
        self.config, self.d_model = config, d_model
        self.norm = make_norm(config.norm, d_model)
        self.out = nn.Linear(d_model, d_model)
        self.ffn_norm = make_norm(config.norm, d_model)
        self.ffn = FeedForward(d_model, config.d_ff or 4 * d_model, config.activation)
        init_linear(self)


class MultiHead(Mixer):
    """A layer of multi-head attention inside a `Block`."""

    def __init__(self, d_model: int, config: BlockConfig) -> None:
        super().__init__()
        self.d_model, self.causal = d_model, config.causal
        self.heads, self.d_head = config.heads, head_width(d_model, config.heads)
        self.block = Block(d_model, config)

    def closing_norm(self) -> Norm | None:
        return self.block.closing_norm()

    def split(self, parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, time, d_head) of (batch, time, 3 * d_model)."""
        query, key, value = (split_heads(part, self.heads) for part in parts.chunk(3, dim=-1))
        return query, key, value


def head_width(d_model: int, heads: int) -> int:
    """The width of each head."""
    check_positive("d_model", d_model)
    require(d_model % heads == 0, f"d_model must be a multiple of heads = {heads}, got {d_model}")
    return d_model // heads


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, heads, time, d_head) of (batch, time, heads * d_head)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(batch, time, heads * d_head) of (batch, heads, time, d_head)."""
    return x.transpose(1, 2).flatten(2)
