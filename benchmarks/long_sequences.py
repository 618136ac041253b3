"""Two long inputs in which an early event matters late, and what one would use instead of SeqBoat.

    python benchmarks/long_sequences.py --out long.json                         # both, all models, 2,048 steps
    python benchmarks/long_sequences.py --out long.json --write DIR             # write the tables only
    python benchmarks/long_sequences.py --out long.json --page docs/long-sequences.md

machines: a vibration and a load sensor, a reading per step. Every machine has one short burst of vibration and one
load peak somewhere, at least an eighth of the series apart. If the burst comes first, the part was cracked when the
load came, and the machine fails; if it comes after, nothing happens. Both kinds have the same events, so no mean,
extreme or histogram of a series tells them apart.

logs: lines of a server's log as bytes. Each log has the line `disk full` and the line `backup started` among ordinary
ones. A backup that starts after the disk is full is damaged; one that starts before is not. The words are the same.

Models, each with the same rows, steps and batches (AdamW, learning rate 0.003):

    bag of words, summary statistics   the baselines that `seqboat train classify` prints
    GRU                                in both directions, mean of its outputs
    Transformer                        two encoder layers on what it can afford: means of 8 steps of a series, or the
                                       last 256 bytes of a log
    SeqBoat                            the recipe classify with `--model.mixer.ssm s4d`, which remembers long
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from seqboat.ops.positions import sinusoids
from seqboat.own.task import OwnTask
from seqboat.recipes import find_recipe
from seqboat.tasks import ClassifyTaskConfig
from seqboat.training.config import override
from seqboat.training.record import commit

ROOT = Path(__file__).parents[1]
PATCH = 8
"""Steps of a series whose mean is a token of the Transformer."""
LAST_BYTES = 256
"""Bytes of a log that the Transformer reads."""
NORMAL = (
    "GET /index 200 in {} ms",
    "user {} logged in",
    "cache hit for key {}",
    "job {} finished",
    "heartbeat {} ok",
    "retry {} of queue",
    "session {} closed",
)


def two_places(random: np.random.Generator, length: int, width: int) -> tuple[int, int]:
    """Places of two events in a sequence, an eighth of it apart or more, the first one first."""
    gap = max(length // 8, width)
    first = int(random.integers(length - gap - width))
    return first, int(random.integers(first + gap, length - width + 1))


def machine(random: np.random.Generator, length: int, fails: bool) -> NDArray[np.float64]:
    """Vibration and load (length, 2)."""
    series = 0.3 * random.standard_normal((length, 2))
    width = 12
    burst, peak = two_places(random, length, width)
    if not fails:
        burst, peak = peak, burst
    steps = np.arange(width)
    series[burst : burst + width, 0] += 3 * np.sin(steps * np.pi / 2 + 0.5)
    series[peak : peak + width, 1] += 2.5
    return series.round(3)


def log(random: np.random.Generator, length: int, damaged: bool) -> str:
    """A log of at most `length` bytes."""
    lines: list[str] = []
    size = 0
    while True:
        line = NORMAL[random.integers(len(NORMAL))].format(random.integers(1000))
        size += len(line) + 1
        if size + 28 > length:
            break
        lines.append(line)
    first, second = two_places(random, len(lines), 1)
    events = ["disk full", "backup started"] if damaged else ["backup started", "disk full"]
    lines.insert(second, events[1])
    lines.insert(first, events[0])
    return "\n".join(lines)


def write_table(name: str, path: Path, rows: int, length: int) -> None:
    """Write a table of examples, half of each class."""
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            if name == "machines":
                series = machine(random, length, row % 2 == 0).tolist()
                record: dict[str, Any] = {"text": series, "label": ["fails", "runs"][row % 2]}
            else:
                record = {"text": log(random, length, row % 2 == 0), "label": ["damaged", "whole"][row % 2]}
            file.write(json.dumps(record) + "\n")


class GRU(nn.Module):
    """An input layer and torch's GRU."""

    def __init__(self, task: OwnTask, d_model: int) -> None:
        super().__init__()
        vocab = task.vocab
        self.embed = nn.Linear(task.channels, d_model) if vocab is None else nn.Embedding(vocab, d_model)
        self.layer = nn.GRU(d_model, d_model // 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(d_model, task.classes)

    def forward(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        return self.head(mean(self.layer(self.embed(inputs))[0], mask))


class Transformer(nn.Module):
    """Encoder layers on means of some steps, or on the last tokens."""

    def __init__(self, task: OwnTask, d_model: int) -> None:
        super().__init__()
        vocab = task.vocab
        self.embed = nn.Linear(task.channels, d_model) if vocab is None else nn.Embedding(vocab, d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d_model, 4, 4 * d_model, 0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(d_model, task.classes)

    def forward(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        if inputs.is_floating_point():
            x, mask = F.avg_pool1d(inputs.mT, PATCH, ceil_mode=True).mT, None
        else:
            lengths = inputs.new_full((len(inputs),), inputs.shape[1]) if mask is None else mask.sum(1)
            places = lengths[:, None] - LAST_BYTES + torch.arange(LAST_BYTES)
            mask = places >= 0
            x = inputs.gather(1, places.clamp(min=0))
        x = self.embed(x)
        x = x + sinusoids(torch.arange(x.shape[1])[None], x.shape[2]).to(x.dtype)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=None if mask is None else ~mask)
        return self.head(mean(x, mask))


class SeqBoatClassifier(nn.Module):
    """The model of the recipe classify."""

    def __init__(self, task: OwnTask, settings: list[str]) -> None:
        super().__init__()
        config = override(
            find_recipe("classify")(), ["--model.mixer.ssm=s4d", *(f"--{setting}" for setting in settings)]
        )
        self.model = config.build_model(task)

    def forward(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        return self.model(inputs, mask).logits


def mean(x: Tensor, mask: Tensor | None) -> Tensor:
    return x.mean(1) if mask is None else (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def build(name: str, task: OwnTask, settings: list[str]) -> nn.Module:
    if name == "seqboat":
        return SeqBoatClassifier(task, settings)
    return GRU(task, 64) if name == "gru" else Transformer(task, 64)


MODELS = ("seqboat", "gru", "transformer")
NAMES = {"seqboat": "SeqBoat", "gru": "GRU", "transformer": "Transformer, cut"}


@torch.no_grad()
def accuracy(model: nn.Module, task: OwnTask, batch: int) -> float:
    data, right = task.dataset("val"), 0
    for start in range(0, len(data), batch):
        part = task.collate([data[i] for i in range(start, min(start + batch, len(data)))])
        right += int((model.eval()(part.inputs, part.mask).argmax(1) == part.targets).sum())
    return right / len(data)


def run(task: OwnTask, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one model; its accuracy on held-out rows and its processor time."""
    torch.manual_seed(options.seed)
    random = np.random.default_rng(options.seed)
    model, data = build(name, task, options.set), task.dataset("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    start = time.process_time()
    for step in range(1, options.steps + 1):
        part = task.collate([data[int(i)] for i in random.integers(len(data), size=options.batch)])
        for group in optimizer.param_groups:
            group["lr"] = 0.003 * min(step / 20, 1, 2 * (1 - (step - 1) / options.steps))
        loss = F.cross_entropy(model.train()(part.inputs, part.mask), part.targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"{name} step {step}: loss {loss.item():.3f}", flush=True)
    seconds = time.process_time() - start
    return {
        "model": name,
        "accuracy": accuracy(model, task, options.batch),
        "seconds": round(seconds, 1),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def table(records: list[dict[str, Any]]) -> str:
    """All results as Markdown."""
    lines = ["| data | model | accuracy on held-out rows | parameters | processor time of training |"]
    lines.append("|---|---|---|---|---|")
    for record in records:
        for name, score in record["baselines"].items():
            lines.append(f"| {record['data']} | {name} | {score:.3f} | | |")
        lines += [
            f"| {record['data']} | {NAMES[found['model']]} | {found['accuracy']:.3f} | {found['parameters']:,} | "
            f"{found['seconds'] / 60:.1f} minutes |"
            for found in record["models"]
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of all results")
    parser.add_argument("--data", nargs="+", default=["machines", "logs"], choices=("machines", "logs"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--length", type=int, default=2048, help="steps of a series, bytes of a log")
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="+", default=[], help="settings of SeqBoat, as model.d_model=32")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the tables to a folder, and stop")
    parser.add_argument("--page", type=Path, help="train nothing: write the table into this document")
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else []
    if options.page is not None:
        sys.path.append(str(ROOT / "tools"))
        from pages import replace_part

        commits = ", ".join(f"`{name}`" for name in dict.fromkeys(record["commit"][:7] for record in records))
        commands = ", ".join(f"`{command}`" for command in dict.fromkeys(r["command"] for r in records))
        lead = f"One seed, one thread of a busy machine; commit {commits}; {commands}."
        replace_part(options.page, "long sequences", f"{lead}\n\n{table(records)}")
        return
    folder = options.write or options.out.parent
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.data:
        path = folder / f"{name}.jsonl"
        write_table(name, path, options.rows, options.length)
        if options.write:
            print(path)
            continue
        kind = "series" if name == "machines" else "text"
        task = ClassifyTaskConfig(train=str(path), input=kind, max_length=options.length).build()
        scores = {found: value["accuracy"] for found, value in task.baselines("val").items()}
        record: dict[str, Any] = {
            "data": name,
            "baselines": scores,
            "models": [],
            "commit": commit(),
            "command": " ".join(["python", "benchmarks/long_sequences.py", *sys.argv[1:]]),
        }
        records.append(record)
        for model in options.models:
            record["models"].append(run(task, model, options))
            options.out.write_text(json.dumps(records, indent=1), encoding="utf-8")
            print(record["models"][-1], flush=True)
    if not options.write:
        print(table(records))


if __name__ == "__main__":
    main()
