"""The layer around a state-space core that S4 and its successors share.

    h = dropout(GELU(SSM(x)))
    y = x + dropout(gate(h)),   gate(h) = (h W_1 + b_1) * sigmoid(h W_2 + b_2)     "glu"
                                gate(h) = h * sigmoid(h W + b)                      "sigmoid"

with the norm before the branch or after the sum. Nothing but the core mixes tokens: a stack of these layers is a
pure state-space model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_rate
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Mixer, MixerOutput
from seqboat.core.nn import NORMS, Norm, NormName, make_norm
from seqboat.core.settings import Settings
from seqboat.ssm.diagonal import S4DConfig
from seqboat.ssm.liquid_s4 import LiquidS4Config
from seqboat.ssm.s4 import S4Config
from seqboat.ssm.s5 import S5Config

Gate = Literal["glu", "sigmoid"]
GATES = ("glu", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class SSMLayerConfig(Settings):
    """The options that all layers with a state-space core have."""

    causal: bool = False
    """Whether the layer reads from left to right only, for language models."""
    norm: NormName = "layer"
    """The norm of the layer."""
    prenorm: bool = True
    """Whether the norm comes before the branch instead of after the layer."""
    gate: Gate = "glu"
    """The output: a gated linear unit, or the activations gated by a linear map of themselves."""
    dropout: float = 0.0
    """Rate of dropout on the activations and on the output of the branch."""

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)
        check_choice("gate", self.gate, GATES)
        check_rate("dropout", self.dropout)


class SSMLayer(Mixer):
    """A state-space core with norm, gate and residual connection, on (batch, time, d_model).

    Args:
        ssm: the core, on the same width.
        config: the rest.
    """

    packs = True

    def __init__(self, ssm: Mixer, config: SSMLayerConfig) -> None:
        super().__init__()
        self.config, self.d_model, self.causal = config, ssm.d_model, ssm.causal
        self.norm: Norm = make_norm(config.norm, self.d_model)
        self.ssm = ssm
        # the published layers keep the framework's initial values of linear maps, and so does this one
        self.out = nn.Linear(self.d_model, (2 if config.gate == "glu" else 1) * self.d_model)

    def closing_norm(self) -> nn.Module | None:
        return make_norm(self.config.norm, self.d_model) if self.config.prenorm else None

    @property
    def name(self) -> str:
        return f"{self.ssm.name} layer"

    def mix(self, x: Tensor, layout: Layout, state: Any) -> MixerOutput:
        ssm = self.ssm(self._open(x, layout.mask), layout, state)
        return MixerOutput(clear(self._close(x, ssm.y, layout.mask), layout.mask), ssm.state)

    def _open(self, x: Tensor, mask: Tensor | None) -> Tensor:
        # autocast may widen the output of a norm: states keep to the type of the inputs
        return self.norm(x, mask).to(x.dtype) if self.config.prenorm else x

    def _close(self, x: Tensor, mixed: Tensor, mask: Tensor | None) -> Tensor:
        hidden = self._drop(F.gelu(mixed))
        out = self.out(hidden)
        out = F.glu(out) if self.config.gate == "glu" else hidden * torch.sigmoid(out)
        y = x + self._drop(out).to(x.dtype)
        return y if self.config.prenorm else self.norm(y, mask).to(x.dtype)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    def init_state(self, batch: int) -> Any:
        return self.ssm.init_state(batch)

    @torch.no_grad()
    def step(self, x: Tensor, state: Any) -> MixerOutput:
        ssm = self.ssm.step(self._open(x, None), state)
        return MixerOutput(self._close(x, ssm.y, None), ssm.state)


@dataclass(frozen=True, kw_only=True)
class S4DLayerConfig(SSMLayerConfig):
    """S4D: a diagonal state-space kernel with complex states in each channel; no attention."""

    ssm: S4DConfig = S4DConfig()
    """The state-space core."""

    def build(self, d_model: int) -> SSMLayer:
        return SSMLayer(self.ssm.build(d_model, self.causal), self)


@dataclass(frozen=True, kw_only=True)
class S4LayerConfig(SSMLayerConfig):
    """S4: a state-space kernel whose matrix is diagonal plus rank one (HiPPO-LegS); no attention."""

    ssm: S4Config = S4Config()
    """The state-space core."""

    def build(self, d_model: int) -> SSMLayer:
        return SSMLayer(self.ssm.build(d_model, self.causal), self)


@dataclass(frozen=True, kw_only=True)
class S5LayerConfig(SSMLayerConfig):
    """S5: one state-space system shared by all channels, run by a parallel scan; no attention."""

    ssm: S5Config = S5Config()
    """The state-space core."""
    norm: NormName = "batch"
    """The norm of the layer."""
    gate: Gate = "sigmoid"
    """The output: a gated linear unit, or the activations gated by a linear map of themselves."""

    def build(self, d_model: int) -> SSMLayer:
        return SSMLayer(self.ssm.build(d_model, self.causal), self)


@dataclass(frozen=True, kw_only=True)
class LiquidS4LayerConfig(SSMLayerConfig):
    """Liquid-S4: a diagonal state-space kernel that also responds to products of successive inputs; no attention."""

    ssm: LiquidS4Config = LiquidS4Config()
    """The state-space core."""

    def build(self, d_model: int) -> SSMLayer:
        return SSMLayer(self.ssm.build(d_model, self.causal), self)
