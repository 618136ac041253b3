"""`seqboat export-published`: write a run as a checkpoint of the published implementation."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run", help="folder of a run, or one checkpoint (step-N) in it")
    parser.add_argument("file", help="fairseq checkpoint to write; must not exist")
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="published data whose dictionaries number the tokens (default: new ones next to the file)",
    )
    parser.add_argument("--which", choices=("best", "latest"), default="best", help="which checkpoint")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.compat.runs import export_run
    from seqboat.training.checkpoint import CheckpointError

    try:
        done = export_run(options.run, options.file, options.data, options.which)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    print(f"{done.file}: a checkpoint of the published implementation")
    for path in done.dictionaries:
        print(f"{path}: its dictionary")
    return 0
