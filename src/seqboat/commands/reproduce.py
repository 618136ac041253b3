"""`seqboat reproduce`: run the paper's experiments and write the results beside its numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from seqboat.paper.targets.base import Job, MeasuredTarget, Target
    from seqboat.paper.trials import Bench, Scale

EXIT_DIVERGED = 3
"""As of `seqboat train`."""

SURVIVES_OUTPUT = True
"""Hours of training do not depend on whether progress can be printed."""


EPILOG = """\
Run the same command in two terminals to share the work: each process takes the next run that no other works on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "target", nargs="*", help="tables and figures to make (default: list them all with their progress)"
    )
    parser.add_argument(
        "--scale",
        choices=("small", "paper"),
        default="small",
        help="small variants (default), or the recipes as published",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        default=[],
        help="only these parts of the targets (names as in --dry-run; * and ? stand for anything)",
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="seeds of every run (default: each run's own number)"
    )
    parser.add_argument(
        "--out", metavar="DIR", default="runs/reproduce", help="folder of the runs (%(default)s)"
    )
    parser.add_argument("--page", metavar="FILE", help="page to write (default: results.md in DIR)")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and stop")
    parser.add_argument(
        "--again", action="store_true", help="measure again what the page already has (speed and memory)"
    )
    parser.add_argument(
        "--collect", action="store_true", help="run nothing: record the runs that are finished"
    )
    parser.add_argument(
        "--rewrite",
        action="store_true",
        help="run nothing: write the page and its figures again from the recorded results",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.paper.reproduce import chosen, estimate, plan
    from seqboat.paper.targets import TARGETS
    from seqboat.paper.targets.base import MeasuredTarget

    if options.seeds is not None and options.seeds < 1:
        raise ValueError(f"--seeds must be an integer >= 1, got {options.seeds}")
    if options.rewrite:
        return _rewrite(options)
    if not options.target:
        for target in TARGETS.values():
            print(_state(target, Path(options.out), _page(options)), flush=True)
        return 0
    unknown = [name for name in options.target if name not in TARGETS]
    if unknown:
        raise ValueError(f"target {unknown[0]!r} is unknown; expected some of {', '.join(TARGETS)}")
    folder = Path(options.out)
    page = _page(options)
    # hours may pass before something is written
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} must be a folder, got a file")
    if page.is_dir() or page.suffix == ".json":
        raise ValueError(
            f"--page {page} must be a file such as results.md: results.json beside it has the numbers"
        )
    jobs: list[Job] = []
    measurements: list[Measurement] = []
    for name in dict.fromkeys(options.target):
        target = TARGETS[name]
        if not target.names(options.scale):
            raise ValueError(f"{name} has nothing to run at --scale {options.scale}")
        jobs += plan(target, options.scale, folder, options.seeds, options.only)
        if isinstance(target, MeasuredTarget):
            for bench in chosen(target.benches(options.scale), options.only):
                done = _is_measured(page, target, options.scale, bench) and not options.again
                measurements.append(Measurement(target, bench, done))
    if not jobs and not measurements:
        known = dict.fromkeys(n for name in options.target for n in TARGETS[name].names(options.scale))
        raise ValueError(f"--only {' '.join(options.only)} fits nothing; there are {', '.join(known)}")
    if not options.collect:
        _show_plan(jobs, measurements)
        minutes, unknown_time = estimate(jobs)
        left = [m.bench.minutes for m in measurements if not m.done]
        minutes += sum(m or 0 for m in left)
        unknown_time += sum(m is None for m in left)
        more = f", and {unknown_time} runs whose time depends on your hardware" if unknown_time else ""
        print(f"about {minutes:.0f} minutes of one core{more}", flush=True)
    if options.dry_run:
        return 0
    code = _run_jobs(jobs, page, options.collect)
    if code in (0, EXIT_DIVERGED) and not options.collect:
        _measure([m for m in measurements if not m.done], page, options.scale, folder)
    return code


def _rewrite(options: argparse.Namespace) -> int:
    """Write the page again from the records behind it."""
    from seqboat.paper.results import rewrite

    if options.target:
        raise ValueError("--rewrite takes no targets: it writes the whole page")
    page = _page(options)
    records = rewrite(page)
    print(f"wrote {page} from {len(records)} records")
    return 0


def _page(options: argparse.Namespace) -> Path:
    return Path(options.page) if options.page else Path(options.out) / "results.md"


def _state(target: Target, folder: Path, page: Path) -> str:
    """A line about the small runs of a target: how many are done, and how long the others take."""
    from seqboat.paper.reproduce import estimate, plan

    line = f"{target.name:18s} {target.title} ({target.where})"
    try:
        jobs = plan(target, "small", folder)
    except ValueError as error:
        return f"{line}: {error}"
    left = [bench for bench in target.small_benches if not _is_measured(page, target, "small", bench)]
    minutes = estimate(jobs)[0] + sum(bench.minutes or 0 for bench in left)
    everything = len(jobs) + len(target.small_benches)
    done = sum(job.finished for job in jobs) + len(target.small_benches) - len(left)
    return f"{line}: {done} of {everything} done at --scale small, {minutes:.0f} minutes left"


class Measurement(NamedTuple):
    """Something to measure, and whether the page has it already."""

    target: MeasuredTarget
    bench: Bench
    done: bool


def _is_measured(page: Path, target: Target, scale: str, bench: Bench) -> bool:
    from seqboat.paper.results import read_records

    key = (target.name, scale, bench.name)
    return any((r["target"], r["scale"], r["trial"]) == key for r in read_records(page))


def _run_jobs(jobs: Sequence[Job], page: Path, collect_only: bool) -> int:
    """Train the runs that are not finished and record those that are."""
    from seqboat.commands.eval import show_progress
    from seqboat.data.files import InUse
    from seqboat.paper.reproduce import refreshed, run_job
    from seqboat.paper.results import add_records

    progress = show_progress if sys.stderr.isatty() else None
    written = diverged = False
    for job in jobs:
        job = refreshed(job)
        if not job.finished:
            if collect_only:
                continue
            print(f"{job.trial.title}, seed {job.seed}: {job.folder}", flush=True)
            try:
                outcome = run_job(job)
            except InUse as taken:
                print(f"left to another process: {taken}", file=sys.stderr)
                continue
            if outcome.exit_code == EXIT_DIVERGED:
                print(f"{job.folder}: {outcome.message}; the other runs continue", file=sys.stderr)
                diverged = True
                continue
            if outcome.exit_code:
                print(f"{job.folder}: {outcome.message}; the same command continues", file=sys.stderr)
                return outcome.exit_code
        record = job.target.collect(job, progress)
        add_records(page, [record])
        written = True
        print(f"{job.trial.title}, seed {job.seed}: {job.target.summarize(record)}", flush=True)
    if jobs:
        print(f"wrote {page}" if written else "no run is finished, so none is recorded")
    return EXIT_DIVERGED if diverged else 0


def _measure(measurements: Sequence[Measurement], page: Path, scale: Scale, folder: Path) -> None:
    """Measure, and record each part when it is done."""
    from seqboat.paper.results import add_records

    for target, bench, _ in measurements:
        print(f"{target.title}, {bench.title}", flush=True)
        record = target.measure(bench, scale, folder, lambda message: print(f"  {message}", flush=True))
        add_records(page, [record])
        print(f"wrote {page}", flush=True)


def _show_plan(jobs: Sequence[Job], measurements: Sequence[Measurement]) -> None:
    # a run that belongs to several targets is run once
    for job in {job.folder: job for job in jobs}.values():
        if job.finished:
            state = "finished"
        elif job.step:
            state = f"continues after step {job.step:,} of {job.steps:,}"
        else:
            state = f"{job.steps:,} steps"
        print(f"  {job.trial.name}: {job.trial.command(job.seed)}: {state}")
    for target, bench, done in measurements:
        state = "on the page already (--again measures again)" if done else "to measure"
        print(f"  {bench.name}: {target.title}, {bench.title}: {state}")
