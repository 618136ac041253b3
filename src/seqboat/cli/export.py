"""`seqboat export`: a run for Hugging Face, for onnxruntime, with int8 weights, or for the published code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from seqboat.cli.options import Shared
from seqboat.cli.parser import Count

if TYPE_CHECKING:
    from seqboat.models.heads import LanguageModel
    from seqboat.run import Run

ONLY = {
    "onnx": ("form", "opset", "check", "int8"),
    "int8": ("text", "limit", "no_score"),
    "published": ("data",),
}
"""Options of one form."""


def run(
    run: str,
    folder: Path,
    *,
    to: Literal["hf", "onnx", "int8", "published"],
    form: Literal["step", "sequence", "both"] | None = None,
    int8: bool = False,
    opset: Count | None = None,
    check: bool = False,
    text: Path | None = None,
    limit: Count | None = None,
    no_score: bool = False,
    data: Path | None = None,
    shared: Shared,
) -> int:
    """Write a run for Hugging Face transformers, for onnxruntime, with int8 weights, or for the published code.

    Args:
        run: folder of a run, a checkpoint (step-N) in it, or a bundled model: enwik8-small.
        folder: where to write: must be empty or not exist (published: a file).
        to: folder for transformers, ONNX files, run with int8 weights, or fairseq checkpoint.
        form: onnx: one token with the state, whole sequences, or both (default: both for language models).
        int8: onnx: store the weights of linear layers as int8.
        opset: onnx: version of its operators (default: 18).
        check: onnx: compare the files in the folder with the run, and write nothing.
        text: int8: score this file before and after, instead of the run's test text.
        limit: int8: score only the first N bytes.
        no_score: int8: do not measure what the rounding costs.
        data: published: data whose dictionaries number the tokens (default: new ones next to the file).

    examples:
      seqboat export enwik8-small small --to int8 && seqboat generate small --prompt "The history of"
      seqboat export runs/reviews reviews-onnx --to onnx
    """
    from seqboat.cli.onnx import to_onnx
    from seqboat.training.checkpoint import CheckpointError

    given = {"form": form, "opset": opset, "check": check, "text": text, "limit": limit, "no_score": no_score}
    given |= {"int8": int8, "data": data}
    for needed, names in ONLY.items():
        for name in names:
            if given[name] and needed != to:
                raise ValueError(f"--{name.replace('_', '-')} works only with --to {needed}, got --to {to}")
    try:
        if to == "hf":
            return to_hf(run, folder, shared)
        if to == "onnx":
            return to_onnx(run, folder, form, int8, opset or 18, check, shared.which)
        if to == "int8":
            return to_int8(run, folder, text, limit, not no_score, shared)
        return to_published(run, folder, data, shared)
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def to_hf(run: str, folder: Path, shared: Shared) -> int:
    """A folder that Hugging Face transformers loads."""
    try:
        import seqboat.hf  # noqa: F401 - says what to install
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
    from transformers.utils import logging

    from seqboat.cli.hf import export_run

    logging.disable_progress_bar()
    done = export_run(run, folder, shared.which)
    count = sum(parameter.numel() for parameter in done.model.parameters())
    print(f"{done.folder}: {type(done.model).__name__}, {count:,} parameters")
    inputs = "token ids are those of the task"
    if done.model.config.channels is not None:
        inputs = "the model reads real values (input_values)"
    kinds = {"bytes": "tokenizer: bytes", "own": "tokenizer: the one that the run was trained with"}
    print(kinds[done.tokenizer] if done.tokenizer else f"no tokenizer: {inputs}")
    print("load it after `import seqboat.hf`, which registers the model type")
    return 0


def to_published(run: str, file: Path, data: Path | None, shared: Shared) -> int:
    """A checkpoint of the published implementation."""
    from seqboat.paper.checkpoints import export_run

    done = export_run(run, file, data, shared.which)
    print(f"{done.file}: a checkpoint of the published implementation")
    for path in done.dictionaries:
        print(f"{path}: its dictionary")
    return 0


def to_int8(
    run: str, folder: Path, text_file: Path | None, limit: int | None, scored: bool, shared: Shared
) -> int:
    """A run with int8 weights, and what that costs in bits per byte; its model card states both."""
    import torch

    from seqboat.core.checks import require
    from seqboat.data.files import making_folder
    from seqboat.export.int8 import is_quantized, quantize
    from seqboat.run import Run

    require(
        scored or not (text_file or limit),
        "--no-score leaves nothing for --text or --limit",
    )
    require(not folder.is_file(), f"{folder} is a file: choose a folder that does not exist yet")
    require(
        not folder.exists() or not any(folder.iterdir()),
        f"{folder} is not empty: choose a folder that does not exist yet",
    )
    require(
        folder.absolute().parent.is_dir(), f"{folder}: the folder {folder.absolute().parent} does not exist"
    )
    source = Run(run, shared.which)
    model = source.language_model
    require(not is_quantized(model), f"{source} has int8 weights already")
    count = sum(weight.numel() for weight in source.weights.values())
    before = sum(weight.numel() * weight.element_size() for weight in source.weights.values())
    lines = [f"| model | {count:,} numbers, step {source.step:,}; made by `seqboat export --to int8` |"]
    text, name = read_text(source, text_file, limit) if scored else (b"", "")
    plain = measure(model, text) if text else None
    quantize(model)
    rounded = measure(model, text) if text else None
    if plain and rounded:
        change = 100 * (rounded / plain - 1)
        lines.append(
            f"| score | {rounded:.6f} bits per byte of {name}, {len(text):,} bytes; before rounding {plain:.6f} "
            f"({change:+.4f} %) |"
        )
    else:
        lines.append("| score | not measured |")
    with making_folder(folder) as stage:
        source.pack(stage, torch.int8)
        after = sum(path.stat().st_size for path in stage.rglob("*.safetensors"))
        lines.append(f"| weights | {after:,} bytes; before {before:,} |")
        card = [
            f"# {folder.name}",
            "",
            "Weights in int8, with a scale for every row.",
            "",
            "| | |",
            "|---|---|",
            *lines,
        ]
        (stage / "README.md").write_text("\n".join(card) + "\n", encoding="utf-8")
    print("\n".join(line.strip("| ").replace(" | ", ": ") for line in lines))
    return 0


def read_text(source: Run, path: Path | None, limit: int | None) -> tuple[bytes, str]:
    """What to score, and what to call it."""
    from seqboat.core.checks import require

    if path is not None:
        require(Path(path).is_file(), f"{path} is not a file")
        with open(path, "rb") as file:
            data = file.read() if limit is None else file.read(limit)
        require(len(data) > 0, f"{path} is empty: there is nothing to score")
        return data, Path(path).name
    try:
        stored = source.task.text("test")
    except (ValueError, OSError) as error:
        raise ValueError(
            f"the run's test text cannot be read ({error}): give --text FILE or --no-score"
        ) from error
    return bytes(stored[:limit]), f"the test text of {source.task.name}"


def measure(model: LanguageModel, text: bytes) -> float:
    """Bits per byte of a text."""
    import io

    from seqboat.text.score import CHUNK, read_chunks, score, total

    found = total(score(model, read_chunks(io.BytesIO(text), CHUNK))).bits_per_token
    assert found is not None
    return found


def in_own_units(model: Any, run: Run) -> None:
    """Let a model that learned a number answer in its units, not in standard deviations from the mean."""
    import torch

    from seqboat.core.checks import require
    from seqboat.export.int8 import is_quantized
    from seqboat.own.targets import NumberTarget
    from seqboat.own.task import OwnTask

    if not isinstance(run.task, OwnTask) or not isinstance(run.task.target, NumberTarget):
        return
    facts, out = run.task.facts, model.head.out
    require(out.bias is not None, "a number needs a head with a bias (model.head_bias)")
    with torch.no_grad():
        # the rows of a matrix, or the scale of its int8 codes
        (out.scale if is_quantized(model) else out.weight).mul_(facts["target_std"])
        out.bias.mul_(facts["target_std"]).add_(facts["target_mean"])


def input_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the real values that a model of own data reads."""
    return {name: facts[name] for name in ("input", "mean", "std", "gaps", "rate") if name in facts}
