"""Parts with hand-written backward passes against the chain of operators they stand for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.ops.fused import by_channel, combine, gates, linear, norm_of_silu, scale_by_rms, silu, take


def channels_first(x: Tensor) -> Tensor:
    """The same matrix, laid out channel by channel."""
    return x.t().contiguous().t()


@pytest.mark.parametrize("lay_out", [torch.clone, channels_first], ids=["by token", "by channel"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_linear(lay_out, tokens: int) -> None:
    layer = nn.Linear(5, 3).double()
    x = lay_out(torch.randn(tokens, 5, dtype=torch.float64)).requires_grad_()
    grad = torch.randn(tokens, 3, dtype=torch.float64)
    inputs = (x, layer.weight, layer.bias)
    torch.testing.assert_close(linear(layer, x), layer(x))
    ours = torch.autograd.grad(linear(layer, x), inputs, grad)
    torch.testing.assert_close(ours, torch.autograd.grad(layer(x), inputs, grad))
    assert by_channel(ours[0]) == by_channel(x)


@pytest.mark.parametrize("lay_out", [torch.clone, channels_first], ids=["by token", "by channel"])
@pytest.mark.parametrize("rows", [[], [4], [0, 2, 3, 6]], ids=len)
def test_take(lay_out, rows: list[int]) -> None:
    x = lay_out(torch.randn(7, 5, dtype=torch.float64)).requires_grad_()
    index = torch.tensor(rows, dtype=torch.int64)
    grad = torch.randn(len(rows), 5, dtype=torch.float64)
    torch.testing.assert_close(take(x, index), x[index])
    (ours,) = torch.autograd.grad(take(x, index), x, grad)
    (theirs,) = torch.autograd.grad(x[index], x, grad)
    torch.testing.assert_close(ours, theirs)
    assert by_channel(ours) == by_channel(x)


@pytest.mark.parametrize("shape", [(0, 4), (3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("per_channel", [False, True])
def test_scale_by_rms(shape: tuple[int, ...], per_channel: bool) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn((4,) if per_channel else (), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: scale_by_rms(x, w, 1e-5), (x, weight))
    torch.testing.assert_close(scale_by_rms(x, weight, 1e-5), F.rms_norm(x, (4,), None, 1e-5) * weight)


@pytest.mark.parametrize("shape", [(0, 4), (3, 4), (2, 3, 4)], ids=str)
def test_norm_of_silu(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, w, b: norm_of_silu(x, w, b, 1e-5), (x, weight, bias))
    plain = F.layer_norm(F.silu(x), (4,), weight, bias, 1e-5)
    torch.testing.assert_close(norm_of_silu(x, weight, bias, 1e-5), plain)
    # a frozen norm asks for no gradient of its weights
    frozen = norm_of_silu(x, weight.detach(), bias.detach(), 1e-5)
    (ours,) = torch.autograd.grad(frozen, x, torch.ones_like(frozen))
    torch.testing.assert_close(ours, torch.autograd.grad(plain, x, torch.ones_like(plain))[0])


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_gates(tokens: int) -> None:
    """Against the same through a Linear with a hook, which takes the plain way."""
    layer = nn.Linear(5, 4 + 2 * 3).double()
    x = torch.randn(tokens, 5, dtype=torch.float64, requires_grad=True)
    gamma, beta = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = (x, layer.weight, layer.bias, gamma, beta)
    fast = gates(layer, x, gamma, beta)
    grads = [torch.randn_like(part) for part in fast]
    ours = torch.autograd.grad(fast, inputs, grads)
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    plain = gates(layer, x, gamma, beta)
    assert calls, "a hooked layer must be called"
    torch.testing.assert_close(fast, plain)
    torch.testing.assert_close(ours, torch.autograd.grad(plain, inputs, grads))


def test_adapters_are_not_passed_over() -> None:
    """A layer that was replaced, as adapters do, is called rather than read."""

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    layer = Doubled(3, 3)
    x = torch.randn(4, 3)
    torch.testing.assert_close(linear(layer, x), layer(x))


def test_autocast_gives_the_lower_type() -> None:
    layer = nn.Linear(8, 6)
    x = torch.randn(5, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(layer, x)
        parts = gates(layer, x, torch.ones(2, 2), torch.zeros(2, 2))
    assert y.dtype == torch.bfloat16 and all(part.dtype == torch.bfloat16 for part in parts)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


@pytest.mark.parametrize("lay_out", [torch.clone, channels_first], ids=["by token", "by channel"])
def test_combine(lay_out) -> None:
    layer = nn.Linear(4, 4).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    flat = lay_out(torch.randn(10, 4, dtype=torch.float64)).requires_grad_()
    rows = torch.tensor([1, 3, 3, 9])
    y = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def fast(x: Tensor, h: Tensor, y: Tensor) -> Tensor:
        return combine(layer, x, h.view(2, 5, 4), rows, y)

    assert torch.autograd.gradcheck(fast, (x, flat, y))
    summed = (layer(flat.view(2, 5, 4)) + x).view(10, 4).index_add(0, rows, y).view(2, 5, 4)
    torch.testing.assert_close(fast(x, flat, y), summed)
    weights = (layer.weight, layer.bias)
    ours = torch.autograd.grad(fast(x, flat, y).square().sum(), weights)
    torch.testing.assert_close(ours, torch.autograd.grad(summed.square().sum(), weights))
    hook = layer.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(fast(x, flat, y), summed)
    hook.remove()


def test_gradcheck() -> None:
    layer = nn.Linear(3, 2 + 2 * 2).double()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    gamma, beta = (torch.randn(2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, g, b: gates(layer, x, g, b), (x, gamma, beta))
    assert torch.autograd.gradcheck(lambda x: linear(layer, x), x)
    assert torch.autograd.gradcheck(lambda x: take(x, torch.tensor([0, 2])), x)
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: scale_by_rms(x, w, 1e-5, activate=True), (x, weight))
    scalar = torch.randn((), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: scale_by_rms(x, w, 1e-5, activate=True), (x, scalar))


@pytest.mark.parametrize("channels_first", [False, True])
def test_silu_is_made_again_with_the_same_gradients(channels_first: bool) -> None:
    torch.manual_seed(0)
    before = torch.randn(4, 6, dtype=torch.float64).t() if channels_first else torch.randn(6, 4).double()
    before = before.requires_grad_()
    layer = nn.Linear(4, 4, dtype=torch.float64)
    rows, y = torch.tensor([1, 3]), torch.randn(2, 4, dtype=torch.float64)
    inputs = [before, layer.weight, layer.bias]

    def run(activate: Callable[[Tensor], Tensor]) -> list[Tensor]:
        hidden = activate(before)
        summed = combine(layer, torch.zeros_like(hidden), hidden, rows, y) * linear(layer, hidden)
        return list(torch.autograd.grad(summed.square().sum(), inputs))

    for got, want in zip(run(silu), run(F.silu), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("outputs", [2, 4])
def test_channels_that_would_meet_in_a_cache_lie_apart(outputs: int) -> None:
    """Tokens stored by channel, a page apart: other strides, the same numbers and gradients, also the second ones."""
    torch.manual_seed(0)
    before = torch.randn(4, 2, 256, dtype=torch.float64).permute(1, 2, 0).requires_grad_()
    layer, few = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, outputs, dtype=torch.float64)
    rows, y = torch.tensor([1, 300]), torch.randn(2, 4, dtype=torch.float64)
    inputs = [before, layer.weight, few.weight, few.bias]

    def run(fused: bool) -> list[Tensor]:
        hidden = silu(before) if fused else F.silu(before)
        chosen = linear(few, hidden) if fused else few(hidden)
        base = torch.zeros_like(before)
        summed = combine(layer, base, hidden, rows, y) if fused else plain(hidden)
        total = (summed * chosen.sum(dim=-1, keepdim=True)).square().sum()
        first = torch.autograd.grad(total, inputs, create_graph=True)
        again = torch.autograd.grad(first[0].square().sum(), inputs, retain_graph=True)
        return [hidden, chosen, summed, *torch.autograd.grad(total, inputs), *again]

    def plain(hidden: Tensor) -> Tensor:
        return layer(hidden).reshape(-1, 4).index_add(0, rows, y).view_as(hidden)

    assert silu(before).stride(-1) == 512 + 128 // 8 and silu(before[:, :100]).stride(-1) == 200
    for got, want in zip(run(fused=True), run(fused=False), strict=True):
        torch.testing.assert_close(got, want)


def kept_bytes(activate: Callable[[Tensor], Tensor]) -> int:
    """Memory that is kept for the backward pass of a Linear behind an activation."""
    before = torch.randn(64, 8, requires_grad=True)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    layer = nn.Linear(8, 8)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = linear(layer, activate(before))
    y.sum().backward()
    return sum(kept.values())


def test_silu_is_not_kept() -> None:
    assert kept_bytes(F.silu) - kept_bytes(silu) == 64 * 8 * 4


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_makes_its_hidden_state_again(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SeqBoatConfig(init="paper", gau=GAUConfig(d_z=8, d_v=16, window=4), dropout=dropout).build(8)
    calls: list[int] = []

    def counted(x: Tensor, silu: Callable[..., Tensor] = F.silu, **options: bool) -> Tensor:
        if x.numel() == 2 * 64 * 8:
            calls.append(1)
        return silu(x, **options)

    y = layer(torch.randn(2, 64, 8, requires_grad=True)).y
    monkeypatch.setattr(F, "silu", counted)
    y.sum().backward()
    # once more for the norm behind the layer, whatever the dropout
    assert (len(calls) > 1) == (dropout == 0)


class _Probe(torch.autograd.Function):
    """The identity, whose node tells whether the graph behind it is still alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_graph_that_nobody_needs_is_freed() -> None:
    layer = SeqBoatConfig(init="paper", gau=GAUConfig(d_z=8, d_v=16, window=4)).build(8)
    x = _Probe.apply(torch.randn(2, 64, 8, requires_grad=True))
    node = weakref.ref(x.grad_fn)
    y = layer(x).y
    del x
    assert node() is not None
    del y
    assert node() is None
