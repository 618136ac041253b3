"""Matrix products of single tokens, in the layout that processors read fastest."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from seqboat.export.int8 import Int8Embedding, Int8Linear

SPLIT = 1 << 16
"""Numbers of a matrix from which on several threads share it: below, starting them costs more than they save."""


class Product(Protocol):
    """x W^T + b on (tokens, inputs)."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...


def count_parts(rows: int, numbers: int) -> int:
    """Into how many groups of rows a matrix is split, so that every thread reads some of them.

    A library of matrix products has one thread read most of a matrix that is multiplied by a single vector, but
    spreads a batch of products over all threads; two per thread keep them equally busy.
    """
    threads = torch.get_num_threads()
    if threads == 1 or numbers < SPLIT:
        return 1
    return max(parts for parts in range(1, 2 * threads + 1) if rows % parts == 0)


def is_plain(*layers: nn.Module) -> bool:
    """Whether layers are nothing but their weights: no adapter, no parametrization, no tensor of another kind."""
    return all(
        type(layer) in (Int8Linear, Int8Embedding)
        or (type(layer) in (nn.Linear, nn.Embedding) and type(layer.weight) is nn.Parameter)
        for layer in layers
    )


class FloatProduct:
    """x W^T + b with the matrix stored by input channel: a product with one token then reads it in order.

    Args:
        weight: (outputs, inputs).
        bias: (outputs,); zeros by default.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.matrix = weight.t().contiguous()
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias.clone()
        self.parts = count_parts(len(self.matrix), self.matrix.numel())
        self.pieces = self.matrix.unflatten(0, (self.parts, -1))  # (parts, inputs / parts, outputs)
        self.biases = torch.zeros_like(self.pieces[:, :1])
        self.biases[0] = self.bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.parts == 1 or len(x) > 1:
            return torch.addmm(self.bias, x, self.matrix, out=out)
        return torch.sum(torch.baddbmm(self.biases, x.view(self.parts, 1, -1), self.pieces), 0, out=out)


def make_product(layer: nn.Linear, more: tuple[Tensor, Tensor] | None = None) -> tuple[Product, bool]:
    """The product of a linear layer.

    Args:
        layer: plain, or with int8 weights.
        more: weight and bias of further outputs, to be computed in the same product where that is possible.

    Returns:
        The product, and whether it has the further outputs.
    """
    if isinstance(layer, Int8Linear):
        matrix = Int8Matrix.pack(layer.codes, layer.scale, layer.bias)
        if matrix is not None:
            return matrix, False
    weight, bias = layer.weight, layer.bias
    if more is None:
        return FloatProduct(weight, bias), False
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    return FloatProduct(torch.cat([weight, more[0]]), torch.cat([bias, more[1]])), True


def make_head(embedding: nn.Module) -> Product:
    """The scores of tokens (tokens, d_model), with the weights of their embedding."""
    if isinstance(embedding, Int8Embedding):
        matrix = Int8Matrix.pack(embedding.codes, embedding.scale, None)
        if matrix is not None:
            return matrix
    return FloatProduct(embedding.weight)  # type: ignore[arg-type]


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
