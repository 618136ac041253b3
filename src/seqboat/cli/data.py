"""`seqboat data`: see what data there is, prepare it, check it, look at it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqboat.console import format_bytes, printable

if TYPE_CHECKING:
    from seqboat.data.store import ArrayStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    shown = verbs.add_parser("list", help="what is there, what is missing, sizes and licenses")
    shown.add_argument("--json", action="store_true", help="print JSON")

    made = verbs.add_parser("prepare", help="make a data set ready for training")
    made.add_argument("names", nargs="+", metavar="NAME", help="data sets (seqboat data list)")
    made.add_argument(
        "--from",
        dest="origin",
        metavar="PATH|download|generate",
        help="a file or folder as distributed, or a folder that contains it "
        "(default: generate if possible, otherwise download)",
    )
    made.add_argument("--count", metavar="TRAIN,VAL,TEST", help="examples to generate")
    made.add_argument("--seed", type=int, default=0, help="seed of generated data (default: 0)")
    made.add_argument("--workers", type=int, help="processes that generate data (default: all cores)")
    made.add_argument("--strict", action="store_true", help="fail on bad records instead of skipping them")
    made.add_argument(
        "--unpickle",
        action="store_true",
        help="allow data stored as pickles of tensors (processed speech); no code in them is run",
    )
    made.add_argument("--force", action="store_true", help="prepare again even if the data is already there")

    checked = verbs.add_parser("verify", help="compare prepared data with its recorded hashes")
    checked.add_argument("names", nargs="*", metavar="NAME", help="data sets (default: all that are there)")

    looked = verbs.add_parser("show", help="print one example")
    looked.add_argument("task", metavar="TASK", help="a task with prepared data, or recall or copy")
    looked.add_argument("--split", default="train", choices=("train", "val", "test"))
    looked.add_argument("--index", type=int, default=0, help="number of the example (default: 0)")

    for verb in (shown, made, checked, looked):
        verb.add_argument("--data-dir", default="data", metavar="FOLDER", help="data folder (default: data)")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    return {"list": _list, "prepare": _prepare, "verify": _verify, "show": _show}[options.verb](options)


def _find(root: str, name: str) -> tuple[ArrayStore | None, str | None]:
    """The prepared data, if there is any, and what is wrong with it, if anything."""
    from seqboat.data.store import MANIFEST, ArrayStore, MissingData

    if not (Path(root) / name / MANIFEST).exists():
        return None, None
    try:
        return ArrayStore.find(root, name), None
    except MissingData as error:
        return None, str(error)


def _list(options: argparse.Namespace) -> int:
    from seqboat.data.prepare import DATASETS, DOWNLOADS

    rows: list[dict[str, Any]] = []
    for name, info in DATASETS.items():
        store, problem = _find(options.data_dir, name)
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
    if options.json:
        print(json.dumps(rows, indent=1))
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
            print(f"{'':38} then: seqboat data prepare {row['name']}{_how(row['name'])}")
    downloads = Path(options.data_dir) / DOWNLOADS
    print(f"\nPrepared data is in {Path(options.data_dir)}, downloaded files are in {downloads}.")
    return 0


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{split} {counts[split]:,}" for split in ("train", "val", "test") if split in counts)


def _how(name: str) -> str:
    from seqboat.data.prepare import DATASETS

    return "" if DATASETS[name].draw is not None else " --from PATH   (or: --from download)"


def _prepare(options: argparse.Namespace) -> int:
    from seqboat.data.prepare import find_dataset, prepare

    counts = None
    if options.count is not None:
        fields = options.count.replace("_", "").split(",")
        if not all(field.isdigit() for field in fields):
            raise ValueError(f"--count must be three numbers such as 1000,100,100; got {options.count!r}")
        counts = tuple(int(field) for field in fields)
    for name in options.names:
        find_dataset(name)
    for name in options.names:
        before, _ = _find(options.data_dir, name)
        store = prepare(
            name,
            options.origin,
            options.data_dir,
            counts=counts,
            seed=options.seed,
            workers=options.workers,
            strict=options.strict,
            force=options.force,
            unpickle=options.unpickle,
        )
        manifest = store.manifest
        counted = _counted(manifest["counts"])
        if before is not None and not options.force:
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


def _verify(options: argparse.Namespace) -> int:
    from seqboat.data.prepare import DATASETS, find_dataset
    from seqboat.data.store import ArrayStore

    for name in options.names:
        find_dataset(name)
    names = options.names or [n for n in DATASETS if (Path(options.data_dir) / n).exists()]
    for name in names:
        ArrayStore.find(options.data_dir, name).verify()
        print(f"{name}: unchanged since it was prepared")
    if not names:
        print(f"{options.data_dir} contains no prepared data")
    return 0


def _show(options: argparse.Namespace) -> int:
    from seqboat.data.prepare import DATASETS
    from seqboat.tasks import TASKS
    from seqboat.tasks.stored import StoredTaskConfig

    configs = {name: make() for name, make in TASKS.items() if not getattr(make, "own_data", False)}
    configs |= {name: info.task for name, info in DATASETS.items()}
    if options.task not in configs:
        raise ValueError(f"no task {options.task!r} to show: there are {', '.join(configs)}")
    config = configs[options.task]
    if isinstance(config, StoredTaskConfig):
        config = replace(config, data_dir=options.data_dir)
    task = config.build()
    dataset = task.dataset(options.split)
    if not 0 <= options.index < len(dataset):
        raise ValueError(f"--index must be from 0 to {len(dataset) - 1}, got {options.index}")
    print(printable(task.show(dataset[options.index]), lines=True))
    return 0
