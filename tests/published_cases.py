"""Stored whole models of the published implementation: parameters, inputs, logits, gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

NAMES = ["image", "language_model", "listops", "pathfinder", "retrieval", "speech", "text"]
FOLDER = Path(__file__).parent / "fixtures" / "golden" / "models"


class PublishedModel(NamedTuple):
    """One stored model."""

    config: dict[str, Any]
    params: dict[str, Tensor]
    grads: dict[str, Tensor]
    """of the mean cross entropy"""
    arrays: dict[str, Tensor]
    """input, target, logits and lengths"""

    def run(self, model: nn.Module) -> Tensor:
        """The logits of our model."""
        arrays = self.arrays
        if self.config["kind"] == "matcher":
            masks = [real(arrays["input"], arrays["lengths"]), real(arrays["input1"], arrays["lengths1"])]
            return model(arrays["input"], arrays["input1"], *masks).logits
        if self.config["vocab"] is None or "lengths" not in arrays:
            return model(arrays["input"]).logits
        return model(arrays["input"], real(arrays["input"], arrays["lengths"])).logits


def real(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Where the tokens are not padding."""
    return torch.arange(tokens.shape[1]) < lengths[:, None]


def read(name: str) -> PublishedModel:
    """A stored model by name."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["config"])
    params: dict[str, Tensor] = {}
    grads: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for key, value in arrays.items():
        kind, _, inner = key.partition(".")
        {"param": params, "grad": grads}.get(kind, rest)[inner or kind] = value
    return PublishedModel(config, params, grads, rest)
