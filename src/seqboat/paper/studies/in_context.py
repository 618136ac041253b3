"""Tasks that tell models apart at small scale: recall, needles in a haystack, and other tests of memory.

After the grids of Arora et al. (2023) and Poli et al. (2024), cut to what trains in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from seqboat.paper.studies.study import Study
from seqboat.paper.tables import Pictures, Record, rates_text, score_text, table
from seqboat.paper.trial import Trial


class Test(NamedTuple):
    """A task with its sizes."""

    title: str
    recipe: str
    arguments: tuple[str, ...]
    chance: float


class Model(NamedTuple):
    """A mixer with the size of its state."""

    row: str
    title: str
    arguments: tuple[str, ...]
    """settings of the mixer"""
    size: int | None = None
    """window, chunk or states per channel"""


def _recall(length: int, pairs: int, *more: str) -> tuple[str, ...]:
    return f"--task.length={length}", f"--task.pairs={pairs}", "--task.vocab=32", *more


def _needle(needles: int) -> tuple[str, ...]:
    return "--task.length=64", "--task.key_length=1", "--task.digits=1", f"--task.needles={needles}"


TESTS = {
    "recall-8": Test("recall, 8 pairs in 64", "recall", _recall(64, 8), 1 / 15),
    "recall-4": Test("recall, 4 pairs in 32", "recall", _recall(32, 4), 1 / 15),
    "noisy-recall": Test(
        "recall with noise, 4 pairs in 64",
        "recall",
        ("--task.length=64", "--task.pairs=4", "--task.vocab=46", "--task.noise=0.5"),
        1 / 15,
    ),
    "copy": Test(
        "selective copying, 4 tokens in 32", "copy", ("--task.length=32", "--task.tokens=4"), 1 / 14
    ),
    "needle-1": Test("needle, one key in 64 bytes", "needle", _needle(1), 0.1),
    "needle-4": Test("needle, four keys in 64 bytes", "needle", _needle(4), 0.1),
    "memorize": Test("memorization, 63 pairs", "memorize", (), 1 / 63),
    "recall-16": Test(
        "recall, 16 pairs in 128",
        "recall",
        ("--task.length=128", "--task.pairs=16", "--task.vocab=64"),
        1 / 31,
    ),
}
"""In the order in which they are run."""


def _model(row: str, title: str, name: str, size: int, *more: str) -> Model:
    field = f"--model.mixer.{name}={size}"
    mixer = () if row.startswith("seqboat") else (f"--model.mixer={row}",)
    return Model(row, f"{title}, {size}", (*mixer, field, *more), size)


def _boat(window: int) -> Model:
    return _model("seqboat", "SeqBoat, window", "gau.window", window)


SCALED = "--model.mixer.init=scaled", "--model.mixer.gau.positions=rotary-original"
"""The library's default initial weights and positions, as in the tables."""


def _scaled(window: int) -> Model:
    return _model("seqboat-scaled", "SeqBoat, scaled start, window", "gau.window", window, *SCALED)


def _conv(window: int) -> Model:
    title = "SeqBoat, scaled start, short convolution, window"
    kernel = "--model.mixer.ssm=ema-conv", "--model.mixer.ssm.d_state=4"  # as many as the recipes have
    return _model("seqboat-conv", title, "gau.window", window, *SCALED, *kernel)


MODELS = (
    _boat(64),
    _scaled(64),
    _conv(64),
    _model("mega-chunk", "MEGA-chunk", "chunk", 64),
    _model("s4d", "S4D, states", "ssm.d_state", 64),
    _model("mamba2", "Mamba-2, states", "d_state", 64),
    _model("gated-deltanet", "Gated DeltaNet, keys", "d_key", 16),
    _model("samba", "Samba, window", "window", 64),
    Model("transformer", "Transformer", ("--model.mixer=transformer", "--model.mixer.positions=rotary")),
)
"""Models on every test."""
SIZES = (
    _boat(16),
    _boat(32),
    _scaled(16),
    _scaled(32),
    _conv(16),
    _conv(32),
    _model("mega-chunk", "MEGA-chunk", "chunk", 16),
    _model("s4d", "S4D, states", "ssm.d_state", 16),
    _model("mamba2", "Mamba-2, states", "d_state", 16),
    _model("gated-deltanet", "Gated DeltaNet, keys", "d_key", 8),
    _model("samba", "Samba, window", "window", 16),
)
"""Smaller states of the same models, on tests of recall."""
WITH_SIZES = ("recall-8",)
"""Tests on which several sizes are compared."""


def in_context_trials() -> tuple[Trial, ...]:
    """Every model on every test; several sizes of state on tests of recall."""
    return tuple(
        Trial(
            name=f"{name}-{model.row}" + (f"-{model.size}" if model.size else ""),
            title=model.title,
            recipe=test.recipe,
            arguments=(*test.arguments, *model.arguments),
            match=not model.row.startswith("seqboat"),
            row=model.row,
            task=name,
            size=model.size,
        )
        for name, test in TESTS.items()
        for model in (*MODELS, *(SIZES if name in WITH_SIZES else ()))
    )


def show(study: Study, records: Sequence[Record], pictures: Pictures) -> list[str]:
    lines: list[str] = []
    for budget in sorted({r["budget"] for r in records}, reverse=True):
        found = {r["trial"]: r for r in records if r["budget"] == budget and r["seed"] == 0}
        lines += [f"### {budget:g} seconds for each model", "", *_verdict(found), *_overview(study, found)]
        lines += pictures.show(
            _by_state(study, found), f"-state-{budget:g}", "Accuracy against size of the state"
        )
        lines += pictures.show(_by_time(study, found), f"-time-{budget:g}", "Accuracy against seconds")
        lines += _sizes(study, found)
    return lines


def _verdict(found: dict[str, Record]) -> list[str]:
    """In words: SeqBoat with a window of 64 against the recurrent models with a state of similar size."""
    starts = {
        "seqboat": "the paper's initial weights",
        "seqboat-scaled": "the library's",
        "seqboat-conv": "a short convolution too",
    }
    rivals = {"mamba2-64": "Mamba-2", "gated-deltanet-16": "Gated DeltaNet"}
    lines = []
    for name, test in TESTS.items():
        own = {row: r for row in starts if (r := found.get(f"{name}-{row}-64")) is not None}
        others = {row: r for row in rivals if (r := found.get(f"{name}-{row}")) is not None}
        if test.recipe == "recall" and own and others:
            mine = ", ".join(f"{_percent(r)} with {starts[row]}" for row, r in own.items())
            theirs = " and ".join(f"{rivals[row]} {_percent(r)}" for row, r in others.items())
            # as precisely as it is shown
            best, rival = (round(max(r["test"] for r in rows.values()), 3) for rows in (own, others))
            word = "at or above" if best >= rival else "below"
            lines.append(f"- {test.title}: SeqBoat ({mine}) is {word} the better of {theirs}.")
    return [*lines, ""] if lines else []


def _percent(record: Record) -> str:
    return f"{100 * record['test']:.1f} % (state of {record['state_bytes'] / 1024:.0f} kB)"


def _overview(study: Study, found: dict[str, Record]) -> list[str]:
    rows: dict[str, list[str]] = {}
    for trial in study.trials:
        cells = rows.setdefault(trial.title, ["" for _ in TESTS])
        record = found.get(trial.name)
        text = score_text([record["test"]], record["metric"]) if record else "not run"
        cells[list(TESTS).index(trial.task)] = text
    head = [f"{test.title} (chance {100 * test.chance:.0f} %)" for test in TESTS.values()]
    return table(["", *head], [[title, *cells] for title, cells in rows.items()])


def _sizes(study: Study, found: dict[str, Record]) -> list[str]:
    """What each run took."""
    head = [
        "",
        "task",
        "accuracy",
        "state, kB",
        "parameters",
        "learning rate",
        "steps x batch",
        "tokens/s",
        "active %",
    ]
    rows = []
    for trial in study.trials:
        if trial.name in found:
            r = found[trial.name]
            active = rates_text(r["activation"]) if any(a is not None for a in r["activation"]) else "-"
            rows.append(
                [
                    trial.title,
                    TESTS[trial.task].title,
                    score_text([r["test"]], r["metric"]),
                    f"{r['state_bytes'] / 1024:.1f}",
                    f"{r['parameters']:,}",
                    f"{r['lr']:g}",
                    f"{r['steps']} x {r['batch']}",
                    f"{r['tokens_per_second']:,.0f}",
                    active,
                ]
            )
    return table(head, rows)


def lines_by_state(study: Study, found: dict[str, Record]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """For each test with several sizes, a line for each model: size of the state in kB, accuracy."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for trial in study.trials:
        if trial.name in found and trial.task in WITH_SIZES:
            record = found[trial.name]
            name = trial.title.rpartition(", ")[0] or trial.title
            lines = panels.setdefault(TESTS[trial.task].title, {})
            lines.setdefault(name, []).append((record["state_bytes"] / 1024, record["test"]))
    return panels


def _by_state(study: Study, found: dict[str, Record]) -> Callable[[Any], Any] | None:
    from seqboat.figures import lines_figure

    panels = lines_by_state(study, found)
    if not panels:
        return None
    chance = {test.title: test.chance for test in TESTS.values()}
    return lambda theme: lines_figure(
        panels, x="state of one sequence, kB", y="accuracy", log="x", chance=chance, theme=theme
    )


def _by_time(study: Study, found: dict[str, Record]) -> Callable[[Any], Any] | None:
    from seqboat.figures import lines_figure

    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for trial in study.trials:
        if trial.name in found and any(trial.title == model.title for model in MODELS):
            points = [(seconds, score) for seconds, _, score in found[trial.name]["curve"]]
            panels.setdefault(TESTS[trial.task].title, {})[trial.title] = points
    if not panels:
        return None
    chance = {test.title: test.chance for test in TESTS.values()}
    return lambda theme: lines_figure(
        panels, x="seconds of training", y="accuracy on validation data", chance=chance, theme=theme
    )


IN_CONTEXT = Study(
    name="in-context",
    title="Recall, needles and memory",
    about="All models have two layers, as many parameters as the recipe's SeqBoat (width 64), the same processor "
    "time, and a learning rate chosen from three. SeqBoat with a scaled start has the library's default initial "
    "weights, and rotary positions beside the bias table; with a short convolution, its kernel is `ema-conv`. The "
    "state is what a model keeps after reading an example; that of the Transformer grows with the text. Recall asks "
    "which value followed a key. Needle asks, byte by byte, which digit was assigned to a letter. Memorization has "
    "pairs that never change, so the weights must store them.",
    trials=in_context_trials(),
    budget=20.0,
    command="seqboat reproduce in-context",
    show=show,
)
