"""The configuration of a run as plain frozen dataclasses.

Every field has a default that works; recipes change them, and so does the command line by dotted names.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from seqboat.core.checks import check_choice, check_positive, require
from seqboat.core.settings import Settings
from seqboat.models.backbone import Backbone, BackboneConfig
from seqboat.models.heads import Classifier, LanguageModel, Matcher, Tagger
from seqboat.tasks.task import SPLITS, Split, Task, TaskConfig
from seqboat.training.optim import OptimizerConfig, ScheduleConfig

Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
Distributed = Literal["ddp", "fsdp", "hybrid"]
TrackerName = Literal["tensorboard", "trackio", "wandb"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Settings):
    """How the steps are taken."""

    batch_size: int = 32
    """Examples per step, over all processes and micro-batches."""
    accumulation: int = 1
    """Micro-batches per step and process, at least."""
    max_micro_batch: int | None = None
    """Examples of a micro-batch at most: a process takes as many micro-batches as its part of the batch needs."""
    bucketing: bool = False
    """Whether examples of similar length share a batch."""
    carry_state: bool = False
    """Whether a language model reads contiguous text and keeps its state from batch to batch, without gradient."""
    carry_segments: int | None = None
    """Segments after which a carried state is dropped and every sequence continues at a random place of the text
    (fewer if it is short). None carries states to its end."""
    workers: int = 0
    """Processes that read data; 0 reads between the steps."""
    precision: Precision = "fp32"
    """fp32; tf32 for matrix products on NVIDIA GPUs; or bf16 where it is safe. Parameters stay in fp32."""
    compile: bool = False
    """Whether the model runs through torch.compile."""
    gradient_checkpointing: bool = False
    """Whether activations are recomputed in the backward pass instead of kept."""
    distributed: Distributed = "ddp"
    """With several processes, which torchrun starts: copies of the model (ddp), one model sharded over all of them
    (fsdp), or over those of each host (hybrid)."""
    device: str = "auto"
    """Where to train; auto takes a GPU if there is one."""
    max_tokens: int = 2**19
    """Tokens of a micro-batch, padding included; examples of varying length that exceed it are split further."""
    log_every: int = 20
    """Steps between lines of metrics."""
    save_every: int = 1000
    """Steps between checkpoints; evaluations that improve save too."""
    keep: int = 2
    """How many of the newest checkpoints to keep besides the best."""
    max_skipped: int = 5
    """Steps in a row with a loss or gradient that is not finite, after which a run stops with exit code 3."""
    trackers: tuple[TrackerName, ...] = ()
    """Where metrics go besides the run's own file."""

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "accumulation",
            "log_every",
            "save_every",
            "keep",
            "max_skipped",
            "max_tokens",
        ):
            check_positive(f"training.{name}", getattr(self, name))
        check_positive("training.workers", self.workers, least=0)
        if self.max_micro_batch is not None:
            check_positive("training.max_micro_batch", self.max_micro_batch)
        if self.carry_segments is not None:
            check_positive("training.carry_segments", self.carry_segments)
        check_choice("training.precision", self.precision, PRECISIONS)
        check_choice("training.distributed", self.distributed, get_args(Distributed))
        require(
            self.accumulation <= self.batch_size,
            f"training.accumulation must not exceed training.batch_size, "
            f"got {self.accumulation} and {self.batch_size}",
        )
        require(
            not (self.carry_state and self.bucketing),
            "training.carry_state and training.bucketing cannot be combined: contiguous text is not sorted",
        )
        for tracker in self.trackers:
            check_choice("training.trackers", tracker, ("tensorboard", "trackio", "wandb"))

    def micro_batches(self, processes: int) -> int:
        """Micro-batches per step and process, from `accumulation` and `max_micro_batch`."""
        count = self.accumulation
        if self.max_micro_batch is not None:
            count = max(count, -(-self.batch_size // (processes * self.max_micro_batch)))
        # carried states belong to sequences: every micro-batch has as many
        while self.carry_state and self.accumulation < count < self.batch_size // processes:
            if self.batch_size % (processes * count) == 0:
                break
            count += 1
        return count


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Settings):
    """How held-out data is scored during training."""

    every: int = 1000
    """Steps between evaluations; there is one more after the last step."""
    batch_size: int = 32
    """Examples at a time, over all processes."""
    split: Split = "val"
    """What is scored."""
    limit: int | None = None
    """How many examples are scored during training; None scores all."""
    patience: int | None = None
    """Stop after this many evaluations without a better one; None never stops early."""

    def __post_init__(self) -> None:
        check_positive("evaluation.every", self.every)
        check_positive("evaluation.batch_size", self.batch_size)
        check_choice("evaluation.split", self.split, SPLITS)
        for name in ("limit", "patience"):
            if getattr(self, name) is not None:
                check_positive(f"evaluation.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """Everything that a run depends on."""

    task: TaskConfig
    """What is learned."""
    model: BackboneConfig
    """The model that learns it."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How parameters move."""
    schedule: ScheduleConfig = ScheduleConfig()
    """For how long, and how fast."""
    training: TrainingConfig = TrainingConfig()
    """How the steps are taken."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How held-out data is scored."""
    start: str = ""
    """A run whose backbone training starts from, or one of its checkpoints; empty starts from fresh weights."""
    seed: int = 0
    """Of the initial weights, the order of the data and the noise of dropout and routers."""
    recipe: str = ""
    """Where the configuration came from."""

    def __post_init__(self) -> None:
        check_positive("seed", self.seed, least=0)

    def build_task(self) -> Task:
        """The task; reads no data yet."""
        return self.task.build()

    def build_model(self, task: Task | None = None, classes: int | None = None) -> nn.Module:
        """A model with fresh weights for the task; the number of classes may be known better than from its data."""
        task = task or self.build_task()
        have, want = self.model.vocab, task.vocab
        require(
            have is None or have == want,
            f"model.vocab must be {want} for the task {task.name}, got {have}",
        )
        backbone = dataclasses.replace(self.model, vocab=want, channels=task.channels)
        if task.kind == "lm":
            return LanguageModel(backbone)
        heads: dict[str, type[Matcher | Tagger | Classifier]] = {"match": Matcher, "tag": Tagger}
        return task.complete(heads.get(task.kind, Classifier)(backbone, classes or task.classes))

    def carries_growing_state(self) -> bool:
        """Whether training carries a state from segment to segment that keeps growing, as a Transformer's does."""
        if not self.training.carry_state:
            return False
        with torch.device("meta"):
            return Backbone(dataclasses.replace(self.model, vocab=2)).grows

    def by_segments(self) -> RunConfig:
        """The same without a carried state: segments are read one by one, and the second half of each is scored."""
        size = getattr(self.task, "segment", None)
        cut = {} if size is None else {"context": size // 2, "window": size}
        return self.replace(task=cut, training={"carry_state": False})

    def replace(self, **changes: Any) -> RunConfig:
        """A copy in which fields, or fields of parts, are changed: `replace(seed=1, model=dict(num_layers=2))`."""
        return dataclasses.replace(
            self,
            **{
                name: dataclasses.replace(getattr(self, name), **value) if isinstance(value, dict) else value
                for name, value in changes.items()
            },
        )


FREE_TO_CHANGE = (
    "recipe",
    "task.data_dir",
    "training.workers",
    "training.gradient_checkpointing",
    "training.max_micro_batch",
    "training.device",
    "training.distributed",
    "training.log_every",
    "training.save_every",
    "training.keep",
    "training.max_tokens",
    "training.max_skipped",
    "training.trackers",
)
"""Fields that a resumed run may change: they decide where and what is seen of the numbers, not the numbers."""
