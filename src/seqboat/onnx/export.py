"""Export a trained run to a folder of ONNX files.

    NAME/
      step.onnx, sequence.onnx    the forms that were asked for
      model.json                  what the files say about themselves, and their sizes and checksums

The folder appears complete or not at all.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from seqboat.core.checks import check_choice, require
from seqboat.data.files import digest_of, making_folder, write_json
from seqboat.inference.int8 import is_quantized, quantize
from seqboat.models.heads import LanguageModel
from seqboat.onnx.graph import DEFAULT_OPSET
from seqboat.onnx.model import FORMS, GraphModel
from seqboat.own.targets import LabelsTarget, NumberTarget
from seqboat.own.task import OwnTask
from seqboat.run import Run
from seqboat.training.checkpoint import MODEL
from seqboat.version import __version__

FORMAT = "seqboat 1"
"""Of the metadata."""
LARGEST = (1 << 31) - 1
"""Bytes that an ONNX file can have."""


class Exported(NamedTuple):
    """What was written."""

    folder: Path
    files: tuple[Path, ...]
    model: nn.Module
    """what the files compute: with int8 weights if they have them"""
    notes: dict[str, str]
    """what `verify` found, by the names of the files"""


def export_run(
    run: Run,
    folder: Path | str,
    forms: Sequence[str] | None = None,
    *,
    int8: bool = False,
    opset: int = DEFAULT_OPSET,
    verify: Callable[[Path, nn.Module], str] | None = None,
) -> Exported:
    """Write the model of a run.

    Args:
        run: a language model, classifier, tagger or matcher.
        folder: must not exist, or be empty.
        forms: "step", "sequence" or both; by default all that the model has.
        int8: whether to round weights to int8; those of a quantized run are int8 already.
        opset: version of the operators.
        verify: called with every file and its model before the folder appears; may raise, and says what it found.
    """
    folder = Path(folder)
    check_new(folder)
    model = prepare(run, int8)
    if forms is None:
        forms = FORMS if isinstance(model, LanguageModel) else ("sequence",)
    for form in forms:
        check_choice("form", form, FORMS)
    facts = describe(run, model)
    with making_folder(folder) as stage:
        listed, notes, about = {}, {}, facts
        for form in forms:
            path = stage / f"{form}.onnx"
            about = write_form(model, form, path, facts, opset)
            if verify is not None:
                notes[path.name] = verify(path, model)
            listed[path.name] = {"bytes": path.stat().st_size, "sha256": digest_of(path)}
        write_json(stage / "model.json", {**about, "form": list(forms), "opset": opset, "files": listed})
    return Exported(folder, tuple(folder / name for name in listed), model, notes)


def write_form(
    model: nn.Module, form: str, path: Path, facts: Mapping[str, Any], opset: int = DEFAULT_OPSET
) -> dict[str, Any]:
    """Write one form of a model, and return what it says about itself."""
    writer = GraphModel(model, opset)
    about = {**facts, "form": form}
    if writer.remembers:
        about["state"] = [
            {"name": name, "type": kind, "shape": list(shape)}
            for name, (kind, shape) in writer.state_shapes().items()
        ]
    written = writer.build(form, {name: as_text(value) for name, value in about.items()})
    size = written.ByteSize()
    require(size <= LARGEST, f"{path.name} would have {size:,} bytes, more than an ONNX file can hold")
    path.write_bytes(written.SerializeToString(deterministic=True))
    return about


def check_new(folder: Path) -> None:
    """Refuse a folder that has something in it, or cannot be made."""
    require(not folder.is_file(), f"{folder} is a file: choose a folder that does not exist yet")
    require(
        not folder.exists() or not any(folder.iterdir()),
        f"{folder} is not empty: choose a folder that does not exist yet",
    )
    parent = folder.absolute().parent
    require(parent.is_dir(), f"{folder}: the folder {parent} does not exist")


def prepare(run: Run, int8: bool) -> nn.Module:
    """A copy of a run's model that answers in the units of its task."""
    model: Any = copy.deepcopy(run.model).float()
    if int8 and not is_quantized(model):
        quantize(model)
    if isinstance(run.task, OwnTask) and isinstance(run.task.target, NumberTarget):
        facts, out = run.task.facts, model.head.out
        assert facts is not None
        require(out.bias is not None, "a number needs a head with a bias (model.head_bias)")
        with torch.no_grad():
            # the rows of a matrix, or the scale of its int8 codes
            (out.scale if is_quantized(model) else out.weight).mul_(facts["target_std"])
            out.bias.mul_(facts["target_std"]).add_(facts["target_mean"])
    done: nn.Module = model.eval()
    return done


def describe(run: Run, model: Any) -> dict[str, Any]:
    """What a file says about its model."""
    task, backbone = run.task, model.backbone.config
    facts: dict[str, Any] = {
        "format": FORMAT,
        "seqboat": __version__,
        "model": type(model).__name__,
        "task": task.name,
        "recipe": run.config.recipe or "",
        "step": run.step,
        "vocab": backbone.vocab,
        "channels": None if backbone.vocab is not None else backbone.channels,
        "bytes": task.text_bytes,
        "max_length": task.max_length,
        "layers": backbone.num_layers,
        "d_model": backbone.d_model,
        "int8": is_quantized(model),
        "weights": run.checkpoint.state["files"][MODEL],
    }
    if not isinstance(model, LanguageModel):
        labels = run.checkpoint.state.get("labels")
        facts["labels"] = None if not labels else list(labels)
        facts["problem"] = "classes"
        if isinstance(task, OwnTask):
            if isinstance(task.target, NumberTarget):
                facts["problem"] = "number"
            elif isinstance(task.target, LabelsTarget):
                facts["problem"] = "several labels"
            if task.vocab is None and task.facts:
                names = ("input", "mean", "std", "gaps", "rate")
                facts["input"] = {name: task.facts[name] for name in names if name in task.facts}
    return {name: value for name, value in facts.items() if value is not None}


def as_text(value: Any) -> str:
    """A value of the metadata: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
