"""Weights as int8 with a scale per row: a quarter of the memory, and of what decoding has to read per token.

    quantize(model)     # in place: linear layers and embeddings

Row n of a matrix is scale[n] * codes[n], with scale[n] = max|row| / 127. Two kinds of small matrices have codes in
half precision instead, scaled by a power of two: the embedding of tokens, which also scores the next one, and the
linear map that every token passes in a SeqBoat layer. Most of what rounding did to the scores came from these.

Only weights are rounded. Many tokens are multiplied by a matrix in floating point that is made and dropped again; a
few by a packed one, whose codes are numbers in half precision, which hold int8 exactly, widened inside the product.
(`torch._weight_int8pack_mm` needs no packing, but in float32 it is slower than a product of floats where torch has no
fast kernel for the processor, and in bf16 it crashes for some sizes.) Routers, norms, state-space kernels and biases
stay as they are: they are small, and decisions depend on them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.layers.routers import Router
from seqboat.layers.seqboat import SeqBoat

FEW = 16
"""Up to this many tokens the packed product is used."""
LEVELS = 127
"""Largest int8 code of a weight."""
CODES = (torch.int8, torch.float16)
"""Types of codes."""


def quantize_rows(weight: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Codes (rows, columns) and scales (rows,) of a matrix.

    >>> codes, scale = quantize_rows(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> codes.tolist(), [round(value, 4) for value in scale.tolist()]
    ([[64, -127], [0, 0]], [0.0157, 1.0])

    Args:
        weight: (rows, columns).
        dtype: of the codes, one of `CODES`.
    """
    largest = weight.detach().double().abs().amax(dim=1)
    # a power of two leaves weights as they are that were in half precision before
    scale = largest / LEVELS if dtype == torch.int8 else torch.exp2(torch.frexp(largest).exponent.double())
    scale = torch.where(largest > 0, scale, 1.0).to(weight.dtype)
    codes = weight.detach().double() / scale.double()[:, None]
    if dtype == torch.int8:
        codes = codes.round().clamp(-LEVELS, LEVELS)
    return codes.to(dtype), scale


def pack(codes: Tensor) -> Callable[[Tensor], Tensor] | None:
    """The product of (tokens, columns) with codes (rows, columns) in float32; None where torch has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, with nothing in its place
        try:
            packed = torch.fbgemm_pack_gemm_matrix_fp16(codes.float())
            multiply = torch.fbgemm_linear_fp16_weight_fp32_activation
            multiply(codes.new_zeros(1, codes.shape[1], dtype=torch.float32), packed, None)
        except (AttributeError, RuntimeError, NotImplementedError, TypeError):
            return None
    return lambda x: multiply(x, packed, None)


class Int8Weight(nn.Module):
    """What layers with int8 weights have in common."""

    codes: Tensor
    """(rows, columns), int8 or half precision"""
    scale: Tensor
    """(rows,)"""

    def take(self, codes: Tensor, scale: Tensor) -> None:
        """Set up a layer that holds these codes instead of parameters."""
        nn.Module.__init__(self)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self._packed: tuple[Any, Callable[[Tensor], Tensor] | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What copies of a layer are made of: all but the packed matrix, which cannot be copied."""
        return {**self.__dict__, "_packed": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `float` and `cuda` call: the type of a model is that of its scales, and codes keep theirs."""
        before = self.codes
        super()._apply(fn, recurse)
        self.codes = before.to(self.codes.device)
        return self

    @property
    def weight(self) -> Tensor:
        """(rows, columns): the matrix in floating point, made anew."""
        return self.codes.to(self.scale.dtype) * self.scale[:, None]

    def rows(self, places: Tensor) -> Tensor:
        """(..., columns): some rows of the matrix, by their numbers (...)."""
        return F.embedding(places, self.codes).to(self.scale.dtype) * F.embedding(places, self.scale[:, None])

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + b."""
        plain = x.is_cpu and x.dtype == self.scale.dtype == torch.float32 and not x.requires_grad
        # nothing to look at while torch traces: there the number of tokens is not known
        if not torch.compiler.is_compiling() and plain and 0 < x.numel() <= FEW * self.codes.shape[1]:
            key = self.codes.data_ptr(), self.codes._version
            if self._packed is None or self._packed[0] != key:
                self._packed = key, pack(self.codes)
            product = self._packed[1]
            if product is not None and not torch.is_autocast_enabled("cpu"):
                y = product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
                return y * self.scale if bias is None else torch.addcmul(bias, y, self.scale)
        return F.linear(x, self.weight, bias)


class Int8Linear(Int8Weight, nn.Linear):  # type: ignore[override]
    """A linear layer with int8 weights, for inference.

    Args:
        codes: (outputs, inputs).
        scale: (outputs,).
        bias: (outputs,), or None.
    """

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.take(codes, scale)
        self.out_features, self.in_features = codes.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, self.bias)


class Int8Embedding(Int8Weight, nn.Embedding):  # type: ignore[override]
    """An embedding with int8 weights, for inference.

    Args:
        codes: (tokens, width).
        scale: (tokens,).
    """

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.take(codes, scale)
        self.num_embeddings, self.embedding_dim = codes.shape

    def forward(self, input: Tensor) -> Tensor:
        return self.rows(input)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


Quantizable = nn.Linear | nn.Embedding


def quantizable(model: nn.Module) -> Iterator[tuple[str, Quantizable]]:
    """The layers of a model that take int8 weights, by name: linear layers outside routers, and embeddings."""
    routers = [name + "." for name, part in model.named_modules() if isinstance(part, Router)]
    for name, part in model.named_modules():
        if isinstance(part, Quantizable) and not name.startswith(tuple(routers)):
            yield name, part


def code_types(model: nn.Module) -> dict[str, torch.dtype]:
    """The type of the codes of every layer that takes them, by name."""
    maps = [f"{name}.linear" for name, part in model.named_modules() if isinstance(part, SeqBoat)]
    return {
        name: torch.float16 if isinstance(part, nn.Embedding) or name in maps else torch.int8
        for name, part in quantizable(model)
    }


def quantize(model: nn.Module) -> None:
    """Round the weights of a model to int8, in place; it can no longer be trained."""
    layers = dict(quantizable(model))
    for name, dtype in code_types(model).items():
        if not isinstance(layers[name], Int8Weight):
            put_codes(model, name, *quantize_rows(layers[name].weight, dtype))
    model.requires_grad_(False)


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has layers with int8 weights."""
    return any(isinstance(part, Int8Weight) for part in model.modules())


def quantize_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model by name, those of linear layers and embeddings as int8 codes and scales."""
    found = dict(tensors)
    for name, dtype in code_types(model).items():
        codes, scale = quantize_rows(found.pop(f"{name}.weight").float(), dtype)
        found |= {f"{name}.codes": codes, f"{name}.scale": scale}
    return found


def float_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model by name, all in floating point, whatever int8 weights it has."""
    found = dict(model.state_dict())
    for name, part in quantizable(model):
        if isinstance(part, Int8Weight):
            del found[f"{name}.codes"], found[f"{name}.scale"]
            found[f"{name}.weight"] = part.weight
    return found


def widen(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by name in floating point, from a checkpoint that may hold int8 codes and scales.

    >>> list(widen({"out.codes": torch.ones(1, 2, dtype=torch.int8), "out.scale": torch.ones(1)}))
    ['out.weight']
    """
    names = [key.removesuffix(".codes") for key in tensors if key.endswith(".codes")]
    parts = {f"{name}.{part}" for name in names for part in ("codes", "scale")}
    found = {key: value for key, value in tensors.items() if key not in parts}
    for name in names:
        scale = tensors[f"{name}.scale"]
        found[f"{name}.weight"] = tensors[f"{name}.codes"].to(scale.dtype) * scale[:, None]
    return found


def expect_codes(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make room in a model for the int8 weights among these tensors; ValueError if they are not this model's."""
    layers = dict(quantizable(model))
    names = [key.removesuffix(".codes") for key in tensors if key.endswith(".codes")]
    for name in names:
        require(name in layers, f"int8 weights of another model: it has no layer {name}")
        codes, weight = tensors[f"{name}.codes"], layers[name].weight
        require(
            codes.dtype in CODES and codes.shape == weight.shape,
            f"int8 weights of another model: {name}.codes must be int8 or float16 of shape "
            f"{tuple(weight.shape)}, got {codes.dtype} of shape {tuple(codes.shape)}",
        )
        put_codes(
            model, name, torch.zeros_like(weight, dtype=codes.dtype), weight.new_ones(len(weight)).detach()
        )
    if names:
        model.requires_grad_(False)


def put_codes(model: nn.Module, name: str, codes: Tensor, scale: Tensor) -> None:
    """Replace a layer of a model by one with these int8 weights."""
    old = model.get_submodule(name)
    new: Int8Weight
    new = Int8Linear(codes, scale, old.bias) if isinstance(old, nn.Linear) else Int8Embedding(codes, scale)
    model.set_submodule(name, new.train(old.training))
