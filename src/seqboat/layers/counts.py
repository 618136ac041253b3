"""Counting active tokens: the one place that says what a router did on a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqboat.core.checks import check_mask
from seqboat.layers.packing import Routing


class TokenCounts(NamedTuple):
    """How many tokens a router activated, per sequence."""

    active: Tensor
    """(batch, modules): real tokens that activated each module"""
    tokens: Tensor
    """(batch,): real tokens"""


@torch.no_grad()
def count_tokens(routing: Routing, mask: Tensor | None = None) -> TokenCounts:
    """Count the active tokens of a batch.

    >>> active = torch.tensor([[[True], [False], [True]]])
    >>> counts = count_tokens(Routing(active, active.float()), torch.tensor([[True, True, False]]))
    >>> counts.active.tolist(), counts.tokens.tolist()
    ([[1]], [2])

    Args:
        routing: from a layer's output.
        mask: (batch, time), True on real tokens.
    """
    active = routing.active
    batch, time, _ = active.shape
    if mask is None:
        return TokenCounts(active.sum(dim=1), torch.full((batch,), time, device=active.device))
    check_mask(mask, active)
    return TokenCounts((active & mask[..., None]).sum(dim=1), mask.sum(dim=1))


def count_layers(
    routings: Sequence[Routing | None], masks: Sequence[Tensor | None] = (None,)
) -> list[TokenCounts | None]:
    """What each layer of a model did, summed over the batch: (modules,) active tokens and () real ones.

    Args:
        routings: of all layers, from the model's output; of several sequences one after the other.
        masks: (batch, time) each, one per sequence.
    """
    layers = len(routings) // len(masks)
    found: list[TokenCounts | None] = [None] * layers
    for number, routing in enumerate(routings):
        if routing is None:
            continue
        active, tokens = (part.sum(dim=0) for part in count_tokens(routing, masks[number // layers]))
        before = found[number % layers]
        if before is not None:
            active, tokens = active + before.active, tokens + before.tokens
        found[number % layers] = TokenCounts(active, tokens)
    return found


class Activation(NamedTuple):
    """What one router did on a batch, per module."""

    rate: Tensor
    """(modules,): fraction of the real tokens that were activated"""
    confidence: Tensor
    """(modules,): mean confidence over the activated tokens; zero if there are none"""
    per_row: Tensor
    """(batch, modules): fraction of each sequence's real tokens that were activated"""


@torch.no_grad()
def activation(routing: Routing, mask: Tensor | None = None) -> Activation:
    """Measure what a router did; nothing of this is computed unless asked for.

    Args:
        routing: from a layer's output.
        mask: (batch, time), True on real tokens.

    Returns:
        `rate` and `confidence` of shape (modules,), and `per_row` of shape (batch, modules).

    >>> import torch
    >>> from seqboat import Routing, activation
    >>> active = torch.tensor([[[True], [False], [True], [False]]])
    >>> activation(Routing(active, active.float())).rate.tolist()
    [0.5]
    """
    active, tokens = count_tokens(routing, mask)
    confidence = routing.confidence
    if mask is not None:
        confidence = torch.where(mask[..., None], confidence, 0)
    return Activation(
        rate=active.sum(dim=0) / tokens.sum().clamp(min=1),
        confidence=confidence.sum(dim=(0, 1)) / active.sum(dim=0).clamp(min=1),
        per_row=active / tokens[:, None].clamp(min=1),
    )
