"""Samba (Ren et al., 2024): recurrent layers and attention over a sliding window in turn, a static hybrid.

    recurrence, feed-forward, window attention, feed-forward, recurrence, ...
    O_i = softmax(Q_i K_i^T / sqrt(d_head)) V_i        over a token and the window - 1 before it, rotary positions

The recurrence compresses the whole past, the window recalls the recent tokens exactly. The published models use
Mamba; here it is Mamba-2, or Gated DeltaNet. Queries come in blocks as long as the window, each with the keys of its
block and of the window before it: time and memory are linear in the sequence. The state has a constant size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Mixer, MixerOutput
from seqboat.core.nn import init_linear
from seqboat.core.state import overwrite
from seqboat.mixers.block import head_width, join_heads, split_heads
from seqboat.mixers.delta import GatedDeltaNetConfig
from seqboat.mixers.gated import GatedBlock, GatedConfig
from seqboat.mixers.mamba2 import Mamba2Config
from seqboat.mixers.memory import Fifo, make_fifo, push
from seqboat.ops.attention import rotate, turns


@dataclass(frozen=True, kw_only=True)
class WindowAttentionConfig(GatedConfig):
    """Sliding window: causal multi-head attention over the last tokens, rotary positions, and a gated block."""

    heads: int = 4
    """Attention heads, each of width d_model / heads."""
    window: int = 64
    """Tokens that a token sees, itself included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("heads", self.heads)
        check_positive("window", self.window)

    def build(self, d_model: int) -> WindowAttention:
        return WindowAttention(d_model, self)


class WindowAttention(Mixer):
    """One layer of attention over a sliding window on (batch, time, d_model)."""

    def __init__(self, d_model: int, config: WindowAttentionConfig | None = None) -> None:
        super().__init__()
        config = config or WindowAttentionConfig()
        self.config, self.d_model, self.causal = config, d_model, True
        self.heads, self.d_head = config.heads, head_width(d_model, config.heads)
        require(
            self.d_head % 2 == 0, f"d_model / heads must be even with rotary positions, got {self.d_head}"
        )
        self.past = config.window - 1
        self.block = GatedBlock(d_model, d_model, config)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        init_linear(self)

    def closing_norm(self) -> nn.Module | None:
        return self.block.closing_norm()

    def mix(self, x: Tensor, layout: Layout, state: Fifo | None) -> MixerOutput:
        mask = layout.mask
        batch, time = x.shape[:2]
        before = self._fresh(batch, x.dtype, x.device) if state is None else state
        query, key, value = self._project(self.block.open(x, mask), before.total)
        after, keys, values = push(before, key, value, None if mask is None else mask.sum(dim=1))
        left = self.past
        if state is None:  # nothing is further away than the first token
            left = min(left, max(time - 1, 0))
        keys, values = (part[:, :, self.past - left :].to(query.dtype) for part in (keys, values))
        attended = self._attend(query, keys, values, before.total, left)
        return MixerOutput(clear(self.block.close(x, join_heads(attended), mask), mask), after)

    def _project(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, time, d_head) of tokens after `total` (batch,) others."""
        query, key, value = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        position = total[:, None] + torch.arange(x.shape[1], device=x.device)
        turn = turns(position[:, None], self.d_head, query.dtype)
        return rotate(query, turn), rotate(key, turn), value

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, total: Tensor, left: int) -> Tensor:
        """(batch, heads, time, d_head), from keys and values that begin `left` tokens before the queries."""
        batch, _, time, _ = query.shape
        size = max(min(time, self.config.window), 1)
        blocks = max(-(-time // size), 1)
        width, pad = left + size, blocks * size - time
        queries = F.pad(query, (0, 0, 0, pad)).unflatten(2, (blocks, size)).transpose(1, 2)
        keys, values = (
            F.pad(part, (0, 0, 0, pad)).unfold(2, width, size).permute(0, 2, 1, 4, 3)
            for part in (keys, values)
        )
        column = torch.arange(width, device=query.device)
        distance = torch.arange(size, device=query.device)[:, None] + left - column
        seen = (distance >= 0) & (distance <= left)
        # a token sees itself, so that no softmax is empty, padding included
        first = torch.arange(blocks, device=query.device)[:, None] * size - left + column
        real = first >= -total[:, None, None]  # (batch, blocks, width)
        visible = (seen & real[:, :, None]).flatten(0, 1)[:, None]
        attended = F.scaled_dot_product_attention(
            queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), attn_mask=visible
        )
        return attended.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :time]

    def _fresh(self, batch: int, dtype: torch.dtype, device: torch.device) -> Fifo:
        return make_fifo(batch, self.heads, self.past, self.d_head, dtype, device)

    @torch.no_grad()
    def step(self, x: Tensor, state: Fifo) -> MixerOutput:
        query, key, value = self._project(self.block.open(x, None)[:, None], state.total)
        after, keys, values = push(state, key, value, None)
        age = torch.arange(self.past, -1, -1, device=x.device)
        visible = (age <= state.total[:, None])[:, None, None]
        attended = F.scaled_dot_product_attention(
            query, keys.to(query.dtype), values.to(query.dtype), attn_mask=visible
        )
        y = self.block.close(x, join_heads(attended)[:, 0], None)
        return MixerOutput(y, overwrite(state, after))


@dataclass(frozen=True, kw_only=True)
class SambaConfig(Mamba2Config):
    """Samba: Mamba-2 layers and attention over a sliding window in turn, a feed-forward block after each."""

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
    """Samba with Gated DeltaNet: its layers and attention over a sliding window in turn."""

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
