"""`seqboat export-hf`: write a trained run as a folder that Hugging Face transformers loads."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "run", help="folder of a run, one checkpoint (step-N) in it, or a bundled model: enwik8-small"
    )
    parser.add_argument("folder", help="where to write; must be empty or not exist")
    parser.add_argument("--which", choices=("best", "latest"), default="best", help="which checkpoint")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.training.checkpoint import CheckpointError

    try:
        import seqboat.hf  # noqa: F401 - says what to install
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
    from transformers.utils import logging

    from seqboat.hf.export import export_run

    logging.disable_progress_bar()
    try:
        done = export_run(options.run, options.folder, options.which)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    count = sum(parameter.numel() for parameter in done.model.parameters())
    print(f"{done.folder}: {type(done.model).__name__}, {count:,} parameters")
    inputs = "token ids are those of the task"
    if done.model.config.channels is not None:
        inputs = "the model reads real values (input_values)"
    kinds = {"bytes": "tokenizer: bytes", "own": "tokenizer: the one that the run was trained with"}
    print(kinds[done.tokenizer] if done.tokenizer else f"no tokenizer: {inputs}")
    print("load it after `import seqboat.hf`, which registers the model type")
    return 0
