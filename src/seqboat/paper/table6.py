"""Table 6: speed and memory of whole models over their training runs, as multiples of MEGA's.

A training step's wall time and allocated memory are averages over a run, and evaluation is timed with the trained
model: how many tokens attend, and so what a step takes, changes while a model learns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from seqboat.paper.published import EFFICIENCY as PUBLISHED
from seqboat.paper.published import EFFICIENCY_MODELS as MODELS
from seqboat.paper.published import LRA_TASKS, TITLES
from seqboat.paper.target import Pictures, Row, Rows, Target, on_accelerator, ratio_text, table
from seqboat.paper.trial import Scale, Trial, table_run

BASELINE = "mega"


class Block(NamedTuple):
    """A part of table 6."""

    title: str
    field: str
    """of the cost of a run"""
    published: str
    """field of the published numbers"""
    inverted: bool
    """whether speed is the inverse of the field"""


BLOCKS = (
    Block("training speed", "seconds", "training", True),
    Block("training memory", "memory_mb", "memory", False),
    Block("evaluation speed", "eval_examples_per_s", "evaluation", False),
)


def _cost(row: Row, field: str) -> float | None:
    """A cost; the time of a step is processor time on a CPU, where other work takes wall time."""
    field = "processor_seconds" if field == "seconds" and not on_accelerator(row) else field
    value: float | None = row["cost"].get(field)
    return value


def measured_ratio(block: Block, own: Sequence[Row], base: Sequence[Row]) -> float | None:
    """Speed or memory as a multiple of the baseline's; None unless both ran on the same kind of device."""
    if not own or not base or own[0].get("device") != base[0].get("device"):
        return None
    ours, reference = _cost(own[0], block.field), _cost(base[0], block.field)
    if not ours or not reference:
        return None
    return reference / ours if block.inverted else ours / reference


def _ratios(trials: Sequence[Trial], recorded: Rows, block: Block) -> Mapping[tuple[str, str], float | None]:
    base = {trial.task: recorded[trial.name] for trial in trials if trial.row == BASELINE}
    return {
        (trial.row, trial.task): measured_ratio(block, recorded[trial.name], base[trial.task])
        for trial in trials
    }


def show(trials: Sequence[Trial], recorded: Rows, pictures: Pictures) -> list[str]:
    """The three blocks of table 6, ours and the paper's ratios side by side."""
    head = [TITLES[task] for task in LRA_TASKS]
    lines = []
    for block in BLOCKS:
        found = _ratios(trials, recorded, block)
        rows = []
        for model, label in MODELS.items():
            cells = []
            for task in LRA_TASKS:
                paper = getattr(PUBLISHED[task], block.published)[model]
                cells.append(f"{ratio_text(found[model, task])} ({paper:.2f}x)")
            rows.append([label, *cells])
        lines += table([f"{block.title}, ours (paper)", *head], rows)
    absolute = {(trial.row, trial.task): _absolute(recorded[trial.name]) for trial in trials}
    rows = [[label, *(absolute[model, task] for task in LRA_TASKS)] for model, label in MODELS.items()]
    return lines + table(["ms per step / MB / examples per second", *head], rows)


def _absolute(rows: Sequence[Row]) -> str:
    if not rows:
        return "not run"
    seconds, memory = _cost(rows[0], "seconds"), _cost(rows[0], "memory_mb")
    cells = ["-" if seconds is None else f"{1000 * seconds:.0f}", "-" if memory is None else f"{memory:.0f}"]
    return " / ".join([*cells, f"{rows[0]['cost']['eval_examples_per_s']:.0f}"])


def _runs(scale: Scale) -> tuple[Trial, ...]:
    return tuple(table_run("lra", row, task, scale) for task in LRA_TASKS for row in MODELS)


EFFICIENCY = Target(
    name="efficiency",
    title="Speed and memory by task",
    where="table 6",
    about="Wall time and allocated memory of a training step, averaged over whole training runs, and evaluation "
    "throughput of the trained models on the test split, as multiples of MEGA's. On a CPU, processor time and "
    "no memory.",
    small=_runs("small"),
    paper=_runs("paper"),
    show=show,
)
