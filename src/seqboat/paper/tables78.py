"""Tables 7 and 8: forms of the layer, their validation accuracy and their speed as multiples of MEGA's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from seqboat.paper.published import ABLATIONS, TITLES
from seqboat.paper.target import (
    Pictures,
    Row,
    Rows,
    Target,
    mean_seconds,
    ratio_text,
    score_text,
    table,
    validation_scores,
)
from seqboat.paper.trial import CUT_SHORT, Scale, Trial, ablation_run

TASKS = ("image", "listops", "pathfinder")


def ablation_runs(scale: Scale) -> tuple[Trial, ...]:
    """Both tables, task by task; MEGA, whose speed is one, is a row of each."""
    trials = []
    for task in TASKS:
        mega = ablation_run(task, "mega", scale)
        for name, rows in ABLATIONS.items():
            for row, (_, scores) in rows.items():
                if task in scores:
                    trials.append(
                        dataclasses.replace(
                            ablation_run(task, row, scale),
                            table=name,
                            paper=f"{scores[task].accuracy:.2f} %",
                            paper_speed=scores[task].speed,
                            baseline=mega.name,
                        )
                    )
        trials.append(dataclasses.replace(mega, baseline=mega.name, paper_speed=1.0))
    return tuple(trials)


def show(trials: Sequence[Trial], recorded: Rows, pictures: Pictures) -> list[str]:
    """A table for each of the paper's: rows are forms of the layer, columns are tasks."""
    lines = []
    for name in dict.fromkeys(trial.table for trial in trials if trial.table):
        tasks = list(dict.fromkeys(trial.task for trial in trials if trial.table == name))
        found = {(t.title, t.task): t for t in trials if t.table in (name, "")}
        head = [name]
        for task in tasks:
            head += [f"{TITLES[task]}, ours", "paper", "speed, ours", "paper"]
        rows = []
        for title in dict.fromkeys(title for title, _ in found):
            cells = [title]
            for task in tasks:
                trial = found[title, task]
                cells += _cells(trial, recorded[trial.name], recorded[trial.baseline or trial.name])
            rows.append(cells)
        lines += table(head, rows)
    return lines


def _cells(trial: Trial, own: Sequence[Row], base: Sequence[Row]) -> list[str]:
    published = ratio_text(trial.paper_speed)
    if not own:
        return ["not run", trial.paper or "-", "-", published]
    score = score_text(validation_scores(own), own[0]["score"]["metric"])
    seconds, reference = mean_seconds(own), mean_seconds(base)
    speed = f"{reference / seconds:.2f}x" if seconds and reference else "-"
    return [score, trial.paper or "-", speed, published]


ABLATION = Target(
    name="ablation",
    title="Ablations",
    where="tables 7 and 8",
    about="Best accuracy on the validation split, and the speed of training steps as a multiple of MEGA's: on a GPU "
    "by wall time, on a CPU by processor time, of all steps of a run without its evaluations.",
    cut=CUT_SHORT,
    small=ablation_runs("small"),
    paper=ablation_runs("paper"),
    show=show,
)
