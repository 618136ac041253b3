"""`seqboat list`: the names that other commands accept."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

WHAT = ("recipes", "rows", "ablations", "mixers", "tasks", "routers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("what", choices=WHAT, help="what to list")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    things = table(options.what)
    width = max(22, *map(len, things))
    for name, thing in things.items():
        print(f"{name:<{width}} {first_sentence(thing)}")
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
        from seqboat.core.routers import ROUTERS

        return ROUTERS
    from seqboat.tasks import TASKS

    return TASKS


def first_sentence(thing: Any) -> str:
    """The first line of a docstring."""
    return (thing.__doc__ or "").strip().split("\n")[0]
