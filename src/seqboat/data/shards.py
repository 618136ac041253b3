"""Work in parts, which several processes can share and an interruption does not lose.

A part is a number and leaves a file; parts whose files exist are not made again. The content of a part must not
depend on the process that makes it, so that any number of processes makes the same data.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from seqboat.console import Advance

Make = Callable[[int, Advance], None]
"""Makes a part and reports finished examples; must be picklable."""


def make_parts(make: Make, parts: Sequence[int], workers: int, advance: Advance) -> None:
    """Make parts with several processes; with one part or one worker, in this process."""
    if workers > 1 and len(parts) > 1:
        _share(make, parts, min(workers, len(parts)), advance)
        return
    for part in parts:
        make(part, advance)


def _share(make: Make, parts: Sequence[int], workers: int, advance: Advance) -> None:
    import multiprocessing
    from multiprocessing.connection import Connection, wait

    # a fresh interpreter: forking one in which torch runs threads can hang
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], list[Connection]()
    for worker in range(workers):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (make, parts[worker::workers], sender)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        while pipes:
            for pipe in wait(pipes):
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except EOFError:
                    pipes.remove(pipe)
                    continue
                if isinstance(message, ValueError):
                    raise message
                advance(message)
        for process in processes:
            process.join()
            if process.exitcode != 0:
                raise RuntimeError(f"a process that made data ended with exit code {process.exitcode}")
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _work(make: Make, parts: Sequence[int], sender: Any) -> None:
    threading.Thread(target=_watch_parent, daemon=True).start()
    try:
        for part in parts:
            make(part, sender.send)
    except ValueError as error:
        sender.send(error)


def _watch_parent() -> None:
    """End this process as soon as its parent is gone, for example killed."""
    import multiprocessing
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
