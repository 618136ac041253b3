"""What Mamba-2, Gated DeltaNet and Samba share: a gated block around each layer, and a matrix per head as a state.

    x = x + mix(norm(x)) W,   x = x + (SiLU(norm(x) W_1) * norm(x) W_2) W_3        the latter if there is one
    gate, u, rates = norm(x) W,   u = SiLU(conv(u)),   S_t = g_t S_{t-1} + ...,   y = x + (gated norm of q_t S_t) W_o

Subclasses say what they read from u and rates. Between the projections everything is in at least float32.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, check_rate
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Direction, Mixer, MixerOutput, check_direction
from seqboat.core.nn import NORMS, Norm, NormName, init_linear, make_norm
from seqboat.core.settings import Settings
from seqboat.core.state import overwrite
from seqboat.ops.scan import BLOCK
from seqboat.ssm.diagonal import Roles, at_least_float32, joined_with, latest


@dataclass(frozen=True, kw_only=True)
class GatedConfig(Settings):
    """What gated layers have in common."""

    directions: ClassVar[tuple[Direction, ...]] = ("causal",)

    ffn: bool = True
    """Whether a gated feed-forward block follows each layer."""
    d_ff: int | None = None
    """Its hidden width; 8/3 of the model's by default."""
    causal: bool = True
    """Always true: the layer has no bidirectional form."""
    norm: NormName = "rms"
    """The norm before each block."""
    dropout: float = 0.0
    """Rate of dropout on the outputs of both blocks."""

    def __post_init__(self) -> None:
        check_direction(self, self.causal, "its state holds what came before")
        if self.d_ff is not None:
            check_positive("d_ff", self.d_ff)
        check_choice("norm", self.norm, NORMS)
        check_rate("dropout", self.dropout)


class GatedFeedForward(nn.Module):
    """Two linear maps multiplied with each other, one of them after SiLU, and a third one (SwiGLU)."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(d_model, 2 * d_hidden, bias=False)
        self.out = nn.Linear(d_hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.hidden(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class GatedBlock(nn.Module):
    """Norms, output projection, residual connections and feed-forward block of one layer.

    Args:
        d_model: width of the model.
        d_inner: width of what the layer computes.
        config: of the layer.
    """

    def __init__(self, d_model: int, d_inner: int, config: GatedConfig) -> None:
        super().__init__()
        self.config, self.d_model = config, d_model
        self.norm: Norm = make_norm(config.norm, d_model)
        self.out = nn.Linear(d_inner, d_model, bias=False)
        if config.ffn:
            self.ffn_norm: Norm = make_norm(config.norm, d_model)
            self.ffn = GatedFeedForward(d_model, config.d_ff or max(8 * d_model // 3, 1))

    def open(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """What the layer reads, from (..., d_model)."""
        return self.norm(x, mask)

    def close(self, x: Tensor, mixed: Tensor, mask: Tensor | None) -> Tensor:
        """(..., d_model) of the inputs and what the layer computed from them, (..., d_inner)."""
        y = x + self._drop(self.out(mixed)).to(x.dtype)
        if not self.config.ffn:
            return y
        return y + self._drop(self.ffn(self.ffn_norm(y, mask))).to(x.dtype)

    def closing_norm(self) -> Norm:
        """The norm at the end of a stack."""
        return make_norm(self.config.norm, self.d_model)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x


@dataclass(frozen=True, kw_only=True)
class MatrixStateConfig(GatedConfig):
    """What layers with a matrix per head have in common."""

    conv: int = 4
    """Taps of the short convolution: tokens that it sees, the current one included."""
    expand: int = 2
    """Width of the values as a multiple of the model's or of the keys'."""
    block: int = BLOCK
    """Tokens that are computed by matrix products at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("conv", "expand", "block"):
            check_positive(name, getattr(self, name))


class MatrixState(NamedTuple):
    """The state of a layer."""

    history: Tensor
    """(batch, conv - 1, channels): the last inputs of the convolution, zeros before the first token"""
    memory: Tensor
    """a matrix of keys by values per head; float32 at least"""


class MatrixStateLayer(Mixer):
    """One layer on (batch, time, d_model).

    Args:
        d_model: width of the model.
        config: of the layer.
        d_inner: width of the values and of their gate.
        channels: inputs of the convolution.
        heads: number of heads, each with its own decay.
        rates: projected rates per head.
    """

    narrow: ClassVar[bool] = True
    """Whether autocast may narrow the projection of the inputs."""
    parameter_roles: ClassVar[Roles] = {"log_rate": "ssm", "step_bias": "dt"}

    def __init__(
        self, d_model: int, config: MatrixStateConfig, d_inner: int, channels: int, heads: int, rates: int
    ) -> None:
        super().__init__()
        self.d_model, self.causal = d_model, True
        self.d_inner, self.heads, self.channels, self.taps = d_inner, heads, channels, config.conv
        self.sizes = (d_inner, channels, rates * heads)
        self.block = GatedBlock(d_model, d_inner, config)
        self.project = nn.Linear(d_model, sum(self.sizes), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(config.conv, channels))
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.step_bias = nn.Parameter(torch.empty(heads))

    def reset_parameters(self) -> None:
        """Weights N(0, 0.02), taps up to 1 / sqrt(conv), decay rates 1 to 16, steps log-uniform from 0.001 to 0.1."""
        init_linear(self)
        bound = self.taps**-0.5
        nn.init.uniform_(self.conv_weight, -bound, bound)
        with torch.no_grad():
            self.log_rate.uniform_(1, 16).log_()
            step = self.step_bias.uniform_(math.log(1e-3), math.log(0.1)).exp()
            self.step_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step

    def closing_norm(self) -> nn.Module | None:
        return self.block.closing_norm()

    @abstractmethod
    def read(
        self, u: Tensor, rates: Tensor, mask: Tensor | None, memory: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence over (batch, time, ...), whose padding must leave the memory as it is.

        Returns:
            y: (batch, time, d_inner).
            memory: after the last real token.
        """

    @abstractmethod
    def read_token(self, u: Tensor, rates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """As `read`, for one token."""

    @abstractmethod
    def apply_gate(self, y: Tensor, gate: Tensor) -> Tensor:
        """The gated norm of (..., d_inner)."""

    @abstractmethod
    def make_memory(self, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The matrices before the first token."""

    def convolve(self, joined: Tensor, time: int) -> Tensor:
        """(batch, time, channels) of the inputs after those that came before them."""
        taps = self.conv_weight.to(joined.dtype)
        y = taps[0] * joined[:, :time]
        for i in range(1, self.taps):
            y = torch.addcmul(y, taps[i], joined[:, i : i + time])
        return y

    def decay_and_step(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the decays, and the steps, both as the rates (..., heads)."""
        step = F.softplus(rates + self.step_bias.to(rates.dtype))
        return -self.log_rate.to(rates.dtype).exp() * step, step

    def _project(self, x: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.block.open(x, mask)
        allowed = self.narrow and torch.is_autocast_enabled(x.device.type)
        with torch.autocast(x.device.type, enabled=allowed):
            parts: Tensor = self.project(normed if allowed else normed.to(x.dtype))
            return parts

    def mix(self, x: Tensor, layout: Layout, state: MatrixState | None) -> MixerOutput:
        mask = layout.mask
        parts = self._project(x, mask)
        with torch.autocast(x.device.type, enabled=False):
            gate, u, rates = parts.to(at_least_float32(x.dtype)).split(self.sizes, dim=-1)
            history, memory = (None, None) if state is None else state
            joined = joined_with(u, history, self.taps - 1)
            mixed, memory = self.read(F.silu(self.convolve(joined, u.shape[1])), rates, mask, memory)
            gated = self.apply_gate(mixed, gate).to(x.dtype)
            after = MatrixState(latest(joined, mask, self.taps - 1), memory)
        return MixerOutput(clear(self.block.close(x, gated, mask), mask), after)

    def _fresh(self, batch: int, dtype: torch.dtype, device: torch.device) -> MatrixState:
        dtype = at_least_float32(dtype)
        history = torch.zeros(batch, self.taps - 1, self.channels, dtype=dtype, device=device)
        return MatrixState(history, self.make_memory(batch, dtype, device))

    @torch.no_grad()
    def step(self, x: Tensor, state: MatrixState) -> MixerOutput:
        parts = self._project(x, None)
        with torch.autocast(x.device.type, enabled=False):
            gate, u, rates = parts.to(at_least_float32(x.dtype)).split(self.sizes, dim=-1)
            joined = torch.cat([state.history, u[:, None]], dim=1)
            mixed, memory = self.read_token(F.silu(self.convolve(joined, 1)[:, 0]), rates, state.memory)
            gated = self.apply_gate(mixed, gate).to(x.dtype)
            after = MatrixState(joined[:, 1:], memory)
        return MixerOutput(self.block.close(x, gated, None), overwrite(state, after))
