"""The block scan against a token-by-token recurrence, and its derivatives against finite differences."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from closeness import assert_same_numbers
from mixer_cases import turned
from seqboat.core.nn import fft_convolve
from seqboat.ops.scan import block_tables, final_state, scan, toeplitz
from seqboat.ssm.diagonal import log_decay

real_or_complex = pytest.mark.parametrize("complex_states", [False, True], ids=["real", "complex"])
directions = pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "bidirectional"])


class Layer(NamedTuple):
    """A diagonal layer as real leaves; the last axis holds (real, imaginary) if the states are complex."""

    log_decay: Tensor
    drive: Tensor
    read: Tensor
    skip: Tensor


def make(complex_states: bool, bidirectional: bool, dim: int = 2, states: int = 2, seed: int = 0) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    shape = (2 if bidirectional else 1, dim, states) + ((2,) if complex_states else ())

    def leaf() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    decay = leaf()
    if complex_states:
        decay = torch.stack([-torch.rand(shape[:-1], generator=generator).double() - 0.05, decay[..., 1]], -1)
    else:
        decay = -decay.abs() - 0.05
    skip = torch.randn(dim, generator=generator, dtype=torch.float64)
    return Layer(*(part.requires_grad_() for part in (decay, leaf(), leaf(), skip)))


def coefficients(layer: Layer, complex_states: bool) -> tuple[Tensor, Tensor, Tensor]:
    decay, drive, read, _ = layer
    if complex_states:
        return torch.view_as_complex(decay), torch.view_as_complex(drive), torch.view_as_complex(read)
    return decay, drive, read


def sequence(batch: int, time: int, dim: int = 2, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, time, dim, generator=generator, dtype=torch.float64)


def run(
    x: Tensor,
    layer: Layer,
    *,
    complex_states: bool,
    bidirectional: bool,
    block: int,
    start: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The scan; with one direction also the state after the last token."""
    decay, drive, read = coefficients(layer, complex_states)
    tables = block_tables(decay, drive, read, layer.skip, block)
    y, states = scan(x, tables, bidirectional, start)
    if bidirectional:
        return (y,)
    return y, final_state(x, states, tables, decay[0], start, lengths)


def naive(
    x: Tensor, layer: Layer, *, complex_states: bool, bidirectional: bool, start: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The same, one token after the other."""
    decay, drive, read = coefficients(layer, complex_states)
    total, last = layer.skip * x, None
    for direction in range(len(decay)):
        state = torch.zeros(x.shape[0], *decay.shape[1:], dtype=decay.dtype)
        if start is not None and direction == 0:
            state = torch.view_as_complex(start.unflatten(-1, (-1, 2))) if complex_states else start
        tokens = x.flip(1) if direction else x
        outputs = []
        for t in range(x.shape[1]):
            state = torch.exp(decay[direction]) * state + drive[direction] * tokens[:, t, :, None]
            outputs.append((read[direction] * state).sum(dim=-1).real)
        y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x)
        total = total + (y.flip(1) if direction else y)
        if direction == 0:
            last = torch.view_as_real(state).flatten(-2) if complex_states else state
    return (total,) if bidirectional or last is None else (total, last)


def random_start(batch: int, complex_states: bool, dim: int = 2, states: int = 2) -> Tensor:
    width = 2 * states if complex_states else states
    generator = torch.Generator().manual_seed(7)
    return torch.randn(batch, dim, width, generator=generator, dtype=torch.float64)


# around one and several blocks, and (150 tokens in blocks of 2) enough blocks for the two-level carry
@pytest.mark.parametrize(
    ("time", "block"),
    [(0, 4), (1, 4), (3, 4), (4, 4), (5, 4), (8, 4), (13, 5), (7, 1), (6, 64), (150, 2), (129, 1), (67, 1)],
)
@real_or_complex
@directions
def test_values_and_gradients(bidirectional: bool, complex_states: bool, time: int, block: int) -> None:
    layer = make(complex_states, bidirectional)
    x = sequence(3, time).requires_grad_()
    start = None if bidirectional else random_start(3, complex_states).requires_grad_()
    kind = {"complex_states": complex_states, "bidirectional": bidirectional}
    got = run(x, layer, **kind, block=block, start=start)  # type: ignore[arg-type]
    want = naive(x, layer, **kind, start=start)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    inputs = [x, *layer] + ([] if start is None else [start])
    weights = [torch.linspace(-1, 1, part.numel()).double().cos().view(part.shape) for part in want]
    totals = [sum((w * p).sum() for w, p in zip(weights, parts, strict=True)) for parts in (got, want)]
    grads = [
        torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
        for total in totals
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("bidirectional", "started"),
    [(False, False), (False, True), (True, False)],
    ids=["causal", "started", "bidirectional"],
)
@real_or_complex
def test_gradcheck(complex_states: bool, bidirectional: bool, started: bool) -> None:
    """Through the output and, with one direction, the final state of rows of different lengths."""
    layer = make(complex_states, bidirectional)
    lengths = torch.tensor([7, 3])
    real = (torch.arange(7) < lengths[:, None])[..., None]
    x = sequence(2, 7).requires_grad_()
    start = random_start(2, complex_states).requires_grad_() if started else None

    def function(x: Tensor, start: Tensor | None, *parts: Tensor) -> tuple[Tensor, ...]:
        return run(
            torch.where(real, x, 0.0),
            Layer(*parts),
            complex_states=complex_states,
            bidirectional=bidirectional,
            block=3,
            start=start,
            lengths=None if bidirectional else lengths,
        )

    assert torch.autograd.gradcheck(function, (x, start, *layer))  # type: ignore[arg-type]


@real_or_complex
def test_final_state_of_every_length(complex_states: bool) -> None:
    """Rows of 0 to 9 real tokens end in the state after their own last token."""
    layer = make(complex_states, bidirectional=False)
    lengths = torch.arange(10)
    x = sequence(10, 9) * (torch.arange(9) < lengths[:, None])[..., None]
    start = random_start(10, complex_states)
    _, final = run(
        x, layer, complex_states=complex_states, bidirectional=False, block=4, start=start, lengths=lengths
    )
    for row, length in enumerate(lengths.tolist()):
        _, want = naive(
            x[row : row + 1, :length],
            layer,
            complex_states=complex_states,
            bidirectional=False,
            start=start[row : row + 1],
        )
        torch.testing.assert_close(final[row], want[0])


@real_or_complex
@directions
def test_layout_of_the_input_does_not_matter(bidirectional: bool, complex_states: bool) -> None:
    layer = make(complex_states, bidirectional)
    kind = {"complex_states": complex_states, "bidirectional": bidirectional, "block": 4}
    x = sequence(3, 10)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    strided = torch.stack([x, -x], dim=-1)[..., 0]
    expanded = x[:1].expand(3, -1, -1)
    assert not any(part.is_contiguous() for part in (turned, strided, expanded))
    torch.testing.assert_close(run(turned, layer, **kind), run(x, layer, **kind))  # type: ignore[arg-type]
    torch.testing.assert_close(run(strided, layer, **kind), run(x, layer, **kind))  # type: ignore[arg-type]
    torch.testing.assert_close(
        run(expanded, layer, **kind),  # type: ignore[arg-type]
        run(expanded.contiguous(), layer, **kind),  # type: ignore[arg-type]
    )


@real_or_complex
@directions
def test_gradient_of_any_layout(bidirectional: bool, complex_states: bool) -> None:
    """The gradient may arrive expanded or transposed."""
    layer = make(complex_states, bidirectional)
    kind = {"complex_states": complex_states, "bidirectional": bidirectional, "block": 4}
    x = sequence(2, 6).requires_grad_()
    y = run(x, layer, **kind)[0]  # type: ignore[arg-type]
    ones = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0], ones)
    weight = sequence(6, 2, seed=3).transpose(0, 1)
    got = torch.autograd.grad(y, x, weight, retain_graph=True)[0]
    torch.testing.assert_close(got, torch.autograd.grad(y, x, weight.contiguous())[0])


def test_an_empty_batch() -> None:
    layer = make(complex_states=False, bidirectional=False)
    y, final = run(sequence(0, 5), layer, complex_states=False, bidirectional=False, block=4)
    assert y.shape == (0, 5, 2)
    assert final.shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("complex_states", "bidirectional", "started"), [(False, False, True), (True, True, False)]
)
def test_operator_registration(complex_states: bool, bidirectional: bool, started: bool) -> None:
    """Schema, shapes under tracing and autograd registration, as torch checks them."""
    layer = make(complex_states, bidirectional)
    tables = block_tables(*coefficients(layer, complex_states), skip=layer.skip, block=3)
    tables = type(tables)(*(part.detach().clone().requires_grad_() for part in tables))
    x = sequence(2, 7).requires_grad_()
    start = random_start(2, complex_states).transpose(0, 1).contiguous() if started else None
    torch.library.opcheck(torch.ops.seqboat.block_scan.default, (x, *tables, start, bidirectional))


def test_toeplitz_gradient() -> None:
    kernel = sequence(1, 2, 5)[0].requires_grad_()
    assert torch.autograd.gradcheck(toeplitz, kernel)


@pytest.mark.parametrize("taps", [1, 3, 6])
def test_fft_convolution(taps: int) -> None:
    x, kernel = sequence(2, 6).requires_grad_(), sequence(1, 2, taps)[0].requires_grad_()
    got = fft_convolve(x, kernel)
    for t in range(6):
        want = sum(kernel[:, lag] * x[:, t - lag] for lag in range(min(taps, t + 1)))
        torch.testing.assert_close(got[:, t], want)
    assert torch.autograd.gradcheck(fft_convolve, (x, kernel))


def test_log_decay() -> None:
    """Accurate where 1 - p a rounds to one or to zero, and differentiable everywhere."""
    delta = torch.tensor([-40.0, -3.0, 0.0, 2.0, 40.0], dtype=torch.float64)
    alpha = delta[:, None]
    got = log_decay(delta, alpha)
    assert torch.isfinite(got).all()
    assert (got < 0).all()
    # p a is far below the resolution of 1 - p a: its logarithm is -p a
    assert got[0, 0].item() == pytest.approx(-(torch.tensor(-40.0).double().sigmoid().item() ** 2), rel=1e-12)
    # 1 - p a = (e^-d + e^-a + e^-(d+a)) p a is about 2 e^-40
    assert got[-1, -1].item() == pytest.approx(-40 + torch.tensor(2.0).double().log().item(), rel=1e-12)
    middle = (-3.0, 0.0, 2.0)
    for d in middle:
        for a in middle:
            x, y = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (d, a))
            want = torch.log(1 - torch.sigmoid(x) * torch.sigmoid(y))
            torch.testing.assert_close(log_decay(x, y), want)
            assert torch.autograd.gradcheck(log_decay, (x, y))


def test_rotation() -> None:
    """Gradients, lengths kept, products that depend on the distance alone."""
    x = sequence(1, 5, 4)[0].requires_grad_()
    position = torch.tensor([0, 1, 5, 1000, 123456])
    assert torch.autograd.gradcheck(lambda part: turned(part, position), x)
    torch.testing.assert_close(turned(x, position).norm(dim=-1), x.norm(dim=-1))
    q, k = x[:1], x[1:2]
    products = [
        (turned(q, torch.tensor([shift + 3])) * turned(k, torch.tensor([shift]))).sum()
        for shift in (0, 17, 900_000)
    ]
    torch.testing.assert_close(products[1], products[0])
    torch.testing.assert_close(products[2], products[0], rtol=1e-9, atol=1e-9)


@real_or_complex
@directions
def test_autocast_changes_nothing(complex_states: bool, bidirectional: bool) -> None:
    """The scan and its tables keep the precision of what they are given."""
    layer = Layer(*(part.detach().float().requires_grad_() for part in make(complex_states, bidirectional)))
    x = sequence(2, 11).float()

    def gradients(enabled: bool) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y, *_ = run(x, layer, complex_states=complex_states, bidirectional=bidirectional, block=4)
        return y, *torch.autograd.grad(y.square().sum(), layer)

    plain, inside = gradients(False), gradients(True)
    for one, other in zip(plain, inside, strict=True):
        assert_same_numbers(one, other)
