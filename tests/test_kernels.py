"""The registry of kernels: what is available, chosen, refused and disabled, and that torch computes the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import seqboat
from seqboat.ops import banded as banded_module
from seqboat.ops.band import Neighbors
from seqboat.ops.banded import banded
from seqboat.ops.kernels import registry
from seqboat.ops.kernels.registry import Implementation

HERE = sys.modules[__name__]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry without choices, and with nothing counted, for each test."""
    monkeypatch.setattr(registry, "SEAM", registry._Seam())
    monkeypatch.setattr(banded_module, "SEAM", registry.SEAM)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", {name: [] for name in registry.OPERATIONS})
    yield
    registry._load.cache_clear()


def negated(q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> Tensor:
    return -banded_module._forward(q, k, v, near, 0.0, 0)


def doubled(grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> tuple[Any, ...]:
    return tuple(2 * part for part in banded_module._backward(grad, q, k, v, near, 0.0, 0))


def broken(*arguments: Any) -> Tensor:
    raise RuntimeError("no such instruction")


def register(operation: str, run: str, **options: Any) -> None:
    made = Implementation("triton", f"{HERE.__name__}:{run}", **options)
    registry.IMPLEMENTATIONS[operation].append(made)


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor, Neighbors]:
    monkeypatch.setitem(sys.modules, HERE.__name__, HERE)
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, width, requires_grad=True) for width in (4, 4, 3))
    group = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    return q, k, v, Neighbors(group, None, torch.randn(7, requires_grad=True), 3, 0, "softmax", 0.5)


def test_torch_runs_unless_something_is_chosen(inputs: Any) -> None:
    expected = banded(*inputs)
    register("attention", "negated")
    assert torch.equal(banded(*inputs), expected)
    assert seqboat.kernels()["attention"]["ran"] == {}
    seqboat.use_kernels("triton")
    assert torch.equal(banded(*inputs), -expected)
    assert seqboat.kernels()["attention"]["ran"] == {"triton": 1}
    assert registry.record()["attention"] == "triton" and registry.record()["scan"] == "torch"
    seqboat.use_kernels("torch")
    assert torch.equal(banded(*inputs), expected)


def test_a_choice_holds_inside_its_block(inputs: Any) -> None:
    register("attention", "negated")
    expected = banded(*inputs)
    with seqboat.using_kernels("triton", "attention"):
        assert seqboat.kernels()["attention"]["chosen"] == "triton"
        assert seqboat.kernels()["attention_backward"]["chosen"] == "triton"
        assert seqboat.kernels()["scan"]["chosen"] == "auto"
        assert torch.equal(banded(*inputs), -expected)
    assert torch.equal(banded(*inputs), expected)


def test_forward_and_backward_are_chosen_separately(inputs: Any) -> None:
    q = inputs[0]
    banded(*inputs).sum().backward()
    expected, q.grad = q.grad, None
    register("attention_backward", "doubled")
    with seqboat.using_kernels("triton"):
        banded(*inputs).sum().backward()
    assert torch.allclose(q.grad, 2 * expected)
    assert seqboat.kernels()["attention"]["ran"] == {}
    assert seqboat.kernels()["attention_backward"]["ran"] == {"triton": 1}


def test_a_refused_call_runs_in_torch_and_says_why(inputs: Any) -> None:
    register("attention", "broken", refuse=lambda **call: f"width {call['d_z']} of {call['dtype']}")
    expected = banded(*inputs)
    with seqboat.using_kernels("triton"):
        assert torch.equal(banded(*inputs), expected)
    assert seqboat.kernels()["attention"]["refused"] == {"triton": "width 4 of torch.float32"}


def test_what_is_missing_says_why(inputs: Any) -> None:
    register("attention", "broken", missing=lambda: "no GPU", experimental=True)
    expected = banded(*inputs)
    with seqboat.using_kernels("triton"):
        assert torch.equal(banded(*inputs), expected)
    found = seqboat.kernels()["attention"]["implementations"]
    assert found["triton"] == "not available: no GPU (experimental)"
    assert found["torch"] == "available"


def test_a_kernel_that_fails_is_disabled_with_a_warning(inputs: Any) -> None:
    register("attention", "broken")
    expected = banded(*inputs)
    seqboat.use_kernels("triton")
    with pytest.warns(RuntimeWarning, match="triton failed in attention.*no such instruction"):
        assert torch.equal(banded(*inputs), expected)
    assert torch.equal(banded(*inputs), expected)  # and no second warning
    assert "no such instruction" in seqboat.kernels()["attention"]["implementations"]["triton"]


def test_a_wrong_kernel_can_be_disabled_for_one_operation(inputs: Any) -> None:
    register("attention", "negated")
    register("scan", "broken")
    expected = banded(*inputs)
    seqboat.use_kernels("triton")
    registry.disable("attention", "triton", "differs from torch by 2e-1")
    assert torch.equal(banded(*inputs), expected)
    found = seqboat.kernels()
    assert "disabled: differs from torch by 2e-1" in found["attention"]["implementations"]["triton"]
    assert found["scan"]["implementations"]["triton"] == "available"
    registry.enable("attention", "triton")
    assert torch.equal(banded(*inputs), -expected)


def test_auto_takes_only_what_is_automatic(inputs: Any) -> None:
    register("attention", "broken")
    call = {"device": torch.device("cuda"), "dtype": torch.float32}
    assert registry.pick("attention", **call) is None
    register("attention", "negated", automatic=True)
    found = registry.pick("attention", **call)
    assert found is not None and found.run.endswith("negated")


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="name must be one of auto, torch, flex, varlen, triton; got 'cuda'"):
        seqboat.use_kernels("cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="operation must be one of scan"):
        seqboat.use_kernels("triton", operation="norm")


def test_triton_is_missing_without_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    reason = registry.triton_missing.__wrapped__()
    assert reason is not None and ("not installed" in reason or "no GPU" in reason)
    call = {"device": torch.device("cpu"), "dtype": torch.float32}
    assert registry.refuse_for_triton(**call) == "no Triton kernels for cpu tensors"
    call = {"device": torch.device("cuda"), "dtype": torch.float64}
    assert registry.refuse_for_triton(**call) == "no Triton kernels for float64"
