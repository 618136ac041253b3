"""The contract of a mixer: a layer that takes a sequence and returns one of the same shape.

    module(x, mask=None, state=None, cu_seqlens=None) -> MixerOutput(y, state, routing)

A mixer owns its norm and its residual connection: layers are stacked by calling one after the other.
Causal mixers return the state after the last token; passing it back continues the sequence, and `step` takes
one token at a time. All three give the same numbers. With `cu_seqlens` the input holds concatenated
documents (`core.documents`), each of which is computed as if it were alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.core.checks import (
    check_device,
    check_dtype,
    check_mask,
    check_positive,
    check_row_mask,
    check_sequence,
    check_token,
    require,
)
from seqboat.core.documents import Documents, find_documents
from seqboat.core.padding import Aligned, align, zero_padding
from seqboat.core.state import check_state
from seqboat.layers.packing import Routing

Direction = Literal["bidirectional", "causal"]
DIRECTIONS: tuple[Direction, ...] = ("bidirectional", "causal")


def directions_of(config: object) -> tuple[Direction, ...]:
    """The directions in which a mixer works, from its configuration or its class.

    A method with only one form declares it in a class variable `directions`; its field `causal` then has one value.
    """
    return getattr(config, "directions", DIRECTIONS)


def check_direction(config: object, causal: bool, reason: str) -> None:
    """Refuse a direction that a method does not have.

    Args:
        config: of the mixer; its class declares `directions`.
        causal: the direction asked for.
        reason: why there is no other.
    """
    asked = DIRECTIONS[causal]
    name = type(config).__name__.removesuffix("Config")
    only = " and ".join(directions_of(config))
    require(asked in directions_of(config), f"{name} has no {asked} form, it is {only}: {reason}")


class MixerOutput(NamedTuple):
    """What a mixer returns: `y, state, routing = layer(x)`.

    >>> import torch
    >>> from seqboat import SeqBoat
    >>> out = SeqBoat(8)(torch.randn(2, 5, 8))
    >>> out.y.shape, out.state, out.routing.probs.shape
    (torch.Size([2, 5, 8]), None, torch.Size([2, 5, 1]))
    """

    y: Tensor
    """(batch, time, dim), zeros on padding; (batch, dim) from `step`"""
    state: Any = None
    """the state after the last real token; None for bidirectional mixers"""
    routing: Routing | None = None
    """which tokens were activated; None for mixers without a router"""


class Mixer(nn.Module, ABC):
    """A sequence layer with its norm and residual connection inside.

    Subclasses implement `mix` on sequences whose real tokens come first, and set `d_model` and `causal`.

    >>> import torch
    >>> from torch import nn
    >>> from seqboat import Mixer, MixerOutput
    >>> class Mean(Mixer):
    ...     def __init__(self, d_model):
    ...         super().__init__()
    ...         self.d_model, self.causal = d_model, False
    ...         self.linear = nn.Linear(d_model, d_model)
    ...     def mix(self, x, mask, state):
    ...         count = x.shape[1] if mask is None else mask.sum(dim=1)[:, None, None]
    ...         y = x + self.linear(x.sum(dim=1, keepdim=True) / count)      # padding is zero in x
    ...         return MixerOutput(y if mask is None else y * mask[..., None])
    >>> mask = torch.tensor([[False, True, True, False]])                    # in any pattern
    >>> Mean(3)(torch.randn(1, 4, 3), mask).y.shape
    torch.Size([1, 4, 3])
    """

    d_model: int
    causal: bool
    widens = False
    """Whether the mixer computes in at least float32: then narrow inputs may meet wide parameters."""
    wants_positions = False
    """Whether the mixer does not see the order of its tokens: models then add absolute positions to their inputs."""
    packs = False
    """Whether the mixer computes packed documents without padding them."""

    def forward(
        self,
        x: Tensor,
        mask: Tensor | Aligned | Documents | None = None,
        state: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> MixerOutput:
        """Run the layer.

        Args:
            x: (batch, time, d_model).
            mask: (batch, time), True on real tokens, in any pattern; or `Aligned` where real tokens come first; or
                `Documents`, whose packed sequence x is.
            state: of this mixer, from an earlier call or `init_state`.
            cu_seqlens: (documents + 1,), where each document begins in the flattened (batch * time) input, and the
                end of the last; every document is computed as if it were alone, except that the first one of a
                sequence continues from its state.
        """
        if cu_seqlens is not None:
            return self._run_packed(x, mask, state, cu_seqlens)
        self.check(x, mask, state)
        if mask is None:
            return self.mix(x, None, state)
        if isinstance(mask, Aligned):
            return self.mix(zero_padding(x, mask.mask), mask.mask, state)
        if isinstance(mask, Documents):
            return self.mix_documents(zero_padding(x, mask.mask), mask, state)
        plan = align(mask)
        y, after, routing = self.mix(plan.pull(x), plan.mask, state)
        if routing is not None:
            routing = Routing(plan.push(routing.active), plan.push(routing.probs))
        return MixerOutput(plan.push(y), after, routing)

    @abstractmethod
    def mix(self, x: Tensor, mask: Tensor | None, state: Any) -> MixerOutput:
        """As `forward`, with real tokens first in every sequence and zeros after them."""

    def mix_documents(self, x: Tensor, documents: Documents, state: Any) -> MixerOutput:
        """As `mix`, on packed documents (1, tokens, d_model); here, as sequences padded to the longest document."""
        if state is not None:
            fresh = self.make_state(1, x.dtype, x.device)  # type: ignore[operator]
            state = documents.enter(state, fresh)
        y, after, routing = self.mix(documents.spread(x), documents.real, state)
        if routing is not None:
            routing = Routing(documents.collect(routing.active), documents.collect(routing.probs))
        after = None if after is None else documents.leave(after)
        return MixerOutput(documents.collect(y), after, routing)

    def _run_packed(self, x: Tensor, mask: Any, state: Any, cu_seqlens: Tensor) -> MixerOutput:
        """As `forward`, from cu_seqlens."""
        self.check(x, mask, state)
        require(
            mask is None or isinstance(mask, Tensor),
            f"with cu_seqlens, mask must be None or a tensor, got {type(mask).__name__}",
        )
        documents = find_documents(cu_seqlens, x, mask)
        if x.shape[1] == 0:
            return self.mix(x, mask, state)
        y, after, routing = self.mix_documents(documents.pull(x), documents, state)
        if routing is not None:
            routing = Routing(documents.push(routing.active), documents.push(routing.probs))
        return MixerOutput(documents.push(y), after, routing)

    def closing_norm(self) -> nn.Module | None:
        """The norm that a stack of such mixers ends with, if it needs one."""
        return None

    def check(self, x: Tensor, mask: Tensor | Aligned | Documents | None, state: Any) -> None:
        """Refuse what does not fit this mixer."""
        if not self._fits(x):  # the messages are only looked up if something is wrong
            check_sequence(x, self.d_model)
            self.check_home(x)
        if mask is not None and not isinstance(mask, Documents):
            check_mask(mask.mask if isinstance(mask, Aligned) else mask, x)
        if state is not None:
            self.check_state(state, x if not isinstance(mask, Documents) else x.expand(mask.shape[0], -1, -1))

    def _fits(self, x: Tensor) -> bool:
        """Whether `check_sequence` and `check_home` would accept x."""
        weight = next(self.parameters(), x)
        return (
            isinstance(x, Tensor)
            and x.dim() == 3
            and x.shape[2] == self.d_model
            and x.is_floating_point()
            and x.device == weight.device
            and (x.dtype == weight.dtype or (self.widens and torch.float64 not in (x.dtype, weight.dtype)))
        )

    def check_home(self, x: Tensor) -> None:
        """Refuse an input on another device than the parameters, or of another type."""
        parameter = next(self.parameters(), None)
        if parameter is not None:
            check_device(x, parameter)
            if not self.widens or torch.float64 in (x.dtype, parameter.dtype):
                check_dtype(x, parameter)

    def check_state(self, state: Any, x: Tensor) -> None:
        """Refuse a state that does not belong to this mixer and batch."""
        raise ValueError(f"{self.name} has no state: call it without one")

    @property
    def name(self) -> str:
        """What messages call this mixer."""
        return type(self).__name__


class AsTensor(nn.Module):
    """A mixer that returns its output alone, as the layers of an `nn.Sequential` do.

    Args:
        mixer: any layer of this package; its decisions and its state are dropped.

    >>> from seqboat import SeqBoat
    >>> model = nn.Sequential(nn.Linear(3, 8), AsTensor(SeqBoat(8)), nn.Linear(8, 2))
    >>> model(torch.randn(4, 10, 3)).shape
    torch.Size([4, 10, 2])
    """

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        require(
            isinstance(mixer, Mixer), f"mixer must be a layer of this package, got {type(mixer).__name__}"
        )
        self.mixer = mixer

    def forward(self, x: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """(batch, time, d_model) of the same shape; `mask` and `cu_seqlens` as in `Mixer.forward`."""
        out: Tensor = self.mixer(x, mask, cu_seqlens=cu_seqlens).y
        return out


class RecurrentMixer(Mixer):
    """A mixer that can carry a state, if it is causal. Subclasses also implement `make_state` and `advance`.

    The whole sequence, its chunks with a carried state, and single steps give the same numbers.

    >>> import torch
    >>> from seqboat import RecurrentMixer, SeqBoat
    >>> layer = SeqBoat(8, causal=True).eval()
    >>> isinstance(layer, RecurrentMixer)
    True
    >>> x = torch.randn(1, 3, 8)
    >>> state = layer.init_state(batch=1)
    >>> for token in x.unbind(dim=1):
    ...     y, state, routing = layer.step(token, state)
    >>> torch.testing.assert_close(y, layer(x).y[:, -1])
    """

    @property
    def grows(self) -> bool:
        """Whether the state grows with the sequence, as that of a Transformer does; subclasses say so."""
        return False

    def init_state(self, batch: int, dtype: torch.dtype | None = None) -> Any:
        """The state before the first token.

        Args:
            batch: number of sequences.
            dtype: of the inputs to come; the parameters' by default.
        """
        self.require_causal()
        check_positive("batch", batch, least=0)
        parameter = next(self.parameters())
        return self.make_state(batch, dtype or parameter.dtype, parameter.device)

    def step(self, x: Tensor, state: Any, mask: Tensor | None = None, inplace: bool = False) -> MixerOutput:
        """Take one token per sequence.

        Args:
            x: (batch, d_model).
            state: from `init_state`, `forward` or `step`.
            mask: (batch,), False for sequences that pause: their state stays and their output is zero.
            inplace: whether the given state may be overwritten, which saves a copy of its memory.
        """
        self.require_causal()
        check_token(x, self.d_model)
        self.check_home(x)
        self.check_state(state, x)
        if mask is not None:
            check_row_mask(mask, x)
            x = keep_rows(mask, x)
        return self.advance(x, state, mask, inplace)

    @abstractmethod
    def make_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Any:
        """A fresh state."""

    @abstractmethod
    def advance(
        self, x: Tensor, state: Any, mask: Tensor | None = None, inplace: bool = False
    ) -> MixerOutput:
        """As `step`, without the checks; paused sequences of x are zero."""

    def require_causal(self) -> None:
        """Refuse to carry a state through a layer that sees the future."""
        require(self.causal, f"this {self.name} is bidirectional: only causal layers carry a state")

    def check_state(self, state: Any, x: Tensor) -> None:
        """Refuse a state of another batch size or another model."""
        self.require_causal()
        fresh = self.make_state(x.shape[0], x.dtype, torch.device("meta"))
        check_state(state, fresh, x.device, self.name)


def keep_rows(mask: Tensor | None, yes: Tensor, no: Tensor | None = None) -> Tensor:
    """The marked sequences of one tensor and the others of another (or zeros)."""
    if mask is None:
        return yes
    rows = mask.view(-1, *(1,) * (yes.dim() - 1))
    return torch.where(rows, yes, yes.new_zeros(()) if no is None else no)
