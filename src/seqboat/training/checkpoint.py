"""Checkpoints that are whole or not there.

    run/
      lock                     pid and host of the run that writes here
      latest, best             names of checkpoints
      step-1000/
        model.safetensors      weights
        optim.safetensors      averages of the optimizer
        state.json             step, progress, configuration, versions, sha256 of every file

A checkpoint is written to `.stage-1000-<pid>`, every file and the folder are flushed to disk, the folder is
renamed, the pointers are replaced, and only then are old checkpoints removed (renamed first, so that no half of one
is ever called `step-N`). Whatever moment a process dies at, the newest finished checkpoint stays. Nothing is
pickled: a file can hold numbers and words, never code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from seqboat.checks import require
from seqboat.data.console import printable
from seqboat.data.files import digest_of, flush_file, flush_folder, write_text
from seqboat.training.config import RunConfig, from_dict

FORMAT = 1
"""Version of the layout above; a newer one is refused."""
MODEL, OPTIM, STATE = "model.safetensors", "optim.safetensors", "state.json"
STAGE = ".stage-"
PHASES = ("stage", "write", "flush", "rename", "pointer", "prune")
"""What saving does, in order; `on_phase` is called before each."""
SLACK = 1 << 20
"""Bytes beyond the tensors that a checkpoint may take."""


class CheckpointError(Exception):
    """A checkpoint cannot be written or read: the message names the file and the reason."""


class Checkpoint(NamedTuple):
    """A checkpoint that was found whole."""

    path: Path
    state: dict[str, Any]
    """what state.json says"""

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def config(self) -> RunConfig:
        """The configuration of the run that wrote it."""
        try:
            return from_dict(self.state["config"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{self.path}: its configuration does not fit: {error}") from error

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one of its files, on the CPU."""
        return load_file(self.path / name)


def _seal(state: Mapping[str, Any]) -> str:
    """A state as JSON text that holds its own hash, so that any changed byte is found."""
    plain = json.dumps(state, indent=1, sort_keys=True)
    digest = hashlib.sha256(plain.encode()).hexdigest()
    return json.dumps({**state, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def _unseal(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        state = json.loads(text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(state, dict) or "sha256" not in state:
        raise CheckpointError(f"{path} is not the state of a checkpoint")
    if state.get("format", 0) != FORMAT:
        raise CheckpointError(f"{path} has format {state.get('format')!r}, this version reads {FORMAT}")
    plain = {key: value for key, value in state.items() if key != "sha256"}
    # the text is compared too: the same values in other bytes are a changed file
    if _seal(plain) != text:
        raise CheckpointError(f"{path} does not match its own sha256: the file was changed or damaged")
    return plain


def verify(path: Path) -> Checkpoint:
    """Read the state of a checkpoint and check every byte of it; CheckpointError names what is wrong."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint folder")
    state = _unseal(path / STATE)
    expected = state["files"]
    found = {entry.name for entry in path.iterdir()} - {STATE}
    for name in sorted(expected.keys() - found):
        raise CheckpointError(f"{path / name} is missing")
    for name in sorted(found - expected.keys()):
        raise CheckpointError(f"{path / name} does not belong to the checkpoint")
    for name, digest in sorted(expected.items()):
        if digest_of(path / name) != digest:
            raise CheckpointError(f"{path / name} does not match its sha256: the file was changed or damaged")
    return Checkpoint(path, state)


def _warn(message: str) -> None:
    warnings.warn(printable(message), stacklevel=3)


class Store:
    """The checkpoints of a run's folder. Whoever writes holds the folder's `Lock`.

    Args:
        folder: of the run.
        keep: how many of the newest checkpoints to keep; the best one is kept besides.
        on_phase: called with each phase's name before it, so that tests can make it fail.
        warn: called with what a user should know.
    """

    def __init__(
        self,
        folder: Path | str,
        keep: int = 2,
        on_phase: Callable[[str], None] | None = None,
        warn: Callable[[str], None] = _warn,
    ) -> None:
        require(keep >= 1, f"keep must be at least 1, got {keep}")
        self.folder = Path(folder)
        self.keep = keep
        self._phase = on_phase or (lambda phase: None)
        self._warn = warn

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, oldest first."""
        names = [entry.name for entry in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(
            int(n.removeprefix("step-")) for n in names if n.startswith("step-") and n[5:].isdigit()
        )

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def save(
        self,
        step: int,
        files: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        best: bool = False,
    ) -> Path:
        """Write a checkpoint.

        Args:
            step: updates done.
            files: tensors by file name and name.
            state: further content of state.json.
            best: whether it is the best so far.
        """
        final, stage = self.path(step), self.folder / f"{STAGE}{step}-{os.getpid()}"
        needed = SLACK + sum(t.numel() * t.element_size() for part in files.values() for t in part.values())
        try:
            self._phase("stage")
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            stage.mkdir()
            self._phase("write")
            hashes = {}
            for name, tensors in files.items():
                save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, stage / name)
                hashes[name] = digest_of(stage / name)
            text = _seal({**state, "format": FORMAT, "step": step, "files": hashes})
            (stage / STATE).write_text(text, encoding="utf-8")
            self._phase("flush")
            for entry in stage.iterdir():
                flush_file(entry)
            flush_folder(stage)
            self._phase("rename")
            if final.exists():
                # a damaged checkpoint of this step that a resumed run writes anew
                self._remove(final)
            os.rename(stage, final)
            flush_folder(self.folder)
            self._phase("pointer")
            self.point("latest", step)
            if best:
                self.point("best", step)
            self._phase("prune")
            self.prune()
        except Exception as error:
            shutil.rmtree(stage, ignore_errors=True)
            if _is_full(error):
                free = shutil.disk_usage(self.folder).free
                raise CheckpointError(
                    f"no space for {final}: it needs {needed:,} bytes, {free:,} are free; "
                    "older checkpoints are untouched"
                ) from error
            if isinstance(error, OSError):
                raise CheckpointError(f"cannot write {final}: {error}") from error
            raise
        return final

    def point(self, name: str, step: int) -> None:
        """Make a pointer (latest or best) name a checkpoint."""
        write_text(self.folder / name, f"step-{step}\n")

    def pointed(self, name: str) -> int | None:
        """The step that a pointer names, if there is one."""
        try:
            text = (self.folder / name).read_text(encoding="utf-8").strip()
        except OSError:
            return None
        return int(text[5:]) if text.startswith("step-") and text[5:].isdigit() else None

    def prune(self) -> None:
        """Remove checkpoints that are neither among the newest nor the best."""
        best = self.pointed("best")
        for step in self.steps()[: -self.keep]:
            if step != best:
                self._remove(self.path(step))

    def _remove(self, path: Path) -> None:
        doomed = path.with_name(f"{STAGE}{path.name}-{os.getpid()}")
        os.rename(path, doomed)
        shutil.rmtree(doomed)

    def sweep(self) -> None:
        """Remove what dead runs left unfinished; only under the lock of the folder."""
        for entry in self.folder.iterdir():
            if entry.name.startswith(STAGE):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.startswith(
                (".latest-", ".best-", ".config.yaml-", ".run.json-", ".metrics.jsonl-")
            ):
                entry.unlink(missing_ok=True)

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; damaged ones are passed over with a warning."""
        for step in reversed(self.steps()):
            try:
                return verify(self.path(step))
            except CheckpointError as error:
                self._warn(f"{error}; trying the checkpoint before it")
        return None

    def best(self) -> Checkpoint | None:
        """The best checkpoint, or the newest if there is no whole best one."""
        step = self.pointed("best")
        if step is not None:
            try:
                return verify(self.path(step))
            except CheckpointError as error:
                self._warn(f"{error}; taking the newest checkpoint instead of the best")
        return self.newest()


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # safetensors reports the same as an error of its own
    return "No space left" in str(error) or "os error 28" in str(error)


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, whole on every process, each shared one once."""
    return {name: whole(value.detach()) for name, value in _own_tensors(model).items()}


def _own_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    seen: set[int] = set()
    tensors = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value
    return tensors


def load_model_tensors(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model; every one must be there and fit."""
    own = _own_tensors(model)
    if missing := sorted(own.keys() - tensors.keys()):
        raise CheckpointError(f"the checkpoint lacks {missing[0]} (and {len(missing) - 1} more)")
    if unknown := sorted(tensors.keys() - own.keys()):
        raise CheckpointError(f"the model has no {unknown[0]} (and {len(unknown) - 1} more)")
    for name, value in tensors.items():
        if own[name].shape != value.shape:
            raise CheckpointError(
                f"{name} must have shape {tuple(own[name].shape)}, the checkpoint has {tuple(value.shape)}"
            )
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(like(value, own[name]))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimizer remembers, as `parameter/slot`."""
    tensors = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for slot, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{slot}"] = whole(value)
    return tensors


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimizer its memory back."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, slot = key.rpartition("/")
        by_name.setdefault(name, {})[slot] = value
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            slots = by_name.pop(name, {})
            # the optimizer counts on the CPU; its averages are laid out like their parameter
            state = {
                slot: value if slot == "step" else like(value, parameter) for slot, value in slots.items()
            }
            if state:
                optimizer.state[parameter] = state
    if by_name:
        raise CheckpointError(f"the optimizer has no parameter {sorted(by_name)[0]}")


def whole(value: Tensor) -> Tensor:
    """A tensor that may be spread over processes, in one piece; every process must call this."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def like(value: Tensor, target: Tensor) -> Tensor:
    """A whole tensor on the device of another, spread over processes as that one is."""
    if hasattr(target, "full_tensor"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(target, DTensor)
        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    return value.to(target.device)
