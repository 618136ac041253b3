"""Every mixer learns: a short run of each, with as many parameters as SeqBoat."""

from __future__ import annotations

from collections.abc import Sequence

from seqboat.core.mixer import directions_of
from seqboat.mixers import MIXERS
from seqboat.paper.matching import TABLES, too_long
from seqboat.paper.tables import Pictures, Record, rates_text, score_text, table
from seqboat.paper.target import ScoredTarget
from seqboat.paper.trial import Scale, Trial, short_schedule

READ_LISTOPS = ("performer", "luna", "transformer", "adaptive-span")
"""Mixers that have a causal form and still read ListOps: the causal form of the first two takes about twice as long,
since it sums prefixes; the others barely begin to recall in so few steps."""

SETTINGS = {
    "reformer": ("--model.mixer.hashes=1", "--model.mixer.buckets=4", "--model.mixer.chunk_size=16"),
}
"""Further settings for short sequences."""


def mixer_runs() -> tuple[Trial, ...]:
    """Every mixer on recall; those without a causal form, and READ_LISTOPS, on ListOps."""
    trials = []
    for name, config in MIXERS.items():
        causal = "causal" in directions_of(config) and name not in READ_LISTOPS
        length, schedule = (64, short_schedule(500, 2)) if causal else (128, short_schedule(400, 2))
        fields = too_long(config(), length, (*TABLES, "window"))
        trials.append(
            Trial(
                name=f"mixers-{name}",
                title=name,
                recipe="recall" if causal else "lra.listops-small",
                arguments=(
                    f"--model.mixer={name}",
                    *(f"--model.mixer.{field}={length}" for field in fields),
                    *SETTINGS.get(name, ()),
                    *schedule,
                ),
                match=True,
                minutes=1.3,
                row=name,
                task="recall" if causal else "listops",
            )
        )
    return tuple(trials)


class MixersTarget(ScoredTarget):
    """A row per mixer: its loss at the beginning and at the end."""

    def show(self, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
        found = self.found(scale, records)
        head = ["mixer", "task", "parameters", "first loss", "last loss", "fall", "test", "processor minutes"]
        return table([*head, "active %"], [_row(trial, found[trial.name]) for trial in self.trials(scale)])


def _row(trial: Trial, records: Sequence[Record]) -> list[str]:
    if not records:
        return [trial.title, trial.task_title, "not run", *"------"]
    record = records[0]
    _, first = record["first_loss"]
    return [
        trial.title,
        trial.task_title,
        f"{record['parameters']:,}",
        f"{first:.2f}",
        f"{record['last_loss']:.2f}",
        f"{1 - record['last_loss'] / first:.0%}",
        score_text([record["test"]], record["metric"]),
        f"{record['processor_minutes']:.1f}",
        rates_text(record["activation"]) if any(r is not None for r in record["activation"]) else "-",
    ]


MIXER_RUNS = MixersTarget(
    name="mixers",
    title="Every mixer learns",
    where="not in the paper",
    about="Associative recall with a fixed short budget and as many parameters as the recipe's SeqBoat. The runs "
    "recorded here used each mixer's own defaults; a new run uses the recipe's settings as far as the mixer supports "
    "them. Tables and windows are no longer than a sequence, and Reformer has one round of hashing with buckets of "
    "16 tokens. Six mixers read ListOps in both directions instead: Linformer and BigBird have no causal form, that "
    "of Performer and Luna takes about twice as long, and Transformer and Adaptive Span barely begin to recall in so "
    "few steps. The first loss is that of the batch at step 10, in the middle of the warm-up; the last is that of "
    "the validation split. Guessing among the 31 values of recall gives a loss of 3.43 and is right in 3 % of cases; "
    "guessing among the ten answers of ListOps gives a loss of 2.30.",
    cut="Recall: 500 steps of 1,500. ListOps: 400 of 4,600. The learning rate is SeqBoat's; no mixer is tuned.",
    small=mixer_runs(),
)
