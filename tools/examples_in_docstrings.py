"""An extension of griffe, which reads our docstrings for the documentation site.

Examples in docstrings are plain doctests; on a page they must be code blocks, or Markdown takes >>> for quotations.
"""

from __future__ import annotations

from typing import Any

try:
    from griffe import Extension
except ImportError:  # the tests look at `fence` where griffe is not installed
    Extension = object


def fence(text: str) -> str:
    """A docstring whose doctests are fenced code blocks.

    >>> print(fence("Adds.\\n\\n>>> 1 + 1\\n2\\n\\nMore."))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    More.
    """
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        starts = line.lstrip().startswith(">>> ")
        if starts and not inside:
            lines += [*([""] if lines and lines[-1] else []), "```pycon"]
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)


class Examples(Extension):
    """Fences the doctests of every docstring."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)
