"""The folder of a run: made when a run starts, removed if it never starts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqboat.data.files import read_json
from seqboat.training.checkpoint import CheckpointStore

TOLD = ("data", "baselines")
"""Entries of run.json about the data, which a resumed run keeps."""


def prepare_folder(folder: Path, resume: bool) -> None:
    """Make a run's folder, or refuse one that cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # a fresh name: a run that was killed here may have left its probe behind
        with tempfile.TemporaryDirectory(prefix=".stage-probe-", dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write to the run's folder {folder}: {error.strerror}") from error
    if not resume and (CheckpointStore(folder).steps() or (folder / "config.yaml").exists()):
        raise ValueError(
            f"{folder} already holds a run: resume it (--resume) or choose another folder (--out)"
        )


def read_told(folder: Path) -> dict[str, Any]:
    """What a run was told about its data before its first step; empty if it was not."""
    try:
        found = read_json(folder / "run.json")
    except ValueError:
        return {}
    return {key: found[key] for key in TOLD if key in found} if isinstance(found, dict) else {}


def remove_unused(folder: Path, made: Sequence[Path] = ()) -> None:
    """Remove a folder in which nothing but a lock was written, and the folders above that were made for it."""
    with contextlib.suppress(OSError):
        if [entry.name for entry in folder.iterdir()] == ["lock"] and not (folder / "lock").stat().st_size:
            (folder / "lock").unlink()
            folder.rmdir()
            for path in made[1:]:
                path.rmdir()
