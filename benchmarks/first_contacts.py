"""First contacts: small tasks that a new user tries, with the library's defaults beside what they would use instead.

    python benchmarks/first_contacts.py --out docs/first-contacts.json --reviews imdb_train.jsonl.xz
    python benchmarks/first_contacts.py --out contacts.json --tasks adding --models seqboat encoder --seeds 0
    python benchmarks/first_contacts.py --out docs/first-contacts.json --page docs/first-contacts.md

Every model is an input layer, two layers of one kind and a linear head, trained with plain AdamW, batches of 32 and
a constant learning rate (0.003) after ten steps of warm-up: no recipe, nothing tuned for one of them. All models have
about as many parameters as the encoder layers (the width is chosen for that). Steps are the same for all, and the
processor time of each run is recorded: the table has the score after all steps, and the score when the fastest model
was done.

Tasks, small enough that all runs of five seeds take about half an hour of one processor:

    adding    the sum of two marked numbers of 50; mean squared error; 400 steps, learning rate 0.001
    copy      4 tokens among 24 blanks, to be repeated in their order; 200 steps
    recall    the value of one of 4 pairs, in 32 tokens; 250 steps
    listops   nested expressions of up to 30 tokens; 150 steps
    longer    the same; 450 steps
    flat      the same without nesting, one list of up to 12 numbers; 150 steps
    needle    which of 8 symbols follows the marker, in 24 tokens; 300 steps
    tickets   reviews in three classes by rating, their first 128 bytes; 100 steps; needs --reviews FILE, the JSONL
              file of IMDB training reviews

Results are added to the JSON file run by run, with commit and command; runs that are there are not repeated, and
files of several processes can be read together (--out FILE --also FILE ...). --page writes table and figure into a
document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reviews import read_reviews
from seqboat import AsTensor, GAUConfig, S4DConfig, SeqBoatConfig
from seqboat.mixers.ssm import S4DLayerConfig
from seqboat.ops.positions import sinusoids
from seqboat.tasks.copy import CopyTask, CopyTaskConfig
from seqboat.tasks.recall import RecallTask, RecallTaskConfig
from seqboat.tasks.short_listops import ShortListOpsTask, ShortListOpsTaskConfig
from seqboat.tasks.task import IGNORE
from seqboat.training.record import commit

BATCH = 32
LAYERS = 2
WARMUP = 10
"""Steps until the learning rate is highest."""
EVERY = 25
"""Steps between entries of a run's curve."""
HELD_OUT = 4
"""Batches that scores of a curve are computed on."""
LAST = 16
"""Batches that the last score is computed on."""
ROOT = Path(__file__).parents[1]


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
    lr: float = 0.003
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

    return Contact(draw, 1, None, 400, 0.001)


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
        inputs = random.integers(2, 10, size=(BATCH, 24))
        rows, places = np.arange(BATCH), random.integers(23, size=BATCH)
        inputs[rows, places] = 1
        return Batch(torch.tensor(inputs), None, torch.tensor(inputs[rows, places + 1] - 2))

    return Contact(draw, 8, 10, 300)


def tickets(path: str | None) -> Contact:
    if path is None:
        sys.exit("tickets needs --reviews FILE: the JSONL file of IMDB training reviews, plain or .xz")
    reviews = read_reviews(path, 3, 3000)
    length = 128
    texts = np.zeros((3000, length), np.int64)
    sizes, labels = np.zeros(3000, np.int64), np.zeros(3000, np.int64)
    for row, (review, label) in enumerate(reviews):
        text = np.frombuffer(review.encode()[:length], np.uint8)
        texts[row, : len(text)], sizes[row], labels[row] = text, len(text), label

    def draw(random: np.random.Generator, held_out: bool) -> Batch:
        rows = 2700 + random.permutation(300)[:BATCH] if held_out else random.integers(2700, size=BATCH)
        mask = np.arange(length) < sizes[rows, None]
        return Batch(*(torch.tensor(part) for part in (texts[rows], mask, labels[rows])))

    return Contact(draw, 3, 256, 100)


@cache
def contact(name: str, reviews: str | None) -> Contact:
    """A task by its name."""
    if name == "adding":
        return adding()
    if name == "needle":
        return needle()
    if name == "tickets":
        return tickets(reviews)
    if name == "copy":
        return of_task(CopyTask(CopyTaskConfig(length=32, tokens=4)), 200)
    if name == "recall":
        return of_task(RecallTask(RecallTaskConfig(length=32, pairs=4, vocab=32)), 250)
    short = ShortListOpsTaskConfig(max_depth=3, max_tokens=30, train_size=5_000, eval_size=500)
    if name == "flat":
        short = replace(short, max_depth=2, max_arguments=12, min_tokens=8)
    return of_task(ShortListOpsTask(short), 450 if name == "longer" else 150)


TASKS = ("adding", "copy", "recall", "listops", "longer", "flat", "needle", "tickets")


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
    "table": lambda d, causal: Layers(
        SeqBoatConfig(causal=causal, gau=GAUConfig(positions="original", max_positions=128)), d
    ),
    "encoder": Encoder,
    "gru": GRU,
    "s4d": lambda d, causal: Layers(S4DLayerConfig(causal=causal, ssm=S4DConfig()), d),
}
"""Stacks by name. SeqBoat has its defaults and a bias table for short sequences; "table" has no rotary positions."""


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


@cache
def matched_width(task: Contact, name: str) -> int:
    """The width at which a model has about as many parameters as the encoder of width 32."""
    if name == "encoder":
        return 32
    target = count(Model(task, "encoder", 32))
    return min(range(8, 97, 2), key=lambda width: abs(count(Model(task, name, width)) - target))


def loss_of(task: Contact, out: Tensor, targets: Tensor) -> Tensor:
    if task.outputs == 1:
        return F.mse_loss(out, targets)
    return F.cross_entropy(out.flatten(0, -2), targets.flatten(), ignore_index=IGNORE)


@torch.no_grad()
def score(task: Contact, model: Model, batches: int) -> float:
    random = np.random.default_rng(10_000)
    found, weights = [], []
    for _ in range(batches):
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


def steps_of(task: Contact, name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Train, and report steps, processor seconds and score at regular intervals."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    model = Model(task, name, matched_width(task, name))
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    spent = 0.0
    for step in range(1, task.steps + 1):
        batch = task.draw(random, False)
        start = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = task.lr * min(step / WARMUP, 1)
        loss = loss_of(task, model.train()(batch.inputs, batch.mask), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent += time.process_time() - start
        if step % EVERY == 0:
            found = score(task, model, LAST if step == task.steps else HELD_OUT)
            yield {"step": step, "seconds": round(spent, 2), "score": round(found, 4)}


def read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.pstdev(values):.3f}"


NAMES = {
    "seqboat": "SeqBoat",
    "table": "SeqBoat, table",
    "encoder": "encoder layer",
    "gru": "GRU",
    "s4d": "S4D",
}


def is_solved(task: str, value: float) -> bool:
    return value <= 0.02 if task == "adding" else value >= 0.9


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
            reached = [
                next((point["step"] for point in run["curve"] if is_solved(task, point["score"])), None)
                for run in group
            ]
            found = [step for step in reached if step is not None]
            steps = f"{statistics.mean(found):.0f}" if found else "never"
            if found and None in reached:
                steps = f"{len(found)} of {len(reached)} seeds"
            pace = statistics.mean(
                1000 * run["curve"][-1]["seconds"] / run["curve"][-1]["step"] for run in group
            )
            lines.append(
                f"| {task} | {NAMES[name]} | {group[0]['parameters']:,} | {len(group)} | {spread(last)} | "
                f"{spread(early)} | {steps} | {pace:.0f} |"
            )
    return "\n".join(lines)


def verdicts(runs: list[dict[str, Any]]) -> str:
    """SeqBoat beside the better of encoder layer and GRU, as Markdown: worse by more than the spread, or not.

    The spread is the standard deviation of the difference of two means over the seeds, twice.
    """
    lines = ["| task | SeqBoat | better of encoder layer and GRU | difference | spread | worse by more |"]
    lines.append("|---|---|---|---|---|---|")
    for task in dict.fromkeys(run["task"] for run in runs):
        sign = -1 if task == "adding" else 1
        last: dict[str, list[float]] = {}
        for run in runs:
            if run["task"] == task:
                last.setdefault(run["model"], []).append(run["curve"][-1]["score"])
        if not {"seqboat", "encoder", "gru"} <= set(last):
            continue
        rival = max(("encoder", "gru"), key=lambda name: sign * statistics.mean(last[name]))
        means = [statistics.mean(last[name]) for name in ("seqboat", rival)]
        noise = 2 * sum(statistics.pvariance(last[n]) / len(last[n]) for n in ("seqboat", rival)) ** 0.5
        behind = sign * (means[1] - means[0])
        lines.append(
            f"| {task} | {means[0]:.3f} | {means[1]:.3f} ({NAMES[rival]}) | {means[0] - means[1]:+.3f} | "
            f"{noise:.3f} | {'yes' if behind > noise else 'no'} |"
        )
    return "\n".join(lines)


def write_page(runs: list[dict[str, Any]], page: Path) -> None:
    """Write tables into a document."""
    sys.path.append(str(ROOT / "tools"))
    from pages import replace_part

    order = {name: place for place, name in enumerate(MODELS)}
    runs = sorted(runs, key=lambda run: (TASKS.index(run["task"]), order[run["model"]], run["seed"]))
    names = dict.fromkeys((run["commit"] or "?")[:7] for run in runs)
    commits = ", ".join(f"`{name}`" for name in names)
    seeds = " ".join(str(seed) for seed in sorted({run["seed"] for run in runs}))
    lead = (
        f"Written by `python benchmarks/first_contacts.py --out FILE --page {page.as_posix()}` from {len(runs)} runs "
        f"(commit {commits}; seeds {seeds}; one thread of a busy machine, so that times tell little). "
        "Means ± std over the seeds; scores are accuracies on held-out examples, for adding the "
        "mean squared error."
    )
    replace_part(page, "first contacts", "\n\n".join([textwrap.fill(lead, 118), verdicts(runs), table(runs)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all runs")
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="further files, for the table")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--reviews", help="IMDB training reviews (JSONL, may be .xz), for the task tickets")
    parser.add_argument(
        "--table", action="store_true", help="train nothing: print the table of existing runs"
    )
    parser.add_argument("--page", type=Path, help="train nothing: write the table into this document")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [run for path in (options.out, *options.also) for run in read(path)]
    if options.page is not None:
        write_page(runs, options.page)
    elif not options.table:
        train_all(options, runs)
    print(table(runs))
    print(verdicts(runs))


def train_all(options: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """Train what is missing; every run is written when it has finished."""
    done = {(run["task"], run["model"], run["seed"]) for run in runs}
    for seed in options.seeds:
        for task_name in options.tasks:
            task = contact(task_name, options.reviews)
            for name in options.models:
                if (task_name, name, seed) in done:
                    continue
                curve = list(steps_of(task, name, seed))
                width = matched_width(task, name)
                run = {
                    "task": task_name,
                    "model": name,
                    "seed": seed,
                    "lr": task.lr,
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


if __name__ == "__main__":
    main()
