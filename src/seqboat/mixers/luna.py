"""Luna (Ma et al., 2021): two nested attentions through a short second sequence, P.

    Y_P = Attn(P, X),   Y_X = Attn(X, Y_P)            pack the sequence into P, and unpack it again
    P'  = norm(P + Y_P),   X_A = norm(X + Y_X W + b),   X' = norm(X_A + FFN(X_A))

P' is the P of the next layer: the second stream, which begins as parameters. In a stack the model owns these and P
precedes the sequence; a single layer has its own. P packs the whole sequence, so there is no causal form.

Time and memory are linear in the sequence. Luna-256 has 256 tokens in P.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_positive
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Direction, MixerOutput, check_direction
from seqboat.core.nn import Norm, init_linear, make_norm
from seqboat.core.settings import fill_in
from seqboat.mixers.block import BlockConfig, MultiHead, join_heads, split_heads
from seqboat.ops.attention import HIDDEN, widen


@dataclass(frozen=True, kw_only=True)
class LunaConfig(BlockConfig):
    """Luna: attention through a second, short sequence of learned tokens, in linear time."""

    directions: ClassVar[tuple[Direction, ...]] = ("bidirectional",)

    length: int = 256
    """Tokens of the second sequence."""
    tied: bool = True
    """Whether keys and values are the same projection, as in the published models."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_direction(self, self.causal, "its second sequence packs all tokens")
        check_positive("length", self.length)

    def build(self, d_model: int) -> Luna:
        return Luna(d_model, self)


class Luna(MultiHead):
    """One Luna layer on (batch, time, d_model): attention through a short second sequence."""

    wants_positions = True

    def __init__(self, d_model: int, config: LunaConfig | None = None, **options: Any) -> None:
        config = fill_in(LunaConfig, config, options, self, d_model)
        super().__init__(d_model, config)
        self.config = config
        self.lead = config.length
        self.pack_query = nn.Linear(d_model, d_model)
        self.query = nn.Linear(d_model, d_model)
        # keys and values, in this order
        self.pack = nn.Linear(d_model, d_model if config.tied else 2 * d_model)
        self.unpack = nn.Linear(d_model, d_model if config.tied else 2 * d_model)
        self.second: nn.Parameter | None = nn.Parameter(torch.empty(config.length, d_model))
        self.second_norm: Norm | None = make_norm(config.norm, d_model) if config.prenorm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights N(0, 0.02), truncated at two standard deviations, biases 0; second sequence N(0, 1 / d_model)."""
        init_linear(self)
        if self.second is not None:
            nn.init.normal_(self.second, std=self.d_model**-0.5)

    def follow(self) -> None:
        self.second = None
        # after the sum only the next layer sees it, and a layer on its own has none
        self.second_norm = make_norm(self.config.norm, self.d_model)

    def mix(self, x: Tensor, layout: Layout, state: None) -> MixerOutput:
        mask = layout.mask
        if self.second is not None:
            second = self.second.expand(x.shape[0], -1, -1).to(x.dtype)
            return MixerOutput(self._mix_streams(x, second, mask)[0])
        second, x = x[:, : self.lead], x[:, self.lead :]
        y, second = self._mix_streams(x, second, None if mask is None else mask[:, self.lead :])
        return MixerOutput(torch.cat([second, y], dim=1))

    def _mix_streams(self, x: Tensor, second: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both sequences after this layer."""
        branch = self.block.open(x, mask)
        by = self.second_norm(second) if self.second_norm is not None and self.config.prenorm else second
        visible = None if mask is None else mask[:, None, None]
        packed = self._attend(self.pack_query(by), self.pack(branch), visible)
        attended = self._attend(self.query(branch), self.unpack(packed), None)
        y = clear(self.block.close(x, attended, mask), mask)
        after = second + self.block.drop(packed)
        if self.second_norm is not None and not self.config.prenorm:
            after = self.second_norm(after)
        return y, after.to(x.dtype)

    def _attend(self, query: Tensor, given: Tensor, visible: Tensor | None) -> Tensor:
        """(batch, queries, d_model) of queries and of keys with values, all (batch, time, d_model or twice that)."""
        parts = [split_heads(part, self.heads) for part in given.split(self.d_model, dim=-1)]
        key, value = parts[0], parts[-1]
        scale = 1 / math.sqrt(self.d_head)
        scores = widen((split_heads(query, self.heads) * scale) @ key.transpose(-1, -2))
        if visible is not None:
            scores = scores.masked_fill(~visible, HIDDEN)
        weights = self.block.drop(torch.softmax(scores, dim=-1)).to(value.dtype)
        return join_heads(weights @ value)
