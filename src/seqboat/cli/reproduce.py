"""`seqboat reproduce`: run the paper's experiments and write the results next to its numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seqboat.paper.machine import Machine
    from seqboat.paper.target import Job, Target
    from seqboat.paper.trial import Trial

EXIT_DIVERGED = 3
"""As of `seqboat train`."""

SURVIVES_OUTPUT = True
"""Hours of training do not depend on whether progress can be printed."""


EPILOG = """\
  seqboat reproduce                                      every target and its progress
  seqboat reproduce tables --scale paper --dry-run       every row of tables 1 to 3: size, memory, what is missing
  seqboat reproduce tables --scale paper --rows seqboat,s5 --tasks image,text --device cuda --precision bf16
  seqboat reproduce merge a/results.json b/results.json --page results.md

`tables` means lra, speech and enwik8; `figures` means activation, confidence, tradeoff and span. To
divide the work, run the same command in several terminals: each process picks the next run that no other is working
on. Set other training fields by their dotted names, as in `seqboat train`: --training.workers=4.
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
        help="tables and figures to make (default: list them all with their progress), or merge RESULTS...",
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
    parser.add_argument("--page", metavar="FILE", help="page to write (default: results.md in DIR)")
    machine = parser.add_argument_group("how to run them")
    machine.add_argument("--device", help="where to train and score: auto (default), cpu or cuda")
    machine.add_argument("--precision", help="training precision: fp32, bf16, ...")
    machine.add_argument(
        "--accumulation",
        metavar="N",
        help="micro-batches per step; auto: as many as needed to fit in GPU memory",
    )
    machine.add_argument(
        "--memory",
        type=float,
        default=24.0,
        metavar="GB",
        help="GPU memory, for --accumulation auto and --dry-run (default: %(default)g)",
    )
    machine.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes for each run, one per GPU (default: %(default)s)",
    )
    machine.add_argument("--compile", action="store_true", help="use torch.compile")
    machine.add_argument(
        "--checkpointing", action="store_true", help="recompute activations in the backward pass"
    )
    machine.add_argument("--data-dir", "--data_dir", metavar="FOLDER", help="where the prepared data is")
    what = parser.add_argument_group("what to do")
    what.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would run, its size and memory, and what data is missing, and stop",
    )
    what.add_argument(
        "--collect", action="store_true", help="only record finished runs, without running anything"
    )
    what.add_argument(
        "--rewrite",
        action="store_true",
        help="only rewrite the page and its figures from recorded results, without running anything",
    )
    what.add_argument(
        "--keep", choices=("first", "last"), help="which of two conflicting records merge keeps"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.paper.reproduce import estimate, plan
    from seqboat.paper.targets import TARGETS

    if options.seeds is not None and options.seeds < 1:
        raise ValueError(f"--seeds must be an integer >= 1, got {options.seeds}")
    if options.target[:1] == ["merge"]:
        return _merge(options)
    if options.keep is not None:
        raise ValueError("--keep works only with merge")
    if options.rewrite:
        return _rewrite(options)
    machine = make_machine(options)
    if not options.target:
        for target in TARGETS.values():
            print(_state(target, Path(options.out)), flush=True)
        return 0
    folder = Path(options.out)
    page = _page(options)
    # hours may pass before something is written
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} must be a folder, got a file")
    _check_page(page)
    rows, tasks = _names(options.rows), _names(options.tasks)
    jobs: list[Job] = []
    targets = _targets(options.target)
    for target in targets:
        if not target.trials(options.scale):
            raise ValueError(f"{target.name} has nothing to run at --scale {options.scale}")
        jobs += plan(target, options.scale, folder, options.seeds, options.only, rows, tasks, machine)
    if not jobs:
        trials = [trial for target in targets for trial in target.trials(options.scale)]
        raise ValueError(_nothing(options, trials))
    if options.dry_run:
        _show_forecast(jobs, options.memory * 1e9)
    elif not options.collect:
        _show_plan(jobs)
    if not options.collect:
        minutes, unknown_time = estimate(jobs)
        more = f", and {unknown_time} runs whose time depends on your hardware" if unknown_time else ""
        print(f"about {minutes:.0f} minutes of one core{more}", flush=True)
    if options.dry_run:
        return 0
    return _run_jobs(jobs, page, options.collect)


def make_machine(options: argparse.Namespace) -> Machine:
    """How to carry out runs, by the options and the fields of training."""
    from seqboat.paper.machine import Machine

    fields = list(options.fields)
    fit = options.accumulation == "auto"
    for name in ("device", "precision", *(() if fit else ("accumulation",))):
        if getattr(options, name) is not None:
            fields.append(f"--training.{name}={getattr(options, name)}")
    if options.compile:
        fields.append("--training.compile=true")
    if options.checkpointing:
        fields.append("--training.gradient_checkpointing=true")
    if options.data_dir is not None:
        fields.append(f"--data.data_dir={options.data_dir}")
    if options.processes < 1:
        raise ValueError(f"--processes must be an integer >= 1, got {options.processes}")
    if not options.memory > 0:
        raise ValueError(f"--memory must be positive, got {options.memory:g}")
    memory = options.memory * 1e9
    return Machine(settings=tuple(fields), processes=options.processes, memory=memory if fit else None)


def _names(text: str | None) -> list[str]:
    """The names of a list with commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _targets(names: Sequence[str]) -> list[Target]:
    """The targets of these names, each once, and those of groups."""
    from seqboat.paper.targets import GROUPS, TARGETS

    found = dict.fromkeys(part for name in names for part in GROUPS.get(name, (name,)))
    unknown = [name for name in found if name not in TARGETS]
    if unknown:
        known = ", ".join([*TARGETS, *GROUPS, "merge"])
        raise ValueError(f"target {unknown[0]!r} is unknown; expected some of {known}")
    return [TARGETS[name] for name in found]


def _nothing(options: argparse.Namespace, trials: Sequence[Trial]) -> str:
    """Why nothing was chosen, and what there is."""
    for name in ("rows", "tasks"):
        wanted = _names(getattr(options, name))
        known = dict.fromkeys(getattr(trial, name[:-1]) for trial in trials)
        if wanted and not any(fnmatchcase(one, pattern) for one in known for pattern in wanted):
            return f"--{name} {','.join(wanted)} fits nothing; there are {', '.join(known)}"
    if not options.only:
        return "--rows and --tasks together fit nothing"
    names = dict.fromkeys(trial.name for trial in trials)
    return f"--only {' '.join(options.only)} fits nothing; there are {', '.join(names)}"


def _check_page(page: Path) -> None:
    if page.is_dir() or page.suffix == ".json":
        raise ValueError(
            f"--page {page} must be a file such as results.md: results.json next to it has the numbers"
        )


def _merge(options: argparse.Namespace) -> int:
    """Join the results of several machines."""
    from seqboat.paper.merge import merge
    from seqboat.paper.results import write_records
    from seqboat.paper.tables import showing

    pages = [Path(name) for name in options.target[1:]]
    if not pages:
        raise ValueError(
            "merge needs the results to join: seqboat reproduce merge a/results.json b/results.json"
        )
    page = _page(options)
    _check_page(page)
    merged = merge(pages, options.keep or "first")
    with showing(*pages):
        for conflict in merged.conflicts:
            print(f"conflict: {conflict.describe()}", file=sys.stderr)
    if merged.conflicts and options.keep is None:
        raise ValueError(
            f"{len(merged.conflicts)} runs have several results; --keep first or --keep last decides"
        )
    with showing(*pages):
        write_records(page, merged.records)
    print(f"wrote {page} from {len(merged.records)} records of {len(pages)} pages")
    return 0


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


def _state(target: Target, folder: Path) -> str:
    """A line about the small runs of a target: how many are done, and how long the others take."""
    from seqboat.paper.reproduce import estimate, plan

    line = f"{target.name:18s} {target.title} ({target.where})"
    try:
        jobs = plan(target, "small", folder)
    except ValueError as error:
        return f"{line}: {error}"
    done = sum(job.finished for job in jobs)
    return f"{line}: {done} of {len(jobs)} done at --scale small, {estimate(jobs)[0]:.0f} minutes left"


def _run_jobs(jobs: Sequence[Job], page: Path, collect_only: bool) -> int:
    """Train the runs that are not finished and record those that are."""
    from seqboat.cli.eval import show_progress
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


def _once(jobs: Sequence[Job]) -> list[Job]:
    """A run that belongs to several targets is run once."""
    return list({job.folder: job for job in jobs}.values())


def _progress_text(job: Job) -> str:
    if job.finished:
        return "finished"
    if job.step:
        return f"continues after step {job.step:,} of {job.steps:,}"
    return f"{job.steps:,} steps"


def _show_plan(jobs: Sequence[Job]) -> None:
    for job in _once(jobs):
        print(f"  {job.trial.name}: {job.trial.command(job.seed)}: {_progress_text(job)}")


def _show_forecast(jobs: Sequence[Job], memory: float) -> None:
    """A line per trial, as soon as it is known, and where the settings come from."""
    from seqboat.paper.forecast import HEAD, forecast, line

    trials: dict[str, list[Job]] = {}
    for job in _once(jobs):
        trials.setdefault(job.trial.name, []).append(job)
    if trials:
        print(HEAD)
    for same in trials.values():
        print(line(same, forecast(same[0], memory)), flush=True)
    sources = dict.fromkeys((same[0].trial.title, same[0].trial.source) for same in trials.values())
    for title, source in sources:
        if source:
            print(f"settings of {title}: {source}")
