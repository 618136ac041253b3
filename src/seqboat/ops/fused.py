"""Small operations with hand-written backward passes, where autograd would waste time or memory.

On a CPU an elementwise pass over a sequence costs as much as a matrix product of width 100, and several times
that if its operands have different memory layouts. These functions take fewer passes than a chain of operators, and
give each gradient the layout of its tensor (the scan returns its output channel by channel).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.ops.kernels.function import run_kernel
from seqboat.ops.kernels.registry import SEAM
from seqboat.ops.positions import rotate
from seqboat.ops.precision import wide_type
from seqboat.ops.transforms import differentiates_again, gradients_of, transformed

_silu_backward = torch.ops.aten.silu_backward


def is_plain(*layers: nn.Module) -> bool:
    """Whether all layers are bare `nn.Linear`s without hooks, so that their weights can be used directly."""
    return not any(type(layer) is not nn.Linear or has_hooks(layer) for layer in layers)


def has_hooks(layer: nn.Module) -> bool:
    """Whether calling a module does more than its own forward."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return any(hooks)


def in_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, cast as autocast would cast the operands of a matrix product."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(part.to(dtype) if part.dtype == torch.float32 else part for part in tensors)


def by_channel(x: Tensor) -> bool:
    """Whether a (tokens, dim) matrix is stored channel by channel."""
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) >= x.shape[0] > 1


PAGE, LINE = 4096, 128
"""Bytes: channels that lie a multiple of a page apart meet in the same few places of a processor's cache, which holds
only some of them at a time; a few cache lines between them are enough."""


def _meet(x: Tensor) -> bool:
    """Whether (batch, time, dim) is stored channel by channel, so that the channels of a token meet in a cache."""
    if x.dim() != 3 or x.device.type != "cpu":
        return False
    batch, time, _ = x.shape
    along, apart = (x.stride(0) == time or batch == 1) and x.stride(1) == 1, x.stride(2)
    return along and apart >= batch * time > 1 and apart * x.element_size() % PAGE == 0


def _apart(dim: int, tokens: int, like: Tensor) -> Tensor:
    """(dim, tokens), without values: channels that do not meet in a cache."""
    size = like.element_size()
    more = LINE // size if like.device.type == "cpu" and tokens * size % PAGE == 0 else 0
    return like.new_empty(dim, tokens + more)[:, :tokens]


class _SiluApart(torch.autograd.Function):
    """SiLU(x) of tokens stored by channel, with channels that do not meet in a cache."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = _apart(x.shape[-1], x[..., 0].numel(), x).t().unflatten(0, x.shape[:-1])
        return torch.ops.aten.silu.out(x, out=out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if differentiates_again():
            gate = torch.sigmoid(x)
            return grad * gate * (1 + x * (1 - gate))
        return _silu_backward(grad, x)


def silu(x: Tensor) -> Tensor:
    """SiLU(x), which `affine` and `combine` recompute in the backward pass instead of storing it.

    SiLU stores x for its own gradient anyway, and recomputing costs less than a second array of this size.
    """
    if torch.compiler.is_compiling() or transformed():
        return F.silu(x)
    y = _SiluApart.apply(x) if _meet(x) else F.silu(x)
    if y.requires_grad:
        y.silu_of = x  # type: ignore[union-attr]
    return y


def _silu_input(x: Tensor) -> Tensor | None:
    """(tokens, dim): the input from which `silu` made x, with the layout of x; None if x is not from `silu`."""
    before: Tensor | None = getattr(x, "silu_of", None)
    return None if before is None else before.reshape(-1, before.shape[-1])


FEW = 16
"""Outputs up to which a product with tokens that are stored by channel is computed the other way around."""


def _narrow(x: Tensor, weight: Tensor) -> bool:
    """Whether x W^T is a narrow product with tokens stored by channel, such as the logits of a router.

    Libraries of matrix products are slow at it: W x^T reads the channels in order instead.
    """
    return len(weight) <= FEW and not torch.compiler.is_compiling() and by_channel(x)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b on (tokens, dim)."""
    if _narrow(x, weight):
        return torch.addmm(bias[:, None], weight, x.t()).t()
    return torch.addmm(bias, x, weight.t())


class _Linear(torch.autograd.Function):
    """x W^T + b on (tokens, dim), with the gradient of x in the layout of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if before is None else before, weight)
        ctx.activate = before is not None
        return _affine(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if _narrow(x, weight):
            grad = grad.t().contiguous().t()
        if ctx.needs_input_grad[0]:
            dx = torch.mm(weight.t(), grad.t()).t() if by_channel(x) else torch.mm(grad, weight)
        if ctx.needs_input_grad[1]:
            dw = torch.mm(grad.t(), F.silu(x) if ctx.activate else x)
        if ctx.needs_input_grad[2]:
            db = grad.sum(dim=0)
        return dx, dw, db, None


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b on (..., dim); all tensors have the same dtype."""
    flat = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and not transformed():
        y = _Linear.apply(flat, weight, bias, _silu_input(x))
    else:
        y = _affine(flat, weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a layer to (..., dim): a bare Linear by `affine`; anything else, such as an adapter, by calling it."""
    if not is_plain(layer) or layer.bias is None:
        return layer(x)
    parts = in_autocast(x, layer.weight, layer.bias)  # type: ignore[arg-type]
    with torch.autocast(x.device.type, enabled=False):
        return affine(*parts)


class _Combine(torch.autograd.Function):
    """x + h W^T + b with y added at some rows, in one array; the gradient of h has the layout of h."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h: Tensor,
        weight: Tensor,
        bias: Tensor,
        rows: Tensor,
        y: Tensor,
        before: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(h if before is None else before, weight, rows)
        ctx.activate = before is not None
        return torch.add(x, bias).addmm_(h, weight.t()).index_add_(0, rows, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, rows = ctx.saved_tensors
        if by_channel(h) and not (differentiates_again() or torch.compiler.is_compiling()):
            dh = torch.mm(weight.t(), grad.t(), out=_apart(h.shape[1], h.shape[0], h)).t()
        else:
            dh = torch.mm(weight.t(), grad.t()).t() if by_channel(h) else torch.mm(grad, weight)
        dweight = torch.mm(grad.t(), F.silu(h) if ctx.activate else h)
        return grad, dh, dweight, grad.sum(dim=0), None, grad.index_select(0, rows), None


def combine(layer: nn.Module | None, x: Tensor, h: Tensor, rows: Tensor, y: Tensor) -> Tensor:
    """x + layer(h), with y added at some tokens.

    Args:
        layer: applied to every token, usually a Linear; None leaves the term out.
        x, h: (batch, time, dim).
        rows: (tokens,), indices into the flattened (batch * time) sequence.
        y: (tokens, dim).
    """
    if layer is not None and is_plain(layer) and layer.bias is not None and not transformed():
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if x.dtype == h.dtype == y.dtype == weight.dtype:
            dim = x.shape[-1]
            with torch.autocast(x.device.type, enabled=False):
                parts = x.reshape(-1, dim), h.reshape(-1, dim), weight, layer.bias, rows, y, _silu_input(h)
                return _Combine.apply(*parts).view(x.shape)
    summed = x if layer is None else linear(layer, h) + x
    return summed.reshape(-1, x.shape[-1]).index_add(0, rows, y.to(summed.dtype)).view(x.shape)


class _Take(torch.autograd.Function):
    """Rows of (tokens, dim), with the gradient in the layout of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.like = x.shape, by_channel(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        shape, channels = ctx.like
        if channels:
            return grad.new_zeros(shape[1], shape[0]).index_add_(1, rows, grad.t()).t(), None
        return grad.new_zeros(shape).index_add_(0, rows, grad), None


def take(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of (tokens, dim) at these indices, which must be distinct."""
    return x.index_select(0, rows) if transformed() else _Take.apply(x, rows)


class _Gather(torch.autograd.Function):
    """The same rows and some of them again; the gradient is added up in one array."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, alone: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        ctx.shape, ctx.alone = x.shape, alone
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, taken: Tensor | None) -> tuple[Tensor | None, None, None]:
        (rows,) = ctx.saved_tensors
        if taken is None:
            return grad, None, None
        if grad is None:
            return taken.new_zeros(ctx.shape).index_add_(0, rows, taken), None, None
        if ctx.alone and not differentiates_again():
            return grad.index_add_(0, rows, taken), None, None
        return grad.index_add(0, rows, taken), None, None


def gather(x: Tensor, rows: Tensor, alone: bool) -> tuple[Tensor, Tensor]:
    """(..., dim) as it is, and its rows at these distinct indices: fewer launches, and less traffic, than `take`.

    Args:
        x: the sequence.
        rows: indices into the flattened sequence.
        alone: whether nothing else holds the gradient of the first result, so that it may be added to in place: true
            if that comes out of a matrix product.
    """
    if transformed():
        return x, x.reshape(-1, x.shape[-1]).index_select(0, rows)
    whole, taken = _Gather.apply(x.reshape(-1, x.shape[-1]), rows, alone)
    whole = whole.view(x.shape)
    before = getattr(x, "silu_of", None)
    if before is not None:
        whole.silu_of = before
    return whole, taken


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    """(..., 1): inner products over the last dimension, without materializing a * b."""
    dim = a.shape[-1]
    return torch.bmm(a.reshape(-1, 1, dim), b.reshape(-1, dim, 1)).view(*a.shape[:-1], 1)


def _plain_scale_by_rms(x: Tensor, weight: Tensor, eps: float, activate: bool) -> Tensor:
    inner = F.silu(x) if activate else x
    square = inner.to(wide_type(x)).square().sum(dim=-1, keepdim=True) / max(x.shape[-1], 1)
    return inner * torch.rsqrt(square + eps).to(x.dtype) * weight.to(x.dtype)


class _ScaleByRMS(torch.autograd.Function):
    """x / rms(x) * weight over the last dimension; with `activate`, of SiLU(x), recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, activate: bool) -> Tensor:
        inner = F.silu(x) if activate else x
        square = torch.linalg.vector_norm(inner, dim=-1, keepdim=True, dtype=wide_type(x)).square_()
        inverse = square.div_(max(x.shape[-1], 1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.activate, ctx.eps = activate, eps
        scale = inverse.to(x.dtype) if weight.dim() else (inverse * weight).to(x.dtype)
        y = inner.mul_(scale) if activate else inner * scale
        return y.mul_(weight.to(x.dtype)) if weight.dim() else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        if differentiates_again():
            return gradients_of(_plain_scale_by_rms, (x, weight, ctx.eps, ctx.activate), [grad])
        inner = F.silu(x) if ctx.activate else x
        if weight.dim() == 0:
            product = _row_products(grad, inner).to(inverse.dtype)
            dweight = (product * inverse).sum()
            dx = grad * (inverse * weight).to(x.dtype)
            product = product * weight
        else:
            scaled = grad * weight.to(x.dtype)
            dweight = torch.einsum("...d,...d->d", grad, inner * inverse.to(x.dtype))
            product = _row_products(scaled, inner).to(inverse.dtype)
            dx = scaled.mul_(inverse.to(x.dtype))
        radial = (product * inverse.pow(3)).to(x.dtype)
        dx.addcmul_(inner, radial, value=-1 / max(x.shape[-1], 1))
        if ctx.activate:
            dx = _silu_backward(dx, x)
        return dx, dweight.to(weight.dtype), None, None


def scale_by_rms(x: Tensor, weight: Tensor, eps: float, activate: bool = False) -> Tensor:
    """Scale to unit root mean square over the last dimension, then multiply by the weight.

    Args:
        x: (..., dim).
        weight: (), one for all channels, or (dim,).
        eps: added to the mean square.
        activate: whether to apply SiLU first.
    """
    if transformed() or torch.compiler.is_compiling():
        return _plain_scale_by_rms(x, weight, eps, activate)
    if SEAM.open:
        return run_kernel("norm", _plain_norm, x, weight, None, eps, activate)
    return _ScaleByRMS.apply(x, weight, eps, activate)


def _plain_norm_of_silu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(F.silu(x), x.shape[-1:], weight, bias, eps)


def _plain_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, activate: bool) -> Tensor:
    """Both norms, for kernels: a layer norm of SiLU if there is a bias, else by root mean square."""
    if bias is None:
        return _ScaleByRMS.apply(x, weight, eps, activate)
    return _NormOfSilu.apply(x, weight, bias, eps)


class _NormOfSilu(torch.autograd.Function):
    """Layer norm of SiLU(x) over the last dimension; the backward pass recomputes SiLU instead of storing it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, inverse = torch.native_layer_norm(F.silu(x), x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        if differentiates_again():
            return gradients_of(_plain_norm_of_silu, (x, weight, bias, ctx.eps), [grad])
        needed = [True, *ctx.needs_input_grad[1:3]]
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            grad, F.silu(x), x.shape[-1:], mean, inverse, weight, bias, needed
        )
        _silu_backward.grad_input(dx, x, grad_input=dx)
        return dx, dweight, dbias, None


def norm_of_silu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of SiLU(x) over the last dimension.

    Args:
        x: (..., dim).
        weight, bias: (dim,).
        eps: added to the variance.
    """
    if transformed() or torch.compiler.is_compiling():
        return _plain_norm_of_silu(x, weight, bias, eps)
    if SEAM.open:
        return run_kernel("norm", _plain_norm, x, weight, bias, eps, True)
    return _NormOfSilu.apply(x, weight, bias, eps)


def _make_gates(before: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value, gate and z from the projection before its activation."""
    d_z = gamma.shape[1]
    d_v = (before.shape[1] - d_z) // 2
    z, gate, value = F.silu(before).split([d_z, d_v, d_v], dim=1)
    return torch.addcmul(beta[0], z, gamma[0]), torch.addcmul(beta[1], z, gamma[1]), value, gate, z


def plain_gates(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _make_gates(torch.addmm(bias, x, weight.t()), gamma, beta)[:4]


class _Gates(torch.autograd.Function):
    """SiLU(x W^T + b), split into z, gate and value; query and key from z. One buffer in each pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        before = torch.addmm(bias, x, weight.t())
        query, key, value, gate, z = _make_gates(before, gamma, beta)
        ctx.save_for_backward(x, weight, bias, gamma, beta, before, z)
        return query, key, value, gate

    @staticmethod
    def backward(
        ctx: Any, dquery: Tensor, dkey: Tensor, dvalue: Tensor, dgate: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight, bias, gamma, beta, before, z = ctx.saved_tensors
        if differentiates_again():
            inputs = x, weight, bias, gamma, beta
            return gradients_of(plain_gates, inputs, [dquery, dkey, dvalue, dgate])
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
        layer: projects to d_z + 2 d_v.
        x: the tokens.
        gamma, beta: (2, d_z), scale and shift of query and key.
    """
    if is_plain(layer) and layer.bias is not None:
        parts = in_autocast(x, layer.weight, layer.bias, gamma, beta)
        with torch.autocast(x.device.type, enabled=False):
            if torch.is_grad_enabled() and not transformed():
                return _Gates.apply(*parts)
            return plain_gates(*parts)
    d_z = gamma.shape[1]
    d_v = (layer.out_features - d_z) // 2
    z, gate, value = F.silu(layer(x)).split([d_z, d_v, d_v], dim=-1)
    query, key = (torch.addcmul(beta[i], z, gamma[i]).to(z.dtype) for i in (0, 1))
    return query, key, value, gate


def kernel_gates(
    layer: nn.Linear, x: Tensor, gamma: Tensor, beta: Tensor, position: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """As `gates`, with queries and keys rotated by `position` if given; None unless a kernel may compute it."""
    if not SEAM.open or not is_plain(layer) or layer.bias is None or transformed():
        return None
    parts = in_autocast(x, layer.weight, layer.bias)
    with torch.autocast(x.device.type, enabled=False):
        found: tuple[Tensor, Tensor, Tensor, Tensor] = run_kernel(
            "gates", _plain_open_gates, affine(*parts), gamma, beta, position
        )
        return found


def _plain_open_gates(
    before: Tensor, gamma: Tensor, beta: Tensor, position: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, gate, _ = _make_gates(before, gamma.to(before.dtype), beta.to(before.dtype))
    if position is not None:
        query, key = rotate(torch.stack([query, key]), position).unbind(0)
    return query, key, value, gate
