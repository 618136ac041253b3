"""Steering toward a rate: where the border between active and inactive lies, and how a running value follows it.

Budgets shift the log-odds of decisions this way, retrofitted modules move their thresholds. In training the border
of each batch decides in that batch; its running value decides at inference, where a decision depends on the token
alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqboat.layers.packing import Routing


def border_at_rate(score: Tensor, allowed: Tensor, rate: Tensor) -> Tensor:
    """(modules,): a score that this fraction of the allowed tokens of a batch exceeds, in float64.

    Args:
        score: (batch, time, modules).
        allowed: (batch, time, 1) bool; the result means nothing if there is none.
        rate: (modules,).
    """
    if not score.shape[0] * score.shape[1]:
        return rate.double()
    ranked = torch.where(allowed, score, -torch.inf).flatten(0, 1).sort(dim=0, descending=True).values
    tokens = allowed.sum()
    count = (rate * tokens).round().long()
    # between the last token above and the first below; beyond the ends if all or none should be above
    last, first = (count - 1).clamp(min=0), torch.minimum(count, (tokens - 1).clamp(min=0))
    above, below = (ranked.gather(0, place[None])[0].double() for place in (last, first))
    return (above + below) / 2 + (count == 0).double() - (count == tokens).double()


def follow(value: Tensor, border: Tensor, weight: float | Tensor) -> Tensor:
    """A running value, moved toward the latest border; it stays where the border is not finite."""
    moved = torch.lerp(value, border.to(value.dtype), weight)
    return torch.where(moved.isfinite(), moved, value)


def rate_loss(routing: Routing, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Squared distance of the activation rates from a target, summed over the modules.

    The rate itself has no gradient: the gradient of the mean probability of all tokens, active or not, replaces it.

    Args:
        routing: from a layer's output.
        target: (modules,) or one number.
        mask: (batch, time), True on real tokens.
    """
    active, probs = routing.active, routing.probs
    if mask is None:
        mask = active.new_ones(active.shape[:2])
    total = mask.sum().clamp(min=1)
    rate = (active & mask[..., None]).sum(dim=(0, 1)) / total
    soft = torch.where(mask[..., None], probs, 0).sum(dim=(0, 1)) / total
    error = rate.to(soft.dtype) - target.to(soft)
    return (error.square() + 2 * error * (soft - soft.detach())).sum()
