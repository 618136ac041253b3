"""Results as a page: every number beside the paper's, with the command that makes it, and what was not run.

Records (plain data from `reproduce.collect`) are kept in a JSON file beside the page, and the page is written anew
from all of them, so that runs of several days and machines add up.
"""

from __future__ import annotations

import html
import importlib.util
import inspect
import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from seqboat.data.files import taking_turns, write_text
from seqboat.paper.efficiency import MODELS, PUBLISHED_LENGTH, PUBLISHED_MIXERS, TASKS
from seqboat.paper.targets import TARGETS, Bench, Scale, Target, Trial
from seqboat.recipes import find_recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from seqboat.figures import Theme

Record = dict[str, Any]
Make = Callable[["Theme"], "Figure"]
"""Draws a figure in a theme."""

_KEY = ("target", "scale", "trial", "seed")


def read_records(page: Path) -> list[Record]:
    """The records behind a page; none if there is no page yet."""
    path = page.with_suffix(".json")
    if not path.exists():
        return []
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(records, list) or not all(
            isinstance(r, dict) and {*_KEY} <= r.keys() for r in records
        ):
            raise ValueError("not a list of records")
    except ValueError as error:
        raise ValueError(f"{path} does not hold results: {error}") from error
    return [_modernize(record) for record in records]


_RENAMED = {"contender": "candidate", "floor_ratio": "lower_bound_ratio"}
"""Fields of measured rows that had other names in earlier versions."""


def _modernize(record: Record) -> Record:
    """A record with the field names of today."""
    for part in record.get("parts", {}).values():
        part["rows"] = [{_RENAMED.get(key, key): row[key] for key in row} for row in part["rows"]]
    return record


def add_records(page: Path, new: Sequence[Record]) -> list[Record]:
    """Put records behind a page, over those of the same run, and write the page anew.

    Processes that write to one page take turns.
    """
    page.parent.mkdir(parents=True, exist_ok=True)
    with taking_turns(page.parent):
        return _add_records(page, new)


def _add_records(page: Path, new: Sequence[Record]) -> list[Record]:
    found = {tuple(r[k] for k in _KEY): r for r in [*read_records(page), *new]}
    order = {name: i for i, name in enumerate(TARGETS)}
    records = sorted(
        found.values(), key=lambda r: (order.get(r["target"], len(order)), r["scale"], r["trial"], r["seed"])
    )
    write_text(page.with_suffix(".json"), _compact(records))
    write_page(page, records, {(r["target"], r["scale"]) for r in new})
    return records


def _compact(records: Sequence[Record]) -> str:
    """JSON with a line per record, so that a new run is a new line in a diff."""
    return "[\n" + ",\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n]\n"


def write_page(page: Path, records: Sequence[Record], changed: Collection[tuple[str, Scale]]) -> None:
    """Write the page and its figures.

    Args:
        page: to write.
        records: all of them.
        changed: targets and scales with new records; figures of others are drawn only if they are missing.
    """
    lines = [
        "# Results",
        "",
        "Written by `seqboat reproduce` from the JSON file of the same name; nothing is edited by hand. Minutes are",
        "those of training with its evaluations, by the clock and of the processor, which a busy machine does not",
        "stretch.",
        "",
    ]
    for target in TARGETS.values():
        for scale in get_args(Scale):
            mine = [r for r in records if r["target"] == target.name and r["scale"] == scale]
            if target.names(scale):
                pictures = Pictures(page.parent, (target.name, scale) in changed)
                lines += _section(pictures, target, scale, mine)
    write_text(page, "\n".join(lines).rstrip() + "\n")


class Pictures(NamedTuple):
    """Where figures go."""

    folder: Path
    """of the page"""
    redraw: bool
    """whether those that exist are drawn anew"""

    def show(self, name: str, title: str, make: Make | None) -> list[str]:
        """Draw a figure in all its forms, if need be; returns the lines that show it.

        Args:
            name: of the files.
            title: for readers who do not see it.
            make: draws it in a theme; None if there is nothing to draw.
        """
        if make is None or importlib.util.find_spec("matplotlib") is None:
            return []
        from seqboat.figures import write_figure

        path = self.folder / "images" / name
        if self.redraw or not path.with_suffix(".svg").exists():
            write_figure(make, path)
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="images/{name}-dark.svg">'
        return [f'<picture>{dark}<img alt="{html.escape(title)}" src="images/{name}.svg"></picture>', ""]


def _section(pictures: Pictures, target: Target, scale: Scale, records: Sequence[Record]) -> list[str]:
    trials = target.trials(scale)
    command = f"seqboat reproduce {target.name} --scale {scale}"
    size = "small twins on two cores" if scale == "small" else "as published"
    lines = [
        f"## {target.title}: {size}",
        "",
        f"{target.where[0].upper() + target.where[1:]}. {target.about}",
        "",
    ]
    if not records:
        what = f" runs it: {_commands(trials, command)}." if trials else " measures it."
        return [*lines, f"Not run here. `{command}`{what}", ""]
    lines += [f"`{command}`", ""]
    if scale == "small" and target.cut:
        lines += [f"Cut: {target.cut}", ""]
    found = {trial.name: [r for r in records if r["trial"] == trial.name] for trial in trials}
    name = f"results-{target.name}-{scale}"
    if target.layout == "mixers":
        lines += _mixer_table(trials, found)
    elif target.layout == "ablation":
        lines += _ablation_tables(trials, found)
    elif target.layout == "tradeoff":
        lines += _tradeoff_tables(trials, found)
        lines += pictures.show(name, target.title, _draw_tradeoff(trials, found))
    elif target.layout == "activation":
        lines += _activation_table(trials, found)
        lines += pictures.show(name, target.title, _draw_activation(trials, found))
    elif target.layout == "confidence":
        for trial in trials:
            if found[trial.name]:
                lines += [f"### {trial.title}", ""]
                make = _draw_confidence(found[trial.name][0])
                lines += pictures.show(f"{name}-{trial.name}", f"{target.title}, {trial.title}", make)
    elif target.layout == "span":
        lines += _span_tables(trials, found)
        lines += pictures.show(name, target.title, _draw_span(trials, found))
    elif target.layout == "efficiency":
        lines += _efficiency_tables(records[0]["parts"])
        lines += pictures.show(name, target.title, _draw_efficiency(records[0]["parts"]))
    elif target.layout == "mixers-efficiency":
        lines += _mixers_by_length(target.benches(scale), records)
        for bench in target.benches(scale):
            lines += _mixer_efficiency(bench, [r for r in records if r["trial"] == bench.name])
        lines += pictures.show(name, target.title, _draw_mixers(records))
    else:
        lines += _run_table(trials, found)
        title = f"{target.title}: held-out score during training"
        lines += pictures.show(name, title, _draw_curves(trials, records))
        for trial in trials:
            notes = [_cut(trial) if not trial.arguments else "", _data(found[trial.name])]
            if any(notes):
                lines.append(f"- **{trial.title}.** {' '.join(filter(None, notes))}")
    made = sorted(
        {(r["versions"]["seqboat"], r["versions"]["torch"], r["commit"] or "unknown") for r in records}
    )
    lines += [
        "",
        "Made with " + "; ".join(f"seqboat {v} at {c}, torch {t}" for v, t, c in made) + ".",
        "",
    ]
    return lines


FEW = 8
"""Commands that a sentence can list."""


def _commands(trials: Sequence[Trial], command: str) -> str:
    if len(trials) > FEW:
        return f"{len(trials)} trials, which `{command} --dry-run` lists"
    return ", ".join(f"`{trial.command()}`" for trial in trials)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table and an empty line."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:], ""]


def _run_table(trials: Sequence[Trial], records: Mapping[str, Sequence[Record]]) -> list[str]:
    head = ["", "paper, full size", "ours", "gap", "seeds", "parameters", "minutes", "processor", "threads"]
    return _table([*head, "active %", "command"], [_run_row(trial, records[trial.name]) for trial in trials])


def _run_row(trial: Trial, records: Sequence[Record]) -> list[str]:
    if not records:
        return [trial.title, trial.paper or "-", "not run", *"-------", f"`{trial.command()}`"]
    values = [r["test"] for r in records]
    threads = sorted({str(r["threads"]) for r in records})
    return [
        trial.title,
        trial.paper or "-",
        _score(values, records[0]["metric"]),
        _gap(trial, records),
        ", ".join(str(r["seed"]) for r in records),
        f"{records[0]['parameters']:,}",
        *(f"{statistics.mean(r[k] for r in records):.1f}" for k in ("minutes", "processor_minutes")),
        "/".join(threads),
        "; ".join(_rates(r["activation"]) for r in records),
        f"`{trial.command()}`",
    ]


def _gap(trial: Trial, records: Sequence[Record]) -> str:
    """Our mean minus the paper's number, in its unit."""
    if trial.paper is None:
        return "-"
    scale = 100 if records[0]["metric"] == "accuracy" else 1
    gap = scale * statistics.mean(r["test"] for r in records) - float(trial.paper.split()[0])
    return f"{gap:+.1f}" if scale == 100 else f"{gap:+.2f}"


def _mixer_table(trials: Sequence[Trial], records: Mapping[str, Sequence[Record]]) -> list[str]:
    """What each mixer learnt."""
    rows = []
    for trial in trials:
        if not records[trial.name]:
            rows.append([trial.title, trial.task, "not run", *"------"])
            continue
        record = records[trial.name][0]
        _, first = record["first_loss"]
        rows.append(
            [
                trial.title,
                trial.task,
                f"{record['parameters']:,}",
                f"{first:.2f}",
                f"{record['last_loss']:.2f}",
                f"{1 - record['last_loss'] / first:.0%}",
                _score([record["test"]], record["metric"]),
                f"{record['processor_minutes']:.1f}",
                _rates(record["activation"]) if any(r is not None for r in record["activation"]) else "-",
            ]
        )
    head = ["mixer", "task", "parameters", "first loss", "last loss", "fall", "test", "processor minutes"]
    return _table([*head, "active %"], rows)


def _ablation_tables(trials: Sequence[Trial], records: Mapping[str, Sequence[Record]]) -> list[str]:
    """A table for each of the paper's: rows are forms of the layer, columns are tasks."""
    lines = []
    for table in dict.fromkeys(trial.table for trial in trials if trial.table):
        own = [trial for trial in trials if trial.table == table]
        tasks = list(dict.fromkeys(trial.task for trial in own))
        found = {(t.title, t.task): t for t in trials if t.table in (table, "")}
        head = [table]
        for task in tasks:
            head += [f"{task}, ours", "paper", "speed, ours", "paper"]
        rows = []
        for title in dict.fromkeys(title for title, _ in found):
            cells = [title]
            for task in tasks:
                trial = found[title, task]
                cells += _ablation_cells(trial, records[trial.name], records[trial.baseline or trial.name])
            rows.append(cells)
        lines += _table(head, rows)
    return lines


def _ablation_cells(trial: Trial, own: Sequence[Record], base: Sequence[Record]) -> list[str]:
    published = f"{trial.paper_speed:.2f}x" if trial.paper_speed is not None else "-"
    if not own:
        return ["not run", trial.paper or "-", "-", published]
    score = _score([r["test"] for r in own], own[0]["metric"])
    seconds, reference = _seconds(own), _seconds(base)
    speed = f"{reference / seconds:.2f}x" if seconds and reference else "-"
    return [score, trial.paper or "-", speed, published]


def _seconds(records: Sequence[Record]) -> float | None:
    """Processor seconds of a training step, on average."""
    known = [r["step_seconds"] for r in records if r.get("step_seconds")]
    return statistics.mean(known) if known else None


def _tradeoff_tables(trials: Sequence[Trial], records: Mapping[str, Sequence[Record]]) -> list[str]:
    """A table for each task: a row for every size."""
    lines = []
    for task in dict.fromkeys(trial.task for trial in trials):
        own = [trial for trial in trials if trial.task == task]
        models = list(dict.fromkeys(trial.title for trial in own))
        rows = []
        for size in sorted({trial.size or 0 for trial in own}):
            cells = [str(size)]
            for model in models:
                trial = next(t for t in own if t.title == model and t.size == size)
                found = records[trial.name]
                seconds = _seconds(found)
                cells += [
                    _score([r["test"] for r in found], found[0]["metric"]) if found else "not run",
                    f"{1000 * seconds:.0f}" if seconds else "-",
                    _rates(found[0]["activation"]) if found else "-",
                ]
            rows.append(cells)
        head = [f"{task}, memory or chunk"]
        for model in models:
            head += [model, "ms per update", "active %"]
        lines += _table(head, rows)
    return lines


def _score(values: Sequence[float], metric: str) -> str:
    """Mean, and deviation over seeds, in the unit of the paper's tables."""
    mean = statistics.mean(values)
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    if metric == "accuracy":
        return f"{100 * mean:.1f} %" + (f" ± {100 * spread:.1f}" if len(values) > 1 else "")
    return f"{mean:.3f} {metric}" + (f" ± {spread:.3f}" if len(values) > 1 else "")


def _rates(activation: Sequence[float | None]) -> str:
    """Per layer, in percent."""
    return " ".join("-" if rate is None else f"{100 * rate:.0f}" for rate in activation)


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


def _efficiency_tables(parts: Mapping[str, Any]) -> list[str]:
    """The three blocks of table 6, ours and the paper's ratios to MEGA side by side."""
    head = [f"{TASKS[task].title} ({TASKS[task].length:,})" for task in parts]
    lines = _table(
        ["sizes", *head],
        [
            ["batch", *(str(part["setting"]["batch"]) for part in parts.values())],
            ["active", *(_rate(part["rate"]) for part in parts.values())],
        ],
    )
    for title, mode, kind in BLOCKS:
        rows = []
        for number, (model, label) in enumerate(MODELS.items()):
            cells = [label]
            for task, part in parts.items():
                ours = _efficiency_ratio(part["rows"], model, mode, kind)
                paper = getattr(TASKS[task].published, kind)[number]
                cells.append(f"{'left out' if ours is None else f'{ours:.2f}x'} ({paper:.2f}x)")
            rows.append(cells)
        lines += _table([f"{title}, ours (paper)", *head], rows)
    seconds = [
        [
            MODELS[model],
            *(_efficiency_seconds(part["rows"], model) for part in parts.values()),
        ]
        for model in MODELS
    ]
    lines += _table(["ms per step, training / inference", *head], seconds)
    notes = [row["note"] for part in parts.values() for row in part["rows"] if row["note"]]
    return lines + [f"- Left out: {note}." for note in dict.fromkeys(notes)]


BLOCKS = (
    ("training speed", "training", "training"),
    ("training memory", "training", "memory"),
    ("evaluation speed", "inference", "evaluation"),
)
"""Of table 6: title, mode of the benchmark, field of the published numbers."""


def _rate(rate: Mapping[str, Any]) -> str:
    assumed = "" if rate["run"] else ", assumed"
    return f"{rate['value']:.0%}{assumed}"


def _find_row(rows: Sequence[Record], candidate: str, mode: str) -> Record:
    return next(row for row in rows if row["candidate"] == candidate and row["mode"] == mode)


def _efficiency_ratio(rows: Sequence[Record], model: str, mode: str, kind: str) -> float | None:
    """Speed or memory as a multiple of the first candidate's; None where it was not measured."""
    row = _find_row(rows, model, mode)
    if kind == "memory":
        return row["memory_ratio"]
    return 1 / row["ratio"] if row["ratio"] else None


def _efficiency_seconds(rows: Sequence[Record], model: str) -> str:
    found = [_find_row(rows, model, mode)["seconds"] for mode in ("training", "inference")]
    return " / ".join("-" if seconds is None else f"{1000 * seconds['median']:.0f}" for seconds in found)


def _mixers_by_length(benches: Sequence[Bench], records: Sequence[Record]) -> list[str]:
    """Ratios of every mixer at all lengths, first at equal width, then at equal parameters."""
    rows = {r["trial"]: r["parts"]["mixers"]["rows"] for r in records}
    lines = []
    for matched in (False, True):
        own = [bench for bench in benches if bench.matched == matched and bench.name in rows]
        if not own:
            continue
        labels = list(dict.fromkeys(row["candidate"] for bench in own for row in rows[bench.name]))
        columns: dict[str, list[float | None]] = {}
        for title, mode, kind in BLOCKS:
            for bench in own:
                found = [_efficiency_ratio(rows[bench.name], label, mode, kind) for label in labels]
                columns[f"{title}, {bench.length:,}"] = found
                if bench.length == PUBLISHED_LENGTH and mode == "training":
                    number = 0 if kind == "training" else 1
                    columns[f"{title}, paper"] = [
                        PUBLISHED_MIXERS[label][number] if label in PUBLISHED_MIXERS else None
                        for label in labels
                    ]
        cells = (
            ["-" if value is None else f"{value:.2f}x" for value in column] for column in columns.values()
        )
        lines += [f"### All lengths, equal {'parameters' if matched else 'width'}", ""]
        lines += _table(["mixer", *columns], list(zip(labels, *cells, strict=True)))
    return lines


def _mixer_efficiency(bench: Bench, records: Sequence[Record]) -> list[str]:
    """Every mixer at one length."""
    lines = [f"### {bench.title[0].upper()}{bench.title[1:]}", ""]
    if not records:
        return [*lines, "Not measured here.", ""]
    part = records[0]["parts"]["mixers"]
    rows, changes = part["rows"], part["changes"]
    setting = part["setting"]
    lines += [f"{setting['batch']} x {setting['length']:,} tokens; active: {_rate(part['rate'])}.", ""]
    table = []
    for label in dict.fromkeys(row["candidate"] for row in rows):
        training, inference = (_find_row(rows, label, mode) for mode in ("training", "inference"))
        published = PUBLISHED_MIXERS.get(label) if bench.length == PUBLISHED_LENGTH else None
        table.append(
            [
                label + (f" ({_change(changes[label])})" if _change(changes[label]) else ""),
                f"{training['parameters']:,}" if training["parameters"] else "-",
                *_time_cells(training),
                f"{published[0]:.1f}x" if published else "-",
                *_memory_cells(training),
                f"{published[1]:.2f}x" if published else "-",
                *_time_cells(inference),
                *_memory_cells(inference),
            ]
        )
    head = ["mixer", "parameters", "training ms", "speed", "paper", "MiB", "memory", "paper", "inference ms"]
    lines += _table([*head, "speed", "MiB", "memory"], table)
    notes = dict.fromkeys(row["note"] for row in rows if row["note"])
    return [*lines, *(f"- Left out: {note}." for note in notes), *([""] if notes else [])]


def _change(overrides: Mapping[str, Any]) -> str:
    """What matching parameters changed."""
    shown = {name: value for name, value in overrides.items() if name != "implementation"}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _time_cells(row: Record) -> list[str]:
    if row["seconds"] is None:
        return ["left out", "-"]
    return [f"{1000 * row['seconds']['median']:.0f}", f"{1 / row['ratio']:.2f}x" if row["ratio"] else "-"]


def _memory_cells(row: Record) -> list[str]:
    if row["memory"] is None:
        return ["-", "-"]
    return [f"{row['memory'] / 2**20:.0f}", f"{row['memory_ratio']:.2f}x" if row["memory_ratio"] else "-"]


def _draw_tradeoff(trials: Sequence[Trial], records: Mapping[str, Sequence[Record]]) -> Make | None:
    from seqboat.figures import Point, tradeoff_figure

    panels: dict[str, dict[str, list[Point]]] = {}
    for trial in trials:
        found = records[trial.name]
        seconds = _seconds(found)
        if seconds:
            scores = [100 * r["test"] for r in found]
            spread = statistics.stdev(scores) if len(scores) > 1 else None
            point = Point(trial.size or 0, 1000 * seconds, statistics.mean(scores), spread)
            panels.setdefault(trial.task, {}).setdefault(trial.title, []).append(point)
    if not panels:
        return None
    return lambda theme: tradeoff_figure(
        panels, speed="processor ms per update", score="test accuracy, %", faster="low", theme=theme
    )


def _draw_efficiency(parts: Mapping[str, Any]) -> Make:
    from seqboat.figures import ratios_figure

    panels: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    for title, mode, kind in BLOCKS:
        rows = panels.setdefault(title, {})
        for task, part in parts.items():
            for number, (model, label) in enumerate(MODELS.items()):
                if number:
                    ours = _efficiency_ratio(part["rows"], model, mode, kind)
                    rows[f"{TASKS[task].title}, {label}"] = ours, getattr(TASKS[task].published, kind)[number]
    return lambda theme: ratios_figure(panels, reference="MEGA", theme=theme)


def _draw_mixers(records: Sequence[Record]) -> Make | None:
    """At the paper's length and equal width."""
    from seqboat.figures import ratios_figure

    found = [r for r in records if r["trial"] == f"width-{PUBLISHED_LENGTH}"]
    if not found:
        return None
    rows = found[0]["parts"]["mixers"]["rows"]
    panels: dict[str, dict[str, tuple[float | None, float | None]]] = {
        "training speed": {},
        "training memory": {},
    }
    for label in dict.fromkeys(row["candidate"] for row in rows):
        published = PUBLISHED_MIXERS.get(label, (None, None))
        for i, (panel, kind) in enumerate((("training speed", "training"), ("training memory", "memory"))):
            panels[panel][label] = _efficiency_ratio(rows, label, "training", kind), published[i]
    return lambda theme: ratios_figure(panels, reference="plain Transformer", theme=theme)


def _draw_curves(trials: Sequence[Trial], records: Sequence[Record]) -> Make:
    """Held-out scores during training."""
    from seqboat.figures import curves_figure

    titles = {trial.name: trial.title for trial in trials}
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        panels.setdefault(titles.get(str(record["trial"]), str(record["trial"])), []).append(record)
    return lambda theme: curves_figure(panels, theme=theme)


IDLE = 0.001
"""Share of active tokens below which a layer counts as working without attention."""


def _activation_table(trials: Sequence[Trial], records: Mapping[str, Sequence[Record]]) -> list[str]:
    """Rates of all layers, and whether the upper ones attend more than the lower ones."""
    layers = max(len(r["rates"]) for found in records.values() for r in found)
    rows, idle, upward = [], [], []
    for trial in trials:
        if not records[trial.name]:
            rows.append([trial.title, *("-" for _ in range(layers)), "not run", "-"])
            continue
        rates = [rate for rate in records[trial.name][0]["rates"] if rate is not None]
        half = len(rates) // 2
        lower, upper = (
            statistics.mean(r[0] for r in part) for part in (rates[:half], rates[len(rates) - half :])
        )
        shown = [f"{100 * mean:.1f} ± {100 * spread:.1f}" for mean, spread in rates]
        rows.append(
            [trial.title, *shown, *["-"] * (layers - len(shown)), f"{100 * lower:.1f}", f"{100 * upper:.1f}"]
        )
        idle += [f"{trial.title} layer {i}" for i, (mean, _) in enumerate(rates, start=1) if mean < IDLE]
        if upper > lower:
            upward.append(trial.title)
    head = ["active %", *(f"layer {i}" for i in range(1, layers + 1)), "lower half", "upper half"]
    ran = sum(bool(found) for found in records.values())
    return [
        *_table(head, rows),
        f"- The upper half of the layers attends more than the lower one in {len(upward)} of {ran} tasks"
        + (f": {', '.join(upward)}." if upward else "."),
        "- Layers in which fewer than one token in a thousand attends, so that the state-space layer works alone: "
        + (f"{', '.join(idle)}." if idle else "none."),
        "",
    ]


def _draw_activation(trials: Sequence[Trial], records: Mapping[str, Sequence[Record]]) -> Make:
    from seqboat.figures import activation_figure

    tasks = {}
    for trial in trials:
        if records[trial.name]:
            rates = [rate or (None, None) for rate in records[trial.name][0]["rates"]]
            tasks[trial.title] = [mean for mean, _ in rates], [spread for _, spread in rates]
    return lambda theme: activation_figure(tasks, theme=theme)


LAST = 4
"""Layers whose confidences are drawn, at most."""


def _draw_confidence(record: Record) -> Make:
    from seqboat.figures import confidence_maps_figure

    pictures = record["pictures"]
    layers = len(pictures[0]["layers"])
    maps = {
        f"layer {number + 1}": [picture["layers"][number] for picture in pictures]
        for number in range(max(0, layers - LAST), layers)
        if pictures[0]["layers"][number] is not None
    }
    return lambda theme: confidence_maps_figure([p["input"] for p in pictures], maps, theme=theme)


def _span_tables(trials: Sequence[Trial], records: Mapping[str, Sequence[Record]]) -> list[str]:
    """A table for each task: a row for every size of memory."""
    lines = []
    for task in dict.fromkeys(trial.task for trial in trials):
        own = [trial for trial in trials if trial.task == task]
        layers = max((len(r["spans"]) for trial in own for r in records[trial.name]), default=0)
        rows = []
        for trial in own:
            cells = [str(trial.size), f"{_local_span(trial):.3g}"]
            found = records[trial.name]
            spans = found[0]["spans"] if found else ["not run"] * layers
            rows.append([*cells, *(_span(value) for value in spans)])
        head = [f"{task}, memory", "sliding window", *(f"layer {i}" for i in range(1, layers + 1))]
        lines += _table(head, rows)
    return lines


def _local_span(trial: Trial) -> float:
    """The span of a window of the trial's size that slides over all tokens."""
    from seqboat.analysis.attention import local_span

    mixer: Any = trial.config(0).model.mixer
    return local_span(trial.size or 0, mixer.causal)


def _span(value: Any) -> str:
    """Mean and deviation; a dash where nothing attends."""
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value[0]:.1f} ± {value[1]:.1f}"


def _draw_span(trials: Sequence[Trial], records: Mapping[str, Sequence[Record]]) -> Make:
    from seqboat.figures import span_figure

    panels: dict[str, dict[int, list[float | None]]] = {}
    for trial in trials:
        if records[trial.name]:
            assert trial.size is not None
            spans = [value and value[0] for value in records[trial.name][0]["spans"]]
            panels.setdefault(trial.task, {})[trial.size] = spans
    local = {trial.size: _local_span(trial) for trial in trials if trial.size is not None}
    return lambda theme: span_figure(panels, local=local, theme=theme)
