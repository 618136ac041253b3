"""Tables 1 to 3: the score of each run beside the paper's."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Sequence

from seqboat.paper.published import TITLES
from seqboat.paper.target import Pictures, Row, Rows, Target, rates_text, scores_text, table
from seqboat.paper.trial import Trial, table_runs
from seqboat.recipes import find_recipe


def show(trials: Sequence[Trial], rows: Rows, pictures: Pictures) -> list[str]:
    """The paper's table, ours beside its numbers, then the details of the runs that there are."""
    ran = [trial for trial in trials if rows[trial.name]]
    return [
        *_paper_table(trials, rows),
        f"{len(ran)} of {len(trials)} rows and tasks were run:",
        "",
        *_details(ran, rows),
        *_notes(ran),
    ]


def _paper_table(trials: Sequence[Trial], found: Rows) -> list[str]:
    """Models by tasks; every cell has our score and the paper's."""
    tasks = list(dict.fromkeys(trial.task for trial in trials))
    rows: dict[str, list[str]] = {}
    for trial in trials:
        cells = rows.setdefault(trial.title, ["-"] * len(tasks))
        own = found[trial.name]
        score = scores_text(own) if own else "-"
        cells[tasks.index(trial.task)] = f"{score} ({trial.paper})"
    head = [TITLES.get(task, task) for task in tasks]
    return table(["ours (paper, full size)", *head], [[title, *cells] for title, cells in rows.items()])


def _details(trials: Sequence[Trial], found: Rows) -> list[str]:
    head = ["", "paper, full size", "ours", "gap", "seeds", "parameters", "minutes", "processor", "threads"]
    return table([*head, "active %", "command"], [_row(trial, found[trial.name]) for trial in trials])


def _name(trial: Trial) -> str:
    """The model, and the task where there are several."""
    return f"{trial.title}, {trial.task_title}" if trial.task else trial.title


def _row(trial: Trial, rows: Sequence[Row]) -> list[str]:
    threads = sorted({str(row["cost"]["threads"]) for row in rows})
    return [
        _name(trial),
        trial.paper or "-",
        scores_text(rows),
        _gap(trial, rows),
        ", ".join(str(row["seed"]) for row in rows),
        f"{rows[0]['cost']['parameters']:,}",
        *(f"{statistics.mean(row['cost'][k] for row in rows):.1f}" for k in ("minutes", "processor_minutes")),
        "/".join(threads),
        "; ".join(rates_text(row["activation"]) for row in rows),
        f"`{trial.command()}`",
    ]


def _gap(trial: Trial, rows: Sequence[Row]) -> str:
    """Our mean minus the paper's number, in its unit."""
    if trial.paper is None or trial.paper == "chance":
        return "-"
    scale = 100 if rows[0]["score"]["metric"] == "accuracy" else 1
    gap = scale * statistics.mean(row["score"]["value"] for row in rows) - float(trial.paper.split()[0])
    return f"{gap:+.1f}" if scale == 100 else f"{gap:+.2f}"


def _notes(trials: Sequence[Trial]) -> list[str]:
    """What was cut, once for each recipe of a task."""
    lines: dict[str, str] = {}
    for trial in trials:
        cut = "" if trial.arguments else _cut(trial)
        name = trial.task_title or trial.title
        if cut and name not in lines:
            lines[name] = f"- **{name}.** {cut}"
    return list(lines.values())


def _cut(trial: Trial) -> str:
    """What a small recipe leaves out: the paragraph of its docstring that says so."""
    text = inspect.getdoc(find_recipe(trial.recipe.partition("/")[0])) or ""
    found = [" ".join(part.split()) for part in text.split("\n\n") if part.lstrip().startswith("Cut:")]
    return found[0] if found else ""


LRA = Target(
    name="lra",
    title="Long Range Arena",
    where="table 1",
    about="Accuracy on the test split. The small variants see shorter sequences and few epochs, so their scores are "
    "not comparable with the paper's; they show that each task trains and where its models attend.",
    small=table_runs("lra", "small"),
    paper=table_runs("lra", "paper"),
    show=show,
)
SPEECH = Target(
    name="speech",
    title="Speech Commands",
    where="table 2",
    about="Accuracy on the test split.",
    small=table_runs("speech", "small"),
    paper=table_runs("speech", "paper"),
    show=show,
)
ENWIK8 = Target(
    name="enwik8",
    title="Language modeling",
    where="table 3",
    about="Bits per byte on the test split. As in the paper, full-size models read it in windows of 8,192 bytes, of "
    "which the last 1,192 are scored. Models that carry a state from segment to segment, including the small "
    "variants, read it from beginning to end, in as many parts as an evaluation batch has sequences.",
    small=table_runs("enwik8", "small"),
    paper=table_runs("enwik8", "paper"),
    show=show,
)
