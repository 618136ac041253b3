"""The state of a causal model as a cache of transformers.

The library asks each layer of a cache for the number of positions seen, and to reorder, repeat and select sequences;
what a layer stores is up to it. Ours stores the mixer's state, of constant size for SeqBoat layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from seqboat.core.checks import require
from seqboat.core.state import map_state, repeat_rows, select_rows
from seqboat.inference.lean import LeanBackbone, lean_backbone
from seqboat.models.backbone import Backbone, BackboneState


class SeqBoatCacheLayer(CacheLayerMixin):
    """The state of one mixer, and the number of tokens that the model has seen."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.cumulative_length = 0
        """positions so far, including padding: the same for all sequences"""
        self._state: BackboneState | None = None
        self.settle: Callable[[], None] | None = None
        """called before the state is read, while it is elsewhere"""

    @property
    def state(self) -> BackboneState | None:
        """The state of the model with this mixer as its only one."""
        if self.settle is not None:
            self.settle()
        return self._state

    @state.setter
    def state(self, state: BackboneState | None) -> None:
        self._state = state

    def put(self, state: BackboneState, new: int) -> None:
        """Take over the state after `new` more positions."""
        self.state = state
        self.cumulative_length += new
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        return -1 if self._state is None else len(self._state.seen)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a SeqBoat cache holds states, not keys and values of all tokens")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a SeqBoat cache holds states, not keys and values of all tokens")

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

    def get_max_cache_shape(self) -> int:
        """`get_max_length` under its name in versions before 5.14."""
        return -1

    def reset(self) -> None:
        self.settle = None
        self.state, self.cumulative_length, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = select_rows(self.state, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = repeat_rows(self.state, repeats)


class SeqBoatCache(Cache):
    """The state of all layers. Like every cache of the library it is updated in place."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[SeqBoatCacheLayer() for _ in range(num_layers)])
        self._differentiable = False
        self._lean: LeanBackbone | None = None
        self._may_be_lean = True

    def step(self, backbone: Backbone, tokens: Tensor) -> Tensor | None:
        """Read one token per sequence, (batch,), by a lean step: (batch, d_model), or None where it does not apply.

        The lean step is chosen once and keeps the state until somebody asks for it: to reorder sequences, as beam
        search does at every step, or to read a longer piece. From then on the general step is taken.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if self._lean is None:
            state = self.state if self._may_be_lean else None
            self._may_be_lean = False
            if state is None or not self.overwritable:
                return None
            self._lean = lean_backbone(backbone, len(state.seen))
            if self._lean is None:
                return None
            self._lean.join(state)
            for layer in self.layers:
                layer.settle = self._settle
        if not self._lean.applies or self._lean.backbone is not backbone or len(tokens) != len(self._lean):
            self._settle()
            return None
        for layer in self.layers:
            layer.cumulative_length += 1
        return self._lean.step(tokens)

    def _settle(self) -> None:
        """Take the state back from the lean step."""
        assert self._lean is not None
        state, self._lean = self._lean.state(), None
        for layer, memory in zip(self.layers, state.layers, strict=True):
            layer.settle = None
            layer.state = state._replace(layers=(memory,))

    def reset(self) -> None:
        super().reset()
        self._lean, self._may_be_lean = None, True

    def __deepcopy__(self, memo: dict[int, Any]) -> SeqBoatCache:
        new = SeqBoatCache(len(self.layers))
        memo[id(self)] = new
        for mine, theirs in zip(new.layers, self.layers, strict=True):
            if theirs.state is not None:
                mine.put(map_state(Tensor.clone, theirs.state), theirs.cumulative_length)
        new._differentiable, new._may_be_lean = self._differentiable, self._may_be_lean
        return new

    @property
    def state(self) -> BackboneState | None:
        """The state in the form of the core; None before the first token."""
        first = self.layers[0].state
        if first is None:
            return None
        return first._replace(layers=tuple(layer.state.layers[0] for layer in self.layers))

    def put(self, state: BackboneState, new: int) -> None:
        """Take over the state after `new` more positions."""
        require(
            len(state.layers) == len(self.layers),
            f"the cache has {len(self.layers)} layers, the model {len(state.layers)}",
        )
        self._differentiable = torch.is_grad_enabled()
        for layer, memory in zip(self.layers, state.layers, strict=True):
            layer.put(state._replace(layers=(memory,)), new)

    @property
    def overwritable(self) -> bool:
        """Whether a step may overwrite the tensors: no gradient needs them, and torch allows it."""
        state = self.state
        if state is None or self._differentiable or torch.is_grad_enabled():
            return False
        return torch.is_inference_mode_enabled() or not state.seen.is_inference()

    def to(self, device: torch.device | str) -> SeqBoatCache:
        """Move the state to another device."""
        for layer in self.layers:
            if layer.state is not None:
                layer.state = map_state(lambda part: part.to(device), layer.state)
        return self
