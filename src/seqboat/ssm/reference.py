"""State-space kernels as loops, one sequence at a time: the specification of the fast ones.

Every function takes (time, dim) in any floating type and walks over its tokens in Python. Parameters come under the
names that the kernel's module gives them, complex ones as (real, imaginary) pairs. Bidirectional layers own two of
everything (MD-EMA, S4D) or two readouts C: one reads from left to right, the other from right to left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqboat.core.checks import require
from seqboat.ssm.conv import EMAConvConfig
from seqboat.ssm.diagonal import SSMConfig
from seqboat.ssm.ema import EMAConfig
from seqboat.ssm.liquid_s4 import LiquidS4Config
from seqboat.ssm.s4 import S4Config
from seqboat.ssm.s4d import S4DConfig
from seqboat.ssm.s5 import S5Config

Params = Mapping[str, Tensor]


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


def ema_conv(
    x: Tensor, params: Params, config: EMAConvConfig, state: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """MD-EMA and a short convolution; the state is that of the averages and the last conv - 1 inputs."""
    averages, recent = (None, None) if state is None else state
    y, after = ema(x, params, config, averages)
    kernel = [torch.zeros_like(params["skip"]), *params["taps"][0]]
    near, recent = truncated(x, kernel, recent)
    if after is not None:
        return y + near, (after, recent)
    kernel = [torch.zeros_like(params["skip"]), *params["taps"][1]]
    return y + near + truncated(x.flip(0), kernel, None)[0].flip(0), None


def s4d(
    x: Tensor, params: Params, config: S4DConfig, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """S4D over (time, dim), as `ema`; its states are complex."""
    return run(x, s4d_directions(params, config.rule), params["skip"], config.truncation, state)


def _poles(params: Params) -> Tensor:
    return torch.complex(-torch.exp(params["log_real"]), params["imag"])


def _complex(pairs: Tensor) -> Tensor:
    return torch.complex(pairs[..., 0], pairs[..., 1])


def _both_ways(
    x: Tensor, params: Params, walk: Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]], state: Any
) -> tuple[Tensor, Any]:
    """One walk per readout C, the second from right to left, and the skip."""
    readouts = _complex(params["c"])
    y, after = walk(x, readouts[0], state)
    if len(readouts) == 2:
        other, after = walk(x.flip(0), readouts[1], None)[0].flip(0), None
        y = y + other
    return y + params["skip"] * x, after


def s4(
    x: Tensor, params: Params, config: S4Config, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """S4 over (time, dim): A = diag(poles) - P P*, both of each conjugate pair, discretized by the bilinear rule."""
    copies = len(params["log_dt"]) // len(params["imag"])  # channels share systems in turn
    poles, p, b = (
        torch.cat([part, part.conj()], dim=-1).repeat(copies, 1)
        for part in (_poles(params), _complex(params["p"]), _complex(params["b"]))
    )
    matrix = torch.diag_embed(poles) - p[:, :, None] * p.conj()[:, None]
    half = torch.exp(params["log_dt"])[:, None, None] / 2
    one = torch.eye(poles.shape[1], dtype=poles.dtype)
    step = torch.linalg.solve(one - half * matrix, one + half * matrix)
    drive = torch.linalg.solve(one - half * matrix, 2 * half * b[:, :, None])[..., 0]

    def walk(tokens: Tensor, c: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        state = torch.zeros_like(poles) if state is None else torch.cat([state, state.conj()], dim=-1)
        outputs = []
        for token in tokens:
            state = (step @ state[..., None])[..., 0] + drive * token[:, None]
            outputs.append((torch.cat([c, c.conj()], dim=-1) * state).sum(dim=-1).real)
        return stack(outputs, tokens), state[:, : c.shape[1]]

    return _both_ways(x, params, walk, state)


def s5(
    x: Tensor, params: Params, config: S5Config, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """S5 over (time, dim): s_t = q s_{t-1} + (q - 1) / poles (B x_t), y = 2 Re(C s), one system for all channels."""
    poles = _poles(params)
    q = torch.exp(poles * torch.exp(params["log_dt"]))
    drive = ((q - 1) / poles)[:, None] * _complex(params["b"])

    def walk(tokens: Tensor, c: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        state = torch.zeros_like(poles) if state is None else state
        outputs = []
        for token in tokens:
            state = q * state + drive @ token.to(drive.dtype)
            outputs.append(2 * (c @ state).real)
        return stack(outputs, tokens), state

    return _both_ways(x, params, walk, state)


def liquid_s4(
    x: Tensor, params: Params, config: LiquidS4Config, state: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Liquid-S4 over (time, dim); its state is that of the system and the last order - 1 inputs."""
    poles = _poles(params)
    q = torch.exp(poles * torch.exp(params["log_dt"])[:, None])
    drive = (q - 1) / poles * _complex(params["b"])
    past = config.order - 1

    def walk(
        tokens: Tensor, c: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        system, history = (torch.zeros_like(poles), tokens.new_zeros(past, tokens.shape[1]))
        if state is not None:
            system, history = state
        inputs, outputs = list(history), []
        for token in tokens:
            inputs.append(token)
            system, at_once = q * system, torch.zeros_like(system)
            together = torch.ones_like(token)
            for order in range(1, config.order + 1):
                together = together * inputs[-order]
                term = drive**order * together[:, None]
                if order == 1 or config.kernel == "kb":
                    system = system + term
                else:
                    at_once = at_once + term
            outputs.append(2 * (c * (system + at_once)).sum(dim=-1).real)
        return stack(outputs, tokens), (system, stack(inputs[len(inputs) - past :], tokens))

    return _both_ways(x, params, walk, state)


KERNELS: dict[type[SSMConfig], Callable[..., tuple[Tensor, Any]]] = {
    EMAConfig: ema,
    EMAConvConfig: ema_conv,
    S4DConfig: s4d,
    S4Config: s4,
    S5Config: s5,
    LiquidS4Config: liquid_s4,
}
"""The loops of each kernel."""


def ssm(x: Tensor, params: Params, config: SSMConfig, state: Any = None) -> tuple[Tensor, Any]:
    """The state-space kernel that a configuration names: its outputs, and its state if it is causal."""
    require(type(config) in KERNELS, f"{type(config).__name__} has no reference")
    return KERNELS[type(config)](x, params, config, state)
