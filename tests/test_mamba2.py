"""Mamba-2 against its equations by loops, and against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mixer_cases import enliven
from oracles import assert_same_with_gradients, convolved, in_double, normed, silu, with_block
from seqboat.core.nn import EPS
from seqboat.mixers import MIXERS
from seqboat.mixers.mamba2 import Mamba2, Mamba2Config
from seqboat.ops.matrix_state import decays_between, gated_sum, gated_sum_step

SMALL = Mamba2Config(d_state=3, d_head=4, block=4)


def made(config: Mamba2Config = SMALL, d_model: int = 6) -> Any:
    torch.manual_seed(0)
    return enliven(config.build(d_model))


def oracle(layer: Any, x: Tensor) -> Tensor:
    """One sequence (time, dim) by the equations, token by token."""
    heads, width, states = layer.heads, layer.d_head, layer.d_state
    memory = [x.new_zeros(width, states) for _ in range(heads)]
    inputs, outputs = [], []
    for token in x:
        parts = layer.project.weight @ normed(token, layer.block.norm.weight)
        gate, u, rate = parts.split(list(layer.sizes))
        inputs.append(u)
        values, b, c = silu(convolved(layer, inputs) + layer.conv_bias).split([layer.d_inner, states, states])
        read = []
        for h, value in enumerate(values.split(width)):
            dt = torch.log(1 + torch.exp(rate[h] + layer.step_bias[h]))
            decay = torch.exp(-dt * torch.exp(layer.log_rate[h]))
            memory[h] = decay * memory[h] + dt * torch.outer(value, b)
            read.append(memory[h] @ c + layer.skip[h] * value)
        y = normed(torch.cat(read) * silu(gate), layer.gated_norm.weight)
        outputs.append(with_block(layer, token + layer.block.out.weight @ y))
    return torch.stack(outputs)


@pytest.mark.parametrize(
    "config", [SMALL, Mamba2Config(d_state=2, d_head=3, conv=1, ffn=True, d_ff=5)], ids=str
)
def test_equals_its_equations(config: Mamba2Config) -> None:
    layer = made(config)
    x = torch.randn(2, 11, 6, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(layer, x, [layer(x).y, torch.stack([oracle(layer, row) for row in x])])


@pytest.mark.parametrize(("d_model", "time"), [(6, 11), (10, 37)])
def test_equals_transformers(d_model: int, time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the comparison needs transformers")
    from transformers import Mamba2Config as TheirConfig
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    layer = made(d_model=d_model)
    theirs: Any = Mamba2Mixer(
        TheirConfig(
            hidden_size=d_model,
            num_heads=layer.heads,
            head_dim=layer.d_head,
            state_size=layer.d_state,
            n_groups=1,
            expand=2,
            conv_kernel=4,
            chunk_size=8,
            layer_norm_epsilon=EPS,
            num_hidden_layers=1,
        ),
        layer_idx=0,
    ).double()
    weights = {
        "in_proj.weight": layer.project.weight,
        "conv1d.weight": layer.conv_weight.t()[:, None],
        "conv1d.bias": layer.conv_bias,
        "dt_bias": layer.step_bias,
        "A_log": layer.log_rate,
        "D": layer.skip,
        "norm.weight": layer.gated_norm.weight,
        "out_proj.weight": layer.block.out.weight,
    }
    assert weights.keys() == dict(theirs.named_parameters()).keys()
    x = torch.randn(2, time, d_model, dtype=torch.float64, requires_grad=True)
    with in_double(monkeypatch):
        expected = x + torch.func.functional_call(theirs, weights, (layer.block.norm(x),))
        assert expected.dtype == torch.float64
        assert_same_with_gradients(layer, x, [layer(x).y, expected])


def test_blocks_are_tokens_in_turn() -> None:
    """Any size of a block, with a state before and one after, gives what single tokens give."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 13, 3, dtype=torch.float64)
    value = torch.randn(2, 13, 2, 4, dtype=torch.float64)
    log_decay = -torch.rand(2, 13, 2, dtype=torch.float64)
    start = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    outputs, state = [], start
    for t in range(13):
        y, state = gated_sum_step(query[:, t], key[:, t], value[:, t], log_decay[:, t], state)
        outputs.append(y)
    for size in (1, 2, 5, 13, 32):
        y, after = gated_sum(query, key, value, log_decay, start, size)
        torch.testing.assert_close(y, torch.stack(outputs, dim=1))
        torch.testing.assert_close(after, state)


def test_strong_decays_lose_no_digits() -> None:
    """Sums of logarithms of thousands, and one pair of tokens with hardly any decay between them."""
    log_decay = torch.full((64,), -1000.0)
    log_decay[40] = -1e-3
    found = decays_between(log_decay)
    assert found[40, 39].item() == pytest.approx(0.9990005, rel=1e-7)
    assert (
        found.diagonal().eq(1).all()
        and found.isfinite().all()
        and found.sum() == pytest.approx(64.999, rel=1e-4)
    )


def test_defaults_are_those_of_the_paper() -> None:
    config = MIXERS["mamba2"]()
    assert config == Mamba2Config(d_state=128, expand=2, conv=4, ffn=False, norm="rms")
    assert [config.build(width).d_head for width in (32, 96, 50)] == [64, 64, 50]
    layer = config.build(128)
    step = torch.nn.functional.softplus(layer.step_bias)
    assert layer.heads == 4 and step.min() > 1e-3 and step.max() < 0.1001
    assert layer.log_rate.exp().min() >= 1 and layer.log_rate.exp().max() <= 16.001


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"expand \* d_model must be a multiple of d_head = 5, got 16"):
        Mamba2(8, Mamba2Config(d_head=5))
    with pytest.raises(ValueError, match="Mamba2 has no bidirectional form, it is causal: its state"):
        Mamba2Config(causal=False)
    with pytest.raises(ValueError, match="conv must be"):
        Mamba2Config(conv=0)
