"""A checkpoint that `torch.save` wrote, read without running anything in it.

A pickle is a program: it can import any function and call it. This reader knows a short list of names, each of which
becomes an inert stand-in (a namespace, a number, the description of a tensor), and refuses a file that asks for any
other name. Nothing is imported, and nothing from the file is called. Tensors are described first and only read,
from the file's uncompressed members, when they are asked for.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqboat.core.checks import require, short
from seqboat.data.files import open_regular

MAX_PICKLE = 64 << 20
"""Bytes of the pickle in a checkpoint; the tensors are outside of it."""
MAX_DEPTH = 30
"""How deeply the settings of a checkpoint may be nested."""
MAX_SETTINGS = 100_000
"""Values that the settings of a checkpoint may hold."""

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
ARRAYS = {torch.float32: "<f4", torch.float64: "<f8", torch.int64: "<i8", torch.int32: "<i4"}
"""Types of tensors that can stay on disk, as NumPy writes them."""
NUMBERS = {"f8": "d", "f4": "f", "i8": "q", "i4": "i", "u8": "Q", "b1": "?"}
"""Types of NumPy numbers, with their letters in `struct`."""
SETTINGS = (
    ("omegaconf.dictconfig", "DictConfig"),
    ("omegaconf.listconfig", "ListConfig"),
    ("omegaconf.base", "ContainerMetadata"),
    ("omegaconf.base", "Metadata"),
    ("omegaconf.nodes", "AnyNode"),
    ("omegaconf.nodes", "StringNode"),
    ("omegaconf.nodes", "IntegerNode"),
    ("omegaconf.nodes", "FloatNode"),
    ("omegaconf.nodes", "BooleanNode"),
    ("omegaconf.nodes", "EnumNode"),
)
"""Classes of configuration files whose fields are read, but which are not imported."""
TYPES = {("typing", "Any")} | {
    (home, name)
    for home in ("builtins", "__builtin__")
    for name in ("dict", "list", "str", "int", "float", "bool")
}
"""Types that such a configuration mentions."""


class Refused(ValueError):
    """The file asks for something that is not on the list."""


class StoredTensor(NamedTuple):
    """A tensor of the file that has not been read yet."""

    member: str
    """name of its storage"""
    dtype: torch.dtype
    elements: int
    """of the storage"""
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Fields:
    """What a namespace or a configuration object of the file holds, and nothing else."""

    def __setstate__(self, state: object) -> None:
        # an object with slots has a pair of states
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                vars(self).update({str(name): value for name, value in part.items()})


class _Number:
    """The type of a NumPy number."""

    def __init__(self, code: object = "", *_: object) -> None:
        vars(self)["code"] = code

    def __setstate__(self, state: object) -> None:
        """The byte order; all numbers of a checkpoint have that of the machine."""


class _Known:
    """A name of the list; a pickle may call it with arguments, and cannot change it."""

    __slots__ = ("_call", "_name")
    _name: str
    _call: Callable[..., Any] | None

    def __init__(self, name: str, call: Callable[..., Any] | None = None) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_call", call)

    def __call__(self, *arguments: Any) -> Any:
        if self._call is None:
            raise Refused(f"the file calls {self._name}: refused")
        return self._call(*arguments)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise Refused(f"the file sets {name!r} of {self._name}: refused")

    def __str__(self) -> str:
        return self._name


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    """Describe a tensor; only one that lies in its storage without overlap is accepted."""
    require(isinstance(storage, StoredTensor), "a tensor without a storage: refused")
    numbers = (offset, *shape, *stride)
    plain = all(type(number) is int and 0 <= number < 1 << 48 for number in numbers)
    require(plain and len(shape) == len(stride) <= 8, f"a tensor of shape {short(shape)}: refused")
    elements = math.prod(shape)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    require(
        elements == 0 or (last < storage.elements and elements <= storage.elements),
        f"a tensor of shape {short(tuple(shape))} in a storage of {storage.elements:,} numbers: refused",
    )
    return storage._replace(offset=offset, shape=tuple(shape), stride=tuple(stride))


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _number(kind: Any, content: Any = b"", *_: Any) -> float | int | bool:
    code = vars(kind).get("code") if isinstance(kind, _Number) else None
    require(code in NUMBERS and isinstance(content, bytes | str), f"a number of type {short(code)}: refused")
    data = content.encode("latin-1") if isinstance(content, str) else content
    letter = "<" + NUMBERS[str(code)]
    require(len(data) == struct.calcsize(letter), f"a number of {len(data)} bytes: refused")
    found: float | int | bool = struct.unpack(letter, data)[0]
    return found


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How pickles of protocol 2 write bytes."""
    require(
        isinstance(text, str) and encoding in ("latin1", "latin-1"), "bytes in an unknown encoding: refused"
    )
    found: bytes = text.encode("latin-1")
    return found


class _Reader(pickle.Unpickler):
    """An unpickler of the listed names."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("argparse", "Namespace"): Fields,
            ("torch._utils", "_rebuild_tensor_v2"): _Known("torch._utils._rebuild_tensor_v2", _tensor),
            ("torch._utils", "_rebuild_parameter"): _Known("torch._utils._rebuild_parameter", _parameter),
            ("numpy", "dtype"): _Number,
            ("_codecs", "encode"): _Known("_codecs.encode", _encode),
        }
        for home in ("numpy.core.multiarray", "numpy._core.multiarray"):
            known[home, "scalar"] = _Known(f"{home}.scalar", _number)
        known |= {("torch", name): _Known(f"torch.{name}") for name in STORAGES}
        known |= {names: _Known(".".join(names)) for names in TYPES}
        known |= dict.fromkeys(SETTINGS, Fields)
        self.known = known

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known:
            raise Refused(f"the file asks for {short(f'{module}.{name}')}, which is not on the list: refused")
        return self.known[module, name]

    def persistent_load(self, pid: Any) -> StoredTensor:
        require(
            isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage",
            "the file names something outside of it that is no storage: refused",
        )
        _, kind, key, _, elements = pid
        dtype = STORAGES.get(str(kind).removeprefix("torch.")) if isinstance(kind, _Known) else None
        require(dtype is not None, f"a storage of type {short(kind)}: refused")
        assert dtype is not None
        require(isinstance(key, str) and key.isalnum(), f"a storage called {short(key)}: refused")
        require(type(elements) is int and 0 <= elements < 1 << 48, "a storage of an impossible size: refused")
        return StoredTensor(key, dtype, elements, 0, (elements,), (1,))


class PickledFile:
    """A file that `torch.save` wrote, in the zip format of PyTorch since 1.6.

    Args:
        path: of the file.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            head = file.read(4)
        require(
            head == b"PK\x03\x04",
            f"{path} is not a checkpoint in the zip format of PyTorch 1.6 and later; "
            "an older one has to be loaded and saved again with PyTorch",
        )
        try:
            with zipfile.ZipFile(path) as archive:
                self._members = {member.filename: member for member in archive.infolist()}
                found = [
                    name for name in self._members if name.count("/") == 1 and name.endswith("/data.pkl")
                ]
                require(len(found) == 1, f"{path} has no data.pkl: torch.save did not write it")
                self._stem = found[0].removesuffix("data.pkl")
                order = self._members.get(f"{self._stem}byteorder")
                require(
                    order is None or self._read(archive, order, 16) == b"little",
                    f"{path} was written on a machine of another byte order",
                )
                content = self._read(archive, self._members[found[0]], MAX_PICKLE)
        except (zipfile.BadZipFile, NotImplementedError, OSError, EOFError) as error:
            raise ValueError(f"{path} is damaged or truncated: {error}") from error
        try:
            self.content = _Reader(content).load()
        except Refused as error:
            raise Refused(f"{path}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        except Exception as error:
            # a damaged pickle fails in any way
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {short(error)}") from None

    def _read(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int | None = None) -> bytes:
        name, size = member.filename, member.file_size
        require(
            member.compress_type == zipfile.ZIP_STORED,
            f"{self.path}: {name} is compressed: torch.save does not",
        )
        require(
            most is None or size <= most, f"{self.path}: {name} has {size:,} bytes, more than {most or 0:,}"
        )
        # stored members cannot be larger than the file itself
        require(size <= self.path.stat().st_size, f"{self.path}: {name} is larger than the file")
        return archive.read(member)

    def tensors(self, values: Mapping[Any, Any]) -> dict[str, Tensor]:
        """Read the tensors of a dictionary; whatever else it holds is refused."""
        found: dict[str, Tensor] = {}
        storages: dict[str, Tensor] = {}
        with zipfile.ZipFile(self.path) as archive:
            for name, value in values.items():
                require(
                    isinstance(name, str) and isinstance(value, StoredTensor),
                    f"{self.path}: {short(name)} is not a tensor but {type(value).__name__}",
                )
                if value.member not in storages:
                    storages[value.member] = self._storage(archive, value)
                storage = storages[value.member]
                require(storage.dtype == value.dtype, f"{self.path}: {name} has two types")
                found[name] = storage.as_strided(value.shape, value.stride, value.offset).clone()
        return found

    def _storage(self, archive: zipfile.ZipFile, value: StoredTensor) -> Tensor:
        member = self._member(value)
        try:
            content = self._read(archive, member)
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise ValueError(f"{self.path} is damaged or truncated: {error}") from error
        return (
            torch.frombuffer(bytearray(content), dtype=value.dtype)
            if content
            else torch.empty(0, dtype=value.dtype)
        )

    def _member(self, value: StoredTensor) -> zipfile.ZipInfo:
        name = f"{self._stem}data/{value.member}"
        member = self._members.get(name)
        require(member is not None, f"{self.path} has no {name}")
        assert member is not None
        size = value.elements * value.dtype.itemsize
        require(
            member.file_size == size, f"{self.path}: {name} has {member.file_size:,} bytes, expected {size:,}"
        )
        return member

    def array(self) -> NDArray[Any]:
        """The only tensor of the file, as an array that stays on disk."""
        value = self.content
        require(
            isinstance(value, StoredTensor), f"{self.path} holds {type(value).__name__}, expected a tensor"
        )
        assert isinstance(value, StoredTensor)
        contiguous = tuple(math.prod(value.shape[axis + 1 :]) for axis in range(len(value.shape)))
        require(
            value.stride == contiguous and value.dtype in ARRAYS,
            f"{self.path} holds a tensor of {value.dtype} in an unusual layout: save a contiguous copy",
        )
        member = self._member(value)
        require(member.compress_type == zipfile.ZIP_STORED, f"{self.path}: {member.filename} is compressed")
        with open_regular(self.path) as file:
            file.seek(member.header_offset)
            head = file.read(30)
            require(head[:4] == b"PK\x03\x04", f"{self.path} is damaged: no member where its index says")
            begin = member.header_offset + 30 + sum(struct.unpack("<HH", head[26:30]))
        start, dtype = begin + value.offset * value.dtype.itemsize, np.dtype(ARRAYS[value.dtype])
        end = start + math.prod(value.shape) * dtype.itemsize
        require(end <= self.path.stat().st_size, f"{self.path} is truncated")
        if start == end:
            return np.empty(value.shape, dtype)
        return np.memmap(self.path, dtype, "r", offset=start, shape=value.shape)


def plain_settings(value: object) -> dict[str, Any]:
    """The settings of a checkpoint as a dictionary: a namespace, or a configuration with sections.

    Args:
        value: the entry `args` or `cfg` of a checkpoint.
    """
    count = 0

    def plain(part: Any, depth: int) -> Any:
        nonlocal count
        count += 1
        require(depth <= MAX_DEPTH, "the settings are nested too deeply: refused")
        require(count <= MAX_SETTINGS, f"the settings hold more than {MAX_SETTINGS:,} values: refused")
        if isinstance(part, Fields):
            fields = vars(part)
            for inner in ("_content", "_val"):
                if inner in fields:
                    return plain(fields[inner], depth + 1)
            part = fields
        if isinstance(part, Mapping):
            return {str(name): plain(entry, depth + 1) for name, entry in part.items()}
        if isinstance(part, list | tuple):
            return [plain(entry, depth + 1) for entry in part]
        return part if isinstance(part, int | float | str | bytes | None) else str(part)

    found = plain(value, 0)
    require(isinstance(found, dict), f"the settings must be a namespace, got {type(value).__name__}")
    assert isinstance(found, dict)
    flat: dict[str, Any] = {}
    # sections such as `model` and `task` first: what stands beside them is more specific
    for section in found.values():
        if isinstance(section, dict):
            flat |= section
    return flat | {name: entry for name, entry in found.items() if not isinstance(entry, dict)}
