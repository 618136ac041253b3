"""The gated attention unit in one piece against the same unit in its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from seqboat.layers.gau import GAU, GAUConfig
from seqboat.layers.packing import Packed, pack
from seqboat.ops import band
from seqboat.ops.band import Neighbors
from seqboat.ops.gated import _gated, gated_attention
from seqboat.ops.positions import POSITIONS, rotations


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few scores at a time, so that even short sequences take several parts."""
    monkeypatch.setitem(band.SCORES_AT_ONCE, "cpu", 3000)


def make_unit(**changes: Any) -> GAU:
    torch.manual_seed(0)
    config = GAUConfig(**{"d_z": 4, "d_v": 6, "window": 10, "max_positions": 30, **changes})
    unit = GAU(5, config, causal=False).double()
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return unit


def run(unit: GAU, tokens: Tensor, packed: Packed) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and all gradients."""
    x = tokens.clone().requires_grad_()
    unit.zero_grad()
    y, state = unit(x, packed)
    assert state is None
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    grads = {name: p.grad.clone() for name, p in unit.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return y.detach(), {**grads, "x": x.grad}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kind", ["softmax", "relu2", "laplace"])
@pytest.mark.parametrize("window", [1, 2, 7, 40, 300])
@pytest.mark.parametrize("rate", [0.0, 0.02, 0.5, 1.0])
def test_one_piece_equals_the_parts(positions: Any, kind: Any, window: int, rate: float) -> None:
    unit = make_unit(positions=positions, attention=kind, window=window)
    packed = pack(torch.rand(3, 47) < rate)
    tokens = torch.randn(packed.flat.shape[0], 5, dtype=torch.float64)
    assert unit.fuses(tokens)
    whole = run(unit, tokens, packed)
    hook = unit.base.register_forward_hook(lambda *_: None)
    assert not unit.fuses(tokens), "a hooked projection must be called"
    parts = run(unit, tokens, packed)
    hook.remove()
    assert whole[1].keys() == parts[1].keys() == {name for name, _ in unit.named_parameters()} | {"x"}
    torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize("rotated", [False, True])
def test_gradcheck_and_registration(rotated: bool) -> None:
    unit = make_unit(window=4)
    packed = pack(torch.rand(2, 4) < 0.8)
    tokens = torch.randn(packed.flat.shape[0], 5, dtype=torch.float64, requires_grad=True)
    assert unit.bias is not None
    turn = rotations(packed.position, 4, tokens) if rotated else None
    weights = (unit.base.weight, unit.base.bias, unit.gamma, unit.beta, unit.out.weight, unit.out.bias)

    def function(*tensors: Any) -> Tensor:
        *rest, table = tensors
        near = Neighbors(packed.row, packed.position, table, 2, 2, "softmax", 0.5)
        arguments: list[Any] = [*rest, near, turn]
        return gated_attention(*arguments)

    assert torch.autograd.gradcheck(function, (tokens, *weights, unit.bias.table))
    assert torch.autograd.gradgradcheck(function, (tokens, *weights, unit.bias.table))
    if rotated:  # the same schema with and without, and seconds each
        given = (turn, packed.row, packed.position, unit.bias.table, 2, 2, "softmax", 0.5)
        torch.library.opcheck(_gated, (tokens, *weights, *given))


def test_what_it_does_not_serve_takes_the_parts() -> None:
    """Causal units remember keys and values; dropout and autocast need them too."""
    tokens = torch.randn(3, 5)
    plain = make_unit().float()
    assert plain.fuses(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not plain.fuses(tokens)
    assert not plain.fuses(tokens.bfloat16())
    assert not GAU(5, GAUConfig(d_z=4), causal=True).fuses(tokens)
    for changes in (
        {"span": "full"},
        {"attention_dropout": 0.5},
        {"kernel": "flex"},
    ):
        assert not make_unit(**changes).float().fuses(tokens), changes
    assert make_unit(attention_dropout=0.5).float().eval().fuses(tokens)


@pytest.mark.parametrize("whole", [True, False], ids=["one piece", "parts"])
def test_gradients_that_are_not_finite_stay_in_their_sequence(whole: bool) -> None:
    """Blocks hold tokens of several sequences: only the poisoned one may hear of a NaN."""
    unit = make_unit()
    packed = pack(torch.ones(3, 7, dtype=torch.bool))
    x = torch.randn(21, 5, dtype=torch.float64, requires_grad=True)
    if not whole:
        unit.base.register_forward_hook(lambda *_: None)
    assert unit.fuses(x) == whole
    weight = torch.linspace(-1, 1, 105, dtype=torch.float64).view(21, 5)
    (clean,) = torch.autograd.grad((unit(x, packed)[0] * weight).sum(), x)
    weight[10, 2] = torch.nan
    grads = torch.autograd.grad((unit(x, packed)[0] * weight).sum(), [x, *unit.parameters()])
    assert grads[0].isfinite().all(dim=1).tolist() == [True] * 7 + [False] * 7 + [True] * 7
    torch.testing.assert_close(grads[0][:7], clean[:7])
    torch.testing.assert_close(grads[0][14:], clean[14:])
    # but nothing hides it from the optimizer
    assert not any(grad.isfinite().all() for grad in grads[1:])
