"""`seqboat export-onnx`: write a trained run for onnxruntime, on servers, in other languages and in browsers."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from seqboat.run import Run

EPILOG = """\
The step form reads one token per sequence, with the state as inputs and outputs. The sequence form reads whole
sequences of any batch size and length. model.json lists the checksums of the files and describes the model. Before
the folder is kept, every file is run in onnxruntime and compared with the model.

  seqboat export-onnx RUN
  seqboat export-onnx RUN --out small --form step --int8
  seqboat export-onnx RUN --check small
"""
TOLERANCE = 1e-3
"""Largest difference of two scores between a file and its model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("run", help="folder of a run, one checkpoint in it, or the name of a bundled model")
    parser.add_argument(
        "--out", metavar="FOLDER", help="where to write (default: NAME-onnx in the current folder)"
    )
    parser.add_argument(
        "--form",
        choices=("step", "sequence", "both"),
        help="what to write (default: both for language models, otherwise sequence)",
    )
    parser.add_argument("--int8", action="store_true", help="store the weights of linear layers as int8")
    parser.add_argument(
        "--opset", type=int, default=18, metavar="N", help="version of ONNX operators (default: 18)"
    )
    parser.add_argument("--which", choices=("best", "latest"), default="best", help="which checkpoint")
    parser.add_argument(
        "--check",
        metavar="FOLDER",
        help="compare files written earlier with the run, without writing anything",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.core.checks import require
    from seqboat.core.extras import check_installed
    from seqboat.run import Run
    from seqboat.training.checkpoint import CheckpointError

    for module in ("onnx", "onnxscript", "onnxruntime"):
        check_installed(module, "export-onnx")
    from seqboat.export.onnx import FORMS, OPSETS, write_folder
    from seqboat.models.heads import LanguageModel

    try:
        source = Run(options.run, options.which)
        if options.check is not None:
            given = [name for name in ("out", "form", "int8") if getattr(options, name)]
            require(not given, f"--check writes nothing: leave out --{', --'.join(given)}")
            return check(source, Path(options.check))
        require(
            options.opset in OPSETS,
            f"--opset must be between {OPSETS[0]} and {OPSETS[-1]}, got {options.opset}",
        )
        folder = Path(options.out or f"{source.folder.resolve().name}-onnx")
        model = prepare(source, options.int8)
        every = FORMS if isinstance(model, LanguageModel) else ("sequence",)
        forms = {None: every, "both": FORMS}.get(options.form, (options.form,))
        notes = write_folder(model, folder, forms, describe(source, model), options.opset, verify)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    for name, note in notes.items():
        print(f"{folder / name}: {(folder / name).stat().st_size:,} bytes, {note}")
    return 0


def prepare(run: Run, int8: bool) -> nn.Module:
    """A copy of a run's model that answers in the units of its task."""
    import torch

    from seqboat.core.checks import require
    from seqboat.export.int8 import is_quantized, quantize
    from seqboat.own.targets import NumberTarget
    from seqboat.own.task import OwnTask

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
                names = ("input", "mean", "std", "gaps", "rate")
                facts["input"] = {name: task.facts[name] for name in names if name in task.facts}
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
