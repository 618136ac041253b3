"""How close two results must be: the same bits, or the same numbers up to a few units in the last place."""

from __future__ import annotations

import torch
from torch import Tensor

# Observed: up to 2.4 through one or two layers. A wrong weight or a wrong token is off by 1e6 and more.
ULPS = 16


def assert_same_numbers(got: Tensor, expected: Tensor, ulps: float = ULPS, name: str = "values") -> None:
    """The same numbers, up to `ulps` units in the last place of the largest expected value.

    Bits are promised where data are copied: weights, checkpoints, and a run that is resumed on the same
    machine. So these tests keep `torch.equal`, as do integers, decisions, and one program that runs twice on
    the same memory. Numbers that are computed twice on different memory agree to a few units only: where a
    tensor begins (a weights file that is mapped into memory keeps its offsets), the number of threads, and
    the instruction set of the processor change the order in which a matrix product adds its terms, and thereby
    its last bits. The unit is that of the largest value, because a small sum of large terms has their error.
    """
    assert got.shape == expected.shape, f"{name}: {tuple(got.shape)} instead of {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{name}: {got.dtype} instead of {expected.dtype}"
    if not got.is_floating_point():
        assert torch.equal(got, expected), f"{name}: differ"
        return
    finite = expected.isfinite()
    assert got[~finite].equal(expected[~finite]), f"{name}: infinite in other places, or not a number"
    if not finite.any():
        return
    unit = torch.finfo(expected.dtype).eps * float(expected[finite].detach().abs().max())
    off = float((got[finite].detach() - expected[finite].detach()).abs().max())
    # a not-a-number in `got` compares as False
    assert off <= ulps * unit, (
        f"{name}: off by {off:.2e}, {off / unit if unit else torch.inf:.1f} ulp of the largest"
    )


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected number or to one; infinite for other shapes."""
    if found.shape != expected.shape:
        return torch.inf
    if not expected.numel():
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.detach().to(wide), expected.detach().to(wide)
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
