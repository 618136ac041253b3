"""Exported models in onnxruntime: loading with checks, states, and the comparison with the model they came from.

model = OnnxModel("folder/step.onnx")
logits, active, state = model.step(tokens, model.start(batch=1))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from seqboat.core.checks import require
from seqboat.data.files import digest_of, read_json
from seqboat.models.heads import LanguageModel, Matcher
from seqboat.onnx.export import FORMAT

TYPES = {"float": np.float32, "int": np.int64}
State = dict[str, NDArray[Any]]


class Step(NamedTuple):
    """What one token of every sequence gives."""

    logits: NDArray[Any]
    """(batch, vocab)"""
    active: NDArray[Any] | None
    """(batch, layers, modules) bool; None for models without modules"""
    state: State


class OnnxModel:
    """An exported file, checked and ready to run.

    Args:
        path: of the file.
        threads: of onnxruntime.
    """

    def __init__(self, path: Path | str, threads: int = 1) -> None:
        self.path = Path(path)
        require(self.path.is_file(), f"{self.path} is not a file")
        check_sum(self.path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # what goes wrong is raised
        try:
            self.session = onnxruntime.InferenceSession(
                str(self.path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the library has a class for every kind of damage
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{self.path} is not a whole ONNX file: {reason}") from error
        self.about: dict[str, str] = dict(self.session.get_modelmeta().custom_metadata_map)
        require(self.about.get("format") == FORMAT, f"{self.path} was not written by `seqboat export-onnx`")
        self.form = self.about["form"]
        self.state_parts: list[dict[str, Any]] = json.loads(self.about.get("state", "[]"))
        self.names = [output.name for output in self.session.get_outputs()]

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """All outputs by name."""
        return dict(zip(self.names, self.session.run(None, dict(inputs)), strict=True))

    def start(self, batch: int = 1) -> State:
        """The state before the first token."""
        return {
            part["name"]: np.zeros((batch, *part["shape"]), TYPES[part["type"]]) for part in self.state_parts
        }

    def check_state(self, state: Mapping[str, NDArray[Any]], batch: int) -> None:
        """Refuse a state that is not of this model, naming what differs."""
        if len(state) != len(self.state_parts):
            ours, theirs = _layers(self.start()), _layers(state)
            require(ours == theirs, f"state of another model: it has {theirs} layers, the model {ours}")
        for part in self.state_parts:
            name, shape, dtype = part["name"], (batch, *part["shape"]), TYPES[part["type"]]
            require(name in state, f"state of another model: it has no part {name}")
            got = state[name]
            if got.shape != shape or got.dtype != dtype:
                raise ValueError(
                    f"state of another model: {name} must be {np.dtype(dtype)} of shape {shape}, "
                    f"got {got.dtype} of shape {got.shape}"
                )

    def step(self, tokens: NDArray[Any], state: State) -> Step:
        """Read one token of each sequence, (batch,)."""
        require(self.form == "step", f"{self.path} reads whole sequences, not single tokens")
        self.check_state(state, len(tokens))
        given = {f"state.{part['name']}": state[part["name"]] for part in self.state_parts}
        found = self.run({"tokens": tokens, **given})
        return Step(found["logits"], found.get("active"), next_state(found))


def next_state(outputs: Mapping[str, NDArray[Any]]) -> State:
    """The state among the outputs of either form."""
    return {name.removeprefix("next."): part for name, part in outputs.items() if name.startswith("next.")}


def _layers(state: Mapping[str, Any]) -> int:
    return len({name.split(".")[0] for name in state if "." in name})


def check_sum(path: Path) -> None:
    """Refuse a file whose content is not what model.json beside it says; without one there is nothing to compare."""
    about = path.with_name("model.json")
    if not about.is_file():
        return
    found = read_json(about)
    listed = found.get("files", {}).get(path.name) if isinstance(found, dict) else None
    if not isinstance(listed, dict):
        return
    size = path.stat().st_size
    require(
        size == listed.get("bytes"),
        f"{path} is damaged: it has {size:,} bytes, but {about.name} says {listed.get('bytes')}",
    )
    require(
        digest_of(path) == listed.get("sha256"), f"{path} is damaged: its checksum is not that of {about}"
    )


class Difference(NamedTuple):
    """How far a file is from the model that it was made from."""

    worst: float
    """largest difference of two scores, where all decisions are the same"""
    decisions: int
    """that were compared"""
    flipped: int
    """of them, how many differ"""


@torch.no_grad()
def compare(file: OnnxModel, model: Any, tokens: int = 64, seed: int = 0) -> Difference:
    """Run a file and the model that it came from on random inputs.

    Args:
        file: in either form.
        model: of the core.
        tokens: steps, or the longest of a batch of sequences.
        seed: of the inputs.
    """
    random = np.random.default_rng(seed)
    config = model.backbone.config
    shape = () if config.vocab is not None else (config.channels,)

    def draw(*size: int) -> NDArray[Any]:
        if config.vocab is None:
            return random.normal(size=(*size, *shape)).astype(np.float32)
        return random.integers(0, config.vocab, size)

    if file.form == "step":
        assert isinstance(model, LanguageModel)
        ours, theirs, total = file.start(2), model.init_state(2), Difference(0.0, 0, 0)
        for _ in range(tokens):
            ids = draw(2)
            got, want = file.step(ids, ours), model.step(torch.from_numpy(ids), theirs)
            ours, theirs = got.state, want.state
            found = _differ(got.logits, got.active, want.logits, want.routings, 1)
            total = Difference(max(total.worst, found.worst), *np.add(total[1:], found[1:]).tolist())
            if found.flipped:
                break  # states differ from here on
        return total
    lengths = np.array([tokens, max(1, tokens // 2), max(1, tokens // 3)])
    names = ("first", "second") if isinstance(model, Matcher) else ("tokens" if not shape else "values",)
    inputs = [draw(len(lengths), tokens) for _ in names]
    given = dict(zip(names, inputs, strict=True))
    mask = torch.arange(tokens) < torch.from_numpy(lengths)[:, None]
    for name in names:
        given[f"{name}_lengths" if len(names) > 1 else "lengths"] = lengths
    outputs = file.run(given)
    want = model(*map(torch.from_numpy, inputs), *[mask] * len(names))
    logits, wanted = outputs["logits"], want.logits
    if wanted.dim() == 3:
        logits, wanted = logits[mask.numpy()], wanted[mask]
    active = [outputs[name] for name in outputs if name.endswith("active")]
    return _differ(logits, np.concatenate(active, 2) if active else None, wanted, want.routings, 2)


def _differ(
    logits: NDArray[Any], active: NDArray[Any] | None, wanted: torch.Tensor, routings: Any, axis: int
) -> Difference:
    decided = [routing.active for routing in routings if routing is not None]
    flipped = count = 0
    if active is not None:
        expected = torch.stack(decided, axis).numpy()
        flipped, count = int((active != expected).sum()), active.size
    worst = 0.0 if flipped else float(np.abs(logits - wanted.numpy()).max(initial=0.0))
    return Difference(worst, count, flipped)
