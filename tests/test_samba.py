"""Samba: the order of its layers, and its window attention against attention over everything with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mixer_cases import assert_near, enliven, turned
from oracles import assert_same_with_gradients, normed, with_block
from seqboat.mixers import MIXERS
from seqboat.mixers.delta import GatedDeltaNet
from seqboat.mixers.mamba2 import Mamba2
from seqboat.mixers.samba import WindowAttention, WindowAttentionConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import LanguageModel


def oracle(layer: Any, x: Tensor) -> Tensor:
    """One sequence (time, dim) by the equations: each token with those that it sees."""
    d, width = layer.d_model, layer.d_head
    query, key, value = torch.stack([layer.qkv.weight @ normed(t, layer.block.norm.weight) for t in x]).split(
        d, 1
    )
    outputs = []
    for i, token in enumerate(x):
        first = max(0, i - layer.config.window + 1)
        places = torch.arange(first, i + 1)
        read = []
        for channels in torch.arange(d).split(width):
            keyed = turned(key[first : i + 1, channels], places)
            scores = keyed @ turned(query[i, channels], torch.tensor(i)) / width**0.5
            weights = torch.exp(scores) / torch.exp(scores).sum()
            read.append(weights @ value[first : i + 1, channels])
        outputs.append(with_block(layer, token + layer.block.out.weight @ torch.cat(read)))
    return torch.stack(outputs)


@pytest.mark.parametrize(("window", "ffn"), [(1, True), (3, False), (4, True), (50, False)])
def test_window_attention_equals_its_equations(window: int, ffn: bool) -> None:
    torch.manual_seed(0)
    layer: Any = enliven(WindowAttentionConfig(heads=2, window=window, ffn=ffn, d_ff=3).build(8))
    x = torch.randn(2, 11, 8, dtype=torch.float64, requires_grad=True)
    y = layer(x).y
    expected = torch.stack([oracle(layer, row) for row in x])
    if window == 1:  # the weight of the only key is 1, whatever queries and keys are
        assert_near(y, expected, 1e-9)
        return
    assert_same_with_gradients(layer, x, [y, expected])


def test_the_state_has_a_constant_size() -> None:
    layer = WindowAttentionConfig(heads=2, window=5).build(8)
    state = layer(torch.randn(3, 40, 8)).state
    assert state.keys.shape == layer.init_state(3).keys.shape == (3, 2, 4, 4)
    assert state.total.tolist() == [40] * 3


@pytest.mark.parametrize(("name", "kind"), [("samba", Mamba2), ("samba-gdn", GatedDeltaNet)])
def test_layers_alternate(name: str, kind: type) -> None:
    mixer = MIXERS[name](window=7, heads=2, d_ff=9, dropout=0.25)
    with torch.device("meta"):
        layers = LanguageModel(BackboneConfig(mixer=mixer, d_model=8, num_layers=5, vocab=7)).backbone.layers
    assert [type(layer) for layer in layers] == [kind, WindowAttention, kind, WindowAttention, kind]
    attention: Any = layers[1]
    every: list[Any] = list(layers)
    assert attention.config == WindowAttentionConfig(window=7, heads=2, d_ff=9, dropout=0.25)
    assert all(layer.block.ffn.out.in_features == 9 for layer in every)
    assert isinstance(mixer.build(8), kind)


def test_bad_settings_are_named() -> None:
    for name in ("samba", "samba-gdn"):
        with pytest.raises(ValueError, match="window must be"):
            MIXERS[name](window=0)
    with pytest.raises(ValueError, match="d_model must be a multiple of heads = 3, got 8"):
        WindowAttention(8, WindowAttentionConfig(heads=3))
    with pytest.raises(ValueError, match="d_model / heads must be even with rotary positions, got 1"):
        WindowAttention(4, WindowAttentionConfig(heads=4))
