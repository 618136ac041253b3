"""Memory and time of a run before it starts, and micro-batches that fit on a device.

    estimate(config).memory                     bytes on each device, for the micro-batches of the configuration
    estimate(config, memory=24e9).micro_batch   the largest micro-batch that fits in 24 GB

A training step of the model runs on tensors without content (`shapes.Meter`), with every example as long as the task
allows and all tokens active, so the estimate is an upper bound for tasks of varying length and sparse layers. Layers
are alike: two models of one and two layers give the cost of any depth.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from seqboat.core.checks import check_choice, check_positive, require
from seqboat.models.backbone import StackConfig
from seqboat.tasks.task import Batch, Task, apply_model
from seqboat.training.config import RunConfig
from seqboat.training.planning.shapes import Meter, without_content

SPARE = 0.1
"""Fraction of a device's memory that is left to the driver, the workspaces of libraries, and fragmentation."""
GB = 1e9


@dataclass(frozen=True)
class Rates:
    """How fast a device works."""

    name: str
    products: dict[str, float]
    """floating-point operations per second of matrix products, by precision"""
    bandwidth: float
    """bytes per second from and to memory"""
    memory: float | None = None
    """bytes"""
    launch: float = 0.0
    """seconds that starting an operation takes"""


def _sheet(name: str, gb: float, fp32: float, tf32: float, half: float, bandwidth: float) -> Rates:
    products = {"fp32": fp32 * 1e12, "tf32": tf32 * 1e12, "bf16": half * 1e12, "fp16": half * 1e12}
    return Rates(name, products, bandwidth * GB, gb * GB)


GPUS = {
    sheet.name: sheet
    for sheet in (
        _sheet("l4", 24, 30.3, 60.0, 121.0, 300),
        _sheet("a10", 24, 31.2, 62.5, 125.0, 600),
        _sheet("rtx3090", 24, 35.6, 35.6, 71.0, 936),
        _sheet("rtx4090", 24, 82.6, 82.6, 165.2, 1008),
        _sheet("a100-40gb", 40, 19.5, 156.0, 312.0, 1555),
        _sheet("a100-80gb", 80, 19.5, 156.0, 312.0, 2039),
        _sheet("h100", 80, 67.0, 494.0, 989.0, 3350),
    )
}
"""Peak rates of the makers' data sheets, without sparsity. No run reaches them: times from them are lower bounds."""


def named_rates(name: str) -> Rates:
    """The rates of a GPU by its name."""
    check_choice("gpu", name, tuple(GPUS))
    return GPUS[name]


class Cost(NamedTuple):
    """One micro-batch, forward and backward."""

    activations: float
    """bytes held at most besides weights and gradients"""
    products: float
    """floating-point operations of matrix products"""
    moved: float
    """bytes read and written"""
    started: float
    """operations"""


class Estimate(NamedTuple):
    """What a run will take, on each of its devices."""

    parameters: int
    weights: int
    """bytes of parameters and buffers"""
    gradients: int
    """bytes; two copies where processes exchange them"""
    optimizer: int
    """bytes of the optimizer's averages"""
    activations: int
    """bytes of a micro-batch in the forward and backward pass"""
    micro_batch: int
    """examples at a time"""
    micro_batches: int
    """per step"""
    processes: int
    steps: int
    flops: float
    """floating-point operations of matrix products per step and device"""
    step_seconds: float | None
    """a step, at the rates of a device; None without any"""
    limit: int | None
    """bytes of memory that were asked for"""
    device: str
    """what the rates are of"""

    @property
    def memory(self) -> int:
        """Bytes on each device, with a reserve for what is not counted."""
        return round((self.weights + self.gradients + self.optimizer + self.activations) / (1 - SPARE))

    @property
    def fits(self) -> bool:
        """Whether the limit is kept; True without one."""
        return self.limit is None or self.memory <= self.limit

    @property
    def seconds(self) -> float | None:
        """All steps; evaluation not included."""
        return None if self.step_seconds is None else self.step_seconds * self.steps

    def report(self) -> str:
        """A few lines for people."""
        where = f"on each of {self.processes} devices" if self.processes > 1 else "on one device"
        lines = [
            f"parameters      {self.parameters:,}",
            f"micro-batches   {self.micro_batches} of {self.micro_batch} examples per step, {where}",
            f"memory          {self.memory / GB:.2f} GB: weights {self.weights / GB:.2f}, gradients "
            f"{self.gradients / GB:.2f}, optimizer {self.optimizer / GB:.2f}, activations "
            f"{self.activations / GB:.2f}, reserve {SPARE:.0%}",
            f"work            {self.flops / 1e12:.3g} TFLOP per step",
        ]
        if self.limit is not None:
            verdict = "fits" if self.fits else "does NOT fit"
            lines[2] += f"; {verdict} in {self.limit / GB:g} GB"
        if self.seconds is not None and self.step_seconds is not None:
            hours = self.seconds / 3600
            lines.append(
                f"time            {self.step_seconds:.3g} s per step, {hours:.3g} h for {self.steps:,} steps "
                f"at the rates of {self.device}"
            )
        return "\n".join(lines)


def estimate(
    config: RunConfig,
    *,
    processes: int | None = None,
    memory: float | None = None,
    device: Rates | str | None = None,
    activation: float = 1.0,
) -> Estimate:
    """Estimate memory and time of a run; takes a few seconds and no data.

    Args:
        config: of the run.
        processes: devices; those of the configuration by default.
        memory: bytes of a device; the largest micro-batch that fits is chosen. By default the micro-batches are those
            of the configuration.
        device: its rates, or a name from GPUS, for the time.
        activation: fraction of tokens that routers activate.
    """
    if isinstance(device, str):
        device = named_rates(device)
    processes = processes or config.training.processes
    check_positive("processes", processes)
    require(0 <= activation <= 1, f"activation must be from 0 to 1, got {activation!r}")
    task = config.build_task()
    weights, trained = _sizes(config, task)
    gradients = trained
    optimizer = 2 * trained
    if processes > 1 and config.training.distributed == "fsdp":
        gradients, optimizer, weights = gradients // processes, optimizer // processes, weights // processes
    elif processes > 1:
        gradients *= 2
    fixed = weights + gradients + optimizer
    per_process = -(-config.training.batch_size // processes)
    largest = micro_batch_of(config, processes)
    limit, size = memory, largest
    cost = _cost(config, task, size, activation)
    if limit is not None:
        room = limit * (1 - SPARE) - fixed
        while cost.activations > room and size > 1:
            # proportional, and always smaller: what does not depend on the batch makes this a low guess
            size = max(1, min(size - 1, int(size * room / cost.activations)))
            cost = _cost(config, task, size, activation)
    count = -(-per_process // size)
    precision = config.training.precision
    step = None
    if device is not None:
        rate = device.products[precision]
        step = count * max(cost.products / rate + cost.moved / device.bandwidth, cost.started * device.launch)
    found = Estimate(
        parameters=trained // 4,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=round(cost.activations),
        micro_batch=size,
        micro_batches=count,
        processes=processes,
        steps=config.schedule.steps,
        flops=cost.products * count,
        step_seconds=step,
        limit=None if limit is None else round(limit),
        device="" if device is None else device.name,
    )
    return found


def micro_batch_of(config: RunConfig, processes: int) -> int:
    """The largest micro-batch that the settings of a run lead to, in examples."""
    training, task = config.training, config.build_task()
    parts = processes * training.micro_batches(processes)
    size = -(-training.batch_size // parts)
    tokens = task.max_length * (2 if task.kind == "match" else 1)
    if not task.fixed_length and not training.carry_state:
        size = min(size, max(training.max_tokens // tokens, 1))
    return size


def _sizes(config: RunConfig, task: Task) -> tuple[int, int]:
    """Bytes of all weights and buffers, and of what is trained."""
    model = config.build_model(task)
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    return trained + buffers, trained


def _cost(config: RunConfig, task: Task, size: int, activation: float) -> Cost:
    """The cost of a micro-batch; that of a deep model follows from two shallow ones."""
    layers = config.model.num_layers
    if layers <= 2 or isinstance(config.model.mixer, StackConfig):
        return _measure(config, task, size, activation)
    one, two = (
        _measure(config.replace(model={"num_layers": depth}), task, size, activation) for depth in (1, 2)
    )
    return Cost(*(a + (b - a) * (layers - 1) for a, b in zip(one, two, strict=True)))


def _measure(config: RunConfig, task: Task, size: int, activation: float) -> Cost:
    """Run a training step without content."""
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.training.precision)
    model: Any = config.build_model(task).train()
    model.backbone.gradient_checkpointing = config.training.gradient_checkpointing
    with Meter(activation) as meter:
        without_content(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before, meter.peak, meter.moved, meter.started = meter.held, meter.held, 0, 0
        meter.products.clear()
        batch = _batch(task, size)
        with torch.autocast("cpu", precision, enabled=precision is not None):
            output = apply_model(model, task.kind, batch)
        task.loss(output, batch).total.backward()
        return Cost(meter.peak - before, sum(meter.products.values()), meter.moved, meter.started)


def _batch(task: Task, size: int) -> Batch:
    """A micro-batch of the longest examples, padded where the task's are."""
    shape = (size, task.max_length)
    inputs = torch.zeros(shape if task.vocab is not None else (*shape, task.channels))
    if task.vocab is not None:
        inputs = inputs.long()
    mask = None if task.fixed_length else torch.ones(shape, dtype=torch.bool)
    targets = torch.zeros(shape if task.kind == "lm" else (size,), dtype=torch.int64)
    if task.kind != "match":
        return Batch(inputs, mask, targets)
    return Batch(inputs, mask, targets, inputs.clone(), mask)


def measure_rates(device: torch.device) -> Rates:
    """Time matrix products, copies and the start of operations on a device; takes about a second."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def timed(call: Any, least: float = 0.1) -> float:
        call()
        wait()
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < least:
            call()
            count += 1
            if count % 8 == 0:
                wait()
        wait()
        return (time.perf_counter() - began) / count

    size = 4096 if device.type == "cuda" else 512
    a = torch.randn(size, size, device=device)
    products = {}
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for name, dtype in (
            ("fp32", torch.float32),
            ("tf32", torch.float32),
            ("bf16", torch.bfloat16),
            ("fp16", torch.float16),
        ):
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            b = a.to(dtype)
            products[name] = 2 * size**3 / timed(lambda b=b: b @ b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    large, small = torch.empty(2**26 if device.type == "cuda" else 2**24, device=device), a[0, :1]
    memory = None
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    return Rates(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        products=products,
        bandwidth=2 * 4 * large.numel() / timed(lambda: large.clone()),
        memory=memory,
        launch=timed(lambda: small + small, 0.02),
    )
