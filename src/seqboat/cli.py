"""The command line: a table of commands, each a module that adds its arguments and runs.

Help must not wait for torch, so commands import what they need when they run. Errors that a user can cause are
one line and exit code 2; anything else is a failure with exit code 1 and its traceback under --debug.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from seqboat.data.console import printable
from seqboat.extras import EXTRAS, missing
from seqboat.version import __version__

COMMANDS = {
    "demo": ("seqboat.commands.demo", "train a small model on ListOps in a few minutes and show what it did"),
    "data": ("seqboat.commands.data", "list, prepare, verify and show data sets"),
    "train": ("seqboat.commands.train", "train a recipe, with any of its settings changed"),
    "eval": ("seqboat.commands.eval", "score a trained run on held-out data"),
    "report": (
        "seqboat.commands.report",
        "one HTML page: what a run did, token by token; or several runs compared",
    ),
    "explain": ("seqboat.commands.explain", "what a run makes of one input, and which tokens attended"),
    "intervene": (
        "seqboat.commands.intervene",
        "the score of a run as attention is switched off, layer by layer, or its threshold moves",
    ),
    "reproduce": (
        "seqboat.commands.reproduce",
        "run the paper's experiments and write the results beside its numbers",
    ),
    "generate": ("seqboat.commands.generate", "text from a trained language model, as it is produced"),
    "score": ("seqboat.commands.score", "bits per byte of files, or of every byte, by a language model"),
    "export-hf": ("seqboat.commands.export_hf", "write a trained run for Hugging Face transformers"),
    "list": ("seqboat.commands.list", "list recipes, mixers, tasks, routers or ablations"),
    "bench": ("seqboat.commands.bench", "time and memory of mixers, side by side in one run"),
}
"""Name, module and one line of help of every command, in the order of the help text."""


class UsageError(Exception):
    """Something that the user can mend: the message says what was wrong and what was expected."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seqboat", description="Sequence models that attend only where attention is worth its price."
    )
    parser.add_argument("--version", action="version", version=f"seqboat {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, line) in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        import_module(module).add_arguments(command)
    return parser


def one_line(error: Exception) -> str:
    """The message of an error, which may have been written over several lines and may quote a file."""
    return printable(" ".join(str(error).split()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    try:
        return _run(arguments)
    finally:
        _flush()


def _flush() -> None:
    """Write what is buffered; if nobody reads it any more, it has nowhere to go."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    options, fields = parser.parse_known_args(arguments)
    command = import_module(COMMANDS[options.command][0])
    if fields and not getattr(command, "TAKES_FIELDS", False):
        parser.error(f"unrecognized arguments: {' '.join(fields)}")
    options.fields = fields
    try:
        return int(command.run(options))
    except (UsageError, ValueError) as error:
        if options.debug:
            raise
        print(f"seqboat {options.command}: error: {one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0  # whoever read the output has enough of it
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if options.debug:
            raise
        library = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if library in EXTRAS:
            line = missing(library, "this command")
            print(f"seqboat {options.command}: error: {line}", file=sys.stderr)
            return 2
        kind = type(error).__name__
        print(f"seqboat {options.command}: {kind}: {one_line(error)} (--debug shows where)", file=sys.stderr)
        return 1
