"""Convolutions before the first layer: what neighbors say together, before a linear memory reads it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.layout import clear
from seqboat.core.nn import make_norm


class Stem(nn.Module):
    """Two residual convolutions over time, x + GELU(conv(norm(x))); padding counts as zeros.

    Args:
        d_model: channels.
        width: of the kernels, odd.
    """

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(make_norm("layer", d_model) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv1d(d_model, d_model, width, padding=width // 2) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The same shape as x (batch, time, d_model)."""
        for norm, conv in zip(self.norms, self.convs, strict=True):
            inner = clear(norm(x, mask), mask)
            x = x + F.gelu(conv(inner.transpose(1, 2))).transpose(1, 2)
        return clear(x, mask)
