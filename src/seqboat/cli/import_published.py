"""`seqboat import-published`: make a run of a checkpoint of the published implementation."""

from __future__ import annotations

import argparse
import sys

RECIPES = (
    "lra.listops",
    "lra.text",
    "lra.retrieval",
    "lra.image",
    "lra.pathfinder",
    "lra.pathx",
    "speech",
    "enwik8",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("file", help="fairseq checkpoint, such as checkpoint_best.pt")
    parser.add_argument("out", help="folder of the run to write; must be empty or not exist")
    parser.add_argument(
        "--unpickle",
        action="store_true",
        help="allow reading the pickle: only tensors, settings and plain values; no code in it is run",
    )
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="published data with the model's dictionaries (src-bin/dict.txt, or dict.txt); needed by models "
        "that read tokens",
    )
    parser.add_argument(
        "--recipe", choices=RECIPES, help="recipe of the same task (default: from the architecture's name)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if not options.unpickle:
        raise ValueError(
            f"{options.file} is a pickle: pass --unpickle to read it. Names outside of a short list are "
            "refused, and nothing in the file is run"
        )
    from seqboat.compat.runs import import_run
    from seqboat.console import printable
    from seqboat.training.checkpoint import CheckpointError

    try:
        done = import_run(options.file, options.out, options.data, options.recipe)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    count = sum(parameter.numel() for parameter in done.model.parameters())
    print(f"{done.folder}: {type(done.model).__name__} for {done.config.recipe}, {count:,} parameters")
    for note in done.notes:
        print(printable(note), file=sys.stderr)
    return 0
