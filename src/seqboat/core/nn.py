"""Parts that several mixers use: norms, convolution by FFT, masked means, initial weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice

Made = TypeVar("Made")


_VERSION = attrgetter("_version")


class Kept:
    """What follows from weights alone, kept from one step of decoding to the next.

    It is made again if a weight was replaced or changed in place, and after `forget`, which layers call for every new
    sequence: changes through `.data` leave no trace.
    """

    def __init__(self) -> None:
        self._key: list[int] | None = None
        self.value: Any = None

    def forget(self) -> None:
        if self._key is not None and not torch.compiler.is_compiling():
            self._key = self.value = None

    def get(self, weights: Iterable[Tensor | None], make: Callable[[], Made]) -> Made:
        """What `make` makes of these weights."""
        if torch.compiler.is_compiling():
            return make()
        given = [w for w in weights if w is not None]
        try:
            key = [*map(Tensor.data_ptr, given), *map(_VERSION, given)]
        except RuntimeError:  # inference tensors count no changes
            return make()
        if self._key != key:
            self.value, self._key = make(), key
        found: Made = self.value
        return found


NormName = Literal["layer", "batch", "scale", "rms"]
NORMS = ("layer", "batch", "scale", "rms")
EPS = 1e-5
"""Added to variances and mean squares before the root."""
MOMENTUM = 0.1
"""Weight of a new batch in the running averages of `BatchNorm`."""


def make_norm(name: NormName, d_model: int) -> Norm:
    """A norm by its name."""
    check_choice("norm", name, NORMS)
    if name == "batch":
        return BatchNorm(d_model)
    if name == "layer":
        return LayerNorm(d_model)
    return ScaleNorm(d_model) if name == "scale" else RMSNorm(d_model)


class Norm(nn.Module):
    """A norm over (..., dim) that may look at the mask of its tokens."""

    affine = True
    """whether there is a learned scale (and shift)"""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize.

        Args:
            x: (batch, time, dim), or (batch, dim) in a step.
            mask: (batch, time), True on real tokens.
        """
        raise NotImplementedError

    def drop_affine(self) -> None:
        """Give up the learned scale and shift: the normalized values are the output."""
        self.affine = False
        for name in list(self._parameters):
            self.register_parameter(name, None)


class LayerNorm(Norm):
    """Zero mean and unit variance over the channels of a token, then a learned scale and shift."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, EPS)


class _RootMeanSquareNorm(Norm):
    """Unit root mean square over the channels of a token, then a learned scale."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
        return x * inverse.to(x.dtype) * self._scale(x).to(x.dtype)

    def _scale(self, x: Tensor) -> Tensor:
        return self.weight if self.affine else x.new_ones(())


class RMSNorm(_RootMeanSquareNorm):
    """Unit root mean square over the channels of a token, then a learned scale per channel."""

    def __init__(self, d_model: int) -> None:
        super().__init__((d_model,))


class ScaleNorm(_RootMeanSquareNorm):
    """Unit root mean square over the channels of a token, then one learned scale for all of them."""

    def __init__(self, d_model: int) -> None:
        super().__init__(())


class BatchNorm(Norm):
    """Zero mean and unit variance per channel over all real tokens of the batch; running averages in eval.

    If a batch is split over several processes, `total` sums over them, so that the moments are those of the whole
    batch; some processes may have no token at all.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.total: Callable[[Tensor], Tensor] | None = None
        """differentiable sum over the processes; None where there is one"""
        self.tracking = True
        """whether training batches update the running averages"""
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.register_buffer("running_mean", torch.zeros(d_model))
        self.register_buffer("running_var", torch.ones(d_model))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.training:
            if mask is not None:
                # what padding holds, even NaN, must not reach a gradient
                x = torch.where(mask[..., None], x, 0)
            mean, var, count = self._moments(x) if mask is None else self._masked_moments(x, mask)
            if self.total is not None:
                mean, var, count = self._pool(mean, var, count, self.total)
            if self.tracking:
                self._track(mean, var, count)
        else:
            mean, var = self.running_mean, self.running_var
        scale = torch.rsqrt(var + EPS)
        if self.affine:
            scale = self.weight * scale
        shift = self.bias - mean * scale if self.affine else -mean * scale
        return torch.addcmul(shift.to(x.dtype), x, scale.to(x.dtype))

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        flat = flat if flat.dtype == torch.float64 else flat.float()
        count = torch.tensor(float(flat.shape[0]), dtype=flat.dtype, device=x.device)
        mean = flat.sum(dim=0) / count.clamp(min=1)
        var = (flat - mean).square().sum(dim=0) / count.clamp(min=1)
        return mean, var, count

    def _masked_moments(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        real = mask[..., None]
        wide = x if x.dtype == torch.float64 else x.float()
        dims = tuple(range(x.dim() - 1))
        count = mask.sum().to(wide.dtype)
        mean = wide.sum(dim=dims) / count.clamp(min=1)
        var = torch.where(real, wide - mean, 0).square().sum(dim=dims) / count.clamp(min=1)
        return mean, var, count

    def _pool(
        self, mean: Tensor, var: Tensor, count: Tensor, total: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The moments of all processes from those of each, by one sum.

        In float64, as the square of the mean, which is subtracted in the end, may be far larger than the variance.
        """
        own, square = mean.double(), var.double() + mean.double().square()
        sums = total(torch.cat([count.double()[None], count * own, count * square]))
        count, (own, square) = sums[0], sums[1:].view(2, -1) / sums[0].clamp(min=1)
        pooled = own, (square - own.square()).clamp(min=0), count
        return tuple(part.to(mean.dtype) for part in pooled)  # type: ignore[return-value]

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Update the running averages; an empty batch changes nothing."""
        weight = torch.where(count > 0, MOMENTUM, 0.0)
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight.to(mean.dtype))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight.to(mean.dtype))


def batch_norms(module: nn.Module) -> Iterator[BatchNorm]:
    """All batch norms of a model."""
    return (part for part in module.modules() if isinstance(part, BatchNorm))


@contextlib.contextmanager
def no_tracking(module: nn.Module) -> Iterator[None]:
    """Keep the running averages of a module's batch norms fixed inside a `with` block."""
    norms = [norm for norm in batch_norms(module) if norm.tracking]
    for norm in norms:
        norm.tracking = False
    try:
        yield
    finally:
        for norm in norms:
            norm.tracking = True


def fft_convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Causal convolution of (batch, time, dim) with (dim, taps), through the Fourier transform."""
    time, taps = x.shape[1], kernel.shape[1]
    if time == 0 or x.shape[0] == 0:
        return x + 0 * kernel.sum()
    size = time + taps - 1
    product = torch.fft.rfft(x.transpose(1, 2), n=size) * torch.fft.rfft(kernel, n=size)
    return torch.fft.irfft(product, n=size)[..., :time].transpose(1, 2)


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the real tokens of (batch, time, dim); zero for a sequence without any."""
    if mask is None:
        return x.sum(dim=1) / max(x.shape[1], 1)
    real = mask[..., None]
    return torch.where(real, x, 0).sum(dim=1) / real.sum(dim=1).clamp(min=1)


def masked_max(x: Tensor, mask: Tensor | None) -> Tensor:
    """Largest values over the real tokens of (batch, time, dim); zero for a sequence without any."""
    if mask is None:
        return x.amax(dim=1) if x.shape[1] else x.sum(dim=1)
    found = x.masked_fill(~mask[..., None], -torch.inf).amax(dim=1) if x.shape[1] else x.sum(dim=1)
    return found.masked_fill(~mask.any(dim=1, keepdim=True), 0.0)


def init_linear(module: nn.Module, scaled: bool = False) -> None:
    """Initialize every Linear of a module: weights truncated at two standard deviations, biases 0.

    Args:
        module: with the linear maps.
        scaled: whether weights are N(0, 1 / inputs) instead of N(0, 0.02).
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            std = part.in_features**-0.5 if scaled else 0.02
            nn.init.trunc_normal_(part.weight, std=std, a=-2 * std, b=2 * std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


ActivationName = Literal["relu", "gelu", "silu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class FeedForward(nn.Module):
    """Two linear maps with a function between them, on each token alone."""

    def __init__(self, d_model: int, d_hidden: int, activation: ActivationName = "relu") -> None:
        super().__init__()
        check_choice("activation", activation, tuple(ACTIVATIONS))
        self.activation = activation
        self.hidden = nn.Linear(d_model, d_hidden)
        self.out = nn.Linear(d_hidden, d_model)
        init_linear(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(ACTIVATIONS[self.activation](self.hidden(x)))


def sinusoids(position: Tensor, d_model: int) -> Tensor:
    """Sinusoidal position embedding (..., d_model): sines in the first half, cosines in the second."""
    exponent = torch.arange(0, d_model, 2, dtype=torch.float64, device=position.device) / d_model
    angle = position[..., None] * 10000.0**-exponent
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[..., :d_model]
