"""Small differentiable parts with hand-written backward passes, where autograd's own would waste time or memory.

On a CPU an elementwise pass over a sequence costs as much as a matrix product of width 100, and several times
that if its operands lie differently in memory. These functions take fewer passes than a chain of operators, and
give gradients the layout of the tensor they belong to (the scan returns its output channel by channel).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_silu_backward = torch.ops.aten.silu_backward


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is just a Linear, so that its weights may be used without calling it."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is nn.Linear and not any(hooks)


def in_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the type that autocast would give a matrix product of them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(part.to(dtype) if part.dtype == torch.float32 else part for part in tensors)


def by_channel(x: Tensor) -> bool:
    """Whether the (tokens, dim) matrix lies channel by channel in memory."""
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) >= x.shape[0] > 1


class _Linear(torch.autograd.Function):
    """x W^T + b on (tokens, dim), with the gradient of x laid out as x is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(weight.t(), grad.t()).t() if by_channel(x) else torch.mm(grad, weight)
        if ctx.needs_input_grad[1]:
            dw = torch.mm(grad.t(), x)
        if ctx.needs_input_grad[2]:
            db = grad.sum(dim=0)
        return dx, dw, db


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """A Linear with a bias on (..., dim); anything else, adapters and hooks included, is simply called."""
    if not is_plain(layer) or layer.bias is None:
        return layer(x)
    flat, weight, bias = in_autocast(x.flatten(0, -2), layer.weight, layer.bias)  # type: ignore[arg-type]
    with torch.autocast(x.device.type, enabled=False):
        return _Linear.apply(flat, weight, bias).unflatten(0, x.shape[:-1])


class _Take(torch.autograd.Function):
    """Rows of (tokens, dim), with the gradient laid out as x is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.like = x.shape, by_channel(x)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        shape, channels = ctx.like
        if channels:
            return grad.new_zeros(shape[1], shape[0]).index_add_(1, rows, grad.t()).t(), None
        return grad.new_zeros(shape).index_add_(0, rows, grad), None


def take(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of (tokens, dim) at distinct places."""
    return _Take.apply(x, rows)


class _ScaleByRMS(torch.autograd.Function):
    """x / rms(x) * weight over the last dimension; weight is a number or one per channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_wide(x)).square_()
        inverse = square.div_(max(x.shape[-1], 1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        if weight.dim() == 0:
            return x * (inverse * weight).to(x.dtype)
        return (x * inverse.to(x.dtype)).mul_(weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        dim = max(x.shape[-1], 1)
        if weight.dim() == 0:
            inner = (grad * x).sum(dim=-1, keepdim=True, dtype=inverse.dtype)
            dweight = (inner * inverse).sum()
            inner, scale = inner * weight, inverse * weight
            dx = grad * scale.to(x.dtype)
        else:
            product = grad * x
            dweight = (product * inverse.to(x.dtype)).flatten(0, -2).sum(dim=0)
            inner = (product * weight.to(x.dtype)).sum(dim=-1, keepdim=True, dtype=inverse.dtype)
            dx = (grad * inverse.to(x.dtype)).mul_(weight.to(x.dtype))
        dx.addcmul_(x, (inner * inverse.pow(3)).to(x.dtype), value=-1 / dim)
        return dx, dweight.to(weight.dtype), None


def scale_by_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Unit root mean square over the last dimension, times the weight."""
    return _ScaleByRMS.apply(x, weight, eps)


class _Gates(torch.autograd.Function):
    """SiLU(x W^T + b) split in z, gate and value; query and key from z. One buffer forward, one backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        d_z = gamma.shape[1]
        d_v = (weight.shape[0] - d_z) // 2
        before = torch.addmm(bias, x, weight.t())
        after = F.silu(before)
        z, gate, value = after.split([d_z, d_v, d_v], dim=1)
        ctx.save_for_backward(x, weight, before, z, gamma)
        query = torch.addcmul(beta[0], z, gamma[0])
        key = torch.addcmul(beta[1], z, gamma[1])
        return query, key, value, gate

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dquery: Tensor, dkey: Tensor, dvalue: Tensor, dgate: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, weight, before, z, gamma = ctx.saved_tensors
        d_z = gamma.shape[1]
        d_v = (weight.shape[0] - d_z) // 2
        dbeta = torch.stack([dquery.sum(dim=0), dkey.sum(dim=0)])
        dgamma = torch.stack([(dquery * z).sum(dim=0), (dkey * z).sum(dim=0)])
        dz = torch.addcmul(dquery * gamma[0], dkey, gamma[1])
        grad = torch.empty_like(before)
        at = 0
        for part, width in ((dz, d_z), (dgate, d_v), (dvalue, d_v)):
            place = slice(at, at + width)
            _silu_backward.grad_input(part, before[:, place], grad_input=grad[:, place])
            at += width
        return torch.mm(grad, weight), torch.mm(grad.t(), x), grad.sum(dim=0), dgamma, dbeta


def gates(layer: nn.Linear, x: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and gate of a gated attention unit on (tokens, dim).

    Args:
        layer: to d_z + 2 d_v.
        x: the tokens.
        gamma, beta: (2, d_z), scale and shift of query and key.
    """
    if is_plain(layer) and layer.bias is not None:
        parts = in_autocast(x, layer.weight, layer.bias, gamma, beta)
        with torch.autocast(x.device.type, enabled=False):
            return _Gates.apply(*parts)
    d_z = gamma.shape[1]
    d_v = (layer.out_features - d_z) // 2
    z, gate, value = F.silu(layer(x)).split([d_z, d_v, d_v], dim=-1)
    query, key = (torch.addcmul(beta[i], z, gamma[i]).to(z.dtype) for i in (0, 1))
    return query, key, value, gate


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
