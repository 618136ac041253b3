"""Baselines for a language model, computed in seconds by counting bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TRAIN_BYTES = 4_000_000
"""Bytes to count at most: the last ones before the held-out text."""
SCORED_BYTES = 1_000_000
"""Bytes to score at most: the first ones."""
ORDER = 3
"""Bytes of context of the larger baseline."""


def score_counts(train: NDArray[np.uint8], text: NDArray[np.uint8]) -> dict[str, dict[str, float]]:
    """Bits per byte of models that count: single bytes, and each byte after the three before it.

    Args:
        train: text to count in.
        text: text to score; its first byte is only context.
    """
    learn, wanted = train[-TRAIN_BYTES:].astype(np.int64), text[: SCORED_BYTES + 1].astype(np.int64)
    found = {}
    probs = np.full(len(wanted) - 1, 1 / 256)
    for order in range(ORDER + 1):
        probs = _blend(learn, wanted, order, probs)
        if order in (0, ORDER):
            name = "byte frequencies" if order == 0 else f"counts after {ORDER} bytes"
            found[name] = {"bits": float(-np.log2(probs).mean())}
    return found


def _blend(
    train: NDArray[np.int64], text: NDArray[np.int64], order: int, lower: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Probabilities of the bytes after the first, from counts of the context, blended with a shorter context.

    The shorter context weighs as much as the context has different followers (Witten and Bell).
    """
    pairs, counts = np.unique(_windows(train, order + 1), return_counts=True)
    if not len(pairs):
        return lower
    contexts, first = np.unique(pairs >> 8, return_index=True)
    totals = np.add.reduceat(counts, first)
    followers = np.diff(np.append(first, len(pairs)))
    # bytes with too little text before them keep their probability
    skipped = max(order - 1, 0)
    wanted = _windows(text[max(1 - order, 0) :], order + 1)
    own, known = _look_up(contexts, wanted >> 8)
    total = np.where(known, totals[own], 0)
    weight = np.where(known, followers[own], 1)
    place, met = _look_up(pairs, wanted)
    count = np.where(met, counts[place], 0)
    blended = lower.copy()
    blended[skipped:] = (count + weight * lower[skipped:]) / (total + weight)
    return blended


def _windows(text: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Each run of `size` bytes as a number."""
    count = max(len(text) - size + 1, 0)
    found = np.zeros(count, np.int64)
    for i in range(size):
        found = (found << 8) | text[i : i + count]
    return found


def _look_up(
    table: NDArray[np.int64], keys: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The place of each key in a sorted table, and whether it is there."""
    place = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return place, table[place] == keys
