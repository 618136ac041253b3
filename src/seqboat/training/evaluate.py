"""Score a model on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seqboat.core.checks import check_positive
from seqboat.core.mixer import Routing, count_layers
from seqboat.core.state import map_state
from seqboat.tasks.segments import SegmentDataset, check_window
from seqboat.tasks.task import Batch, Dataset, Split, Task, apply_model, draw_subset
from seqboat.training.loader import TIMEOUT, Part, batches, micro_batches, split_batch
from seqboat.training.parallel import World


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which a model runs; the weights stay in full precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@torch.no_grad()
def activation_sums(
    routings: Sequence[Routing | None], batch: Batch, modules: Sequence[int | None] | None = None
) -> Tensor:
    """How many tokens each layer activated, and how many it saw: (layers, 2) in float64.

    A layer without a router counts no tokens. Of a pair of sequences both count. Where a layer has several modules
    the mean over them is counted, or the one whose place `modules` names.
    """
    masks = [batch.mask] if batch.second is None else [batch.mask, batch.second_mask]
    layers = count_layers(routings, masks)
    sums = torch.zeros(len(layers), 2, dtype=torch.float64, device=batch.inputs.device)
    for number, counts in enumerate(layers):
        if counts is not None:
            place = None if modules is None else modules[number]
            active = counts.active.double()
            sums[number, 0] = active.mean() if place is None else active[place]
            sums[number, 1] = counts.tokens
    return sums


def rates(sums: Tensor) -> list[float | None]:
    """Activation rate of each layer; None where nothing was routed."""
    return [active / seen if seen else None for active, seen in sums.tolist()]


class EvaluationInterrupted(Exception):
    """An evaluation was asked to stop before its end."""


class Evaluation(NamedTuple):
    """Scores of a split."""

    metrics: dict[str, float]
    """by name, the task's own metric among them"""
    activation: list[float | None]
    """activation rate of each layer"""
    examples: int


@dataclass(frozen=True, kw_only=True)
class Windows:
    """A long text in overlapping windows, each read from nothing: section 4.3 of the paper."""

    window: int = 8192
    """Tokens in a window."""
    context: int = 7000
    """Tokens of it that come before the scored ones; fewer only at the beginning of the text."""

    def __post_init__(self) -> None:
        check_window(self.window, self.context)


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """A long text read once, with a state that is handed on: every token is scored with all tokens before it."""

    chunk: int = 8192
    """Tokens that are read at once; the result does not depend on it."""

    def __post_init__(self) -> None:
        check_positive("chunk", self.chunk)


MODES: dict[type, str] = {Windows: "windows", Streaming: "stream"}
"""How commands call the ways to read a text."""


def cut_text(
    text: NDArray[Any],
    reading: Windows | Streaming,
    limit: int | None = None,
    starts: NDArray[np.int64] | None = None,
) -> SegmentDataset:
    """A text as examples; with a limit, only its first `limit` targets; `starts` are those of its documents."""
    text = text if limit is None else text[: limit + 1]
    if isinstance(reading, Streaming):
        return SegmentDataset({"text": text}, "text", 0, len(text), reading.chunk, starts=starts)
    scored = reading.window - reading.context
    return SegmentDataset({"text": text}, "text", 0, len(text), scored, reading.context, starts=starts)


def evaluation_parts(
    dataset: Dataset, batch_size: int, world: World, fixed: bool, max_tokens: int | None = None
) -> list[Part]:
    """The batches of this process; all processes get as many. Similar lengths go together."""
    order = np.arange(len(dataset))
    lengths = None
    if not fixed:
        lengths = dataset.lengths()
        order = np.argsort(lengths, kind="stable")
    cuts = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    if lengths is None or max_tokens is None:
        return [split_batch(cut, world.size)[world.rank] for cut in cuts]
    return [
        part for cut in cuts for part in micro_batches(cut, world.size, 1, lengths, max_tokens)[world.rank]
    ]


def stream_parts(count: int, batch_size: int, world: World) -> list[Part]:
    """Batches in which every sequence continues that of the batch before; the last sequences end first."""
    rows = min(batch_size, count)
    each = -(-count // rows)
    mine = np.array_split(np.arange(rows), world.size)[world.rank]
    parts = []
    for t in range(each):
        numbers = tuple(int(b) * each + t for b in mine if int(b) * each + t < count)
        parts.append(Part(numbers, True) if numbers else Part((0,), False))
    return parts


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    split: Split,
    world: World,
    *,
    batch_size: int = 32,
    limit: int | None = None,
    workers: int = 0,
    precision: str = "fp32",
    carry_state: bool = False,
    reading: Windows | Streaming | None = None,
    progress: Callable[[int, int], None] | None = None,
    max_tokens: int | None = None,
    timeout: float = TIMEOUT,
    interrupted: Callable[[], bool] | None = None,
    modules: Sequence[int | None] | None = None,
    observe: Callable[[Sequence[int], Batch, Tensor], None] | None = None,
) -> Evaluation:
    """Score a model.

    Args:
        model: put into eval mode and back.
        task: scores.
        split: of the task.
        world: every process scores its part.
        batch_size: over all processes.
        limit: score at most this many examples, drawn at random but always the same; for contiguous text, the first.
        workers: processes that read data.
        precision: as in `TrainingConfig`.
        carry_state: whether a language model keeps its state along the text.
        reading: how to cut a long text instead of as the task does and `carry_state` says; a limit then counts
            tokens at its beginning. Several sequences of a `Streaming` read parts of the text side by side.
        progress: called with the number of batches done and of all batches.
        max_tokens: of a batch of one process, padding included; larger batches are split.
        timeout: seconds to wait for a data worker.
        interrupted: called after every batch; True ends the evaluation with EvaluationInterrupted.
        modules: index of the module of each layer whose activation is counted; the mean over all by default.
        observe: called with the numbers of the examples of every batch, the batch, and the logits.
    """
    task.check_split(split)
    task.check_data(split)
    if reading is None:
        dataset = task.dataset(split)
    else:
        dataset = cut_text(task.text(split), reading, limit, task.document_starts(split))
        limit = None
        carry_state = isinstance(reading, Streaming)
    if carry_state:
        if limit is not None and limit < len(dataset):
            dataset = _Head(dataset, limit)
        parts = stream_parts(len(dataset), batch_size, world)
    else:
        dataset = draw_subset(dataset, limit)
        parts = evaluation_parts(dataset, batch_size, world, task.fixed_length, max_tokens)
    totals: dict[str, Tensor] = {}
    routed: Tensor | None = None
    state = None
    was_training = model.training
    model.eval()
    try:
        for done, (part, batch) in enumerate(
            batches(task, dataset, split, iter(parts), workers, timeout, world.device.type == "cuda"),
            start=1,
        ):
            batch = batch.to(world.device, non_blocking=True)
            if state is not None:
                state = first_rows(state, len(part.examples))
            with autocast(world.device, precision):
                output = apply_model(model, task.kind, batch, state)
            if carry_state:
                state = output.state
            sums = activation_sums(output.routings, batch, modules) * part.counted
            routed = sums if routed is None else routed + sums
            for name, value in task.score(output, batch).items():
                value = value * part.counted
                totals[name] = totals[name] + value if name in totals else value
            if observe is not None and part.counted:
                observe(part.examples, batch, output.logits)
            if progress is not None:
                progress(done, len(parts))
            if interrupted is not None and interrupted():
                raise EvaluationInterrupted
    finally:
        model.train(was_training)
    assert routed is not None
    totals = {name: world.sum(value).cpu() for name, value in totals.items()}
    routed = world.sum(routed).cpu()
    return Evaluation(task.summarize(totals), rates(routed), len(dataset))


def check_outputs(split: Split, numbers: Sequence[int], batch: Batch, logits: Tensor) -> None:
    """Refuse outputs of real tokens that are not finite, naming the example: they would count as answers."""
    bad = ~logits.isfinite().all(dim=-1)
    if bad.dim() > 1:
        bad = (bad if batch.mask is None else bad & batch.mask).any(dim=1)
    for place in bad.nonzero().flatten().tolist():
        raise ValueError(
            f"{split} example {numbers[place]}: the model's output is not finite (NaN or infinite): the run "
            "diverged, or the input is too large"
        )


def first_rows(state: Any, count: int) -> Any:
    """The state of the first sequences."""
    return map_state(lambda rows: rows[:count], state)


class _Head(Dataset):
    """The first examples of a dataset."""

    def __init__(self, whole: Dataset, size: int) -> None:
        self.whole, self.size = whole, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.whole[index]

    def lengths(self) -> Any:
        return self.whole.lengths()[: self.size]
