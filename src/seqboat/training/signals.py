"""Signals that ask a run to save and stop.

| signal | sent by | exit code |
|---|---|---|
| SIGINT | Ctrl-C | 130 |
| SIGTERM | systemd, Kubernetes, Slurm at the time limit | 143 |
| SIGHUP | a terminal that closes (unless started with nohup) | 129 |
| SIGUSR1 | Slurm ahead of the time limit (`--signal=USR1@120`), to requeue | 75 |
"""

from __future__ import annotations

import contextlib
import signal
from types import FrameType
from typing import Any

STOP_SIGNALS: tuple[int, ...] = tuple(
    int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
EXIT_REQUEUE = 75
"""Exit code after SIGUSR1: the job should be queued again (EX_TEMPFAIL of sysexits.h)."""


def exit_code(number: int) -> int:
    """The exit code of a run that a signal stopped."""
    return EXIT_REQUEUE if signal.Signals(number).name == "SIGUSR1" else 128 + number


class StopSignals:
    """Remembers the first signal, for the loop to stop after its step; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self.received = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        # only the main thread may set handlers; a run in another thread is stopped by its caller
        with contextlib.suppress(ValueError):
            for number in STOP_SIGNALS:
                ignored = signal.getsignal(number) == signal.SIG_IGN
                if not (ignored and signal.Signals(number).name == "SIGHUP"):  # nohup stays in force
                    self._old[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def ignore_stop_signals(worker: int = 0) -> None:
    """Leave stopping to the main process: schedulers signal data workers too, and the last step needs them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
