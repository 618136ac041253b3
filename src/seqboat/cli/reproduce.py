"""`seqboat reproduce`: run the paper's experiments and write the results next to its numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seqboat.paper.jobs import Job
    from seqboat.paper.target import Target

EXIT_DIVERGED = 3
"""As of `seqboat train`."""

SURVIVES_OUTPUT = True
"""Hours of training do not depend on whether progress can be printed."""


EPILOG = """\
  seqboat reproduce                                      every target and its progress
  seqboat reproduce tables --scale paper --dry-run       every row of tables 1 to 3: size, what is missing
  seqboat reproduce tables --scale paper --rows seqboat,s5 --tasks image,text --training.precision bf16
  seqboat reproduce page runs/reproduce/results.jsonl other/results.jsonl --page results.md

`tables` means lra, speech and enwik8; `figures` means activation, confidence, tradeoff and span. Each finished run is
a line of results.jsonl in DIR; `page` writes a page from one or more of these files. To divide the work, run the same
command in several terminals: each process picks the next run that no other is working on. Set fields of training by
their dotted names, as in `seqboat train`: --training.workers=4.
"""

TAKES_FIELDS = True
"""Arguments that argparse does not know are fields of training."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "target",
        nargs="*",
        help="tables and figures to make (default: list them all with their progress), or page RESULTS...",
    )
    parser.add_argument(
        "--scale",
        choices=("small", "paper"),
        default="small",
        help="small variants (default), or recipes at the paper's scale",
    )
    parser.add_argument("--rows", metavar="NAMES", help="only these models, such as seqboat,s5")
    parser.add_argument("--tasks", metavar="NAMES", help="only these tasks, such as image,text")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        default=[],
        help="only these parts of the targets (names as in --dry-run; * and ? match anything)",
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="number of seeds per run (default: depends on the run)"
    )
    parser.add_argument(
        "--out", metavar="DIR", default="runs/reproduce", help="folder of the runs (default: %(default)s)"
    )
    parser.add_argument(
        "--page", metavar="FILE", default="results.md", help="page to write (default: %(default)s)"
    )
    parser.add_argument("--device", help="where to train and score: auto (default), cpu or cuda")
    parser.add_argument("--data-dir", "--data_dir", metavar="FOLDER", help="where the prepared data is")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would run, its size, and what data is missing, and stop",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.paper import TARGETS
    from seqboat.paper.jobs import plan

    if options.target[:1] == ["page"]:
        return write_results([Path(name) for name in options.target[1:]], Path(options.page))
    if options.seeds is not None and options.seeds < 1:
        raise ValueError(f"--seeds must be an integer >= 1, got {options.seeds}")
    folder = Path(options.out)
    if not options.target:
        for target in TARGETS.values():
            print(_state(target, folder), flush=True)
        return 0
    # hours may pass before something is written
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} must be a folder, got a file")
    rows, tasks = _names(options.rows), _names(options.tasks)
    targets = _targets(options.target)
    settings = list(options.fields)
    if options.device is not None:
        settings.append(f"--training.device={options.device}")
    if options.data_dir is not None:
        settings.append(f"--data.data_dir={options.data_dir}")
    jobs = plan(targets, options.scale, folder, options.seeds, options.only, rows, tasks, settings)
    if not jobs:
        raise ValueError(_nothing(options, targets))
    if options.dry_run:
        _show_plan(jobs)
        return 0
    return _run_jobs(jobs, folder / "results.jsonl")


def write_results(files: Sequence[Path], page: Path) -> int:
    """Write a page from one or more files of results."""
    from seqboat.paper import TARGETS
    from seqboat.paper.results import check_commits, read_rows, write_page

    if not files:
        raise ValueError(
            "page needs the results to show: seqboat reproduce page runs/reproduce/results.jsonl"
        )
    if page.is_dir() or page.suffix != ".md":
        raise ValueError(f"--page {page} must be a file such as results.md")
    rows = read_rows(files)
    check_commits(rows)
    write_page(page, rows, list(TARGETS.values()))
    print(f"wrote {page} from {len(rows)} runs")
    return 0


def _names(text: str | None) -> list[str]:
    """The names of a list with commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _targets(names: Sequence[str]) -> list[Target]:
    """The targets of these names, each once, and those of groups."""
    from seqboat.paper import GROUPS, TARGETS

    found = dict.fromkeys(part for name in names for part in GROUPS.get(name, (name,)))
    unknown = [name for name in found if name not in TARGETS]
    if unknown:
        known = ", ".join([*TARGETS, *GROUPS, "page"])
        raise ValueError(f"target {unknown[0]!r} is unknown; expected some of {known}")
    return [TARGETS[name] for name in found]


def _nothing(options: argparse.Namespace, targets: Sequence[Target]) -> str:
    """Why nothing was chosen, and what there is."""
    trials = [trial for target in targets for trial in target.trials(options.scale)]
    for name in ("rows", "tasks"):
        wanted = _names(getattr(options, name))
        known = dict.fromkeys(getattr(trial, name[:-1]) for trial in trials)
        if wanted and not any(fnmatchcase(one, pattern) for one in known for pattern in wanted):
            return f"--{name} {','.join(wanted)} fits nothing; there are {', '.join(known)}"
    if not options.only:
        return "--rows and --tasks together fit nothing"
    names = dict.fromkeys(trial.name for trial in trials)
    return f"--only {' '.join(options.only)} fits nothing; there are {', '.join(names)}"


def _state(target: Target, folder: Path) -> str:
    """A line about the small runs of a target: how many are done."""
    from seqboat.paper.jobs import plan

    line = f"{target.name:12s} {target.title} ({target.where})"
    try:
        jobs = plan([target], "small", folder)
    except ValueError as error:
        return f"{line}: {error}"
    return f"{line}: {sum(job.finished for job in jobs)} of {len(jobs)} done at --scale small"


def _run_jobs(jobs: Sequence[Job], results: Path) -> int:
    """Train the runs that are not finished and record those that are."""
    from seqboat.cli.eval import show_progress
    from seqboat.data.files import InUse
    from seqboat.paper.jobs import collect, refreshed, run_job
    from seqboat.paper.results import add_row, find_row
    from seqboat.paper.target import scores_text

    progress = show_progress if sys.stderr.isatty() else None
    written = diverged = False
    for job in jobs:
        job = refreshed(job)
        if not job.finished:
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
        row = collect(job, find_row(results, job.scale, job.trial.name, job.seed), progress)
        add_row(results, row)
        written = True
        print(f"{job.trial.title}, seed {job.seed}: {scores_text([row])} on the test split", flush=True)
    print(f"wrote {results}" if written else "no run is finished, so none is recorded")
    return EXIT_DIVERGED if diverged else 0


def _show_plan(jobs: Sequence[Job]) -> None:
    """A line per trial: progress, sizes, what is missing and the command; then where the settings come from."""
    from seqboat.paper.jobs import missing, parameters

    trials: dict[str, list[Job]] = {}
    for job in jobs:
        trials.setdefault(job.trial.name, []).append(job)
    print(
        f"  {'name':26s} {'model':18s} {'task':16s} {'steps':>9s} {'parameters':>11s}  missing, and the command"
    )
    for same in trials.values():
        trial = same[0].trial
        done = sum(job.finished for job in same)
        begun = [job for job in same if job.step and not job.finished]
        state = [f"{done} of {len(same)} seeds finished"] if done else []
        state += [f"seed {job.seed} continues after step {job.step:,}" for job in begun]
        seeds = f" x {len(same)}" if len(same) > 1 else ""
        print(
            f"  {trial.name:26s} {trial.title:18s} {trial.task_title:16s} {f'{trial.steps:,}{seeds}':>9s} "
            f"{parameters(same[0]):>11,}  {'; '.join([*state, *missing(same[0])]) or 'nothing'}: {trial.command()}",
            flush=True,
        )
    for title, source in dict.fromkeys(
        (same[0].trial.title, same[0].trial.source) for same in trials.values()
    ):
        if source:
            print(f"settings of {title}: {source}")
