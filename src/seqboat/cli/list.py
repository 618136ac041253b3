"""`seqboat list`: the names that other commands accept."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

WHAT = ("recipes", "rows", "ablations", "mixers", "tasks", "routers", "ssms", "plugins")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("what", choices=WHAT, help="what to list")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.plugins import plugin_of

    if options.what == "plugins":
        return _plugins()
    things = table(options.what)
    width = max(22, *map(len, things))
    for name, thing in things.items():
        plugin = plugin_of(thing)
        origin = "" if plugin is None else f" [plug-in {plugin.title}]"
        print(f"{name:<{width}} {first_sentence(thing)}{origin}")
    return 0


def _plugins() -> int:
    """What is loaded from where, and what is not."""
    from seqboat.plugins import GROUP, failed_plugins, loaded_plugins

    for plugin in loaded_plugins():
        parts = "; ".join(f"{table.lower()}: {', '.join(names)}" for table, names in plugin.parts.items())
        print(f"{plugin.title}  {parts}")
    for module, reason in failed_plugins().items():
        print(f"{module}  skipped: {reason}")
    if not loaded_plugins() and not failed_plugins():
        print(
            f"no plug-ins: no installed package has an entry point in the group {GROUP}, and --import was not given"
        )
    return 0


def table(what: str) -> Mapping[str, Any]:
    """All entries of a registry, by name."""
    if what == "recipes":
        from seqboat.recipes import RECIPES

        return RECIPES
    if what == "rows":
        from seqboat.recipes import ROW_RECIPES

        return ROW_RECIPES
    if what == "ablations":
        from seqboat.recipes import ABLATIONS

        return ABLATIONS
    if what == "mixers":
        from seqboat.mixers import MIXERS

        return MIXERS
    if what == "routers":
        from seqboat.layers.routers import ROUTERS

        return ROUTERS
    if what == "ssms":
        from seqboat.ssm import SSMS

        return SSMS
    from seqboat.tasks import TASKS

    return TASKS


def first_sentence(thing: Any) -> str:
    """The first line of a docstring."""
    return (thing.__doc__ or "").strip().split("\n")[0]
