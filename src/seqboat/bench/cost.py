"""What a layer costs: its parameters, and the matrix products behind its FLOPs and its matmul lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from seqboat.layers.gau import GAU
from seqboat.layers.seqboat import SeqBoat
from seqboat.ssm.diagonal import DiagonalSSM


def count_parameters(module: nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def linear_flops(module: nn.Module) -> int:
    """Multiplications and additions per token of all linear maps in a module."""
    return sum(2 * part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


class Product(NamedTuple):
    """A batch of matrix products (rows x inner) @ (inner x columns)."""

    what: str
    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.rows * self.inner * self.columns


def forward_products(layer: SeqBoat, batch: int, length: int, active: int) -> list[Product]:
    """The matrix products of one forward pass.

    The state-space layer counts as the products of its block scan (within blocks, into and out of the states);
    attention as the products inside the window alone: `window` + 1 keys per active token (its chunk, or all).

    Args:
        layer: with a diagonal state-space layer and no feed-forward block.
        batch: sequences.
        length: tokens per sequence.
        active: active tokens in the whole batch.
    """
    gau, ssm = layer.sma.units["gau"], layer.ssm
    assert isinstance(gau, GAU) and isinstance(ssm, DiagonalSSM)
    d, tokens = layer.sma.d_model, batch * length
    block = min(ssm.block, length)
    blocks, states = -(-tokens // block), ssm.d_state * ssm.directions
    each = active // batch  # a token attends to tokens of its own sequence only
    span = each if gau.others is None else gau.others + 1
    keys = max(min(span, each), 1)
    # as many products as in a band of this width
    groups = -(-active // keys)
    found = [
        Product("scan: within blocks", d, blocks, block, block),
        Product("scan: into states", d, blocks, block, states),
        Product("scan: out of states", d, blocks, states, block),
        Product("linear", 1, tokens, d, d),
        Product("router", 1, tokens, d, 2),
        Product("gau: base", 1, active, d, gau.d_z + 2 * gau.d_v),
        Product("gau: scores", groups, keys, gau.d_z, keys),
        Product("gau: values", groups, keys, keys, gau.d_v),
        Product("gau: out", 1, active, gau.d_v, d),
    ]
    return [product for product in found if product.flops]


def backward_products(forward: Sequence[Product]) -> list[Product]:
    """The gradients of both factors of each product. Recomputed scores are not counted."""
    found = []
    for what, batch, rows, inner, columns in forward:
        found.append(Product(f"{what}, left", batch, rows, columns, inner))
        found.append(Product(f"{what}, right", batch, inner, rows, columns))
    return found
