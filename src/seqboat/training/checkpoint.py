"""Checkpoints that are complete or absent.

    run/
      lock                     pid and host of the run that writes here
      latest, best             names of checkpoints
      step-1000/
        model.safetensors      weights
        optim.safetensors      averages of the optimizer
        state.json             step, progress, configuration, versions, sha256 of every file

While a model is sharded over processes, its checkpoints have `shard-*.safetensors` in place of the first two, written
by all of them; the run's last act is to turn its best and its newest checkpoint into whole ones.

A checkpoint is written to `.stage-1000-XXXX`, every file and the folder are flushed to disk, the folder is
renamed, the pointers are replaced, and only then are old checkpoints removed (renamed first, so that no half of one
is ever called `step-N`). Whatever moment a process dies at, the newest finished checkpoint stays. Nothing is
pickled: a file can hold numbers and words, never code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from seqboat.console import printable
from seqboat.core.checks import require, short
from seqboat.data.files import digest_of, flush_file, flush_folder, open_regular, write_text
from seqboat.export.int8 import widen
from seqboat.plugins import MissingPlugin
from seqboat.training.config import RunConfig
from seqboat.training.parallel import gather_shards, shard_like
from seqboat.training.settings_io import from_dict

FORMAT = 1
"""Version of the layout above; another one is refused."""
MODEL, OPTIM, STATE = "model.safetensors", "optim.safetensors", "state.json"
STAGE = ".stage-"
PHASES = ("stage", "write", "flush", "rename", "pointer", "prune")
"""What saving does, in order; `on_phase` is called before each."""
OLD = ".old-"
"""Prefix of a checkpoint that is being replaced by a new one of the same step."""
DAMAGED = "damaged-"
"""Prefix of checkpoints that were moved aside."""
MAX_STATE = 1 << 24
"""Bytes of a state.json beyond which it is refused."""
SLACK = 1 << 20
"""Bytes beyond the tensors that a checkpoint may take."""


class CheckpointError(Exception):
    """A checkpoint cannot be written or read: the message names the file and the reason."""


class OtherFormat(CheckpointError):
    """A checkpoint of another version: never passed over, because what follows would overwrite it."""


class Checkpoint(NamedTuple):
    """A complete checkpoint."""

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
        except MissingPlugin as error:
            raise MissingPlugin(f"{self.path}: {error}") from error
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{self.path}: its configuration does not fit: {error}") from error

    @property
    def sharded(self) -> bool:
        """Whether all processes of its run wrote a part of it."""
        return MODEL not in self.state["files"]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one of its files, on the CPU; those of shards are put together."""
        try:
            if name in (MODEL, OPTIM) and self.sharded:
                return _read_shards(self.path, f"{name}/")
            return load_file(self.path / name)
        except (
            OSError,
            RuntimeError,
            SafetensorError,
            ValueError,
            LookupError,
            TypeError,
            AssertionError,
        ) as error:
            # a RuntimeError: the file vanished while it was opened
            raise CheckpointError(f"{self.path / name} cannot be read: {error}") from error


def write_shards(folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write this process's parts of sharded tensors; every process must call this.

    Args:
        folder: that all processes see.
        files: tensors by the name of the file that they belong to, and by their own.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    parts = {f"{file}/{name}": tensor for file, part in files.items() for name, tensor in part.items()}
    # safetensors: the other format of torch's shards begins with a pickle
    dcp.save(parts, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def _read_shards(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The whole tensors of a sharded checkpoint whose names have this prefix, which is taken off."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = HuggingFaceStorageReader(str(folder))
    parts = {}
    for name, about in reader.read_metadata().state_dict_metadata.items():
        if name.startswith(prefix) and isinstance(about, TensorStorageMetadata):
            # before memory is taken for it
            stored = sum(chunk.sizes.numel() for chunk in about.chunks)
            require(about.size.numel() == stored, f"the shards of {name} do not make up its shape")
            parts[name] = torch.empty(about.size, dtype=about.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(parts, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in parts.items()}


def _seal(state: Mapping[str, Any]) -> str:
    """A state as JSON text that holds its own hash, so that any changed byte is found."""
    plain = json.dumps(state, indent=1, sort_keys=True)
    digest = hashlib.sha256(plain.encode()).hexdigest()
    return json.dumps({**state, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def _unseal(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            content = file.read(MAX_STATE + 1)
        require(len(content) <= MAX_STATE, f"it is too large: more than {MAX_STATE:,} bytes")
        text = content.decode("utf-8")
        state = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
    if not isinstance(state, dict) or "sha256" not in state:
        raise CheckpointError(f"{path} is not the state of a checkpoint")
    plain = {key: value for key, value in state.items() if key != "sha256"}
    # the text is compared too: the same values in other bytes are a changed file
    if _seal(plain) != text:
        raise CheckpointError(f"{path} does not match its own sha256: the file was changed or damaged")
    if plain.get("format") != FORMAT:
        raise OtherFormat(
            f"{path} has format {short(plain.get('format'))}, this version reads {FORMAT}: "
            "another version of seqboat wrote it"
        )
    _check_state(plain, path)
    return plain


def _check_state(state: dict[str, Any], path: Path) -> None:
    """Refuse a sealed state that lacks what every checkpoint has."""
    for key, kind in (("files", dict), ("step", int)):
        if not isinstance(state.get(key), kind):
            raise CheckpointError(f"{path} has no valid {key!r}")
    for key in ("config", "progress", "versions"):
        if not isinstance(state.get(key, {}), dict):
            raise CheckpointError(f"{path} has no valid {key!r}")
    if path.parent.name.startswith("step-") and path.parent.name != f"step-{state['step']}":
        raise CheckpointError(f"{path} is of step {state['step']}, but its folder is {path.parent.name}")


def verify(path: Path) -> Checkpoint:
    """Read the state of a checkpoint and check every byte of it; CheckpointError names what is wrong."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint folder")
    state = _unseal(path / STATE)
    expected = state["files"]
    try:
        found = {entry.name for entry in path.iterdir()} - {STATE}
        for name in sorted(expected.keys() - found):
            raise CheckpointError(f"{path / name} is missing")
        for name in sorted(found - expected.keys()):
            raise CheckpointError(f"{path / name} does not belong to the checkpoint")
        for name, digest in sorted(expected.items()):
            if digest_of(path / name) != digest:
                raise CheckpointError(
                    f"{path / name} does not match its sha256: the file was changed or damaged"
                )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return Checkpoint(path, state)


def _warn(message: str) -> None:
    warnings.warn(printable(message), stacklevel=3)


class CheckpointStore:
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
        self._whole: set[int] = set()
        self._best: int | None = None

    def steps(self) -> list[int]:
        """Steps of the checkpoints in the folder, oldest first."""
        names = [entry.name for entry in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(
            int(n.removeprefix("step-")) for n in names if n.startswith("step-") and n[5:].isdigit()
        )

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def stage(self, step: int) -> Path:
        """A new folder to write a checkpoint to."""
        try:
            made = Path(tempfile.mkdtemp(prefix=f"{STAGE}{step}-", dir=self.folder))
            made.chmod(self.folder.stat().st_mode & 0o777)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path(step)}: {error}") from error
        return made

    def save(
        self,
        step: int,
        files: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        best: bool = False,
        stage: Path | None = None,
    ) -> Path:
        """Write a checkpoint.

        Args:
            step: steps done.
            files: tensors by file name and name.
            state: further content of state.json.
            best: whether it is the best so far.
            stage: from `stage`, if other files of the checkpoint are there already.
        """
        final = self.path(step)
        needed = SLACK + sum(t.numel() * t.element_size() for part in files.values() for t in part.values())
        try:
            self._phase("stage")
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            stage = stage or self.stage(step)
            self._phase("write")
            for name, tensors in files.items():
                save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, stage / name)
            hashes = {entry.name: digest_of(entry) for entry in stage.iterdir()}
            text = _seal({**state, "format": FORMAT, "step": step, "files": hashes})
            (stage / STATE).write_text(text, encoding="utf-8")
            self._phase("flush")
            for entry in stage.iterdir():
                flush_file(entry)
            flush_folder(stage)
            self._phase("rename")
            old = self.folder / f"{OLD}{final.name}-{secrets.token_hex(4)}"
            if final.exists():
                os.rename(final, old)  # put back by `sweep` if this process dies here
            os.rename(stage, final)
            flush_folder(self.folder)
            shutil.rmtree(old, ignore_errors=True)
            self._whole.add(step)
            self._phase("pointer")
            self.point("latest", step)
            if best:
                self.point("best", step)
            self._phase("prune")
            self.prune()
        except Exception as error:
            if stage is not None:
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

    def consolidate(self) -> None:
        """Turn the best and the newest checkpoint into whole ones if they are sharded."""
        newest, best = self.steps()[-1], self.pointed("best")
        for step in dict.fromkeys((best, newest)):
            found = None if step is None else verify(self.path(step))
            if found is not None and found.sharded:
                others = [name for name in found.state["files"] if not name.startswith("shard-")]
                files = {name: found.tensors(name) for name in (MODEL, OPTIM, *others)}
                state = {key: value for key, value in found.state.items() if key != "files"}
                self.save(found.step, files, state, best=step == best)

    def point(self, name: str, step: int) -> None:
        """Make a pointer (latest or best) name a checkpoint."""
        if name == "best":
            self._best = step
        write_text(self.folder / name, f"step-{step}\n")

    def pointed(self, name: str) -> int | None:
        """The step that a pointer names, if there is one."""
        try:
            with open_regular(self.folder / name) as file:
                text = file.read(64).decode("utf-8").strip()
        except (OSError, ValueError):
            return None
        return int(text[5:]) if text.startswith("step-") and text[5:].isdigit() else None

    def prune(self) -> None:
        """Remove old checkpoints: only whole ones, after as many newer whole ones as are kept, and never the best."""
        kept = {self._best, self.pointed("best"), self.pointed("latest")}
        if len(self._whole) > self.keep:  # all are read again: what was damaged since takes no place
            self._whole = {step for step in self._whole if self._still_whole(step)}
        for step in sorted(self._whole)[: -self.keep]:
            if step not in kept:
                self._remove(self.path(step))
                self._whole.remove(step)

    def _still_whole(self, step: int) -> bool:
        try:
            verify(self.path(step))
        except CheckpointError as error:
            if self.path(step).exists():
                self._warn(f"{error}; older checkpoints are kept in its place")
            return False
        return True

    def _remove(self, path: Path) -> None:
        doomed = path.with_name(f"{STAGE}{path.name}-{secrets.token_hex(4)}")
        os.rename(path, doomed)
        shutil.rmtree(doomed)

    def sweep(self) -> None:
        """Remove what dead runs left unfinished; only under the lock of the folder."""
        for entry in self.folder.iterdir():
            if entry.name.startswith(OLD):
                final = self.folder / entry.name.removeprefix(OLD).rpartition("-")[0]
                if final.exists():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    os.rename(entry, final)
            elif entry.name.startswith(STAGE):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.startswith(
                (".latest-", ".best-", ".config.json-", ".run.json-", ".metrics.jsonl-")
            ):
                entry.unlink(missing_ok=True)

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; damaged ones are passed over with a warning."""
        passed: set[int] = set()
        while steps := [step for step in self.steps() if step not in passed]:
            try:
                return verify(self.path(steps[-1]))
            except OtherFormat:
                raise
            except CheckpointError as error:
                passed.add(steps[-1])
                if self.path(steps[-1]).exists():  # else the run removed it in the meantime
                    self._warn(f"{error}; trying the checkpoint before it")
        return None

    def recover(self) -> Checkpoint | None:
        """The newest whole checkpoint, for a run that will write here; None if there are no checkpoints at all.

        Damaged checkpoints are moved aside, so that nothing ever counts them or overwrites them. Only under the lock
        of the folder.

        Raises:
            CheckpointError: if there are checkpoints and none of them can be read; nothing is moved then.
        """
        troubles: dict[int, CheckpointError] = {}
        newest: Checkpoint | None = None
        for step in reversed(self.steps()):
            try:
                found = verify(self.path(step))
            except OtherFormat:
                raise
            except CheckpointError as error:
                troubles[step] = error
            else:
                self._whole.add(step)
                newest = newest or found
        aside = sorted(entry.name for entry in self.folder.glob(f"{DAMAGED}step-*"))
        if newest is None and (troubles or aside):
            reason = str(next(iter(troubles.values()))) if troubles else f"{aside[-1]} was moved aside"
            raise CheckpointError(
                f"{self.folder} has {len(troubles) + len(aside)} checkpoints and none can be read ({reason}); "
                "restore one from a copy, or start again in another folder (--out)"
            )
        for step, trouble in troubles.items():
            target = self._free_name(f"{DAMAGED}step-{step}")
            os.rename(self.path(step), target)
            self._warn(f"{trouble}; moved aside to {target.name}")
        return newest

    def _free_name(self, name: str) -> Path:
        path, number = self.folder / name, 1
        while os.path.lexists(path):
            number += 1
            path = self.folder / f"{name}-{number}"
        return path

    def best(self) -> Checkpoint | None:
        """The best checkpoint, or the newest if there is no complete best one."""
        step = self.pointed("best")
        if step is not None:
            try:
                return verify(self.path(step))
            except OtherFormat:
                raise
            except CheckpointError as error:
                again = self.pointed("best")
                if again is not None and again != step:  # a run replaced it in the meantime
                    return self.best()
                self._warn(f"{error}; taking the newest checkpoint instead of the best")
        return self.newest()


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # safetensors reports the same with its own error type
    return "No space left" in str(error) or "os error 28" in str(error)


def model_tensors(model: torch.nn.Module, whole: bool = True) -> dict[str, Tensor]:
    """Parameters and buffers by name, whole on every process or as they are sharded, each shared one once."""
    found = {name: value.detach() for name, value in _own_tensors(model).items()}
    return {name: gather_shards(value) for name, value in found.items()} if whole else found


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
            own[name].copy_(shard_like(value, own[name]))


def load_start(model: torch.nn.Module, run: Path | str) -> None:
    """Give the backbone of a fresh model the weights of a run.

    Args:
        model: with the same backbone.
        run: the folder of the run, whose best checkpoint is taken, or one of its checkpoints.
    """
    path = Path(run)
    if path.name.startswith("step-"):
        found: Checkpoint | None = verify(path)
    else:
        store = CheckpointStore(path)
        found = store.best() or store.newest()
    if found is None:
        raise ValueError(f"{run} contains no complete checkpoint to start from")
    tensors = widen(found.tensors(MODEL))
    with torch.no_grad():
        for name, own in _own_tensors(model).items():
            if not name.startswith("backbone."):
                continue
            if name not in tensors or tensors[name].shape != own.shape:
                there = tuple(tensors[name].shape) if name in tensors else "nothing"
                raise ValueError(f"{run}: {name} must have shape {tuple(own.shape)}, it has {there}")
            own.copy_(tensors[name])


def optimizer_tensors(optimizer: torch.optim.Optimizer, whole: bool = True) -> dict[str, Tensor]:
    """What an optimizer remembers, as `parameter/slot`."""
    tensors = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for slot, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{slot}"] = gather_shards(value) if whole else value
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
                slot: value if slot == "step" else shard_like(value, parameter)
                for slot, value in slots.items()
            }
            if state:
                optimizer.state[parameter] = state
    if by_name:
        raise CheckpointError(f"the optimizer has no parameter {sorted(by_name)[0]}")
