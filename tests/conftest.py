"""What several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


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
