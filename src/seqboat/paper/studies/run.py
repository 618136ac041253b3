"""Running studies: one process after another takes the next run that nobody works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from seqboat.data.files import InUse, Lock
from seqboat.paper.studies.budget import spend
from seqboat.paper.studies.store import append_records, read_records, record_key
from seqboat.paper.studies.study import Cell
from seqboat.paper.tables import Record


def chosen_cells(
    cells: Sequence[Cell],
    only: Sequence[str] = (),
    rows: Sequence[str] = (),
    tasks: Sequence[str] = (),
) -> list[Cell]:
    """Runs whose trial, row and task are given or match a pattern; all by default."""

    def fits(name: str, patterns: Sequence[str]) -> bool:
        return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)

    return [
        cell
        for cell in cells
        if fits(cell.trial.name, only) and fits(cell.trial.row, rows) and fits(cell.trial.task, tasks)
    ]


def run_cells(
    cells: Sequence[Cell],
    page: Path,
    out: Path,
    settings: Sequence[str] = (),
    tell: Callable[[str], None] = print,
) -> int:
    """Run what has no record yet, and append a record after each; returns how many were run.

    Args:
        cells: in the order to run them.
        page: whose records say what is done.
        out: folder of the runs.
        settings: of training and data on this machine, by their dotted names.
        tell: called with a line for every run.
    """
    count = 0
    for cell in cells:
        # read each time: another process may have finished it
        records = read_records(page)
        if cell.key in {record_key(r) for r in records}:
            continue
        folder = cell.folder(out)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with Lock(folder):
                record = run_cell(cell, folder, settings, first_seed(cell, records))
                append_records(page, [record])
        except InUse:
            tell(f"{cell.describe()}: left to another process")
            continue
        count += 1
        tell(f"{cell.describe()}: {summarize(record)}")
    return count


def run_cell(cell: Cell, folder: Path, settings: Sequence[str] = (), known: Record | None = None) -> Record:
    """Run one cell, with batch and learning rate of another seed if its record is known; returns its record."""
    found = spend(
        cell.trial, cell.seed, cell.budget, folder, rates=cell.study.rates, settings=settings, known=known
    )
    return {**cell.study.describe(cell.trial), **found}


def first_seed(cell: Cell, records: Sequence[Record]) -> Record | None:
    """The record of the first seed of a cell's trial at the same budget, if any."""
    seeds = [r for r in records if (r["study"], r["trial"], r["budget"]) == cell.key[:3]]
    return min(seeds, key=lambda r: int(r["seed"]), default=None)


def summarize(record: Record) -> str:
    """A record in a few words."""
    if "test" not in record:
        return "diverged"
    return (
        f"{record['metric']} {record['test']:.4f}, learning rate {record['lr']:g}, {record['steps']:,} steps of "
        f"{record['batch']} in {record['training_seconds']:.1f} s"
    )
