"""`seqboat train`: train a recipe, with any of its settings changed."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

TAKES_FIELDS = True
"""Arguments that argparse does not know are fields of the configuration."""
SURVIVES_OUTPUT = True
"""Hours of training do not depend on whether progress can be printed."""

EPILOG = """\
Any field of the configuration can be set by its dotted name, as --a.b=value or --a.b value; --print-config shows
them all. Parts are chosen by name; another mixer keeps the settings of the recipe's own where it has them:

  seqboat train lra.listops-small --seed=1 --training.batch_size=16
  seqboat train lra.image/mega-chunk                           (seqboat list rows)
  seqboat train lra.image-small --model.mixer NAME             (seqboat list mixers)
  seqboat train lra.image-small --model.mixer NAME --match-parameters
  seqboat train recall --model.mixer.router sigmoid            (seqboat list routers)
  seqboat train classify --data.train reviews.csv
  seqboat train lm --data.text notes/*.txt
  torchrun --nproc-per-node 2 -m seqboat train recall --training.distributed=fsdp

Exit codes: 0 finished, 1 failure, 2 wrong usage, 3 diverged, 129, 130 and 143 stopped by SIGHUP,
SIGINT or SIGTERM, 75 stopped by SIGUSR1 and to be queued again (a checkpoint is written first; --resume continues).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "recipe", nargs="?", help="name of a recipe (seqboat list recipes, rows or ablations)"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of settings, on top of the recipe or instead of one"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the run (default: runs/RECIPE)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    parser.add_argument(
        "--match-parameters",
        action="store_true",
        help="give the model as many parameters as the recipe's own, by its width",
    )
    parser.add_argument(
        "--print-config", "--print_config", action="store_true", help="print the configuration and stop"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from seqboat.checks import require
    from seqboat.recipes import find_recipe
    from seqboat.training.config import RunConfig, from_yaml, override, to_yaml
    from seqboat.training.loop import train

    config: RunConfig | None = None
    source: str | None = options.config
    if options.recipe is not None:
        config = dataclasses.replace(find_recipe(options.recipe)(), recipe=options.recipe)
    if options.config is not None:
        config = from_yaml(options.config, config, _say)
    if config is None and options.resume and options.out is not None:
        source = str(Path(options.out) / "config.yaml")
        config = from_yaml(source)
    if config is None:
        raise ValueError("name a recipe (seqboat list recipes), or give --config FILE, or --resume --out DIR")
    config = override(config, options.fields, _say)
    if options.match_parameters:
        from seqboat.paper.matching import match_parameters

        require(bool(config.recipe), "--match-parameters needs a recipe whose model is to be matched")
        config, found = match_parameters(config, find_recipe(config.recipe)())
        print(found.report(), file=sys.stderr)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    folder = Path(options.out or default_folder(config.recipe))
    try:
        outcome = train(config, folder, resume=options.resume)
    except ValueError as error:
        if source is None or source in str(error):
            raise
        raise ValueError(f"{error} (settings from {source})") from error
    if os.environ.get("RANK", "0") == "0":
        best = "" if outcome.best is None else f"; best {config.build_task().metric} {outcome.best:.4f}"
        print(f"{outcome.message}{best}; {folder}", file=sys.stderr if outcome.exit_code else sys.stdout)
    return outcome.exit_code


def default_folder(recipe: str) -> Path:
    """Where a run goes unless --out says: a row stands beside the recipe that it belongs to, not inside its run.

    >>> default_folder("lra.image/mega").as_posix()
    'runs/lra.image-mega'
    """
    return Path("runs") / (recipe.replace("/", "-") or "run")


def _say(line: str) -> None:
    """Tell the user, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)
