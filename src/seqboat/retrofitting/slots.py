"""The active tokens of each sequence, moved to slots at its front, and their attention masks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqboat.core.checks import require
from seqboat.core.padding import align


class Slots(NamedTuple):
    """The active tokens of each sequence, moved to its front."""

    place: Tensor
    """(batch, slots): positions in the sequence; after the last active token, those of inactive ones"""
    real: Tensor | None
    """(batch, slots) bool: False after the last active token of a sequence; None if all are True"""

    def take(self, x: Tensor) -> Tensor:
        """Gather (batch, slots, ...) from (batch or 1, time, ...)."""
        x = x.expand(self.place.shape[0], *x.shape[1:])
        index = self.place.view(*self.place.shape, *(1,) * (x.dim() - 2))
        return x.gather(1, index.expand(-1, -1, *x.shape[2:]))

    def put(self, y: Tensor, base: Tensor) -> Tensor:
        """`base` (batch, time, dim), with active tokens replaced by their slots of y (batch, slots, dim)."""
        index = self.place[..., None].expand_as(y)
        if self.real is not None:
            y = torch.where(self.real[..., None], y, base.gather(1, index))
        return base.scatter(1, index, y)


def find_slots(active: Tensor, per_sequence: Tensor, width: int, count: int) -> Slots:
    """The slots of (batch, time) decisions.

    Args:
        active: the decisions.
        per_sequence: (batch,), number of active tokens in each sequence.
        width: slots per sequence.
        count: total number of active tokens.
    """
    order = align(active).order
    if count == active.shape[0] * width:
        return Slots(order[:, :width], None)
    return Slots(order[:, :width], torch.arange(width, device=active.device) < per_sequence[:, None])


def take_slots(slots: Slots, value: Any) -> Any:
    """`Slots.take` of a (batch or 1, time, ...) tensor, or of each tensor in a tuple."""
    return tuple(slots.take(part) for part in value) if isinstance(value, tuple) else slots.take(value)


def slot_mask(
    mask: Any, x: Tensor, slots: Slots | None, layer: Any, longest: int, even: bool, causal: bool
) -> Any:
    """The attention mask of slots: (batch, 1, slots, keys), or None if attention is right without one.

    Args:
        mask: of the tokens, (batch, heads or 1, time, seen + time), bool or additive; without one, every token sees
            all keys, or those before it if attention is causal.
        x: (batch, time, dim), the tokens.
        slots: where they were moved; None if they were not.
        layer: of the cache, whose keys come first; None without a cache.
        longest: number of keys of the longest sequence.
        even: whether all sequences have this many keys.
        causal: whether attention without a mask is causal.
    """
    require(
        mask is None or (isinstance(mask, Tensor) and mask.dim() == 4),
        "attention_mask must be None or (batch, heads, queries, keys), as for the attention implementations "
        f"eager and sdpa; got {describe(mask)}",
    )
    batch, time, _ = x.shape
    place = torch.arange(time, device=x.device).expand(batch, time) if slots is None else slots.place
    real = None if slots is None else slots.real
    queries, keys, keep = place, place, real
    if layer is not None:
        past = layer.seen
        queries = place + past
        layer.announce(queries, real, longest, even)
        if mask is None and time == 1 and even and slots is None:
            return None  # one token per sequence, which sees all keys of its sequence
        if past > 0:  # otherwise the keys are the slots themselves
            keys, keep = layer.visible()
    if mask is None:
        if keys is place and (causal or real is None):
            return None  # slots keep their order, and no real slot sees unused ones, which come last
        assert keep is not None
        if not causal:
            assert real is not None
            # added to the scores, which every attention implementation understands
            hidden = real[:, :, None] & ~keep[:, None, :]
            return torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill_(
                hidden, torch.finfo(x.dtype).min
            )[:, None]
        visible = (keys[:, None, :] <= queries[:, :, None]) & keep[:, None, :]
        return visible[:, None] if real is None else (visible | ~real[:, :, None])[:, None]
    if slots is None and keys is place:
        return mask
    heads, columns = mask.shape[1], mask.shape[3]
    mask = mask.expand(batch, heads, time, columns)
    mask = mask.gather(2, place[:, None, :, None].expand(-1, heads, -1, columns))
    mask = mask.gather(3, keys[:, None, None, :].expand(-1, heads, mask.shape[2], -1))
    if keep is not None:
        hidden = ~keep[:, None, None, :]
        mask = mask.masked_fill(hidden, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)
    if real is not None:
        # an unused slot sees all keys: a softmax must not be empty
        mask = mask.masked_fill(~real[:, None, :, None], True if mask.dtype == torch.bool else 0.0)
    return mask


def describe(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
