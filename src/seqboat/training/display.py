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
    scores = {k: v for k, v in record.items() if k not in NO_SCORES and isinstance(v, float | None)}
    return "  ".join(f"{name} {'-' if value is None else f'{value:.4f}'}" for name, value in scores.items())


class PlainDisplay(Display):
    """One line for every record."""

    quiet = False

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.steps = self.first = 0
        self.began = 0.0

    def start(self, title: str, steps: int, done: int = 0) -> None:
        self.steps, self.first, self.began = steps, done, time.monotonic()
        self.tell(title)

    def log(self, record: Mapping[str, Any]) -> None:
        taken, left = record["step"] - self.first, self.steps - record["step"]
        rest = ""
        if taken > 0 < left:
            rest = f"  {format_seconds((time.monotonic() - self.began) / taken * left)} left"
        self.tell(f"{self._line(record)}{rest}")

    def scored(self, record: Mapping[str, Any], better: bool) -> None:
        self.tell(f"{self._line(record, record['split'] + ': ')}{'  best so far' if better else ''}")

    def _line(self, record: Mapping[str, Any], what: str = "") -> str:
        active = rate_text(record["activation"])
        return f"step {record['step']}/{self.steps}  {what}{metric_text(record)}  active % {active}"

    def tell(self, message: str) -> None:
        # a closed pipe or terminal must not end a run
        with contextlib.suppress(OSError, ValueError):
            print(printable(message, lines=True), file=self.stream, flush=True)


class LiveDisplay(PlainDisplay):
    """A bar that moves; scores and events scroll above it."""

    def __init__(self, console: Any = None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__()
        text = TextColumn("{task.description}", markup=False)
        self.bar = Progress(BarColumn(), TimeRemainingColumn(), text, console=console)

    def start(self, title: str, steps: int, done: int = 0) -> None:
        super().start(title, steps, done)
        self.bar.start()
        self.task = self.bar.add_task("", total=max(steps, 1), completed=done)

    def log(self, record: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.bar.update(self.task, completed=record["step"], description=printable(self._line(record)))

    def tell(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.bar.console.print(printable(message, lines=True), highlight=False, markup=False)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.bar.stop()


def make_display(first: bool = True) -> Display:
    """The display that fits: live in a terminal with rich installed, or else plain lines."""
    if not first:
        return Display()
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            return LiveDisplay()
    return PlainDisplay()
