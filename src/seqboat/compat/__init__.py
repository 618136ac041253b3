"""The published implementation: its layers, its whole models and its checkpoints, in and out."""

from seqboat.compat.layers import (
    ema_from_published,
    ema_parameters,
    ema_to_published,
    layer_config,
    layer_from_published,
    layer_parameters,
    layer_to_published,
    load,
    published_config,
    to_published,
)
from seqboat.compat.models import backbone_config, model_from_published, model_to_published

__all__ = [
    "backbone_config",
    "ema_from_published",
    "ema_parameters",
    "ema_to_published",
    "layer_config",
    "layer_from_published",
    "layer_parameters",
    "layer_to_published",
    "load",
    "model_from_published",
    "model_to_published",
    "published_config",
    "to_published",
]
