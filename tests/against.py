"""Layers against slow versions of themselves: outputs and all gradients, rows of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqboat.core.mixer import Mixer
from seqboat.mixers.block import Block


def enlarge(layer: Any, seed: int = 1) -> Any:
    """The layer in float64 and eval mode with weights large enough that every part of it shows."""
    generator = torch.Generator().manual_seed(seed)
    layer = layer.to(torch.float64).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return layer


def check_against(layer: Mixer, oracle: Callable[[Tensor], Tensor], lengths: list[int]) -> None:
    """Compare a layer on padded rows with an oracle on each row (time, d_model) alone, gradients included."""
    time = max(lengths)
    generator = torch.Generator().manual_seed(2)
    shape = len(lengths), time, layer.d_model
    x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    mask = torch.arange(time) < torch.tensor(lengths)[:, None]
    weights = torch.randn(shape, generator=generator, dtype=torch.float64) * mask[..., None]
    parameters = {"x": x, **dict(layer.named_parameters())}
    rows = [oracle(x[i, :n]) for i, n in enumerate(lengths)]
    expected = torch.stack([F.pad(row, (0, 0, 0, time - len(row))) for row in rows])
    y = layer(x, mask).y
    torch.testing.assert_close(y, expected)
    found, wanted = (
        torch.autograd.grad((out * weights).sum(), list(parameters.values())) for out in (y, expected)
    )
    for name, one, other in zip(parameters, found, wanted, strict=True):
        torch.testing.assert_close(one, other, msg=name)


def by_head(x: Tensor, heads: int) -> list[Tensor]:
    """The part of each head in (time, heads * d_head)."""
    return list(x.chunk(heads, dim=-1))


def around(block: Block, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """A layer around an attention, by its equations; for LayerNorm and ReLU or GELU."""

    def ffn(y: Tensor) -> Tensor:
        hidden = y @ block.ffn.hidden.weight.T + block.ffn.hidden.bias
        hidden = F.relu(hidden) if block.config.activation == "relu" else F.gelu(hidden)
        return hidden @ block.ffn.out.weight.T + block.ffn.out.bias

    def out(y: Tensor) -> Tensor:
        return y @ block.out.weight.T + block.out.bias

    if block.config.prenorm:
        y = x + out(attend(block.norm(x)))
        return y + ffn(block.ffn_norm(y))
    y = block.norm(x + out(attend(x)))
    return block.ffn_norm(y + ffn(y))
