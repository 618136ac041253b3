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
SAMPLE = 16384
"""Tokens that the neurons of a substitute are chosen by."""
REDUNDANT = 1e-6
"""Fraction of a neuron's variance that linear maps of others must leave for it to be chosen."""


class Substitute(nn.Linear):
    """What inactive tokens get: a linear map, and some GELU neurons if there are any. It adds nothing until fitted.

    Args:
        d_model: width of the tokens.
        neurons: hidden neurons beside the linear map.
        dtype: of the weights.
    """

    def __init__(self, d_model: int, neurons: int, dtype: torch.dtype) -> None:
        super().__init__(d_model, d_model, dtype=dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.inner = nn.Linear(d_model, neurons, dtype=dtype) if neurons else None
        self.outer = nn.Linear(neurons, d_model, bias=False, dtype=dtype) if neurons else None
        if self.outer is not None:
            nn.init.zeros_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.inner is None or self.outer is None else y + self.outer(F.gelu(self.inner(x)))

    def features(self, x: Tensor) -> Tensor:
        """Tokens (tokens, dim) and their neurons, (tokens, dim + neurons): the output is linear in them."""
        return x if self.inner is None else torch.cat([x, F.gelu(self.inner(x))], dim=1)

    def set(self, weight: Tensor, bias: Tensor) -> None:
        """Set the weights (dim, dim + neurons) and the bias of the features."""
        inputs = self.in_features
        self.weight.copy_(weight[:, :inputs])
        self.bias.copy_(bias)
        if self.outer is not None:
            self.outer.weight.copy_(weight[:, inputs:])


def widest_map(module: nn.Module, d_model: int, without: nn.Module | None = None) -> nn.Linear | None:
    """The linear map of a token to most numbers in a module: that to the hidden neurons of a feed-forward block.

    Args:
        module: of the model.
        d_model: width of the tokens.
        without: a child whose maps do not count.
    """
    own = set() if without is None else set(without.modules())
    maps = [
        part
        for part in module.modules()
        if isinstance(part, nn.Linear) and part.in_features == d_model and part not in own
    ]
    return max(maps, key=lambda part: part.out_features, default=None)


def hidden_width(module: nn.Module, d_model: int) -> int:
    """How many hidden neurons a module has."""
    widest = widest_map(module, d_model)
    return 0 if widest is None else widest.out_features


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
    worst become active. Below rate 1 the substitute is then fitted again, to the tokens that it will serve. Its
    neurons are copied from the module.

    A layer is run about three times, whatever the depth of the model. One vector per token and module is kept in
    memory, or one per token and layer where these are more.

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
    layers = _Layers(model)
    try:
        for unit in units.values():
            unit.rate = 1.0
        wanted = _dense_outputs(model, units, batches)
        layers.begin(len(batches))
        for name in list(wanted):  # in the order in which they run
            targets = wanted.pop(name)
            units[name].rate = rates[name]
            tokens = _inputs(model, units[name], batches, layers)
            if units[name].inside_residual:
                targets = [y - x for x, y in zip(tokens, targets, strict=True)]
            _fit_unit(units[name], tokens, targets)
    finally:
        layers.restore()
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
        probs = [unit.score(x)[:, 0] for x in directions]
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
    """Choose the neurons of a substitute, if it has any, and set its weights."""
    substitute: Any = unit.substitute
    if substitute.inner is not None:
        _choose_neurons(unit, tokens, targets)
    substitute.set(*_solve([substitute.features(x) for x in tokens], targets))


def _choose_neurons(unit: SparseUnit, tokens: list[Tensor], targets: list[Tensor]) -> None:
    """Copy neurons of the module, one after the other: the one that explains most of what those before it leave.

    A linear map of the token comes first. They are neurons of the widest of the module's linear maps of a token.
    """
    substitute: Any = unit.substitute
    widest = widest_map(unit._owner[0], substitute.in_features, unit)
    assert widest is not None
    x, y = torch.cat(tokens)[:SAMPLE], torch.cat(targets)[:SAMPLE]
    neurons = F.gelu(widest(x))
    weight, bias = _solve([x], [torch.cat([neurons, y], dim=1)])
    left = torch.cat([neurons, y], dim=1) - x @ weight.mT.to(x.dtype) - bias.to(x.dtype)
    neurons, rest = left[:, : widest.out_features], left[:, widest.out_features :]
    count = substitute.inner.out_features
    best = choose_columns((neurons.mT @ neurons).double(), (neurons.mT @ rest).double(), count)
    substitute.inner.weight.copy_(widest.weight[best])
    substitute.inner.bias.copy_(torch.zeros(()) if widest.bias is None else widest.bias[best])


def choose_columns(products: Tensor, moments: Tensor, count: int) -> list[int]:
    """Columns of a matrix that explain some targets best by least squares, chosen greedily.

    Args:
        products: (columns, columns), of the columns with each other.
        moments: (columns, targets), of the columns with the targets.
        count: how many to choose.

    >>> matrix = torch.tensor([[1.0, 1.1, 0.0], [0.0, 0.1, 0.0], [0.0, 0.0, 0.5]])  # the first two are alike
    >>> target = torch.tensor([[3.0], [0.0], [1.0]])
    >>> choose_columns(matrix.T @ matrix, matrix.T @ target, 2)
    [0, 2]
    """
    # a Cholesky factorization whose pivots are the chosen columns
    factor = products.new_zeros(count, len(products))
    moments, size = moments.clone(), products.diagonal()
    left, free = size.clone(), torch.ones_like(size, dtype=torch.bool)
    best: list[int] = []
    for step in range(count):
        # what is left of a redundant column is rounding error
        useful = left > REDUNDANT * size
        gain = moments.square().sum(dim=1) / left.clamp(min=torch.finfo(left.dtype).tiny)
        one = int(torch.where(free, torch.where(useful, gain, 0.0), -1.0).argmax())
        best.append(one)
        free[one] = False
        if useful[one]:
            row = (products[one] - factor[:step, one] @ factor[:step]) / left[one].sqrt()
            factor[step] = row
            left -= row.square()
            moments.addr_(row, moments[one] / row[one], alpha=-1.0)
    return best


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


class _Layers:
    """The layers of a model, which repeat what they gave once nothing before them changes any more.

    Modules are fitted in the order in which they run: what ran to its end before a module was reached stays as it is.
    Layers are the elements of outermost module lists; one that runs several times in a call (as shared layers do) is
    not repeated.
    """

    def __init__(self, model: nn.Module) -> None:
        self.batch = 0
        self.calls = dict.fromkeys(_outermost(model), 0)
        self.outputs: dict[nn.Module, list[Any]] | None = None
        self.forwards: dict[nn.Module, Any] = {}
        self.handles = {layer: layer.register_forward_hook(self._note) for layer in self.calls}

    def _note(self, layer: nn.Module, args: Any, out: Any) -> None:
        if self.outputs is None:
            self.calls[layer] += 1
        else:
            self.outputs[layer].append(out)

    def begin(self, batches: int) -> None:
        """After one call of the model per batch: from now on keep what layers give."""
        self.outputs = {layer: [] for layer in self.calls}
        for layer, calls in self.calls.items():
            if calls != batches:
                self.handles.pop(layer).remove()

    def settle(self, batches: int) -> None:
        """After the model ran up to a module, per batch: layers that came to their end repeat what they gave."""
        assert self.outputs is not None
        for layer, found in self.outputs.items():
            if len(found) == batches and layer not in self.forwards:
                self.handles.pop(layer).remove()
                self.forwards[layer] = layer.__dict__.get("forward")
                layer.forward = lambda *args, found=found, **kwargs: _copy(found[self.batch])

    def restore(self) -> None:
        for handle in self.handles.values():
            handle.remove()
        for layer, forward in self.forwards.items():
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _outermost(model: nn.Module) -> list[nn.Module]:
    """The elements of module lists that are not in another one."""
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    own = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [layer for name in own for layer in model.get_submodule(name).children()]


def _copy(out: Any) -> Any:
    """What a layer gave, safe from changes in place."""
    if isinstance(out, tuple):
        return tuple(map(_copy, out))
    return out.clone() if isinstance(out, Tensor) else out


def _inputs(
    model: nn.Module, unit: SparseUnit, batches: Sequence[Mapping[str, Any]], layers: _Layers
) -> list[Tensor]:
    """Per batch, the real tokens (tokens, dim) that a module gets."""
    found: list[Tensor] = []

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.append(_real_tokens(unit, args[0] if args else kwargs[unit._names[0]]))
        raise _Reached

    handle = unit._owner[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        for layers.batch, batch in enumerate(batches):
            with contextlib.suppress(_Reached):
                model(**batch)
    finally:
        handle.remove()
    layers.settle(len(batches))
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
