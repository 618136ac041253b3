"""What routers decided, token by token, on the examples of a run.

    examples = load_examples("runs/listops", "test", limit=20)      model, configuration, task and examples of a run
    batch = examples.batch(range(4))                                the first four as a batch
    for sample in trace(examples.model, examples.task.kind, batch):
        sample.prediction, sample.probs[0]                          the most probable class, and its probability
        for sequence in sample.sequences:                           one, or the two documents of a pair
            for layer in sequence.layers:                           None where a layer has no router
                layer.active, layer.probs, layer.confidence         (length,) each, without padding

`examples.task` describes the tokens: `modality` ("bytes", "tokens", "image", "wave"), `token_names`, `picture`
(height and width), `labels`, `token_classes`. Layers are counted from 0 here; commands count them from 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seqboat.bench.cost import linear_flops
from seqboat.core.mixer import Routing
from seqboat.layers.gau import GAU
from seqboat.layers.seqboat import SeqBoat
from seqboat.layers.sma import SparseModularActivation
from seqboat.run import Run
from seqboat.ssm.diagonal import DiagonalSSM
from seqboat.tasks.task import IGNORE, Batch, Dataset, Kind, Split, Task, apply_model, draw_subset
from seqboat.training.config import RunConfig
from seqboat.training.evaluate import Windows, cut_text

RANKED = 5
"""Number of most probable next tokens in the trace of a language model; a classifier's has all classes."""

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]


class Examples(NamedTuple):
    """A trained model and examples to run it on."""

    model: nn.Module
    """in eval mode"""
    config: RunConfig
    task: Task
    dataset: Dataset
    """at most as many examples as requested"""
    step: int
    """of the checkpoint"""

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Some of the examples as a batch, on the model's device."""
        device = next(self.model.parameters()).device
        return self.task.collate([self.dataset[i] for i in numbers]).to(device)


def load_examples(
    run: Path | str,
    split: Split = "test",
    limit: int | None = None,
    which: str = "best",
    fields: Sequence[str] = (),
    reading: Windows | None = None,
) -> Examples:
    """The model of a run and examples of one of its splits.

    Args:
        run: the run's folder, or one checkpoint in it.
        split: of the task.
        limit: maximum number of examples, a fixed random sample; all by default.
        which: "best" or "latest".
        fields: overrides of the data settings, as arguments `--data.x=value`.
        reading: windows with context to cut a long text into, instead of the task's segments.
    """
    source = Run(run, which, fields)
    task = source.task
    task.check_split(split)
    task.check_data(split)
    dataset = task.dataset(split) if reading is None else cut_text(task.text(split), reading)
    return Examples(source.model, source.config, task, draw_subset(dataset, limit), source.step)


class Site(NamedTuple):
    """The router of a layer, and the module to report on: its attention, or else its first module."""

    sma: SparseModularActivation
    module: str
    """name of the module to report on"""
    column: int
    """its index among the modules"""
    gau: GAU | None
    """the module itself, if it is the attention unit of the paper"""
    layer: SeqBoat | None
    """the layer it belongs to, if it is the paper's with a diagonal state-space layer"""
    outside: int
    """FLOPs per token of the linear maps around that layer"""

    @property
    def temperature(self) -> float | None:
        """The router's temperature for the module, if it has one."""
        found = getattr(self.sma.router, "temperature", None)
        if not isinstance(found, Tensor):
            return None
        found = found.detach()
        return float(found[self.column] if found.dim() else found)


def sites(model: nn.Module) -> list[Site | None]:
    """One per layer of a model; None for layers without a router."""
    return [_site(layer) for layer in model.backbone.layers]  # type: ignore[union-attr]


def _site(layer: nn.Module) -> Site | None:
    sma = next((part for part in layer.modules() if isinstance(part, SparseModularActivation)), None)
    if sma is None:
        return None
    units = list(sma.units.items())
    column = next((i for i, (_, unit) in enumerate(units) if isinstance(unit, GAU)), 0)
    name, unit = units[column]
    owner = next((part for part in layer.modules() if isinstance(part, SeqBoat) and part.sma is sma), None)
    counted = owner if owner is not None and isinstance(owner.ssm, DiagonalSSM) else None
    outside = 0 if owner is None else linear_flops(layer) - linear_flops(owner)
    return Site(sma, name, column, unit if isinstance(unit, GAU) else None, counted, outside)


class LayerTrace(NamedTuple):
    """What the router of a layer decided for the real tokens of a sequence."""

    active: Flags
    """(length,): which tokens were activated"""
    probs: Floats
    """(length,): probability of activation"""
    module: str = "gau"
    """name of the routed module"""
    others: tuple[LayerTrace, ...] = ()
    """the same for the other modules of the layer"""

    @property
    def confidence(self) -> Floats:
        """(length,): the probability where active, zero elsewhere."""
        return np.where(self.active, self.probs, np.float32(0))


class SequenceTrace(NamedTuple):
    """One sequence through all layers."""

    inputs: NDArray[Any]
    """(length,) int64 token ids, or (length, channels) float32 values; no padding"""
    layers: tuple[LayerTrace | None, ...]
    """one per layer; None without a router"""


class SampleTrace(NamedTuple):
    """One example through a model."""

    sequences: tuple[SequenceTrace, ...]
    """one, or two for a pair"""
    label: int | Numbers
    """the class; for a language model or a tagger (length,) the target of each token, or IGNORE; IGNORE for targets
    that are not classes"""
    ranked: Numbers
    """(classes,), most probable first; for a language model (length, at most RANKED)"""
    probs: Floats
    """their probabilities"""
    label_prob: float | Floats
    """probability of the label; for a language model or a tagger (length,), nan without a target"""
    logits: Floats = np.zeros(0, np.float32)
    """the model's output, for tasks whose answers are not classes"""

    @property
    def prediction(self) -> int | Numbers:
        """The most probable class; for a language model (length,) the most probable next tokens."""
        best = self.ranked[..., 0]
        return int(best) if best.ndim == 0 else best


@torch.no_grad()
def trace(model: nn.Module, kind: Kind, batch: Batch) -> list[SampleTrace]:
    """What a model did with every sample of a batch.

    Args:
        model: in eval mode.
        kind: of its task.
        batch: on the model's device.
    """
    return traces_of(sites(model), kind, batch, apply_model(model, kind, batch.joined()))


def traces_of(found: Sequence[Site | None], kind: Kind, batch: Batch, output: Any) -> list[SampleTrace]:
    """Like `trace`, from an existing output.

    Args:
        found: `sites` of the model.
        kind: of its task.
        batch: the input of the model.
        output: its output.
    """
    probs = torch.softmax(output.logits.float(), dim=-1)
    top = probs.topk(min(RANKED, probs.shape[-1]) if kind == "lm" else probs.shape[-1], dim=-1)
    each = kind in ("lm", "tag")
    targets = batch.targets
    if targets.is_floating_point():
        targets = torch.full(targets.shape[:1], IGNORE, device=targets.device)
    chosen = probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    label_probs = torch.where(targets == IGNORE, torch.nan, chosen)
    parts = list(halves(found, batch, output.routings))
    samples = []
    for row in range(len(batch.inputs)):
        sequences = tuple(sequence_trace(found, inputs, mask, half, row) for inputs, mask, half in parts)
        cut: Any = slice(len(sequences[0].inputs)) if each else ...
        label, label_prob = to_array(targets[row][cut]), to_array(label_probs[row][cut])
        samples.append(
            SampleTrace(
                sequences,
                label if each else int(label),
                to_array(top.indices[row][cut]),
                to_array(top.values[row][cut]),
                label_prob if each else float(label_prob),
                np.zeros(0, np.float32) if kind == "lm" else to_array(output.logits[row][cut].float()),
            )
        )
    return samples


def to_array(x: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = x.cpu().numpy()
    return found


Half = tuple[Tensor, Tensor | None, Sequence[Routing | None]]


def halves(found: Sequence[Site | None], batch: Batch, routings: Sequence[Routing | None]) -> Iterator[Half]:
    """Inputs, mask and routings of a batch; for pairs, those of the first sequences, then of the second."""
    layers = len(found)
    yield batch.inputs, batch.mask, routings[:layers]
    if batch.second is not None:
        yield batch.second, batch.second_mask, routings[layers:]


def sequence_trace(
    found: Sequence[Site | None],
    inputs: Tensor,
    mask: Tensor | None,
    routings: Sequence[Routing | None],
    row: int,
) -> SequenceTrace:
    real: Any = slice(None) if mask is None else mask[row]
    layers = [
        None if site is None or routing is None else _layer(site, routing, row, real)
        for site, routing in zip(found, routings, strict=True)
    ]
    return SequenceTrace(to_array(inputs[row][real]), tuple(layers))


def _layer(site: Site, routing: Routing, row: int, real: Any) -> LayerTrace:
    active, probs = to_array(routing.active[row][real]), to_array(routing.probs[row][real].float())
    names = list(site.sma.units)
    others = tuple(
        LayerTrace(active[:, i], probs[:, i], name) for i, name in enumerate(names) if i != site.column
    )
    return LayerTrace(active[:, site.column], probs[:, site.column], site.module, others)
