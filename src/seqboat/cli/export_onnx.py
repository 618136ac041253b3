"""`seqboat export-onnx`: write a trained run for onnxruntime, on servers, in other languages and in browsers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

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

    for module in ("onnx", "onnxruntime"):
        check_installed(module, "export-onnx")
    from seqboat.onnx.export import export_run

    try:
        source = Run(options.run, options.which)
        if options.check is not None:
            given = [name for name in ("out", "form", "int8") if getattr(options, name)]
            require(not given, f"--check writes nothing: leave out --{', --'.join(given)}")
            return check(source, Path(options.check))
        folder = Path(options.out or f"{source.folder.resolve().name}-onnx")
        forms = {None: None, "both": ("step", "sequence")}.get(options.form, (options.form,))
        done = export_run(source, folder, forms, int8=options.int8, opset=options.opset, verify=verify)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    for path in done.files:
        print(f"{path}: {path.stat().st_size:,} bytes, {done.notes[path.name]}")
    return 0


def verify(path: Path, model: nn.Module) -> str:
    """Compare a file with the model that it was made from; a line about it."""
    from seqboat.core.checks import require
    from seqboat.onnx.session import OnnxModel, compare

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
    from seqboat.onnx.export import prepare
    from seqboat.onnx.session import OnnxModel
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
