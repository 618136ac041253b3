"""Adaptive spans against their equations, and at full span against full attention."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from against import around, by_head, check_against, enlarge
from seqboat import tasks
from seqboat.mixers import AdaptiveSpan, AdaptiveSpanConfig
from seqboat.mixers.base import auxiliary_loss
from seqboat.model import BackboneConfig, Classifier
from seqboat.state import state_bytes
from seqboat.train import add_auxiliary_gradients, train
from small_runs import Spy, ToyConfig, small_run

BASE = AdaptiveSpanConfig(heads=2, max_span=9, ramp=3)


def make(config: AdaptiveSpanConfig, spans: tuple[float, float]) -> AdaptiveSpan:
    torch.manual_seed(0)
    layer: AdaptiveSpan = enlarge(AdaptiveSpan(6, config))
    with torch.no_grad():
        layer.span.copy_(torch.tensor(spans))
    return layer


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
                for s in range(t + 1 if config.causal else len(x)):
                    index = t - s if config.causal else t - s + config.max_span
                    if abs(t - s) > config.max_span:
                        raised.append(torch.zeros((), dtype=x.dtype))
                        continue
                    score = qh[t] @ (kh[s] + layer.distances[index]) / math.sqrt(layer.d_head)
                    mask = ((config.ramp + layer.span[h] - abs(t - s)) / config.ramp).clamp(0, 1)
                    raised.append(mask * score.exp())
                weights = torch.stack(raised) / sum(raised)
                rows.append(weights @ vh[: len(weights)])
            heads.append(torch.stack(rows))
        return torch.cat(heads, dim=-1)

    return around(layer.block, x, attend)


@pytest.mark.parametrize("spans", [(0.2, 2.5), (9.0, 4.2)])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_equals_its_equations(causal: bool, spans: tuple[float, float]) -> None:
    layer = make(AdaptiveSpanConfig(heads=2, max_span=9, ramp=3, causal=causal), spans)
    check_against(layer, lambda x: oracle(layer, x), [37, 12, 1])


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_at_full_span_it_is_full_attention(causal: bool) -> None:
    layer = make(AdaptiveSpanConfig(heads=2, max_span=20, ramp=4, causal=causal), (20.0, 20.0))
    x = torch.randn(1, 20, 6, dtype=torch.float64)

    def attend(branch: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 3)).transpose(0, 1) for part in (branch @ layer.qkv.weight.T).chunk(3, -1)
        )
        distance = torch.arange(20)[:, None] - torch.arange(20)
        hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
        p = layer.distances[distance.clamp(min=0) if causal else distance + 20]
        scores = (q @ k.transpose(1, 2) + torch.einsum("htd,tsd->hts", q, p)) / math.sqrt(3)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    torch.testing.assert_close(layer(x).y[0], around(layer.block, x[0], attend))


def test_what_lies_beyond_all_spans_is_neither_seen_nor_remembered() -> None:
    layer = make(AdaptiveSpanConfig(heads=2, max_span=100, ramp=3, causal=True), (1.0, 0.0))
    assert layer.reach() == 3
    x = torch.randn(1, 30, 6, dtype=torch.float64)
    changed = x.clone()
    changed[:, :10] += 1
    assert layer(changed).y[:, 13:].equal(layer(x).y[:, 13:])
    assert not torch.equal(layer(changed).y[:, 12], layer(x).y[:, 12])
    small = state_bytes(layer(x).state)
    with torch.no_grad():
        layer.span.copy_(torch.tensor([7.0, 0.0]))
    state = layer(x).state
    assert layer.reach() == 9 and state_bytes(state) - 8 == 3 * (small - 8)


def test_spans_stay_in_their_range_and_keep_their_gradient() -> None:
    layer = make(AdaptiveSpanConfig(heads=2, max_span=9, ramp=3, causal=True), (-4.0, 50.0)).train()
    assert layer.spans().tolist() == [0, 9]
    x = torch.randn(2, 12, 6, dtype=torch.float64)
    # twice before the backward pass, as in models of two sequences
    (layer(x).y.sum() + layer(x + 1).y.sum()).backward()
    assert layer.span.tolist() == [0, 9]
    assert layer.span.grad is not None and layer.span.grad[0] != 0


def test_long_spans_have_a_price() -> None:
    config = dataclasses.replace(BASE, span_weight=0.1)
    model = Classifier(BackboneConfig(mixer=config, d_model=6, num_layers=2, vocab=5), 2)
    layers = [layer for layer in model.modules() if isinstance(layer, AdaptiveSpan)]
    with torch.no_grad():
        layers[0].span.copy_(torch.tensor([1.0, 2.0]))
        layers[1].span.copy_(torch.tensor([4.0, 5.0]))
    loss = auxiliary_loss(model)
    assert loss is not None
    torch.testing.assert_close(loss, torch.tensor(0.1 * (1.5 + 4.5)))
    layers[0].span.grad = torch.tensor([1.0, 2.0])
    add_auxiliary_gradients(model)
    torch.testing.assert_close(layers[0].span.grad, torch.tensor([1.05, 2.05]))
    torch.testing.assert_close(layers[1].span.grad, torch.full((2,), 0.05))
    assert all(p.grad is None for name, p in model.named_parameters() if not name.endswith(".span"))
    assert auxiliary_loss(torch.nn.Linear(2, 2)) is None
    free = AdaptiveSpan(6, dataclasses.replace(BASE, span_weight=0.0))
    assert auxiliary_loss(free) is None
    with pytest.raises(ValueError, match="span_weight must be at least 0, got -1"):
        AdaptiveSpanConfig(span_weight=-1)


def test_training_pays_for_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "toy", ToyConfig)
    spans = {}
    for weight in (0.0, 1.0):
        mixer = AdaptiveSpanConfig(heads=2, max_span=9, ramp=3, first_span=5.0, span_weight=weight)
        config = small_run(model={"mixer": mixer}, optimiser={"lr": 0.1})
        found: list[torch.Tensor] = []

        def keep(step: int, model: torch.nn.Module, found: list[torch.Tensor] = found) -> None:
            found[:] = [p.detach().clone() for name, p in model.named_parameters() if name.endswith(".span")]

        train(config, tmp_path / str(weight), display=Spy(), on_step=keep)
        spans[weight] = torch.cat(found)
    assert (spans[1.0] < spans[0.0] - 0.2).all() and (spans[1.0] < 4.5).all()


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
