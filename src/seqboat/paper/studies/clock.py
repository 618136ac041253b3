"""Seconds that are worth the same on a busy machine, a slow one and a fast one.

    clock = StandardClock()                    called after every step, it returns the standard seconds so far
    probes = Probes(folder, config)            the same for a run, with its slowdown kept in its folder

Processor time is no measure of compute by itself: on a busy machine the caches and often the cores are shared, and a
second of processor time buys half of the steps or fewer. So a probe, the same few operations every time, runs between
the steps of a model. A probe that takes twice as long as on the standard core means that a second is worth half a
standard second there and then.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from seqboat.training.config import RunConfig

STANDARD = 0.01
"""Seconds of processor time that the probe takes on the standard core."""
TOKENS, WIDTH = 4096, 64
"""Shape of the probe's activations, which are about as large as those of a small model."""
PROBES = 40
"""In a run, about; they take a few percent of its time and are not counted."""
FILE = "probes.jsonl"


class Probe:
    """A small feed-forward block, forward and backward: products, elementwise functions, a norm, memory traffic."""

    def __init__(self) -> None:
        noise = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=noise, dtype=torch.float32, device="cpu")

        self.x = normal(TOKENS, WIDTH)
        self.into = normal(WIDTH, 2 * WIDTH).div_(WIDTH**0.5).requires_grad_()
        self.out = normal(2 * WIDTH, WIDTH).div_(WIDTH**0.5).requires_grad_()
        self()  # what runs for the first time takes longer

    def __call__(self) -> float:
        """Seconds of processor time."""
        began = time.process_time()
        with torch.enable_grad():
            y = F.layer_norm(F.silu(self.x @ self.into) @ self.out + self.x, (WIDTH,))
            loss = (y * torch.sigmoid(y)).square().mean()
            torch.autograd.grad(loss, (self.into, self.out))
        return time.process_time() - began


class StandardClock:
    """Standard seconds since it was made, without those of its own probes."""

    def __init__(self) -> None:
        self.probe, self.seconds = Probe(), 0.0
        self.taken = self.probe()
        self.left = time.process_time()

    def __call__(self) -> float:
        spent = time.process_time() - self.left
        before, self.taken = self.taken, self.probe()
        self.seconds += spent * STANDARD / statistics.mean((before, self.taken))
        self.left = time.process_time()
        return self.seconds


class Probes:
    """Probes between the steps of a run, kept in its folder: a run that is resumed continues them.

    Args:
        folder: of the run.
        config: of the run.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.path, self.steps = folder / FILE, config.schedule.steps
        self.every, self.evaluated = max(self.steps // PROBES, 1), config.evaluation.every
        self.probe = Probe()

    def __call__(self, step: int, model: nn.Module) -> None:
        """After a step of training; not before an evaluation, whose time is not that of a step."""
        if step % self.every or step % self.evaluated == 0 or step == self.steps:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([step, self.probe()]) + "\n")

    def taken(self) -> list[float]:
        """Seconds of each probe; of a step that was repeated, the last one."""
        found: dict[int, float] = {}
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                # a process that was killed may have left half a line
                with contextlib.suppress(ValueError):
                    step, seconds = json.loads(line)
                    found[step] = seconds
        return list(found.values())

    def slowdown(self) -> float | None:
        """How many times as long a probe took as on the standard core, averaged over the run; None without probes."""
        taken = self.taken()
        return statistics.mean(taken) / STANDARD if taken else None

    def standard_step(self, seconds: float) -> float:
        """Standard seconds of a step, from seconds of processor time that include the probes between the steps."""
        return (seconds - sum(self.taken()) / self.steps) / (self.slowdown() or 1.0)
