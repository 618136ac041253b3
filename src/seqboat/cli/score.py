"""`seqboat score`: bits per byte of files, or of every byte, by a language model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seqboat.text.scoring import Scores

EPILOG = """\
Prints a line of JSON for every file: its number of bytes, the bits that the model needs for them, bits per byte, and
the fraction of bytes for which each layer attends. With --per-token, a line for every byte comes first: its position,
its value, its bits given all bytes before it, and the layers that attend to it. Files are scored independently; the
first byte of a file, which has no context, costs 8 bits.

  seqboat score RUN *.txt
  seqboat score RUN --per-token log.txt | jq -c 'select(.bits > 15)'      find what surprised the model
  tar c folder | seqboat score RUN -                                      how small could a compressor make it?
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("run", help="folder of a run, one checkpoint in it, or the name of a bundled model")
    parser.add_argument("files", nargs="+", metavar="FILE", help="what to score; - is standard input")
    parser.add_argument("--which", choices=("best", "latest"), default="best", help="which checkpoint")
    parser.add_argument("--per-token", action="store_true", help="also print a line for every byte")
    parser.add_argument("--chunk", type=int, metavar="N", help="bytes to read at a time")
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.run import Run
    from seqboat.text.scoring import CHUNK, read_chunks, score, total
    from seqboat.training.parallel import choose_device

    if options.chunk is not None and options.chunk < 1:
        raise ValueError(f"--chunk must be an integer >= 1, got {options.chunk}")
    for name in options.files:
        if name != "-" and not Path(name).is_file():
            raise ValueError(f"{name} is not a file")
    if options.files.count("-") > 1:
        raise ValueError("standard input (-) can be read only once")
    device = choose_device(options.device, what="--device")
    model = Run(options.run, options.which).language_model.to(device)
    for name in options.files:
        with sys.stdin.buffer if name == "-" else open(name, "rb") as file:
            parts: Iterable[Scores] = score(model, read_chunks(file, options.chunk or CHUNK))
            if sys.stderr.isatty():
                parts = show_progress(name, parts)
            if options.per_token:
                parts = print_tokens(name, parts)
            sums = total(parts)
        line = {
            "file": name,
            "bytes": sums.tokens,
            "bits": sums.bits,
            "bits_per_byte": sums.bits_per_token,
            "activation": sums.activation,
        }
        print(json.dumps(line), flush=True)
    return 0


def print_tokens(name: str, parts: Iterable[Scores]) -> Iterator[Scores]:
    """Print a line for every byte that goes by."""
    position = 0
    for part in parts:
        lines = []
        for i, (token, bits) in enumerate(zip(part.tokens.tolist(), part.bits.tolist(), strict=True)):
            active = [None if layer is None else bool(layer[i]) for layer in part.active]
            line = {"file": name, "position": position + i, "byte": token, "bits": bits, "active": active}
            lines.append(json.dumps(line) + "\n")
        position += len(lines)
        sys.stdout.write("".join(lines))
        yield part


def show_progress(name: str, parts: Iterable[Scores]) -> Iterator[Scores]:
    """Count bytes on one line of the terminal."""
    done, bits = 0, 0.0
    for part in parts:
        done, bits = done + len(part.tokens), bits + float(part.bits.sum())
        print(
            f"\r{name}: {done:,} bytes, {bits / done:.4f} bits per byte",
            end="",
            file=sys.stderr,
            flush=True,
        )
        yield part
    print("\r\033[K", end="", file=sys.stderr, flush=True)
