"""A second device on a machine that has only a CPU.

A tensor of the second device reports `remote:0` (PyTorch's privateuseone backend, registered from Python) while its
data lie in CPU memory. Every operation runs on the CPU, so results can be compared with the CPU's number by number.
But an operation that mixes both devices is refused, as on a GPU, and so is NumPy: code that creates a tensor on the
wrong device fails here with a message that names the operator.

    with second_device() as device:       # makes the device known, once per process
        model.to(device)(x.to(device))
        with host_reads() as reads:       # how often the host waits for the device
            ...

Random numbers come from the CPU's generator, so that dropout drops the same values on both devices.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

NAME = "remote"
"""As torch calls it. Not `second`: torch gives every module a method of this name."""
aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)
BY_INDEX = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
"""Operators whose indices may lie on the CPU, as CUDA allows."""
WAITS = (
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
)
"""Operators whose result the host must know before it can continue."""

_active = False
_reads: list[str] | None = None


@cache
def _register() -> torch.device:
    """Make the device known to torch in this process."""

    class Hook(_DummyPrivateUse1Hook):
        def is_available(self) -> bool:
            return _active

    backend: Any = types.ModuleType(f"torch.{NAME}")
    backend.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    backend.is_available = lambda: _active
    backend.device_count = lambda: int(_active)
    backend.current_device = lambda: 0
    backend._is_in_bad_fork = lambda: False
    backend.manual_seed_all = lambda seed: None
    _setup_privateuseone_for_python_backend(NAME, backend, Hook())
    return torch.device(NAME, 0)


class SecondTensor(Tensor):
    """A tensor of the second device; `inner` has its data."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: Tensor) -> SecondTensor:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=_register(),
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def tolist(self) -> Any:
        """The values on the host."""
        _waited("tolist")
        return self.inner.tolist()

    def new_tensor(  # type: ignore[override]
        self, data: Any, dtype: torch.dtype | None = None, **_: Any
    ) -> Tensor:
        """A tensor of Python values on this device."""
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.device)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(self._placed(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(self._placed(index), value)

    def _placed(self, index: Any) -> Any:
        """A list of numbers as a tensor of this device, which torch would make where no mode sees it."""
        if not isinstance(index, list):
            return index
        return torch.tensor(index, dtype=None if index else torch.int64, device=self.device)

    def data_ptr(self) -> int:
        """Where the data lie."""
        return int(self.inner.data_ptr())

    def numpy(self, **_: Any) -> Any:
        """Refused, as for every device whose memory NumPy cannot see."""
        raise TypeError(f"can't convert {NAME} device type tensor to numpy")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SecondTensor({self.inner!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SecondTensor, (self.inner,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied: Any = SecondTensor(self.inner.detach().clone())
            copied.requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]


class _Mode(TorchDispatchMode):
    """Sees the operators that have no tensor among their arguments, such as `torch.zeros`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


@contextlib.contextmanager
def second_device() -> Iterator[torch.device]:
    """Inside, the second device can be used."""
    global _active
    device, before = _register(), _active
    _active = True
    makers = torch.tensor, torch.as_tensor
    # these two copy from Python values where no mode sees it
    torch.tensor, torch.as_tensor = (_moving(make) for make in makers)
    try:
        # torch makes a thread per device at the first backward pass of a process, which may have been before
        with torch.autograd.set_multithreading_enabled(False), _Mode():
            yield device
    finally:
        torch.tensor, torch.as_tensor = makers
        _active = before


def _moving(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes a tensor of Python values on the CPU and then moves it where it is wanted."""

    def moved(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        away = device is not None and torch.device(device).type == NAME
        if not away or isinstance(data, SecondTensor):
            return make(data, *args, device=device, **options)
        return make(data, *args, **options).to(device)

    return moved


@contextlib.contextmanager
def host_reads() -> Iterator[list[str]]:
    """A list of the operators inside at which the host waits for the second device."""
    global _reads
    before, _reads = _reads, []
    try:
        yield _reads
    finally:
        _reads = before


def _waited(what: str) -> None:
    if _reads is not None:
        _reads.append(what)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    given = _tensors((args, tuple(kwargs.values())))
    here = [part for part in given if isinstance(part, SecondTensor)]
    target = kwargs.get("device")
    to_second = bool(here) if target is None else torch.device(target).type == NAME
    if here:
        _check(func, args, given)
        _count(func, args, to_second)
    plain = {name: torch.device("cpu") if name == "device" and value is not None else _map(_unwrap, value)
             for name, value in kwargs.items()}  # fmt: skip
    if "pin_memory" in plain:
        plain["pin_memory"] = False
    out = func(*_map(_unwrap, args), **plain)
    if func in (aten._to_copy.default,) and _same_storage(out, _unwrap(args[0])):
        out = out.clone()
    if func._schema.is_mutable:
        return _given_back(func, args, kwargs, out)
    return _map(_wrap, out) if to_second else out


def _same_storage(one: Any, two: Any) -> bool:
    return (
        isinstance(one, Tensor) and one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr() != 0
    )


def _check(func: Any, args: tuple[Any, ...], given: list[Tensor]) -> None:
    """Refuse tensors of both devices, except single values and where a copy is what is asked for."""
    if func in COPIES:
        return
    looked_at = _tensors(args[0]) + _tensors(args[2:]) if func in BY_INDEX else given
    there = [part for part in looked_at if not isinstance(part, SecondTensor) and part.dim() > 0]
    if there:
        shapes = [tuple(part.shape) for part in there]
        raise RuntimeError(f"{func}: expected all tensors on {NAME}:0, but found some on cpu: {shapes}")


def _count(func: Any, args: tuple[Any, ...], to_second: bool) -> None:
    """Record an operator that makes the host wait."""
    name = func._overloadpacket.__name__
    to_host = func is aten._to_copy.default and not to_second
    to_host = to_host or (func is aten.copy_.default and not isinstance(args[0], SecondTensor))
    by_mask = func in BY_INDEX and any(
        part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1]
    )
    if func in WAITS or to_host or by_mask:
        _waited("copy to host" if to_host else name)


def _unwrap(value: Any) -> Any:
    return value.inner if isinstance(value, SecondTensor) else value


def _wrap(value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, SecondTensor):
        return value
    # a wrapper cannot postpone a conjugate
    return SecondTensor(value.resolve_conj().resolve_neg())


def _map(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tuple | list):
        return type(tree)([_map(change, part) for part in tree])
    return change(tree)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, tuple | list):
        return [found for part in tree for found in _tensors(part)]
    return []


def _given_back(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Any:
    """What an operator that writes into its arguments returns: those arguments, and new tensors."""
    written = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
    parts = {id(_unwrap(part)): part for part in written}
    here = any(isinstance(part, SecondTensor) for part in written)
    return _map(lambda leaf: parts.get(id(leaf), _wrap(leaf) if here else leaf), out)
