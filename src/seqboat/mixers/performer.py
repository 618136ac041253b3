"""Performer (Choromanski et al., 2021): attention through random features, FAVOR+.

    softmax(Q K^T / sqrt(d_head)) V  ~  phi(Q) (phi(K)^T V) / (phi(Q) phi(K)^T 1)
    phi(x) = exp(w_i^T x - |x|^2 / 2) over i,  x scaled by d_head^(-1/4)          "softmax"
    phi(x) = max(w_i^T x, 0) + epsilon                                            "relu"

with w_i ~ N(0, I), orthogonal in groups of d_head. The error falls as one over the root of the number of features.
Time and memory are linear in the sequence; causal layers carry the sums of phi(k) v^T and of phi(k), a state of
constant size. In training the features are drawn anew every `redraw` steps, from the layer's seed and the step alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.checks import check_choice, check_positive
from seqboat.mixers.base import MixerOutput, RecurrentMixer, keep_rows
from seqboat.mixers.block import Block, BlockConfig, head_width, join_heads, split_heads, widen
from seqboat.mixers.linear import causal_product
from seqboat.nn import init_linear
from seqboat.padding import zero_padding

FeatureKernel = Literal["softmax", "relu"]
FEATURE_KERNELS = ("softmax", "relu")
RELU_EPSILON = 1e-3
"""What is added to ReLU features, so that no token is without any weight."""


@dataclass(frozen=True, kw_only=True)
class PerformerConfig(BlockConfig):
    """A layer of Performer."""

    kernel: FeatureKernel = "softmax"
    """What the features stand for: softmax attention, or ReLU of random projections."""
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
    """(count, dim): rows N(0, I), orthogonal in groups of `dim`; the same for the same seed and number of draw."""
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
        # drawn on the CPU: the same on every device, and known where parameters are only announced (meta)
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
        """(..., count) of (..., dim), in float32 at least.

        Args:
            x: queries or keys.
            query: whether a factor of each token's own may be left out; it cancels for queries only.
        """
        with torch.autocast(x.device.type, enabled=False):
            x = widen(x) * self.dim**-0.25
            projected = x @ self.features.to(x.dtype).T
            if self.kernel == "relu":
                return F.relu(projected) + RELU_EPSILON
            if query:
                return (projected - projected.detach().amax(dim=-1, keepdim=True)).exp()
            # at most exp(|w|^2 / 2), which float32 holds for heads far wider than 100
            return (projected - 0.5 * x.square().sum(dim=-1, keepdim=True)).exp()


class PerformerState(NamedTuple):
    """The state of a causal layer, of constant size."""

    sums: Tensor
    """(batch, heads, features, d_head + 1): of phi(k) v^T, and in the last column of phi(k)"""


class Performer(RecurrentMixer):
    """One Performer layer on (batch, time, d_model)."""

    wants_positions = True

    def __init__(self, d_model: int, config: PerformerConfig | None = None) -> None:
        super().__init__()
        config = config or PerformerConfig()
        self.config, self.d_model, self.causal = config, d_model, config.causal
        self.heads, self.d_head = config.heads, head_width(d_model, config.heads)
        self.block = Block(d_model, config)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.features = RandomFeatures(config.features, self.d_head, config.kernel, config.redraw)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights N(0, 0.02), truncated at two deviations, biases 0."""
        init_linear(self)

    def closing_norm(self) -> nn.Module | None:
        return self.block.closing_norm()

    def mix(self, x: Tensor, mask: Tensor | None, state: PerformerState | None) -> MixerOutput:
        query, key, value = self._project(self.block.open(x, mask), mask)
        after = None
        with torch.autocast(x.device.type, enabled=False):
            if self.causal:
                before = self.make_state(x.shape[0], value.dtype, x.device) if state is None else state
                both, sums = causal_product(query, key, value, before.sums)
                after = PerformerState(sums)
            else:
                both = query @ (key.transpose(-1, -2) @ value)
        y = self.block.close(x, join_heads(_divide(both).to(x.dtype)), mask)
        return MixerOutput(zero_padding(y, mask), after)

    def _project(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Features of queries and keys (batch, heads, time, features); values with a column of ones behind them."""
        query, key, value = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        keys = self.features(key, query=False)
        if mask is not None:
            keys = torch.where(mask[:, None, :, None], keys, 0)
        return self.features(query, query=True), keys, F.pad(widen(value), (0, 1), value=1.0)

    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> PerformerState:
        shape = batch, self.heads, self.config.features, self.d_head + 1
        # sums of many terms are kept in float32 at least
        return PerformerState(
            torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
        )

    def advance(
        self, x: Tensor, state: PerformerState, mask: Tensor | None = None, inplace: bool = False
    ) -> MixerOutput:
        real = None if mask is None else mask[:, None]
        query, key, value = self._project(self.block.open(x, mask)[:, None], real)
        with torch.autocast(x.device.type, enabled=False):
            fresh = key.transpose(-1, -2) @ value
            sums = state.sums.add_(fresh) if inplace else state.sums + fresh
            both = query @ sums
        y = self.block.close(x, join_heads(_divide(both).to(x.dtype))[:, 0], mask)
        return MixerOutput(keep_rows(mask, y), PerformerState(sums))


def _divide(both: Tensor) -> Tensor:
    """Weighted sums over the sums of the weights, which are in the last column."""
    return both[..., :-1] / both[..., -1:].clamp(min=torch.finfo(both.dtype).tiny)
