"""Attention on packed tokens against whole score matrices, and its derivatives against finite differences."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from seqboat.ops import attention
from seqboat.ops.attention import (
    FUNCTIONS,
    AttentionName,
    Neighbors,
    RelativeBias,
    Seen,
    attend,
    attend_groups,
    banded,
    rotate,
    turns,
)

KINDS: tuple[AttentionName, ...] = get_args(AttentionName)
FAR = 1 << 30
TINY = 1e-250
"""Weights above this are seen at all."""

kinds = pytest.mark.parametrize("kind", KINDS)
biases = pytest.mark.parametrize("bias", ["none", "places", "positions"])
ways = pytest.mark.parametrize("go", ["chosen", "dense", "cut", "band"], indirect=True)
weighted = pytest.mark.parametrize("weigh", [False, True], ids=["even", "weighed"])
reaches = pytest.mark.parametrize(
    ("left", "right"), [(0, 0), (5, 0), (0, 2), (5, 3), (16, 0), (40, 0), (33, 33), (FAR, 0), (FAR, FAR)]
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few scores at a time, so that even short sequences take several parts."""
    monkeypatch.setitem(attention.SCORES, "cpu", 2000)


def naive(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, kind: str, weight: Tensor | None, keep: Tensor | None = None
) -> Tensor:
    """With whole rows of scores."""
    place = torch.arange(len(q))
    distance = place - place[:, None]
    visible = (distance >= -seen.left) & (distance <= seen.right) & (seen.group == seen.group[:, None])
    scores = q @ k.T
    if seen.table is not None:
        if seen.position is not None:
            distance = seen.position - seen.position[:, None]
        furthest = len(seen.table) // 2
        scores = scores + seen.table[distance.clamp(-furthest, furthest) + furthest]
    share = visible * (1 if weight is None else weight)
    if kind == "softmax":
        weights = torch.exp(scores) * share
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-300)
    elif kind == "relu2":
        weights = torch.relu(scores) ** 2 * share
    else:
        mu, sigma = math.sqrt(1 / 2), math.sqrt(1 / (4 * math.pi))
        weights = (1 + torch.erf((scores - mu) / (sigma * math.sqrt(2)))) / 2 * share
    return (weights if keep is None else weights * keep) @ v


class Inputs:
    """Queries, keys, values, groups of different sizes, and what the bias needs."""

    def __init__(
        self,
        count: int,
        bias: str,
        left: int,
        right: int,
        groups: int = 3,
        width: int = 3,
        weigh: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def leaf(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

        group = torch.randint(0, groups, (count,), generator=generator).sort().values
        counts = torch.bincount(group, minlength=groups)
        offsets = torch.cat([counts[:0], counts.new_zeros(1), counts.cumsum(0)])
        position = torch.randint(1, 4, (count,), generator=generator).cumsum(0)
        self.q, self.k, self.v = leaf(count, width), leaf(count, width), leaf(count, width + 1)
        table = None if bias == "none" else leaf(15)
        shown = position if bias == "positions" else None
        self.seen = Seen(group, offsets, int(counts.max()), left, right, table, shown)
        self.weight: Tensor | None = None
        if weigh:
            self.weight = (0.1 + 0.9 * torch.rand(count, generator=generator).double()).requires_grad_()

    @property
    def leaves(self) -> list[Tensor]:
        parts = (self.q, self.k, self.v, self.seen.table, self.weight)
        return [part for part in parts if part is not None]


@pytest.fixture
def go(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes `attend` compute in one way."""
    way: str = request.param
    if way != "chosen":
        monkeypatch.setattr(attention, "_is_short", lambda *_: way != "band")
    if way == "cut":
        monkeypatch.setattr(attention, "DENSE", 50)
    return way


def assert_same(got: Tensor, want: Tensor, leaves: list[Tensor]) -> None:
    """Values and gradients."""
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    above = torch.linspace(-3, 3, want.numel()).double().cos().view(want.shape)
    grads = [
        torch.autograd.grad(y, leaves, above, allow_unused=True, materialize_grads=True) for y in (got, want)
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


# nothing, one, two tokens; around one and several blocks of 16
@pytest.mark.parametrize("count", [0, 1, 2, 16, 17, 100])
@biases
@kinds
@ways
def test_lengths(kind: AttentionName, bias: str, count: int, go: str) -> None:
    inputs = Inputs(count, bias, 5, 3, weigh=count % 2 == 0)
    arguments = inputs.q, inputs.k, inputs.v, inputs.seen, kind
    got = attend(*arguments, weight=inputs.weight)
    assert_same(got, naive(*arguments, inputs.weight), inputs.leaves)


@reaches
@biases
@kinds
@ways
def test_reaches(kind: AttentionName, bias: str, left: int, right: int, go: str) -> None:
    for groups in (1, 5):
        inputs = Inputs(75, bias, left, right, groups)
        arguments = inputs.q, inputs.k, inputs.v, inputs.seen, kind
        assert_same(attend(*arguments), naive(*arguments, None), inputs.leaves)


@pytest.mark.parametrize("go", ["dense", "band"], indirect=True)
@pytest.mark.parametrize(("left", "right"), [(4, 0), (2, 2)])
@biases
@kinds
@weighted
def test_gradcheck(kind: AttentionName, bias: str, left: int, right: int, weigh: bool, go: str) -> None:
    """20 tokens: two blocks, in which the groups change."""
    inputs = Inputs(20, bias, left, right, groups=2, width=1, weigh=weigh)

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        parts = list(rest)
        table = None if inputs.seen.table is None else parts.pop(0)
        return attend(q, k, v, inputs.seen._replace(table=table), kind, 0.0, parts[0] if parts else None)

    assert torch.autograd.gradcheck(run, inputs.leaves)


@kinds
@ways
def test_a_weight_of_zero_hides_a_key(kind: AttentionName, go: str) -> None:
    inputs = Inputs(40, "places", 6, 6)
    weight = torch.ones(40, dtype=torch.float64)
    weight[3::4] = 0
    weight.requires_grad_()
    y = attend(inputs.q, inputs.k, inputs.v, inputs.seen, kind, weight=weight)
    want = naive(inputs.q, inputs.k, inputs.v, inputs.seen, kind, weight)
    torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-11)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), [*inputs.leaves, weight]))


@ways
def test_a_query_that_sees_no_weight_stays_in_its_group(go: str) -> None:
    inputs = Inputs(40, "none", 6, 6)
    v = inputs.v.detach().clone()
    v[inputs.seen.group == 1] = torch.inf
    weight = torch.zeros(40, dtype=torch.float64)
    y = attend(inputs.q, inputs.k, torch.where(v.isfinite(), v, 1e9), inputs.seen, weight=weight)
    assert (y[inputs.seen.group != 1].abs() < 100).all()


@pytest.mark.parametrize(("groups", "size"), [(0, 0), (3, 0), (0, 4)])
@kinds
def test_groups_without_tokens(kind: AttentionName, groups: int, size: int) -> None:
    q, v = torch.zeros(groups, size, 3, requires_grad=True), torch.zeros(groups, size, 4, requires_grad=True)
    y = attend_groups(q, q, v, torch.zeros(groups, dtype=torch.int64), (2, 2), kind)
    assert y.shape == (groups, size, 4)
    assert all(not grad.any() for grad in torch.autograd.grad(y.sum(), [q, v]))


@kinds
def test_groups_without_keys_are_finite(kind: AttentionName) -> None:
    """Whatever such queries get is not used, but must not be NaN: zero times NaN would spread."""
    q = torch.randn(2, 3, 3, requires_grad=True)
    y = attend_groups(q, q, q, torch.zeros(2, dtype=torch.int64), (2, 2), kind)
    assert torch.isfinite(y).all() and torch.isfinite(torch.autograd.grad(y.sum(), q)[0]).all()


@kinds
@ways
def test_layout_of_the_input_does_not_matter(kind: AttentionName, go: str) -> None:
    inputs = Inputs(40, "positions", 4, 4)
    parts = [part.detach() for part in (inputs.q, inputs.k, inputs.v)]
    (q, k, v), turned = parts, [part.t().contiguous().t() for part in parts]
    got = attend(turned[0], turned[1], turned[2], inputs.seen, kind)
    torch.testing.assert_close(got, attend(q, k, v, inputs.seen, kind))


@kinds
def test_parts_do_not_matter(kind: AttentionName, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of scores held at a time changes nothing."""
    inputs, results = Inputs(90, "positions", 7, 2), []
    monkeypatch.setattr(attention, "_is_short", lambda *_: False)
    for scores in (1, 1 << 20):
        monkeypatch.setitem(attention.SCORES, "cpu", scores)
        y = attend(inputs.q, inputs.k, inputs.v, inputs.seen, kind)
        results.append((y, *torch.autograd.grad(y.sum(), inputs.leaves)))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("go", ["dense", "band"], indirect=True)
@kinds
def test_dropout(kind: AttentionName, go: str) -> None:
    """Forward and backward pass agree with an explicit computation; which weights are dropped, values show."""
    count, rate = 50, 0.4
    inputs = Inputs(count, "positions", 20, 20, groups=1)

    def run(v: Tensor, dropout: float = rate, seed: int = 3) -> Tensor:
        torch.manual_seed(seed)
        return attend(inputs.q, inputs.k, v, inputs.seen, kind, dropout)

    eye = torch.eye(count, dtype=torch.float64)
    weights = run(eye, dropout=0.0).detach()
    scale = torch.where(weights > TINY, run(eye).detach() / weights.clamp(min=TINY), 0.0)
    kept = (scale - 1 / (1 - rate)).abs() < 1e-6
    assert (kept | (scale.abs() < 1e-12)).all(), "a weight was neither kept nor dropped"
    keep = kept.double() / (1 - rate)
    assert float(kept[weights > TINY].double().mean()) == pytest.approx(1 - rate, abs=0.05)
    want = naive(inputs.q, inputs.k, inputs.v, inputs.seen, kind, None, keep)
    assert_same(run(inputs.v), want, inputs.leaves)
    assert not torch.equal(run(inputs.v, seed=4), run(inputs.v))


@ways
@kinds
def test_hidden_keys_have_no_influence(kind: AttentionName, go: str) -> None:
    """Keys of other groups and keys out of reach change no bit."""
    inputs = Inputs(60, "none", 4, 0, groups=1)
    group, offsets = torch.arange(60) // 30, torch.tensor([0, 30, 60])
    seen = inputs.seen._replace(group=group, offsets=offsets, longest=30)
    before = attend(inputs.q, inputs.k, inputs.v, seen, kind)
    k, v = inputs.k.detach().clone(), inputs.v.detach().clone()
    k[:20] *= 1e6
    v[:20] *= 1e6
    k[35:] *= 1e6
    after = attend(inputs.q, k, v, seen, kind)
    # tokens 24 to 34 see neither the first 20 nor the later ones
    assert torch.equal(before[24:35], after[24:35])


@ways
@kinds
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_what_is_not_finite_stays_in_its_group(kind: AttentionName, go: str, value: float) -> None:
    inputs = Inputs(60, "none", 9, 9)
    above = torch.ones_like(inputs.v)
    above[inputs.seen.group == 1] = value
    y = attend(inputs.q, inputs.k, inputs.v, inputs.seen, kind)
    want = torch.autograd.grad(y, inputs.leaves, torch.ones_like(y), retain_graph=True)
    found = torch.autograd.grad(y, inputs.leaves, above)
    others = inputs.seen.group != 1
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one[others], other[others])


@ways
@kinds
def test_single_precision(kind: AttentionName, go: str) -> None:
    inputs = Inputs(40, "positions", 6, 6)
    got = attend(inputs.q.float(), inputs.k.float(), inputs.v.float(), inputs.seen, kind)
    assert got.dtype == torch.float32
    # float32 rounding of about ten products
    want = attend(inputs.q, inputs.k, inputs.v, inputs.seen, kind)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "bias"), [("softmax", "positions"), ("relu2", "none"), ("laplace", "places")]
)
def test_registration(kind: str, bias: str) -> None:
    """Schema, shapes under tracing and autograd registration, as torch checks them."""
    inputs = Inputs(20, bias, 4, 2)
    seen = inputs.seen
    near = Neighbors(seen.group, seen.position, seen.table, 4, 2, seen.longest, kind)
    torch.library.opcheck(banded, (inputs.q, inputs.k, inputs.v, *near, 0.0, 0))


def test_all_kinds_differ() -> None:
    """A wrong name could not pass for another one."""
    assert tuple(FUNCTIONS) == KINDS
    inputs = Inputs(10, "none", 3, 3)
    results = [attend(inputs.q, inputs.k, inputs.v, inputs.seen, kind) for kind in KINDS]
    for one, other in itertools.combinations(results, 2):
        assert not torch.allclose(one, other)


# positions


def turn_by(x: Tensor, position: Tensor) -> Tensor:
    return rotate(x, turns(position, x.shape[-1], x.dtype))


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_rotation_by_hand() -> None:
    x = torch.tensor([[1.0, 0.0, 0.0, 2.0]], dtype=torch.float64)
    one, hundredth = 3.0, 0.03
    expected = [[math.cos(one), math.sin(one), -2 * math.sin(hundredth), 2 * math.cos(hundredth)]]
    torch.testing.assert_close(
        turn_by(x, torch.tensor([3])), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_rotated_products_depend_on_the_distance_alone() -> None:
    q, k = values(1, 8), values(2, 8)[1:]
    for distance in (0, 1, 17, 400):
        products = torch.stack(
            [
                (turn_by(q, torch.tensor([p])) * turn_by(k, torch.tensor([p + distance]))).sum()
                for p in (0, 5, 1234, 1_000_000)
            ]
        )
        # angles in float64 at position 1e6 have an error of about 1e-10
        torch.testing.assert_close(products, products[:1].expand(4), rtol=0, atol=1e-8)
    norms = turn_by(k, torch.tensor([999])).norm(dim=-1)
    torch.testing.assert_close(norms, k.norm(dim=-1))


def test_rotation_is_accurate_at_position_one_million() -> None:
    x = values(1, 8)
    position = torch.tensor([1_000_000])
    exact = turn_by(x, position)
    torch.testing.assert_close(turn_by(x.float(), position).double(), exact, rtol=0, atol=1e-6)
    for i in range(4):
        angle = math.fmod(1_000_000 * 10000.0 ** (-2 * i / 8), 2 * math.pi)
        turned = x[0, 2 * i] * math.cos(angle) - x[0, 2 * i + 1] * math.sin(angle)
        assert float(exact[0, 2 * i]) == pytest.approx(float(turned), abs=1e-8)


def test_rotation_has_gradients() -> None:
    position = torch.tensor([0, 3, 70])
    assert torch.autograd.gradcheck(lambda x: turn_by(x, position), values(3, 4).requires_grad_())


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
