"""Configurations as plain dictionaries and YAML, and back.

A part that can be one of several things (a mixer, a task, a router, a state-space layer) is a dictionary with its
`name`; everything else follows from the fields of the dataclasses and their types. Files are data: no tags, no
class paths, nothing is looked up by import. A part of a plug-in also says which one (`plugin`), so that loading can
tell what is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from seqboat.core.checks import ABSENT, require, short
from seqboat.core.settings import spell, types_of, union_members
from seqboat.data.files import open_regular
from seqboat.layers.routers import ROUTERS, RouterConfig
from seqboat.mixers import MIXERS
from seqboat.mixers.carry import carry_over
from seqboat.models.backbone import MixerConfig
from seqboat.plugins import RESERVED, check_record, load_plugins, record_of
from seqboat.ssm import SSMS, SSMConfig
from seqboat.tasks import TASKS
from seqboat.tasks.task import TaskConfig
from seqboat.training.config.fields import FREE_TO_CHANGE, RunConfig


class Choice(typing.NamedTuple):
    """A field that can be one of several dataclasses."""

    options: Mapping[str, Callable[[], Any]]
    """makes the default of each, by name"""

    def has(self, name: object) -> bool:
        """Whether there is an option of this name, of this package or of an installed plug-in."""
        if isinstance(name, str) and name not in self.options:
            load_plugins()
        return isinstance(name, str) and name in self.options

    def name_of(self, value: object) -> str:
        """The name under which a value's class is listed."""
        for name, make in self.options.items():
            if (make if isinstance(make, type) else type(make())) is type(value):
                return name
        raise ValueError(f"{type(value).__name__} is not one of {', '.join(self.options)}")


FAMILIES: Mapping[Any, Mapping[str, Callable[[], Any]]] = {
    MixerConfig: MIXERS,
    TaskConfig: TASKS,
    RouterConfig: ROUTERS,
    SSMConfig: SSMS,
}
"""Kinds of parts that a field may be one of, each with the registry that names them."""


def choice_of(hint: Any) -> Choice | None:
    """The options of a field, if it has any."""
    options = FAMILIES.get(hint)
    return None if options is None else Choice(options)


def to_dict(config: Any, hint: Any = None) -> Any:
    """A configuration as plain dictionaries, lists, numbers and words."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        choice = choice_of(hint)
        head = {"name": choice.name_of(config), **dict(record_of(type(config)))} if choice else {}
        fields = types_of(type(config))
        return head | {name: to_dict(getattr(config, name), fields[name]) for name in fields}
    if isinstance(config, tuple | list):
        return [to_dict(item) for item in config]
    return str(config) if isinstance(config, Path) else config


RENAMED = {"optimiser": "optimizer"}
"""Former names of groups of fields, which files and commands may still use."""


def modernize(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """A dictionary with the former names of its groups replaced by the present ones."""
    for old, new in RENAMED.items():
        if old in data:
            require(new not in data, f"{old} and {new} are the same group of fields: give one of them")
            data = {RENAMED.get(key, key): value for key, value in data.items()}
    return data


def from_dict(
    data: Mapping[str, Any], base: RunConfig | None = None, report: Report | None = None
) -> RunConfig:
    """A run's configuration from a dictionary; what it lacks comes from `base` or from the defaults.

    Args:
        data: as from `to_dict`, with any fields left out.
        base: the configuration that it changes.
        report: told what another mixer than that of `base` has no place for.
    """
    data = modernize(data)
    merged = data if base is None else _merge(to_dict(base), data, RunConfig, "", report)
    config = _read(RunConfig, merged, "")
    assert isinstance(config, RunConfig)
    if base is None:
        return config
    parts = [f"{part}.{name}" for part in ("model", "training") for name in data.get(part) or ()]
    return without_growth(base, config, parts, report)


def without_growth(
    base: RunConfig, config: RunConfig, changed: Sequence[str], report: Report | None
) -> RunConfig:
    """A changed configuration; if its mixer's state would grow with the text, segments are read one by one.

    Args:
        base: the configuration before; if its state grew already, nothing happens.
        config: the configuration after.
        changed: dotted names of what was changed. An explicit `training.carry_state` stands, and training refuses it.
        report: told if it happens.
    """
    mixer = any(name.startswith("model.mixer") for name in changed)
    if not mixer or "training.carry_state" in changed:
        return config
    if base.carries_growing_state() or not config.carries_growing_state():
        return config
    if report is not None:
        name = to_dict(config.model)["mixer"]["name"]
        report(
            f"the state of {name} grows with the text, so segments are read one by one, and the second half of each "
            "is scored: training.carry_state=false"
        )
    return config.by_segments()


def part_from_dict(kind: Any, data: Mapping[str, Any], where: str) -> Any:
    """A part of a configuration from a dictionary; what it lacks comes from the defaults.

    Args:
        kind: the type of the part, such as MixerConfig or BackboneConfig.
        data: its fields, and its name where there are several of the kind.
        where: what messages call it.
    """
    return _read(kind, data, where)


def join_names(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def class_of(hint: Any, data: Mapping[str, Any], where: str) -> type | None:
    """The dataclass that a dictionary describes."""
    choice = choice_of(hint)
    if choice is not None:
        name: Any = data.get("name")
        known = choice.has(name)
        if "plugin" in data:
            part = choice.options[name] if known else None
            check_record(data["plugin"], f"{where or 'configuration'} {short(name)}", part)
        if not known:
            raise ValueError(unknown_message(f"{where or 'configuration'}: name", name, choice.options))
        make = choice.options[name]
        return make if isinstance(make, type) else type(make())
    for member in union_members(hint):
        if dataclasses.is_dataclass(member):
            return member  # type: ignore[return-value]
    return None


def unknown_message(what: str, name: object, known: typing.Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(str(name)[:100], known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
    return f"{what} {short(name)} is unknown; {hint}"


def _read(hint: Any, data: Any, where: str) -> Any:
    if data is None and type(None) in union_members(hint):
        return None
    if isinstance(data, Mapping):
        cls = class_of(hint, data, where)
        if cls is None:
            raise ValueError(f"{where} must be {spell_type(hint)}, got a dictionary")
        fields = types_of(cls)
        given = {key: value for key, value in data.items() if key not in RESERVED or key in fields}
        for key in given:
            if key not in fields:
                raise ValueError(
                    unknown_message(
                        "field", join_names(where, str(key)), [join_names(where, f) for f in fields]
                    )
                )
        values = {key: _read(fields[key], value, join_names(where, key)) for key, value in given.items()}
        for field in dataclasses.fields(cls):
            former, siblings = field.metadata.get(ABSENT, (None, ()))
            if siblings and field.name not in given and all(name in given for name in siblings):
                # written in full by a version without this field: its numbers must come out again
                values[field.name] = former
        required = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
        for name in required:
            if name not in values:
                raise ValueError(f"{join_names(where, name)} is missing")
        choice = choice_of(hint)
        if choice is not None and not isinstance(choice.options[data["name"]], type):
            return dataclasses.replace(choice.options[data["name"]](), **values)
        return cls(**values)
    choice = choice_of(hint)
    if choice is not None and isinstance(data, str):
        return _read(hint, {"name": data}, where)
    return check_value(hint, data, where)


def spell_type(hint: Any) -> str:
    """A type in words."""
    members = union_members(hint)
    if len(members) > 1:
        return " or ".join(spell_type(m) for m in members)
    if (choice := choice_of(hint)) is not None:
        return "one of " + ", ".join(choice.options)
    if typing.get_origin(hint) is tuple:
        return "a list"
    if dataclasses.is_dataclass(hint):
        return "a dictionary"
    return {type(None): "null", bool: "true or false"}.get(hint) or spell(hint)


def check_value(hint: Any, data: Any, where: str) -> Any:
    """A value that came from YAML, JSON or Python, checked against its type."""
    for member in union_members(hint):
        origin = typing.get_origin(member)
        if member is type(None) and data is None:
            return None
        if origin is Literal and data in typing.get_args(member):
            return data
        if member is bool and isinstance(data, bool):
            return data
        if member is int and isinstance(data, int) and not isinstance(data, bool):
            return data
        if member is float and isinstance(data, int | float | str) and not isinstance(data, bool):
            with contextlib.suppress(ValueError):  # YAML reads 1e-3 as a word
                return float(data)
        if member is str and isinstance(data, str):
            return data
        if member is Path and isinstance(data, str | Path):
            return Path(data)
        if origin is tuple and isinstance(data, list | tuple):
            parts = typing.get_args(member)
            if parts[-1] is Ellipsis:
                return tuple(_read(parts[0], item, f"{where}[{i}]") for i, item in enumerate(data))
            if len(parts) == len(data):
                return tuple(
                    _read(p, item, f"{where}[{i}]")
                    for i, (p, item) in enumerate(zip(parts, data, strict=True))
                )
    raise ValueError(f"{where or 'configuration'} must be {spell_type(hint)}, got {short(data)}")


Report = Callable[[str], object]
"""Takes a line about a change that did not keep everything."""


def chosen_defaults(
    hint: Any, name: str, old: Any, where: str, report: Report | None = None
) -> dict[str, Any]:
    """The dictionary of another option: a mixer keeps the settings of the old one, the rest are defaults.

    Args:
        hint: type of the field.
        name: of the option.
        old: the dictionary of the option before.
        where: what messages call the field.
        report: told what a mixer has no place for.
    """
    choice = choice_of(hint)
    assert choice is not None
    if not choice.has(name):
        raise ValueError(unknown_message(where, name, choice.options))
    if hint is MixerConfig and isinstance(old, Mapping):
        carried = carry_over(_read(hint, old, where), name)
        line = carried.report()
        if line and report is not None:
            report(line)
        made = carried.mixer
    else:
        made = choice.options[name]()
    return {"name": name} | {key: value for key, value in to_dict(made, hint).items() if key != "name"}


def _merge(
    base: dict[str, Any], data: Mapping[str, Any], hint: Any, where: str, report: Report | None = None
) -> dict[str, Any]:
    """One dictionary over another; another name starts as `chosen_defaults` says."""
    choice = choice_of(hint)
    if choice is not None and "name" in data and data["name"] != base.get("name"):
        base = chosen_defaults(hint, data["name"], base, join_names(where, "name"), report)
    cls = class_of(hint, base, where)
    fields = types_of(cls) if cls else {}
    merged = dict(base)
    for key, value in data.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping) and key in fields:
            merged[key] = _merge(base[key], value, fields[key], join_names(where, key), report)
        else:
            merged[key] = value
    return merged


MAX_FILE = 1 << 17
"""Bytes of a configuration file beyond which it is refused."""


def to_yaml(config: RunConfig) -> str:
    """A configuration as YAML text, with every field."""
    import yaml

    return str(yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=None, width=100))


MAX_ALIASES = 16
"""Aliases in a YAML file beyond which it is refused: a few dozen can stand for a file of any size."""


MAX_DEPTH = 50
"""Levels of a YAML file beyond which it is refused: parsing takes the square of them."""


def _depth(text: str) -> int:
    """At least as many levels as a YAML text nests."""
    deepest = depth = 0
    for mark in re.findall(r"[\[{\]}]", text):
        depth = depth + 1 if mark in "[{" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    dashes = max((len(run) // 2 for run in re.findall(r"(?:- )+", text)), default=0)
    return max(deepest, dashes)


def _load_yaml(text: str) -> Any:
    import yaml

    require(_depth(text) <= MAX_DEPTH, "it is nested too deeply")
    aliases = sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))
    require(aliases <= MAX_ALIASES, f"more than {MAX_ALIASES} aliases in a YAML file")
    return yaml.safe_load(text)


def from_yaml(path: Path | str, base: RunConfig | None = None, report: Report | None = None) -> RunConfig:
    """Read a configuration from a YAML (or JSON) file; see `from_dict`."""
    import yaml

    path = Path(path)
    try:
        with open_regular(path) as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ValueError(f"cannot read the configuration {path}: {error.strerror}") from error
    require(
        len(content) <= MAX_FILE, f"{path} is too large for a configuration: more than {MAX_FILE:,} bytes"
    )
    try:
        data = _load_yaml(content.decode("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        raise ValueError(f"{path} is not plain YAML: {reason}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a dictionary of fields, got {type(data).__name__}")
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
        inner = join_names(name, key)
        if inner in FREE_TO_CHANGE or key == "plugin":
            continue
        found = _difference(old.get(key, "nothing"), new.get(key, "nothing"), inner)
        if found:
            return found
    return None
