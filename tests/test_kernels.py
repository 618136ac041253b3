"""The seam to kernels: what is available, chosen, refused and disabled, and that torch computes the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import seqboat
from closeness import assert_same_numbers
from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.ops import attention, kernels
from seqboat.ops.attention import Neighbors
from seqboat.ops.scan import block_tables, final_state, scan
from seqboat.ssm.diagonal import EMAConfig, S4DConfig, SSMConfig

Inputs = tuple[Tensor, Tensor, Tensor, Neighbors]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[..., Any]]]:
    """Nothing chosen or counted, and kernels that a test may put in place of Triton's, by their names."""
    made: dict[str, Callable[..., Any]] = {}
    state: tuple[Any, ...] = kernels.CHOSEN, kernels.DISABLED, kernels.REFUSED, kernels.RAN
    before = [part.copy() for part in state]
    for part in state:
        part.clear()
    monkeypatch.setattr(kernels, "_load", lambda function: made[function])
    monkeypatch.setattr(kernels, "missing", lambda: None)
    monkeypatch.setattr(kernels, "refuse", lambda x, **sizes: None)
    yield made
    for part, kept in zip(state, before, strict=True):
        part.clear()
        part.update(kept)


@pytest.fixture
def inputs() -> Inputs:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, width, requires_grad=True) for width in (4, 4, 3))
    group = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    return q, k, v, Neighbors(group, None, torch.randn(7, requires_grad=True), 3, 0, 5, "softmax")


def banded(q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> Tensor:
    return attention.banded(q, k, v, *near, 0.0, 0)


def negated(q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> Tensor:
    return -attention._forward(q, k, v, near, 0.0, 0)


def doubled(grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> tuple[Any, ...]:
    return tuple(2 * part for part in attention._backward(near, 0.0, 0, grad, q, k, v))


def broken(*arguments: Any) -> Tensor:
    raise RuntimeError("no such instruction")


def test_torch_runs_unless_kernels_are_chosen(inputs: Inputs, fresh: dict[str, Any]) -> None:
    expected = banded(*inputs)
    fresh["triton_band:attention"] = negated
    assert torch.equal(banded(*inputs), expected) and not kernels.RAN
    with seqboat.using_kernels("triton", "attention"):
        assert seqboat.kernels()["attention"]["chosen"] == "triton"
        assert seqboat.kernels()["scan"]["chosen"] == "torch"
        assert torch.equal(banded(*inputs), -expected)
    assert kernels.record() == {"scan": "torch", "attention": "triton"}
    assert torch.equal(banded(*inputs), expected)
    seqboat.use_kernels("triton")
    assert torch.equal(banded(*inputs), -expected)
    seqboat.use_kernels()
    assert torch.equal(banded(*inputs), expected)


def test_gradients_are_those_of_the_kernels(inputs: Inputs, fresh: dict[str, Any]) -> None:
    q = inputs[0]
    banded(*inputs).sum().backward()
    expected, q.grad = q.grad, None
    fresh["triton_band:attention"] = lambda q, k, v, near: attention._forward(q, k, v, near, 0.0, 0)
    fresh["triton_band:attention_backward"] = doubled
    with seqboat.using_kernels("triton"):
        banded(*inputs).sum().backward()
    assert expected is not None and q.grad is not None
    assert torch.allclose(q.grad, 2 * expected)
    assert kernels.RAN == {"attention": 1, "attention_backward": 1}


@pytest.mark.parametrize("where", ["missing", "refuse"])
def test_torch_runs_where_kernels_cannot(where: str, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, where, lambda *x, **sizes: f"not here: {sizes}")
    expected = banded(*inputs)
    with seqboat.using_kernels("triton"):
        assert torch.equal(banded(*inputs), expected)
    assert seqboat.kernels()["attention"]["refused"].startswith("not here")
    available = seqboat.kernels()["attention"]["implementations"]["triton"]
    assert available.startswith("not available: not here" if where == "missing" else "available")


def test_a_kernel_that_fails_is_disabled_with_a_warning(inputs: Inputs, fresh: dict[str, Any]) -> None:
    fresh["triton_band:attention"] = broken
    expected = banded(*inputs)
    with seqboat.using_kernels("triton"):
        with pytest.warns(RuntimeWarning, match="no such instruction; attention runs in torch from now on"):
            assert torch.equal(banded(*inputs), expected)
        assert torch.equal(banded(*inputs), expected)  # and no second warning
    assert "no such instruction" in seqboat.kernels()["attention"]["implementations"]["triton"]
    assert seqboat.kernels()["scan"]["implementations"]["triton"] == "available (experimental)"


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="name must be one of torch, triton; got 'cuda'"):
        seqboat.use_kernels("cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="operation must be one of scan, attention; got 'sorting'"):
        seqboat.use_kernels("triton", operation="sorting")


def test_choices_from_outside() -> None:
    code = "from seqboat.ops import kernels; print(*kernels.CHOSEN)"
    environment = {**os.environ, kernels.VARIABLE: "triton,scan=torch"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert done.stdout.split() == [b"attention"]


def test_what_the_kernels_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "interprets", lambda: True)
    x = torch.zeros(1)
    assert kernels.refuse(x, states=64, d_z=256) is None
    assert kernels.refuse(x, states=128) == "128 states per channel, at most 64 fit into registers"
    assert kernels.refuse(x, dropout=0.1) == "attention dropout"
    assert kernels.refuse(x, d_z=512) == "queries of width 512, at most 256 fit into shared memory"
    assert kernels.refuse(x.double()) == "no Triton kernels for float64"
    assert kernels.refuse(x.to("meta")) == "no Triton kernels for meta tensors"
    monkeypatch.setattr(kernels, "interprets", lambda: False)
    assert kernels.refuse(x) == "no Triton kernels for cpu tensors"


@pytest.mark.parametrize("kind", [EMAConfig, S4DConfig])
@pytest.mark.parametrize("causal", [True, False])
def test_a_state_space_layer_asks_for_a_kernel(
    kind: type[SSMConfig], causal: bool, fresh: dict[str, Any]
) -> None:
    def negated_scan(
        x: Tensor, log: Tensor, drive: Tensor, read: Tensor, skip: Tensor, start: Any, lengths: Any
    ) -> tuple[Tensor, Tensor]:
        tables = block_tables(log, drive, read, skip, 16)
        y, states = scan(x, tables, not causal, start)
        return -y, -final_state(x, states, tables, log[0], start, lengths) if causal else x.new_zeros(0)

    torch.manual_seed(1)
    layer = kind(d_state=4).build(3, causal)
    x, mask = torch.randn(2, 11, 3), torch.arange(11) < torch.tensor([[11], [4]])
    expected = layer(x, mask)
    fresh["triton_scan:scan"] = negated_scan
    with seqboat.using_kernels("triton"):
        found = layer(x, mask)
    assert torch.allclose(found.y, -expected.y, atol=1e-6)
    if causal:
        assert torch.allclose(found.state.states, -expected.state.states, atol=1e-6)
    fresh["triton_scan:scan"] = broken
    with seqboat.using_kernels("triton"), pytest.warns(RuntimeWarning, match="scan runs in torch"):
        assert_same_numbers(layer(x, mask).y, expected.y)


def test_a_layer_without_kernels_is_the_layer_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something is chosen that is not there, other code paths lead to the same numbers."""
    monkeypatch.setattr(kernels, "missing", lambda: "not here")
    torch.manual_seed(3)
    config = SeqBoatConfig(gau=GAUConfig(d_z=4, d_v=6, window=4), norm="scale")
    causal = SeqBoatConfig(
        gau=GAUConfig(d_z=4, d_v=6, window=4, positions="rotary"), causal=True, prenorm=True
    )
    for layer in (SeqBoat(8, config).double(), SeqBoat(8, causal).double()):
        x = torch.randn(2, 13, 8, dtype=torch.float64, requires_grad=True)
        results = []
        for choice in ("torch", "triton"):
            with seqboat.using_kernels(choice):
                y = layer(x).y
                y.square().sum().backward()
            results.append([y.detach(), x.grad, *(part.grad for part in layer.parameters())])
            x.grad = None
            layer.zero_grad()
        for found, expected in zip(*results, strict=True):
            assert (found is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(found, expected)
