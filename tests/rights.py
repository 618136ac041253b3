"""Permissions that bind root too: tests of files that may not be read would see nothing otherwise."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION = 0x20080522
_OVERRIDE = 0b110
"""The capabilities DAC_OVERRIDE and DAC_READ_SEARCH, by which root passes over permissions."""


def _change(keep: int, add: int) -> None:
    """Change the capabilities in force of this thread."""
    system = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    failed = system.capget(header, sets)
    sets[0] = sets[0] & keep | add & sets[1]
    if failed or system.capset(header, sets):
        raise OSError(ctypes.get_errno(), "cannot change the capabilities of this thread")


def respect_permissions() -> None:
    """From here on this thread, and processes that it starts, may read and write only what permissions allow."""
    if os.geteuid() == 0 and sys.platform == "linux":
        _change(~_OVERRIDE & 0xFFFFFFFF, 0)


@contextmanager
def permissions() -> Iterator[None]:
    """A block in which permissions hold."""
    respect_permissions()
    try:
        yield
    finally:
        if os.geteuid() == 0 and sys.platform == "linux":
            _change(0xFFFFFFFF, _OVERRIDE)
