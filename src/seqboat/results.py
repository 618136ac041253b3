"""Results as a page: every number beside the paper's, with the command that makes it, and what was not run.

Records (plain data from `reproduce.collect`) are kept in a JSON file beside the page, and the page is written anew
from all of them, so that runs of several days and machines add up.
"""

from __future__ import annotations

import inspect
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from seqboat.checkpoint import write_atomically
from seqboat.recipes import find_recipe
from seqboat.reproduce import TARGETS, Scale, Target, Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]

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
    return records


def add_records(page: Path, new: Sequence[Record]) -> list[Record]:
    """Put records behind a page, over those of the same run, and write the page anew."""
    found = {tuple(r[k] for k in _KEY): r for r in [*read_records(page), *new]}
    order = {name: i for i, name in enumerate(TARGETS)}
    records = sorted(
        found.values(), key=lambda r: (order.get(r["target"], len(order)), r["scale"], r["trial"], r["seed"])
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page.with_suffix(".json"), _compact(records))
    write_page(page, records)
    return records


def _compact(records: Sequence[Record]) -> str:
    """JSON with a line per record, so that a new run is a new line in a diff."""
    return "[\n" + ",\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n]\n"


def write_page(page: Path, records: Sequence[Record]) -> None:
    """Write the page and its figures."""
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
            if target.trials(scale):
                lines += _section(page, target, scale, mine)
    write_atomically(page, "\n".join(lines).rstrip() + "\n")


def _section(page: Path, target: Target, scale: Scale, records: Sequence[Record]) -> list[str]:
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
        commands = ", ".join(f"`{trial.command()}`" for trial in trials)
        return [*lines, f"Not run here. `{command}` runs it: {commands}.", ""]
    lines += [
        f"`{command}`",
        "",
        "| | paper, full size | ours | seeds | parameters | minutes | processor | threads | active % | command |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(trial, [r for r in records if r["trial"] == trial.name]) for trial in trials]
    lines.append("")
    figure = _draw_curves(page, target, scale, records)
    if figure is not None:
        lines += [f"![{target.title}: held-out score during training]({figure})", ""]
    cuts = [(trial.title, _cut(trial)) for trial in trials if not trial.arguments]
    lines += [f"- **{title}.** {cut}" for title, cut in cuts if cut]
    made = sorted(
        {(r["versions"]["seqboat"], r["versions"]["torch"], r["commit"] or "unknown") for r in records}
    )
    lines += [
        "",
        "Made with " + "; ".join(f"seqboat {v} at {c}, torch {t}" for v, t, c in made) + ".",
        "",
    ]
    return lines


def _row(trial: Trial, records: Sequence[Record]) -> str:
    if not records:
        cells = [trial.title, trial.paper or "-", "not run", *"------", f"`{trial.command()}`"]
        return "| " + " | ".join(cells) + " |"
    values = [r["test"] for r in records]
    threads = sorted({str(r["threads"]) for r in records})
    cells = [
        trial.title,
        trial.paper or "-",
        _score(values, records[0]["metric"]),
        ", ".join(str(r["seed"]) for r in records),
        f"{records[0]['parameters']:,}",
        *(f"{statistics.mean(r[k] for r in records):.1f}" for k in ("minutes", "processor_minutes")),
        "/".join(threads),
        "; ".join(_rates(r["activation"]) for r in records),
        f"`{trial.command()}`",
    ]
    return "| " + " | ".join(cells) + " |"


def _score(values: Sequence[float], metric: str) -> str:
    """Mean, and deviation over seeds, in the unit of the paper's tables."""
    mean = statistics.mean(values)
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    if metric == "accuracy":
        return f"{100 * mean:.1f} %" + (f" ± {100 * spread:.1f}" if len(values) > 1 else "")
    return f"{mean:.3f} {metric}" + (f" ± {spread:.3f}" if len(values) > 1 else "")


def _rates(activation: Sequence[float | None]) -> str:
    return " ".join("-" if rate is None else f"{100 * rate:.0f}" for rate in activation)


def _cut(trial: Trial) -> str:
    """What a small recipe leaves out: the paragraph of its docstring that says so."""
    text = inspect.getdoc(find_recipe(trial.recipe)) or ""
    found = [" ".join(part.split()) for part in text.split("\n\n") if part.lstrip().startswith("Cut:")]
    return found[0] if found else ""


def _draw_curves(page: Path, target: Target, scale: Scale, records: Sequence[Record]) -> str | None:
    """The curves of a section as a PNG in images/ beside the page; None without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return None
    from seqboat.figures import curves_figure, save_figure

    name = f"images/results-{target.name}-{scale}.png"
    titles = {trial.name: trial.title for trial in target.trials(scale)}
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        panels.setdefault(titles.get(str(record["trial"]), str(record["trial"])), []).append(record)
    figure: Figure = curves_figure(panels)
    (page.parent / "images").mkdir(exist_ok=True)
    save_figure(figure, page.parent / name)
    return name
