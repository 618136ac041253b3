"""`seqboat intervene`: how much does each activation matter?"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seqboat.analysis.interventions import InterventionResult

TAKES_FIELDS = True
"""Arguments that argparse does not know change the data of the run."""

EPILOG = """\
Scores the run unchanged, without the attention of each layer in turn, with the attention of only one layer, with all
attention off (state-space layers alone), with all on (every token attends within its working memory), and with other
probability thresholds, all on the same examples. Errors are standard errors over the examples. The error of a change
is smaller than that of a score if both models are wrong on the same examples.

  seqboat intervene runs/listops --limit 500 --plot listops.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "run", nargs="?", help="folder of a run, or one checkpoint in it (default: the bundled model)"
    )
    parser.add_argument(
        "--split", choices=("train", "val", "test"), default="test", help="what to score (default: test)"
    )
    parser.add_argument(
        "--which", choices=("best", "latest"), default="best", help="which checkpoint (default: best)"
    )
    parser.add_argument("--limit", type=int, default=500, help="examples to score (default: 500)")
    parser.add_argument(
        "--batch-size", "--batch_size", metavar="N", type=int, help="examples at a time (default: the run's)"
    )
    parser.add_argument(
        "--thresholds", metavar="P,P", help="thresholds to try; '' for none (default: 0.1,0.2 up to 0.9)"
    )
    parser.add_argument(
        "--data-dir", "--data_dir", metavar="FOLDER", help="where the prepared data is (default: the run's)"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--plot", metavar="FILE", help="draw a figure: .svg, .pdf or .png")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    for name in ("limit", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be an integer >= 1, got {value}")
    thresholds = read_thresholds(options.thresholds)
    if options.plot is not None:
        check_plot(Path(options.plot))

    from seqboat.analysis.interventions import THRESHOLDS, intervene
    from seqboat.report.page import finite
    from seqboat.run import Run, find_run
    from seqboat.training.parallel import choose_device

    folder = find_run(options.run)
    outcomes, metric, examples = intervene(
        folder,
        options.split,
        options.limit,
        thresholds=THRESHOLDS if thresholds is None else thresholds,
        which=options.which,
        batch_size=options.batch_size,
        fields=[*([f"--data.data_dir={options.data_dir}"] if options.data_dir else []), *options.fields],
        device=choose_device(options.device, what="--device"),
        progress=show_progress if sys.stderr.isatty() else None,
    )
    if options.plot is not None:
        draw(outcomes, metric, Path(options.plot))
    if options.json:
        record = {
            "run": str(folder),
            "split": options.split,
            "examples": examples,
            "metric": metric,
            "outcomes": [outcome.as_record() for outcome in outcomes],
        }
        print(json.dumps(finite(record)))
    else:
        shown = folder.name if Run(folder).shipped else str(folder)
        print(f"{shown}, {examples:,} examples of {options.split}")
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


def draw(outcomes: Sequence[InterventionResult], metric: str, path: Path) -> None:
    """The same as a picture."""
    from seqboat.analysis.interventions import intervention_figure
    from seqboat.plotting import save_figure

    forced = {
        outcome.setting.name: (outcome.metrics[metric], outcome.error)
        for outcome in outcomes[1:]
        if outcome.setting.threshold is None
    }
    moved = {
        outcome.setting.threshold: (outcome.metrics[metric], outcome.error, outcome.rate)
        for outcome in outcomes
        if outcome.setting.threshold is not None and math.isfinite(outcome.metrics[metric])
    }
    usual = (outcomes[0].metrics[metric], outcomes[0].error)
    save_figure(intervention_figure(forced, moved, metric=metric, usual=usual), path)


def show_progress(outcome: InterventionResult, done: int, settings: int) -> None:
    """Count settings on one line of the terminal."""
    end = "\n" if done == settings else ""
    print(f"\r\033[K{done}/{settings} {outcome.setting.name}", end=end, file=sys.stderr, flush=True)
