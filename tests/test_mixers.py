"""Every other mixer against its equations: loops, or the layers of other packages; and what is special about each."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from against import around, by_head, check_against, enlarge
from closeness import assert_same_numbers
from mixer_cases import assert_near, turned
from oracles import assert_same_with_gradients, convolved, in_double, normed, silu, with_block
from seqboat import set_training_step
from seqboat.core.nn import EPS, sinusoids
from seqboat.core.state import state_bytes
from seqboat.layers.budget import extra_loss
from seqboat.mixers import MIXERS
from seqboat.mixers.adaptive_span import AdaptiveSpan, AdaptiveSpanConfig
from seqboat.mixers.bigbird import BigBird, BigBirdConfig
from seqboat.mixers.delta import GatedDeltaNetConfig
from seqboat.mixers.h3 import H3, H3Config, H3HybridConfig
from seqboat.mixers.linformer import Linformer, LinformerConfig
from seqboat.mixers.luna import Luna, LunaConfig
from seqboat.mixers.mamba2 import Mamba2Config
from seqboat.mixers.mega import Mega, MegaConfig, RotaryBias
from seqboat.mixers.performer import (
    RELU_EPSILON,
    FeatureKernel,
    Performer,
    PerformerConfig,
    RandomFeatures,
    draw_features,
)
from seqboat.mixers.reformer import Reformer, ReformerConfig
from seqboat.mixers.samba import WindowAttentionConfig
from seqboat.mixers.transformer import Transformer, TransformerConfig, TransformerPositions
from seqboat.mixers.transformer_xl import TransformerXL, TransformerXLConfig
from seqboat.models.backbone import Backbone, BackboneConfig
from seqboat.models.heads import Classifier, LanguageModel
from seqboat.ops.attention import MU, SIGMA, AttentionName
from seqboat.ops.matrix_state import (
    decays_between,
    gated_delta,
    gated_delta_step,
    gated_sum,
    gated_sum_step,
)
from seqboat.ssm.diagonal import EMAConfig, S4DConfig, as_complex
from seqboat.training.step import add_auxiliary_gradients


def make(config: Any, d_model: int = 6) -> Any:
    """A layer whose every part shows."""
    torch.manual_seed(0)
    layer = enlarge(config.build(d_model))
    if isinstance(layer, AdaptiveSpan):
        set_spans(layer, config.first_span, config.first_span / 2)
    return layer


# the equations, for one sequence (time, d_model)


def feed_forward(layer: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    hidden = function(x @ layer.ffn.hidden.weight.T + layer.ffn.hidden.bias)
    return hidden @ layer.ffn.out.weight.T + layer.ffn.out.bias


def in_turn(x: Tensor, direction: int, walk: Callable[[Tensor], Tensor]) -> Tensor:
    """A walk from left to right, or from right to left."""
    return walk(x) if direction == 0 else walk(x.flip(0)).flip(0)


def transformer(layer: Transformer, x: Tensor) -> Tensor:
    config = layer.config

    def attend(branch: Tensor) -> Tensor:
        q, k, v = (branch @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=-1)
        heads = []
        for h, (qh, kh, vh) in enumerate(zip(*(by_head(p, config.heads) for p in (q, k, v)), strict=True)):
            if config.positions == "rotary":
                qh, kh = (turned(part, torch.arange(len(x))) for part in (qh, kh))
            rows = []
            for t in range(len(x)):
                keys = range(t + 1 if config.causal else len(x))
                scores = torch.stack([qh[t] @ kh[s] for s in keys]) / math.sqrt(layer.d_head)
                if config.positions == "relative":
                    reach = config.max_positions - 1
                    scores = scores + layer.bias[h, [max(-reach, min(reach, s - t)) + reach for s in keys]]
                rows.append(scores.exp() / scores.exp().sum() @ vh[: len(keys)])
            heads.append(torch.stack(rows))
        return torch.cat(heads, dim=-1)

    return around(layer, x, attend)  # type: ignore[arg-type]


def average(layer: Mega, x: Tensor) -> Tensor:
    ema = layer.ema
    total = x * ema.skip
    for direction in range(ema.directions):
        delta, alpha, beta, gamma = (p[direction] for p in (ema.delta, ema.alpha, ema.beta, ema.gamma))
        p, q = torch.sigmoid(delta), 1 - torch.sigmoid(delta) * torch.sigmoid(alpha)

        def walk(tokens: Tensor, q: Tensor = q, drive: Tensor = p * beta, read: Tensor = gamma) -> Tensor:
            state, outputs = torch.zeros_like(q), []
            for token in tokens:
                state = q * state + drive * token[:, None]
                outputs.append((read * state).sum(-1) / math.sqrt(ema.d_state))
            return torch.stack(outputs)

        total = total + in_turn(x, direction, walk)
    return total


def mega(layer: Mega, x: Tensor) -> Tensor:
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
    added = y + feed_forward(layer, given, F.silu)
    return added if config.prenorm else layer.ffn_norm(added)


def transformer_xl(layer: TransformerXL, x: Tensor, everything: bool = False) -> Tensor:
    segment, memory = layer.config.segment, layer.config.memory
    begin_of = [0 if everything else max(t // segment * segment - memory, 0) for t in range(len(x))]

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


def adaptive_span(layer: AdaptiveSpan, x: Tensor) -> Tensor:
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


def performer(layer: Performer, x: Tensor) -> Tensor:
    def phi(token: Tensor) -> Tensor:
        token = token / layer.d_head**0.25
        dots = layer.features.features @ token
        if layer.config.kernel == "relu":
            return dots.clamp(min=0) + RELU_EPSILON
        return (dots - token @ token / 2).exp()

    def attend(branch: Tensor) -> Tensor:
        parts = (branch @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=-1)
        heads = []
        for q, k, v in zip(*(by_head(p, layer.heads) for p in parts), strict=True):
            rows = []
            for t in range(len(x)):
                weights = torch.stack([phi(q[t]) @ phi(k[s]) for s in range(len(x))])
                rows.append(weights / weights.sum() @ v)
            heads.append(torch.stack(rows))
        return torch.cat(heads, dim=-1)

    return around(layer.block, x, attend)


def linformer(layer: Linformer, x: Tensor) -> Tensor:
    columns = layer.config.max_positions

    def shorten(rows: Tensor, kind: int, h: int) -> Tensor:
        weights = layer.project[kind, h % layer.project.shape[1]]
        return sum(
            (weights[min(t, columns - 1)][:, None] * row for t, row in enumerate(rows)),
            torch.zeros(layer.config.projected, rows.shape[1], dtype=rows.dtype),
        )

    def attend(branch: Tensor) -> Tensor:
        parts = (branch @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=-1)
        heads = []
        for h, (q, k, v) in enumerate(zip(*(by_head(p, layer.heads) for p in parts), strict=True)):
            scores = q @ shorten(k, 0, h).T / math.sqrt(layer.d_head)
            heads.append(torch.softmax(scores, dim=-1) @ shorten(v, layer.project.shape[0] - 1, h))
        return torch.cat(heads, dim=-1)

    return around(layer.block, x, attend)


def blocks_seen(layer: BigBird, number: int) -> Tensor:
    """(heads, number, number): whether a block sees another, from what the layer says of its random ones."""
    config = layer.config
    front, back = (config.global_blocks + 1) // 2, config.global_blocks // 2
    seen = layer.look(torch.tensor([number]), number)
    result = torch.zeros(layer.heads, number, number, dtype=torch.bool)
    for h in range(layer.heads):
        for i in range(number):
            drawn = seen.blocks[0, h, i][seen.valid[0, h, i]].tolist()
            assert len(set(drawn)) == len(drawn), "a block is looked at twice"
            fixed = {
                j
                for j in range(number)
                if j < front or j >= number - back or abs(i - j) <= config.window_blocks // 2
            }
            assert fixed <= set(drawn)
            free = number - len(fixed)
            assert len(set(drawn) - fixed) == min(config.random_blocks, free)
            everything = i < front or i >= number - back
            result[h, i, list(range(number)) if everything else drawn] = True
    return result


def bigbird(layer: BigBird, x: Tensor) -> Tensor:
    size = layer.config.block_size
    number = -(-len(x) // size)
    block = torch.arange(len(x)) // size
    visible = blocks_seen(layer, number)[:, block][:, :, block]

    def attend(branch: Tensor) -> Tensor:
        parts = (branch @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (2, 3)).transpose(0, 1) for part in parts)
        scores = (q @ k.transpose(1, 2) / math.sqrt(3)).masked_fill(~visible, -torch.inf)
        return (torch.softmax(scores, dim=-1) @ v).transpose(0, 1).flatten(1)

    return around(layer.block, x, attend)


def attention(query: Tensor, given: Tensor, width: int = 6) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V of (queries, dim) and (keys, dim) or (keys, 2 dim), token by token."""
    parts = given.split(width, dim=-1)
    heads = []
    for q, k, v in zip(*(by_head(p, 2) for p in (query, parts[0], parts[-1])), strict=True):
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


def luna(layer: Luna, x: Tensor) -> Tensor:
    assert layer.second is not None
    return streams(layer, x, layer.second)[0]


def seen_from(layer: Reformer, buckets: list[int], i: int) -> set[int]:
    """The tokens that token i sees in one round of hashing."""
    size = layer.config.chunk_size
    order = sorted(range(len(buckets)), key=lambda j: (buckets[j], j))
    chunk = {j: rank // size for rank, j in enumerate(order)}
    return {j for j in order if chunk[i] - chunk[j] in (0, 1)}


def hashed_attention(layer: Reformer, branch: Tensor) -> Tensor:
    """Shared-QK attention of (time, dim) over the union of all rounds, token by token."""
    shared, value = branch @ layer.shared.weight.T, branch @ layer.value.weight.T
    buckets = layer.hash(shared.unflatten(-1, (layer.heads, -1)).transpose(0, 1)[None])[0]
    heads = []
    for h, (q, v) in enumerate(zip(by_head(shared, layer.heads), by_head(value, layer.heads), strict=True)):
        rows = []
        for i in range(len(branch)):
            seen: set[int] = set().union(*(seen_from(layer, hashed.tolist(), i) for hashed in buckets[h]))
            others = sorted(seen - {i}) or [i]
            length = [(q[j].square().mean() + 1e-6).sqrt() * layer.d_head**0.5 for j in others]
            scores = torch.stack([q[i] @ q[j] / n for j, n in zip(others, length, strict=True)])
            if others == [i]:
                scores = scores * 0
            rows.append(torch.softmax(scores, dim=0) @ v[others])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1)


def reformer(layer: Reformer, x: Tensor) -> Tensor:
    return around(layer.block, x, lambda branch: hashed_attention(layer, branch))


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


def h3(layer: H3, x: Tensor) -> Tensor:
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
    return y + feed_forward(layer, layer.ffn_norm(y), F.gelu)


def mamba2(layer: Any, x: Tensor) -> Tensor:
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


def gated_deltanet(layer: Any, x: Tensor) -> Tensor:
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


def window_attention(layer: Any, x: Tensor) -> Tensor:
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


MEGA = MegaConfig(ema=EMAConfig(d_state=3), d_z=4, d_v=7, max_positions=6)
SPAN = AdaptiveSpanConfig(heads=2, max_span=9, ramp=3)
HASHED = ReformerConfig(heads=2, hashes=3, buckets=4, chunk_size=3)
PAIRS = H3Config(shift=4, ssm=S4DConfig(d_state=4, block=8, init="lin"), d_ff=5)
STATES = Mamba2Config(d_state=3, d_head=4, block=4)
DELTA = GatedDeltaNetConfig(heads=2, d_key=3, block=4, ffn=False)
EQUATIONS: list[tuple[Callable[[Any, Tensor], Tensor], Any]] = [
    (transformer, TransformerConfig(heads=2)),
    (transformer, TransformerConfig(heads=3, prenorm=True, norm="rms", activation="gelu")),
    (transformer, TransformerConfig(heads=1, positions="rotary", d_ff=7)),
    (transformer, TransformerConfig(heads=2, positions="relative", max_positions=6)),
    (transformer, TransformerConfig(heads=2, causal=True, positions="relative", max_positions=6)),
    (transformer, TransformerConfig(heads=3, causal=True, positions="rotary", prenorm=True)),
    (mega, MEGA),
    (mega, replace(MEGA, prenorm=True, norm="rms", d_ff=5)),
    (mega, replace(MEGA, attention="relu2", ffn=False)),
    (mega, replace(MEGA, attention="laplace", ffn=False)),
    (mega, replace(MEGA, chunk=4, attention="relu2")),
    (mega, replace(MEGA, causal=True, attention="laplace", prenorm=True)),
    (mega, replace(MEGA, causal=True, chunk=4)),
    (mega, replace(MEGA, positions="rotary")),
    (mega, replace(MEGA, causal=True, chunk=4, positions="rotary")),
    (transformer_xl, TransformerXLConfig(heads=2, segment=3, memory=4)),
    (transformer_xl, TransformerXLConfig(heads=1, segment=4, memory=2, prenorm=True)),
    (transformer_xl, TransformerXLConfig(heads=2, segment=3, memory=0)),
    (transformer_xl, TransformerXLConfig(heads=2, segment=1, memory=0)),
    (transformer_xl, TransformerXLConfig(heads=2, segment=20, memory=20)),
    (adaptive_span, replace(SPAN, first_span=2.5)),
    (adaptive_span, replace(SPAN, first_span=9.0, prenorm=True)),
    (performer, PerformerConfig(heads=2, features=7, prenorm=True)),
    (performer, PerformerConfig(heads=2, features=7, kernel="relu")),
    (linformer, LinformerConfig(heads=2, projected=4, max_positions=7, sharing="none", prenorm=True)),
    (linformer, LinformerConfig(heads=2, projected=4, max_positions=7, sharing="heads")),
    (linformer, LinformerConfig(heads=2, projected=4, max_positions=7, sharing="keys")),
    (bigbird, BigBirdConfig(heads=2, block_size=2, random_blocks=2)),
    (bigbird, BigBirdConfig(heads=2, block_size=3, global_blocks=1, random_blocks=1, prenorm=True)),
    (bigbird, BigBirdConfig(heads=2, block_size=2, window_blocks=5, global_blocks=0, random_blocks=0)),
    (bigbird, BigBirdConfig(heads=2, block_size=2, window_blocks=1, global_blocks=5, random_blocks=9)),
    (luna, LunaConfig(heads=2, length=3)),
    (luna, LunaConfig(heads=2, length=3, tied=False, prenorm=True)),
    (reformer, replace(HASHED, hashes=1, prenorm=False)),
    (reformer, HASHED),
    (reformer, replace(HASHED, buckets=1, chunk_size=32)),
    (h3, PAIRS),
    (h3, replace(PAIRS, d_head=3)),
    (h3, replace(PAIRS, causal=False, d_head=2, norm="rms")),
    (mamba2, STATES),
    (mamba2, Mamba2Config(d_state=2, d_head=3, conv=1, ffn=True, d_ff=5)),
    (gated_deltanet, DELTA),
    (gated_deltanet, GatedDeltaNetConfig(heads=3, conv=2, expand=1, d_ff=5)),
    (window_attention, WindowAttentionConfig(heads=1, window=1, d_ff=3)),
    (window_attention, WindowAttentionConfig(heads=1, window=4, d_ff=3)),
    (window_attention, WindowAttentionConfig(heads=1, window=50, ffn=False)),
]


@pytest.mark.parametrize(
    ("equations", "config"),
    EQUATIONS,
    ids=[f"{number}-{equations.__name__}" for number, (equations, _) in enumerate(EQUATIONS)],
)
def test_equals_its_equations(equations: Callable[[Any, Tensor], Tensor], config: Any) -> None:
    """Rows of different lengths, and the gradients of the inputs and of every parameter."""
    layer = make(config)
    check_against(layer, lambda x: equations(layer, x), [17, 5, 1])


DROPS = [kind() for kind in MIXERS.values() if not kind.__module__.startswith("seqboat.layers")]


@pytest.mark.parametrize("config", DROPS, ids=lambda config: type(config).__name__)
def test_dropout_only_in_training(config: Any) -> None:
    config = replace(config, dropout=0.5)
    layer = config.build(8) if hasattr(config, "build") else config.build_layers(8, 1)[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    x = torch.randn(2, 5, 8)
    assert not torch.equal(layer(x).y, layer(x).y)
    layer.eval()
    torch.testing.assert_close(layer(x).y, layer(x).y)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Transformer(10), "multiple of heads = 8, got 10"),
        (lambda: Transformer(6, heads=2, positions="rotary"), "d_model / heads must be even"),
        (lambda: Transformer(8).init_state(1), "bidirectional"),
        (lambda: TransformerConfig(positions="learned"), "positions must be one of absolute, rotary"),  # type: ignore[arg-type]
        (lambda: TransformerXL(8, memory=-1), "memory must be an integer >= 0, got -1"),
        (lambda: AdaptiveSpan(8, max_span=8, first_span=9), "first_span must be in 0..max_span = 8, got 9"),
        (lambda: AdaptiveSpanConfig(span_weight=-1), "span_weight must be at least 0, got -1"),
        (lambda: Mega(8, chunk=0), "chunk must be an integer >= 1, got 0"),
        (lambda: Mega(8, positions="rotary", d_z=5), "d_z must be even with rotary positions, got 5"),
        (lambda: Performer(8, kernel="cosine"), "kernel must be one of softmax, relu; got 'cosine'"),
        (lambda: BigBird(8, window_blocks=2), "window_blocks must be odd, got 2"),
        (lambda: Linformer(8, sharing="layers"), "sharing must be one of none, heads, keys; got 'layers'"),
        (lambda: Luna(8, length=0), "length must be an integer >= 1, got 0"),
        (lambda: Reformer(8, buckets=7), "buckets must be even or 1, got 7"),
        (lambda: H3(8, d_head=3), "d_model must be a multiple of d_head = 3, got 8"),
        (lambda: H3(8, ssm=S4DConfig(truncation=5)), "ssm.truncation of H3 must be None, got 5"),
        (
            lambda: Mamba2Config(d_head=5).build(8),
            "expand * d_model must be a multiple of d_head = 5, got 16",
        ),
        (lambda: GatedDeltaNetConfig(heads=0), "heads must be an integer >= 1, got 0"),
        (lambda: WindowAttentionConfig(heads=4).build(4), "d_model / heads must be even with rotary"),
        (lambda: MIXERS["samba-gdn"](window=0), "window must be an integer >= 1, got 0"),
    ],
)
def test_each_names_the_wrong_argument(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_defaults_are_those_of_the_papers() -> None:
    assert MIXERS["mega"]().chunk is None and MIXERS["mega-chunk"]().chunk == 128
    assert MIXERS["h3"]() == H3Config(shift=64, ssm=S4DConfig(d_state=64, init="lin"), d_head=1, causal=True)
    assert MIXERS["mamba2"]() == Mamba2Config(d_state=128, expand=2, conv=4, ffn=False, norm="rms")
    assert [MIXERS["mamba2"]().build(width).d_head for width in (32, 96, 50)] == [64, 64, 50]
    layer = MIXERS["mamba2"]().build(128)
    step = F.softplus(layer.step_bias)
    assert layer.heads == 4 and step.min() > 1e-3 and step.max() < 0.1001
    assert layer.log_rate.exp().min() >= 1 and layer.log_rate.exp().max() <= 16.001
    assert MIXERS["gated-deltanet"]() == GatedDeltaNetConfig(heads=4, expand=2, conv=4, ffn=True, norm="rms")
    layer = MIXERS["gated-deltanet"]().build(64)
    assert (layer.d_key * 4, layer.d_inner) == (48, 96)  # 3/4 and 3/2 of the width


# Transformer and MEGA


def test_step_alone_grows_without_copies() -> None:
    layer = make(TransformerConfig(heads=2, causal=True), 12).float()
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


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention", ["softmax", "relu2", "laplace"])
@pytest.mark.parametrize("prenorm", [False, True])
def test_mega_equals_another_implementation(
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


# Transformer-XL


def test_with_enough_memory_it_is_full_attention_over_the_concatenation() -> None:
    layer = make(TransformerXLConfig(heads=2, segment=4, memory=16))
    x = torch.randn(1, 15, 6, dtype=torch.float64)
    full = transformer_xl(layer, x[0], everything=True)
    outputs, state = [], None
    for piece in x.split([4, 4, 4, 3], dim=1):
        y, state, _ = layer(piece, None, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1)[0], full)


def test_memory_passes_gradients_inside_a_call_and_none_from_a_detached_state() -> None:
    layer = make(TransformerXLConfig(heads=2, segment=3, memory=4))
    x = torch.randn(1, 6, 6, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).y[:, 3:].sum(), x)
    assert grad[:, :3].any()
    state = layer(x[:, :3]).state
    y = layer(x[:, 3:], None, type(state)(*(part.detach() for part in state))).y
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert not grad[:, :3].any()


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
    y = block.ffn_norm(y + feed_forward(block, y, F.relu))
    # their softmax is in float32
    torch.testing.assert_close(layer(x).y[:, memory:], y, rtol=2e-6, atol=2e-6)


# Adaptive Span


def with_spans(config: AdaptiveSpanConfig, *spans: float) -> AdaptiveSpan:
    layer: AdaptiveSpan = make(config)
    set_spans(layer, *spans)
    return layer


def set_spans(layer: AdaptiveSpan, *spans: float) -> None:
    with torch.no_grad():
        layer.span_ratio.copy_(torch.tensor(spans, dtype=torch.float64) / layer.config.max_span)


def test_what_lies_beyond_all_spans_is_neither_seen_nor_remembered() -> None:
    layer = with_spans(replace(SPAN, max_span=100), 1.0, 0.0)
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
    layer = with_spans(SPAN, -4.0, 50.0).train()
    assert layer.spans().tolist() == [0, 9] and layer.reach() == 9
    inside = with_spans(SPAN, 0.0, 9.0)
    x = torch.randn(2, 12, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x).y, inside(x).y)
    # only what leads back comes through: against the gradient from below, with it from above
    for sign, expected in ((1.0, [0.0, 9.0]), (-1.0, [-9.0, 0.0])):
        (gradient,) = torch.autograd.grad(sign * layer.spans().sum(), layer.span_ratio)
        assert gradient.tolist() == expected
        (gradient,) = torch.autograd.grad(sign * inside.spans().sum(), inside.span_ratio)
        assert gradient.tolist() == [sign * 9.0, sign * 9.0]


class Looks(TorchDispatchMode):
    """Counts how often the host looks at a number on the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def test_decoding_looks_at_spans_once() -> None:
    layer = with_spans(replace(SPAN, max_span=100), 1.0, 0.0)
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


def test_long_spans_have_a_cost() -> None:
    config = replace(SPAN, span_weight=0.1)
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
    free = AdaptiveSpan(6, replace(SPAN, span_weight=0.0))
    assert extra_loss(free) is None


def shared_stack(num_layers: int) -> Classifier:
    mixer = replace(SPAN, shared_distances=True)
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


# Performer, Linformer, BigBird


def attention_error(features: int, trials: int = 12) -> float:
    """Root mean square difference between estimated and true softmax attention."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 32, 8, dtype=torch.float64).unbind(0)
    q, k = q / 4, k / 4  # of long vectors the estimate has heavy tails, and needs more features to settle
    exact = torch.softmax(q @ k.T / math.sqrt(8), dim=-1) @ v
    errors = []
    for _ in range(trials):
        phi = RandomFeatures(features, 8, "softmax", None).double()
        weights = phi(q, query=True).exp() @ phi(k, query=False).exp().T
        errors.append((weights / weights.sum(dim=-1, keepdim=True) @ v - exact).square().mean())
    return math.sqrt(sum(errors) / trials)


def test_error_falls_as_one_over_the_root_of_the_features() -> None:
    counts = [64, 256, 1024, 4096]
    errors = [attention_error(count) for count in counts]
    for few, many in itertools.pairwise(errors):
        # four times the features: half the error, up to the noise of the draws
        assert 0.35 < many / few < 0.7
    assert errors[-1] / errors[0] == pytest.approx(1 / 8, rel=0.3)


def bare() -> Performer:
    """A layer in float32 whose output is what its heads attend to."""
    torch.manual_seed(0)
    layer = Performer(16, PerformerConfig(heads=2, features=64)).eval()
    layer.block.close = lambda x, attended, mask: attended  # type: ignore[method-assign]
    with torch.no_grad():
        layer.qkv.weight.normal_().mul_(0.5)
    return layer


def by_logarithms(layer: Performer, x: Tensor) -> Tensor:
    """What heads attend to, in float64 from the logarithms of all products of features."""
    layer = layer.double()
    parts = (x @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=-1)
    heads = []
    for q, k, v in zip(*(by_head(part / 8**0.25, 2) for part in parts), strict=True):
        dots = [part @ layer.features.features.T for part in (q, k)]
        logs = dots[0][:, :, None] + (dots[1] - k.square().sum(dim=-1, keepdim=True) / 2)[:, None]
        weights = logs.logsumexp(dim=-1)
        heads.append(torch.softmax(weights, dim=-1) @ v * 8**0.25)
    return torch.cat(heads, dim=-1)


@pytest.mark.parametrize("scale", [6.0, 12.0])
def test_long_keys_are_seen(scale: float) -> None:
    layer = bare()
    with torch.no_grad():
        layer.qkv.weight[16:32] *= scale
    x = torch.randn(2, 90, 16, requires_grad=True)
    key = by_head(layer.qkv(x), 3)[1].unflatten(-1, (2, 8))
    lengths, weight = (90, 70), torch.randn(2, 90, 16)
    assert (
        layer.features(key, query=False).amax(dim=-1) < -110
    ).float().mean() > 0.5  # too small for float32
    y = layer(x, torch.arange(90) < torch.tensor(lengths)[:, None]).y
    wide = x.detach().double().requires_grad_()
    rows = [by_logarithms(layer, wide[i : i + 1, :n]) for i, n in enumerate(lengths)]
    # logarithms of some thousands have errors of 2^-13 in float32
    expected = torch.cat([F.pad(row, (0, 0, 0, 90 - row.shape[1])) for row in rows])
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)
    assert y[0].any(dim=-1).all() and y[1, :70].any(dim=-1).all()
    (found,) = torch.autograd.grad((y * weight).sum(), x)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), wide)
    assert wanted.any() and (found.double() - wanted).norm() < 1e-2 * wanted.norm()


def test_features_are_orthogonal_in_groups_with_the_lengths_of_normal_vectors() -> None:
    w = draw_features(20, 8, seed=3).double()
    for group in (w[:8], w[8:16], w[16:]):
        gram = group @ group.T
        torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-5)
    lengths = draw_features(4000, 8, seed=3).square().sum(dim=1)
    assert lengths.mean() == pytest.approx(8, rel=0.05) and lengths.var() == pytest.approx(16, rel=0.2)


def test_features_follow_the_seed_and_the_training_step() -> None:
    def layer() -> Performer:
        torch.manual_seed(4)
        return Performer(6, PerformerConfig(heads=2, features=5, redraw=10))

    one, two = layer(), layer()
    first = one.features.features.clone()
    assert two.features.features.equal(first)
    set_training_step(one, 9)
    assert one.features.features.equal(first)
    set_training_step(one, 10)
    second = one.features.features.clone()
    assert not second.equal(first)
    # a run that is resumed in the middle has the same features, whether it noticed the first draw or not
    set_training_step(two, 17)
    assert two.features.features.equal(second)
    torch.manual_seed(5)
    other = Performer(6, PerformerConfig(heads=2, features=5))
    assert not other.features.features.equal(first)
    other.load_state_dict(one.state_dict())
    assert other.features.features.equal(second) and other.features.seed.equal(one.features.seed)
    kept = Performer(6, PerformerConfig(heads=2, features=5, redraw=None))
    before = kept.features.features.clone()
    set_training_step(kept, 100_000)
    assert kept.features.features.equal(before)


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.filterwarnings("ignore")
def test_agrees_with_performer_pytorch(kernel: FeatureKernel) -> None:
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    layer = make(PerformerConfig(heads=2, features=7, kernel=kernel))
    w = layer.features.features
    q, k, v = torch.randn(3, 1, 2, 9, 3, dtype=torch.float64).unbind(0)
    if kernel == "softmax":
        # their epsilon is not in the paper's equations
        theirs = [peer.softmax_kernel(x, projection_matrix=w, is_query=x is q, eps=0) for x in (q, k)]
    else:
        theirs = [
            peer.generalized_kernel(x, projection_matrix=w, kernel_epsilon=RELU_EPSILON) for x in (q, k)
        ]
    expected = peer.linear_attention(*theirs, v)
    ours = layer.features(q, query=True).exp() @ layer.features(k, query=False).exp().transpose(-1, -2)
    torch.testing.assert_close(ours / ours.sum(dim=-1, keepdim=True) @ v, expected)


@pytest.mark.filterwarnings("ignore")
def test_agrees_with_the_package_linformer() -> None:
    peer = pytest.importorskip("linformer")
    layer = make(LinformerConfig(heads=2, projected=4, sharing="heads", max_positions=9))
    theirs = peer.LinformerSelfAttention(
        6, 9, k=4, heads=2, dim_head=3, one_kv_head=False, share_kv=False
    ).double()
    query, key, value = layer.qkv.weight.chunk(3)
    with torch.no_grad():
        layer.qkv.bias.zero_()
        theirs.to_q.weight.copy_(query)
        theirs.to_k.weight.copy_(key)
        theirs.to_v.weight.copy_(value)
        theirs.proj_k.copy_(layer.project[0, 0])
        theirs.proj_v.copy_(layer.project[1, 0])
        theirs.to_out.weight.copy_(torch.eye(6))
        theirs.to_out.bias.zero_()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    expected = torch.stack([around(layer.block, row, lambda b: theirs(b[None])[0]) for row in x])
    torch.testing.assert_close(layer(x).y, expected)


def test_random_blocks_follow_the_seed_and_nothing_else() -> None:
    config = BigBirdConfig(heads=4, block_size=2, random_blocks=3)
    torch.manual_seed(3)
    one = BigBird(8, config)
    torch.manual_seed(3)
    two = BigBird(8, config)
    other = BigBird(8, config)
    number = torch.tensor([40])
    patterns = [layer.look(number, 40).blocks for layer in (one, two, other)]
    assert patterns[0].equal(patterns[1]) and not patterns[0].equal(patterns[2])
    assert not patterns[0][:, 0].equal(patterns[0][:, 1]), "every head draws for itself"
    # longer sequences in the batch change nothing
    padded = one.look(torch.tensor([40, 57]), 57)
    alone = one.look(number, 40)
    assert padded.blocks[0, :, :40][padded.valid[0, :, :40]].equal(alone.blocks[0][alone.valid[0]])
    other.load_state_dict(one.state_dict())
    assert other.look(number, 40).blocks.equal(patterns[0])


def test_random_blocks_are_spread_evenly() -> None:
    torch.manual_seed(0)
    layer = BigBird(8, BigBirdConfig(heads=8, block_size=2, random_blocks=4))
    drawn = layer.look(torch.tensor([128]), 128).blocks[..., -4:]
    share = torch.histc(drawn.float(), bins=4, min=0, max=128) / drawn.numel()
    # 4,096 draws: the std is 0.007
    assert ((share - 0.25).abs() < 0.04).all()


@pytest.mark.filterwarnings("ignore")
def test_bigbird_agrees_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    peer: Any = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    layer = make(BigBirdConfig(heads=2, block_size=4, random_blocks=2))
    number = 9
    config = peer.BigBirdConfig(
        hidden_size=6, num_attention_heads=2, block_size=4, num_random_blocks=2, use_bias=True
    )
    theirs = peer.BigBirdBlockSparseAttention(config, seed=0).double().eval()
    weights, biases = layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3)
    for part, weight, bias in zip((theirs.query, theirs.key, theirs.value), weights, biases, strict=True):
        part.weight.data.copy_(weight)
        part.bias.data.copy_(bias)
    # its random blocks are ours
    drawn = layer.look(torch.tensor([number]), number).blocks[0, :, 1:-1, -2:].numpy()
    monkeypatch.setattr(theirs, "_bigbird_block_rand_mask_with_head", lambda **_: list(drawn))
    x = torch.randn(1, 4 * number, 6, dtype=torch.float64)
    one = torch.ones(1, 1, 4 * number, 1, dtype=torch.float64)
    blocked = torch.ones(1, number, 4, dtype=torch.float64)
    band = torch.ones(1, 1, number - 4, 4, 12, dtype=torch.float64)
    out = theirs(x, band, one, one.transpose(2, 3), blocked, blocked)[0]
    expected = around(layer.block, x[0], lambda _: out[0])
    torch.testing.assert_close(layer(x).y[0], expected)


# Luna and Reformer


@pytest.mark.parametrize("prenorm", [False, True])
def test_the_second_stream_runs_through_a_stack(prenorm: bool) -> None:
    torch.manual_seed(0)
    mixer = LunaConfig(heads=2, length=3, prenorm=prenorm)
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


def test_rotations_follow_the_seed_and_are_saved() -> None:
    torch.manual_seed(3)
    one = Reformer(8, HASHED)
    torch.manual_seed(3)
    two = Reformer(8, HASHED)
    other = Reformer(8, HASHED)
    assert one.rotations.equal(two.rotations) and not one.rotations.equal(other.rotations)
    other.load_state_dict(one.state_dict())
    assert other.rotations.equal(one.rotations)
    tokens = torch.randn(1, 2, 200, 4)
    buckets = one.hash(tokens)
    assert buckets.unique().tolist() == [0, 1, 2, 3]
    # opposite tokens have opposite buckets
    assert one.hash(-tokens).equal((buckets + 2) % 4)


@pytest.mark.filterwarnings("ignore")
def test_reformer_agrees_with_transformers() -> None:
    peer: Any = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    layer = make(ReformerConfig(heads=2, hashes=1, buckets=4, chunk_size=4))
    config = peer.ReformerConfig(
        hidden_size=6,
        num_attention_heads=2,
        attention_head_size=3,
        num_buckets=4,
        num_hashes=1,
        lsh_attn_chunk_length=4,
        lsh_attention_probs_dropout_prob=0.0,
        hash_seed=7,
    )
    theirs = peer.LSHSelfAttention(config).double().eval()
    theirs.query_key.weight.data.copy_(layer.shared.weight)
    theirs.value.weight.data.copy_(layer.value.weight)
    torch.manual_seed(7)
    layer.rotations.copy_(torch.randn(2, 3, 1, 2, dtype=torch.float64))
    x = torch.randn(1, 24, 6, dtype=torch.float64)
    expected = theirs(x)[0]
    expected = expected[0] if expected.dim() == 3 else expected
    shared, value = layer._project(x)
    bucket = layer.hash(shared)
    attended = layer._attend(shared, value, bucket, torch.tensor([24]))
    # theirs looks back from the first chunk to the last one; ours to nothing
    chunk = bucket[0, :, 0].argsort(dim=-1, stable=True).argsort(dim=-1) // 4
    ours = attended[0].transpose(0, 1)
    compared = (chunk > 0).T
    assert compared.sum() == 40
    torch.testing.assert_close(ours[compared], expected.unflatten(-1, (2, 3))[compared])


# H3, Mamba-2, Gated DeltaNet, Samba


@pytest.mark.parametrize(("layers", "attention"), [(1, []), (2, [1]), (3, [1, 2]), (12, [1, 7])])
def test_places_of_attention_in_the_hybrid(layers: int, attention: list[int]) -> None:
    config = BackboneConfig(mixer=H3HybridConfig(d_ff=5), d_model=8, num_layers=layers, vocab=7)
    with torch.device("meta"):
        found = LanguageModel(config).backbone.layers
    assert [i for i, layer in enumerate(found) if isinstance(layer, Transformer)] == attention
    assert sum(isinstance(layer, H3) for layer in found) == layers - len(attention)


@pytest.mark.parametrize(("d_model", "time"), [(6, 11), (10, 37)])
def test_mamba2_equals_transformers(d_model: int, time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the comparison needs transformers")
    from transformers import Mamba2Config as TheirConfig
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    layer = make(STATES, d_model)
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


def test_blocks_of_the_gated_sum_are_tokens_in_turn() -> None:
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


def test_blocks_of_the_delta_rule_are_tokens_in_turn() -> None:
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
    pytest.importorskip("transformers", reason="the comparison needs transformers")
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
    pytest.importorskip("transformers", reason="the comparison needs transformers")
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    layer = make(DELTA)
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


@pytest.mark.parametrize(("name", "kind"), [("samba", "Mamba2"), ("samba-gdn", "GatedDeltaNet")])
def test_layers_alternate(name: str, kind: str) -> None:
    mixer = MIXERS[name](window=7, heads=2, d_ff=9, dropout=0.25)
    with torch.device("meta"):
        layers = LanguageModel(BackboneConfig(mixer=mixer, d_model=8, num_layers=5, vocab=7)).backbone.layers
    assert [type(layer).__name__ for layer in layers] == [kind, "WindowAttention"] * 2 + [kind]
    attention: Any = layers[1]
    every: list[Any] = list(layers)
    assert attention.config == WindowAttentionConfig(window=7, heads=2, d_ff=9, dropout=0.25)
    assert all(layer.block.ffn.out.in_features == 9 for layer in every)
