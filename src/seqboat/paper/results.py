"""Results as a page: every number beside the paper's, with the command that makes it, and what was not run.

Records (plain data from `Target.collect` and `measure`) are kept in a JSON file beside the page, and the page is
written from all of them, so that runs of several days and machines add up.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import get_args

from seqboat.data.files import read_json, taking_turns, write_text
from seqboat.paper.tables import Pictures, Record, on_accelerator, showing
from seqboat.paper.target import Target
from seqboat.paper.targets import TARGETS
from seqboat.paper.trial import Scale, Trial

_KEY = ("target", "scale", "trial", "seed")


def record_key(record: Record) -> tuple[str, ...]:
    """What a record is of: target, scale, trial and seed."""
    return tuple(str(record[key]) for key in _KEY)


def read_records(page: Path) -> list[Record]:
    """The records behind a page; none if there is no page yet."""
    path = page.with_suffix(".json")
    if not path.exists():
        return []
    records = read_json(path)
    if not isinstance(records, list) or not all(isinstance(r, dict) and {*_KEY} <= r.keys() for r in records):
        raise ValueError(f"{path} does not hold results: not a list of records")
    return records


def add_records(page: Path, new: Sequence[Record]) -> list[Record]:
    """Add records to a page, replacing those of the same run, and write the page again.

    Processes that write to one page take turns.
    """
    page.parent.mkdir(parents=True, exist_ok=True)
    with taking_turns(page.parent):
        return _write(page, [*read_records(page), *new], {(r["target"], r["scale"]) for r in new})


def write_records(page: Path, records: Sequence[Record]) -> list[Record]:
    """Write a page of these records and no others."""
    page.parent.mkdir(parents=True, exist_ok=True)
    with taking_turns(page.parent):
        return _write(page, records, {(r["target"], r["scale"]) for r in records})


def rewrite(page: Path) -> list[Record]:
    """Write the page and all its figures again from the records behind it."""
    if not page.with_suffix(".json").exists():
        raise ValueError(f"there is no {page.with_suffix('.json')} to write {page} from")
    return write_records(page, read_records(page))


def _write(page: Path, records: Sequence[Record], changed: Collection[tuple[str, Scale]]) -> list[Record]:
    found = {record_key(r): r for r in records}
    order = {name: i for i, name in enumerate(TARGETS)}
    with showing(page.with_suffix(".json")):
        ordered = sorted(
            found.values(),
            key=lambda r: (order.get(r["target"], len(order)), r["scale"], r["trial"], r["seed"]),
        )
        write_text(page.with_suffix(".json"), _compact(ordered))
        write_page(page, ordered, changed)
    return ordered


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
        "`seqboat reproduce` writes this page from the JSON file of the same name; do not edit it by hand. Minutes",
        "cover training and its evaluations: wall-clock time, and processor time, which does not depend on how busy",
        "the machine is.",
        "",
    ]
    for target in TARGETS.values():
        for scale in get_args(Scale):
            names = {trial.name for trial in target.trials(scale)}
            mine = [
                r
                for r in records
                if (r["target"], r["scale"]) == (target.name, scale) and r["trial"] in names
            ]
            if names:
                redraw = (target.name, scale) in changed
                pictures = Pictures(page.parent, redraw, f"results-{target.name}-{scale}", target.title)
                lines += _section(target, scale, mine, pictures)
    write_text(page, "\n".join(lines).rstrip() + "\n")


def _section(target: Target, scale: Scale, records: Sequence[Record], pictures: Pictures) -> list[str]:
    trials = target.trials(scale)
    command = f"seqboat reproduce {target.name} --scale {scale}"
    size = "small variants on two cores" if scale == "small" else "as published"
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
    lines += target.show(scale, records, pictures)
    made = sorted(
        {(r["versions"]["seqboat"], r["versions"]["torch"], r["commit"] or "unknown") for r in records}
    )
    devices = sorted({r["device"] for r in records if on_accelerator(r)})
    where = f" on {', '.join(devices)}" if devices else ""
    lines += [
        "",
        "Made with " + "; ".join(f"seqboat {v} at {c}, torch {t}" for v, t, c in made) + f"{where}.",
        "",
    ]
    return lines


FEW = 8
"""Commands that a sentence can list."""


def _commands(trials: Sequence[Trial], command: str) -> str:
    if len(trials) > FEW:
        return f"{len(trials)} trials, which `{command} --dry-run` lists"
    return ", ".join(f"`{trial.command()}`" for trial in trials)
