"""`seqboat predict`: answers of a trained run for inputs without labels."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

TAKES_FIELDS = True
"""Arguments that argparse does not know change the data of the run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """\
  seqboat predict runs/classify new.csv --out answers.csv
  seqboat predict runs/classify --text "a fine film"
  printf 'one text\\nanother\\n' | seqboat predict runs/classify -
  seqboat predict runs/classify new.csv --data.text_column=body

Rows that cannot be read keep their place in the output; the column `error` gives the reason."""
    parser.add_argument("run", help="folder of a run, or one checkpoint in it (not a language model)")
    parser.add_argument(
        "file", nargs="?", help="table or folder of inputs; - reads one text per line from standard input"
    )
    parser.add_argument(
        "--text", action="append", metavar="TEXT", help="a text instead of a file; repeatable"
    )
    parser.add_argument("--out", metavar="FILE", help="where to write (default: standard output)")
    parser.add_argument(
        "--format",
        choices=("csv", "jsonl"),
        help="output format (default: from the name of --out, otherwise csv)",
    )
    parser.add_argument(
        "--probabilities",
        action="store_true",
        help="write the probability of every label, not just the best one",
    )
    parser.add_argument(
        "--activation", action="store_true", help="write the fraction of tokens that attended"
    )
    parser.add_argument(
        "--which", choices=("best", "latest"), default="best", help="which checkpoint (default: best)"
    )
    parser.add_argument(
        "--batch-size", "--batch_size", metavar="N", type=int, help="inputs at a time (default: the run's)"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.data.files import replacing
    from seqboat.predict import Predictor
    from seqboat.training.parallel import choose_device

    if (options.file is None) == (not options.text):
        raise ValueError("give a file, a folder or - to predict from, or --text")
    device = choose_device(options.device, what="--device")
    predictor = Predictor(
        options.run, options.which, batch_size=options.batch_size, device=device, fields=options.fields
    )
    if options.text:
        texts = [text.encode("utf-8", "surrogateescape").decode(errors="replace") for text in options.text]
        answers: Iterable[dict[str, Any]] = predictor.predict(texts, activation=options.activation)
    elif options.file == "-":
        answers = _from_lines(predictor, sys.stdin, options.activation)
    else:
        answers = predictor.stream(options.file, activation=options.activation)
    kind = options.format or ("jsonl" if str(options.out).endswith((".jsonl", ".json")) else "csv")
    count = failed = 0

    def counted() -> Iterator[dict[str, Any]]:
        nonlocal count, failed
        for answer in answers:
            count += 1
            failed += "error" in answer
            yield answer

    columns = predictor.columns(options.probabilities, options.activation)
    if options.out is None:
        write(sys.stdout, kind, counted(), columns)
    else:
        with (
            replacing(Path(options.out), [options.file or ""], "--out") as partial,
            open(partial, "w", newline="", encoding="utf-8") as file,
        ):
            write(file, kind, counted(), columns)
    if failed:
        print(f"seqboat predict: {failed:,} of {count:,} rows could not be read", file=sys.stderr)
    return 0


def _from_lines(predictor: Any, lines: IO[str], activation: bool) -> Iterator[dict[str, Any]]:
    """Answers for one text per line; empty lines keep their place."""
    batch: list[str] = []
    number = 0

    def flush() -> Iterator[dict[str, Any]]:
        nonlocal number
        texts = [text for text in batch if text.strip()]
        answers = iter(predictor.predict(texts, activation=activation))
        for text in batch:
            number += 1
            place = f"line {number}"
            yield {**next(answers), "row": place} if text.strip() else {"row": place, "error": "empty text"}
        batch.clear()

    for line in lines:
        batch.append(line.rstrip("\r\n"))
        if len(batch) == 32 * predictor.batch_size:
            yield from flush()
    yield from flush()


def write(file: Any, kind: str, answers: Iterable[dict[str, Any]], columns: Sequence[str]) -> None:
    """Write answers as JSON lines, or as CSV with these columns."""
    if kind == "jsonl":
        detailed = any(column.startswith("p(") for column in columns)
        for answer in answers:
            if not detailed:
                answer.pop("probabilities", None)
            file.write(json.dumps(answer, ensure_ascii=False) + "\n")
        return
    writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for answer in answers:
        writer.writerow(_flat(answer))


def _flat(answer: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in answer.items():
        if name == "probabilities":
            flat |= {f"p({label})": f"{p:.6g}" for label, p in value.items()}
        elif name == "labels":
            flat[name] = "|".join(value)
        elif isinstance(value, list):
            flat[name] = json.dumps(value, ensure_ascii=False)
        elif isinstance(value, float):
            flat[name] = f"{value:.6g}"
        else:
            flat[name] = value
    return flat
