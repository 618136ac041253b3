"""Models as ONNX files, written by torch, and their use in onnxruntime.

    step       (batch,) tokens and a state to the scores of the next token and the state after it
    sequence   (batch, time) tokens or values and their lengths to scores; language models also give the state after
               the last token, with which a step continues

`torch.onnx.export` writes the graph of the model. Our own operators stand in it in ordinary ones, for any number of
tokens: `docs/deploy.md` lists the names of inputs and outputs.

>>> model = OnnxModel("folder/step.onnx")  # doctest: +SKIP
>>> logits, active, state = model.step(tokens, model.start(batch=1))  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxscript import optimizer
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan as carry_along
from torch.export import Dim
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree

from seqboat.core.checks import check_choice, require
from seqboat.data.files import digest_of, read_json, write_json
from seqboat.models.heads import LanguageModel, Matcher, check_exportable
from seqboat.ops.attention import FAR, FUNCTIONS, HIDDEN

FORMAT = "seqboat 2"
"""Of the metadata."""
FORMS = ("step", "sequence")
OPSETS = range(18, 24)
"""Versions of the operators that torch writes and onnxruntime runs."""
LARGEST = (1 << 31) - 1
"""Bytes that an ONNX file can have."""
GROUP = 64
"""Queries that attend side by side."""
TYPES = {"float": np.float32, "int": np.int64}
State = dict[str, NDArray[Any]]


# our operators in ordinary ones


def _carry(u: Tensor, decay: Tensor, start: Tensor | None, reverse: bool) -> Tensor:
    """(batch, blocks, dim, states): the states that enter each block, as one Scan."""
    first = u.new_zeros(u[:, 0].shape) if start is None else start

    def step(state: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        return decay * state + added, state.clone()

    _, states = carry_along(step, first, u.transpose(0, 1).contiguous(), reverse=reverse)
    return states.transpose(0, 1)


def _block_scan(
    x: Tensor,
    mix: Tensor,
    enter: Tensor,
    leave: Tensor,
    decay: Tensor,
    start: Tensor | None,
    bidirectional: bool,
) -> tuple[Tensor, Tensor]:
    batch, time, dim = x.shape
    block, width = enter.shape[1:]
    # one block more than is needed: then no number of tokens is special
    blocks = time // block + 1
    x = torch.cat([x, x.new_zeros(batch, blocks * block - time, dim)], dim=1)
    inputs = x.reshape(batch, blocks, block, dim).permute(3, 0, 1, 2).reshape(dim, batch * blocks, block)
    u = torch.bmm(inputs, enter).reshape(dim, batch, blocks, width).permute(1, 2, 0, 3)
    if bidirectional:
        ahead, behind = decay.chunk(2, dim=-1)
        one, other = u.chunk(2, dim=-1)
        states = torch.cat([_carry(one, ahead, None, False), _carry(other, behind, None, True)], dim=-1)
    else:
        states = _carry(u, decay, start, False)
    entered = states.permute(2, 0, 1, 3).reshape(dim, batch * blocks, width)
    y = torch.bmm(inputs, mix) + torch.bmm(entered, leave)
    y = y.reshape(dim, batch, blocks * block)[:, :, :time]
    return y, states[:, : (time + block - 1) // block].flatten(0, 1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Tensor,
    position: Tensor | None,
    table: Tensor | None,
    left: int,
    right: int,
    longest: int,
    function: str,
    *dropout: Any,
) -> Tensor:
    """Groups of queries, and the keys around each, found by their indices."""
    tokens = q.shape[0]
    groups = (tokens + GROUP - 1) // GROUP + 1
    query = torch.arange(groups * GROUP).view(groups, GROUP)
    if max(left, right) >= FAR:  # every token, whatever its group
        key = torch.arange(tokens + 1).expand(groups, -1)
    else:
        key = torch.arange(groups)[:, None] * GROUP + torch.arange(-left, GROUP + right)

    def at(x: Tensor, places: Tensor) -> Tensor:
        # one row more: never an empty array
        spare = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return spare[places.clamp(min=0).clamp(max=tokens)]

    def minus(x: Tensor) -> Tensor:
        return at(x, key)[:, None, :] - at(x, query)[:, :, None]

    step = key[:, None, :] - query[:, :, None]
    seen = (step >= -left) & (step <= right) & ((key >= 0) & (key < tokens))[:, None, :]
    scores = torch.bmm(at(q, query), at(k, key).transpose(1, 2))
    if table is not None:
        far = (table.shape[0] - 1) // 2
        distance = step if position is None else minus(position)
        scores = scores + table[(distance + far).clamp(0, 2 * far)]
    weights = FUNCTIONS[function].weights(torch.where(seen & (minus(group) == 0), scores, HIDDEN))
    return torch.bmm(weights, at(v, key)).flatten(0, 1)[:tokens]


ORDINARY: dict[str, Callable[..., Any]] = {
    "seqboat::block_scan": _block_scan,
    "seqboat::attend": _attend,
}
"""What stands in a graph for each of our operators."""


class _Ordinary(TorchFunctionMode):
    """Inside, our operators are those of ORDINARY."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name() if isinstance(func, torch._ops.OpOverload) else ""
        return ORDINARY.get(name, func)(*args, **(kwargs or {}))


# models as functions of tensors


def _decisions(routings: Sequence[Any], dim: int) -> dict[str, Tensor]:
    """Which modules each token activated, (..., layers, modules)."""
    active = [routing.active for routing in routings if routing is not None]
    return {"active": torch.stack(active, dim=dim)} if active else {}


def state_tensors(state: Any) -> dict[str, Tensor]:
    """The tensors of a state by name: "seen", and those of layers with the number of the layer."""
    leaves, _ = tree.tree_flatten_with_path(state)
    named = {tree.keystr(path).replace("[", ".").replace("]", ""): leaf for path, leaf in leaves}
    return {
        name.lstrip(".").removeprefix("layers."): leaf for name, leaf in named.items() if leaf is not None
    }


class _Step(nn.Module):
    """One token of every sequence."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        leaves, self.spec = tree.tree_flatten(model.init_state(2))
        self.there = [leaf is not None for leaf in leaves]

    def forward(self, tokens: Tensor, *state: Tensor) -> dict[str, Tensor]:
        parts = iter(state)
        leaves = [next(parts).clone() if there else None for there in self.there]
        with _Ordinary():
            logits, after, routings = self.model.step(tokens, tree.tree_unflatten(leaves, self.spec))
        state_after = {f"next.{name}": part for name, part in state_tensors(after).items()}
        return {"logits": logits, **_decisions(routings, 1), **state_after}


class _Sequence(nn.Module):
    """Whole sequences."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.remembers = isinstance(model, LanguageModel)

    def forward(self, inputs: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        with _Ordinary():
            out = self.model(inputs, torch.arange(inputs.shape[1]) < lengths[:, None])
        after = state_tensors(out.state) if self.remembers else {}
        found = {"logits": out.logits, **_decisions(out.routings, 2)}
        return found | {f"next.{name}": part for name, part in after.items()}


class _Pair(nn.Module):
    """Pairs of whole sequences."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, first: Tensor, first_lengths: Tensor, second: Tensor, second_lengths: Tensor
    ) -> dict[str, Tensor]:
        masks = [
            torch.arange(part.shape[1]) < lengths[:, None]
            for part, lengths in ((first, first_lengths), (second, second_lengths))
        ]
        with _Ordinary():
            logits, routings = self.model(first, second, *masks)
        half = len(routings) // 2
        found = {"logits": logits}
        for name, part in (("first", routings[:half]), ("second", routings[half:])):
            found |= {f"{name}_{key}": value for key, value in _decisions(part, 2).items()}
        return found


def _example(model: Any, form: str) -> tuple[nn.Module, dict[str, Tensor], dict[str, dict[int, Any]]]:
    """A model as a function of tensors, example inputs by name, and which of their sizes are free."""
    config, batch, time = model.backbone.config, 3, 70
    if form == "step":
        state = {f"state.{name}": part for name, part in state_tensors(model.init_state(batch)).items()}
        inputs = {"tokens": torch.zeros(batch, dtype=torch.int64), **state}
        return _Step(model), inputs, {name: {0: Dim.DYNAMIC} for name in inputs}
    whole = torch.zeros(batch, time, dtype=torch.int64)
    if config.vocab is None:
        whole = torch.zeros(batch, time, config.channels)
    lengths = torch.tensor([time, 40, 1])
    if isinstance(model, Matcher):
        names = ("first", "first_lengths", "second", "second_lengths")
        parts = (whole, lengths, whole[:, 1:].clone(), lengths.clone())
        free = {name: {0: Dim.DYNAMIC} if "_" in name else {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in names}
        return _Pair(model), dict(zip(names, parts, strict=True)), free
    name = "values" if config.vocab is None else "tokens"
    free = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, "lengths": {0: Dim.DYNAMIC}}
    return _Sequence(model), {name: whole, "lengths": lengths}, free


# files


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch's exporter says about other libraries and its own old parts."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@torch.no_grad()
def write_form(
    model: Any, form: str, path: Path, facts: Mapping[str, Any], opset: int = OPSETS[0]
) -> dict[str, Any]:
    """Write one form of a model, and return what the file says about itself.

    Args:
        model: a language model, classifier, tagger or matcher of the core, in eval mode.
        form: "step" or "sequence".
        path: of the file.
        facts: what the file should say besides.
        opset: version of the operators.
    """
    check_exportable(model)
    check_choice("form", form, FORMS)
    require(opset in OPSETS, f"opset must be in {OPSETS[0]}..{OPSETS[-1]}, got {opset}")
    kind = type(model).__name__
    require(hasattr(model, "backbone"), f"a {kind} has no ONNX form")
    require(not model.training, "a model in training mode has no ONNX form: call eval()")
    if form == "step":
        require(
            isinstance(model, LanguageModel),
            f"a {kind.lower()} reads whole sequences: choose --form sequence",
        )
        require(
            not model.backbone.grows,
            "the state of a step has a fixed size, but that of this model grows: choose --form sequence",
        )
    function, inputs, free = _example(model, form)
    shapes: Any = tuple(free.values())
    if form == "step":
        shapes = (shapes[0], shapes[1:])
    try:
        with _quietly():
            program = torch.export.export(
                function.eval(),
                tuple(inputs.values()),
                dynamic_shapes=shapes,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            graphs = [part for part in program.graph_module.modules() if isinstance(part, GraphModule)]
            values = [node.meta.get("val") for part in graphs for node in part.graph.nodes]
            require(
                not any(isinstance(value, Tensor) and value.is_complex() for value in values),
                "it computes with complex numbers, as S4D and S5 do, which ONNX lacks",
            )
            names = list(function(*inputs.values()))
            written = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                input_names=list(inputs),
                output_names=names,
                verbose=False,
                optimize=False,
            )
    except Exception as error:  # the exporter has its own class for every step that fails
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise ValueError(f"this {kind} has no ONNX form: {reason}") from error
    assert written is not None
    # what follows from the weights, such as the tables of a scan, is computed when a file is loaded
    optimizer.optimize(written.model, output_size_limit=1024)
    about = {**facts, "form": form}
    if any(name.startswith("next.") for name in names):
        about["state"] = [
            {
                "name": name,
                "type": "float" if part.is_floating_point() else "int",
                "shape": list(part.shape[1:]),
            }
            for name, part in state_tensors(model.init_state(1)).items()
        ]
    written.model.graph.metadata_props.clear()
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()  # where in the code it comes from
    written.model.metadata_props.clear()
    written.model.metadata_props.update({name: as_text(value) for name, value in about.items()})
    written.save(path)
    size = path.stat().st_size
    require(size <= LARGEST, f"{path.name} would have {size:,} bytes, more than an ONNX file can hold")
    return about


def as_text(value: Any) -> str:
    """A value of the metadata: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_folder(
    model: Any,
    folder: Path,
    forms: Sequence[str],
    facts: Mapping[str, Any],
    opset: int = OPSETS[0],
    verify: Callable[[Path, nn.Module], str] | None = None,
) -> dict[str, str]:
    """Write forms of a model, and model.json with what they say and their checksums; the folder appears whole or not.

    Args:
        model: as in `write_form`.
        folder: must not exist, or be empty.
        forms: one of FORMS, or both.
        facts: what the files should say about the model.
        opset: version of the operators.
        verify: called with every file and its model before the folder appears; may raise, and says what it found.

    Returns:
        What `verify` said, by the names of the files.
    """
    require(not folder.is_file(), f"{folder} is a file: choose a folder that does not exist yet")
    require(
        not folder.exists() or not any(folder.iterdir()),
        f"{folder} is not empty: choose a folder that does not exist yet",
    )
    parent = folder.absolute().parent
    require(parent.is_dir(), f"{folder}: the folder {parent} does not exist")
    facts = {"format": FORMAT, **facts}
    stage = folder.absolute().with_name(f".{folder.name}-{os.getpid()}")
    try:
        stage.mkdir()
        listed, notes, about = {}, {}, dict(facts)
        for form in forms:
            path = stage / f"{form}.onnx"
            about = write_form(model, form, path, facts, opset)
            notes[path.name] = "" if verify is None else verify(path, model)
            listed[path.name] = {"bytes": path.stat().st_size, "sha256": digest_of(path)}
        write_json(stage / "model.json", {**about, "form": list(forms), "opset": opset, "files": listed})
        if folder.exists():
            folder.rmdir()
        os.rename(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return notes


# onnxruntime


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
        require(
            self.about.get("format") == FORMAT, f"{self.path} was not written by `seqboat export --to onnx`"
        )
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
