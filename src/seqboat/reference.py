"""The paper as loops, one sequence at a time: the specification that tests compare all other code with.

Slow and obvious on purpose. Every function takes a single sequence (time, dim) in any floating type, walks over
its tokens in Python, and is differentiable because it is plain arithmetic. Nothing here calls the layers it
specifies: parameters come as a mapping from our names to tensors (`dict(layer.named_parameters())`, with
`named_buffers()` added for batch norm and Gumbel softmax), options as the layers' own configurations.

    section 3.2, listings 1 and 2    compress, extract
    section 3.3                      route, layer
    appendix A.2                     gau
    appendix A.3                     ema; s4d beside it
    working memory, decoding         decode_step

There is no padding: callers leave padding tokens out. Everything is as in evaluation: no dropout, no Gumbel noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqboat.core.checks import require
from seqboat.layers.budget import BudgetConfig
from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import (
    AlwaysActiveConfig,
    GumbelConfig,
    RouterConfig,
    SigmoidConfig,
    TemperedSoftmaxConfig,
    XMoEConfig,
)
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.ssm.diagonal import EMAConfig, S4DConfig, SSMConfig

Params = Mapping[str, Tensor]


# state-space kernels


class Diagonal(NamedTuple):
    """One direction of a diagonal state-space layer: s_t = q s_{t-1} + drive x_t, y_t = Re(read . s_t)."""

    q: Tensor
    """(dim, states)"""
    drive: Tensor
    """(dim, states)"""
    read: Tensor
    """(dim, states)"""


def stack(tokens: Sequence[Tensor], like: Tensor) -> Tensor:
    """Tokens to a sequence; an empty one has the width of `like`."""
    return torch.stack(list(tokens)) if tokens else like.new_zeros(0, like.shape[-1])


def recurrence(x: Tensor, layer: Diagonal, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Walk over (time, dim) token by token, without the skip; the output and the last state."""
    if state is None:
        state = torch.zeros_like(layer.q)
    outputs = []
    for token in x:
        state = layer.q * state + layer.drive * token[:, None]
        outputs.append((layer.read * state).sum(dim=-1).real)
    return stack(outputs, x), state


def taps(layer: Diagonal, count: int) -> list[Tensor]:
    """The first taps (dim,) of the kernel: k[l] = Re(sum_n read drive q^l)."""
    kernel, power = [], torch.ones_like(layer.q)
    for _ in range(count):
        kernel.append((layer.read * layer.drive * power).sum(dim=-1).real)
        power = power * layer.q
    return kernel


def truncated(x: Tensor, kernel: Sequence[Tensor], history: Tensor | None) -> tuple[Tensor, Tensor]:
    """y_t = sum over l of k[l] x_{t-l}, the kernel ending after its last tap; and the last inputs."""
    past = len(kernel) - 1
    inputs = list(x.new_zeros(past, x.shape[1]) if history is None else history)
    outputs = []
    for token in x:
        inputs.append(token)
        outputs.append(sum((k * inputs[-1 - lag] for lag, k in enumerate(kernel)), torch.zeros_like(token)))
    return stack(outputs, x), stack(inputs[len(inputs) - past :], x)


def run(
    x: Tensor,
    directions: Sequence[Diagonal],
    skip: Tensor,
    truncation: int | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """K * x + D . x: one direction from left to right, a second one from right to left if there is one."""
    outputs = []
    after = None
    for number, layer in enumerate(directions):
        # the second direction reads the sequence backwards
        sequence = x.flip(0) if number == 1 else x
        if truncation is None:
            y, last = recurrence(sequence, layer, state)
        else:
            y, last = truncated(sequence, taps(layer, truncation), state)
        outputs.append(y.flip(0) if number == 1 else y)
        after = last
    y = sum(outputs, skip * x)
    return y, after if len(directions) == 1 else None


def ema_directions(params: Params) -> list[Diagonal]:
    """MD-EMA: p = sigmoid(delta), q = 1 - p sigmoid(alpha), drive p beta, read gamma / sqrt(states)."""
    directions = []
    for delta, alpha, beta, gamma in zip(
        params["delta"], params["alpha"], params["beta"], params["gamma"], strict=True
    ):
        p = torch.sigmoid(delta)
        read = gamma / math.sqrt(gamma.shape[-1])
        directions.append(Diagonal(1 - p * torch.sigmoid(alpha), p * beta, read))
    return directions


def s4d_directions(params: Params, rule: str = "zoh") -> list[Diagonal]:
    """S4D: A = -exp(log_real) + i imag, q = exp(dt A), drive 1, read 2 C (q - 1) / A; or by the bilinear rule."""
    directions = []
    for log_dt, log_real, imag, c in zip(
        params["log_dt"], params["log_real"], params["imag"], params["c"], strict=True
    ):
        pole = torch.complex(-torch.exp(log_real), imag)
        dt = torch.exp(log_dt)[:, None]
        q = torch.exp(pole * dt) if rule == "zoh" else (2 + dt * pole) / (2 - dt * pole)
        inside = (q - 1) / pole if rule == "zoh" else 2 * dt / (2 - dt * pole)
        read = 2 * torch.complex(c[..., 0], c[..., 1]) * inside
        directions.append(Diagonal(q, torch.ones_like(q), read))
    return directions


def ema(
    x: Tensor, params: Params, config: EMAConfig, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """MD-EMA over (time, dim); the parameters say whether there are one or two directions.

    Returns:
        (time, dim), and the state after the last token (None with two directions).
    """
    return run(x, ema_directions(params), params["skip"], config.truncation, state)


def s4d(
    x: Tensor, params: Params, config: S4DConfig, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """S4D over (time, dim), as `ema`; its states are complex."""
    return run(x, s4d_directions(params, config.rule), params["skip"], config.truncation, state)


KERNELS: dict[type[SSMConfig], Callable[..., tuple[Tensor, Any]]] = {EMAConfig: ema, S4DConfig: s4d}
"""The loops of the kernels that the paper writes out."""


def ssm(x: Tensor, params: Params, config: SSMConfig, state: Any = None) -> tuple[Tensor, Any]:
    """The state-space kernel that a configuration names: its outputs, and its state if it is causal."""
    require(type(config) in KERNELS, f"{type(config).__name__} has no reference")
    return KERNELS[type(config)](x, params, config, state)


# the layer


class Decisions(NamedTuple):
    """What the router decided for the tokens of a sequence."""

    active: list[bool]
    """the paper's a"""
    probs: Tensor
    """(time,): probability of activation; the paper's c where active"""


class MemoryEntry(NamedTuple):
    """One activated token in the working memory."""

    slot: int
    """index in the compressed sequence"""
    position: int
    """index in the original sequence"""
    key: Tensor
    """(d_z,)"""
    value: Tensor
    """(d_v,)"""
    weight: Tensor | None = None
    """what it counts for those that see it, in the gated form"""


class LayerState(NamedTuple):
    """What a causal layer remembers of the tokens so far."""

    ssm: Any
    """of the kernel: (dim, states), or, with a truncated kernel, the last inputs (truncation - 1, dim)"""
    memory: list[MemoryEntry]
    """first in, first out: at most `window` entries, or all of them with span "full" """
    seen: int
    """tokens so far"""


class LayerOutput(NamedTuple):
    """What a layer returns for one sequence."""

    y: Tensor
    """(time, dim); (dim,) from `decode_step`"""
    state: LayerState | None
    """after the last token; None for bidirectional layers"""
    decisions: Decisions
    """of the router"""


def under(params: Params, prefix: str) -> dict[str, Tensor]:
    """The parameters below a prefix.

    >>> sorted(under({"ssm.alpha": torch.ones(1), "norm.weight": torch.ones(1)}, "ssm."))
    ['alpha']
    """
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x * torch.sigmoid(x)


def probabilities(token: Tensor, params: Params, config: RouterConfig) -> Tensor:
    """The probabilities (skip, activate) of one token (dim,), for one module."""
    if isinstance(config, AlwaysActiveConfig):
        return token.new_tensor([0.0, 1.0])
    if isinstance(config, SigmoidConfig):
        logit = params["logits.weight"] @ token + params["logits.bias"]
        if config.temperature_scale is not None:
            logit = logit / torch.exp(params["log_temperature"].clamp(-20, 20))
        activate = torch.sigmoid(logit)
        return torch.cat([1 - activate, activate])
    if isinstance(config, TemperedSoftmaxConfig):
        temperature = torch.exp(params["log_temperature"].clamp(-20, 20))
        logits = params["logits.weight"] @ token + params["logits.bias"]
        return torch.softmax(logits / temperature, dim=0)
    if isinstance(config, GumbelConfig):
        steps = float(params["training_step"])
        annealed = max(config.start * config.decay**steps, config.floor)
        logits = params["logits.weight"] @ token + params["logits.bias"]
        return torch.softmax(logits / annealed, dim=0)
    require(isinstance(config, XMoEConfig), f"the paper has no router {type(config).__name__}")
    # X-MoE: cosines with one embedding per option, the first of which is "do nothing"
    point = params["project.weight"] @ token
    cosines = []
    for option in params["options"]:
        lengths = point.norm().clamp(min=1e-12) * option.norm().clamp(min=1e-12)
        cosines.append((point * option).sum() / lengths)
    temperature = torch.exp(params["log_temperature"].clamp(-20, 20))
    return torch.softmax(torch.stack(cosines) / temperature, dim=0)


def route(h: Tensor, params: Params, config: RouterConfig) -> Decisions:
    """Decide for every token of (time, dim): a = argmax_i p_i."""
    active, probs = [], []
    for token in h:
        p = probabilities(token, params, config)
        active.append(int(p.argmax()) == 1)
        probs.append(p[1])
    return Decisions(active, torch.stack(probs) if probs else h.new_zeros(0))


def counted(decisions: Decisions, config: SeqBoatConfig) -> list[Tensor]:
    """What every token's output is multiplied by: c, or in the gated form min(3 (2 p - 1), 1) where active."""
    found = []
    for active, p in zip(decisions.active, decisions.probs, strict=True):
        plain = config.form == "paper" or isinstance(config.router, XMoEConfig)
        weight = p if plain else torch.clamp(3 * (2 * p - 1), max=1)
        found.append(weight if active else torch.zeros_like(p))
    return found


def compress(h: Tensor, active: Sequence[bool]) -> tuple[Tensor, list[int]]:
    """The active tokens of (time, dim) as a shorter sequence, and where each came from.

    >>> compress(torch.tensor([[1.0], [2.0], [3.0]]), [True, False, True])
    (tensor([[1.], [3.]]), [0, 2])
    """
    places = [t for t in range(len(h)) if active[t]]
    return stack([h[t] for t in places], h), places


def extract(y: Tensor, places: Sequence[int], time: int) -> Tensor:
    """Put every token of a compressed sequence back where it came from, zeros elsewhere.

    >>> extract(torch.tensor([[5.0], [6.0]]), [0, 2], 3).flatten().tolist()
    [5.0, 0.0, 6.0]
    """
    tokens = [y.new_zeros(y.shape[-1]) for _ in range(time)]
    for slot, place in enumerate(places):
        tokens[place] = y[slot]
    return stack(tokens, y)


def rotate(x: Tensor, position: int) -> Tensor:
    """Rotate each pair of adjacent channels of (dim,) by position * 10000^(-2i/dim)."""
    turned = []
    for i in range(0, len(x), 2):
        angle = position * 10000.0 ** (-i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        turned += [x[i] * cos - x[i + 1] * sin, x[i + 1] * cos + x[i] * sin]
    return torch.stack(turned)


def softmax(scores: Tensor) -> Tensor:
    """exp(s) over the sum of all exp(s)."""
    return torch.softmax(scores, dim=0)


def squared_relu(scores: Tensor) -> Tensor:
    """max(s, 0)^2."""
    return torch.relu(scores) ** 2


def laplace(scores: Tensor) -> Tensor:
    """(1 + erf((s - mu) / (sigma sqrt 2))) / 2, mu = sqrt(1/2), sigma = sqrt(1 / (4 pi))."""
    mu, sigma = math.sqrt(1 / 2), math.sqrt(1 / (4 * math.pi))
    return (1 + torch.erf((scores - mu) / (sigma * math.sqrt(2)))) / 2


ATTENTION_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "softmax": (softmax, True),
    "relu2": (squared_relu, False),
    "laplace": (laplace, False),
}
"""The function of a query's scores, and whether they are scaled by 1 / sqrt(d_z) rather than 1 / keys."""

ROTATED = ("rotary", "rotary-original")
"""Positions that rotate queries and keys."""

DISTANCES: dict[str, Callable[[MemoryEntry, MemoryEntry], int]] = {
    "original": lambda query, key: key.position - query.position,
    "rotary-original": lambda query, key: key.position - query.position,
    "compressed": lambda query, key: key.slot - query.slot,
}
"""Positions that add a bias, and the distance it depends on."""


def project(
    token: Tensor, position: int, params: Params, config: GAUConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and gate of one token (dim,)."""
    base = silu(params["base.weight"] @ token + params["base.bias"])
    d_v = params["out.weight"].shape[1]
    z, gate, value = base[: config.d_z], base[config.d_z : -d_v], base[-d_v:]
    query = z * params["gamma"][0] + params["beta"][0]
    key = z * params["gamma"][1] + params["beta"][1]
    if config.positions in ROTATED:
        query, key = rotate(query, position), rotate(key, position)
    return query, key, value, gate


def sees(query_slot: int, key_slot: int, config: GAUConfig, causal: bool) -> bool:
    """Whether a query sees a key, given their slots in the compressed sequence."""
    if causal and key_slot > query_slot:
        return False
    if config.span == "full":
        return True
    if config.span == "chunk":
        return key_slot // config.window == query_slot // config.window
    # the working memory: w tokens before, or w / 2 on either side
    reach = config.window if causal else config.window // 2
    return abs(key_slot - query_slot) <= reach


def attend(
    query: Tensor, own: MemoryEntry, visible: Sequence[MemoryEntry], params: Params, config: GAUConfig
) -> Tensor:
    """f(q . k * scale + bias) v over the visible entries, including the query's own: (d_v,)."""
    function, by_width = ATTENTION_FUNCTIONS[config.attention]
    keys = len(visible) if config.span == "full" else config.window
    scale = 1 / math.sqrt(config.d_z) if by_width else 1 / keys
    scores = []
    for entry in visible:
        score = (query * entry.key).sum() * scale
        if config.positions in DISTANCES:
            table = params["bias.table"]
            furthest = len(table) // 2
            distance = DISTANCES[config.positions](own, entry)
            score = score + table[furthest + max(-furthest, min(furthest, distance))]
        if entry.weight is not None and by_width:
            score = score + torch.log(entry.weight)
        scores.append(score)
    weights = function(torch.stack(scores))
    if not by_width:
        weights = torch.stack(
            [w if e.weight is None else w * e.weight for w, e in zip(weights, visible, strict=True)]
        )
    return sum(
        (weight * entry.value for weight, entry in zip(weights, visible, strict=True)),
        torch.zeros_like(own.value),
    )


def close(gate: Tensor, attended: Tensor, params: Params) -> Tensor:
    """(g * o) W_h + b_h."""
    return params["out.weight"] @ (gate * attended) + params["out.bias"]


def keep(memory: list[MemoryEntry], config: GAUConfig) -> list[MemoryEntry]:
    """Drop the oldest entries beyond the window (first in, first out)."""
    return memory if config.span == "full" else memory[-config.window :]


def gau(
    tokens: Tensor,
    positions: Sequence[int],
    params: Params,
    config: GAUConfig,
    *,
    causal: bool,
    memory: Sequence[MemoryEntry] = (),
    counts: Sequence[Tensor] | None = None,
) -> tuple[Tensor, list[MemoryEntry]]:
    """Gated attention over the compressed sequence.

    Args:
        tokens: (slots, dim).
        positions: of the tokens in the original sequence.
        params: of the unit.
        config: of the unit.
        causal: whether a query sees no later keys.
        memory: entries of earlier tokens.
        counts: the weight of each token, in the gated form.

    Returns:
        (slots, dim), and the memory after the last token.
    """
    entries = list(memory)
    queries, gates = [], []
    for i, (token, position) in enumerate(zip(tokens, positions, strict=True)):
        query, key, value, gate = project(token, position, params, config)
        slot = entries[-1].slot + 1 if entries else 0
        entries.append(MemoryEntry(slot, position, key, value, None if counts is None else counts[i]))
        queries.append(query)
        gates.append(gate)
    outputs = []
    for query, gate, own in zip(queries, gates, entries[len(memory) :], strict=True):
        visible = [entry for entry in entries if sees(own.slot, entry.slot, config, causal)]
        outputs.append(close(gate, attend(query, own, visible, params, config), params))
    return stack(outputs, tokens), keep(entries, config)


def normalize(token: Tensor, params: Params, name: str) -> Tensor:
    """The norm of one token (dim,); batch norm with its running averages."""
    eps = 1e-5
    if name == "layer":
        centered = token - token.mean()
        return centered / torch.sqrt((centered**2).mean() + eps) * params["weight"] + params["bias"]
    if name == "batch":
        centered = token - params["running_mean"]
        return centered / torch.sqrt(params["running_var"] + eps) * params["weight"] + params["bias"]
    # RMSNorm has a weight per channel, ScaleNorm one for all
    return token / torch.sqrt((token**2).mean() + eps) * params["weight"]


def layer(x: Tensor, params: Params, config: SeqBoatConfig, state: LayerState | None = None) -> LayerOutput:
    """One SeqBoat layer over (time, dim).

    H = SiLU(SSM(S)),  out = SiLU(c * extract(GAU(compress(H))) + H W + b + S)
    """
    require(not config.ffn and config.budget == BudgetConfig(), "only the paper's layer is written out here")
    seen = 0 if state is None else state.seen
    norm, attention = under(params, "norm."), under(params, "sma.units.gau.")
    branch = stack([normalize(token, norm, config.norm) for token in x], x) if config.prenorm else x
    mixed, ssm_after = ssm(branch, under(params, "ssm."), config.ssm, None if state is None else state.ssm)
    h = silu(mixed)
    decisions = route(h, under(params, "sma.router."), config.router)
    tokens, places = compress(h, decisions.active)
    weights = counted(decisions, config)
    compressed, memory = gau(
        tokens,
        [seen + place for place in places],
        attention,
        config.gau,
        causal=config.causal,
        memory=[] if state is None else state.memory,
        counts=None if config.form == "paper" else [weights[place] for place in places],
    )
    extracted = extract(compressed, places, len(x))
    outputs = []
    for t in range(len(x)):
        out = params["linear.weight"] @ h[t] + params["linear.bias"] + x[t]
        if decisions.active[t]:
            out = out + weights[t] * extracted[t]
        out = silu(out)
        outputs.append(out if config.prenorm else normalize(out, norm, config.norm))
    after = LayerState(ssm_after, memory, seen + len(x)) if ssm_after is not None else None
    return LayerOutput(stack(outputs, x), after, decisions)


def decode_step(x: Tensor, params: Params, config: SeqBoatConfig, state: LayerState | None) -> LayerOutput:
    """One token (dim,) through a causal layer, with the working memory as a queue.

    Args:
        x: the token.
        params: of the layer.
        config: of the layer.
        state: after the preceding tokens; None at the beginning.
    """
    norm, attention = under(params, "norm."), under(params, "sma.units.gau.")
    seen = 0 if state is None else state.seen
    queue = [] if state is None else list(state.memory)
    branch = normalize(x, norm, config.norm) if config.prenorm else x
    mixed, ssm_after = ssm(
        branch[None], under(params, "ssm."), config.ssm, None if state is None else state.ssm
    )
    assert ssm_after is not None, "only causal layers decode"
    h = silu(mixed[0])
    p = probabilities(h, under(params, "sma.router."), config.router)
    active = int(p.argmax()) == 1
    out = params["linear.weight"] @ h + params["linear.bias"] + x
    if active:
        query, key, value, gate = project(h, seen, attention, config.gau)
        (weight,) = counted(Decisions([True], p[1:]), config)
        count = None if config.form == "paper" else weight
        own = MemoryEntry(queue[-1].slot + 1 if queue else 0, seen, key, value, count)
        # before the oldest entry is dropped: a query sees itself and up to `window` tokens before it
        queue.append(own)
        visible = [entry for entry in queue if sees(own.slot, entry.slot, config.gau, causal=True)]
        out = out + weight * close(gate, attend(query, own, visible, attention, config.gau), attention)
        if config.gau.span != "full" and len(queue) > config.gau.window:
            queue.pop(0)
    out = silu(out)
    y = out if config.prenorm else normalize(out, norm, config.norm)
    return LayerOutput(y, LayerState(ssm_after, queue, seen + 1), Decisions([active], p[1:]))
