"""Weights at odd offsets: the worst place in memory where a file mapped into memory can put them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

ALIGNMENT = 64
"""Bytes to which torch aligns the memory it allocates."""


def lay_odd(x: Tensor) -> Tensor:
    """A copy that begins one element past an aligned address: 8 bytes in float64, 4 in float32.

    The storage itself begins there, as that of a tensor from a mapped file does.
    """
    size = x.element_size()
    memory = torch.UntypedStorage((x.numel() + 1) * size)[size:]
    return torch.empty(0, dtype=x.dtype).set_(memory).view(x.shape).copy_(x)


def is_odd(x: Tensor) -> bool:
    return x.data_ptr() % ALIGNMENT == x.element_size()


def _lay(parameter: Any) -> None:
    """Move the data of a parameter; the parameter stays the same object, so shared ones stay shared."""
    if type(parameter) is not nn.Parameter or parameter.device.type != "cpu" or not parameter.numel():
        return
    if parameter.is_contiguous() and not is_odd(parameter):
        parameter.data = lay_odd(parameter.data)


@contextmanager
def odd_offsets() -> Iterator[None]:
    """Every parameter that a module gets, or that it converts with `.to`, lies at an odd offset."""
    convert = nn.Module._apply

    def _apply(self: nn.Module, *args: Any, **settings: Any) -> nn.Module:
        convert(self, *args, **settings)
        for parameter in self._parameters.values():
            _lay(parameter)
        return self

    hook = register_module_parameter_registration_hook(lambda module, name, parameter: _lay(parameter))
    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]
        hook.remove()
