"""Spans: what a query sees among the active tokens of its sequence, and what decoding remembers of them.

    memory    the working memory: `window / 2` tokens on either side, or, if causal, the `window` tokens before it
    chunk     its chunk of `window` active tokens
    full      all of them

A slot is a token's place among the active tokens of its sequence. Causal units remember keys and values: the last
`window` of them in a ring, slot s at place s modulo the window; or, with the span "full", all of them.

To add a span, write a class here and give it a name in `SpanName` and `SPANS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.layers.packing import Packed


class WorkingMemory(NamedTuple):
    """The last activated tokens of every sequence."""

    keys: Tensor
    """(batch, places, d_z)"""
    values: Tensor
    """(batch, places, d_v)"""
    positions: Tensor
    """(batch, places), in the original sequence"""
    total: Tensor
    """(batch,): tokens activated so far"""


class Span(ABC):
    """What a query sees.

    Args:
        window: size of the working memory, or of a chunk.
        causal: whether queries see no later key.
    """

    def __init__(self, window: int, causal: bool) -> None:
        self.window, self.causal = window, causal

    @property
    @abstractmethod
    def reach(self) -> int | None:
        """Slots from a query to the furthest key it sees; None if there is no bound."""

    @property
    @abstractmethod
    def others(self) -> int | None:
        """The most keys that a query sees besides its own; None if there is no bound."""

    @abstractmethod
    def visible(self, slot: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """First slot that queries at these slots see, and the one behind the last, among `count` tokens."""

    def keys(self, slot: Tensor, count: int | Tensor, dtype: torch.dtype) -> float | Tensor:
        """The number of keys that scores are scaled by, of queries at these slots among `count` tokens."""
        return self.window

    # what decoding remembers

    def make_state(
        self, batch: int, d_z: int, d_v: int, dtype: torch.dtype, device: torch.device
    ) -> WorkingMemory:
        """An empty memory."""
        places = self.places
        return WorkingMemory(
            torch.zeros(batch, places, d_z, dtype=dtype, device=device),
            torch.zeros(batch, places, d_v, dtype=dtype, device=device),
            torch.zeros(batch, places, dtype=torch.int64, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
        )

    @property
    def places(self) -> int:
        """Places of an empty memory."""
        return self.window

    def remembered(self, count: int) -> int:
        """How many of `count` tokens the next query may see."""
        return min(count, self.window)

    def place(self, slot: Tensor) -> Tensor:
        """Where the tokens at these slots are kept."""
        return slot % self.window

    def held(self, total: Tensor, places: int) -> Tensor:
        """(batch, places): the slot kept at each place after `total` tokens; negative if none."""
        place = torch.arange(places, device=total.device)
        return total[:, None] - 1 - (total[:, None] - 1 - place) % self.window

    def hidden(self, slot: Tensor, places: int) -> Tensor:
        """(batch, places): the places that a query at the next slot does not see."""
        return torch.arange(places, device=slot.device) >= slot[:, None]

    def make_room(
        self, state: WorkingMemory, total: Tensor, more: int = 0, most: int | None = None
    ) -> WorkingMemory:
        """The memory with room for `total + more` tokens per sequence; `most` is the largest total if known."""
        return state

    def remember(self, key: Tensor, value: Tensor, packed: Packed, state: WorkingMemory) -> WorkingMemory:
        """The memory after all packed tokens."""
        begin, count = packed.offsets[:-1], packed.offsets.diff()
        total = state.total + count
        # what an empty memory must hold is known from packing
        most = packed.longest if self.places == 0 and state.keys.shape[1] == 0 else None
        state = self.make_room(state, total, most=most)
        slot = self.held(total, state.keys.shape[1])
        fresh = (slot >= state.total[:, None]) & (slot < total[:, None])
        source = begin[:, None] + slot - state.total[:, None]
        source = torch.where(fresh, source, key.shape[0])  # one spare token of zeros at the end

        def renew(new: Tensor, old: Tensor) -> Tensor:
            spare = F.pad(new.to(old.dtype), (*(0, 0) * (new.dim() - 1), 0, 1))
            taken = spare.index_select(0, source.flatten()).view(*source.shape, *new.shape[1:])
            return torch.where(fresh.view(*fresh.shape, *(1,) * (new.dim() - 1)), taken, old)

        return WorkingMemory(
            renew(key, state.keys),
            renew(value, state.values),
            renew(packed.position, state.positions),
            total,
        )

    def record(
        self, token: WorkingMemory, sequences: Tensor, state: WorkingMemory, inplace: bool
    ) -> WorkingMemory:
        """The memory after one more token of some sequences.

        Args:
            token: key, value, position and slot of each, without an axis of places.
            sequences: (tokens,), their places in the batch.
            state: the memory of the whole batch.
            inplace: whether it may be overwritten.
        """
        room = self.make_room(state, token.total, 1)
        target = (sequences, self.place(token.total))
        one = torch.ones_like(sequences)
        if inplace:
            room.keys.index_put_(target, token.keys)
            room.values.index_put_(target, token.values)
            room.positions.index_put_(target, token.positions)
            room.total.index_add_(0, sequences, one)
            return room
        return WorkingMemory(
            room.keys.index_put(target, token.keys),
            room.values.index_put(target, token.values),
            room.positions.index_put(target, token.positions),
            room.total.index_add(0, sequences, one),
        )


class MemorySpan(Span):
    """The working memory: a band of the packed array."""

    def __init__(self, window: int, causal: bool) -> None:
        super().__init__(window, causal)
        self.left = window if causal else window // 2
        """slots before itself that a query sees"""
        self.right = 0 if causal else window // 2
        """slots after itself that a query sees"""

    @property
    def reach(self) -> int:
        return max(self.left, self.right)

    @property
    def others(self) -> int:
        return self.left + self.right

    def visible(self, slot: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return (slot - self.left).clamp(min=0), (slot + self.right + 1).clamp(max=count)


class FullSpan(Span):
    """All active tokens. The memory of a causal unit grows with them."""

    reach = None
    others = None
    places = 0

    def visible(self, slot: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(slot), slot + 1 if self.causal else torch.full_like(slot, count)

    def keys(self, slot: Tensor, count: int | Tensor, dtype: torch.dtype) -> float | Tensor:
        keys = slot + 1 if self.causal else count
        return keys.clamp(min=1).to(dtype) if isinstance(keys, Tensor) else max(keys, 1)

    def begun(self, total: Tensor) -> Tensor:
        return total

    def remembered(self, count: int) -> int:
        return count

    def place(self, slot: Tensor) -> Tensor:
        return slot

    def held(self, total: Tensor, places: int) -> Tensor:
        return torch.arange(places, device=total.device).expand(total.shape[0], -1)

    def make_room(
        self, state: WorkingMemory, total: Tensor, more: int = 0, most: int | None = None
    ) -> WorkingMemory:
        if most is None:
            most = int(total.max()) if len(total) else 0
        missing = max(0, most + more * bool(len(total)) - state.keys.shape[1])
        keys, values = (F.pad(part, (0, 0, 0, missing)) for part in (state.keys, state.values))
        return WorkingMemory(keys, values, F.pad(state.positions, (0, missing)), state.total)


class ChunkSpan(Span):
    """Chunks of `window` active tokens. The memory holds the current one."""

    @property
    def reach(self) -> int:
        return self.window - 1

    others = reach

    def visible(self, slot: Tensor, count: int) -> tuple[Tensor, Tensor]:
        first = slot // self.window * self.window
        return first, slot + 1 if self.causal else (first + self.window).clamp(max=count)

    def begun(self, total: Tensor) -> Tensor:
        return total % self.window

    def remembered(self, count: int) -> int:
        return (count - 1) % self.window + 1 if count else 0

    def hidden(self, slot: Tensor, places: int) -> Tensor:
        return super().hidden(self.begun(slot), places)


SpanName = Literal["memory", "full", "chunk"]
SPANS: dict[str, type[Span]] = {"memory": MemorySpan, "full": FullSpan, "chunk": ChunkSpan}
"""Spans by the name that configurations use."""
