"""`seqboat bench`: time and memory of mixers, side by side in one run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqboat.cli.main import UsageError
from seqboat.core.extras import check_installed

if TYPE_CHECKING:
    from seqboat.bench.setting import LayerSetting

LAYERS = (
    "seqboat",
    "published",
    "mega-chunk",
    "transformer",
    "lower-bound",
)
DECODERS = ("seqboat", "mega-chunk", "transformer")
EXAMPLES = """\
examples:
  seqboat bench                                             the paper's Text layer and all baselines
  seqboat bench --length 16384                              the same number of tokens in longer sequences
  seqboat bench --mixers seqboat --rate 0.1                 how cost falls with the fraction of active tokens
  seqboat bench --mixers seqboat seqboat:gau.positions=original --window 64
  seqboat bench --mixers seqboat seqboat:compiled=True --no-memory --modes training
  seqboat bench decode --context 1024 32768                 time per token and size of the state
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "what",
        nargs="?",
        choices=("layer", "decode"),
        default="layer",
        help="what to measure: layer (training step and inference of a layer; default) or decode (token by token)",
    )
    parser.add_argument(
        "--mixers",
        nargs="+",
        metavar="NAME[:FIELD=VALUE,...]",
        help="candidates, compared with the first one: names of mixers, 'published' for the paper's algorithm, or "
        "'lower-bound' for the matrix products of our layer alone; besides its own fields, every mixer has d_model "
        "(its width) and compiled (use torch.compile)",
    )
    parser.add_argument(
        "--preset", choices=("text", "enwik8"), default="text", help="layer sizes (default: text)"
    )
    parser.add_argument("--length", type=int, metavar="N", help="tokens per sequence")
    parser.add_argument("--window", type=int, metavar="W", help="size of the working memory")
    parser.add_argument(
        "--rate",
        type=_rate,
        default="0.5",
        metavar="R",
        help="fraction of tokens to activate, or 'natural' to let the routers decide (default %(default)s)",
    )
    parser.add_argument(
        "--batch", type=int, help="sequences per batch (default: keeps the number of tokens constant)"
    )
    parser.add_argument("--modes", nargs="+", choices=("training", "inference"), help="default: both")
    parser.add_argument("--context", nargs="+", type=int, metavar="N", help="decode: tokens of context")
    parser.add_argument("--steps", type=int, help="decode: tokens per round")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--warmup", type=int, default=1, help="warm-up rounds (default 1)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch decides)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    parser.add_argument("--dtype", default="float32", help="type of weights and inputs (default float32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and inputs")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to a file")


def _rate(text: str) -> float | None:
    if text == "natural":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1 or 'natural', got {text!r}")
    return rate


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    _check(options)
    import torch

    from seqboat.bench.setting import PRESETS
    from seqboat.data.files import write_json

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {options.device}: torch sees no CUDA device")
    if options.threads:
        torch.set_num_threads(options.threads)
    setting = _setting(PRESETS[options.preset], options)
    record = {"layer": _layers, "decode": _decode}[options.what](options, setting)
    if options.json:
        write_json(options.json, record)
        print(f"wrote {options.json}")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse what could only fail after minutes of measuring."""
    least = {"length": 1, "window": 1, "rounds": 1, "warmup": 0, "batch": 1, "steps": 1, "threads": 1}
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise UsageError(f"--{name} must be at least {bound}, got {value}")
    if any(value < 1 for value in options.context or ()):
        raise UsageError(f"--context must be at least 1, got {min(options.context)}")
    path = options.json
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise UsageError(f"--json: cannot write to the folder {path.parent}")
    check_installed("rich", "this command")
    if options.what == "decode":
        for name in ("length", "modes"):
            if getattr(options, name):
                raise UsageError(f"--{name} cannot be used with 'decode'")
    elif options.context or options.steps:
        raise UsageError("--context and --steps need 'decode'")


def _setting(preset: LayerSetting, options: argparse.Namespace) -> LayerSetting:
    from dataclasses import replace

    length = options.length or preset.length
    return replace(
        preset,
        length=length,
        batch=options.batch or max(1, preset.tokens // length),
        window=options.window or preset.window,
        rate=options.rate,
        device=options.device,
        dtype=options.dtype,
        seed=options.seed,
    )


def _default_layers() -> Sequence[str]:
    """The usual candidates, without the published algorithm where this installation does not have it."""
    from seqboat.bench import setting

    if setting.PUBLISHED_SOURCE.is_file():
        return LAYERS
    print("skipping 'published', which needs a clone of the repository", file=sys.stderr)
    return tuple(name for name in LAYERS if name != setting.PUBLISHED)


def _layers(options: argparse.Namespace, setting: LayerSetting) -> dict[str, Any]:
    from rich.console import Console

    from seqboat.bench.layers import print_layers, run_layers
    from seqboat.bench.measure import as_record
    from seqboat.bench.setting import MODES, parse_candidate

    candidates = [parse_candidate(text) for text in options.mixers or _default_layers()]
    if len({candidate.label for candidate in candidates}) < len(candidates):
        raise UsageError("--mixers: the same candidate is given twice")
    rows = _with_progress(
        lambda progress: run_layers(
            candidates,
            setting,
            tuple(mode for mode in MODES if mode in (options.modes or MODES)),
            rounds=options.rounds,
            warmup=options.warmup,
            memory=not options.no_memory,
            progress=progress,
        )
    )
    print_layers(Console(), rows, setting)
    return as_record(rows, setting, what="layer", rounds=options.rounds)


def _decode(options: argparse.Namespace, setting: LayerSetting) -> dict[str, Any]:
    from dataclasses import replace

    from rich.console import Console

    from seqboat.bench.decode import print_decode, run_decode
    from seqboat.bench.measure import as_record
    from seqboat.bench.setting import parse_candidate

    candidates = [parse_candidate(text) for text in options.mixers or DECODERS]
    setting = replace(setting, batch=options.batch or 1, causal=True)
    rows = _with_progress(
        lambda progress: run_decode(
            candidates,
            setting,
            options.context or [1024, 8192, 32768],
            steps=options.steps or 64,
            rounds=options.rounds,
            warmup=options.warmup,
            progress=progress,
        )
    )
    print_decode(Console(), rows, "one layer")
    return as_record(rows, setting, what="decode", rounds=options.rounds)


def _with_progress(job: Callable[[Callable[[str], None]], list[Any]]) -> list[Any]:
    """Run a job and show its messages on a status line."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        return job(lambda message: status.update(message))
