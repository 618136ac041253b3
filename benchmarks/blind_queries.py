"""Does squared ReLU leave queries without a key? The first steps of a recipe, watched.

    python benchmarks/blind_queries.py speech-small --steps 100 --every 20
    python benchmarks/blind_queries.py speech-small --steps 100 --every 20 --model.mixer.gau.attention=laplace

Trains a recipe for some steps, with its optimizer, schedule and batch size, in an order of examples that depends on
the seed alone. At the start and every few steps it prints, for each layer: the fraction of active tokens, and the
fraction of queries whose attention weights are all zero, measured on four examples spread over the validation split.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from seqboat.analysis.measures import measure
from seqboat.analysis.traces import Examples
from seqboat.recipes import find_recipe
from seqboat.tasks.task import Subset, apply_model
from seqboat.training.config import RunConfig, override
from seqboat.training.optim import build_optimizer, learning_rate, set_learning_rate

EXAMPLES = 4
"""Validation examples that are measured."""


class Seen(NamedTuple):
    """The layers after some steps."""

    step: int
    loss: float | None
    """mean over the steps since the last measurement"""
    active: list[float]
    blind: list[float | None]
    """None where no token is active"""


def watch(config: RunConfig, steps: int, every: int) -> Iterator[Seen]:
    """Train, and measure at the start and every few steps."""
    torch.manual_seed(config.seed)
    task = config.build_task()
    model = config.build_model(task)
    data, held_out = task.dataset("train"), task.dataset("val")
    some = Subset(held_out, np.arange(0, len(held_out), max(1, len(held_out) // EXAMPLES))[:EXAMPLES])
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(config.seed)).tolist()
    optimizer = build_optimizer(model, config.optimizer)

    def look(step: int, losses: Sequence[float]) -> Seen:
        found = measure(Examples(model, config, task, some, step), "val", batch_size=EXAMPLES).layers
        layers = [layer for layer in found if layer is not None]
        model.train()
        return Seen(
            step,
            sum(losses) / len(losses) if losses else None,
            [layer.counts.active / layer.counts.total for layer in layers],
            [layer.blind and layer.blind.active / layer.blind.total for layer in layers],
        )

    yield look(0, [])
    losses: list[float] = []
    size = config.training.batch_size
    for step in range(1, steps + 1):
        batch = task.collate([data[order[(step * size + i) % len(order)]] for i in range(size)])
        set_learning_rate(optimizer, learning_rate(step, config.optimizer.lr, config.schedule))
        loss = task.loss(apply_model(model, task.kind, batch), batch).mean
        optimizer.zero_grad()
        loss.backward()
        if config.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        optimizer.step()
        losses.append(loss.item())
        if step % every == 0:
            yield look(step, losses)
            losses = []


def percent(values: Sequence[float | None]) -> str:
    """Rates of layers, `-` where there is none."""
    return " ".join("-" if value is None else f"{100 * value:.1f}" for value in values)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe", help="name of a recipe; its settings follow as in `seqboat train`")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    options, fields = parser.parse_known_args(arguments)
    config = override(find_recipe(options.recipe)(), fields)
    print("step  loss  active %, by layer  blind %, by layer")
    for seen in watch(config, options.steps, options.every):
        loss = "-" if seen.loss is None else f"{seen.loss:.3f}"
        print(f"{seen.step}  {loss}  {percent(seen.active)}  {percent(seen.blind)}", flush=True)


if __name__ == "__main__":
    main()
