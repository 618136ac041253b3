"""Configurations as plain data: what files hold and what the command line changes.

    to_dict(config)                                            plain data, every field
    from_dict(data, base)                                      back; what is missing comes from base
    override(config, ["--model.mixer", "mega", "--seed=1"])
    difference(old, new)                                       the first field that differs, in words

A part with several forms (mixer, task, router, kernel) is a dictionary with its `name`. Files are data: nothing in
them is looked up by import. A part of a plug-in also says which one (`plugin`), so that loading can tell what is
missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from seqboat.core.checks import check_choice, require, short
from seqboat.core.settings import FAMILIES, check_type, field_texts, spell, types_of, union_members
from seqboat.data.files import open_regular
from seqboat.mixers.carry import carry_over
from seqboat.models.backbone import MixerConfig
from seqboat.plugins import RESERVED, check_record, load_plugins, plugin_of
from seqboat.tasks import TASKS as TASKS  # fills the table of tasks
from seqboat.training.config import FREE_TO_CHANGE, RunConfig

MAX_FILE = 1 << 17
"""Bytes of a configuration file beyond which it is refused."""
SHORT = {"data": "task"}
"""Other names of groups on the command line."""
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

Report = Callable[[str], object]
"""Takes a line about a change that did not keep everything."""


def to_dict(config: Any, hint: Any = None) -> Any:
    """A configuration as plain dictionaries, lists, numbers and words."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        head = {"name": name_of(hint, config)} if hint in FAMILIES else {}
        if hint in FAMILIES and (plugin := plugin_of(type(config))) is not None:
            head["plugin"] = plugin.module
        fields = types_of(type(config))
        return head | {name: to_dict(getattr(config, name), fields[name]) for name in fields}
    if isinstance(config, tuple | list):
        return [to_dict(item) for item in config]
    return str(config) if isinstance(config, Path) else config


def name_of(hint: Any, part: object) -> str:
    """The name of a part's form."""
    for name, kind in FAMILIES[hint].items():
        if kind is type(part):
            return name
    raise ValueError(f"{type(part).__name__} is not one of {', '.join(FAMILIES[hint])}")


def from_dict(
    data: Mapping[str, Any], base: RunConfig | None = None, report: Report | None = None
) -> RunConfig:
    """A run's configuration from a dictionary; what it lacks comes from `base` or from the defaults.

    Args:
        data: as from `to_dict`, with any fields left out.
        base: the configuration that it changes.
        report: told what another mixer than that of `base` has no place for.
    """
    config: RunConfig = part_from_dict(RunConfig, data, "", base, report)
    parts = [f"{part}.{name}" for part in ("model", "training") for name in data.get(part) or ()]
    return config if base is None else _by_segments(base, config, parts, report)


def part_from_dict(hint: Any, data: Any, where: str, now: Any = None, report: Report | None = None) -> Any:
    """A part of a configuration from plain data.

    Args:
        hint: the type of the part, such as MixerConfig or BackboneConfig.
        data: its fields, with its name where it has several forms; or a value.
        where: what messages call it.
        now: the part that it changes; what is missing comes from there, or from the defaults.
        report: told what another mixer has no place for.
    """
    if hint in FAMILIES and isinstance(data, str):
        data = {"name": data}
    if not isinstance(data, Mapping):
        return _value(hint, data, where)
    part = _form(hint, data, now, where, report)
    kinds, values = types_of(part if isinstance(part, type) else type(part)), {}
    for key, value in data.items():
        place = f"{where}.{key}" if where else str(key)
        if key in kinds:
            values[key] = part_from_dict(kinds[key], value, place, getattr(part, key, None), report)
        elif key not in RESERVED:
            known = [f"{where}.{kind}" if where else kind for kind in kinds]
            raise ValueError(unknown_message("field", place, known))
    if not isinstance(part, type):
        return dataclasses.replace(part, **values)
    for field in dataclasses.fields(part):
        given = field.name in values or field.default is not field.default_factory
        require(given, f"{where}.{field.name} is missing" if where else f"{field.name} is missing")
    return part(**values)


def _form(hint: Any, data: Mapping[str, Any], now: Any, where: str, report: Report | None) -> Any:
    """The part that a dictionary changes, or the class of a new one; a mixer keeps what it can of the one before."""
    if hint not in FAMILIES:
        members = [member for member in union_members(hint) if dataclasses.is_dataclass(member)]
        require(len(members) > 0, f"{where} must be {spell(hint)}, got a dictionary")
        return members[0] if now is None else now
    name, family = data.get("name"), FAMILIES[hint]
    if now is not None and name in (None, name_of(hint, now)):
        return now
    if isinstance(name, str) and name not in family:
        load_plugins()
    kind = family.get(name) if isinstance(name, str) else None
    if "plugin" in data:
        check_record(data["plugin"], f"{where or 'configuration'} {short(name)}", kind)
    if kind is None:
        raise ValueError(unknown_message(where or "configuration: name", name, family))
    if now is None or hint is not MixerConfig:
        return kind()
    carried = carry_over(now, kind)
    if report is not None and (line := carried.report()):
        report(line)
    return carried.mixer


def _value(hint: Any, data: Any, where: str) -> Any:
    """A value, checked against its type."""
    members = union_members(hint)
    for member in members:
        kinds = typing.get_args(member)
        if typing.get_origin(member) is tuple and isinstance(data, list | tuple):
            kinds = kinds[:1] * len(data) if kinds[-1] is Ellipsis else kinds
            require(len(kinds) == len(data), f"{where} must be {len(kinds)} values, got {short(data)}")
            return tuple(
                _value(kind, item, f"{where}[{i}]")
                for i, (kind, item) in enumerate(zip(kinds, data, strict=True))
            )
    check_type(where, hint, data)
    words = choices(hint)
    if words and isinstance(data, str) and str not in members:
        check_choice(where, data, words)
    if isinstance(data, int) and not isinstance(data, bool) and float in members and int not in members:
        return float(data)
    return Path(data) if Path in members and isinstance(data, str) else data


def choices(hint: Any) -> tuple[Any, ...]:
    """The words that a field may be."""
    literals = [member for member in union_members(hint) if typing.get_origin(member) is Literal]
    return tuple(word for member in literals for word in typing.get_args(member))


def unknown_message(what: str, name: object, known: typing.Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(str(name)[:100], known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
    return f"{what} {short(name)} is unknown; {hint}"


def _by_segments(
    base: RunConfig, config: RunConfig, changed: Sequence[str], report: Report | None
) -> RunConfig:
    """A changed configuration; if only its new mixer's state grows with the text, segments are read one by one.

    An explicit `training.carry_state` stands, and training refuses it.
    """
    mixer = any(name.startswith("model.mixer") for name in changed)
    if not mixer or "training.carry_state" in changed or base.carries_growing_state():
        return config
    if not config.carries_growing_state():
        return config
    if report is not None:
        name = name_of(MixerConfig, config.model.mixer)
        report(
            f"the state of {name} grows with the text, so segments are read one by one, and the second half of each "
            "is scored: training.carry_state=false"
        )
    return config.by_segments()


# files


def to_json(config: RunConfig) -> str:
    """A configuration as JSON text, with every field."""
    return json.dumps(to_dict(config), indent=1) + "\n"


def read_config(path: Path | str, base: RunConfig | None = None, report: Report | None = None) -> RunConfig:
    """Read a configuration from a JSON file; see `from_dict`."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ValueError(f"cannot read the configuration {path}: {error.strerror}") from error
    large = f"{path} is too large for a configuration: more than {MAX_FILE:,} bytes"
    require(len(content) <= MAX_FILE, large)
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{path} is not JSON: {reason}") from error
    require(isinstance(data, dict), f"{path} must hold an object of fields, got {type(data).__name__}")
    try:
        return from_dict(data, base, report)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def difference(old: RunConfig, new: RunConfig) -> str | None:
    """The first field in which two runs differ, with both values; None if one may continue the other.

    Fields that decide where a run happens and what is seen of it, not its numbers, may differ.
    """
    return _difference(to_dict(old), to_dict(new), "")


def _difference(old: Any, new: Any, name: str) -> str | None:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return None if old == new else f"{name} is {short(new)}, it was {short(old)}"
    for key in [*old, *(k for k in new if k not in old)]:
        inner = f"{name}.{key}" if name else key
        if inner in FREE_TO_CHANGE or key == "plugin":
            continue
        found = _difference(old.get(key, "nothing"), new.get(key, "nothing"), inner)
        if found:
            return found
    return None


# the command line


def override(config: RunConfig, arguments: Sequence[str], report: Report | None = None) -> RunConfig:
    """Apply command-line overrides: `--a.b=value`, or `--a.b value` with as many values as a list takes.

    `--model.mixer NAME` picks another mixer, with the settings of the one before where it has them (`mixers.carry`);
    what it has no place for is reported. If its state grows with the text and the recipe carries states, segments are
    read one by one instead. Other parts (task, router, ssm) start from their defaults. `--data.x` is `--task.x`.
    """
    base, changed = config, []
    pending: dict[str, Any] = {}
    for name, words in split_arguments(arguments):
        path = name.split(".")
        path[0] = SHORT.get(path[0], path[0])
        hint, part = _find(config, path, name)
        if hint in FAMILIES:
            require(
                len(words) == 1, f"--{name} must be one of {', '.join(FAMILIES[hint])}, got {_said(words)}"
            )
            # what is chosen takes over what was set before
            config, pending = part_from_dict(RunConfig, pending, "", config), {}
            chosen = _nested(path, {"name": words[0]}, {})
            config = part_from_dict(RunConfig, chosen, "", config, report)
        else:
            inner = (
                ", ".join(f"--{name}.{key}" for key in types_of(type(part)))
                if dataclasses.is_dataclass(part)
                else ""
            )
            require(not inner, f"--{name} is a group of fields: set one of {inner}")
            value = _parse(hint, words or ["true"] if hint is bool else words, f"--{name}")
            _value(hint, value, f"--{name}")
            _nested(path, value, pending)
        changed.append(".".join(path))
    config = part_from_dict(RunConfig, pending, "", config)
    return _by_segments(base, config, changed, report)


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


def _find(config: RunConfig, path: Sequence[str], name: str) -> tuple[Any, Any]:
    """Type and value of a field; the message about a wrong name has the nearest."""
    hint: Any = RunConfig
    part: Any = config
    for key in path:
        if part is None:  # a part that may be left out
            part = next((kind for kind in union_members(hint) if dataclasses.is_dataclass(kind)), None)
        kinds = (
            types_of(part if isinstance(part, type) else type(part)) if dataclasses.is_dataclass(part) else {}
        )
        if key not in kinds:
            known = [setting.name for setting in describe(config)]
            same = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
            near = same[:3] or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"; did you mean {' or '.join('--' + n for n in near)}?" if near else ""
            raise ValueError(f"--{name} is not a field of this configuration{hint}")
        hint, part = kinds[key], getattr(part, key, None)
    return hint, part


def _nested(path: Sequence[str], value: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Dictionaries with a value at a path."""
    node = data
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = value
    return data


def _said(words: Sequence[str]) -> str:
    return " ".join(words) or "nothing"


def _parse(hint: Any, words: Sequence[str], where: str) -> Any:
    """Words as a value, which may not fit its type."""
    members = union_members(hint)
    for member in members:
        if typing.get_origin(member) is tuple:
            kind = typing.get_args(member)[0]
            items = [] if list(words) in ([""], ["[]"]) else list(words)
            if kind not in (str, Path):  # paths may hold commas
                items = [item for word in items for item in word.strip("[]()").split(",") if item]
            return [_parse(kind, [item.strip()], where) for item in items]
    require(len(words) == 1, f"{where} must be {spell(hint)}, got {_said(words)}")
    word = words[0]
    if type(None) in members and word.lower() in ("none", "null"):
        return None
    if bool in members and word.lower() in WORDS:
        return WORDS[word.lower()]
    for kind in (int, float):
        if kind in members:
            with contextlib.suppress(ValueError):
                return kind(word)
    return word


class Setting(NamedTuple):
    """One setting."""

    name: str
    """as the command line takes it"""
    value: str
    text: str


def describe(config: Any, where: str = "") -> Iterator[Setting]:
    """Every setting of a configuration, in its order.

    >>> from seqboat.recipes import find_recipe
    >>> list(describe(find_recipe("recall")()))[1]
    Setting(name='data.length', value='64', text='Tokens per example.')
    """
    texts = field_texts(type(config))
    for name, hint in types_of(type(config)).items():
        value, path = getattr(config, name), f"{where}.{name}" if where else name
        path = "data" if path == "task" else path
        words = ", ".join(map(str, choices(hint)))
        text = texts.get(name, "") + (f" One of {words}." if words else "")
        if hint in FAMILIES:
            yield Setting("task" if path == "data" else path, name_of(hint, value), text)
        if dataclasses.is_dataclass(value):
            yield from describe(value, path)
        elif hint not in FAMILIES:
            shown = " ".join(map(str, value)) or "(none)" if isinstance(value, tuple) else str(value)
            yield Setting(path, shown if shown else '""', text)
