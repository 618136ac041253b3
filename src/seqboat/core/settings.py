"""Settings: configurations that name the wrong argument, and layers that take their settings as keywords.

GAUConfig(window="128")                        TypeError: GAUConfig: window must be an integer, got '128'
GAUConfig(windw=128)                           TypeError: GAUConfig has no setting 'windw'; did you mean 'window'?
SeqBoat(64, causal=True, window=128)           the same as SeqBoatConfig(causal=True, gau=GAUConfig(window=128))
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from seqboat.core.checks import check_positive, short

Config = TypeVar("Config")

FAMILIES: dict[Any, dict[str, Any]] = {}
"""Kinds of parts that have several forms, with the forms by name; every registry adds its own."""


class WrongArgument(TypeError, ValueError):
    """An argument of a wrong type, or one that does not exist; a ValueError too, as every mistake in a file is."""


class Settings:
    """The base of configurations, which are frozen dataclasses with keywords only."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        # before __init__: its own message would name neither the class nor the nearest keyword
        known = types_of(cls)
        if args:
            raise WrongArgument(
                f"{cls.__name__} takes its settings by name, got {short(args[0])} without one"
            )
        for name, value in values.items():
            if name not in known:
                raise WrongArgument(unknown(cls.__name__, "setting", name, known))
            check_type(f"{cls.__name__}: {name}", known[name], value)
        return super().__new__(cls)


def types_of(cls: Any) -> dict[str, Any]:
    """Types of the fields of a dataclass."""
    return _types_of(cls)


@cache
def _types_of(cls: Any) -> dict[str, Any]:
    found = typing.get_type_hints(cls)
    return {field.name: found[field.name] for field in dataclasses.fields(cls)}


def field_texts(cls: Any) -> dict[str, str]:
    """The text under each field of a dataclass or a named tuple, from its source.

    >>> from seqboat import GAUConfig
    >>> field_texts(GAUConfig)["window"]
    'Size of the working memory, or of a chunk.'
    """
    return _field_texts(cls)


@cache
def _field_texts(cls: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if owner.__module__.partition(".")[0] in ("builtins", "typing", "abc"):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in itertools.pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def unknown(owner: str, what: str, name: str, known: Iterable[str], further: Iterable[str] = ()) -> str:
    """The message that a name is unknown, with the nearest one that is known, or all of them but the further ones.

    >>> unknown("GAUConfig", "setting", "windw", ["window", "span"])
    "GAUConfig has no setting 'windw'; did you mean 'window'?"
    """
    known = list(known)
    near = difflib.get_close_matches(name, [*known, *further], n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
    return f"{owner} has no {what} {name!r}; {hint}"


def union_members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def check_type(name: str, hint: Any, value: Any) -> None:
    """Raise a WrongArgument unless the value is of the type; which values a type allows is not checked here."""
    if not _fits(hint, value):
        raise WrongArgument(f"{name} must be {spell(hint)}, got {short(value)}")


def _fits(hint: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if len(union_members(hint)) > 1:
        return any(_fits(member, value) for member in arguments)
    if hint is None or hint is type(None):
        return value is None
    if origin is Literal:
        return type(value) in {type(word) for word in arguments}
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    if origin is tuple:
        each = isinstance(value, tuple | list)
        return each and (arguments[-1] is not Ellipsis or all(_fits(arguments[0], item) for item in value))
    if hint is Path:
        return isinstance(value, Path | str)
    if getattr(hint, "_is_protocol", False):
        return callable(getattr(value, "build", None))
    return not isinstance(hint, type) or isinstance(value, hint)


def spell(hint: Any) -> str:
    """A type in words.

    >>> spell(int | None), spell(tuple[int, ...])
    ('an integer or None', 'a tuple')
    """
    members = union_members(hint)
    if len(members) > 1:
        return " or ".join(map(spell, members))
    if hint is None or hint is type(None):
        return "None"
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return "a tuple"
    words = {int: "an integer", float: "a number", bool: "True or False", str: "text", Path: "a path"}
    name = getattr(hint, "__name__", str(hint))
    article = "an" if name[:1] in "AEIOU" or name[:2] in ("S4", "S5", "SS", "XM") else "a"
    return words.get(hint) or f"{article} {name}"


def fill_in(
    kind: type[Config],
    config: Config | None,
    options: Mapping[str, Any],
    owner: object,
    d_model: Any = 1,
) -> Config:
    """The configuration of a layer that was given one, or settings as keywords, or both.

    A keyword is a field of the configuration, or a field of one of its parts that only one of them has: `window` is
    that of `gau`. Parts that come in several forms can be given by name: `router="sigmoid"`.

    Args:
        kind: class of the configuration.
        config: given to the layer; None for the defaults.
        options: keywords given to the layer.
        owner: the layer, which messages name.
        d_model: its width, checked here because every layer has one.
    """
    name = type(owner).__name__
    check_type(f"{name}: d_model", int, d_model)
    check_positive("d_model", d_model)
    if config is not None and not isinstance(config, kind):
        raise WrongArgument(
            f"{name}: config must be {spell(kind)}, got {short(config)}; single settings are given by name"
        )
    base = kind() if config is None else config
    own = types_of(type(base))
    base = _replace(
        base, {key: _part(own[key], key, value) for key, value in options.items() if key in own}, name
    )
    deeper = {key: value for key, value in options.items() if key not in own}
    places = _places(base) if deeper else {}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in deeper.items():
        if key not in places:
            arguments = [word for word in inspect.signature(type(owner)).parameters if word != "options"]
            raise WrongArgument(unknown(name, "argument", key, [*arguments, *own], places))
        if len(places[key]) > 1:
            listed = " and ".join(f"{part}.{key}" for part in places[key])
            raise WrongArgument(f"{name}: {key!r} could be {listed}; give the whole part")
        inner.setdefault(places[key][0], {})[key] = value
    # parts inside of parts first
    for path in sorted(inner, key=lambda path: -path.count(".")):
        base = _change(base, path, inner[path], name)
    return base


def _part(hint: Any, name: str, value: Any) -> Any:
    """A value, or the default of the form that it names."""
    for member in union_members(hint):
        table = FAMILIES.get(member)
        if isinstance(value, str) and table is not None:
            if value not in table:
                raise ValueError(unknown(name, "form", value, table))
            return table[value]()
    return value


def _places(config: Any) -> dict[str, list[str]]:
    """Fields of the parts of a configuration, with the parts that have them; those nearer to the top come first."""
    found: dict[str, list[str]] = {}
    level = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    while level := {path: part for path, part in level.items() if dataclasses.is_dataclass(part)}:
        here: dict[str, list[str]] = {}
        below: dict[str, Any] = {}
        for path, part in level.items():
            for field in dataclasses.fields(part):
                here.setdefault(field.name, []).append(path)
                below[f"{path}.{field.name}"] = getattr(part, field.name)
        found = here | found
        level = below
    return found


def _change(config: Any, path: str, values: Mapping[str, Any], owner: str) -> Any:
    head, _, rest = path.partition(".")
    if not head:
        own = types_of(type(config))
        return _replace(config, {key: _part(own[key], key, value) for key, value in values.items()}, owner)
    part = _change(getattr(config, head), rest, values, owner)
    return dataclasses.replace(config, **{head: part})


def _replace(config: Any, values: Mapping[str, Any], owner: str) -> Any:
    """A changed copy; errors name the layer."""
    for key, value in values.items():
        check_type(f"{owner}: {key}", types_of(type(config))[key], value)
    return dataclasses.replace(config, **values) if values else config
