"""The Transformer layer against its equations, and against itself in pieces."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mixer_cases import turned
from seqboat.core.state import state_bytes
from seqboat.mixers import Transformer, TransformerConfig
from seqboat.mixers.transformer import TransformerPositions
from seqboat.models.backbone import Backbone, BackboneConfig

CONFIGS = {
    "post": TransformerConfig(heads=2),
    "pre": TransformerConfig(heads=3, prenorm=True, norm="rms", activation="gelu"),
    "rotary": TransformerConfig(heads=2, positions="rotary", d_ff=7),
    "relative": TransformerConfig(heads=2, positions="relative", max_positions=6),
    "causal": TransformerConfig(heads=2, causal=True),
    "causal-relative": TransformerConfig(heads=2, causal=True, positions="relative", max_positions=6),
    "causal-rotary": TransformerConfig(heads=3, causal=True, positions="rotary", prenorm=True),
}
CAUSAL = [name for name in CONFIGS if name.startswith("causal")]


def make(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    """A layer with weights large enough that every part of it shows."""
    torch.manual_seed(1)
    layer = Transformer(12, CONFIGS[name]).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    return layer


def oracle(layer: Transformer, x: Tensor) -> Tensor:
    """One sequence (time, dim), head by head and query by query."""
    config, time = layer.config, len(x)
    branch = layer.norm(x) if config.prenorm else x
    q, k, v = F.linear(branch, layer.qkv.weight, layer.qkv.bias).split(layer.d_model, dim=-1)
    outputs = []
    for t in range(time):
        heads = []
        for h in range(config.heads):
            own = slice(h * layer.d_head, (h + 1) * layer.d_head)
            keys = range(t + 1 if config.causal else time)
            scores = []
            for s in keys:
                one, other = q[t, own], k[s, own]
                if config.positions == "rotary":
                    one, other = turned(one, torch.tensor(t)), turned(other, torch.tensor(s))
                score = one @ other / math.sqrt(layer.d_head)
                if config.positions == "relative":
                    reach = config.max_positions - 1
                    score = score + layer.bias[h, max(-reach, min(reach, s - t)) + reach]
                scores.append(score)
            weights = torch.stack(scores).exp()
            heads.append(sum(w * v[s, own] for w, s in zip(weights / weights.sum(), keys, strict=True)))
        outputs.append(torch.cat(heads))
    attended = torch.stack(outputs) @ layer.out.weight.T + layer.out.bias

    def ffn(y: Tensor) -> Tensor:
        hidden = y @ layer.ffn.hidden.weight.T + layer.ffn.hidden.bias
        hidden = F.relu(hidden) if config.activation == "relu" else F.gelu(hidden)
        return hidden @ layer.ffn.out.weight.T + layer.ffn.out.bias

    if config.prenorm:
        y = x + attended
        return y + ffn(layer.ffn_norm(y))
    y = layer.norm(x + attended)
    return layer.ffn_norm(y + ffn(y))


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_its_equations(name: str) -> None:
    layer = make(name)
    lengths = [9, 4, 1]
    x = torch.randn(3, 9, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    parameters = {"x": x, **dict(layer.named_parameters())}
    weights = torch.randn(3, 9, 12, dtype=torch.float64) * mask[..., None]
    results = []
    for whole in (True, False):
        if whole:
            y = layer(x, mask).y
        else:
            rows = [oracle(layer, x[i, :n]) for i, n in enumerate(lengths)]
            y = torch.stack([F.pad(row, (0, 0, 0, 9 - len(row))) for row in rows])
        grads = torch.autograd.grad((y * weights).sum(), list(parameters.values()))
        results.append((y, dict(zip(parameters, grads, strict=True))))
    torch.testing.assert_close(results[0][0], results[1][0])
    for key, grad in results[1][1].items():
        torch.testing.assert_close(results[0][1][key], grad, msg=key)


@pytest.mark.parametrize("name", CAUSAL)
def test_whole_is_pieces_is_steps(name: str) -> None:
    layer = make(name)
    x = torch.randn(3, 11, 12, dtype=torch.float64)
    mask = torch.rand(3, 11) < 0.7
    mask[2] = False
    whole = layer(x, mask)
    for pieces in ([3, 1, 0, 7], [11]):
        state, outputs, begin = layer.init_state(3), [], 0
        for size in pieces:
            piece = slice(begin, begin + size)
            y, state, _ = layer(x[:, piece], mask[:, piece], state)
            outputs.append(y)
            begin += size
        torch.testing.assert_close(torch.cat(outputs, dim=1), whole.y)
        torch.testing.assert_close(state, whole.state)
    whole, state = layer(x), layer.init_state(3)
    for t in range(11):
        torch.testing.assert_close(layer.step(x[:, t], state).y, whole.y[:, t])


def test_step_alone_grows_without_copies() -> None:
    layer = make("causal", torch.float32)
    state = layer.init_state(1)
    x = torch.randn(1, 40, 12)
    pointers = set()
    outputs = []
    for t in range(40):
        y, state, _ = layer.step(x[:, t], state)
        pointers.add(state.keys.data_ptr())
        outputs.append(y)
    assert len(pointers) <= 4
    assert state_bytes(state) >= 2 * 40 * 12 * 4
    torch.testing.assert_close(torch.stack(outputs, dim=1), layer(x).y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("time", [0, 1])
@pytest.mark.parametrize("name", ["post", "causal-rotary", "causal-relative"])
def test_short_sequences(name: str, time: int) -> None:
    layer = make(name)
    x = torch.randn(2, time, 12, dtype=torch.float64)
    y = layer(x).y
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_dropout_only_in_training() -> None:
    layer = Transformer(8, TransformerConfig(heads=2, dropout=0.5))
    x = torch.randn(2, 5, 8)
    assert not torch.equal(layer(x).y, layer(x).y)
    layer.eval()
    torch.testing.assert_close(layer(x).y, layer(x).y)


def test_autocast_keeps_the_type_of_the_state() -> None:
    layer = make("causal-rotary", torch.float32)
    x = torch.randn(2, 6, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        again = layer(x, None, out.state)
    assert out.state.keys.dtype == again.state.keys.dtype == torch.float32
    assert again.y.isfinite().all()


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="multiple of heads = 8, got 10"):
        Transformer(10)
    with pytest.raises(
        ValueError, match="positions must be one of absolute, rotary, relative, none; got 'learned'"
    ):
        TransformerConfig(positions="learned")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be even"):
        Transformer(6, TransformerConfig(heads=2, positions="rotary"))
    with pytest.raises(ValueError, match="bidirectional"):
        Transformer(8).init_state(1)


@pytest.mark.parametrize("positions", ["absolute", "rotary", "relative", "none"])
def test_models_add_positions_where_the_layer_leaves_them_to_the_inputs(
    positions: TransformerPositions,
) -> None:
    mixer = TransformerConfig(heads=2, positions=positions)
    config = BackboneConfig(mixer=mixer, d_model=8, num_layers=1, vocab=5)
    assert Backbone(config).absolute_positions == (positions == "absolute")
    assert not Backbone(replace(config, absolute_positions=False)).absolute_positions
    torch.manual_seed(0)
    model = Backbone(config).double()
    tokens = torch.tensor([[1, 2, 3, 4]])
    swapped = model(tokens.flip(1)).y.flip(1)
    # without positions the order of the tokens is lost
    assert torch.allclose(swapped, model(tokens).y, rtol=1e-9, atol=1e-12) == (positions == "none")
