"""Changing the mixer keeps the recipe: settings that both mixers have carry over.

Settings are compared by meaning, which is a field's name with a few exceptions (`MEANINGS`): the chunk of MEGA is the
window of SeqBoat. A variant of a mixer keeps what makes it a variant: SeqBoat-mem32 has a window of 32 whatever the
window was before. Settings that the new mixer does not support are dropped and reported.

    carry_over(lra.image().model.mixer, "mega")        the command line, files and recipes all use this
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, Literal, NamedTuple, get_args, get_origin

from seqboat.core.checks import require
from seqboat.core.mixer import directions_of
from seqboat.layers.routers import RouterConfig
from seqboat.mixers import MIXERS
from seqboat.ssm import SSMConfig

WHOLE = (RouterConfig, SSMConfig)
"""Parts that carry over as a whole or not at all."""
MEANINGS = {"chunk": "window", "ema": "ssm"}
"""Fields with another name for the same thing."""
APART = ("ffn", "init")
"""Fields that mean the same only in variants of one mixer: SeqBoat's block is beside attention, MEGA's after it, and
each mixer has its own initial weights."""
SYNONYMS = {
    "original": "relative",
    "compressed": "relative",
    "relative": "original",
    "rotary-original": "rotary",
}
"""Values with another name for the same thing, or for the nearest that there is."""


class Carried(NamedTuple):
    """A new mixer with the settings of another one."""

    mixer: Any
    """its configuration"""
    left: tuple[str, ...]
    """settings that it has no place for"""
    change: str
    """names of the two mixers"""

    def report(self) -> str | None:
        """What was left behind, in one line; None if nothing was."""
        return f"{self.change}: not carried over: {', '.join(self.left)}" if self.left else None


def carry_over(old: Any, new: str | type) -> Carried:
    """Configure another mixer with the settings of the one before.

    Args:
        old: configuration of a mixer.
        new: name in MIXERS, or a configuration class.
    """
    kind = MIXERS[new] if isinstance(new, str) else new
    have, places = _settings(old), _settings(kind())
    ancestor = _common(type(old), kind)
    kept_apart = set(APART) if ancestor is None else _variant_fields(ancestor, type(old), kind)
    changes: dict[str, Any] = {}
    left = []
    usual = dict(_settings(type(old)()).values())
    for meaning, (path, value) in have.items():
        if path == "causal" or path in kept_apart:
            continue
        found = _accepted(kind, places, meaning, path, value)
        if found is not None:
            changes[found[0]] = found[1]
        elif value != usual.get(path) and path != "init":  # how weights start is no setting of another mixer
            left.append(meaning if dataclasses.is_dataclass(value) else f"{meaning}={value}")
    return Carried(
        _with_direction(_apply(kind(), changes), old), tuple(left), f"{_name(type(old))} -> {_name(kind)}"
    )


def _name(kind: type) -> str:
    return next((name for name, known in MIXERS.items() if known is kind), kind.__name__)


def _settings(config: Any, inside: str = "") -> dict[str, tuple[str, Any]]:
    """Every setting of a configuration: its meaning, its dotted path and its value."""
    found: dict[str, tuple[str, Any]] = {}
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), inside + field.name
        if dataclasses.is_dataclass(value) and not isinstance(value, WHOLE):
            found |= _settings(value, f"{path}.")
        else:
            name = path.removeprefix("gau.")
            found[MEANINGS.get(name, name)] = (path, value)
    return found


def _common(old: type, new: type) -> type | None:
    """The mixer that two are variants of."""
    return next((kind for kind in new.__mro__ if kind in MIXERS.values() and issubclass(old, kind)), None)


def _variant_fields(ancestor: type, *variants: type) -> set[str]:
    """Paths in which variants differ from the mixer that they are variants of."""
    usual = dict(_settings(ancestor()).values())
    return {
        path
        for variant in variants
        for path, value in _settings(variant()).values()
        if path in usual and usual[path] != value
    }


def _accepted(
    kind: type, places: dict[str, tuple[str, Any]], meaning: str, path: str, value: Any
) -> tuple[str, Any] | None:
    """Where a setting belongs in the new mixer, and its value there; None if there is no place for it."""
    if meaning not in places:
        return None
    place, default = places[meaning]
    if place != path and default is None and meaning in MEANINGS.values():
        return None  # None says that there is no such thing: MEGA without chunks
    for candidate in (value, SYNONYMS.get(value) if isinstance(value, str) else None):
        if candidate is not None or value is None:
            try:
                _checked(kind, place, candidate)
            except ValueError:
                continue
            return place, candidate
    return None


def _checked(kind: type, path: str, value: Any) -> None:
    """Refuse a value that a field cannot have by its type, or alone."""
    *parts, last = path.split(".")
    owner = functools.reduce(getattr, parts, kind())
    hint = typing.get_type_hints(type(owner))[last]
    if get_origin(hint) is Literal:
        require(value in get_args(hint), f"{last} cannot be {value!r}")
    if isinstance(hint, type) and dataclasses.is_dataclass(value):
        require(isinstance(value, hint), f"{last} cannot be {type(value).__name__}")
    dataclasses.replace(owner, **{last: value})


def _apply(config: Any, changes: dict[str, Any]) -> Any:
    """A configuration with other values of fields, by their dotted paths; parts change in one go."""
    inner: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        inner.setdefault(name, {})[rest] = value
    values = {
        name: given[""] if "" in given else _apply(getattr(config, name), given)
        for name, given in inner.items()
    }
    return dataclasses.replace(config, **values)


def _with_direction(config: Any, old: Any) -> Any:
    """The direction of the old mixer: the task decides it. What needs no causal mixer can do with one."""
    causal = getattr(old, "causal", False)
    if not causal and "bidirectional" not in directions_of(config):
        return config
    return dataclasses.replace(config, causal=causal)
