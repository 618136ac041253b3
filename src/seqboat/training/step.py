"""One training step: micro-batches, their gradients over all processes, and the step of the optimizer.

Losses are summed over all processes and micro-batches and divided by the number of targets scored in the whole
batch, so that uneven parts average exactly. Dropout and routers are reseeded for every micro-batch, so a step
depends on nothing but the weights, the configuration and its number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from seqboat.core.mixer import Routing
from seqboat.core.state import detach_state, map_state, tensors
from seqboat.layers.budget import auxiliary_loss, budget_loss
from seqboat.layers.price import AttentionPrice
from seqboat.layers.routers import set_training_step
from seqboat.layers.sma import sparse_layers
from seqboat.tasks.task import Batch, Loss, Task, apply_model
from seqboat.training.config import RunConfig
from seqboat.training.diagnosis import activated_tokens, explain_nonfinite, first_nonfinite, routed_modules
from seqboat.training.evaluate import activation_sums, autocast, rates
from seqboat.training.loader import Loaded, Plan
from seqboat.training.optim import build_optimizer, learning_rate, set_learning_rate
from seqboat.training.parallel import ParallelModel, World, gather_shards
from seqboat.training.signals import STOP_SIGNALS


class StepResult(NamedTuple):
    """What one step did."""

    metrics: dict[str, float | None]
    lr: float
    norm: float
    tokens: int
    signal: int
    """the signal that asks all processes to stop; 0 for none"""
    activation: list[float | None]
    """activation rate of each layer, if asked for"""
    activated: list[int]
    """tokens that activated each module of each routed layer, if asked for"""
    trouble: str
    """why the step was not applied; empty if it was"""


class StepTotals(NamedTuple):
    """What is summed over the micro-batches and processes of a step."""

    sums: Tensor | None = None
    """loss and number of targets, on the device"""
    tokens: float = 0.0
    loss: float = 0.0
    targets: float = 0.0
    signals: tuple[float, ...] = (0.0,) * len(STOP_SIGNALS)
    """how many processes received each of STOP_SIGNALS"""

    def over(self, world: World) -> StepTotals:
        """The totals of all processes; every process must call this."""
        mine = torch.tensor([self.tokens, *self.signals], dtype=torch.float64).to(world.device)
        sums = mine.new_zeros(2) if self.sums is None else self.sums
        # the one place where the host waits for the loss of a step
        loss, targets, tokens, *signals = world.sum(torch.cat([sums, mine])).tolist()
        return StepTotals(None, tokens, loss, targets, tuple(signals))

    @property
    def stop(self) -> int:
        """The signal to obey, or 0."""
        return next((n for n, count in zip(STOP_SIGNALS, self.signals, strict=True) if count), 0)


def signal_flags(received: int) -> tuple[float, ...]:
    """A received signal as `StepTotals.signals`."""
    return tuple(float(received == number) for number in STOP_SIGNALS)


def seed_step(seed: int, step: int, rank: int, part: int) -> None:
    """Seed the noise of one micro-batch."""
    state = np.random.SeedSequence((seed, step, rank, part)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


class Stepper:
    """Takes the steps of a run.

    Args:
        config: of the run.
        task: computes losses and scores.
        model: as all processes see it.
        world: the processes.
        plan: which examples are read, and when a carried state starts from nothing.
    """

    def __init__(self, config: RunConfig, task: Task, model: ParallelModel, world: World, plan: Plan) -> None:
        self.config, self.task, self.model, self.world = config, task, model, world
        self.plan = plan
        self.module = model.module
        self.optimizer = build_optimizer(self.module, config.optimizer)
        self.modules = routed_modules(self.module)
        calls = config.schedule.steps * config.training.micro_batches(world.size)
        self.price = AttentionPrice.of_gated(self.module, deadline=max(1, calls // 2))
        """what attention costs in the gated form"""
        for layer in sparse_layers(self.module).values():
            layer.warns = False  # the training loop reports dead routers itself
        self.carried: list[Any] = [None] * config.training.micro_batches(world.size)

    def step(self, step: int, micro: list[Loaded], received: int, logged: bool) -> StepResult:
        """Take one step.

        Args:
            step: steps taken before.
            micro: the micro-batches of this process.
            received: the number of a signal that this process received, or 0.
            logged: whether scores and activation are wanted.
        """
        config, world = self.config, self.world
        lr = learning_rate(step, config.optimizer.lr, config.schedule)
        set_learning_rate(self.optimizer, lr)
        set_training_step(self.module, step)
        if config.training.carry_state and self.plan.starts_anew(step):
            self.carried = [None] * len(self.carried)
        # running averages of norms move in the forward pass: a step that is not applied must not move them either
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        carried = self._carried_for(micro)
        self.optimizer.zero_grad(set_to_none=True)
        # a signal may reach only some processes, or one before another: all of them stop at the same step
        totals = StepTotals(signals=signal_flags(received))
        routed: Tensor | None = None
        activated = torch.zeros(len(self.modules), dtype=torch.int64, device=world.device)
        scores: dict[str, Tensor] = {}
        for number, loaded in enumerate(micro):
            part, batch = loaded.part, self._place(loaded)
            seed_step(config.seed, step, world.rank, number)
            with self.model.accumulate(last=number + 1 == len(micro)):
                with self._autocast():
                    output = apply_model(self.model.run, self.task.kind, batch, carried[number])
                loss = self.task.loss(output, batch)
                objective = self._with_budget(loss, output.routings, batch)
                if self.price is not None:
                    objective = objective + self._price(
                        self.price, loss, batch, carried[number], part.counted
                    )
                (objective if part.counted else 0 * objective).backward()
            if config.training.carry_state:
                self.carried[number] = detach_state(output.state)
            if part.counted:
                sums = torch.stack([loss.total.detach().double(), loss.scored.double()])
                totals = totals._replace(
                    sums=sums if totals.sums is None else totals.sums + sums,
                    tokens=totals.tokens + batch.tokens,
                )
            if logged:
                counts = activation_sums(output.routings, batch) * part.counted
                routed = counts if routed is None else routed + counts
                active = activated_tokens(output.routings, len(counts), world.device)
                activated = activated + active * part.counted
                for name, value in self.task.score(output, batch).items():
                    value = value * part.counted
                    scores[name] = scores[name] + value if name in scores else value
        totals = totals.over(world)
        norm = self._finish_gradients(world.size / max(totals.targets, 1.0))
        trouble = ""
        if math.isfinite(totals.loss) and math.isfinite(norm):
            self.optimizer.step()
        else:
            trouble = self._diagnose(step, micro, carried)
            with torch.no_grad():
                for buffer, value in zip(self.module.buffers(), buffers, strict=True):
                    buffer.copy_(value)
            if config.training.carry_state:
                self.carried = carried
        metrics: dict[str, float | None] = {"loss": finite_or_none(totals.loss / max(totals.targets, 1.0))}
        activation: list[float | None] = []
        if logged:
            assert routed is not None
            activation = rates(world.sum(routed).cpu())
            activated = world.sum(activated)
            summed = {name: world.sum(value).cpu() for name, value in scores.items()}
            final = self.task.summarize(summed)
            metrics |= {name: finite_or_none(value) for name, value in final.items() if name != "loss"}
        return StepResult(
            metrics, lr, norm, int(totals.tokens), totals.stop, activation, activated.tolist(), trouble
        )

    def _carried_for(self, micro: list[Loaded]) -> list[Any]:
        """The state that each micro-batch starts from."""
        return list(self.carried) if self.config.training.carry_state else [None] * len(micro)

    def _with_budget(self, loss: Loss, routings: Sequence[Routing | None], batch: Batch) -> Tensor:
        """The loss to minimize: that of the task, and what budgets add to it for every target."""
        masks = [batch.mask] if batch.second is None else [batch.mask, batch.second_mask]
        extra = budget_loss(self.module, routings, masks)
        return loss.total if extra is None else loss.total + extra * loss.scored

    def _price(self, price: AttentionPrice, loss: Loss, batch: Batch, carried: Any, counted: bool) -> Tensor:
        """What attention costs, for every target."""

        def per_target(loss: Loss) -> Tensor:
            return loss.mean * counted

        def off() -> Tensor:
            with self._autocast():
                return per_target(
                    self.task.loss(apply_model(self.module, self.task.kind, batch, carried), batch)
                )

        return price(per_target(loss), off) * loss.scored

    def _place(self, loaded: Loaded) -> Batch:
        """A micro-batch on the device; the tokens of a stand-in are padding, so that no norm counts them."""
        batch = loaded.batch.to(self.world.device, non_blocking=True)
        return batch if loaded.part.counted else batch.hidden()

    def _autocast(self) -> torch.autocast:
        return autocast(self.world.device, self.config.training.precision)

    def _finish_gradients(self, scale: float) -> float:
        """Turn averages over processes of sums into the average over all targets, clip, and return the norm."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        add_auxiliary_gradients(self.module)
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        size = float(gather_shards(norm))
        limit = self.config.optimizer.clip
        # a norm that is not finite would spread to every gradient, and hide where it came from
        if limit is not None and math.isfinite(size):
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return size

    def _diagnose(self, step: int, micro: list[Loaded], carried: list[Any]) -> str:
        """Find where numbers stop being finite."""
        found = []
        # all processes run all micro-batches, whatever they find: layers and norms wait for each other
        for number, loaded in enumerate(micro):
            seed_step(self.config.seed, step, self.world.rank, number)
            with self._autocast():
                batch = self._place(loaded)
                found.append(first_nonfinite(self.module, self.task.kind, batch, carried[number]))
        return explain_nonfinite(self.module, self.world, found)

    def carried_tensors(self) -> dict[str, Tensor]:
        """The carried states of all sequences of the global batch, in its order."""
        if self.carried[0] is None:
            return {}
        parts = [dict(tensors(state)) for state in self.carried]
        return {name: self.world.gather_rows(torch.cat([part[name] for part in parts])) for name in parts[0]}

    def load_carried(self, saved: dict[str, Tensor]) -> None:
        """Give every process and micro-batch its states back."""
        parts = self.config.training.micro_batches(self.world.size)
        size = self.config.training.batch_size // (self.world.size * parts)
        for part in range(parts if saved else 0):
            start = (self.world.rank * parts + part) * size
            fresh = self.module.init_state(size)  # type: ignore[operator]
            values = iter([saved[name][start : start + size] for name, _ in tensors(fresh)])
            self.carried[part] = map_state(
                lambda like, values=values: next(values).clone().to(like.device),  # type: ignore[misc]
                fresh,
            )


def add_auxiliary_gradients(model: nn.Module) -> None:
    """Add the gradient of what layers ask for besides the task (`layers.budget.auxiliary_loss`).

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


def finite_or_none(value: float) -> float | None:
    """None for numbers that JSON cannot hold."""
    return value if math.isfinite(value) else None
