"""Scores and sums that stay in float32 or float64 under autocast."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_type(x: Tensor) -> torch.dtype:
    """The dtype of scores and sums: float64 for float64, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """Cast a tensor to the dtype of scores and sums."""
    return x if x.dtype == torch.float64 else x.float()
