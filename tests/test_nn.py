"""Norms and convolution, each against torch's own or a direct formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from seqboat.core.nn import (
    NORMS,
    BatchNorm,
    LayerNorm,
    Norm,
    RMSNorm,
    ScaleNorm,
    fft_convolve,
    init_linear,
    make_norm,
    masked_mean,
    sinusoids,
)


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def randomize(norm: Norm) -> Norm:
    norm.double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize(
    ("ours", "other"), [(LayerNorm(6), nn.LayerNorm(6)), (RMSNorm(6), nn.RMSNorm(6, eps=1e-5))]
)
def test_layer_and_rms_norm_are_torchs(ours: Norm, other: nn.Module) -> None:
    randomize(ours)
    other.double().load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(values(2, 5, 6)), other(values(2, 5, 6)))


def test_scale_norm_by_formula() -> None:
    norm = ScaleNorm(6).double()
    nn.init.constant_(norm.weight, 3.0)
    x = values(2, 5, 6)
    root_mean_square = (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x), 3.0 * x / root_mean_square)


@pytest.mark.parametrize("steps", [1, 3])
def test_batch_norm_is_torchs(steps: int) -> None:
    """Without a mask: outputs, gradients and running averages, in training and in eval."""
    ours, other = BatchNorm(6).double(), nn.BatchNorm1d(6).double()
    nn.init.normal_(ours.weight)
    nn.init.normal_(ours.bias)
    other.load_state_dict(ours.state_dict(), strict=False)
    for step in range(steps):
        x = (values(4, 5, 6) * (step + 2) + step).requires_grad_()
        z = x.detach().clone().requires_grad_()
        y, expected = ours(x), other(z.transpose(1, 2)).transpose(1, 2)
        torch.testing.assert_close(y, expected)
        weight = values(4, 5, 6).flip(0)
        (y * weight).sum().backward()
        (expected * weight).sum().backward()
        torch.testing.assert_close(x.grad, z.grad)
        torch.testing.assert_close(ours.running_mean, other.running_mean)
        torch.testing.assert_close(ours.running_var, other.running_var)
    torch.testing.assert_close(ours.weight.grad, other.weight.grad)
    torch.testing.assert_close(ours.bias.grad, other.bias.grad)
    ours.eval(), other.eval()
    x = values(2, 3, 6)
    torch.testing.assert_close(ours(x), other(x.transpose(1, 2)).transpose(1, 2))
    torch.testing.assert_close(ours(x[:, 0]), other(x[:, 0]))


@pytest.mark.parametrize("filling", [100.0, math.nan])
def test_masked_batch_norm_sees_real_tokens_only(filling: float) -> None:
    ours, other = BatchNorm(6).double(), BatchNorm(6).double()
    mask = torch.rand(4, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    x = torch.where(mask[..., None], values(4, 9, 6), filling).requires_grad_()
    real = x.detach()[mask].requires_grad_()
    y, expected = ours(x, mask), other(real)
    torch.testing.assert_close(y[mask], expected)
    torch.testing.assert_close(ours.running_mean, other.running_mean)
    torch.testing.assert_close(ours.running_var, other.running_var)
    weight = values(*expected.shape)
    (y[mask] * weight).sum().backward()
    (expected * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[mask], real.grad)
    assert not x.grad[~mask].any()


@pytest.mark.parametrize("own", [0, 1, 5, 9], ids=["none", "one", "some", "all"])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_batch_norm_over_processes(own: int, offset: float) -> None:
    """Of nine real tokens some are here and the others elsewhere, together with padding."""
    x = (values(9, 6) + offset).float()

    def share(tokens: Tensor) -> tuple[Tensor, Tensor]:
        padded = torch.cat([tokens, torch.full((2, 6), math.nan)])
        return padded[None], (torch.arange(len(padded)) < len(tokens))[None]

    elsewhere: list[Tensor] = []
    other, whole, norm = BatchNorm(6), BatchNorm(6), BatchNorm(6)
    other.total = lambda sums: elsewhere.append(sums) or sums  # type: ignore[func-returns-value]
    other(*share(x[own:]))
    norm.total = lambda sums: sums + elsewhere[0]
    y, expected = norm(*share(x[:own])), whole(x)
    if not offset:  # float32 keeps too few digits of the tokens themselves
        torch.testing.assert_close(y[0, :own], expected[:own])
    torch.testing.assert_close(norm.running_mean, whole.running_mean)
    torch.testing.assert_close(norm.running_var, whole.running_var)


def test_batch_norm_of_nothing_moves_no_average() -> None:
    norm = BatchNorm(3)
    for x, mask in (
        (torch.zeros(0, 4, 3), None),
        (torch.zeros(2, 0, 3), None),
        (torch.full((2, 4, 3), 5.0), torch.zeros(2, 4, dtype=torch.bool)),
    ):
        y = norm(x, mask)
        assert y.shape == x.shape and y.isfinite().all()
        assert not norm.running_mean.any() and (norm.running_var == 1).all()
    one = norm(torch.full((1, 1, 3), 2.0))
    assert one.isfinite().all() and norm.running_var.isfinite().all()


@pytest.mark.parametrize("name", NORMS)
def test_norms_keep_type_and_layout(name: str) -> None:
    norm = make_norm(name, 6)  # type: ignore[arg-type]
    x = values(2, 5, 6)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert norm.to(dtype)(x.to(dtype)).dtype == dtype
    norm = randomize(norm)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(norm(turned), norm(x))
    norm.eval()
    torch.testing.assert_close(norm(x[:, 2]), norm(x)[:, 2])


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_norm_without_affine_parameters(name: str, training: bool) -> None:
    """The same numbers as with a scale of 1 and a shift of 0, and nothing to learn."""
    norm, plain = (make_norm(name, 6).double().train(training) for _ in range(2))  # type: ignore[arg-type]
    plain.drop_affine()
    assert not list(plain.parameters()) and not {"weight", "bias"} & plain.state_dict().keys()
    x = values(2, 5, 6)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    for masked in (None, mask):
        torch.testing.assert_close(plain(x, masked), norm(x, masked))
    y = x.clone().requires_grad_()
    (plain(y) * x).sum().backward()
    z = x.clone().requires_grad_()
    (norm(z) * x).sum().backward()
    torch.testing.assert_close(y.grad, z.grad)


@pytest.mark.parametrize(("time", "taps"), [(1, 1), (7, 3), (3, 7), (16, 16), (31, 5)])
def test_fft_convolution_is_the_direct_one(time: int, taps: int) -> None:
    x, kernel = values(2, time, 3), values(3, taps)
    expected = torch.zeros_like(x)
    for t in range(time):
        for lag in range(min(taps, t + 1)):
            expected[:, t] += kernel[:, lag] * x[:, t - lag]
    torch.testing.assert_close(fft_convolve(x, kernel), expected, rtol=0, atol=1e-12)


def test_fft_convolution_of_nothing_has_gradients() -> None:
    kernel = values(3, 4).requires_grad_()
    for shape in ((2, 0, 3), (0, 5, 3)):
        y = fft_convolve(torch.zeros(shape, dtype=torch.float64), kernel)
        assert y.shape == shape
        y.sum().backward()
        assert kernel.grad is not None and not kernel.grad.any()
    torch.autograd.gradcheck(fft_convolve, (values(2, 5, 3).requires_grad_(), kernel))


def test_masked_mean() -> None:
    x = values(3, 5, 2)
    torch.testing.assert_close(masked_mean(x, None), x.mean(dim=1))
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
    x = torch.where(mask[..., None], x, math.nan)
    mean = masked_mean(x, mask)
    torch.testing.assert_close(mean[0], x[0].mean(dim=0))
    torch.testing.assert_close(mean[1], (x[1, 1] + x[1, 3]) / 2)
    assert not mean[2].any()
    assert masked_mean(torch.zeros(2, 0, 3), None).tolist() == [[0.0] * 3] * 2


@torch.no_grad()
def test_initial_values_of_linear_layers() -> None:
    torch.manual_seed(0)
    stack = nn.Sequential(nn.Linear(200, 300), nn.GELU(), nn.Linear(300, 100, bias=False))
    init_linear(stack)
    for layer in (stack[0], stack[2]):
        assert isinstance(layer, nn.Linear)
        assert float(layer.weight.abs().max()) <= 0.04
        # a normal cut at two standard deviations has 0.88 of its std
        assert float(layer.weight.std()) == pytest.approx(0.02 * 0.8796, rel=0.02)
    assert isinstance(stack[0], nn.Linear) and not stack[0].bias.any()


@pytest.mark.parametrize("d_model", [1, 2, 6, 7])
def test_sinusoids_by_formula(d_model: int) -> None:
    position = torch.tensor([[0, 1], [5, 1_000_000]])
    table = sinusoids(position, d_model)
    assert table.shape == (2, 2, d_model)
    half = (d_model + 1) // 2
    for (row, column), p in zip(((0, 0), (0, 1), (1, 0), (1, 1)), (0, 1, 5, 1_000_000), strict=True):
        for i in range(d_model):
            angle = p * 10000.0 ** (-2 * (i % half) / d_model)
            expected = math.sin(angle) if i < half else math.cos(angle)
            assert float(table[row, column, i]) == pytest.approx(expected, abs=1e-9)
