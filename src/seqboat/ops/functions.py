"""Attention functions: f in O = f(Q K^T * scale + bias) V, appendix A.2 of the paper.

    softmax    exp(s) / sum(exp(s)), scale 1 / sqrt(d_key)
    relu2      max(s, 0)^2, scale 1 / keys
    laplace    (1 + erf((s - mu) / (sigma sqrt 2))) / 2, mu = sqrt(1/2), sigma = sqrt(1 / (4 pi)), scale 1 / keys

To add one, write a class here and give it a name in `AttentionName` and `ATTENTIONS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN = -1e30
"""Score of a masked key: its exponential is zero, and a query without visible keys stays finite."""

LAPLACE_MU = math.sqrt(0.5)
LAPLACE_SIGMA = math.sqrt(0.25 / math.pi)


class AttentionFunction(ABC):
    """Turns the scores of a query into the weights of its keys."""

    reads_scores = True
    """Whether the gradient needs the scores; if not, they can be freed once the weights are computed."""

    @abstractmethod
    def scale(self, d_key: int, keys: float | Tensor) -> float | Tensor:
        """The factor on the products of queries and keys.

        Args:
            d_key: width of queries and keys.
            keys: number of keys that a query sees, or the size of its window; a floating-point tensor if it
                differs between queries.
        """

    @abstractmethod
    def weights(self, scores: Tensor) -> Tensor:
        """The weights of biased scores (..., keys); zero where a score is HIDDEN."""

    @abstractmethod
    def grad_scores(self, scores: Tensor, weights: Tensor, grad_weights: Tensor) -> Tensor:
        """The gradient of the scores, given that of the weights, which may be overwritten."""


class Softmax(AttentionFunction):
    """Positive weights that sum to one."""

    reads_scores = False

    def scale(self, d_key: int, keys: float | Tensor) -> float:
        return 1 / math.sqrt(d_key)

    def weights(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1)

    def grad_scores(self, scores: Tensor, weights: Tensor, grad_weights: Tensor) -> Tensor:
        # (grad - sum(grad * weights)) * weights, in one pass
        return torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)


class SquaredReLU(AttentionFunction):
    """Weighs each key independently; the scale keeps the sum independent of the number of keys."""

    def scale(self, d_key: int, keys: float | Tensor) -> float | Tensor:
        return 1 / keys

    def weights(self, scores: Tensor) -> Tensor:
        return F.relu(scores).square()

    def grad_scores(self, scores: Tensor, weights: Tensor, grad_weights: Tensor) -> Tensor:
        return grad_weights.mul_(F.relu(scores)).mul_(2)


class Laplace(AttentionFunction):
    """A smooth approximation of squared ReLU, bounded by one."""

    def scale(self, d_key: int, keys: float | Tensor) -> float | Tensor:
        return 1 / keys

    def weights(self, scores: Tensor) -> Tensor:
        return 0.5 * torch.erfc((LAPLACE_MU - scores) * (1 / (LAPLACE_SIGMA * math.sqrt(2))))

    def grad_scores(self, scores: Tensor, weights: Tensor, grad_weights: Tensor) -> Tensor:
        density = ((scores - LAPLACE_MU) / LAPLACE_SIGMA).square_().mul_(-0.5).exp_()
        return grad_weights.mul_(density).mul_(1 / (LAPLACE_SIGMA * math.sqrt(2 * math.pi)))


AttentionName = Literal["softmax", "relu2", "laplace"]
ATTENTIONS: dict[str, AttentionFunction] = {
    "softmax": Softmax(),
    "relu2": SquaredReLU(),
    "laplace": Laplace(),
}
"""Attention functions by the name that configurations use."""


def draw_seed(dropout: float) -> int:
    """A seed from the global generator, so that forward and backward pass draw the same dropout mask."""
    return int(torch.randint(0, 2**62, (1,)).item()) if dropout > 0 else 0


def drop(weights: Tensor, dropout: float, seed: int) -> Tensor:
    """The weights after dropout, in place."""
    return weights.mul_(dropout_mask(weights, dropout, seed)) if dropout > 0 else weights


def weigh_back(
    function: AttentionFunction, scores: Tensor, grad: Tensor, values: Tensor, dropout: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Weights after dropout, and the gradient of the scores.

    Args:
        function: the attention function.
        scores: (groups, queries, keys), biased.
        grad: (groups, queries, d_v), of the weighted sums.
        values: (groups, keys, d_v).
        dropout: rate of weights dropped.
        seed: that of the forward pass.
    """
    weights = function.weights(scores)
    grad_weights = torch.bmm(grad, values.transpose(1, 2))
    if dropout > 0:
        mask = dropout_mask(weights, dropout, seed)
        return weights * mask, function.grad_scores(scores, weights, grad_weights.mul_(mask))
    return weights, function.grad_scores(scores, weights, grad_weights)


def dropout_mask(weights: Tensor, rate: float, seed: int) -> Tensor:
    """The factor on each weight: 0 if dropped, 1 / (1 - rate) if kept."""
    generator = torch.Generator(device=weights.device).manual_seed(seed)
    keep = torch.rand(weights.shape, generator=generator, device=weights.device) >= rate
    return keep.to(weights.dtype).mul_(1 / (1 - rate))
