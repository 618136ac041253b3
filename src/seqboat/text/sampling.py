"""How the next token is chosen from its scores."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqboat.core.checks import check_positive, require


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen; changes of the scores apply in the order of these fields."""

    greedy: bool = False
    """Whether to always take the most probable token instead of sampling."""
    repetition_penalty: float = 1.0
    """Tokens that have occurred: positive scores are divided by this, negative ones multiplied; 1 changes nothing."""
    temperature: float = 1.0
    """Scores are divided by this: below 1 the likely become likelier."""
    top_k: int | None = None
    """Keep only this many of the most probable tokens (and ties with the last of them); None keeps all."""
    top_p: float = 1.0
    """Keep only the most probable tokens that together reach this probability."""
    min_p: float = 0.0
    """Keep only tokens at least this probable, relative to the most probable one."""
    seed: int | None = None
    """Sequence r draws from a generator with seed + r; None takes another seed every time."""

    def __post_init__(self) -> None:
        for name in ("temperature", "repetition_penalty"):
            value = getattr(self, name)
            require(
                0 < value < math.inf,
                f"{name} must be a finite number > 0, got {value!r}"
                + ("; to always take the most probable token, set greedy" if name == "temperature" else ""),
            )
        if self.top_k is not None:
            check_positive("top_k", self.top_k)
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p!r}")
        require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p!r}")
        if self.seed is not None:
            check_positive("seed", self.seed, least=0)
        if self.greedy:
            # a setting that has no effect is a misunderstanding
            for name, plain in (("temperature", 1.0), ("top_k", None), ("top_p", 1.0), ("min_p", 0.0)):
                value = getattr(self, name)
                require(
                    value == plain,
                    f"greedy and {name} cannot be combined: the most probable token is taken, got {name} {value!r}",
                )
            require(self.seed is None, "greedy and seed cannot be combined: nothing is drawn")


def penalize(logits: Tensor, used: Tensor, penalty: float) -> Tensor:
    """Scores in which tokens that have occurred are less likely (for a penalty above 1)."""
    if penalty == 1:
        return logits
    return torch.where(used, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def distribution(logits: Tensor, used: Tensor, sampling: SamplingConfig) -> Tensor:
    """Probabilities to draw the next token by.

    Args:
        logits: (batch, vocab).
        used: (batch, vocab), True for tokens that have occurred.
        sampling: what is kept and how it is scaled.

    Returns:
        (batch, vocab) in float64, zero for what is left out.
    """
    scores = penalize(logits.double(), used, sampling.repetition_penalty)
    # seen from the best score, so that no temperature makes it infinite
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    if sampling.top_p < 1:
        probs, order = scores.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        # a token stays if those before it do not reach the sum yet: so the first always stays
        beyond = probs.cumsum(dim=-1) - probs >= sampling.top_p
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -math.inf)
    probs = scores.softmax(dim=-1)
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(dim=-1, keepdim=True), 0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def choose(
    logits: Tensor, used: Tensor, sampling: SamplingConfig, generators: Sequence[torch.Generator]
) -> Tensor:
    """The next token of every sequence, (batch,); it depends neither on the other sequences nor on the device.

    Args:
        logits: (batch, vocab).
        used: (batch, vocab), True for tokens that have occurred; read only where there is a repetition penalty.
        sampling: how to choose.
        generators: one per sequence.
    """
    if sampling.greedy:
        return penalize(logits, used, sampling.repetition_penalty).argmax(dim=-1)
    probs = distribution(logits, used, sampling)
    draws = [torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators]
    # the first token at which the sum of probabilities passes the draw; never one of probability zero
    sums = probs.cumsum(dim=-1)
    height = torch.cat(draws).to(sums.device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, height, right=True).squeeze(-1).clamp_(max=probs.shape[-1] - 1)


def make_generators(sampling: SamplingConfig, batch: int) -> list[torch.Generator]:
    """One random generator per sequence: that of sequence r has the seed `sampling.seed` + r."""
    seed = secrets.randbits(60) if sampling.seed is None else sampling.seed
    return [torch.Generator().manual_seed(seed + number) for number in range(batch)]
