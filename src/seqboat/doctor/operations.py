"""Cases of every heavy operation, in odd sizes, each with a slow and obvious form to compare with.

A case makes its inputs in float64. They are rounded to the type under test, the operation runs on the device in that
type, and the obvious form runs on the CPU in float64 on the same rounded numbers. Outputs and the gradients of all
inputs are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.core.padding import Aligned
from seqboat.ops.attention import Neighbors, banded
from seqboat.ops.functions import ATTENTIONS
from seqboat.ssm.diagonal import DiagonalSSM
from seqboat.ssm.ema import EMA, EMAConfig
from seqboat.ssm.s4d import S4D, S4DConfig

BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest relative RMS error by type."""

Call = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One call of an operation."""

    operation: str
    name: str
    inputs: dict[str, Tensor]
    """in float64 on the CPU, and integers"""
    run: Call
    """the operation of the library; takes the inputs by name"""
    obvious: Call
    """the same, written for reading"""
    wide: tuple[str, ...] = ()
    """inputs that stay in at least float32"""


class Errors(NamedTuple):
    """Relative RMS errors of a call."""

    outputs: float
    gradients: float


def measure(case: Case, device: torch.device, dtype: torch.dtype) -> Errors:
    """How far an operation is from its obvious form."""
    rounded, placed = {}, {}
    for name, value in case.inputs.items():
        if not value.is_floating_point():
            rounded[name], placed[name] = value, value.to(device)
            continue
        kept = dtype if name not in case.wide or dtype == torch.float64 else torch.float32
        narrow = value.to(kept)
        rounded[name] = narrow.double().requires_grad_()
        placed[name] = narrow.to(device).requires_grad_()
    found, expected = _differentiate(case.run, placed), _differentiate(case.obvious, rounded)
    return Errors(*(_error(got, wanted) for got, wanted in zip(found, expected, strict=True)))


def _differentiate(call: Call, inputs: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the inputs for a fixed gradient of the outputs."""
    outputs = call(**inputs)
    generator = torch.Generator().manual_seed(7)
    # exact in every type
    weights = [torch.randn(out.shape, generator=generator).bfloat16() for out in outputs]
    products = [(out * w.to(out.device, out.dtype)).sum() for out, w in zip(outputs, weights, strict=True)]
    total = torch.stack([part.double() for part in products]).sum()
    if not total.requires_grad:
        return list(outputs), []
    leaves = [value for value in inputs.values() if value.requires_grad]
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return [out.detach() for out in outputs], filled


def _error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative RMS error of any tensor; one that is not finite counts as infinite.

    Small ones are measured against a thousandth of the largest: they are sums of larger numbers of both signs.
    """
    norms = [float(wanted.norm()) for wanted in expected]
    most = max([*norms, 0.0])
    worst = 0.0
    for got, wanted, norm in zip(found, expected, norms, strict=True):
        error = float((got.double().cpu() - wanted).norm())
        if not math.isfinite(error):
            return math.inf
        worst = max(worst, error / (norm + 1e-3 * most) if error else 0.0)
    return worst


def cases() -> Iterator[Case]:
    """All cases of all operations."""
    yield from _scans()
    yield from _attentions()


class _Random:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)


# the scan

SCANS: tuple[tuple[str, int, int, bool, bool], ...] = (
    ("ema", 67, 4, True, True),
    ("ema", 67, 4, False, False),
    ("ema", 1, 1, True, False),
    ("ema", 0, 3, False, False),
    ("ema", 130, 16, True, False),
    ("s4d", 67, 4, True, True),
    ("s4d", 33, 2, False, False),
)
"""Kernel, tokens, states, whether causal, and whether there is padding."""


def _scans() -> Iterator[Case]:
    for number, (kind, time, states, causal, padded) in enumerate(SCANS):
        draw = _Random(number)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            made: DiagonalSSM = (
                EMA(5, EMAConfig(d_state=states), causal=causal)
                if kind == "ema"
                else S4D(5, S4DConfig(d_state=states), causal=causal)
            )
        inputs = {"x": draw(3, time, 5)}
        inputs |= {name: p.detach().double() for name, p in made.named_parameters()}
        if padded:
            inputs["mask"] = torch.arange(time) < torch.tensor([[time], [0], [time // 2]])
        direction = "causal" if causal else "bidirectional"
        name = f"{kind}, {time} tokens, {states} states, {direction}{', padded' if padded else ''}"
        weights = tuple(name for name, _ in made.named_parameters())
        yield Case("scan", name, inputs, _scan(made), _obvious_scan(made), weights)


def _scan(made: DiagonalSSM) -> Call:
    def run(x: Tensor, mask: Tensor | None = None, **weights: Tensor) -> tuple[Tensor, ...]:
        padding = None if mask is None else Aligned(mask)
        out = torch.func.functional_call(made, weights, (x, padding), strict=True)
        return (out.y,) if out.state is None else (out.y, out.state.states)

    return run


def _obvious_scan(made: DiagonalSSM) -> Call:
    """s_t = q * s_{t-1} + drive * x_t, y_t = Re(read . s_t) + skip * x_t, token by token."""

    def run(x: Tensor, mask: Tensor | None = None, **weights: Tensor) -> tuple[Tensor, ...]:
        log_decay, drive, read = _coefficients(made, weights)
        real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        outputs = weights["skip"] * x
        final = None
        for direction in range(len(log_decay)):
            order = range(x.shape[1]) if direction == 0 else range(x.shape[1] - 1, -1, -1)
            state = torch.zeros(x.shape[0], *log_decay.shape[1:], dtype=drive.dtype)
            columns: dict[int, Tensor] = {}
            for t in order:
                now = torch.exp(log_decay[direction]) * state + drive[direction] * x[:, t, :, None]
                state = torch.where(real[:, t, None, None], now, state)
                y = (read[direction] * state).sum(dim=-1)
                columns[t] = y.real if y.is_complex() else y
            if columns:
                outputs = outputs + torch.stack([columns[t] for t in sorted(columns)], dim=1)
            final = state
        y = torch.where(real[..., None], outputs, 0.0)
        if not made.causal:
            return (y,)
        assert final is not None
        return y, torch.view_as_real(final).flatten(-2) if final.is_complex() else final

    return run


def _coefficients(made: DiagonalSSM, weights: dict[str, Tensor]) -> Any:
    class Coefficients(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = made

        def forward(self) -> Any:
            return self.made.coefficients()

    return torch.func.functional_call(Coefficients(), {f"made.{k}": v for k, v in weights.items()}, ())


# attention

ATTENTION_CASES: tuple[tuple[tuple[int, ...], int, int, str, str, int, int], ...] = (
    ((1, 7, 33, 20), 5, 0, "softmax", "position", 6, 10),
    ((40, 3, 24), 4, 4, "softmax", "slot", 16, 33),
    ((40, 1, 24), 1, 1, "relu2", "position", 6, 5),
    ((67,), 90, 0, "laplace", "none", 8, 16),
    ((5,), 3, 3, "softmax", "none", 16, 16),
    ((), 4, 4, "softmax", "position", 6, 10),
)
"""Tokens of each sequence, keys before and behind, function, bias, d_z and d_v."""


def _attentions() -> Iterator[Case]:
    for number, (lengths, left, right, attention, bias, d_z, d_v) in enumerate(ATTENTION_CASES):
        draw, tokens = _Random(100 + number), sum(lengths)
        group = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
        fixed = left, right, attention, float(ATTENTIONS[attention].scale(d_z, left + right + 1))
        inputs = {"q": draw(tokens, d_z), "k": draw(tokens, d_z), "v": draw(tokens, d_v), "group": group}
        if bias != "none":
            inputs["table"] = draw(2 * 12 + 1)
        if bias == "position":
            inputs["position"] = torch.cumsum(torch.arange(tokens) % 3 + 1, 0)
        sizes = f"{len(lengths)} sequences, {tokens} tokens, -{left}..+{right}, d_z {d_z}, d_v {d_v}"
        name = f"{attention}, {sizes}, bias {bias}"
        yield Case("attention", name, inputs, _banded(fixed), _obvious_attention(fixed), ("table",))


Fixed = tuple[int, int, str, float]


def _banded(fixed: Fixed) -> Call:
    left, right, attention, scale = fixed

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: Tensor,
        table: Tensor | None = None,
        position: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        near = Neighbors(group, position, table, left, right, len(q), attention)
        return (banded(q * scale, k, v, *near, 0.0, 0),)

    return run


def _obvious_attention(fixed: Fixed) -> Call:
    """All scores of all tokens, with those that a query does not see left out."""
    left, right, attention, scale = fixed

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: Tensor,
        table: Tensor | None = None,
        position: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        place = torch.arange(len(q))
        step = place - place[:, None]
        seen = (step >= -left) & (step <= right) & (group == group[:, None])
        scores = q @ k.T * scale
        if table is not None:
            where = place if position is None else position
            furthest = len(table) // 2
            scores = scores + table[(where - where[:, None] + furthest).clamp(0, 2 * furthest)]
        if attention == "softmax":
            weights = torch.softmax(torch.where(seen, scores, -torch.inf), dim=1)
        elif attention == "relu2":
            weights = torch.where(seen, torch.relu(scores) ** 2, 0.0)
        else:
            mu, sigma = math.sqrt(0.5), math.sqrt(0.25 / math.pi)
            weights = torch.where(seen, (1 + torch.erf((scores - mu) / (sigma * math.sqrt(2)))) / 2, 0.0)
        return (weights @ v,)

    return run
