"""No two places of the package share 12 or more equal lines of code.

Lines are compared without indentation. Blank lines, comments, docstrings (single strings that stand alone, as under a
field) and imports do not count: two modules may need the same ones, and two fields the same words.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import seqboat

PACKAGE = Path(seqboat.__file__).parent
LIMIT = 12


def code_lines(text: str) -> list[tuple[int, str]]:
    """Numbers and text of the lines of code, stripped, without what does not count."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        alone = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if alone or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt) and node.end_lineno is not None
            skipped |= set(range(node.lineno, node.end_lineno + 1))
    lines = [
        (number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if number not in skipped
    ]
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def repeated(sources: dict[str, str], limit: int = LIMIT) -> list[str]:
    """Places that share `limit` equal lines in a row."""
    places: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, text in sources.items():
        lines = code_lines(text)
        for start in range(len(lines) - limit + 1):
            window = tuple(line for _, line in lines[start : start + limit])
            places[window].append(f"{name}:{lines[start][0]}")
    return [" = ".join(found) for found in places.values() if len(found) > 1]


def test_no_long_passage_occurs_twice() -> None:
    sources = {
        str(p.relative_to(PACKAGE)): p.read_text(encoding="utf-8") for p in sorted(PACKAGE.rglob("*.py"))
    }
    assert repeated(sources) == []


@pytest.mark.parametrize("lines", [LIMIT - 1, LIMIT])
def test_repetition_is_found(lines: int) -> None:
    body = "\n\n".join(f"    x{i} = {i}  " for i in range(lines))
    sources = {
        "a.py": f'import os\ndef f():\n    """One."""\n{body}\n',
        "b.py": f"class C:\n  def g(self):\n    # other words\n{body.replace('x3', 'x3')}\n",
    }
    assert bool(repeated(sources)) == (lines == LIMIT)
