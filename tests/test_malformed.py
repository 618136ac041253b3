"""A short trial of malformed inputs: `make test-malformed` runs two thousand of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not hasattr(os, "fork") or not Path("/proc").exists(), reason="needs fork and /proc")
def test_malformed_inputs() -> None:
    script = Path(__file__).parent / "malformed.py"
    done = subprocess.run(
        [sys.executable, str(script), "--count", "25", "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.endswith("25 passed, 0 failed\n")
