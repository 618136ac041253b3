"""Ordinary modules in a sparse layer: no module may let one sequence of a batch change another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_same_numbers
from seqboat import AsTensor, PaddedUnit, SeqBoat, SparseModularActivation
from seqboat.layers.routers import SigmoidRouter

WIDTH = 8
ENCODER = {"dim_feedforward": 16, "dropout": 0.0}


class OwnAttention(nn.Module):
    """Attention written by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, dim=-1) @ x


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, batch_first=True, **ENCODER),  # type: ignore[arg-type]
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, batch_first=True, **ENCODER),  # type: ignore[arg-type]
        2,
        enable_nested_tensor=False,
    ),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "convolution": (lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1), r"is Conv1d, which mixes tokens"),
    "inside": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Conv2d(1, 1, 3))),
        r"contains Conv2d \(1.0\), which mixes tokens",
    ),
    "attention inside": (
        lambda: nn.Sequential(nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
        r"contains MultiheadAttention \(0\)",
    ),
    "both directions": (lambda: nn.GRU(WIDTH, WIDTH // 2, bidirectional=True), r"is GRU, which mixes tokens"),
    "decoder": (lambda: nn.TransformerDecoderLayer(WIDTH, 2), r"is TransformerDecoderLayer"),
    "pooling": (lambda: nn.AdaptiveAvgPool1d(WIDTH), r"is AdaptiveAvgPool1d"),
    "mixer inside": (lambda: nn.Sequential(AsTensor(SeqBoat(WIDTH))), r"contains SeqBoat \(0.mixer\)"),
    "by name": (OwnAttention, r"is OwnAttention, .* wrap the module in seqboat.PaddedUnit\(module, call\)"),
    "time first": (
        lambda: nn.MultiheadAttention(WIDTH, 2),
        r"must be built with batch_first=True: MultiheadAttention",
    ),
}


def sparse(module: nn.Module) -> SparseModularActivation:
    """A layer whose router picks about half of the tokens, and none of the last sequence."""
    router = SigmoidRouter(WIDTH)
    nn.init.normal_(router.logits.weight)
    return SparseModularActivation({"unit": module}, WIDTH, router).double().eval()


@pytest.mark.parametrize("name", WRAPPED)
def test_sequences_of_a_batch_do_not_change_each_other(name: str) -> None:
    torch.manual_seed(0)
    layer = sparse(WRAPPED[name]())
    x = torch.randn(3, 12, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[2] = False  # a sequence without a token to attend to
    y, _, routing = layer(x, mask)
    assert 0 < routing.active.sum() < mask.sum()
    for row in range(2):
        torch.testing.assert_close(layer(x[row : row + 1]).y[0], y[row], rtol=0, atol=1e-12)
    # the module sees the active tokens side by side
    picked = x[0][routing.active[0, :, 0]]
    unit = layer.units["unit"]
    assert isinstance(unit, PaddedUnit)
    args = (picked[None],) * (3 if name == "attention" else 1)
    alone = unit.module(*args)
    alone = (alone[0] if isinstance(alone, tuple) else alone)[0]
    torch.testing.assert_close(
        y[0][routing.active[0, :, 0]], alone * routing.probs[0][routing.active[0, :, 0]], rtol=0, atol=1e-12
    )
    y.sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in unit.parameters())]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_mix_tokens_are_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        SparseModularActivation({"unit": make()}, WIDTH)


def test_the_way_out_works() -> None:
    torch.manual_seed(0)
    conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
    layer = sparse(PaddedUnit(conv, lambda module, x, real: module(x.mT).mT))
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(x[:1]).y[0], layer(x).y[0], rtol=0, atol=1e-12)


def test_lists_and_module_dicts_are_accepted() -> None:
    modules = [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())]
    x = torch.randn(2, 5, WIDTH)
    for given, names in (
        (modules, ["0", "1"]),
        (tuple(modules), ["0", "1"]),
        (nn.ModuleList(modules), ["0", "1"]),
        (nn.ModuleDict({"a": modules[0], "b": modules[1]}), ["a", "b"]),
        (modules[1], ["module"]),
    ):
        layer = SparseModularActivation(given, WIDTH)
        assert list(layer.units) == names
        assert layer(x).routing.active.shape == (2, 5, len(names))
    with pytest.raises(ValueError, match=r"module '1' must be an nn\.Module, got builtin_function"):
        SparseModularActivation([nn.Identity(), torch.relu], WIDTH)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="modules must hold at least one module, got none"):
        SparseModularActivation([], WIDTH)


def test_a_layer_stands_in_a_sequential() -> None:
    torch.manual_seed(0)
    layer = SparseModularActivation(nn.Linear(WIDTH, WIDTH), WIDTH)
    model = nn.Sequential(nn.Linear(3, WIDTH), AsTensor(layer), nn.Linear(WIDTH, 1))
    x = torch.randn(2, 5, 3)
    assert_same_numbers(model(x), model[2](layer(model[0](x)).y))
    with pytest.raises(ValueError, match="mixer must be a layer of this package, got Linear"):
        AsTensor(nn.Linear(1, 1))  # type: ignore[arg-type]
