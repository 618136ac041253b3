"""Performer against its equations, the kernels that its features estimate, and somebody else's code."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from against import around, by_head, check_against, enlarge
from seqboat import set_training_step
from seqboat.mixers import Performer, PerformerConfig
from seqboat.mixers.performer import RELU_EPSILON, FeatureKernel, RandomFeatures, draw_features


def make(config: PerformerConfig) -> Performer:
    torch.manual_seed(0)
    layer: Performer = enlarge(Performer(6, config))
    return layer


def oracle(layer: Performer, x: Tensor) -> Tensor:
    """One sequence (time, dim), head by head, weight by weight."""

    def phi(token: Tensor) -> Tensor:
        token = token / layer.d_head**0.25
        dots = layer.features.features @ token
        if layer.config.kernel == "relu":
            return dots.clamp(min=0) + RELU_EPSILON
        return (dots - token @ token / 2).exp()

    def attend(branch: Tensor) -> Tensor:
        parts = (branch @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=-1)
        heads = []
        for q, k, v in zip(*(by_head(p, layer.heads) for p in parts), strict=True):
            rows = []
            for t in range(len(x)):
                weights = torch.stack([phi(q[t]) @ phi(k[s]) for s in range(len(x))])
                rows.append(weights / weights.sum() @ v)
            heads.append(torch.stack(rows))
        return torch.cat(heads, dim=-1)

    return around(layer.block, x, attend)


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize("prenorm", [False, True])
def test_equals_its_equations(prenorm: bool, kernel: FeatureKernel) -> None:
    layer = make(PerformerConfig(heads=2, features=7, kernel=kernel, prenorm=prenorm))
    check_against(layer, lambda x: oracle(layer, x), [9, 4, 1])


def attention_error(features: int, trials: int = 12) -> float:
    """Root mean square difference between estimated and true softmax attention."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 32, 8, dtype=torch.float64).unbind(0)
    q, k = q / 4, k / 4  # of long vectors the estimate has heavy tails, and needs more features to settle
    exact = torch.softmax(q @ k.T / math.sqrt(8), dim=-1) @ v
    errors = []
    for _ in range(trials):
        phi = RandomFeatures(features, 8, "softmax", None).double()
        weights = phi(q, query=True).exp() @ phi(k, query=False).exp().T
        errors.append((weights / weights.sum(dim=-1, keepdim=True) @ v - exact).square().mean())
    return math.sqrt(sum(errors) / trials)


def test_error_falls_as_one_over_the_root_of_the_features() -> None:
    counts = [64, 256, 1024, 4096]
    errors = [attention_error(count) for count in counts]
    for few, many in itertools.pairwise(errors):
        # four times the features: half the error, up to the noise of the draws
        assert 0.35 < many / few < 0.7
    assert errors[-1] / errors[0] == pytest.approx(1 / 8, rel=0.3)


def bare() -> Performer:
    """A layer in float32 whose output is what its heads attend to."""
    torch.manual_seed(0)
    layer = Performer(16, PerformerConfig(heads=2, features=64)).eval()
    layer.block.close = lambda x, attended, mask: attended  # type: ignore[method-assign]
    with torch.no_grad():
        layer.qkv.weight.normal_().mul_(0.5)
    return layer


def by_logarithms(layer: Performer, x: Tensor) -> Tensor:
    """What heads attend to, in float64 from the logarithms of all products of features."""
    layer = layer.double()
    parts = (x @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=-1)
    heads = []
    for q, k, v in zip(*(by_head(part / 8**0.25, 2) for part in parts), strict=True):
        dots = [part @ layer.features.features.T for part in (q, k)]
        logs = dots[0][:, :, None] + (dots[1] - k.square().sum(dim=-1, keepdim=True) / 2)[:, None]
        weights = logs.logsumexp(dim=-1)
        heads.append(torch.softmax(weights, dim=-1) @ v * 8**0.25)
    return torch.cat(heads, dim=-1)


@pytest.mark.parametrize("scale", [6.0, 12.0])
def test_long_keys_are_seen(scale: float) -> None:
    layer = bare()
    with torch.no_grad():
        layer.qkv.weight[16:32] *= scale
    x = torch.randn(2, 90, 16, requires_grad=True)
    key = by_head(layer.qkv(x), 3)[1].unflatten(-1, (2, 8))
    lengths, weight = (90, 70), torch.randn(2, 90, 16)
    assert (
        layer.features(key, query=False).amax(dim=-1) < -110
    ).float().mean() > 0.5  # too small for float32
    y = layer(x, torch.arange(90) < torch.tensor(lengths)[:, None]).y
    wide = x.detach().double().requires_grad_()
    rows = [by_logarithms(layer, wide[i : i + 1, :n]) for i, n in enumerate(lengths)]
    # logarithms of some thousands have errors of 2^-13 in float32
    expected = torch.cat([F.pad(row, (0, 0, 0, 90 - row.shape[1])) for row in rows])
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)
    assert y[0].any(dim=-1).all() and y[1, :70].any(dim=-1).all()
    (found,) = torch.autograd.grad((y * weight).sum(), x)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), wide)
    assert wanted.any() and (found.double() - wanted).norm() < 1e-2 * wanted.norm()


def test_long_keys_that_are_alike_share_the_attention() -> None:
    """Where softmax attention is a mean, whatever the queries, so is its estimate."""
    layer = bare()
    with torch.no_grad():
        layer.qkv.weight[16:32] = 0
        layer.qkv.bias[16:32] = 40
    x = torch.randn(2, 150, 16)
    value = by_head(layer.qkv(x), 3)[2]
    total = value.mean(dim=1, keepdim=True)
    torch.testing.assert_close(layer(x).y, total.expand_as(value), rtol=1e-4, atol=1e-4)


def test_features_are_orthogonal_in_groups_with_the_lengths_of_normal_vectors() -> None:
    w = draw_features(20, 8, seed=3).double()
    for group in (w[:8], w[8:16], w[16:]):
        gram = group @ group.T
        torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-5)
    lengths = draw_features(4000, 8, seed=3).square().sum(dim=1)
    assert lengths.mean() == pytest.approx(8, rel=0.05) and lengths.var() == pytest.approx(16, rel=0.2)


def test_features_follow_the_seed_and_the_training_step() -> None:
    def layer() -> Performer:
        torch.manual_seed(4)
        return Performer(6, PerformerConfig(heads=2, features=5, redraw=10))

    one, two = layer(), layer()
    first = one.features.features.clone()
    assert two.features.features.equal(first)
    set_training_step(one, 9)
    assert one.features.features.equal(first)
    set_training_step(one, 10)
    second = one.features.features.clone()
    assert not second.equal(first)
    # a run that is resumed in the middle has the same features, whether it noticed the first draw or not
    set_training_step(two, 17)
    assert two.features.features.equal(second)
    torch.manual_seed(5)
    other = Performer(6, PerformerConfig(heads=2, features=5))
    assert not other.features.features.equal(first)
    other.load_state_dict(one.state_dict())
    assert other.features.features.equal(second) and other.features.seed.equal(one.features.seed)
    kept = Performer(6, PerformerConfig(heads=2, features=5, redraw=None))
    before = kept.features.features.clone()
    set_training_step(kept, 100_000)
    assert kept.features.features.equal(before)


def test_layers_can_be_announced_before_their_weights_are_there() -> None:
    torch.manual_seed(4)
    layer = Performer(6, PerformerConfig(heads=2, features=5))
    with torch.device("meta"):
        other = Performer(6, PerformerConfig(heads=2, features=5))
    other.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(1, 4, 6)
    torch.testing.assert_close(other(x).y, layer(x).y)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="kernel must be one of softmax, relu; got 'cosine'"):
        PerformerConfig(kernel="cosine")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="features must be an integer >= 1, got 0"):
        PerformerConfig(features=0)
    with pytest.raises(ValueError, match="redraw must be an integer >= 1, got 0"):
        PerformerConfig(redraw=0)
    with pytest.raises(ValueError, match="Performer has no causal form, it is bidirectional"):
        PerformerConfig(causal=True)


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.filterwarnings("ignore")
def test_agrees_with_performer_pytorch(kernel: FeatureKernel) -> None:
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    layer = make(PerformerConfig(heads=2, features=7, kernel=kernel))
    w = layer.features.features
    q, k, v = torch.randn(3, 1, 2, 9, 3, dtype=torch.float64).unbind(0)
    if kernel == "softmax":
        # their epsilon is not in the paper's equations
        theirs = [peer.softmax_kernel(x, projection_matrix=w, is_query=x is q, eps=0) for x in (q, k)]
    else:
        theirs = [
            peer.generalized_kernel(x, projection_matrix=w, kernel_epsilon=RELU_EPSILON) for x in (q, k)
        ]
    expected = peer.linear_attention(*theirs, v)
    ours = layer.features(q, query=True).exp() @ layer.features(k, query=False).exp().transpose(-1, -2)
    torch.testing.assert_close(ours / ours.sum(dim=-1, keepdim=True) @ v, expected)
