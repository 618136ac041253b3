"""torch.compile for models that decide how much they compute.

The number of active tokens depends on the data, and torch traces through such sizes only on request. Without these
two settings a layer is split into several graphs around the packing of its tokens (with the same results); with
them a layer, and a whole model, is one graph for any number of active tokens.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch._dynamo
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def capture_active_tokens() -> None:
    """Tell torch's compiler, for this process, to trace through sizes that depend on the data."""
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    torch._dynamo.config.capture_scalar_outputs = True


def compile_model(model: Model, **options: Any) -> Model:
    """Compile a model into one graph for batches of any size; the first call takes seconds to a minute.

    Args:
        model: any module of this package.
        options: of torch.compile; `dynamic` is True unless given.

    Returns:
        The compiled model, which shares its weights with the model.

    >>> from seqboat import Classifier, compile_model
    >>> model = compile_model(Classifier(vocab=5, d_model=8, num_layers=1))     # compiled by the first call
    """
    capture_active_tokens()
    return torch.compile(model, **{"dynamic": True, **options})  # type: ignore[return-value]
