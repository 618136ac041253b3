"""`seqboat paper`: data sets, experiments and results of the paper, published checkpoints, and what there is."""

from __future__ import annotations

import json as jsons
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from seqboat.cli.parser import Count, Size
from seqboat.console import format_bytes, printable

if TYPE_CHECKING:
    from seqboat.data.store import ArrayStore
    from seqboat.paper.jobs import Job
    from seqboat.paper.target import Target
    from seqboat.paper.trial import Scale

EXIT_DIVERGED = 3
"""As of `seqboat train`."""
SURVIVES_OUTPUT = ("run",)
"""Verbs whose hours of training do not depend on whether progress can be printed."""

# lists


What = Literal["recipes", "rows", "ablations", "mixers", "tasks", "routers", "ssms", "targets", "plugins"]


def list_names(what: What) -> int:
    """Names that commands accept, each with a line about it.

    Args:
        what: to list.
    """
    from seqboat.plugins import plugin_of

    if what == "plugins":
        return _plugins()
    things = table(what)
    width = max(22, *map(len, things))
    for name, thing in things.items():
        plugin = plugin_of(thing)
        origin = "" if plugin is None else f" [plug-in {plugin.title}]"
        print(f"{name:<{width}} {first_sentence(thing)}{origin}")
    return 0


def _plugins() -> int:
    """What is loaded from where, and what is not."""
    from seqboat.plugins import GROUP, found_plugins

    for plugin in found_plugins():
        parts = "; ".join(f"{table.lower()}: {', '.join(names)}" for table, names in plugin.parts.items())
        print(
            f"{plugin.title}  {parts}"
            if plugin.problem is None
            else f"{plugin.module}  skipped: {plugin.problem}"
        )
    if not found_plugins():
        print(
            f"no plug-ins: no installed package has an entry point in the group {GROUP}, and --import was not given"
        )
    return 0


TABLES = {
    "recipes": ("seqboat.recipes", "RECIPES"),
    "rows": ("seqboat.recipes", "ROW_RECIPES"),
    "ablations": ("seqboat.recipes", "ABLATIONS"),
    "mixers": ("seqboat.mixers", "MIXERS"),
    "tasks": ("seqboat.tasks", "TASKS"),
    "routers": ("seqboat.layers.routers", "ROUTERS"),
    "ssms": ("seqboat.ssm", "SSMS"),
    "targets": ("seqboat.paper", "TARGETS"),
}
"""Where each registry is."""


def table(what: str) -> Mapping[str, Any]:
    """All entries of a registry, by name."""
    module, name = TABLES[what]
    found: Mapping[str, Any] = getattr(import_module(module), name)
    return found


def first_sentence(thing: Any) -> str:
    """The first line of a docstring."""
    return getattr(thing, "title", None) or (thing.__doc__ or "").strip().split("\n")[0]


# data


def data_list(*, json: bool = False, data_dir: str = "data") -> int:
    """List data sets: what is there, what is missing, sizes and licenses.

    Args:
        json: print JSON.
        data_dir: where prepared data is.
    """
    from seqboat.data.prepare import DATASETS, DOWNLOADS

    rows: list[dict[str, Any]] = []
    for name, info in DATASETS.items():
        store, problem = _find(data_dir, name)
        rows.append(
            {
                "name": name,
                "title": info.title,
                "license": info.license,
                "state": "ready" if store is not None else "broken" if problem else "missing",
                "bytes": info.size if store is None else store.bytes,
                "counts": None if store is None else store.manifest["counts"],
                "source": None if store is None else store.manifest["source"],
                "skipped": None if store is None else store.manifest["skipped"],
                "problem": problem,
                "get": info.get,
            }
        )
    if json:
        print(jsons.dumps(rows, indent=1))
        return 0
    for row in rows:
        about = "" if row["state"] == "ready" else "about "
        print(f"{row['name']:14} {row['state']:8} {about + format_bytes(row['bytes']):>14}  {row['title']}")
        print(f"{'':38} license: {row['license']}")
        if row["state"] == "ready":
            print(
                f"{'':38} {_counted(row['counts'])}; from {printable(row['source'])}; "
                f"{row['skipped']} records left out"
            )
        else:
            if row["problem"]:
                print(f"{'':38} {printable(row['problem'])}")
            print(f"{'':38} get {row['get']}")
            print(f"{'':38} then: seqboat paper data prepare {row['name']}{_how(row['name'])}")
    downloads = Path(data_dir) / DOWNLOADS
    print(f"\nPrepared data is in {Path(data_dir)}, downloaded files are in {downloads}.")
    return 0


def _find(root: str, name: str) -> tuple[ArrayStore | None, str | None]:
    """The prepared data, if there is any, and what is wrong with it, if anything."""
    from seqboat.data.store import MANIFEST, ArrayStore, MissingData

    if not (Path(root) / name / MANIFEST).exists():
        return None, None
    try:
        return ArrayStore.find(root, name), None
    except MissingData as error:
        return None, str(error)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{split} {counts[split]:,}" for split in ("train", "val", "test") if split in counts)


def _how(name: str) -> str:
    from seqboat.data.prepare import DATASETS

    return "" if DATASETS[name].draw is not None else " --from PATH   (or: --from download)"


def data_prepare(
    *names: str,
    from_: str | None = None,
    count: str | None = None,
    seed: int = 0,
    workers: Count | None = None,
    strict: bool = False,
    unpickle: bool = False,
    force: bool = False,
    data_dir: str = "data",
) -> int:
    """Make data sets ready for training.

    Args:
        names: data sets (seqboat paper data list).
        from_: a file or folder as distributed, download, or generate (default: generate if possible).
        count: TRAIN,VAL,TEST examples to generate.
        seed: of generated data.
        workers: processes that generate data (default: all cores).
        strict: fail on bad records instead of skipping them.
        unpickle: allow data stored as pickles of tensors (processed speech); no code in them is run.
        force: prepare again even if the data is already there.
        data_dir: where prepared data is.
    """
    if not names:
        raise ValueError("name at least one data set (seqboat paper data list)")
    from seqboat.data.prepare import find_dataset, prepare

    counts = None
    if count is not None:
        fields = count.replace("_", "").split(",")
        if not all(field.isdigit() for field in fields):
            raise ValueError(f"--count must be three numbers such as 1000,100,100; got {count!r}")
        counts = tuple(int(field) for field in fields)
    for name in names:
        find_dataset(name)
    for name in names:
        before, _ = _find(data_dir, name)
        store = prepare(
            name,
            from_,
            data_dir,
            counts=counts,
            seed=seed,
            workers=workers,
            strict=strict,
            force=force,
            unpickle=unpickle,
        )
        manifest = store.manifest
        counted = _counted(manifest["counts"])
        if before is not None and not force:
            print(f"{store.folder} already exists ({counted}); --force prepares it again")
            continue
        print(f"{store.folder}: {counted}; {format_bytes(store.bytes)}")
        for note in manifest.get("notes", ()):
            print(printable(note), file=sys.stderr)
        if manifest["skipped"]:
            print(f"{manifest['skipped']} records were skipped:", file=sys.stderr)
            for skip in manifest["skipped_records"]:
                print(printable("  {file}, {record}: {reason}".format(**skip)), file=sys.stderr)
    return 0


def data_verify(*names: str, data_dir: str = "data") -> int:
    """Compare prepared data with its recorded hashes.

    Args:
        names: data sets (default: all that are there).
        data_dir: where prepared data is.
    """
    from seqboat.data.prepare import DATASETS, find_dataset
    from seqboat.data.store import ArrayStore

    for name in names:
        find_dataset(name)
    chosen = names or [n for n in DATASETS if (Path(data_dir) / n).exists()]
    for name in chosen:
        ArrayStore.find(data_dir, name).verify()
        print(f"{name}: unchanged since it was prepared")
    if not chosen:
        print(f"{data_dir} contains no prepared data")
    return 0


def data_show(
    task: str,
    *,
    split: Literal["train", "val", "test"] = "train",
    index: Size = 0,
    data_dir: str = "data",
) -> int:
    """Print one example.

    Args:
        task: one with prepared data, or recall or copy.
        split: which part of the data.
        index: number of the example.
        data_dir: where prepared data is.
    """
    from seqboat.data.prepare import DATASETS
    from seqboat.tasks import TASKS
    from seqboat.tasks.stored import StoredTaskConfig

    configs = {name: make() for name, make in TASKS.items() if not getattr(make, "own_data", False)}
    configs |= {name: info.task for name, info in DATASETS.items()}
    if task not in configs:
        raise ValueError(f"no task {task!r} to show: there are {', '.join(configs)}")
    config = configs[task]
    if isinstance(config, StoredTaskConfig):
        config = replace(config, data_dir=data_dir)
    built = config.build()
    dataset = built.dataset(split)
    if not 0 <= index < len(dataset):
        raise ValueError(f"--index must be from 0 to {len(dataset) - 1}, got {index}")
    print(printable(built.show(dataset[index]), lines=True))
    return 0


# experiments


def run_targets(
    *targets: str,
    scale: Literal["small", "paper"] = "small",
    rows: str = "",
    tasks: str = "",
    only: tuple[str, ...] = (),
    seeds: Count | None = None,
    out: Path = Path("runs/paper"),
    device: str | None = None,
    data_dir: str | None = None,
    dry_run: bool = False,
    fields: Sequence[str] = (),
) -> int:
    """Run experiments of the paper; each finished run is a line of results.jsonl, which `paper page` shows.

    Args:
        targets: tables and figures (seqboat paper list targets), tables or figures; without any: the progress of all.
        scale: small variants, or recipes at the paper's scale.
        rows: only these models, such as seqboat,s5.
        tasks: only these tasks, such as image,text.
        only: only these parts of the targets (names as in --dry-run; * and ? match anything).
        seeds: per run (default: depends on the run).
        out: folder of the runs.
        device: where to train and score: auto, cpu or cuda.
        data_dir: where the prepared data is.
        dry_run: print what would run, its size, and what data is missing, and stop.

    Settings of training are fields, as in `seqboat train`: --training.workers=4. To divide the work, run the same
    command in several terminals: each process picks the next run that no other is working on.
    """
    from seqboat.paper import TARGETS
    from seqboat.paper.jobs import plan

    if not targets:
        for target in TARGETS.values():
            print(_state(target, out), flush=True)
        return 0
    # hours may pass before something is written
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} must be a folder, got a file")
    chosen = _targets(targets)
    settings = list(fields)
    if device is not None:
        settings.append(f"--training.device={device}")
    if data_dir is not None:
        settings.append(f"--data.data_dir={data_dir}")
    jobs = plan(chosen, scale, out, seeds, only, _names(rows), _names(tasks), settings)
    if not jobs:
        raise ValueError(_nothing(chosen, scale, {"rows": _names(rows), "tasks": _names(tasks)}, only))
    if dry_run:
        _show_plan(jobs)
        return 0
    return _run_jobs(jobs, out / "results.jsonl")


def write_results(*results: Path, out: Path = Path("results.md")) -> int:
    """Write a page from one or more files of results.

    Args:
        results: files such as runs/paper/results.jsonl.
        out: page to write.
    """
    from seqboat.paper import TARGETS
    from seqboat.paper.results import check_commits, read_rows, write_page

    if not results:
        raise ValueError("page needs the results to show: seqboat paper page runs/paper/results.jsonl")
    if out.is_dir() or out.suffix != ".md":
        raise ValueError(f"--out {out} must be a file such as results.md")
    rows = read_rows(results)
    check_commits(rows)
    write_page(out, rows, list(TARGETS.values()))
    print(f"wrote {out} from {len(rows)} runs")
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


def _nothing(
    targets: Sequence[Target], scale: Scale, wanted: Mapping[str, Sequence[str]], only: Sequence[str]
) -> str:
    """Why nothing was chosen, and what there is."""
    trials = [trial for target in targets for trial in target.trials(scale)]
    for name, patterns in wanted.items():
        known = dict.fromkeys(getattr(trial, name[:-1]) for trial in trials)
        if patterns and not any(fnmatchcase(one, pattern) for one in known for pattern in patterns):
            return f"--{name} {','.join(patterns)} fits nothing; there are {', '.join(known)}"
    if not only:
        return "--rows and --tasks together fit nothing"
    names = dict.fromkeys(trial.name for trial in trials)
    return f"--only {' '.join(only)} fits nothing; there are {', '.join(names)}"


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


# does routing matter


def routing(
    *,
    tasks: str = "recall-128,recall-256,adding-128",
    arms: str = "gated,oracle,full,always,never,paper,paper-start,random,top-k",
    seeds: Count = 5,
    first_seed: int = 0,
    quick: bool = False,
    results: Path = Path("runs/routing/results.jsonl"),
    out: Path = Path("routing.md"),
) -> int:
    """Train routers where a few tokens matter, and write a page: who finds them, and who decides on the same weights.

    Args:
        tasks: names with commas: recall-128, recall-256, recall-1024, recall-4096, layers-128, sym-256, mqar-128,
            order-128, adding-128, easy-128, color-128, context-128.
        arms: who decides, with commas: gated, oracle, full, always, never, paper, paper-start, random, shuffled,
            top-k, labeled.
        seeds: how many.
        first_seed: the first one.
        quick: one task, five arms and two seeds, in less than two minutes.
        results: file with a line per run; runs that are in it are not repeated.
        out: page to write.
    """
    from seqboat.paper.routing import QUICK, run_suite, write_page

    numbers = range(first_seed, first_seed + (2 if quick else seeds))
    chosen = (["recall-128"], list(QUICK)) if quick else (_names(tasks), _names(arms))
    rows = run_suite(*chosen, numbers, results, print)
    write_page(rows, out)
    print(f"wrote {out} from {len(rows)} runs in {results}")
    return 0


# published checkpoints


Recipe = Literal[
    "lra.listops", "lra.text", "lra.retrieval", "lra.image", "lra.pathfinder", "lra.pathx", "speech", "enwik8"
]


def import_published(
    file: Path,
    run: Path,
    *,
    unpickle: bool = False,
    data: Path | None = None,
    recipe: Recipe | None = None,
) -> int:
    """Make a run of a checkpoint of the published implementation.

    Args:
        file: fairseq checkpoint, such as checkpoint_best.pt.
        run: folder to write; must be empty or not exist.
        unpickle: allow reading the pickle: only tensors, settings and plain values; no code in it is run.
        data: published data with the model's dictionaries (dict.txt), for models that read tokens.
        recipe: of the same task (default: from the architecture's name).
    """
    if not unpickle:
        raise ValueError(
            f"{file} is a pickle: pass --unpickle to read it. Names outside of a short list are "
            "refused, and nothing in the file is run"
        )
    from seqboat.paper.checkpoints import import_run
    from seqboat.training.checkpoint import CheckpointError

    try:
        done = import_run(file, run, data, recipe)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    count = sum(parameter.numel() for parameter in done.model.parameters())
    print(f"{done.folder}: {type(done.model).__name__} for {done.config.recipe}, {count:,} parameters")
    for note in done.notes:
        print(printable(note), file=sys.stderr)
    return 0


VERBS = {
    "list": (list_names, "names of recipes, mixers, tasks, routers, targets"),
    "data list": (data_list, "data sets: what is there, sizes, licenses"),
    "data prepare": (data_prepare, "make data sets ready for training"),
    "data verify": (data_verify, "compare prepared data with its hashes"),
    "data show": (data_show, "print one example"),
    "run": (run_targets, "run tables and figures"),
    "page": (write_results, "write the page of results"),
    "routing": (routing, "who finds the few tokens that matter"),
    "import": (import_published, "make a run of a published checkpoint"),
}
"""The verbs, each a function with a line about it."""
