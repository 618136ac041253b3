"""Linformer (Wang et al., 2020): keys and values are projected along time to a fixed length.

    O_i = softmax(Q_i (E K_i)^T / sqrt(d_head)) (F V_i)       for each head i; E, F: (projected, time), learned

Time and memory are linear in the sequence. Column t of E and F belongs to position t of the sequence; positions
beyond `max_positions` share the last column. Projections mix all positions, so there is no causal form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Direction, MixerOutput, check_direction
from seqboat.core.nn import init_linear
from seqboat.core.settings import fill_in
from seqboat.mixers.block import BlockConfig, MultiHead, join_heads, split_heads
from seqboat.ops.attention import widen

Sharing = Literal["none", "heads", "keys"]
SHARINGS = ("none", "heads", "keys")


@dataclass(frozen=True, kw_only=True)
class LinformerConfig(BlockConfig):
    """Linformer: attention to a fixed number of learned projections of keys and values, in linear time."""

    directions: ClassVar[tuple[Direction, ...]] = ("bidirectional",)

    projected: int = 256
    """Length that keys and values are projected to."""
    sharing: Sharing = "keys"
    """Whether projections are shared: by no heads, by all heads, or also by keys and values (E = F)."""
    max_positions: int = 4096
    """Positions with a separate column."""
    activation: Literal["relu", "gelu", "silu"] = "gelu"
    """The function inside the feed-forward block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_direction(self, self.causal, "its projections mix all positions")
        check_positive("projected", self.projected)
        check_positive("max_positions", self.max_positions)
        check_choice("sharing", self.sharing, SHARINGS)

    def build(self, d_model: int) -> Linformer:
        return Linformer(d_model, self)


class Linformer(MultiHead):
    """One Linformer layer on (batch, time, d_model): attention to a fixed number of projected keys."""

    causal = False
    wants_positions = True

    def __init__(self, d_model: int, config: LinformerConfig | None = None, **options: Any) -> None:
        config = fill_in(LinformerConfig, config, options, self, d_model)
        super().__init__(d_model, config)
        self.config = config
        self.qkv = nn.Linear(d_model, 3 * d_model)
        kinds = 1 if config.sharing == "keys" else 2
        owners = self.heads if config.sharing == "none" else 1
        # of keys and of values; (max_positions, projected) each, so that a position is a row
        self.project = nn.Parameter(torch.empty(kinds, owners, config.max_positions, config.projected))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values.

        Linear         weights N(0, 0.02), truncated at two standard deviations, biases 0
        projections    N(0, 1 / projected), as in the paper's proof
        """
        init_linear(self)
        nn.init.normal_(self.project, std=self.config.projected**-0.5)

    def mix(self, x: Tensor, layout: Layout, state: Any) -> MixerOutput:
        mask = layout.mask
        parts = self.qkv(self.block.open(x, mask)).chunk(3, dim=-1)
        query, key, value = (split_heads(part, self.heads) for part in parts)
        if mask is not None:
            # the biases of the projection gave padding a key and a value
            key, value = (torch.where(mask[:, None, :, None], part, 0) for part in (key, value))
        keys, values = self._shorten(key, 0), self._shorten(value, -1)
        scores = (query * (1 / math.sqrt(self.d_head))) @ keys.transpose(-1, -2)
        weights = self.block.drop(torch.softmax(widen(scores), dim=-1)).to(values.dtype)
        y = self.block.close(x, join_heads(weights @ values), mask)
        return MixerOutput(clear(y, mask))

    def _shorten(self, x: Tensor, kind: int) -> Tensor:
        """(batch, heads, projected, d_head) of (batch, heads, time, d_head)."""
        position = torch.arange(x.shape[2], device=x.device)
        columns = self.project[kind][:, position.clamp(max=self.config.max_positions - 1)]
        return columns.to(x.dtype).transpose(-1, -2) @ x
