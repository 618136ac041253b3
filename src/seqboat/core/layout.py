"""Layout: how the tokens of a batch lie in memory while layers work on them.

Padding does not exist for any layer: it takes no position, decays no state and is never routed. Whatever the pattern
of the mask (left, right, interior), the real tokens first move to the front of their sequence, keeping their order;
results move back at the end. Packed documents do not see each other: `cu_seqlens`, the convention of variable-length
attention, says where each begins, [0, 3, 5] for documents of 3 and 2 tokens. A model does this once, on its inputs; a
layer called directly does it on its own. Every layer gets a `Layout`.

    rows        batch of sequences, real tokens first in each        mask (batch, time)
    packed      documents behind each other in one sequence          offsets, number, position
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.core.checks import check_mask, require


def front_places(chosen: Tensor) -> Tensor:
    """Where each token goes when the chosen ones of a sequence move to its front; all keep their order.

    >>> front_places(torch.tensor([[False, True, False, True]])).tolist()
    [[2, 0, 3, 1]]
    """
    front = chosen.cumsum(dim=1)
    # a token that stays behind comes after all the chosen ones, and after those before it that were not
    behind = torch.arange(chosen.shape[1], device=chosen.device) - front + front[:, -1:]
    return torch.where(chosen, front - 1, behind)


def clear(x: Tensor, mask: Tensor | None) -> Tensor:
    """Write zeros over the padding of (batch, time, ...), whatever was there, NaN included."""
    if mask is None:
        return x
    return torch.where(mask.view(*mask.shape, *(1,) * (x.dim() - 2)), x, x.new_zeros(()))


@dataclass(frozen=True, eq=False)
class Documents:
    """Where the documents of a packed sequence (1, tokens) begin."""

    offsets: Tensor
    """(documents + 1,): where each begins among the real tokens, and the end of the last"""
    number: Tensor
    """(tokens,): the document of each token; the number of documents for padding"""
    position: Tensor
    """(tokens,): the position of each token in its document"""

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document. The host waits for the device to learn it."""
        return int(self.offsets.diff().max()) if len(self.offsets) > 1 else 0

    @property
    def bound(self) -> int:
        """The same, or what it is at most where the host would have to wait."""
        known = self.offsets.device.type == "cpu" and not torch.compiler.is_compiling()
        return self.longest if known else len(self.number)

    @cached_property
    def real(self) -> Tensor:
        """(documents, longest): True on the tokens of documents side by side."""
        return torch.arange(self.longest, device=self.offsets.device) < self.offsets.diff()[:, None]

    def spread(self, x: Tensor) -> Tensor:
        """The documents of a packed sequence (1, tokens, ...) side by side: (documents, longest, ...), padded."""
        places = self.offsets[:-1, None] + torch.arange(self.longest, device=x.device)
        rows = x[0].index_select(0, places.clamp(max=max(x.shape[1] - 1, 0)).flatten())
        return clear(rows.view(*places.shape, *x.shape[2:]), self.real)

    def collect(self, y: Tensor) -> Tensor:
        """The inverse of `spread`; zeros on padding."""
        place = self.number * self.longest + self.position
        spare = torch.cat([y.flatten(0, 1), y.new_zeros(1, *y.shape[2:])])
        place = torch.where(self.number < len(self.offsets) - 1, place, len(spare) - 1)
        return spare.index_select(0, place)[None]


@dataclass(frozen=True, eq=False)
class Layout:
    """How tokens lie. `WHOLE` is a batch without padding, as given."""

    mask: Tensor | None = None
    """(batch, time): True on real tokens, which come first; None if all are"""
    order: Tensor | None = None
    """(batch, time): where each token came from; None if nothing was moved"""
    documents: Documents | None = None
    """what the sequence is made of, if it is packed"""
    shape: tuple[int, int] | None = None
    """batch and time of a packed input, before it became one sequence"""

    def pull(self, x: Tensor) -> Tensor:
        """The tokens of (batch, time, ...) in this layout; zeros on padding."""
        x = x if self.shape is None else x.reshape(1, -1, *x.shape[2:])
        if self.order is None:
            return clear(x, self.mask)
        order = self.order.view(*self.order.shape, *(1,) * (x.dim() - 2)).expand_as(x)
        return clear(x.gather(1, order), self.mask)

    def push(self, y: Tensor) -> Tensor:
        """The inverse of `pull`."""
        if self.order is not None:
            order = self.order.view(*self.order.shape, *(1,) * (y.dim() - 2)).expand_as(y)
            y = torch.zeros_like(y).scatter(1, order, y)
        return y if self.shape is None else y.reshape(*self.shape, *y.shape[2:])

    def lengths(self, x: Tensor) -> Tensor:
        """(batch,): real tokens of each sequence of x (batch, time, ...)."""
        if self.mask is None:
            return torch.full((x.shape[0],), x.shape[1], device=x.device)
        return self.mask.sum(dim=1)


WHOLE = Layout()
"""The layout of a batch without padding, as given."""


def find_layout(x: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Layout:
    """The layout of a batch (batch, time, ...) with any mask, or of packed documents.

    Args:
        x: the input.
        mask: (batch, time), True on real tokens, in any pattern; of packed input, padding belongs to no document.
        cu_seqlens: (documents + 1,), where each document begins in the flattened (batch * time) input, and the end of
            the last. Documents end with their sequence, and may be empty.

    >>> layout = find_layout(torch.tensor([[7, 8, 9, 10]]), torch.tensor([[False, True, False, True]]))
    >>> layout.pull(torch.tensor([[7, 8, 9, 10]])).tolist()
    [[8, 10, 0, 0]]
    """
    if mask is not None:
        check_mask(mask, x)
    if cu_seqlens is None:
        return WHOLE if mask is None else front(mask)
    batch, time = x.shape[:2]
    _check_starts(cu_seqlens, batch, time, x.device)
    offsets, moved = cu_seqlens.long(), WHOLE
    if mask is not None:
        moved = front(mask.reshape(1, -1))
        offsets = F.pad(mask.flatten().cumsum(dim=0), (1, 0)).index_select(0, offsets)
    places = torch.arange(batch * time, device=x.device)
    number = torch.bucketize(places, offsets[1:], right=True)
    return Layout(
        moved.mask, moved.order, Documents(offsets, number, places - offsets[number]), (batch, time)
    )


def front(mask: Tensor) -> Layout:
    """The layout in which the real tokens of every sequence have moved to its front."""
    places = torch.arange(mask.shape[1], device=mask.device)
    order = torch.empty_like(mask, dtype=torch.int64).scatter_(1, front_places(mask), places.expand_as(mask))
    return Layout(places < mask.sum(dim=1, keepdim=True), order)


def _check_starts(cu_seqlens: Tensor, batch: int, time: int, device: torch.device) -> None:
    require(isinstance(cu_seqlens, Tensor), f"cu_seqlens must be a tensor, got {type(cu_seqlens).__name__}")
    shape = tuple(cu_seqlens.shape)
    require(
        cu_seqlens.dim() == 1 and shape[0] > 0 and cu_seqlens.dtype in (torch.int32, torch.int64),
        f"cu_seqlens must be int32 or int64 of shape (documents + 1,), got {cu_seqlens.dtype} of shape {shape}",
    )
    require(
        cu_seqlens.device == device, f"cu_seqlens is on {cu_seqlens.device} but its sequence is on {device}"
    )
    if device.type != "cpu" or torch.compiler.is_compiling():
        return  # looking at the values would make the host wait
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    require(
        first == 0 and last == batch * time and bool((cu_seqlens.diff() >= 0).all()),
        f"cu_seqlens must increase from 0 to batch * time = {batch * time}, "
        f"got {cu_seqlens.tolist()[:8]} .. {last}",
    )
    require(
        bool(torch.isin(torch.arange(batch) * time, cu_seqlens).all()),
        f"every one of the {batch} sequences must begin a document, or be part of one long sequence: "
        "reshape the input to (1, batch * time)",
    )
