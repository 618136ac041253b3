"""`seqboat eval`: score a trained run on held-out data."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from seqboat.cli.control import add_control_arguments, read_control

if TYPE_CHECKING:
    from seqboat.training.evaluate import Streaming, Windows


TAKES_FIELDS = True
"""Arguments that argparse does not know change the data of the run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = "To change settings of the data: seqboat eval runs/classify --data.test new.csv"
    parser.add_argument(
        "run", help="folder of a run, one checkpoint (step-N) in it, or a bundled model: enwik8-small"
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
    from seqboat.console import printable
    from seqboat.run import Run
    from seqboat.training.display import metric_text, rate_text
    from seqboat.training.parallel import choose_device
    from seqboat.training.plan import baseline_text
    from seqboat.training.record import read_told

    for name in ("batch_size", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be an integer >= 1, got {value}")
    reading = make_reading(options)
    control = read_control(options)
    fields = [*([f"--data.data_dir={options.data_dir}"] if options.data_dir else []), *options.fields]
    device = choose_device(options.device, what="--device")
    source = Run(options.run, options.which, fields)
    result = source.evaluate(
        options.split,
        batch_size=options.batch_size,
        limit=options.limit,
        progress=show_progress if sys.stderr.isatty() else None,
        reading=reading,
        device=device,
        control=None if control is None else control.applied,
        details=True,
    )
    if control is not None:
        result["control"] = control.record()
    baselines = read_told(source.folder).get("baselines")
    if baselines:
        result["baselines"] = baselines
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
        if baselines and (text := baseline_text(baselines)):
            print(f"baselines on {baselines['split']}, {baselines['metric']}: {text}")
        for line in outcome_lines(result):
            print(printable(line))
    return 0


LISTED = 30
"""Classes to list; of more, those with the lowest F1."""
GRID = 12
"""Classes up to which the whole confusion matrix is printed."""


def outcome_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Scores of every class, confusions and the worst errors, as lines."""
    classes = result.get("classes")
    if classes:
        yield from _class_lines(classes)
    confusion = result.get("confusion")
    if confusion and len(confusion) <= GRID:
        yield from _grid_lines([row["label"] for row in classes or ()], confusion)
    elif result.get("confused"):
        yield ""
        yield "most frequent confusions"
        for pair in result["confused"]:
            yield f"  {pair['label']} predicted as {pair['predicted']}: {pair['count']:,}"
    if result.get("worst"):
        yield ""
        yield "worst errors (example, label, prediction, beginning of the input)"
        for error in result["worst"]:
            yield f"  {error['example']}  {error_text(error)}  {error['input']}"


def error_text(error: Mapping[str, Any]) -> str:
    """The label of a wrong answer, and the answer."""
    label = "" if error["label"] is None else f"{error['label']} -> "
    sure = f" ({error['probability']:.0%})" if "probability" in error else ""
    return f"{label}{error['predicted']}{sure}"


def _class_lines(classes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    shown = list(classes)
    if len(shown) > LISTED:
        shown = sorted(shown, key=lambda row: -1.0 if row["f1"] is None else row["f1"])[:LISTED]
    wide = max(5, *(len(_cut(row["label"])) for row in shown))
    yield ""
    more = f" ({LISTED} of {len(classes):,}, lowest F1 first)" if len(classes) > LISTED else ""
    yield f"{'class':{wide}}  precision  recall      F1    count  predicted{more}"
    for row in shown:
        scores = ["-" if row[k] is None else f"{row[k]:.4f}" for k in ("precision", "recall", "f1")]
        yield (
            f"{_cut(row['label']):{wide}}  {scores[0]:>9}  {scores[1]:>6}  {scores[2]:>6}  "
            f"{row['count']:7,}  {row['predicted']:9,}"
        )
    from seqboat.tasks.outcomes import macro_f1

    mean = macro_f1(classes)
    yield f"{'mean':{wide}}  {'':9}  {'':6}  {'-' if mean is None else f'{mean:.4f}':>6}"


def _grid_lines(labels: Sequence[str], confusion: Sequence[Sequence[int]]) -> Iterator[str]:
    names = [_cut(label) for label in labels]
    wide = max(map(len, names))
    cell = [max(len(name), *(len(f"{row[i]:,}") for row in confusion)) for i, name in enumerate(names)]
    yield ""
    yield "confusion (rows: label, columns: prediction)"
    yield " " * wide + "".join(f"  {name:>{size}}" for name, size in zip(names, cell, strict=True))
    for name, row in zip(names, confusion, strict=True):
        yield f"{name:{wide}}" + "".join(f"  {count:>{size},}" for count, size in zip(row, cell, strict=True))


def _cut(label: str, size: int = 24) -> str:
    return label if len(label) <= size else label[: size - 1] + "…"


def make_reading(options: argparse.Namespace) -> Windows | Streaming | None:
    """How to read a long text, if the options say so."""
    from seqboat.training.evaluate import Streaming, Windows

    kinds = {"windows": (Windows, ("window", "context")), "stream": (Streaming, ("chunk",))}
    for mode, (_, names) in kinds.items():
        for name in names:
            if getattr(options, name) is not None and options.mode != mode:
                raise ValueError(f"--{name} works only with --mode {mode}, got {_mode_text(options.mode)}")
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
