"""Packed input: documents concatenated into one sequence instead of padded side by side.

`cu_seqlens`, the convention of variable-length attention, says where each document begins: documents of 3 and 2
tokens are `[0, 3, 5]`. Every layer then treats each document as a sequence by itself: states, working memories,
positions and limits are reset at its first token, and the result is that of the document alone. A state belongs to
a sequence of the batch: its first document continues from it, and the state of its last document is returned.

Layers see the documents as one sequence (1, tokens, dim), real tokens first. What can only be computed on padded
sequences is moved to (documents, longest, dim) and back by `Documents.spread` and `Documents.collect`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.core.checks import check_mask, require
from seqboat.core.padding import Alignment, align
from seqboat.core.state import State, concat_rows, map_state, select_rows


class DocumentBlocks(NamedTuple):
    """Documents laid out in blocks of tokens, each document beginning a new block."""

    place: Tensor
    """(tokens,): where each token goes"""
    group: Tensor
    """(blocks,): the document of each block"""
    first: Tensor
    """(documents + 1,): the first block of each document, and the number of blocks of all"""
    reach: int
    """blocks of the longest document, or a bound if the host does not know it"""


@dataclass(frozen=True, eq=False)
class Documents:
    """Where the documents of a packed sequence begin and end."""

    offsets: Tensor
    """(documents + 1,): where each begins among the real tokens, and the end of the last"""
    number: Tensor
    """(tokens,): the document of each token; the number of documents for padding"""
    position: Tensor
    """(tokens,): the position of each token in its document"""
    mask: Tensor | None
    """(1, tokens): True on real tokens, which come first; None if nothing is padded"""
    first: Tensor
    """(batch,): the first document of each sequence"""
    last: Tensor
    """(batch,): the last document of each sequence"""
    shape: tuple[int, int]
    """batch and time of the input that was packed"""
    plan: Alignment | None = None
    """how its real tokens were moved to the front"""
    _blocks: dict[int, DocumentBlocks] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """Number of documents."""
        return self.offsets.shape[0] - 1

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document. The host waits for the device to learn it."""
        return int(self.offsets.diff().max()) if self.count else 0

    @cached_property
    def real(self) -> Tensor:
        """(documents, longest): True on the tokens of padded documents."""
        return torch.arange(self.longest, device=self.offsets.device) < self.offsets.diff()[:, None]

    def pull(self, x: Tensor) -> Tensor:
        """The packed sequence (1, tokens, ...) of an input (batch, time, ...); zeros on padding."""
        flat = x.reshape(1, -1, *x.shape[2:])
        return flat if self.plan is None else self.plan.pull(flat)

    def push(self, y: Tensor) -> Tensor:
        """The inverse of `pull`."""
        flat = y if self.plan is None else self.plan.push(y)
        return flat.reshape(*self.shape, *y.shape[2:])

    def spread(self, x: Tensor) -> Tensor:
        """The documents of a packed sequence (1, tokens, ...) side by side: (documents, longest, ...), padded."""
        places = self.offsets[:-1, None] + torch.arange(self.longest, device=x.device)
        places = places.clamp(max=max(x.shape[1] - 1, 0))
        rows = x[0].index_select(0, places.flatten()).view(*places.shape, *x.shape[2:])
        return torch.where(self.real.view(*self.real.shape, *(1,) * (x.dim() - 2)), rows, x.new_zeros(()))

    def collect(self, y: Tensor) -> Tensor:
        """The inverse of `spread`; zeros on padding."""
        flat = y.flatten(0, 1)
        if flat.shape[0] == 0:
            return y.new_zeros(1, self.number.shape[0], *y.shape[2:])
        place = self.number * self.longest + self.position
        if self.mask is None:
            return flat.index_select(0, place)[None]
        rows = flat.index_select(0, place.clamp(max=flat.shape[0] - 1))[None]
        return torch.where(self.mask.view(*self.mask.shape, *(1,) * (y.dim() - 2)), rows, y.new_zeros(()))

    def of_first(self, values: Tensor) -> Tensor:
        """(documents, ...): values (batch, ...) for the first document of each sequence, zeros for the others."""
        return values.new_zeros(self.count, *values.shape[1:]).index_copy(0, self.first, values)

    def enter(self, state: State, fresh: State) -> State:
        """The state before each document, from that of each sequence; `fresh` is an empty one of one sequence."""
        numbers = torch.arange(1, self.shape[0] + 1, device=self.first.device)
        return select_rows(concat_rows([fresh, state]), self.of_first(numbers))

    def leave(self, state: State) -> State:
        """The state after the last document of each sequence, from that after each document."""
        return select_rows(state, self.last)

    def still(self, state: State) -> State:
        """The state of the sequences whose first document is also their last; zeros for the others."""
        same = self.first == self.last
        return map_state(
            lambda part: torch.where(same.view(-1, *(1,) * (part.dim() - 1)), part, part.new_zeros(())), state
        )

    def sums(self, flags: Tensor) -> Tensor:
        """(..., documents): how many tokens of each document are marked in (..., tokens)."""
        return F.pad(flags.cumsum(dim=-1), (1, 0)).index_select(-1, self.offsets).diff(dim=-1)

    def blocks(self, size: int) -> DocumentBlocks:
        """The layout in blocks of this many tokens; computed once for all layers."""
        if size not in self._blocks:
            tokens, lengths = self.number.shape[0], self.offsets.diff()
            first = F.pad(((lengths + size - 1) // size).cumsum(dim=0), (1, 0))
            # a bound, so that the host need not wait: every document, and the padding, may leave a block unfilled
            count = tokens // size + self.count + 1
            block = torch.arange(count, device=lengths.device)
            group = torch.bucketize(block, first[1:], right=True)
            known = self.offsets.device.type == "cpu" and not torch.compiler.is_compiling()
            longest = self.longest if known and self.mask is None else tokens
            place = first.index_select(0, self.number) * size + self.position
            self._blocks[size] = DocumentBlocks(place, group, first, -(-longest // size))
        return self._blocks[size]


def find_documents(cu_seqlens: Tensor, x: Tensor, mask: Tensor | None = None) -> Documents:
    """The documents of a batch.

    Args:
        cu_seqlens: (documents + 1,), where each document begins in the flattened (batch * time) input, and where the
            last one ends, which is batch * time. Documents end with their sequence, and may be empty: an empty one
            at the beginning of a sequence takes its state, so that what follows starts from an empty one.
        x: (batch, time, ...), the input.
        mask: (batch, time), True on real tokens, in any pattern: padding belongs to no document.
    """
    batch, time = x.shape[:2]
    starts = torch.arange(batch, device=x.device) * time
    _check(cu_seqlens, batch * time, starts)
    offsets, plan, real = cu_seqlens.long(), None, None
    most = max(offsets.shape[0] - 2, 0)
    first = torch.searchsorted(offsets, starts).clamp(max=most)
    last = torch.bucketize(starts + max(time - 1, 0), offsets[1:], right=True).clamp(max=most)
    if mask is not None:
        check_mask(mask, x)
        plan = align(mask.reshape(1, -1))
        real = plan.mask
        offsets = F.pad(mask.flatten().cumsum(dim=0), (1, 0)).index_select(0, offsets)
    places = torch.arange(batch * time, device=x.device)
    number = torch.bucketize(places, offsets[1:], right=True)
    return Documents(offsets, number, places - offsets[number], real, first, last, (batch, time), plan)


def _check(cu_seqlens: Tensor, tokens: int, starts: Tensor) -> None:
    device = starts.device
    require(isinstance(cu_seqlens, Tensor), f"cu_seqlens must be a tensor, got {type(cu_seqlens).__name__}")
    shape = tuple(cu_seqlens.shape)
    require(
        cu_seqlens.dim() == 1 and shape[0] > 0 and cu_seqlens.dtype in (torch.int32, torch.int64),
        f"cu_seqlens must be int32 or int64 of shape (documents + 1,), got {cu_seqlens.dtype} of shape {shape}",
    )
    require(
        cu_seqlens.device == device, f"cu_seqlens is on {cu_seqlens.device} but its sequence is on {device}"
    )
    if device.type == "cpu" and not torch.compiler.is_compiling():
        # elsewhere, looking at the values would make the host wait
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        require(
            first == 0 and last == tokens and bool((cu_seqlens.diff() >= 0).all()),
            f"cu_seqlens must increase from 0 to batch * time = {tokens}, got {cu_seqlens.tolist()[:8]} .. {last}",
        )
        require(
            bool(torch.isin(starts, cu_seqlens).all()),
            f"every one of the {len(starts)} sequences must begin a document, or be part of one long sequence: "
            "reshape the input to (1, batch * time)",
        )
