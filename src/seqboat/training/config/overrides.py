"""Changing a configuration by dotted names, as the command line does."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqboat.core.checks import require
from seqboat.core.settings import types_of, union_members
from seqboat.training.config.fields import RunConfig
from seqboat.training.config.serialization import (
    RENAMED,
    Report,
    check_value,
    choice_of,
    chosen_defaults,
    class_of,
    from_dict,
    join_names,
    spell_type,
    to_dict,
    without_growth,
)


def _parse(hint: Any, words: Sequence[str], where: str) -> Any:
    """A value that came from the command line, checked against its type."""
    for member in union_members(hint):
        if typing.get_origin(member) is tuple:
            kinds = typing.get_args(member)
            items = [] if list(words) in ([""], ["[]"]) else list(words)
            if kinds[0] not in (str, Path):  # paths may hold commas
                items = [item for word in items for item in word.strip("[]()").split(",") if item]
            if kinds[-1] is not Ellipsis and len(kinds) != len(items):
                raise ValueError(f"{where} must be {len(kinds)} values, got {' '.join(words)}")
            kinds = (kinds[0],) * len(items) if kinds[-1] is Ellipsis else kinds
            return tuple(_parse(k, [i.strip()], where) for k, i in zip(kinds, items, strict=True))
    if len(words) != 1:
        raise ValueError(f"{where} must be {spell_type(hint)}, got {' '.join(words) or 'nothing'}")
    word = words[0]
    if type(None) in union_members(hint) and word.lower() in ("none", "null"):
        return None
    converted: list[Any] = []
    for member in union_members(hint):
        if member is bool and word.lower() in ("true", "false", "yes", "no", "1", "0"):
            converted.append(word.lower() in ("true", "yes", "1"))
        elif member is int:
            with contextlib.suppress(ValueError):
                converted.append(int(word))
        elif member is not type(None):
            converted.append(word)
    for value in converted:
        try:
            return check_value(hint, value, where)
        except ValueError:
            continue
    raise ValueError(f"{where} must be {spell_type(hint)}, got {word!r}")


def field_names(data: Mapping[str, Any], where: str = "") -> list[str]:
    """Dotted names of all fields of a configuration in dictionary form."""
    names = []
    for key, value in data.items():
        if key == "plugin":  # where a part comes from is no setting
            continue
        inner = join_names(where, key)
        names.append(inner)
        if isinstance(value, Mapping):
            names += field_names(value, inner)
    return names


def override(config: RunConfig, arguments: Sequence[str], report: Report | None = None) -> RunConfig:
    """Apply command-line overrides: `--a.b=value`, or `--a.b value` with as many values as a list takes.

    `--model.mixer NAME` picks another mixer, with the settings of the one before where it has them (`mixers.carry`);
    what it has no place for is reported. If its state grows with the text and the recipe carries states, segments are
    read one by one instead. Other options (task, router, ssm) start from their defaults. `--data.x` is `--task.x`.
    """
    data = to_dict(config)
    names = []
    for name, words in split_arguments(arguments):
        _set(data, name, words, report)
        names.append(name)
    return without_growth(config, from_dict(data), names, report)


def change_field(config: Any, path: str, value: Any, label: str) -> Any:
    """A configuration with another value of one field.

    Args:
        config: of a mixer or any other part.
        path: the field's name; those of parts are dotted.
        value: as it is, unchecked.
        label: what the messages begin with.

    >>> from seqboat import SeqBoatConfig
    >>> change_field(SeqBoatConfig(), "gau.window", 32, "mine").gau.window
    32
    """
    name, _, rest = path.partition(".")
    known = [field.name for field in dataclasses.fields(config)]
    require(
        name in known, f"{label}: {type(config).__name__} has no field {name!r}; it has {', '.join(known)}"
    )
    if rest:
        part = getattr(config, name)
        require(dataclasses.is_dataclass(part), f"{label}: {name} has no fields")
        value = change_field(part, rest, value, label)
    return dataclasses.replace(config, **{name: value})


def split_arguments(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Names and words of `--name=word` and `--name word word`."""
    pairs: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, word = argument[2:].partition("=")
            pairs.append((name, [word] if equals else []))
        elif pairs:
            pairs[-1][1].append(argument)
        else:
            raise ValueError(f"argument {argument!r} does not belong to any --name")
    return pairs


def _set(data: dict[str, Any], name: str, words: list[str], report: Report | None) -> None:
    path = name.split(".")
    typed = "data" if path[0] == "data" else RENAMED.get(path[0], path[0])
    path[0] = "task" if typed == "data" else typed
    # as the user writes it
    where = ".".join([typed, *path[1:]])
    node, hint = data, RunConfig
    for depth, part in enumerate(path):
        here = ".".join(path[:depth])
        cls = class_of(hint, node, here) if isinstance(node, Mapping) else None
        fields = types_of(cls) if cls else {}
        if part not in fields:
            known = field_names(data)
            if typed == "data":
                known = [f"data.{k[5:]}" if k.startswith("task.") else k for k in known]
            raise ValueError(_unknown_field(where, known))
        hint = fields[part]
        if depth < len(path) - 1:
            node = node[part]
    last = path[-1]
    if choice_of(hint) is not None:
        if len(words) != 1:
            raise ValueError(f"{where} must be {spell_type(hint)}, got {' '.join(words) or 'nothing'}")
        node[last] = chosen_defaults(hint, words[0], node[last], where, report)
    elif isinstance(node.get(last), Mapping):
        inner = ", ".join(f"{where}.{key}" for key in node[last])
        raise ValueError(f"{where} is a group of fields: set one of {inner}")
    else:
        value = _parse(hint, words or ["true"] if hint is bool else words, where)
        node[last] = to_dict(value)


def _unknown_field(name: str, known: Sequence[str]) -> str:
    same = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    near = same[:3] or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {' or '.join('--' + n for n in near)}?" if near else ""
    return f"--{name} is not a field of this configuration{hint}"
