"""`seqboat demo`: train a small model on ListOps expressions that it makes itself, and show what it did."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from seqboat.extras import missing
from seqboat.version import __version__

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from seqboat.models.backbone import Classifier
    from seqboat.tasks.synthetic.listops import Expression, ListOpsConfig

SURVIVES_OUTPUT = True
"""Hours of training do not depend on whether progress can be printed."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run of a few minutes on two cores."""

    max_depth: int = 5
    """Of the expressions."""
    max_arguments: int = 5
    """Of an operator."""
    min_tokens: int = 10
    """Of an expression."""
    max_tokens: int = 100
    """Of an expression."""
    test_count: int = 2000
    """Expressions to test on; training never sees them."""
    d_model: int = 64
    """Width of the model."""
    num_layers: int = 3
    """SeqBoat layers."""
    d_state: int = 8
    """Averages per channel of the MD-EMA."""
    d_z: int = 32
    """Width of queries and keys."""
    window: int = 64
    """Working memory of the attention."""
    temperature_scale: float = 0.3
    """Initial temperature of the routers; the paper's for ListOps, as is the learning rate."""
    batch: int = 64
    """Expressions per update, of about the same length."""
    pool: int = 16
    """Batches that are drawn together and sorted by length."""
    steps: int = 2800
    """Updates."""
    warmup: float = 0.1
    """Share of the updates until the learning rate is highest."""
    lr: float = 4e-3
    """Highest learning rate."""
    weight_decay: float = 0.01
    """Of matrices."""


QUICK = Recipe(test_count=200, d_model=32, num_layers=2, batch=16, pool=4, steps=25)
"""A few seconds that show whether everything is in place; the model learns next to nothing."""

SHOWN_TOKENS = range(40, 57)
"""Length of the expression in the picture: the first one of the test set that fits on two lines."""


class Batch(NamedTuple):
    """Some expressions as tensors."""

    ids: Tensor
    """(batch, time) token ids, zero on padding"""
    mask: Tensor
    """(batch, time), True on real tokens"""
    values: Tensor
    """(batch,)"""


class Progress(NamedTuple):
    """Where training is; averages over the updates since the last report."""

    done: float
    """share of the run, from 0 to 1"""
    step: int
    loss: float
    accuracy: float
    rates: tuple[float, ...]
    """activation rate of each layer"""
    seconds: float
    """since training began"""

    @property
    def remaining(self) -> float:
        """Seconds that the rest will take if it goes on like this."""
        return self.seconds * (1 - self.done) / self.done if self.done > 0 else 0.0

    @property
    def metrics(self) -> str:
        """What a line of progress says; short enough for a terminal of 80 columns."""
        rates = " ".join(f"{rate:4.0%}" for rate in self.rates)
        return f"loss {self.loss:.2f}  accuracy {self.accuracy:.2f}  active {rates}"


class Evaluation(NamedTuple):
    """What the trained model does on the test set."""

    accuracy: float
    majority: float
    """share of the most common value"""
    rates: NDArray[np.float64]
    """(layers,): share of all tokens that were activated"""
    deviations: NDArray[np.float64]
    """(layers,): standard deviation of that share over the expressions"""
    confidence: NDArray[np.float64]
    """(layers,): mean confidence of the activated tokens"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--steps", type=int, help=f"updates to train for ({Recipe.steps})")
    parser.add_argument(
        "--minutes",
        type=float,
        default=4.0,
        help="longest time to train for; on a slow machine the learning rate falls sooner (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the expressions and the model (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for the picture and the numbers (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a run of a few seconds, to see that it runs")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    recipe = QUICK if options.quick else Recipe()
    if options.steps is not None:
        recipe = replace(recipe, steps=options.steps)
    check(recipe, options)
    prepare_folder(options.out)

    import torch

    from seqboat.tasks.synthetic import listops

    begin = time.perf_counter()
    torch.manual_seed(options.seed)
    expressions = listops.iterate(options.seed, task(recipe))
    test = list(islice(expressions, recipe.test_count))
    model = build_model(recipe)
    count = sum(p.numel() for p in model.parameters())
    example = min(test[:50], key=lambda e: len(e.tokens))
    print(
        f"ListOps: expressions of {recipe.min_tokens} to {recipe.max_tokens} tokens, and the digit each is worth"
    )
    print(f"  {' '.join(example.tokens)}  ->  {example.value}")
    print(f"model: {recipe.num_layers} SeqBoat layers of width {recipe.d_model}, {count:,} parameters")
    print(f"training: {recipe.steps:,} updates of {recipe.batch} expressions, each seen once", flush=True)
    with one_thread():
        with reporter(recipe.steps) as report:
            updates = train(model, expressions, recipe, options.minutes, report)
        result = evaluate(model, test, recipe)
    if updates < recipe.steps:
        print(
            f"out of time: {updates:,} of {recipe.steps:,} updates in {options.minutes:g} minutes (--minutes)"
        )
    shown = next((e for e in test if len(e.tokens) in SHOWN_TOKENS), test[0])
    print_result(result, recipe)
    write_numbers(options, recipe, result, updates, time.perf_counter() - begin)
    draw(options.out / "demo.png", model, shown, result)
    print(f"time     {clock(time.perf_counter() - begin)}")
    return 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core: the products are tiny, and threads would wait for each other at every one of them.

    On two cores that were busy with other work, the waiting made an update take nearly ten times as long.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(recipe: Recipe, options: argparse.Namespace) -> None:
    """Refuse numbers that make no sense."""
    from seqboat.cli import UsageError

    if recipe.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {recipe.steps}")
    if not options.minutes > 0:
        raise UsageError(f"--minutes must be positive, got {options.minutes}")


def prepare_folder(out: Path) -> None:
    """Make the folder and see that it can be written to, before anything takes long."""
    from seqboat.cli import UsageError

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written to: {error.strerror or error}") from None


def task(recipe: Recipe) -> ListOpsConfig:
    """The expressions of the demo."""
    from seqboat.tasks.synthetic.listops import ListOpsConfig

    return ListOpsConfig(
        max_depth=recipe.max_depth,
        max_arguments=recipe.max_arguments,
        longer_than=recipe.min_tokens - 1,
        shorter_than=recipe.max_tokens + 1,
    )


def build_model(recipe: Recipe) -> Classifier:
    """The small model."""
    from seqboat.core.routers import TemperedSoftmaxConfig
    from seqboat.mixers.seqboat.gau import GAUConfig
    from seqboat.mixers.seqboat.layer import SeqBoatConfig
    from seqboat.mixers.ssm.ema import EMAConfig
    from seqboat.models.backbone import BackboneConfig, Classifier
    from seqboat.tasks.synthetic.listops import CLASSES, TOKENS

    mixer = SeqBoatConfig(
        # half of the usual block: most expressions are shorter than it
        ssm=EMAConfig(d_state=recipe.d_state, block=32),
        router=TemperedSoftmaxConfig(temperature_scale=recipe.temperature_scale),
        gau=GAUConfig(d_z=recipe.d_z, window=recipe.window, max_positions=recipe.max_tokens),
    )
    config = BackboneConfig(
        mixer=mixer, d_model=recipe.d_model, num_layers=recipe.num_layers, vocab=len(TOKENS)
    )
    return Classifier(config, CLASSES)


def to_batch(expressions: list[Expression]) -> Batch:
    """Expressions as tensors, padded to the longest."""
    import torch

    from seqboat.tasks.synthetic import listops

    ids = torch.from_numpy(listops.pad([listops.encode(e.tokens) for e in expressions]))
    return Batch(ids, ids != listops.PAD, torch.tensor([e.value for e in expressions]))


def batches(expressions: Iterator[Expression], size: int, pool: int) -> Iterator[Batch]:
    """Batches of about the same length: some are drawn together, sorted by length, and come in any order."""
    import torch

    while True:
        drawn = sorted(islice(expressions, size * pool), key=lambda e: len(e.tokens))
        for i in torch.randperm(pool).tolist():
            yield to_batch(drawn[i * size : (i + 1) * size])


def train(
    model: Classifier,
    expressions: Iterator[Expression],
    recipe: Recipe,
    minutes: float,
    report: Callable[[Progress], None],
) -> int:
    """Train until the updates or the minutes are used up, whichever comes first.

    The learning rate follows the share of the run that is over, so that it has come down to zero either way.

    Returns:
        how many updates were made.
    """
    import torch
    import torch.nn.functional as F

    from seqboat.core.counts import activations
    from seqboat.training.optim import (
        OptimizerConfig,
        ScheduleConfig,
        build_optimizer,
        learning_rate,
        set_learning_rate,
    )

    config = OptimizerConfig(lr=recipe.lr, weight_decay=recipe.weight_decay)
    schedule = ScheduleConfig(steps=recipe.steps, warmup_steps=int(recipe.warmup * recipe.steps))
    optimizer = build_optimizer(model, config)
    every = max(1, recipe.steps // 100)
    losses, hits, seen = 0.0, 0, 0
    begin = time.perf_counter()
    model.train()
    done = 0.0
    step = 0
    for batch in batches(expressions, recipe.batch, recipe.pool):
        step += 1
        set_learning_rate(optimizer, learning_rate(int(done * recipe.steps), recipe.lr, schedule))
        out = model(batch.ids, batch.mask)
        loss = F.cross_entropy(out.logits, batch.values)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses += loss.item() * len(batch.values)
        hits += int((out.logits.argmax(dim=1) == batch.values).sum())
        seen += len(batch.values)
        seconds = time.perf_counter() - begin
        done = min(1.0, max(step / recipe.steps, seconds / (60 * minutes)))
        if step % every == 0 or done == 1.0:
            rates = tuple(float(a.rate) for a in activations(out.routings, batch.mask))
            report(Progress(done, step, losses / seen, hits / seen, rates, seconds))
            losses, hits, seen = 0.0, 0, 0
        if done == 1.0:
            break
    return step


@contextmanager
def reporter(steps: int) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on a terminal that has one; otherwise a line every twentieth of the way."""
    try:
        from rich import progress
        from rich.console import Console

        console = Console()
        terminal = console.is_terminal
    except ModuleNotFoundError:
        terminal = False
    if not terminal:
        yield plain_reporter(steps)
        return
    columns = (
        progress.BarColumn(bar_width=10),
        progress.TextColumn("{task.fields[step]}/{task.fields[steps]}"),
        progress.TextColumn("{task.fields[metrics]}"),
        progress.TextColumn("{task.fields[remaining]} left"),
    )
    with progress.Progress(*columns, console=console) as bar:
        shown = bar.add_task("", total=1.0, step=0, steps=steps, metrics="", remaining="?")

        def report(state: Progress) -> None:
            bar.update(
                shown,
                completed=state.done,
                step=state.step,
                metrics=state.metrics,
                remaining=clock(state.remaining),
            )

        yield report


def plain_reporter(steps: int) -> Callable[[Progress], None]:
    """Lines for logs and pipes."""
    lines_due = 1

    def report(state: Progress) -> None:
        nonlocal lines_due
        if state.done * 20 < lines_due and state.done < 1:
            return
        lines_due = int(state.done * 20) + 1
        print(f"{state.step:5d}/{steps}  {state.metrics}  {clock(state.remaining)} left", flush=True)

    return report


def evaluate(model: Classifier, test: list[Expression], recipe: Recipe) -> Evaluation:
    """Measure the model on the test set."""
    import numpy as np
    import torch

    from seqboat.core.counts import activations

    model.eval()
    # sorted by length, so that batches hold little padding
    test = sorted(test, key=lambda e: len(e.tokens))
    hits = 0
    tokens = 0
    active = np.zeros(recipe.num_layers)
    confidence = np.zeros(recipe.num_layers)
    per_row = []
    with torch.no_grad():
        for i in range(0, len(test), 200):
            batch = to_batch(test[i : i + 200])
            out = model(batch.ids, batch.mask)
            hits += int((out.logits.argmax(dim=1) == batch.values).sum())
            measured = activations(out.routings, batch.mask)
            real = int(batch.mask.sum())
            rates = np.array([float(a.rate) for a in measured])
            tokens += real
            active += rates * real
            confidence += rates * real * np.array([float(a.confidence) for a in measured])
            per_row.append(torch.cat([a.per_row for a in measured], dim=1).numpy())
    majority = np.bincount([e.value for e in test]).max() / len(test)
    return Evaluation(
        accuracy=hits / len(test),
        majority=float(majority),
        rates=active / tokens,
        deviations=np.concatenate(per_row).std(axis=0),
        confidence=confidence / np.maximum(active, 1),
    )


def print_result(result: Evaluation, recipe: Recipe) -> None:
    """Say how good the model is and where it attends."""
    print()
    print(
        f"test accuracy        {result.accuracy:.3f}   on {recipe.test_count:,} expressions it has not seen"
    )
    print(f"  most common value  {result.majority:.3f}")
    print(f"  chance             {1 / 10:.3f}")
    print("activation           share of tokens that attend, and how sure the router is of them")
    for layer, (rate, confidence) in enumerate(zip(result.rates, result.confidence, strict=True), start=1):
        bar = "#" * round(40 * rate)
        print(f"  layer {layer}            {rate:.3f}   {confidence:.2f}  {bar}".rstrip())
    print()


def write_numbers(
    options: argparse.Namespace, recipe: Recipe, result: Evaluation, updates: int, seconds: float
) -> None:
    """Leave what was run and what came of it beside the picture."""
    import torch

    from seqboat.data.files import write_json

    numbers = {
        "recipe": asdict(recipe),
        "seed": options.seed,
        "minutes": options.minutes,
        "updates": updates,
        "seconds": round(seconds, 1),
        "versions": {"seqboat": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        "accuracy": result.accuracy,
        "most_common_value": result.majority,
        "activation_rate": result.rates.tolist(),
        "confidence": result.confidence.tolist(),
    }
    path = options.out / "demo.json"
    write_json(path, numbers, indent=2)
    print(f"numbers  {path}")


def draw(path: Path, model: Classifier, shown: Expression, result: Evaluation) -> None:
    """Write the picture, if matplotlib is there."""
    import torch

    try:
        from matplotlib.figure import Figure  # noqa: F401  (only to see whether it is there)

        from seqboat.figures import demo_figure, save_figure
    except ModuleNotFoundError:
        print(f"picture  none: {missing('matplotlib', 'it')}")
        return
    batch = to_batch([shown])
    with torch.no_grad():
        out = model(batch.ids, batch.mask)
    said = int(out.logits.argmax())
    confidence = torch.stack([r.confidence[0, :, 0] for r in out.routings if r is not None]).numpy()
    caption = f"one expression worth {shown.value}; the model says {said}; white: not activated"
    save_figure(demo_figure(result.rates, result.deviations, shown.tokens, confidence, caption), path)
    print(f"picture  {path}")


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(83.2)
    '1:23'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
