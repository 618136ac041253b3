"""torch.compile for models that decide how much they compute.

How many tokens are active depends on the data, and torch traces through such sizes only if it is told to.
Without these two settings a layer falls into several graphs around the packing of its tokens (with the same
results); with them a layer, and a whole model, is one graph that serves every number of active tokens.
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
    """Compile a model in one graph; the first call takes from seconds to a minute.

    Args:
        model: any module of this package.
        **options: of torch.compile.
    """
    capture_active_tokens()
    return torch.compile(model, **options)  # type: ignore[return-value]
