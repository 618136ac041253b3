"""`seqboat quantize`: write a language model with int8 weights, and what that costs in bits per byte."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from seqboat.models.heads import LanguageModel
    from seqboat.run import Run

EPILOG = """\
Linear layers become int8, with a scale for every row; the embedding and the linear map that
every token passes become half precision; everything else is unchanged. The folder works like a run in generate,
score, export-hf and Run("FOLDER"). Both models are scored on the run's test text, or on --text, and the model card
(README.md) states the result.

  seqboat quantize RUN small
  seqboat quantize RUN small --text notes.txt --limit 100000
  seqboat generate small --prompt "The history of"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("run", help="folder of a run, one checkpoint in it, or the name of a bundled model")
    parser.add_argument("folder", help="where to write; must be empty or not exist")
    parser.add_argument("--which", choices=("best", "latest"), default="best", help="which checkpoint")
    parser.add_argument("--text", metavar="FILE", help="score this file instead of the run's test text")
    parser.add_argument("--limit", type=int, metavar="N", help="score only the first N bytes")
    parser.add_argument("--no-score", action="store_true", help="do not measure what the rounding costs")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    import torch

    from seqboat.core.checks import require
    from seqboat.data.files import making_folder
    from seqboat.export.int8 import is_quantized, quantize
    from seqboat.run import Run

    folder = Path(options.folder)
    require(options.limit is None or options.limit > 0, f"--limit must be at least 1, got {options.limit}")
    require(
        not (options.no_score and (options.text or options.limit)),
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
    source = Run(options.run, options.which)
    model = source.language_model
    require(not is_quantized(model), f"{source} has int8 weights already")
    count = sum(weight.numel() for weight in source.weights.values())
    before = sum(weight.numel() * weight.element_size() for weight in source.weights.values())
    lines = [f"| model | {count:,} numbers, step {source.step:,}; made by `seqboat quantize` |"]
    text, name = (b"", "") if options.no_score else read_text(source, options.text, options.limit)
    plain = measure(model, text, "as it was") if text else None
    quantize(model)
    rounded = measure(model, text, "int8") if text else None
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


def read_text(source: Run, path: str | None, limit: int | None) -> tuple[bytes, str]:
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


def measure(model: LanguageModel, text: bytes, what: str) -> float:
    """Bits per byte of a text."""
    import numpy as np

    from seqboat.text.scoring import CHUNK, score, total

    ids = np.frombuffer(text, np.uint8)
    shows = sys.stderr.isatty()

    def chunks() -> Iterator[NDArray[np.uint8]]:
        for begin in range(0, len(ids), CHUNK):
            if shows:
                print(f"\rscoring {what}: {begin:,}/{len(ids):,} bytes", end="", file=sys.stderr, flush=True)
            yield ids[begin : begin + CHUNK]

    found = total(score(model, chunks())).bits_per_token
    if shows:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    assert found is not None
    return found
