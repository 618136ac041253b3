"""Tables of a benchmark in a terminal; each column is defined in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from seqboat.bench.measure import Quartiles, human_seconds, machine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Column(NamedTuple):
    """One column: its heading, and its text for a row. A column that is empty in every row is left out."""

    head: str
    cell: Callable[[Any], str]


def make_table(title: str, columns: Sequence[Column], rows: Sequence[Any]) -> Table:
    """Make a table: the first column names the rows, the others hold numbers."""
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
    """Print a table; no cell is ever wrapped or cut.

    Files get one wide table. In a terminal that is too narrow for it, further columns follow below, beside the
    names of the rows again: a terminal breaks long lines wherever they reach its edge.
    """
    from rich.console import Console

    def width(shown: Sequence[Column]) -> int:
        table = make_table("", shown, rows)
        return console.measure(table, options=console.options.update(max_width=10_000)).maximum

    left = [column for column in columns[1:] if any(column.cell(row) for row in rows)]
    while True:
        count = len(left)
        while console.is_terminal and count > 1 and width([columns[0], *left[:count]]) > console.width:
            count -= 1
        shown, left = [columns[0], *left[:count]], left[count:]
        needed = width(shown)
        wide = console if needed <= console.width else Console(file=console.file, width=needed)
        wide.print(make_table(title, shown, rows))
        if not left:
            return
        title = ""


def print_machine(console: Console) -> None:
    """Print the hardware and software in one line."""
    found = machine()
    where = found["cuda"] or found["cpu"] or "unknown CPU"
    line = f"{where}, {found['threads']} of {found['cores']} cores, torch {found['torch']}"
    console.print(line, highlight=False)


def median_text(seconds: Quartiles | None) -> str:
    """The median as text; empty if there is none."""
    return "" if seconds is None else human_seconds(seconds.median)


def quartiles_text(seconds: Quartiles | None) -> str:
    """The quartiles relative to the median."""
    if seconds is None:
        return ""
    low, high = seconds.low / seconds.median - 1, seconds.high / seconds.median - 1
    return f"{low:+.0%} {high:+.0%}"


def ratio_text(ratio: float | None) -> str:
    """A ratio as text.

    >>> ratio_text(1.5)
    '1.50x'
    """
    return "" if ratio is None else f"{ratio:.2f}x"
