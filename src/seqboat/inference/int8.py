"""Weights as int8 with a scale per row: a quarter of the memory, and of what decoding has to read per token.

    quantize(model)     # in place: linear layers and embeddings

Row n of a matrix is scale[n] * codes[n], with scale[n] = max|row| / 127. Two kinds of small matrices have codes in
half precision instead, scaled by a power of two: the embedding of tokens, which also scores the next one, and the
linear map that every token passes in a SeqBoat layer. Most of what rounding did to the scores came from these
(docs/language-model.md).

Only weights are rounded: whole sequences are multiplied by a matrix in floating point that is made and dropped again,
single tokens by a packed one (`Int8Matrix`). Routers, norms, state-space kernels and biases stay as they are: they
are small, and decisions depend on them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.layers.routers import Router
from seqboat.layers.seqboat import SeqBoat

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
        return F.linear(input, self.weight, self.bias)


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


class Int8Bag(Int8Weight, nn.EmbeddingBag):  # type: ignore[override]
    """Sums of embeddings with int8 weights, for inference.

    Args:
        codes: (places, width).
        scale: (places,).
    """

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.take(codes, scale)
        self.num_embeddings, self.embedding_dim = codes.shape
        self.mode = "sum"

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        return self.rows(input).sum(dim=-2)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


Quantizable = nn.Linear | nn.Embedding | nn.EmbeddingBag


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
    if isinstance(old, nn.Linear):
        new = Int8Linear(codes, scale, old.bias)
    else:
        new = Int8Bag(codes, scale) if isinstance(old, nn.EmbeddingBag) else Int8Embedding(codes, scale)
    model.set_submodule(name, new.train(old.training))


class Int8Matrix:
    """x W^T + b for a few tokens; made by `pack`.

    The codes are packed as half-precision numbers, which hold int8 exactly, and widened inside the product, which
    sums in float32: activations are not rounded. PyTorch's products of int8 weights need either activations rounded
    to 7 bits or instructions that many processors lack; docs/performance.md compares them.
    """

    def __init__(self, product: Callable[[Tensor], Tensor], scale: Tensor, bias: Tensor | None) -> None:
        self._product, self._scale, self._bias = product, scale, bias

    @classmethod
    def pack(cls, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Int8Matrix | None:
        """A matrix from its codes; None where there is no such product: then floating point has to do."""
        if codes.device.type != "cpu" or scale.dtype != torch.float32:
            return None
        for pack in (_pack_tensor, _pack_object):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # deprecated: the other one serves when it is gone
                    product = pack(codes.float())
                    product(scale.new_zeros(1, codes.shape[1]))
            except (AttributeError, RuntimeError, NotImplementedError, TypeError):
                continue
            return cls(product, scale, bias)
        return None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = self._product(x)
        if self._bias is None:
            return torch.mul(y, self._scale, out=out)
        return torch.addcmul(self._bias, y, self._scale, out=out)


def _pack_tensor(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The product as an operator of tensors alone."""
    packed, multiply = (
        torch.fbgemm_pack_gemm_matrix_fp16(weight),
        torch.fbgemm_linear_fp16_weight_fp32_activation,
    )
    return lambda x: multiply(x, packed, None)


def _pack_object(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The same product; handing its object over from Python takes longer than a small product."""
    packed, multiply = (
        torch.ops.quantized.linear_prepack_fp16(weight, None),
        torch.ops.quantized.linear_dynamic_fp16,
    )
    return lambda x: multiply(x, packed)
