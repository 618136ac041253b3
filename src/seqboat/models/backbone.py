"""A backbone: an input layer and a stack of mixers. No mixer is named here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqboat.core.checks import (
    check_choice,
    check_dtype,
    check_mask,
    check_positive,
    check_rate,
    require,
)
from seqboat.core.layout import WHOLE, Layout, clear, find_layout
from seqboat.core.mixer import Mixer, Routing, directions_of
from seqboat.core.nn import Norm, no_tracking, sinusoids
from seqboat.core.settings import FAMILIES, Settings, check_type, fill_in, unknown
from seqboat.mixers import MIXERS
from seqboat.models.stem import Stem
from seqboat.plugins import load_plugins

HeadInit = Literal["normal", "xavier", "zero"]
HEAD_INITS = ("normal", "xavier", "zero")
Pool = Literal["mean", "mean+max"]
POOLS = ("mean", "mean+max")


class MixerConfig(Protocol):
    """What a model needs to know about a mixer's configuration."""

    def build(self, d_model: int) -> Mixer: ...


FAMILIES[MixerConfig] = MIXERS


@runtime_checkable
class StackConfig(Protocol):
    """A mixer's configuration that builds a whole stack, because its layers differ by depth."""

    def build_layers(self, d_model: int, num_layers: int) -> Sequence[Mixer]: ...


@runtime_checkable
class SecondStream(Protocol):
    """A mixer with a second stream: extra tokens that the stack puts in front of the sequence."""

    lead: int
    """Tokens of the second stream; 0 for none."""

    def follow(self) -> None:
        """Take the second stream from the front of the sequence, where the stack puts it."""


@runtime_checkable
class SharesParameters(Protocol):
    """A mixer whose layers have parameters in common, which belong to the first one of a stack."""

    def share(self, first: Any) -> None:
        """Use the common parameters of `first` from now on."""


@dataclass(frozen=True, kw_only=True)
class BackboneConfig(Settings):
    """An input layer and a stack of mixers, identical unless the mixer's configuration builds the stack itself."""

    mixer: MixerConfig
    """The layer that is stacked."""
    d_model: int = 128
    """Width of the model."""
    num_layers: int = 4
    """Number of mixers."""
    vocab: int | None = None
    """Number of token ids; None for real-valued inputs."""
    channels: int = 1
    """Channels of real-valued inputs."""
    scaled_embedding: bool = False
    """Whether to multiply token embeddings by sqrt(d_model), as the paper's language model does."""
    absolute_positions: bool | None = None
    """Whether to add sinusoidal positions with a learned scale to the inputs; None: if the mixer needs them."""
    dropout: float = 0.0
    """Dropout rate on the input of the first layer."""
    final_norm_affine: bool = True
    """Whether the norm that a pre-norm stack ends with has a learned scale and shift."""
    head_hidden: bool = True
    """Whether the head of a classifier or tagger has a hidden layer; that of a matcher always has one."""
    head_bias: bool = True
    """Whether the class scores of a classifier or matcher have a bias."""
    head_init: HeadInit = "normal"
    """Initial weights of the head: truncated N(0, 0.02) as in the layers, Xavier as in the published code, or a last
    map of zeros, with which a model begins as what is added to its answers."""
    stem: int = 0
    """Width of two residual convolutions before the first layer; 0 without."""
    pool: Pool = "mean"
    """What a classifier reads of the tokens: their mean, or also their largest values."""

    def __post_init__(self) -> None:
        check_choice("head_init", self.head_init, HEAD_INITS)
        check_choice("pool", self.pool, POOLS)
        check_positive("stem", self.stem, least=0)
        require(self.stem == 0 or self.stem % 2 == 1, f"stem must be odd, got {self.stem}")
        check_positive("d_model", self.d_model)
        check_positive("num_layers", self.num_layers)
        check_positive("channels", self.channels)
        check_rate("dropout", self.dropout)
        if self.vocab is not None:
            check_positive("vocab", self.vocab)


def backbone_config(
    config: BackboneConfig | None, options: dict[str, Any], owner: object, causal: bool = False
) -> BackboneConfig:
    """The configuration of a model that was given one, or settings as keywords, or both.

    Args:
        config: given to the model; by default SeqBoat layers.
        options: keywords given to the model: fields of `BackboneConfig`, and fields of the mixer with other names.
            The mixer may be a name in MIXERS.
        owner: the model, which messages name.
        causal: whether mixers that are not given as a configuration read from left to right.
    """
    mixer = options.pop("mixer", None if config else "seqboat")
    if isinstance(mixer, str):
        if mixer not in MIXERS:
            load_plugins()
        if mixer not in MIXERS:
            raise ValueError(unknown(type(owner).__name__, "mixer", mixer, MIXERS))
        mixer = MIXERS[mixer](causal=causal or "bidirectional" not in directions_of(MIXERS[mixer]))
    if mixer is not None:
        check_type(f"{type(owner).__name__}: mixer", MixerConfig, mixer)
        config = BackboneConfig(mixer=mixer) if config is None else replace(config, mixer=mixer)
    return fill_in(BackboneConfig, config, options, owner)


class BackboneState(NamedTuple):
    """What a causal stack remembers."""

    layers: tuple[Any, ...]
    """one state per layer"""
    seen: Tensor
    """(batch,): real tokens so far"""


class BackboneOutput(NamedTuple):
    """What a stack returns."""

    y: Tensor
    """(batch, time, d_model), zeros on padding; (batch, d_model) from `step`"""
    state: BackboneState | None
    """after the last real token; None unless every layer is causal"""
    routings: tuple[Routing | None, ...]
    """one per layer"""


class Backbone(nn.Module):
    """An input layer and a stack of mixers.

    Args:
        config: every setting as one `BackboneConfig`.
        options: settings by name: fields of `BackboneConfig` and of the mixer, which may be a name in MIXERS.

    Calling it with token ids (batch, time), or real values (batch, time) or (batch, time, channels), returns a
    `BackboneOutput` whose y is (batch, time, d_model).
    """

    def __init__(self, config: BackboneConfig | None = None, **options: Any) -> None:
        super().__init__()
        config = backbone_config(config, options, self)
        self.config = config
        self.gradient_checkpointing = False
        d_model = config.d_model
        if config.vocab is not None:
            self.embedding: nn.Embedding | nn.Linear = nn.Embedding(config.vocab, d_model)
        else:
            self.embedding = nn.Linear(config.channels, d_model)
        if isinstance(config.mixer, StackConfig):
            self.layers = nn.ModuleList(config.mixer.build_layers(d_model, config.num_layers))
        else:
            self.layers = nn.ModuleList(config.mixer.build(d_model) for _ in range(config.num_layers))
        first = self.layers[0]
        assert isinstance(first, Mixer)
        for layer in self.layers[1:]:
            if isinstance(layer, SharesParameters):
                layer.share(first)
        asked = config.absolute_positions
        self.absolute_positions = first.wants_positions if asked is None else asked
        if self.absolute_positions:
            self.position_scale = nn.Parameter(torch.empty(()))
        self.lead: nn.Parameter | None = None
        if isinstance(first, SecondStream) and first.lead:
            self.lead = nn.Parameter(torch.empty(first.lead, d_model))
            for layer in self.layers:
                layer.follow()  # type: ignore[operator]
        self.causal = all(layer.decodes for layer in self.layers)
        self.stem = Stem(d_model, config.stem) if config.stem else None
        require(self.stem is None or not self.causal, "stem reads both sides: causal layers need stem=0")
        self.norm = first.closing_norm()
        if isinstance(self.norm, Norm) and not config.final_norm_affine:
            self.norm.drop_affine()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values of the input layer; mixers have their own.

        token embedding    N(0, 1 / d_model)
        real values        weights N(0, 1), biases N(0, 0.1)
        position scale     1 / sqrt(d_model)
        second stream      N(0, 1 / d_model)
        """
        if isinstance(self.embedding, nn.Embedding):
            nn.init.normal_(self.embedding.weight, std=self.config.d_model**-0.5)
        else:
            nn.init.normal_(self.embedding.weight)
            nn.init.normal_(self.embedding.bias, std=0.1)
        if self.absolute_positions:
            nn.init.constant_(self.position_scale, self.config.d_model**-0.5)
        if self.lead is not None:
            nn.init.normal_(self.lead, std=self.config.d_model**-0.5)

    def forward(
        self,
        inputs: Tensor,
        mask: Tensor | None = None,
        state: BackboneState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> BackboneOutput:
        """Run the stack.

        Args:
            inputs: token ids or real values.
            mask: (batch, time), True on real tokens, in any pattern.
            state: from an earlier call; causal stacks only.
            cu_seqlens: (documents + 1,), where packed documents begin in the flattened (batch * time) inputs, and the
                end of the last; every document is computed as if it were alone.
        """
        inputs = self._check(inputs, mask)
        if state is not None:
            require(cu_seqlens is None, "packed documents carry no state: call without one")
            self._check_state(state, inputs.shape[0])
        layout = WHOLE
        if inputs.shape[1] and (mask is not None or cu_seqlens is not None):
            layout = find_layout(inputs, mask, cu_seqlens)
            inputs = layout.pull(inputs)
        self._check_ids(inputs)
        x, states, routings = self._run(inputs, layout, state)
        if layout is not WHOLE:
            x = layout.push(x)
            routings = [
                None if r is None else Routing(layout.push(r.active), layout.push(r.probs)) for r in routings
            ]
        final = None
        if self.causal and layout.documents is None:
            new = layout.lengths(inputs)
            final = BackboneState(tuple(states), new if state is None else state.seen + new)
        return BackboneOutput(x, final, tuple(routings))

    def _run(
        self, inputs: Tensor, layout: Layout, state: BackboneState | None
    ) -> tuple[Tensor, list[Any], list[Routing | None]]:
        """Outputs, states and decisions of the layers, on inputs that lie as the layout says."""
        documents, apart = layout.documents, False
        if documents is not None and (self.lead is not None or self.stem is not None):
            # every document has a second stream of its own, and a stem that sees no other
            inputs, layout, apart = documents.spread(inputs), Layout(documents.real), True
        position = torch.arange(inputs.shape[1], device=inputs.device)[None]
        if layout.documents is not None:
            position = layout.documents.position[None]
        elif state is not None:
            position = state.seen[:, None] + position
        x, real = self._embed(inputs, position), layout.mask
        if self.stem is not None:
            x = self.stem(x, real)
        lead = 0 if self.lead is None else len(self.lead)
        if self.lead is not None:
            x = torch.cat([self.lead.expand(inputs.shape[0], -1, -1).to(x.dtype), x], dim=1)
            layout = WHOLE if real is None else Layout(F.pad(real, (lead, 0), value=True))
        states: list[Any] = []
        routings: list[Routing | None] = []
        before = (None,) * len(self.layers) if state is None else state.layers
        for layer, memory in zip(self.layers, before, strict=True):
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                # torch's compiler takes no contexts here
                around: Any = {}
                if not torch.compiler.is_compiling():
                    around = {"context_fn": partial(_recomputing, layer)}
                x, after, routing = checkpoint(layer, x, layout, memory, use_reentrant=False, **around)
            else:
                x, after, routing = layer(x, layout, memory)
            states.append(after)
            routings.append(routing)
        x = x[:, lead:]
        if self.norm is not None:
            x = clear(self.norm(x, real), real)
        return documents.collect(x) if apart and documents is not None else x, states, routings

    def _embed(self, inputs: Tensor, position: Tensor) -> Tensor:
        if isinstance(self.embedding, nn.Embedding):
            x = self.embedding(inputs)
            if self.config.scaled_embedding:
                x = x * math.sqrt(self.config.d_model)
        else:
            # autocast narrows the product; layers and states keep the dtype of the weights
            x = self.embedding(inputs).to(self.embedding.weight.dtype)
        if self.absolute_positions:
            x = x + (sinusoids(position, self.config.d_model) * self.position_scale).to(x.dtype)
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    def _check(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        require(isinstance(inputs, Tensor), f"inputs must be a tensor, got {type(inputs).__name__}")
        shape = tuple(inputs.shape)
        if self.config.vocab is not None:
            require(
                inputs.dim() == 2 and inputs.dtype in (torch.int64, torch.int32),
                f"inputs must be integer token ids of shape (batch, time), got {inputs.dtype} of shape {shape}",
            )
        else:
            if inputs.dim() == 2 and self.config.channels == 1:
                inputs = inputs[..., None]
            require(
                inputs.dim() == 3 and inputs.shape[2] == self.config.channels and inputs.is_floating_point(),
                f"inputs must be floating point of shape (batch, time, {self.config.channels}), "
                f"got {inputs.dtype} of shape {shape}",
            )
        weight = self.embedding.weight
        require(
            inputs.device == weight.device,
            f"inputs are on {inputs.device} but the model is on {weight.device}",
        )
        if isinstance(self.embedding, nn.Linear):
            check_dtype(inputs, weight, "inputs", "model")
        if mask is not None:
            check_mask(mask, inputs)
        return inputs

    def _check_ids(self, ids: Tensor) -> None:
        """Reject token ids out of range, on the CPU only: other devices raise an error themselves."""
        vocab = self.config.vocab
        if vocab is None or ids.device.type != "cpu" or not ids.numel() or torch.compiler.is_compiling():
            return
        low, high = (int(edge) for edge in ids.aminmax())
        require(
            low >= 0 and high < vocab,
            f"inputs must be token ids in 0..{vocab - 1}, got {low if low < 0 else high}",
        )

    def _check_state(self, state: BackboneState, batch: int) -> None:
        require(self.causal, "this model is bidirectional: only causal models carry a state")
        require(
            isinstance(state, BackboneState) and len(state.layers) == len(self.layers),
            f"state of another model: it must be a BackboneState of {len(self.layers)} layers, "
            f"got {type(state).__name__}",
        )
        require(
            len(state.seen) == batch, f"the state is of {len(state.seen)} sequences, but there are {batch}"
        )

    @property
    def grows(self) -> bool:
        """Whether the state grows with the sequence, as that of a Transformer does."""
        return any(layer.grows for layer in self.layers)

    def init_state(self, batch: int) -> BackboneState:
        """The state before the first token."""
        require(self.causal, "this model is bidirectional: only causal models carry a state")
        seen = torch.zeros(batch, dtype=torch.int64, device=self.embedding.weight.device)
        return BackboneState(tuple(layer.init_state(batch) for layer in self.layers), seen)  # type: ignore[operator]

    @torch.no_grad()
    def step(self, inputs: Tensor, state: BackboneState) -> BackboneOutput:
        """Take one token per sequence.

        Args:
            inputs: (batch,) token ids, or (batch, channels) real values.
            state: from `init_state`, `forward` or `step`; it is overwritten, and returned.
        """
        if not self.causal:
            raise ValueError("this model is bidirectional: only causal models carry a state")
        vocab, channels = self.config.vocab, self.config.channels
        if not isinstance(inputs, Tensor) or inputs.dim() != (1 if vocab is not None else 2):
            if vocab is None and channels == 1 and isinstance(inputs, Tensor) and inputs.dim() == 1:
                return self.step(inputs[:, None], state)
            wanted = "integer token ids of shape (batch,)"
            wanted = wanted if vocab is not None else f"floating point of shape (batch, {channels})"
            found = type(inputs).__name__
            if isinstance(inputs, Tensor):
                found = f"{inputs.dtype} of shape {tuple(inputs.shape)}"
            raise ValueError(f"inputs must be {wanted}, got {found}")
        inputs = self._check(inputs[:, None], None)
        if len(state.layers) != len(self.layers) or state.seen.shape[0] != inputs.shape[0]:
            self._check_state(state, inputs.shape[0])
        self._check_ids(inputs)
        x, routings = self._embed(inputs, state.seen[:, None])[:, 0], []
        for layer, memory in zip(self.layers, state.layers, strict=True):
            assert isinstance(layer, Mixer)
            x, _, routing = layer.step(x, memory)
            routings.append(routing)
        if self.norm is not None:
            x = self.norm(x)
        state.seen.add_(1)
        return BackboneOutput(x, state, tuple(routings))


def _recomputing(layer: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for a checkpointed layer and its recomputation, which must not update running averages again."""
    return nullcontext(), no_tracking(layer)
