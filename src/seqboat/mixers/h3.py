"""H3 (Fu et al., 2023): two state-space layers and two products take the place of attention.

    Q, K, V = x W_q, x W_k, x W_v
    O       = Q * DiagSSM(ShiftSSM(K) * V),   y = x + O W_o,   y = y + W_2 GELU(W_1 y + b_1) + b_2

with a norm before each block. The shift layer remembers the last tokens one by one (its matrix moves each state to
the next, so that its kernel is a free tap per state); the diagonal layer is S4D and remembers, per head, the outer
product of keys and values. Together they can store "after this key came that value" and read it with Q.

In the hybrid model two layers of a stack are those of a Transformer with rotary positions: the second, and the second
of its latter half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, check_rate, require
from seqboat.core.layout import WHOLE, Layout, clear
from seqboat.core.mixer import Mixer, MixerOutput
from seqboat.core.nn import NORMS, FeedForward, Norm, NormName, init_linear, make_norm
from seqboat.core.settings import Settings, fill_in
from seqboat.core.state import overwrite
from seqboat.mixers.transformer import TransformerConfig
from seqboat.ssm.diagonal import (
    S4DConfig,
    SSMState,
    StateSpace,
    TruncatedState,
    at_least_float32,
    joined_with,
    latest,
)


@dataclass(frozen=True, kw_only=True)
class H3Config(Settings):
    """H3: a shift and a diagonal state-space layer, multiplied with queries, keys and values; feed-forward block."""

    shift: int = 64
    """Tokens that the shift layer remembers."""
    ssm: S4DConfig = S4DConfig(init="lin")
    """The diagonal layer."""
    d_head: int = 1
    """Width of a head; its state holds d_head^2 products of a key and a value."""
    d_ff: int | None = None
    """Hidden width of the feed-forward block; four times the model's by default."""
    causal: bool = True
    """Whether the layer reads from left to right only, for language models."""
    norm: NormName = "layer"
    """The norm of both blocks."""
    dropout: float = 0.0
    """Rate of dropout on the outputs of both blocks."""

    def __post_init__(self) -> None:
        check_positive("shift", self.shift)
        check_positive("d_head", self.d_head)
        if self.d_ff is not None:
            check_positive("d_ff", self.d_ff)
        check_choice("norm", self.norm, NORMS)
        check_rate("dropout", self.dropout)

    def build(self, d_model: int) -> H3:
        return H3(d_model, self)


@dataclass(frozen=True, kw_only=True)
class H3HybridConfig(H3Config):
    """H3 hybrid: H3 with attention in two layers of a stack, the second and the second of its latter half."""

    heads: int = 4
    """Attention heads, each of width d_model / heads, which is 64 in the published models."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("heads", self.heads)

    def build_layers(self, d_model: int, num_layers: int) -> list[Mixer]:
        """The layers of a stack."""
        attention = TransformerConfig(
            heads=self.heads,
            d_ff=self.d_ff,
            activation="gelu",
            positions="rotary",
            causal=self.causal,
            norm=self.norm,
            prenorm=True,
            dropout=self.dropout,
        )
        places = (1, 1 + num_layers // 2)
        return [(attention if i in places else self).build(d_model) for i in range(num_layers)]


class ShiftSSM(StateSpace):
    """A state-space layer whose states are the last tokens: a convolution with free taps.

    Args:
        d_model: channels.
        states: tokens that are remembered, the current one included.
        causal: one direction, or else both.
    """

    def __init__(self, d_model: int, states: int, *, causal: bool) -> None:
        super().__init__(d_model, causal)
        self.states = states
        self.taps = nn.Parameter(torch.empty(self.directions, d_model, states))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Taps and skip start at N(0, 1)."""
        nn.init.normal_(self.taps)
        nn.init.normal_(self.skip)

    def extra_repr(self) -> str:
        return f"{self.d_model}, states={self.states}, causal={self.causal}"

    def read(
        self, x: Tensor, layout: Layout, state: TruncatedState | None
    ) -> tuple[Tensor, TruncatedState | None]:
        past = self.states - 1
        taps, skipped = self.taps.to(x.dtype), self.skip.to(x.dtype) * x
        joined = joined_with(x, None if state is None else state.history, past)
        if self.causal:
            after = TruncatedState(latest(joined, layout.mask, past))
            return _slide(joined, taps[0].flip(-1)) + skipped, after
        # the oldest tap first, up to the furthest ahead; both directions have one for the token itself
        behind, own, ahead = taps[0, :, 1:].flip(-1), taps[:, :, 0].sum(dim=0)[:, None], taps[1, :, 1:]
        joined = F.pad(joined, (0, 0, 0, past))
        return _slide(joined, torch.cat([behind, own, ahead], dim=1)) + skipped, None

    def _fresh(self, batch: int, dtype: torch.dtype, device: torch.device) -> TruncatedState:
        shape = (batch, self.states - 1, self.d_model)
        return TruncatedState(torch.zeros(shape, dtype=at_least_float32(dtype), device=device))

    def read_token(self, x: Tensor, state: TruncatedState) -> tuple[Tensor, TruncatedState]:
        joined = torch.cat([state.history, x[:, None]], dim=1)
        y = (joined * self.taps[0].to(x.dtype).flip(-1).t()).sum(dim=1)
        return y, TruncatedState(joined[:, 1:])


def _slide(x: Tensor, taps: Tensor) -> Tensor:
    """(batch, length - taps + 1, dim): each output is the sum of (batch, length, dim) under the taps (dim, taps)."""
    if x.shape[1] < taps.shape[1]:
        return x[:, :0] + 0 * taps.sum()
    return F.conv1d(x.transpose(1, 2), taps[:, None], groups=taps.shape[0]).transpose(1, 2)


class H3State(NamedTuple):
    """The state of a causal layer."""

    shift: TruncatedState
    """of the keys"""
    ssm: SSMState
    """of the products: (batch, d_head^2 * heads, states)"""


class H3(Mixer):
    """One H3 layer on (batch, time, d_model): two state-space layers with products between them."""

    def __init__(self, d_model: int, config: H3Config | None = None, **options: Any) -> None:
        super().__init__()
        config = fill_in(H3Config, config, options, self, d_model)
        check_positive("d_model", d_model)
        require(
            d_model % config.d_head == 0,
            f"d_model must be a multiple of d_head = {config.d_head}, got {d_model}",
        )
        require(
            config.ssm.truncation is None, f"ssm.truncation of H3 must be None, got {config.ssm.truncation}"
        )
        self.config, self.d_model, self.causal = config, d_model, config.causal
        self.d_head, self.heads = config.d_head, d_model // config.d_head
        self.norm: Norm = make_norm(config.norm, d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.shift = ShiftSSM(d_model, config.shift, causal=config.causal)
        self.ssm = config.ssm.build(self.heads, config.causal)
        self.out = nn.Linear(d_model, d_model)
        self.ffn_norm: Norm = make_norm(config.norm, d_model)
        self.ffn = FeedForward(d_model, config.d_ff or 4 * d_model, "gelu")
        init_linear(self)

    def closing_norm(self) -> nn.Module | None:
        return make_norm(self.config.norm, self.d_model)

    def mix(self, x: Tensor, layout: Layout, state: H3State | None) -> MixerOutput:
        mask = layout.mask
        query, key, value = self._project(x, mask)
        shifted = self.shift(key, layout, None if state is None else state.shift)
        pairs = self._pairs(shifted.y, value)  # (batch, time, d_head^2, heads)
        batch, time = x.shape[:2]
        square = self.d_head**2
        rows = pairs.transpose(1, 2).reshape(batch * square, time, self.heads)
        spread = WHOLE if mask is None else Layout(mask.repeat_interleave(square, dim=0))
        before = None if state is None else self._spread(state.ssm)
        found = self.ssm(rows, spread, before)
        stored = found.y.view(batch, square, time, self.heads).transpose(1, 2)
        y = self._close(x, self._select(query, stored), mask)
        after = None
        if self.causal:
            after = H3State(shifted.state, self._gather(found.state))
        return MixerOutput(clear(y, mask), after)

    def _project(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, in the type of the inputs: products of three lose too much in a narrow one."""
        parts = self.qkv(self.norm(x, mask)).to(x.dtype)
        query, key, value = clear(parts, mask if x.dim() == 3 else None).chunk(3, dim=-1)
        return query, key, value

    def _pairs(self, key: Tensor, value: Tensor) -> Tensor:
        """The products of each key and value of a head, (..., d_head^2, heads)."""
        key, value = (
            part.unflatten(-1, (self.heads, self.d_head)).transpose(-1, -2) for part in (key, value)
        )
        return (key[..., :, None, :] * value[..., None, :, :]).flatten(-3, -2)

    def _select(self, query: Tensor, stored: Tensor) -> Tensor:
        """What the queries (..., d_model) read from products (..., d_head^2, heads)."""
        query = query.unflatten(-1, (self.heads, self.d_head)).transpose(-1, -2)  # (..., d_head, heads)
        stored = stored.unflatten(-2, (self.d_head, self.d_head))
        read = (query[..., :, None, :] * stored).sum(dim=-3)  # (..., d_head, heads)
        return read.transpose(-1, -2).flatten(-2)

    def _spread(self, state: SSMState) -> SSMState:
        """From one state per sequence to one per product, as the diagonal layer has them."""
        return SSMState(state.states.unflatten(1, (self.d_head**2, self.heads)).flatten(0, 1))

    def _gather(self, state: SSMState) -> SSMState:
        square = self.d_head**2
        states = state.states.unflatten(0, (state.states.shape[0] // square, square))
        return SSMState(states.flatten(1, 2))

    def _close(self, x: Tensor, read: Tensor, mask: Tensor | None) -> Tensor:
        y = x + self._drop(self.out(read)).to(x.dtype)
        return y + self._drop(self.ffn(self.ffn_norm(y, mask))).to(x.dtype)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    def _fresh(self, batch: int, dtype: torch.dtype, device: torch.device) -> H3State:
        shape = (batch, self.d_head**2 * self.heads, self.ssm.d_state)
        states = torch.zeros(shape, dtype=at_least_float32(dtype), device=device)
        return H3State(self.shift._fresh(batch, dtype, device), SSMState(states))

    @torch.no_grad()
    def step(self, x: Tensor, state: H3State) -> MixerOutput:
        query, key, value = self._project(x, None)
        shifted = self.shift.step(key, state.shift)
        rows = self._pairs(shifted.y, value).flatten(0, 1)
        square = self.d_head**2
        found = self.ssm.step(rows, self._spread(state.ssm))
        y = self._close(x, self._select(query, found.y.unflatten(0, (len(x), square))), None)
        overwrite(state.ssm, self._gather(found.state))
        return MixerOutput(y, state)
