"""First contacts: small tasks that a new user tries, with the library's defaults beside what they would use instead.

    python benchmarks/first_contacts.py --out first_contacts.json --seeds 0 1 2 3 4
    python benchmarks/first_contacts.py --out first_contacts.json --tasks adding --models seqboat encoder
    python benchmarks/first_contacts.py --out first_contacts.json --table

Every model is an input layer, layers of one kind and a linear head, trained with plain AdamW and a constant learning
rate after ten steps of warm-up: no recipe, nothing tuned for one of them. All models have about as many parameters as
the encoder layers (the width is chosen for that). Steps are the same for all, and the processor time of each run is
recorded: the table has the score after all steps, and the score at the time when the fastest model was done.

Tasks: adding (two marked numbers of 50; mean squared error), copy (4 tokens among 32), recall (4 pairs), listops
(expressions of up to 30 tokens), needle (which symbol follows the one marker in 128 tokens), tickets (reviews in
three classes by rating, 256 bytes; needs --reviews FILE, the JSONL file of IMDB training reviews).

Results are added to the JSON file run by run, with commit and command; runs that are there are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reviews import read_reviews
from seqboat import AsTensor, GAUConfig, S4DConfig, SeqBoatConfig
from seqboat.mixers.ssm.s4d import S4DLayerConfig
from seqboat.ops.positions import sinusoids
from seqboat.tasks.base import IGNORE
from seqboat.tasks.synthetic.copy import CopyTask, CopyTaskConfig
from seqboat.tasks.synthetic.recall import RecallTask, RecallTaskConfig
from seqboat.tasks.synthetic.short_listops import ShortListOpsTask, ShortListOpsTaskConfig
from seqboat.training.provenance import commit

BATCH = 32
LAYERS = 2
EVERY = 20
"""Steps between entries of a run's curve."""
HELD_OUT = 8
"""Batches that scores are computed on."""


class Batch(NamedTuple):
    """Inputs (batch, time) or (batch, time, channels), where they are real, and targets."""

    inputs: Tensor
    mask: Tensor | None
    targets: Tensor


class Contact(NamedTuple):
    """A task."""

    draw: Callable[[np.random.Generator, bool], Batch]
    """a batch; the second argument tells whether it is held out"""
    outputs: int
    vocab: int | None
    steps: int
    per_token: bool = False
    causal: bool = False

    @property
    def metric(self) -> str:
        return "mean squared error" if self.outputs == 1 else "accuracy"


def adding() -> Contact:
    def draw(random: np.random.Generator, held_out: bool) -> Batch:
        time_steps = 50
        values = random.random((BATCH, time_steps))
        marks = np.zeros_like(values)
        rows, half = np.arange(BATCH), time_steps // 2
        marks[rows, random.integers(half, size=BATCH)] = 1
        marks[rows, half + random.integers(half, size=BATCH)] = 1
        inputs = torch.tensor(np.stack([values, marks], -1), dtype=torch.float32)
        return Batch(inputs, None, torch.tensor((values * marks).sum(1), dtype=torch.float32))

    return Contact(draw, 1, None, 400)


def of_task(task: Any, steps: int) -> Contact:
    """A task of the package, with examples drawn by number."""
    parts = {held_out: task.dataset("val" if held_out else "train") for held_out in (False, True)}

    def draw(random: np.random.Generator, held_out: bool) -> Batch:
        data = parts[held_out]
        batch = task.collate([data[int(i)] for i in random.integers(len(data), size=BATCH)])
        return Batch(batch.inputs, batch.mask, batch.targets)

    lm = task.kind == "lm"
    return Contact(draw, task.classes, task.vocab, steps, per_token=lm, causal=lm)


def needle() -> Contact:
    def draw(random: np.random.Generator, held_out: bool) -> Batch:
        inputs = random.integers(2, 18, size=(BATCH, 128))
        rows, places = np.arange(BATCH), random.integers(127, size=BATCH)
        inputs[rows, places] = 1
        return Batch(torch.tensor(inputs), None, torch.tensor(inputs[rows, places + 1] - 2))

    return Contact(draw, 16, 18, 400)


def tickets(path: str | None) -> Contact:
    if path is None:
        sys.exit("tickets needs --reviews FILE: the JSONL file of IMDB training reviews, plain or .xz")
    reviews = read_reviews(path, 3, 3000)
    length = 256
    texts = np.zeros((3000, length), np.int64)
    sizes, labels = np.zeros(3000, np.int64), np.zeros(3000, np.int64)
    for row, (review, label) in enumerate(reviews):
        text = np.frombuffer(review.encode()[:length], np.uint8)
        texts[row, : len(text)], sizes[row], labels[row] = text, len(text), label

    def draw(random: np.random.Generator, held_out: bool) -> Batch:
        rows = 2700 + random.permutation(300)[:BATCH] if held_out else random.integers(2700, size=BATCH)
        mask = np.arange(length) < sizes[rows, None]
        return Batch(*(torch.tensor(part) for part in (texts[rows], mask, labels[rows])))

    return Contact(draw, 3, 256, 400)


def contact(name: str, reviews: str | None) -> Contact:
    """A task by its name."""
    if name == "adding":
        return adding()
    if name == "needle":
        return needle()
    if name == "tickets":
        return tickets(reviews)
    if name == "copy":
        return of_task(CopyTask(CopyTaskConfig(length=32, tokens=4)), 400)
    if name == "recall":
        return of_task(RecallTask(RecallTaskConfig(length=32, pairs=4, vocab=32)), 600)
    short = ShortListOpsTaskConfig(max_depth=3, max_tokens=30, train_size=20_000, eval_size=500)
    return of_task(ShortListOpsTask(short), 400)


TASKS = ("adding", "copy", "recall", "listops", "needle", "tickets")


class Encoder(nn.Module):
    """torch's encoder layers; positions are added to the inputs."""

    positions = True

    def __init__(self, d_model: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d_model, 4, 4 * d_model, 0.0, batch_first=True) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        time_steps = x.shape[1]
        ahead = torch.ones(time_steps, time_steps, dtype=torch.bool).triu(1) if self.causal else None
        for layer in self.layers:
            x = layer(x, ahead, None if mask is None else ~mask)
        return x


class GRU(nn.Module):
    """torch's GRU, in both directions unless causal."""

    positions = False

    def __init__(self, d_model: int, causal: bool) -> None:
        super().__init__()
        size = d_model if causal else d_model // 2
        self.layer = nn.GRU(d_model, size, LAYERS, batch_first=True, bidirectional=not causal)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


class Layers(nn.Module):
    """Layers of this package."""

    positions = False

    def __init__(self, config: Any, d_model: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AsTensor(config.build(d_model)) for _ in range(LAYERS))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


MODELS: dict[str, Callable[[int, bool], nn.Module]] = {
    "seqboat": lambda d, causal: Layers(SeqBoatConfig(causal=causal, gau=GAUConfig(max_positions=128)), d),
    "encoder": Encoder,
    "gru": GRU,
    "s4d": lambda d, causal: Layers(S4DLayerConfig(causal=causal, ssm=S4DConfig()), d),
}
"""Stacks by name: SeqBoat with its defaults (and a table of positions for short sequences), and the others."""


class Model(nn.Module):
    """An input layer, a stack and a linear head on each token or on the mean."""

    def __init__(self, task: Contact, name: str, d_model: int) -> None:
        super().__init__()
        self.task, self.d_model = task, d_model
        self.embed = nn.Linear(2, d_model) if task.vocab is None else nn.Embedding(task.vocab, d_model)
        self.stack = MODELS[name](d_model, task.causal)
        self.head = nn.Linear(d_model, task.outputs)

    def forward(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embed(inputs)
        if self.stack.positions:
            x = x + sinusoids(torch.arange(x.shape[1])[None], self.d_model).to(x.dtype)
        y = self.stack(x, mask)
        if not self.task.per_token:
            y = y.mean(1) if mask is None else (y * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        out: Tensor = self.head(y)
        return out.squeeze(-1) if self.task.outputs == 1 else out


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def matched_width(task: Contact, name: str) -> int:
    """The width at which a model has about as many parameters as the encoder of width 32."""
    target = count(Model(task, "encoder", 32))
    return min(range(8, 97, 4), key=lambda width: abs(count(Model(task, name, width)) - target))


def loss_of(task: Contact, out: Tensor, targets: Tensor) -> Tensor:
    if task.outputs == 1:
        return F.mse_loss(out, targets)
    return F.cross_entropy(out.flatten(0, -2), targets.flatten(), ignore_index=IGNORE)


@torch.no_grad()
def score(task: Contact, model: Model) -> float:
    random = np.random.default_rng(10_000)
    found, weights = [], []
    for _ in range(HELD_OUT):
        batch = task.draw(random, True)
        out = model.eval()(batch.inputs, batch.mask)
        if task.outputs == 1:
            found.append(float(F.mse_loss(out, batch.targets)))
            weights.append(1)
        else:
            asked = batch.targets != IGNORE
            found.append(float((out.argmax(-1) == batch.targets)[asked].sum()))
            weights.append(int(asked.sum()))
    return sum(found) / sum(weights)


def steps_of(task: Contact, name: str, seed: int, lr: float) -> Iterator[dict[str, Any]]:
    """Train, and report steps, processor seconds and score at regular intervals."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    model = Model(task, name, matched_width(task, name))
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    spent = 0.0
    for step in range(1, task.steps + 1):
        batch = task.draw(random, False)
        start = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = lr * min(step / 10, 1)
        loss = loss_of(task, model.train()(batch.inputs, batch.mask), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent += time.process_time() - start
        if step % EVERY == 0:
            yield {"step": step, "seconds": round(spent, 2), "score": round(score(task, model), 4)}


def read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.pstdev(values):.3f}"


def table(runs: list[dict[str, Any]]) -> str:
    """All runs, as Markdown: mean and standard deviation over the seeds."""
    lines = [
        "| task | model | parameters | seeds | score, all steps | score, equal time | steps to 0.02 or 0.9 | ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in dict.fromkeys(run["task"] for run in runs):
        mine = [run for run in runs if run["task"] == task]
        fastest = min(run["curve"][-1]["seconds"] for run in mine)
        for name in dict.fromkeys(run["model"] for run in mine):
            group = [run for run in mine if run["model"] == name]
            last = [run["curve"][-1]["score"] for run in group]
            early = []
            for run in group:
                in_time = [point for point in run["curve"] if point["seconds"] <= fastest]
                early.append((in_time or run["curve"])[-1 if in_time else 0]["score"])
            good = (lambda s: s <= 0.02) if task == "adding" else (lambda s: s >= 0.9)
            reached = [next((p["step"] for p in run["curve"] if good(p["score"])), None) for run in group]
            steps = "never" if None in reached else f"{statistics.mean(s for s in reached if s):.0f}"
            if None in reached and any(reached):
                steps = f"{sum(s is not None for s in reached)} of {len(reached)} seeds"
            pace = statistics.mean(
                1000 * run["curve"][-1]["seconds"] / run["curve"][-1]["step"] for run in group
            )
            lines.append(
                f"| {task} | {name} | {group[0]['parameters']:,} | {len(group)} | {spread(last)} | {spread(early)} | "
                f"{steps} | {pace:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all runs")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--reviews", help="IMDB training reviews (JSONL, may be .xz), for the task tickets")
    parser.add_argument(
        "--table", action="store_true", help="train nothing: print the table of existing runs"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = read(options.out)
    if not options.table:
        done = {(run["task"], run["model"], run["seed"]) for run in runs}
        for seed in options.seeds:
            for task_name in options.tasks:
                task = contact(task_name, options.reviews)
                for name in options.models:
                    if (task_name, name, seed) in done:
                        continue
                    curve = list(steps_of(task, name, seed, options.lr))
                    width = matched_width(task, name)
                    run = {
                        "task": task_name,
                        "model": name,
                        "seed": seed,
                        "metric": task.metric,
                        "width": width,
                        "parameters": count(Model(task, name, width)),
                        "command": " ".join(["python", "benchmarks/first_contacts.py", *sys.argv[1:]]),
                        "commit": commit(),
                        "curve": curve,
                    }
                    runs.append(run)
                    options.out.write_text(json.dumps(runs), encoding="utf-8")
                    print(f"{task_name} {name} seed {seed}: {curve[-1]}", flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()
