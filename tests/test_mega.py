"""The MEGA layer against its equations, and against itself in pieces."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.core.state import state_bytes, tensors
from seqboat.mixers import MIXERS, Mega, MegaConfig
from seqboat.mixers.mega import MegaState, RotaryBias
from seqboat.ops.attention import MU, SIGMA, AttentionName
from seqboat.ssm.ema import EMAConfig

BASE = MegaConfig(ema=EMAConfig(d_state=3), d_z=4, d_v=7, max_positions=6)
CONFIGS = {
    "full": BASE,
    "pre": replace(BASE, prenorm=True, norm="rms", d_ff=5),
    "relu2": replace(BASE, attention="relu2", ffn=False),
    "laplace": replace(BASE, attention="laplace", ffn=False),
    "chunk": replace(BASE, chunk=4),
    "chunk-relu2": replace(BASE, chunk=4, attention="relu2"),
    "causal": replace(BASE, causal=True),
    "causal-laplace": replace(BASE, causal=True, attention="laplace", prenorm=True),
    "causal-chunk": replace(BASE, causal=True, chunk=4),
    "rotary": replace(BASE, positions="rotary"),
    "causal-chunk-rotary": replace(BASE, causal=True, chunk=4, positions="rotary"),
    "causal-chunk-relu2": replace(BASE, causal=True, chunk=3, attention="relu2", ffn=False),
}
CAUSAL = [name for name in CONFIGS if name.startswith("causal")]


def make(name: str, dtype: torch.dtype = torch.float64) -> Mega:
    """A layer with weights large enough that every part of it shows."""
    torch.manual_seed(1)
    layer = Mega(6, CONFIGS[name]).to(dtype)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if not key.startswith("ema."):
                parameter.add_(torch.randn_like(parameter) * 0.4)
    return layer


def average(layer: Mega, x: Tensor) -> Tensor:
    """MD-EMA of (time, dim), token by token."""
    ema = layer.ema
    total = x * ema.skip
    for direction in range(1 if layer.causal else 2):
        delta, alpha, beta, gamma = (p[direction] for p in (ema.delta, ema.alpha, ema.beta, ema.gamma))
        p, q = torch.sigmoid(delta), 1 - torch.sigmoid(delta) * torch.sigmoid(alpha)
        state, outputs = torch.zeros_like(delta), []
        for token in x if direction == 0 else x.flip(0):
            state = q * state + p * beta * token[:, None]
            outputs.append((gamma * state).sum(-1) / math.sqrt(ema.d_state))
        one = torch.stack(outputs)
        total = total + (one if direction == 0 else one.flip(0))
    return total


def oracle(layer: Mega, x: Tensor) -> Tensor:
    """One sequence (time, dim) by the paper's equations."""
    config, time, d = layer.config, len(x), layer.d_model
    branch = layer.norm(x) if config.prenorm else x
    averaged = F.silu(average(layer, branch))
    widths = [d, layer.d_z, layer.d_v, d]
    weight, bias = layer.base.weight.split(widths), layer.base.bias.split(widths)
    phi, z, gamma, share = (averaged @ w.T + b for w, b in zip(weight, bias, strict=True))
    phi, z, gamma = torch.sigmoid(phi), F.silu(z), F.silu(gamma)
    q, k = layer.kappa[0] * z + layer.mu[0], layer.kappa[1] * z + layer.mu[1]
    v = F.silu(branch @ layer.value.weight.T + layer.value.bias)
    size = config.chunk or time
    attended = []
    for t in range(time):
        begin = t // size * size
        keys = range(begin, t + 1 if config.causal else min(begin + size, time))
        scale = 1 / math.sqrt(layer.d_z) if config.attention == "softmax" else 1 / len(keys)
        reach = layer.bias.max_distance
        distance = [max(-reach, min(reach, s - t)) + reach for s in keys]
        scores = torch.stack([q[t] @ k[s] for s in keys]) * scale + layer.bias.table[distance]
        if config.attention == "softmax":
            weights = scores.exp() / scores.exp().sum()
        elif config.attention == "relu2":
            weights = scores.clamp(min=0) ** 2
        else:
            weights = 0.5 * (1 + torch.erf((scores - MU) / (SIGMA * math.sqrt(2))))
        attended.append(weights @ v[keys.start : keys.stop])
    hidden = F.silu(share + (gamma * torch.stack(attended)) @ layer.attended.weight.T)
    y = phi * hidden + (1 - phi) * x
    y = y if config.prenorm else layer.norm(y)
    if not config.ffn:
        return y
    given = layer.ffn_norm(y) if config.prenorm else y
    inner = F.silu(given @ layer.ffn.hidden.weight.T + layer.ffn.hidden.bias)
    added = y + inner @ layer.ffn.out.weight.T + layer.ffn.out.bias
    return added if config.prenorm else layer.ffn_norm(added)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_its_equations(name: str) -> None:
    layer = make(name)
    lengths = [11, 5, 1]
    x = torch.randn(3, 11, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(11) < torch.tensor(lengths)[:, None]
    parameters = {"x": x, **dict(layer.named_parameters())}
    weights = torch.randn(3, 11, 6, dtype=torch.float64) * mask[..., None]
    results = []
    for whole in (True, False):
        if whole:
            y = layer(x, mask).y
        else:
            rows = [oracle(layer, x[i, :n]) for i, n in enumerate(lengths)]
            y = torch.stack([F.pad(row, (0, 0, 0, 11 - len(row))) for row in rows])
        grads = torch.autograd.grad((y * weights).sum(), list(parameters.values()))
        results.append((y, dict(zip(parameters, grads, strict=True))))
    torch.testing.assert_close(results[0][0], results[1][0])
    for key, grad in results[1][1].items():
        torch.testing.assert_close(results[0][1][key], grad, msg=key)


@pytest.mark.parametrize("name", CAUSAL)
def test_whole_is_pieces_is_steps(name: str) -> None:
    layer = make(name)
    x = torch.randn(3, 13, 6, dtype=torch.float64)
    mask = torch.rand(3, 13) < 0.8
    mask[2] = False
    whole = layer(x, mask)
    for pieces in ([3, 1, 0, 9], [4, 9], [13]):
        state, outputs, begin = layer.init_state(3), [], 0
        for size in pieces:
            piece = slice(begin, begin + size)
            y, state, _ = layer(x[:, piece], mask[:, piece], state)
            outputs.append(y)
            begin += size
        torch.testing.assert_close(torch.cat(outputs, dim=1), whole.y)
        torch.testing.assert_close(state.ema.states, whole.state.ema.states)
    whole, state = layer(x), layer.init_state(3)
    for t in range(13):
        torch.testing.assert_close(layer.step(x[:, t], state).y, whole.y[:, t])
    # a sequence continues from either state in the same way
    more = torch.randn(3, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(more, None, state).y, layer(more, None, whole.state).y)


def test_state_of_chunks_is_constant() -> None:
    layer = make("causal-chunk")
    sizes = set()
    state = layer.init_state(2)
    for _ in range(9):
        state = layer.step(torch.randn(2, 6, dtype=torch.float64), state).state
        sizes.add(state_bytes(state))
    assert isinstance(state, MegaState) and len(sizes) == 1
    assert dict(tensors(state))["state.cache.keys"].shape == (2, 1, 4, 4)


@pytest.mark.parametrize("time", [0, 1])
@pytest.mark.parametrize("name", ["full", "chunk", "causal", "causal-chunk"])
def test_short_sequences(name: str, time: int) -> None:
    layer = make(name)
    x = torch.randn(2, time, 6, dtype=torch.float64)
    y = layer(x).y
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_dropout_only_in_training() -> None:
    for config in (replace(BASE, dropout=0.5), replace(BASE, attention_dropout=0.5)):
        layer = Mega(6, config)
        with torch.no_grad():
            layer.attended.weight.normal_()
        x = torch.randn(2, 5, 6)
        assert not torch.equal(layer(x).y, layer(x).y)
        layer.eval()
        torch.testing.assert_close(layer(x).y, layer(x).y)


def test_rotary_bias_is_the_product_of_rotated_vectors() -> None:
    """As published: both vectors, rotated in halves by the positions of query and key."""
    bias = RotaryBias(6, 9).double()
    frequencies = 10000.0 ** -(torch.arange(3, dtype=torch.float64) / 3)
    angle = torch.arange(10)[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    query, key = (
        torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        for first, second in bias.vectors
    )
    distance = torch.arange(10) - torch.arange(10)[:, None]
    torch.testing.assert_close(bias(distance), query @ key.T)
    torch.testing.assert_close(bias.table, bias(torch.arange(-9, 10)))
    with pytest.raises(ValueError, match="d_z must be even with rotary positions, got 5"):
        MegaConfig(positions="rotary", d_z=5)


def test_names_and_bad_settings() -> None:
    assert MIXERS["mega"]().chunk is None and MIXERS["mega-chunk"]().chunk == 128
    with pytest.raises(ValueError, match="chunk must be an integer >= 1, got 0"):
        MegaConfig(chunk=0)
    with pytest.raises(ValueError, match="attention must be one of"):
        MegaConfig(attention="linear")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bidirectional"):
        Mega(8).init_state(1)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention", ["softmax", "relu2", "laplace"])
@pytest.mark.parametrize("prenorm", [False, True])
def test_equals_another_implementation(
    attention: AttentionName, prenorm: bool, causal: bool, chunk: int | None
) -> None:
    """The layer of transformers 4.57, the last version that has one: the SiLU on the average is there too."""
    theirs: Any = pytest.importorskip(
        "transformers.models.deprecated.mega.modeling_mega",
        reason="no version of transformers with MEGA is installed (4.57 has it)",
        exc_type=ImportError,
    )
    torch.manual_seed(0)
    config = theirs.MegaConfig(
        hidden_size=6,
        ema_projection_size=3,
        shared_representation_size=4,
        intermediate_size=8,
        nffn_hidden_size=10,
        chunk_size=chunk or -1,
        use_chunking=chunk is not None,
        max_positions=chunk or 12,
        bidirectional=not causal,
        normalization_type="layernorm",
        relative_positional_bias="simple",
        attention_activation=attention,
        normalize_before_mega=prenorm,
        normalize_before_ffn=prenorm,
    )
    other = theirs.MegaBlock(config).double().eval()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    layer = Mega(
        6,
        MegaConfig(
            ema=EMAConfig(d_state=3),
            d_z=4,
            d_v=8,
            d_ff=10,
            attention=attention,
            chunk=chunk,
            max_positions=12,
            causal=causal,
            prenorm=prenorm,
        ),
    ).double()
    gated, ffn = other.mega_layer, other.nffn
    ema, shape = gated.ema_gate, (1 if causal else 2, 6, 3)
    pairs = [
        (layer.ema.delta, ema.damping_factor.view(shape)),
        (layer.ema.alpha, ema.decay_factor.view(shape)),
        (layer.ema.beta, ema.ema_expansion_matrix.view(shape)),
        (layer.ema.gamma, ema.kernel_projection_matrix.view(shape)),
        (layer.ema.skip, ema.residual_weight),
        (layer.norm.weight, gated.norm.norm.weight),
        (layer.norm.bias, gated.norm.norm.bias),
        (layer.value.weight, gated.v_proj.weight),
        (layer.value.bias, gated.v_proj.bias),
        (layer.base.weight, gated.mx_proj.weight),
        # the last part of the projection and the attended values share a sum, and so a bias
        (
            layer.base.bias,
            gated.mx_proj.bias + torch.cat([gated.h_proj.bias.new_zeros(18), gated.h_proj.bias]),
        ),
        (layer.attended.weight, gated.h_proj.weight),
        (layer.kappa, gated.qk_weight),
        (layer.mu, gated.qk_bias),
        (layer.bias.table, gated.rel_pos_bias.rel_pos_bias),
        (layer.ffn_norm.weight, ffn.norm.norm.weight),
        (layer.ffn_norm.bias, ffn.norm.norm.bias),
        (layer.ffn.hidden.weight, ffn.fc1.weight),
        (layer.ffn.hidden.bias, ffn.fc1.bias),
        (layer.ffn.out.weight, ffn.fc2.weight),
        (layer.ffn.out.bias, ffn.fc2.bias),
    ]
    assert len(pairs) == len(list(layer.parameters()))
    with torch.no_grad():
        for ours, given in pairs:
            assert isinstance(ours, Tensor)
            ours.copy_(given)
    x = torch.randn(2, 12, 6, dtype=torch.float64)
    # theirs is told what to see inside a chunk
    size = chunk or 12
    seen = torch.ones(size, size, dtype=torch.float64).tril() if causal else None
    expected = other(x.transpose(0, 1), causal_mask=seen)[0].transpose(0, 1)
    # theirs computes the average in float32, whatever the type of its inputs
    torch.testing.assert_close(layer(x).y, expected, rtol=1e-5, atol=1e-5)
