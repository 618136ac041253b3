"""The SeqBoat layer in the variants of the paper's ablations, appendix E.

Each variant is a configuration whose defaults differ from SeqBoat's in what its line of the tables changes;
`mixers.carry.carry_over` makes the same change to any other SeqBoat. One of them has a part that SeqBoat lacks, a
feed-forward block after each layer:

    y = SeqBoat(x),   out = y + W_2 SiLU(W_1 y + b_1) + b_2

with the norm before the block or after the sum, as in MEGA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Mixer, MixerOutput
from seqboat.core.nn import FeedForward, Norm, init_linear, make_norm
from seqboat.layers.gau import GAUConfig
from seqboat.layers.routers import AlwaysActiveConfig, GumbelConfig, RouterConfig, SigmoidConfig, XMoEConfig
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig, SeqBoatState
from seqboat.ssm.diagonal import S4DConfig, SSMConfig


@dataclass(frozen=True, kw_only=True)
class SeqBoatFullConfig(SeqBoatConfig):
    """SeqBoat-full: active tokens attend to all other active ones, without a working memory."""

    gau: GAUConfig = GAUConfig(span="full")
    """Attention among the active tokens."""


@dataclass(frozen=True, kw_only=True)
class SeqBoatFullAlwaysConfig(SeqBoatFullConfig):
    """SeqBoat-full without routing: every token attends to all others."""

    router: RouterConfig = AlwaysActiveConfig()
    """Decides which tokens attend."""


@dataclass(frozen=True, kw_only=True)
class SeqBoatFullGumbelConfig(SeqBoatFullConfig):
    """SeqBoat-full whose router is a Gumbel softmax."""

    router: RouterConfig = GumbelConfig()
    """Decides which tokens attend."""


@dataclass(frozen=True, kw_only=True)
class SeqBoatFullS4DConfig(SeqBoatFullConfig):
    """SeqBoat-full with S4D as its state-space kernel, in place of the moving average."""

    ssm: SSMConfig = S4DConfig()
    """The state-space layer that reads every token."""


@dataclass(frozen=True, kw_only=True)
class SeqBoatSigmoidConfig(SeqBoatConfig):
    """SeqBoat-Sigmoid: the router is a sigmoid instead of the tempered softmax."""

    router: RouterConfig = SigmoidConfig()
    """Decides which tokens attend."""


@dataclass(frozen=True, kw_only=True)
class SeqBoatMoEConfig(SeqBoatConfig):
    """SeqBoat-MoE: the router of X-MoE chooses between attention and nothing."""

    router: RouterConfig = XMoEConfig()
    """Decides which tokens attend."""


@dataclass(frozen=True, kw_only=True)
class SeqBoatLocalConfig(SeqBoatConfig):
    """SeqBoat-local: no routing; every token attends to those around it."""

    router: RouterConfig = AlwaysActiveConfig()
    """Decides which tokens attend."""


@dataclass(frozen=True, kw_only=True)
class SeqBoatLocal32Config(SeqBoatLocalConfig):
    """SeqBoat-local32: no routing; every token attends to the 32 around it."""

    gau: GAUConfig = GAUConfig(window=32)
    """Attention among the active tokens."""


@dataclass(frozen=True, kw_only=True)
class SeqBoatChunkConfig(SeqBoatLocalConfig):
    """SeqBoat-chunk: no routing; every token attends inside its chunk of the sequence."""

    gau: GAUConfig = GAUConfig(span="chunk")
    """Attention among the active tokens."""


@dataclass(frozen=True, kw_only=True)
class SeqBoatMem32Config(SeqBoatConfig):
    """SeqBoat-mem32: a working memory of 32 tokens."""

    gau: GAUConfig = GAUConfig(window=32)
    """Attention among the active tokens."""


@dataclass(frozen=True, kw_only=True)
class SeqBoatThenFFNConfig(SeqBoatConfig):
    """SeqBoat-FFN: SeqBoat with MEGA's feed-forward block after each layer."""

    d_ff: int | None = None
    """Hidden width of the block; twice the model's by default."""

    def build(self, d_model: int) -> SeqBoatThenFFN:  # type: ignore[override]
        return SeqBoatThenFFN(d_model, self)


class SeqBoatThenFFN(Mixer):
    """A SeqBoat layer and a feed-forward block on (batch, time, d_model)."""

    packs = True

    def __init__(self, d_model: int, config: SeqBoatThenFFNConfig | None = None) -> None:
        super().__init__()
        config = config or SeqBoatThenFFNConfig()
        self.config, self.d_model, self.causal = config, d_model, config.causal
        self.layer = SeqBoat(d_model, config)
        self.norm: Norm = make_norm(config.norm, d_model)
        self.ffn = FeedForward(d_model, config.d_ff or 2 * d_model, "silu")
        if config.init == "scaled":
            init_linear(self.ffn, scaled=True)

    def closing_norm(self) -> nn.Module | None:
        return self.layer.closing_norm()

    def mix(self, x: Tensor, layout: Layout, state: SeqBoatState | None) -> MixerOutput:
        out = self.layer.mix(x, layout, state)
        return out._replace(y=clear(self.close(out.y, layout.mask), layout.mask))

    def close(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The feed-forward block, on the output of the layer."""
        prenorm = self.config.prenorm
        added = self.ffn(self.norm(x, mask) if prenorm else x).to(x.dtype)
        y = x + (F.dropout(added, self.config.dropout, self.training) if self.config.dropout else added)
        return y if prenorm else self.norm(y, mask).to(x.dtype)

    @property
    def grows(self) -> bool:
        return self.layer.grows

    def init_state(self, batch: int) -> SeqBoatState:
        return self.layer.init_state(batch)

    @torch.no_grad()
    def step(self, x: Tensor, state: SeqBoatState) -> MixerOutput:
        out = self.layer.step(x, state)
        return out._replace(y=self.close(out.y, None))
