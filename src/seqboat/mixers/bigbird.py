"""BigBird (Zaheer et al., 2020): a block of tokens sees its neighbors, a few global blocks and a few random ones.

    block i sees   i - w/2 ... i + w/2                         the window
                   the first and the last blocks               global: these also see everything
                   `random_blocks` others                       drawn once for each head

    O = softmax(Q K^T / sqrt(d_head) where visible) V

Time and memory are linear in the sequence. Which blocks are random is a function of the head's seed, the block and
the number of blocks of the sequence, so neither padding nor other sequences change it. This is the paper's internal
construction (existing tokens are global); it looks both ways, so there is no causal form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Direction, MixerOutput, check_direction
from seqboat.core.nn import init_linear
from seqboat.core.settings import fill_in
from seqboat.mixers.block import BlockConfig, MultiHead, join_heads
from seqboat.ops.attention import HIDDEN, widen


@dataclass(frozen=True, kw_only=True)
class BigBirdConfig(BlockConfig):
    """BigBird: attention in blocks to neighbors, a few global blocks and a few random ones."""

    directions: ClassVar[tuple[Direction, ...]] = ("bidirectional",)

    block_size: int = 64
    """Tokens per block."""
    window_blocks: int = 3
    """Blocks of the window, with a block itself in the middle."""
    global_blocks: int = 2
    """Blocks that see everything and are seen by all: alternately the first and the last of the sequence."""
    random_blocks: int = 3
    """Random blocks that each block also sees."""
    activation: Literal["relu", "gelu", "silu"] = "gelu"
    """The function inside the feed-forward block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_direction(self, self.causal, "its global blocks see everything and are seen by all")
        check_positive("block_size", self.block_size)
        check_positive("window_blocks", self.window_blocks)
        check_positive("global_blocks", self.global_blocks, least=0)
        check_positive("random_blocks", self.random_blocks, least=0)
        require(self.window_blocks % 2 == 1, f"window_blocks must be odd, got {self.window_blocks}")

    def build(self, d_model: int) -> BigBird:
        return BigBird(d_model, self)


class Seen(NamedTuple):
    """Which blocks of keys each block of queries looks at."""

    blocks: Tensor
    """(sequences, heads, blocks, looks): numbers of blocks"""
    valid: Tensor
    """as blocks: whether to look there; no block is looked at twice"""


class BigBird(MultiHead):
    """One BigBird layer on (batch, time, d_model): block-sparse attention with global and random blocks."""

    causal = False
    wants_positions = True
    seeds: Tensor

    def __init__(self, d_model: int, config: BigBirdConfig | None = None, **options: Any) -> None:
        config = fill_in(BigBirdConfig, config, options, self, d_model)
        super().__init__(d_model, config)
        self.config = config
        self.front, self.back = (config.global_blocks + 1) // 2, config.global_blocks // 2
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.register_buffer("seeds", torch.randint(0, 1 << 31, (self.heads,)))
        init_linear(self)

    def mix(self, x: Tensor, layout: Layout, state: Any) -> MixerOutput:
        mask = layout.mask
        time, size = x.shape[1], self.config.block_size
        blocks = max(-(-time // size), 1)
        counts = torch.full((1,), time, device=x.device) if mask is None else mask.sum(dim=1)
        parts = self.split(self.qkv(self.block.open(x, mask)))
        query, key, value = (F.pad(part, (0, 0, 0, blocks * size - time)) for part in parts)
        query = (query * (1 / math.sqrt(self.d_head))).unflatten(2, (blocks, size))
        real = (torch.arange(blocks * size, device=x.device) < counts[:, None]).unflatten(1, (blocks, size))
        number = -(-counts // size)  # blocks of each sequence
        attended = self._attend_blocks(query, key, value, real, self.look(number, blocks))
        if self.config.global_blocks:
            attended = self._add_globals(attended, query, key, value, real, number)
        attended = attended.flatten(2, 3)[:, :, :time]
        y = self.block.close(x, join_heads(attended), mask)
        return MixerOutput(clear(y, mask))

    def look(self, number: Tensor, blocks: int) -> Seen:
        """What each block sees.

        Args:
            number: (sequences,), blocks of each sequence.
            blocks: of the longest one.
        """
        own = torch.arange(blocks, device=number.device)[:, None]
        last = number[:, None, None] - 1
        side = self.config.window_blocks // 2
        front = torch.arange(self.front, device=number.device).expand(blocks, -1)
        window = own + torch.arange(-side, side + 1, device=number.device)
        back = last - torch.arange(self.back, device=number.device)
        sequences = len(number)
        parts = [part.expand(sequences, blocks, -1) for part in (front, back, window)]
        valid = [
            parts[0] <= last,
            (parts[1] >= self.front) & (parts[1] <= last),
            self._free(parts[2], last),
        ]
        every = torch.cat(parts, dim=-1)[:, None].expand(-1, self.heads, -1, -1)
        seen = Seen(every, torch.cat(valid, dim=-1)[:, None].expand(every.shape))
        count = min(self.config.random_blocks, blocks)
        if not count:
            return Seen(seen.blocks.clamp(0, blocks - 1), seen.valid)
        other = own.T
        allowed = self._free(other.expand(sequences, blocks, -1), last) & ((other - own).abs() > side)
        rank = _mix_bits(self.seeds[:, None, None], own, other)
        rank = torch.where(allowed[:, None], rank, _NEVER)
        drawn = rank.topk(count, dim=-1, largest=False)
        every = torch.cat([seen.blocks, drawn.indices], dim=-1)
        return Seen(every.clamp(0, blocks - 1), torch.cat([seen.valid, drawn.values < _NEVER], dim=-1))

    def _free(self, block: Tensor, last: Tensor) -> Tensor:
        """Whether there is such a block and it is not global."""
        return (block >= self.front) & (block <= last - self.back)

    def _attend_blocks(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor, seen: Seen) -> Tensor:
        """(batch, heads, blocks, size, d_head): each block to the blocks that it sees."""
        batch, heads, blocks, size, d_head = query.shape
        looks = seen.blocks.shape[3] * size
        index = seen.blocks.expand(batch, -1, -1, -1).flatten(2)[..., None, None]
        index = index.expand(-1, -1, -1, size, d_head)
        keys, values = (
            part.unflatten(2, (blocks, size)).gather(2, index).view(batch, heads, blocks, looks, d_head)
            for part in (key, value)
        )
        sequence = torch.arange(len(real), device=real.device)[:, None, None, None]
        visible = (
            real[sequence, seen.blocks] & seen.valid[..., None]
        )  # (sequences, heads, blocks, looks, size)
        return self._weigh(query @ keys.transpose(-1, -2), visible.flatten(3)[..., None, :]) @ values

    def _add_globals(
        self, attended: Tensor, query: Tensor, key: Tensor, value: Tensor, real: Tensor, number: Tensor
    ) -> Tensor:
        """Attention of the global blocks to everything, which replaces what they saw of their neighbors."""
        batch, heads, blocks, size, d_head = query.shape
        own = torch.arange(blocks, device=query.device)
        back = number[:, None] - 1 - torch.arange(self.back, device=query.device)
        front = torch.arange(self.front, device=query.device)
        chosen = torch.cat([front.expand(len(number), -1), back], dim=1)
        chosen = chosen.clamp(0, blocks - 1).expand(batch, -1)  # (batch, global blocks)
        index = chosen[:, None, :, None, None].expand(-1, heads, -1, size, d_head)
        queries = query.gather(2, index).flatten(2, 3)
        visible = real.flatten(1)[:, None, None]
        by_global = self._weigh(queries @ key.transpose(-1, -2), visible) @ value
        by_global = by_global.unflatten(2, (-1, size))
        # which of the global blocks a block is
        order = torch.where(own < self.front, own, self.front + number[:, None] - 1 - own)
        is_global = (own < self.front) | (own >= number[:, None] - self.back)
        place = order.clamp(0, self.config.global_blocks - 1).expand(batch, -1)
        place = place[:, None, :, None, None].expand(-1, heads, -1, size, d_head)
        return torch.where(is_global[:, None, :, None, None], by_global.gather(2, place), attended)

    def _weigh(self, scores: Tensor, visible: Tensor) -> Tensor:
        weights = torch.softmax(widen(scores).masked_fill(~visible, HIDDEN), dim=-1)
        return self.block.drop(weights).to(scores.dtype)


_NEVER = (1 << 62) - 1
"""Rank of a block that must not be drawn; the lowest ranks are drawn."""


def _mix_bits(seed: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """A pseudo-random number below _NEVER for each (seed, own, other); products of integers wrap around."""
    x = seed * 0x2545F4914F6CDD1D + own * 0x1D8E4E27C47D124F + other * 0x6A09E667F3BCC909
    for factor in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
        x = (x ^ ((x >> 29) & ((1 << 35) - 1))) * factor
    return (x ^ ((x >> 32) & ((1 << 32) - 1))) & (_NEVER >> 1)
