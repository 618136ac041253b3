"""The command line: a table of commands, each a module with a function whose signature is its parser.

Help must not wait for torch, so commands import what they need when they run. Errors that a user can cause are
one line and exit code 2; anything else is a failure with exit code 1 and its traceback under --debug.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from seqboat.cli.parser import FIELDS, Parser, call, fill
from seqboat.core.extras import EXTRAS, missing
from seqboat.version import __version__

COMMANDS = {
    "train": "train a model: a recipe, or your own table, folder or text",
    "eval": "score a run on held-out data, or on files",
    "predict": "answers for new inputs; every row keeps its ids",
    "generate": "continue a text with a language model",
    "explain": "which tokens attended in an input, and what attention contributes",
    "report": "one HTML page about a run: scores, errors, token by token",
    "export": "write a run for Hugging Face, ONNX, int8, or the published code",
    "bench": "time and memory of layers, side by side",
    "doctor": "check that everything computes correctly on this machine",
    "paper": "data sets, tables and figures of the paper",
}
"""Every command, a module of `seqboat.cli`, with one line of help."""

MOVED = {
    "demo": "train demo",
    "score": "eval",
    "intervene": "explain",
    "quantize": "export --to int8",
    "export-hf": "export --to hf",
    "export-onnx": "export --to onnx",
    "export-published": "export --to published",
    "import-published": "paper import",
    "data": "paper data",
    "list": "paper list",
    "reproduce": "paper run",
}
"""Commands of before, and what they are now; they go with the next version."""


class UsageError(Exception):
    """A mistake that the user can fix: the message says what was wrong and what was expected."""


def build_parser() -> Parser:
    """The parser of the first word: help and version import no command."""
    parser = Parser(prog="seqboat", description="Sequence models that attend only where attention pays off.")
    parser.usage = "seqboat COMMAND ..."
    parser.add_argument("--version", action="version", version=f"seqboat {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        commands.add_parser(name, help=line, add_help=False)
    parser.epilog = (
        "seqboat COMMAND --help lists its options; seqboat paper list recipes shows what can be trained."
    )
    return parser


def command_parser(name: str, command: Any) -> Parser:
    """The parser of a command; those of verbs have their function."""
    parser = Parser(prog=f"seqboat {name}")
    if hasattr(command, "VERBS"):
        parser.usage = f"seqboat {name} VERB ..."
        parser.description = f"{COMMANDS[name][:1].upper()}{COMMANDS[name][1:]}."
        verbs: Any = {"title": "verbs", "metavar": "VERB", "required": True}
        groups = {"": parser.add_subparsers(prog=parser.prog, dest="verb", **verbs)}
        for words, (function, line) in command.VERBS.items():
            group, _, verb = words.rpartition(" ")
            if group not in groups:
                inner = groups[""].add_parser(group, help="verbs: " + _verbs(command, group))
                inner.usage = f"seqboat {name} {group} VERB ..."
                groups[group] = inner.add_subparsers(prog=f"{parser.prog} {group}", dest="inner", **verbs)
            found = groups[group].add_parser(verb, help=line)
            fill(found, function)
            found.set_defaults(function=function)
            _add_import(found)
        return parser
    if hasattr(command, "add_arguments"):
        command.add_arguments(parser)
    else:
        fill(parser, command.run)
        parser.set_defaults(function=command.run)
    _add_import(parser)
    return parser


def _verbs(command: Any, group: str) -> str:
    return ", ".join(words.rpartition(" ")[2] for words in command.VERBS if words.startswith(f"{group} "))


def _add_import(parser: argparse.ArgumentParser) -> None:
    """Let a command take plug-ins."""
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="also load the plug-in in this module (installed plug-ins load by themselves)",
    )
    parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)


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
    arguments = _moved(list(sys.argv[1:] if arguments is None else arguments))
    name = next((word for word in arguments if not word.startswith("-")), "")
    command = import_module(f"seqboat.cli.{name}") if name in COMMANDS else None
    before, form = sys.stdout, warnings.formatwarning
    if "--debug" not in arguments:
        warnings.formatwarning = partial(one_line_warning, " ".join(["seqboat", name]).strip())
    output = Output(before, survive=_survives(command, arguments))
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


def _survives(command: Any, arguments: Sequence[str]) -> bool:
    """Whether a command, or its verb, goes on without an output."""
    found = getattr(command, "SURVIVES_OUTPUT", False)
    return found if isinstance(found, bool) else bool({*found} & {*arguments})


def _moved(arguments: list[str]) -> list[str]:
    """The arguments with a command of before replaced by what it is now, which is said."""
    place = next((i for i, word in enumerate(arguments) if not word.startswith("-")), None)
    if place is None or arguments[place] not in MOVED:
        return arguments
    old = arguments[place]
    new = "paper page" if arguments[place : place + 2] == ["reproduce", "page"] else MOVED[old]
    rest = arguments[place + 1 + (new == "paper page") :]
    if old == "export-onnx":
        rest = [word for word in rest if word != "--out"]
    changed = [*arguments[:place], *new.split(), *rest]
    print(f"seqboat {old} is now: {shlex.join(['seqboat', *changed])}", file=sys.stderr)
    return changed


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


def _run(arguments: list[str], name: str, command: Any, output: Output) -> int:
    if command is None:
        build_parser().parse_args(arguments)
        return 0
    place = arguments.index(name)
    debug = "--debug" in arguments[:place]
    for word in arguments[:place]:
        if word != "--debug":
            build_parser().parse_args(arguments)  # says what is wrong with it
    parser = command_parser(name, command)
    rest, fields = [_hyphens(word) for word in arguments[place + 1 :]], list[str]()
    if _takes_fields(command):
        rest, fields = split_fields(rest, _options(parser))
    if {"-h", "--help"} & set(rest) and hasattr(command, "explain_recipe"):
        asked, _ = parser.parse_known_args([word for word in rest if word not in ("-h", "--help")])
        if asked.recipe is not None:
            return _explained(command, asked, fields)
    try:
        options = parser.parse_args(rest)
    except SystemExit as stop:
        if stop.code:
            return 2
        raise
    function = getattr(options, "function", None)
    if fields and function and FIELDS not in inspect.signature(function).parameters:
        parser.error(f"unrecognized arguments: {' '.join(fields)}")
    options.fields = fields
    output.check()
    try:
        _load_plugins(options.imports)
        return call(function, options, fields) if function else int(command.run(options))
    except (UsageError, ValueError) as error:
        if debug or options.debug:
            raise
        print(f"seqboat {name}: error: {one_line(error)}", file=sys.stderr)
        return 2
    except (BrokenPipeError, OutputError):
        raise
    except Exception as error:
        if debug or options.debug:
            raise
        library = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if library in EXTRAS:
            line = missing(library, "this command")
            print(f"seqboat {name}: error: {line}", file=sys.stderr)
            return 2
        kind = type(error).__name__
        print(f"seqboat {name}: {kind}: {one_line(error)} (--debug shows where)", file=sys.stderr)
        return 1


def _hyphens(word: str) -> str:
    """An option written with underscores; fields have dots."""
    name, equals, value = word.partition("=")
    plain = name.startswith("--") and "." not in name
    return name.replace("_", "-") + equals + value if plain else word


def _takes_fields(command: Any) -> bool:
    """Whether a command, or one of its verbs, takes settings by their dotted names."""
    if hasattr(command, "add_arguments"):
        return getattr(command, "TAKES_FIELDS", False)
    functions = [function for function, _ in getattr(command, "VERBS", {}).values()] or [command.run]
    return any(FIELDS in inspect.signature(function).parameters for function in functions)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Names of all options of a command and its verbs."""
    found: list[str] = []
    for action in parser._actions:
        found += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            found += [name for inner in action.choices.values() for name in _options(inner)]
    return found
