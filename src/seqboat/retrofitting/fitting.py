"""Substitutes and routers of a retrofitted model, fitted to its dense form by least squares, without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.checks import require
from seqboat.core.routers import SigmoidRouter
from seqboat.retrofitting.unit import SparseUnit

RIDGE = 1e-4
"""Added to the diagonal of the inputs' covariance, relative to its mean."""


class LeastSquares:
    """A ridge regression with an intercept, in double precision, from batches of (tokens, inputs) and targets."""

    def __init__(self, inputs: int, targets: int, device: torch.device) -> None:
        self.products = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64, device=device)
        self.moments = torch.zeros(inputs + 1, targets, dtype=torch.float64, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        x = F.pad(x.double(), (0, 1), value=1.0)
        self.products += x.mT @ x
        self.moments += x.mT @ y.double()

    def solve(self) -> tuple[Tensor, Tensor]:
        """Weight (targets, inputs) and bias (targets,)."""
        inputs = len(self.products) - 1
        penalty = torch.full((inputs + 1,), RIDGE, dtype=torch.float64, device=self.products.device)
        penalty *= self.products.diagonal()[:-1].mean()
        penalty[-1] = 0.0
        found = torch.linalg.solve(self.products + penalty.diag(), self.moments)
        return found[:-1].mT, found[-1]


@torch.no_grad()
def fit_skipped(
    model: nn.Module, units: Mapping[str, SparseUnit], batches: Sequence[Mapping[str, Any]]
) -> None:
    """Fit the substitute of each module to what the module adds to a token, and the router to the error that is left.

    A router's logit then predicts, up to its scale, the logarithm of the distance between module and substitute: the
    tokens that the substitute serves worst become active. Every token is active while the model runs.

    Args:
        model: the retrofitted model.
        units: by the name of the module.
        batches: keyword arguments of the model.
    """
    require(len(batches) > 0, "fit needs at least one batch")
    for name, unit in units.items():
        require(
            isinstance(unit.substitute, nn.Linear),
            f'{name} has no substitute to fit: retrofit(..., skipped="linear")',
        )
        require(isinstance(unit.router, SigmoidRouter), f"{name}: only the default router can be fitted")
    was, rates = model.training, {name: unit.rate for name, unit in units.items()}
    model.eval()
    try:
        for unit in units.values():
            unit.rate = 1.0
        maps: dict[str, LeastSquares] = {}
        for name, x, added in _observe(model, units, batches):
            maps.setdefault(name, LeastSquares(x.shape[1], added.shape[1], x.device)).add(x, added)
        for name, solved in maps.items():
            _set(units[name].substitute, *solved.solve())
        errors: dict[str, LeastSquares] = {}
        for name, x, added in _observe(model, units, batches):
            substitute = units[name].substitute
            assert substitute is not None
            left = (added - substitute(x)).double().square().sum(dim=1, keepdim=True)
            solved = errors.setdefault(name, LeastSquares(x.shape[1], 1, x.device))
            solved.add(F.rms_norm(x, x.shape[1:]), left.clamp(min=torch.finfo(x.dtype).tiny).log() / 2)
        for name, solved in errors.items():
            weight, _ = solved.solve()
            # centered: the average token has probability one half
            count, sums = solved.products[-1, -1], solved.products[-1, :-1]
            center = (weight[0] @ sums) / count
            spread = (weight[0] @ solved.products[:-1, :-1] @ weight[0] / count - center.square()).sqrt()
            scale = 1 / spread.clamp(min=1e-6)
            router: Any = units[name].router
            _set(router.logits, weight * scale, -center[None] * scale)
    finally:
        for name, unit in units.items():
            unit.rate = rates[name]
        model.train(was)


def _set(linear: Any, weight: Tensor, bias: Tensor) -> None:
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)


def _observe(model: nn.Module, units: Mapping[str, SparseUnit], batches: Sequence[Mapping[str, Any]]) -> Any:
    """Run the model; yield every module's name, its real tokens (tokens, dim), and what it adds to them."""
    seen: list[tuple[str, Tensor, Tensor]] = []

    def keep(name: str, unit: SparseUnit, x: Tensor, added: Tensor) -> None:
        real = unit.call.real(x)
        pick = (lambda part: part.flatten(0, 1)) if real is None else (lambda part: part[real])
        seen.append((name, pick(x), pick(added)))

    handles = []
    for name, unit in units.items():
        for module, hook in _hooks(name, unit, keep):
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        for batch in batches:
            model(**batch)
            yield from seen
            seen.clear()
    finally:
        for handle in handles:
            handle.remove()


def _hooks(name: str, unit: SparseUnit, keep: Callable[..., None]) -> list[tuple[nn.Module, Any]]:
    """Where to look at a module: at its output, or at what the norm of a block of two halves gets."""
    owner, second = unit._owner[0], unit._second[0]
    inside: list[Tensor] = []

    def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        x = args[0] if args else kwargs[unit._names[0]]
        y = out[0] if isinstance(out, tuple) else out
        keep(name, unit, x, y - x if unit.kind == "block" else y)

    def norm(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        inside.append(args[0])

    def end(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        x = args[1]
        keep(name, unit, x, (inside[-1] if inside else out) - x)
        inside.clear()

    if second is None:
        return [(owner, after)]
    return [(second, end)] if unit.norm is None else [(unit.norm, norm), (second, end)]
