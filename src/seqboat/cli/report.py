"""`seqboat report`: what a run did, as one HTML page or as numbers."""

from __future__ import annotations

import json as jsons
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from seqboat.cli.options import Shared
from seqboat.cli.parser import Count, Size


def run(
    run: str,
    *,
    out: Path | None = None,
    split: Literal["train", "val", "test"] = "test",
    samples: Size = 20,
    limit: Count | None = None,
    json: bool = False,
    shared: Shared,
    fields: Sequence[str] = (),
) -> int:
    """Write one HTML page about a run: scores, errors, and a sample of inputs token by token.

    Args:
        run: folder of a run, a checkpoint (step-N) in it, or a bundled model: enwik8-small.
        out: page to write (default: report.html in the run's folder).
        split: what to analyze.
        samples: examples in the explorer.
        limit: analyze at most N examples.
        json: print the numbers as one JSON object; writes a page only with --out.

    examples:
      seqboat report runs/reviews --data.test new.csv       settings of the data
    """
    from seqboat.cli.eval import show_progress
    from seqboat.data.files import write_text
    from seqboat.report.page import finite
    from seqboat.report.run import collect, report_page
    from seqboat.run import find_run

    folder = find_run(run)
    wants_page = not json or out is not None
    page = default_page(folder) if out is None else out
    if wants_page:
        check_page_path(page, folder)
    progress = show_progress if sys.stderr.isatty() else None
    found = collect(
        folder,
        split,
        samples if wants_page else 0,
        limit,
        which=shared.which,
        fields=shared.fields(fields),
        device=shared.chosen(),
        progress=progress,
    )
    text = report_page(found) if wants_page else ""
    if wants_page:
        write_text(page, text)
    if json:
        print(jsons.dumps(finite(found.numbers)))
    else:
        print(f"wrote {page} ({len(text.encode()) / 1e6:.1f} MB)")
    return 0


def default_page(folder: Path) -> Path:
    """Beside the run; here if the run came with the package."""
    from seqboat.run import Run

    run = Run(folder)
    return Path(f"{run.folder.name}.html") if run.shipped else run.folder / "report.html"


def check_page_path(page: Path, folder: Path) -> None:
    """Refuse a place where no page can be written, before work is done for it."""
    from seqboat.core.checks import check_output

    if not folder.is_dir():
        raise ValueError(f"{folder} is not the folder of a run")
    check_output("--out", page)
    if page.parent.name.startswith("step-"):
        raise ValueError(f"{page}: a checkpoint's folder must not change; choose another --out")
