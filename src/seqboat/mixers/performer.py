"""Performer (Choromanski et al., 2021): attention through random features, FAVOR+.

    softmax(Q K^T / sqrt(d_head)) V  ~  phi(Q) (phi(K)^T V) / (phi(Q) phi(K)^T 1)
    phi(x) = exp(w_i^T x - |x|^2 / 2) over i,  x scaled by d_head^(-1/4)          "softmax"
    phi(x) = max(w_i^T x, 0) + epsilon                                            "relu"

with w_i ~ N(0, I), orthogonal in groups of d_head. The error falls with the square root of the number of features.
Time and memory are linear in the sequence; causal layers carry the sums of phi(k) v^T and of phi(k), a state of
constant size. In training new features are drawn every `redraw` steps, from the layer's seed and the step alone.

The features of long keys are too small for float32. So sums are divided by exp(peak_i), where peak_i is the largest
logarithm of feature i among their keys, and queries multiply it back: phi_i(q) exp(peak_i), divided by the largest of
these. Both factors cancel, and no sum of weights is below one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive
from seqboat.core.mixer import MixerOutput, RecurrentMixer, keep_rows
from seqboat.core.nn import init_linear
from seqboat.core.padding import zero_padding
from seqboat.core.settings import fill_in
from seqboat.mixers.block import Block, BlockConfig, head_width, join_heads, split_heads
from seqboat.mixers.linear import BLOCK
from seqboat.ops.functions import HIDDEN
from seqboat.ops.precision import widen

FeatureKernel = Literal["softmax", "relu"]
FEATURE_KERNELS = ("softmax", "relu")
RELU_EPSILON = 1e-3
"""Added to ReLU features, so that every token has some weight."""


@dataclass(frozen=True, kw_only=True)
class PerformerConfig(BlockConfig):
    """Performer: attention approximated by random features of queries and keys, in linear time.

    >>> from seqboat.mixers import PerformerConfig
    >>> layer = PerformerConfig(causal=True).build(64)
    >>> layer.name, layer.causal
    ('Performer', True)
    """

    kernel: FeatureKernel = "softmax"
    """What the features approximate: softmax attention, or a kernel of ReLU features."""
    features: int = 256
    """Random features per head."""
    redraw: int | None = 1000
    """Training steps between draws of new features; None keeps the first ones."""
    activation: Literal["relu", "gelu", "silu"] = "gelu"
    """The function inside the feed-forward block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kernel", self.kernel, FEATURE_KERNELS)
        check_positive("features", self.features)
        if self.redraw is not None:
            check_positive("redraw", self.redraw)

    def build(self, d_model: int) -> Performer:
        return Performer(d_model, self)


def draw_features(count: int, dim: int, seed: int, draw: int = 0) -> Tensor:
    """(count, dim): rows N(0, I), orthogonal in groups of `dim`; the same for the same seed and draw."""
    generator = torch.Generator("cpu").manual_seed((seed * 1_000_003 + draw) % (1 << 62))
    groups = -(-count // dim)
    exact: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    square = torch.randn(groups, dim, dim, **exact)
    q, r = torch.linalg.qr(square)
    # with the signs of the diagonal every direction is equally likely; without, the estimate would be biased
    q = q * r.diagonal(dim1=1, dim2=2).sign()[:, None]
    directions = q.transpose(1, 2).reshape(groups * dim, dim)[:count]
    lengths = torch.randn(count, dim, **exact).norm(dim=1, keepdim=True)
    return (directions * lengths).to(torch.get_default_dtype())


class RandomFeatures(nn.Module):
    """Positive features whose products are an estimate of a kernel."""

    features: Tensor
    seed: Tensor

    def __init__(self, count: int, dim: int, kernel: FeatureKernel, redraw: int | None) -> None:
        super().__init__()
        self.count, self.dim, self.kernel, self.redraw = count, dim, kernel, redraw
        self._draw = 0
        # drawn on the CPU: the same on every device, and known even if parameters are on the meta device
        seed = torch.randint(0, 1 << 31, (), device="cpu")
        self.register_buffer("seed", seed)
        self.register_buffer("features", draw_features(count, dim, int(seed)))

    def notice_training_step(self, step: int) -> None:
        """Draw new features if it is time."""
        draw = 0 if self.redraw is None else step // self.redraw
        if draw != self._draw:
            self._draw = draw
            self.features.copy_(draw_features(self.count, self.dim, int(self.seed), draw))

    def forward(self, x: Tensor, query: bool) -> Tensor:
        """Logarithms (..., count) of the features of (..., dim), in at least float32.

        Args:
            x: queries or keys.
            query: whether a factor per token may be left out; it cancels for queries only.
        """
        with torch.autocast(x.device.type, enabled=False):
            x = widen(x) * self.dim**-0.25
            projected = x @ self.features.to(x.dtype).T
            if self.kernel == "relu":
                return (F.relu(projected) + RELU_EPSILON).log()
            return projected if query else projected - 0.5 * x.square().sum(dim=-1, keepdim=True)


class PerformerState(NamedTuple):
    """The state of a causal layer, of constant size."""

    sums: Tensor
    """(batch, heads, features, d_head + 1): of phi(k) v^T, and in the last column of phi(k); over exp(peaks)"""
    peaks: Tensor
    """(batch, heads, features): the largest log phi(k) so far"""


class Performer(RecurrentMixer):
    """One Performer layer on (batch, time, d_model): linear attention with random features.

    Args:
        d_model: width of the tokens.
        config: settings; the defaults if not given.
        options: individual settings as keywords, fields of `PerformerConfig`.

    Calling it with x of shape (batch, time, d_model) returns a `MixerOutput` whose y has the same shape.

    >>> import torch
    >>> from seqboat.mixers import Performer
    >>> Performer(16, heads=2, features=16)(torch.randn(2, 100, 16)).y.shape
    torch.Size([2, 100, 16])
    """

    wants_positions = True

    def __init__(self, d_model: int, config: PerformerConfig | None = None, **options: Any) -> None:
        super().__init__()
        config = fill_in(PerformerConfig, config, options, self, d_model)
        self.config, self.d_model, self.causal = config, d_model, config.causal
        self.heads, self.d_head = config.heads, head_width(d_model, config.heads)
        self.block = Block(d_model, config)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.features = RandomFeatures(config.features, self.d_head, config.kernel, config.redraw)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights N(0, 0.02), truncated at two standard deviations, biases 0."""
        init_linear(self)

    def closing_norm(self) -> nn.Module | None:
        return self.block.closing_norm()

    def mix(self, x: Tensor, mask: Tensor | None, state: PerformerState | None) -> MixerOutput:
        query, key, value = self._project(self.block.open(x, mask), mask)
        after = None
        with torch.autocast(x.device.type, enabled=False):
            before = self.make_state(x.shape[0], value.dtype, x.device) if state is None else state
            if self.causal:
                both, after = _look_back(query, key, value, before)
            elif x.shape[1]:
                both, _ = _look_at(query, *_remember(key, value, before))
            else:
                both = value
        y = self.block.close(x, join_heads(_divide(both).to(x.dtype)), mask)
        return MixerOutput(zero_padding(y, mask), after)

    def _project(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Log features of queries and keys (batch, heads, time, features); values with a last column of ones."""
        query, key, value = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        keys = self.features(key, query=False)
        if mask is not None:
            keys = torch.where(mask[:, None, :, None], keys, -torch.inf)
        return self.features(query, query=True), keys, F.pad(widen(value), (0, 1), value=1.0)

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> PerformerState:
        shape = batch, self.heads, self.config.features, self.d_head + 1
        # sums of many terms are kept in at least float32
        sums = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
        return PerformerState(sums, torch.full_like(sums[..., 0], HIDDEN))

    def advance(
        self, x: Tensor, state: PerformerState, mask: Tensor | None = None, inplace: bool = False
    ) -> MixerOutput:
        real = None if mask is None else mask[:, None]
        query, key, value = self._project(self.block.open(x, mask)[:, None], real)
        with torch.autocast(x.device.type, enabled=False):
            after = _remember(key, value, state, inplace)
            both, _ = _look_at(query, *after)
        y = self.block.close(x, join_heads(_divide(both).to(x.dtype))[:, 0], mask)
        return MixerOutput(keep_rows(mask, y), after)


def _remember(key: Tensor, value: Tensor, state: PerformerState, inplace: bool = False) -> PerformerState:
    """The state after keys (..., time, features), in logarithms, and their values; time is at least one."""
    # the peaks cancel, so no gradient has to pass through them
    peaks = torch.maximum(state.peaks, key.detach().amax(dim=-2))
    fresh = (key - peaks.unsqueeze(-2)).exp().transpose(-1, -2) @ value
    kept = (state.peaks - peaks).exp().unsqueeze(-1)
    sums = state.sums.mul_(kept).add_(fresh) if inplace else state.sums * kept + fresh
    return PerformerState(sums, peaks)


def _look_at(query: Tensor, sums: Tensor, peaks: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sums for queries (..., time, features), in logarithms; and the logarithm of the factor they lack."""
    query = query + peaks.unsqueeze(-2)
    scale = query.detach().amax(dim=-1, keepdim=True)
    return (query - scale).exp() @ sums, scale


def _look_back(
    query: Tensor, key: Tensor, value: Tensor, state: PerformerState
) -> tuple[Tensor, PerformerState]:
    """Weighted sums for queries that see the state and the keys up to their own, and the state after the last one.

    In blocks: everything before a block is a state; inside a block, pairs of queries and keys have weights, relative
    to the largest features of both. A weight that is too small for its type counts as `least`, which matters only to
    queries whose other weights are all as small.
    """
    time = query.shape[-2]
    size = min(BLOCK, max(time, 1))
    blocks = max(-(-time // size), 1)
    pad = (0, 0, 0, blocks * size - time)
    query, value = (F.pad(part, pad).unflatten(-2, (blocks, size)) for part in (query, value))
    key = F.pad(key, pad, value=-torch.inf).unflatten(-2, (blocks, size))
    states = [state]
    for k, v in zip(key.unbind(-3), value.unbind(-3), strict=True):
        states.append(_remember(k, v, states[-1]))
    sums, peaks = (torch.stack(part, dim=2) for part in zip(*states[:-1], strict=True))
    old, old_scale = _look_at(query, sums, peaks)
    largest, own = (part.detach().amax(dim=-1, keepdim=True) for part in (query, key))
    own = own.clamp(min=HIDDEN)
    pairs = (query - largest).exp() @ (key - own).exp().transpose(-1, -2)
    # far enough from the smallest number that the gradient of the logarithm stays finite
    least = 1e8 * torch.finfo(pairs.dtype).tiny
    weights = largest + own.transpose(-1, -2) + pairs.clamp(min=least).log()
    future = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    weights = weights.masked_fill(future, -torch.inf)
    scale = torch.maximum(old_scale, weights.detach().amax(dim=-1, keepdim=True))
    both = (weights - scale).exp() @ value + (old_scale - scale).exp() * old
    return both.flatten(-3, -2)[..., :time, :], states[-1]


def _divide(both: Tensor) -> Tensor:
    """Weighted sums over the sums of the weights, which are in the last column."""
    return both[..., :-1] / both[..., -1:].clamp(min=torch.finfo(both.dtype).tiny)
