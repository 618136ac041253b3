"""What lean layers have in common: the tokens of a step, the contract of a layer, and routers folded into a row."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from seqboat.inference.attention import turns
from seqboat.inference.products import is_plain
from seqboat.layers.policy import Policy
from seqboat.layers.routers import (
    GumbelSoftmax,
    Router,
    SigmoidRouter,
    TemperedSoftmax,
    ThresholdRouter,
    TopKCapacity,
)
from seqboat.ops.positions import frequencies
from seqboat.ssm.diagonal import at_least_float32

Decision = tuple[list[int], list[float]]
"""The rows that activate a module, and what its output is multiplied by for each."""


class Token:
    """What all layers know about the tokens of a step."""

    def __init__(self, seen: list[int], dtype: torch.dtype, device: torch.device) -> None:
        self.seen, self._dtype, self._device = seen, dtype, device
        self._turns: dict[int, Tensor] = {}

    def turn(self, d_z: int) -> Tensor:
        """(rows, d_z / 2) complex: the rotations at the positions of all rows, computed once."""
        found = self._turns.get(d_z)
        if found is None:
            found = turns(frequencies(d_z, self._device), self.seen, self._dtype)
            self._turns[d_z] = found
        return found


class LeanLayer(ABC):
    """A layer on one token of each of the first rows."""

    @abstractmethod
    def __call__(self, x: Tensor, token: Token) -> Tensor:
        """(rows, d_model) to (rows, d_model)."""

    @abstractmethod
    def put(self, row: int, state: Any, source: int) -> None:
        """Take over the state of one sequence of a batch."""

    @abstractmethod
    def get(self, rows: list[int], seen: Tensor) -> Any:
        """The state of these rows, which have read (rows,) tokens, as the layer itself has it."""

    @abstractmethod
    def move(self, source: int, target: int) -> None:
        """Let the state of one row replace that of another."""


class Folded:
    """A router that compares one number per module with a border; None for other routers.

    Attributes:
        weight, bias: (modules, d_model) and (modules,), of the log-odds.
        border: above which a module is active.
    """

    def __init__(self, weight: Tensor, bias: Tensor, border: list[float]) -> None:
        self.weight, self.bias, self.border = weight, bias, border

    def decide(self, logits: list[list[float]]) -> list[Decision]:
        """The rows of each module, from the log-odds of all rows."""
        found: list[Decision] = []
        for module, border in enumerate(self.border):
            rows, weights = [], []
            for row, values in enumerate(logits):
                logit = values[module]
                # a token that is not finite has a logit that is not finite, and activates nothing
                if border < logit < math.inf:
                    rows.append(row)
                    weights.append(1 / (1 + math.exp(-logit)) if logit > -700 else 0.0)
            found.append((rows, weights))
        return found


def is_plain_router(router: Router) -> bool:
    """Whether the logits of a router may be folded; routers without a single linear layer are called as they are."""
    logits = getattr(router, "logits", None)
    return logits is None or is_plain(logits)


def fold_router(policy: Policy) -> Folded | None:
    """A router, and what steers it toward a target, as one row per module; None for other kinds of routers."""
    router = policy.router
    kind = type(router)
    if kind not in (TemperedSoftmax, GumbelSoftmax, SigmoidRouter, ThresholdRouter, TopKCapacity):
        return None
    assert isinstance(router.logits, nn.Linear)
    weight, bias = router.logits.weight.double(), router.logits.bias.double()
    border = [0.0] * router.modules_count
    if isinstance(router, TemperedSoftmax | GumbelSoftmax):
        # softmax over two is a sigmoid of their difference
        temperature = router.temperature.double().expand(router.modules_count)
        weight = (weight[1::2] - weight[0::2]) / temperature[:, None]
        bias = (bias[1::2] - bias[0::2]) / temperature
    elif isinstance(router, ThresholdRouter):
        border = [router.border] * router.modules_count
    elif isinstance(router, TopKCapacity):
        border = router.border.double().tolist()
    if policy.steered:
        border = [place - shift for place, shift in zip(border, policy.shift.tolist(), strict=True)]
    dtype = at_least_float32(router.logits.weight.dtype)
    return Folded(weight.to(dtype), bias.to(dtype), border)
