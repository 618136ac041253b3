"""`seqboat explain`: what a trained model makes of one input, and which tokens attended."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqboat.cli.control import add_control_arguments, read_control, read_layers
from seqboat.console import typed_bytes
from seqboat.core.extras import missing

if TYPE_CHECKING:
    from seqboat.analysis.traces import Examples
    from seqboat.report.explain import Sequences
    from seqboat.tasks.task import Task

EPILOG = """\
  seqboat explain runs/listops --text "[MAX 2 9 [MIN 4 7 ] 0 ]"
  seqboat explain enwik8-small --file notes.txt --layer 2
  seqboat explain runs/image --image cat.png --html cat.html
  seqboat explain runs/retrieval --file one.txt --file two.txt --json
  seqboat explain runs/speech --wav yes.wav --off 2

Layers are counted from 1. Tasks that compare two sequences take two inputs.
"""
MOST = 64 << 20
"""Bytes of a file beyond which it is refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "run", nargs="?", help="folder of a run, or one checkpoint in it (default: the bundled model)"
    )
    parser.add_argument("--text", action="append", default=[], help="the input: text, or tokens of the task")
    parser.add_argument(
        "--file", action="append", default=[], help="the input: a text file; - is standard input"
    )
    parser.add_argument("--image", action="append", default=[], metavar="PNG", help="the input: an image")
    parser.add_argument("--wav", action="append", default=[], help="the input: a sound file")
    parser.add_argument("--layer", metavar="LAYERS", help="show only these layers, such as 2 or 1,3")
    parser.add_argument(
        "--which", choices=("best", "latest"), default="best", help="which checkpoint (default: best)"
    )
    parser.add_argument(
        "--data-dir", "--data_dir", metavar="FOLDER", help="where the prepared data is (default: the run's)"
    )
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: auto")
    parser.add_argument("--html", metavar="FILE", help="also write an interactive page")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_control_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    control = read_control(options)
    given = [(kind, value) for kind in ("text", "file", "image", "wav") for value in getattr(options, kind)]
    if not given:
        raise ValueError("give the input: --text, --file, --image or --wav")

    from seqboat.analysis.traces import sites
    from seqboat.core.checks import check_output
    from seqboat.report.explain import as_record, explain, longest, render, subject
    from seqboat.report.page import finite
    from seqboat.run import find_run

    folder = find_run(options.run)
    if options.html is not None:
        check_output("--html", Path(options.html))
    fields = [f"--data.data_dir={options.data_dir}"] if options.data_dir else []
    lengths: list[int] = []

    def read(task: Task) -> Sequences:
        parts = tuple(read_input(task, kind, value) for kind, value in given)
        lengths.extend(len(part) for part in parts)
        return parts

    examples = subject(folder, read, options.which, fields)
    most = longest(examples.task)
    if max(lengths) > most:
        print(f"only the first {most:,} of {max(lengths):,} tokens are read", file=sys.stderr)
    layers = None
    if options.layer is not None:
        found = sites(examples.model)
        layers = sorted(number - 1 for number in read_layers("--layer", options.layer, found))
    with contextlib.nullcontext() if control is None else control.applied(examples.model):
        sample = explain(examples)
        if options.html is not None:
            write_html(Path(options.html), examples, str(folder))
    by_hand = {} if control is None else {"control": control.record()}
    if options.json:
        head = {"run": str(folder), "step": examples.step, "task": examples.task.name, **by_hand}
        print(json.dumps(finite(head | as_record(sample, examples.task, layers))))
        return 0
    lines = [f"{folder}, step {examples.step}"]
    if control is not None:
        lines.append(f"overrides: {control.describe()}")
    width = shutil.get_terminal_size().columns
    lines.append(render(sample, examples.task, layers, use_color(options.color), width))
    # a terminal that knows few characters shows question marks
    encoding = sys.stdout.encoding or "utf-8"
    print("\n".join(lines).encode(encoding, "replace").decode(encoding))
    return 0


def use_color(choice: str) -> bool:
    """Whether to write colors: https://no-color.org, and only to a terminal, unless told otherwise."""
    if choice != "auto":
        return choice == "always"
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def read_input(task: Task, kind: str, value: str) -> Any:
    """One input, from what was typed or from a file."""
    if kind == "text":
        if not value.strip():
            raise ValueError("--text must not be empty")
        return task.read_text(typed_bytes(value))
    content = read_bytes(kind, value)
    if kind == "file":
        return task.read_text(content)
    if kind == "wav":
        return _named(value, lambda: task.read_wav(content))
    return _named(value, lambda: task.read_image(read_pixels(content)))


def _named(name: str, read: Any) -> Any:
    """Errors with the name of the file in front."""
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def read_bytes(kind: str, name: str) -> bytes:
    """A file, or standard input."""
    try:
        if name == "-":
            content = sys.stdin.buffer.read(MOST + 1)
        else:
            with open(name, "rb") as file:
                content = file.read(MOST + 1)
    except OSError as error:
        raise ValueError(f"--{kind} {name} cannot be read: {error.strerror or error}") from error
    if not content:
        raise ValueError(f"--{kind} {name} is empty")
    if len(content) > MOST:
        raise ValueError(f"--{kind} {name} is too large: more than {MOST:,} bytes")
    return content


def read_pixels(content: bytes) -> Any:
    """(height, width) uint8: an image in gray."""
    import io

    import numpy as np

    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ValueError(missing("PIL", "an image")) from error
    try:
        with Image.open(io.BytesIO(content)) as image:
            return np.asarray(image.convert("L"))
    except UnidentifiedImageError as error:
        raise ValueError("not an image of a known format") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"not an image that can be read: {error}") from error


def write_html(path: Path, examples: Examples, run: str) -> None:
    """A page to look into the input."""
    from seqboat.data.files import write_text
    from seqboat.report.explain import explain_page

    write_text(path, explain_page(examples, run))
