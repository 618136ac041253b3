"""The registry of kernels: what is available, chosen, refused and disabled, and that torch computes the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import seqboat
from closeness import assert_same_numbers, difference
from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.ops import attention
from seqboat.ops.attention import Neighbors
from seqboat.ops.kernels import registry
from seqboat.ops.kernels.registry import Implementation
from seqboat.ops.kernels.scan import _torch_gradients, torch_scan
from seqboat.ssm.diagonal import SSMConfig
from seqboat.ssm.ema import EMAConfig
from seqboat.ssm.s4d import S4DConfig

HERE = sys.modules[__name__]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry without choices, and with nothing counted, for each test."""
    for name, value in vars(registry._Seam()).items():
        monkeypatch.setattr(registry.SEAM, name, value)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", {name: [] for name in registry.OPERATIONS})
    yield
    registry._load.cache_clear()


def banded(q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> Tensor:
    return attention.banded(q, k, v, *near, 0.0, 0)


def negated(q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> Tensor:
    return -attention._forward(q, k, v, near, 0.0, 0)


def doubled(grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, near: Neighbors) -> tuple[Any, ...]:
    return tuple(2 * part for part in attention._backward(near, 0.0, 0, grad, q, k, v))


def negated_scan(*arguments: Any) -> tuple[Tensor, Tensor]:
    y, final = torch_scan(*arguments)
    return -y, -final


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
    return q, k, v, Neighbors(group, None, torch.randn(7, requires_grad=True), 3, 0, 5, "softmax")


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
    with pytest.raises(ValueError, match="name must be one of auto, torch, triton; got 'cuda'"):
        seqboat.use_kernels("cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="operation must be one of scan"):
        seqboat.use_kernels("triton", operation="sorting")


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


@pytest.mark.parametrize("kind", [EMAConfig, S4DConfig])
@pytest.mark.parametrize("causal", [True, False])
def test_a_state_space_layer_asks_for_a_kernel(
    kind: type[SSMConfig], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, HERE.__name__, HERE)
    torch.manual_seed(1)
    layer = kind(d_state=4).build(3, causal)
    x, mask = torch.randn(2, 11, 3), torch.arange(11) < torch.tensor([[11], [4]])
    expected = layer(x, mask)
    register("scan", "negated_scan")
    with seqboat.using_kernels("triton"):
        found = layer(x, mask)
    assert torch.allclose(found.y, -expected.y, atol=1e-6)
    if causal:
        assert torch.allclose(found.state.states, -expected.state.states, atol=1e-6)
    register("scan", "broken")
    registry.IMPLEMENTATIONS["scan"].pop(0)
    with seqboat.using_kernels("triton"), pytest.warns(RuntimeWarning, match="triton failed in scan"):
        assert_same_numbers(layer(x, mask).y, expected.y)


def test_the_scan_in_torch_has_gradients_of_all_inputs() -> None:
    torch.manual_seed(2)
    shape = (1, 3, 2)
    x, drive, read = torch.randn(2, 9, 3), torch.randn(shape), torch.randn(shape)
    inputs = x, -torch.rand(shape), drive, read, torch.randn(3), torch.randn(2, 3, 2), torch.tensor([9, 4])
    grads = _torch_gradients(inputs, True, torch.ones(2, 9, 3), torch.ones(2, 3, 2))
    leaves = [part.double().requires_grad_() for part in inputs[:6]]
    run: Any = torch_scan
    y, final = run(*leaves, inputs[6], True)
    expected = torch.autograd.grad(y.sum() + final.sum(), leaves)
    assert grads[6] is None
    for found, wanted in zip(grads, expected, strict=False):
        assert found is not None and difference(found, wanted) < 2e-6


def test_what_the_kernels_do_not_fit_is_refused() -> None:
    call = {"device": torch.device("cuda"), "dtype": torch.float32}
    attention = {**call, "d_z": 64, "dropout": 0.0}
    assert registry._refuse_scan(**call, states=64) is None
    assert (
        registry._refuse_scan(**call, states=128) == "128 states per channel, at most 64 fit into registers"
    )
    assert registry._refuse_attention(**attention) is None
    assert registry._refuse_attention(**{**attention, "dropout": 0.1}) == "attention dropout"
    assert "queries of width 512" in str(registry._refuse_attention(**{**attention, "d_z": 512}))


def test_a_layer_without_kernels_is_the_layer_of_torch() -> None:
    """Where something is chosen that is not there, other code paths lead to the same numbers."""
    torch.manual_seed(3)
    config = SeqBoatConfig(gau=GAUConfig(d_z=4, d_v=6, window=4), norm="scale")
    causal = SeqBoatConfig(
        gau=GAUConfig(d_z=4, d_v=6, window=4, positions="rotary"), causal=True, prenorm=True
    )
    for layer in (SeqBoat(8, config).double(), SeqBoat(8, causal).double()):
        x = torch.randn(2, 13, 8, dtype=torch.float64, requires_grad=True)
        results = []
        for choice in ("auto", "triton"):
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
