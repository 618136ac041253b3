"""Tables 1 to 3, and our diagnostics: the score of each run beside the paper's, with its curve."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from seqboat.paper.published import CHANCE, TITLES
from seqboat.paper.tables import Make, Pictures, Record, Records, rates_text, score_text, table
from seqboat.paper.target import ScoredTarget
from seqboat.paper.trial import Scale, Trial, table_runs
from seqboat.recipes import find_recipe


class RunsTarget(ScoredTarget):
    """A line for every run, curves of the held-out score, and what the small recipes cut."""

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        trials, found = self.trials(scale), self.found(scale, records)
        return [*_details(trials, found), *self.show_curves(trials, found, pictures), *_notes(trials, found)]

    def show_curves(self, trials: Sequence[Trial], records: Records, pictures: Pictures) -> list[str]:
        """The figure of held-out scores."""
        return pictures.show(
            _draw_curves(trials, records), title=f"{self.title}: held-out score during training"
        )


class TableTarget(RunsTarget):
    """The paper's table, ours beside its numbers, then the details of the runs that there are."""

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        trials, found = self.trials(scale), self.found(scale, records)
        ran = [trial for trial in trials if found[trial.name]]
        return [
            *_paper_table(trials, found),
            f"{len(ran)} of {len(trials)} rows and tasks were run:",
            "",
            *_details(ran, found),
            *self.show_curves(ran, found, pictures),
            *_notes(ran, found),
        ]


def _paper_table(trials: Sequence[Trial], records: Records) -> list[str]:
    """Models by tasks; every cell has our score and the paper's."""
    tasks = list(dict.fromkeys(trial.task for trial in trials))
    rows: dict[str, list[str]] = {}
    for trial in trials:
        cells = rows.setdefault(trial.title, ["-"] * len(tasks))
        own = records[trial.name]
        score = score_text([r["test"] for r in own], own[0]["metric"]) if own else "-"
        cells[tasks.index(trial.task)] = f"{score} ({trial.paper})"
    head = [TITLES.get(task, task) for task in tasks]
    return table(["ours (paper, full size)", *head], [[title, *cells] for title, cells in rows.items()])


def _details(trials: Sequence[Trial], records: Records) -> list[str]:
    head = ["", "paper, full size", "ours", "gap", "seeds", "parameters", "minutes", "processor", "threads"]
    return table([*head, "active %", "command"], [_row(trial, records[trial.name]) for trial in trials])


def _name(trial: Trial) -> str:
    """The model, and the task where there are several."""
    return f"{trial.title}, {trial.task_title}" if trial.task else trial.title


def _row(trial: Trial, records: Sequence[Record]) -> list[str]:
    if not records:
        return [_name(trial), trial.paper or "-", "not run", *"-------", f"`{trial.command()}`"]
    threads = sorted({str(r["threads"]) for r in records})
    return [
        _name(trial),
        trial.paper or "-",
        score_text([r["test"] for r in records], records[0]["metric"]),
        _gap(trial, records),
        ", ".join(str(r["seed"]) for r in records),
        f"{records[0]['parameters']:,}",
        *(f"{statistics.mean(r[k] for r in records):.1f}" for k in ("minutes", "processor_minutes")),
        "/".join(threads),
        "; ".join(rates_text(r["activation"]) for r in records),
        f"`{trial.command()}`",
    ]


def _gap(trial: Trial, records: Sequence[Record]) -> str:
    """Our mean minus the paper's number, in its unit."""
    if trial.paper is None or trial.paper == "chance":
        return "-"
    scale = 100 if records[0]["metric"] == "accuracy" else 1
    gap = scale * statistics.mean(r["test"] for r in records) - float(trial.paper.split()[0])
    return f"{gap:+.1f}" if scale == 100 else f"{gap:+.2f}"


def _notes(trials: Sequence[Trial], records: Records) -> list[str]:
    """What was cut and which data it was, once for each recipe of a task."""
    lines: dict[str, str] = {}
    for trial in trials:
        notes = [_cut(trial) if not trial.arguments else "", _data(records[trial.name])]
        name = trial.task_title or trial.title
        if any(notes) and name not in lines:
            lines[name] = f"- **{name}.** {' '.join(filter(None, notes))}"
    return list(lines.values())


def _cut(trial: Trial) -> str:
    """What a small recipe leaves out: the paragraph of its docstring that says so."""
    text = inspect.getdoc(find_recipe(trial.recipe.partition("/")[0])) or ""
    found = [" ".join(part.split()) for part in text.split("\n\n") if part.lstrip().startswith("Cut:")]
    return found[0] if found else ""


def _data(records: Sequence[Record]) -> str:
    """Where the examples came from and how many there are, where they were prepared."""
    found = next((r for r in records if r.get("data")), None)
    if found is None:
        return ""
    counts = found["data"]["counts"]
    sizes = ", ".join(f"{counts[split]:,} {split}" for split in ("train", "val", "test") if split in counts)
    scored = f"; {found['examples']:,} of the test split scored" if found["metric"] == "accuracy" else ""
    return f"Data: {found['data']['source']} ({sizes}){scored}."


def _draw_curves(trials: Sequence[Trial], records: Records) -> Make | None:
    """Held-out scores during training: a panel per task, a line per run."""
    from seqboat.figures import curves_figure

    panels: dict[str, list[Mapping[str, Any]]] = {}
    chance = {}
    for trial in trials:
        title = trial.task_title or trial.title
        for record in records[trial.name]:
            seed = f"seed {record['seed']}"
            label = f"{trial.title}, {seed}" if trial.task else seed
            panels.setdefault(title, []).append({**record, "label": label})
            if trial.task in CHANCE:
                chance[title] = CHANCE[trial.task]
    if not panels:
        return None
    return lambda theme: curves_figure(panels, chance=chance, theme=theme)


LRA = TableTarget(
    name="lra",
    title="Long Range Arena",
    where="table 1",
    about="Accuracy on the test split. The small variants see shorter sequences and few epochs, so their scores are "
    "not comparable with the paper's; they show that each task trains and where its models attend.",
    small=table_runs("lra", "small"),
    paper=table_runs("lra", "paper"),
)
SPEECH = TableTarget(
    name="speech",
    title="Speech Commands",
    where="table 2",
    about="Accuracy on the test split.",
    small=table_runs("speech", "small"),
    paper=table_runs("speech", "paper"),
)
ENWIK8 = TableTarget(
    name="enwik8",
    title="Language modeling",
    where="table 3",
    about="Bits per byte on the test split. As in the paper, full-size models read it in windows of 8,192 bytes, of "
    "which the last 1,192 are scored. Models that carry a state from segment to segment, including the small "
    "variants, read it from beginning to end, in as many parts as an evaluation batch has sequences.",
    small=table_runs("enwik8", "small"),
    paper=table_runs("enwik8", "paper"),
)
DIAGNOSTICS = RunsTarget(
    name="diagnostics",
    title="Diagnostics",
    where="not in the paper",
    about="Associative recall needs attention: the model has to look up which value followed a key. A pure "
    "state-space model of the same size has only its state for that.",
    small=(
        Trial(name="recall", title="recall, SeqBoat", recipe="recall", seeds=3, minutes=3),
        Trial(
            name="recall-s4d",
            title="recall, pure state-space model (S4D)",
            recipe="recall",
            arguments=("--model.mixer=s4d", "--model.d_model=72"),
            seeds=3,
            minutes=3,
        ),
        Trial(name="copy", title="selective copy, SeqBoat", recipe="copy", seeds=3, minutes=3),
    ),
)
