"""The helpers that compare numbers, and the fixture that moves weights in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from closeness import assert_same_numbers, largest
from odd_offsets import is_odd, odd_offsets

DTYPES = [torch.float64, torch.float32]
NARROWER = {torch.float64: torch.float32, torch.float32: torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_of_the_digits_of_the_largest_value(dtype: torch.dtype) -> None:
    expected = torch.tensor([4.0, -1.0, 0.0], dtype=dtype)
    bound = 4 * torch.finfo(dtype).eps ** 0.5
    got = expected.clone()
    got[2] = 0.9 * bound
    assert_same_numbers(got, expected)
    got[2] = 1.1 * bound
    with pytest.raises(AssertionError, match=r"weights: off by .*, more than "):
        assert_same_numbers(got, expected, "weights")
    assert_same_numbers(got, expected, scale=8.0)
    assert largest([expected, torch.tensor([torch.inf, -5.0]), torch.zeros(0)]) == 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_order_is_the_same_and_a_fault_is_not(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(20, 40, dtype=torch.float64, generator=generator) + 1).to(dtype)
    x = torch.rand(40, dtype=torch.float64, generator=generator).to(dtype)
    exact = weight.double() @ x.double()
    expected, eps = exact.to(dtype), torch.finfo(dtype).eps
    # what a sum of 40 terms may be off by in any order
    reach = 40 * eps * (weight.double().abs() @ x.double().abs())
    assert reach.max() < eps**0.5 * exact.abs().max()
    for _ in range(5):
        found = (weight * x)[:, torch.randperm(40, generator=generator)].cumsum(dim=1)[:, -1]
        assert bool(((found - exact).abs() <= reach).all())
        assert_same_numbers(found, expected)
    narrow = (weight.to(NARROWER[dtype]) @ x.to(NARROWER[dtype])).to(dtype)
    for fault in (narrow, weight @ x.roll(1), weight[:, 1:] @ x[1:]):
        with pytest.raises(AssertionError, match="off by"):
            assert_same_numbers(fault, expected)


def test_what_is_not_a_number_or_not_a_float() -> None:
    x = torch.tensor([1.0, -torch.inf])
    assert_same_numbers(x, x.clone())
    assert_same_numbers(torch.zeros(0), torch.zeros(0))
    assert_same_numbers(torch.tensor([1, 2]), torch.tensor([1, 2]))
    for other in (torch.tensor([1.0, torch.inf]), torch.tensor([torch.nan, -torch.inf]), x[:1], x.double()):
        with pytest.raises(AssertionError):
            assert_same_numbers(other, x)
    with pytest.raises(AssertionError):
        assert_same_numbers(x, torch.tensor([1.0, 1.0]))
    with pytest.raises(AssertionError):
        assert_same_numbers(torch.tensor([1, 3]), torch.tensor([1, 2]))


def test_weights_at_odd_offsets() -> None:
    before = nn.Module._apply
    with odd_offsets():
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(3, 5), nn.LayerNorm(5))
        model[1].weight = model[0].weight
        assert all(is_odd(parameter) for parameter in model.parameters())
        assert model[1].weight is model[0].weight
        values = copy.deepcopy(model.state_dict())
        model = model.double()
        assert all(is_odd(parameter) for parameter in model.parameters())
        assert {p.data_ptr() % 16 for p in model.parameters()} == {8}
        for name, value in model.state_dict().items():
            assert torch.equal(value.float(), values[name]), name
    assert nn.Module._apply is before
