"""Weights on disk: their checksums, and a limit on the model that is built for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from seqboat.core.checks import require
from seqboat.data.files import digest_of, write_json
from seqboat.models.backbone import Backbone, BackboneConfig
from seqboat.models.limits import build_within

CHECKSUMS = "sha256.json"
"""The file beside the weights with their hashes."""


class WeightsSize(NamedTuple):
    """The size of a model, from the headers of its weights."""

    folder: Path
    elements: int
    tensors: int


_loading: ContextVar[WeightsSize | None] = ContextVar("loading", default=None)
"""The weights being loaded while a model is built."""


def check_weights(folder: Path) -> WeightsSize | None:
    """Reject a folder with unreadable files, or with weights that do not match their saved hashes.

    Returns:
        The size of the model; None if the folder has no safetensors file.
    """
    config = folder / "config.json"
    if config.is_file():
        try:
            json.loads(config.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{config} is damaged: {error}") from error
    elements = tensors = 0
    expected: dict[str, str] = {}
    sums = folder / CHECKSUMS
    if sums.is_file():
        try:
            expected = dict(json.loads(sums.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{sums} is damaged: {error}") from error
    for name in sorted(expected):
        require((folder / name).is_file(), f"{folder / name} is missing: {sums} names it")
    for path in sorted(folder.glob("*.safetensors")):
        require(path.is_file(), f"{path} is not a regular file")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    elements += math.prod(file.get_slice(name).get_shape())
                    tensors += 1
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
        if path.name in expected:
            require(
                digest_of(path) == expected[path.name],
                f"{path} was changed after saving: its sha256 differs from the one in {sums} "
                f"(delete {sums.name} if you changed the weights on purpose)",
            )
    return WeightsSize(folder, elements, tensors) if tensors else None


def write_checksums(folder: Path) -> None:
    """Write the hashes of the weights in a folder."""
    sums = {path.name: digest_of(path) for path in sorted(folder.glob("*.safetensors"))}
    write_json(folder / CHECKSUMS, sums)


@contextmanager
def loading(size: WeightsSize | None) -> Iterator[None]:
    """Limit models built inside a `with` block to the size of the weights being loaded."""
    token = _loading.set(size)
    try:
        yield
    finally:
        _loading.reset(token)


def build_backbone(config: BackboneConfig) -> Backbone:
    """Build a backbone; while weights are being loaded, reject one far larger than they are."""
    size = _loading.get()
    if size is None:
        return Backbone(config)
    return build_within(
        lambda: Backbone(config), size.elements, config.num_layers, size.tensors, str(size.folder)
    )
