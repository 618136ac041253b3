"""The training loop: a run is a configuration and a folder, and survives whatever happens to it.

    folder/config.yaml      every setting of the run
    folder/run.json         seed, versions, number of parameters
    folder/metrics.jsonl    one line per record, of training and of held-out data
    folder/step-N/          checkpoints, see `seqboat.training.checkpoint`

Every step is a function of the weights, the configuration and the number of the step: the batch follows from the
seed and the step, and so does the noise of dropout and routers, which is seeded anew in every step. A resumed run
therefore continues bit for bit without any saved generator. Losses are summed over all processes and micro-batches
and divided by how many targets were scored in the whole batch, so that uneven parts average exactly.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch
from torch import Tensor, nn

from seqboat.core.counts import count_layers
from seqboat.core.losses import auxiliary_loss, budget_loss
from seqboat.core.policy import outer_policies, update_budgets
from seqboat.core.routers import set_training_step
from seqboat.core.sma import Routing
from seqboat.core.state import detach_state, map_state, tensors
from seqboat.data.files import Lock, write_text
from seqboat.tasks.base import Batch, Loss, apply_model
from seqboat.training import checkpoint as ck
from seqboat.training.config import RunConfig, difference, to_dict, to_yaml
from seqboat.training.display import Display, make_display
from seqboat.training.evaluate import activation_sums, evaluate, rates
from seqboat.training.loader import Loaded, Part, Plan, batches, share
from seqboat.training.metrics import iterate_metrics
from seqboat.training.optim import build_optimizer, learning_rate, set_learning_rate
from seqboat.training.parallel import World, join, spread
from seqboat.training.track import make_trackers
from seqboat.version import __version__

CARRY = "carry.safetensors"
MAX_SKIPPED = 5
"""Steps with a loss or gradient that is not finite, in a row, after which a run gives up."""
DEAD_AFTER = 200
"""Steps without an activated token after which a layer's router is reported."""
EXIT_DIVERGED = 3
BAD_INPUTS = "the inputs are not finite"


class Outcome(NamedTuple):
    """How a run ended."""

    exit_code: int
    """0 finished, 3 diverged, 130 or 143 stopped by a signal"""
    step: int
    """updates done"""
    best: float | None
    """best value of the task's metric on held-out data"""
    message: str


class Progress(NamedTuple):
    """What a run knows besides weights; part of every checkpoint."""

    step: int = 0
    best: float | None = None
    best_step: int | None = None
    waited: int = 0
    """evaluations since the best one"""
    skipped: int = 0
    """steps that were not applied, in a row up to now"""
    skipped_in_all: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    """seconds of training and evaluation, over all processes that worked on the run one after the other"""
    processor: float = 0.0
    """seconds of processor time of the first process, which a busy machine does not stretch"""
    finished: bool = False
    dead: dict[str, int] | None = None
    """modules without an activated token: the step since when; 0 once that was reported"""


def versions() -> dict[str, str]:
    """What the numbers of a run may depend on."""
    return {
        "seqboat": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """The commit of the working copy that this package is in, if it is in one."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def seed_step(seed: int, step: int, rank: int, part: int) -> None:
    """Seed the noise of one micro-batch."""
    state = np.random.SeedSequence((seed, step, rank, part)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


def peak_memory(device: torch.device) -> float:
    """Highest memory so far, in MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (2**20 if sys.platform == "darwin" else 2**10)


class Signals:
    """The first SIGINT or SIGTERM asks the loop to stop after the step; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self.received = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        # handlers belong to the main thread; a run in another one is stopped by whoever started it
        with contextlib.suppress(ValueError):
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


class Metrics:
    """metrics.jsonl: a line per record. If it cannot be written the run goes on."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self.warn = path, warn
        self.failed = False

    def rewind(self, step: int) -> None:
        """Drop what a run wrote after the checkpoint that it goes on from."""
        if self.path.exists():
            kept = [r for r in iterate_metrics(self.path) if r.get("step", 0) <= step]
            write_text(self.path, "".join(json.dumps(r) + "\n" for r in kept))

    def write(self, record: dict[str, Any]) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            if not self.failed:
                self.warn(f"metrics cannot be written: {error}")
            self.failed = True


def train(
    config: RunConfig,
    folder: Path | str,
    *,
    resume: bool = False,
    display: Display | None = None,
    on_phase: Callable[[str], None] | None = None,
    on_step: Callable[[int, nn.Module], None] | None = None,
) -> Outcome:
    """Train a model.

    Args:
        config: of the run.
        folder: of the run; must be new or empty, unless resuming.
        resume: whether to go on from the newest whole checkpoint; starts anew where there is none.
        display: shows progress; made to fit the terminal by default.
        on_phase: called before each phase of saving (`checkpoint.PHASES`).
        on_step: called with the number of updates done and the model after every step.
    """
    folder = Path(folder)
    with join(config.training.device) as world:
        display = display or make_display(world.first)
        with contextlib.ExitStack() as stack:
            error: Exception | None = None
            if world.first:
                try:
                    # a run that never starts, for want of data for example, leaves no folder behind
                    stack.callback(remove_unused, folder)
                    prepare_folder(folder, resume)
                    stack.enter_context(Lock(folder))
                    ck.Store(folder).sweep()
                except (OSError, ValueError) as caught:
                    error = caught
            world.agree(error)
            stack.callback(display.close)
            return Run(config, folder, world, display, resume, on_phase, on_step).run()


def prepare_folder(folder: Path, resume: bool) -> None:
    """Make a run's folder, or refuse one that cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # a name of its own: a run that was killed here may have left its probe behind
        with tempfile.TemporaryDirectory(prefix=".stage-probe-", dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write to the run's folder {folder}: {error.strerror}") from error
    if not resume and (ck.Store(folder).steps() or (folder / "config.yaml").exists()):
        raise ValueError(
            f"{folder} holds a run already: resume it (--resume) or choose another folder (--out)"
        )


def remove_unused(folder: Path) -> None:
    """Remove a folder in which nothing but a lock was written."""
    with contextlib.suppress(OSError):
        if [entry.name for entry in folder.iterdir()] == ["lock"] and not (folder / "lock").stat().st_size:
            (folder / "lock").unlink()
            folder.rmdir()


class Run:
    """One run, from set-up to its outcome."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        world: World,
        display: Display,
        resume: bool,
        on_phase: Callable[[str], None] | None,
        on_step: Callable[[int, nn.Module], None] | None,
    ) -> None:
        self.config, self.folder, self.world, self.display = config, folder, world, display
        self.on_step = on_step
        training = config.training
        parts = world.size * training.accumulation
        if training.batch_size < parts:
            raise ValueError(
                f"training.batch_size must be at least processes x training.accumulation = {parts}, "
                f"got {training.batch_size}"
            )
        self.task = config.build_task()
        if training.carry_state and self.task.kind != "lm":
            raise ValueError(f"training.carry_state needs a language model, but {self.task.name} is none")
        if training.carry_state and training.batch_size % parts:
            raise ValueError(
                f"with training.carry_state, training.batch_size must be a multiple of processes x "
                f"training.accumulation = {parts}, got {training.batch_size}"
            )
        if training.carry_state and getattr(config.task, "context", None):
            raise ValueError(
                "training.carry_state and task.context exclude each other: the state is the context"
            )
        self.data = self.task.dataset("train")
        self.task.dataset(config.evaluation.split)  # what is wrong with it is said now, not after many steps
        self.plan = Plan(
            len(self.data),
            training.batch_size,
            config.seed,
            self.data.lengths() if training.bucketing else None,
            training.carry_state,
        )
        torch.manual_seed(config.seed)
        model = config.build_model(self.task).to(world.device).train()
        if training.gradient_checkpointing:
            model.backbone.gradient_checkpointing = True  # type: ignore[union-attr]
        if training.compile:
            from seqboat.models.compile import capture_active_tokens

            capture_active_tokens()
            model.compile()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.modules = routed_modules(model)
        self.model = spread(model, world, training.distributed)
        self.module = self.model.module
        self.optimizer = build_optimizer(self.module, config.optimizer)
        self.store = ck.Store(folder, training.keep, on_phase, display.tell)
        self.metrics = Metrics(folder / "metrics.jsonl", display.tell)
        self.progress = Progress()
        self.started = self.worked_from = 0.0
        self.carried: list[Any] = [None] * training.accumulation
        self.resumed = resume and self.load()
        if world.first:
            self.describe()

    # the folder

    def describe(self) -> None:
        """Leave configuration, seed and versions beside the checkpoints."""
        write_text(self.folder / "config.yaml", to_yaml(self.config))
        about = {
            "seed": self.config.seed,
            "parameters": self.parameters,
            "processes": self.world.size,
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "commit": commit(),
        }
        write_text(self.folder / "run.json", json.dumps(about, indent=1) + "\n")
        self.metrics.rewind(self.progress.step)

    def load(self) -> bool:
        """Go on from the newest whole checkpoint, if there is one."""
        found = self.store.newest()
        if found is None:
            return False
        other = difference(found.config(), self.config)
        if other is not None:
            raise ValueError(f"{found.path} is of another configuration: {other}")
        if found.state["versions"].get("torch") != torch.__version__:
            self.display.tell(
                f"the checkpoint was written with torch {found.state['versions'].get('torch')}: "
                "numbers may differ in their last digits"
            )
        ck.load_model_tensors(self.module, found.tensors(ck.MODEL))
        ck.load_optimizer_tensors(self.optimizer, found.tensors(ck.OPTIM))
        self.progress = Progress(**found.state["progress"])
        if CARRY in found.state["files"]:
            self._load_carried(found.tensors(CARRY))
        if self.world.first:
            # the pointers may be older than the checkpoint, if the process died between the two
            self.store.point("latest", self.progress.step)
            if self.progress.best_step is not None and self.store.path(self.progress.best_step).exists():
                self.store.point("best", self.progress.best_step)
        return True

    def save(self, best: bool = False) -> None:
        """Write a checkpoint; all processes take part."""
        files = {ck.MODEL: ck.model_tensors(self.module), ck.OPTIM: ck.optimizer_tensors(self.optimizer)}
        if self.config.training.carry_state:
            files[CARRY] = self._carried_tensors()
        step = self.progress.step
        state = {
            "progress": self.progress._asdict(),
            "config": to_dict(self.config),
            "classes": self.task.classes,
            "labels": self.task.labels,
            "versions": versions(),
            "processes": self.world.size,
            # both follow from the seed and the step, and are here for people
            "sampler": {"epoch": step // self.plan.per_epoch, "position": step % self.plan.per_epoch},
            "rng": {"seed": self.config.seed, "step": step},
        }
        error: Exception | None = None
        if self.world.first:
            try:
                self.store.save(step, files, state, best)
            except Exception as caught:
                error = caught
        self.world.agree(error)

    def _carried_tensors(self) -> dict[str, Tensor]:
        """The carried states of all rows of the global batch, in its order."""
        if self.carried[0] is None:
            return {}
        parts = [dict(tensors(state)) for state in self.carried]
        return {name: self.world.gather_rows(torch.cat([part[name] for part in parts])) for name in parts[0]}

    def _load_carried(self, saved: dict[str, Tensor]) -> None:
        """Give every process and micro-batch its rows back."""
        parts = self.config.training.accumulation
        rows = self.config.training.batch_size // (self.world.size * parts)
        for part in range(parts if saved else 0):
            start = (self.world.rank * parts + part) * rows
            fresh = self.module.init_state(rows)  # type: ignore[operator]
            values = iter([saved[name][start : start + rows] for name, _ in tensors(fresh)])
            self.carried[part] = map_state(
                lambda like, values=values: next(values).clone().to(like.device),  # type: ignore[misc]
                fresh,
            )

    # the loop

    def run(self) -> Outcome:
        """Train to the end, to a signal, or until it makes no sense any more."""
        steps = self.config.schedule.steps
        trackers = make_trackers(self.config.training.trackers, self.folder) if self.world.first else []
        self.display.start(self._title(), steps, self.progress.step)
        if self.resumed:
            self.display.tell(f"resumed after step {self.progress.step}")
        if self.task.skips is not None and self.task.skips.count:
            skips = self.task.skips
            self.display.tell(f"{skips.count} records of the data were left out; the first: {skips.first}")
        try:
            with Signals() as signals:
                return self._loop(steps, signals, trackers)
        finally:
            for tracker in trackers:
                tracker.close()

    def _title(self) -> str:
        where = f"{self.world.size} x {self.world.device.type}"
        name = self.config.recipe or self.task.name
        return f"{name}: {self.parameters:,} parameters, {where}, {self.folder}"

    def _parts(self, step: int) -> Iterator[Part]:
        """The parts of this process, from a step on."""
        accumulation = self.config.training.accumulation
        for number in range(step, self.config.schedule.steps):
            parts = share(self.plan.batch(number), self.world.size * accumulation)
            yield from parts[self.world.rank * accumulation : (self.world.rank + 1) * accumulation]

    def _loop(self, steps: int, signals: Signals, trackers: list[Any]) -> Outcome:
        training, evaluation = self.config.training, self.config.evaluation
        if self.progress.finished:
            return Outcome(0, self.progress.step, self.progress.best, "the run was finished already")
        pin = self.world.device.type == "cuda"
        source = batches(
            self.task, self.data, "train", self._parts(self.progress.step), training.workers, pin_memory=pin
        )
        clock, tokens = time.monotonic(), 0
        self.started = clock - self.progress.elapsed
        self.worked_from = time.process_time() - self.progress.processor
        stopped_early = False
        while self.progress.step < steps and not stopped_early:
            step = self.progress.step
            micro = [next(source) for _ in range(training.accumulation)]
            logged = (step + 1) % training.log_every == 0 or step + 1 == steps
            result = self.step(step, micro, signals.received, logged)
            tokens += result.tokens
            self.progress = self.progress._replace(step=step + 1, tokens=self.progress.tokens + result.tokens)
            if logged:
                now = time.monotonic()
                record = {
                    "step": step + 1,
                    "split": "train",
                    "epoch": (step + 1) / self.plan.per_epoch,
                    **result.metrics,
                    "lr": result.lr,
                    "grad_norm": _finite(result.norm),
                    "tokens_per_s": tokens / max(now - clock, 1e-9),
                    "memory_mb": peak_memory(self.world.device),
                    "activation": result.activation,
                }
                self._record(record, trackers)
                self.display.log(record)
                self._watch_routers(step + 1, result.taken)
                clock, tokens = now, 0
            improved = saved = False
            if (step + 1) % evaluation.every == 0 or step + 1 == steps:
                before = time.monotonic()
                improved = self._evaluate(trackers)
                clock += time.monotonic() - before
                limit = evaluation.patience
                stopped_early = limit is not None and self.progress.waited >= limit
            done = step + 1 == steps or stopped_early
            if done:
                self.progress = self.progress._replace(finished=True)
            if self.on_step is not None:
                self.on_step(step + 1, self.module)
            if self.progress.skipped >= MAX_SKIPPED:
                return self._give_up(result)
            if improved or done or (step + 1) % training.save_every == 0:
                self.save(best=improved)
                saved = True
            if result.signal and not done:
                if not saved:
                    self.save()
                name = signal.Signals(result.signal).name
                return Outcome(
                    128 + result.signal,
                    self.progress.step,
                    self.progress.best,
                    f"stopped by {name} after step {self.progress.step}; --resume goes on",
                )
        reason = f"no better for {self.progress.waited} evaluations" if stopped_early else "finished"
        return Outcome(0, self.progress.step, self.progress.best, reason)

    def _record(self, record: dict[str, Any], trackers: list[Any]) -> None:
        self.progress = self.progress._replace(
            elapsed=time.monotonic() - self.started, processor=time.process_time() - self.worked_from
        )
        record |= {"elapsed": self.progress.elapsed, "processor": self.progress.processor}
        if self.world.first:
            self.metrics.write(record)
            for tracker in trackers:
                tracker.log(record)

    def _watch_routers(self, step: int, taken: list[int]) -> None:
        """Name modules that no token has activated for long.

        Args:
            step: updates done.
            taken: tokens that each module of each routed layer took in this step.
        """
        dead = dict(self.progress.dead or {})
        for (layer, module), count in zip(self.modules, taken, strict=True):
            name = f"layer {layer}" if module is None else f"layer {layer}, module {module}"
            if count:
                if dead.pop(name, step) == 0:
                    self.display.tell(f"{name} is awake again at step {step}")
            elif dead.setdefault(name, step) and step - dead[name] >= DEAD_AFTER:
                self.display.tell(
                    f"{name}: its router has activated no token since step {dead[name]}; "
                    f"the layer works without {module or 'its module'}"
                )
                dead[name] = 0  # said
        self.progress = self.progress._replace(dead=dead)

    def _evaluate(self, trackers: list[Any]) -> bool:
        """Score held-out data; returns whether it is the best so far."""
        evaluation = self.config.evaluation
        started = time.monotonic()
        result = evaluate(
            self.module,
            self.task,
            evaluation.split,
            self.world,
            batch_size=evaluation.batch_size,
            limit=evaluation.limit,
            workers=self.config.training.workers,
            bf16=self.config.training.precision == "bf16",
            carry_state=self.config.training.carry_state,
        )
        value = result.metrics[self.task.metric]
        best = self.progress.best
        sign = 1 if self.task.better == "higher" else -1
        improved = math.isfinite(value) and (best is None or sign * value > sign * best)
        if improved:
            self.progress = self.progress._replace(best=value, best_step=self.progress.step, waited=0)
        else:
            self.progress = self.progress._replace(waited=self.progress.waited + 1)
        record = {
            "step": self.progress.step,
            "split": evaluation.split,
            **{name: _finite(number) for name, number in result.metrics.items()},
            "activation": result.activation,
            "seconds": time.monotonic() - started,
        }
        self._record(record, trackers)
        self.display.scored(record, improved)
        return improved

    def _give_up(self, result: Step) -> Outcome:
        message = (
            f"the loss or its gradient was not finite in {MAX_SKIPPED} steps in a row, the last being step "
            f"{self.progress.step}: {result.trouble}"
        )
        return Outcome(EXIT_DIVERGED, self.progress.step, self.progress.best, message)

    # a step

    def step(self, step: int, micro: list[Loaded], received: int, logged: bool) -> Step:
        """One update.

        Args:
            step: updates done before.
            micro: the micro-batches of this process.
            received: the number of a signal, or 0.
            logged: whether scores and activation are wanted.
        """
        config, world = self.config, self.world
        lr = learning_rate(step, config.optimizer.lr, config.schedule)
        set_learning_rate(self.optimizer, lr)
        set_training_step(self.module, step)
        if config.training.carry_state and step % self.plan.per_epoch == 0:
            self.carried = [None] * len(self.carried)
        # running averages of norms move in the forward pass: a step that is not applied must not move them either
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        carried = list(self.carried)
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(5, dtype=torch.float64)
        routed: Tensor | None = None
        taken = torch.zeros(len(self.modules), dtype=torch.int64, device=world.device)
        scores: dict[str, Tensor] = {}
        for number, loaded in enumerate(micro):
            part, batch = loaded.part, self._place(loaded)
            seed_step(config.seed, step, world.rank, number)
            with self.model.accumulate(last=number + 1 == len(micro)):
                with self._autocast():
                    output = apply_model(self.model.run, self.task.kind, batch, carried[number])
                loss = self.task.loss(output, batch)
                whole = self._with_budget(loss, output.routings, batch)
                (whole if part.counted else 0 * whole).backward()
            if config.training.carry_state:
                self.carried[number] = detach_state(output.state)
            if part.counted:
                sums[0] += loss.total.detach().double().cpu()
                sums[1] += float(loss.scored)
                sums[2] += batch.tokens
            if logged:
                counts = activation_sums(output.routings, batch) * part.counted
                routed = counts if routed is None else routed + counts
                taken = taken + tokens_taken(output.routings, len(counts)) * part.counted
                for name, value in self.task.score(output, batch).items():
                    value = value.cpu() * part.counted
                    scores[name] = scores[name] + value if name in scores else value
        # a signal may reach some processes only, or one before another: all of them stop at the same step
        sums[3], sums[4] = (float(received == s) for s in (signal.SIGINT, signal.SIGTERM))
        sums = world.sum(sums.to(world.device)).cpu()
        total, scored = float(sums[0]), float(sums[1])
        norm = self._finish_gradients(world.size / max(scored, 1.0))
        stop = signal.SIGINT if sums[3] else signal.SIGTERM if sums[4] else 0
        if math.isfinite(total) and math.isfinite(norm):
            self.optimizer.step()
            update_budgets(self.module)
            self.progress = self.progress._replace(skipped=0)
            trouble = ""
        else:
            trouble = self._diagnose(step, micro, carried)
            with torch.no_grad():
                for buffer, value in zip(self.module.buffers(), buffers, strict=True):
                    buffer.copy_(value)
            self.carried = carried
            self.progress = self.progress._replace(
                skipped=self.progress.skipped + 1, skipped_in_all=self.progress.skipped_in_all + 1
            )
            self._report_skipped(step, trouble)
        metrics: dict[str, float | None] = {"loss": _finite(total / max(scored, 1.0))}
        activation: list[float | None] = []
        if logged:
            assert routed is not None
            activation = rates(world.sum(routed.to(world.device)).cpu())
            taken = world.sum(taken)
            summed = {name: world.sum(value.to(world.device)).cpu() for name, value in scores.items()}
            metrics |= {n: _finite(v) for n, v in self.task.summarise(summed).items() if n != "loss"}
        return Step(metrics, lr, norm, int(sums[2]), int(stop), activation, taken.tolist(), trouble)

    def _with_budget(self, loss: Loss, routings: Sequence[Routing | None], batch: Batch) -> Tensor:
        """The loss to minimise: that of the task, and what budgets add to it for every target."""
        masks = [batch.mask] if batch.second is None else [batch.mask, batch.second_mask]
        extra = budget_loss(self.module, routings, masks)
        return loss.total if extra is None else loss.total + extra * loss.scored

    def _place(self, loaded: Loaded) -> Batch:
        """A part on the device; the tokens of a stand-in are padding, so that no norm counts them."""
        batch = loaded.batch.to(self.world.device, non_blocking=True)
        return batch if loaded.part.counted else batch.hidden()

    def _autocast(self) -> torch.autocast:
        bf16 = self.config.training.precision == "bf16"
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=bf16)

    def _finish_gradients(self, scale: float) -> float:
        """Turn averages over processes of sums into the average over all targets, clip, and return the norm."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        add_auxiliary_gradients(self.module)
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        limit = self.config.optimizer.clip
        # a norm that is not finite would spread to every gradient, and hide where it came from
        if limit is not None and math.isfinite(float(ck.whole(norm))):
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return float(ck.whole(norm))

    def _report_skipped(self, step: int, trouble: str) -> None:
        examples = self.plan.batch(step).tolist()
        self.display.tell(
            f"step {step + 1} not applied: {trouble}; training examples {_few(examples)} "
            f"({self.progress.skipped} in a row)"
        )
        if self.world.first:
            record = {"step": step + 1, "split": "skipped", "trouble": trouble, "examples": examples}
            self.metrics.write(record)

    def _diagnose(self, step: int, micro: list[Loaded], carried: list[Any]) -> str:
        """Where numbers stop being finite: an input, the output of a module, or a gradient."""
        found = []
        # all processes run all parts, whatever they find: layers and norms wait for each other
        for number, loaded in enumerate(micro):
            seed_step(self.config.seed, step, self.world.rank, number)
            with self._autocast():
                batch = self._place(loaded)
                found.append(first_nonfinite(self.module, self.task.kind, batch, carried[number]))
        troubles = [trouble for trouble in self.world.gather(found) if trouble]
        if troubles:
            # the inputs of one process may have spread to the norms of others
            return BAD_INPUTS if BAD_INPUTS in troubles else troubles[0]
        for name, parameter in reversed(list(self.module.named_parameters())):
            gradient = parameter.grad
            if gradient is not None and not bool(ck.whole(gradient).isfinite().all()):
                return f"the gradient of {name} is not finite"
        return "the loss is not finite, though every output of the model is"


def add_auxiliary_gradients(model: nn.Module) -> None:
    """Add the gradient of what layers ask for besides the task (`core.losses.auxiliary_loss`).

    It depends on no data, so it is the same in all processes and takes no part in their averages.
    """
    loss = auxiliary_loss(model)
    if loss is None:
        return
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # not backward(): hooks that average over processes must not see it
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class Step(NamedTuple):
    """What one update did."""

    metrics: dict[str, float | None]
    lr: float
    norm: float
    tokens: int
    signal: int
    activation: list[float | None]
    taken: list[int]
    """tokens that each module of each routed layer took, if it was asked for"""
    trouble: str
    """why the step was not applied; empty if it was"""


def tokens_taken(routings: Sequence[Routing | None], layers: int) -> Tensor:
    """How many tokens each module of each routed layer activated; for a pair of sequences, both together."""
    # padding is never active: no masks are needed
    counts = count_layers(routings, [None] * (len(routings) // max(layers, 1)))
    found = [layer.active for layer in counts if layer is not None]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def routed_modules(model: nn.Module) -> list[tuple[int, str | None]]:
    """The number of the layer, from 1, and the name of every module that a router wakes.

    A module that is alone in its layer has no name.
    """
    layers: Iterable[nn.Module] = model.backbone.layers  # type: ignore[assignment, union-attr]
    found: list[tuple[int, str | None]] = []
    for number, layer in enumerate(layers, start=1):
        for policy in outer_policies(layer):
            alone = len(policy.names) == 1
            found += [(number, None if alone else name) for name in policy.names]
    return found


def _finite(value: float) -> float | None:
    """None for numbers that JSON cannot hold."""
    return value if math.isfinite(value) else None


def _few(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(str(n) for n in numbers[:most])
    return f"{shown}, ... ({len(numbers)} in all)" if len(numbers) > most else shown


@torch.no_grad()
def first_nonfinite(model: nn.Module, kind: Any, batch: Batch, state: Any = None) -> str | None:
    """Run a model on a batch and name the first module whose output is not finite."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not found and not _all_finite(output):
                found.append(name)

        return hook

    handles = [part.register_forward_hook(watch(name)) for name, part in model.named_modules() if name]
    try:
        output = apply_model(model, kind, batch, state)
    finally:
        for handle in handles:
            handle.remove()
    if batch.inputs.is_floating_point() and not bool(batch.inputs.isfinite().all()):
        return BAD_INPUTS
    if found:
        return f"the output of {found[0]} is not finite"
    return None if _all_finite(output.logits) else "the logits are not finite"


def _all_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    return not isinstance(value, tuple | list) or all(_all_finite(part) for part in value)
