"""Tables 1 to 3 at equal compute: every row, and the models that came after the paper, on the tiny variants."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from seqboat.paper.published import CHANCE, TITLES, published_score
from seqboat.paper.studies.study import Study
from seqboat.paper.tables import Pictures, Record, rates_text, score_text, table
from seqboat.paper.trial import Trial
from seqboat.recipes import ROWS, find_recipe
from seqboat.recipes.rows import RIVALS, TINY, small_rows, table_of

SCALED = "seqboat-scaled"
"""SeqBoat with the library's default initial weights, and with rotary positions beside a bias table. The recipes have
the weights and positions of the paper."""
KERNEL = "seqboat-s4d"
"""SeqBoat with the kernel of S4D in place of the moving average, which then has the learning rate of the S4D row."""
QUARTER = "seqboat-quarter"
"""SeqBoat with the library's default initial weights, whose layers attend from a quarter of the tokens."""
CONV = "seqboat-conv"
"""SeqBoat whose moving average has a short convolution beside it."""
FORMS = {
    SCALED: "SeqBoat, scaled start",
    QUARTER: "SeqBoat, scaled start, 25 % active",
    KERNEL: "SeqBoat, S4D kernel",
    CONV: "SeqBoat, short convolution",
}
"""Titles of SeqBoat in forms that are not in the paper's tables."""
FIRST = ("seqboat", *FORMS, "mega-chunk", "s4d", "transformer", "seqboat-full", "s5", *RIVALS)
"""Rows that are run first."""
SEEDED = ("seqboat", "seqboat-full", "mega-chunk", "s4d", "s5", "transformer")
"""Rows with three seeds."""
COMPARED = ("mega-chunk", "s4d", "transformer")
"""Rows that SeqBoat is compared with."""
ORDER = ("listops", "enwik8", "image", "speech", "text", "retrieval", "pathfinder", "pathx")
"""Tasks in the order in which they are run."""


def table_trials() -> tuple[Trial, ...]:
    """Every row on every task, the most important ones first."""
    trials = []
    for recipe in TINY:
        name, task = table_of(recipe)
        for row, title in rows_of(name).items():
            own = row == "seqboat" or row in FORMS
            mixer: Any = find_recipe(recipe)().model.mixer
            rotated = ("--model.mixer.gau.positions=rotary-original",)
            scaled = ("--model.mixer.init=scaled", *(rotated if mixer.gau.positions == "original" else ()))
            changes = {
                SCALED: scaled,
                QUARTER: (*scaled, "--model.mixer.budget.target=0.25"),
                # as many parameters as the moving average
                KERNEL: (
                    "--model.mixer.ssm=s4d",
                    f"--model.mixer.ssm.d_state={2 * mixer.ssm.d_state}",
                    "--optimizer.ssm_lr=0.001",
                ),
                # taps take the parameters of one state
                CONV: ("--model.mixer.ssm=ema-conv", f"--model.mixer.ssm.d_state={mixer.ssm.d_state - 1}"),
            }
            trials.append(
                Trial(
                    name=f"{task}-{row}",
                    title=title,
                    recipe=recipe if own else f"{recipe}/{row}",
                    arguments=changes[row] if row in FORMS else (),
                    match=not own,
                    seeds=3 if row in SEEDED else 1,
                    paper=_published(name, row, task),
                    row=row,
                    task=task,
                )
            )

    def rank(trial: Trial) -> tuple[int, int, int]:
        late = FIRST.index(trial.row) if trial.row in FIRST else len(FIRST)
        return int(late == len(FIRST)), ORDER.index(trial.task), late

    return tuple(sorted(trials, key=rank))


def rows_of(table: str) -> dict[str, str]:
    """Titles of the rows of a table, with SeqBoat in all forms."""
    return small_rows(table) | FORMS


def _published(table: str, row: str, task: str) -> str | None:
    """The number of the paper in the words of its table; None where the row is not in it."""
    if row not in ROWS[table]:
        return None
    score = published_score(table, row, task)
    return "chance" if score is None else f"{score:.2f}"


Scores = Mapping[tuple[str, str], Sequence[Record]]
"""Finished runs by row and task."""


def by_cell(records: Sequence[Record]) -> Scores:
    """Finished runs by row and task."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if "test" in record:
            found.setdefault((record["row"], record["task"]), []).append(record)
    return found


class Standing(NamedTuple):
    """How a model does against another one."""

    tasks: int
    """on which both were run, and at least one does better than guessing"""
    ahead: list[str]
    """tasks on which it is at or above the other"""
    clearly_ahead: list[str]
    """of these, by more than two standard errors"""
    clearly_behind: list[str]


def standing(scores: Scores, row: str, other: str) -> Standing:
    """Compare two rows task by task."""
    ahead, clear, behind = [], [], []
    tasks = [
        task
        for task in ORDER
        if (row, task) in scores
        and (other, task) in scores
        and not all(guesses(scores[name, task], task) for name in (row, other))
    ]
    for task in tasks:
        one, two = scores[row, task], scores[other, task]
        sign = 1 if one[0]["better"] == "higher" else -1
        gap = sign * (_mean(one) - _mean(two))
        errors = standard_error(one), standard_error(two)
        error = math.hypot(*errors) if all(errors) else 0.0
        if gap >= 0:
            ahead.append(task)
        if error and gap > 2 * error:  # one seed of a language model has no error that is known
            clear.append(task)
        if error and gap < -2 * error:
            behind.append(task)
    return Standing(len(tasks), ahead, clear, behind)


def _mean(records: Sequence[Record]) -> float:
    return statistics.mean(r["test"] for r in records)


def guesses(records: Sequence[Record], task: str) -> bool:
    """Whether a model is within two standard errors of guessing, or below."""
    chance = CHANCE.get(task)
    return chance is not None and _mean(records) - chance < 2 * standard_error(records)


def standard_error(records: Sequence[Record]) -> float:
    """Of a mean score: from the spread over seeds, or from the number of examples if that is larger.

    The bits of a language model have no error of the second kind here: all models read the same text.
    """
    scores = [r["test"] for r in records]
    seeds = statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0
    if records[0]["metric"] != "accuracy":
        return seeds
    mean = statistics.mean(scores)
    return max(seeds, math.sqrt(mean * (1 - mean) / records[0]["examples"]))


def show(study: Study, records: Sequence[Record], pictures: Pictures) -> list[str]:
    lines: list[str] = []
    for budget in sorted({r["budget"] for r in records}, reverse=True):
        scores = by_cell([r for r in records if r["budget"] == budget])
        lines += [f"### {budget:g} seconds for each model", ""]
        lines += [*_verdict(scores), *_overview(study, scores)]
        lines += pictures.show(_draw(scores, study), f"-{budget:g}", f"Score against seconds, {budget:g} s")
        for task in ORDER:
            lines += _task_table(study, task, scores)
    return lines


def _verdict(scores: Scores) -> list[str]:
    """In words: where SeqBoat stands; against all others as a table."""
    titles = {row: title for table in ROWS for row, title in rows_of(table).items()}
    lines = []
    for other in COMPARED:
        found = standing(scores, "seqboat", other)
        if found.tasks:
            lines.append(
                f"- SeqBoat is at or above **{titles[other]}** on {len(found.ahead)} of {found.tasks} tasks"
                f"{_named(found.ahead)}; by more than two standard errors on {len(found.clearly_ahead)}"
                f"{_named(found.clearly_ahead)}, and below it by as much on {len(found.clearly_behind)}"
                f"{_named(found.clearly_behind)}."
            )
    ran = {row for row, _ in scores}
    forms = [row for row in ("seqboat", *FORMS) if row in ran]
    rows = []
    for other, title in titles.items():
        cells = [_counted(standing(scores, row, other)) if row != other else "" for row in forms]
        if any(cells):
            rows.append([title, *cells])
    if not rows:
        return []
    return [
        *lines,
        "",
        "On how many tasks a form of SeqBoat is at or above another model, and how often clearly above (+) and below "
        "(-), by more than two standard errors. Tasks on which both are within two standard errors of guessing, or "
        "below, do not count.",
        "",
        *table(["against", *(titles[row] for row in forms)], rows),
    ]


def _counted(found: Standing) -> str:
    """A comparison in a cell of a table."""
    if not found.tasks:
        return ""
    return f"{len(found.ahead)} of {found.tasks} (+{len(found.clearly_ahead)}, -{len(found.clearly_behind)})"


def _task_names(tasks: Sequence[str]) -> str:
    return ", ".join(TITLES.get(task, task) for task in tasks)


def _named(tasks: Sequence[str]) -> str:
    return f" ({_task_names(tasks)})" if tasks else ""


def _overview(study: Study, scores: Scores) -> list[str]:
    """Models by tasks; every cell has our score, and the paper's where it has one."""
    rows: dict[str, list[str]] = {}
    ran = {row for row, _ in scores}
    for trial in study.trials:
        if trial.row not in ran:
            continue
        cells = rows.setdefault(trial.title, ["" for _ in ORDER])
        own = scores.get((trial.row, trial.task))
        text = _score(own) if own else "-"
        cells[ORDER.index(trial.task)] = f"{text} ({trial.paper})" if trial.paper else text
    head = [TITLES.get(task, task) for task in ORDER]
    missing = dict.fromkeys(trial.title for trial in study.trials if trial.row not in ran)
    return [
        "A dash stands for a run that was not made."
        + (f" Not run with this budget on any task: {'; '.join(missing)}." if missing else ""),
        "",
        *table(["ours (paper, full size)", *head], [[title, *cells] for title, cells in rows.items()]),
    ]


def _score(records: Sequence[Record]) -> str:
    return score_text([r["test"] for r in records], records[0]["metric"])


def _task_table(study: Study, task: str, scores: Scores) -> list[str]:
    trials = [t for t in study.trials if t.task == task]
    ran = [trial for trial in trials if (trial.row, task) in scores]
    if not ran:
        return []
    head = ["", "ours", "± error", "paper", "seeds", "parameters", "learning rate", "steps x batch"]
    head += ["tokens/s", "MB per step", "active %", "seconds of training"]
    rows = {row for row, _ in scores}  # the others are named once for all tasks
    missing = [trial.title for trial in trials if trial not in ran and trial.row in rows]
    limits = f"Guessing: {100 * CHANCE[task]:.0f} %." if task in CHANCE else ""
    lines = [f"**{TITLES.get(task, task)}.** {limits}".rstrip(), ""]
    lines += table(head, [_row(trial, scores[trial.row, task]) for trial in ran])
    return [*lines, *([f"Not run: {', '.join(missing)}.", ""] if missing else [])]


def _row(trial: Trial, records: Sequence[Record]) -> list[str]:
    first = records[0]
    accuracy = first["metric"] == "accuracy"
    error = standard_error(records)
    return [
        trial.title,
        _score(records),
        "-" if not error else f"{100 * error:.1f}" if accuracy else f"{error:.3f}",
        trial.paper or "-",
        ", ".join(str(r["seed"]) for r in records),
        f"{first['parameters']:,}",
        f"{first['lr']:g}",
        f"{first['steps']} x {first['batch']}",
        _average(records, "tokens_per_second"),
        _average(records, "step_memory_mb"),
        rates_text(first["activation"]) if any(r is not None for r in first["activation"]) else "-",
        _average(records, "training_seconds"),
    ]


def _average(records: Sequence[Record], field: str) -> str:
    known = [r[field] for r in records if r.get(field) is not None]
    return f"{statistics.mean(known):,.0f}" if known else "-"


def _draw(scores: Scores, study: Study) -> Callable[[Any], Any] | None:
    """Held-out scores against seconds of training, for the rows that are run first."""
    from seqboat.figures import lines_figure

    titles = {trial.row: trial.title for trial in study.trials}
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for task in ORDER:
        for row in FIRST:
            for record in scores.get((row, task), ())[:1]:
                points = [(seconds, score) for seconds, _, score in record["curve"]]
                panels.setdefault(TITLES.get(task, task), {})[titles[row]] = points
    if not panels:
        return None
    chance = {TITLES.get(task, task): value for task, value in CHANCE.items()}
    return lambda theme: lines_figure(
        panels, x="seconds of training", y="score on validation data", chance=chance, theme=theme
    )


TABLES = Study(
    name="tables",
    title="Tables 1 to 3 at equal compute",
    about="Every row of the paper's three tables, and newer models, on tiny variants of all eight tasks: two layers "
    "of width 32 (enwik8: 64) on the data of the small variants, which leave chance within a minute on most "
    "tasks (on Text, Retrieval and Path-X most models need more time: give it to them, by `--tasks`). All "
    "models get the same processor time and as many parameters "
    "as the recipe's SeqBoat. For each "
    "model and task, the learning rate is chosen from three on validation data, which takes a quarter of the "
    "time. Mamba-2, Gated DeltaNet and Samba have no bidirectional form and read from left to right. SeqBoat "
    "with a scaled start uses the library's default initial weights instead of the paper's, and rotary "
    "positions beside the bias table where the recipe has one; with 25 % active, a quarter of the tokens attend in "
    "every layer; with the S4D kernel it has S4D's in place of the moving average; with a short convolution, its "
    "kernel is `ema-conv`. Accuracies are measured "
    "on 25,000 tokens of the test split for each second of the budget; enwik8 is in bits per byte: every model "
    "reads segments of 256 bytes from random places without a carried state, and the second half of "
    "each is scored. MB per step is what a training step keeps for its backward pass. ± is the std over "
    "seeds; the error is the standard error from seeds or from the number of examples, whichever is larger. The "
    "paper's numbers come from full-size models and hours on GPUs: they show the ranking of the models and "
    "are not comparable.",
    trials=table_trials(),
    budget=60.0,
    command="seqboat reproduce tables --scale small",
    show=show,
)
