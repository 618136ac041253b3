"""How close two results must be: the same bits, or the same numbers as far as their computation decides them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def assert_same_numbers(
    got: Tensor, expected: Tensor, name: str = "values", scale: float | None = None
) -> None:
    """The same numbers to half of the digits of their format, relative to `scale`: the largest expected value.

    Bits are promised where data are copied: weights, checkpoints, and a run that is resumed on the same
    machine. So these tests keep `torch.equal`, as do integers, decisions, and one program that runs twice on
    the same memory. Numbers that are computed twice on different memory add their terms in another order:
    where a tensor begins (a weights file that is mapped into memory keeps its offsets), the number of threads
    and the instruction set of the processor change it.

    How far that moves a result follows from the computation. A sum of n terms errs by at most n * eps times
    the sum of their magnitudes, in any order. Relative to the result this is n * c * eps, where c is its
    condition: the sum of the magnitudes over the magnitude of the sum. Along a model n adds up over the
    layers, and c is the sum of all |weight * slope| over the result. It is large where terms cancel: 900 for
    the logits of a model that has hardly been trained. So no count of units in the last place holds for every
    result. A fault is of another order: a wrong weight or token moves the result by about its own size, and
    a step in the next narrower format by about the eps of that format. sqrt(eps) lies between the two,
    1.5e-8 in float64 and 3.5e-4 in float32: above the error as long as n * c < 1 / sqrt(eps), 7e7 and 3000,
    and below the faults. What float32 is too narrow for is compared in float64.

    Where all terms of a result may cancel, as in the gradient of a bias that changes nothing, its own size
    says nothing about them: `scale` then is that of the terms, such as the largest of all gradients.
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
    bound = torch.finfo(expected.dtype).eps ** 0.5 * (largest([expected]) if scale is None else scale)
    off = float((got[finite].detach() - expected[finite].detach()).abs().max())
    # a not-a-number in `got` compares as False
    assert off <= bound, f"{name}: off by {off:.2e}, more than {bound:.2e}"


def largest(values: Iterable[Tensor]) -> float:
    """The largest finite magnitude."""
    return max(
        (float(v.detach()[v.isfinite()].abs().max()) for v in values if v.isfinite().any()), default=0.0
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
