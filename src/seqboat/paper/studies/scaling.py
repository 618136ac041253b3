"""Loss on enwik8 against parameters and compute, for SeqBoat and three rivals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from seqboat.paper.studies.study import Study
from seqboat.paper.tables import Pictures, Record, rates_text, table
from seqboat.paper.trial import Trial

SIZES = ((2, 64), (3, 96), (4, 128), (5, 176), (6, 256))
"""Layers and width, about 0.1M to 3M parameters."""
MODELS = {"seqboat": "SeqBoat", "mega-chunk": "MEGA-chunk", "mamba2": "Mamba-2", "transformer": "Transformer"}
WIDE = {
    "seqboat": ("gau.d_v",),
    "mega-chunk": ("d_v", "d_ff"),
    "transformer": ("d_ff",),
}
"""Fields of the mixers that are twice as wide as the model."""
FULL = 39_000_000
"""Parameters of the paper's language model."""
FARTHEST = 10_000
"""Times the longest run up to which a prediction is worth a number."""


def scaling_trials() -> tuple[Trial, ...]:
    """Every model in every size."""
    return tuple(
        Trial(
            name=f"{row}-{layers}x{width}",
            title=f"{title}, {layers} x {width}",
            recipe="enwik8-tiny" if row == "seqboat" else f"enwik8-tiny/{row}",
            arguments=(
                *(("--model.mixer.init=scaled",) if row == "seqboat" else ()),
                f"--model.num_layers={layers}",
                f"--model.d_model={width}",
                *(f"--model.mixer.{field}={2 * width}" for field in WIDE.get(row, ())),
            ),
            row=row,
            size=width,
        )
        for layers, width in SIZES
        for row, title in MODELS.items()
    )


class Fit(NamedTuple):
    """The best loss of a budget, from a parabola through loss against the logarithm of size."""

    loss: float
    parameters: float
    inside: bool
    """whether the best size lies between the sizes that were run"""
    coefficients: tuple[float, float, float]


def fit_sizes(points: Sequence[tuple[float, float]]) -> Fit | None:
    """Fit loss against log(parameters), from at least three sizes.

    >>> fit = fit_sizes([(10**k, (k - 5.5) ** 2 + 2) for k in (5, 6, 7)])
    >>> round(fit.loss, 6), round(math.log10(fit.parameters), 6), fit.inside
    (2.0, 5.5, True)
    """
    if len(points) < 3:
        return None
    x, y = np.log10([p for p, _ in points]), np.array([loss for _, loss in points])
    a, b, c = (float(v) for v in np.polyfit(x, y, 2))
    low, high = float(x.min()), float(x.max())
    ends = [(float(np.polyval((a, b, c), end)), end) for end in (low, high)]
    vertex = -b / (2 * a) if a > 0 else math.nan
    if a > 0 and low <= vertex <= high:
        return Fit(float(np.polyval((a, b, c), vertex)), 10**vertex, True, (a, b, c))
    loss, place = min(ends)
    return Fit(loss, 10**place, False, (a, b, c))


def show(study: Study, records: Sequence[Record], pictures: Pictures) -> list[str]:
    budgets = sorted({r["budget"] for r in records})
    fits = {
        (row, budget): fit_sizes([(r["parameters"], r["test"]) for r in records if _of(r, row, budget)])
        for row in MODELS
        for budget in budgets
    }
    return [
        *pictures.show(_draw(records, budgets, fits), title="Loss against parameters"),
        *_best_table(budgets, fits),
        *_prediction(budgets, fits),
        *_runs(study, records),
    ]


def _of(record: Record, row: str, budget: float) -> bool:
    return record["row"] == row and record["budget"] == budget


def _draw(
    records: Sequence[Record], budgets: Sequence[float], fits: dict[tuple[str, float], Fit | None]
) -> Callable[[Any], Any] | None:
    from seqboat.figures import lines_figure

    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    drawn: dict[str, dict[str, list[tuple[float, float]]]] = {}
    active: dict[str, list[tuple[float, float]]] = {}
    for budget in budgets:
        name = f"{budget:g} seconds"
        for row, title in MODELS.items():
            points = [(r["parameters"], r["test"]) for r in records if _of(r, row, budget)]
            if points:
                panels.setdefault(name, {})[title] = points
            fit = fits[row, budget]
            if fit is not None:
                x = np.linspace(min(p for p, _ in points) ** 0.1, max(p for p, _ in points) ** 0.1, 40) ** 10
                line = np.polyval(fit.coefficients, np.log10(x))
                drawn.setdefault(name, {})[title] = list(zip(x.tolist(), line.tolist(), strict=True))
        activation = [
            (r["parameters"], float(np.mean([a for a in r["activation"] if a is not None])))
            for r in records
            if _of(r, "seqboat", budget)
        ]
        if activation:
            active[f"SeqBoat, {budget:g} s"] = activation
    if not panels:
        return None
    labels = dict.fromkeys(panels, "bits per byte")
    if active:
        panels["activation"], labels["activation"] = active, "active fraction of tokens"
    return lambda theme: lines_figure(panels, x="parameters", y=labels, log="x", fits=drawn, theme=theme)


def _best_table(budgets: Sequence[float], fits: dict[tuple[str, float], Fit | None]) -> list[str]:
    head = ["model", *(f"{budget:g} s: bits at the best size" for budget in budgets)]
    rows = []
    for row, title in MODELS.items():
        cells = []
        for budget in budgets:
            fit = fits[row, budget]
            if fit is None:
                cells.append("not run in three sizes")
            else:
                edge = "" if fit.inside else " (the edge of what was run)"
                cells.append(f"{fit.loss:.3f} at {fit.parameters / 1e6:.2f}M{edge}")
        rows.append([title, *cells])
    return table(head, rows)


def _prediction(budgets: Sequence[float], fits: dict[tuple[str, float], Fit | None]) -> list[str]:
    """What a few budgets say about the paper's size, and how little that is."""
    lines, most = [], 0
    for row, title in MODELS.items():
        known = [(budget, fit) for budget in budgets if (fit := fits[row, budget]) is not None]
        if len(known) < 2:
            continue
        most = max(most, len(known))
        times, losses = np.array([budget for budget, _ in known]), np.array([fit.loss for _, fit in known])
        fall, start = np.polyfit(np.log10(times), losses, 1)
        power, scale = np.polyfit(np.log(times), np.log(losses), 1)
        text = (
            f"- {title}: {-fall:.2f} bits less for ten times the time (loss proportional to time to the power of "
            f"{power:.2f})"
        )
        if len(known) > 2:
            off = [
                np.abs(line - losses).max()
                for line in (fall * np.log10(times) + start, np.exp(power * np.log(times) + scale))
            ]
            text += f", which misses the losses by up to {off[0]:.2f} ({off[1]:.2f}) bits"
        if np.any(np.diff(losses) >= 0):
            lines.append(
                f"{text}; but the loss does not fall with every longer budget, so nothing can be said about 39M "
                f"parameters."
            )
            continue
        sizes = [(budget, fit.parameters) for budget, fit in known if fit.inside]
        if len(sizes) < 2:
            where = (
                "at every budget" if not sizes else f"but with {sizes[0][0]:g} s ({sizes[0][1] / 1e6:.2f}M)"
            )
            lines.append(
                f"{text}; the best size is at the edge of the range {where}, so nothing can be said about 39M "
                f"parameters."
            )
            continue
        seconds, best = np.log(sizes).T
        growth, first = np.polyfit(seconds, best, 1)
        longest = times.max()
        # an exponent of almost nothing would ask for more seconds than a number holds
        far = (math.log(FULL) - first) / growth - math.log(longest) if growth > 0 else math.inf
        if growth <= 0:
            text += "; the best size does not grow with the time, so nothing can be said about 39M parameters"
        elif growth > 1:  # every parameter would see less and less text
            text += (
                f"; the best size grows with the power {growth:.2f} of the time, which cannot continue, so nothing "
                f"can be said about 39M parameters"
            )
        elif far > math.log(FARTHEST):
            text += (
                f"; the best size grows with the power {growth:.2f} of the time, so 39M parameters would be best at "
                f"more than {FARTHEST:,} times the longest run: too far away for a prediction"
            )
        else:
            reach = longest * math.exp(far)
            long = f"{reach / 86400:,.0f} days" if reach > 172_800 else f"{reach / 3600:,.0f} hours"
            text += (
                f"; the best size grows with the power {growth:.2f} of the time, so 39M parameters would be best "
                f"at about {long} of this core, and the two formulas put the loss there between "
                f"{max(fall * math.log10(reach) + start, 0.0):.2f} and "
                f"{math.exp(power * math.log(reach) + scale):.2f} bits"
            )
        lines.append(f"{text}.")
    if lines:
        few = {2: "Two", 3: "Three"}.get(most, str(most))
        lines += [
            "",
            f"{few} budgets and at most five sizes determine two numbers per model. One seed has no error bar, the "
            "extrapolation spans orders of magnitude, and neither formula knows the entropy of text. Do not rely on "
            "these numbers as predictions for 39M parameters. The paper's model reaches 1.02 bits.",
            "",
        ]
    return lines


def _runs(study: Study, records: Sequence[Record]) -> list[str]:
    head = [
        "",
        "seconds",
        "parameters",
        "bits per byte",
        "learning rate",
        "steps x batch",
        "tokens/s",
        "active %",
    ]
    rows = []
    for trial in study.trials:
        for r in sorted((r for r in records if r["trial"] == trial.name), key=lambda r: r["budget"]):
            active = rates_text(r["activation"]) if any(a is not None for a in r["activation"]) else "-"
            rows.append(
                [
                    trial.title,
                    f"{r['budget']:g}",
                    f"{r['parameters']:,}",
                    f"{r['test']:.3f}",
                    f"{r['lr']:g}",
                    f"{r['steps']} x {r['batch']}",
                    f"{r['tokens_per_second']:,.0f}",
                    active,
                ]
            )
    return table(head, rows)


SCALING = Study(
    name="scaling",
    title="Scaling on enwik8",
    about="Bits per byte on part of the test text against the number of parameters, at the same processor time. "
    "A command trains every size twice, with a budget and with four times that budget; a quarter of each goes to "
    "choosing the learning rate. SeqBoat has the library's initial weights. Lines are parabolas in the logarithm of "
    "the size. The last panel and column show the rate of active tokens.",
    trials=scaling_trials(),
    budget=20.0,
    multiples=(1.0, 4.0),
    command="seqboat reproduce scaling",
    show=show,
)
