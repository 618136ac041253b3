"""Gated attention unit on the active tokens, appendix A.2 of the paper.

    base = SiLU(H W + b), split into z (d_z), gate g (d_v) and value v (d_v)
    q = z * gamma_q + beta_q,  k = z * gamma_k + beta_k
    Y = (g * (f(q k^T * scale + bias) v)) W_h + b_h

A slot is a token's place among the active tokens of its sequence. What a query sees is its span:

    memory    the working memory: window / 2 tokens on either side, or, if causal, the window tokens before it
    chunk     its chunk of `window` active tokens
    full      all of them
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, check_rate, require
from seqboat.core.mixer import check_width
from seqboat.core.nn import Kept, init_linear
from seqboat.core.settings import Settings, fill_in
from seqboat.layers.sma import Packed, PackedModule
from seqboat.ops.attention import (
    FAR,
    FUNCTIONS,
    HIDDEN,
    AttentionName,
    RelativeBias,
    Seen,
    attend,
    rotate,
    turns,
    weigh_keys,
)

SpanName = Literal["memory", "full", "chunk"]
PositionsName = Literal["original", "compressed", "rotary", "rotary-original", "none"]
ROTATES = ("rotary", "rotary-original")
BY_POSITION = ("original", "rotary-original")
ROWS = 8
"""Up to this many active sequences attend one after the other in a step: then none pays for the others' places."""


@dataclass(frozen=True, kw_only=True)
class GAUConfig(Settings):
    """Attention among the active tokens: a gated attention unit with a working memory.

    >>> from seqboat import GAUConfig, SeqBoat
    >>> SeqBoat(32, gau=GAUConfig(d_z=16, window=64, positions="rotary")).config.gau.window
    64
    """

    d_z: int = 64
    """Width of queries and keys."""
    d_v: int | None = None
    """Width of values and gates; twice the model's by default."""
    attention: AttentionName = "softmax"
    """The attention function."""
    span: SpanName = "memory"
    """What a query sees: its working memory, everything, or its chunk of `window` active tokens."""
    window: int = 256
    """Size of the working memory, or of a chunk."""
    positions: PositionsName = "rotary-original"
    """Relative bias on original or compressed positions, rotary on original ones, both of these, or none."""
    max_positions: int = 4096
    """Distances (in positions) beyond which the relative bias stays the same."""
    attention_dropout: float = 0.0
    """Rate of dropout on attention weights."""

    def __post_init__(self) -> None:
        check_positive("d_z", self.d_z)
        check_positive("window", self.window)
        check_positive("max_positions", self.max_positions)
        check_choice("attention", self.attention, tuple(FUNCTIONS))
        check_choice("span", self.span, get_args(SpanName))
        check_choice("positions", self.positions, get_args(PositionsName))
        check_rate("attention_dropout", self.attention_dropout)
        if self.d_v is not None:
            check_positive("d_v", self.d_v)
        rotates = self.positions in ROTATES
        require(not rotates or self.d_z % 2 == 0, f"d_z must be even with rotary positions, got {self.d_z}")

    def build(self, d_model: int, causal: bool, dropout: float = 0.0) -> GAU:
        return GAU(d_model, self, causal=causal, dropout=dropout)


class WorkingMemory(NamedTuple):
    """The last activated tokens of every sequence: slot s at place s modulo the places."""

    keys: Tensor
    """(batch, places, d_z); one more channel where keys have weights"""
    values: Tensor
    """(batch, places, d_v)"""
    positions: Tensor
    """(batch, places), in the original sequence"""
    total: Tensor
    """(batch,): tokens activated so far"""


class GAU(PackedModule):
    """A gated attention unit on packed tokens, the attention of SeqBoat. With the span "full" its memory grows.

    Args:
        d_model: width of the tokens.
        config: settings; the defaults if not given.
        causal: whether a token sees earlier tokens only.
        dropout: rate of dropout on the output.
        options: individual settings as keywords, fields of `GAUConfig`.

    >>> from seqboat import GAU, pack
    >>> packed = pack(torch.tensor([[True, False, True], [False, True, True]]))
    >>> y, state = GAU(8, causal=True, window=2)(packed.take(torch.randn(2, 3, 8)), packed)
    >>> y.shape
    torch.Size([4, 8])
    """

    def __init__(
        self,
        d_model: int,
        config: GAUConfig | None = None,
        *,
        causal: bool,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        config = fill_in(GAUConfig, config, options, self, d_model)
        check_rate("dropout", dropout)
        self.config, self.causal, self.d_model, self.dropout = config, causal, check_width(d_model), dropout
        self.d_z, self.d_v, self.window = config.d_z, config.d_v or 2 * d_model, config.window
        self._kept = Kept()
        self.wide: int | None = None
        """window in training, if it is not the configured one"""
        self.function = FUNCTIONS[config.attention]
        self.grows = config.span == "full"
        self.scale = 1 / math.sqrt(self.d_z)
        """of the products, where the number of keys is bounded or does not matter"""
        if self.function.by_keys:
            self.scale = 1 / config.window
        self.base = nn.Linear(d_model, self.d_z + 2 * self.d_v)
        self.gamma = nn.Parameter(torch.empty(2, self.d_z))
        self.beta = nn.Parameter(torch.empty(2, self.d_z))
        self.out = nn.Linear(self.d_v, d_model)
        self.bias: RelativeBias | None = None
        if config.positions in BY_POSITION or (config.positions == "compressed" and self.grows):
            self.bias = RelativeBias(config.max_positions - 1)
        elif config.positions == "compressed":
            self.bias = RelativeBias(max(self.sides))
        init_linear(self)
        nn.init.trunc_normal_(self.gamma, std=0.02, a=-0.04, b=0.04)
        nn.init.zeros_(self.beta)

    def extra_repr(self) -> str:
        return f"{self.config}, causal={self.causal}"

    @property
    def sides(self) -> tuple[int, int]:
        """How many active tokens before and after itself a query sees."""
        window = self.wide if self.wide is not None and self.training else self.window
        reach = {"memory": window // 2, "chunk": self.window - 1, "full": FAR}[self.config.span]
        left = window if self.causal and self.config.span == "memory" else reach
        return left, 0 if self.causal else reach

    @property
    def others(self) -> int | None:
        """The most keys that a query sees besides its own; None if there is no bound."""
        if self.config.span == "chunk":
            return self.window - 1
        return None if self.grows else sum(self.sides)

    def forward(
        self, tokens: Tensor, packed: Packed, state: WorkingMemory | None = None
    ) -> tuple[Tensor, WorkingMemory | None]:
        query, key, value, gate = self.project(tokens, packed.position)
        if self.grows and self.function.by_keys:
            keys = packed.offsets.diff()[packed.row]
            if self.causal:
                keys = packed.slot + 1 if state is None else packed.slot + state.total[packed.row] + 1
            query = query / keys[:, None]
        else:
            query = query * self.scale
        if packed.weight is not None:
            query, key, value = weigh_keys(query, key, value, packed.weight, self.config.attention)
        attended = self._attend(query, key, value, packed, state)
        y = self.out(gate * attended)
        y = F.dropout(y, self.dropout, self.training) if self.dropout else y
        return y, self._remember(key, value, packed, state, tokens.dtype) if self.causal else None

    def project(self, tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and gates of (tokens, d_model)."""
        z, gate, value = F.silu(self.base(tokens)).split([self.d_z, self.d_v, self.d_v], dim=-1)
        pair = torch.addcmul(self.beta, z[:, None], self.gamma)  # (tokens, 2, d_z)
        if self.config.positions in ROTATES:
            pair = rotate(pair, turns(position, self.d_z, pair.dtype)[:, None])
        pair = pair.to(z.dtype)
        return pair[:, 0], pair[:, 1], value, gate

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, packed: Packed, state: WorkingMemory | None
    ) -> Tensor:
        """Weighted sums of values for packed queries, which also see what a state remembers."""
        row, position, offsets, longest = packed.row, packed.position, packed.offsets, packed.longest
        chunks, groups, places = self.config.span == "chunk", 1, None
        group = row
        if chunks:
            # a group per chunk
            groups = -(-longest // self.window)
            group = row * groups + packed.slot // self.window
        if state is not None:
            # before the new tokens of each sequence come all places of its memory, oldest first
            batch, size = state.keys.shape[:2]
            held, order = _held(state.total, size).sort(dim=1)
            sequence, index = (
                torch.arange(batch, device=row.device),
                torch.arange(len(row), device=row.device),
            )
            places = index + (row + 1) * size
            old = (offsets[:-1] + sequence * size)[:, None] + torch.arange(size, device=row.device)
            source = places.new_empty(len(row) + batch * size)
            source[old.flatten()] = (sequence[:, None] * size + order).flatten()
            source[places] = index + batch * size
            key, value, position = (
                torch.cat([past.flatten(0, 1).to(new.dtype), new]).index_select(0, source)
                for past, new in ((state.keys, key), (state.values, value), (state.positions, position))
            )
            query = query.new_zeros(len(source), query.shape[1]).index_copy(0, places, query)
            # places that hold nothing are a group of their own
            longest, groups, part, fresh = longest + size, 2, (held >= 0).long(), torch.ones_like(row)
            if chunks:
                first = ((state.total - size).clamp(min=0) // self.window)[:, None]
                groups = 3 + longest // self.window
                part = torch.where(held >= 0, held // self.window - first + 1, 0)
                fresh = (packed.slot + state.total[row]) // self.window - first[row, 0] + 1
            group = torch.empty_like(source)
            group[old.flatten()] = (sequence[:, None] * groups + part).flatten()
            group[places] = row * groups + fresh
        if groups > 1 or chunks:
            longest = min(longest, self.window) if chunks else longest
            counts = torch.zeros(groups * (offsets.shape[0] - 1), dtype=torch.int64, device=row.device)
            offsets = F.pad(counts.index_add(0, group, torch.ones_like(group)).cumsum(0), (1, 0))
        table = None if self.bias is None else self.bias.table
        coordinate = position if self.config.positions in BY_POSITION else None
        seen = Seen(group, offsets, longest, *self.sides, table, coordinate)
        dropout = self.config.attention_dropout if self.training else 0.0
        attended = attend(query, key, value, seen, self.config.attention, dropout)
        return attended if places is None else attended.index_select(0, places)

    # the working memory of causal units

    @property
    def places(self) -> int:
        """Places of an empty memory: a query also sees itself; with the span "full", memories begin empty."""
        return {"memory": self.window + 1, "chunk": self.window, "full": 0}[self.config.span]

    def init_state(self, batch: int) -> WorkingMemory:
        self._kept.forget()
        return self._empty(batch, self.places, self.gamma.dtype)

    def _empty(self, batch: int, places: int, dtype: torch.dtype) -> WorkingMemory:
        d_key = self.d_z + (self.weighs and not self.function.by_keys)
        keys, values = (
            self.gamma.new_zeros(batch, places, width, dtype=dtype) for width in (d_key, self.d_v)
        )
        numbers = torch.zeros(batch, places, dtype=torch.int64, device=keys.device)
        return WorkingMemory(keys, values, numbers, torch.zeros_like(numbers[:, :1].sum(dim=1)))

    def _remember(
        self, key: Tensor, value: Tensor, packed: Packed, state: WorkingMemory | None, dtype: torch.dtype
    ) -> WorkingMemory:
        """The memory after all packed tokens."""
        size = self.places
        if self.grows:
            size = packed.longest + (0 if state is None else state.keys.shape[1])
        # in the type of the inputs, also where autocast made keys and values narrower
        before = self._empty(packed.offsets.shape[0] - 1, 0, dtype) if state is None else state
        total = before.total + packed.offsets.diff()
        missing = size - before.keys.shape[1]
        slot = _held(total, size)
        fresh = slot >= before.total[:, None]
        source = packed.offsets[:-1, None] + slot - before.total[:, None]
        source = torch.where(fresh, source, key.shape[0])  # one spare token of zeros at the end

        def renew(new: Tensor, old: Tensor) -> Tensor:
            pad = (0, 0) * (new.dim() - 1)
            spare = F.pad(new.to(old.dtype), (*pad, 0, 1))
            taken = spare.index_select(0, source.flatten()).view(*source.shape, *new.shape[1:])
            wide = fresh.view(*fresh.shape, *(1,) * (new.dim() - 1))
            return torch.where(wide, taken, F.pad(old, (*pad, 0, missing)) if missing else old)

        kept = renew(key, before.keys), renew(value, before.values), renew(packed.position, before.positions)
        return WorkingMemory(*kept, total)

    def step(
        self,
        x: Tensor,
        active: Tensor,
        position: Tensor,
        state: WorkingMemory,
        weight: Tensor | None = None,
    ) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self.step(x.to(state.keys.dtype), active, position, state, weight)
        if self.grows and state.keys.shape[1] <= (int(state.total.max()) if len(x) else 0):
            more = max(16, state.keys.shape[1])
            for part in state[:3]:
                part.set_(F.pad(part, (0, 0) * (part.dim() - 2) + (0, more)))  # type: ignore[call-overload]
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            rows = [row for row, on in enumerate(active.tolist()) if on]
            if 0 < len(rows) <= ROWS:
                return self._step_rows(x, rows, position, state, weight)
        query, key, value, gate = self._project_token(x, position, state.total, weight)
        slot, size = state.total, state.keys.shape[1]
        here = torch.arange(size, device=x.device) == (slot % size)[:, None]
        here &= active[:, None]
        for memory, new in ((state.keys, key), (state.values, value)):
            memory.copy_(torch.where(here[..., None], new[:, None].to(memory.dtype), memory))
        state.positions.copy_(torch.where(here, position[:, None], state.positions))
        scores = torch.bmm(state.keys.to(query.dtype), query[:, :, None])[:, :, 0]
        held = _held(slot + 1, size)
        if self.bias is not None and self.config.positions in BY_POSITION:
            scores = scores + self.bias(state.positions - position[:, None])
        elif self.bias is not None:
            scores = scores + self.bias(held - slot[:, None])
        first = slot // self.window * self.window if self.config.span == "chunk" else torch.zeros_like(slot)
        weights = self.function.weights(scores.masked_fill_(held < first[:, None], HIDDEN))
        attended = torch.bmm(weights[:, None].to(state.values.dtype), state.values)[:, 0]
        state.total.add_(active)
        return self.out(gate * attended.to(gate.dtype))

    def _turned(self) -> tuple[Tensor, ...]:
        """Both linear maps, turned, as tokens are multiplied fastest one by one; gamma and beta with the scale."""
        fixed = 1.0 if self.grows and self.function.by_keys else self.scale
        factor = self.gamma.new_tensor([[fixed], [1.0]])
        weights = (self.base.weight.t().contiguous(), self.out.weight.t().contiguous())
        return *weights, self.gamma * factor, self.beta * factor

    def _project_token(
        self, x: Tensor, position: Tensor, total: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `project`, of one token per sequence after `total` active ones, with the scale and weights."""
        if type(self.base) is type(self.out) is nn.Linear and not torch.compiler.is_compiling():
            own = chain(
                self._parameters.values(), self.base._parameters.values(), self.out._parameters.values()
            )
            base, _, gamma, beta = self._kept.get(own, self._turned)
            z, gate, value = F.silu(torch.addmm(self.base.bias, x, base), inplace=True).split(
                [self.d_z, self.d_v, self.d_v], dim=1
            )
            pair = torch.addcmul(beta, z[:, None], gamma)
            if self.config.positions in ROTATES:
                pair = rotate(pair, turns(position, self.d_z, pair.dtype)[:, None])
            query, key = pair.unbind(1)
        else:
            query, key, value, gate = self.project(x, position)
            query = query if self.grows and self.function.by_keys else query * self.scale
        if self.grows and self.function.by_keys:
            query = query / (total + 1)[:, None]
        if weight is not None:
            query, key, value = weigh_keys(query, key, value, weight, self.config.attention)
        return query, key, value, gate

    def _step_rows(
        self, x: Tensor, rows: list[int], position: Tensor, state: WorkingMemory, weight: Tensor | None
    ) -> Tensor:
        """As `step`, of few active sequences: each attends to the places that it has filled."""
        everyone, seen = len(rows) == len(x), position.tolist()
        index = None if everyone else torch.tensor(rows)
        tokens, keys = x, state.total
        if index is not None:
            tokens, position, keys = x[index], position[index], keys[index]
            weight = None if weight is None else weight[index]
        totals = keys.tolist()
        query, key, value, gate = self._project_token(tokens, position, keys, weight)
        size, chunk, weigh = state.keys.shape[1], self.config.span == "chunk", self.function.weights
        attended = []
        for i, row in enumerate(rows):
            slot = totals[i]
            place = slot % size
            count = place + 1 if chunk else min(slot + 1, size)
            memory_keys, memory_values = state.keys[row], state.values[row]
            memory_keys[place].copy_(key[i])
            memory_values[place].copy_(value[i])
            state.positions[row, place] = seen[row]
            scores = torch.mv(memory_keys[:count], query[i])
            if self.bias is not None:
                if self.config.positions in BY_POSITION:
                    distance = state.positions[row, :count] - position[i]
                else:
                    distance = -((place - torch.arange(count)) % size)
                scores = scores + self.bias(distance)
            attended.append(torch.mm(weigh(scores)[None], memory_values[:count]))
        gated = gate.mul_(attended[0] if len(rows) == 1 else torch.cat(attended))
        if type(self.out) is nn.Linear and type(self.base) is nn.Linear:
            out = torch.addmm(self.out.bias, gated, self._kept.value[1])
        else:
            out = self.out(gated)
        if index is None:
            state.total.add_(1)
            return out
        state.total[index] += 1
        return torch.zeros_like(x).index_copy_(0, index, out.to(x.dtype))


def _held(total: Tensor, places: int) -> Tensor:
    """(batch, places): the slot kept at each place after `total` tokens; negative if none."""
    place = torch.arange(places, device=total.device)
    return total[:, None] - 1 - (total[:, None] - 1 - place) % max(places, 1)
