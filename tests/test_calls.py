"""How much of the package one call runs through, and how much of it an import loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import seqboat
from seqboat import SeqBoat

FOLDER = str(Path(seqboat.__file__).parent)


def count(run: Callable[[], Any]) -> tuple[int, int]:
    """Calls of functions of this package, and their files."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            found.append(frame.f_code.co_filename)

    run()  # what is made once
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(found), len(set(found))


@torch.no_grad()
def test_calls_of_a_layer() -> None:
    torch.manual_seed(0)
    layer = SeqBoat(32, window=16).eval()
    x = torch.randn(2, 300, 32)
    calls, files = count(lambda: layer(x))
    assert calls <= 84 and files <= 11


@torch.no_grad()
def test_calls_of_a_step() -> None:
    torch.manual_seed(0)
    layer = SeqBoat(32, window=16, causal=True).eval()
    state, x = layer.init_state(2), torch.randn(2, 32)
    calls, _ = count(lambda: layer.step(x, state))
    assert calls <= 24


def test_modules_of_an_import() -> None:
    script = "import sys; from seqboat import SeqBoat; print(sum(name.startswith('seqboat') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 28
