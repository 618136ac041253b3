"""Padding: a masked batch is the same as its real tokens, moved to the front of each row.

Padding tokens do not exist for any layer: they take no position, they do not decay a state, they are never
routed. Whatever the pattern of the mask (left, right, interior), the real tokens are first moved to the
front of their row, keeping their order, and results are moved back afterwards. A model does this once, on
its token ids; a layer called on its own does it on its inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Aligned(NamedTuple):
    """A mask whose rows are known to hold their real tokens first; layers then move nothing."""

    mask: Tensor
    """(batch, time), True on real tokens"""


class Alignment(NamedTuple):
    """Where each token of a left-aligned batch came from."""

    order: Tensor
    """(batch, time): index in the original row of the token at this place of the aligned row"""
    mask: Tensor
    """(batch, time): True on real tokens of the aligned rows"""

    def pull(self, x: Tensor) -> Tensor:
        """Move the real tokens of (batch, time, ...) to the front of their rows; padding becomes zero."""
        trailing = (1,) * (x.dim() - 2)
        order = self.order.view(*self.order.shape, *trailing).expand_as(x)
        keep = self.mask.view(*self.mask.shape, *trailing)
        return torch.where(keep, x.gather(1, order), x.new_zeros(()))

    def push(self, y: Tensor) -> Tensor:
        """Move the tokens of an aligned (batch, time, ...) back to where they came from."""
        trailing = (1,) * (y.dim() - 2)
        order = self.order.view(*self.order.shape, *trailing).expand_as(y)
        return torch.zeros_like(y).scatter(1, order, y)


def align(mask: Tensor) -> Alignment:
    """Plan the move of the real tokens of every row to its front.

    >>> plan = align(torch.tensor([[False, True, False, True]]))
    >>> plan.pull(torch.tensor([[7, 8, 9, 10]])).tolist()
    [[8, 10, 0, 0]]
    """
    order = torch.argsort(mask.logical_not(), dim=1, stable=True)
    lengths = mask.sum(dim=1, keepdim=True)
    places = torch.arange(mask.shape[1], device=mask.device)
    return Alignment(order, places < lengths)


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Write zeros over the padding of (batch, time, ...), whatever was there, NaN included."""
    if mask is None:
        return x
    return torch.where(mask.view(*mask.shape, *(1,) * (x.dim() - 2)), x, x.new_zeros(()))
