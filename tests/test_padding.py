"""Moving real tokens to the front of their rows and back."""

from __future__ import annotations

import pytest
import torch

from mixer_cases import MASKS, mask_rows
from seqboat.core.padding import Aligned, align, zero_padding


def test_plan_by_hand() -> None:
    mask = torch.tensor([[False, True, True], [True, False, True], [False, False, False]])
    x = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    plan = align(mask)
    assert plan.mask.tolist() == [[True, True, False], [True, True, False], [False, False, False]]
    pulled = plan.pull(x)
    assert pulled.tolist() == [[2, 3, 0], [4, 6, 0], [0, 0, 0]]
    assert plan.push(pulled).tolist() == [[0, 2, 3], [4, 0, 6], [0, 0, 0]]


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)], ids=str)
def test_push_undoes_pull(trailing: tuple[int, ...]) -> None:
    mask = mask_rows()
    x = torch.randn(*mask.shape, *trailing)
    plan = align(mask)
    assert plan.push(plan.pull(x)).equal(zero_padding(x, mask))
    # order is kept, and real tokens come first
    for row, real in enumerate(mask):
        count = int(real.sum())
        assert plan.pull(x)[row, :count].equal(x[row, real])
        assert not plan.pull(x)[row, count:].any()


def test_bool_and_empty() -> None:
    mask = mask_rows()
    plan = align(mask)
    assert plan.push(plan.pull(mask)).equal(mask)
    empty = align(torch.zeros(3, 0, dtype=torch.bool))
    assert empty.pull(torch.zeros(3, 0, 2)).shape == (3, 0, 2)
    none = align(torch.zeros(0, 4, dtype=torch.bool))
    assert none.push(torch.zeros(0, 4, 2)).shape == (0, 4, 2)


def test_padding_is_overwritten_whatever_it_holds() -> None:
    mask = mask_rows([MASKS["interior"]])
    x = torch.randn(1, mask.shape[1], 2)
    x[~mask] = torch.nan
    x.requires_grad_()
    assert not align(mask).pull(x).isnan().any()
    cleaned = zero_padding(x, mask)
    assert not cleaned[~mask].any() and cleaned[mask].equal(x[mask])
    (cleaned.square().sum() + align(mask).pull(x).square().sum()).backward()
    assert x.grad is not None and not x.grad[~mask].any()
    assert x.grad[mask].equal(4 * x.detach()[mask])
    assert zero_padding(x, None) is x


def test_aligned_is_a_mask() -> None:
    mask = mask_rows([MASKS["right"]])
    assert Aligned(mask).mask is mask
