"""Reformer (Kitaev et al., 2020): attention among tokens that hash alike, in chunks.

    q_i = W_qk x_i,  k_i = q_i / |q_i|                       queries and keys share their projection
    h(q) = argmax([q R, -q R])                               the bucket, by a random rotation R; several rounds
    P_i  = tokens of the same chunk as i or of the chunk before, sorted by (bucket, position), in some round
    o_i  = sum over j in P_i of softmax(q_i^T k_j) v_j       i itself only if there is no other

Tokens that meet in several rounds count once, so the rounds together are softmax attention over the union of their
chunks. Time and memory are linear in the sequence, but for the sort. Rotations are drawn once and saved.

In causal layers chunks are counted inside each bucket. Chunks of the whole sorted sequence, as in the paper, would
shift with every later token, but what a token sees must not depend on what follows. The state keeps all keys and
values.

"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.mixer import MixerOutput, RecurrentMixer, keep_rows
from seqboat.core.nn import init_linear, make_norm
from seqboat.core.padding import zero_padding
from seqboat.core.settings import fill_in
from seqboat.mixers.block import Block, BlockConfig, head_width, join_heads, split_heads
from seqboat.mixers.cache import Cache, append, extend
from seqboat.ops.functions import HIDDEN
from seqboat.ops.precision import widen

SELF = -1e5
"""Score of a token with itself: negligible next to any other key, but above hidden ones."""
APART = 1 << 40
"""Distance between the chunks of different buckets in a state."""
NOWHERE = -(1 << 30)
"""The chunk of a place without a token."""


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(BlockConfig):
    """Reformer: attention among tokens that locality-sensitive hashing puts in the same bucket.

    >>> from seqboat.mixers import ReformerConfig
    >>> layer = ReformerConfig(causal=True).build(64)
    >>> layer.name, layer.causal
    ('Reformer', True)
    """

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
        for name in ("hashes", "buckets", "chunk_size"):
            check_positive(name, getattr(self, name))
        require(self.buckets == 1 or self.buckets % 2 == 0, f"buckets must be even or 1, got {self.buckets}")

    def build(self, d_model: int) -> Reformer:
        return Reformer(d_model, self)


class ReformerState(NamedTuple):
    """The state of a causal layer: it grows with the sequence."""

    keys: Tensor
    """(batch, heads, slots, d_head): shared queries and keys, not yet normalized"""
    values: Tensor
    """(batch, heads, slots, d_head)"""
    chunks: Tensor
    """(batch, heads, slots, hashes): bucket * APART + chunk inside the bucket"""
    total: Tensor
    """(batch,): tokens so far"""


class Reformer(RecurrentMixer):
    """One Reformer layer on (batch, time, d_model): attention within hash buckets.

    Args:
        d_model: width of the tokens.
        config: settings; the defaults if not given.
        options: individual settings as keywords, fields of `ReformerConfig`.

    Calling it with x of shape (batch, time, d_model) returns a `MixerOutput` whose y has the same shape.

    >>> import torch
    >>> from seqboat.mixers import Reformer
    >>> Reformer(16, heads=2)(torch.randn(2, 100, 16)).y.shape
    torch.Size([2, 100, 16])
    """

    wants_positions = True
    rotations: Tensor

    def __init__(self, d_model: int, config: ReformerConfig | None = None, **options: Any) -> None:
        super().__init__()
        config = fill_in(ReformerConfig, config, options, self, d_model)
        self.config, self.d_model, self.causal = config, d_model, config.causal
        self.heads, self.d_head = config.heads, head_width(d_model, config.heads)
        self.block = Block(d_model, config)
        self.shared = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        shape = self.heads, self.d_head, config.hashes, config.buckets // 2
        self.register_buffer("rotations", torch.randn(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights N(0, 0.02), truncated at two standard deviations, biases 0."""
        init_linear(self)

    def closing_norm(self) -> nn.Module | None:
        return make_norm(self.config.norm, self.d_model) if self.config.prenorm else None

    def mix(self, x: Tensor, mask: Tensor | None, state: ReformerState | None) -> MixerOutput:
        attended, after = self._attend_all(self.block.open(x, mask), mask, state)
        y = self.block.close(x, attended, mask)
        return MixerOutput(zero_padding(y, mask), after)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shared queries and keys, and values, (batch, heads, time, d_head)."""
        with torch.autocast(x.device.type, enabled=False):
            # what decides which keys are seen stays in full precision
            shared = F.linear(widen(x), widen(self.shared.weight)).to(x.dtype)
        return split_heads(shared, self.heads), split_heads(self.value(x), self.heads)

    def _attend_all(
        self, x: Tensor, mask: Tensor | None, state: ReformerState | None
    ) -> tuple[Tensor, ReformerState | None]:
        """(batch, time, width): attention of all tokens, those of the state before them."""
        batch, time = x.shape[:2]
        counts = torch.full((batch,), time, device=x.device) if mask is None else mask.sum(dim=1)
        shared, value = self._project(x)
        bucket = self.hash(shared)
        if state is None:
            attended, chunk = self._attend(shared, value, bucket, counts)
            after = None
            if self.causal:
                fresh = self.make_state(batch, x.dtype, x.device)
                after = _extend(fresh, shared, value, self._code(bucket, chunk).transpose(2, 3), counts)
            return join_heads(attended), after
        # a piece is computed together with everything before it
        joined = _extend(state, shared, value, (bucket * APART).transpose(2, 3), counts)
        bucket = joined.chunks.transpose(2, 3) // APART
        attended, chunk = self._attend(
            joined.keys.to(shared.dtype), joined.values.to(value.dtype), bucket, joined.total
        )
        place = state.total[:, None] + torch.arange(time, device=x.device)
        place = place.clamp(max=max(attended.shape[2] - 1, 0))[:, None, :, None]
        attended = attended.gather(2, place.expand(-1, self.heads, -1, self.d_head))
        real = torch.arange(chunk.shape[3], device=x.device) < joined.total[:, None]
        codes = torch.where(real[:, None, None], self._code(bucket, chunk), 0)
        return join_heads(attended), joined._replace(chunks=codes.transpose(2, 3))

    def hash(self, shared: Tensor) -> Tensor:
        """(batch, heads, hashes, time): the bucket of each token in each round."""
        shape = *shared.shape[:2], self.config.hashes, shared.shape[2]
        if self.config.buckets == 1:
            return torch.zeros(shape, dtype=torch.int64, device=shared.device)
        with torch.autocast(shared.device.type, enabled=False):
            wide = widen(shared.detach())
            turned = torch.einsum("bhtd,hdrk->bhrtk", wide, self.rotations.to(wide.dtype))
            return torch.cat([turned, -turned], dim=-1).argmax(dim=-1)

    def _arrange(self, bucket: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, int]:
        """Put tokens into chunks.

        Returns:
            Place and chunk of every token, (batch, heads, hashes, time), and the number of chunks. Chunks are
            neighbors if their numbers differ by one.
        """
        time, size, buckets = bucket.shape[-1], self.config.chunk_size, self.config.buckets
        real = (torch.arange(time, device=bucket.device) < counts[:, None])[:, None, None]
        sorting = torch.where(real, bucket, buckets)  # padding comes last
        order = sorting.argsort(dim=-1, stable=True)
        steps = torch.arange(time, device=bucket.device).expand(bucket.shape)
        rank = torch.zeros_like(order).scatter(-1, order, steps)
        if not self.causal:
            return rank, torch.where(real, rank // size, NOWHERE).to(torch.int32), -(-time // size)
        held = torch.zeros(*bucket.shape[:-1], buckets + 1, dtype=torch.int64, device=bucket.device)
        held = held.scatter_add(-1, sorting, torch.ones_like(sorting))
        rank = rank - (held.cumsum(-1) - held).gather(-1, sorting)  # inside the bucket
        needed = -(-held // size)
        begin = (needed.cumsum(-1) - needed).gather(-1, sorting) * size
        chunks = time // size + min(buckets, time)  # enough, however the tokens fall
        place = torch.where(real, begin + rank, chunks * size)
        chunk = bucket * self._gap(time) + rank // size
        return place, torch.where(real, chunk, NOWHERE).to(torch.int32), chunks

    def _gap(self, time: int) -> int:
        """More chunks than any bucket has, so that chunks of different buckets are never neighbors."""
        return time // self.config.chunk_size + 2

    def _code(self, bucket: Tensor, chunk: Tensor) -> Tensor:
        """Bucket and chunk inside the bucket as the state keeps them, for any length of the sequence."""
        return bucket * (APART - self._gap(bucket.shape[-1])) + chunk

    def _attend(self, shared: Tensor, value: Tensor, bucket: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of the first `counts` of (batch, heads, time, d_head), and the chunk of every token."""
        time, d_head = shared.shape[2:]
        rounds, size = self.config.hashes, self.config.chunk_size
        place, chunk, chunks = self._arrange(bucket, counts)
        chunks = max(chunks, 1)
        # the token at each place, or number `time`: nothing
        token = torch.full((*bucket.shape[:-1], chunks * size + 1), time, device=shared.device)
        steps = torch.arange(time, device=shared.device).expand(bucket.shape)
        token = token.scatter(-1, place.clamp(max=chunks * size), steps)[..., :-1]

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
        if self.causal:
            visible = visible & (key_token[..., None, :] <= token[..., None])
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
        back = place.clamp(max=chunks * size - 1)
        attended = attended.flatten(3, 4).gather(3, back[..., None].expand(-1, -1, -1, -1, d_head))
        total = total.flatten(3).gather(3, back)
        weight = torch.softmax(total, dim=2)[..., None].to(attended.dtype)
        return (attended * weight).sum(dim=2), chunk

    @property
    def grows(self) -> bool:
        return self.causal

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> ReformerState:
        empty = torch.zeros(batch, self.heads, 0, self.d_head, dtype=dtype, device=device)
        chunks = torch.zeros(batch, self.heads, 0, self.config.hashes, dtype=torch.int64, device=device)
        total = torch.zeros(batch, dtype=torch.int64, device=device)
        return ReformerState(empty, empty.clone(), chunks, total)

    def advance(
        self, x: Tensor, state: ReformerState, mask: Tensor | None = None, inplace: bool = False
    ) -> MixerOutput:
        attended, after = self._attend_step(self.block.open(x, mask), state, mask, inplace)
        y = self.block.close(x, attended, mask)
        return MixerOutput(keep_rows(mask, y), after)

    def _attend_step(
        self, x: Tensor, state: ReformerState, mask: Tensor | None, inplace: bool
    ) -> tuple[Tensor, ReformerState]:
        """Attention of one token (batch, width) to all earlier ones in its chunks."""
        shared, value = self._project(x[:, None])
        bucket = self.hash(shared).transpose(2, 3)  # (batch, heads, 1, hashes)
        slot = torch.arange(state.keys.shape[2], device=x.device)
        before = (slot < state.total[:, None])[:, None, :, None]
        rank = ((state.chunks // APART == bucket) & before).sum(dim=2)
        chunk = bucket[:, :, 0] * APART + rank // self.config.chunk_size
        held = append(Cache(*state[:2], state.total), shared[:, :, 0], value[:, :, 0], mask, inplace)
        codes = Cache(state.chunks, state.chunks[..., :0], state.total)
        codes = append(codes, chunk, chunk[..., :0], mask, inplace)
        after = ReformerState(held.keys, held.values, codes.keys, held.total)
        used = int(held.total.max()) if held.total.numel() else 0
        slot = torch.arange(used, device=x.device)
        apart = chunk[:, :, None] - codes.keys[:, :, :used]
        visible = ((apart == 0) | (apart == 1)).any(dim=-1) & (slot < held.total[:, None])[:, None]
        query = widen(shared)
        scores = (query @ _unit(widen(held.keys[:, :, :used])).transpose(-1, -2))[:, :, 0]
        newest = (slot == held.total[:, None] - 1)[:, None]
        scores = torch.where(newest, SELF, scores).masked_fill(~visible, HIDDEN)
        weights = torch.softmax(scores, dim=-1).to(value.dtype)[:, :, None]
        return join_heads(weights @ held.values[:, :, :used].to(value.dtype))[:, 0], after


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


def _extend(
    state: ReformerState, keys: Tensor, values: Tensor, chunks: Tensor, counts: Tensor
) -> ReformerState:
    """The state with the first `counts` of (batch, heads, time, ...) after what each sequence has."""
    held = extend(Cache(*state[:2], state.total), keys, values, counts)
    codes = extend(
        Cache(state.chunks, state.chunks[..., :0], state.total),
        chunks,
        chunks[..., :0],
        counts,
        held.keys.shape[2],
    )
    return ReformerState(held.keys, held.values, codes.keys, held.total)
