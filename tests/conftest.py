"""What several test files share."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# under nohup or in the background of a script these are ignored, and processes that tests start inherit that
for number, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    with contextlib.suppress(AttributeError, ValueError):
        if signal.getsignal(getattr(signal, number)) is signal.SIG_IGN:
            signal.signal(getattr(signal, number), handler)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The small files that come with the tests."""
    return REPOSITORY / "tests" / "fixtures"


@pytest.fixture(scope="session", autouse=bool(os.environ.get("SEQBOAT_TEST_ODD_OFFSETS")))
def _odd_offsets() -> Iterator[None]:
    """With SEQBOAT_TEST_ODD_OFFSETS=1 every weight lies at an odd offset in memory."""
    from odd_offsets import odd_offsets

    with odd_offsets():
        yield
