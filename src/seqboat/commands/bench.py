"""`seqboat bench`: time and memory of mixers, side by side in one run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqboat.cli import UsageError
from seqboat.extras import check_installed

if TYPE_CHECKING:
    from rich.table import Table

    from seqboat.bench.decode import DecodeRow
    from seqboat.bench.layers import Row, Setting
    from seqboat.bench.measure import Spread
    from seqboat.bench.profile import Profile

LAYERS = (
    "seqboat",
    "published",
    "mega-chunk",
    "transformer:implementation=plain",
    "transformer:implementation=sdpa",
    "floor",
)
DECODERS = ("seqboat", "mega-chunk", "transformer")
EXAMPLES = """\
examples:
  seqboat bench                                             the paper's Text layer, all yard-sticks
  seqboat bench --lengths 1024 4096 16384 --plot cost.png   the same number of tokens at each length
  seqboat bench --mixers seqboat --rates 0.1 0.5 1          how cost falls with the share of active tokens
  seqboat bench --like-run runs/recall                      with the activation of a trained model
  seqboat bench --mixers seqboat seqboat:gau.positions=original --windows 64 256
  seqboat bench --mixers seqboat seqboat:compiled=True --no-memory --modes training
  seqboat bench profile                                     where the time goes, and how far from the bare products
  seqboat bench decode --contexts 1024 32768                time per token and size of the state
  seqboat bench decode-lm                                   the paper's language model against a Transformer
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "what",
        nargs="?",
        choices=("layer", "profile", "decode", "decode-lm"),
        default="layer",
        help="a training step and inference of single layers (default), where their time goes, single tokens of "
        "single layers, or single tokens of a language model",
    )
    parser.add_argument(
        "--mixers",
        nargs="+",
        metavar="NAME[:FIELD=VALUE,...]",
        help="contenders, the first being what others are compared with: names of mixers, 'published' for the "
        "paper's algorithm, 'floor' for the bare matrix products of our layer; all mixers have the fields d_model (a "
        "width of its own) and compiled (by torch.compile)",
    )
    parser.add_argument("--preset", choices=("text", "enwik8"), default="text", help="sizes of the layer")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help="tokens per row")
    parser.add_argument("--windows", nargs="+", type=int, metavar="W", help="sizes of the working memory")
    parser.add_argument(
        "--rates",
        nargs="+",
        type=_rate,
        metavar="R",
        help="shares of tokens that routers must activate, or 'natural' for what they decide",
    )
    parser.add_argument(
        "--like-run",
        metavar="RUN",
        help="take the rate from a trained run: the mean over its layers on held-out data",
    )
    parser.add_argument("--batch", type=int, help="rows; by default as many as keep the number of tokens")
    parser.add_argument("--modes", nargs="+", choices=("training", "inference"), help="default: both")
    parser.add_argument("--contexts", nargs="+", type=int, metavar="N", help="decode: tokens read before")
    parser.add_argument("--steps", type=int, help="decode: tokens per round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them (default 1)")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's choice by default")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    parser.add_argument("--dtype", default="float32", help="type of weights and inputs (default float32)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw time and memory against what is swept"
    )


_SWEPT = ("lengths", "windows", "rates")


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
    # the profiler would announce itself in lines of its own; it reads this when torch is imported
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    import torch

    from seqboat.bench.layers import PRESETS
    from seqboat.data.files import write_json

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {options.device}: torch sees no CUDA device")
    if options.threads:
        torch.set_num_threads(options.threads)
    setting = _setting(PRESETS[options.preset], options)
    report = {"layer": _layers, "profile": _profile, "decode": _decode, "decode-lm": _decode_lm}[options.what]
    record = report(options, setting)
    if options.json:
        write_json(options.json, record)
        print(f"wrote {options.json}")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse what could only fail after minutes of measuring."""
    for name in ("lengths", "windows", "contexts"):
        if any(value < 1 for value in getattr(options, name) or ()):
            raise UsageError(f"--{name} must be at least 1, got {getattr(options, name)}")
    for name, least in (("rounds", 1), ("warmup", 0), ("batch", 1), ("steps", 1), ("threads", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"--{name} must be at least {least}, got {value}")
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise UsageError(f"--{name}: cannot write to the folder {path.parent}")
    check_installed("rich", "this command")
    if options.plot is not None:
        check_installed("matplotlib", "--plot")
    if options.like_run and options.rates:
        raise UsageError("--rates and --like-run exclude each other")
    refused = {
        "layer": (),
        "profile": ("plot",),
        "decode": ("plot", "lengths", "modes"),
        "decode-lm": ("plot", "lengths", "modes"),
    }
    for name in refused[options.what]:
        if getattr(options, name):
            raise UsageError(f"--{name} does not go with '{options.what}'")
    if options.what != "layer" and any(len(getattr(options, name) or ()) > 1 for name in _SWEPT):
        raise UsageError(f"'{options.what}' takes one window, one rate and one length")
    if options.what in ("layer", "profile") and (options.contexts or options.steps):
        raise UsageError("--contexts and --steps go with 'decode' and 'decode-lm'")


def _setting(preset: Setting, options: argparse.Namespace) -> Setting:
    from dataclasses import replace

    changes: dict[str, Any] = {"device": options.device, "dtype": options.dtype, "seed": options.seed}
    if options.batch:
        changes["batch"] = options.batch
    if options.windows:
        changes["window"] = options.windows[0]
    if options.like_run:
        from seqboat.bench.layers import recorded_activation

        layers = recorded_activation(options.like_run)
        changes["rate"] = sum(layers) / len(layers)
        shown = " ".join(f"{rate:.0%}" for rate in layers)
        print(f"rate {changes['rate']:.3f} as in {options.like_run} (by layer: {shown})")
    elif options.rates:
        changes["rate"] = options.rates[0]
    return replace(preset, **changes)


def _default_layers() -> Sequence[str]:
    """The usual contenders, without the published algorithm where this installation has not got it."""
    from seqboat.bench.layers import PUBLISHED

    if PUBLISHED.is_file():
        return LAYERS
    print("without 'published', which is measured in a clone of the repository only", file=sys.stderr)
    return tuple(name for name in LAYERS if name != "published")


def _layers(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    from seqboat.bench.layers import MODES, as_record, parse_contender, plot, run_layers, sweep

    contenders = [parse_contender(text) for text in options.mixers or _default_layers()]
    if len({contender.label for contender in contenders}) < len(contenders):
        raise UsageError("--mixers: the same contender twice")
    settings = sweep(
        setting,
        options.lengths or [setting.length],
        options.windows or [setting.window],
        options.rates or [setting.rate],
        None if options.batch else setting.tokens,
    )
    modes = tuple(mode for mode in MODES if mode in (options.modes or MODES))
    rows = _with_progress(
        lambda progress: run_layers(
            contenders,
            settings,
            modes,
            rounds=options.rounds,
            warmup=options.warmup,
            memory=not options.no_memory,
            progress=progress,
        )
    )
    _print_layers(rows)
    if options.plot:
        plot(rows, options.plot)
        print(f"drew {options.plot}")
    return as_record(rows, setting, what="layer", rounds=options.rounds)


def _profile(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    from seqboat.bench.layers import MODES, as_record, parse_contender, sweep
    from seqboat.bench.profile import run_profile

    contenders = [parse_contender(text) for text in options.mixers or ("seqboat",)]
    lengths = options.lengths or [setting.length]
    (setting,) = sweep(
        setting, lengths, [setting.window], [setting.rate], None if options.batch else setting.tokens
    )
    found = _with_progress(
        lambda progress: run_profile(
            contenders,
            setting,
            tuple(mode for mode in MODES if mode in (options.modes or MODES)),
            rounds=options.rounds,
            warmup=options.warmup,
            progress=progress,
        )
    )
    _print_profiles(found, setting)
    return as_record(found, setting, what="profile", rounds=options.rounds)


def _decode(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    from dataclasses import replace

    from seqboat.bench.decode import run_decode
    from seqboat.bench.layers import as_record, parse_contender

    contenders = [parse_contender(text) for text in options.mixers or DECODERS]
    setting = replace(setting, batch=options.batch or 1, causal=True)
    rows = _with_progress(
        lambda progress: run_decode(
            contenders,
            setting,
            options.contexts or [1024, 8192, 32768],
            steps=options.steps or 64,
            rounds=options.rounds,
            warmup=options.warmup,
            progress=progress,
        )
    )
    _print_decode(rows, "one layer")
    return as_record(rows, setting, what="decode", rounds=options.rounds)


def _decode_lm(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    from seqboat.bench.decode import LanguageModelSize, run_decode_lm
    from seqboat.bench.layers import as_record

    if options.mixers:
        raise UsageError("--mixers does not go with 'decode-lm'")
    if options.device != "cpu" or options.dtype != "float32" or options.batch not in (None, 1):
        raise UsageError("'decode-lm' runs on the CPU in float32 with batch 1")
    if len(options.contexts or ()) > 1:
        raise UsageError("'decode-lm' takes one context")
    size = LanguageModelSize(**({"window": options.windows[0]} if options.windows else {}))
    rows = _with_progress(
        lambda progress: run_decode_lm(
            size,
            context=(options.contexts or [8192])[0],
            rate=setting.rate,
            steps=options.steps or 16,
            rounds=options.rounds,
            warmup=options.warmup,
            seed=options.seed,
            progress=progress,
        )
    )
    _print_decode(rows, f"language model of {size.num_layers} layers of width {size.d_model}, batch 1")
    return as_record(rows, size, what="decode-lm", rounds=options.rounds)


def _with_progress(job: Callable[[Callable[[str], None]], list[Any]]) -> list[Any]:
    """Run a job that says what it does, on a line that vanishes."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        return job(lambda message: status.update(message))


def _machine_line() -> str:
    from seqboat.bench.measure import machine

    found = machine()
    where = found["cuda"] or found["cpu"] or "unknown CPU"
    return f"{where}, {found['threads']} of {found['cores']} cores, torch {found['torch']}"


def _print_layers(rows: Sequence[Row]) -> None:
    """One table per mode and setting."""
    from itertools import groupby

    from rich.console import Console

    console = Console()
    console.print(_machine_line(), highlight=False)
    for _, group in groupby(rows, lambda row: (row.mode, row.batch, row.length, row.window, row.rate)):
        console.print(_layer_table(list(group)))
    for note in dict.fromkeys(row.note for row in rows if row.note):
        console.print(f"refused: {note}", highlight=False)


def _layer_table(rows: Sequence[Row]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from seqboat.bench.measure import human_bytes

    first = rows[0]
    what = "training step" if first.mode == "training" else first.mode
    rate = "natural rate" if first.rate is None else f"rate {first.rate:g}"
    title = f"{what}, {first.batch} x {first.length} tokens, window {first.window}, {rate}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("contender", overflow="fold")
    with_floor = any(row.floor_ratio is not None for row in rows)
    names = ["active", "median", "quartiles", "ratio", "x floor", "memory", "ratio"]
    for name in names if with_floor else [name for name in names if name != "x floor"]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [row.contender, "" if row.active is None else f"{row.active:.0%}"]
        if row.seconds is None:
            cells += ["refused", "", ""]
        else:
            cells += [*_durations(row.seconds), _times(row.ratio)]
        cells += [_times(row.floor_ratio)] if with_floor else []
        memory = row.memory_estimate if row.seconds is None else row.memory
        shown = "" if memory is None else human_bytes(memory)
        cells += [f"~ {shown}" if row.seconds is None else shown, _times(row.memory_ratio)]
        table.add_row(*cells)
    return table


def _print_profiles(profiles: Sequence[Profile], setting: Setting) -> None:
    """Three tables per layer and mode: parts, kinds of operations, the floor."""
    from rich.console import Console

    from seqboat.bench.measure import human_seconds

    console = Console()
    console.print(_machine_line(), highlight=False)
    for found in profiles:
        step, median = "training step" if found.mode == "training" else found.mode, found.seconds.median
        line = (
            f"{found.contender}, {step}, {setting.batch} x {setting.length} tokens: {human_seconds(median)}"
        )
        if found.floor_seconds is not None:
            floor = human_seconds(found.floor_seconds.median)
            line += f", {_times(found.floor_ratio)} the floor of matrix products ({floor})"
        console.print(f"\n{line}", highlight=False)
        parts = _share_table("by part", "part", "forward", "backward", "together")
        for part, forward, backward in found.parts:
            parts.add_row(part, f"{forward:.1%}", f"{backward:.1%}", f"{forward + backward:.1%}")
        kinds = _share_table("by kind of operation", "kind", "calls", "share")
        for kind, share, calls in found.kinds:
            kinds.add_row(kind, f"{calls:.0f}", f"{share:.1%}")
        console.print(parts)
        console.print(kinds)
        if found.floor:
            floors = _share_table(
                "the floor: each product alone", "product", "GFLOP", "time", "GFLOP/s", "share"
            )
            for what, flops, seconds, share in found.floor:
                rate = f"{flops / seconds:.0f}"
                floors.add_row(what, f"{flops:.2f}", human_seconds(seconds), rate, f"{share:.1%}")
            console.print(floors)


def _share_table(title: str, first: str, *numbers: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _print_decode(rows: Sequence[DecodeRow], what: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from seqboat.bench.measure import human_bytes

    console = Console()
    console.print(_machine_line(), highlight=False)
    table = Table(title=f"decoding, {what}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("contender", overflow="fold")
    for name in ("context", "parameters", "per token", "quartiles", "tokens/s", "ratio", "growth", "state"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.contender,
            str(row.context),
            f"{row.parameters:,}",
            *_durations(row.seconds),
            f"{row.tokens_per_second:.1f}",
            _times(row.ratio),
            _times(row.growth),
            human_bytes(row.state_bytes),
        )
    console.print(table)


def _durations(seconds: Spread) -> list[str]:
    """The median, and how far the quartiles are from it."""
    from seqboat.bench.measure import human_seconds

    low, high = seconds.low / seconds.median - 1, seconds.high / seconds.median - 1
    return [human_seconds(seconds.median), f"{low:+.0%} {high:+.0%}"]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"
