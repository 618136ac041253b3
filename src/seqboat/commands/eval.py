"""`seqboat eval`: score a trained run on held-out data."""

from __future__ import annotations

import argparse
import json
import math
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("run", help="folder of a run, or one checkpoint (step-N) in it")
    parser.add_argument("--split", choices=("train", "val", "test"), default="test", help="what to score")
    parser.add_argument("--which", choices=("best", "latest"), default="best", help="which checkpoint")
    parser.add_argument("--batch_size", type=int, help="examples at a time (default: the run's)")
    parser.add_argument("--limit", type=int, help="score only so many examples")
    parser.add_argument("--data_dir", help="where the prepared data is (default: the run's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.display import metric_text, rate_text
    from seqboat.evaluate import evaluate_run

    for name in ("batch_size", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be an integer >= 1, got {value}")
    result = evaluate_run(
        options.run,
        options.split,
        options.which,
        options.batch_size,
        options.limit,
        {"data_dir": options.data_dir} if options.data_dir else None,
        show_progress if sys.stderr.isatty() else None,
    )
    if options.json:
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()}
        print(json.dumps(plain))
    else:
        print(f"{result['run']}, step {result['step']}, {result['examples']:,} examples of {result['split']}")
        print(f"{metric_text(result)}  active % {rate_text(result['activation'])}")
    return 0


def show_progress(done: int, batches: int) -> None:
    """Count batches on one line of the terminal."""
    print(f"\r{done}/{batches} batches", end="\n" if done == batches else "", file=sys.stderr, flush=True)
