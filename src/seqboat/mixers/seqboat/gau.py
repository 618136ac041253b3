"""Gated attention unit on the active tokens, appendix A.2 of the paper.

    base = SiLU(H W + b), split into z (d_z), gate g (d_v) and value v (d_v)
    q = z * gamma_q + beta_q,  k = z * gamma_k + beta_k
    Y = (g * (f(q k^T * scale + bias) v)) W_h + b_h

f is softmax (scale 1/sqrt(d_z)), squared ReLU or Laplace (scale 1/window, or 1/keys without a window). What a
query sees on the compressed sequence is its working memory: `window / 2` tokens on either side, or, if causal,
itself and the `window` tokens before it. In decoding that is a first-in-first-out memory of constant size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.checks import check_choice, check_positive, check_rate, require
from seqboat.core.nn import RelativeBias, check_even, init_linear, rotate
from seqboat.core.sma import Packed, PackedModule
from seqboat.ops.attention import (
    ATTENTIONS,
    HIDDEN,
    KERNELS,
    AttentionName,
    Kernel,
    attention_weights,
    banded,
    dense,
)
from seqboat.ops.fused import gates, is_plain
from seqboat.ops.gated import gated_attention

Span = Literal["memory", "full", "chunk"]
Positions = Literal["original", "compressed", "rotary", "none"]


@dataclass(frozen=True, kw_only=True)
class GAUConfig:
    """Attention among the active tokens."""

    d_z: int = 64
    """Width of queries and keys."""
    d_v: int | None = None
    """Width of values and gates; twice the model's by default."""
    attention: AttentionName = "softmax"
    """The attention function."""
    span: Span = "memory"
    """What a query sees: its working memory, everything, or its chunk of `window` active tokens."""
    window: int = 256
    """Size of the working memory, or of a chunk."""
    positions: Positions = "original"
    """Relative bias on original or compressed positions, rotary on original ones, or none."""
    max_positions: int = 4096
    """Distances (in positions) beyond which the relative bias stays the same."""
    attention_dropout: float = 0.0
    """Share of attention weights dropped in training."""
    kernel: Kernel = "blocks"
    """What computes the working memory's attention: our blocks, or FlexAttention (softmax, on GPUs)."""

    def __post_init__(self) -> None:
        check_positive("d_z", self.d_z)
        check_positive("window", self.window)
        check_positive("max_positions", self.max_positions)
        check_choice("attention", self.attention, ATTENTIONS)
        check_choice("span", self.span, ("memory", "full", "chunk"))
        check_choice("positions", self.positions, ("original", "compressed", "rotary", "none"))
        check_rate("attention_dropout", self.attention_dropout)
        if self.d_v is not None:
            check_positive("d_v", self.d_v)
        if self.positions == "rotary":
            check_even("d_z", self.d_z, "with rotary positions")
        check_choice("kernel", self.kernel, KERNELS)
        if self.kernel == "flex":
            fits = self.attention == "softmax" and self.span == "memory" and not self.attention_dropout
            require(
                fits,
                "kernel 'flex' needs attention 'softmax', span 'memory' and attention_dropout 0, got "
                f"{self.attention!r}, {self.span!r} and {self.attention_dropout}",
            )

    def build(self, d_model: int, causal: bool, dropout: float = 0.0) -> GAU:
        return GAU(d_model, self, causal=causal, dropout=dropout)


class Memory(NamedTuple):
    """The last activated tokens of every row. Slot s of a row is kept at place s modulo the size."""

    keys: Tensor
    """(batch, window, d_z)"""
    values: Tensor
    """(batch, window, d_v)"""
    positions: Tensor
    """(batch, window), in the original sequence"""
    total: Tensor
    """(batch,): tokens activated so far"""


class RowWeights(NamedTuple):
    """How some queries of one row weigh the keys they see; slots count the active tokens of the row."""

    first: Tensor
    """(queries,): slot of the first key that each sees"""
    end: Tensor
    """(queries,): the slot behind the last one"""
    weights: Tensor
    """(queries, most keys): of the keys from `first` on; zero behind the last"""


class GAU(PackedModule):
    """A gated attention unit. With span "full" the memory of a causal unit grows with the active tokens."""

    def __init__(
        self,
        d_model: int,
        config: GAUConfig | None = None,
        *,
        causal: bool,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        config = config or GAUConfig()
        check_positive("d_model", d_model)
        check_rate("dropout", dropout)
        self.config, self.causal, self.d_model = config, causal, d_model
        self.d_z, self.d_v = config.d_z, config.d_v or 2 * d_model
        self.window, self.dropout = config.window, dropout
        # how many active tokens a query sees before and after itself
        self.left = config.window if causal else config.window // 2
        self.right = 0 if causal else config.window // 2
        self.base = nn.Linear(d_model, self.d_z + 2 * self.d_v)
        self.gamma = nn.Parameter(torch.empty(2, self.d_z))
        self.beta = nn.Parameter(torch.empty(2, self.d_z))
        self.out = nn.Linear(self.d_v, d_model)
        self.bias: RelativeBias | None = None
        if config.positions in ("original", "compressed"):
            self.bias = RelativeBias(self._max_distance())
        self.reset_parameters()

    def _max_distance(self) -> int:
        if self.config.positions == "original" or self.config.span == "full":
            return self.config.max_positions - 1
        return self.window - 1 if self.config.span == "chunk" else max(self.left, self.right)

    def reset_parameters(self) -> None:
        """Initial values, truncated at two deviations.

        base, out     weights N(0, 0.02), biases 0
        gamma         N(0, 0.02)
        beta          0
        bias table    N(0, 0.02)
        """
        init_linear(self)
        nn.init.trunc_normal_(self.gamma, std=0.02, a=-0.04, b=0.04)
        nn.init.zeros_(self.beta)
        if self.bias is not None:
            self.bias.reset_parameters()

    def extra_repr(self) -> str:
        return f"{self.config}, causal={self.causal}"

    def project(self, tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and gates of (tokens, d_model)."""
        query, key, value, gate = gates(self.base, tokens, self.gamma, self.beta)
        if self.config.positions == "rotary":
            query, key = rotate(torch.stack([query, key]), position).unbind(0)
        return query, key, value, gate

    def visible(self, slot: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """First slot that queries at these slots see, and the one behind the last, among `count` active tokens."""
        if self.config.span == "memory":
            return (slot - self.left).clamp(min=0), (slot + self.right + 1).clamp(max=count)
        chunked = self.config.span == "chunk"
        first = slot // self.window * self.window if chunked else torch.zeros_like(slot)
        if self.causal:
            return first, slot + 1
        end = first + self.window if chunked else torch.full_like(slot, count)
        return first, end.clamp(max=count)

    def weigh(self, query: Tensor, key: Tensor, position: Tensor, queries: slice = slice(None)) -> RowWeights:
        """Attention weights inside one row, to look at: `forward` never holds them all.

        Args:
            query, key: (active, d_z), from `project`, of all active tokens of a row.
            position: (active,), their places in the original sequence.
            queries: of which of them.
        """
        count = len(query)
        slots = torch.arange(count, device=query.device)
        slot = slots[queries]
        first, end = self.visible(slot, count)
        low, high = (int(first[0]), int(end[-1])) if len(slot) else (0, 0)
        key_slot = slots[low:high]
        wide = _wide(query)
        scale: float | Tensor = self._scale
        if self.config.span == "full" and self.config.attention != "softmax":
            scale = 1 / (end - first)[:, None].to(wide)
        scores = query[queries].to(wide) @ key[low:high].to(wide).T * scale
        if self.bias is not None:
            places = position if self.config.positions == "original" else slots
            scores = scores + self.bias(places[low:high] - places[queries][:, None]).to(wide)
        hidden = (key_slot < first[:, None]) | (key_slot >= end[:, None])
        weights = attention_weights(scores.masked_fill(hidden, HIDDEN), self.config.attention)
        most = int((end - first).max()) if len(slot) else 0
        column = (first - low)[:, None] + torch.arange(most, device=slot.device)
        inside = column < (end - low)[:, None]
        column = column.clamp(max=max(high - low - 1, 0))
        return RowWeights(first, end, torch.where(inside, weights.gather(1, column), 0))

    def forward(
        self, tokens: Tensor, packed: Packed, state: Memory | None = None
    ) -> tuple[Tensor, Memory | None]:
        if self._is_one_piece(tokens):
            return self._drop(self._in_one_piece(tokens, packed)), None
        query, key, value, gate = self.project(tokens, packed.position)
        if self.config.span == "memory":
            attended = self._attend_memory(query, key, value, packed, state)
        else:
            attended = self._attend_rows(query, key, value, packed, state)
        if not self.causal:
            return self._close(gate, attended), None
        if state is None:
            # in the type of the inputs, also where autocast makes keys and values narrower
            state = self.make_state(len(packed.offsets) - 1, tokens.dtype, tokens.device)
        return self._close(gate, attended), self._remember(key, value, packed, state)

    def _close(self, gate: Tensor, attended: Tensor) -> Tensor:
        return self._drop(self.out(gate * attended))

    def _drop(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.dropout, self.training) if self.dropout else y

    def _is_one_piece(self, tokens: Tensor) -> bool:
        """Whether the unit can be computed from tokens to output without its queries, keys and values."""
        config = self.config
        return (
            not self.causal  # a causal unit remembers its keys and values
            and config.span == "memory"
            and config.positions != "rotary"
            and config.kernel == "blocks"
            and not self._attention_dropout
            and is_plain(self.base)
            and is_plain(self.out)
            and tokens.dtype in (torch.float32, torch.float64)
            and not torch.is_autocast_enabled(tokens.device.type)
        )

    def _in_one_piece(self, tokens: Tensor, packed: Packed) -> Tensor:
        return gated_attention(
            tokens,
            self.base.weight,
            self.base.bias,
            self.gamma,
            self.beta,
            self.out.weight,
            self.out.bias,
            packed.row,
            left=self.left,
            right=self.right,
            kind=self.config.attention,
            scale=self._scale,
            table=self._table,
            position=packed.position if self.config.positions == "original" else None,
        )

    @property
    def _table(self) -> Tensor | None:
        return None if self.bias is None else self.bias.table

    @property
    def _attention_dropout(self) -> float:
        return self.config.attention_dropout if self.training else 0.0

    @property
    def _scale(self) -> float:
        """What products of queries and keys are multiplied by, where it is the same for all."""
        return 1 / math.sqrt(self.d_z) if self.config.attention == "softmax" else 1 / self.window

    def _attend_memory(
        self, query: Tensor, key: Tensor, value: Tensor, packed: Packed, state: Memory | None
    ) -> Tensor:
        group, position, places = packed.row, packed.position, None
        if state is not None:
            # before the new tokens of each row come all places of its memory, oldest first
            places, group, source = self._places_with_memory(packed, state)
            order = self._oldest_first(state)
            old = self._in_order(state, order)
            query = torch.cat([old.keys.new_zeros(old.keys.shape), query.to(old.keys.dtype)])
            key = torch.cat([old.keys, key.to(old.keys.dtype)]).index_select(0, source)
            query = query.index_select(0, source)
            value = torch.cat([old.values, value.to(old.values.dtype)]).index_select(0, source)
            position = torch.cat([old.positions, position]).index_select(0, source)
        attended = banded(
            query,
            key,
            value,
            group,
            left=self.left,
            right=self.right,
            kind=self.config.attention,
            scale=self._scale,
            table=self._table,
            position=position if self.config.positions == "original" else None,
            dropout=self._attention_dropout,
            kernel=self.config.kernel,
        )
        return attended if places is None else attended.index_select(0, places)

    def _oldest_first(self, state: Memory) -> Tensor:
        """(batch, window): places of the memory in the order in which they were filled."""
        ages = torch.arange(self.window, device=state.total.device)
        return (state.total[:, None] + ages) % self.window

    def _in_order(self, state: Memory, order: Tensor) -> Memory:
        """The memory with its oldest tokens first, its rows behind each other."""
        wide = order[..., None]
        return Memory(
            state.keys.gather(1, wide.expand(-1, -1, self.d_z)).flatten(0, 1),
            state.values.gather(1, wide.expand(-1, -1, self.d_v)).flatten(0, 1),
            state.positions.gather(1, order).flatten(),
            state.total,
        )

    def _places_with_memory(self, packed: Packed, state: Memory) -> tuple[Tensor, Tensor, Tensor]:
        """Where tokens and memories go in the joined array, the group of each place, and its source."""
        device, window = packed.flat.device, self.window
        batch, tokens = state.total.shape[0], packed.flat.shape[0]
        fresh = torch.arange(tokens, device=device) + (packed.row + 1) * window
        rows = torch.arange(batch, device=device)
        ages = torch.arange(window, device=device)
        old = (packed.offsets[:-1] + rows * window)[:, None] + ages
        filled = window - state.total[:, None].clamp(max=window) <= ages
        group = packed.row.new_empty(tokens + batch * window)
        group[fresh] = packed.row
        group[old.flatten()] = torch.where(filled, rows[:, None], -1).flatten()
        source = torch.empty_like(group)
        source[torch.cat([old.flatten(), fresh])] = torch.arange(len(group), device=device)
        return fresh, group, source

    def _attend_rows(
        self, query: Tensor, key: Tensor, value: Tensor, packed: Packed, state: Memory | None
    ) -> Tensor:
        """Full or chunked attention, on rows padded to the longest."""
        chunked = self.config.span == "chunk"
        batch = packed.offsets.shape[0] - 1
        counts = packed.offsets.diff()
        before = counts.new_zeros(batch) if state is None else state.total
        # the first column of a row is the first slot of its chunk, or of the sequence
        kept = before % self.window if chunked else before
        columns = int((kept + counts).max()) if batch else 0
        groups, width = 1, columns
        if chunked:
            groups, width = -(-columns // self.window), self.window
            columns = groups * width
        place = packed.row * columns + kept[packed.row] + packed.slot

        def lay_out(fresh: Tensor, old: Tensor | None) -> Tensor:
            rows = fresh.new_zeros(batch, columns, *fresh.shape[1:])
            if old is not None:
                size = min(old.shape[1], columns)
                inside = torch.arange(size, device=fresh.device) < kept[:, None]
                inside = inside.view(batch, size, *(1,) * (fresh.dim() - 1))
                head = torch.where(inside, old[:, :size].to(fresh.dtype), rows.new_zeros(()))
                rows = torch.cat([head, rows[:, size:]], dim=1)
            flat = rows.flatten(0, 1).index_copy(0, place, fresh)
            return flat.view(batch * groups, width, *fresh.shape[1:])

        slots = torch.arange(columns, device=place.device).expand(batch, -1)
        real = slots < (kept + counts)[:, None]
        slot = slots.reshape(batch * groups, width)
        position = lay_out(packed.position, None if state is None else state.positions)
        if self.config.positions != "original":
            position = slot
        scale = torch.full(slot.shape, self._scale, dtype=_wide(query), device=slot.device)
        if self.config.attention != "softmax" and not chunked:
            keys = slot + 1 if self.causal else counts[:, None].clamp(min=1)
            scale = 1 / keys.to(scale.dtype).expand(slot.shape)
        attended = dense(
            lay_out(query, None),
            lay_out(key, None if state is None else state.keys),
            lay_out(value, None if state is None else state.values),
            query_slot=slot,
            key_slot=torch.where(real.reshape(slot.shape), slot, -1),
            query_position=position,
            key_position=position,
            scale=scale,
            table=self._table,
            kind=self.config.attention,
            causal=self.causal,
            dropout=self._attention_dropout,
        )
        return attended.flatten(0, 1).index_select(0, place)

    def _remember(self, key: Tensor, value: Tensor, packed: Packed, state: Memory) -> Memory:
        """The memory after the new tokens."""
        batch = packed.offsets.shape[0] - 1
        counts = packed.offsets.diff()
        total = state.total + counts
        if self.config.span == "full":
            state = _grow(state, int(total.max()) if batch else 0)
            slot = torch.arange(state.keys.shape[1], device=key.device).expand(batch, -1)
        else:
            slot = self._slots_at(total)
        fresh = (slot >= state.total[:, None]) & (slot < total[:, None])
        source = packed.offsets[:-1, None] + slot - state.total[:, None]
        source = torch.where(fresh, source, key.shape[0])  # one spare row of zeros behind the tokens

        def renew(new: Tensor, old: Tensor) -> Tensor:
            spare = F.pad(new.to(old.dtype), (*(0, 0) * (new.dim() - 1), 0, 1))
            taken = spare.index_select(0, source.flatten()).view(*source.shape, *new.shape[1:])
            return torch.where(fresh.view(*fresh.shape, *(1,) * (new.dim() - 1)), taken, old)

        return Memory(
            renew(key, state.keys),
            renew(value, state.values),
            renew(packed.position, state.positions),
            total,
        )

    def _slots_at(self, count: Tensor) -> Tensor:
        """(batch, window): the slot kept at each place after `count` tokens; negative if none."""
        places = torch.arange(self.window, device=count.device)
        return count[:, None] - 1 - (count[:, None] - 1 - places) % self.window

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Memory:
        size = 0 if self.config.span == "full" else self.window
        return Memory(
            torch.zeros(batch, size, self.d_z, dtype=dtype, device=device),
            torch.zeros(batch, size, self.d_v, dtype=dtype, device=device),
            torch.zeros(batch, size, dtype=torch.int64, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def advance(
        self, tokens: Tensor, rows: Tensor, position: Tensor, state: Memory, inplace: bool = False
    ) -> tuple[Tensor, Memory]:
        query, key, value, gate = self.project(tokens, position)
        everyone = rows.shape[0] == state.total.shape[0]
        past = state if everyone else Memory(*(part.index_select(0, rows) for part in state))
        slot = past.total
        places = torch.arange(past.keys.shape[1], device=rows.device)
        hidden = places >= slot[:, None]
        old_slot = places
        if self.config.span != "full" and (self.config.span == "chunk" or self.bias is not None):
            old_slot = self._slots_at(slot)
            if self.config.span == "chunk":
                hidden = hidden | (old_slot // self.window != slot[:, None] // self.window)
        key, value = key.to(past.keys.dtype), value.to(past.values.dtype)
        wide = _wide(query)
        query = query.to(wide) * self._step_scale(slot, wide)
        scores = torch.bmm(past.keys.to(wide), query[:, :, None])[:, :, 0]
        own = (query * key.to(wide)).sum(dim=-1, keepdim=True)
        if self.bias is not None:
            original = self.config.positions == "original"
            distance = past.positions - position[:, None] if original else old_slot - slot[:, None]
            scores = scores + self.bias(distance).to(wide)
            own = own + self.bias(torch.zeros_like(slot[:, None])).to(wide)
        scores = torch.cat([scores.masked_fill(hidden, HIDDEN), own], dim=1)
        weights = attention_weights(scores, self.config.attention)
        attended = torch.bmm(weights[:, None, :-1], past.values.to(wide))[:, 0]
        attended = torch.addcmul(attended, weights[:, -1:], value.to(wide))
        after = self._record(key, value, position, rows, slot, state, inplace)
        return self._close(gate, attended.to(gate.dtype)), after

    def _step_scale(self, slot: Tensor, dtype: torch.dtype) -> Tensor | float:
        if self.config.span == "full" and self.config.attention != "softmax":
            return 1 / (slot + 1)[:, None].to(dtype)
        return self._scale

    def _record(
        self,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        rows: Tensor,
        slot: Tensor,
        state: Memory,
        inplace: bool,
    ) -> Memory:
        """Write one token of some rows into the memory."""
        keys, values, positions, count = state
        if self.config.span == "full":
            keys, values, positions, _ = _grow(state, int(slot.max()) + 1 if len(slot) else 0)
            place = slot
        else:
            place = slot % self.window
        target = (rows, place)
        if inplace:
            keys.index_put_(target, key)
            values.index_put_(target, value)
            positions.index_put_(target, position)
            count.index_add_(0, rows, torch.ones_like(rows))
            return Memory(keys, values, positions, count)
        return Memory(
            keys.index_put(target, key),
            values.index_put(target, value),
            positions.index_put(target, position),
            count.index_add(0, rows, torch.ones_like(rows)),
        )


def _grow(state: Memory, slots: int) -> Memory:
    """The memory with room for so many tokens per row."""
    more = max(0, slots - state.keys.shape[1])
    pad = (0, 0, 0, more)
    keys, values = F.pad(state.keys, pad), F.pad(state.values, pad)
    return Memory(keys, values, F.pad(state.positions, (0, more)), state.total)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
