"""Compress and extract, the packed form, and modules that run on their active tokens alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from seqboat.mixers.activation import SparseModularActivation
from seqboat.mixers.gau import GAUConfig
from seqboat.padding import Aligned
from seqboat.routers import AlwaysActive, Router, SigmoidRouter, TemperedSoftmax, XMoE
from seqboat.sma import Routing, compress, extract, pack


def decisions(batch: int, time: int, rate: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, time, generator=generator) < rate


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (4, 0), (0, 4)], ids=str)
def test_extract_undoes_compress(shape: tuple[int, int], rate: float) -> None:
    active = decisions(*shape, rate)
    x = torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True)
    packed, slot = compress(x, active)
    longest = int(active.sum(dim=1).max()) if active.numel() else 0
    assert packed.shape == (shape[0], longest, 5)
    back = extract(packed, slot)
    assert back.equal(torch.where(active[..., None], x, 0))
    weight = torch.randn_like(back)
    (back * weight).sum().backward()
    assert x.grad is not None and x.grad.equal(torch.where(active[..., None], weight, 0))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (4, 0), (0, 4)], ids=str)
def test_packed_form_is_the_padded_form_without_its_padding(shape: tuple[int, int], rate: float) -> None:
    active = decisions(*shape, rate)
    x = torch.randn(*shape, 5, dtype=torch.float64)
    packed = pack(active)
    padded, slot = compress(x, active)
    tokens = packed.take(x)
    assert tokens.equal(x[active])
    assert tokens.equal(padded[packed.row, packed.slot])
    assert packed.slot.equal(slot[active])
    assert packed.offsets.diff().equal(active.sum(dim=1)) and packed.offsets[0] == 0
    rows, positions = active.nonzero(as_tuple=True)
    assert packed.row.equal(rows) and packed.position.equal(positions)
    base = torch.randn_like(x)
    assert packed.add(base, tokens).equal(base + extract(padded, slot))


def test_packed_positions_continue() -> None:
    active = decisions(3, 9, 0.5)
    seen = torch.tensor([5, 0, 7])
    whole, later = pack(active), pack(active, seen)
    assert later.position.equal(whole.position + seen[whole.row])
    assert later.flat.equal(whole.flat) and later.slot.equal(whole.slot)


def test_packed_gradients() -> None:
    active = decisions(2, 5, 0.5)
    packed = pack(active)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(packed.flat), 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(packed.take, x)
    assert torch.autograd.gradcheck(packed.add, (x, y))
    assert torch.autograd.gradcheck(lambda x: extract(*compress(x, active)), x)


def test_confidence_is_kept_where_active() -> None:
    routing = Routing(torch.tensor([True, False, True]), torch.tensor([0.75, 0.4, 1.0]))
    assert routing.confidence.tolist() == [0.75, 0.0, 1.0]


def spread(router: Router) -> Router:
    """Make the decisions of a router varied and float64."""
    for parameter in router.parameters():
        nn.init.normal_(parameter)
    return router.double()


@pytest.mark.parametrize("router_class", [TemperedSoftmax, SigmoidRouter, XMoE, AlwaysActive])
def test_modules_equal_a_naive_loop(router_class: type[Router]) -> None:
    torch.manual_seed(0)
    units = {
        "wide": nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 6)),
        "gau": GAUConfig(d_z=4, d_v=8, span="full").build(6, causal=False),
        "narrow": nn.Linear(6, 6),
    }
    sma = SparseModularActivation(units, 6, spread(router_class(6, 3))).double()
    x = torch.randn(3, 11, 6, dtype=torch.float64)
    y, state, routing = sma(x)
    assert state is None and routing is not None
    expected = torch.zeros_like(x)
    for row in range(3):
        for i, unit in enumerate(units.values()):
            places = [t for t in range(11) if routing.active[row, t, i]]
            if not places:
                continue
            tokens = x[row, places]
            if i == 1:
                out, _ = unit(tokens, pack(routing.active[row : row + 1, :, i]))
            else:
                out = unit(tokens)
            for place, token in zip(places, out, strict=True):
                expected[row, place] += routing.probs[row, place, i] * token
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    assert routing.active.any()


def test_one_module_and_base() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 6)
    sma = SparseModularActivation(linear, 6, spread(SigmoidRouter(6))).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    out = sma(x)
    assert out.state is not None and out.state.modules == (None,) and out.state.seen.tolist() == [9, 9]
    torch.testing.assert_close(out.y, out.routing.confidence * linear(x), rtol=0, atol=1e-12)
    base = torch.randn_like(x)
    torch.testing.assert_close(sma(x, base=base).y, base + out.y, rtol=0, atol=1e-12)
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    masked = sma(x, Aligned(mask), base=base)
    torch.testing.assert_close(masked.y[mask], (base + out.y)[mask], rtol=0, atol=1e-12)
    torch.testing.assert_close(masked.y[~mask], base[~mask], rtol=0, atol=0)
    assert not masked.routing.active[~mask].any()


@pytest.mark.parametrize("bias", [-1e3, 1e3], ids=["none", "all"])
def test_none_or_all_active(bias: float) -> None:
    torch.manual_seed(0)
    ffn = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    router = SigmoidRouter(6)
    nn.init.constant_(router.logits.bias, bias)
    sma = SparseModularActivation({"ffn": ffn}, 6, router).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    y = sma(x).y
    torch.testing.assert_close(y, ffn(x) if bias > 0 else torch.zeros_like(x), rtol=0, atol=1e-12)
    y.sum().backward()
    for name, parameter in sma.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_gradient_reaches_the_router_only_through_the_confidence() -> None:
    torch.manual_seed(0)
    linear, router = nn.Linear(6, 6), SigmoidRouter(6)
    sma = SparseModularActivation(linear, 6, spread(router)).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    out = sma(x)
    weight = torch.randn_like(out.y)
    (out.y * weight).sum().backward()
    # the gradient of a probability is weight . f(x) on active tokens and zero on the others
    probs = out.routing.probs.detach()
    through = torch.where(out.routing.active, (weight * linear(x)).sum(-1, keepdim=True), 0)
    slope = through * probs * (1 - probs)
    expected = torch.einsum("btm,btd->md", slope, x)
    torch.testing.assert_close(router.logits.weight.grad, expected.detach())


def test_errors() -> None:
    linear = nn.Linear(6, 6)
    with pytest.raises(ValueError, match="modules must hold at least one module, got none"):
        SparseModularActivation({}, 6)
    with pytest.raises(ValueError, match=r"router decides for 2 modules of width 6, but there are 1 modules"):
        SparseModularActivation(linear, 6, SigmoidRouter(6, 2))
    with pytest.raises(ValueError, match=r"of width 5, but there are 1 modules of width 6"):
        SparseModularActivation(linear, 6, SigmoidRouter(5))
    sma = SparseModularActivation(linear, 6)
    x = torch.randn(2, 3, 6)
    with pytest.raises(ValueError, match=r"base must have the shape of x, \(2, 3, 6\), got \(2, 3, 1\)"):
        sma(x, base=torch.randn(2, 3, 1))
    with pytest.raises(ValueError, match="with a base, mask must be None or Aligned"):
        sma(x, torch.ones(2, 3, dtype=torch.bool), base=x)
    with pytest.raises(ValueError, match=r"x must have shape \(batch, time, 6\), got \(2, 6\)"):
        sma(x[:, 0])
    with pytest.raises(ValueError, match=r"(?i)module 'module' must return .*\(.*, 6\), got"):
        SparseModularActivation(nn.Linear(6, 1), 6, AlwaysActive(6))(x)
