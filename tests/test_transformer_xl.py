"""Transformer-XL against its equations and against full attention over the concatenation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from against import around, by_head, check_against, enlarge
from seqboat.core.nn import sinusoids
from seqboat.core.state import state_bytes
from seqboat.mixers import TransformerXL, TransformerXLConfig

CONFIGS = {
    "memory": TransformerXLConfig(heads=2, segment=3, memory=4),
    "pre": TransformerXLConfig(heads=1, segment=4, memory=2, prenorm=True),
    "no-memory": TransformerXLConfig(heads=2, segment=3, memory=0),
    "single": TransformerXLConfig(heads=2, segment=1, memory=0),
    "long": TransformerXLConfig(heads=2, segment=20, memory=20),
}


def make(config: TransformerXLConfig, d_model: int = 6) -> TransformerXL:
    torch.manual_seed(0)
    layer: TransformerXL = enlarge(TransformerXL(d_model, config))
    return layer


def oracle(layer: TransformerXL, x: Tensor, begin_of: list[int]) -> Tensor:
    """One sequence (time, dim), query by query; token t sees the tokens from begin_of[t] to t."""

    def attend(branch: Tensor) -> Tensor:
        q, k, v = (branch @ layer.qkv.weight.T).chunk(3, dim=-1)
        r = sinusoids(torch.arange(max(len(x), 1)), layer.d_model) @ layer.relative.weight.T
        heads = []
        parts = [by_head(part, layer.heads) for part in (q, k, v, r)]
        for h, (qh, kh, vh, rh) in enumerate(zip(*parts, strict=True)):
            rows = []
            for t, begin in enumerate(begin_of):
                scores = torch.stack(
                    [
                        (qh[t] + layer.content_bias[h]) @ kh[s] + (qh[t] + layer.position_bias[h]) @ rh[t - s]
                        for s in range(begin, t + 1)
                    ]
                )
                rows.append(torch.softmax(scores / math.sqrt(layer.d_head), dim=0) @ vh[begin : t + 1])
            heads.append(torch.stack(rows))
        return torch.cat(heads, dim=-1)

    return around(layer.block, x, attend)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_its_equations(name: str) -> None:
    layer = make(CONFIGS[name])
    segment, memory = layer.config.segment, layer.config.memory

    def with_segments(x: Tensor) -> Tensor:
        return oracle(layer, x, [max(t // segment * segment - memory, 0) for t in range(len(x))])

    check_against(layer, with_segments, [11, 5, 1])


def test_with_enough_memory_it_is_full_attention_over_the_concatenation() -> None:
    layer = make(TransformerXLConfig(heads=2, segment=4, memory=16))
    x = torch.randn(1, 15, 6, dtype=torch.float64)
    full = oracle(layer, x[0], [0] * 15)
    outputs, state = [], None
    for piece in x.split([4, 4, 4, 3], dim=1):
        y, state, _ = layer(piece, None, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1)[0], full)


def test_memory_passes_gradients_inside_a_call_and_none_from_a_detached_state() -> None:
    layer = make(CONFIGS["memory"])
    x = torch.randn(1, 6, 6, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).y[:, 3:].sum(), x)
    assert grad[:, :3].any()
    state = layer(x[:, :3]).state
    y = layer(x[:, 3:], None, type(state)(*(part.detach() for part in state))).y
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert not grad[:, :3].any()


@torch.no_grad()
def test_state_is_constant() -> None:
    layer = make(CONFIGS["memory"])
    state = layer.init_state(2)
    size = state_bytes(state)
    for _ in range(12):
        state = layer.step(torch.randn(2, 6, dtype=torch.float64), state).state
        assert state_bytes(state) == size


def test_dropout_only_in_training() -> None:
    layer = TransformerXL(8, TransformerXLConfig(heads=2, dropout=0.5))
    x = torch.randn(2, 5, 8)
    assert not torch.equal(layer(x).y, layer(x).y)
    layer.eval()
    torch.testing.assert_close(layer(x).y, layer(x).y)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="TransformerXL has no bidirectional form, it is causal: its memory"):
        TransformerXLConfig(causal=False)
    with pytest.raises(ValueError, match="memory must be an integer >= 0, got -1"):
        TransformerXLConfig(memory=-1)
    with pytest.raises(ValueError, match="segment must be an integer >= 1, got 0"):
        TransformerXLConfig(segment=0)
    with pytest.raises(ValueError, match="multiple of heads = 8, got 12"):
        TransformerXL(12)


@pytest.mark.filterwarnings("ignore")
def test_agrees_with_x_transformers_where_the_equations_meet() -> None:
    """Without the terms of positions, memory is plain attention to cached keys: so it is in x-transformers."""
    peer = pytest.importorskip("x_transformers")
    torch.manual_seed(0)
    heads, d_model, memory = 2, 8, 5
    layer = make(TransformerXLConfig(heads=heads, segment=5, memory=memory), d_model)
    with torch.no_grad():
        for parameter in (layer.content_bias, layer.position_bias, layer.relative.weight):
            parameter.zero_()
    attention = peer.Attention(dim=d_model, heads=heads, dim_head=d_model // heads, causal=True, flash=False)
    attention = attention.double()
    with torch.no_grad():
        parts = (attention.to_q, attention.to_k, attention.to_v)
        for part, weight in zip(parts, layer.qkv.weight.chunk(3), strict=True):
            part.weight.copy_(weight)
        attention.to_out.weight.copy_(layer.block.out.weight)
        layer.block.out.bias.zero_()
    x = torch.randn(2, 10, d_model, dtype=torch.float64)
    theirs = attention(x[:, memory:], mem=x[:, :memory])
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    block = layer.block
    y = block.norm(x[:, memory:] + theirs)
    hidden = F.relu(y @ block.ffn.hidden.weight.T + block.ffn.hidden.bias)
    y = block.ffn_norm(y + hidden @ block.ffn.out.weight.T + block.ffn.out.bias)
    # their softmax is in float32
    torch.testing.assert_close(layer(x).y[:, memory:], y, rtol=2e-6, atol=2e-6)
