"""The SeqBoat layer, section 3.3 of the paper: a state-space layer on every token, attention on the active ones.

    H   = dropout(SiLU(SSM(S)))
    out = SiLU(c * extract(GAU(compress(H))) + H W + b + S)

Pre-norm normalizes S in the branch, post-norm the output. Bidirectional layers apply dropout to the output of the
attention, causal ones to the sum of both branches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, check_rate
from seqboat.core.layout import Layout, clear
from seqboat.core.mixer import Mixer, MixerOutput
from seqboat.core.nn import NORMS, FeedForward, Kept, Norm, NormName, init_linear, make_norm
from seqboat.core.settings import Settings, fill_in
from seqboat.layers.budget import BudgetConfig
from seqboat.layers.gau import GAU, GAUConfig
from seqboat.layers.routers import RouterConfig, TemperedSoftmax, TemperedSoftmaxConfig
from seqboat.layers.sma import Form, SparseModularActivation
from seqboat.ssm.diagonal import EMA, EMAConfig, SSMConfig

InitName = Literal["scaled", "paper"]
GATED_MEMORY, GATED_DRIVE = 256, 0.2
"""Longest time constant of a fresh layer of the gated form, and what its drive is multiplied by."""


@dataclass(frozen=True, kw_only=True)
class SeqBoatConfig(Settings):
    """SeqBoat: a state-space layer on every token, attention on the tokens that a router picks.

    >>> from seqboat import GAUConfig, SeqBoatConfig
    >>> config = SeqBoatConfig(causal=True, gau=GAUConfig(window=128))
    >>> config.build(64).causal
    True
    """

    ssm: SSMConfig = EMAConfig()
    """The state-space layer that reads every token: any of SSMS."""
    router: RouterConfig = TemperedSoftmaxConfig()
    """Decides which tokens attend."""
    gau: GAUConfig = GAUConfig()
    """Attention among the active tokens."""
    ffn: bool = False
    """Whether there is a feed-forward block next to attention, with routing decisions independent of it."""
    d_ff: int | None = None
    """Width of that block; None takes 2 d_model, as MEGA does."""
    budget: BudgetConfig = BudgetConfig()
    """How many tokens may attend; not limited by default."""
    causal: bool = False
    """Whether the layer reads from left to right only, for language models."""
    norm: NormName = "layer"
    """The norm of the layer."""
    prenorm: bool = False
    """Whether the norm comes before the branch instead of after the layer."""
    dropout: float = 0.0
    """Rate of dropout."""
    form: Form = "paper"
    """What a token counts in its output and in the memory of others: m = clamp(3 (2p - 1), 0, 1) on both ("gated"),
    or the confidence p on its output alone ("paper"), under which nothing tells the router what to remember."""
    init: InitName = "scaled"
    """Initial weights: scaled to the widths, with every token active, or those of the paper."""

    def __post_init__(self) -> None:
        check_choice("form", self.form, get_args(Form))
        check_choice("init", self.init, get_args(InitName))
        check_choice("norm", self.norm, NORMS)
        check_rate("dropout", self.dropout)
        if self.d_ff is not None:
            check_positive("d_ff", self.d_ff)

    def build(self, d_model: int) -> SeqBoat:
        return SeqBoat(d_model, self)


@dataclass(frozen=True, kw_only=True)
class SeqBoatFFNConfig(SeqBoatConfig):
    """SeqBoat with two modules, attention and a feed-forward block, activated independently of each other.

    >>> from seqboat.layers.seqboat import SeqBoatFFNConfig
    >>> layer = SeqBoatFFNConfig(causal=True).build(64)
    >>> layer.name, layer.causal
    ('SeqBoat', True)
    """

    ffn: bool = True
    """Whether there is a feed-forward block next to attention, with routing decisions independent of it."""


class SeqBoatState(NamedTuple):
    """The state of a causal layer, of constant size unless the attention span is full."""

    ssm: Any
    """of the kernel"""
    sma: Any
    """of the sparse modules, an `SMAState`"""


class SeqBoat(Mixer):
    """One SeqBoat layer: a state-space layer on every token, attention on the tokens that a router picks.

        H   = dropout(SiLU(SSM(x)))
        out = SiLU(confidence * attention(H of the active tokens) + H W + b + x)

    The layer has its norm and residual connection inside: stack layers by calling one after the other.

    Args:
        d_model: width of the tokens.
        config: all settings as one `SeqBoatConfig`; the defaults if not given.
        options: individual settings as keywords, instead of a configuration or on top of it. They are the fields of
            `SeqBoatConfig` and of its parts. The most used ones:

            - causal (bool): read from left to right only, for language models and decoding. Default False.
            - window (int): working memory, the number of active tokens that attention reaches. Default 256.
            - ssm (str or SSMConfig): the state-space layer, "ema" (default), "ema-conv", "s4d", "s4", "s5",
              "liquid-s4".
            - d_state (int): states of the state-space layer per channel. Default 16.
            - router (str or RouterConfig): "tempered-softmax" (default), "sigmoid", "top-k", "always-active", ...
            - d_z (int), d_v (int): widths of queries and keys, and of values. Defaults 64 and 2 d_model.
            - attention (str): "softmax" (default), "relu2" or "laplace".
            - positions (str): "rotary-original" (default), "original", "compressed", "rotary" or "none".
            - target (float): fraction of tokens that should attend; not limited by default.
            - dropout (float), norm (str), prenorm (bool), ffn (bool), init (str): as in `SeqBoatConfig`.

    Calling it:
        `layer(x, mask=None, state=None)` with x of shape (batch, time, d_model). The mask is (batch, time) bool, True
        on real tokens in any pattern. The state is what an earlier call of a causal layer returned. Packed documents
        are given by `cu_seqlens`. Causal layers also take one token at a time: `layer.step(x_t, state)` with x_t of
        shape (batch, d_model).

    Returns:
        `MixerOutput(y, state, routing)`: y has the shape of x; state is that after the last token, None for
            bidirectional layers; routing holds `active` and `probs`, both (batch, time, modules).

    Raises:
        TypeError: naming the argument that does not exist or has another type.
        ValueError: naming the setting or the input that does not fit.

    >>> import torch
    >>> from seqboat import SeqBoat, activation
    >>> layer = SeqBoat(64, causal=True, window=128)
    >>> y, state, routing = layer(torch.randn(2, 100, 64))
    >>> y.shape, routing.active.shape
    (torch.Size([2, 100, 64]), torch.Size([2, 100, 1]))
    >>> activation(routing).rate.tolist()  # every token starts active
    [1.0]
    >>> y, state, routing = layer.step(torch.randn(2, 64), state)  # the next token
    >>> y.shape
    torch.Size([2, 64])
    """

    packs = True

    def __init__(self, d_model: int, config: SeqBoatConfig | None = None, **options: Any) -> None:
        super().__init__()
        config = fill_in(SeqBoatConfig, config, options, self, d_model)
        self.config, self.d_model, self.causal = config, d_model, config.causal
        self.norm: Norm = make_norm(config.norm, d_model)
        self.ssm = config.ssm.build(d_model, config.causal)
        branch_dropout = 0.0 if config.causal else config.dropout
        modules: dict[str, nn.Module] = {"gau": config.gau.build(d_model, config.causal, branch_dropout)}
        if config.ffn:
            ffn = FeedForward(d_model, config.d_ff or 2 * d_model, "silu")
            modules["ffn"] = nn.Sequential(ffn, nn.Dropout(branch_dropout)) if branch_dropout else ffn
        self.sma = SparseModularActivation(
            modules,
            d_model,
            config.router,
            budget=config.budget,
            causal=config.causal,
            form=config.form,
            start_active=config.init == "scaled",
        )
        self.linear = nn.Linear(d_model, d_model)
        self._kept = Kept()
        init_linear(self.linear)
        if config.init == "scaled":
            self._scale()

    @torch.no_grad()
    def _scale(self) -> None:
        """Initial values with which a model learns from its first steps; the others are the paper's.

        The paper's weights are so small that attention begins as an even mean and adds almost nothing: a long
        warm-up and tens of thousands of steps make up for it, a user's first few hundred do not.

        linear maps                      N(0, 1 / inputs)
        gamma of queries and keys        1: similar tokens attend to each other, but a token not to itself alone
        skip of the state-space layer    1: a token starts out as itself
        gamma of the moving average      N(0, 0.25): a token stays recognizable beside its neighbors
        router                           every token active

        In the gated form a moving average without a memory of its own gets one of 256 tokens. Its drive is a fifth of
        what keeps the variance of white noise: what is not asked for yet stays small beside the token itself.
        """
        gau = self.sma.units["gau"]
        assert isinstance(gau, GAU)
        for part in (self.linear, *self.sma.units.values()):
            init_linear(part, scaled=True)
        nn.init.ones_(gau.gamma)
        nn.init.ones_(self.ssm.skip)
        if isinstance(self.ssm, EMA):
            self.ssm.gamma.mul_(0.25)
            if self.config.form == "gated":
                if self.ssm.memory is None:
                    self.ssm.spread(GATED_MEMORY)
                self.ssm.beta.mul_(GATED_DRIVE)

    def closing_norm(self) -> nn.Module | None:
        return make_norm(self.config.norm, self.d_model) if self.config.prenorm else None

    def mix(self, x: Tensor, layout: Layout, state: SeqBoatState | None) -> MixerOutput:
        config, before = self.config, SeqBoatState(None, None) if state is None else state
        rate = config.dropout if self.training else 0.0
        # autocast may widen the output of a norm: states keep to the type of the inputs
        branch = self.norm(x, layout.mask).to(x.dtype) if config.prenorm else x
        mixed, ssm, _ = self.ssm(branch, layout, before.ssm)
        hidden = F.silu(mixed)
        hidden = F.dropout(hidden, rate) if rate else hidden
        late = self.causal and rate > 0
        base = self.linear(hidden)
        summed, sma, routing = self.sma.mix(hidden, layout, before.sma, base if late else base + x)
        if late:
            summed = F.dropout(summed, rate) + x
        y = F.silu(summed)
        y = (y if config.prenorm else self.norm(y, layout.mask)).to(x.dtype)
        after = SeqBoatState(ssm, sma) if self.causal and layout.documents is None else None
        return MixerOutput(y if layout.mask is None else clear(y, layout.mask), after, routing)

    @property
    def grows(self) -> bool:
        return self.sma.grows

    def init_state(self, batch: int) -> SeqBoatState:
        self.require_causal()
        self._kept.forget()
        return SeqBoatState(self.ssm.init_state(batch), self.sma.init_state(batch))

    def step(self, x: Tensor, state: SeqBoatState) -> MixerOutput:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.step(x, state)
        prenorm, linear, sma, logits = self.config.prenorm, self.linear, self.sma, None
        router = sma.router
        branch = self.norm(x).to(x.dtype) if prenorm else x
        hidden = F.silu(self.ssm.step(branch, state.ssm).y, inplace=True)
        alone = sma.alone and not torch.is_autocast_enabled(x.device.type)
        if type(router) is TemperedSoftmax and type(linear) is nn.Linear and alone:
            # the router is one more row of the dense product
            logged = router.logits._parameters.values()
            weights = chain(linear._parameters.values(), logged, router._parameters.values())
            weight, bias = self._kept.get(weights, self._join_router)
            base, logits = torch.addmm(bias, hidden, weight).split([self.d_model, len(sma.names)], dim=1)
            base.add_(x)
        else:
            base = linear(hidden) + x
        summed, _, routing = sma.step(hidden, state.sma, base, logits)
        y = F.silu(summed, inplace=True)
        return MixerOutput((y if prenorm else self.norm(y)).to(x.dtype), state, routing)

    def _join_router(self) -> tuple[Tensor, Tensor]:
        """Turned, as single tokens are multiplied fastest; in the type of the weights."""
        router = self.sma.router
        assert isinstance(router, TemperedSoftmax)
        weight, bias = router.folded(self.linear.weight.dtype)
        weight = torch.cat([self.linear.weight, weight]).t().contiguous()
        return weight, torch.cat([self.linear.bias, bias])
