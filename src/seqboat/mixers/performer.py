"""Performer (Choromanski et al., 2021): attention through random features, FAVOR+.

    softmax(Q K^T / sqrt(d_head)) V  ~  phi(Q) (phi(K)^T V) / (phi(Q) phi(K)^T 1)
    phi(x) = exp(w_i^T x - |x|^2 / 2) over i,  x scaled by d_head^(-1/4)          "softmax"
    phi(x) = max(w_i^T x, 0) + epsilon                                            "relu"

with w_i ~ N(0, I), orthogonal in groups of d_head. The error falls with the square root of the number of features.
Time and memory are linear in the sequence. In training new features are drawn every `redraw` steps, from the layer's
seed and the step alone.

The features of long keys are too small for float32. So sums are divided by exp(peak_i), where peak_i is the largest
logarithm of feature i among the keys, and queries multiply it back: phi_i(q) exp(peak_i), divided by the largest of
these. Both factors cancel, and no sum of weights is below one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Direction, MixerOutput, check_direction
from seqboat.core.nn import init_linear
from seqboat.core.settings import fill_in
from seqboat.mixers.block import BlockConfig, MultiHead, join_heads
from seqboat.ops.attention import widen

FeatureKernel = Literal["softmax", "relu"]
FEATURE_KERNELS = ("softmax", "relu")
RELU_EPSILON = 1e-3
"""Added to ReLU features, so that every token has some weight."""
LEAST = -1e30
"""Logarithm of the features of padding: zero, and finite where there is nothing else."""


@dataclass(frozen=True, kw_only=True)
class PerformerConfig(BlockConfig):
    """Performer: attention approximated by random features of queries and keys, in linear time."""

    directions: ClassVar[tuple[Direction, ...]] = ("bidirectional",)

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
        check_direction(self, self.causal, "its sums hold all tokens")
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


class Performer(MultiHead):
    """One Performer layer on (batch, time, d_model): linear attention with random features."""

    wants_positions = True

    def __init__(self, d_model: int, config: PerformerConfig | None = None, **options: Any) -> None:
        config = fill_in(PerformerConfig, config, options, self, d_model)
        super().__init__(d_model, config)
        self.config = config
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.features = RandomFeatures(config.features, self.d_head, config.kernel, config.redraw)
        init_linear(self)

    def mix(self, x: Tensor, layout: Layout, state: None) -> MixerOutput:
        mask = layout.mask
        branch = self.block.open(x, mask)
        query, key, value = self.split(self.qkv(branch))
        query, key = self.features(query, query=True), self.features(key, query=False)
        if mask is not None:
            key = torch.where(mask[:, None, :, None], key, LEAST)
        with torch.autocast(x.device.type, enabled=False):
            # the peaks cancel, so no gradient has to pass through them
            peaks = key.detach().amax(dim=-2, keepdim=True) if x.shape[1] else key
            # with a last column of ones the sums hold the sums of the weights as well
            sums = (key - peaks).exp().transpose(-1, -2) @ F.pad(widen(value), (0, 1), value=1.0)
            query = query + peaks
            both = (query - query.detach().amax(dim=-1, keepdim=True)).exp() @ sums
            attended = both[..., :-1] / both[..., -1:].clamp(min=torch.finfo(both.dtype).tiny)
        y = self.block.close(x, join_heads(attended.to(x.dtype)), mask)
        return MixerOutput(clear(y, mask))
