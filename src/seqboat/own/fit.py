"""Learn from your own data in the minutes you give: the same for the command line and for Python.

1. a baseline is fitted in seconds; its scores of rows that it has not seen are what the network starts from
2. the network learns what the baseline leaves, with a learning rate that falls to zero as the time runs out
3. the best weights by validation are kept, and only if the sum is better than the baseline by a standard error
4. the validation rows are answered once more without attention
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seqboat.core.checks import check_choice, check_positive, require
from seqboat.core.settings import Settings
from seqboat.layers.sma import SparseModularActivation, override_activation
from seqboat.own.baselines import Fitted, Offset, constant_scores, fit_baseline
from seqboat.own.describe import heading
from seqboat.own.task import OwnTask, Scored
from seqboat.tasks.task import Batch, Example
from seqboat.training.config import RunConfig
from seqboat.training.optim import build_optimizer, set_learning_rate

WARMUP = 0.1
"""Share of the time in which the learning rate rises."""
EVALUATIONS = 40
PATIENCE = 1 / 3
"""Share of the time without a gain after which training ends early."""
COOLING = 0.15
"""Share of the time so far that an early end takes: the learning rate falls to zero once more."""
SCORED = 2_000
"""Validation rows that are scored at most while training."""
AVERAGED = 0.99
"""Decay of the average of the weights, which is what is scored and kept."""
BY_HEART = 1.5
"""Ratio of the losses of validation and training from which on rows are learned by heart."""
TRIAL = (0.25, 0.8, 0.12)
"""Shares of the time after and before which a network of numbers is tried with dropout, and for how long."""
DROPOUT = 0.1
CHUNK = 20
"""Batches that are drawn at random together and then sorted by length."""


@dataclass(frozen=True, kw_only=True)
class FitConfig(Settings):
    """How long to learn, and what from."""

    minutes: float = 5.0
    """Time for everything, reading included."""
    steps: int | None = None
    """Steps of training, instead of minutes: the same numbers on every machine."""
    clock: Literal["wall", "processor"] = "wall"
    """What counts as time: what passes, or what this process computes."""
    baseline: bool = True
    """Whether a simple model is fitted first and is part of the answer."""
    early_stopping: bool = True
    """Whether to end when validation gains nothing for a third of the time."""
    evaluations: int = EVALUATIONS
    """How often validation rows are scored."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.minutes, int | float) and 0 < self.minutes < math.inf,
            f"minutes must be positive, got {self.minutes!r}",
        )
        if self.steps is not None:
            check_positive("steps", self.steps)
        check_choice("clock", self.clock, ("wall", "processor"))
        check_positive("evaluations", self.evaluations)

    def now(self) -> float:
        """Seconds on the clock."""
        return time.monotonic() if self.clock == "wall" else time.process_time()


class Progress(NamedTuple):
    """Where training is, for whoever shows it."""

    share: float
    """of the time that is over"""
    step: int
    loss: float
    """of the last steps"""
    metric: str
    score: float | None
    """on validation rows, the last one"""
    best: float | None
    left: float
    """seconds"""


class Result(NamedTuple):
    """A model and how it came about."""

    model: nn.Module
    config: RunConfig
    steps: int
    record: dict[str, Any]
    """baselines, choice, attention, time: plain data"""


class Scores(NamedTuple):
    """Answers for the validation rows."""

    metrics: dict[str, float]
    losses: Tensor
    """(rows,)"""
    each: Tensor
    """(rows,): how good each is, see `Target.each`"""
    active: float | None
    """share of tokens that attended"""


def fit(
    task: OwnTask,
    config: RunConfig,
    settings: FitConfig,
    *,
    started: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
    show: Callable[[Progress], None] = lambda progress: None,
    keep: Callable[[Callable[[], Result]], None] | None = None,
) -> Result:
    """Learn from a task's training rows.

    Args:
        task: reads its data now, unless it did before.
        config: of the run, adapted to the task (`recipes.own.for_task`).
        settings: how long.
        started: on the clock of the settings, when the minutes began; now by default.
        tell: called with lines about the data and the outcome.
        show: called now and then with the progress.
        keep: called after each improvement with a function that makes the result so far.
    """
    started = settings.now() if started is None else started
    with _seeded(config.seed):
        return _Fitting(task, config, settings, started, tell, show, keep).run()


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch inside the block, and restore its generators after it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        yield


class _Fitting:
    """One training run."""

    def __init__(
        self,
        task: OwnTask,
        config: RunConfig,
        settings: FitConfig,
        started: float,
        tell: Callable[[str], None],
        show: Callable[[Progress], None],
        keep: Callable[[Callable[[], Result]], None] | None,
    ) -> None:
        self.task, self.settings, self.started = task, settings, started
        self.tell, self.show, self.keep = tell, show, keep
        summary = task.summary("val")
        for line in summary.lines():
            tell(line)
        self.train, self.val = _rows(task, "train"), _rows(task, "val")
        if len(self.val) > SCORED:
            self.val = [
                self.val[i] for i in np.random.default_rng(0).choice(len(self.val), SCORED, replace=False)
            ]
        self.record: dict[str, Any] = {"data": summary.as_record()}
        self.baseline = self._fit_baseline(config) if settings.baseline else None
        # of numbers, what statistics leave is harder to learn than the whole: there the two only compete
        self.adds = self.baseline is not None and task.vocab is not None
        if self.adds:
            config = config.replace(model={"head_init": "zero"})
        self.share = nn.Parameter(torch.ones(()))
        self.parameters: list[Tensor] = []
        self._build(config)
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        self.random = np.random.default_rng(config.seed)
        self.queue: list[NDArray[np.int64]] = []
        self.lengths = np.array([len(row.inputs) for row in self.train])
        self.step = 0
        self.best: tuple[float, int, dict[str, Tensor], float] | None = None
        """loss, step, weights and share"""
        self.best_scores: Scores | None = None
        self.last: Scores | None = None
        self.losses: list[float] = []
        self.evaluation_cost = 0.0
        numbers = task.vocab is None and config.model.dropout == 0 and hasattr(config.model.mixer, "dropout")
        self.trial: Any = None if numbers else ()
        """what to go back to while dropout is tried; () if it is not"""

    def _build(self, config: RunConfig) -> None:
        """Make the network and its optimizer."""
        self.config = config
        self.model = config.build_model(self.task)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        if self.adds:
            self.optimizer.add_param_group(
                {"params": [("share", self.share)], "weight_decay": 0.0, "scale": 1.0}
            )
        self.parameters = [*self.model.parameters(), self.share]

    def _rebuild(self, config: RunConfig, weights: dict[str, Tensor], moments: dict[str, Any]) -> None:
        """Go on with another configuration of the same shape."""
        self._build(config)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(moments)
        self.model.train()

    def _try_dropout(self, share: float) -> None:
        """Try a network of numbers with dropout for a while once it learns its rows by heart; validation decides.

        Dropout makes noise, which hurts where an exact number is wanted, and helps where rows are few.
        """
        if self.trial is None:
            assert self.best is not None
            if not TRIAL[0] <= share < TRIAL[1] or self.best[0] < BY_HEART * float(
                np.mean(self.losses[-50:])
            ):
                return
            weights = copy.deepcopy(self.model.state_dict())
            moments = copy.deepcopy(self.optimizer.state_dict())
            average = [part.clone() for part in self.average]
            part = float(self.share.detach())
            self.trial = (share + TRIAL[2], self.best[0], self.config, weights, moments, average, part)
            mixer = replace(self.config.model.mixer, dropout=DROPOUT)  # type: ignore[type-var]
            config = self.config.replace(model={"dropout": DROPOUT, "mixer": mixer})
            self._rebuild(config, weights, moments)
        elif self.trial and share >= self.trial[0]:
            _, before, config, weights, moments, average, part = self.trial
            self.trial = ()
            kept = self.best is not None and self.best[0] < before
            self.record["dropout"] = DROPOUT if kept else 0.0
            if not kept:
                self._rebuild(config, weights, moments)
                self.average = average
                self.share.data.fill_(part)

    # the simple thing

    def _fit_baseline(self, config: RunConfig) -> Fitted:
        begun = time.monotonic()
        task = self.task
        inputs, targets = [row.inputs for row in self.train], [row.target for row in self.train]
        found = fit_baseline(task, inputs, targets, task.groups())
        name, scores = constant_scores(task, targets)
        constant = (
            [scores] * len(self.val)
            if task.kind != "tag"
            else [scores.expand(len(r.inputs), -1) for r in self.val]
        )
        with torch.no_grad():
            self.beside = _apply(lambda batch: found.module(batch.inputs, batch.mask), task, self.val, 64)
        self.record["baselines"] = {
            "split": "val",
            "metric": task.metric,
            "scores": {
                name: self._score(constant).metrics,
                found.name: self._score(self.beside).metrics,
            },
        }
        listed = ", ".join(
            f"{name} {s[task.metric]:.4g}" for name, s in self.record["baselines"]["scores"].items()
        )
        self.tell(heading("baselines", f"val {task.metric}: {listed} ({time.monotonic() - begun:.1f} s)"))
        return found

    # scoring

    def _score(self, logits: Sequence[Tensor], active: float | None = None) -> Scores:
        """Metrics of scores for each validation row."""
        task, totals = self.task, dict[str, Tensor]()
        losses, each = [], []
        for start in range(0, len(self.val), 256):
            some = self.val[start : start + 256]
            time = max(len(row.inputs) for row in some)
            stacked = _stack(logits[start : start + 256], time)
            targets = task.collate_targets(some, time)
            batch = Batch(stacked, None, targets)
            for name, value in task.score(Scored(stacked), batch).items():
                totals[name] = totals[name] + value if name in totals else value
            losses.append(task.target.losses(stacked.float(), targets).double())
            each.append(task.target.each(stacked, targets).double())
        return Scores(task.summarize(totals), torch.cat(losses), torch.cat(each), active)

    @torch.no_grad()
    def _evaluate(self, attention: bool = True) -> Scores:
        """Scores of the sum of baseline and network on the validation rows."""
        model = self.model.eval()
        counts = [0.0, 0.0]

        def run(batch: Batch) -> Tensor:
            out = model(batch.inputs, batch.mask)
            for routing in out.routings:
                if routing is not None:
                    real = routing.active if batch.mask is None else routing.active & batch.mask[..., None]
                    counts[0] += float(real.sum())
                    counts[1] += float(
                        (
                            batch.mask.sum()
                            if batch.mask is not None
                            else batch.inputs.shape[0] * batch.inputs.shape[1]
                        )
                        * routing.active.shape[-1]
                    )
            return out.logits

        with contextlib.nullcontext() if attention else override_activation(model, active=False):
            logits = _apply(run, self.task, self.val, 64)
        if self.adds:
            logits = [one + self.share.detach() * two for one, two in zip(logits, self.beside, strict=True)]
        model.train()
        return self._score(logits, counts[0] / counts[1] if counts[1] else None)

    # training

    def _batch(self) -> tuple[Batch, Tensor | None]:
        """The next batch, and the scores that a baseline gives its rows without having seen them."""
        size = self.config.training.batch_size
        if not self.queue:
            order = self.random.permutation(len(self.train))
            for start in range(0, len(order), size * CHUNK):
                part = order[start : start + size * CHUNK]
                part = part[np.argsort(self.lengths[part], kind="stable")]
                self.queue += [part[i : i + size] for i in range(0, len(part), size)]
            self.queue = [self.queue[i] for i in self.random.permutation(len(self.queue))]
        numbers = self.queue.pop()
        patch = int(self.task.facts.get("patch", 1))
        rows = [self.train[i] for i in numbers]
        if patch > 1 and not self.task.fixed_length:
            rows = [row._replace(inputs=_shifted(row.inputs, patch, self.random)) for row in rows]
        batch = self.task.collate(rows)
        if self.baseline is None or not self.adds:
            return batch, None
        unseen = [torch.from_numpy(np.asarray(self.baseline.unseen[i])) for i in numbers]
        return batch, _stack(unseen, batch.inputs.shape[1])

    def _train_step(self, lr: float) -> None:
        batch, beside = self._batch()
        set_learning_rate(self.optimizer, lr)
        logits = self.model(batch.inputs, batch.mask).logits
        if beside is not None:
            logits = logits + self.share * beside
        loss = self.task.loss(Scored(logits), batch).mean
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip or math.inf)
        if bool(norm.isfinite()):
            self.optimizer.step()
            weight = 1 - min(AVERAGED, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], weight)
        self.losses.append(float(loss.detach()))
        self.step += 1

    def _look(self) -> bool:
        """Score the validation rows; returns whether they are all right."""
        begun = self.settings.now()
        with self._averaged():
            return self._look_at(begun)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Put the average of the weights in place inside the block."""
        saved = [parameter.detach().clone() for parameter in self.parameters]
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.average)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, saved)

    def _look_at(self, begun: float) -> bool:
        scores = self.last = self._evaluate()
        loss = float(scores.losses.mean())
        if math.isfinite(loss) and (self.best is None or loss < self.best[0]):
            weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
            self.best, self.best_scores = (loss, self.step, weights, float(self.share.detach())), scores
            if self.keep is not None:
                self.keep(self._snapshot)
        self.evaluation_cost = max(self.settings.now() - begun, 1e-6)
        return self.task.metric == "accuracy" and scores.metrics["accuracy"] == 1.0 and loss < 0.01

    def _snapshot(self) -> Result:
        """The best model so far, with its baseline."""
        return self._finish(copy.deepcopy(self.model), quick=True)

    def run(self) -> Result:
        """Train, choose, and look at what attention did."""
        settings = self.settings
        begun = settings.now()
        end = self.started + 60 * settings.minutes
        left = max(end - begun, 0.0)
        steps = settings.steps
        interrupted = False
        warm, finish = WARMUP, 1.0
        cooling_from: float | None = None
        share = next_look = 0.0
        improved = 0.0
        lr = self.config.optimizer.lr
        highest = lr
        self.model.train()
        try:
            right = 0
            while True:
                if steps is not None:
                    share = self.step / steps
                else:
                    # what comes after training: the last looks and the check of attention
                    reserve = 4 * self.evaluation_cost + 0.2
                    share = (settings.now() - begun) / max(left - reserve, 1e-3)
                if share >= finish and self.step > 0:
                    break
                if cooling_from is not None:
                    lr = (
                        highest
                        * max(1 - cooling_from, 0.05)
                        * max(finish - share, 0.0)
                        / max(finish - cooling_from, 1e-9)
                    )
                else:
                    lr = highest * (min(share / warm, 1.0) if share < warm else (1 - share) / (1 - warm))
                self._train_step(max(lr, 1e-3 * highest))
                if share >= next_look:
                    before = None if self.best is None else self.best[0]
                    right = right + 1 if self._look() else 0
                    if before is None or (self.best is not None and self.best[0] < before * (1 - 1e-3)):
                        improved = share
                    gap = 1 / settings.evaluations
                    if steps is None:  # looking takes a tenth of the time at most
                        gap = max(gap, 10 * self.evaluation_cost / max(left, 1e-3))
                    next_look = share + gap
                    if settings.early_stopping and right >= 2:
                        break
                    if settings.early_stopping and cooling_from is None and share - improved > PATIENCE:
                        cooling_from, finish = share, min(1.0, share * (1 + COOLING))
                if self.trial != () and self.best is not None and (steps is None or steps > 50):
                    self._try_dropout(share)
                self._report(share, begun, left)
        except KeyboardInterrupt:
            interrupted = True
            self.tell(heading("stopped", f"after {self.step} steps; the best weights so far are kept"))
        if not interrupted or self.best is None:
            self._look()
        result = self._finish(self.model)
        seconds = settings.now() - self.started
        result.record.update(seconds=seconds, interrupted=interrupted)
        return result

    def _report(self, share: float, begun: float, left: float) -> None:
        last = None if self.last is None else self.last.metrics[self.task.metric]
        best = None if self.best_scores is None else self.best_scores.metrics[self.task.metric]
        self.show(
            Progress(
                min(share, 1.0),
                self.step,
                float(np.mean(self.losses[-50:])),
                self.task.metric,
                last,
                best,
                max(begun + left - self.settings.now(), 0.0) if self.settings.steps is None else math.nan,
            )
        )

    # the outcome

    def _finish(self, model: nn.Module, quick: bool = False) -> Result:
        """The model with its best weights, or the baseline alone if they add nothing that can be told from chance."""
        assert self.best is not None and self.best_scores is not None
        task, scores = self.task, self.best_scores
        _, step, weights, share = self.best
        model.load_state_dict(weights)
        record = {
            **self.record,
            "steps": self.step,
            "best_step": step,
            "kept": "network",
            "rows": len(self.train),
        }
        record["score"] = {"split": "val", "metric": task.metric, **scores.metrics}
        if self.baseline is not None:
            offset: Offset | None = Offset(copy.deepcopy(self.baseline.module))
            assert offset is not None
            beside = self._score(self.beside)
            gain, error = _difference(beside.losses - scores.losses)
            record["gain"] = {"loss": gain, "error": error}
            if gain > error and self.adds:
                record["kept"] = "network and baseline"
                offset.share.data.fill_(share)
            elif gain > error:
                offset = None
            else:
                record["kept"] = "baseline"
                record["score"] = {"split": "val", "metric": task.metric, **beside.metrics}
                for part in (model.head.out.weight, model.head.out.bias):  # type: ignore[union-attr]
                    if part is not None:
                        nn.init.zeros_(part)  # type: ignore[arg-type]
                switch_off(model)
            model.offset = offset  # type: ignore[assignment]
            record["baselines"]["kept"] = self.baseline.name
            if offset is not None:
                task.facts = {**task.facts, "baseline": self.baseline.about}
            else:
                task.facts = {name: value for name, value in task.facts.items() if name != "baseline"}
        if not quick and record["kept"] != "baseline" and routers_of(model):
            record["attention"] = self._attention(model, share)
        return Result(model.eval(), self.config, step, record)

    def _attention(self, model: nn.Module, share: float) -> dict[str, Any]:
        """What attention contributed to the validation score; it is switched off if that is nothing."""
        self.model = model
        offset: Any = model.offset
        model.offset = None  # type: ignore[assignment]
        self.share.data.fill_(share)
        with_it, without = self._evaluate(), self._evaluate(attention=False)
        gain, error = _difference(without.losses - with_it.losses)
        change, spread = _difference(without.each - with_it.each)
        if self.task.metric == "rmse":
            # of a mean square, the change of its root
            root = self.task.facts["target_std"]
            now, then = with_it.metrics["rmse"], without.metrics["rmse"]
            change, spread = then - now, spread * root**2 / max(now + then, 1e-12)
        found = {"active": with_it.active, "change": change, "error": spread, "metric": self.task.metric}
        if gain <= error:
            switch_off(model)
            found["off"] = True
        model.offset = offset
        return found


def routers_of(model: nn.Module) -> list[Any]:
    """The routers of a model."""
    return [part.router for part in model.modules() if isinstance(part, SparseModularActivation)]


def switch_off(model: nn.Module) -> None:
    """Let no token attend any more: routers with a bias get one that no token overcomes."""
    with torch.no_grad():
        for router in routers_of(model):
            for parameter in router.parameters():
                if parameter.dim() > 1:
                    parameter.zero_()
            router.start_at(-1e4)


def attention_line(found: dict[str, Any] | None) -> str:
    """What attention did, in one line.

    >>> attention_line({"active": 0.02, "change": -0.214, "error": 0.019, "metric": "accuracy"})
    'attention: 2.0 % of tokens; without it -21.4 +- 1.9 points'
    """
    if found is None:
        return "attention: not used, the baseline answers alone"
    scale, unit = (1.0, found["metric"]) if found["metric"] == "rmse" else (100.0, "points")
    change = f"{scale * found['change']:+.3g} +- {scale * found['error']:.2g} {unit}"
    rate = (
        "-" if found["active"] is None else f"{100 * found['active']:.{0 if found['active'] >= 0.1 else 1}f}"
    )
    if found.get("off"):
        return f"attention: bought nothing ({change} without it) and is switched off"
    return f"attention: {rate} % of tokens; without it {change}"


def _difference(values: Tensor) -> tuple[float, float]:
    """The mean of differences and its standard error."""
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return float(values.mean()), error


def _rows(task: OwnTask, split: Literal["train", "val"]) -> list[Example]:
    data = task.dataset(split)
    return [data[i] for i in range(len(data))]


def _apply(run: Callable[[Batch], Tensor], task: OwnTask, rows: Sequence[Example], size: int) -> list[Tensor]:
    """Scores of each row, computed in batches of similar lengths."""
    order = np.argsort([len(row.inputs) for row in rows], kind="stable")
    found: list[Tensor] = [torch.zeros(0)] * len(rows)
    for start in range(0, len(order), size):
        numbers = order[start : start + size]
        some = [rows[i] for i in numbers]
        for number, row, logits in zip(numbers, some, run(task.collate_inputs(some)), strict=True):
            found[number] = logits[: len(row.inputs)] if task.kind == "tag" else logits
    return found


def _stack(rows: Sequence[Tensor], time: int) -> Tensor:
    """Scores of rows as one tensor; those of tags are padded with zeros."""
    if rows[0].dim() == 1:
        return torch.stack(list(rows))
    found = torch.zeros(len(rows), time, rows[0].shape[-1])
    for to, row in zip(found, rows, strict=True):
        to[: len(row)] = row
    return found


def _shifted(patches: NDArray[Any], patch: int, random: np.random.Generator) -> NDArray[Any]:
    """A series that begins a few steps later: the borders of its patches lie elsewhere."""
    shift = int(random.integers(patch))
    if shift == 0:
        return patches
    steps = patches.reshape(len(patches) * patch, -1)
    return np.pad(steps, ((shift, patch - shift), (0, 0))).reshape(len(patches) + 1, -1)
