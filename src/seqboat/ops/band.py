"""The geometry of banded attention: blocks of queries against the neighboring blocks of keys.

The tokens of all sequences form one packed array, and each token sees its neighbors. The keys of a block of queries
are a view of that array, so nothing is copied; scores exist for a few blocks at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.ops.functions import HIDDEN

SCORES_AT_ONCE = {"cpu": 1 << 19, "gpu": 1 << 26}
"""Scores held at a time. On a CPU they fit in a core's cache (measured in docs/performance.md); the number for GPUs
bounds their memory to 256 MB, and its speed has not been measured."""


def scores_at_once(x: Tensor) -> int:
    """How many scores to hold at a time on the device of x."""
    return SCORES_AT_ONCE["cpu" if on_cpu(x) else "gpu"]


def on_cpu(x: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device."""
    return str(getattr(x, "stands_for", x.device.type)) == "cpu"


NEIGHBORS = "Tensor group, Tensor? position, Tensor? table, int left, int right, str attention, float scale"
"""The part of an operator's schema that `Neighbors` holds."""


class Neighbors(NamedTuple):
    """Which keys a token sees, and how they are scored."""

    group: Tensor
    """(tokens,): a token sees only keys of the same group; groups are contiguous"""
    position: Tensor | None
    """(tokens,): coordinates for the distances of the bias; None takes indices into the packed array"""
    table: Tensor | None
    """(2 * max distance + 1,): bias per distance key - query; larger distances use the first or last entry"""
    left: int
    """how many tokens a token sees before itself"""
    right: int
    """how many tokens a token sees after itself"""
    attention: str
    """name of the attention function"""
    scale: float
    """multiplies the products of queries and keys"""


def confine(
    backward: Callable[..., tuple[Tensor, ...]],
    grad: Tensor,
    kept: tuple[Tensor, ...],
    group: Tensor,
    per_token: int,
) -> tuple[Tensor, ...]:
    """Run a backward pass so that what is not finite in one group reaches no token of another.

    A block holds tokens of several groups, and the weights between them, which are zero, times NaN would be NaN. This
    covers gradients that are not finite, and tokens so large that a product of theirs overflows.

    Args:
        backward: from the gradient of the outputs, and `kept`, to the gradients of the inputs.
        grad: (tokens, dim), of the outputs.
        kept: what the pass reads of the forward pass, each (tokens, ...).
        group: (tokens,), as in `Neighbors`.
        per_token: how many of the results are (tokens, ...); the others are sums over all tokens.
    """
    # on a CPU looking costs nothing compared to the pass itself; elsewhere it would wait for the device
    if on_cpu(grad):
        results = backward(grad, *kept)
        if all(part.sum().isfinite() for part in results[:per_token]):
            return results
    # four factors at most meet in a product
    bad = torch.zeros_like(group, dtype=torch.bool)
    for part in (grad, *kept):
        bad |= ~(part.abs() < torch.finfo(part.dtype).max ** 0.25).all(dim=-1)
    results = backward(*(torch.where(bad[:, None], 0, part) for part in (grad, *kept)))
    if len(group) == 0:
        return results
    number = torch.cat([torch.zeros_like(group[:1]), (group[1:] != group[:-1]).cumsum(0)])
    counts = torch.zeros_like(number).index_add_(0, number, bad.to(number.dtype))
    spoiled = torch.where(counts[number] > 0, torch.nan, 0.0).to(grad.dtype)[:, None]
    total = spoiled.sum()
    return tuple(
        part + (spoiled if place < per_token else total).to(part.dtype) for place, part in enumerate(results)
    )


class Band:
    """n blocks of queries, each with the blocks of keys that lie `before` and `after` it."""

    def __init__(self, x: Tensor, left: int, right: int) -> None:
        reach = max(left, right)
        # blocks of a quarter of the reach compute few masked scores; below 16 or above 128, matrix products get slow
        self.size = min(128, max(16, 1 << max(reach // 2, 1).bit_length() - 1))
        self.left, self.right = left, right
        self.before = -(-left // self.size)
        self.after = -(-right // self.size)
        self.tokens = x.shape[0]
        self.blocks = -(-self.tokens // self.size)
        self.width = (self.before + 1 + self.after) * self.size
        self.at_once = max(1, scores_at_once(x) // (self.size * self.width))
        starts = range(0, self.blocks, self.at_once)
        self.parts = [(begin, min(begin + self.at_once, self.blocks)) for begin in starts]
        """ranges of blocks that are processed together"""

    def _range(self, x: Tensor, first: int, last: int, fill: float) -> Tensor:
        """Tokens first .. last of (tokens, ...); a view, unless some of them lie outside."""
        inside = x[max(first, 0) : min(last, self.tokens)]
        before, after = max(-first, 0), max(last - self.tokens, 0)
        if before or after:
            inside = F.pad(inside, (0, 0) * (x.dim() - 1) + (before, after), value=fill)
        return inside

    def queries(self, x: Tensor, begin: int, end: int, fill: float = 0) -> Tensor:
        """Blocks begin .. end of (tokens, ...) as (blocks, size, ...)."""
        inside = self._range(x, begin * self.size, end * self.size, fill)
        return inside.unflatten(0, (end - begin, self.size))

    def keys(self, x: Tensor, begin: int, end: int, fill: float = 0) -> Tensor:
        """What blocks begin .. end may see of (tokens, ...), as (blocks, width, ...): overlapping views."""
        first, last = (begin - self.before) * self.size, (end + self.after) * self.size
        return self._windows(self._range(x, first, last, fill), end - begin)

    def _windows(self, x: Tensor, count: int) -> Tensor:
        shape = (count, self.width, *x.shape[1:])
        return x.as_strided(shape, (self.size * x.stride(0), *x.stride()))

    def pad_windows(self, begin: int, end: int, *parts: Tensor) -> list[Tensor]:
        """Like `keys`, for arrays that hold only the tokens that blocks begin .. end may see."""
        first, last = (begin - self.before) * self.size, (end + self.after) * self.size
        around = (0, 0, max(-first, 0), max(last - self.tokens, 0))
        return [self._windows(F.pad(x, around) if any(around) else x, end - begin) for x in parts]

    def sums(self, x: Tensor) -> Tensor:
        """A buffer (blocks of keys, size, dim) for gradients of keys; only its first blocks are zeroed."""
        around = self.before + self.after
        buffer = x.new_empty(self.blocks + around, self.size, x.shape[-1])
        buffer[:around].zero_()
        return buffer

    def add_by_key(
        self, sums: Tensor, begin: int, weights: Tensor, queries: Tensor, scale: float = 1.0
    ) -> None:
        """Add weights^T queries of blocks from `begin` on to the sums of their keys.

        Neighboring blocks have keys in common, so each segment of a block's keys is added separately. The last
        segment holds keys that no earlier block has seen: it is written first and overwrites, so that the buffer
        need not start from zero.
        """
        count = weights.shape[0]
        last = self.before + self.after
        for segment in range(last, -1, -1):
            columns = slice(segment * self.size, (segment + 1) * self.size)
            target = sums[begin + segment : begin + segment + count]
            beta = 0 if segment == last else 1
            target.baddbmm_(weights[:, :, columns].transpose(1, 2), queries, beta=beta, alpha=scale)

    def tokens_of(self, sums: Tensor) -> Tensor:
        """The (tokens, dim) part of a buffer from `sums`."""
        return sums.flatten(0, 1)[self.before * self.size :][: self.tokens]

    def distance(self, device: torch.device) -> Tensor:
        """(size, width): index of the key minus index of the query; the same in every block."""
        query = torch.arange(self.size, device=device)[:, None]
        key = torch.arange(self.width, device=device) - self.before * self.size
        return key - query


class RollingSums:
    """Gradients of keys for the current blocks and their neighbors, in a buffer that moves along the sequence.

    Args:
        band: the geometry.
        like: a tensor with the dtype and device to use.
        dim: width of a key.
    """

    def __init__(self, band: Band, like: Tensor, dim: int) -> None:
        self.band, self.around = band, band.before + band.after
        self.first = -band.before
        """index of the first block in the buffer"""
        blocks = min(band.at_once, band.blocks) + self.around
        self.buffer = like.new_empty(blocks, band.size, dim)
        self.buffer[: self.around].zero_()

    def add(self, weights: Tensor, queries: Tensor, scale: float = 1.0) -> None:
        """Add weights^T queries of the current blocks, as `Band.add_by_key` does."""
        self.band.add_by_key(self.buffer, 0, weights, queries, scale)

    def current(self, count: int) -> Tensor:
        """The sums of the current blocks themselves, (blocks, size, dim)."""
        return self.buffer[self.band.before : self.band.before + count]

    def tokens(self, tokens: slice) -> Tensor:
        """A view of some tokens of the packed array, which must be in the buffer."""
        begin = self.first * self.band.size
        return self.buffer.flatten(0, 1)[tokens.start - begin : tokens.stop - begin]

    def roll(self, count: int) -> None:
        """Move the buffer by `count` blocks."""
        self.buffer[: self.around] = self.buffer[count : count + self.around].clone()
        self.first += count


class BandScores:
    """Scores of a few blocks at a time: products, bias, and HIDDEN where a key is out of reach.

    Args:
        x: (tokens, ...), with the dtype of the scores.
        near: which keys a token sees.
    """

    def __init__(self, x: Tensor, near: Neighbors) -> None:
        self.band = band = Band(x, near.left, near.right)
        self.scale = near.scale
        self.table = None if near.table is None else near.table.to(x.dtype)
        self.group = near.group.to(torch.int32)
        self.mixed: list[int] | None = None
        """the few blocks whose keys belong to several groups; None where finding them would sync with the device"""
        if on_cpu(x):
            seen = band.keys(self.group, 0, band.blocks, -1)
            self.mixed = (seen[:, 1:] != seen[:, :-1]).any(dim=1).nonzero().squeeze(1).tolist()
        distance = band.distance(x.device)
        self.inside = (distance >= -band.left) & (distance <= band.right)
        self.static = torch.zeros(distance.shape, dtype=x.dtype, device=x.device)
        self.position: Tensor | None = None
        if self.table is not None:
            self.max_distance = (self.table.shape[0] - 1) // 2
            if near.position is None:
                self.distance = (distance + self.max_distance).clamp(0, 2 * self.max_distance)
                self.static = self.table[self.distance]
            else:
                self.position = near.position.to(torch.int32)
                # where reading the positions needs no sync, it may save a pass over the scores
                look = on_cpu(x) and len(near.position) > 0
                self.clamped = not look or bool(near.position.max() > self.max_distance)
        self.static = torch.where(self.inside, self.static, HIDDEN)

    def __call__(self, begin: int, end: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Biased scores (blocks, size, width), and the indices of their biases in the table."""
        static = self.static.expand(end - begin, -1, -1)
        scores = torch.baddbmm(static, q, k.transpose(1, 2), alpha=self.scale)
        index = None
        if self.position is not None:
            assert self.table is not None
            key_position = self.band.keys(self.position, begin, end) + self.max_distance
            query_position = self.band.queries(self.position, begin, end)
            index = key_position[:, None, :] - query_position[:, :, None]
            if self.clamped:
                index.clamp_(0, 2 * self.max_distance)
            scores += self.table.index_select(0, index.view(-1)).view(index.shape)
        self._hide_other_groups(scores, begin, end)
        return scores, index

    def _hide_other_groups(self, scores: Tensor, begin: int, end: int) -> None:
        """Write HIDDEN where query and key belong to different groups."""
        mixed = self.mixed
        if mixed is not None:
            mixed = mixed[bisect_left(mixed, begin) : bisect_left(mixed, end)]
            if not mixed:
                return
        # padding belongs to no group: -1 among the keys, -2 among the queries
        query_group = self.band.queries(self.group, begin, end, -2)
        key_group = self.band.keys(self.group, begin, end, -1)
        if mixed is None:
            scores.masked_fill_(query_group[:, :, None] != key_group[:, None, :], HIDDEN)
            return
        for block in mixed:
            other = query_group[block - begin, :, None] != key_group[block - begin]
            scores[block - begin].masked_fill_(other, HIDDEN)


class TableGradient:
    """The gradient of the bias table, collected from the gradients of the scores."""

    def __init__(self, scores: BandScores) -> None:
        self.scores = scores
        self.static = torch.zeros_like(scores.static)
        self.table = self.static.new_zeros(0 if scores.table is None else scores.table.shape[0])

    def add(self, grad_scores: Tensor, index: Tensor | None) -> None:
        """Add the gradient of some blocks' scores; `index` says which entries of the table biased them."""
        if index is not None:
            self.table.index_add_(0, index.view(-1), grad_scores.view(-1))
        elif self.scores.table is not None:
            self.static.add_(grad_scores.sum(dim=0))

    def total(self) -> Tensor:
        """The gradient of the table; empty if there is no table."""
        scores = self.scores
        if scores.table is not None and scores.position is None:
            # a product instead of a choice by mask: the host would wait for the number of places
            inside = self.static * scores.inside
            self.table.index_add_(0, scores.distance.view(-1), inside.view(-1))
        return self.table
