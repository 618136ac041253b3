"""Runnable candidates: a layer on random inputs, or only the matrix products of our layer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from seqboat.bench.candidates import LOWER_BOUND, OURS, Candidate, build, own_setting
from seqboat.bench.setting import LayerSetting, Mode
from seqboat.layers.routers import AlwaysActive
from seqboat.mixers import SeqBoat
from seqboat.models.cost import Product, backward_products, count_parameters, forward_products


class Runner(ABC):
    """Something that can be timed in each mode."""

    parameters: int = 0

    @abstractmethod
    def run(self, mode: Mode) -> None:
        """One step."""

    def active(self) -> float | None:
        """The fraction of tokens that were activated."""
        return None


class LayerRunner(Runner):
    """A layer on random inputs."""

    def __init__(self, candidate: Candidate, setting: LayerSetting) -> None:
        self.layer = build(candidate, setting)
        self.parameters = count_parameters(self.layer)
        self._call = self.layer
        if candidate.overrides.get("compiled"):
            from seqboat.models.compile import compile_model  # importing this takes as long as torch itself

            # the first call takes up to a minute; it is one of the warm-up rounds
            self._call = compile_model(self.layer)
        self.x = _inputs(own_setting(candidate, setting)).requires_grad_()
        self.above = torch.randn_like(self.x)

    def run(self, mode: Mode) -> None:
        if mode == "inference":
            self.layer.eval()
            with torch.no_grad():
                self._call(self.x)
            return
        self.x.grad = None
        self.layer.train().zero_grad(set_to_none=True)
        self._call(self.x).y.backward(self.above)

    def active(self) -> float | None:
        with torch.no_grad():
            routing = self.layer.eval()(self.x).routing
        return None if routing is None else float(routing.active.float().mean())


def _inputs(setting: LayerSetting) -> Tensor:
    generator = torch.Generator().manual_seed(setting.seed)
    shape = (setting.batch, setting.length, setting.d_model)
    return torch.randn(shape, generator=generator).to(setting.device, setting.torch_dtype)


class LowerBoundRunner(Runner):
    """Only the matrix products of our layer, with preallocated operands.

    Args:
        setting: of the layer.
        candidate: a SeqBoat layer without a feed-forward block; by default the setting's.
    """

    def __init__(self, setting: LayerSetting, candidate: Candidate = OURS) -> None:
        setting = own_setting(candidate, setting)
        layer = build(candidate, setting)
        assert isinstance(layer, SeqBoat)
        rate = 1.0 if isinstance(layer.sma.router, AlwaysActive) else setting.rate
        if rate is None:
            rate = LayerRunner(candidate, setting).active() or 0.0
        active = setting.batch * round(rate * setting.length)
        self.forward = forward_products(layer, setting.batch, setting.length, active)
        self.backward = backward_products(self.forward)
        self._operands: dict[tuple[int, ...], Tensor] = {}
        self._device, self._dtype = setting.device, setting.torch_dtype

    def products(self, mode: Mode) -> list[Product]:
        """The matrix products of a step."""
        return self.forward + self.backward if mode == "training" else self.forward

    def run(self, mode: Mode) -> None:
        for product in self.products(mode):
            self.multiply(product)

    def multiply(self, product: Product) -> None:
        """Compute one batch of products."""
        with torch.no_grad():
            left, right, out = (self._operand(key) for key in operand_keys(product))
            torch.bmm(left, right, out=out)

    def _operand(self, key: tuple[int, ...]) -> Tensor:
        if key not in self._operands:
            self._operands[key] = torch.randn(key[:3], device=self._device, dtype=self._dtype)
        return self._operands[key]

    def flops(self, mode: Mode) -> int:
        """FLOPs of all products."""
        return sum(product.flops for product in self.products(mode))

    def memory(self, mode: Mode) -> int:
        """Size of all operands, which stay allocated, in bytes."""
        keys = {key for product in self.products(mode) for key in operand_keys(product)}
        return sum(batch * rows * columns for batch, rows, columns, _ in keys) * self._dtype.itemsize


def operand_keys(product: Product) -> list[tuple[int, int, int, int]]:
    """Shapes of both factors and of the result, each with its role."""
    _, batch, rows, inner, columns = product
    return [(batch, rows, inner, 0), (batch, inner, columns, 1), (batch, rows, columns, 2)]


def make_runner(candidate: Candidate, setting: LayerSetting) -> Runner:
    """Make a candidate runnable."""
    return LowerBoundRunner(setting) if candidate.name == LOWER_BOUND else LayerRunner(candidate, setting)
