"""Gated attention unit on the active tokens, appendix A.2 of the paper.

    base = SiLU(H W + b), split into z (d_z), gate g (d_v) and value v (d_v)
    q = z * gamma_q + beta_q,  k = z * gamma_k + beta_k
    Y = (g * (f(q k^T * scale + bias) v)) W_h + b_h

f is an attention function (`ops.functions`), what a query sees is a span (`spans`), and positions enter by rotating
queries and keys or as a bias (`ops.positions`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, check_rate
from seqboat.core.nn import init_linear
from seqboat.core.settings import Settings, fill_in
from seqboat.layers.packing import Packed, PackedModule
from seqboat.layers.spans import SPANS, ChunkSpan, FullSpan, SpanName, WorkingMemory
from seqboat.ops.attention import FAR, Seen, attend, weigh_keys
from seqboat.ops.functions import ATTENTIONS, HIDDEN, AttentionName
from seqboat.ops.positions import POSITIONS, PositionsName, RelativeBias
from seqboat.ops.precision import wide_type


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
        check_choice("attention", self.attention, tuple(ATTENTIONS))
        check_choice("span", self.span, tuple(SPANS))
        check_choice("positions", self.positions, tuple(POSITIONS))
        check_rate("attention_dropout", self.attention_dropout)
        if self.d_v is not None:
            check_positive("d_v", self.d_v)
        POSITIONS[self.positions].check_width("d_z", self.d_z)

    def build(self, d_model: int, causal: bool, dropout: float = 0.0) -> GAU:
        return GAU(d_model, self, causal=causal, dropout=dropout)


SMALLEST = 1e-30
"""The least weight of a key: its logarithm is finite."""


class SlotWeights(NamedTuple):
    """How some queries of one sequence weigh the keys they see."""

    first: Tensor
    """(queries,): slot of the first key that each sees"""
    end: Tensor
    """(queries,): the slot behind the last one"""
    weights: Tensor
    """(queries, most keys): of the keys from `first` on; zero behind the last"""


class GAU(PackedModule):
    """A gated attention unit on packed tokens, the attention of SeqBoat. With the span "full" its memory grows.

    Args:
        d_model: width of the tokens.
        config: settings; the defaults if not given.
        causal: whether a token sees earlier tokens only.
        dropout: rate of dropout on the output.
        options: individual settings as keywords, fields of `GAUConfig`.

    Calling it with tokens of shape (tokens, d_model) and where they came from returns the outputs, of the same shape,
    and the state after the last token (None unless causal).

    >>> import torch
    >>> from seqboat import GAU, pack
    >>> active = torch.tensor([[True, False, True], [False, True, True]])
    >>> packed = pack(active)
    >>> unit = GAU(8, causal=True, window=2)
    >>> y, state = unit(packed.take(torch.randn(2, 3, 8)), packed)
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
        check_positive("d_model", d_model)
        check_rate("dropout", dropout)
        self.config, self.causal, self.d_model = config, causal, d_model
        self.d_z, self.d_v = config.d_z, config.d_v or 2 * d_model
        self.window, self.dropout = config.window, dropout
        self.wide: int | None = None
        """window in training, if it is not the configured one"""
        self.span = SPANS[config.span](config.window, causal)
        self.positions = POSITIONS[config.positions]
        self.function = ATTENTIONS[config.attention]
        self.scale = float(self.function.scale(self.d_z, config.window))
        """of the products, where the window bounds the number of keys"""
        self.base = nn.Linear(d_model, self.d_z + 2 * self.d_v)
        self.gamma = nn.Parameter(torch.empty(2, self.d_z))
        self.beta = nn.Parameter(torch.empty(2, self.d_z))
        self.out = nn.Linear(self.d_v, d_model)
        distance = self.positions.max_distance(config.max_positions, self.span.reach)
        self.bias = None if distance is None else RelativeBias(distance)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values, truncated at two standard deviations.

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

    def forward(
        self, tokens: Tensor, packed: Packed, state: WorkingMemory | None = None
    ) -> tuple[Tensor, WorkingMemory | None]:
        query, key, value, gate = self.project(tokens, packed.position)
        scale: float | Tensor = self.scale
        if isinstance(self.span, FullSpan):
            slot = packed.slot if state is None else packed.slot + state.total[packed.row]
            keys = self.span.keys(slot, packed.offsets.diff()[packed.row], wide_type(query))
            scale = self.function.scale(self.d_z, keys)
        query = query * (scale[:, None] if isinstance(scale, Tensor) else scale)
        if packed.weight is not None:
            query, key, value = weigh_keys(query, key, value, packed.weight, self.config.attention)
        attended = self._attend(query, key, value, packed, state)
        y = self._drop(self.out(gate * attended))
        if not self.causal:
            return y, None
        if state is None:
            # in the type of the inputs, also where autocast makes keys and values narrower
            state = self.make_state(packed.offsets.shape[0] - 1, tokens.dtype, tokens.device)
        return y, self.span.remember(key, value, packed, state)

    def project(self, tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and gates of (tokens, d_model)."""
        z, gate, value = F.silu(self.base(tokens)).split([self.d_z, self.d_v, self.d_v], dim=-1)
        query, key = (torch.addcmul(self.beta[i], z, self.gamma[i]).to(z.dtype) for i in (0, 1))
        return *self.positions.rotate(query, key, position), value, gate

    @property
    def sides(self) -> tuple[int, int]:
        """How many active tokens before and after itself a query sees."""
        window = self.wide if self.wide is not None and self.training else self.window
        reach = {"memory": window // 2, "chunk": self.window - 1, "full": FAR}[self.config.span]
        left = window if self.causal and self.config.span == "memory" else reach
        return left, 0 if self.causal else reach

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, packed: Packed, state: WorkingMemory | None
    ) -> Tensor:
        """Weighted sums of values for packed queries, which also see what a state remembers."""
        row, position, offsets, longest = packed.row, packed.position, packed.offsets, packed.slots
        slot: Tensor | None = None
        groups, places = 1, None
        if isinstance(self.span, ChunkSpan):
            slot, groups = packed.slot, -(-longest // self.window)
        group = row if slot is None else row * groups + slot // self.window
        if state is not None:
            # before the new tokens of each sequence come all places of its memory, oldest first
            batch, size = state.keys.shape[:2]
            held = self.span.held(state.total, size)
            held, order = torch.where(held < state.total[:, None], held, -1).sort(dim=1)
            sequence = torch.arange(batch, device=row.device)
            places = torch.arange(len(row), device=row.device) + (row + 1) * size
            old = (offsets[:-1] + sequence * size)[:, None] + torch.arange(size, device=row.device)
            source = places.new_empty(len(row) + batch * size)
            source[old.flatten()] = (sequence[:, None] * size + order).flatten()
            source[places] = torch.arange(len(row), device=row.device) + batch * size
            key, value, position = (
                torch.cat([past.flatten(0, 1).to(new.dtype), new]).index_select(0, source)
                for past, new in ((state.keys, key), (state.values, value), (state.positions, position))
            )
            query = query.new_zeros(len(source), query.shape[1]).index_copy(0, places, query)
            # places that hold nothing are a group of their own
            longest, groups, part = longest + size, 2, torch.where(held >= 0, 1, 0)
            fresh = torch.ones_like(row)
            if slot is not None:
                first = ((state.total - size).clamp(min=0) // self.window)[:, None]
                groups = 3 + longest // self.window
                part = torch.where(held >= 0, held // self.window - first + 1, 0)
                fresh = (packed.slot + state.total[row]) // self.window - first[row, 0] + 1
            group = torch.empty_like(source)
            group[old.flatten()] = (sequence[:, None] * groups + part).flatten()
            group[places] = row * groups + fresh
        if state is not None or slot is not None:
            longest = (
                longest if slot is None else min(longest, max(self.window, 0 if state is None else size))
            )
            counts = torch.zeros(groups * (offsets.shape[0] - 1), dtype=torch.int64, device=row.device)
            offsets = F.pad(counts.index_add(0, group, torch.ones_like(group)).cumsum(0), (1, 0))
        coordinate = self.positions.coordinate(position, None)
        table = None if self.bias is None else self.bias.table
        seen = Seen(group, offsets, longest, *self.sides, table, coordinate)
        dropout = self.config.attention_dropout if self.training else 0.0
        attended = attend(query, key, value, seen, self.config.attention, dropout)
        return attended if places is None else attended.index_select(0, places)

    def _drop(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.dropout, self.training) if self.dropout else y

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> WorkingMemory:
        column = self.weighs and self.config.attention == "softmax"
        return self.span.make_state(batch, self.d_z + column, self.d_v, dtype, device)

    def advance(
        self,
        tokens: Tensor,
        rows: Tensor,
        position: Tensor,
        state: WorkingMemory,
        inplace: bool = False,
        weight: Tensor | None = None,
    ) -> tuple[Tensor, WorkingMemory]:
        query, key, value, gate = self.project(tokens, position)
        everyone = rows.shape[0] == state.total.shape[0]
        past = state if everyone else WorkingMemory(*(part.index_select(0, rows) for part in state))
        slot, places = past.total, past.keys.shape[1]
        wide = wide_type(query)
        scale = self.function.scale(self.d_z, self.span.keys(slot, 1, wide))
        query = query.to(wide) * (scale[:, None] if isinstance(scale, Tensor) else scale)
        if weight is not None:
            query, key, value = weigh_keys(query, key, value, weight, self.config.attention)
        key, value = key.to(past.keys.dtype), value.to(past.values.dtype)
        scores = torch.bmm(past.keys.to(wide), query[:, :, None])[:, :, 0]
        own = (query * key.to(wide)).sum(dim=-1, keepdim=True)
        if self.bias is not None:
            held = self.positions.coordinate(past.positions, self.span.held(slot, places))
            here = self.positions.coordinate(position, slot)
            scores = scores + self.bias(held - here[:, None]).to(wide)
            own = own + self.bias(torch.zeros_like(slot[:, None])).to(wide)
        hidden = self.span.hidden(slot, places)
        weights = self.function.weights(torch.cat([scores.masked_fill(hidden, HIDDEN), own], dim=1))
        attended = torch.bmm(weights[:, None, :-1], past.values.to(wide))[:, 0]
        attended = torch.addcmul(attended, weights[:, -1:], value.to(wide))
        after = self.span.record(WorkingMemory(key, value, position, slot), rows, state, inplace)
        return self._drop(self.out(gate * attended.to(gate.dtype))), after

    def weigh(
        self,
        query: Tensor,
        key: Tensor,
        position: Tensor,
        queries: slice = slice(None),
        weight: Tensor | None = None,
    ) -> SlotWeights:
        """Attention weights inside one sequence, for inspection: `forward` never holds them all.

        Args:
            query: (active, d_z), from `project`, of all active tokens of a sequence.
            key: (active, d_z), likewise.
            position: (active,), their positions in the original sequence.
            queries: which of them to weigh.
            weight: (active,), what each key counts; all alike by default.
        """
        count = len(query)
        slots = torch.arange(count, device=query.device)
        slot = slots[queries]
        first, end = self.span.visible(slot, count)
        low, high = (int(first[0]), int(end[-1])) if len(slot) else (0, 0)
        key_slot = slots[low:high]
        wide = wide_type(query)
        scale = self.function.scale(self.d_z, self.span.keys(slot[:, None], count, wide))
        scores = query[queries].to(wide) @ key[low:high].to(wide).T * scale
        if self.bias is not None:
            places = self.positions.coordinate(position, slots)
            scores = scores + self.bias(places[low:high] - places[queries][:, None]).to(wide)
        hidden = (key_slot < first[:, None]) | (key_slot >= end[:, None])
        counts = None if weight is None else weight[low:high].to(wide)
        by_score = self.config.attention == "softmax"
        if counts is not None and by_score:
            scores = scores + counts.clamp(min=SMALLEST).log()
        weights = self.function.weights(scores.masked_fill(hidden, HIDDEN))
        if counts is not None and not by_score:
            weights = weights * counts
        most = int((end - first).max()) if len(slot) else 0
        column = (first - low)[:, None] + torch.arange(most, device=slot.device)
        inside = column < (end - low)[:, None]
        column = column.clamp(max=max(high - low - 1, 0))
        return SlotWeights(first, end, torch.where(inside, weights.gather(1, column), 0))
