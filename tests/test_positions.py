"""Rotary embedding, sinusoids and relative bias by their formulas; position schemes through one interface."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from seqboat import GAU, GAUConfig
from seqboat.layers.packing import pack
from seqboat.mixers.transformer import TRANSFORMER_POSITIONS, TransformerPositions
from seqboat.ops.positions import POSITIONS, Positions, PositionsName, RelativeBias, rotate, sinusoids


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_rotation_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0, 0.0, 2.0]], dtype=torch.float64)
    one, hundredth = 3.0, 0.03
    expected = [[math.cos(one), math.sin(one), -2 * math.sin(hundredth), 2 * math.cos(hundredth)]]
    torch.testing.assert_close(
        rotate(x, torch.tensor([3])), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_rotated_products_depend_on_the_distance_alone() -> None:
    q, k = values(1, 8), values(2, 8)[1:]
    for distance in (0, 1, 17, 400):
        products = torch.stack(
            [
                (rotate(q, torch.tensor([p])) * rotate(k, torch.tensor([p + distance]))).sum()
                for p in (0, 5, 1234, 1_000_000)
            ]
        )
        # angles in float64 at position 1e6 have an error of about 1e-10
        torch.testing.assert_close(products, products[:1].expand(4), rtol=0, atol=1e-8)
    norms = rotate(k, torch.tensor([999])).norm(dim=-1)
    torch.testing.assert_close(norms, k.norm(dim=-1))


def test_rotation_is_accurate_at_position_one_million() -> None:
    x = values(1, 8)
    position = torch.tensor([1_000_000])
    exact = rotate(x, position)
    torch.testing.assert_close(rotate(x.float(), position).double(), exact, rtol=0, atol=1e-6)
    for i in range(4):
        angle = math.fmod(1_000_000 * 10000.0 ** (-2 * i / 8), 2 * math.pi)
        turned = x[0, 2 * i] * math.cos(angle) - x[0, 2 * i + 1] * math.sin(angle)
        assert float(exact[0, 2 * i]) == pytest.approx(float(turned), abs=1e-8)


def test_rotation_has_gradients() -> None:
    position = torch.tensor([0, 3, 70])
    assert torch.autograd.gradcheck(lambda x: rotate(x, position), values(3, 4).requires_grad_())


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


def test_relative_bias_is_clamped_at_its_ends() -> None:
    bias = RelativeBias(2)
    assert bias.table.shape == (5,)
    with torch.no_grad():
        bias.table.copy_(torch.arange(5.0))
    distance = torch.tensor([[-100, -3, -2, -1], [0, 1, 2, 100]])
    assert bias(distance).tolist() == [[0.0, 0.0, 0.0, 1.0], [2.0, 3.0, 4.0, 4.0]]
    bias(distance).sum().backward()
    assert bias.table.grad is not None and bias.table.grad.tolist() == [3.0, 1.0, 1.0, 1.0, 2.0]
    assert RelativeBias(0)(distance).unique().numel() == 1
    with pytest.raises(ValueError, match="max_distance must be an integer >= 0, got -1"):
        RelativeBias(-1)


def test_names_are_those_of_the_registries() -> None:
    assert tuple(POSITIONS) == get_args(PositionsName)
    assert tuple(TRANSFORMER_POSITIONS) == get_args(TransformerPositions)


@pytest.mark.parametrize("name", POSITIONS)
def test_a_scheme_rotates_or_leaves_alone(name: str) -> None:
    scheme, q, k = POSITIONS[name], values(3, 4), values(2, 3, 4)[1]
    position = torch.tensor([0, 5, 9])
    turned = scheme.rotate(q, k, position)
    if scheme.rotates:
        torch.testing.assert_close(turned, (rotate(q, position), rotate(k, position)))
    else:
        assert turned[0] is q and turned[1] is k


def test_size_of_the_bias_table() -> None:
    """By positions, or by what the span can reach where that is bounded."""
    sizes = {name: [s.max_distance(100, reach) for reach in (8, None)] for name, s in POSITIONS.items()}
    assert sizes == {
        "original": [99, 99],
        "compressed": [8, 99],
        "rotary": [None, None],
        "rotary-original": [99, 99],
        "none": [None, None],
    }


class Halved(Positions):
    """A bias per two slots, as somebody might add it."""

    def max_distance(self, max_positions: int, reach: int | None) -> int:
        assert reach is not None
        return reach // 2

    def coordinate(self, position: Tensor, slot: Tensor | None) -> Tensor:
        return position // 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("span", ["memory", "chunk"])
def test_a_new_scheme_needs_one_class_and_one_line(
    span: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every path of the unit, and its decoding, follow a scheme that none of them knows."""
    monkeypatch.setitem(POSITIONS, "halved", Halved())
    torch.manual_seed(0)
    config = GAUConfig(d_z=4, d_v=6, window=6, positions="halved", span=span)  # type: ignore[arg-type]
    unit = GAU(5, config, causal=causal).double()
    assert unit.bias is not None
    assert unit.bias.max_distance == {"memory": 3 if causal else 1, "chunk": 2}[span]
    for parameter in unit.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    packed = pack(torch.rand(2, 30) < 0.6)
    tokens = values(len(packed.flat), 5)
    whole, state = unit(tokens, packed)
    query, key, value, gate = unit.project(tokens, packed.position)
    for sequence in (0, 1):
        mine = packed.row == sequence
        seen = unit.weigh(query[mine], key[mine], packed.position[mine])
        for i, (first, end) in enumerate(zip(seen.first.tolist(), seen.end.tolist(), strict=True)):
            attended = seen.weights[i, : end - first] @ value[mine][first:end]
            expected = unit.out(gate[mine][i] * attended)
            torch.testing.assert_close(whole[mine][i], expected)
    if not causal:
        return
    after = unit.make_state(2, torch.float64, torch.device("cpu"))
    for sequence in (0, 1):
        for i in (packed.row == sequence).nonzero().squeeze(1).tolist():
            one = torch.tensor([sequence])
            y, after = unit.advance(tokens[i : i + 1], one, packed.position[i : i + 1], after)
            torch.testing.assert_close(y[0], whole[i])
    torch.testing.assert_close(after, state)
