"""The settings of a configuration with their texts and values, for help."""

from __future__ import annotations

import dataclasses
import textwrap
import typing
from typing import Any, Literal, NamedTuple

from seqboat.core.settings import field_texts, types_of, union_members
from seqboat.training.config.fields import RunConfig
from seqboat.training.config.serialization import choice_of, join_names


class Setting(NamedTuple):
    """One setting."""

    name: str
    """dotted"""
    value: str
    text: str


def describe_settings(config: Any, where: str = "") -> list[Setting]:
    """Every setting of a configuration, in its order.

    >>> from seqboat.recipes import find_recipe
    >>> describe_settings(find_recipe("recall")())[1]
    Setting(name='task.length', value='64', text='Tokens per example.')
    """
    found: list[Setting] = []
    texts = field_texts(type(config))
    for name, hint in types_of(type(config)).items():
        value, path = getattr(config, name), join_names(where, name)
        choice = choice_of(hint)
        words = [
            w
            for member in union_members(hint)
            if typing.get_origin(member) is Literal
            for w in typing.get_args(member)
        ]
        text = texts.get(name, "") + (f" One of {', '.join(map(str, words))}." if words else "")
        if choice is not None:
            found.append(Setting(path, choice.name_of(value), text))
        if dataclasses.is_dataclass(value):
            found += describe_settings(value, path)
        elif choice is None:
            shown = " ".join(map(str, value)) or "(none)" if isinstance(value, tuple) else str(value)
            found.append(Setting(path, shown if shown else '""', text))
    return found


def settings_help(config: RunConfig, width: int = 110) -> str:
    """The settings as the command line shows them: name, value, and the text below."""
    lines = []
    for setting in describe_settings(config):
        name = setting.name.replace("task.", "data.", 1) if setting.name.startswith("task.") else setting.name
        lines.append(f"  --{name} {setting.value}")
        lines += textwrap.wrap(setting.text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)
