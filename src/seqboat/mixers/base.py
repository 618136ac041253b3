"""The contract of a mixer: a layer that takes a sequence and returns one of the same shape.

    module(x, mask=None, state=None) -> MixerOutput(y, state, routing)

A mixer owns its norm and its residual connection, so that layers are stacked by calling one after the other.
Causal mixers return the state after the last token; passing it back continues the sequence, and `step` takes
one token at a time. The three ways give the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.checks import (
    check_device,
    check_dtype,
    check_mask,
    check_positive,
    check_row_mask,
    check_sequence,
    check_token,
    require,
)
from seqboat.core.padding import Aligned, align, zero_padding
from seqboat.core.sma import Routing
from seqboat.core.state import check_state

Direction = Literal["bidirectional", "causal"]
DIRECTIONS: tuple[Direction, ...] = ("bidirectional", "causal")


def directions_of(config: object) -> tuple[Direction, ...]:
    """In which directions a mixer works, from its configuration or the class of it.

    A method that has only one form says so by a class variable `directions`; its field `causal` then has one value.
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
    """What a mixer returns."""

    y: Tensor
    """(batch, time, dim), zeros on padding; (batch, dim) from `step`"""
    state: Any = None
    """the state after the last real token; None for bidirectional mixers"""
    routing: Routing | None = None
    """who was activated; None for mixers without a router"""


class Mixer(nn.Module, ABC):
    """A sequence layer. Subclasses implement `mix` on rows whose real tokens come first."""

    d_model: int
    causal: bool
    widens = False
    """Whether the mixer computes in float32 at least: then narrow inputs may meet wide parameters."""
    wants_positions = False
    """Whether the mixer knows no order of its tokens: models then add absolute positions to their inputs."""
    lead = 0
    """Tokens of a second stream: in a stack they run in front of the sequence through all layers."""

    def forward(self, x: Tensor, mask: Tensor | Aligned | None = None, state: Any = None) -> MixerOutput:
        """Run the layer.

        Args:
            x: (batch, time, d_model).
            mask: (batch, time), True on real tokens, in any pattern; or `Aligned` where real tokens come first.
            state: of this mixer, from an earlier call or `init_state`.
        """
        self.check(x, mask, state)
        if mask is None:
            return self.mix(x, None, state)
        if isinstance(mask, Aligned):
            return self.mix(zero_padding(x, mask.mask), mask.mask, state)
        plan = align(mask)
        y, after, routing = self.mix(plan.pull(x), plan.mask, state)
        if routing is not None:
            routing = Routing(plan.push(routing.active), plan.push(routing.probs))
        return MixerOutput(plan.push(y), after, routing)

    @abstractmethod
    def mix(self, x: Tensor, mask: Tensor | None, state: Any) -> MixerOutput:
        """As `forward`, with real tokens first in every row and zeros behind them."""

    def closing_norm(self) -> nn.Module | None:
        """The norm that a stack of such mixers ends with, if it needs one."""
        return None

    def auxiliary_loss(self) -> Tensor | None:
        """What the layer adds to the loss of a model that is trained, a function of its parameters; or None."""
        return None

    def follow(self) -> None:
        """Become a layer of a stack: take the second stream from the front of the sequence, not an own one."""
        raise NotImplementedError(f"{self.name} has no second stream")

    def check(self, x: Tensor, mask: Tensor | Aligned | None, state: Any) -> None:
        """Refuse what does not fit this mixer."""
        check_sequence(x, self.d_model)
        self.check_home(x)
        if mask is not None:
            check_mask(mask.mask if isinstance(mask, Aligned) else mask, x)
        if state is not None:
            self.check_state(state, x)

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
        """How messages call this mixer."""
        return type(self).__name__


def auxiliary_loss(model: nn.Module) -> Tensor | None:
    """What all layers of a model together add to the loss per target; None if they add nothing."""
    terms = [part.auxiliary_loss() for part in model.modules() if isinstance(part, Mixer)]
    found = [term for term in terms if term is not None]
    return torch.stack(found).sum() if found else None


class RecurrentMixer(Mixer):
    """A mixer that can carry a state, if it is causal."""

    def init_state(self, batch: int, dtype: torch.dtype | None = None) -> Any:
        """The state before the first token.

        Args:
            batch: rows.
            dtype: of the inputs to come; the parameters' by default.
        """
        self.require_causal()
        check_positive("batch", batch, least=0)
        parameter = next(self.parameters())
        return self.make_state(batch, dtype or parameter.dtype, parameter.device)

    def step(self, x: Tensor, state: Any, mask: Tensor | None = None, inplace: bool = False) -> MixerOutput:
        """Take one token per row.

        Args:
            x: (batch, d_model).
            state: from `init_state`, `forward` or `step`.
            mask: (batch,), False for rows that rest: their state stays and their output is zero.
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
        """As `step`, without the checks; resting rows of x are zero."""

    def require_causal(self) -> None:
        """Refuse to carry a state through a layer that sees the future."""
        require(self.causal, f"this {self.name} is bidirectional: only causal layers carry a state")

    def check_state(self, state: Any, x: Tensor) -> None:
        """Refuse a state of another batch size or another model."""
        self.require_causal()
        fresh = self.make_state(x.shape[0], x.dtype, torch.device("meta"))
        check_state(state, fresh, x.device, self.name)


def keep_rows(mask: Tensor | None, yes: Tensor, no: Tensor | None = None) -> Tensor:
    """The marked rows of one tensor and the other rows of another (or zeros)."""
    if mask is None:
        return yes
    rows = mask.view(-1, *(1,) * (yes.dim() - 1))
    return torch.where(rows, yes, yes.new_zeros(()) if no is None else no)
