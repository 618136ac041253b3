"""`seqboat demo`: train the recipe `demo`, a small ListOps model, and show what its routers learned."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seqboat.core.extras import missing

if TYPE_CHECKING:
    from seqboat.analysis.measures import Measures
    from seqboat.training.config import RunConfig

SURVIVES_OUTPUT = True
"""Training does not depend on whether progress can be printed."""
SHOWN_TOKENS = range(40, 57)
"""Length of the expression in the picture: the first one of the test set that fits on two lines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--steps", type=int, help="steps to train for (default: 2800)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=4.0,
        help="maximum training time; a slow machine takes fewer steps (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the expressions and the model (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo"),
        help="folder for the run, the picture and the numbers (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run for a few seconds, just to see that it works"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    check(options)
    prepare_folder(options.out)

    from seqboat.run import Run
    from seqboat.training.loop import train
    from seqboat.training.planning.pace import fit_minutes

    begin = time.perf_counter()
    wanted = configure(options)
    task = wanted.build_task()
    test: Any = task.dataset("test")
    example = min((test[i] for i in range(50)), key=lambda e: len(e.inputs))
    count = sum(p.numel() for p in wanted.build_model(task).parameters())
    print("ListOps: nested operations on digits; every expression evaluates to a digit")
    print(f"  {task.show(example)}")
    print(
        f"model: {wanted.model.num_layers} SeqBoat layers of width {wanted.model.d_model}, {count:,} parameters"
    )
    print("generating expressions and timing a few steps", flush=True)
    with one_thread():
        config = pace_reports(fit_minutes(wanted, options.minutes))
        steps = config.schedule.steps
        if steps < wanted.schedule.steps:
            print(
                f"{options.minutes:g} minutes are enough for {steps:,} of {wanted.schedule.steps:,} steps (--minutes)"
            )
        print(f"training: {steps:,} steps of {config.training.batch_size} expressions", flush=True)
        outcome = train(config, options.out / "run")
        if outcome.exit_code:
            print(outcome.message, file=sys.stderr)
            return outcome.exit_code
        result = measure(Run(options.out / "run"))
    print_result(result)
    seconds = time.perf_counter() - begin
    write_numbers(options, config, result, seconds)
    draw(options.out / "demo.png", Run(options.out / "run"), result.measures)
    print(f"run      {options.out / 'run'}   (seqboat report {options.out / 'run'} shows more)")
    print(f"time     {clock(seconds)}")
    return 0


def configure(options: argparse.Namespace) -> RunConfig:
    """The recipe with the options applied."""
    import dataclasses

    from seqboat.recipes import RECIPES

    config = dataclasses.replace(RECIPES["demo"](), recipe="demo", seed=options.seed)
    if options.quick:
        config = config.replace(
            model={"d_model": 32, "num_layers": 2},
            training={"batch_size": 16},
            schedule={"steps": 25, "warmup_steps": 2},
            task=dataclasses.replace(config.task, train_size=400, eval_size=200),  # type: ignore[type-var]
        )
    config = config.replace(task=dataclasses.replace(config.task, seed=options.seed))  # type: ignore[type-var]
    if options.steps is not None:
        config = config.replace(schedule={"steps": options.steps, "warmup_steps": options.steps // 10})
    return config


def pace_reports(config: RunConfig) -> RunConfig:
    """Twenty lines of progress and four evaluations, whatever the number of steps."""
    steps = config.schedule.steps
    return config.replace(
        training={"log_every": max(1, steps // 20), "save_every": steps},
        evaluation={"every": max(1, steps // 4)},
    )


def check(options: argparse.Namespace) -> None:
    """Refuse numbers that make no sense."""
    from seqboat.cli.main import UsageError

    if options.steps is not None and options.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {options.steps}")
    if not options.minutes > 0:
        raise UsageError(f"--minutes must be positive, got {options.minutes}")


def prepare_folder(out: Path) -> None:
    """Make the folder and check that it can be written to; removes an earlier demo."""
    from seqboat.cli.main import UsageError

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        if (out / "demo.json").is_file():
            shutil.rmtree(out / "run", ignore_errors=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written to: {error.strerror or error}") from None


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core: the products are tiny, and threads would wait for each other at every one of them.

    On two cores that were busy with other work, the waiting made a step take nearly ten times as long.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class DemoResult(NamedTuple):
    """What the trained model does on the test set."""

    accuracy: float
    majority: float
    """fraction of the most common value"""
    examples: int
    measures: Measures

    @property
    def layers(self) -> list[Any]:
        """Measures of the layers with a router."""
        return [layer for layer in self.measures.layers if layer is not None]


def measure(run: Any) -> DemoResult:
    """Measure the model on the test set."""
    import numpy as np

    from seqboat.analysis.measures import measure_run

    test = run.task.dataset("test")
    values = [int(test[i].target) for i in range(len(test))]
    measures = measure_run(run.path, "test", weighted=False)
    return DemoResult(
        accuracy=measures.metrics["accuracy"],
        majority=float(np.bincount(values).max() / len(values)),
        examples=len(values),
        measures=measures,
    )


def print_result(result: DemoResult) -> None:
    """Say how good the model is and where it attends."""
    print()
    print(f"test accuracy        {result.accuracy:.3f}   on {result.examples:,} new expressions")
    print(f"  most common value  {result.majority:.3f}")
    print(f"  chance             {1 / 10:.3f}")
    print("activation           fraction of tokens that attend, and the router's mean confidence in them")
    for number, layer in enumerate(result.layers, start=1):
        bar = "#" * round(40 * layer.counts.rate)
        confidence = f"{layer.confidence:.2f}" if layer.confidence is not None else "   -"
        print(f"  layer {number}            {layer.counts.rate:.3f}   {confidence}  {bar}".rstrip())
    print()


def write_numbers(options: argparse.Namespace, config: RunConfig, result: DemoResult, seconds: float) -> None:
    """Write the configuration and the results next to the picture."""
    from seqboat.data.files import write_json
    from seqboat.training.config import to_dict

    numbers = {
        "config": to_dict(config),
        "seed": options.seed,
        "minutes": options.minutes,
        "steps": config.schedule.steps,
        "seconds": round(seconds, 1),
        "accuracy": result.accuracy,
        "most_common_value": result.majority,
        "activation_rate": [layer.counts.rate for layer in result.layers],
        "confidence": [layer.confidence for layer in result.layers],
    }
    path = options.out / "demo.json"
    write_json(path, numbers, indent=2)
    print(f"numbers  {path}")


def draw(path: Path, run: Any, measures: Measures) -> None:
    """Write the picture, if matplotlib is installed."""
    import numpy as np

    from seqboat.analysis.traces import trace

    try:
        from matplotlib.figure import Figure  # noqa: F401 - only to see whether it is there

        from seqboat.figures import demo_figure, save_figure
    except ModuleNotFoundError:
        print(f"picture  none: {missing('matplotlib', 'it')}")
        return
    test = run.task.dataset("test")
    fitting = (i for i in range(len(test)) if len(test[i].inputs) in SHOWN_TOKENS)
    shown = test[next(fitting, 0)]
    (sample,) = trace(run.model, run.task.kind, run.task.collate([shown]))
    tokens = [run.task.token_names[token] for token in shown.inputs.tolist()]
    layers = [layer for layer in sample.sequences[0].layers if layer is not None]
    confidence = np.stack([layer.confidence for layer in layers])
    caption = f"one expression worth {shown.target}; the model says {sample.prediction}; white: not activated"
    found = [layer for layer in measures.layers if layer is not None]
    rates, stds = [layer.counts.rate or 0.0 for layer in found], [layer.rate.std for layer in found]
    save_figure(demo_figure(rates, stds, tokens, confidence, caption), path)
    print(f"picture  {path}")


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(83.2)
    '1:23'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
