"""Gated attention of single tokens: a ring of keys and values that is written in place.

The general step keeps the `window` tokens before the next one and treats that one apart. Here the ring has a place
more, so that the token itself is written first and attention is one product over the ring. `put` and `get` convert
between the two forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.inference.products import count_parts, is_plain, make_product
from seqboat.layers.gau import GAU
from seqboat.layers.spans import ChunkSpan, FullSpan, MemorySpan, WorkingMemory
from seqboat.ops.functions import HIDDEN
from seqboat.ops.positions import CompressedBias, OriginalBias

ONE_BY_ONE = 1 << 20
"""Bytes of a ring beyond which sequences attend one after the other: rings of inactive ones are not read then."""


class Places:
    """Where the slots of a sequence are kept, and how many of them the newest one sees."""

    def __init__(self, gau: GAU) -> None:
        span = gau.span
        self.span, self.window = span, span.window
        self.full, self.chunk = isinstance(span, FullSpan), isinstance(span, ChunkSpan)
        self.size = 64 if self.full else span.window + (0 if self.chunk else 1)
        """places of the ring; with the span "full", as many as there is room for"""

    def place(self, slot: int) -> int:
        return slot % self.size

    def count(self, slot: int) -> int:
        """How many places from the first on the token at this slot sees, itself included."""
        return slot % self.size + 1 if self.chunk else min(slot + 1, self.size)

    def kept(self, total: int) -> range:
        """The slots that the next token may see."""
        if self.full:
            return range(total)
        return range(total - total % self.window if self.chunk else max(0, total - self.window), total)

    def convert(self, total: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the slots that the next token may see are kept: here, and in the unit's own memory."""
        kept = self.kept(total)
        slots = torch.arange(kept.start, kept.stop, device=device)
        return slots % self.size, self.span.place(slots)


def fits(gau: nn.Module) -> bool:
    """Whether attention has a lean form."""
    spans = (MemorySpan, ChunkSpan, FullSpan)
    return type(gau) is GAU and type(gau.span) in spans and is_plain(gau.base, gau.out)


class Room:
    """Where the query, key, value and gate of a single token are computed: views that are made once.

    Args:
        d_z, d_v: widths of keys and values.
        rotates: whether queries and keys are rotated, in pairs of channels.
        like: tensor with the device and type.
    """

    def __init__(self, d_z: int, d_v: int, rotates: bool, like: Tensor) -> None:
        self.base = like.new_empty(1, d_z + 2 * d_v)
        self.z, self.gate, value = self.base.split_with_sizes((d_z, d_v, d_v), dim=1)
        self.value = value[0]
        self.pair = like.new_empty(2, d_z)
        self.query, self.key = self.pair.unbind(0)
        self.turned = torch.view_as_complex(self.pair.view(2, -1, 2)) if rotates else None


class LeanAttention:
    """A gated attention unit on single tokens of `capacity` sequences."""

    def __init__(self, gau: GAU, capacity: int) -> None:
        self.base, _ = make_product(gau.base)
        self.out, _ = make_product(gau.out)
        self.d_z, self.d_v = gau.d_z, gau.d_v
        self.places = Places(gau)
        self.weigh = gau.function.weights
        # a scale that is the same for all tokens is folded into the query
        scale = float(gau.function.scale(gau.d_z, gau.span.window))
        self.per_count = self.places.full and gau.function.scale(gau.d_z, 1.0) != gau.function.scale(
            gau.d_z, 2.0
        )
        factor = torch.tensor([[1.0 if self.per_count else scale], [1.0]], dtype=torch.float64).to(gau.gamma)
        self.gamma, self.beta = gau.gamma * factor, gau.beta * factor
        self.rotates = gau.positions.rotates
        self.table = None if gau.bias is None else gau.bias.table.clone()
        self.original = isinstance(gau.positions, OriginalBias)
        self.compressed = isinstance(gau.positions, CompressedBias)
        like = self.gamma
        self.room = Room(self.d_z, self.d_v, self.rotates, like)
        size = self.places.size
        # several threads share the values of a full ring: as many places each, of which the last may remain empty
        share = 2 * torch.get_num_threads()
        padded = size if self.places.full else -(-size // share) * share
        self.parts = 1 if self.places.full else count_parts(padded, padded * self.d_v)
        self.keys = like.new_zeros(capacity, size, self.d_z)
        self.values = like.new_zeros(capacity, padded if self.parts > 1 else size, self.d_v)
        if self.parts > 1:
            self.shares = self.values.unflatten(1, (self.parts, -1)).unbind(0)
            weights = like.new_zeros(padded)
            self.weights, self.weight_shares = weights[:size], weights.view(self.parts, 1, -1)
        self.at: list[list[int]] = [[] for _ in range(capacity)]
        """positions of the tokens at the places of each row"""
        self.positions = torch.zeros(capacity, self.places.size, dtype=torch.int64, device=like.device)
        """the same, kept up to date only where the bias needs them"""
        self.hidden = like.new_full((capacity, self.places.size), HIDDEN)
        """added to the scores of a batch: places without a token that may be seen"""
        self.total = [0] * capacity
        """tokens that each row has activated"""
        self.by_age: Tensor | None = None
        self._age()

    def _age(self) -> None:
        """Biases by age, oldest first, twice: those of a ring are a slice, wherever its newest token is."""
        if not self.compressed:
            return
        assert self.table is not None
        furthest = len(self.table) // 2
        age = torch.arange(self.places.size, device=self.table.device).clamp(max=furthest)
        ages = self.table[furthest - age].flip(0)
        self.by_age = torch.cat([ages, ages])

    def _grow(self, slot: int) -> None:
        """Make room for the token at a slot; only the span "full" ever needs it."""
        if not self.places.full or slot < self.places.size:
            return
        more = slot + 1 - self.places.size + max(16, slot // 4)
        self.keys, self.values = (F.pad(part, (0, 0, 0, more)) for part in (self.keys, self.values))
        self.positions = F.pad(self.positions, (0, more))
        self.hidden = F.pad(self.hidden, (0, more), value=HIDDEN)
        self.places.size += more
        self._age()

    # one token

    def __call__(
        self, tokens: Tensor, rows: Sequence[int], seen: Sequence[int], turn: Tensor | None, batch: int
    ) -> Tensor:
        """The outputs (tokens, d_model) of one token of each of some rows.

        Args:
            tokens: (tokens, d_model).
            rows: which of the first `batch` rows they belong to, ascending.
            seen: position of the next token of every row.
            turn: (tokens, d_z / 2) complex, the rotations at their positions.
            batch: rows in use.
        """
        if len(rows) == 1:
            return self._read_one(tokens, rows[0], seen[rows[0]], turn)
        base = F.silu(self.base(tokens), inplace=True)
        z, gate, value = base.split_with_sizes((self.d_z, self.d_v, self.d_v), dim=1)
        pair = torch.addcmul(self.beta, z[:, None], self.gamma)  # (tokens, 2, d_z): query and key
        if turn is not None:
            turned = torch.view_as_complex(pair.view(len(rows), 2, -1, 2)) * turn[:, None]
            pair = torch.view_as_real(turned).flatten(2)
        for row in rows:
            self._grow(self.total[row])
        if self._large():
            attended = torch.cat(
                [self._attend(pair[i, 0], pair[i, 1], value[i], row, seen[row]) for i, row in enumerate(rows)]
            )
        else:
            attended = self._attend_together(pair, value, rows, seen, batch)
        return self.out(attended.mul_(gate))

    def _read_one(self, token: Tensor, row: int, position: int, turn: Tensor | None) -> Tensor:
        """As a call on one token of one row."""
        room = self.room
        F.silu(self.base(token, room.base), inplace=True)
        torch.addcmul(self.beta, room.z, self.gamma, out=room.pair)
        if turn is not None:
            assert room.turned is not None
            room.turned.mul_(turn)
        self._grow(self.total[row])
        attended = self._attend(room.query, room.key, room.value, row, position)
        return self.out(attended.mul_(room.gate))

    def _large(self) -> bool:
        return self.places.size * (self.d_z + self.d_v) * self.keys.element_size() > ONE_BY_ONE

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, row: int, position: int) -> Tensor:
        """(1, d_v): what the token of one row reads; it is remembered."""
        slot, size = self.total[row], self.places.size
        place, count = self.places.place(slot), self.places.count(slot)
        keys, values = self.keys[row], self.values[row]
        keys[place].copy_(key)
        values[place].copy_(value)
        self._note(row, place, position)
        if len(self.total) > 1 and not self._large():
            self._show(row, place)
        if count < size:
            keys = keys[:count]
        scores = torch.mv(keys, query)
        if self.per_count:
            scores.div_(slot + 1)
        if self.original:
            self.positions[row, place] = position
            scores.add_(self._bias(self.positions[row, :count] - position))
        elif self.by_age is not None:
            begin = size - 1 - place
            scores.add_(self.by_age[begin : begin + count])
        self.total[row] = slot + 1
        weights = self.weigh(scores)
        if self.parts == 1 or count < size:
            return torch.mm(weights[None], values[:count])
        self.weights.copy_(weights)
        return torch.bmm(self.weight_shares, self.shares[row]).sum(dim=0)

    def _bias(self, distance: Tensor) -> Tensor:
        assert self.table is not None
        furthest = len(self.table) // 2
        return self.table[distance.add_(furthest).clamp_(0, 2 * furthest)]

    def _note(self, row: int, place: int, position: int) -> None:
        """Keep the position of a token; places fill from the first one on."""
        at = self.at[row]
        if place < len(at):
            at[place] = position
        else:
            at.append(position)

    def _show(self, row: int, place: int) -> None:
        """Let products over several rows see a token; a new chunk hides the old one."""
        if self.places.chunk and place == 0:
            self.hidden[row] = HIDDEN
        self.hidden[row, place] = 0

    def _attend_together(
        self, pair: Tensor, value: Tensor, rows: Sequence[int], seen: Sequence[int], batch: int
    ) -> Tensor:
        """(tokens, d_v): as `_attend`, of several rows in products over all rows in use."""
        device, size = pair.device, self.places.size
        slots = [self.total[row] for row in rows]
        where = [self.places.place(slot) for slot in slots]
        index = torch.tensor([rows, where], device=device)
        target = (index[0], index[1])
        query, key = pair.unbind(1)
        self.keys.index_put_(target, key)
        self.values.index_put_(target, value)
        if self.places.chunk:
            for row, place in zip(rows, where, strict=True):
                self._show(row, place)
        else:
            self.hidden.index_put_(target, pair.new_zeros(()))
        if self.per_count:
            counts = torch.tensor([slot + 1 for slot in slots], dtype=query.dtype, device=device)
            query = query / counts[:, None]
        for row, slot, place in zip(rows, slots, where, strict=True):
            self.total[row] = slot + 1
            self._note(row, place, seen[row])
        everyone = len(rows) == batch
        if not everyone:
            query = query.new_zeros(batch, self.d_z).index_copy_(0, index[0], query)
        last = max(self.places.count(total - 1) if total else 1 for total in self.total[:batch])
        scores = torch.baddbmm(self.hidden[:batch, :last, None], self.keys[:batch, :last], query[:, :, None])[
            :, :, 0
        ]
        if self.original:
            here = torch.tensor(seen[:batch], device=device)
            self.positions.index_put_(target, here if everyone else here.index_select(0, index[0]))
            scores.add_(self._bias(self.positions[:batch, :last] - here[:, None]))
        elif self.by_age is not None:
            begin = torch.tensor(
                [size - 1 - self.places.place(max(total - 1, 0)) for total in self.total[:batch]],
                device=device,
            )
            scores.add_(self.by_age[begin[:, None] + torch.arange(last, device=device)])
        weights = self.weigh(scores)
        attended = torch.bmm(weights[:, None], self.values[:batch, :last])[:, 0]
        return attended if everyone else attended.index_select(0, index[0])

    # whole states

    def put(self, row: int, state: WorkingMemory, source: int) -> None:
        """Take over the memory of one sequence of a batch."""
        total = int(state.total[source])
        self.total[row] = total
        self._grow(total)
        ours, theirs = self.places.convert(total, self.keys.device)
        for mine, other in (
            (self.keys, state.keys),
            (self.values, state.values),
            (self.positions, state.positions),
        ):
            mine[row, ours] = other[source, theirs]
        self.at[row] = self.positions[row, : min(total, self.places.size)].tolist()
        self.hidden[row] = HIDDEN
        self.hidden[row, ours] = 0

    def get(self, rows: list[int]) -> WorkingMemory:
        """The memory of these rows, as the unit itself has it."""
        totals = torch.tensor([self.total[row] for row in rows], device=self.keys.device)
        state = self.places.span.make_state(len(rows), self.d_z, self.d_v, self.keys.dtype, self.keys.device)
        state = self.places.span.make_room(state, totals)
        for i, row in enumerate(rows):
            ours, theirs = self.places.convert(self.total[row], self.keys.device)
            state.keys[i, theirs] = self.keys[row, ours]
            state.values[i, theirs] = self.values[row, ours]
            at = torch.tensor(self.at[row], dtype=torch.int64, device=ours.device)
            state.positions[i, theirs] = at[ours]
        return state._replace(total=totals)

    def move(self, source: int, target: int) -> None:
        """Let the memory of one row replace that of another."""
        for part in (self.keys, self.values, self.positions, self.hidden):
            part[target] = part[source]
        self.total[target], self.at[target] = self.total[source], list(self.at[source])


def turns(frequencies: Tensor, positions: Sequence[int], dtype: torch.dtype) -> Tensor:
    """(rows, d_z / 2) complex: what rotary embedding multiplies pairs of channels by at these positions."""
    here = torch.tensor(positions, dtype=torch.float64, device=frequencies.device)
    # reduced to one turn in float64, as everywhere
    angle = torch.remainder(here[:, None] * frequencies, 2 * math.pi).to(dtype)
    return torch.complex(angle.cos(), angle.sin())
