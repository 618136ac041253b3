"""Forced activation rates, for benchmarks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.core.mixer import Routing
from seqboat.layers.routers import AlwaysActive, Router


class ForcedRate(Router):
    """Activates a fixed fraction of the tokens, chosen at random once and for all.

    The probabilities come from the original router, so that its cost and gradient remain; only its decisions are
    replaced.
    """

    def __init__(self, router: Router, rate: float, seed: int = 0) -> None:
        super().__init__(router.d_model, router.modules_count)
        require(0 <= rate <= 1, f"rate must be between 0 and 1, got {rate}")
        self.router, self.rate, self.seed = router, rate, seed
        self._pattern: Tensor | None = None
        self._steps = 0

    def route(self, x: Tensor) -> Routing:
        probs = self.router.route(x).probs
        # decoding passes one token at a time
        picked = (
            self._step(x.shape[0]).view(x.shape[:-1]) if x[..., 0].numel() == len(x) else self._sequence(x)
        )
        return Routing(picked.to(x.device)[..., None].expand(probs.shape), probs)

    def _sequence(self, x: Tensor) -> Tensor:
        """(batch, time): the same number of tokens in each sequence, at different positions."""
        shape = x.shape[:-1]
        if self._pattern is None or self._pattern.shape != shape or self._pattern.device != x.device:
            generator = torch.Generator().manual_seed(self.seed)
            order = torch.rand(shape, generator=generator).argsort(dim=-1).argsort(dim=-1)
            self._pattern = (order < round(self.rate * shape[-1])).to(x.device)
        return self._pattern

    def _step(self, batch: int) -> Tensor:
        """(batch,): spread evenly over the steps, with sequences active at different times."""
        # the golden ratio spreads any number of sequences evenly
        phases = [number * (math.sqrt(5) - 1) / 2 for number in range(batch)]
        before = self._steps * self.rate
        self._steps += 1
        after = self._steps * self.rate
        # plain Python numbers: this must not add to the time of a step
        return torch.tensor([math.floor(after + phase) > math.floor(before + phase) for phase in phases])


def force_rate(module: nn.Module, rate: float, seed: int = 0) -> None:
    """Replace the routers of a module, except those that always activate."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, Router) and not isinstance(child, AlwaysActive | ForcedRate):
                setattr(part, name, ForcedRate(child, rate, seed))
