"""A parser from a function: its signature says what there is, its docstring what it means.

    def run(run: str, *files: Path, limit: Count | None = None, json: bool = False) -> int:
        '''Score a run on held-out data, or on files.

        Args:
            run: folder of a run.
            ...
        '''

Parameters before the star are positional, those after it options. A bool is a flag, a Literal a choice, a tuple takes
several words, a sequence is given several times, and a dataclass is a group of options. `fields` takes settings by
their dotted names. What follows the arguments is printed below the help. An argument without a text is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

KINDS = {int: ("an integer", "N"), float: ("a number", "X"), str: ("text", ""), Path: ("a path", "FILE")}
"""What messages and help call a type."""
FIELDS = "fields"
"""The parameter that takes settings by their dotted names."""


class Word:
    """Reads a word as a value of a type, an integer not below the least."""

    def __init__(self, kind: Any, least: int | None = None) -> None:
        self.kind, self.least = kind, least
        self.metavar = KINDS[kind][1]

    def __call__(self, word: str) -> Any:
        try:
            value = self.kind(word)
        except ValueError:
            value = None
        if value is None or (self.least is not None and value < self.least):
            bound = "" if self.least is None else f" >= {self.least}"
            said = repr(word) if value is None else word
            raise argparse.ArgumentTypeError(f"must be {KINDS[self.kind][0]}{bound}, got {said}")
        return value


Count = Annotated[int, Word(int, 1)]
Size = Annotated[int, Word(int, 0)]


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the whole usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=_Formatter)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): (?=must )", r"\1 ", message)
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help)\n")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=28, width=118)

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text


def fill(parser: argparse.ArgumentParser, function: Callable[..., int]) -> None:
    """Give a parser the arguments of a function."""
    about, texts, after = _documented(function)
    parser.description, parser.epilog = about, after
    hints = typing.get_type_hints(function, include_extras=True)
    words = []
    for name, parameter in inspect.signature(function).parameters.items():
        hint, default = hints[name], parameter.default
        if name == FIELDS:
            continue
        if dataclasses.is_dataclass(hint):
            title, inner, _ = _documented(hint)
            group = parser.add_argument_group(title.rstrip(".").lower())
            kinds = typing.get_type_hints(hint, include_extras=True)
            for field in dataclasses.fields(hint):
                _option(group, field.name, kinds[field.name], field.default, inner[field.name])
        elif parameter.kind is parameter.KEYWORD_ONLY:
            _option(parser, name, hint, default, texts[name])
        else:
            kind, choices, _ = _kind(hint)
            many = parameter.kind is parameter.VAR_POSITIONAL
            optional = "*" if many else None if default is parameter.empty else "?"
            word = name.upper() if choices is None else "{" + ",".join(choices) + "}"
            words.append(f"[{word}{' ...' if many else ''}]" if optional else word)
            usual = None if default is parameter.empty else default
            nargs: Any = {"nargs": optional} if optional else {}
            parser.add_argument(
                name, metavar=word, type=kind, choices=choices, help=texts[name], default=usual, **nargs
            )
    parser.usage = " ".join([parser.prog, *words, "[options]"])


def call(function: Callable[..., int], options: argparse.Namespace, fields: list[str]) -> int:
    """Call a function with what its parser read."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    hints = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if name == FIELDS:
            named[name] = fields
        elif dataclasses.is_dataclass(hints[name]):
            kind: Any = hints[name]
            named[name] = kind(
                **{field.name: getattr(options, field.name) for field in dataclasses.fields(kind)}
            )
        elif parameter.kind is parameter.VAR_POSITIONAL:
            positional.extend(getattr(options, name))
        elif parameter.kind is parameter.KEYWORD_ONLY:
            given = getattr(options, name)
            named[name] = parameter.default if given is None else given
        else:
            positional.append(getattr(options, name))
    return function(*positional, **named)


def _documented(thing: Any) -> tuple[str, dict[str, str], str]:
    """First line, the texts of the arguments, and what follows these."""
    lead, _, rest = inspect.cleandoc(thing.__doc__ or "").partition("\nArgs:\n")
    block, _, after = rest.partition("\n\n")
    texts: dict[str, str] = {}
    for line in block.splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            texts[name] = text.removesuffix(".")
        else:
            texts[name] += " " + line.strip().removesuffix(".")
    return " ".join(lead.split()), texts, after


def _kind(hint: Any) -> tuple[Any, Any, str]:
    """What reads a word, the words that are allowed, and how often: once, "repeated" or "several"."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) in (Sequence, tuple):
        kind, choices, _ = _kind(typing.get_args(hint)[0])
        return kind, choices, "several" if typing.get_origin(hint) is tuple else "repeated"
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint), ""
    if typing.get_origin(hint) is Annotated:
        return typing.get_args(hint)[1], None, ""
    return Word(hint), None, ""


def _option(parser: Any, name: str, hint: Any, default: Any, text: str) -> None:
    flag = "--" + name.strip("_").replace("_", "-")
    if hint is bool:
        parser.add_argument(flag, dest=name, action="store_true", help=text)
        return
    kind, choices, many = _kind(hint)
    if default not in (None, (), "", inspect.Parameter.empty):
        text += f" (default: {default})"
    form: dict[str, Any] = {"action": "append"} if many == "repeated" else {"nargs": "+"} if many else {}
    metavar = (
        None
        if choices
        else {"list": "X", "tuple": "X"}.get(many) or name.strip("_").split("_")[-1][:6].upper()
    )
    if default is inspect.Parameter.empty:
        form["required"] = True
    usual = None if form else default
    parser.add_argument(
        flag, dest=name, type=kind, choices=choices, metavar=metavar, default=usual, help=text, **form
    )
