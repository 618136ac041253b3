"""MEGA (Ma et al., 2022): a moving average of the sequence feeds a single head of gated attention.

    X' = SiLU(EMA(X))
    Z  = SiLU(X' W_z + b_z),  Q = kappa_q * Z + mu_q,  K = kappa_k * Z + mu_k,  V = SiLU(X W_v + b_v)
    O  = f(Q K^T * scale + bias) V
    gamma = SiLU(X' W_gamma + b_gamma)                     the reset gate
    phi   = sigmoid(X' W_phi + b_phi)                      the update gate
    H  = SiLU(X' W_h + (gamma * O) U_h + b_h)
    Y  = phi * H + (1 - phi) * X

with the norm before (on X, but for the last line) or after; then a feed-forward block. The SiLU on the average is not
in the paper's equations but in the implementation that its results come from. f is softmax (scale 1/sqrt(d_z)),
squared ReLU or Laplace (scale 1 / number of keys that the query sees). With `chunk` (MEGA-chunk) a query sees only
its own chunk of the sequence, and time is linear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, check_rate, require
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Mixer, MixerOutput
from seqboat.core.nn import NORMS, FeedForward, Norm, NormName, init_linear, make_norm
from seqboat.core.settings import Settings, fill_in
from seqboat.core.state import overwrite
from seqboat.mixers.memory import Cache, append, extend, make_cache, seen_by_step
from seqboat.ops.attention import (
    FUNCTIONS,
    HIDDEN,
    AttentionName,
    RelativeBias,
    attend_groups,
    frequencies,
    widen,
)
from seqboat.ssm.diagonal import EMAConfig, SSMState, TruncatedState

MegaPositions = Literal["relative", "rotary"]
MEGA_POSITIONS = ("relative", "rotary")


@dataclass(frozen=True, kw_only=True)
class MegaConfig(Settings):
    """MEGA: a moving average feeds gated single-head attention over the whole sequence; feed-forward block."""

    ema: EMAConfig = EMAConfig()
    """The moving average."""
    d_z: int = 64
    """Width of queries and keys."""
    d_v: int | None = None
    """Width of values and of the reset gate; twice the model's by default."""
    attention: AttentionName = "softmax"
    """The attention function."""
    chunk: int | None = None
    """Tokens per chunk; None for attention among all tokens."""
    positions: MegaPositions = "relative"
    """The bias per distance: a learned table, or two learned vectors after rotary embedding."""
    max_positions: int = 4096
    """Distances beyond which the relative bias stays the same, without chunks."""
    ffn: bool = True
    """Whether a feed-forward block follows."""
    d_ff: int | None = None
    """Its hidden width; twice the model's by default."""
    causal: bool = False
    """Whether tokens see no later ones, as in language models."""
    norm: NormName = "layer"
    """The norm of both blocks."""
    prenorm: bool = False
    """Whether the norms come before the blocks instead of after them."""
    dropout: float = 0.0
    """Rate of dropout on the averages, the update gates and the feed-forward block's output."""
    attention_dropout: float = 0.0
    """Rate of dropout on attention weights."""

    def __post_init__(self) -> None:
        check_positive("d_z", self.d_z)
        check_positive("max_positions", self.max_positions)
        for name in ("d_v", "chunk", "d_ff"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_choice("attention", self.attention, tuple(FUNCTIONS))
        check_choice("positions", self.positions, MEGA_POSITIONS)
        require(
            self.positions != "rotary" or self.d_z % 2 == 0,
            f"d_z must be even with rotary positions, got {self.d_z}",
        )
        check_choice("norm", self.norm, NORMS)
        check_rate("dropout", self.dropout)
        check_rate("attention_dropout", self.attention_dropout)

    def build(self, d_model: int) -> Mega:
        return Mega(d_model, self)


@dataclass(frozen=True, kw_only=True)
class MegaChunkConfig(MegaConfig):
    """MEGA-chunk: MEGA whose attention is limited to chunks of the sequence, in linear time."""

    chunk: int | None = 128
    """Tokens per chunk; None for attention among all tokens."""


class RotaryBias(nn.Module):
    """A bias per distance from two learned vectors: their product after rotary embedding, as in MEGA.

    With the vectors a, b split into halves (a1, a2) and (b1, b2), and d = key - query,

        bias(d) = sum over frequencies f of (a1 b1 + a2 b2) cos(f d) + (a2 b1 - a1 b2) sin(f d)
    """

    def __init__(self, dim: int, max_distance: int) -> None:
        super().__init__()
        require(dim % 2 == 0, f"dim of a rotary bias must be even, got {dim}")
        check_positive("max_distance", max_distance, least=0)
        self.max_distance = max_distance
        self.vectors = nn.Parameter(torch.empty(2, 2, dim // 2))
        nn.init.normal_(self.vectors, std=0.02)

    @property
    def table(self) -> Tensor:
        """(2 * max_distance + 1,): the bias of each distance."""
        return self._bias(torch.arange(-self.max_distance, self.max_distance + 1, device=self.vectors.device))

    def forward(self, distance: Tensor) -> Tensor:
        """The bias of each distance; larger ones are those of the ends of the table."""
        return self._bias(distance.clamp(-self.max_distance, self.max_distance))

    def _bias(self, distance: Tensor) -> Tensor:
        (a1, a2), (b1, b2) = self.vectors
        dim = 2 * self.vectors.shape[-1]
        angle = torch.remainder(distance[..., None] * frequencies(dim, distance.device), 2 * math.pi)
        angle = angle.to(self.vectors.dtype)
        return angle.cos() @ (a1 * b1 + a2 * b2) + angle.sin() @ (a2 * b1 - a1 * b2)


class MegaState(NamedTuple):
    """The state of a causal layer: of constant size with chunks."""

    ema: SSMState | TruncatedState
    cache: Cache
    """of one head: everything so far, or the current chunk, slot s at place s modulo its size"""


class Mega(Mixer):
    """One MEGA layer on (batch, time, d_model): a moving average and single-head gated attention."""

    def __init__(self, d_model: int, config: MegaConfig | None = None, **options: Any) -> None:
        super().__init__()
        config = fill_in(MegaConfig, config, options, self, d_model)
        check_positive("d_model", d_model)
        self.config, self.d_model, self.causal = config, d_model, config.causal
        self.d_z, self.d_v, self.chunk = config.d_z, config.d_v or 2 * d_model, config.chunk
        self.function = FUNCTIONS[config.attention]
        self.norm: Norm = make_norm(config.norm, d_model)
        self.ema = config.ema.build(d_model, config.causal)
        self.value = nn.Linear(d_model, self.d_v)
        # update gate, queries and keys, reset gate and what the average adds to H, in one product
        self.base = nn.Linear(d_model, d_model + self.d_z + self.d_v + d_model)
        self.attended = nn.Linear(self.d_v, d_model, bias=False)
        self.kappa = nn.Parameter(torch.empty(2, self.d_z))
        self.mu = nn.Parameter(torch.empty(2, self.d_z))
        distance = (config.chunk or config.max_positions) - 1
        self.bias = (
            RelativeBias(distance) if config.positions == "relative" else RotaryBias(self.d_z, distance)
        )
        if config.ffn:
            self.ffn_norm: Norm = make_norm(config.norm, d_model)
            self.ffn = FeedForward(d_model, config.d_ff or 2 * d_model, "silu")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values, truncated at two standard deviations.

        Linear      weights N(0, 0.02), biases 0
        kappa       N(0, 0.02)
        mu          0
        bias        table or vectors N(0, 0.02)
        """
        init_linear(self)
        nn.init.trunc_normal_(self.kappa, std=0.02, a=-0.04, b=0.04)
        nn.init.zeros_(self.mu)

    def closing_norm(self) -> nn.Module | None:
        return make_norm(self.config.norm, self.d_model) if self.config.prenorm else None

    def mix(self, x: Tensor, layout: Layout, state: MegaState | None) -> MixerOutput:
        mask = layout.mask
        branch = self.norm(x, mask) if self.config.prenorm else x
        averaged = self.ema(branch, layout, None if state is None else state.ema)
        update, query, key, reset, direct = self._project(averaged.y)
        value = F.silu(self.value(branch))
        attended, cache = self._attend(query, key, value, mask, None if state is None else state.cache)
        y = self._close(x, update, reset, direct, attended, mask)
        after = None
        if cache is not None:
            # in the type of the inputs, also where autocast made them narrower
            cache = Cache(cache.keys.to(x.dtype), cache.values.to(x.dtype), cache.total)
            after = MegaState(averaged.state, cache)
        return MixerOutput(clear(y, mask), after)

    def _project(self, averaged: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Update gate, query, key, reset gate and direct part of H, from the moving average."""
        base = self.base(self._drop(F.silu(averaged)))
        update, z, reset, direct = base.split([self.d_model, self.d_z, self.d_v, self.d_model], dim=-1)
        z = F.silu(z)
        query, key = (torch.addcmul(self.mu[i], z, self.kappa[i]).to(z.dtype) for i in (0, 1))
        return torch.sigmoid(update), query, key, F.silu(reset), direct

    def _close(
        self, x: Tensor, update: Tensor, reset: Tensor, direct: Tensor, attended: Tensor, mask: Tensor | None
    ) -> Tensor:
        hidden = self._drop(F.silu(direct + self.attended(reset * attended)))
        y = torch.addcmul(x, update.to(x.dtype), hidden.to(x.dtype) - x)
        prenorm = self.config.prenorm
        y = y if prenorm else self.norm(y, mask)
        if not self.config.ffn:
            return y
        added = y + self._drop(self.ffn(self.ffn_norm(y, mask) if prenorm else y))
        return added if prenorm else self.ffn_norm(added, mask)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, state: Cache | None
    ) -> tuple[Tensor, Cache | None]:
        """Attention on (batch, time, d), and what a causal layer remembers of it.

        With a state, the tokens that it holds come before the new ones.
        """
        batch, time = query.shape[:2]
        places = torch.arange(time, device=query.device)
        counts = torch.full((batch,), time, device=query.device) if mask is None else mask.sum(dim=1)
        if state is None:
            attended = self._attend_chunks(query, key, value, counts)
            return attended, self._remember(key, value, counts, counts) if self.causal else None
        held = self._held(state)
        joined = extend(held, key[:, None], value[:, None], counts)
        keys, values = joined.keys[:, 0].to(key.dtype), joined.values[:, 0].to(value.dtype)
        # queries move to the places of their keys, padding to a spare place after them
        slots = keys.shape[1]
        place = torch.where(places < counts[:, None], held.total[:, None] + places, slots)[..., None]
        moved = query.new_zeros(batch, slots + 1, self.d_z)
        moved = moved.scatter(1, place.expand(-1, -1, self.d_z), query)[:, :slots]
        attended = F.pad(self._attend_chunks(moved, keys, values, joined.total), (0, 0, 0, 1))
        attended = attended.gather(1, place.expand(-1, -1, self.d_v))
        return attended, self._remember(keys, values, state.total + counts, joined.total)

    def _held(self, state: Cache) -> Cache:
        """The tokens that a new one can see: all of them, or those of an unfinished chunk."""
        if self.chunk is None:
            return state
        count = state.total % self.chunk
        most = int(count.max()) if count.numel() else 0
        held = (torch.arange(most, device=count.device) < count[:, None])[:, None, :, None]
        keys, values = (torch.where(held, part[:, :, :most], 0) for part in (state.keys, state.values))
        return Cache(keys, values, count)

    def _attend_chunks(self, query: Tensor, key: Tensor, value: Tensor, total: Tensor) -> Tensor:
        """Attention among the first `total` of (batch, slots, d), in chunks or not."""
        batch, slots = key.shape[:2]
        width = max(slots, 1) if self.chunk is None else min(self.chunk, max(slots, 1))
        groups = -(-slots // width)

        def split(x: Tensor) -> Tensor:
            pad = (0, 0, 0, groups * width - slots)
            return F.pad(x, pad).view(batch * groups, width, x.shape[-1])

        slot = torch.arange(groups * width, device=key.device).expand(batch, -1)
        real = (slot < total[:, None]).reshape(-1, width)
        slot = slot.reshape(-1, width)
        keys = slot % width + 1 if self.causal else real.sum(dim=1, keepdim=True).clamp(min=1)
        query = split(query)
        query = query / keys[..., None] if self.function.by_keys else query / math.sqrt(self.d_z)
        attended = attend_groups(
            query,
            split(key),
            split(value),
            real.sum(dim=1),
            (width, 0 if self.causal else width),
            self.config.attention,
            self.bias.table,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )
        return attended.view(batch, groups * width, self.d_v)[:, :slots]

    def _remember(self, key: Tensor, value: Tensor, seen: Tensor, total: Tensor) -> Cache:
        """The cache after the first `total` of (batch, slots, d), with `seen` tokens since the beginning."""
        batch, slots = key.shape[:2]
        size = self.chunk
        if size is None:
            size = int(total.max()) if batch else 0
        # only an unfinished chunk is kept
        begin = torch.zeros_like(total) if self.chunk is None else total // size * size
        source = begin[:, None] + torch.arange(size, device=key.device)
        source = torch.where(source < total[:, None], source, slots)[..., None]  # a spare token of zeros
        keys, values = (
            F.pad(part, (0, 0, 0, 1)).gather(1, source.expand(-1, -1, part.shape[-1]))[:, None]
            for part in (key, value)
        )
        return Cache(keys, values, seen)

    @property
    def grows(self) -> bool:
        return self.causal and self.chunk is None

    def _fresh(self, batch: int, dtype: torch.dtype, device: torch.device) -> MegaState:
        cache = make_cache(batch, 1, self.d_z, self.d_v, dtype, device)
        if self.chunk is not None:
            pad = (0, 0, 0, self.chunk)
            cache = Cache(F.pad(cache.keys, pad), F.pad(cache.values, pad), cache.total)
        return MegaState(self.ema.init_state(batch), cache)

    @torch.no_grad()
    def step(self, x: Tensor, state: MegaState) -> MixerOutput:
        branch = self.norm(x) if self.config.prenorm else x
        averaged = self.ema.step(branch, state.ema)
        update, query, key, reset, direct = self._project(averaged.y)
        value = F.silu(self.value(branch))
        cache = append(state.cache, key[:, None], value[:, None], self.chunk)
        inside = cache.total if self.chunk is None else (cache.total - 1) % self.chunk + 1
        if self.chunk is None:
            keys, values, visible = seen_by_step(cache)
        else:
            keys, values, visible = *cache[:2], torch.arange(self.chunk, device=x.device) < inside[:, None]
        attended = self._attend_step(query, keys[:, 0], values[:, 0], visible, inside)
        y = self._close(x, update, reset, direct, attended, None)
        if self.chunk is not None:  # only an unfinished chunk is kept
            finished = (cache.total % self.chunk == 0)[:, None, None, None]
            for part in cache[:2]:
                part.masked_fill_(finished, 0)
        overwrite(state.cache, cache)
        return MixerOutput(y, state)

    def _attend_step(
        self, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, inside: Tensor
    ) -> Tensor:
        """Attention of (batch, d_z) to (batch, slots, d_z): the newest token is slot `inside` - 1."""
        dtype, query = query.dtype, widen(query)
        query = query / inside[:, None].clamp(min=1) if self.function.by_keys else query / math.sqrt(self.d_z)
        scores = torch.bmm(widen(keys), query[:, :, None])[:, :, 0]
        slot = torch.arange(keys.shape[1], device=keys.device)
        scores = scores + self.bias(slot - (inside[:, None] - 1)).to(scores.dtype)
        weights = self.function.weights(scores.masked_fill(~visible, HIDDEN))
        return torch.bmm(weights[:, None], widen(values))[:, 0].to(dtype)
