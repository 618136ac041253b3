"""Matrix products of single tokens, in the layout that processors read fastest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from seqboat.inference.int8 import Int8Embedding, Int8Linear, Int8Matrix

Product = Callable[[Tensor], Tensor]
"""x W^T + b on (tokens, dim)."""


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

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.matrix)


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
