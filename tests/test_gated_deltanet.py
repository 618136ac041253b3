"""Gated DeltaNet against its equations by loops, and against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mixer_cases import assert_near, enliven
from oracles import assert_same_with_gradients, convolved, in_double, normed, silu, with_block
from seqboat.core.nn import EPS
from seqboat.mixers import MIXERS
from seqboat.mixers.delta import GatedDeltaNet, GatedDeltaNetConfig
from seqboat.ops.matrix_state import gated_delta, gated_delta_step

SMALL = GatedDeltaNetConfig(heads=2, d_key=3, block=4, ffn=False)
REASON = "the comparison needs transformers"


def made(config: GatedDeltaNetConfig = SMALL, d_model: int = 6) -> Any:
    torch.manual_seed(0)
    return enliven(config.build(d_model))


def oracle(layer: Any, x: Tensor) -> Tensor:
    """One sequence (time, dim) by the equations, token by token."""
    heads, d_key, d_value = layer.heads, layer.d_key, layer.d_value
    memory = [x.new_zeros(d_key, d_value) for _ in range(heads)]
    inputs, outputs = [], []
    for token in x:
        parts = layer.project.weight @ normed(token, layer.block.norm.weight)
        gate, u, rates = parts.split(list(layer.sizes))
        inputs.append(u)
        u = silu(convolved(layer, inputs))
        queries, keys, values = u.split([heads * d_key, heads * d_key, heads * d_value])
        read = []
        for h in range(heads):
            query, key = (part.split(d_key)[h] for part in (queries, keys))
            query, key = (part / (part.square().sum() + 1e-6).sqrt() for part in (query, key))
            replaced = 1 / (1 + torch.exp(-rates[h]))
            step = torch.log(1 + torch.exp(rates[heads + h] + layer.step_bias[h]))
            kept = torch.exp(-step * torch.exp(layer.log_rate[h])) * memory[h]
            correction = values.split(d_value)[h] - key @ kept
            memory[h] = kept + replaced * torch.outer(key, correction)
            y = normed(query @ memory[h] / d_key**0.5, layer.gated_norm.weight)
            read.append(y * silu(gate.split(d_value)[h]))
        outputs.append(with_block(layer, token + layer.block.out.weight @ torch.cat(read)))
    return torch.stack(outputs)


@pytest.mark.parametrize("config", [SMALL, GatedDeltaNetConfig(heads=3, conv=2, expand=1, d_ff=5)], ids=str)
def test_equals_its_equations(config: GatedDeltaNetConfig) -> None:
    layer = made(config)
    x = torch.randn(2, 11, 6, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(layer, x, [layer(x).y, torch.stack([oracle(layer, row) for row in x])])


def tokens(time: int) -> tuple[list[Tensor], Tensor]:
    """Queries, keys of unit length, values, logarithms of decays and rates; and a state before them."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 3, time, 4, dtype=torch.float64)
    value = torch.randn(2, 3, time, 5, dtype=torch.float64)
    log_decay, rate = (
        -torch.rand(2, 3, time, dtype=torch.float64),
        torch.rand(2, 3, time, dtype=torch.float64),
    )
    parts = [query, torch.nn.functional.normalize(key, dim=-1), value, log_decay, rate]
    return parts, torch.randn(2, 3, 4, 5, dtype=torch.float64)


def test_blocks_are_tokens_in_turn() -> None:
    """Any size of a block, with a state before and one after, gives what single tokens give."""
    parts, start = tokens(13)
    outputs, state = [], start
    for t in range(13):
        query, key, value, log_decay, rate = (part[:, :, t] for part in parts)
        y, state = gated_delta_step(query, key, value, log_decay, rate, state)
        outputs.append(y)
    for size in (1, 2, 5, 13, 32):
        query, key, value, log_decay, rate = parts
        y, after = gated_delta(query, key, value, log_decay, rate, start, size)
        assert_near(y, torch.stack(outputs, dim=2), 1e-12)
        assert_near(after, state, 1e-12)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_the_rule_equals_that_of_transformers(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason=REASON)
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    rule: Any = getattr(theirs, f"torch_{form}_gated_delta_rule")
    parts, start = tokens(21)
    for part in (*parts, start):
        part.requires_grad_()
    query, key, value, log_decay, rate = parts
    ours = gated_delta(query * query.shape[-1] ** -0.5, key, value, log_decay, rate, start, 8)
    swapped = [part.transpose(1, 2) for part in parts]
    with in_double(monkeypatch):
        y, state = rule(
            *swapped[:3], g=swapped[3], beta=swapped[4], initial_state=start, output_final_state=True
        )
        grads = [
            torch.autograd.grad(a.sin().sum() + b.cos().sum(), [*parts, start])
            for a, b in (ours, (y.transpose(1, 2), state))
        ]
    assert y.dtype == torch.float64
    assert_near(ours[0], y.transpose(1, 2), 1e-9)
    assert_near(ours[1], state, 1e-9)
    for name, one, two in zip(("query", "key", "value", "decay", "rate", "start"), *grads, strict=True):
        assert_near(one, two, 1e-9, name)


def test_the_layer_equals_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason=REASON)
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    layer = made()
    heads, d_key, d_value = layer.heads, layer.d_key, layer.d_value
    theirs: Any = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=6,
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            linear_key_head_dim=d_key,
            linear_value_head_dim=d_value,
            linear_conv_kernel_dim=4,
            rms_norm_eps=EPS,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        ),
        layer_idx=0,
    ).double()
    gate, u, rates = layer.project.weight.split(list(layer.sizes))
    query, key, value = u.split([heads * d_key, heads * d_key, heads * d_value])
    # theirs interleaves the parts head by head
    mixed = torch.cat([part.unflatten(0, (heads, -1)) for part in (query, key, value, gate)], dim=1).flatten(
        0, 1
    )
    weights = {
        "in_proj_qkvz.weight": mixed,
        "in_proj_ba.weight": rates.unflatten(0, (2, heads)).transpose(0, 1).flatten(0, 1),
        "conv1d.weight": layer.conv_weight.t()[:, None],
        "dt_bias": layer.step_bias,
        "A_log": layer.log_rate,
        "norm.weight": layer.gated_norm.weight,
        "out_proj.weight": layer.block.out.weight,
    }
    assert weights.keys() == dict(theirs.named_parameters()).keys()
    x = torch.randn(2, 19, 6, dtype=torch.float64, requires_grad=True)
    with in_double(monkeypatch):
        expected = x + torch.func.functional_call(theirs, weights, (layer.block.norm(x),))
        assert expected.dtype == torch.float64
        assert_same_with_gradients(layer, x, [layer(x).y, expected])


def test_a_value_is_replaced() -> None:
    """Without decay and at full rate, the last value under a key is what a query with it finds."""
    key = torch.eye(3)[[0, 1, 0]][None, None]
    value = torch.tensor([[1.0], [2.0], [5.0]])[None, None]
    zeros = torch.zeros(1, 1, 3)
    y, state = gated_delta(key, key, value, zeros, zeros + 1, None, 8)
    assert y.flatten().tolist() == [1.0, 2.0, 5.0]
    assert state.flatten().tolist() == [5.0, 2.0, 0.0]


def test_defaults_are_those_of_the_paper() -> None:
    config = MIXERS["gated-deltanet"]()
    assert config == GatedDeltaNetConfig(heads=4, expand=2, conv=4, ffn=True, norm="rms")
    layer = config.build(64)
    assert (layer.d_key * 4, layer.d_inner) == (48, 96)  # 3/4 and 3/2 of the width
    assert layer.block.ffn.hidden.out_features == 2 * 170


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="GatedDeltaNet has no bidirectional form, it is causal: its state"):
        GatedDeltaNetConfig(causal=False)
    with pytest.raises(ValueError, match="heads must be"):
        GatedDeltaNetConfig(heads=0)
    with pytest.raises(ValueError, match="d_key must be"):
        GatedDeltaNet(8, GatedDeltaNetConfig(d_key=0))
