"""Watching routers in any training loop: a module that no token activates learns nothing, nor does its router.

The counts are those of the packed tokens, which the host knows anyway: watching never waits for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

DEAD_AFTER = 200
"""Training steps without an activated token after which a router counts as dead."""
REMEDY = (
    "train with revival=RevivalConfig(inactive_gradient=True) or a budget with a target, or build the layer with "
    'init="scaled", whose routers start active (docs/layers.md, "Dead routers")'
)


class Watch:
    """Counts the training steps since each module of a layer last had an active token; warns once per module."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.inactive = [0] * len(self.names)
        """training steps in a row without an active token, per module"""
        self.warns = True
        """whether to warn; `seqboat train` reports dead routers itself"""
        self._warned: set[int] = set()

    def notice(self, counts: Sequence[int]) -> None:
        """Take the number of active tokens of each module in one training step."""
        for i, count in enumerate(counts):
            self.inactive[i] = 0 if count else self.inactive[i] + 1
            if self.inactive[i] >= DEAD_AFTER and self.warns and i not in self._warned:
                self._warned.add(i)
                warnings.warn(
                    f"no token has activated the module {self.names[i]!r} of this layer in {DEAD_AFTER} training "
                    f"steps, so neither it nor its router learns; {REMEDY}; seqboat.dead_routers(model) lists "
                    "such layers",
                    stacklevel=2,
                )


def watches(model: nn.Module) -> dict[str, Watch]:
    """The watch of every sparsely activated layer, by the name of the layer."""
    found = ((name, getattr(part, "watch", None)) for name, part in model.named_modules())
    return {name: watch for name, watch in found if isinstance(watch, Watch)}


def dead_routers(model: nn.Module, after: int = DEAD_AFTER) -> dict[str, int]:
    """Modules that no token has activated for long, with the training steps since one did.

    Args:
        model: any module that holds sparsely activated ones.
        after: training steps without an active token from which on a module is listed.

    Returns:
        Steps by the name of the layer and, where the layer has several modules, of the module
        ("layers.1.sma", "layers.1.sma: ffn"); empty if all is well.

    >>> import torch
    >>> from seqboat import SparseModularActivation
    >>> layer = SparseModularActivation({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}, d_model=4).train()
    >>> with layer.override(active={"b": False}):
    ...     for _ in range(3):
    ...         _ = layer(torch.ones(1, 2, 4))
    >>> dead_routers(nn.Sequential(layer), after=3)
    {'0: b': 3}
    """
    return {
        name if len(watch.names) == 1 else f"{name}: {unit}": steps
        for name, watch in watches(model).items()
        for unit, steps in zip(watch.names, watch.inactive, strict=True)
        if steps >= after
    }
