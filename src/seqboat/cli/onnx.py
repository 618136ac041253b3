"""A run as files for onnxruntime, on servers, in other languages and in browsers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

    from seqboat.run import Run

TOLERANCE = 1e-3
"""Largest difference of two scores between a file and its model."""


def to_onnx(
    run: str,
    folder: Path,
    form: str | None,
    int8: bool,
    opset: int,
    checks: bool,
    which: Literal["best", "latest"],
) -> int:
    """Write files for onnxruntime; every one is run there and compared with the model before the folder is kept."""
    from seqboat.core.checks import require
    from seqboat.core.extras import check_installed
    from seqboat.run import Run

    for module in ("onnx", "onnxscript", "onnxruntime"):
        check_installed(module, "export --to onnx")
    from seqboat.export.onnx import FORMS, OPSETS, write_folder
    from seqboat.models.heads import LanguageModel

    source = Run(run, which)
    if checks:
        require(not (form or int8), "--check writes nothing: leave out --form and --int8")
        return check(source, folder)
    require(opset in OPSETS, f"--opset must be between {OPSETS[0]} and {OPSETS[-1]}, got {opset}")
    model = prepare(source, int8)
    every = FORMS if isinstance(model, LanguageModel) else ("sequence",)
    forms = FORMS if form == "both" else every if form is None else (form,)
    notes = write_folder(model, folder, forms, describe(source, model), opset, verify)
    for name, note in notes.items():
        print(f"{folder / name}: {(folder / name).stat().st_size:,} bytes, {note}")
    return 0


def prepare(run: Run, int8: bool) -> nn.Module:
    """A copy of a run's model that answers in the units of its task."""
    from seqboat.cli.export import in_own_units
    from seqboat.export.int8 import is_quantized, quantize

    model: Any = copy.deepcopy(run.model).float()
    if int8 and not is_quantized(model):
        quantize(model)
    in_own_units(model, run)
    done: nn.Module = model.eval()
    return done


def describe(run: Run, model: Any) -> dict[str, Any]:
    """What a file says about its model."""
    from seqboat.cli.export import input_facts
    from seqboat.export.int8 import is_quantized
    from seqboat.models.heads import LanguageModel
    from seqboat.own.targets import LabelsTarget, NumberTarget
    from seqboat.own.task import OwnTask
    from seqboat.training.checkpoint import MODEL
    from seqboat.version import __version__

    task, backbone = run.task, model.backbone.config
    facts: dict[str, Any] = {
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
                facts["input"] = input_facts(task.facts)
    return {name: value for name, value in facts.items() if value is not None}


def verify(path: Path, model: nn.Module) -> str:
    """Compare a file with the model that it was made from; a line about it."""
    from seqboat.core.checks import require
    from seqboat.export.onnx import OnnxModel, compare

    found = compare(OnnxModel(path), model)
    require(
        found.worst <= TOLERANCE,
        f"{path.name} differs from the model by {found.worst:.2g}: nothing was written",
    )
    line = f"within {found.worst:.1e} of the model"
    if found.flipped:
        line += f"; {found.flipped} of {found.decisions} decisions at the border fell the other way"
    return line


def check(source: Run, folder: Path) -> int:
    """Compare the files of a folder with the run."""
    from seqboat.core.checks import require
    from seqboat.export.onnx import OnnxModel
    from seqboat.training.checkpoint import MODEL

    files = sorted(folder.glob("*.onnx")) if folder.is_dir() else []
    require(len(files) > 0, f"{folder} is not a folder with ONNX files")
    for path in files:
        file = OnnxModel(path)
        require(
            file.about["weights"] == source.checkpoint.state["files"][MODEL],
            f"{path} is of another model: its weights are not those of {source}",
        )
        print(f"{path}: {verify(path, prepare(source, file.about['int8'] == 'true'))}")
    return 0
