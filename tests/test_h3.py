"""H3 against its equations by loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mixer_cases import enliven
from seqboat.mixers import MIXERS
from seqboat.mixers.h3 import H3, H3Config, H3HybridConfig
from seqboat.mixers.transformer import Transformer
from seqboat.models.backbone import BackboneConfig
from seqboat.models.heads import LanguageModel
from seqboat.ssm.diagonal import as_complex
from seqboat.ssm.s4d import S4DConfig

BASE = H3Config(shift=4, ssm=S4DConfig(d_state=4, block=8, init="lin"), d_ff=5)
HYBRID = H3HybridConfig(shift=4, ssm=S4DConfig(d_state=4, block=8, init="lin"), d_ff=5)
CONFIGS = {
    "causal": BASE,
    "heads": replace(BASE, d_head=3),
    "bidirectional": replace(BASE, causal=False, d_head=2, norm="rms"),
}


def shifted(layer: H3, key: Tensor) -> Tensor:
    """The shift matrix at work: (time, dim) token by token."""
    total = layer.shift.skip * key
    for direction in range(layer.shift.directions):
        taps = layer.shift.taps[direction]
        states, outputs = torch.zeros_like(taps), []
        for token in key if direction == 0 else key.flip(0):
            states = torch.cat([token[:, None], states[:, :-1]], dim=1)
            outputs.append((taps * states).sum(dim=1))
        one = torch.stack(outputs)
        total = total + (one if direction == 0 else one.flip(0))
    return total


def remembered(layer: H3, signal: Tensor, head: int) -> Tensor:
    """The diagonal layer of one head on (time,) token by token."""
    core = layer.ssm
    total = core.skip[head] * signal
    for direction in range(core.directions):
        poles = torch.complex(-core.log_real[direction, head].exp(), core.imag[direction, head])
        decay = torch.exp(core.log_dt[direction, head].exp() * poles)
        read = as_complex(core.c[direction, head])
        state, outputs = torch.zeros_like(poles), []
        for value in signal if direction == 0 else signal.flip(0):
            state = decay * state + (decay - 1) / poles * value
            outputs.append(2 * (read * state).sum().real)
        one = torch.stack(outputs)
        total = total + (one if direction == 0 else one.flip(0))
    return total


def oracle(layer: H3, x: Tensor) -> Tensor:
    """One sequence (time, dim) by the equations."""
    d, width = layer.d_model, layer.d_head
    query, key, value = (layer.norm(x) @ layer.qkv.weight.T + layer.qkv.bias).split(d, dim=1)
    key = shifted(layer, key)
    channels = []
    for channel in range(d):
        head = channel // width
        read = torch.zeros_like(x[:, 0])
        for i in range(head * width, (head + 1) * width):
            read = read + query[:, i] * remembered(layer, key[:, i] * value[:, channel], head)
        channels.append(read)
    y = x + torch.stack(channels, dim=1) @ layer.out.weight.T + layer.out.bias
    hidden = layer.ffn_norm(y) @ layer.ffn.hidden.weight.T + layer.ffn.hidden.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    return y + hidden @ layer.ffn.out.weight.T + layer.ffn.out.bias


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_its_equations(name: str) -> None:
    torch.manual_seed(0)
    layer = enliven(CONFIGS[name].build(6))
    x = torch.randn(2, 11, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    parameters = {"x": x, **dict(layer.named_parameters())}
    results = []
    for y in (layer(x).y, torch.stack([oracle(layer, row) for row in x])):
        grads = torch.autograd.grad((y * weight).sum(), list(parameters.values()))
        results.append((y, dict(zip(parameters, grads, strict=True))))
    torch.testing.assert_close(results[0][0], results[1][0])
    for key, grad in results[1][1].items():
        torch.testing.assert_close(results[0][1][key], grad, msg=key)


def test_defaults_are_those_of_the_paper() -> None:
    config = MIXERS["h3"]()
    assert config == H3Config(shift=64, ssm=S4DConfig(d_state=64, init="lin"), d_head=1, causal=True)
    assert config.build(8).ffn.hidden.out_features == 32


@pytest.mark.parametrize(("layers", "attention"), [(1, []), (2, [1]), (3, [1, 2]), (12, [1, 7])])
def test_places_of_attention_in_the_hybrid(layers: int, attention: list[int]) -> None:
    config = BackboneConfig(mixer=HYBRID, d_model=8, num_layers=layers, vocab=7)
    with torch.device("meta"):
        found = LanguageModel(config).backbone.layers
    assert [i for i, layer in enumerate(found) if isinstance(layer, Transformer)] == attention
    assert sum(isinstance(layer, H3) for layer in found) == layers - len(attention)


@torch.no_grad()
def test_the_hybrid_reads_whole_in_pieces_and_token_by_token() -> None:
    torch.manual_seed(0)
    model = enliven(LanguageModel(BackboneConfig(mixer=HYBRID, d_model=8, num_layers=4, vocab=7)))
    tokens = torch.randint(0, 7, (2, 19))
    whole = model(tokens)
    first = model(tokens[:, :6])
    second = model(tokens[:, 6:], None, first.state)
    torch.testing.assert_close(torch.cat([first[0], second[0]], dim=1), whole[0])
    state, outputs = model.init_state(2), []
    for t in range(19):
        out = model.step(tokens[:, t], state)
        outputs.append(out[0])
        state = out.state
    torch.testing.assert_close(torch.stack(outputs, dim=1), whole[0])


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="d_model must be a multiple of d_head = 3, got 8"):
        H3(8, H3Config(d_head=3))
    with pytest.raises(ValueError, match=r"ssm.truncation of H3 must be None, got 5"):
        H3(8, H3Config(ssm=S4DConfig(truncation=5)))
