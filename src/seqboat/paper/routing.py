"""Does routing matter here: `seqboat paper routing`.

Sequences in which a few tokens matter, most of them only as memory, among many that do not; a working memory far
smaller than the sequence. Every arm is the same model, trained in the same steps on the same data; arms differ in who
decides which tokens are active. After training, the decisions of the gated arm are replaced on the same weights.

Every run is a line of results.jsonl: a run that is there is not repeated.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.core.mixer import Routing
from seqboat.data.files import write_text
from seqboat.layers.gau import GAUConfig
from seqboat.layers.price import AttentionPrice
from seqboat.layers.routers import TemperedSoftmaxConfig, TopKConfig
from seqboat.layers.seqboat import SeqBoat, SeqBoatConfig
from seqboat.layers.sma import override_activation
from seqboat.ssm.diagonal import EMAConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS, VALUES, NOISE, COLORS = 16, 16, 32, 8
HELD_OUT = 256
"""Sequences that every arm is scored on."""
IGNORE = -100


class Drawn(NamedTuple):
    """Sequences of a task."""

    x: Tensor
    """(batch, time, 4): type, key, value and noise of each token, 0 for none; or (batch, time, 2) numbers"""
    y: Tensor
    """(batch, time) values to name, IGNORE elsewhere; or (batch,) numbers"""
    relevant: Tensor
    """(batch, time): the tokens that matter"""


@dataclass(frozen=True)
class Setting:
    """A task, and how long every arm trains on it."""

    kind: str
    time: int
    pairs: int
    window: int
    batch: int
    steps: int
    layers: int = 1
    width: int = 32
    lr: float = 4e-3
    weight: float = 0.3
    deadline: int = 1000
    """both of the price"""
    lengths: tuple[int, ...] = ()
    """lengths in training, for equal parts of the first half of the steps; then `time`"""

    @property
    def causal(self) -> bool:
        return self.kind != "adding"

    def length(self, step: int) -> int:
        """Tokens of a sequence in a step of training."""
        part = 2 * step * max(len(self.lengths), 1) // self.steps
        return self.lengths[part] if part < len(self.lengths) else self.time


SETTINGS = {
    "recall-128": Setting("recall", 128, 4, 8, 16, 800),
    "recall-256": Setting("recall", 256, 6, 16, 16, 800),
    "recall-1024": Setting("recall", 1024, 6, 16, 8, 800),
    "recall-4096": Setting("recall", 4096, 6, 16, 4, 2400, lengths=(512, 1024, 2048)),
    "layers-128": Setting("recall", 128, 4, 8, 16, 800, layers=2),
    "sym-256": Setting("sym", 256, 6, 16, 16, 800),
    "mqar-128": Setting("mqar", 128, 4, 16, 16, 1600),
    "order-128": Setting("order", 128, 2, 8, 16, 800),
    "adding-128": Setting("adding", 128, 2, 256, 32, 400, layers=2, width=48, lr=3e-3, weight=1.0),
    "easy-128": Setting("easy", 128, 0, 8, 16, 800, deadline=200),
    "color-128": Setting("color", 128, 4, 8, 16, 1200, layers=2),
    "context-128": Setting("context", 128, 4, 8, 16, 1200, layers=2),
}


def draw(setting: Setting, batch: int, time: int, generator: torch.Generator) -> Drawn:
    """Sequences of a task.

    recall    pairs of a key and its value in the first three quarters, keys to answer in the last; else noise
    sym       every token that matters asks for the last value of its key, and gives a new one
    mqar      as recall, the key one token before its value
    order     two events among noise; the last token asks which came first
    color     as recall, but all tokens are pairs: those of the color that the first token names matter
    context   as recall, but all tokens are pairs: those behind a marker matter
    easy      every token is named itself: nothing to remember
    adding    two marked numbers to add
    """

    def up_to(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    def places(low: int, high: int, count: int, step: int = 1) -> Tensor:
        chosen = torch.rand(batch, (high - low) // step, generator=generator).argsort(1)[:, :count]
        return chosen.sort(1).values * step + low

    rows = torch.arange(batch)[:, None]
    if setting.kind == "adding":
        numbers, marks = torch.rand(batch, time, generator=generator), torch.zeros(batch, time)
        marks[rows, torch.cat([places(0, time // 2, 1), places(time // 2, time, 1)], 1)] = 1
        return Drawn(torch.stack([numbers, marks], -1), (numbers * marks).sum(1), marks.bool())
    kind, key, value = (torch.zeros(batch, time, dtype=torch.long) for _ in range(3))
    noise, y = 1 + up_to(NOISE, batch, time), torch.full((batch, time), IGNORE)
    relevant = torch.zeros(batch, time, dtype=torch.bool)
    keys = torch.rand(batch, KEYS, generator=generator).argsort(1)[:, : setting.pairs]
    values = up_to(VALUES, batch, setting.pairs)
    if setting.kind == "easy":
        y = noise % VALUES
    elif setting.kind == "sym":
        at = places(0, time, 2 * setting.pairs)
        asked = up_to(setting.pairs, *at.shape)
        given = up_to(VALUES, *at.shape)
        same = (asked[:, :, None] == asked[:, None]) & torch.ones(at.shape[1], at.shape[1]).tril(-1).bool()
        last = (same * torch.arange(1, at.shape[1] + 1)).amax(2) - 1
        kind[rows, at], noise[rows, at], value[rows, at] = 1, 0, 1 + given
        key[rows, at], relevant[rows, at] = 1 + keys.gather(1, asked), True
        y[rows, at] = torch.where(last >= 0, given.gather(1, last.clamp(min=0)), IGNORE)
    elif setting.kind == "order":
        at = places(0, 3 * time // 4, 2)
        first = up_to(2, batch, 1)
        kind[rows, at], noise[rows, at] = 1, 0
        key[rows, at] = 1 + torch.cat([first, 1 - first], 1)
        kind[:, -1], noise[:, -1], y[:, -1:] = 2, 0, first
        relevant[rows, at], relevant[:, -1] = True, True
    else:
        border = 3 * time // 4
        at, asking = places(2, border, setting.pairs, 2), places(border, time, setting.pairs)
        if setting.kind in ("color", "context"):
            kind[:], key, value = 1, 1 + up_to(KEYS, batch, time), 1 + up_to(VALUES, batch, time)
        if setting.kind == "context":
            noise[:] = 0
            kind[rows, at - 1], key[rows, at - 1], value[rows, at - 1] = 3, 0, 0
        elif setting.kind == "color":
            named = 1 + up_to(COLORS, batch, 1)
            noise = 1 + up_to(COLORS, batch, time)
            noise = torch.where(noise == named, noise % COLORS + 1, noise)
            kind[:, 0], key[:, 0], value[:, 0], noise[:, 0] = 3, 0, 0, named[:, 0]
            noise[rows, at] = named
        else:
            kind[rows, at], noise[rows, at] = 1, 0
        key[rows, at], value[rows, at] = 1 + keys, 1 + values
        if setting.kind == "mqar":
            key[rows, at], value[rows, at - 1], key[rows, at - 1] = 0, 0, 1 + keys
            kind[rows, at - 1], noise[rows, at - 1] = 1, 0
        order = torch.rand(batch, setting.pairs, generator=generator).argsort(1)
        kind[rows, asking], value[rows, asking], noise[rows, asking] = 2, 0, 0
        key[rows, asking], y[rows, asking] = 1 + keys.gather(1, order), values.gather(1, order)
        relevant[rows, at], relevant[rows, asking] = True, True
    return Drawn(torch.stack([kind, key, value, noise], -1), y, relevant)


class Arm(NamedTuple):
    """Who decides which tokens are active."""

    title: str
    decides: str = "router"
    """router, never, always, oracle, random or shuffled"""
    form: str = "paper"
    init: str = "scaled"
    router: str = "tempered-softmax"
    full: bool = False
    """whether the working memory holds the whole sequence"""
    labels: bool = False
    """whether the router is also trained on the tokens that matter"""


ARMS = {
    "gated": Arm("gated, with its price", form="gated"),
    "oracle": Arm("the tokens that matter", "oracle"),
    "full": Arm("always, the whole sequence", "always", full=True),
    "always": Arm("always, the same window", "always"),
    "never": Arm("never", "never"),
    "paper": Arm("paper's form, every token active at first"),
    "paper-start": Arm("paper's form and start", init="paper"),
    "random": Arm("random, at the learned rate", "random"),
    "shuffled": Arm("the tokens that matter in another sequence", "shuffled"),
    "top-k": Arm("top-k, at the learned rate", router="top-k"),
    "labeled": Arm("paper's form, trained on the labels too", labels=True),
}


class Net(nn.Module):
    """Embeddings, SeqBoat layers and a linear map."""

    def __init__(self, setting: Setting, arm: Arm, rate: float) -> None:
        super().__init__()
        self.setting, width = setting, setting.width
        adding = setting.kind == "adding"
        self.embed: nn.Module = (
            nn.Linear(2, width) if adding else nn.Embedding(4 + KEYS + VALUES + NOISE + 3, width)
        )
        if isinstance(self.embed, nn.Embedding):
            nn.init.normal_(self.embed.weight, std=0.5)
        config = SeqBoatConfig(
            causal=setting.causal,
            form=arm.form,  # type: ignore[arg-type]
            init=arm.init,  # type: ignore[arg-type]
            router=TopKConfig(capacity=rate) if arm.router == "top-k" else TemperedSoftmaxConfig(),
            ssm=EMAConfig(d_state=8),
            gau=GAUConfig(
                d_z=32 if adding else 16,
                d_v=2 * width,
                window=setting.time if arm.full else setting.window,
                max_positions=setting.time,
            ),
        )
        self.layers = nn.ModuleList(SeqBoat(width, config) for _ in range(setting.layers))
        if arm.init == "scaled" and arm.form == "paper":
            # arms differ in who decides, not in what a fresh layer remembers
            for layer in layers_of(self):
                gated = SeqBoat(width, replace(config, form="gated"))
                layer.ssm.load_state_dict(gated.ssm.state_dict())
        if adding:
            self.head: nn.Module = nn.Sequential(
                nn.Linear(2 * width, 2 * width), nn.GELU(), nn.Linear(2 * width, 1)
            )
        else:
            self.head = nn.Linear(width, VALUES)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Routing]]:
        if x.is_floating_point():
            h = self.embed(x)
        else:
            # a table for each column; its first row is "none"
            start = torch.tensor([0, 4, 5 + KEYS, 6 + KEYS + VALUES])
            some = (x > 0) | (torch.arange(4) == 0)
            h = F.layer_norm((self.embed(x + start) * some[..., None]).sum(2), (self.setting.width,))
        routings = []
        for layer in self.layers:
            out = layer(h)
            h = out.y
            routings.append(out.routing)
        if x.is_floating_point():
            return self.head(torch.cat([h.mean(1), h[:, -1]], 1))[:, 0], routings
        return self.head(h), routings


def layers_of(net: Net) -> list[SeqBoat]:
    """The layers, with their type."""
    return [layer for layer in net.layers if isinstance(layer, SeqBoat)]


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    """Of the answers, per answer."""
    if y.is_floating_point():
        return F.mse_loss(output, y)
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=IGNORE)


@contextmanager
def decided(net: Net, by: str, relevant: Tensor, rate: float, generator: torch.Generator) -> Iterator[None]:
    """Take the decisions of all layers from someone else than the routers."""
    given: dict[str, Any] = {}
    if by in ("never", "always"):
        given = {"active": by == "always", "confidence": 1.0}
    elif by != "router":
        mask = relevant if by == "oracle" else relevant.roll(1, 0)
        if by == "random":
            mask = torch.rand(relevant.shape, generator=generator) < rate
        given = {"mask": mask, "confidence": 1.0}
    with ExitStack() as stack:
        if given:
            stack.enter_context(override_activation(net, **given))
        yield


@torch.no_grad()
def score(net: Net, held: Drawn, by: str, rate: float) -> dict[str, Any]:
    """Accuracy (or error), and per layer the rate of activation, its precision and its recall."""
    net.eval()
    generator = torch.Generator().manual_seed(5)
    right = answers = 0.0
    counts = torch.zeros(len(net.layers), 2, dtype=torch.float64)
    size = max(1, 2**16 // held.x.shape[1])
    for part in zip(*(tensor.split(size) for tensor in held), strict=True):
        x, y, relevant = part
        with decided(net, by, relevant, rate, generator):
            output, routings = net(x)
        asked = torch.ones_like(y, dtype=torch.bool) if y.is_floating_point() else y != IGNORE
        found = (output - y).square() if y.is_floating_point() else (output.argmax(-1) == y)[asked]
        right, answers = right + float(found.sum()), answers + float(asked.sum())
        for i, routing in enumerate(routings):
            active = routing.active[..., 0]
            counts[i] += torch.tensor([float(active.sum()), float((active & relevant).sum())])
    matter = float(held.relevant.sum())
    net.train()
    return {
        "score": right / answers,
        "rate": [round(n / held.relevant.numel(), 5) for n, _ in counts.tolist()],
        "precision": [round(hit / n, 4) if n else None for n, hit in counts.tolist()],
        "recall": [round(hit / matter, 4) if matter else None for _, hit in counts.tolist()],
    }


def train(
    name: str, arm_name: str, seed: int, rate: float, *, every: int = 100, **changes: Any
) -> dict[str, Any]:
    """Train an arm on a task, and replace its decisions afterwards; the line of results."""
    options = {key: changes.pop(key) for key in tuple(changes) if key not in Setting.__dataclass_fields__}
    setting, arm = replace(SETTINGS[name], **changes), ARMS[arm_name]
    torch.manual_seed(seed)
    net = Net(setting, arm, rate)
    data, generator = torch.Generator().manual_seed(1000 + seed), torch.Generator().manual_seed(seed)
    held = draw(setting, HELD_OUT, setting.time, torch.Generator().manual_seed(99))
    optimizer = torch.optim.AdamW(net.parameters(), setting.lr, weight_decay=0.0)
    price = None
    if arm.form == "gated":
        options.setdefault("wide", setting.time)
        price = AttentionPrice(net, setting.weight, deadline=setting.deadline, **options)
    seconds, curve = 0.0, []
    for step in range(setting.steps):
        warm = min(1.0, (step + 1) / 50)
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / setting.steps))
        x, y, relevant = draw(setting, setting.batch, setting.length(step), data)
        begun = time.process_time()
        with decided(net, arm.decides, relevant, rate, generator):
            output, routings = net(x)
        loss = loss_of(output, y)
        total = loss
        if price is not None:

            def off(x: Tensor = x, y: Tensor = y) -> Tensor:
                return loss_of(net(x)[0], y)

            total = loss + price(loss, off=off)
        if arm.labels:
            for routing in routings:
                total = total + F.binary_cross_entropy(
                    routing.probs[..., 0].clamp(1e-6, 1 - 1e-6), relevant.float()
                )
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        seconds += time.process_time() - begun
        if (step + 1) % every == 0:
            now = score(net, Drawn(*(part[:64] for part in held)), arm.decides, rate)
            curve.append([step + 1, round(now["score"], 4), now["rate"], round(seconds, 1)])
    found = score(net, held, arm.decides, rate)
    result = {
        "task": name,
        "arm": arm_name,
        "seed": seed,
        "steps": setting.steps,
        "seconds": round(seconds, 1),
    }
    result |= found | {"curve": curve, "options": changes | options}
    result["forward"] = _forward_seconds(net, held, arm.decides, rate)
    if price is not None:
        rate = statistics.mean(found["rate"])
        result["gain"] = round(price.gain, 4)
        result["controls"] = {by: score(net, held, by, rate)["score"] for by in CONTROLS}
    if arm_name in ("gated", "paper", "oracle"):
        result["sets"] = _sets(net, held, arm.decides)
    return result


CONTROLS = ("never", "always", "random", "shuffled", "oracle")
"""Decisions on the weights of the gated arm."""


@torch.no_grad()
def _forward_seconds(net: Net, held: Drawn, by: str, rate: float) -> float:
    """Processor seconds of a forward pass over 8 sequences, the best of three."""
    net.eval()
    x, _, relevant = (part[:8] for part in held)
    times = []
    for _ in range(3):
        begun = time.process_time()
        with decided(net, by, relevant, rate, torch.Generator().manual_seed(0)):
            net(x)
        times.append(time.process_time() - begun)
    return round(min(times), 4)


@torch.no_grad()
def _sets(net: Net, held: Drawn, by: str) -> dict[str, list[int]]:
    """The active tokens of the first sequence in the last layer, and those that matter."""
    net.eval()
    x, _, relevant = (part[:1] for part in held)
    with decided(net, by, relevant, 0.0, torch.Generator()):
        active = net(x)[1][-1].active[0, :, 0]
    return {"active": active.nonzero()[:, 0].tolist(), "matter": relevant[0].nonzero()[:, 0].tolist()}


def gradients(seed: int = 0) -> list[tuple[str, int, dict[str, float]]]:
    """The mean absolute gradient of the loss with respect to p, by kind of token, for each form and layer."""
    rows = []
    for layers in (1, 2):
        for form in ("paper", "gated"):
            setting = replace(SETTINGS["recall-256"], layers=layers, window=256)
            torch.manual_seed(seed)
            net = Net(setting, Arm("", form=form), 0.0)
            for layer in layers_of(net):
                # below the gate's saturation, or a fresh gated layer has no gradient at all but the price's
                layer.sma.router.start_at(math.log(0.6 / 0.4))
            drawn = draw(setting, 16, setting.time, torch.Generator().manual_seed(seed))
            output, routings = net(drawn.x)
            for routing in routings:
                routing.probs.retain_grad()
            loss_of(output, drawn.y).backward()
            for number, routing in enumerate(routings, start=1):
                assert routing.probs.grad is not None
                gradient = routing.probs.grad[..., 0].abs()
                kinds = {"noise": 0, "memory": 1, "question": 2}
                means = {
                    kind: float(gradient[drawn.x[..., 0] == code].mean()) for kind, code in kinds.items()
                }
                rows.append((f"{form}, {layers} layer{'s' * (layers > 1)}", number, means))
    return rows


# the suite, its page and its figure

QUICK = ("gated", "oracle", "always", "paper", "never")
"""Arms of a quick look, on one task and two seeds."""


def run_suite(
    tasks: Sequence[str],
    arms: Sequence[str],
    seeds: Sequence[int],
    results: Path,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Train what results.jsonl lacks, and return the lines of these tasks, arms and seeds."""
    for name, known in ((tasks, SETTINGS), (arms, ARMS)):
        for one in name:
            require(one in known, f"{one!r} is unknown; expected some of {', '.join(known)}")
    results.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(results)
    for task in tasks:
        for seed in seeds:
            # the gated arm comes first: others take the rate that it learned
            for arm in sorted(arms, key=list(ARMS).index):
                if (task, arm, seed) not in rows:
                    learned = rows.get((task, "gated", seed))
                    rate = statistics.mean(learned["rate"]) if learned else _share(SETTINGS[task])
                    row = rows[task, arm, seed] = train(task, arm, seed, max(rate, 0.001))
                    with results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                tell(_line(rows[task, arm, seed]))
    return [rows[task, arm, seed] for task in tasks for arm in arms for seed in seeds]


def read_rows(results: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The lines of results.jsonl; of a run that is there twice, the last."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    rows = (json.loads(line) for line in lines if line.strip())
    return {(row["task"], row["arm"], row["seed"]): row for row in rows}


def _share(setting: Setting) -> float:
    """The part of the tokens that matters."""
    drawn = draw(setting, 64, setting.time, torch.Generator().manual_seed(0))
    return float(drawn.relevant.float().mean())


def _line(row: dict[str, Any]) -> str:
    rates = " ".join(f"{100 * rate:.2f}" for rate in row["rate"])
    return (
        f"{row['task']} {row['arm']} seed {row['seed']}: {_score(row['task'], row['score'])}, "
        f"active {rates} %, {row['seconds']} s"
    )


def _score(task: str, value: float) -> str:
    return f"{value:.4f}" if SETTINGS[task].kind == "adding" else f"{100 * value:.1f}"


def _all(values: Sequence[str]) -> str:
    """Every seed."""
    return " ".join(values)


def write_page(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """One page: a table per task with every seed, the controls, and what the loss tells the routers."""
    lines = [
        "# Does routing matter here",
        "",
        "Accuracy in percent (adding: squared error) on 256 held-out sequences, by seed. Active, precision and "
        "recall are those of the last layer, against the tokens that matter. Seconds are processor seconds of "
        "training.",
        "",
    ]
    for task in dict.fromkeys(row["task"] for row in rows):
        setting, own = SETTINGS[task], [row for row in rows if row["task"] == task]
        lengths = f", lengths {', '.join(map(str, setting.lengths))} first" if setting.lengths else ""
        lines += [
            f"## {task}",
            "",
            f"{setting.time} tokens, {100 * _share(setting):.2f} % of them matter, window {setting.window}, "
            f"{setting.layers} layer{'s' * (setting.layers > 1)}, {setting.steps} steps of {setting.batch}{lengths}.",
            "",
            "| who decides | seeds | score | active % | precision | recall | seconds | forward, ms |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for arm in ARMS:
            same = [row for row in own if row["arm"] == arm]
            if not same:
                continue
            columns = [
                _all([str(row["seed"]) for row in same]),
                _all([_score(task, row["score"]) for row in same]),
                _all([f"{100 * row['rate'][-1]:.2f}" for row in same]),
                *(
                    _all(["-" if row[name][-1] is None else f"{row[name][-1]:.2f}" for row in same])
                    for name in ("precision", "recall")
                ),
                _all([f"{row['seconds']:.0f}" for row in same]),
                _all([f"{1000 * row['forward']:.0f}" for row in same if "forward" in row]) or "-",
            ]
            lines.append(f"| {ARMS[arm].title} | {' | '.join(columns)} |")
        learned = [row for row in own if row.get("controls")]
        if learned:
            lines += ["", f"On the weights of the gated arm, decided by others: {_controls(task, learned)}."]
        lines.append("")
    lines += ["## What the loss tells the routers", "", *gradient_table(), ""]
    if _draw(rows, out.parent / "images" / out.stem):
        lines += [f"![Learned sets against the tokens that matter](images/{out.stem}.svg)", ""]
    write_text(out, "\n".join(lines))


def _controls(task: str, rows: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"{by} {_all([_score(task, row['controls'][by]) for row in rows])}" for by in CONTROLS)


def gradient_table() -> list[str]:
    """The mean absolute gradient of the loss with respect to p, as a table."""
    lines = ["| form | layer | noise | memory | question |", "|---|---|---|---|---|"]
    for form, layer, means in gradients():
        lines.append(
            f"| {form} | {layer} | {' | '.join(f'{value:.1e}' if value else '0' for value in means.values())} |"
        )
    return lines


def _draw(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """The active tokens of one sequence, by arm, against those that matter."""
    import importlib.util

    first = next((row for row in rows if row["arm"] == "gated"), None)
    if first is None or importlib.util.find_spec("matplotlib") is None:
        return False
    from seqboat.plotting import dress, new_figure, style_of, write_figure

    same = [
        row for row in rows if "sets" in row and (row["task"], row["seed"]) == (first["task"], first["seed"])
    ]

    def make(theme: Any) -> Figure:
        style = style_of(theme)
        figure = new_figure(8.0, 0.8 + 0.35 * len(same), style)
        axes = figure.subplots()
        for place, row in enumerate(same):
            matter = set(row["sets"]["matter"])
            for right, color in ((True, style.lines[0]), (False, style.lines[1])):
                at = [token for token in row["sets"]["active"] if (token in matter) is right]
                axes.scatter(at, [place] * len(at), s=14, marker="|", color=color, linewidths=1.5)
        axes.set_yticks(range(len(same)), [ARMS[row["arm"]].title for row in same])
        axes.set_ylim(len(same) - 0.4, -0.6)
        axes.set_xlabel(f"token of a held-out sequence, {first['task']}")
        dress(axes, style, None)
        return figure

    write_figure(make, path, formats=("svg",), themes=("light",))
    return True
