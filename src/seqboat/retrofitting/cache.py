"""A layer of transformers' cache that keeps the keys and values of activated tokens only.

The sequences of a batch, and the layers of a model, then hold different numbers of tokens. A layer reports as its
length the number of tokens so far, activated or not, so that positions and masks stay those of the original
sequence. transformers comes with the `hf` extra.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache

from seqboat.core.checks import require


class VisibleKeys(NamedTuple):
    """The keys that the next call of attention finds in the cache."""

    position: Tensor
    """(batch, keys): positions in the original sequence, counting padding"""
    real: Tensor
    """(batch, keys) bool: False after the last key of a sequence"""


class SparseLayer(CacheLayerMixin):
    """Keys and values of the activated tokens of one layer; each sequence is filled from the front.

    Memory grows by doubling, and new tokens are written after the old ones, so that a decoding step does not copy
    the past.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        """tokens so far, activated or not, including padding"""
        self.even: int | None = 0
        """number of tokens that every sequence holds; None if it differs"""
        self._count: Tensor | None = None
        self.position: Tensor | None = None
        """(batch, capacity): their positions in the original sequence"""
        self._slot: Tensor | slice | None = None
        self._width = 0

    @property
    def count(self) -> Tensor | None:
        """(batch,): number of tokens that each sequence holds; None before the first one."""
        if self.position is None or self.even is None:
            return self._count
        return torch.full((self.position.shape[0],), self.even, device=self.position.device)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity = self._capacity(self._width)
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    @staticmethod
    def _capacity(needed: int) -> int:
        # one more than the next power of two: the last place takes tokens that are not kept
        return (1 << max(needed - 1, 31).bit_length()) + 1

    def announce(self, position: Tensor, real: Tensor | None, width: int, even: bool) -> None:
        """Announce the tokens of the next `update`.

        Args:
            position: (batch, slots), positions in the original sequence.
            real: (batch, slots) bool, real slots first; None if all are.
            width: number of tokens in the longest sequence after the update.
            even: whether every sequence will hold the same number.
        """
        batch, slots = position.shape
        if self.position is None:
            self.position = position.new_zeros(batch, self._capacity(width))
        held = self.position.shape[0]
        require(held == batch, f"the cache holds {held} sequences, but {batch} were given")
        if width >= self.position.shape[1]:
            self.position = _grow(self.position, 1, self._capacity(width))
            if self.keys is not None and self.values is not None:
                self.keys, self.values = (
                    _grow(held, 2, self._capacity(width)) for held in (self.keys, self.values)
                )
        self._width = width
        if even and real is None:
            # all sequences held the same number: all write at the same places
            self._slot = slice(width - slots, width)
            self.position[:, self._slot] = position
            self.even = width
            return
        count = self.count
        assert count is not None
        slot = count[:, None] + torch.arange(slots, device=position.device)
        if real is not None:
            slot = torch.where(real, slot, self.position.shape[1] - 1)
        self.position.scatter_(1, slot, position)
        self._count = count + (slots if real is None else real.sum(dim=1))
        self._slot, self.even = slot, width if even else None

    def visible(self) -> VisibleKeys:
        """The keys that attention will find after the announced update."""
        count, width = self.count, self._width
        assert self.position is not None and count is not None
        kept = torch.arange(width, device=count.device) < count[:, None]
        return VisibleKeys(self.position[:, :width], kept)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the announced tokens.

        Args:
            key_states: (batch, heads, slots, width).
            value_states: the same.

        Returns:
            Keys and values (batch, heads, tokens of the longest sequence, width).
        """
        assert self._slot is not None, "update without announce"
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if key_states.requires_grad or value_states.requires_grad:
            # what attention saved for its backward pass must not be overwritten
            self.keys, self.values = self.keys.clone(), self.values.clone()
        if isinstance(self._slot, slice):
            self.keys[:, :, self._slot] = key_states
            self.values[:, :, self._slot] = value_states
        else:
            index = self._slot[:, None, :, None]
            self.keys.scatter_(2, index.expand_as(key_states), key_states)
            self.values.scatter_(2, index.expand_as(value_states), value_states)
        self._slot = None
        return self.keys[:, :, : self._width], self.values[:, :, : self._width]

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in earlier releases of transformers."""
        return -1

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def _select(self, rows: Tensor) -> None:
        for name in ("_count", "position", "keys", "values"):
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, held.index_select(0, rows.to(held.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.position is not None:
            self._select(torch.arange(len(self.position), device=self.position.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.position is not None:
            rows = torch.arange(len(self.position), device=self.position.device)
            self._select(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of the original sequence: -n removes n, a positive number is how many to keep."""
        stay = tokens_to_remove if tokens_to_remove > 0 else self.seen + tokens_to_remove
        self.seen = max(min(stay, self.seen), 0)
        count = self.count
        if count is not None and self.position is not None:
            place = torch.arange(self.position.shape[1], device=self.position.device)
            held = (place < count[:, None]) & (self.position < self.seen)
            self._count, self.even = held.sum(dim=1), None


def sparse_layer(cache: Cache, index: int) -> SparseLayer:
    """The sparse layer at this index of a cache; it replaces an ordinary layer that is still empty."""
    require(
        isinstance(cache, Cache) and not isinstance(cache, EncoderDecoderCache),
        f"a retrofitted model needs a Cache of a decoder, got {type(cache).__name__}",
    )
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, SparseLayer):
        return layer
    require(
        type(layer) is DynamicLayer and not layer.is_initialized,
        f"layer {index} of the cache must be a SparseLayer or a DynamicLayer without content, got "
        f"{type(layer).__name__}: retrofitted models use the default (dynamic) cache, from the first token on",
    )
    cache.layers[index] = sparse = SparseLayer()
    return sparse


def _grow(held: Tensor, dim: int, size: int) -> Tensor:
    """A larger copy, without the last place, which holds tokens that were not kept."""
    shape = list(held.shape)
    shape[dim] = size
    kept = held.narrow(dim, 0, held.shape[dim] - 1)
    return torch.cat([kept, held.new_zeros(shape).narrow(dim, 0, size - kept.shape[dim])], dim)
