"""Tables of a benchmark in a terminal: a table is a list of columns, and a column is one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from seqboat.bench.measure import Quartiles, human_seconds, machine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Column(NamedTuple):
    """One column: its head, and what it says of a row. It is left out where it says nothing of any row."""

    head: str
    cell: Callable[[Any], str]


def make_table(title: str, columns: Sequence[Column], rows: Sequence[Any]) -> Table:
    """The first column names the rows; the others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    cells = [[column.cell(row) for row in rows] for column in columns]
    shown = [i for i, values in enumerate(cells) if i == 0 or any(values)]
    for i in shown:
        table.add_column(columns[i].head, justify="right" if i else "left", no_wrap=True)
    for line in zip(*(cells[i] for i in shown), strict=True):
        table.add_row(*line)
    return table


def print_table(console: Console, title: str, columns: Sequence[Column], rows: Sequence[Any]) -> None:
    """Print a table as wide as it is: no cell is broken or cut, however narrow the terminal."""
    from rich.console import Console

    table = make_table(title, columns, rows)
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    wide = console if needed <= console.width else Console(file=console.file, width=needed)
    wide.print(table)


def print_machine(console: Console) -> None:
    """What the numbers depend on, in a line."""
    found = machine()
    where = found["cuda"] or found["cpu"] or "unknown CPU"
    line = f"{where}, {found['threads']} of {found['cores']} cores, torch {found['torch']}"
    console.print(line, highlight=False)


def median_text(seconds: Quartiles | None) -> str:
    """The median; nothing if there is none."""
    return "" if seconds is None else human_seconds(seconds.median)


def quartiles_text(seconds: Quartiles | None) -> str:
    """How far the quartiles are from the median."""
    if seconds is None:
        return ""
    low, high = seconds.low / seconds.median - 1, seconds.high / seconds.median - 1
    return f"{low:+.0%} {high:+.0%}"


def ratio_text(ratio: float | None) -> str:
    """A multiple of something.

    >>> ratio_text(1.5)
    '1.50x'
    """
    return "" if ratio is None else f"{ratio:.2f}x"
