"""`seqboat reproduce`: run the paper's experiments and write the results beside its numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seqboat.reproduce import Job


EPILOG = """\
The same command in two terminals shares the work: each process takes the next run that no other is at.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("target", nargs="*", help="tables to run (default: list them)")
    parser.add_argument(
        "--scale",
        choices=("small", "paper"),
        default="small",
        help="small twins, or the recipes as published",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        default=[],
        help="run only these trials (names as in --dry-run; * and ? stand for anything)",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="run so many seeds of everything")
    parser.add_argument(
        "--out", metavar="DIR", default="runs/reproduce", help="folder of the runs (%(default)s)"
    )
    parser.add_argument("--page", metavar="FILE", help="page to write (default: results.md in DIR)")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and stop")
    parser.add_argument(
        "--collect", action="store_true", help="run nothing: write down the runs that are finished"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.checkpoint import InUse
    from seqboat.commands.eval import show_progress
    from seqboat.reproduce import collect, estimate, plan, refreshed, run_job
    from seqboat.results import add_records
    from seqboat.targets import TARGETS
    from seqboat.train import EXIT_DIVERGED

    if options.seeds is not None and options.seeds < 1:
        raise ValueError(f"--seeds must be an integer >= 1, got {options.seeds}")
    if not options.target:
        for target in TARGETS.values():
            minutes = sum((trial.minutes or 0) * trial.seeds for trial in target.small)
            print(
                f"{target.name:12s} {target.title} ({target.where}): {minutes:.0f} minutes at --scale small"
            )
        return 0
    unknown = [name for name in options.target if name not in TARGETS]
    if unknown:
        raise ValueError(f"target {unknown[0]!r} is unknown; expected some of {', '.join(TARGETS)}")
    folder = Path(options.out)
    page = Path(options.page) if options.page else folder / "results.md"
    jobs: list[Job] = []
    for name in dict.fromkeys(options.target):
        if not TARGETS[name].trials(options.scale):
            raise ValueError(f"{name} has nothing to run at --scale {options.scale}")
        jobs += plan(TARGETS[name], options.scale, folder, options.seeds, options.only)
    if not jobs:
        known = [t.name for name in options.target for t in TARGETS[name].trials(options.scale)]
        raise ValueError(
            f"--only {' '.join(options.only)} fits no trial; there are {', '.join(dict.fromkeys(known))}"
        )
    if not options.collect:
        _show_plan(jobs)
        minutes, unknown_time = estimate(jobs)
        more = f", and {unknown_time} runs whose time depends on your hardware" if unknown_time else ""
        print(f"about {minutes:.0f} minutes of one core{more}", flush=True)
    if options.dry_run:
        return 0
    progress = show_progress if sys.stderr.isatty() else None
    written = diverged = False
    for job in jobs:
        job = refreshed(job)
        if not job.finished:
            if options.collect:
                continue
            print(f"{job.trial.title}, seed {job.seed}: {job.folder}", flush=True)
            try:
                outcome = run_job(job)
            except InUse as taken:
                print(f"left to another process: {taken}", file=sys.stderr)
                continue
            if outcome.exit_code == EXIT_DIVERGED:
                print(f"{job.folder}: {outcome.message}; the others go on", file=sys.stderr)
                diverged = True
                continue
            if outcome.exit_code:
                print(f"{job.folder}: {outcome.message}; the same command goes on", file=sys.stderr)
                return outcome.exit_code
        record = collect(job, progress)
        add_records(page, [record])
        written = True
        print(
            f"{job.trial.title}, seed {job.seed}: {record['metric']} {record['test']:.4f} on the test split",
            flush=True,
        )
    print(f"wrote {page}" if written else "nothing is finished, so nothing is written")
    return EXIT_DIVERGED if diverged else 0


def _show_plan(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.finished:
            state = "finished"
        elif job.step:
            state = f"goes on after step {job.step:,} of {job.steps:,}"
        else:
            state = f"{job.steps:,} steps"
        print(f"  {job.trial.name}: {job.trial.command(job.seed)}: {state}")
