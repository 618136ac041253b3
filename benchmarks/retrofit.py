"""What a retrofit costs and saves: quality against the fraction of active tokens, before and after a short tuning.

    python benchmarks/retrofit.py --out runs/retrofit

A small decoder of transformers (Llama's layout; 1.2 million parameters unless `--width` and `--layers` say otherwise)
is trained on bytes of enwik8, or of any file (`--text`). Then, from the same weights and on the same batches:

- dense: it is trained further as it is;
- sparse: it is retrofitted and trained as long, while the fraction of tokens that the feed-forward blocks of all
  layers but the first, or these and attention, process falls from all to 75, 50 or 30 %.

"Before" is the retrofitted model with routers that have learned nothing: tokens are picked at random, though the same
token in the same context is always picked alike. Quality is in bits per byte of validation text.

Speed is measured on a larger model with random weights, where Python is not most of the time: the original and the
retrofitted model take turns. Every part is kept in the folder as it is done, so that a run that was stopped continues
with the next part; the tables are printed from what is there, and `--figure` draws it.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from seqboat import RateSchedule, Retrofit, retrofit
from seqboat.bench.measure import machine, quartiles
from seqboat.plotting import save_figure
from seqboat.tasks.enwik8 import BORDERS, Enwik8TaskConfig
from seqboat.tasks.segments import SegmentDataset
from seqboat.tasks.task import BYTES, Dataset

CONTEXT = 128
BATCH = 8
EVAL_BATCHES = 24
ROUTER_SCALE = 1.0
"""Learning rate of the routers, as a multiple of that of the model."""

FEED_FORWARD = {"model.layers.[1-9].mlp": "tokens"}
PLACES: dict[str, Any] = {
    "feed-forward": FEED_FORWARD,
    "attention and feed-forward": {"model.layers.[1-9].self_attn": "sequence", **FEED_FORWARD},
}
"""What is retrofitted: blocks of all layers but the first, which every byte needs to see the one before it."""
RUNS = [
    ("feed-forward", 0.5),
    ("attention and feed-forward", 0.5),
    ("feed-forward", 0.3),
    ("feed-forward", 0.75),
    ("attention and feed-forward", 0.75),
    ("attention and feed-forward", 0.3),
]
"""Which modules, and the fraction of tokens that they process after tuning; the most important first."""


def make_model(width: int, layers: int, heads: int, context: int) -> LlamaForCausalLM:
    """A decoder with random weights."""
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        initializer_range=0.7 / math.sqrt(width),  # small models start slowly from the usual 0.02
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def datasets(data: str, text: Path | None) -> tuple[Dataset, Dataset]:
    """Segments to train on and to validate with."""
    if text is None:
        task = Enwik8TaskConfig(data_dir=data, segment=CONTEXT).build()
        return task.whole("train"), task.whole("val")
    store = {"bytes": np.frombuffer(text.read_bytes(), np.uint8)}
    size = len(store["bytes"])
    borders = {split: [round(border * size) for border in BORDERS[split]] for split in ("train", "val")}
    train, val = (
        SegmentDataset(store, "bytes", start=start, end=end, segment=CONTEXT, whole=True)
        for start, end in borders.values()
    )
    return train, val


def batches(data: Dataset, count: int, seed: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets (BATCH, CONTEXT); drawn at random, or spread evenly over the data without a seed."""
    if seed is None:
        rows = np.linspace(0, len(data) - 2, count * BATCH).astype(int)  # the last segment may be shorter
    else:
        rows = np.random.default_rng(seed).integers(0, len(data), count * BATCH)
    for start in range(0, len(rows), BATCH):
        examples = [data[int(row)] for row in rows[start : start + BATCH]]
        yield (
            torch.from_numpy(np.stack([example.inputs for example in examples])),
            torch.from_numpy(np.stack([np.asarray(example.target) for example in examples])),
        )


def bits(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Bits per byte of a batch."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / math.log(2)


@torch.no_grad()
def evaluate(model: nn.Module, val: Dataset) -> float:
    """Bits per byte of validation text."""
    model.eval()
    scores = [bits(model, *batch).item() for batch in batches(val, EVAL_BATCHES, None)]
    model.train()
    return sum(scores) / len(scores)


def fit(
    model: nn.Module,
    data: Dataset,
    steps: int,
    lr: float,
    seed: int,
    label: str,
    sparse: Retrofit | None = None,
    rate: float = 1.0,
) -> None:
    """Train, with a linear warm-up of 20 steps and a linear decay to zero."""
    groups = [{"params": [p for n, p in model.named_parameters() if ".sparse." not in n], "scale": 1.0}]
    if sparse is not None:
        groups.append({"params": sparse.router_parameters(), "scale": ROUTER_SCALE})
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    # the budget is reached after a quarter of the steps; the rest is for adapting to it
    schedule = RateSchedule(final=rate, begin=steps // 20, steps=max(steps // 5, 1))
    begin = time.perf_counter()
    for step, batch in enumerate(batches(data, steps, seed)):
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"] * min((step + 1) / 20, 1 - step / steps)
        if sparse is not None:
            sparse.set_rate(schedule(step))
        loss = bits(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 24 or step == steps - 1:
            spent = time.perf_counter() - begin
            print(f"  {label}: {step + 1}/{steps}  {loss.item():.3f} bits  {spent:.0f} s", file=sys.stderr)


class Results:
    """Numbers by name in a file that is rewritten after each part."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "retrofit-results.json"
        self.content: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def put(self, name: str, value: Any) -> None:
        self.content[name] = value
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.content, indent=2) + "\n", encoding="utf-8")
        new.replace(self.path)


def make_base(
    results: Results, train: Dataset, val: Dataset, steps: int, width: int, layers: int
) -> LlamaForCausalLM:
    """The model that everything starts from: trained here, or read from the folder."""
    torch.manual_seed(0)
    model = make_model(width, layers, 4, CONTEXT)
    file = results.folder / "base.safetensors"
    if "base" in results.content and file.exists():
        model.load_state_dict(load_file(file))
    else:
        fit(model, train, steps, 4e-3, 0, "base")
        save_file(model.state_dict(), file)
        count = sum(p.numel() for p in model.parameters())
        results.put(
            "base",
            {
                "bits": evaluate(model, val),
                "steps": steps,
                "width": width,
                "layers": layers,
                "parameters": count,
            },
        )
    return model.train()


def tune(
    results: Results,
    base: LlamaForCausalLM,
    train: Dataset,
    val: Dataset,
    steps: int,
    place: str,
    rate: float,
) -> None:
    """Train a copy of the base for some more steps: as it is, or with a budget."""
    name = f"{place} {rate:.0%}"
    if name in results.content:
        return
    model: Any = copy.deepcopy(base)
    torch.manual_seed(1)
    if rate == 1:
        fit(model, train, steps, 2e-3, 1, name)
        results.put(name, {"bits": evaluate(model, val), "steps": steps, "share": 1.0})
        return
    sparse = retrofit(model, PLACES[place])
    sparse.set_rate(rate)
    sparse.calibrate({"input_ids": inputs} for inputs, _ in batches(train, 8, 2))
    before = evaluate(model, val)
    sparse.set_rate(1.0)
    fit(model, train, steps, 2e-3, 1, name, sparse, rate)
    sparse.calibrate({"input_ids": inputs} for inputs, _ in batches(train, 8, 2))
    sparse.reset_statistics()
    after = evaluate(model, val)
    rates = sparse.rates()
    results.put(
        name,
        {
            "before": before,
            "bits": after,
            "steps": steps,
            "share": rate,
            "rates": {module: round(rate, 3) for module, rate in rates.items()},
            "exact": same_with_and_without_cache(model, val),
        },
    )
    folder = results.folder / name.replace(" ", "-").replace("%", "")
    model.save_pretrained(folder, state_dict=sparse.original_state_dict())
    sparse.save(folder)


def same_with_and_without_cache(model: Any, val: Dataset) -> bool:
    """Whether greedy generation is the same with the sparse cache and without any, in double precision."""
    model = copy.deepcopy(model).double().eval()
    prompt = next(batches(val, 1, None))[0][:2, :64]
    settings = {"max_new_tokens": 32, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    return torch.equal(
        model.generate(prompt, **settings), model.generate(prompt, use_cache=False, **settings)
    )


def measure_speed(results: Results, rounds: int) -> None:
    """Seconds of the original and of retrofitted models that take half of their tokens, in turns."""
    if "speed" in results.content:
        return
    torch.manual_seed(0)
    dense = make_model(768, 4, 12, 1024).eval()
    models: dict[str, Any] = {"dense": dense}
    handles: dict[str, Retrofit] = {}
    for place, select in PLACES.items():
        models[place] = copy.deepcopy(dense)
        handles[place] = sparse = retrofit(models[place], select)
        sparse.set_rate(0.5)
        sparse.calibrate({"input_ids": draw(1, 256), "use_cache": False} for _ in range(4))
        sparse.reset_statistics()
    prompt, coming = draw(4, 496), draw(4, 16)
    with torch.no_grad():
        caches = {
            (key, rows): model(prompt[:rows], use_cache=True, logits_to_keep=1).past_key_values
            for key, model in models.items()
            for rows in (1, 4)
        }

    @torch.no_grad()
    def prefill(key: str) -> None:
        models[key](prompt[:1], use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def decode(key: str, rows: int) -> None:
        for token in coming[:rows].split(1, dim=1):
            models[key](token, past_key_values=caches[key, rows])
        caches[key, rows].crop(-coming.shape[1])

    def generate(key: str) -> None:
        # sampled from random weights, so that the routers see something new at every step
        torch.manual_seed(0)
        mask = torch.ones_like(prompt[:1])
        models[key].generate(prompt[:1], attention_mask=mask, max_new_tokens=16, do_sample=True)

    def step(key: str) -> None:
        models[key].train()
        bits(models[key], prompt[:1, :256], prompt[:1, :256]).backward()
        models[key].zero_grad()
        models[key].eval()

    jobs: dict[str, Callable[[str], None]] = {
        "16 tokens behind 496, 1 row": lambda key: decode(key, 1),
        "16 tokens behind 496, 4 rows": lambda key: decode(key, 4),
        "reading 496 tokens": prefill,
        "generate(): 496 read, 16 new": generate,
        "training step of 256 tokens": step,
    }
    seconds = {}
    for label, job in jobs.items():
        times = take_turns({key: partial(job, key) for key in models}, rounds)
        # ratios within a round, because the speed of a shared machine changes from minute to minute
        seconds[label] = {key: quartiles(values).median for key, values in times.items()} | {
            f"{key} / dense": quartiles([a / b for a, b in zip(times[key], times["dense"], strict=True)])
            for key in handles
        }
        print(f"  {label}: {seconds[label]}", file=sys.stderr)
    held = {key: cache_bytes(caches[key, 1]) for key in models}
    rates = {place: sum(handle.rates().values()) / len(handle.units) for place, handle in handles.items()}
    count = sum(p.numel() for p in dense.parameters())
    results.put(
        "speed",
        {"seconds": seconds, "rates": rates, "parameters": count, "cached": held, "machine": machine()},
    )


def take_turns(jobs: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of processor time of every job in every round; after one warm-up round.

    Processor time and one thread, because what else runs on a machine then hardly matters.
    """
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {key: [] for key in jobs}
    for turn in range(rounds + 1):
        for key, job in jobs.items():
            begin = time.process_time()
            job()
            if turn > 0:
                times[key].append(time.process_time() - begin)
    return times


def draw(rows: int, length: int) -> Tensor:
    """Random bytes."""
    return torch.randint(0, BYTES, (rows, length))


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a cache has in use."""
    total = 0
    for layer in cache.layers:
        used = layer.keys.shape[2] if getattr(layer, "count", None) is None else int(layer.count.max())
        total += 2 * layer.keys[:, :, :used].numel() * layer.keys.element_size()
    return total


def show(content: Mapping[str, Any]) -> None:
    """Print the tables."""
    if "base" in content:
        base, dense = content["base"], content.get("dense 100%")
        size = f"{base['layers']} layers of {base['width']}, {base['parameters']:,} parameters"
        print(f"\nbase: {size}, {base['steps']} steps: {base['bits']:.3f} bits per byte")
        if dense is not None:
            print(f"dense, {dense['steps']} further steps: {dense['bits']:.3f}\n")
            print("| retrofitted | rate | before tuning | after | relative to dense | measured rate |")
            print("|---|---|---|---|---|---|")
            for place, rate in sorted(RUNS):
                row = content.get(f"{place} {rate:.0%}")
                if row is not None:
                    taken = sum(row["rates"].values()) / len(row["rates"])
                    print(
                        f"| {place} | {rate:.0%} | {row['before']:.3f} | {row['bits']:.3f} | "
                        f"{row['bits'] / dense['bits'] - 1:+.1%} | {taken:.1%} |"
                    )
    speed = content.get("speed")
    if speed is not None:
        print(f"\nspeed: {speed['parameters']:,} parameters, random weights; rates {speed['rates']}")
        print("\n| | dense | " + " | ".join(f"{place} at 50 %" for place in PLACES) + " |")
        print("|---" * (2 + len(PLACES)) + "|")
        for label, row in speed["seconds"].items():
            ratios = [row[f"{place} / dense"] for place in PLACES]
            cells = [f"{middle:.2f}x ({low:.2f}-{high:.2f})" for middle, low, high in ratios]
            print(f"| {label} | {row['dense']:.3f} s | " + " | ".join(cells) + " |")
        print(f"| keys and values held | {speed['cached']['dense'] / 1e6:.1f} MB | ", end="")
        print(" | ".join(f"{speed['cached'][p] / speed['cached']['dense']:.2f}x" for p in PLACES) + " |")


def draw_figure(content: Mapping[str, Any], path: Path) -> None:
    """Quality against the fraction of active tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = dict(zip(PLACES, ("#2c7fb8", "#253494"), strict=True))
    dense, base = content["dense 100%"]["bits"], content["base"]["bits"]
    for place, color in colors.items():
        rows = [content[f"{p} {s:.0%}"] for p, s in sorted(RUNS) if p == place and f"{p} {s:.0%}" in content]
        rates = [100 * row["share"] for row in rows] + [100]
        left.plot(rates, [row["before"] for row in rows] + [base], "--", marker="o", mfc="white", color=color)
        left.plot(rates, [row["bits"] for row in rows] + [dense], "-", marker="o", color=color)
        right.plot(
            rates, [row["bits"] / dense for row in rows] + [1], "-", marker="o", color=color, label=place
        )
    left.plot([], [], "--", marker="o", mfc="white", color="0.3", label="before tuning")
    left.plot([], [], "-", marker="o", color="0.3", label="after tuning")
    right.axhline(1.03, color="0.5", lw=0.8, ls=":")
    right.text(100, 1.031, "3 % above dense", ha="left", va="bottom", fontsize=8, color="0.35")
    left.set_ylabel("bits per byte")
    left.set_title("(a) quality", loc="left", fontsize=11)
    right.set_ylabel("bits, as a multiple of dense")
    right.set_title("(b) after tuning, against dense after as many steps", loc="left", fontsize=11)
    for axes in (left, right):
        axes.set_xlim(103, 27)
        axes.set_xlabel("active tokens in retrofitted modules, %")
        axes.legend(frameon=False, fontsize=9)
        axes.grid(alpha=0.3, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/retrofit"), help="folder of all results")
    parser.add_argument("--part", choices=("all", "quality", "speed"), default="all", help="what to measure")
    parser.add_argument("--data", default="data", help="the data folder, with enwik8 prepared")
    parser.add_argument("--text", type=Path, help="train on this file instead of enwik8")
    parser.add_argument("--width", type=int, default=128, help="width of the small model")
    parser.add_argument("--layers", type=int, default=6, help="layers of the small model, up to 9")
    parser.add_argument("--steps", type=int, default=1000, help="training steps of the base")
    parser.add_argument("--tune-steps", type=int, default=600, help="steps of every tuning")
    parser.add_argument("--runs", type=int, default=len(RUNS), help="how many budgets to try, of %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of the speed")
    parser.add_argument("--figure", type=Path, help="draw the quality here")
    options = parser.parse_args()
    results = Results(options.out)
    if options.part != "speed":
        train, val = datasets(options.data, options.text)
        base = make_base(results, train, val, options.steps, options.width, options.layers)
        for place, rate in [("dense", 1.0), *RUNS][: options.runs + 1]:
            tune(results, base, train, val, options.tune_steps, place, rate)
    if options.part != "quality":
        measure_speed(results, options.rounds)
    show(results.content)
    if options.figure is not None:
        draw_figure(results.content, options.figure)


if __name__ == "__main__":
    main()
