"""Adaptive spans against their equations, and at full span against full attention."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from against import around, by_head, check_against, enlarge
from closeness import assert_same_numbers
from seqboat import tasks
from seqboat.core.state import state_bytes
from seqboat.layers.budget import extra_loss
from seqboat.mixers import AdaptiveSpan, AdaptiveSpanConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import Classifier
from seqboat.training.step import add_auxiliary_gradients
from seqboat.training.trainer import train
from small_runs import Spy, ToyConfig, small_run

BASE = AdaptiveSpanConfig(heads=2, max_span=9, ramp=3)


def make(config: AdaptiveSpanConfig, spans: tuple[float, float]) -> AdaptiveSpan:
    torch.manual_seed(0)
    layer: AdaptiveSpan = enlarge(AdaptiveSpan(6, config))
    set_spans(layer, *spans)
    return layer


def set_spans(layer: AdaptiveSpan, *spans: float) -> None:
    with torch.no_grad():
        layer.span_ratio.copy_(torch.tensor(spans, dtype=torch.float64) / layer.config.max_span)


def oracle(layer: AdaptiveSpan, x: Tensor) -> Tensor:
    """One sequence (time, dim), head by head and query by query."""
    config = layer.config

    def attend(branch: Tensor) -> Tensor:
        q, k, v = (branch @ layer.qkv.weight.T).chunk(3, dim=-1)
        heads = []
        for h, (qh, kh, vh) in enumerate(zip(*(by_head(p, 2) for p in (q, k, v)), strict=True)):
            rows = []
            for t in range(len(x)):
                raised = []
                for s in range(t + 1):
                    if t - s > config.max_span:
                        raised.append(torch.zeros((), dtype=x.dtype))
                        continue
                    score = qh[t] @ (kh[s] + layer.distances[t - s]) / math.sqrt(layer.d_head)
                    mask = (
                        (config.ramp + layer.config.max_span * layer.span_ratio[h] - (t - s)) / config.ramp
                    ).clamp(0, 1)
                    raised.append(mask * score.exp())
                weights = torch.stack(raised) / sum(raised)
                rows.append(weights @ vh[: len(weights)])
            heads.append(torch.stack(rows))
        return torch.cat(heads, dim=-1)

    return around(layer.block, x, attend)


@pytest.mark.parametrize("spans", [(0.2, 2.5), (9.0, 4.2)])
def test_equals_its_equations(spans: tuple[float, float]) -> None:
    layer = make(AdaptiveSpanConfig(heads=2, max_span=9, ramp=3), spans)
    check_against(layer, lambda x: oracle(layer, x), [37, 12, 1])


def test_at_full_span_it_is_full_attention() -> None:
    layer = make(AdaptiveSpanConfig(heads=2, max_span=20, ramp=4), (20.0, 20.0))
    x = torch.randn(1, 20, 6, dtype=torch.float64)

    def attend(branch: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 3)).transpose(0, 1) for part in (branch @ layer.qkv.weight.T).chunk(3, -1)
        )
        distance = torch.arange(20)[:, None] - torch.arange(20)
        hidden = distance < 0
        p = layer.distances[distance.clamp(min=0)]
        scores = (q @ k.transpose(1, 2) + torch.einsum("htd,tsd->hts", q, p)) / math.sqrt(3)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    torch.testing.assert_close(layer(x).y[0], around(layer.block, x[0], attend))


def test_what_lies_beyond_all_spans_is_neither_seen_nor_remembered() -> None:
    layer = make(AdaptiveSpanConfig(heads=2, max_span=100, ramp=3), (1.0, 0.0))
    assert layer.reach() == 3
    x = torch.randn(1, 30, 6, dtype=torch.float64)
    changed = x.clone()
    changed[:, :10] += 1
    assert layer(changed).y[:, 13:].equal(layer(x).y[:, 13:])
    assert not torch.equal(layer(changed).y[:, 12], layer(x).y[:, 12])
    small = state_bytes(layer(x).state)
    set_spans(layer, 7.0, 0.0)
    state = layer(x).state
    assert layer.reach() == 9 and state_bytes(state) - 8 == 3 * (small - 8)


def test_spans_stay_in_their_range_and_keep_their_gradient() -> None:
    layer = make(AdaptiveSpanConfig(heads=2, max_span=9, ramp=3), (-4.0, 50.0)).train()
    assert layer.spans().tolist() == [0, 9] and layer.reach() == 9
    inside = make(layer.config, (0.0, 9.0))
    x = torch.randn(2, 12, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x).y, inside(x).y)
    # only what leads back comes through: against the gradient from below, with it from above
    for sign, expected in ((1.0, [0.0, 9.0]), (-1.0, [-9.0, 0.0])):
        (gradient,) = torch.autograd.grad(sign * layer.spans().sum(), layer.span_ratio)
        assert gradient.tolist() == expected
        (gradient,) = torch.autograd.grad(sign * inside.spans().sum(), inside.span_ratio)
        assert gradient.tolist() == [sign * 9.0, sign * 9.0]


def walk(layer: AdaptiveSpan, cost: list[float], steps: int) -> list[float]:
    """Ratios after steps of training that do nothing but pay for spans."""
    optimizer = torch.optim.AdamW([layer.span_ratio], lr=0.01)
    for _ in range(steps):
        (layer.spans() @ torch.tensor(cost, dtype=torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ratios: list[float] = layer.span_ratio.tolist()
    return ratios


def test_spans_neither_run_away_nor_stay_away() -> None:
    layer = make(AdaptiveSpanConfig(heads=2, max_span=9, ramp=3), (0.5, 8.5))
    below, above = walk(layer, [1.0, -1.0], 1000)
    # as far as momentum carries: about a dozen steps of the thousand
    assert -0.15 < below < 0 and 1 < above < 1.15
    below, above = walk(layer, [-1.0, 1.0], 40)
    assert 0.2 < below < 0.4 and 0.6 < above < 0.8


@pytest.mark.slow
def test_compiled_layers_give_the_same(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(torch._dynamo.reset)
    layer = make(AdaptiveSpanConfig(heads=2, max_span=9, ramp=3), (0.2, 2.5)).train()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 12, 6, dtype=torch.float64)
    for spans in ((0.2, 2.5), (-1.0, 0.5), (12.0, -2.0)):
        set_spans(layer, *spans)
        out, expected = compiled(x), layer(x)
        torch.testing.assert_close(out.y, expected.y)
        for sign in (1, -1):
            found, wanted = (
                torch.autograd.grad(sign * o.y.pow(3).sum(), layer.span_ratio, retain_graph=True)[0]
                for o in (out, expected)
            )
            torch.testing.assert_close(found, wanted)
        # with room for the longest span that there could be: the present one is not known to the compiler
        assert out.state.keys.shape[2] == 9 and expected.state.keys.shape[2] == layer.reach()
    torch.testing.assert_close(layer(x, None, out.state).y, layer(x, None, expected.state).y)


class Looks(TorchDispatchMode):
    """Counts how often the host looks at a number on the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def test_decoding_looks_at_spans_once() -> None:
    layer = make(AdaptiveSpanConfig(heads=2, max_span=100, ramp=3), (1.0, 0.0))
    x = torch.randn(1, 6, 6, dtype=torch.float64)
    with Looks() as looks:
        state = layer(x).state
        assert looks.count == 1
        for _ in range(5):
            state = layer.step(x[:, 0], state).state
        assert looks.count == 1 and state.keys.shape[2] == 3
        set_spans(layer, 7.0, 0.0)
        for _ in range(5):
            state = layer.step(x[:, 0], state).state
        assert looks.count == 2 and state.keys.shape[2] == 9


def copy_back(cost: float, steps: int = 150) -> tuple[float, float]:
    """Train a head that looks for the token of 20 steps ago, with a span of 14, to say it.

    Returns:
        The span afterwards, and the mean square error.
    """
    torch.manual_seed(0)
    config = AdaptiveSpanConfig(heads=1, max_span=64, ramp=8, first_span=14, span_weight=cost, prenorm=True)
    layer = AdaptiveSpan(4, config)
    with torch.no_grad():
        # every query is the same, and closer to that distance than to others
        layer.qkv.weight[0].fill_(1.0)
        layer.distances[20, 0] = 4.0
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.005)
    for _ in range(steps):
        x = torch.randn(4, 48, 4)
        x[..., 0] = 3.0
        loss = (layer(x).y - x)[:, 20:, 1:].sub(x[:, :-20, 1:]).square().mean()
        loss.backward()
        add_auxiliary_gradients(layer)
        optimizer.step()
        optimizer.zero_grad()
    return layer.spans().item(), loss.item()


def test_training_at_a_common_rate_moves_spans_by_tokens() -> None:
    free, error = copy_back(cost=0.0)
    # the ramp lets go of distance 20 only when the span is as long; 150 steps of 0.005 tokens would not be one token
    assert 18 < free < 24 and error < 0.5
    costly, error = copy_back(cost=0.003)
    assert costly < 1 and error > 0.9


def test_long_spans_have_a_cost() -> None:
    config = dataclasses.replace(BASE, span_weight=0.1)
    model = Classifier(BackboneConfig(mixer=config, d_model=6, num_layers=2, vocab=5), 2)
    layers = [layer for layer in model.modules() if isinstance(layer, AdaptiveSpan)]
    set_spans(layers[0], 1.0, 2.0)
    set_spans(layers[1], 4.0, 5.0)
    loss = extra_loss(model)
    assert loss is not None
    torch.testing.assert_close(loss, torch.tensor(0.1 * (1.5 + 4.5)))
    layers[0].span_ratio.grad = torch.tensor([1.0, 2.0])
    add_auxiliary_gradients(model)
    # a token of one of two heads costs 0.05, and a ratio of one is nine tokens
    torch.testing.assert_close(layers[0].span_ratio.grad, torch.tensor([1.45, 2.45]))
    torch.testing.assert_close(layers[1].span_ratio.grad, torch.full((2,), 0.45))
    assert all(p.grad is None for name, p in model.named_parameters() if not name.endswith(".span_ratio"))
    assert extra_loss(torch.nn.Linear(2, 2)) is None
    free = AdaptiveSpan(6, dataclasses.replace(BASE, span_weight=0.0))
    assert extra_loss(free) is None
    with pytest.raises(ValueError, match="span_weight must be at least 0, got -1"):
        AdaptiveSpanConfig(span_weight=-1)


def test_training_pays_for_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "toy", ToyConfig)
    spans = {}
    for weight in (0.0, 1.0):
        mixer = AdaptiveSpanConfig(heads=2, max_span=9, ramp=3, first_span=5.0, span_weight=weight)
        config = small_run(model={"mixer": mixer}, optimizer={"lr": 0.1})
        found: list[torch.Tensor] = []

        def keep(step: int, model: torch.nn.Module, found: list[torch.Tensor] = found) -> None:
            found[:] = [part.spans().detach() for part in model.modules() if isinstance(part, AdaptiveSpan)]

        train(config, tmp_path / str(weight), display=Spy(), on_step=keep)
        spans[weight] = torch.cat(found)
    assert (spans[1.0] < spans[0.0] - 0.2).all() and (spans[1.0] < 4.5).all()


def shared_stack(num_layers: int) -> Classifier:
    mixer = dataclasses.replace(BASE, shared_distances=True)
    torch.manual_seed(0)
    return Classifier(BackboneConfig(mixer=mixer, d_model=8, num_layers=num_layers, vocab=5), 2).double()


def test_layers_share_their_distances() -> None:
    model = shared_stack(3)
    tables = [name for name, _ in model.named_parameters() if name.endswith("distances")]
    assert tables == ["backbone.layers.0.distances"]
    ids = torch.randint(5, (2, 12))
    model(ids).logits.square().sum().backward()
    first: Any = model.backbone.layers[0]
    gradient = first.distances.grad.clone()
    # as many tables as layers, all of the same numbers: the gradients add up
    apart = copy.deepcopy(model)
    layers: list[Any] = list(apart.backbone.layers)
    for layer in layers[1:]:
        assert layer._owner[0] is layers[0]
        layer.distances = torch.nn.Parameter(first.distances.detach().clone())
        layer._owner.clear()
    apart.zero_grad()
    apart(ids).logits.square().sum().backward()
    summed = sum(layer.distances.grad for layer in layers)
    assert_same_numbers(gradient, summed)
    assert not torch.equal(gradient, layers[0].distances.grad)
    # weights come back, and a device or dtype is changed for all layers
    other = shared_stack(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(model.state_dict())
    assert_same_numbers(other(ids).logits, model(ids).logits)
    assert model.float()(ids).logits.dtype == torch.float32


def test_one_layer_alone_has_its_distances() -> None:
    layer = AdaptiveSpan(8, dataclasses.replace(BASE, shared_distances=True))
    assert layer(torch.randn(1, 5, 8)).y.shape == (1, 5, 8)
    assert "distances" in dict(layer.named_parameters())


def test_dropout_only_in_training() -> None:
    layer = AdaptiveSpan(8, AdaptiveSpanConfig(heads=2, max_span=9, dropout=0.5))
    x = torch.randn(2, 5, 8)
    assert not torch.equal(layer(x).y, layer(x).y)
    layer.eval()
    torch.testing.assert_close(layer(x).y, layer(x).y)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"first_span must be in 0..max_span = 8, got 9"):
        AdaptiveSpanConfig(max_span=8, first_span=9)
    with pytest.raises(ValueError, match="ramp must be an integer >= 1, got 0"):
        AdaptiveSpanConfig(ramp=0)
    with pytest.raises(ValueError, match="max_span must be an integer >= 1, got 0"):
        AdaptiveSpanConfig(max_span=0)
