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
from seqboat.ops.band import Neighbors
from seqboat.ops.banded import banded
from seqboat.ops.dense import dense
from seqboat.ops.functions import ATTENTIONS, AttentionName
from seqboat.ops.positions import Positions
from seqboat.ops.precision import wide_type


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


class Scoring(NamedTuple):
    """How a unit turns products of queries and keys into weights."""

    attention: AttentionName
    positions: Positions
    table: Tensor | None
    """biases per distance"""
    scale: float
    """of the products, where the window bounds the number of keys"""
    dropout: float = 0.0
    width: int | None = None
    """of queries and keys without the column of weights"""
    wide: int | None = None
    """another window, for whole sequences"""


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

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: Packed,
        state: WorkingMemory | None,
        scoring: Scoring,
    ) -> Tensor:
        """Weighted sums of values (tokens, d_v) for packed queries, which also see what a state remembers."""

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
        if packed.documents is not None:
            # of each sequence, what its last document leaves
            begin, count = begin[packed.documents.last], count[packed.documents.last]
            state = packed.documents.still(state)
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

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: Packed,
        state: WorkingMemory | None,
        scoring: Scoring,
    ) -> Tensor:
        group, position, places = packed.row, packed.position, None
        if state is not None:
            # before the new tokens of each sequence come all places of its memory, oldest first
            places, group, source = self._places_with_memory(packed, state)
            old = self._oldest_first(state)
            query = torch.cat([old.keys.new_zeros(old.keys.shape), query.to(old.keys.dtype)])
            key = torch.cat([old.keys, key.to(old.keys.dtype)]).index_select(0, source)
            query = query.index_select(0, source)
            value = torch.cat([old.values, value.to(old.values.dtype)]).index_select(0, source)
            position = torch.cat([old.positions, position]).index_select(0, source)
        longest = packed.longest if state is None else None
        near = self.neighbors(group, position, scoring, longest)
        attended = banded(query, key, value, near, scoring.dropout)
        return attended if places is None else attended.index_select(0, places)

    def neighbors(
        self, group: Tensor, position: Tensor, scoring: Scoring, longest: int | None = None
    ) -> Neighbors:
        """What each token of a packed array sees, given its sequence and its position.

        Args:
            group: (tokens,), their sequences.
            position: (tokens,), their positions.
            scoring: how they attend.
            longest: tokens of the longest sequence, if known: nothing lies further away.
        """
        attention, positions, table, scale = scoring[:4]
        coordinate = positions.coordinate(position, None)
        left, right = self.left, self.right
        if scoring.wide is not None and longest is not None:
            left, right = scoring.wide // (1 if self.causal else 2), 0 if self.causal else scoring.wide // 2
        if longest is not None:
            left, right = (min(side, max(longest - 1, 1)) if side else 0 for side in (left, right))
        return Neighbors(group, coordinate, table, left, right, attention, scale)

    def _oldest_first(self, state: WorkingMemory) -> WorkingMemory:
        """The memory with its oldest tokens first, sequence after sequence."""
        age = torch.arange(self.window, device=state.total.device)
        order = (state.total[:, None] + age) % self.window
        wide = order[..., None]
        return WorkingMemory(
            state.keys.gather(1, wide.expand_as(state.keys)).flatten(0, 1),
            state.values.gather(1, wide.expand_as(state.values)).flatten(0, 1),
            state.positions.gather(1, order).flatten(),
            state.total,
        )

    def _places_with_memory(self, packed: Packed, state: WorkingMemory) -> tuple[Tensor, Tensor, Tensor]:
        """Where tokens and memories go in the joined array, the group of each place, and its source."""
        device, window = packed.flat.device, self.window
        batch, tokens = state.total.shape[0], packed.flat.shape[0]
        sequence = owner = torch.arange(batch, device=device)
        memories = packed.row + 1
        if packed.documents is not None:
            # memories belong to the first document of their sequence
            owner = packed.documents.first
            memories = torch.bucketize(packed.row, owner, right=True)
        fresh = torch.arange(tokens, device=device) + memories * window
        age = torch.arange(window, device=device)
        old = (packed.offsets[owner] + sequence * window)[:, None] + age
        filled = window - state.total[:, None].clamp(max=window) <= age
        group = packed.row.new_empty(tokens + batch * window)
        group[fresh] = packed.row
        group[old.flatten()] = torch.where(filled, owner[:, None], -1).flatten()
        source = torch.empty_like(group)
        source[torch.cat([old.flatten(), fresh])] = torch.arange(len(group), device=device)
        return fresh, group, source


class PaddedSpan(Span):
    """A span that is computed on sequences padded to the longest, cut into groups of equal width."""

    @abstractmethod
    def begun(self, total: Tensor) -> Tensor:
        """How many of `total` tokens the next one still sees: the columns before it."""

    @abstractmethod
    def grid(self, columns: int) -> tuple[int, int]:
        """How many groups hold this many columns, and their width."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: Packed,
        state: WorkingMemory | None,
        scoring: Scoring,
    ) -> Tensor:
        batch = packed.offsets.shape[0] - 1
        counts = packed.offsets.diff()
        kept = self.begun(counts.new_zeros(batch) if state is None else state.total)
        # without a past, packing the tokens told how long the longest sequence is
        longest = packed.slots if state is None or not batch else int((kept + counts).max())
        groups, width = self.grid(longest)
        columns = groups * width
        place = packed.row * columns + kept[packed.row] + packed.slot

        def lay_out(fresh: Tensor, old: Tensor | None) -> Tensor:
            grid = fresh.new_zeros(batch, columns, *fresh.shape[1:])
            if old is not None:
                size = min(old.shape[1], columns)
                inside = torch.arange(size, device=fresh.device) < kept[:, None]
                inside = inside.view(batch, size, *(1,) * (fresh.dim() - 1))
                head = torch.where(inside, old[:, :size].to(fresh.dtype), grid.new_zeros(()))
                grid = torch.cat([head, grid[:, size:]], dim=1)
            flat = grid.flatten(0, 1).index_copy(0, place, fresh)
            return flat.view(batch * groups, width, *fresh.shape[1:])

        slots = torch.arange(columns, device=place.device).expand(batch, -1)
        real = slots < (kept + counts)[:, None]
        slot = slots.reshape(batch * groups, width)
        position = lay_out(packed.position, None if state is None else state.positions)
        coordinate = scoring.positions.coordinate(position, slot)
        keys = self.keys(slot, counts[:, None], wide_type(query))
        attended = dense(
            lay_out(query, None),
            lay_out(key, None if state is None else state.keys),
            lay_out(value, None if state is None else state.values),
            query_slot=slot,
            key_slot=torch.where(real.reshape(slot.shape), slot, -1),
            query_position=coordinate,
            key_position=coordinate,
            scale=ATTENTIONS[scoring.attention].scale(scoring.width or query.shape[1], keys),
            table=scoring.table,
            attention=scoring.attention,
            causal=self.causal,
            dropout=scoring.dropout,
        )
        return attended.flatten(0, 1).index_select(0, place)


class FullSpan(PaddedSpan):
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

    def grid(self, columns: int) -> tuple[int, int]:
        return 1, columns

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


class ChunkSpan(PaddedSpan):
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

    def grid(self, columns: int) -> tuple[int, int]:
        return -(-columns // self.window), self.window

    def remembered(self, count: int) -> int:
        return (count - 1) % self.window + 1 if count else 0

    def hidden(self, slot: Tensor, places: int) -> Tensor:
        return super().hidden(self.begun(slot), places)


SpanName = Literal["memory", "full", "chunk"]
SPANS: dict[str, type[Span]] = {"memory": MemorySpan, "full": FullSpan, "chunk": ChunkSpan}
"""Spans by the name that configurations use."""
