"""Extra losses: what parts of a model add to the loss of its task.

There are two kinds. A layer whose budget is steered by the loss adds a term for the decisions it took on a batch.
Any module may have a method `auxiliary_loss()` that returns a loss term, or None. `extra_loss` adds up both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import torch
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.layers.packing import Routing
from seqboat.layers.policy import outer_policies


def extra_loss(
    model: nn.Module,
    routings: Sequence[Routing | None] = (),
    masks: Sequence[Tensor | None] = (None,),
) -> Tensor | None:
    """Everything that a model adds to the loss per target; None if it adds nothing.

    Args:
        model: whose output it is.
        routings: of all layers, from the model's output; of several sequences one after the other. Without them
            budgets add nothing.
        masks: (batch, time) each, one per sequence.

    >>> import torch
    >>> from seqboat import Classifier, extra_loss
    >>> model = Classifier(vocab=5, d_model=8, num_layers=1, target=0.5, target_by="loss")
    >>> out = model(torch.randint(0, 5, (2, 7)))
    >>> loss = out.logits.square().mean() + (extra_loss(model, out.routings) or 0)      # yours, and the model's
    >>> loss.backward()
    """
    terms = [budget_loss(model, routings, masks) if len(routings) else None, auxiliary_loss(model)]
    found = [term for term in terms if term is not None]
    return sum(found[1:], found[0]) if found else None


def auxiliary_loss(model: nn.Module) -> Tensor | None:
    """The part of `extra_loss` that does not depend on decisions: what modules with `auxiliary_loss()` add."""
    terms = [getattr(part, "auxiliary_loss", lambda: None)() for part in model.modules()]
    found = [term for term in terms if term is not None]
    return torch.stack(found).sum() if found else None


def budget_loss(
    model: nn.Module, routings: Sequence[Routing | None], masks: Sequence[Tensor | None] = (None,)
) -> Tensor | None:
    """What budgets add to the loss of a batch; None if they add nothing.

    Args:
        model: whose output it is.
        routings: of all layers, from the model's output; of several sequences one after the other.
        masks: (batch, time) each, one per sequence.

    >>> import torch
    >>> from seqboat import SeqBoat, budget_loss
    >>> layer = SeqBoat(8, target=0.5, target_by="loss")
    >>> routing = layer(torch.randn(2, 7, 8)).routing
    >>> budget_loss(layer, [routing]).shape
    torch.Size([])
    >>> budget_loss(SeqBoat(8), [routing]) is None
    True
    """
    known = outer_policies(model)
    if not any(policy.target is not None and policy.budget.target_by == "loss" for policy in known):
        return None
    routed = [routing for routing in routings if routing is not None]
    each = len(routed) // len(masks)
    require(
        each == len(known),
        f"routings must hold {len(known)} x {len(masks)}, one per routed layer and mask; got {len(routed)}",
    )
    terms = [
        policy.loss(routing, masks[number // each])
        for number, (policy, routing) in enumerate(zip(cycle(known), routed, strict=False))
    ]
    return torch.stack([term for term in terms if term is not None]).sum()
