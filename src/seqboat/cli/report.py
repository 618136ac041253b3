"""`seqboat report`: what a run did, as one HTML page or as numbers."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

TAKES_FIELDS = True
"""Arguments that argparse does not know change the data of the run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = "To change settings of the data: seqboat report runs/classify --data.test new.csv"
    parser.add_argument(
        "run",
        help="folder of a run, one checkpoint (step-N) in it, or a bundled model: enwik8-small",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="page to write (default: report.html in the run's folder)",
    )
    parser.add_argument(
        "--split",
        choices=("train", "val", "test"),
        default="test",
        help="split to analyze (default: test)",
    )
    parser.add_argument(
        "--which", choices=("best", "latest"), default="best", help="which checkpoint (default: best)"
    )
    parser.add_argument("--samples", type=int, default=20, help="examples in the explorer (default: 20)")
    parser.add_argument("--limit", type=int, help="analyze at most this many examples")
    parser.add_argument(
        "--data-dir", "--data_dir", metavar="FOLDER", help="where the prepared data is (default: the run's)"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the numbers as one JSON object; writes a page only with --out",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.cli.eval import show_progress
    from seqboat.data.files import write_text
    from seqboat.report.page import finite
    from seqboat.report.run import collect, report_page
    from seqboat.run import find_run
    from seqboat.training.parallel import choose_device

    if options.samples < 0:
        raise ValueError(f"--samples must be an integer >= 0, got {options.samples}")
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit must be an integer >= 1, got {options.limit}")
    folder = find_run(options.run)
    wants_page = not options.json or options.out is not None
    page = Path(options.out) if options.out is not None else default_page(folder)
    if wants_page:
        check_page_path(page, folder)
    fields = [*([f"--data.data_dir={options.data_dir}"] if options.data_dir else []), *options.fields]
    progress = show_progress if sys.stderr.isatty() else None
    device = choose_device(options.device, what="--device")
    found = collect(
        folder,
        options.split,
        options.samples if wants_page else 0,
        options.limit,
        which=options.which,
        fields=fields,
        device=device,
        progress=progress,
    )
    text = report_page(found) if wants_page else ""
    if wants_page:
        write_text(page, text)
    if options.json:
        print(json.dumps(finite(found.numbers)))
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
