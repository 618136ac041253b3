"""What a language model has read so far, ready to continue: read in chunks, saved to a file, resumed.

    session = start(model, batch=2)
    session = read(model, session, [b"one text", b"another, longer text"])     # in chunks, in bounded memory
    save_session("state.safetensors", session, model)
    session = load_session("state.safetensors", model)                         # refuses another model's

A session is a value of constant size (section 3.3 of the paper: the state of a layer is that of its state-space
model and the last `window` activated tokens), unless a layer of the model attends to everything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from seqboat.core.checks import check_positive, require
from seqboat.core.state import check_state, rebuild, tensors
from seqboat.data.files import replacing
from seqboat.models.backbone import BackboneState
from seqboat.models.heads import LanguageModel
from seqboat.training.checkpoint import model_tensors

CHUNK = 4096
"""Tokens of each sequence that are read at once."""
TAIL = 3
"""Last tokens that a session keeps: the most that a character of UTF-8 can lack its end by."""
FORMAT = "seqboat-state-2"
"""What a state file calls itself; another one is refused."""


class Session(NamedTuple):
    """What a model has read, one text per sequence of the batch."""

    state: BackboneState
    """after the last token of each sequence"""
    logits: Tensor
    """(batch, vocab): scores of the next token; zeros, all alike, before the first"""
    used: Tensor
    """(batch, vocab): True for tokens that have occurred"""
    tail: Tensor
    """(batch, TAIL): the last tokens, -1 where there were none"""

    @property
    def batch(self) -> int:
        """How many texts there are."""
        return self.logits.shape[0]


def start(model: LanguageModel, batch: int = 1) -> Session:
    """Nothing read yet."""
    check_positive("batch", batch)
    weight = model.backbone.embedding.weight
    assert isinstance(weight, Tensor)
    vocab = len(weight)
    return Session(
        model.init_state(batch),
        torch.zeros(batch, vocab, dtype=weight.dtype, device=weight.device),
        torch.zeros(batch, vocab, dtype=torch.bool, device=weight.device),
        torch.full((batch, TAIL), -1, dtype=torch.int64, device=weight.device),
    )


@torch.no_grad()
def read(
    model: LanguageModel,
    session: Session,
    rows: Sequence[bytes | NDArray[Any]],
    *,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> Session:
    """Read on. Memory does not depend on the lengths of the texts, only on the chunk.

    Args:
        model: in eval mode.
        session: what was read before.
        rows: the next tokens of each text, as bytes or arrays of ids; they may differ in length, also be empty.
        chunk: tokens of each sequence that are read at once; the result does not depend on it.
        progress: called with the tokens done and all, of the longest text.
    """
    check_positive("chunk", chunk)
    require(
        len(rows) == session.batch,
        f"rows must hold one text per sequence of the session, {session.batch}, got {len(rows)}",
    )
    vocab, device = session.logits.shape[1], session.logits.device
    texts = [_as_ids(row, vocab, f"rows[{i}]") for i, row in enumerate(rows)]
    longest = max(len(text) for text in texts)
    used, tail = session.used.cpu().numpy().copy(), session.tail.cpu().numpy().copy()
    state, logits = session.state, session.logits
    for begin in range(0, longest, chunk):
        parts = [text[begin : begin + chunk] for text in texts]
        sizes = np.array([len(part) for part in parts])
        tokens = np.zeros((len(parts), sizes.max()), np.int64)
        for row, part in enumerate(parts):
            tokens[row, : len(part)] = part
            used[row, part] = True
            tail[row] = np.concatenate([tail[row], part[-TAIL:]])[-TAIL:]
        mask = None
        if sizes.min() < sizes.max():
            mask = torch.from_numpy(np.arange(sizes.max()) < sizes[:, None]).to(device)
        out = model(torch.from_numpy(tokens).to(device), mask, state)
        state = out.state
        last = torch.from_numpy(np.maximum(sizes - 1, 0)).to(device)
        fresh = out.logits[torch.arange(len(parts), device=device), last]
        logits = torch.where(torch.from_numpy(sizes > 0).to(device)[:, None], fresh, logits)
        if progress is not None:
            progress(min(begin + chunk, longest), longest)
    return Session(state, logits, torch.from_numpy(used).to(device), torch.from_numpy(tail).to(device))


def _as_ids(row: bytes | NDArray[Any], vocab: int, name: str) -> NDArray[Any]:
    ids = np.frombuffer(row, np.uint8) if isinstance(row, bytes) else row
    require(
        isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu",
        f"{name} must be bytes or a one-dimensional array of token ids, got {type(row).__name__}",
    )
    if len(ids):
        low, high = int(ids.min()), int(ids.max())
        require(
            low >= 0 and high < vocab,
            f"{name} must hold token ids in 0..{vocab - 1}, got {low if low < 0 else high}",
        )
    return ids


# files


def fingerprint(model: LanguageModel) -> str:
    """What tells a model from every other one: a hash of its settings and of all its weights."""
    digest = hashlib.sha256(_spell(model.backbone.config).encode())
    _hash_tensors(digest, model_tensors(model))
    return digest.hexdigest()


def _spell(config: Any) -> str:
    """Settings as text, without those at their defaults: a setting that a later version adds changes nothing."""
    if not dataclasses.is_dataclass(config):
        return repr(config)
    parts = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # how weights began is no setting of a trained model
        if value != field.default and field.name != "init":
            parts.append(f"{field.name}={_spell(value)}")
    return f"{type(config).__name__}({', '.join(parts)})"


def _hash_tensors(digest: Any, parts: Mapping[str, Tensor]) -> None:
    for name, value in sorted(parts.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _seal(owner: str, parts: Mapping[str, Tensor]) -> dict[str, str]:
    """What a state file says about itself, with a hash by which a changed byte is found."""
    digest = hashlib.sha256(f"{FORMAT} {owner}".encode())
    _hash_tensors(digest, parts)
    return {"format": FORMAT, "model": owner, "sha256": digest.hexdigest()}


def save_session(path: Path | str, session: Session, model: LanguageModel) -> None:
    """Write a session to a file that only this model can continue from; whole or not at all."""
    path = Path(path)
    check_state_path(path)
    parts = {name: part.detach().cpu().contiguous().clone() for name, part in tensors(session, "session")}
    with replacing(path) as stage:
        save_file(parts, stage, _seal(fingerprint(model), parts))


def check_state_path(path: Path) -> None:
    """Refuse a place where no file can be written, before work is done for it."""
    require(not path.is_dir(), f"{path} is a folder: a state is written to a file")
    require(path.parent.is_dir(), f"{path}: the folder {path.parent} does not exist")
    require(os.access(path.parent, os.W_OK), f"{path}: the folder {path.parent} cannot be written to")


def load_session(path: Path | str, model: LanguageModel) -> Session:
    """The session in a file, on the model's device.

    Raises:
        ValueError: naming the file, if it is none, is damaged, or belongs to another model.
    """
    path = Path(path)
    require(path.is_file(), f"{path} is not a file: expected a state that was saved before")
    try:
        with safe_open(path, framework="pt") as file:
            said = file.metadata() or {}
            # copied, because a tensor in a mapped file begins anywhere: complex states need whole pairs
            parts = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dictionary
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a state: {error}") from error
    require(
        said.get("format") == FORMAT,
        f"{path} is not a state of this version: format is {said.get('format')!r}, expected {FORMAT!r}",
    )
    require(
        said == _seal(said.get("model", ""), parts),
        f"{path} does not match its own sha256: the file was changed or damaged",
    )
    require(
        said["model"] == fingerprint(model),
        f"{path} is the state of another model: only the model that wrote it can continue from it",
    )
    try:
        return _rebuild(parts, model)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{path} does not fit this model: {error}") from error


def _rebuild(parts: Mapping[str, Tensor], model: LanguageModel) -> Session:
    """A session from its tensors, all of which must be what reading a text could have left."""
    logits = parts.get("session.logits")
    vocab = model.backbone.config.vocab
    require(
        logits is not None and logits.dim() == 2 and logits.shape[0] > 0 and logits.shape[1] == vocab,
        f"logits must have shape (batch, {vocab})",
    )
    assert logits is not None
    like = start(model, len(logits))
    device = like.logits.device
    session: Session = rebuild(like, {name: part.to(device) for name, part in parts.items()}, "session")
    check_state(session, like, device, "model")
    expected = dict(tensors(like, "session"))
    for name, part in tensors(session, "session"):
        fresh = expected[name]
        if (
            not part.is_floating_point()
            and not part.is_complex()
            and part.dtype != torch.bool
            and part.numel()
        ):
            # counters start at zero and places without a token are -1: nothing ever goes below its first value
            least = min(0, int(fresh.min())) if fresh.numel() else 0
            require(int(part.min()) >= least, f"{name} must be at least {least}, got {int(part.min())}")
    require(int(session.tail.max()) < len(session.used[0]), f"tail must hold token ids below {vocab}")
    return session
