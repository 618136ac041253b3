"""`seqboat reproduce`: run the paper's experiments and write the results next to its numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from seqboat.paper.machine import Machine
    from seqboat.paper.studies.study import Study
    from seqboat.paper.target import Job, MeasuredTarget, Target
    from seqboat.paper.trial import Bench, Scale, Trial

EXIT_DIVERGED = 3
"""As of `seqboat train`."""

SURVIVES_OUTPUT = True
"""Hours of training do not depend on whether progress can be printed."""


EPILOG = """\
  seqboat reproduce                                      every target and its progress
  seqboat reproduce tables --scale paper --dry-run       every row of tables 1 to 3: size, memory, what is missing
  seqboat reproduce tables --scale small --budget 60     the same rows as small variants, one minute of a core each
  seqboat reproduce tables --scale paper --rows seqboat,s5 --tasks image,text --device cuda --precision bf16
  seqboat reproduce merge a/results.json b/results.json --page results.md

Studies compare models at equal processor time: `tables` at --scale small, and others shown by `seqboat reproduce`.
They write evidence.md, and --budget sets the seconds of each run.

At --scale paper, `tables` means lra, speech and enwik8; `figures` means activation, confidence, tradeoff and span. To
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
        "--budget",
        type=float,
        metavar="SECONDS",
        help="standard seconds of processor time for each run of a study (default: depends on the study)",
    )
    parser.add_argument(
        "--out", metavar="DIR", default="runs/reproduce", help="folder of the runs (default: %(default)s)"
    )
    parser.add_argument(
        "--page", metavar="FILE", help="page to write (default: results.md in DIR, or evidence.md)"
    )
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
        "--again",
        action="store_true",
        help="repeat measurements of speed and memory that are already recorded",
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
    from seqboat.paper.reproduce import chosen, estimate, plan
    from seqboat.paper.studies import STUDIES
    from seqboat.paper.target import MeasuredTarget
    from seqboat.paper.targets import TARGETS

    if options.seeds is not None and options.seeds < 1:
        raise ValueError(f"--seeds must be an integer >= 1, got {options.seeds}")
    if options.target[:1] == ["merge"]:
        return _merge(options)
    if options.keep is not None:
        raise ValueError("--keep works only with merge")
    studies = _studies(options)
    if studies:
        return _run_studies(options, studies)
    if options.budget is not None:
        raise ValueError(
            "--budget works only with a study: seqboat reproduce tables --scale small --budget 60"
        )
    if options.rewrite:
        return _rewrite(options)
    machine = make_machine(options)
    if not options.target:
        for target in TARGETS.values():
            print(_state(target, Path(options.out), _page(options)), flush=True)
        for study in STUDIES.values():
            print(f"{study.name:18s} {study.title} (a study, {study.budget:g} s each): {study.command}")
        return 0
    folder = Path(options.out)
    page = _page(options)
    # hours may pass before something is written
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} must be a folder, got a file")
    _check_page(page)
    rows, tasks = _names(options.rows), _names(options.tasks)
    jobs: list[Job] = []
    measurements: list[Measurement] = []
    targets = _targets(options.target)
    for target in targets:
        if not target.names(options.scale):
            raise ValueError(f"{target.name} has nothing to run at --scale {options.scale}")
        jobs += plan(target, options.scale, folder, options.seeds, options.only, rows, tasks, machine)
        if isinstance(target, MeasuredTarget):
            for bench in chosen(target.benches(options.scale), options.only, rows, tasks):
                done = _is_measured(page, target, options.scale, bench) and not options.again
                measurements.append(Measurement(target, bench, done))
    if not jobs and not measurements:
        trials = [trial for target in targets for trial in target.trials(options.scale)]
        names = [part for target in targets for part in target.names(options.scale)]
        raise ValueError(_nothing(options, trials, names))
    if options.dry_run:
        _show_forecast(jobs, options.memory * 1e9)
    elif not options.collect:
        _show_plan(jobs)
    if not options.collect:
        _show_measurements(measurements)
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


def _studies(options: argparse.Namespace) -> list[Study]:
    """The studies among the targets; they cannot be mixed with others, since they have another page."""
    from seqboat.paper.studies import STUDIES
    from seqboat.paper.targets import GROUPS

    if options.scale == "paper":  # the names of groups are those of the paper's tables
        wrong = [name for name in options.target if name in STUDIES and name not in GROUPS]
        if wrong:
            raise ValueError(f"{wrong[0]} is a study of small models: it has nothing to run at --scale paper")
        return []
    found = [STUDIES[name] for name in dict.fromkeys(options.target) if name in STUDIES]
    if found and len(found) < len(set(options.target)):
        raise ValueError(
            f"{found[0].name} is a study, which has a separate page: run other targets separately"
        )
    return found


def _run_studies(options: argparse.Namespace, studies: Sequence[Study]) -> int:
    """Run what is left of some studies, and write their page."""
    from seqboat.paper.studies.budget import Stopped
    from seqboat.paper.studies.page import write_page
    from seqboat.paper.studies.run import chosen_cells, run_cells
    from seqboat.paper.studies.store import read_records, record_key

    machine = make_machine(options)
    page = Path(options.page) if options.page else Path(options.out) / "evidence.md"
    if options.budget is not None and not options.budget > 0:
        raise ValueError(f"--budget must be positive, got {options.budget:g}")
    if machine.processes > 1:
        raise ValueError("studies compare the time of one process: --processes must be 1")
    if options.rewrite or options.collect:
        print(f"wrote {page} from {len(write_page(page))} records")
        return 0
    known = [cell for study in studies for cell in study.cells(options.budget or study.budget, options.seeds)]
    cells = chosen_cells(known, options.only, _names(options.rows), _names(options.tasks))
    if not cells:
        trials = [cell.trial for cell in known]
        raise ValueError(_nothing(options, trials, [trial.name for trial in trials]))
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


def _targets(names: Sequence[str]) -> list[Target]:
    """The targets of these names, each once, and those of groups."""
    from seqboat.paper.targets import GROUPS, TARGETS

    found = dict.fromkeys(part for name in names for part in GROUPS.get(name, (name,)))
    unknown = [name for name in found if name not in TARGETS]
    if unknown:
        known = ", ".join([*TARGETS, *GROUPS, "merge"])
        raise ValueError(f"target {unknown[0]!r} is unknown; expected some of {known}")
    return [TARGETS[name] for name in found]


def _nothing(options: argparse.Namespace, trials: Sequence[Trial], names: Sequence[str]) -> str:
    """Why nothing was chosen, and what there is."""
    for name in ("rows", "tasks"):
        wanted = _names(getattr(options, name))
        known = dict.fromkeys(getattr(trial, name[:-1]) for trial in trials)
        if wanted and not any(fnmatchcase(one, pattern) for one in known for pattern in wanted):
            return f"--{name} {','.join(wanted)} fits nothing; there are {', '.join(known)}"
    if not options.only:
        return "--rows and --tasks together fit nothing"
    return f"--only {' '.join(options.only)} fits nothing; there are {', '.join(dict.fromkeys(names))}"


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


def _measure(measurements: Sequence[Measurement], page: Path, scale: Scale, folder: Path) -> None:
    """Measure, and record each part when it is done."""
    from seqboat.paper.results import add_records

    for target, bench, _ in measurements:
        print(f"{target.title}, {bench.title}", flush=True)
        record = target.measure(bench, scale, folder, lambda message: print(f"  {message}", flush=True))
        add_records(page, [record])
        print(f"wrote {page}", flush=True)


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


def _show_measurements(measurements: Sequence[Measurement]) -> None:
    for target, bench, done in measurements:
        state = "on the page already (--again measures again)" if done else "to measure"
        print(f"  {bench.name}: {target.title}, {bench.title}: {state}")
