"""Studies of `seqboat reproduce`: models against each other at equal processor time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seqboat.paper.machine import Machine
    from seqboat.paper.studies.study import Study


def run_studies(options: argparse.Namespace, studies: Sequence[Study], machine: Machine) -> int:
    """Run what is left of some studies, and write their page."""
    from seqboat.commands.reproduce import split_names
    from seqboat.paper.studies.budget import Stopped
    from seqboat.paper.studies.page import write_page
    from seqboat.paper.studies.run import chosen_cells, run_cells
    from seqboat.paper.studies.store import read_records, record_key

    page = Path(options.page) if options.page else Path(options.out) / "evidence.md"
    if options.budget is not None and not options.budget > 0:
        raise ValueError(f"--budget must be positive, got {options.budget:g}")
    if machine.processes > 1:
        raise ValueError("studies compare the time of one process: --processes must be 1")
    if options.rewrite or options.collect:
        print(f"wrote {page} from {len(write_page(page))} records")
        return 0
    cells = []
    for study in studies:
        cells += chosen_cells(
            study.cells(options.budget or study.budget, options.seeds),
            options.only,
            split_names(options.rows),
            split_names(options.tasks),
        )
    if not cells:
        raise ValueError("--rows, --tasks and --only fit nothing; --dry-run without them shows what there is")
    done = {record_key(r) for r in read_records(page)}
    left = [cell for cell in cells if cell.key not in done]
    if options.dry_run:
        for cell in cells:
            state = (
                "done"
                if cell.key in done
                else "begun"
                if cell.folder(Path(options.out)).is_dir()
                else "to run"
            )
            print(f"  {cell.trial.name}: {cell.describe()}: {state}; {cell.trial.command(cell.seed)}")
    minutes = sum(cell.budget for cell in left) / 60
    print(
        f"{len(cells) - len(left)} of {len(cells)} runs done; about {minutes:.0f} minutes of one core left",
        flush=True,
    )
    if options.dry_run:
        return 0
    try:
        run_cells(left, page, Path(options.out), machine.settings, lambda line: print(line, flush=True))
    except Stopped as stopped:
        print(f"{stopped}; the same command continues", file=sys.stderr)
        return stopped.exit_code
    finally:
        write_page(page)
    print(f"wrote {page}")
    return 0
