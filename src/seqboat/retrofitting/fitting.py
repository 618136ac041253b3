"""Substitutes and routers of a retrofitted model, fitted to its dense form by least squares, without training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.layers.routers import SigmoidRouter
from seqboat.retrofitting.unit import SparseUnit

RIDGE = 1e-4
"""Added to the diagonal of the inputs' covariance, relative to its mean."""


class Substitute(nn.Linear):
    """What inactive tokens get: a linear map. It adds nothing until fitted."""

    def __init__(self, d_model: int, dtype: torch.dtype) -> None:
        super().__init__(d_model, d_model, dtype=dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class LeastSquares:
    """A ridge regression with an intercept, from batches of (tokens, inputs) and targets."""

    def __init__(self, inputs: int, targets: int, device: torch.device) -> None:
        self.products = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64, device=device)
        self.moments = torch.zeros(inputs + 1, targets, dtype=torch.float64, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        x = F.pad(x, (0, 1), value=1.0)
        # a batch in its own precision, which is twice as fast; the penalty is much larger than the rounding error
        self.products += x.mT @ x
        self.moments += x.mT @ y.to(x.dtype)

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
    """Fit substitutes, routers and thresholds, module after module, each on what the modules before it leave.

    Every module has its own rate. The tokens of a module come from the model with all earlier modules fitted and
    sparse, and the substitute's target is what the dense model has after this module: each module makes up for the
    errors of those before it. A router's logit predicts, up to its scale, the logarithm of the distance between
    target and substitute (after the norm, where a block ends with one), so that the tokens that the substitute serves
    worst become active. Below rate 1 the substitute is then fitted again, to the tokens that it will serve.

    The model is run up to each module, over all batches: the work grows with the square of the depth. One vector per
    token and module is kept in memory.

    Args:
        model: the retrofitted model.
        units: by the name of the module.
        batches: keyword arguments of the model.
    """
    require(len(batches) > 0, "fit needs at least one batch")
    for name, unit in units.items():
        require(
            isinstance(unit.substitute, Substitute),
            f'{name} has no substitute to fit: retrofit(..., skipped="linear")',
        )
        require(isinstance(unit.router, SigmoidRouter), f"{name}: only the default router can be fitted")
    was, rates = model.training, {name: unit.rate for name, unit in units.items()}
    model.eval()
    try:
        for unit in units.values():
            unit.rate = 1.0
        wanted = _dense_outputs(model, units, batches)
        for name in list(wanted):  # in the order in which they run
            targets = wanted.pop(name)
            units[name].rate = rates[name]
            tokens = _inputs(model, units[name], batches)
            if units[name].inside_residual:
                targets = [y - x for x, y in zip(tokens, targets, strict=True)]
            _fit_unit(units[name], tokens, targets)
    finally:
        for name, unit in units.items():
            unit.rate = rates[name]
        model.train(was)


def _fit_unit(unit: SparseUnit, tokens: list[Tensor], targets: list[Tensor]) -> None:
    """Fit one module to batches of (tokens, dim) and what should be added to them."""
    substitute: Any = unit.substitute
    directions = [F.rms_norm(x, x.shape[1:]) for x in tokens]
    _fit_substitute(unit, tokens, targets)
    # after the norm, as the next module sees it: before it a few large channels would decide
    norm = unit.norm if unit.halved else None
    logs = []
    for x, y in zip(tokens, targets, strict=True):
        found = substitute(x)
        off = y - found if norm is None else norm(x + y) - norm(x + found)
        error = off.double().square().sum(dim=1, keepdim=True)
        logs.append(error.clamp(min=torch.finfo(x.dtype).tiny).log() / 2)
    _fit_router(unit, directions, logs)
    if unit.rate < 1.0:
        probs = [unit.router(x).probs[:, 0] for x in directions]
        unit.threshold.copy_(torch.nanquantile(torch.cat(probs), 1 - unit.rate))
        unit.updates.zero_()
        served = [part < unit.threshold for part in probs]
        if any(bool(rows.any()) for rows in served):  # tokens that are all alike are all active
            _fit_substitute(
                unit,
                [x[rows] for x, rows in zip(tokens, served, strict=True)],
                [y[rows] for y, rows in zip(targets, served, strict=True)],
            )


def _fit_substitute(unit: SparseUnit, tokens: list[Tensor], targets: list[Tensor]) -> None:
    """Set the weights of a substitute."""
    _set(unit.substitute, *_solve(tokens, targets))


def _fit_router(unit: SparseUnit, tokens: list[Tensor], logs: list[Tensor]) -> None:
    """Logits that predict the logarithms (tokens, 1), with mean 0 and std 1 over all tokens."""
    solver = LeastSquares(tokens[0].shape[1], 1, tokens[0].device)
    for x, y in zip(tokens, logs, strict=True):
        solver.add(x, y)
    weight, _ = solver.solve()
    count, sums = solver.products[-1, -1], solver.products[-1, :-1]
    center = (weight[0] @ sums) / count
    variance = weight[0] @ solver.products[:-1, :-1] @ weight[0] / count - center.square()
    scale = 1 / variance.clamp(min=1e-12).sqrt()
    router: Any = unit.router
    _set(router.logits, weight * scale, -center[None] * scale)


def _solve(inputs: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Weight and bias of the linear map from inputs to targets."""
    solver = LeastSquares(inputs[0].shape[1], targets[0].shape[1], inputs[0].device)
    for x, y in zip(inputs, targets, strict=True):
        solver.add(x, y)
    return solver.solve()


def _set(linear: Any, weight: Tensor, bias: Tensor) -> None:
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)


def _real_tokens(unit: SparseUnit, x: Tensor) -> Tensor:
    """The real tokens (tokens, dim) of (batch, time, dim)."""
    real = unit.call.real(x)
    return x.flatten(0, 1) if real is None else x[real]


def _dense_outputs(
    model: nn.Module, units: Mapping[str, SparseUnit], batches: Sequence[Mapping[str, Any]]
) -> dict[str, list[Tensor]]:
    """By module, in the order in which they run: per batch, what it gives to its real tokens (tokens, dim).

    Where the residual connection is inside, that is the token plus what is added to it, before the norm.
    """
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, unit: SparseUnit, y: Tensor) -> None:
        found.setdefault(name, []).append(_real_tokens(unit, y))

    handles = []
    for name, unit in units.items():
        module, hook = _output_hook(name, unit, keep)
        handles.append(module.register_forward_hook(hook))
    try:
        for batch in batches:
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


class _Reached(Exception):
    """The module in question has been called: the rest of the model need not run."""


def _inputs(model: nn.Module, unit: SparseUnit, batches: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Per batch, the real tokens (tokens, dim) that a module gets."""
    found: list[Tensor] = []

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.append(_real_tokens(unit, args[0] if args else kwargs[unit._names[0]]))
        raise _Reached

    handle = unit._owner[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        for batch in batches:
            with contextlib.suppress(_Reached):
                model(**batch)
    finally:
        handle.remove()
    return found


def _output_hook(name: str, unit: SparseUnit, keep: Callable[..., None]) -> tuple[nn.Module, Any]:
    """Where to look at what a module gives: at its output, or at what the norm of a block of two halves gets."""
    owner, second = unit._owner[0], unit._second[0]

    def after(module: nn.Module, args: Any, out: Any) -> None:
        keep(name, unit, out[0] if isinstance(out, tuple) else out)

    def norm(module: nn.Module, args: Any, out: Any) -> None:
        keep(name, unit, args[0])

    if second is None:
        return owner, after
    return (second, after) if unit.norm is None else (unit.norm, norm)
