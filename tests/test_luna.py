"""Luna against its equations by loops: one layer, and a stack with its second stream."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from against import around, by_head, check_against, enlarge
from seqboat.mixers import Luna, LunaConfig
from seqboat.models.backbone import Backbone, BackboneConfig

HEADS = 2


def make(config: LunaConfig) -> Luna:
    torch.manual_seed(0)
    layer: Luna = enlarge(Luna(6, config))
    return layer


def attention(query: Tensor, given: Tensor, width: int = 6) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V of (queries, dim) and (keys, dim) or (keys, 2 dim), token by token."""
    parts = given.split(width, dim=-1)
    heads = []
    for q, k, v in zip(*(by_head(p, HEADS) for p in (query, parts[0], parts[-1])), strict=True):
        rows = []
        for token in q:
            weights = torch.stack([(token @ other / math.sqrt(q.shape[1])).exp() for other in k])
            rows.append(weights / weights.sum() @ v)
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1)


def apply(linear: torch.nn.Linear, x: Tensor) -> Tensor:
    return x @ linear.weight.T + linear.bias


def streams(layer: Luna, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """One layer on a sequence (time, dim) and its second stream (length, dim)."""
    norm = layer.second_norm

    def pack(branch: Tensor) -> Tensor:
        by = norm(p) if layer.config.prenorm and norm is not None else p
        return attention(apply(layer.pack_query, by), apply(layer.pack, branch))

    y = around(layer.block, x, lambda b: attention(apply(layer.query, b), apply(layer.unpack, pack(b))))
    after = p + pack(layer.block.norm(x) if layer.config.prenorm else x)
    return y, after if layer.config.prenorm or norm is None else norm(after)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prenorm", [False, True])
def test_a_layer_equals_its_equations(tied: bool, prenorm: bool) -> None:
    layer = make(LunaConfig(heads=HEADS, length=3, tied=tied, prenorm=prenorm))
    assert layer.second is not None
    second = layer.second
    check_against(layer, lambda x: streams(layer, x, second)[0], [8, 3, 1])


@pytest.mark.parametrize("prenorm", [False, True])
def test_the_second_stream_runs_through_a_stack(prenorm: bool) -> None:
    torch.manual_seed(0)
    mixer = LunaConfig(heads=HEADS, length=3, prenorm=prenorm)
    config = BackboneConfig(mixer=mixer, d_model=6, num_layers=3, vocab=None, absolute_positions=False)
    model: Backbone = enlarge(Backbone(config))
    assert [name for name, _ in model.named_parameters() if name.endswith("second")] == []
    inputs = torch.randn(2, 7, 1, dtype=torch.float64)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    y = model(inputs, mask).y
    assert model.lead is not None
    for row, count in enumerate((7, 4)):
        assert isinstance(model.embedding, torch.nn.Linear)
        x, p = apply(model.embedding, inputs[row, :count]), model.lead.clone()
        for layer in model.layers:
            assert isinstance(layer, Luna)
            x, p = streams(layer, x, p)
        x = model.norm(x) if model.norm is not None else x
        torch.testing.assert_close(y[row, :count], x)
    y.square().sum().backward()
    # all but the last norm of the stream, which nothing follows, have something to learn
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        last = name.startswith("layers.2.second_norm") and not prenorm
        assert bool(parameter.grad.any()) != last, name


def test_dropout_only_in_training() -> None:
    layer = Luna(8, LunaConfig(heads=2, length=3, dropout=0.5))
    x = torch.randn(2, 5, 8)
    assert not torch.equal(layer(x).y, layer(x).y)
    layer.eval()
    torch.testing.assert_close(layer(x).y, layer(x).y)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="length must be an integer >= 1, got 0"):
        LunaConfig(length=0)
    with pytest.raises(ValueError, match="Luna has no causal form, it is bidirectional"):
        LunaConfig(causal=True)
