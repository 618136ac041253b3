"""Loops to compare with: kernels the paper does not write out, and parts of layers with a matrix state.

The kernels join those of `seqboat.reference`, whose layer then runs with any of them: import this module before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from mixer_cases import assert_near
from seqboat.core.nn import EPS
from seqboat.reference import KERNELS, Params, ema, stack, truncated
from seqboat.ssm.conv import EMAConvConfig
from seqboat.ssm.liquid_s4 import LiquidS4Config
from seqboat.ssm.s4 import S4Config
from seqboat.ssm.s5 import S5Config


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


KERNELS.update({EMAConvConfig: ema_conv, S4Config: s4, S5Config: s5, LiquidS4Config: liquid_s4})


# layers with a matrix as their state


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + EPS).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def convolved(layer: Any, inputs: list[Tensor]) -> Tensor:
    """The newest token after the convolution, from all tokens so far."""
    last = inputs[::-1][: layer.taps]
    return sum(layer.conv_weight[layer.taps - 1 - age] * u for age, u in enumerate(last))


def with_block(layer: Any, x: Tensor) -> Tensor:
    """The feed-forward block on one token."""
    if not layer.config.ffn:
        return x
    gate, value = (layer.block.ffn.hidden.weight @ normed(x, layer.block.ffn_norm.weight)).chunk(2)
    return x + layer.block.ffn.out.weight @ (silu(gate) * value)


def assert_same_with_gradients(
    layer: Any, x: Tensor, results: Sequence[Tensor], tolerance: float = 1e-9
) -> None:
    """Both results and their gradients agree, by the inputs and by every parameter."""
    weight = torch.randn_like(x)
    parameters = {"x": x, **dict(layer.named_parameters())}
    assert_near(results[0], results[1], tolerance, "y")
    first, second = (
        torch.autograd.grad((y * weight).sum(), list(parameters.values()), retain_graph=True) for y in results
    )
    for key, one, two in zip(parameters, first, second, strict=True):
        assert_near(one, two, tolerance, key)


@contextmanager
def in_double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What casts to float32 casts to float64: transformers widens to no more than float32."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch, "float32", torch.float64)
        yield
