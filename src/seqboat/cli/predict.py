"""`seqboat predict`: answers of a trained model for inputs without labels."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

TAKES_FIELDS = True
"""Arguments that argparse does not know change the data of the run."""

Answers = Iterable[tuple[Mapping[str, Any], dict[str, Any]]]
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of cells that a spreadsheet takes for a formula."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.usage = f"{parser.prog} RUN [FILE] [options]"
    parser.epilog = """\
  seqboat predict model new.csv --out answers.csv
  seqboat predict model --text "a fine film"
  printf 'one text\\nanother\\n' | seqboat predict model -
  seqboat predict model new.csv --data.text_column=body

Every column of the input comes back, then the answer. Rows that cannot be read keep their place: `error` says why.
`cut` counts the tokens that were too many. Cells that look like formulas get a ' in front."""
    parser.add_argument("run", help="folder of a run, or one checkpoint in it (not a language model)")
    parser.add_argument(
        "file", nargs="?", help="table or folder of inputs; - reads one text per line from standard input"
    )
    parser.add_argument(
        "--text", action="append", metavar="TEXT", help="a text instead of a file; repeatable"
    )
    parser.add_argument("--out", metavar="FILE", help="where to write (default: standard output)")
    parser.add_argument(
        "--format", choices=("csv", "jsonl"), help="default: from the name of --out, otherwise csv"
    )
    parser.add_argument("--probabilities", action="store_true", help="write the probability of every label")
    parser.add_argument(
        "--activation", action="store_true", help="write the fraction of tokens that attended"
    )
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="answer every N-th row, from row I on (0/4, 1/4, ...); adds a column input_row",
    )
    parser.add_argument(
        "--which", choices=("best", "latest"), default="best", help="which checkpoint (default: best)"
    )
    parser.add_argument(
        "--batch-size", "--batch_size", metavar="N", type=int, help="inputs at a time (default: the run's)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the data, as in train (the same as --data.NAME=VALUE)",
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.data.files import replacing
    from seqboat.predict import Predictor
    from seqboat.training.parallel import choose_device

    if (options.file is None) == (not options.text):
        raise ValueError("give a file, a folder or - to predict from, or --text")
    shard = None if options.shard is None else read_shard(options.shard)
    device = choose_device(options.device, what="--device")
    fields = [*options.fields, *(f"--data.{setting}" for setting in options.set)]
    predictor = Predictor(
        options.run, options.which, batch_size=options.batch_size, device=device, fields=fields
    )
    answers: Answers
    if options.text:
        texts = [text.encode("utf-8", "surrogateescape").decode(errors="replace") for text in options.text]
        found = predictor.predict(texts, activation=options.activation)
        answers = [({"row": number}, answer) for number, answer in enumerate(found)]
    elif options.file == "-":
        answers = _from_lines(predictor, sys.stdin, options.activation)
    else:
        answers = predictor.stream(options.file, activation=options.activation, shard=shard)
    kind = options.format or ("jsonl" if str(options.out).endswith((".jsonl", ".json")) else "csv")
    count = failed = 0

    def counted() -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
        nonlocal count, failed
        for values, answer in answers:
            count += 1
            failed += "error" in answer
            yield values, answer

    columns = predictor.columns(options.probabilities, options.activation)
    if options.out is None:
        write(sys.stdout, kind, counted(), columns)
    else:
        inputs = [] if options.file in (None, "-") else [Path(options.file)]
        with (
            replacing(Path(options.out), inputs, "--out") as partial,
            open(partial, "w", newline="", encoding="utf-8") as file,
        ):
            write(file, kind, counted(), columns)
    if failed:
        print(f"seqboat predict: {failed:,} of {count:,} rows could not be read", file=sys.stderr)
    return 0


def read_shard(text: str) -> tuple[int, int]:
    """A part of how many.

    >>> read_shard("1/4")
    (1, 4)
    """
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"--shard must be I/N with I from 0 to N - 1, such as 0/4, got {text!r}")
    return int(part), int(parts)


def _from_lines(predictor: Any, lines: IO[str], activation: bool) -> Answers:
    """Answers for one text per line; empty lines keep their place."""
    batch: list[str] = []
    number = 0

    def flush() -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
        nonlocal number
        texts = [text for text in batch if text.strip()]
        answers = iter(predictor.predict(texts, activation=activation))
        for text in batch:
            number += 1
            yield {"row": f"line {number}"}, next(answers) if text.strip() else {"error": "empty text"}
        batch.clear()

    for line in lines:
        batch.append(line.rstrip("\r\n"))
        if len(batch) == 32 * predictor.batch_size:
            yield from flush()
    yield from flush()


def write(file: Any, kind: str, answers: Answers, columns: Sequence[str]) -> None:
    """Write the columns of inputs and their answers as JSON lines, or as CSV.

    An answer whose name is that of a column is called `predicted_NAME`.
    """
    writer: Any = None
    names: dict[str, str] = {}
    given: list[str] = []
    waiting: list[tuple[Mapping[str, Any], dict[str, Any]]] = []
    detailed = any(column.startswith("p(") for column in columns)
    shown = file.isatty() if hasattr(file, "isatty") else False

    def put(values: Mapping[str, Any], answer: dict[str, Any]) -> None:
        if not detailed:
            answer.pop("probabilities", None)
        if kind == "jsonl":
            renamed = {_free(name, values): value for name, value in answer.items()}
            file.write(json.dumps({**values, **renamed}, ensure_ascii=False, default=str) + "\n")
            return
        row = {_cell(name): value for name, value in values.items() if name in given}
        row |= {names[name]: value for name, value in _flat(answer).items() if name in names}
        writer.writerow({name: _cell(value, shown) for name, value in row.items()})

    for values, answer in answers:
        # a row that cannot be read has no columns: wait for one that has
        if writer is None and kind == "csv":
            waiting.append((values, answer))
            if values:
                given = [*values]
                names = {name: _free(name, values) for name in columns}
                writer = csv.DictWriter(
                    file,
                    [*map(_cell, given), *names.values()],
                    restval="",
                    extrasaction="ignore",
                    lineterminator="\n",
                )
                writer.writeheader()
                for pair in waiting:
                    put(*pair)
            continue
        put(values, answer)
    if writer is None and kind == "csv":
        names = {name: name for name in columns}
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for pair in waiting:
            put(*pair)


def _free(name: str, values: Mapping[str, Any]) -> str:
    return f"predicted_{name}" if name in values else name


def _cell(value: Any, shown: bool = False) -> Any:
    """A cell that no spreadsheet runs, and on a terminal one that moves no cursor.

    >>> _cell("=1+1"), _cell("-4.5"), _cell("good")
    ("'=1+1", '-4.5', 'good')
    """
    if isinstance(value, list | dict | tuple):
        value = json.dumps(value, ensure_ascii=False, default=str)
    if not isinstance(value, str):
        return value
    if shown:
        from seqboat.console import printable

        value = printable(value)
    if value.startswith(FORMULA):
        try:
            float(value)
        except ValueError:
            return "'" + value
    return value


def _flat(answer: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in answer.items():
        if name == "probabilities":
            flat |= {f"p({label})": f"{p:.6g}" for label, p in value.items()}
        elif name == "labels":
            flat[name] = "|".join(value)
        elif isinstance(value, float):
            flat[name] = f"{value:.6g}"
        else:
            flat[name] = value
    return flat
