"""The price of attention: what a router pays for every token, so that it activates those that are worth it.

    price = AttentionPrice(model)
    loss = task_loss(model(x), y)
    loss = loss + price(loss, off=lambda: task_loss(model(x), y))

Nothing in a task's loss pushes a router down, and a constant penalty kills it before attention has learned anything.
The price follows what attention has gained so far over the same batch with attention off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqboat.core.checks import check_positive, require
from seqboat.core.mixer import Routing
from seqboat.layers.gau import GAU
from seqboat.layers.sma import SparseModularActivation, override_activation

FREE = 0.02
"""Gain up to which attention has no price."""
MEMORY = 0.3
"""Weight of the last measurement in the running mean of the gain."""
WORTH = 0.05
"""Gain that attention must have at the deadline: a model that was never trained without it overstates it."""
LAST = 3.0
"""The price of attention that is not worth it."""
SOLVED = 0.3
"""Part of the first loss with attention off below which a gain is worth less."""
PULL, SPEED = 3.0, 0.05
"""How the price follows a rate: per unit of rate at once, and more with every call."""


class AttentionPrice:
    """What to add to the loss of a model so that attention keeps the tokens that are worth it.

    For every sparsely activated layer, the mean of relu(2p - 1) over the real tokens of the last forward pass, times

        weight * max(0, gain - 0.02)  +  early, while more than `above` of the layer's tokens are active

    gain is a running mean of 1 - loss / loss with attention off, measured on every `every`-th batch; once the loss
    with attention off is below 30 % of the first one, it is a share of those 30 %. Until something is gained, a layer
    with less than `above` active tokens is paid `early` to take more; attention that gains less than 5 % after
    `deadline` calls pays so much that it goes off.

    Args:
        model: holds the layers; it, or what wraps it, is what the loop calls.
        weight: of the gain.
        early: the price of a layer that is more active than `above`.
        above: see `early`.
        every: calls between two measurements.
        deadline: calls after which attention that gains too little is switched off, and a wide window narrows.
        rate: mean rate of activation to reach instead: the price then follows the rate, and `off` is never called.
        wide: window in training up to the deadline, if wider than the layer's: while most tokens are active, a narrow
            window shows neighbors only. It then narrows to the layer's own in as many calls again.

    >>> import torch
    >>> from seqboat import AttentionPrice, SeqBoat
    >>> layer, x = SeqBoat(8, form="gated"), torch.randn(2, 16, 8)
    >>> price = AttentionPrice(layer)
    >>> loss = layer(x).y.square().mean()
    >>> total = loss + price(loss, off=lambda: layer(x).y.square().mean())
    >>> total.backward()
    """

    def __init__(
        self,
        model: nn.Module,
        weight: float = 0.3,
        early: float = 0.03,
        above: float = 0.25,
        every: int = 10,
        *,
        deadline: int | None = 1000,
        rate: float | None = None,
        wide: int | None = None,
    ) -> None:
        for name, value in {"weight": weight, "early": early, "above": above}.items():
            require(value >= 0, f"{name} must not be negative, got {value!r}")
        check_positive("every", every)
        if deadline is not None:
            check_positive("deadline", deadline)
        require(rate is None or 0 < rate < 1, f"rate must be between 0 and 1, got {rate!r}")
        if wide is not None:
            check_positive("wide", wide)
        self.model, self.weight, self.early, self.above = model, weight, early, above
        self.every, self.deadline, self.rate, self.wide = every, deadline, rate, wide
        self.layers = [part for part in model.modules() if isinstance(part, SparseModularActivation)]
        require(
            bool(self.layers), "the model has no sparsely activated layer: attention has nothing to pay for"
        )
        self.calls = 0
        self.gain = 0.0
        """running mean of what attention gains, as a share of the loss with attention off"""
        self.first = 0.0
        """the first loss with attention off"""
        self.level: Tensor | float = 0.0
        """the part of the price by which the rate is kept"""
        for layer in self.layers:
            layer.recent.on = True
        model.register_forward_pre_hook(self._forget)
        self._set_window()

    @classmethod
    def of_gated(cls, model: nn.Module, **options: Any) -> AttentionPrice | None:
        """The price of a model whose layers are of the gated form; None for other models."""
        layers = (part for part in model.modules() if isinstance(part, SparseModularActivation))
        return cls(model, **options) if any(layer.form == "gated" for layer in layers) else None

    def _forget(self, *_: Any) -> None:
        """A forward pass begins: what earlier ones decided is not priced any more."""
        if torch.is_grad_enabled():
            for layer in self.layers:
                layer.recent.routings.clear()

    def __call__(self, loss: Tensor, off: Callable[[], Tensor] | None = None) -> Tensor:
        """The price of the last forward pass.

        Args:
            loss: of the task, per target, of that pass.
            off: computes the same loss again; called with attention off and without gradients. Without it,
                attention gains nothing.
        """
        heard = [layer.recent.take() for layer in self.layers]
        if off is not None and self.rate is None and self.calls % self.every == 0:
            self._measure(loss, off)
        self.calls += 1
        self._set_window()
        found = [_cost(routings) for routings in heard if routings]
        if not found:
            return loss.new_zeros(())
        cost, spare, rate = (torch.stack(part) for part in zip(*found, strict=True))
        if self.rate is not None:
            level = self._follow(rate.mean())
            # too little active: tokens that are left out are paid for
            return (level.clamp(min=0) * cost - level.clamp(max=0) * spare).sum().to(loss.dtype)
        gained = max(0.0, self.gain - FREE)
        if self.late and self.gain <= WORTH:
            return (LAST * cost).sum().to(loss.dtype)
        if gained:
            pressure = self.weight * gained + self.early * (rate > self.above)
            return (pressure * cost).sum().to(loss.dtype)
        # nothing is known yet: what was left out too early comes back
        total = (
            self.early * torch.where(rate > self.above, cost, torch.where(rate < self.above, spare, 0)).sum()
        )
        return total.to(loss.dtype)

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and self.calls > self.deadline

    @torch.no_grad()
    def _measure(self, loss: Tensor, off: Callable[[], Tensor]) -> None:
        """Compare the loss with that of the same batch with attention off."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        with override_activation(self.model, active=False):
            without = off()
        # running averages of norms must not see a model without attention
        for buffer, value in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(value)
        pair = torch.stack([loss.detach().double(), without.detach().double().to(loss.device)])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(pair)
        with_it, without_it = pair.tolist()
        if without_it == 0 or not (math.isfinite(with_it) and math.isfinite(without_it)):
            return
        self.first = self.first or abs(without_it)
        now = max(0.0, (without_it - with_it) / max(abs(without_it), SOLVED * self.first))
        self.gain = now if self.calls == 0 else self.gain + MEMORY * (now - self.gain)

    def _follow(self, rate: Tensor) -> Tensor:
        """The price by which the rate is reached: it rises while more is active, and is negative if too little is."""
        assert self.rate is not None
        over = rate - self.rate
        self.level = (self.level + SPEED * over).clamp(-1.0, 10.0)
        return self.level + PULL * over

    def _set_window(self) -> None:
        """The window in training, which narrows after the deadline, by a factor per call."""
        if self.wide is None:
            return
        over = 0.0 if self.deadline is None else min(1.0, max(0.0, self.calls / self.deadline - 1))
        for layer in self.layers:
            for unit in layer.units.values():
                if isinstance(unit, GAU):
                    wide = max(self.wide, unit.window)
                    narrowed = round(wide ** (1 - over) * unit.window**over)
                    unit.wide = narrowed if narrowed > unit.window else None

    def state_dict(self) -> dict[str, float]:
        """What a run that is resumed needs."""
        return {"calls": self.calls, "gain": self.gain, "first": self.first, "level": float(self.level)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`."""
        missing = {"calls", "gain", "first", "level"} - set(state)
        require(not missing, f"the state of an attention price lacks {', '.join(sorted(missing))}")
        self.calls, self.gain = int(state["calls"]), float(state["gain"])
        self.first, self.level = float(state["first"]), float(state["level"])
        self._set_window()


def _cost(routings: list[Routing]) -> tuple[Tensor, Tensor, Tensor]:
    """Means over the real tokens of a layer: relu(2p - 1), relu(1 - 2p), and the part of them that is active."""
    probs = torch.cat([routing.probs.flatten() for routing in routings])
    active = torch.cat([routing.active.flatten() for routing in routings])
    # the probability of padding is exactly zero
    real = probs.detach() > 0
    count = real.sum().clamp(min=1)
    margin = torch.where(real, 2 * probs - 1, 0)
    return torch.relu(margin).sum() / count, torch.relu(-margin).sum() / count, active.sum() / count
