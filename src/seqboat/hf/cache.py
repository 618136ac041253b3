"""The state of a causal model as a cache of transformers.

The library asks a cache for the number of positions seen, and to reorder, repeat and select sequences; what it stores
is up to it. Ours stores the model's state, of constant size for SeqBoat layers, in one layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from seqboat.core.state import map_state, repeat_rows, select_rows
from seqboat.models.backbone import Backbone, BackboneState


class SeqBoatCacheLayer(CacheLayerMixin):
    """The state of a stack, and the number of tokens that it has seen."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.cumulative_length = 0
        """positions so far, including padding: the same for all sequences"""
        self.overwritable = False
        """whether a step may overwrite the state: no gradient needs it"""
        self.state: BackboneState | None = None
        """in the form of the core; None before the first token"""

    def put(self, state: BackboneState, new: int) -> None:
        """Take over the state after `new` more positions."""
        self.state = state
        self.overwritable = not torch.is_grad_enabled()
        self.cumulative_length += new
        self.is_initialized = True

    def step(self, backbone: Backbone, tokens: Tensor) -> Tensor | None:
        """Read one token per sequence, (batch,): (batch, d_model); None where the state may not be overwritten."""
        if self.state is None or not self.may_overwrite() or torch.compiler.is_compiling():
            return None
        self.cumulative_length += 1
        return backbone.step(tokens, self.state).y

    def may_overwrite(self) -> bool:
        """Whether a step may overwrite the tensors: no gradient needs them, and torch allows it."""
        state = self.state
        if state is None or not self.overwritable or torch.is_grad_enabled():
            return False
        return torch.is_inference_mode_enabled() or not state.seen.is_inference()

    def change(self, function: Any) -> None:
        """Apply a function to the state, if there is one."""
        if self.state is not None:
            self.state = function(self.state)

    def __deepcopy__(self, memo: dict[int, Any]) -> SeqBoatCacheLayer:
        new = SeqBoatCacheLayer()
        if self.state is not None:
            new.put(map_state(Tensor.clone, self.state), self.cumulative_length)
        new.overwritable = self.overwritable
        return new

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else len(self.state.seen)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a SeqBoat cache holds a state, not keys and values of all tokens")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a SeqBoat cache holds a state, not keys and values of all tokens")

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            "a recurrent state cannot be rolled back: keep a copy of the cache (copy.deepcopy) instead"
        )

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in versions before 5.14

    def reset(self) -> None:
        self.state, self.cumulative_length, self.is_initialized = None, 0, False

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change(lambda state: select_rows(state, indices))

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change(lambda state: repeat_rows(state, repeats))


class SeqBoatCache(Cache):
    """The state of a model. Like every cache of the library it is updated in place."""

    def __init__(self) -> None:
        super().__init__(layers=[SeqBoatCacheLayer()])

    @property
    def whole(self) -> SeqBoatCacheLayer:
        """The one layer."""
        layer: SeqBoatCacheLayer = self.layers[0]
        return layer

    @property
    def state(self) -> BackboneState | None:
        """The state in the form of the core; None before the first token."""
        return self.whole.state

    def to(self, device: torch.device | str) -> SeqBoatCache:
        """Move the state to another device."""
        self.whole.change(lambda state: map_state(lambda part: part.to(device), state))
        return self
