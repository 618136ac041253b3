"""The contract of a mixer: a layer that takes a sequence and returns one of the same shape.

    module(x, mask=None, state=None, cu_seqlens=None) -> MixerOutput(y, state, routing)

A mixer owns its norm and its residual connection: layers are stacked by calling one after the other. Causal mixers
return the state after the last token; passing it back continues the sequence, and `step` takes one token at a time.
All three give the same numbers. With `cu_seqlens` the input holds concatenated documents (`core.layout`), each of
which is computed as if it were alone; packed documents carry no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from seqboat.core.checks import check_device, check_dtype, check_mask, check_positive, check_sequence, require
from seqboat.core.layout import WHOLE, Layout, find_layout
from seqboat.core.state import tensors

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


class Routing(NamedTuple):
    """The decisions of a router for M modules.

    >>> from seqboat import SeqBoat
    >>> routing = SeqBoat(8)(torch.randn(2, 5, 8)).routing
    >>> routing.active.shape, routing.confidence.shape
    (torch.Size([2, 5, 1]), torch.Size([2, 5, 1]))
    """

    active: Tensor
    """(batch, time, modules) bool: whether the token activates the module (the paper's a)"""
    probs: Tensor
    """the same shape, in at least float32: the probability of activation"""

    @property
    def confidence(self) -> Tensor:
        """The probability of the decision where active, zero elsewhere (the paper's c)."""
        return torch.where(self.active, self.probs, self.probs.new_zeros(()))


class MixerOutput(NamedTuple):
    """What a mixer returns: `y, state, routing = layer(x)`.

    >>> from seqboat import SeqBoat
    >>> out = SeqBoat(8)(torch.randn(2, 5, 8))
    >>> out.y.shape, out.state, out.routing.probs.shape
    (torch.Size([2, 5, 8]), None, torch.Size([2, 5, 1]))
    """

    y: Tensor
    """(batch, time, dim), zeros on padding; (batch, dim) from `step`"""
    state: Any = None
    """the state after the last real token; None for bidirectional mixers, and with packed documents"""
    routing: Routing | None = None
    """which tokens were activated; None for mixers without a router"""


class Mixer(nn.Module, ABC):
    """A sequence layer with its norm and residual connection inside.

    Subclasses implement `mix`, and set `d_model` and `causal`; those that decode implement `init_state` and `step`.

    >>> from seqboat import Mixer, MixerOutput
    >>> class Mean(Mixer):
    ...     def __init__(self, d_model):
    ...         super().__init__()
    ...         self.d_model, self.causal = d_model, False
    ...         self.linear = nn.Linear(d_model, d_model)
    ...     def mix(self, x, layout, state):
    ...         count = layout.lengths(x)[:, None, None]
    ...         y = x + self.linear(x.sum(dim=1, keepdim=True) / count)      # padding is zero in x
    ...         return MixerOutput(y if layout.mask is None else y * layout.mask[..., None])
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
        mask: Tensor | Layout | None = None,
        state: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> MixerOutput:
        """Run the layer.

        Args:
            x: (batch, time, d_model).
            mask: (batch, time), True on real tokens, in any pattern; or the `Layout` that x is in already.
            state: of this mixer, from an earlier call or `init_state`; it is not changed.
            cu_seqlens: (documents + 1,), where each document begins in the flattened (batch * time) input, and the
                end of the last; every document is computed as if it were alone.
        """
        if isinstance(mask, Layout):
            if mask.documents is not None and not self.packs:
                return self._mix_apart(x, mask)
            return self.mix(x, mask, state)
        self.check(x, state)
        if mask is None and cu_seqlens is None:
            return self.mix(x, WHOLE, state)
        require(cu_seqlens is None or state is None, "packed documents carry no state: call without one")
        layout = find_layout(x, mask, cu_seqlens)
        if layout.documents is not None and not x.shape[1]:
            layout = WHOLE
        y, after, routing = self(layout.pull(x), layout, state)
        if routing is not None:
            routing = Routing(layout.push(routing.active), layout.push(routing.probs))
        return MixerOutput(layout.push(y), after, routing)

    @abstractmethod
    def mix(self, x: Tensor, layout: Layout, state: Any) -> MixerOutput:
        """As `forward`, on tokens that lie as the layout says, with zeros on padding."""

    def _mix_apart(self, x: Tensor, layout: Layout) -> MixerOutput:
        """As `mix`, on packed documents: as sequences padded to the longest document."""
        documents = layout.documents
        assert documents is not None
        y, _, routing = self.mix(documents.spread(x), Layout(documents.real), None)
        if routing is not None:
            routing = Routing(documents.collect(routing.active), documents.collect(routing.probs))
        return MixerOutput(documents.collect(y), None, routing)

    def init_state(self, batch: int) -> Any:
        """The state before the first token; every tensor of it has the batch first."""
        self.require_causal()
        check_positive("batch", batch, least=0)
        weight = next(self.parameters())
        return self._fresh(batch, weight.dtype, weight.device)

    def _fresh(self, batch: int, dtype: torch.dtype, device: torch.device) -> Any:
        """The state before the first token, for inputs of this type."""
        raise NotImplementedError(f"{self.name} carries no state")

    def step(self, x: Tensor, state: Any) -> MixerOutput:
        """One token (batch, d_model) per sequence, without gradient; overwrites the state, and returns it."""
        raise NotImplementedError(f"{self.name} carries no state")

    @property
    def decodes(self) -> bool:
        """Whether the mixer carries a state and takes single steps."""
        return self.causal and type(self).step is not Mixer.step

    @property
    def grows(self) -> bool:
        """Whether the state grows with the sequence, as that of a Transformer does."""
        return False

    def closing_norm(self) -> nn.Module | None:
        """The norm that a stack of such mixers ends with, if it needs one."""
        return None

    def check(self, x: Tensor, state: Any) -> None:
        """Refuse what does not fit this mixer."""
        weight = next(self.parameters(), x)
        fits = isinstance(x, Tensor) and x.dim() == 3 and x.shape[2] == self.d_model and x.is_floating_point()
        if not fits or x.device != weight.device or x.dtype != weight.dtype:
            check_sequence(x, self.d_model)
            check_device(x, weight)
            if not self.widens or torch.float64 in (x.dtype, weight.dtype):
                check_dtype(x, weight)
        if state is not None:
            self.require_causal()
            self.check_rows(state, len(x))

    def check_rows(self, state: Any, batch: int) -> None:
        """Refuse a state of another batch; one of another mixer fails at its first product."""
        name, part = next(tensors(state), ("state", None))
        require(part is not None, f"state must be that of this {self.name}, got {type(state).__name__}")
        assert part is not None
        require(len(part) == batch, f"{name} must be of {batch} sequences, got {len(part)}")

    def require_causal(self) -> None:
        """Refuse to carry a state through a layer that sees the future."""
        if not self.causal:
            raise ValueError(f"this {self.name} is bidirectional: only causal layers carry a state")

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


class Activation(NamedTuple):
    """What one router did on a batch, per module."""

    rate: Tensor
    """(modules,): fraction of the real tokens that were activated"""
    confidence: Tensor
    """(modules,): mean confidence over the activated tokens; zero if there are none"""
    per_row: Tensor
    """(batch, modules): fraction of each sequence's real tokens that were activated"""


@torch.no_grad()
def activation(routing: Routing, mask: Tensor | None = None) -> Activation:
    """Measure what a router did; nothing of this is computed unless asked for.

    Args:
        routing: from a layer's output.
        mask: (batch, time), True on real tokens.

    Returns:
        `rate` and `confidence` of shape (modules,), and `per_row` of shape (batch, modules).

    >>> from seqboat import Routing, activation
    >>> active = torch.tensor([[[True], [False], [True], [False]]])
    >>> activation(Routing(active, active.float())).rate.tolist()
    [0.5]
    """
    counts, confidence = count_tokens(routing, mask), routing.confidence
    if mask is not None:
        confidence = torch.where(mask[..., None], confidence, 0)
    active, tokens = counts
    return Activation(
        rate=active.sum(dim=0) / tokens.sum().clamp(min=1),
        confidence=confidence.sum(dim=(0, 1)) / active.sum(dim=0).clamp(min=1),
        per_row=active / tokens[:, None].clamp(min=1),
    )


class TokenCounts(NamedTuple):
    """How many tokens a router activated, per sequence."""

    active: Tensor
    """(batch, modules): real tokens that activated each module"""
    tokens: Tensor
    """(batch,): real tokens"""


@torch.no_grad()
def count_tokens(routing: Routing, mask: Tensor | None = None) -> TokenCounts:
    """Count the active tokens of a batch.

    >>> active = torch.tensor([[[True], [False], [True]]])
    >>> counts = count_tokens(Routing(active, active.float()), torch.tensor([[True, True, False]]))
    >>> counts.active.tolist(), counts.tokens.tolist()
    ([[1]], [2])
    """
    active = routing.active
    if mask is None:
        batch, time, _ = active.shape
        return TokenCounts(active.sum(dim=1), torch.full((batch,), time, device=active.device))
    check_mask(mask, active)
    return TokenCounts((active & mask[..., None]).sum(dim=1), mask.sum(dim=1))


def count_layers(
    routings: Sequence[Routing | None], masks: Sequence[Tensor | None] = (None,)
) -> list[TokenCounts | None]:
    """What each layer of a model did, summed over the batch: (modules,) active tokens and () real ones.

    Args:
        routings: of all layers, from the model's output; of several sequences one after the other.
        masks: (batch, time) each, one per sequence.
    """
    layers = len(routings) // len(masks)
    found: list[TokenCounts | None] = [None] * layers
    for number, routing in enumerate(routings):
        if routing is None:
            continue
        active, tokens = (part.sum(dim=0) for part in count_tokens(routing, masks[number // layers]))
        before = found[number % layers]
        if before is not None:
            active, tokens = active + before.active, tokens + before.tokens
        found[number % layers] = TokenCounts(active, tokens)
    return found


def check_width(d_model: int) -> int:
    """The width of a layer, which every constructor checks first."""
    check_positive("d_model", d_model)
    return d_model
