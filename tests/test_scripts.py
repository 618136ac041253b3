"""Recipes of tables 4 and 5 against the published command lines, field by field."""

from __future__ import annotations

import re

import pytest

from published_scripts import (
    DIFFERENCES,
    REASONS,
    SCRIPTS,
    TABLE_4,
    TABLE_5,
    compare,
    comparison,
)
from seqboat.recipes import RECIPES, find_recipe
from seqboat.training.settings_io import override


def test_every_recipe_of_the_paper_has_its_command_line() -> None:
    assert set(SCRIPTS) == {name.removesuffix("-small") for name in RECIPES if name.endswith("-small")}
    assert set(SCRIPTS) == {*TABLE_4, "enwik8"}


@pytest.mark.parametrize("recipe", SCRIPTS)
def test_recipes_equal_the_published_command_lines(recipe: str) -> None:
    """Field by field, but for those with a reason; the printed table names them all."""
    lines = compare(recipe)
    print("\n".join(comparison(recipe)))
    assert len(lines) >= 30
    for line in lines:
        reason = REASONS.get((recipe, line.field))
        assert line.equal == (reason is None), line


@pytest.mark.parametrize("recipe", SCRIPTS)
def test_recipes_equal_the_tables_of_the_paper(recipe: str) -> None:
    paper = TABLE_5 if recipe == "enwik8" else TABLE_4[recipe]
    found = {line.field: line for line in compare(recipe)}
    assert set(paper) <= set(found)
    for field, value in paper.items():
        assert found[field]._replace(published=value).equal, found[field]


def test_a_comparison_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print("\n".join(comparison("lra.pathx")))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["lra.pathx", "paper", "script", "ours"]
    (layers,) = (line for line in shown if line.startswith("--encoder-layers"))
    assert layers.split()[1:4] == ["6", "4", "6"]


def recipe_for(where: str) -> str:
    """A recipe that a difference concerns."""
    names = {
        "Path-X": "lra.pathx",
        "Retrieval": "lra.retrieval",
        "Text": "lra.text",
        "Speech": "speech",
        "enwik8": "enwik8",
        "Sigmoid": "ablations.image.sigmoid",
        "S4D": "ablations.image.full-s4d",
        "Gumbel": "ablations.image.full-gumbel",
    }
    return next((name for word, name in names.items() if where.startswith(word)), "lra.listops")


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.where)
def test_switches_work(difference: tuple[str, ...]) -> None:
    where, *_, switch = difference
    config = find_recipe(recipe_for(where))()
    typed = re.findall(r"--[a-z_.]+=[a-z0-9.]+", switch)
    assert typed or switch == "none" or where.startswith(("S4D", "bias"))
    for argument in typed:
        assert override(config, [argument]) != config
