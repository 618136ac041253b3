"""Time of a training step of one layer as a GPU's memory, arithmetic and launches allow it: a prediction, no timing.

    TRITON_INTERPRET=1 python tools/roofline.py --page docs/gpu.md

Every launch that `tools/launches.py` counts takes the longest of three times: its bytes over the bandwidth, its
operations over the peak of their type, and the time that the host needs to launch a kernel. The sum over launches is
the prediction. Caches, and what keeps a kernel from its roofline, are left out. The table of launches is written too:
counting takes minutes, and both are of the same count.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch

import launches
from launches import ACTIVE, LAYERS, Cost, Step, cost_of
from pages import replace_part


class Gpu(NamedTuple):
    """What the vendor states."""

    name: str
    bandwidth: float
    """bytes per second"""
    exact: float
    """float32 operations per second, without TF32"""
    half: float
    """bf16 operations per second of the matrix units, dense"""


GPUS = (
    Gpu("A100", 2.039e12, 19.5e12, 312e12),
    Gpu("H100", 3.35e12, 66.9e12, 989e12),
)
SUSTAINED = 0.8
"""Fraction of bandwidth and peak that is assumed to be reached."""
LAUNCH = 4e-6
"""Seconds from one launch to the next, as an eager PyTorch program issues them; an assumption."""
BATCH = {"Text": 50, "enwik8": 8}
"""Sequences of a training step, from the recipes."""


def seconds(step: Step, gpu: Gpu, scale: float) -> float:
    """The predicted time of one launch, of a batch that is `scale` times the one that was counted."""
    peak = gpu.half if step.narrow else gpu.exact
    memory = step.bytes * scale / (gpu.bandwidth * SUSTAINED)
    return max(memory, step.flops * scale / (peak * SUSTAINED), LAUNCH)


def table() -> str:
    """A Markdown table of all layers, types and devices."""
    lines = [
        "| layer | GPU | type | torch, ms | triton, ms | speed-up | of which memory | arithmetic | launches |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (_, batch, _) in LAYERS.items():
        for dtype in (None, torch.bfloat16):
            costs = [cost_of(name, triton, dtype) for triton in (False, True)]
            scale = BATCH[name] / batch
            for gpu in GPUS:
                plain, fused = (sum(seconds(step, gpu, scale) for step in cost.steps) for cost in costs)
                parts = bounds(costs[1], gpu, scale)
                lines.append(
                    f"| {name} | {gpu.name} | {'float32' if dtype is None else 'bf16 autocast'} | "
                    f"{plain * 1e3:.2f} | {fused * 1e3:.2f} | {plain / fused:.1f}x | "
                    f"{' | '.join(f'{100 * part / fused:.0f} %' for part in parts)} |"
                )
    return "\n".join(lines)


def bounds(cost: Cost, gpu: Gpu, scale: float) -> list[float]:
    """Seconds of the launches that are bound by memory, by arithmetic, and by launching."""
    found = [0.0, 0.0, 0.0]
    for step in cost.steps:
        took = seconds(step, gpu, scale)
        memory = step.bytes * scale / (gpu.bandwidth * SUSTAINED)
        found[2 if took == LAUNCH else 0 if took == memory else 1] += took
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, help="document whose table to replace")
    arguments = parser.parse_args()
    made = table()
    print(made)
    if arguments.page:
        stated = "; ".join(
            f"{gpu.name} {gpu.bandwidth / 1e12:.2f} TB/s, {gpu.exact / 1e12:.0f} TFLOP/s in float32, "
            f"{gpu.half / 1e12:.0f} in bf16"
            for gpu in GPUS
        )
        assumed = (
            f"Assumed: {stated}; {SUSTAINED:.0%} of each is reached; {LAUNCH * 1e6:.0f} microseconds per launch; "
            f"{ACTIVE:.0%} of the tokens are active; batches of the recipes "
            f"({', '.join(f'{name} {size}' for name, size in BATCH.items())} sequences)."
        )
        replace_part(arguments.page, "roofline", f"{assumed}\n\n{made}")
        replace_part(arguments.page, "launches", launches.table())


if __name__ == "__main__":
    main()
