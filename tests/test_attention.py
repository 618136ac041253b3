"""Banded and dense attention against whole score matrices, and their derivatives against finite differences."""

from __future__ import annotations

import itertools
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from seqboat.ops import band
from seqboat.ops.band import Neighbors
from seqboat.ops.banded import banded as banded_operator
from seqboat.ops.dense import dense
from seqboat.ops.functions import ATTENTIONS, AttentionName

KINDS: tuple[AttentionName, ...] = get_args(AttentionName)
TINY = 1e-250
"""Weights above this are seen at all."""

kinds = pytest.mark.parametrize("kind", KINDS)
biases = pytest.mark.parametrize("bias", ["none", "places", "positions"])
bands = pytest.mark.parametrize(
    ("left", "right"), [(0, 0), (5, 0), (0, 2), (3, 3), (16, 0), (40, 0), (33, 33)]
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few scores at a time, so that even short sequences take several parts."""
    monkeypatch.setitem(band.SCORES_AT_ONCE, "cpu", 2000)


def banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Tensor,
    *,
    left: int,
    right: int,
    attention: str = "softmax",
    scale: float = 1.0,
    table: Tensor | None = None,
    position: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    near = Neighbors(group, position, table, left, right, attention, scale)
    return banded_operator(q, k, v, near, dropout)


def function(scores: Tensor, visible: Tensor, kind: str) -> Tensor:
    """The attention function on whole rows of scores; nothing where nothing is visible."""
    if kind == "softmax":
        weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
        return torch.where(visible.any(dim=-1, keepdim=True), weights, 0.0)
    if kind == "relu2":
        return torch.where(visible, torch.relu(scores) ** 2, 0.0)
    mu, sigma = math.sqrt(1 / 2), math.sqrt(1 / (4 * math.pi))
    return torch.where(visible, (1 + torch.erf((scores - mu) / (sigma * math.sqrt(2)))) / 2, 0.0)


def look_up(table: Tensor, distance: Tensor) -> Tensor:
    reach = len(table) // 2
    return table[distance.clamp(-reach, reach) + reach]


def naive_banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Tensor,
    *,
    left: int,
    right: int,
    attention: str,
    scale: float,
    table: Tensor | None,
    position: Tensor | None,
    keep: Tensor | None = None,
) -> Tensor:
    places = torch.arange(len(q))
    distance = places - places[:, None]
    visible = (distance >= -left) & (distance <= right) & (group == group[:, None])
    scores = q @ k.T * scale
    if table is not None:
        scores = scores + look_up(table, distance if position is None else position - position[:, None])
    weights = function(scores, visible, attention)
    return (weights if keep is None else weights * keep) @ v


def tokens(count: int, bias: str, groups: int = 3, width: int = 3, seed: int = 0) -> dict[str, Any]:
    """Queries, keys, values, groups of different sizes, and what the bias needs."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    group = torch.randint(0, groups, (count,), generator=generator).sort().values
    position = torch.randint(1, 4, (count,), generator=generator).cumsum(0)
    return {
        "q": leaf(count, width),
        "k": leaf(count, width),
        "v": leaf(count, width + 1),
        "group": group,
        "table": None if bias == "none" else leaf(15),
        "position": position if bias == "positions" else None,
    }


def differentiable(inputs: dict[str, Any]) -> list[Tensor]:
    return [inputs[name] for name in ("q", "k", "v", "table") if inputs[name] is not None]


def assert_same(got: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    """Values and gradients."""
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    weight = torch.linspace(-3, 3, want.numel()).double().cos().view(want.shape)
    got_grads, want_grads = (
        torch.autograd.grad(y, inputs, weight, allow_unused=True, materialize_grads=True) for y in (got, want)
    )
    torch.testing.assert_close(got_grads, want_grads, rtol=1e-11, atol=1e-11)


# nothing, one, two tokens; around one and several blocks of 16
@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 31, 33, 100])
@biases
@kinds
def test_banded_lengths(kind: AttentionName, bias: str, count: int) -> None:
    inputs = tokens(count, bias)
    options: dict[str, Any] = {"left": 5, "right": 3, "attention": kind, "scale": 0.7}
    got, want = banded(**inputs, **options), naive_banded(**inputs, **options)
    assert_same(got, want, differentiable(inputs))


@bands
@biases
@kinds
def test_banded_bands(kind: AttentionName, bias: str, left: int, right: int) -> None:
    for groups in (1, 5):
        inputs = tokens(75, bias, groups)
        options: dict[str, Any] = {"left": left, "right": right, "attention": kind, "scale": 0.7}
        got, want = banded(**inputs, **options), naive_banded(**inputs, **options)
        assert_same(got, want, differentiable(inputs))


@pytest.mark.parametrize(("left", "right"), [(4, 0), (2, 2)])
@biases
@kinds
def test_banded_gradcheck(kind: AttentionName, bias: str, left: int, right: int) -> None:
    """20 tokens: two blocks, in which the groups change."""
    inputs = tokens(20, bias, groups=2, width=1)
    rest = {"group": inputs["group"], "position": inputs["position"]}

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None) -> Tensor:
        return banded(q, k, v, table=table, left=left, right=right, attention=kind, scale=0.7, **rest)

    assert torch.autograd.gradcheck(run, differentiable(inputs))


def naive_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query_slot: Tensor,
    key_slot: Tensor,
    query_position: Tensor,
    key_position: Tensor,
    scale: Tensor,
    table: Tensor | None,
    attention: str,
    causal: bool,
    keep: Tensor | None = None,
) -> Tensor:
    scores = (q @ k.transpose(1, 2)) * scale[..., None]
    if table is not None:
        scores = scores + look_up(table, key_position[:, None, :] - query_position[:, :, None])
    visible = (key_slot >= 0)[:, None, :].expand_as(scores)
    if causal:
        visible = visible & (key_slot[:, None, :] <= query_slot[:, :, None])
    weights = function(scores, visible, attention)
    return (weights if keep is None else weights * keep) @ v


def rows(groups: int, queries: int, keys: int, bias: str, width: int = 3) -> dict[str, Any]:
    """Groups with fewer and fewer keys, the last query of each standing at its last key."""
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    counts = torch.tensor([max(1, keys - 2 * row) for row in range(groups)])
    slots = torch.arange(keys).expand(groups, -1)
    query_slot = (counts[:, None] - queries + torch.arange(queries)).clamp(min=0)
    key_position = torch.randint(1, 4, (groups, keys), generator=generator).cumsum(1)
    by_place = bias != "positions"
    return {
        "q": leaf(groups, queries, width),
        "k": leaf(groups, keys, width),
        "v": leaf(groups, keys, width + 1),
        "query_slot": query_slot,
        "key_slot": torch.where(slots < counts[:, None], slots, -1),
        "query_position": query_slot if by_place else key_position.gather(1, query_slot),
        "key_position": slots if by_place else key_position,
        "scale": torch.rand(groups, queries, generator=generator, dtype=torch.float64) + 0.2,
        "table": None if bias == "none" else leaf(15),
    }


@pytest.mark.parametrize(
    ("groups", "queries", "keys"), [(2, 1, 1), (3, 9, 9), (2, 4, 13), (1, 50, 50), (5, 70, 71)]
)
@pytest.mark.parametrize("causal", [False, True])
@biases
@kinds
def test_dense(kind: AttentionName, bias: str, causal: bool, groups: int, queries: int, keys: int) -> None:
    inputs = rows(groups, queries, keys, bias)
    got = dense(**inputs, attention=kind, causal=causal)
    want = naive_dense(**inputs, attention=kind, causal=causal)
    assert_same(got, want, differentiable(inputs))


@pytest.mark.parametrize("causal", [False, True])
@biases
@kinds
def test_dense_gradcheck(kind: AttentionName, bias: str, causal: bool) -> None:
    inputs = rows(2, 4, 5, bias, width=2)
    fixed = {name: part for name, part in inputs.items() if name not in ("q", "k", "v", "table")}

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None) -> Tensor:
        return dense(q, k, v, table=table, attention=kind, causal=causal, **fixed)

    assert torch.autograd.gradcheck(run, differentiable(inputs))


@pytest.mark.parametrize(("groups", "size"), [(0, 0), (3, 0), (0, 4)])
@kinds
def test_dense_without_tokens(kind: AttentionName, groups: int, size: int) -> None:
    inputs = {
        name: part[:groups, :size] if part.dim() > 1 else part
        for name, part in rows(3, 4, 4, "positions").items()
    }
    y = dense(**inputs, attention=kind, causal=True)
    assert y.shape == (groups, size, 4)
    grads = torch.autograd.grad(y.sum(), differentiable(inputs), allow_unused=True, materialize_grads=True)
    assert all(not grad.any() for grad in grads)


@kinds
def test_dense_groups_without_keys_are_finite(kind: AttentionName) -> None:
    """Whatever such queries get is not used, but must not be NaN: zero times NaN would spread."""
    inputs = rows(2, 3, 3, "places")
    inputs["key_slot"] = torch.full_like(inputs["key_slot"], -1)
    y = dense(**inputs, attention=kind, causal=False)
    assert torch.isfinite(y).all()
    grads = torch.autograd.grad(y.sum(), differentiable(inputs))
    assert all(torch.isfinite(grad).all() for grad in grads)


@kinds
def test_layout_of_the_input_does_not_matter(kind: AttentionName) -> None:
    inputs = tokens(40, "positions")
    options: dict[str, Any] = {"left": 4, "right": 4, "attention": kind}
    turned = {name: inputs[name].detach().t().contiguous().t() for name in ("q", "k", "v")}
    assert not turned["q"].is_contiguous()
    torch.testing.assert_close(banded(**{**inputs, **turned}, **options), banded(**inputs, **options))
    grouped = rows(3, 6, 6, "positions")
    turned = {
        name: grouped[name].detach().transpose(0, 2).contiguous().transpose(0, 2) for name in ("q", "k", "v")
    }
    assert not turned["q"].is_contiguous()
    torch.testing.assert_close(
        dense(**{**grouped, **turned}, attention=kind, causal=True),
        dense(**grouped, attention=kind, causal=True),
    )


@kinds
def test_parts_do_not_matter(kind: AttentionName, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of scores held at a time changes nothing."""
    inputs, grouped = tokens(90, "positions"), rows(3, 30, 30, "places")
    results = []
    for scores in (1, 1 << 20):
        monkeypatch.setitem(band.SCORES_AT_ONCE, "cpu", scores)
        y = banded(**inputs, left=7, right=2, attention=kind)
        z = dense(**grouped, attention=kind, causal=True)
        leaves = differentiable(inputs) + differentiable(grouped)
        results.append((y, z, *torch.autograd.grad(y.sum() + z.sum(), leaves)))
    torch.testing.assert_close(results[0], results[1])


def dropout_scale(weights: Tensor, run: Any, count: int, rate: float) -> Tensor:
    """Which weights were dropped, seen through values that are the identity matrix."""
    dropped = run(torch.eye(count, dtype=torch.float64))
    scale = torch.where(weights > TINY, dropped / weights.clamp(min=TINY), 0.0)
    kept = (scale - 1 / (1 - rate)).abs() < 1e-6
    assert (kept | (scale.abs() < 1e-12)).all(), "a weight was neither kept nor dropped"
    return kept.double() / (1 - rate)


@kinds
def test_banded_dropout(kind: AttentionName) -> None:
    """One seed, one mask: forward and backward pass agree with an explicit computation."""
    count, rate = 50, 0.4
    inputs = tokens(count, "positions", groups=1)
    options: dict[str, Any] = {"left": 20, "right": 20, "attention": kind, "scale": 0.7}

    def run(v: Tensor, dropout: float = rate, seed: int = 3) -> Tensor:
        torch.manual_seed(seed)
        return banded(**{**inputs, "v": v}, **options, dropout=dropout)

    weights = run(torch.eye(count, dtype=torch.float64), dropout=0.0).detach()
    keep = dropout_scale(weights, lambda v: run(v).detach(), count, rate)
    visible = weights > TINY
    share = float((keep[visible] > 0).double().mean())
    assert share == pytest.approx(1 - rate, abs=0.05)
    assert_same(run(inputs["v"]), naive_banded(**inputs, **options, keep=keep), differentiable(inputs))
    assert not torch.equal(run(inputs["v"], seed=4), run(inputs["v"]))


@kinds
def test_dense_dropout(kind: AttentionName) -> None:
    count, rate = 40, 0.25
    inputs = rows(2, count, count, "places")
    inputs["key_slot"] = torch.arange(count).expand(2, -1)

    def run(v: Tensor, dropout: float = rate, seed: int = 3) -> Tensor:
        torch.manual_seed(seed)
        return dense(**{**inputs, "v": v.expand(2, count, -1)}, attention=kind, causal=False, dropout=dropout)

    weights = run(torch.eye(count, dtype=torch.float64), dropout=0.0).detach()
    keep = dropout_scale(weights, lambda v: run(v).detach(), count, rate)
    share = float((keep[weights > TINY] > 0).double().mean())
    assert share == pytest.approx(1 - rate, abs=0.05)
    want = naive_dense(**inputs, attention=kind, causal=False, keep=keep)
    assert_same(run(inputs["v"]), want, differentiable(inputs))
    assert not torch.equal(run(inputs["v"], seed=4), run(inputs["v"]))


def test_hidden_keys_have_no_influence() -> None:
    """Keys of other groups and keys out of reach change no bit."""
    inputs = tokens(60, "none", groups=1)
    inputs["group"] = torch.arange(60) // 30
    options: dict[str, Any] = {"left": 4, "right": 0}
    for kind in KINDS:
        before = banded(**inputs, **options, attention=kind)
        changed = {name: inputs[name].detach().clone() for name in ("k", "v")}
        changed["k"][:20] *= 1e6
        changed["v"][:20] *= 1e6
        changed["k"][35:] *= 1e6
        after = banded(**{**inputs, **changed}, **options, attention=kind)
        # tokens 24 to 34 see neither the first 20 nor the later ones
        assert torch.equal(before[24:35], after[24:35])


@kinds
def test_single_precision(kind: AttentionName) -> None:
    inputs = tokens(40, "positions")
    single = {
        name: part.float() if part is not None and part.is_floating_point() else part
        for name, part in inputs.items()
    }
    got = banded(**single, left=6, right=6, attention=kind)
    assert got.dtype == torch.float32
    # float32 rounding of about ten products
    torch.testing.assert_close(
        got.double(), banded(**inputs, left=6, right=6, attention=kind), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "bias"), [("softmax", "positions"), ("relu2", "none"), ("laplace", "places")]
)
def test_banded_registration(kind: str, bias: str) -> None:
    """Schema, shapes under tracing and autograd registration, as torch checks them."""
    inputs = tokens(20, bias)
    tensors = [inputs[name] for name in ("q", "k", "v", "group", "position", "table")]
    torch.library.opcheck(torch.ops.seqboat.banded.default, (*tensors, 4, 2, kind, 0.7, 0.0, 0))


@pytest.mark.parametrize(("kind", "bias"), [("softmax", "positions"), ("relu2", "none")])
def test_dense_registration(kind: str, bias: str) -> None:
    inputs = rows(2, 4, 5, bias)
    torch.library.opcheck(torch.ops.seqboat.dense.default, (*inputs.values(), kind, True, 0.0, 0))


def test_names_are_those_of_the_registry() -> None:
    assert tuple(ATTENTIONS) == KINDS


@kinds
def test_scale(kind: AttentionName) -> None:
    """Of the width of keys, or of their number, which may differ between queries."""
    scale = ATTENTIONS[kind].scale
    if kind == "softmax":
        assert scale(16, 5) == scale(16, torch.tensor([5.0])) == 0.25
        return
    keys = torch.tensor([2.0, 4.0], dtype=torch.float64)
    assert scale(16, 5) == 0.2
    torch.testing.assert_close(scale(16, keys), 1 / keys)


def test_all_kinds_differ() -> None:
    """A wrong name could not pass for another one."""
    inputs = tokens(10, "none")
    results = [banded(**inputs, left=3, right=3, attention=kind) for kind in KINDS]
    for one, other in itertools.combinations(results, 2):
        assert not torch.allclose(one, other)
