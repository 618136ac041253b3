"""`seqboat explain`: which tokens attended in one input; without an input, what attention contributes."""

from __future__ import annotations

import contextlib
import json as jsons
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from seqboat.cli.options import Control, Shared, read_layers
from seqboat.cli.parser import Count
from seqboat.console import typed_bytes

if TYPE_CHECKING:
    from seqboat.analysis.interventions import InterventionResult
    from seqboat.analysis.traces import Examples
    from seqboat.report.explain import Sequences
    from seqboat.tasks.task import Task

MOST = 64 << 20
"""Bytes of a file beyond which it is refused."""


def run(
    run: str | None = None,
    *,
    text: Sequence[str] = (),
    file: Sequence[str] = (),
    image: Sequence[str] = (),
    wav: Sequence[str] = (),
    layer: str | None = None,
    color: Literal["auto", "always", "never"] = "auto",
    html: str | None = None,
    json: bool = False,
    split: Literal["train", "val", "test"] = "test",
    limit: Count = 500,
    batch_size: Count | None = None,
    thresholds: str | None = None,
    plot: Path | None = None,
    control: Control,
    shared: Shared,
    fields: Sequence[str] = (),
) -> int:
    """Show which tokens attended in an input; without an input, measure on held-out data what attention contributes.

    Args:
        run: folder of a run, or a checkpoint in it (default: the bundled model).
        text: the input: text, or tokens of the task. Tasks that compare two sequences take two inputs.
        file: the input: a text file; - is standard input.
        image: the input: an image.
        wav: the input: a sound file.
        layer: show only these layers, such as 2 or 1,3.
        color: mark what attended with colors.
        html: also write an interactive page.
        json: print one JSON object.
        split: without an input: what to score, with routers as they are and overridden layer by layer.
        limit: without an input: examples to score.
        batch_size: without an input: examples at a time (default: the run's).
        thresholds: without an input: probabilities to try, such as 0.3,0.7 (default: 0.1 to 0.9).
        plot: without an input: draw a figure, .svg, .pdf or .png.

    examples:
      seqboat explain runs/listops --text "[MAX 2 9 [MIN 4 7 ] 0 ]"
    """
    inputs = {"text": text, "file": file, "image": image, "wav": wav}
    given = [(kind, value) for kind, values in inputs.items() for value in values]
    if not given:
        wrong = {"--layer": layer, "--html": html, "overrides": control.record()}
        for name in [name for name, value in wrong.items() if value]:
            raise ValueError(f"{name} needs an input: --text, --file, --image or --wav")
        tried = read_thresholds(thresholds)
        return contribution(run, split, limit, batch_size, tried, plot, json, shared, fields)
    if plot is not None or thresholds is not None:
        raise ValueError(f"{'--plot' if plot else '--thresholds'} cannot be used with an input")
    return one_input(run, given, layer, color, html, json, control, shared, fields)


def one_input(
    run: str | None,
    given: Sequence[tuple[str, str]],
    layer: str | None,
    color: str,
    html: str | None,
    as_json: bool,
    control: Control,
    shared: Shared,
    fields: Sequence[str],
) -> int:
    """What the model makes of one input, and which tokens attended."""
    from seqboat.analysis.traces import sites
    from seqboat.core.checks import check_output
    from seqboat.report.explain import as_record, explain, longest, render, subject
    from seqboat.report.page import finite
    from seqboat.run import Run, find_run

    folder = find_run(run)
    if html is not None:
        check_output("--html", Path(html))
    lengths: list[int] = []

    def read(task: Task) -> Sequences:
        parts = tuple(read_input(task, kind, value) for kind, value in given)
        lengths.extend(len(part) for part in parts)
        return parts

    examples = subject(folder, read, shared.which, shared.fields(fields))
    most = longest(examples.task)
    if max(lengths) > most:
        print(f"only the first {most:,} of {max(lengths):,} tokens are read", file=sys.stderr)
    layers = None
    if layer is not None:
        found = sites(examples.model)
        layers = sorted(number - 1 for number in read_layers("--layer", layer, found))
    with contextlib.nullcontext() if not control.record() else control.applied(examples.model):
        sample = explain(examples)
        if html is not None:
            write_html(Path(html), examples, str(folder))
    by_hand = {} if not control.record() else {"control": control.record()}
    if as_json:
        head = {"run": str(folder), "step": examples.step, "task": examples.task.name, **by_hand}
        print(jsons.dumps(finite(head | as_record(sample, examples.task, layers))))
        return 0
    shown = folder.name if Run(folder).shipped else str(folder)
    lines = [f"{shown}, step {examples.step}"]
    if control.record():
        lines.append(f"overrides: {control.describe()}")
    width = shutil.get_terminal_size().columns
    lines.append(render(sample, examples.task, layers, use_color(color), width))
    # a terminal that knows few characters shows question marks
    encoding = sys.stdout.encoding or "utf-8"
    print("\n".join(lines).encode(encoding, "replace").decode(encoding))
    return 0


def contribution(
    run: str | None,
    split: Literal["train", "val", "test"],
    limit: int,
    batch_size: int | None,
    thresholds: tuple[float, ...] | None,
    plot: Path | None,
    as_json: bool,
    shared: Shared,
    fields: Sequence[str],
) -> int:
    """Scores of the run unchanged, without the attention of each layer, with only one, with none, with all, and with
    other thresholds, on the same examples; errors are standard errors over the examples."""
    if plot is not None:
        check_plot(plot)

    from seqboat.analysis.interventions import THRESHOLDS, intervene, intervention_figure
    from seqboat.plotting import save_figure
    from seqboat.report.page import finite
    from seqboat.run import Run, find_run

    folder = find_run(run)
    outcomes, metric, examples = intervene(
        folder,
        split,
        limit,
        thresholds=THRESHOLDS if thresholds is None else thresholds,
        which=shared.which,
        batch_size=batch_size,
        fields=shared.fields(fields),
        device=shared.chosen(),
        progress=show_settings if sys.stderr.isatty() else None,
    )
    if plot is not None:
        save_figure(intervention_figure(outcomes, metric), plot)
    if as_json:
        record = {
            "run": str(folder),
            "split": split,
            "examples": examples,
            "metric": metric,
            "outcomes": [outcome.as_record() for outcome in outcomes],
        }
        print(jsons.dumps(finite(record)))
    else:
        shown = folder.name if Run(folder).shipped else str(folder)
        print(f"{shown}, {examples:,} examples of {split}")
        print("\n".join(table(outcomes, metric)))
    return 0


def read_thresholds(text: str | None) -> tuple[float, ...] | None:
    """The thresholds given on the command line; None if there are none."""
    if text is None:
        return None
    try:
        values = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ValueError(f"--thresholds must be numbers with commas between them, got {text!r}") from None
    for value in values:
        if not 0 <= value <= 1:
            raise ValueError(f"--thresholds must be between 0 and 1, got {value:g}")
    return values


def check_plot(path: Path) -> None:
    """Refuse what could not be written at the end."""
    from seqboat.core.checks import check_output
    from seqboat.core.extras import check_installed

    if path.suffix.lower() not in (".svg", ".pdf", ".png"):
        raise ValueError(f"--plot must end with .svg, .pdf or .png, got {path.name!r}")
    check_installed("matplotlib", "--plot")
    check_output("--plot", path)


def table(outcomes: Sequence[InterventionResult], metric: str) -> list[str]:
    """A line per setting: score and change with their standard errors, activation."""
    from seqboat.training.display import rate_text

    usual = outcomes[0].metrics[metric]
    wide = max(len(outcome.setting.name) for outcome in outcomes)
    lines = [f"{'':{wide}}  {metric + ' ± error':>17}  {'change ± error':>17}  active %, by layer"]
    for outcome in outcomes:
        score = outcome.metrics[metric]
        first = outcome is outcomes[0]
        change = "" if first else f"{score - usual:+.4f}{_error(outcome.change_error)}"
        rates = rate_text(outcome.activation)
        value = f"{score:.4f}{_error(outcome.error)}"
        lines.append(f"{outcome.setting.name:{wide}}  {value:>17}  {change:>17}  {rates}")
    return lines


def _error(value: float | None) -> str:
    return "" if value is None else f" ± {value:.4f}"


def show_settings(outcome: InterventionResult, done: int, settings: int) -> None:
    """Count settings on one line of the terminal."""
    end = "\n" if done == settings else ""
    print(f"\r\033[K{done}/{settings} {outcome.setting.name}", end=end, file=sys.stderr, flush=True)


def use_color(choice: str) -> bool:
    """Whether to write colors: https://no-color.org, and only to a terminal, unless told otherwise."""
    if choice != "auto":
        return choice == "always"
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def read_input(task: Task, kind: str, value: str) -> Any:
    """One input, from what was typed or from a file."""
    if kind == "text":
        if not value.strip():
            raise ValueError("--text must not be empty")
        return task.read_text(typed_bytes(value))
    content = read_bytes(kind, value)
    if kind == "file":
        return task.read_text(content)
    if kind == "wav":
        return _named(value, lambda: task.read_wav(content))
    return _named(value, lambda: task.read_image(read_pixels(content)))


def _named(name: str, read: Any) -> Any:
    """Errors with the name of the file in front."""
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def read_bytes(kind: str, name: str) -> bytes:
    """A file, or standard input."""
    try:
        if name == "-":
            content = sys.stdin.buffer.read(MOST + 1)
        else:
            with open(name, "rb") as file:
                content = file.read(MOST + 1)
    except OSError as error:
        raise ValueError(f"--{kind} {name} cannot be read: {error.strerror or error}") from error
    if not content:
        raise ValueError(f"--{kind} {name} is empty")
    if len(content) > MOST:
        raise ValueError(f"--{kind} {name} is too large: more than {MOST:,} bytes")
    return content


def read_pixels(content: bytes) -> Any:
    """(height, width) uint8: an image in gray."""
    from seqboat.own.inputs import read_picture

    return read_picture(content).round().astype("uint8")


def write_html(path: Path, examples: Examples, run: str) -> None:
    """A page to look into the input."""
    from seqboat.data.files import write_text
    from seqboat.report.explain import explain_page

    write_text(path, explain_page(examples, run))
