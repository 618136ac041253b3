"""`seqboat eval`: score a run on held-out data, or files with a language model."""

from __future__ import annotations

import json as jsons
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from seqboat.cli.options import Control, Shared
from seqboat.cli.parser import Count, Size

if TYPE_CHECKING:
    from seqboat.run import Run
    from seqboat.text.score import Scores
    from seqboat.training.evaluate import Streaming, Windows


def run(
    run: str,
    *files: str,
    split: Literal["train", "val", "test"] = "test",
    limit: Count | None = None,
    batch_size: Count | None = None,
    mode: Literal["windows", "stream"] | None = None,
    window: Count | None = None,
    context: Size | None = None,
    chunk: Count | None = None,
    per_token: bool = False,
    json: bool = False,
    control: Control,
    shared: Shared,
    fields: Sequence[str] = (),
) -> int:
    """Score a run on held-out data, or files with a language model.

    Args:
        run: folder of a run, a checkpoint (step-N) in it, or a bundled model: enwik8-small.
        files: score these with a language model, a line of JSON for each; - is standard input.
        split: what to score.
        limit: score at most N examples; with --mode, the first N tokens.
        batch_size: examples at a time (default: the run's).
        mode: read a long text in overlapping windows, or once with a carried state (default: as in training).
        window: tokens in a window (default: 8192).
        context: tokens of context before the scored ones (default: 7000).
        chunk: tokens to read at a time, of a stream or a file (default: 8192).
        per_token: with files, also a line for every byte.
        json: print one JSON object.

    examples:
      seqboat eval runs/reviews --data.test new.csv         settings of the data
      seqboat eval enwik8-small --per-token log.txt | jq -c 'select(.bits > 15)'
    """
    from seqboat.run import Run

    if files:
        given = {"--limit": limit, "--mode": mode, "--json": json, "overrides": control.record()}
        wrong = [name for name, value in given.items() if value]
        if wrong:
            raise ValueError(f"{wrong[0]} cannot be used with files")
        return score_files(run, files, per_token, chunk, shared)
    if per_token:
        raise ValueError("--per-token needs files to score")
    reading = make_reading(mode, {"window": window, "context": context, "chunk": chunk})
    device = shared.chosen()
    source = Run(run, shared.which, shared.fields(fields))
    changed = control.record()
    result = source.evaluate(
        split,
        batch_size=batch_size,
        limit=limit,
        progress=show_progress if sys.stderr.isatty() else None,
        reading=reading,
        device=device,
        control=control.applied if changed else None,
        details=True,
    )
    if changed:
        result["control"] = changed
    tell(result, source, control, json)
    return 0


def tell(result: dict[str, Any], source: Run, control: Control, as_json: bool) -> None:
    """Print the scores of a split."""
    from seqboat.console import printable
    from seqboat.training.display import metric_text, rate_text
    from seqboat.training.plan import baseline_text
    from seqboat.training.record import read_told

    baselines = read_told(source.folder).get("baselines")
    if baselines:
        result["baselines"] = baselines
    if as_json:
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()}
        print(jsons.dumps(plain))
        return
    what = f"{result['examples']:,} examples of {result['split']}"
    if "mode" in result:
        what = f"{result['tokens']:,} tokens of {result['split']}, {reading_text(result)}"
    print(f"{result['run']}, step {result['step']}, {what}")
    if control.record():
        print(f"overrides: {control.describe()}")
    print(f"{metric_text(result)}  active % {rate_text(result['activation'])}")
    if baselines and (text := baseline_text(baselines)):
        print(f"baselines on {baselines['split']}, {baselines['metric']}: {text}")
    for line in outcome_lines(result):
        print(printable(line))


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


def make_reading(mode: str | None, given: Mapping[str, int | None]) -> Windows | Streaming | None:
    """How to read a long text, if the options say so."""
    from seqboat.training.evaluate import Streaming, Windows

    kinds = {"windows": (Windows, ("window", "context")), "stream": (Streaming, ("chunk",))}
    for needed, (_, names) in kinds.items():
        for name in names:
            if given[name] is not None and mode != needed:
                got = "no --mode" if mode is None else f"--mode {mode}"
                raise ValueError(f"--{name} works only with --mode {needed}, got {got}")
    if mode is None:
        return None
    kind, names = kinds[mode]
    sizes: dict[str, Any] = {name: given[name] for name in names if given[name] is not None}
    return kind(**sizes)


def reading_text(result: dict[str, Any]) -> str:
    """How a text was read, in words."""
    if result["mode"] == "stream":
        return "read once with a carried state"
    return f"in windows of {result['window']:,} with at least {result['context']:,} of context"


def show_progress(done: int, batches: int) -> None:
    """Count batches on one line of the terminal."""
    print(f"\r{done}/{batches} batches", end="\n" if done == batches else "", file=sys.stderr, flush=True)


def score_files(run: str, files: Sequence[str], per_token: bool, chunk: int | None, shared: Shared) -> int:
    """Bits per byte of files by a language model; each is scored by itself, its first byte costs 8 bits."""
    from seqboat.run import Run
    from seqboat.text.score import CHUNK, read_chunks, score, total

    for name in files:
        if name != "-" and not Path(name).is_file():
            raise ValueError(f"{name} is not a file")
    if files.count("-") > 1:
        raise ValueError("standard input (-) can be read only once")
    device = shared.chosen()
    model = Run(run, shared.which).language_model.to(device)
    for name in files:
        with sys.stdin.buffer if name == "-" else open(name, "rb") as file:
            parts: Iterable[Scores] = score(model, read_chunks(file, chunk or CHUNK))
            if sys.stderr.isatty():
                parts = show_bytes(name, parts)
            if per_token:
                parts = print_tokens(name, parts)
            sums = total(parts)
        line = {
            "file": name,
            "bytes": sums.tokens,
            "bits": sums.bits,
            "bits_per_byte": sums.bits_per_token,
            "activation": sums.activation,
        }
        print(jsons.dumps(line), flush=True)
    return 0


def print_tokens(name: str, parts: Iterable[Scores]) -> Iterator[Scores]:
    """Print a line for every byte that goes by."""
    position = 0
    for part in parts:
        lines = []
        for i, (token, bits) in enumerate(zip(part.tokens.tolist(), part.bits.tolist(), strict=True)):
            active = [None if layer is None else bool(layer[i]) for layer in part.active]
            line = {"file": name, "position": position + i, "byte": token, "bits": bits, "active": active}
            lines.append(jsons.dumps(line) + "\n")
        position += len(lines)
        sys.stdout.write("".join(lines))
        yield part


def show_bytes(name: str, parts: Iterable[Scores]) -> Iterator[Scores]:
    """Count bytes on one line of the terminal."""
    done, bits = 0, 0.0
    for part in parts:
        done, bits = done + len(part.tokens), bits + float(part.bits.sum())
        print(
            f"\r{name}: {done:,} bytes, {bits / done:.4f} bits per byte",
            end="",
            file=sys.stderr,
            flush=True,
        )
        yield part
    print("\r\033[K", end="", file=sys.stderr, flush=True)
