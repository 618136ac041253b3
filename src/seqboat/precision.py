"""Scans, scores and softmax stay in the precision of their inputs, also where autocast is on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def full_precision(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run a function with autocast off: forward in a training step, backward wherever it is called.

    Custom operators resolve the annotations of what this returns in this module, so `Tensor` is imported by name.
    """

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        first = args[0]
        assert isinstance(first, Tensor)
        with torch.autocast(first.device.type, enabled=False):
            return function(*args, **kwargs)

    return run
