"""Results: a line of results.jsonl for every finished run, and the page that shows them beside the paper's numbers.

    add_row(path, row)                          written at once: runs of several days and processes add up
    rows = read_rows([one, two])                those of several machines
    write_page(Path("results.md"), rows, targets)

A row on a page comes from a commit that is in the history; a changed working copy is no source.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from seqboat.data.files import taking_turns, write_text
from seqboat.paper.target import Pictures, Row, Target, on_accelerator
from seqboat.paper.trial import Scale, Trial

KEY = ("scale", "trial", "seed")


def key(row: Row) -> tuple[str, ...]:
    """Which run a row is of: scale, trial and seed."""
    return tuple(str(row[name]) for name in KEY)


def read_rows(files: Sequence[Path]) -> list[Row]:
    """The rows of several files, each run once.

    What two files observed of one run is joined; two rows that differ in anything else are an error.
    """
    found: dict[tuple[str, ...], tuple[Row, str]] = {}
    for path in files:
        if not path.is_file():
            raise ValueError(f"there is no {path}: `seqboat paper run TARGET` writes results.jsonl")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            row, place = _parse(line, f"{path}, line {number}"), f"{path}, line {number}"
            if key(row) in found:
                other, where = found[key(row)]
                if other | {"observed": None} != row | {"observed": None}:
                    raise ValueError(f"{where} and {place} are of one run, {' '.join(key(row))}, and differ")
                row = row | {"observed": other["observed"] | row["observed"]}
            found[key(row)] = row, place
    return [row for row, _ in found.values()]


def _parse(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    if not isinstance(row, dict) or not {*KEY, "observed"} <= row.keys():
        raise ValueError(f"{place} is not a row of results: it needs {', '.join(KEY)} and observed")
    return row


def find_row(path: Path, scale: str, trial: str, seed: int) -> Row | None:
    """The row of a run, if there is one."""
    rows = read_rows([path]) if path.exists() else []
    return next((row for row in rows if key(row) == (scale, trial, str(seed))), None)


def add_row(path: Path, row: Row) -> None:
    """Write a row, which replaces that of the same run. Processes that write to one file take turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with taking_turns(path.parent):
        rows = {key(other): other for other in (read_rows([path]) if path.exists() else [])}
        rows[key(row)] = row
        write_text(path, "".join(json.dumps(other, ensure_ascii=False) + "\n" for other in rows.values()))


def check_commits(rows: Sequence[Row]) -> None:
    """Refuse rows that nobody could make again: of a changed working copy, or of a commit outside the history."""
    for commit in dict.fromkeys(row.get("commit") for row in rows):
        places = [" ".join(key(row)) for row in rows if row.get("commit") == commit]
        if commit is None or commit.endswith("-dirty"):
            state = "no commit" if commit is None else f"a changed working copy ({commit})"
            raise ValueError(f"{places[0]} was run from {state}: commit, move the run away and run it again")
        asked = subprocess.run(
            ["git", "merge-base", "--is-ancestor", commit, "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            timeout=10,
        )
        if asked.returncode:
            raise ValueError(f"{places[0]} was run from {commit}, which is not a commit of this history")


@contextmanager
def showing(target: Target, scale: str) -> Iterator[None]:
    """Name the part of a page whose rows cannot be shown: one that was edited may lack any field."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        what = f"{target.name} at scale {scale}"
        raise ValueError(f"a row of {what} cannot be shown: {type(error).__name__}: {error}") from error


def write_page(page: Path, rows: Sequence[Row], targets: Sequence[Target]) -> None:
    """Write the page and its figures."""
    lines = [
        "# Results",
        "",
        "`seqboat paper page` writes this page from results.jsonl; do not edit it by hand. Minutes are those of",
        "training and its evaluations: wall-clock time, and processor time, which depends less on what else runs.",
        "",
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    for target in targets:
        for scale in get_args(Scale):
            if target.trials(scale):
                pictures = Pictures(page.parent, f"results-{target.name}-{scale}", target.title)
                with showing(target, scale):
                    lines += _section(target, scale, rows, pictures)
    write_text(page, "\n".join(lines).rstrip() + "\n")


def _section(target: Target, scale: Scale, rows: Sequence[Row], pictures: Pictures) -> list[str]:
    trials = target.trials(scale)
    mine = [row for row in rows if row["scale"] == scale]
    if target.observe is not None:
        mine = [row for row in mine if target.name in row["observed"]]
    found = {trial.name: [row for row in mine if row["trial"] == trial.name] for trial in trials}
    shown = [row for some in found.values() for row in some]
    command = f"seqboat paper run {target.name} --scale {scale}"
    size = "small variants on two cores" if scale == "small" else "as published"
    lines = [
        f"## {target.title}: {size}",
        "",
        f"{target.where[0].upper() + target.where[1:]}. {target.about}",
        "",
    ]
    if not shown:
        return [*lines, f"Not run here. `{command}` runs it: {_commands(trials, command)}.", ""]
    lines += [f"`{command}`", ""]
    if scale == "small" and target.cut:
        lines += [f"Cut: {target.cut}", ""]
    lines += target.show(trials, found, pictures)
    made = sorted({(row["versions"]["seqboat"], row["versions"]["torch"], row["commit"]) for row in shown})
    devices = sorted({row["device"] for row in shown if on_accelerator(row)})
    where = f" on {', '.join(devices)}" if devices else ""
    by = "; ".join(f"seqboat {version} at {commit}, torch {torch}" for version, torch, commit in made)
    return [*lines, "", f"Made with {by}{where}.", ""]


FEW = 8
"""Commands that a sentence can list."""


def _commands(trials: Sequence[Trial], command: str) -> str:
    if len(trials) > FEW:
        return f"{len(trials)} trials, which `{command} --dry-run` lists"
    return ", ".join(f"`{trial.command()}`" for trial in trials)
