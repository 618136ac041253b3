"""Write the README's results (a table and a chart) from docs/results.json: `python tools/glance.py`.

`--check` writes nothing and fails if the README or the chart differ from what the records say.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diagrams import IMAGES, ROOT, THEMES, Canvas

Record = dict[str, Any]
README = ROOT / "README.md"
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->"

TASKS = [
    ("lra", "listops", "ListOps", "accuracy"),
    ("lra", "text", "Text", "accuracy"),
    ("lra", "retrieval", "Retrieval (not LRA's own pairs of papers)", "accuracy"),
    ("lra", "image", "Image", "accuracy"),
    ("lra", "pathfinder", "Pathfinder", "accuracy"),
    ("lra", "pathx", "Path-X (chance: 50 %)", "accuracy"),
    ("speech", "speech", "Speech Commands", "accuracy"),
    ("enwik8", "enwik8", "enwik8", "bits per byte"),
    ("diagnostics", "recall", "associative recall", "accuracy"),
    ("diagnostics", "recall-s4d", "associative recall with S4D instead of SeqBoat", "accuracy"),
]
"""Target, trial, name and unit of each row of the table."""

LINES = [
    ("transformer", "Transformer", "purple-edge"),
    ("transformer, fused", "Transformer, fused attention", "blue-edge"),
    ("mega-chunk", "MEGA-chunk", "green-edge"),
    ("seqboat", "SeqBoat", "orange-edge"),
]
"""Mixer, label and color of each line of the chart."""
LENGTHS = (1024, 4096, 16384)


def table(records: Iterable[Record]) -> list[str]:
    """One row per task that was run: its score on the test split and the fraction of tokens that attend, by layer."""
    lines = [
        "| task | test score | active tokens, by layer | parameters | command |",
        "|---|---|---|---|---|",
    ]
    small = [r for r in records if r["scale"] == "small"]
    for target, trial, name, unit in TASKS:
        runs = [r for r in small if (r["target"], r["trial"]) == (target, trial)]
        if not runs:
            continue
        score = statistics.mean(r["test"] for r in runs)
        shown = f"{score:.2f} {unit}" if unit != "accuracy" else f"{100 * score:.1f} %"
        seeds = f" (mean of {len(runs)} seeds)" if len(runs) > 1 else ""
        rates = [r["activation"] for r in runs if None not in r["activation"]]
        # several seeds end with different layers active: their rates are not averaged
        attend = " / ".join(f"{100 * rate:.0f} %" for rate in rates[0]) if len(rates) == 1 else ""
        attend = attend or ("differs by seed" if rates else "no attention")
        command = runs[0]["command"].split(" --seed")[0]
        lines.append(f"| {name} | {shown}{seeds} | {attend} | {runs[0]['parameters']:,} | `{command}` |")
    return lines


def timings(records: Iterable[Record]) -> dict[str, list[float]]:
    """Seconds of a training step by mixer, at each of LENGTHS, with equal parameter counts."""
    found: dict[str, list[float]] = {name: [] for name, _, _ in LINES}
    parts = {r["trial"]: r["parts"]["mixers"] for r in records if r["target"] == "mixers-efficiency"}
    for length in LENGTHS:
        for row in parts[f"parameters-{length}"]["rows"]:
            name = row.get("candidate") or row["contender"]  # records of older versions
            if name in found and row["mode"] == "training":
                tokens = row["batch"] * row["length"]
                found[name].append(1e6 * row["seconds"]["median"] / tokens)
    return found


def chart(seconds: dict[str, list[float]], theme: str) -> str:
    """Time per token of a training step against the length, both axes logarithmic."""
    c = Canvas(800, 330, "Training time per token against sequence length, one layer", THEMES[theme])
    left, right, top, bottom = 70, 520, 40, 280
    values = [value for line in seconds.values() for value in line]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(length: int) -> float:
        return left + (right - left) * math.log(length / LENGTHS[0]) / math.log(LENGTHS[-1] / LENGTHS[0])

    def y(value: float) -> float:
        return bottom - (bottom - top) * (math.log10(value) - low) / (high - low)

    c.text(left - 50, 22, "microseconds per token, training step of one layer", anchor="start", bold=True)
    for power in range(low, high + 1):
        c.rule(left, y(10**power), right, y(10**power))
        c.text(left - 10, y(10**power) + 4, f"{10**power:g}", anchor="end", size=12, color="muted")
    for length in LENGTHS:
        c.text(x(length), bottom + 22, f"{length:,}", size=12, color="muted")
    c.text((left + right) / 2, bottom + 42, "tokens per sequence", size=12, color="muted")
    for name, label, color in LINES:
        points = [(x(length), y(value)) for length, value in zip(LENGTHS, seconds[name], strict=True)]
        c.line(points, color)
        c.text(
            right + 14, points[-1][1] + 4, f"{label}: {seconds[name][-1]:.0f}", anchor="start", color=color
        )
    return c.svg()


def region(records: list[Record]) -> str:
    """What stands between the markers of the README."""
    seconds = timings(records)
    rate = next(r for r in records if r["trial"] == "parameters-16384")["parts"]["mixers"]["setting"]["rate"]
    ratios = [
        seconds[name][-1] / seconds["seqboat"][-1]
        for name in ("transformer", "transformer, fused", "mega-chunk")
    ]
    picture = (
        '<picture><source media="(prefers-color-scheme: dark)" srcset="docs/images/glance-dark.svg">'
        '<img alt="Training time per token against sequence length: SeqBoat stays flat, a Transformer rises" '
        'src="docs/images/glance.svg"></picture>'
    )
    speed = (
        f"**Speed.** One layer of width 128 with {100 * rate:.0f} % of the tokens active, against layers with the "
        f"same number of parameters, on two CPU cores. At {LENGTHS[-1]:,} tokens, a SeqBoat training step is "
        f"{ratios[0]:.0f}x as fast as a Transformer's with plain attention, {ratios[1]:.0f}x as fast as one with "
        f"fused attention, and {ratios[2]:.1f}x as fast as MEGA-chunk."
    )
    quality = (
        "**Quality.** These are small variants of the paper's experiments: shorter sequences, narrower models, and a "
        "few epochs on two CPU cores. The scores are not comparable with the paper's; nothing has been run at full "
        "size."
    )
    paragraphs = [textwrap.fill(speed, 118), picture, textwrap.fill(quality, 118), "\n".join(table(records))]
    return "\n\n".join(paragraphs) + "\n\n"


def outputs() -> dict[Path, str]:
    """Every file this script writes, with its text."""
    records = json.loads((ROOT / "docs" / "results.json").read_text(encoding="utf-8"))
    readme = README.read_text(encoding="utf-8")
    before, rest = readme.split(BEGIN)
    after = rest[rest.index(END) :]
    charts = {IMAGES / f"glance{theme}.svg": chart(timings(records), theme) for theme in THEMES}
    return {README: before + BEGIN + region(records) + after, **charts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file would change")
    check = parser.parse_args().check
    stale = [p for p, text in outputs().items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run python tools/glance.py", file=sys.stderr)
        return 1 if stale else 0
    for path, text in outputs().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
