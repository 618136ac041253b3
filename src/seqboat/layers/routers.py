"""Routers: a token to a decision and a probability for each module.

Section 3.3 of the paper (latent configurator) and its variants in appendices A.4 and E. A router works on each
token alone, so its decisions are causal and the same in training, chunked reading and single steps. The gradient
reaches it only through the confidence that multiplies the output of an activated module.

Routers that compare the tokens of a sequence with each other (`per_sequence`: top-k capacity and expert choice) break
this rule where they can afford to. In training and in bidirectional layers they pick a fixed fraction of each
sequence, and keep track of the border between the tokens picked and those passed over; causal layers at inference,
which cannot see what is still to come, activate what lies above that border.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.mixer import Routing
from seqboat.core.nn import init_linear
from seqboat.core.settings import FAMILIES, Settings

START_CONFIDENCE = 0.8
"""The probability of activation with which routers that start active begin."""


class Router(nn.Module, ABC):
    """Decides for `modules` modules on the last dimension of its input."""

    per_sequence = False
    """Whether the router picks among the tokens of whole sequences, where it may."""
    at_half = False
    """Whether a token is active exactly where its probability is above one half."""

    def __init__(self, d_model: int, modules: int = 1) -> None:
        super().__init__()
        check_positive("d_model", d_model)
        check_positive("modules", modules)
        self.d_model, self.modules_count = d_model, modules

    def forward(self, x: Tensor) -> Routing:
        """Decide.

        Args:
            x: (..., d_model).

        Returns:
            active and probs, both (..., modules); probs in at least float32.
        """
        if x.shape[-1] != self.d_model:
            raise ValueError(f"x must have shape (..., {self.d_model}), got {tuple(x.shape)}")
        with torch.autocast(x.device.type, enabled=False):
            return self.route(x if x.dtype == torch.float64 else x.float())

    @abstractmethod
    def route(self, x: Tensor) -> Routing:
        """As `forward`, in full precision."""

    def select(self, score: Tensor, allowed: Tensor) -> Tensor:
        """Pick among the tokens of whole sequences; only for routers with `per_sequence`.

        Args:
            score: (batch, time, modules), log-odds.
            allowed: (batch, time, 1) bool, which tokens may be picked.
        """
        raise NotImplementedError(f"{type(self).__name__} decides about each token alone")

    def start_active(self, confidence: float = START_CONFIDENCE) -> None:
        """Let every token start active, whatever the seed and the data.

        The weights shrink to a tenth, so that tokens differ only slightly at first, and the biases are set to the
        log-odds of the confidence. Routers without such biases stay as they are: those that take a fixed fraction of
        each sequence, and those whose options compete.

        Args:
            confidence: the probability of activation that every token starts with, between 0.5 and 1.
        """
        require(0.5 < confidence < 1, f"confidence must be between 0.5 and 1, got {confidence!r}")
        self.start_at(math.log(confidence / (1 - confidence)))

    def start_at(self, log_odds: float) -> None:
        """Start with about these log-odds for every token; by default, nothing is set."""

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """A Linear in the precision of x, whatever its own."""
        return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def decide(logit: Tensor) -> Routing:
    """Activate where the probability is above one half.

    A token that is not finite has a logit that is not finite; it activates nothing, so that it cannot
    affect other sequences.
    """
    probs = torch.sigmoid(logit)
    return Routing((probs > 0.5) & (logit < math.inf), probs)


def above_border(logit: Tensor, border: Tensor | float) -> Routing:
    """Activate where the log-odds are above a border; a token that is not finite activates nothing, as above."""
    return Routing((logit > border) & (logit < math.inf), torch.sigmoid(logit))


START_SPREAD = 0.1
"""What the weights of a router that starts active are multiplied by."""


def _start_pairs(layer: nn.Linear, difference: Tensor) -> None:
    """Set the biases of logits in pairs (skip, activate) so that each pair starts with this difference."""
    layer.weight.mul_(START_SPREAD)
    half = (difference / 2).expand(layer.out_features // 2)
    layer.bias.copy_(torch.stack([-half, half], dim=-1).flatten())


class TemperedSoftmax(Router):
    """softmax(u / tau) over (skip, activate), with a learned temperature: the paper's router."""

    at_half = True
    options = 2
    """Logits per module."""

    def __init__(self, d_model: int, modules: int = 1, temperature_scale: float = 1.0) -> None:
        super().__init__(d_model, modules)
        require(temperature_scale > 0, f"temperature_scale must be positive, got {temperature_scale}")
        self.temperature_scale = temperature_scale
        self.logits = nn.Linear(d_model, self.options * modules)
        self.log_temperature = nn.Parameter(torch.empty(modules))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Logits start at N(0, 0.02), the temperature at temperature_scale * sqrt(d_model)."""
        init_linear(self.logits)
        start = math.log(self.temperature_scale * math.sqrt(self.d_model))
        nn.init.constant_(self.log_temperature, start)

    @property
    def temperature(self) -> Tensor:
        """(modules,): tau, kept within exp(-20) and exp(20)."""
        return torch.exp(self.log_temperature.clamp(-20.0, 20.0))

    @torch.no_grad()
    def start_at(self, log_odds: float) -> None:
        _start_pairs(self.logits, log_odds * self.temperature)

    def folded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Weight and bias of the log-odds: softmax over two is a sigmoid of their difference."""
        scale = 1 / self.temperature.to(dtype)
        weight, bias = self.logits.weight.to(dtype), self.logits.bias.to(dtype)
        return (weight[1::2] - weight[0::2]) * scale[:, None], (bias[1::2] - bias[0::2]) * scale

    def route(self, x: Tensor) -> Routing:
        return decide(F.linear(x, *self.folded(x.dtype)))


class TemperedSigmoid(TemperedSoftmax):
    """sigmoid(u / tau) of one logit per module, active above one half: the published form of SeqBoat-Sigmoid."""

    options = 1

    def route(self, x: Tensor) -> Routing:
        return decide(self.linear(self.logits, x) / self.temperature.to(x.dtype))


class SigmoidRouter(Router):
    """One logit per module, active above one half; no temperature."""

    at_half = True

    def __init__(self, d_model: int, modules: int = 1) -> None:
        super().__init__(d_model, modules)
        self.logits = nn.Linear(d_model, modules)
        init_linear(self.logits)

    @torch.no_grad()
    def start_at(self, log_odds: float) -> None:
        self.logits.weight.mul_(START_SPREAD)
        self.logits.bias.fill_(log_odds)

    def route(self, x: Tensor) -> Routing:
        return decide(self.linear(self.logits, x))


class GumbelSoftmax(Router):
    """Softmax with Gumbel noise in training and a temperature that decays with the training step.

    tau' = max(2 * 0.999995^T, 0.5); `set_training_step` tells T. No noise in eval mode.
    """

    at_half = True
    training_step: Tensor

    def __init__(
        self,
        d_model: int,
        modules: int = 1,
        start: float = 2.0,
        decay: float = 0.999995,
        floor: float = 0.5,
    ) -> None:
        super().__init__(d_model, modules)
        require(floor > 0, f"floor must be positive, got {floor}")
        require(0 < decay <= 1, f"decay must be in (0, 1], got {decay}")
        self.start, self.decay, self.floor = start, decay, floor
        self.logits = nn.Linear(d_model, 2 * modules)
        init_linear(self.logits)
        self.register_buffer("training_step", torch.zeros((), dtype=torch.int64))

    def notice_training_step(self, step: int) -> None:
        """Training has reached this step."""
        self.training_step.fill_(step)

    @torch.no_grad()
    def start_at(self, log_odds: float) -> None:
        _start_pairs(self.logits, log_odds * self.temperature)

    @property
    def temperature(self) -> Tensor:
        """tau' at the current training step."""
        return (self.start * self.decay ** self.training_step.double()).clamp(min=self.floor)

    def route(self, x: Tensor) -> Routing:
        logits = self.linear(self.logits, x).unflatten(-1, (self.modules_count, 2))
        difference = logits[..., 1] - logits[..., 0]
        if self.training:
            # the difference of two Gumbel variables is logistic
            uniform = torch.rand_like(difference).clamp(1e-7, 1 - 1e-7)
            difference = difference + torch.logit(uniform)
        return decide(difference / self.temperature.to(x.dtype))


class XMoE(Router):
    """Cosine scores against a learned embedding per option, one of which is "do nothing" (Chi et al., 2022).

    The options compete: the best one wins, so at most one module is active per token.
    """

    def __init__(self, d_model: int, modules: int = 1, d_route: int = 16) -> None:
        super().__init__(d_model, modules)
        check_positive("d_route", d_route)
        self.project = nn.Linear(d_model, d_route, bias=False)
        self.options = nn.Parameter(torch.empty(modules + 1, d_route))
        self.log_temperature = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Projection N(0, 0.02), option embeddings orthogonal where they can be, temperature 0.3."""
        init_linear(self.project)
        nn.init.orthogonal_(self.options)
        nn.init.constant_(self.log_temperature, math.log(0.3))

    @property
    def temperature(self) -> Tensor:
        """(): of the softmax over the options, kept within exp(-20) and exp(20)."""
        return torch.exp(self.log_temperature.clamp(-20.0, 20.0))

    def route(self, x: Tensor) -> Routing:
        token = F.normalize(self.linear(self.project, x), dim=-1)
        option = F.normalize(self.options.to(x.dtype), dim=-1)
        scale = torch.exp(-self.log_temperature.clamp(-20.0, 20.0)).to(x.dtype)
        probs = torch.softmax(token @ option.T * scale, dim=-1)
        best = probs.argmax(dim=-1, keepdim=True)
        options = torch.arange(1, probs.shape[-1], device=x.device)
        # a token that is not finite has no best option
        return Routing((best == options) & (probs[..., 1:] > 0), probs[..., 1:])


class AlwaysActive(Router):
    """Every token activates every module, with confidence one."""

    def route(self, x: Tensor) -> Routing:
        # a token that is not finite activates nothing, so that it cannot affect other sequences
        finite = x.detach().sum(dim=-1, keepdim=True).isfinite()
        active = finite.expand(*x.shape[:-1], self.modules_count)
        return Routing(active, active.to(x.dtype))


class TopKCapacity(Router):
    """The most probable tokens of each sequence, a fixed fraction (mixture of depths, Raposo et al., 2024).

    In training and in bidirectional layers; causal layers at inference activate what lies above the border between
    the tokens picked and those passed over, of which there is a running mean.
    """

    per_sequence = True
    border: Tensor

    def __init__(self, d_model: int, modules: int = 1, capacity: float = 0.5) -> None:
        super().__init__(d_model, modules)
        require(0 < capacity <= 1, f"capacity must be above 0 and at most 1, got {capacity!r}")
        self.capacity = capacity
        self.logits = nn.Linear(d_model, modules)
        init_linear(self.logits)
        self.register_buffer("border", torch.zeros(modules))

    def route(self, x: Tensor) -> Routing:
        return above_border(self.linear(self.logits, x), self.border)

    def select(self, score: Tensor, allowed: Tensor) -> Tensor:
        lengths = allowed.sum(dim=1)
        # 0.3 * 10 is a little more than 3
        count = (self.capacity * lengths.double() - 1e-9).ceil().long()
        hidden = torch.where(allowed, score, -math.inf)
        ranked, order = hidden.sort(dim=1, descending=True, stable=True)
        places = torch.arange(score.shape[1], device=score.device)[:, None]
        picked = (places < count[:, None]).expand_as(score)
        if self.training and score.shape[1]:
            self._follow(ranked, count, lengths)
        return torch.zeros_like(picked).scatter(1, order, picked) & allowed

    @torch.no_grad()
    def _follow(self, ranked: Tensor, count: Tensor, lengths: Tensor) -> None:
        """Move the border toward the middle between the last token picked and the first one passed over."""
        last = ranked.gather(1, (count - 1).clamp(min=0).expand(-1, ranked.shape[2])[:, None])[:, 0]
        first = ranked.gather(1, count.clamp(max=ranked.shape[1] - 1).expand(-1, ranked.shape[2])[:, None])[
            :, 0
        ]
        known = (count > 0) & (count < lengths)
        middle = torch.where(known, (last + first) / 2, 0).sum(dim=0) / known.sum(dim=0).clamp(min=1)
        moved = torch.lerp(self.border, middle.to(self.border.dtype), 0.1)
        self.border.copy_(torch.where(known.any() & moved.isfinite(), moved, self.border))


@dataclass(frozen=True, kw_only=True)
class RouterConfig(Settings):
    """The configuration of a router; `ROUTERS` lists them."""

    def build(self, d_model: int, modules: int = 1) -> Router:
        """A router for this many modules, on tokens of this width."""
        raise NotImplementedError(f"{type(self).__name__} does not say what to build")


@dataclass(frozen=True, kw_only=True)
class TemperedSoftmaxConfig(RouterConfig):
    """The paper's router: softmax over skipping and activating, with a learned temperature.

    >>> from seqboat import TemperedSoftmaxConfig, SeqBoat
    >>> layer = SeqBoat(32, router=TemperedSoftmaxConfig(temperature_scale=0.5))
    >>> type(SeqBoat(32, router="tempered-softmax").config.router).__name__      # by name, with the defaults
    'TemperedSoftmaxConfig'
    """

    temperature_scale: float = 1.0
    """The temperature starts at this times sqrt(d_model) (the paper's alpha)."""

    def build(self, d_model: int, modules: int = 1) -> Router:
        return TemperedSoftmax(d_model, modules, self.temperature_scale)


@dataclass(frozen=True, kw_only=True)
class SigmoidConfig(RouterConfig):
    """One logit per module, active above one half; the ablation SeqBoat-Sigmoid.

    >>> from seqboat import SigmoidConfig, SeqBoat
    >>> layer = SeqBoat(32, router=SigmoidConfig())
    >>> type(SeqBoat(32, router="sigmoid").config.router).__name__      # by name, with the defaults
    'SigmoidConfig'
    """

    temperature_scale: float | None = None
    """A learned temperature starts at this times sqrt(d_model), as in the published code; None: no temperature."""

    def build(self, d_model: int, modules: int = 1) -> Router:
        if self.temperature_scale is None:
            return SigmoidRouter(d_model, modules)
        return TemperedSigmoid(d_model, modules, self.temperature_scale)


@dataclass(frozen=True, kw_only=True)
class GumbelConfig(RouterConfig):
    """Softmax with Gumbel noise in training and an annealed temperature; an ablation.

    >>> from seqboat import GumbelConfig, SeqBoat
    >>> layer = SeqBoat(32, router=GumbelConfig(start=1.0))
    >>> type(SeqBoat(32, router="gumbel-softmax").config.router).__name__      # by name, with the defaults
    'GumbelConfig'
    """

    start: float = 2.0
    """First temperature."""
    decay: float = 0.999995
    """Factor per training step."""
    floor: float = 0.5
    """Last temperature."""

    def build(self, d_model: int, modules: int = 1) -> Router:
        return GumbelSoftmax(d_model, modules, self.start, self.decay, self.floor)


@dataclass(frozen=True, kw_only=True)
class XMoEConfig(RouterConfig):
    """Cosine scores against a learned vector per module; the ablation SeqBoat-MoE.

    >>> from seqboat import XMoEConfig, SeqBoat
    >>> layer = SeqBoat(32, router=XMoEConfig(d_route=8))
    >>> type(SeqBoat(32, router="x-moe").config.router).__name__      # by name, with the defaults
    'XMoEConfig'
    """

    d_route: int = 16
    """Width of the space in which tokens and options are compared."""

    def build(self, d_model: int, modules: int = 1) -> Router:
        return XMoE(d_model, modules, self.d_route)


@dataclass(frozen=True, kw_only=True)
class AlwaysActiveConfig(RouterConfig):
    """No routing: every token activates every module.

    >>> from seqboat import AlwaysActiveConfig, SeqBoat
    >>> layer = SeqBoat(32, router=AlwaysActiveConfig())
    >>> type(SeqBoat(32, router="always-active").config.router).__name__      # by name, with the defaults
    'AlwaysActiveConfig'
    """

    def build(self, d_model: int, modules: int = 1) -> Router:
        return AlwaysActive(d_model, modules)


@dataclass(frozen=True, kw_only=True)
class TopKConfig(RouterConfig):
    """A fixed fraction of each sequence, as in mixture of depths.

    >>> from seqboat import TopKConfig, SeqBoat
    >>> layer = SeqBoat(32, router=TopKConfig(capacity=0.25))
    >>> type(SeqBoat(32, router="top-k").config.router).__name__      # by name, with the defaults
    'TopKConfig'
    """

    capacity: float = 0.5
    """Fraction of a sequence that each module takes."""

    def build(self, d_model: int, modules: int = 1) -> Router:
        return TopKCapacity(d_model, modules, self.capacity)


ROUTERS: dict[str, type[RouterConfig]] = {
    "tempered-softmax": TemperedSoftmaxConfig,
    "sigmoid": SigmoidConfig,
    "gumbel-softmax": GumbelConfig,
    "x-moe": XMoEConfig,
    "always-active": AlwaysActiveConfig,
    "top-k": TopKConfig,
}
"""Every router by the name that commands, files and keywords use."""
FAMILIES[RouterConfig] = ROUTERS


def set_training_step(model: nn.Module, step: int) -> None:
    """Tell every part of a model that changes with training which step has been reached.

    These are the modules with a method `notice_training_step`: routers that anneal. In a training
    loop of yours, call it before each step; `seqboat train` does.

    Args:
        model: any module.
        step: steps taken so far.

    >>> from seqboat import SeqBoat, set_training_step
    >>> layer = SeqBoat(8, router="gumbel-softmax")
    >>> set_training_step(layer, 1000)
    """
    for part in model.modules():
        notice = getattr(part, "notice_training_step", None)
        if callable(notice):
            notice(step)
