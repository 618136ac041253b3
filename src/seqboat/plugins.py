"""Plug-ins: tasks, mixers, routers, state-space kernels and recipes from other packages.

A plug-in is a module with any of the tables in `TABLES`, written like those of this package:

    MIXERS = {"running-mean": RunningMeanConfig}

It is loaded if an installed package names it as an entry point of the group `seqboat.plugins`, or if you name it
yourself: `--import my_module` on the command line, the environment variable SEQBOAT_IMPORT, or `load_plugin`. A run
records which plug-in each of its parts comes from, but nothing is imported because a file says so.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import sys
import typing
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

GROUP = "seqboat.plugins"
"""The group of entry points that packages put their plug-ins in."""
VARIABLE = "SEQBOAT_IMPORT"
"""Environment variable with modules to load, separated by commas; processes that a command starts inherit it."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
RESERVED = ("name", "plugin")
"""Keys that a part of a configuration has beside its fields."""


class Table(NamedTuple):
    """A registry that plug-ins can add to."""

    home: str
    """the module that has it"""
    what: str
    """is in it"""
    base: str | None = None
    """class in `home` that its entries derive from"""


TABLES = {
    "TASKS": Table("seqboat.tasks", "task"),
    "MIXERS": Table("seqboat.mixers", "mixer"),
    "ROUTERS": Table("seqboat.layers.routers", "router", "RouterConfig"),
    "SSMS": Table("seqboat.ssm", "state-space kernel", "SSMConfig"),
    "RECIPES": Table("seqboat.recipes", "recipe"),
}


class Plugin(NamedTuple):
    """A plug-in that was loaded, or that should have been."""

    module: str
    package: str | None
    """the installed package that declares it; None if it was named by hand"""
    version: str | None
    parts: Mapping[str, tuple[str, ...]]
    """names that it added, by table"""
    problem: str | None = None
    """why it could not be loaded"""

    @property
    def title(self) -> str:
        """What messages and lists call it."""
        return self.module if self.package is None else f"{self.module} ({self.package} {self.version})"


class MissingPlugin(ValueError):
    """Something needs a plug-in that is not loaded; the message says how to load it."""


class _State:
    """What has been loaded in this process."""

    def __init__(self) -> None:
        self.looked = False
        self.found: dict[str, Plugin] = {}
        self.owners: dict[Any, Plugin] = {}
        """the plug-in of each added class or function"""


_state = _State()


def load_plugins() -> None:
    """Load the plug-ins of installed packages, and those that SEQBOAT_IMPORT names, once per process.

    A plug-in of a package that cannot be loaded is left out with a warning. A module in SEQBOAT_IMPORT that cannot be
    loaded raises a ValueError.
    """
    if _state.looked:
        return
    _state.looked = True
    for entry in sorted(entry_points(group=GROUP)):
        _load_entry(entry)
    try:
        for module in re.split(r"[,\s]+", os.environ.get(VARIABLE, "").strip()):
            if module:
                load_plugin(module)
    except ValueError as error:
        _state.looked = False
        raise ValueError(f"{VARIABLE}: {error}") from error


def _load_entry(entry: EntryPoint) -> None:
    package = entry.dist.name if entry.dist is not None else entry.name
    version = entry.dist.version if entry.dist is not None else None
    try:
        if entry.attr:
            raise ValueError(f"its entry point must name a module, got {entry.value}")
        _load(entry.module, package, version)
    except ValueError as error:
        _state.found[entry.module] = Plugin(entry.module, package, version, {}, str(error))
        warnings.warn(f"the plug-in {entry.module} of {package} is skipped: {error}", stacklevel=3)


def load_plugin(module: str) -> Plugin:
    """Import a module and add what its tables name: tasks, mixers, routers, state-space kernels and recipes.

    Args:
        module: dotted name of the module, which is installed or in the current folder. A second call changes nothing.

    Returns:
        What was added: `plugin.parts` has the names by table.

    Raises:
        ValueError: saying what is wrong with the module; nothing of it is added then.
    """
    if module.endswith(".py") or os.sep in module:
        stem = os.path.basename(module).removesuffix(".py")
        raise ValueError(
            f"{module} is a file: give the name of the module, {stem}, in the folder of the file"
        )
    top = module.partition(".")[0]
    here = os.getcwd()
    if top not in sys.modules and here not in sys.path and importlib.util.find_spec(top) is None:
        sys.path.append(here)
    return _load(module)


def _load(module: str, package: str | None = None, version: str | None = None) -> Plugin:
    known = _state.found.get(module)
    if known is not None and known.problem is None:
        return known
    try:
        found = import_module(module)
    except (Exception, SystemExit) as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module}.".startswith(f"{error.name}.")
        ):
            raise ValueError(f"there is no module {error.name}, installed or in {os.getcwd()}") from error
        raise ValueError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    parts = {}
    for name in TABLES:
        if getattr(found, name, None) is not None:
            parts[name] = _checked(module, name, getattr(found, name))
    if not parts:
        raise ValueError(f"{module} has none of the tables {', '.join(TABLES)}")
    plugin = Plugin(module, package, version, {name: tuple(table) for name, table in parts.items()})
    for name, table in parts.items():
        _registry(name).update(table)
        _state.owners.update(dict.fromkeys(table.values(), plugin))
    _state.found[module] = plugin
    return plugin


def _registry(name: str) -> dict[str, Any]:
    found: dict[str, Any] = getattr(import_module(TABLES[name].home), name)
    return found


def _checked(module: str, name: str, table: Any) -> dict[str, Any]:
    """The table of a plug-in, if it can be added to ours."""
    if not isinstance(table, Mapping) or not table:
        raise ValueError(f"{module}.{name} must be a dictionary of names, got {type(table).__name__}")
    known = _registry(name)
    for key, value in table.items():
        where = f"{module}.{name}[{key!r}]"
        if not isinstance(key, str) or not NAME.fullmatch(key):
            raise ValueError(f"{where}: a name must consist of letters, digits, dots and hyphens")
        if key in known:
            owner = _state.owners.get(known[key])
            by = "seqboat" if owner is None else f"the plug-in {owner.title}"
            raise ValueError(f"{where}: {by} already has a {TABLES[name].what} of this name")
        if value in known.values():
            raise ValueError(f"{where}: {value.__name__} is already registered under another name")
        if name == "RECIPES":
            if not callable(value):
                raise ValueError(f"{where} must be a function that returns a RunConfig")
        else:
            _check_class(where, name, value)
    return dict(table)


def _check_class(where: str, name: str, value: Any) -> None:
    """Refuse a configuration class with which commands or saved runs would fail later."""
    if not isinstance(value, type) or not dataclasses.is_dataclass(value):
        raise ValueError(f"{where} must be a configuration class, a frozen dataclass, got {value!r}")
    table = TABLES[name]
    if table.base is not None and not issubclass(value, getattr(import_module(table.home), table.base)):
        raise ValueError(f"{where}: {value.__name__} must derive from {table.home}.{table.base}")
    if not callable(getattr(value, "build", None)):
        raise ValueError(f"{where}: {value.__name__} has no method build")
    fields = [field.name for field in dataclasses.fields(value)]
    for reserved in RESERVED:
        if reserved in fields:
            raise ValueError(f"{where}: {value.__name__} must not have a field {reserved!r}")
    if name == "MIXERS" and "causal" not in fields:
        raise ValueError(f"{where}: {value.__name__} needs a field causal, the direction of the mixer")
    try:
        typing.get_type_hints(value)
        value()
    except Exception as error:
        raise ValueError(
            f"{where}: {value.__name__}() must work without arguments, got {type(error).__name__}: {error}"
        ) from error


def found_plugins() -> list[Plugin]:
    """The plug-ins of this process in the order in which they were found, also those that have a problem."""
    return list(_state.found.values())


def plugin_of(part: Any) -> Plugin | None:
    """The plug-in that a configuration class or a recipe comes from; None for those of this package."""
    return _state.owners.get(part)


def check_record(module: Any, what: str, part: Any = None) -> None:
    """Compare the recorded origin of a part with what is loaded under its name.

    Args:
        module: of its plug-in; may come from a file of someone else.
        what: the part in words, such as "model.mixer 'running-mean'".
        part: what is loaded under the name; None if nothing is.

    Raises:
        MissingPlugin: if the part comes from a plug-in that is not loaded.
    """
    if not isinstance(module, str):
        raise ValueError(f"{what}: plugin must be the name of a module")
    owner, found, module = plugin_of(part), _state.found.get(module), module[:200]
    if owner is not None and owner.module == module:
        return
    lead = f"{what} comes from the plug-in {module}"
    if found is not None and found.problem is not None:
        raise MissingPlugin(f"{lead}, which cannot be loaded: {found.problem}")
    if found is not None:
        raise MissingPlugin(f"{lead}, which no longer has it")
    if owner is not None:
        raise MissingPlugin(f"{lead}, not from {owner.title}, which has the same name")
    raise MissingPlugin(
        f"{lead}: install its package, or add --import {module} (in Python, seqboat.load_plugin({module!r}))"
    )
