"""Tables 1 to 3, and our diagnostics: the score of each run beside the paper's, with its curve."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from seqboat.paper.published import LRA_TASKS
from seqboat.paper.tables import Make, Pictures, Record, rates_text, score_text, table
from seqboat.paper.targets.base import ScoredTarget
from seqboat.paper.trials import Scale, Trial, paper_runs
from seqboat.recipes import find_recipe


class ScoresTarget(ScoredTarget):
    """A row per run, curves of the held-out score, and what the small recipes cut."""

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        trials, found = self.trials(scale), self.found(scale, records)
        head = [
            "",
            "paper, full size",
            "ours",
            "gap",
            "seeds",
            "parameters",
            "minutes",
            "processor",
            "threads",
        ]
        lines = table([*head, "active %", "command"], [_row(trial, found[trial.name]) for trial in trials])
        lines += pictures.show(
            _draw_curves(trials, records), title=f"{self.title}: held-out score during training"
        )
        for trial in trials:
            notes = [_cut(trial) if not trial.arguments else "", _data(found[trial.name])]
            if any(notes):
                lines.append(f"- **{trial.title}.** {' '.join(filter(None, notes))}")
        return lines


def _row(trial: Trial, records: Sequence[Record]) -> list[str]:
    if not records:
        return [trial.title, trial.paper or "-", "not run", *"-------", f"`{trial.command()}`"]
    threads = sorted({str(r["threads"]) for r in records})
    return [
        trial.title,
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
    if trial.paper is None:
        return "-"
    scale = 100 if records[0]["metric"] == "accuracy" else 1
    gap = scale * statistics.mean(r["test"] for r in records) - float(trial.paper.split()[0])
    return f"{gap:+.1f}" if scale == 100 else f"{gap:+.2f}"


def _cut(trial: Trial) -> str:
    """What a small recipe leaves out: the paragraph of its docstring that says so."""
    text = inspect.getdoc(find_recipe(trial.recipe)) or ""
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


def _draw_curves(trials: Sequence[Trial], records: Sequence[Record]) -> Make:
    """Held-out scores during training."""
    from seqboat.figures import curves_figure

    titles = {trial.name: trial.title for trial in trials}
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        panels.setdefault(titles.get(str(record["trial"]), str(record["trial"])), []).append(record)
    return lambda theme: curves_figure(panels, theme=theme)


LRA = ScoresTarget(
    name="lra",
    title="Long Range Arena",
    where="table 1",
    about="Accuracy on the test split. The small variants see shorter sequences and a few epochs, so they are "
    "not comparable with the paper's numbers; they show that each task trains and where it attends.",
    small=paper_runs("small", *LRA_TASKS),
    paper=paper_runs("paper", *LRA_TASKS),
)
SPEECH = ScoresTarget(
    name="speech",
    title="Speech Commands",
    where="table 2",
    about="Accuracy on the test split.",
    small=paper_runs("small", "speech"),
    paper=paper_runs("paper", "speech"),
)
ENWIK8 = ScoresTarget(
    name="enwik8",
    title="Language modeling",
    where="table 3",
    about="Bits per byte on the test split, which is read as one batch of equal parts, each from beginning to end "
    "with its state carried along.",
    small=paper_runs("small", "enwik8"),
    paper=paper_runs("paper", "enwik8"),
)
DIAGNOSTICS = ScoresTarget(
    name="diagnostics",
    title="Diagnostics",
    where="not in the paper",
    about="Associative recall needs attention: the model has to look up which value stood beside a key. A "
    "pure state-space model of the same size has only its state for that.",
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
