"""Figures as files, in every theme and format; the same figure always gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from seqboat.core.checks import require
from seqboat.data.files import replacing
from seqboat.figures.style import THEMES, Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "pdf", "png")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format of its suffix, atomically.

    Args:
        figure: to write.
        path: ends with .png, .svg or .pdf.
    """
    from matplotlib import rc_context

    path = Path(path)
    kind = path.suffix[1:].lower()
    require(kind in FORMATS, f"the name of a picture must end with .png, .svg or .pdf, got {path.name!r}")
    # no dates and no random names: the same figure gives the same file
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    with rc_context({"svg.hashsalt": "seqboat"}), replacing(path) as stage:
        figure.savefig(stage, format=kind, dpi=110, metadata=metadata)


def write_figure(
    make: Callable[[Theme], Figure],
    path: str | Path,
    formats: Sequence[str] = ("svg", "png"),
    themes: Sequence[Theme] = THEMES,
) -> list[Path]:
    """Draw a figure in every theme and write it in every format.

    Args:
        make: draws it in a theme.
        path: without an ending; the dark ones end with -dark.
        formats: of svg, pdf and png.
        themes: light, dark or both.

    Returns:
        The files.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for theme in themes:
        figure = make(theme)
        for kind in formats:
            name = path.name + ("" if theme == "light" else f"-{theme}")
            written.append(path.with_name(f"{name}.{kind}"))
            save_figure(figure, written[-1])
    return written
