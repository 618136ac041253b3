"""Run a model on shapes alone: no data and no arithmetic, but every operation and every allocation.

`Meter` is a context in which tensors have a shape and no content. It counts the memory that is held at a time,
floating-point operations, bytes moved and operations started, for models and batches of any size, on any machine.
What depends on data is assumed: `nonzero` finds a given fraction of the places, and values read by the host are
false, one, or very large.

Tensors report the CPU as their device, so that autocast works, but layers split their work as on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from seqboat.ops.positions import separate_frequencies

aten = torch.ops.aten
META = torch.device("meta")
CPU = torch.device("cpu")
LARGE = 1e9
"""What a floating-point value that the host reads is assumed to be, such as the longest learned span."""


class ShapeTensor(Tensor):
    """A tensor without content: its `content` lies on the meta device."""

    content: Tensor
    stands_for = "gpu"
    """The kind of device whose way of working is to be counted."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> ShapeTensor:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CPU,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: Tensor) -> None:
        self.content = inner

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} on a tensor without content, outside of its meter")

    def tolist(self) -> Any:
        """What is assumed of all values that the host reads."""
        value: Any = _assumed(self)
        for size in reversed(self.shape):
            value = [value] * size
        return value

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShapeTensor({tuple(self.shape)}, {self.dtype})"


class Meter(TorchDispatchMode):
    """Counts what models do to tensors without content, which are the only tensors inside its context.

    Args:
        fraction: of places that `nonzero` finds: the activation rate of routers.
    """

    def __init__(self, fraction: float = 1.0) -> None:
        super().__init__()
        self.fraction = fraction
        self.held = 0
        """bytes of all tensors alive"""
        self.peak = 0
        """the most that was ever held"""
        self.products: dict[torch.dtype, float] = {}
        """floating-point operations of matrix products, convolutions and attention, by type"""
        self.moved = 0
        """bytes that operations read and wrote"""
        self.started = 0
        """operations that a device would run"""
        self._alive: set[int] = set()
        self._separate: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        # entered again for what an operation does inside
        self._separate.append(separate_frequencies())
        self._separate[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._separate.pop().__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "seqboat":
            return self._run_inside(OPDEFS[func._schema.name]._init_fn, args, kwargs)
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default):
            return _assumed(args[0])
        inner_args, inner_kwargs = _map(_unwrap, args), {name: _map(_unwrap, v) for name, v in kwargs.items()}
        if func is aten.nonzero.default:
            size = round(self.fraction * args[0].numel())
            out = torch.empty(size, args[0].dim(), dtype=torch.int64, device=META)
        elif func is aten.nonzero_static.default:
            out = torch.empty(kwargs["size"], args[0].dim(), dtype=torch.int64, device=META)
        else:
            makes = not _tensors(args) and any(a.name == "device" for a in func._schema.arguments)
            if makes or "device" in inner_kwargs:
                inner_kwargs["device"] = META
            inner_kwargs.pop("pin_memory", None)
            out = _map(_plain, func(*inner_args, **inner_kwargs))
        self._count(func, inner_args, inner_kwargs, out)
        if func._schema.is_mutable and _tensors(out):
            return _given_back(func, args, kwargs, out)
        return _map(_wrap, out)

    def _run_inside(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Count what an operator of this package consists of."""
        with torch.no_grad(), self:
            return body(*args, **kwargs)

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outputs, inputs = _tensors(out), _tensors((args, tuple(kwargs.values())))
        here = {id(part.untyped_storage()) for part in inputs}
        fresh = [part for part in outputs if self._hold(part)]
        if not fresh and not func._schema.is_mutable:
            return  # a view
        self.started += 1
        written = fresh or outputs
        self.moved += sum(_size(part) for part in inputs) + sum(
            _size(part) for part in written if fresh or id(part.untyped_storage()) in here
        )
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            dtype = outputs[0].dtype
            work = formula(*args, **kwargs, out_val=out)
            self.products[dtype] = self.products.get(dtype, 0.0) + work

    def _hold(self, part: Tensor) -> bool:
        """Count the memory of a tensor until nothing holds it any longer; False if it was counted before."""
        storage = part.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return False
        self._alive.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, key, size)
        return True

    def _release(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.held -= size


def without_content(model: nn.Module) -> nn.Module:
    """Replace the parameters and buffers of a model; inside of a meter only."""
    done: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in done:
                    shape = torch.empty_like(parameter)
                    done[id(parameter)] = parameter, nn.Parameter(shape, parameter.requires_grad)
                module._parameters[name] = done[id(parameter)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.clone()
    return model


def _assumed(x: Tensor) -> bool | float | int:
    """What a value is taken to be when the host reads it."""
    if x.dtype == torch.bool:
        return False
    return LARGE if x.is_floating_point() else 1


def _unwrap(value: Any) -> Any:
    if isinstance(value, ShapeTensor):
        return value.content
    return value.to(META) if isinstance(value, Tensor) and value.device != META else value


def _plain(value: Any) -> Any:
    """A conjugate that lies in memory: wrappers cannot postpone it."""
    if isinstance(value, Tensor) and (value.is_conj() or value.is_neg()):
        return value.resolve_conj().resolve_neg()
    return value


def _wrap(value: Any) -> Any:
    return ShapeTensor(value) if isinstance(value, Tensor) else value


def _map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Arguments or results of an operator, nested in tuples and lists, with every part changed."""
    if isinstance(tree, tuple | list):
        return type(tree)([_map(change, part) for part in tree])
    return change(tree)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, tuple | list):
        return [found for part in tree for found in _tensors(part)]
    return []


def _size(part: Tensor) -> int:
    """Bytes that reading a tensor takes; what is only expanded is read once."""
    sizes = [size for size, stride in zip(part.shape, part.stride(), strict=True) if stride or not size]
    count = 1
    for size in sizes:
        count *= size
    return count * part.element_size()


def _given_back(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Any:
    """What an operation that writes into its arguments returns: those arguments, and fresh tensors."""
    schema = func._schema
    written = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            written += _tensors(value)
    parts = {id(part.content): part for part in written if isinstance(part, ShapeTensor)}
    return _map(lambda leaf: parts.get(id(leaf), _wrap(leaf)) if isinstance(leaf, Tensor) else leaf, out)
