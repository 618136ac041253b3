"""A Hugging Face tokenizer as plain values, so that a run can contain it: its files, compressed, in base64."""

from __future__ import annotations

import base64
import tempfile
import warnings
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from seqboat.core.checks import require

MAX_PACKED = 8 << 20
"""Characters that a run carries at most."""
MAX_FILE = 256 << 20
"""Bytes that a file may have when it is unpacked."""


def pack_tokenizer(tokenizer: Any) -> dict[str, str]:
    """The files of a tokenizer by name; empty if they are too large to be carried."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        packed = {
            path.relative_to(folder).as_posix(): base64.b64encode(
                zlib.compress(path.read_bytes(), 9)
            ).decode()
            for path in files
        }
    size = sum(map(len, packed.values()))
    if size > MAX_PACKED:
        warnings.warn(
            f"the tokenizer takes {size:,} characters, more than the {MAX_PACKED:,} that a run carries: the run will "
            "need it at the place or under the name that --data.tokenizer says",
            stacklevel=2,
        )
        return {}
    return packed


def unpack_tokenizer(packed: dict[str, str]) -> Any:
    """The tokenizer that was packed; reads nothing but what was packed."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for name, text in packed.items():
            parts = PurePosixPath(name).parts
            require(
                bool(parts)
                and ".." not in parts
                and not PurePosixPath(name).is_absolute()
                and "\\" not in name,
                f"the run's tokenizer has a file with the name {name!r}",
            )
            path = Path(folder, *parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_unpack_file(name, text))
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"the run's tokenizer cannot be loaded: {error}") from None


def _unpack_file(name: str, text: str) -> bytes:
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(base64.b64decode(text, validate=True), MAX_FILE)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"the run's tokenizer cannot be unpacked: {name}: {error}") from None
    require(reader.eof, f"the run's tokenizer cannot be unpacked: {name} is truncated or too large")
    return content
