"""Reformer (Kitaev et al., 2020): attention among tokens that hash alike, in chunks.

    q_i = W_qk x_i,  k_i = q_i / |q_i|                       queries and keys share their projection
    h(q) = argmax([q R, -q R])                               the bucket, by a random rotation R; several rounds
    P_i  = tokens of the same chunk as i or of the chunk before, sorted by (bucket, position), in some round
    o_i  = sum over j in P_i of softmax(q_i^T k_j) v_j       i itself only if there is no other

Tokens that meet in several rounds count once, so the rounds together are softmax attention over the union of their
chunks. Time and memory are linear in the sequence, but for the sort. Rotations are drawn once and saved. Chunks shift
with every later token, so there is no causal form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Direction, MixerOutput, check_direction
from seqboat.core.nn import init_linear
from seqboat.core.settings import fill_in
from seqboat.mixers.block import BlockConfig, MultiHead, join_heads, split_heads
from seqboat.ops.attention import HIDDEN, widen

SELF = -1e5
"""Score of a token with itself: negligible next to any other key, but above hidden ones."""
NOWHERE = -(1 << 30)
"""The chunk of a place without a token."""


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(BlockConfig):
    """Reformer: attention among tokens that locality-sensitive hashing puts in the same bucket."""

    directions: ClassVar[tuple[Direction, ...]] = ("bidirectional",)

    hashes: int = 4
    """Rounds of hashing."""
    buckets: int = 64
    """Buckets per round: an even number, or one for all tokens."""
    chunk_size: int = 64
    """Tokens per chunk."""
    prenorm: bool = True
    """Whether the norms come before the blocks instead of after them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_direction(self, self.causal, "chunks shift with every later token")
        for name in ("hashes", "buckets", "chunk_size"):
            check_positive(name, getattr(self, name))
        require(self.buckets == 1 or self.buckets % 2 == 0, f"buckets must be even or 1, got {self.buckets}")

    def build(self, d_model: int) -> Reformer:
        return Reformer(d_model, self)


class Reformer(MultiHead):
    """One Reformer layer on (batch, time, d_model): attention within hash buckets."""

    wants_positions = True
    rotations: Tensor

    def __init__(self, d_model: int, config: ReformerConfig | None = None, **options: Any) -> None:
        config = fill_in(ReformerConfig, config, options, self, d_model)
        super().__init__(d_model, config)
        self.config = config
        self.shared = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        shape = self.heads, self.d_head, config.hashes, config.buckets // 2
        self.register_buffer("rotations", torch.randn(shape))
        init_linear(self)

    def mix(self, x: Tensor, layout: Layout, state: None) -> MixerOutput:
        mask = layout.mask
        time = x.shape[1]
        counts = torch.full((len(x),), time, device=x.device) if mask is None else mask.sum(dim=1)
        shared, value = self._project(self.block.open(x, mask))
        attended = self._attend(shared, value, self.hash(shared), counts)
        return MixerOutput(clear(self.block.close(x, join_heads(attended), mask), mask))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shared queries and keys, and values, (batch, heads, time, d_head)."""
        with torch.autocast(x.device.type, enabled=False):
            # what decides which keys are seen stays in full precision
            shared = F.linear(widen(x), widen(self.shared.weight)).to(x.dtype)
        return split_heads(shared, self.heads), split_heads(self.value(x), self.heads)

    def hash(self, shared: Tensor) -> Tensor:
        """(batch, heads, hashes, time): the bucket of each token in each round."""
        shape = *shared.shape[:2], self.config.hashes, shared.shape[2]
        if self.config.buckets == 1:
            return torch.zeros(shape, dtype=torch.int64, device=shared.device)
        with torch.autocast(shared.device.type, enabled=False):
            wide = widen(shared.detach())
            turned = torch.einsum("bhtd,hdrk->bhrtk", wide, self.rotations.to(wide.dtype))
            return torch.cat([turned, -turned], dim=-1).argmax(dim=-1)

    def _attend(self, shared: Tensor, value: Tensor, bucket: Tensor, counts: Tensor) -> Tensor:
        """Attention of the first `counts` of (batch, heads, time, d_head)."""
        time, d_head = shared.shape[2:]
        rounds, size = self.config.hashes, self.config.chunk_size
        chunks = max(-(-time // size), 1)
        steps = torch.arange(time, device=shared.device)
        real = (steps < counts[:, None])[:, None, None]
        # the place of each token in the order of (bucket, position); padding comes last
        order = torch.where(real, bucket, self.config.buckets).argsort(dim=-1, stable=True)
        place = torch.zeros_like(order).scatter(-1, order, steps.expand(bucket.shape))
        chunk = torch.where(real, place // size, NOWHERE).to(torch.int32)
        # the token at each place, or number `time`: nothing
        token = F.pad(order, (0, chunks * size - time), value=time)

        def lay_out(x: Tensor) -> Tensor:
            """(batch, heads, hashes, chunks, size, d) of (batch, heads, time, d)."""
            index = token.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
            return F.pad(x, (0, 0, 0, 1)).gather(2, index).unflatten(2, (rounds, chunks, size))

        codes = F.pad(chunk, (0, 1), value=NOWHERE)
        token = token.unflatten(-1, (chunks, size))
        query = widen(lay_out(shared))
        key, values = _with_previous(_unit(query)), _with_previous(lay_out(value))
        key_token = _with_previous(token[..., None], time).squeeze(-1)
        scores = query @ key.transpose(-1, -2)
        visible = _neighbors(codes, token, key_token)
        scores = torch.where(key_token[..., None, :] == token[..., None], SELF, scores)
        if rounds > 1:
            # in how many rounds the two meet: the rounds together count every pair once
            meetings = sum(
                _neighbors(codes[:, :, r, None].expand_as(codes), token, key_token).to(torch.int8)
                for r in range(rounds)
            )
            assert isinstance(meetings, Tensor)
            scores = scores - meetings.clamp(min=1).to(scores.dtype).log()
        scores = scores.masked_fill(~visible, HIDDEN)
        total = torch.logsumexp(scores, dim=-1, keepdim=True)
        attended = self.block.drop((scores - total).exp()).to(values.dtype) @ values
        # back to the tokens, and the rounds together
        attended = attended.flatten(3, 4).gather(3, place[..., None].expand(-1, -1, -1, -1, d_head))
        total = total.flatten(3).gather(3, place)
        weight = torch.softmax(total, dim=2)[..., None].to(attended.dtype)
        return (attended * weight).sum(dim=2)


def _unit(shared: Tensor) -> Tensor:
    """Keys of unit length."""
    scale = torch.rsqrt(shared.square().mean(dim=-1, keepdim=True) + 1e-6)
    return shared * scale * (1 / math.sqrt(shared.shape[-1]))


def _with_previous(x: Tensor, fill: int = 0) -> Tensor:
    """(..., chunks, 2 size, d) of (..., chunks, size, d): each chunk after the one before it."""
    before = F.pad(x[..., :-1, :, :], (0, 0, 0, 0, 1, 0), value=fill)
    return torch.cat([before, x], dim=-2)


def _neighbors(code: Tensor, token: Tensor, key_token: Tensor) -> Tensor:
    """(..., chunks, size, 2 size): whether a key is in the chunk of a query or in the one before it."""
    one, two = (code.gather(-1, t.flatten(3)).view(t.shape) for t in (token, key_token))
    # zero for 0 and 1, and for nothing else: fewer passes over all pairs than two comparisons
    return (one[..., None] - two[..., None, :]) >> 1 == 0
