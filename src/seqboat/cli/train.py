"""`seqboat train`: train a recipe, with any of its settings changed."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from seqboat.own.fit import Progress
    from seqboat.training.config import RunConfig
    from seqboat.training.trainer import RunOutcome

TAKES_FIELDS = True
"""Arguments that argparse does not know are fields of the configuration."""
SURVIVES_OUTPUT = True
"""Hours of training do not depend on whether progress can be printed."""

BEGAN = time.monotonic()
"""When the command started: the minutes of a run include the import of torch."""

EPILOG = """\
Your own table, in the minutes you give; the task follows from the target column:
  seqboat train reviews.csv --target label --minutes 5 --out model
  seqboat train sensors.csv --target wear --series machine --channels load heat
  seqboat train logs.jsonl --target label --text events --set max_length=16000
  seqboat predict model new.csv --out answers.csv;  seqboat report model
Recipes, with any field set as --a.b=value (`seqboat train RECIPE --help` describes them all):
  seqboat train lra.listops-small --seed=1 --training.batch_size=16
  seqboat train recall --model.mixer.router sigmoid    (seqboat paper list recipes, ...)
  seqboat train lm --data.text notes/*.txt
  torchrun --nproc-per-node 8 --no-python seqboat train enwik8
Exit codes: 0 finished, 1 failure, 2 wrong usage, 3 diverged; 129, 130 and 143 stopped by SIGHUP, SIGINT or SIGTERM;
75 stopped by SIGUSR1. A stopped run of a recipe writes a checkpoint first; --resume continues it.
"""


STOPPED = (75, 129, 130, 143)
"""Exit codes of a run that a signal stopped, after it saved a checkpoint."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.usage = f"{parser.prog} [DATA or RECIPE] [options]"
    parser.epilog = EPILOG
    parser.add_argument("recipe", nargs="?", metavar="DATA or RECIPE", help="table, folder or recipe")
    own = parser.add_argument_group("your own data")
    own.add_argument("--target", metavar="COLUMN", help="what to learn: classes, numbers, or lists of tags")
    own.add_argument("--text", metavar="COLUMN", help="texts, or lists of words (default: found)")
    own.add_argument("--series", metavar="COLUMN", help="ids of series, in a table with one row per time")
    own.add_argument("--channels", metavar="COLUMN", nargs="+", default=[], help="columns of numbers")
    own.add_argument(
        "--minutes", type=float, default=5.0, help="for everything, reading included (default: 5)"
    )
    own.add_argument(
        "--set",
        dest="sets",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="any setting: max_length, tokens=bytes, group_column, split_column, val, steps, seed, d_model, lr, ...",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="JSON file of settings, in addition to a recipe or instead of one"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the run (default: runs/NAME)")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="RUN",
        help="start from the weights of a run or of a bundled model, with a new head",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    parser.add_argument(
        "--dry-run", action="store_true", help="estimate memory without reading data, and stop"
    )
    parser.add_argument(
        "--print-config", "--print_config", action="store_true", help="print the configuration and stop"
    )


SHOWN = (
    "data.",
    "model.mixer",
    "model.d_model",
    "model.num_layers",
    "optimizer.name",
    "optimizer.lr",
    "schedule.steps",
    "schedule.warmup_steps",
    "training.batch_size",
    "training.precision",
    "evaluation.every",
    "evaluation.patience",
    "seed",
)
"""Settings that the help of a recipe shows: those that people change, and whole groups."""
MOST_SHOWN = 32


def explain_recipe(name: str, fields: Sequence[str]) -> str:
    """What `seqboat train RECIPE --help` prints: the settings that people change, a line for each."""
    from seqboat.recipes import find_recipe
    from seqboat.training.settings_io import describe, override

    recipe = find_recipe(name)
    about = " ".join((recipe.__doc__ or "").split("\n\n")[0].split())
    lines = []
    for setting in describe(override(recipe(), fields, _say)):
        if setting.name in SHOWN or setting.name.startswith(tuple(part for part in SHOWN if part[-1] == ".")):
            line = f"  {f'--{setting.name} {setting.value}':<34} {setting.text}"
            lines.append(line if len(line) <= 116 else f"{line[:113]}...")
    settings = "\n".join(lines[:MOST_SHOWN])
    lead = (
        "Settings and their values; --print-config prints all, `seqboat train --help` has the other options"
    )
    return f"usage: seqboat train {name} [--SETTING VALUE ...]\n\n{about}\n\n{lead}:\n{settings}"


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.core.checks import naming
    from seqboat.recipes import find_recipe
    from seqboat.training.settings_io import override, read_config, to_json
    from seqboat.training.trainer import train

    if is_own_data(options):
        return train_own(options)
    config: RunConfig | None = None
    source: str | None = options.config
    if options.recipe is not None:
        config = dataclasses.replace(find_recipe(options.recipe)(), recipe=options.recipe)
    if options.config is not None:
        config = read_config(options.config, config, _say)
    if config is None and options.resume and options.out is not None:
        source = str(Path(options.out) / "config.json")
        config = read_config(source)
    if config is not None and options.start is not None:
        from seqboat.run import start_from

        config = start_from(config, options.start)
        if hasattr(config.task, "tokens"):
            # the weights know bytes
            config = config.replace(task={"tokens": "bytes"})
    if config is None:
        raise ValueError("give a recipe (seqboat paper list recipes), --config FILE, or --resume --out DIR")
    folder = Path(options.out or default_folder(config.recipe))
    is_first = os.environ.get("RANK", "0") == "0"
    with naming(source):
        config = override(config, options.fields, _say)
        if options.dry_run:
            from seqboat.training.plan import estimate

            print(estimate(config, processes=int(os.environ.get("WORLD_SIZE", "1"))).report())
            return 0
        if options.print_config:
            print(to_json(config), end="")
            return 0
        if options.config is None and options.recipe is not None:
            config = _adapted(config, options.fields)
        try:
            outcome = train(config, folder, resume=options.resume)
        except KeyboardInterrupt:
            # a second Ctrl-C: nothing is saved any more, but there may be a checkpoint from before
            if is_first and (folder / "config.json").exists():
                print(resume_line(folder), file=sys.stderr)
            raise
    if is_first:
        for line in _closing_lines(config, outcome, folder):
            print(line, file=sys.stderr if outcome.exit_code else sys.stdout)
        if outcome.exit_code in STOPPED:
            print(resume_line(folder), file=sys.stderr)
    return outcome.exit_code


def is_own_data(options: argparse.Namespace) -> bool:
    """Whether the first word is a file or a folder, not the name of a recipe."""
    from seqboat.own.tables import OTHER, SUFFIXES

    name = options.recipe
    if name is None:
        return bool(options.target)
    path = Path(name)
    return bool(options.target) or path.suffix.lower() in {**SUFFIXES, **OTHER} or path.is_dir()


def train_own(options: argparse.Namespace) -> int:
    """Train on the user's own table or folder."""
    from seqboat.own.describe import heading
    from seqboat.own.session import (
        TASKS,
        closing_lines,
        configure,
        fit_config,
        learn,
        look_at,
        split_settings,
        with_columns,
    )

    if options.recipe is None:
        raise ValueError("--target: name the table first: seqboat train data.csv --target COLUMN")
    if options.fields:
        raise ValueError(f"{options.fields[0]}: settings of own data are given as --set name=value")
    path = Path(options.recipe)
    of_fit, of_task, others = split_settings(options.sets)
    settings = fit_config(of_fit, minutes=options.minutes)
    started = BEGAN if settings.clock == "wall" else 0.0
    target = options.target or of_task.pop("label_column", "label")
    look = look_at(
        path,
        target,
        text=options.text,
        channels=options.channels,
        file=of_task.get("file_column"),
        encoding=of_task.get("encoding", "utf-8"),
        delimiter=of_task.get("delimiter"),
    )
    name = of_fit.get("task", look.task)
    if name == "labels":
        name = "classify"
        of_task.setdefault("label_separator", "|")
    fields = {
        "text_column": look.text_column,
        "series_column": options.series,
        "channels": tuple(options.channels) or None,
        "label_column": target,
    }
    config = with_columns(TASKS[name](train=str(path)), **fields)
    folder = Path(options.out or default_folder(path.stem))
    _check_free(folder)
    _say(heading("task", f"{name}: {look.why}" if name == look.task else name))
    sets = [f"--task.{key}={value}" for key, value in of_task.items()]
    task, run_config = configure(config, None, [*sets, *others])
    shown = ProgressBar(sys.stderr)
    found = learn(task, run_config, settings, started=started, out=folder, tell=shown.tell, show=shown.show)
    shown.close()
    *lines, last = closing_lines(found.result.record)
    following = f"seqboat predict {shlex.quote(str(folder))} new{path.suffix}"
    for line in [*lines, heading("model", f"{folder}; next: {following}"), last]:
        print(one_line(line))
    return 0


def _check_free(folder: Path) -> None:
    """Refuse a folder that holds anything but a run of own data."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"--out {folder} is not a folder: name a new one")
    if folder.exists() and any(folder.iterdir()) and not (folder / "run.json").is_file():
        raise ValueError(f"--out {folder} holds other files: name a new folder")


class ProgressBar:
    """One line that moves on a terminal; elsewhere a line for every tenth.

    Args:
        stream: to write to.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.stream, self.moves = stream, stream.isatty()
        self.width = self.tenth = 0
        self.last = 0.0

    def tell(self, line: str) -> None:
        """Print a line of its own."""
        self._clear()
        print(one_line(line), file=self.stream, flush=True)

    def show(self, progress: Progress) -> None:
        """Show how far training is."""
        tenth = int(10 * progress.share)
        if self.moves:
            if time.monotonic() - self.last < 0.2 and progress.share < 1:
                return
            self.last = time.monotonic()
            line = f"[{'#' * (2 * tenth):<20}] {progress_text(progress)}"
            self.stream.write("\r" + line.ljust(self.width))
            self.stream.flush()
            self.width = len(line)
        elif tenth > self.tenth and progress.score is not None:
            self.tenth = tenth
            self.tell(f"{10 * tenth:>3} %       {progress_text(progress)}")

    def _clear(self) -> None:
        if self.width:
            self.stream.write("\r" + " " * self.width + "\r")
            self.width = 0

    def close(self) -> None:
        """Remove the moving line."""
        self._clear()


def _adapted(config: RunConfig, fields: Sequence[str]) -> RunConfig:
    """Adapted to a user's table, with as many steps as it needs, unless the user set them."""
    from seqboat.own.task import OwnTask
    from seqboat.recipes.own import for_rows, for_task
    from seqboat.training.settings_io import override, split_arguments

    task = config.build_task()
    if not isinstance(task, OwnTask):
        return config
    if not config.start:
        config = for_task(config, task)
    given = dict(split_arguments(fields))
    rows = len(task.dataset("train"))
    longer = config if "schedule.steps" in given else for_rows(config, rows)
    if longer.schedule.steps > config.schedule.steps:
        epochs = longer.schedule.steps * config.training.batch_size / rows
        _say(
            f"steps       {longer.schedule.steps:,} instead of {config.schedule.steps:,}: {rows:,} rows, read "
            f"{epochs:.2g} times (--schedule.steps)"
        )
    return override(longer, fields)


def resume_line(folder: Path) -> str:
    """How to continue a run that was stopped.

    >>> resume_line(Path("runs/my run"))
    "continue with: seqboat train --resume --out 'runs/my run'"
    """
    return f"continue with: {shlex.join(['seqboat', 'train', '--resume', '--out', str(folder)])}"


def _closing_lines(config: RunConfig, outcome: RunOutcome, folder: Path) -> Iterator[str]:
    """How the run ended, its best score, and what simple models reach."""
    from seqboat.training.plan import baseline_text, better_baseline
    from seqboat.training.record import read_told

    task = config.build_task()
    best = "" if outcome.best is None else f"; best {task.metric} {outcome.best:.4f}"
    baselines = read_told(folder).get("baselines")
    if outcome.best is None or not baselines or not baselines["scores"]:
        yield f"{outcome.message}{best}; {folder}"
        return
    yield f"{outcome.message}{best} on {baselines['split']} ({baseline_text(baselines)}); {folder}"
    if outcome.exit_code == 0 and (found := better_baseline(baselines, outcome.best, task.better)):
        yield (
            f"the baseline {found[0]!r} is better than this run: train longer (--schedule.steps), "
            "or use the baseline"
        )


def default_folder(recipe: str) -> Path:
    """The default folder of a run: that of a row is next to its recipe's, not inside it.

    >>> default_folder("lra.image/mega").as_posix()
    'runs/lra.image-mega'
    """
    return Path("runs") / (recipe.replace("/", "-") or "run")


def progress_text(progress: Progress) -> str:
    """Step, loss, score and time left."""
    score = (
        ""
        if progress.score is None
        else f"  val {progress.metric} {progress.score:.4g} (best {progress.best:.4g})"
    )
    left = (
        ""
        if progress.left != progress.left
        else f"  {int(progress.left) // 60}:{int(progress.left) % 60:02} left"
    )
    return f"step {progress.step:,}  loss {progress.loss:.4g}{score}{left}"


def one_line(line: str) -> str:
    """A line without control codes from a file."""
    from seqboat.console import printable

    return printable(line)


def _say(line: str) -> None:
    """Tell the user, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
