"""`seqboat train`: train a recipe, with any of its settings changed."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seqboat.training.config import RunConfig
    from seqboat.training.trainer import RunOutcome

TAKES_FIELDS = True
"""Arguments that argparse does not know are fields of the configuration."""
SURVIVES_OUTPUT = True
"""Hours of training do not depend on whether progress can be printed."""

EPILOG = """\
Set any field of the configuration by its dotted name, as --a.b=value or --a.b value. `seqboat train RECIPE --help`
describes every field; --print-config prints them all. Choose parts such as mixers and routers by name; a new mixer
keeps the recipe's settings as far as it supports them:

  seqboat train lra.listops-small --seed=1 --training.batch_size=16
  seqboat train lra.image/mega-chunk                           (seqboat paper list rows)
  seqboat train lra.image-small --model.mixer NAME             (seqboat paper list mixers)
  seqboat train recall --model.mixer.router sigmoid            (seqboat paper list routers)
  seqboat train classify --data.train reviews.csv
  seqboat train classify --data.train reviews.csv --from enwik8-small
  seqboat train lm --data.text notes/*.txt
  seqboat train lra.pathx --dry-run                            (memory, without data)
  torchrun --nproc-per-node 8 --no-python seqboat train enwik8 (eight GPUs of this machine)

Exit codes: 0 finished, 1 failure, 2 wrong usage, 3 diverged; 129, 130 and 143 stopped by SIGHUP, SIGINT or
SIGTERM; 75 stopped by SIGUSR1, to be queued again. A stopped run writes a checkpoint first; --resume continues it.
"""


STOPPED = (75, 129, 130, 143)
"""Exit codes of a run that a signal stopped, after it saved a checkpoint."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "recipe", nargs="?", help="name of a recipe (seqboat paper list recipes, rows or ablations)"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="JSON file of settings, in addition to a recipe or instead of one"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the run (default: runs/RECIPE)")
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


def explain_recipe(name: str, fields: Sequence[str]) -> str:
    """What `seqboat train RECIPE --help` prints: every setting of the recipe, with its text and its value."""
    from seqboat.recipes import find_recipe
    from seqboat.training.settings_io import describe, override

    recipe = find_recipe(name)
    about = " ".join((recipe.__doc__ or "").split("\n\n")[0].split())
    lines = []
    for setting in describe(override(recipe(), fields, _say)):
        lines.append(f"  --{setting.name} {setting.value}")
        lines += textwrap.wrap(setting.text, 110, initial_indent=" " * 8, subsequent_indent=" " * 8)
    settings = "\n".join(lines)
    lead = "Settings and their values; `seqboat train --help` lists the other options"
    return f"usage: seqboat train {name} [--SETTING VALUE ...]\n\n{about}\n\n{lead}:\n{settings}"


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.core.checks import naming
    from seqboat.recipes import find_recipe
    from seqboat.training.settings_io import override, read_config, to_json
    from seqboat.training.trainer import train

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
            config = _lengthened(config, options.fields)
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


def _lengthened(config: RunConfig, fields: Sequence[str]) -> RunConfig:
    """With as many steps as a user's table needs, unless the user set them."""
    from seqboat.own.task import OwnTaskConfig
    from seqboat.recipes.own import for_rows
    from seqboat.training.settings_io import split_arguments

    given = dict(split_arguments(fields))
    if not isinstance(config.task, OwnTaskConfig) or "schedule.steps" in given:
        return config
    rows = len(config.build_task().dataset("train"))
    longer = for_rows(config, rows)
    if "evaluation.every" in given:
        longer = longer.replace(evaluation={"every": config.evaluation.every})
    if longer.schedule.steps > config.schedule.steps:
        epochs = longer.schedule.steps * config.training.batch_size / rows
        _say(
            f"steps       {longer.schedule.steps:,} instead of {config.schedule.steps:,}: {rows:,} rows, read "
            f"{epochs:.2g} times (--schedule.steps)"
        )
    return longer


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


def _say(line: str) -> None:
    """Tell the user, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
