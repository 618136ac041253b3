"""The training loop: a run is a configuration and a folder, and can be interrupted at any moment.

    folder/config.json      every setting of the run
    folder/run.json         seed, versions, number of parameters
    folder/metrics.jsonl    one line per record, of training and of held-out data
    folder/step-N/          checkpoints, see `seqboat.training.checkpoint`

Every step is a function of the weights, the configuration and the number of the step: the batch follows from the
seed and the step, and so does the noise of dropout and routers. A resumed run therefore continues bit for bit
without any saved generator.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from seqboat.core.checks import short
from seqboat.data.files import Lock, write_text
from seqboat.ops.kernels import kernels, record
from seqboat.tasks.task import SPLITS, Split, data_change
from seqboat.training import checkpoint as ck
from seqboat.training.config import RunConfig
from seqboat.training.diagnosis import watch_routers
from seqboat.training.display import Display, make_display
from seqboat.training.evaluate import EvaluationInterrupted, evaluate
from seqboat.training.loader import Part, Plan, batches, check_lengths, micro_batches
from seqboat.training.parallel import World, join, parallelize
from seqboat.training.plan import describe_data
from seqboat.training.record import (
    MemoryMeter,
    MetricsWriter,
    Tracker,
    commit,
    device_name,
    make_trackers,
    prepare_folder,
    read_told,
    remove_unused,
    versions,
)
from seqboat.training.settings_io import difference, to_dict, to_json
from seqboat.training.signals import StopSignals, exit_code
from seqboat.training.step import Stepper, StepResult, StepTotals, finite_or_none, signal_flags

T = TypeVar("T")
CARRY = "carry.safetensors"
EXIT_DIVERGED = 3


class RunOutcome(NamedTuple):
    """How a run ended."""

    exit_code: int
    """0 finished, 3 diverged, others: stopped by a signal (`seqboat.training.signals`)"""
    step: int
    """steps taken"""
    best: float | None
    """best value of the task's metric on held-out data"""
    message: str


def train(
    config: RunConfig,
    folder: Path | str,
    *,
    resume: bool = False,
    display: Display | None = None,
    on_step: Callable[[int, nn.Module], None] | None = None,
) -> RunOutcome:
    """Train a model.

    Args:
        config: of the run.
        folder: of the run; must be new or empty, unless resuming.
        resume: continue from the newest whole checkpoint; a folder without checkpoints starts from step 0.
        display: shows progress; chosen to fit the terminal by default.
        on_step: called with the number of steps taken and the model after every step.
    """
    folder = Path(folder)
    with join(config.training.device) as world:
        display = display or make_display(world.first)
        with contextlib.ExitStack() as stack:
            error: Exception | None = None
            lock: Lock | None = None
            if world.first:
                try:
                    # a run that never starts, for lack of data for example, leaves no folder behind
                    missing = [path for path in (folder, *folder.parents) if not path.exists()]
                    stack.callback(remove_unused, folder, missing)
                    prepare_folder(folder, resume)
                    lock = stack.enter_context(Lock(folder))
                    ck.CheckpointStore(folder).sweep()
                except (OSError, ValueError) as caught:
                    error = caught
            world.agree(error)
            stack.callback(display.close)
            return Trainer(config, folder, world, display, resume, lock, on_step).run()


class TrainingProgress(NamedTuple):
    """What a run knows besides weights; part of every checkpoint."""

    step: int = 0
    best: float | None = None
    best_step: int | None = None
    waited: int = 0
    """evaluations since the best one"""
    skipped: int = 0
    """steps in a row, up to now, that were not applied"""
    skipped_in_all: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    """seconds of training and evaluation, over all processes that worked on the run one after the other"""
    processor: float = 0.0
    """seconds of processor time of the first process, which a busy machine does not stretch"""
    finished: bool = False
    dead: dict[str, int] | None = None
    """modules without an activated token: the step since when; 0 once that was reported"""
    evaluation_due: bool = False
    """whether the evaluation after this step was interrupted and must still happen"""


def read_progress(found: ck.Checkpoint, steps: int) -> TrainingProgress:
    """The progress in a checkpoint; ck.CheckpointError if no run of this many steps can have it."""
    try:
        progress = TrainingProgress(**found.state["progress"])
        counts = (progress.waited, progress.skipped, progress.skipped_in_all, progress.tokens)
        sound = (
            type(progress.step) is int
            and found.step == progress.step
            and 0 <= progress.step <= steps
            and (progress.best_step is None or 0 <= progress.best_step <= progress.step)
            and all(type(count) is int and count >= 0 for count in counts)
            and all(math.isfinite(s) and s >= 0 for s in (progress.elapsed, progress.processor))
        )
    except (KeyError, TypeError) as error:
        raise ck.CheckpointError(f"{found.path}: its progress does not fit: {error}") from error
    if not sound:
        raise ck.CheckpointError(
            f"{found.path}: its progress is impossible in a run of {steps} steps: {short(progress._asdict())}"
        )
    return progress


@contextlib.contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """Round the factors of fp32 matrix products on NVIDIA GPUs to TF32 (10 bits of mantissa) if asked to."""
    before = torch.get_float32_matmul_precision()
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Trainer:
    """One run, from set-up to its outcome."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        world: World,
        display: Display,
        resume: bool,
        lock: Lock | None,
        on_step: Callable[[int, nn.Module], None] | None,
    ) -> None:
        self.config, self.folder, self.world, self.display = config, folder, world, display
        self.lock, self.on_step = lock, on_step
        training = config.training
        self.task = config.build_task()
        self._check_batches()
        self.data = self.task.dataset("train")
        self.task.dataset(config.evaluation.split)  # problems with it are reported now, not after many steps
        if training.carry_state and len(self.data) < training.batch_size:
            source = ", ".join(getattr(config.task, "text", ())) or self.task.name
            raise ValueError(
                f"{source}: with training.carry_state, each of the {training.batch_size} texts of a batch needs a "
                f"window of tokens, and there are {len(self.data)}: give more text, or lower training.batch_size"
            )
        self.plan = Plan(
            len(self.data),
            training.batch_size,
            config.seed,
            self.data.lengths() if training.bucketing else None,
            training.carry_state,
            training.carry_segments,
        )
        self.lengths = self._sizes("train") if not training.carry_state else None
        self._sizes(config.evaluation.split)
        torch.manual_seed(config.seed)
        model = config.build_model(self.task).to(world.device).train()
        if config.start and not (resume and ck.CheckpointStore(folder).steps()):
            ck.load_start(model, config.start)
        if training.gradient_checkpointing:
            model.backbone.gradient_checkpointing = True  # type: ignore[union-attr]
        if training.compile:
            from seqboat.models.compile import capture_active_tokens

            capture_active_tokens()
            model.compile()
        self.parameters = sum(p.numel() for p in model.parameters())
        parallel = parallelize(model, world, training.distributed)
        self.module = parallel.module
        self.stepper = Stepper(config, self.task, parallel, world, self.plan)
        self.store = ck.CheckpointStore(folder, training.keep, warn=display.tell)
        self.metrics = MetricsWriter(folder / "metrics.jsonl", display.tell)
        self.memory = MemoryMeter(world.device)
        self.trackers: list[Tracker] = []
        self.signals = StopSignals()
        self.progress = TrainingProgress()
        self.started = self.worked_from = 0.0
        self.about: dict[str, Any] = {}
        """what was told about the data before the first step"""
        self.prints = self._fingerprints()
        self.resumed = resume and self.load()
        if world.first:
            self.describe()

    def _fingerprints(self) -> dict[str, Any]:
        """What tells the data of this run from any other; all processes must have the same."""
        prints = {split: self.task.fingerprint(split) for split in ("train", self.config.evaluation.split)}
        with contextlib.suppress(OSError, ValueError):
            # a test split may come later
            prints["test"] = self.task.fingerprint("test")
        for rank, other in enumerate(self.world.gather([prints])):
            for split, known in prints.items():
                if known and (change := data_change(known, other.get(split))):
                    raise ValueError(
                        f"rank {rank} of {self.world.size} has other data than rank {self.world.rank}: {change}"
                    )
        return {split: found for split, found in prints.items() if found}

    def _check_batches(self) -> None:
        """Refuse batches that cannot be divided among processes and micro-batches."""
        training = self.config.training
        parts = self.world.size * training.micro_batches(self.world.size)
        if training.batch_size < parts:
            raise ValueError(
                f"training.batch_size must be at least processes x training.accumulation = {parts}, "
                f"got {training.batch_size}"
            )
        if training.carry_state and self.task.kind != "lm":
            raise ValueError(f"training.carry_state needs a language model, but {self.task.name} is not one")
        if self.config.carries_growing_state():
            raise ValueError(
                "training.carry_state needs a state of constant size, but that of this model grows with the text: "
                "--training.carry_state=false reads segments one by one"
            )
        if training.carry_state and training.batch_size % parts:
            raise ValueError(
                f"with training.carry_state, training.batch_size must be a multiple of processes x "
                f"training.accumulation = {parts}, got {training.batch_size}"
            )
        if training.carry_state and getattr(self.config.task, "context", None):
            raise ValueError(
                "training.carry_state and task.context cannot be combined: the state is the context"
            )

    def _sizes(self, split: Split) -> NDArray[np.integer] | None:
        """Tokens of each example of a split; None if all are equally long, so that batch_size says it all."""
        if self.task.fixed_length:
            return None
        sizes = self.task.lengths(split)
        sizes = 2 * sizes.astype(np.int64) if self.task.kind == "match" else sizes
        check_lengths(sizes, self.config.training.max_tokens, split)
        return sizes

    # the folder

    def describe(self) -> None:
        """Write configuration, seed and versions next to the checkpoints."""
        write_text(self.folder / "config.json", to_json(self.config))
        if self.resumed:
            self.about = read_told(self.folder)
        self._write_about()
        self.metrics.rewind(self.progress.step)

    def _write_about(self) -> None:
        about = {
            "seed": self.config.seed,
            "parameters": self.parameters,
            "processes": self.world.size,
            "threads": torch.get_num_threads(),
            "device": device_name(self.world.device),
            "versions": versions(),
            "kernels": {name: found["chosen"] for name, found in kernels().items()},
            "commit": commit(),
            "fingerprints": self.prints,
            **self.about,
        }
        write_text(self.folder / "run.json", json.dumps(about, indent=1) + "\n")

    def load(self) -> bool:
        """Continue from the newest whole checkpoint, if there is one."""
        found = self._find()
        if found is None:
            return False
        other = difference(found.config(), self.config)
        if other is not None:
            raise ValueError(f"{found.path} has another configuration: {other}")
        before = found.state.get("data", {})
        for split in sorted(before, key=SPLITS.index):
            if change := data_change(before[split], self.prints.get(split)):
                raise ValueError(
                    f"the data of the split {split} changed since {found.path} was written: {change}; restore "
                    "them, or start another run (--out)"
                )
        if found.state["versions"].get("torch") != torch.__version__:
            self.display.tell(
                f"the checkpoint was written with torch {found.state['versions'].get('torch')}: "
                "numbers may differ in their last digits"
            )
        ck.load_model_tensors(self.module, found.tensors(ck.MODEL))
        ck.load_optimizer_tensors(self.stepper.optimizer, found.tensors(ck.OPTIM))
        self.progress = read_progress(found, self.config.schedule.steps)
        if self.stepper.price is not None and "price" in found.state:
            self.stepper.price.load_state_dict(found.state["price"])
        if CARRY in found.state["files"]:
            self.stepper.load_carried(found.tensors(CARRY))
        if self.world.first:
            # the pointers may be older than the checkpoint, if the process died between the two
            self.store.point("latest", self.progress.step)
            if self.progress.best_step is not None and self.store.path(self.progress.best_step).exists():
                self.store.point("best", self.progress.best_step)
        return True

    def _find(self) -> ck.Checkpoint | None:
        """The checkpoint to continue from: the first process looks for it, the others take the same."""
        found: list[ck.Checkpoint | None] = []

        def look() -> int | None:
            found.append(self.store.recover())
            return None if found[0] is None else found[0].step

        step = self._by_first(look)
        return found[0] if found else None if step is None else ck.verify(self.store.path(step))

    def save(self, best: bool = False) -> None:
        """Write a checkpoint; all processes take part."""
        sharded = self.world.size > 1 and self.config.training.distributed != "ddp"
        files = {
            ck.MODEL: ck.model_tensors(self.module, not sharded),
            ck.OPTIM: ck.optimizer_tensors(self.stepper.optimizer, not sharded),
        }
        stage: Path | None = None
        if sharded:
            stage = Path(self._by_first(lambda: str(self.store.stage(self.progress.step))))
            ck.write_shards(stage, files)
            files = {}
        if self.config.training.carry_state:
            files[CARRY] = self.stepper.carried_tensors()
        step = self.progress.step
        state = {
            "progress": self.progress._asdict(),
            "config": to_dict(self.config),
            "classes": self.task.classes,
            "labels": self.task.labels,
            "facts": self.task.facts,
            "data": self.prints,
            "versions": versions(),
            "kernels": record(),
            "processes": self.world.size,
            # both follow from the seed and the step, and are here for people
            "sampler": {"epoch": step // self.plan.per_epoch, "position": step % self.plan.per_epoch},
            "rng": {"seed": self.config.seed, "step": step},
        }
        if self.stepper.price is not None:
            state["price"] = self.stepper.price.state_dict()

        def write() -> None:
            if self.lock is not None:
                self.lock.check()
            self.store.save(step, files, state, best, stage)
            if sharded and self.progress.finished:
                self.store.consolidate()

        self._by_first(write)

    def _by_first(self, call: Callable[[], T]) -> T:
        """What the first process's call returns, or raises, in all of them."""
        found: Any = None
        error: Exception | None = None
        if self.world.first:
            try:
                found = call()
            except Exception as caught:
                error = caught
        self.world.agree(error)
        return cast(T, self.world.broadcast(found))

    # the loop

    def run(self) -> RunOutcome:
        """Train to the end, to a signal, or until the run diverges."""
        if self.world.first:
            self.trackers = make_trackers(self.config.training.trackers, self.folder)
        try:
            with self.signals, matrix_products(self.config.training.precision):
                if not (self.display.quiet or self.progress.finished):
                    self._brief()
                self.display.start(self._title(), self.config.schedule.steps, self.progress.step)
                if self.resumed:
                    self.display.tell(f"resumed after step {self.progress.step}")
                return self._loop()
        finally:
            for tracker in self.trackers:
                tracker.close()

    def _brief(self) -> None:
        """Tell what there is to learn from, what simple models reach on it, and how long training will take."""
        found = describe_data(self.config, self.task, self.about, self.display.tell)
        if not found:
            return
        self.about = found
        if self.world.first:
            self._write_about()

    def _title(self) -> str:
        where = f"{self.world.size} x {self.world.device.type}"
        name = self.config.recipe or self.task.name
        return f"{name}: {self.parameters:,} parameters, {where}, {self.folder}"

    def _parts(self, step: int) -> list[Part]:
        """The micro-batches of this process in one step."""
        training = self.config.training
        of_processes = micro_batches(
            self.plan.batch(step),
            self.world.size,
            training.micro_batches(self.world.size),
            self.lengths,
            training.max_tokens,
        )
        return of_processes[self.world.rank]

    def _all_parts(self) -> Iterator[Part]:
        for step in range(self.progress.step, self.config.schedule.steps):
            yield from self._parts(step)

    def _loop(self) -> RunOutcome:
        training, steps = self.config.training, self.config.schedule.steps
        if self.progress.finished:
            return self._outcome(0, "the run had already finished")
        self.started = time.monotonic() - self.progress.elapsed
        self.worked_from = time.process_time() - self.progress.processor
        if self.progress.evaluation_due and (outcome := self._after_step(0)):
            return outcome
        source = batches(
            self.task,
            self.data,
            "train",
            self._all_parts(),
            training.workers,
            pin_memory=self.world.device.type == "cuda",
        )
        clock, tokens = time.monotonic(), 0
        with contextlib.closing(source):
            while self.progress.step < steps:
                step = self.progress.step
                micro = [next(source) for _ in self._parts(step)]
                logged = (step + 1) % training.log_every == 0 or step + 1 == steps
                self.memory.start_step()
                result = self.stepper.step(step, micro, self.signals.received, logged)
                self.memory.end_step()
                tokens += result.tokens
                self._advance(result)
                if logged:
                    now = time.monotonic()
                    self._log(result, tokens / max(now - clock, 1e-9))
                    clock, tokens = now, 0
                if self.on_step is not None:
                    self.on_step(step + 1, self.module)
                if self.progress.skipped >= training.max_skipped:
                    return self._give_up(result)
                before = time.monotonic()
                if outcome := self._after_step(result.signal):
                    return outcome
                clock += time.monotonic() - before
        raise AssertionError("a run ends after its last step")

    def _outcome(self, code: int, message: str) -> RunOutcome:
        return RunOutcome(code, self.progress.step, self.progress.best, message)

    def _advance(self, result: StepResult) -> None:
        """Count a step, and report it if it was not applied."""
        progress = self.progress
        step = progress.step + 1
        due = step % self.config.evaluation.every == 0 or step == self.config.schedule.steps
        skipped = progress.skipped + 1 if result.trouble else 0
        self.progress = progress._replace(
            step=step,
            tokens=progress.tokens + result.tokens,
            skipped=skipped,
            skipped_in_all=progress.skipped_in_all + bool(result.trouble),
            evaluation_due=due,
        )
        if result.trouble:
            examples = self.plan.batch(step - 1).tolist()
            self.display.tell(
                f"step {step} not applied: {result.trouble}; training examples {_few(examples)} "
                f"({skipped} in a row)"
            )
            if self.world.first:
                record = {"step": step, "split": "skipped", "trouble": result.trouble, "examples": examples}
                self.metrics.write(record)

    def _log(self, result: StepResult, speed: float) -> None:
        step = self.progress.step
        record = {
            "step": step,
            "split": "train",
            "epoch": step / self.plan.per_epoch,
            **result.metrics,
            "lr": result.lr,
            "grad_norm": finite_or_none(result.norm),
            "tokens_per_s": speed,
            **self.memory.read(),
            "activation": result.activation,
        }
        self._record(record)
        self.display.log(record)
        dead = watch_routers(
            self.progress.dead or {}, step, self.stepper.modules, result.activated, self.display.tell
        )
        self.progress = self.progress._replace(dead=dead)

    def _after_step(self, stop: int) -> RunOutcome | None:
        """Evaluate and save when due; returns the outcome if the run ends here.

        Args:
            stop: the signal that asks to stop, or 0. It also cuts an evaluation short, which the resumed run repeats.
        """
        improved = False
        if self.progress.evaluation_due and not stop:
            try:
                improved = self._evaluate()
            except EvaluationInterrupted:
                stop = self._agreed_signal()
        step, patience = self.progress.step, self.config.evaluation.patience
        early = patience is not None and self.progress.waited >= patience
        done = not self.progress.evaluation_due and (step == self.config.schedule.steps or early)
        if done:
            self.progress = self.progress._replace(finished=True)
        if improved or done or stop or step % self.config.training.save_every == 0:
            self.save(best=improved)
        if done and self.progress.best is None and self.progress.waited:
            return self._outcome(EXIT_DIVERGED, f"no evaluation gave a finite {self.task.metric}")
        if done:
            last = step == self.config.schedule.steps
            return self._outcome(
                0, "finished" if last else f"no better for {self.progress.waited} evaluations"
            )
        if stop:
            name = signal.Signals(stop).name
            return self._outcome(exit_code(stop), f"stopped by {name} after step {step}")
        return None

    def _agreed_signal(self) -> int:
        """The signal that asks all processes to stop, or 0; every process must call this."""
        return StepTotals(signals=signal_flags(self.signals.received)).over(self.world).stop

    def _record(self, record: dict[str, Any]) -> None:
        self.progress = self.progress._replace(
            elapsed=time.monotonic() - self.started, processor=time.process_time() - self.worked_from
        )
        record |= {"elapsed": self.progress.elapsed, "processor": self.progress.processor}
        if self.world.first:
            self.metrics.write(record)
            for tracker in self.trackers:
                tracker.log(record)

    def _evaluate(self) -> bool:
        """Score held-out data; returns whether the result is the best so far."""
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
            precision=self.config.training.precision,
            carry_state=self.config.training.carry_state,
            max_tokens=self.config.training.max_tokens,
            interrupted=lambda: self._agreed_signal() != 0,
        )
        value = result.metrics[self.task.metric]
        best = self.progress.best
        sign = 1 if self.task.better == "higher" else -1
        improved = math.isfinite(value) and (best is None or sign * value > sign * best)
        self.progress = self.progress._replace(evaluation_due=False)
        if not math.isfinite(value):
            self.display.tell(f"step {self.progress.step}: {self.task.metric} is not finite: {value}")
        if improved:
            self.progress = self.progress._replace(best=value, best_step=self.progress.step, waited=0)
        else:
            self.progress = self.progress._replace(waited=self.progress.waited + 1)
        record = {
            "step": self.progress.step,
            "split": evaluation.split,
            **{name: finite_or_none(number) for name, number in result.metrics.items()},
            "activation": result.activation,
            "seconds": time.monotonic() - started,
        }
        self._record(record)
        self.display.scored(record, improved)
        return improved

    def _give_up(self, result: StepResult) -> RunOutcome:
        count = self.progress.skipped
        often = f"{count} steps in a row, the last being step" if count > 1 else "step"
        return self._outcome(
            EXIT_DIVERGED,
            f"the loss or its gradient was not finite in {often} {self.progress.step}: {result.trouble}",
        )


def _few(numbers: list[int], most: int = 8) -> str:
    shown = ", ".join(str(n) for n in numbers[:most])
    return f"{shown}, ... ({len(numbers)} in all)" if len(numbers) > most else shown
