"""The command line: a table of commands, each a module that adds its arguments and runs.

Help must not wait for torch, so commands import what they need when they run. Errors that a user can cause are
one line and exit code 2; anything else is a failure with exit code 1 and its traceback under --debug.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from seqboat.core.extras import EXTRAS, missing
from seqboat.version import __version__

COMMANDS = {
    "data": ("seqboat.cli.data", "list, prepare, verify and show data sets"),
    "train": ("seqboat.cli.train", "train a model from a recipe; any setting can be changed"),
    "eval": ("seqboat.cli.eval", "score a trained run on held-out data"),
    "predict": ("seqboat.cli.predict", "predict labels, numbers or tags for new inputs"),
    "report": (
        "seqboat.cli.report",
        "write an HTML page about a run, token by token, or comparing several runs",
    ),
    "explain": (
        "seqboat.cli.explain",
        "show what a model predicts for one input, and which tokens attend",
    ),
    "intervene": (
        "seqboat.cli.intervene",
        "measure what attention contributes: switch it off layer by layer, or move thresholds",
    ),
    "reproduce": (
        "seqboat.cli.reproduce",
        "run the paper's experiments and write the results next to its numbers",
    ),
    "generate": ("seqboat.cli.generate", "generate text with a language model"),
    "score": (
        "seqboat.cli.score",
        "measure bits per byte of files with a language model",
    ),
    "quantize": ("seqboat.cli.quantize", "convert a language model to int8 weights"),
    "export-hf": ("seqboat.cli.export_hf", "export a run to Hugging Face transformers"),
    "export-onnx": (
        "seqboat.cli.export_onnx",
        "export a run to ONNX, for onnxruntime and browsers",
    ),
    "import-published": (
        "seqboat.cli.import_published",
        "turn a checkpoint of the published implementation into a run",
    ),
    "export-published": (
        "seqboat.cli.export_published",
        "export a run as a checkpoint of the published implementation",
    ),
    "list": (
        "seqboat.cli.list",
        "list recipes, rows, ablations, mixers, tasks, routers, SSMs or plug-ins",
    ),
    "doctor": (
        "seqboat.cli.doctor",
        "check versions, kernels and every heavy operation on this machine",
    ),
    "bench": ("seqboat.cli.bench", "compare the time and memory of mixers"),
}
"""Name, module and one line of help of every command, in the order of the help text."""


class UsageError(Exception):
    """A mistake that the user can fix: the message says what was wrong and what was expected."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help)\n")


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of the commands by name."""
    parser = Parser(prog="seqboat", description="Sequence models that attend only where attention pays off.")
    parser.add_argument("--version", action="version", version=f"seqboat {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    found = {}
    for name, (module, line) in COMMANDS.items():
        found[name] = commands.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        import_module(module).add_arguments(found[name])
        _add_import(found[name])
    return parser, found


def _add_import(parser: argparse.ArgumentParser) -> None:
    """Let a command, or its verbs, take plug-ins."""
    verbs = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for verb in [parser] if not verbs else verbs[0].choices.values():
        verb.add_argument(
            "--import",
            dest="imports",
            action="append",
            default=[],
            metavar="MODULE",
            help="also load the plug-in in this module (installed plug-ins load by themselves)",
        )


def _load_plugins(modules: Sequence[str]) -> None:
    """Load the plug-ins of installed packages and these modules; processes that this one starts load them too."""
    from seqboat.plugins import VARIABLE, load_plugin, load_plugins

    load_plugins()
    for module in modules:
        try:
            load_plugin(module)
        except ValueError as error:
            raise UsageError(f"--import {module}: {error}") from error
    if modules:
        named = [*filter(None, os.environ.get(VARIABLE, "").split(",")), *modules]
        os.environ[VARIABLE] = ",".join(dict.fromkeys(named))


def split_fields(arguments: Sequence[str], known: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tell the options of a command from fields of the configuration: `--a.b=value`, or `--a.b value value`.

    Args:
        arguments: of the command.
        known: the names of its options; their unambiguous beginnings count as options too.

    >>> split_fields(["--resume", "--training.workers", "2", "--out", "R"], ["--resume", "--out"])
    (['--resume', '--out', 'R'], ['--training.workers', '2'])
    """
    options: list[str] = []
    fields: list[str] = []
    target = options
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, _ = argument.partition("=")
            is_field = not any(option.startswith(name) for option in known)
            (fields if is_field else options).append(argument)
            # the words after --a.b belong to it, those after --a.b=value do not
            target = fields if is_field and not equals else options
        elif argument.startswith("-") and not argument[1:2].isdigit():
            options.append(argument)
            target = options
        else:
            target.append(argument)
    return options, fields


def one_line(error: Exception | str) -> str:
    """The message of an error or a warning in one line, without control codes from a file."""
    from seqboat.console import printable

    return printable(" ".join(str(error).split()))


class OutputError(Exception):
    """Standard output cannot be written to."""


class Output:
    """Standard output whose failures can be told from those of any other file.

    Args:
        stream: the original; None if it is closed.
        survive: whether to report a failure once on standard error and continue, instead of raising `OutputError`.
    """

    def __init__(self, stream: Any, survive: bool) -> None:
        # the lowest free handle is that of the closed stream: no other file can be opened in its place
        self._stream = open(os.devnull, "w", encoding="utf-8") if stream is None else stream  # noqa: SIM115
        self._survive = survive
        self._failed = stream is None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def buffer(self) -> Output:
        """For bytes, with the same treatment of failures."""
        return Output(self._stream.buffer, self._survive)

    def write(self, text: Any) -> int:
        return self._try(lambda: int(self._stream.write(text)))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], Any]) -> Any:
        if self._failed:
            return 0
        try:
            return act()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._failed = True
            self.discard()
            message = f"cannot write to standard output: {error.strerror or error}"
            if not self._survive:
                raise OutputError(message) from error
            print(f"seqboat: {message}; continuing without it", file=sys.stderr)
            return 0

    def check(self) -> None:
        """Stop if standard output is closed, unless the command works without it."""
        if self._failed and not self._survive:
            raise OutputError("standard output is closed")

    def discard(self) -> None:
        """Send what is still buffered nowhere, so that the interpreter does not fail on it at exit."""
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = next((word for word in arguments if word in COMMANDS), "")
    command = import_module(COMMANDS[name][0]) if name else None
    before, form = sys.stdout, warnings.formatwarning
    if "--debug" not in arguments:
        warnings.formatwarning = partial(one_line_warning, " ".join(["seqboat", name]).strip())
    output = Output(before, survive=getattr(command, "SURVIVES_OUTPUT", False))
    sys.stdout = output
    try:
        try:
            return _run(arguments, name, command, output)
        finally:
            output.flush()
    except BrokenPipeError:
        output.discard()
        return 0  # whoever read the output has enough of it
    except OutputError as error:
        print(f"{' '.join(['seqboat', name]).strip()}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    finally:
        sys.stdout, warnings.formatwarning = before, form


def one_line_warning(prog: str, message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning as users of the command line see it, without the line of code that raised it."""
    return f"{prog}: warning: {one_line(message)}\n"


def _explained(command: Any, asked: argparse.Namespace, fields: Sequence[str]) -> int:
    """Print the settings of a recipe, with plug-ins loaded."""
    try:
        _load_plugins(asked.imports)
        print(command.explain_recipe(asked.recipe, fields))
    except (UsageError, ValueError) as error:
        print(f"seqboat train: error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: Sequence[str], name: str, command: Any, output: Output) -> int:
    parser, commands = build_parser()
    fields: list[str] = []
    if getattr(command, "TAKES_FIELDS", False):
        place = list(arguments).index(name) + 1
        known = [option for action in commands[name]._actions for option in action.option_strings]
        rest, fields = split_fields(arguments[place:], known)
        arguments = [*arguments[:place], *rest]
    if {"-h", "--help"} & set(arguments) and hasattr(command, "explain_recipe"):
        rest = [word for word in arguments[list(arguments).index(name) + 1 :] if word not in ("-h", "--help")]
        asked, _ = commands[name].parse_known_args(rest)
        if asked.recipe is not None:
            return _explained(command, asked, fields)
    options = parser.parse_args(arguments)
    options.fields = fields
    output.check()
    try:
        _load_plugins(options.imports)
        return int(command.run(options))
    except (UsageError, ValueError) as error:
        if options.debug:
            raise
        print(f"seqboat {options.command}: error: {one_line(error)}", file=sys.stderr)
        return 2
    except (BrokenPipeError, OutputError):
        raise
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
