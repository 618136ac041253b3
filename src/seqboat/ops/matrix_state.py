"""Recurrences whose state is a matrix per head, computed in blocks: Mamba-2 and the gated delta rule.

    S_t = g_t S_{t-1} + k_t^T v_t                                     y_t = q_t S_t        `gated_sum`
    S_t = g_t S_{t-1} + b_t k_t^T (v_t - g_t k_t S_{t-1})             y_t = q_t S_t        `gated_delta`

Rows are keys, columns are values. Inside a block both are products of (size, size) matrices; a state connects the
blocks, which is the only loop. Decays g come as logarithms, at most 0, and are only ever summed: no quotient of
products can overflow, and no difference of large sums loses digits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decays_between(log_decay: Tensor) -> Tensor:
    """(..., size, size): the decay of what token j wrote when token i reads it; zero if j is later.

    Args:
        log_decay: (..., size).
    """
    size = log_decay.shape[-1]
    sums = log_decay[..., None].expand(*log_decay.shape, size).tril(-1).cumsum(dim=-2)
    later = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).triu(1)
    return sums.masked_fill(later, -torch.inf).exp()


def _in_blocks(x: Tensor, size: int, dim: int) -> Tensor:
    """Cut a dimension into blocks, at least one, the last one filled up with zeros."""
    time = x.shape[dim]
    blocks = max(-(-time // size), 1)
    padding = [0, 0] * (x.dim() - 1 - dim) + [0, blocks * size - time]
    return F.pad(x, padding).unflatten(dim, (blocks, size))


def gated_sum(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, start: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of all tokens so far, each decayed since then, read by queries; all heads share the keys.

    Args:
        query, key: (batch, time, d_key).
        value: (batch, time, heads, d_value), zero on padding.
        log_decay: (batch, time, heads), zero on padding.
        start: (batch, d_key, heads, d_value) or None for zeros.
        size: tokens per block.

    Returns:
        y: (batch, time, heads, d_value).
        state: as `start`, after the last token.
    """
    time = query.shape[1]
    query, key, value, log_decay = (_in_blocks(part, size, 1) for part in (query, key, value, log_decay))
    heads, d_value = value.shape[3:]
    by_head = log_decay.transpose(2, 3)  # (batch, blocks, heads, size)
    between = decays_between(by_head)
    since_start = by_head.cumsum(dim=-1).exp()
    scores = torch.matmul(query, key.transpose(-1, -2))[:, :, None] * between
    y = torch.matmul(scores, value.transpose(2, 3)).transpose(2, 3)
    # what each block adds to the state, and by how much the state decays meanwhile
    until_end = between[..., -1, :].transpose(2, 3)[..., None]
    added = torch.matmul(key.transpose(-1, -2), (value * until_end).flatten(3)).unflatten(3, (heads, d_value))
    decay = since_start[..., -1][:, :, None, :, None]
    state = torch.zeros_like(added[:, 0]) if start is None else start
    entering = []
    for more, less in zip(added.unbind(1), decay.unbind(1), strict=True):
        entering.append(state)
        state = torch.addcmul(more, less, state)
    old = torch.matmul(query, torch.stack(entering, dim=1).flatten(3)).unflatten(3, (heads, d_value))
    y = torch.addcmul(y, old, since_start.transpose(2, 3)[..., None])
    return y.flatten(1, 2)[:, :time], state


def gated_sum_step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `gated_sum`, for one token: all arguments without the dimension of time."""
    added = key[:, :, None, None] * value[:, None]
    state = torch.addcmul(added, log_decay.exp()[:, None, :, None], state)
    y = torch.einsum("bk,bkhv->bhv", query, state)
    return y, state


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    start: Tensor | None,
    size: int,
) -> tuple[Tensor, Tensor]:
    """As `gated_sum`, but each token first subtracts what the state already holds under its key.

    The corrections of a block depend on each other: they solve a triangular system, for the values and for the keys
    that read the state at the beginning of the block.

    Args:
        query, key: (batch, heads, time, d_key); keys of unit length.
        value: (batch, heads, time, d_value).
        log_decay: (batch, heads, time), zero on padding.
        rate: (batch, heads, time) in [0, 1], zero on padding: how much of the old value is replaced.
        start: (batch, heads, d_key, d_value) or None for zeros.
        size: tokens per block.

    Returns:
        y: (batch, heads, time, d_value).
        state: as `start`, after the last token.
    """
    time, d_value = value.shape[2:]
    query, key, value = (_in_blocks(part, size, 2) for part in (query, key, value))
    log_decay, rate = (_in_blocks(part, size, 2) for part in (log_decay, rate))
    between = decays_between(log_decay)
    since_start = log_decay.cumsum(dim=-1).exp()
    turned = key.transpose(-1, -2)
    system = torch.matmul(key * rate[..., None], turned) * between
    wanted = torch.cat([value * rate[..., None], key * (rate * since_start)[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    fresh, reading = solved.split([d_value, key.shape[-1]], dim=-1)
    writing = turned * between[..., -1:, :]
    decay = since_start[..., -1, None, None]
    state = torch.zeros_like(writing[:, :, 0] @ fresh[:, :, 0]) if start is None else start
    entering, corrections = [], []
    parts = (part.unbind(2) for part in (fresh, reading, writing, decay))
    for new, read, write, less in zip(*parts, strict=True):
        correction = new - torch.matmul(read, state)
        entering.append(state)
        corrections.append(correction)
        state = torch.addcmul(torch.matmul(write, correction), less, state)
    scores = torch.matmul(query, turned) * between
    y = torch.matmul(scores, torch.stack(corrections, dim=2))
    y = y + torch.matmul(query * since_start[..., None], torch.stack(entering, dim=2))
    return y.flatten(2, 3)[:, :, :time], state


def gated_delta_step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `gated_delta`, for one token: all arguments without the dimension of time."""
    decayed = log_decay.exp()[..., None, None] * state
    found = torch.einsum("bhk,bhkv->bhv", key, decayed)
    correction = rate[..., None] * (value - found)
    state = torch.addcmul(decayed, key[..., None], correction[..., None, :])
    return torch.einsum("bhk,bhkv->bhv", query, state), state
