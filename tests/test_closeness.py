"""The helpers that compare numbers, and the fixture that moves weights in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from closeness import ULPS, assert_same_numbers
from odd_offsets import is_odd, odd_offsets

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_few_units_of_the_largest_value(dtype: torch.dtype) -> None:
    expected = torch.tensor([4.0, -1.0, 0.0], dtype=dtype)
    unit = 4 * torch.finfo(dtype).eps
    got = expected.clone()
    got[2] = ULPS * unit
    assert_same_numbers(got, expected)
    got[2] = 2 * ULPS * unit
    with pytest.raises(AssertionError, match=r"weights: off by .*, 32\.0 ulp of the largest"):
        assert_same_numbers(got, expected, name="weights")
    with pytest.raises(AssertionError, match="ulp"):
        assert_same_numbers(expected + unit, expected, ulps=0)


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
