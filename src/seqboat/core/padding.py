"""Padding: a masked batch is the same as its real tokens, moved to the front of each sequence.

Padding does not exist for any layer: it takes no position, decays no state and is never routed. Whatever the
pattern of the mask (left, right, interior), the real tokens are first moved to the front of their sequence, keeping
their order, and results are moved back afterward. A model does this once, on its token ids; a layer called directly
does it on its inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Aligned(NamedTuple):
    """A mask known to hold the real tokens of each sequence first; layers then move nothing."""

    mask: Tensor
    """(batch, time), True on real tokens"""


class Alignment(NamedTuple):
    """Where each token of a left-aligned batch came from."""

    order: Tensor
    """(batch, time): index in the original sequence of the token at this place"""
    mask: Tensor
    """(batch, time): True on the real tokens of the aligned sequences"""

    def pull(self, x: Tensor) -> Tensor:
        """Move the real tokens of (batch, time, ...) to the front of their sequences; padding becomes zero."""
        trailing = (1,) * (x.dim() - 2)
        order = self.order.view(*self.order.shape, *trailing).expand_as(x)
        keep = self.mask.view(*self.mask.shape, *trailing)
        return torch.where(keep, x.gather(1, order), x.new_zeros(()))

    def push(self, y: Tensor) -> Tensor:
        """Move the tokens of an aligned (batch, time, ...) back to where they came from."""
        trailing = (1,) * (y.dim() - 2)
        order = self.order.view(*self.order.shape, *trailing).expand_as(y)
        return torch.zeros_like(y).scatter(1, order, y)


def front_places(chosen: Tensor) -> Tensor:
    """Where each token goes when the chosen ones of a sequence move to its front; all keep their order.

    >>> front_places(torch.tensor([[False, True, False, True]])).tolist()
    [[2, 0, 3, 1]]

    Args:
        chosen: (batch, time) bool.
    """
    front = chosen.cumsum(dim=1)
    # a token that stays behind comes after all the chosen ones, and after those before it that were not
    behind = torch.arange(chosen.shape[1], device=chosen.device) - front + front[:, -1:]
    return torch.where(chosen, front - 1, behind)


def align(mask: Tensor) -> Alignment:
    """Plan the move of the real tokens of every sequence to its front.

    >>> plan = align(torch.tensor([[False, True, False, True]]))
    >>> plan.pull(torch.tensor([[7, 8, 9, 10]])).tolist()
    [[8, 10, 0, 0]]
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    order = torch.empty_like(mask, dtype=torch.int64).scatter_(1, front_places(mask), places.expand_as(mask))
    return Alignment(order, places < mask.sum(dim=1, keepdim=True))


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Write zeros over the padding of (batch, time, ...), whatever was there, NaN included."""
    if mask is None:
        return x
    return torch.where(mask.view(*mask.shape, *(1,) * (x.dim() - 2)), x, x.new_zeros(()))
