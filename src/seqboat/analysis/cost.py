"""The cost of a routed layer on real sequences, relative to the same layer with every token active."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from seqboat.analysis.traces import LayerTrace, Site
from seqboat.bench.cost import forward_products, linear_flops


class LayerCost(NamedTuple):
    """FLOPs of a layer's matrix products in the forward pass, over all sequences."""

    flops: float
    """with the router's decisions"""
    always: float
    """with every token active"""

    @property
    def fraction(self) -> float:
        """FLOPs relative to the layer with every token active."""
        return self.flops / self.always if self.always else 0.0


class CostCounter:
    """Counts the FLOPs of a layer over sequences of any length."""

    def __init__(self, site: Site) -> None:
        self.site, self.flops, self.always = site, 0, 0

    def add(self, layer: LayerTrace) -> None:
        if self.site.layer is not None:
            active = {part.module: int(part.active.sum()) for part in (layer, *layer.others)}
            length = len(layer.active)
            self.flops += self._count(length, active)
            self.always += self._count(length, dict.fromkeys(active, length))

    def _count(self, length: int, active: Mapping[str, int]) -> int:
        assert self.site.layer is not None
        products = forward_products(self.site.layer, 1, length, active[self.site.module])
        total = sum(product.flops for product in products) + length * self.site.outside
        for name, unit in self.site.sma.units.items():
            if name != self.site.module:
                total += active[name] * linear_flops(unit)
        return total

    def cost(self) -> LayerCost | None:
        return None if self.site.layer is None else LayerCost(self.flops, self.always)
