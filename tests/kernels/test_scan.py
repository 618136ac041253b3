"""The Triton scan against the loops of the reference in float64: outputs, states and all gradients."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from closeness import difference
from seqboat.ops.kernels.triton_scan import Inputs, forward, scan_backward
from seqboat.reference import Diagonal, run

TOLERANCE = 2e-6


class Case(NamedTuple):
    batch: int
    time: int
    dim: int
    states: int
    directions: int
    complex: bool
    start: bool
    padded: bool


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    directions = rng.choice([1, 2])
    return Case(
        batch=rng.choice([1, 2, 3]),
        time=rng.choice([1, 2, 5, 15, 16, 17, 31, 33, 50, 67]),
        dim=rng.choice([1, 3, 7, 33, 65]),
        states=rng.choice([1, 2, 3, 5, 16]),
        directions=directions,
        complex=rng.random() < 0.4,
        start=directions == 1 and rng.random() < 0.6,
        padded=rng.random() < 0.5,
    )


CASES = [draw(seed) for seed in range(24)] + [
    Case(2, 200, 5, 4, 1, False, True, False),
    Case(1, 70, 3, 33, 2, True, False, True),
    Case(2, 0, 3, 2, 1, False, True, False),
    Case(3, 40, 4, 2, 1, True, True, True),
]


def make(case: Case, seed: int) -> dict[str, Tensor | None]:
    torch.manual_seed(seed)
    shape = (case.directions, case.dim, case.states)
    log_decay = -0.5 * torch.rand(shape) ** 2 - 1e-3
    # outputs of the size of one, as in a model
    size = 0.25 / case.states
    drive, read = torch.randn(shape), size * torch.randn(shape)
    if case.complex:
        log_decay = torch.complex(log_decay, torch.randn(shape))
        drive = torch.complex(drive, torch.randn(shape))
        read = torch.complex(read, size * torch.randn(shape))
    width = case.states * (2 if case.complex else 1)
    lengths = torch.randint(0, case.time + 1, (case.batch,)) if case.padded else None
    if lengths is not None and case.batch > 2:
        lengths[0] = 0
    return {
        "x": torch.randn(case.batch, case.time, case.dim),
        "log_decay": log_decay,
        "drive": drive,
        "read": read,
        "skip": torch.randn(case.dim),
        "start": torch.randn(case.batch, case.dim, width) if case.start else None,
        "lengths": lengths,
    }


def widen(x: Tensor | None) -> Tensor | None:
    if x is None or not (x.is_floating_point() or x.is_complex()):
        return x
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def reference(inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Sequence by sequence, padding left out."""
    x, log_decay = inputs["x"], inputs["log_decay"]
    outputs, finals = [], []
    for row in range(x.shape[0]):
        length = x.shape[1] if inputs["lengths"] is None else int(inputs["lengths"][row])
        layers = [
            Diagonal(torch.exp(log), drive, read)
            for log, drive, read in zip(log_decay, inputs["drive"], inputs["read"], strict=True)
        ]
        start = None if inputs["start"] is None else inputs["start"][row]
        if start is not None and log_decay.is_complex():
            start = torch.view_as_complex(start.unflatten(-1, (-1, 2)))
        y, final = run(x[row, :length], layers, inputs["skip"], None, start)
        outputs.append(torch.cat([y, y.new_zeros(x.shape[1] - length, x.shape[2])]))
        if final is not None:
            finals.append(torch.view_as_real(final).flatten(-2) if final.is_complex() else final)
    return torch.stack(outputs), torch.stack(finals) if finals else None


@pytest.mark.parametrize("seed", range(len(CASES)), ids=lambda seed: str(CASES[seed])[5:-1])
def test_equals_the_reference(seed: int) -> None:
    case = CASES[seed]
    inputs = make(case, seed)
    double = {name: widen(part) for name, part in inputs.items()}
    leaves = {
        name: part.requires_grad_() for name, part in double.items() if part is not None and name != "lengths"
    }
    expected, expected_final = reference(double)
    y, final = forward(Inputs(**inputs))  # type: ignore[arg-type]
    assert difference(y, expected) < TOLERANCE
    assert (final is None) == (expected_final is None)
    grad = torch.randn(y.shape)
    loss = (expected * grad).sum()
    grad_final = None
    if final is not None and expected_final is not None:
        assert difference(final, expected_final) < TOLERANCE
        grad_final = torch.randn(final.shape)
        loss = loss + (expected_final * grad_final).sum()
    wanted_grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    expected_grads = dict(zip(leaves, wanted_grads, strict=True))
    grads = scan_backward(grad, grad_final, Inputs(**inputs))  # type: ignore[arg-type]
    for name, found in zip(("x", "log_decay", "drive", "read", "skip", "start"), grads, strict=True):
        if name in leaves:
            assert found is not None
            wanted = expected_grads[name]
            wanted = torch.zeros_like(leaves[name]) if wanted is None else wanted
            assert difference(found, wanted) < TOLERANCE, name
        else:
            assert found is None


def test_parameter_gradients_are_deterministic() -> None:
    case = Case(2, 50, 5, 3, 2, False, False, True)
    inputs = Inputs(**make(case, 0))  # type: ignore[arg-type]
    grad = torch.randn(2, 50, 5)
    first, second = (scan_backward(grad, None, inputs) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]
