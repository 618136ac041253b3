"""Progress of a run on the screen: a live table in a terminal, plain lines anywhere else.

A display never stops a run: if the terminal is gone, training continues without it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any, ClassVar, TextIO

from seqboat.console import format_seconds, printable


class Display:
    """Shows nothing: the display of every process but the first."""

    quiet: ClassVar[bool] = True
    """Whether it shows nothing, so that nothing needs to be measured for it."""

    def start(self, title: str, steps: int, done: int = 0) -> None:
        """A run begins, or continues after `done` steps."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Metrics of training, as in metrics.jsonl."""

    def scored(self, record: Mapping[str, Any], better: bool) -> None:
        """Metrics of held-out data, as in metrics.jsonl."""

    def tell(self, message: str) -> None:
        """Something that happens once."""

    def close(self) -> None:
        """The run ends."""


def rate_text(activation: list[float | None]) -> str:
    """Activation rates of all layers, in percent."""
    return " ".join("-" if rate is None else f"{100 * rate:.0f}" for rate in activation)


NO_SCORES = (
    "step",
    "split",
    "epoch",
    "activation",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "memory_mb",
    "seconds",
    "elapsed",
    "processor",
)
"""What a record of metrics holds besides scores."""


def metric_text(record: Mapping[str, Any]) -> str:
    """All scores of a record."""
    return "  ".join(f"{k} {v:.4f}" for k, v in record.items() if k not in NO_SCORES and isinstance(v, float))


def norm_text(record: Mapping[str, Any]) -> str:
    """The norm of the gradient; "-" where it is not finite."""
    norm = record["grad_norm"]
    return "-" if norm is None else f"{norm:.2f}"


class Clock:
    """The time that a run still needs, from the steps it has taken since it began or was resumed."""

    def __init__(self, steps: int, done: int) -> None:
        self.steps, self.first, self.began = steps, done, time.monotonic()

    def left(self, step: int) -> str | None:
        """The remaining time as text; None if nothing is left, or before the first step."""
        taken, left = step - self.first, self.steps - step
        return format_seconds((time.monotonic() - self.began) / taken * left) if taken > 0 < left else None


class PlainDisplay(Display):
    """One line for every record."""

    quiet = False

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.steps = 0

    def start(self, title: str, steps: int, done: int = 0) -> None:
        self.steps = steps
        self.clock = Clock(steps, done)
        self.tell(title)

    def log(self, record: Mapping[str, Any]) -> None:
        left = self.clock.left(record["step"])
        self.tell(
            f"step {record['step']}/{self.steps}  {metric_text(record)}  lr {record['lr']:.2e}  "
            f"norm {norm_text(record)}  {record['tokens_per_s']:,.0f} tokens/s  "
            f"{record['memory_mb']:,.0f} MB  active % {rate_text(record['activation'])}"
            f"{f'  {left} left' if left else ''}"
        )

    def scored(self, record: Mapping[str, Any], better: bool) -> None:
        self.tell(
            f"step {record['step']}/{self.steps}  {record['split']}: {metric_text(record)}  "
            f"active % {rate_text(record['activation'])}{'  best so far' if better else ''}"
        )

    def tell(self, message: str) -> None:
        # a closed pipe or terminal must not end a run
        with contextlib.suppress(OSError, ValueError):
            print(printable(message, lines=True), file=self.stream, flush=True)


class LiveDisplay(Display):
    """A table that is redrawn, with the activation rate of every layer as a bar; events scroll above it."""

    quiet = False

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console()
        self.live = Live(console=self.console, refresh_per_second=4, transient=False)
        self.title, self.steps, self.done = "", 0, 0
        self.train: dict[str, Any] = {}
        self.held_out: dict[str, Any] = {}

    def start(self, title: str, steps: int, done: int = 0) -> None:
        self.title, self.steps, self.done = title, steps, done
        self.clock = Clock(steps, done)
        self.live.start()
        self._draw()

    def log(self, record: Mapping[str, Any]) -> None:
        self.train, self.done = dict(record), int(record["step"])
        self._draw()

    def scored(self, record: Mapping[str, Any], better: bool) -> None:
        self.held_out = dict(record)
        self.tell(f"step {record['step']}  {record['split']}: {metric_text(record)}{'  *' if better else ''}")
        self._draw()

    def tell(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.console.print(printable(message, lines=True), highlight=False, markup=False)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.live.stop()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        record = self.train
        left = self.clock.left(self.done) if record else None
        table.add_row("step", f"{self.done:,} of {self.steps:,}{f'   {left} left' if left else ''}")
        if record:
            table.add_row("train", metric_text(record))
            if self.held_out:
                table.add_row(str(self.held_out["split"]), metric_text(self.held_out))
            table.add_row("learning rate", f"{record['lr']:.2e}   gradient norm {norm_text(record)}")
            table.add_row("speed", f"{record['tokens_per_s']:,.0f} tokens/s   {record['memory_mb']:,.0f} MB")
        layers = Table.grid(padding=(0, 1))
        for number, rate in enumerate(record.get("activation", []), start=1):
            filled = 0.0 if rate is None else rate
            text = "no router" if rate is None else f"{100 * filled:5.1f} %"
            layers.add_row(f"layer {number}", ProgressBar(1.0, filled, width=40), text)
        # a bar alone does not end its line: what follows it would continue on its line
        bar = Table.grid()
        bar.add_row(ProgressBar(max(self.steps, 1), self.done, width=60))
        with contextlib.suppress(OSError, ValueError):
            self.live.update(Group(Text(self.title), bar, table, layers))


def make_display(first: bool = True) -> Display:
    """The display that fits: live in a terminal with rich installed, or else plain lines."""
    if not first:
        return Display()
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            return LiveDisplay()
    return PlainDisplay()
