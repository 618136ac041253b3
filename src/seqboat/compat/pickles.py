"""Files that `torch.save` wrote, read by `torch.load(weights_only=True)`: tensors, plain values and namespaces.

Nothing in such a file is run: torch refuses whatever asks for anything else.
"""

from __future__ import annotations

import argparse
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqboat.core.checks import require, short
from seqboat.data.files import open_regular

_scalar: Any = np.float64(0).__reduce__()[0]
ALLOWED: list[Any] = [
    argparse.Namespace,
    # numbers of NumPy, under the names that its versions give them
    *((_scalar, f"numpy.{home}.multiarray.scalar") for home in ("core", "_core")),
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("f8", "f4", "i8", "i4", "u8", "?")),
]
"""What a file may hold besides what torch allows."""
MAX_FILE = 1 << 34
"""Largest file that is opened, in bytes."""
MAX_PICKLE = 64 << 20
"""Largest pickle in it, in bytes; the tensors are outside of the pickle."""


def load_pickle(path: Path) -> Any:
    """The content of a file; its tensors stay on disk until they are read.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    _check_archive(path)
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = re.search(
            r"(?:GLOBAL|type|function|class) ([\w.<>]+)", str(error).partition("Please file")[0]
        )
        asked = f"asks for {named[1]!r}" if named else "is no plain data"
        raise ValueError(f"{path}: the file {asked}: refused") from None
    except Exception as error:
        # a damaged pickle fails in any way
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {short(error)}") from None


def _check_archive(path: Path) -> None:
    """Refuse what would take more memory than the file has bytes."""
    with open_regular(path) as file:
        size, head = path.stat().st_size, file.read(4)
    require(size <= MAX_FILE, f"{path} has {size:,} bytes, more than {MAX_FILE:,}: refused")
    require(head == b"PK\x03\x04", f"{path} is not a file of torch.save (1.6 or later)")
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                name = member.filename
                most = MAX_PICKLE if name.endswith("data.pkl") else size
                require(member.compress_type == zipfile.ZIP_STORED, f"{path}: {name} is compressed: refused")
                require(member.file_size <= most, f"{path}: {name} has {member.file_size:,} bytes: refused")
            bad = archive.testzip()
            require(bad is None, f"{path} is damaged: {bad} does not match its checksum")
    except (zipfile.BadZipFile, NotImplementedError, OSError, EOFError) as error:
        raise ValueError(f"{path} is damaged or truncated: {error}") from error


def load_tensors(path: Path, values: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The tensors of a dictionary of a file, in memory; whatever else it holds is refused."""
    for name, value in values.items():
        require(
            isinstance(name, str) and isinstance(value, Tensor),
            f"{path}: {short(name)} is not a tensor but {type(value).__name__}",
        )
        _check_size(path, value)
    return {name: value.clone() for name, value in values.items()}


def load_array(path: Path) -> NDArray[Any]:
    """The only tensor of a file, as an array that stays on disk."""
    value = load_pickle(path)
    require(isinstance(value, Tensor), f"{path} holds {type(value).__name__}, expected a tensor")
    _check_size(path, value)
    require(value.dtype != torch.bfloat16, f"{path} holds a tensor of {value.dtype}: save it as float32")
    array: NDArray[Any] = value.numpy()
    return array


def _check_size(path: Path, value: Tensor) -> None:
    """Refuse a tensor that repeats its numbers: copied, it could be of any size."""
    held = value.untyped_storage().nbytes() // value.element_size() if value.layout == torch.strided else 0
    require(
        value.numel() <= held,
        f"{path}: a tensor of shape {short(tuple(value.shape))} in a storage of {held} numbers: refused",
    )
