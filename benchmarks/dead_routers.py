"""Do routers die, and what helps? Every remedy on the same tasks and seeds, through the normal training code.

    python benchmarks/dead_routers.py --out runs/dead-routers
    python benchmarks/dead_routers.py --out runs/dead-routers --tasks recall --arms none floor --seeds 0 1 2

Every arm is one training run in a separate folder. A run that was stopped continues where it was, one that is
finished is only read, so that the command can be repeated until all is done. `--table` only reads what is there. The
table (DIR/dead_routers.md, with the command of every arm) gives for each task and arm, over the seeds: the score on
held-out data after the last step, the activation of each layer, and how many layers were dead at the end: fewer than
one token in a thousand active.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

from seqboat.data.files import write_text
from seqboat.recipes import find_recipe
from seqboat.tasks.task import Task
from seqboat.training.config import override
from seqboat.training.display import PlainDisplay
from seqboat.training.record import iterate_metrics
from seqboat.training.trainer import train

MIXER = "--model.mixer."
ARMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "warm-up": (f"{MIXER}revival.warmup_steps=300",),
    "noise": (f"{MIXER}revival.noise=0.5", f"{MIXER}revival.noise_steps=1000"),
    "floor": (f"{MIXER}revival.floor=0.05",),
    "inactive-gradient": (f"{MIXER}revival.inactive_gradient=true",),
    "target": (f"{MIXER}budget.target=0.3",),
    "always": (f"{MIXER}router=always-active",),
}
"""What each arm sets besides the recipe; the last one has no router at all, for comparison."""
DEAD = 0.001


class Run(NamedTuple):
    """One arm with one seed."""

    task: str
    arm: str
    seed: int
    fields: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.task}/{self.arm}/seed-{self.seed}"

    @property
    def command(self) -> str:
        return " ".join(["seqboat train", self.task, *self.fields, f"--seed={self.seed}"])


class Result(NamedTuple):
    """How a run ended."""

    score: float
    activation: list[float | None]

    @property
    def dead(self) -> int:
        """Layers that activate almost nothing."""
        return sum(rate is not None and rate < DEAD for rate in self.activation)


def perform(run: Run, folder: Path) -> None:
    """Train, or continue."""
    config = dataclasses.replace(find_recipe(run.task)(), recipe=run.task, seed=run.seed)
    config = override(config, run.fields)
    print(f"{run.name}: {run.command}", flush=True)
    outcome = train(config, folder / run.name, resume=True, display=PlainDisplay())
    print(f"{run.name}: {outcome.message}", flush=True)
    if outcome.exit_code:
        sys.exit(outcome.exit_code)


def read(run: Run, folder: Path, task: Task) -> Result | None:
    """The last score on held-out data, if the run is finished."""
    path = folder / run.name / "metrics.jsonl"
    if not path.exists():
        return None
    records = [r for r in iterate_metrics(path) if r["split"] not in ("train", "skipped")]
    config = override(find_recipe(run.task)(), run.fields)
    if not records or records[-1]["step"] < config.schedule.steps:
        return None
    return Result(records[-1][task.metric], records[-1]["activation"])


def percent(values: list[float]) -> str:
    return " ".join(f"{100 * value:.1f}" for value in values)


def table(runs: list[Run], folder: Path) -> str:
    """All finished runs, as Markdown."""
    lines = []
    for name in dict.fromkeys(run.task for run in runs):
        task = find_recipe(name)().build_task()
        lines += [
            f"## {name}",
            "",
            f"| arm | seeds | {task.metric}, % | mean | layers active, % (mean over seeds) | dead layers, by seed |",
            "|---|---|---|---|---|---|",
        ]
        commands = []
        for arm in dict.fromkeys(run.arm for run in runs if run.task == name):
            mine = [run for run in runs if run.task == name and run.arm == arm]
            found = {run.seed: result for run in mine if (result := read(run, folder, task)) is not None}
            commands.append(f"- {arm}: `{mine[0].command.rpartition(' ')[0]}`")
            if not found:
                continue
            scores = [result.score for result in found.values()]
            layers = zip(*(result.activation for result in found.values()), strict=True)
            rates = [sum(rate or 0 for rate in layer) / len(found) for layer in layers]
            dead = " ".join(str(result.dead) for result in found.values())
            seeds = " ".join(map(str, found))
            mean = percent([sum(scores) / len(scores)])
            lines.append(f"| {arm} | {seeds} | {percent(scores)} | {mean} | {percent(rates)} | {dead} |")
        lines += ["", *commands, ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs")
    parser.add_argument(
        "--tasks", nargs="+", default=["recall", "lra.listops-small"], help="names of recipes"
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="further settings of every run"
    )
    parser.add_argument("--table", action="store_true", help="train nothing: only read existing runs")
    options = parser.parse_args()
    extra: tuple[str, ...] = tuple(f"--{field}" for field in options.set)
    runs = [
        Run(task, arm, seed, (*ARMS[arm], *extra))
        for seed in options.seeds
        for task in options.tasks
        for arm in options.arms
    ]
    for run in runs:
        if not options.table:
            perform(run, options.out)
        write_text(options.out / "dead_routers.md", table(runs, options.out))
    print(table(runs, options.out))


if __name__ == "__main__":
    main()
