"""The paper's tables and figures as lists of runs, at full size and as small twins for two cores.

    target = TARGETS["ablation"]
    for trial in target.trials("small"):
        trial.command()                 what to type for it
        trial.config(seed)              what that runs

`reproduce.py` runs them, `results.py` writes down what came out. What a small target cuts beyond the recipes that it
uses is said once, in its field `cut`, and stands on the page.
"""

from __future__ import annotations

import dataclasses
import shlex
from functools import cache
from typing import Literal

from seqboat.mixers import MIXERS
from seqboat.mixers.base import directions_of
from seqboat.paper.matching import TABLES, match_parameters, too_long
from seqboat.recipes import find_recipe
from seqboat.training.config import RunConfig, override

Scale = Literal["small", "paper"]
Layout = Literal[
    "runs",
    "mixers",
    "ablation",
    "tradeoff",
    "efficiency",
    "mixers-efficiency",
    "activation",
    "confidence",
    "span",
]
"""How the page shows a target."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One row of a table: a recipe with some settings, run with one or more seeds.

    Two targets may have the same trial: it is run once.
    """

    name: str
    """fit for the name of a folder; what has the same name has the same settings"""
    title: str
    """as in the table"""
    recipe: str
    arguments: tuple[str, ...] = ()
    """settings, as `seqboat train` takes them"""
    match: bool = False
    """whether the model gets as many parameters as the recipe's own"""
    seeds: int = 1
    minutes: float | None = None
    """of the processor for one seed, about; None where it needs other hardware"""
    paper: str | None = None
    """the number in the paper for the full-size experiment, in the words of its table"""
    table: str = ""
    """which of several tables it is a row of"""
    task: str = ""
    """which of several tasks it is a column of"""
    baseline: str | None = None
    """name of the trial that its speed is compared with"""
    paper_speed: float | None = None
    """its training speed in the paper, as a multiple of the baseline's"""
    size: int | None = None
    """of working memory or chunk, where that is what changes"""

    def config(self, seed: int) -> RunConfig:
        """The configuration of one run."""
        return dataclasses.replace(_configure(self.recipe, self.arguments, self.match), seed=seed)

    @property
    def steps(self) -> int:
        """Updates of one run. Does not wait for widths to be matched."""
        return _configure(self.recipe, self.arguments, False).schedule.steps

    def command(self, seed: int | None = None) -> str:
        """What to type for one run of it."""
        words = ["seqboat", "train", self.recipe, *self.arguments]
        words += ["--match-parameters"] if self.match else []
        return shlex.join(words if seed is None else [*words, f"--seed={seed}"])


@cache
def _configure(recipe: str, arguments: tuple[str, ...], match: bool) -> RunConfig:
    own = find_recipe(recipe)()
    config = override(dataclasses.replace(own, recipe=recipe), arguments)
    return match_parameters(config, own)[0] if match else config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Something that is measured, not trained (`efficiency.py`)."""

    name: str
    """unique in its target"""
    title: str
    minutes: float | None
    """on two cores, about; None where it depends on the hardware"""
    what: Literal["tasks", "mixers"]
    """the models and tasks of table 6, or every mixer"""
    length: int | None = None
    """tokens per row, of mixers"""
    matched: bool = False
    """whether mixers have as many parameters as SeqBoat, instead of its width"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A table or figure of the paper."""

    name: str
    title: str
    where: str
    """in the paper"""
    about: str
    """what to look at; a sentence or two for the page"""
    cut: str = ""
    """what the small trials leave out beyond their recipes"""
    layout: Layout = "runs"
    small: tuple[Trial, ...] = ()
    paper: tuple[Trial, ...] = ()
    small_benches: tuple[Bench, ...] = ()
    paper_benches: tuple[Bench, ...] = ()

    def trials(self, scale: Scale) -> tuple[Trial, ...]:
        """What is trained at one scale."""
        return self.small if scale == "small" else self.paper

    def benches(self, scale: Scale) -> tuple[Bench, ...]:
        """What is measured at one scale."""
        return self.small_benches if scale == "small" else self.paper_benches

    @property
    def observed(self) -> bool:
        """Whether it shows what trained models do, not how well."""
        return self.layout in ("activation", "confidence", "span")

    def names(self, scale: Scale) -> list[str]:
        """Of everything that there is to do at one scale."""
        trials, benches = self.trials(scale), self.benches(scale)
        return [trial.name for trial in trials] + [bench.name for bench in benches]


def _pair(name: str, title: str, recipe: str, paper: str, minutes: float) -> tuple[Trial, Trial]:
    """A small trial and its full-size twin."""
    return (
        Trial(name=name, title=title, recipe=f"{recipe}-small", paper=paper, minutes=minutes),
        Trial(name=name, title=title, recipe=recipe, paper=paper),
    )


_LRA = (
    _pair("listops", "ListOps", "lra.listops", "61.70 %", 7),
    _pair("text", "Text", "lra.text", "89.60 %", 12),
    _pair("retrieval", "Retrieval", "lra.retrieval", "91.28 %", 9),
    _pair("image", "Image", "lra.image", "90.10 %", 15),
    _pair("pathfinder", "Pathfinder", "lra.pathfinder", "96.35 %", 11),
    _pair("pathx", "Path-X", "lra.pathx", "96.68 %", 15),
)
_SPEECH = _pair("speech", "Speech Commands", "speech", "97.35 %", 15)
_ENWIK8 = _pair("enwik8", "enwik8", "enwik8", "1.02 bits", 15)


# short schedules, so that tables of many rows end on two cores


def _schedule(steps: int, evaluations: int, *more: str) -> tuple[str, ...]:
    """Settings of a short run: a tenth of the steps is warm-up, as in the small recipes."""
    return (
        f"--schedule.steps={steps}",
        f"--schedule.warmup_steps={steps // 10}",
        f"--evaluation.every={steps // evaluations}",
        "--training.log_every=10",
        *more,
    )


_SHORT = {
    "listops": _schedule(800, 4),
    "image": _schedule(600, 3, "--training.batch_size=25", "--evaluation.limit=2000"),
    "pathfinder": _schedule(500, 5),
}
"""Settings of the short runs, by task."""
_SHORT_MINUTES = {"listops": 1.6, "image": 3.3, "pathfinder": 5.5}
_TASKS = {"image": "Image", "listops": "ListOps", "pathfinder": "Pathfinder"}
_CUT_SHORT = (
    "Every row of a task has the same short schedule: ListOps 800 updates of the small recipe's 4,600, Image 600 "
    "of 1,800 with batches of 25 images instead of 50 (validated on 2,000), Pathfinder 500 of 2,000. Such runs are "
    "far from converged."
)


READ_LISTOPS = ("performer", "luna", "transformer", "adaptive-span")
"""Mixers that have a causal form and still read ListOps: that of the first two takes about twice as long as the other
one, since it sums prefixes; the others hardly begin to recall in so few updates."""


SETTINGS = {
    "reformer": ("--model.mixer.hashes=1", "--model.mixer.buckets=4", "--model.mixer.chunk_size=16"),
}
"""What else short sequences ask for."""


def _mixers() -> tuple[Trial, ...]:
    """Every mixer on recall; those without a causal form, and READ_LISTOPS, on ListOps."""
    trials = []
    for name, config in MIXERS.items():
        causal = "causal" in directions_of(config) and name not in READ_LISTOPS
        length, schedule = (64, _schedule(500, 2)) if causal else (128, _schedule(400, 2))
        trials.append(
            Trial(
                name=f"mixers-{name}",
                title=name,
                recipe="recall" if causal else "lra.listops-small",
                arguments=(
                    f"--model.mixer={name}",
                    *(
                        f"--model.mixer.{field}={length}"
                        for field in too_long(config(), length, (*TABLES, "window"))
                    ),
                    *SETTINGS.get(name, ()),
                    *schedule,
                ),
                match=True,
                minutes=1.3,
                task="recall" if causal else "ListOps",
            )
        )
    return tuple(trials)


class _Published:
    """The paper's ablations: accuracy in percent and speed as a multiple of MEGA's, by task."""

    FULL = {  # noqa: RUF012 - a table
        "full": ("SeqBoat-full", {"image": (90.16, 1.45), "listops": (60.95, 1.79)}),
        "full-always": ("- always activated", {"image": (90.70, 1.25), "listops": (62.10, 1.11)}),
        "full-gumbel": ("- Gumbel softmax", {"image": (89.94, 1.29), "listops": (59.75, 1.76)}),
        "full-s4d": ("- SSM with S4D", {"image": (82.84, 1.88), "listops": (59.25, 2.45)}),
    }
    OWN = {  # noqa: RUF012 - a table
        "": ("SeqBoat", {"image": (90.36, 1.33), "listops": (59.05, 2.26), "pathfinder": (96.34, 1.31)}),
        "ffn": (
            "SeqBoat-FFN",
            {"image": (89.60, 1.13), "listops": (56.45, 2.05), "pathfinder": (96.62, 0.97)},
        ),
        "gau-ffn": (
            "SeqBoat-{GAU, FFN}",
            {"image": (89.74, 1.20), "listops": (59.10, 1.97), "pathfinder": (96.10, 1.06)},
        ),
        "sigmoid": (
            "SeqBoat-Sigmoid",
            {"image": (87.34, 1.77), "listops": (58.20, 2.52), "pathfinder": (91.35, 1.67)},
        ),
        "moe": (
            "SeqBoat-MoE",
            {"image": (85.60, 1.66), "listops": (58.10, 2.19), "pathfinder": (91.41, 1.80)},
        ),
        "local": (
            "SeqBoat-local",
            {"image": (90.12, 1.46), "listops": (59.00, 1.78), "pathfinder": (96.08, 1.54)},
        ),
        "chunk": (
            "SeqBoat-chunk",
            {"image": (86.46, 2.17), "listops": (58.35, 2.79), "pathfinder": (93.91, 2.97)},
        ),
        "mem32": (
            "SeqBoat-mem32",
            {"image": (78.16, 1.73), "listops": (58.70, 2.14), "pathfinder": (92.97, 1.86)},
        ),
        "local32": (
            "SeqBoat-local32",
            {"image": (75.58, 1.67), "listops": (53.90, 2.19), "pathfinder": (82.05, 1.80)},
        ),
    }


def _ablation(scale: Scale) -> tuple[Trial, ...]:
    """Both tables, task by task; MEGA, whose speed is one, is a row of each."""
    trials = []
    for task, title in _TASKS.items():
        mega = _short(task, "mega", "MEGA", scale, ablation=True)
        for table, rows in (("SeqBoat-full", _Published.FULL), ("SeqBoat", _Published.OWN)):
            found = {row: (label, values[task]) for row, (label, values) in rows.items() if task in values}
            if not found:
                continue
            for row, (label, (accuracy, speed)) in found.items():
                trial = _short(task, row, label, scale, ablation=True)
                trials.append(
                    dataclasses.replace(
                        trial,
                        table=table,
                        task=title,
                        paper=f"{accuracy:.2f} %",
                        paper_speed=speed,
                        baseline=mega.name,
                    )
                )
        trials.append(dataclasses.replace(mega, task=title, baseline=mega.name, paper_speed=1.0))
    return tuple(trials)


def _short(task: str, row: str, title: str, scale: Scale, ablation: bool = False, size: int = 0) -> Trial:
    """A run of a task with a short schedule, or the whole one at full size.

    Args:
        task: of the Long Range Arena.
        row: of the ablations; the recipe's own SeqBoat if empty.
        title: in the table.
        scale: of the recipe.
        ablation: whether ListOps has three seeds.
        size: of working memory or chunk, if it is not the recipe's.
    """
    small = scale == "small"
    suffix = "-small" if small else ""
    field = "chunk" if row == "mega" else "gau.window"
    recipe = f"ablations.{task}{suffix}.{row}" if row else f"lra.{task}{suffix}"
    seeds = 3 if ablation and task == "listops" else 1
    return Trial(
        name="-".join(filter(None, (task, "short" if small else "full", row, str(size or "")))),
        title=title,
        recipe=recipe,
        arguments=(
            *((f"--model.mixer.{field}={size}",) if size else ()),
            *(_SHORT[task] if small else ()),
        ),
        seeds=seeds if small else 1,
        minutes=_SHORT_MINUTES[task] * (1.3 if row == "mega" else 1.0) if small else None,
    )


def _tradeoff(scale: Scale) -> tuple[Trial, ...]:
    """SeqBoat and MEGA-chunk with memories and chunks of several sizes on two tasks."""
    sizes = (16, 32, 64, 128) if scale == "small" else (16, 32, 64, 128, 256, 512)
    own = 64 if scale == "small" else 256
    trials = []
    for task in ("image", "pathfinder"):
        for row, title in (("", "SeqBoat"), ("mega", "MEGA-chunk")):
            for size in sizes:
                # the size of the recipe itself is a run of the ablations as well
                changed = 0 if size == own and not row else size
                trial = _short(task, row, title, scale, size=changed)
                seeds = 1 if scale == "small" else 3
                trials.append(dataclasses.replace(trial, task=_TASKS[task], size=size, seeds=seeds))
    return tuple(trials)


TARGETS = {
    target.name: target
    for target in (
        Target(
            name="lra",
            title="Long Range Arena",
            where="table 1",
            about="Accuracy on the test split. The small twins see shorter sequences and a few epochs, so they are "
            "not comparable with the paper's numbers; they show that each task trains and where it attends.",
            small=tuple(small for small, _ in _LRA),
            paper=tuple(full for _, full in _LRA),
        ),
        Target(
            name="speech",
            title="Speech Commands",
            where="table 2",
            about="Accuracy on the test split.",
            small=_SPEECH[:1],
            paper=_SPEECH[1:],
        ),
        Target(
            name="enwik8",
            title="Language modelling",
            where="table 3",
            about="Bits per byte on the test split: it is read in as many parts as a batch has rows, side by side, "
            "each from front to end with its state carried along.",
            small=_ENWIK8[:1],
            paper=_ENWIK8[1:],
        ),
        Target(
            name="diagnostics",
            title="Diagnostics",
            where="not in the paper",
            about="Associative recall needs attention: the model has to look up which value stood beside a key. A "
            "pure state-space model of the same size has only its state for that.",
            small=(
                Trial(name="recall", title="recall, SeqBoat", recipe="recall", seeds=3, minutes=3),
                Trial(
                    name="recall-s4d",
                    title="recall, pure state-space model (S4D)",
                    recipe="recall",
                    arguments=("--model.mixer=s4d", "--model.d_model=72"),
                    seeds=3,
                    minutes=3,
                ),
                Trial(name="copy", title="selective copy, SeqBoat", recipe="copy", seeds=3, minutes=3),
            ),
            paper=(),
        ),
        Target(
            name="mixers",
            title="Every mixer learns",
            where="not in the paper",
            about="Associative recall for a fixed short budget, with each mixer's own defaults and as many "
            "parameters as the recipe's SeqBoat; tables and windows are no longer than a sequence, and Reformer has "
            "one round of hashing with buckets of 16 tokens. Linformer and BigBird have no causal form, that of "
            "Performer and Luna takes about twice as long, and Transformer and Adaptive Span hardly begin "
            "to recall in so few updates: these six read ListOps in both directions instead. The first "
            "loss is that of the batch at step 10, in the middle of the warm-up; the last is that of the validation "
            "split. A guess among the 31 values of recall has a loss of 3.43, right in 3 % of cases, a guess among "
            "the ten answers of ListOps has a loss of 2.30.",
            cut="Recall: 500 updates of 1,500. ListOps: 400 of 4,600. The learning rate is SeqBoat's; no mixer is "
            "tuned.",
            layout="mixers",
            small=_mixers(),
            paper=(),
        ),
        Target(
            name="ablation",
            title="Ablations",
            where="tables 7 and 8",
            about="Accuracy on the test split (the paper's is validation accuracy), and the speed of training steps "
            "as a multiple of MEGA's, from the processor time of all steps of a run without its evaluations.",
            cut=_CUT_SHORT,
            layout="ablation",
            small=_ablation("small"),
            paper=_ablation("paper"),
        ),
        Target(
            name="tradeoff",
            title="Speed against accuracy",
            where="figure 5",
            about="SeqBoat with working memories and MEGA-chunk with chunks of several sizes: accuracy on the test "
            "split, and processor time per update. The paper finds MEGA-chunk at chance on Pathfinder with chunks "
            "below 128, and SeqBoat near 90 % with a memory of 16.",
            cut=_CUT_SHORT
            + " Sequences have 256 tokens, so memories of 16 to 128; one seed instead of three.",
            layout="tradeoff",
            small=_tradeoff("small"),
            paper=_tradeoff("paper"),
        ),
        Target(
            name="activation",
            title="Activation by layer and task",
            where="figure 3",
            about="Share of the tokens that attend in each layer: mean and standard deviation over 100 sequences of "
            "the validation split. The paper shows SeqBoat-full; these are the SeqBoat runs of the tables above.",
            layout="activation",
            small=(*(small for small, _ in _LRA), _SPEECH[0], _ENWIK8[0]),
            paper=(*(full for _, full in _LRA), _SPEECH[1], _ENWIK8[1]),
        ),
        Target(
            name="confidence",
            title="Confidence over images",
            where="figure 4",
            about="Confidence of activation of every pixel in the last layers, for three images of the validation "
            "split; white where a pixel does not attend. The paper shows Pathfinder.",
            layout="confidence",
            small=tuple(small for small, _ in _LRA if small.name in ("image", "pathfinder")),
            paper=tuple(full for _, full in _LRA if full.name in ("image", "pathfinder")),
        ),
        Target(
            name="span",
            title="Attention span by layer and memory",
            where="figure 6",
            about="Mean distance, in tokens of the original sequence, from a query to the keys that it may see, over "
            "100 sequences of the validation split: the SeqBoat runs of speed against accuracy. A window that "
            "slides over all tokens would reach a quarter of its size (half of it lies on either side), or half of "
            "it in causal layers. The paper shows Pathfinder and enwik8.",
            cut=_CUT_SHORT,
            layout="span",
            small=tuple(trial for trial in _tradeoff("small") if trial.title == "SeqBoat"),
            paper=tuple(trial for trial in _tradeoff("paper") if trial.title == "SeqBoat"),
        ),
        Target(
            name="efficiency",
            title="Speed and memory by task",
            where="table 6",
            about="Speed of a training step, its peak memory, and speed of inference as multiples of MEGA's, at the "
            "six lengths of the Long Range Arena. One layer of each model with the widths of the task's recipe: all "
            "layers of a model are alike. In SeqBoat and SeqBoat-full so many tokens attend as in the layers of our "
            "trained small twin of the task, on average; MEGA-chunk has chunks of 128, SeqBoat the memory of its "
            "recipe. The paper measured whole models on GPUs with its own batch sizes, over all of training.",
            cut="batches of 8,192 tokens, or of one sequence if that is longer; one layer instead of 4 to 8; layer "
            "norms.",
            layout="efficiency",
            small_benches=(
                Bench(name="lra-tasks", title="six tasks, four models", minutes=12, what="tasks"),
            ),
            paper_benches=(
                Bench(name="lra-tasks", title="six tasks, four models", minutes=None, what="tasks"),
            ),
        ),
        Target(
            name="mixers-efficiency",
            title="Speed and memory of every mixer",
            where="columns of table 1, for all mixers and more lengths",
            about="One layer of each mixer on the sizes of Text (width 128, memory 256), as multiples of a plain "
            "Transformer (scores and weights in full), measured in turn; "
            "the paper's multiples are those of its table 1, at 4,096 tokens. "
            "First all at the same width, then all with as many parameters as SeqBoat. In routed layers so many "
            "tokens attend as in our Text-small run. H3 and its hybrid differ in a stack only, not in one layer; "
            "Adaptive Span has the spans that it starts with, its ramp of 32 tokens.",
            cut="batches of 8,192 tokens, or of one sequence if that is longer; a step that should take more than 15 "
            "seconds is left out.",
            layout="mixers-efficiency",
            small_benches=tuple(
                Bench(
                    name=f"{'parameters' if matched else 'width'}-{length}",
                    title=f"{length:,} tokens, equal {'parameters' if matched else 'width'}",
                    minutes=8,
                    what="mixers",
                    length=length,
                    matched=matched,
                )
                for matched in (False, True)
                for length in (1024, 4096, 16384)
            ),
        ),
    )
}
"""Every target of `seqboat reproduce` by its name."""
