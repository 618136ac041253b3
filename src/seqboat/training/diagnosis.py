"""What goes wrong inside a model: numbers that are not finite, and routers that activate nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqboat.core.mixer import Routing, count_layers
from seqboat.layers.budget import outer_layers
from seqboat.layers.sma import DEAD_AFTER
from seqboat.tasks.task import Batch, Kind, apply_model
from seqboat.training.parallel import World, gather_shards

BAD_INPUTS = "the inputs are not finite"


@torch.no_grad()
def first_nonfinite(model: nn.Module, kind: Kind, batch: Batch, state: Any = None) -> str | None:
    """Run a model on a batch and name the first module whose output is not finite."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not found and not _all_finite(output):
                found.append(name)

        return hook

    handles = [part.register_forward_hook(watch(name)) for name, part in model.named_modules() if name]
    try:
        output = apply_model(model, kind, batch, state)
    finally:
        for handle in handles:
            handle.remove()
    if batch.inputs.is_floating_point() and not bool(batch.inputs.isfinite().all()):
        return BAD_INPUTS
    if found:
        return f"the output of {found[0]} is not finite"
    return None if _all_finite(output.logits) else "the logits are not finite"


def _all_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    return not isinstance(value, tuple | list) or all(_all_finite(part) for part in value)


def explain_nonfinite(model: nn.Module, world: World, found: list[str | None]) -> str:
    """Why a step has a loss or gradient that is not finite: an input, the output of a module, or a gradient.

    Args:
        model: with the gradients of the step.
        world: every process must call this.
        found: what `first_nonfinite` said of each micro-batch of this process.
    """
    troubles = [trouble for trouble in world.gather(found) if trouble]
    if troubles:
        # the inputs of one process may have spread to the norms of others
        return BAD_INPUTS if BAD_INPUTS in troubles else troubles[0]
    for name, parameter in reversed(list(model.named_parameters())):
        gradient = parameter.grad
        if gradient is not None and not bool(gather_shards(gradient).isfinite().all()):
            return f"the gradient of {name} is not finite"
    return "the loss is not finite, though every output of the model is"


def routed_modules(model: nn.Module) -> list[tuple[int, str | None]]:
    """The layer number, from 1, and the name of every module that a router activates.

    A module that is alone in its layer has no name.
    """
    layers: Iterable[nn.Module] = model.backbone.layers  # type: ignore[assignment, union-attr]
    found: list[tuple[int, str | None]] = []
    for number, layer in enumerate(layers, start=1):
        for sma in outer_layers(layer):
            alone = len(sma.names) == 1
            found += [(number, None if alone else name) for name in sma.names]
    return found


def activated_tokens(routings: Sequence[Routing | None], layers: int, device: torch.device) -> Tensor:
    """How many tokens each module of each routed layer activated; both sequences of a pair count."""
    # padding is never active: no masks are needed
    counts = count_layers(routings, [None] * (len(routings) // max(layers, 1)))
    found = [layer.active for layer in counts if layer is not None]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=device)


def watch_routers(
    dead: dict[str, int],
    step: int,
    modules: Sequence[tuple[int, str | None]],
    activated: Sequence[int],
    tell: Callable[[str], None],
) -> dict[str, int]:
    """Report modules that no token has activated for long; returns `dead` for the next call.

    Args:
        dead: modules without an activated token: the step since when; 0 once that was reported.
        step: steps taken.
        modules: of `routed_modules`.
        activated: tokens of this step that activated each of them.
        tell: called with every message.
    """
    dead = dict(dead)
    for (layer, module), count in zip(modules, activated, strict=True):
        name = f"layer {layer}" if module is None else f"layer {layer}, module {module}"
        if count:
            if dead.pop(name, step) == 0:
                tell(f"{name} is active again at step {step}")
        elif dead.setdefault(name, step) and step - dead[name] >= DEAD_AFTER:
            tell(
                f"{name}: its router has activated no token since step {dead[name]}; "
                f"the layer works without {module or 'its module'}"
            )
            dead[name] = 0
    return dead
