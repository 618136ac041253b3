"""Table 6: speed and memory of whole models over their training runs, as multiples of MEGA's.

A training step's wall time and allocated memory are averages over a run, and evaluation is timed with the trained
model: how many tokens attend, and so what a step takes, changes while a model learns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from seqboat.paper.published import EFFICIENCY as PUBLISHED
from seqboat.paper.published import EFFICIENCY_MODELS as MODELS
from seqboat.paper.published import LRA_TASKS, TITLES
from seqboat.paper.tables import Make, Pictures, Record, Records, on_accelerator, ratio_text, table
from seqboat.paper.target import Job, OnProgress, Target, per_step, step_memory
from seqboat.paper.trial import Scale, Trial, table_run
from seqboat.run import Run

BASELINE = "mega"


class Block(NamedTuple):
    """A part of table 6."""

    title: str
    field: str
    """of a record"""
    published: str
    """field of the published numbers"""
    inverted: bool
    """whether speed is the inverse of the field"""


BLOCKS = (
    Block("training speed", "step_seconds", "training", True),
    Block("training memory", "step_memory_mb", "memory", False),
    Block("evaluation speed", "examples_per_second", "evaluation", False),
)


class EfficiencyTarget(Target):
    """The three blocks of table 6, ours and the paper's ratios side by side."""

    def collect(self, job: Job, progress: OnProgress | None = None) -> Record:
        source = Run(job.folder)
        about = job.about()
        record = job.origin() | {"device": about.get("device"), "batch": job.config.training.batch_size}
        clock = "elapsed" if on_accelerator(record) else "processor"
        now = time.perf_counter if on_accelerator(record) else time.process_time
        started = now()
        scored = source.evaluate("val", progress=progress, device=job.device)
        return record | {
            "step_seconds": per_step(source.metrics, clock),
            "step_memory_mb": step_memory(source.metrics),
            "examples_per_second": scored["examples"] / (now() - started),
        }

    def summarize(self, record: Record) -> str:
        seconds, speed = record["step_seconds"], record["examples_per_second"]
        step = "unknown" if seconds is None else f"{1000 * seconds:.0f} ms"
        return f"{step} per training step, {speed:.0f} examples per second in evaluation"

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        trials, found = self.trials(scale), self.found(scale, records)
        return [*_tables(trials, found), *pictures.show(_draw(trials, found))]


def measured_ratio(block: Block, own: Sequence[Record], base: Sequence[Record]) -> float | None:
    """Speed or memory as a multiple of the baseline's; None unless both ran on the same kind of device."""
    if not own or not base or own[0].get("device") != base[0].get("device"):
        return None
    ours, reference = own[0].get(block.field), base[0].get(block.field)
    if not ours or not reference:
        return None
    ratio: float = reference / ours if block.inverted else ours / reference
    return ratio


def _ratios(
    trials: Sequence[Trial], records: Records, block: Block
) -> Mapping[tuple[str, str], float | None]:
    base = {trial.task: records[trial.name] for trial in trials if trial.row == BASELINE}
    return {
        (trial.row, trial.task): measured_ratio(block, records[trial.name], base[trial.task])
        for trial in trials
    }


def _tables(trials: Sequence[Trial], records: Records) -> list[str]:
    head = [TITLES[task] for task in LRA_TASKS]
    lines = []
    for block in BLOCKS:
        found = _ratios(trials, records, block)
        rows = []
        for model, label in MODELS.items():
            cells = []
            for task in LRA_TASKS:
                paper = getattr(PUBLISHED[task], block.published)[model]
                cells.append(f"{ratio_text(found[model, task])} ({paper:.2f}x)")
            rows.append([label, *cells])
        lines += table([f"{block.title}, ours (paper)", *head], rows)
    absolute = {(trial.row, trial.task): _absolute(records[trial.name]) for trial in trials}
    rows = [[label, *(absolute[model, task] for task in LRA_TASKS)] for model, label in MODELS.items()]
    return lines + table(["ms per step / MB / examples per second", *head], rows)


def _absolute(records: Sequence[Record]) -> str:
    if not records:
        return "not run"
    seconds, memory = records[0]["step_seconds"], records[0]["step_memory_mb"]
    cells = ["-" if seconds is None else f"{1000 * seconds:.0f}", "-" if memory is None else f"{memory:.0f}"]
    return " / ".join([*cells, f"{records[0]['examples_per_second']:.0f}"])


def _draw(trials: Sequence[Trial], records: Records) -> Make | None:
    from seqboat.figures import ratios_figure

    panels: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    for block in BLOCKS:
        found = _ratios(trials, records, block)
        if any(found[trial.row, trial.task] for trial in trials if trial.row != BASELINE):
            panels[block.title] = {
                f"{TITLES[task]}, {MODELS[model]}": (
                    found[model, task],
                    getattr(PUBLISHED[task], block.published)[model],
                )
                for task in LRA_TASKS
                for model in MODELS
                if model != BASELINE
            }
    if not panels:
        return None
    return lambda theme: ratios_figure(panels, reference=MODELS[BASELINE], theme=theme)


def _runs(scale: Scale) -> tuple[Trial, ...]:
    return tuple(table_run("lra", row, task, scale) for task in LRA_TASKS for row in MODELS)


EFFICIENCY = EfficiencyTarget(
    name="efficiency",
    title="Speed and memory by task",
    where="table 6",
    about="Wall time and allocated memory of a training step, averaged over whole training runs, and evaluation "
    "throughput of the trained models on the validation split, as multiples of MEGA's. On a CPU, processor time and "
    "no memory.",
    small=_runs("small"),
    paper=_runs("paper"),
)
