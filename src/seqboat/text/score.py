"""How many bits a language model needs for each byte of a text: a compressor's bound, and a search for anomalies.

    bits of byte t = -log2 p(byte t | all bytes before it)

A text is read once, in chunks that hand the state on, so memory does not depend on its length and every byte is
scored with everything before it. Nothing comes before the first byte: it costs log2(vocab), 8 bits for bytes, as it
would any compressor that does not know the text. An arithmetic coder driven by the model comes within a few bits of
the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from seqboat.core.checks import check_positive, require
from seqboat.models.backbone import BackboneState
from seqboat.models.heads import LanguageModel, LanguageModelOutput

CHUNK = 8192
"""Bytes that are read at once."""


class Binary(Protocol):
    """What is read of a file."""

    def read(self, size: int, /) -> bytes: ...


class Scores(NamedTuple):
    """The tokens of a chunk, and what the model made of them."""

    tokens: NDArray[np.int64]
    """(time,)"""
    bits: NDArray[np.float64]
    """(time,): what each token costs, given all before it"""
    active: tuple[NDArray[np.bool_] | None, ...]
    """for each layer (time,): whether it attended when it read the token; None for layers without a router"""


class Total(NamedTuple):
    """The sums over a text."""

    tokens: int
    bits: float
    activation: tuple[float | None, ...]
    """for each layer the fraction of tokens that attended; None without a router; empty for an empty text"""

    @property
    def bits_per_token(self) -> float | None:
        """The average; None for an empty text."""
        return self.bits / self.tokens if self.tokens else None


def read_chunks(file: Binary, chunk: int = CHUNK) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a file, of which as little as possible is in memory."""
    check_positive("chunk", chunk)
    while data := file.read(chunk):
        yield np.frombuffer(data, np.uint8)


def score(model: LanguageModel, chunks: Iterable[NDArray[np.integer[Any]]]) -> Iterator[Scores]:
    """Score a text that comes in chunks of any lengths; the scores do not depend on how it was cut.

    Args:
        model: put into eval mode and back.
        chunks: token ids of one text, in order.
    """
    was_training = model.training
    model.eval()
    try:
        state: BackboneState | None = None
        before: Tensor | None = None
        for chunk in chunks:
            require(
                chunk.ndim == 1 and chunk.dtype.kind in "iu",
                f"chunks must be one-dimensional arrays of token ids, got {chunk.dtype} of shape {chunk.shape}",
            )
            if len(chunk):
                ids = chunk.astype(np.int64)
                out = _read(model, ids, state)
                # the first token of a chunk was foreseen at the end of the chunk before
                bits = _bits(out.logits[0], before, torch.from_numpy(ids).to(out.logits.device))
                state, before = out.state, out.logits[0, -1]
                active = (None if r is None else r.active[0].any(dim=-1).cpu().numpy() for r in out.routings)
                yield Scores(ids, bits.cpu().numpy(), tuple(active))
    finally:
        model.train(was_training)


@torch.no_grad()
def _read(model: LanguageModel, ids: NDArray[np.int64], state: BackboneState | None) -> LanguageModelOutput:
    device = model.backbone.embedding.weight.device
    out: LanguageModelOutput = model(torch.from_numpy(ids).to(device)[None], None, state)
    return out


def _bits(logits: Tensor, before: Tensor | None, ids: Tensor) -> Tensor:
    """What each of (time,) tokens costs; from the scores (time, vocab) after each, and those before the first."""
    first = logits.new_zeros(logits.shape[1:]) if before is None else before
    scores = torch.cat([first[None], logits[:-1]])
    # sums of millions of tokens are taken of these, so they are as exact as the scores themselves
    return F.cross_entropy(scores.double(), ids, reduction="none") / math.log(2)


def total(parts: Iterable[Scores]) -> Total:
    """Add up the scores of a text."""
    tokens, bits = 0, 0.0
    active: list[int | None] | None = None
    for part in parts:
        tokens += len(part.tokens)
        bits += float(part.bits.sum())
        counts = [None if layer is None else int(layer.sum()) for layer in part.active]
        if active is not None:
            counts = [None if a is None or b is None else a + b for a, b in zip(active, counts, strict=True)]
        active = counts
    return Total(tokens, bits, tuple(None if count is None else count / tokens for count in active or ()))
