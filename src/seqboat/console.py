"""Terminal output: text from files without control codes, sizes, and progress."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_JOINERS = "\u200c\u200d"
"""Invisible, but part of correct spelling in several scripts, and of emoji."""

Advance = Callable[[int], None]
"""Called with the number of units done since the last call."""


def printable(text: object, *, lines: bool = False, mark: str | None = None) -> str:
    r"""Make text from a file safe to print: nothing in it moves the cursor or reorders the display.

    Control codes, bidirectional overrides, other invisible characters and halves of surrogate pairs are escaped.

    Args:
        text: what to print.
        lines: keep line breaks and tabs.
        mark: printed instead of the escape of each such character.
    """
    text = str(text)
    if text.isprintable():
        return text
    kept = _JOINERS + ("\n\t" if lines else "")
    return "".join(c if c in kept or _is_visible(c) else mark or _escape(c) for c in text)


def _is_visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def format_bytes(size: float) -> str:
    """A human-readable size.

    >>> format_bytes(61_500_000)
    '61.5 MB'
    """
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def format_seconds(seconds: float) -> str:
    """A human-readable duration.

    >>> format_seconds(42), format_seconds(250), format_seconds(5000)
    ('42 s', '4 min', '1 h 23 min')
    """
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def progress(title: str, total: int | None, unit: str = "") -> Iterator[Advance]:
    """Show the progress of some work: a bar on a terminal, a line every few seconds elsewhere."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            pass
        else:
            with Progress(console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(title, total=total)
                yield lambda count: bar.advance(task, count)
            return
    done = 0
    last = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= 5:
            last = now
            of = "" if total is None else f" of {total:,}"
            print(f"{title}: {done:,}{of} {unit}".rstrip(), file=sys.stderr, flush=True)

    yield advance


def typed_bytes(argument: str) -> bytes:
    """A command-line argument as UTF-8; bytes that the locale could not decode come back unchanged."""
    return argument.encode("utf-8", "surrogateescape")
