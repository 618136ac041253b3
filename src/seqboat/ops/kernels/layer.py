"""What joins the parts of a layer, as operations with kernels for devices; None where the usual chain should run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.ops.fused import in_autocast, is_plain
from seqboat.ops.kernels.function import run_kernel
from seqboat.ops.kernels.registry import SEAM, pick
from seqboat.ops.transforms import transformed


def _fits(operation: str, x: Tensor) -> bool:
    """Whether a kernel will compute this call."""
    if not SEAM.open or transformed() or torch.compiler.is_compiling():
        return False
    return pick(operation, device=x.device, dtype=x.dtype) is not None


def kernel_route(
    x: Tensor, rate: float, layer: nn.Linear, log_temperature: Tensor, narrow: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Hidden tokens dropout(SiLU(x)), and the decisions of a tempered softmax over two options about them.

    Args:
        x: (..., dim), in float32.
        rate: of dropout.
        layer: to the two logits, (2, dim), in float32.
        log_temperature: (1,).
        narrow: whether autocast may narrow the hidden tokens. Decisions are made before that.

    Returns:
        hidden (..., dim), active (..., 1) bool and probs (..., 1).
    """
    if not is_plain(layer) or layer.bias is None or not x.dtype == layer.weight.dtype == torch.float32:
        return None
    if not _fits("route", x):
        return None
    flat = x.reshape(-1, x.shape[-1])
    # drawn by torch, so that both passes see the same in every implementation
    keep = torch.empty_like(flat, dtype=torch.bool).bernoulli_(1 - rate) if rate else None
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if narrow and autocast else x.dtype
    with torch.autocast(x.device.type, enabled=False):
        hidden, probs, active = run_kernel(
            "route", plain_route, flat, keep, rate, layer.weight, layer.bias, log_temperature, dtype
        )
    shape = x.shape[:-1]
    return hidden.view(x.shape), active.view(*shape, 1), probs.view(*shape, 1)


def plain_route(
    x: Tensor,
    keep: Tensor | None,
    rate: float,
    weight: Tensor,
    bias: Tensor,
    log_temperature: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in torch, on (tokens, dim)."""
    hidden = F.silu(x)
    if keep is not None:
        hidden = hidden * keep / (1 - rate)
    logits = F.linear(hidden, weight, bias)
    logit = (logits[:, 1] - logits[:, 0]) / torch.exp(log_temperature.clamp(-20.0, 20.0))
    probs = torch.sigmoid(logit)
    return hidden.to(dtype), probs, (probs > 0.5) & (logit < torch.inf)


def kernel_scatter(
    layer: nn.Module | None, base: Tensor | None, h: Tensor, y: Tensor, active: Tensor, probs: Tensor
) -> Tensor | None:
    """base + layer(h), with y times its probability added at active tokens.

    Args:
        layer: applied to every token, with a bias.
        base: (batch, time, dim); zeros by default.
        h: (batch, time, dim).
        y: (tokens, dim), of the active tokens in their order.
        active, probs: (batch, time, 1).
    """
    if layer is None or not is_plain(layer) or layer.bias is None or not _fits("scatter", h):
        return None
    dim = h.shape[-1]
    flat, weight = in_autocast(h.reshape(-1, dim), layer.weight)  # type: ignore[arg-type]
    with torch.autocast(h.device.type, enabled=False):
        flags = active.reshape(-1)
        inputs: tuple[Any, ...] = (
            torch.mm(flat, weight.t()),
            layer.bias,
            None if base is None else base.reshape(-1, dim),
            y,
            probs.reshape(-1),
            flags,
            flags.cumsum(0, dtype=torch.int32),
            h.dtype if base is None else base.dtype,
        )
        result: Tensor = run_kernel("scatter", plain_scatter, *inputs)
    return result.view(h.shape)


def plain_scatter(
    product: Tensor,
    bias: Tensor,
    base: Tensor | None,
    y: Tensor,
    probs: Tensor,
    active: Tensor,
    places: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The same in torch, from the product of h and the weight of the layer, on (tokens, dim)."""
    summed = product.to(dtype) + bias.to(dtype)
    summed = summed if base is None else summed + base
    rows = active.nonzero().squeeze(1)
    return summed.index_add(0, rows, (y * probs.index_select(0, rows)[:, None]).to(dtype))
