"""`seqboat eval`: score a trained run on held-out data."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from seqboat.commands.control import add_control_arguments, read_control

if TYPE_CHECKING:
    from seqboat.training.evaluate import Streaming, Windows


TAKES_FIELDS = True
"""Arguments that argparse does not know change the data of the run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = "Settings of the data can be changed: seqboat eval runs/classify --data.test new.csv"
    parser.add_argument(
        "run", help="folder of a run, one checkpoint (step-N) in it, or a shipped model: enwik8-small"
    )
    parser.add_argument(
        "--split", choices=("train", "val", "test"), default="test", help="what to score (default: test)"
    )
    parser.add_argument(
        "--which", choices=("best", "latest"), default="best", help="which checkpoint (default: best)"
    )
    parser.add_argument(
        "--batch-size", "--batch_size", metavar="N", type=int, help="examples at a time (default: the run's)"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="score at most N examples; with --mode, the first N tokens"
    )
    parser.add_argument(
        "--mode",
        choices=("windows", "stream"),
        help="how a language model reads a long text: in overlapping windows, or once with a carried state "
        "(default: as in training)",
    )
    parser.add_argument("--window", type=int, help="tokens in a window (default: 8192)")
    parser.add_argument(
        "--context", type=int, help="tokens of context before the scored ones (default: 7000)"
    )
    parser.add_argument("--chunk", type=int, help="tokens of a stream to read at a time (default: 8192)")
    parser.add_argument(
        "--data-dir", "--data_dir", metavar="FOLDER", help="where the prepared data is (default: the run's)"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_control_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.runs import Run
    from seqboat.training.display import metric_text, rate_text
    from seqboat.training.parallel import choose_device

    for name in ("batch_size", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be an integer >= 1, got {value}")
    reading = make_reading(options)
    control = read_control(options)
    fields = [*([f"--data.data_dir={options.data_dir}"] if options.data_dir else []), *options.fields]
    device = choose_device(options.device, what="--device")
    result = Run(options.run, options.which, fields).evaluate(
        options.split,
        batch_size=options.batch_size,
        limit=options.limit,
        progress=show_progress if sys.stderr.isatty() else None,
        reading=reading,
        device=device,
        control=None if control is None else control.applied,
    )
    if control is not None:
        result["control"] = control.record()
    if options.json:
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()}
        print(json.dumps(plain))
    else:
        what = f"{result['examples']:,} examples of {result['split']}"
        if "mode" in result:
            what = f"{result['tokens']:,} tokens of {result['split']}, {reading_text(result)}"
        print(f"{result['run']}, step {result['step']}, {what}")
        if control is not None:
            print(f"overrides: {control.describe()}")
        print(f"{metric_text(result)}  active % {rate_text(result['activation'])}")
    return 0


def make_reading(options: argparse.Namespace) -> Windows | Streaming | None:
    """How to read a long text, if the options say so."""
    from seqboat.training.evaluate import Streaming, Windows

    kinds = {"windows": (Windows, ("window", "context")), "stream": (Streaming, ("chunk",))}
    for mode, (_, names) in kinds.items():
        for name in names:
            if getattr(options, name) is not None and options.mode != mode:
                raise ValueError(f"--{name} goes with --mode {mode}, got {_mode_text(options.mode)}")
    if options.mode is None:
        return None
    kind, names = kinds[options.mode]
    return kind(**{name: getattr(options, name) for name in names if getattr(options, name) is not None})


def _mode_text(mode: str | None) -> str:
    return "no --mode" if mode is None else f"--mode {mode}"


def reading_text(result: dict[str, Any]) -> str:
    """How a text was read, in words."""
    if result["mode"] == "stream":
        return "read once with a carried state"
    return f"in windows of {result['window']:,} with at least {result['context']:,} of context"


def show_progress(done: int, batches: int) -> None:
    """Count batches on one line of the terminal."""
    print(f"\r{done}/{batches} batches", end="\n" if done == batches else "", file=sys.stderr, flush=True)
