"""A run on disk: the one way to its configuration, task, model, metrics and checkpoints.

    run = Run("runs/recall")                # or one of its checkpoints: Run("runs/recall/step-500")
    run.config, run.task, run.model         # each loaded on first use
    run.evaluate("test")["accuracy"]
    Run("enwik8-small").language_model      # a model that comes with the package

The folder of a run is described in `seqboat.training.trainer`. A packed run (`Run.pack`) is the same folder with
nothing that only training needs:

    NAME/
      README.md                the model card: data, license, size, scores
      best, latest             the name of the checkpoint
      step-N/
        model.safetensors      weights, in half precision, or in int8 with a scale per row
        state.json             step, configuration, sha256 of the weights
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from seqboat.console import printable
from seqboat.core.checks import check_choice, naming, require
from seqboat.data.files import read_json
from seqboat.export.int8 import expect_codes, quantize_tensors
from seqboat.models.heads import Classifier, LanguageModel, Matcher, Tagger
from seqboat.models.limits import build_within
from seqboat.tasks.outcomes import Outcomes
from seqboat.tasks.task import BYTES, Batch, Split, Task
from seqboat.training.checkpoint import (
    MODEL,
    STATE,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    load_model_tensors,
    verify,
)
from seqboat.training.config import RunConfig
from seqboat.training.evaluate import MODES, Streaming, Windows, check_outputs, evaluate
from seqboat.training.parallel import World
from seqboat.training.record import iterate_metrics
from seqboat.training.settings_io import override, split_arguments, to_dict

MODELS = Path(__file__).parent / "models"
"""Where models that come with the package are."""
PACKED = ("config", "classes", "labels", "facts", "data", "versions")
"""What a packed checkpoint keeps of its state: what it takes to use the model."""
ATTEMPTS = 20
"""How often to look for a checkpoint while a training run keeps replacing them."""


def shipped_models() -> dict[str, Path]:
    """Folders of the models that come with the package, by name."""
    found = sorted(MODELS.iterdir()) if MODELS.is_dir() else []
    return {path.name: path for path in found if (path / "best").is_file()}


def find_run(run: Path | str | None) -> Path:
    """Find the folder of a run or, by its name, of a bundled model; for None, of the first bundled model."""
    shipped = shipped_models()
    if run is None:
        require(len(shipped) > 0, "give the folder of a run: this installation has no bundled model")
        return next(iter(shipped.values()))
    return shipped[str(run)] if str(run) in shipped and not Path(run).exists() else Path(run)


def start_from(config: RunConfig, run: Path | str) -> RunConfig:
    """A configuration whose training starts from the backbone of a trained run.

    The model becomes that of the run; dropout on its inputs and the head stay those of the configuration.

        config = start_from(find_recipe("classify")(), "enwik8-small")

    Args:
        config: of the run to come.
        run: the folder of a run, one of its checkpoints, or the name of a model that comes with the package.
    """
    source = Run(run)
    kept = ("dropout", "head_hidden", "head_bias", "head_init")
    model = dataclasses.replace(
        source.config.model, vocab=config.model.vocab, **{name: getattr(config.model, name) for name in kept}
    )
    return config.replace(model=model, start=str(source.path.resolve()))


class SavedFacts(dict[str, Any]):
    """What a checkpoint says about its data; a missing part is a ValueError that names the file.

    >>> SavedFacts({"labels": ["a", "b"]}, Path("state.json"))["mean"]
    Traceback (most recent call last):
    ValueError: state.json says nothing about the 'mean' of the data: the file was changed
    """

    def __init__(self, facts: Any, path: Path) -> None:
        require(
            isinstance(facts, dict), f"{path}: facts must be an object, got {printable(repr(facts)[:40])}"
        )
        super().__init__(facts)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"{self.path} says nothing about the {key!r} of the data: the file was changed")


class Run:
    """A trained run. Nothing is read before it is asked for, and everything comes from one and the same checkpoint.

    Args:
        run: the folder of a run, one checkpoint (step-N) in it, or the name of a model that comes with the package;
            None for the first of these.
        which: "best" or "latest" checkpoint.
        fields: changes to the data, written as the arguments `--data.FIELD=value`.
    """

    def __init__(
        self, run: Path | str | None = None, which: str = "best", fields: Sequence[str] = ()
    ) -> None:
        check_choice("which", which, ("best", "latest"))
        self.path = find_run(run)
        """as it was named: the run's folder, or a checkpoint"""
        self.which = which
        self.fields = tuple(fields)
        for name, _ in split_arguments(fields):
            require(
                name.startswith(("data.", "task.")),
                f"only the data can be changed (--data.FIELD), got --{name}",
            )
        require(self.path.is_dir(), f"{self.path} is not the folder of a run")

    def __str__(self) -> str:
        return str(self.path)

    @property
    def folder(self) -> Path:
        """The run's folder, also where a checkpoint in it was named."""
        return self.path.parent if self._is_checkpoint else self.path

    @property
    def _is_checkpoint(self) -> bool:
        return self.path.name.startswith("step-")

    @property
    def shipped(self) -> bool:
        """Whether the model came with the package."""
        return self.folder.parent == MODELS

    @property
    def steps(self) -> list[int]:
        """Steps at which the run has a checkpoint now, oldest first."""
        return CheckpointStore(self.folder).steps()

    # the checkpoint

    @cached_property
    def _read(self) -> tuple[Checkpoint, dict[str, Tensor]]:
        """The checkpoint and its weights, opened together: a run that still trains may delete the files any time."""
        for attempt in range(ATTEMPTS):
            said: list[str] = []
            store = CheckpointStore(self.folder, warn=said.append)
            before = store.steps()
            failure: Exception | None = None
            try:
                found = self._find(store)
                weights = found.tensors(MODEL)
            except (ValueError, CheckpointError) as error:
                failure = error
            except (OSError, SafetensorError) as error:
                failure = CheckpointError(f"{self.path} cannot be read: {error}")
            # a checkpoint that was there and is gone was replaced while it was read: look again
            replaced = not set(before) <= set(store.steps())
            if replaced and (failure or said) and not self._is_checkpoint and attempt + 1 < ATTEMPTS:
                continue
            if failure is not None:
                # nothing was taken instead: what was wrong with the first checkpoint belongs to the error
                reason = said[0].rpartition("; ")[0] if said else ""
                raise type(failure)(f"{failure}: {reason}") if reason else failure
            for line in said:
                warnings.warn(printable(line), stacklevel=5)
            break
        return found, weights

    def _find(self, store: CheckpointStore) -> Checkpoint:
        if self._is_checkpoint:
            return verify(self.path)
        found = store.best() if self.which == "best" else store.newest()
        if found is None:
            raise ValueError(f"{self.path} contains no complete checkpoint")
        return found

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint, with every byte of it checked."""
        return self._read[0]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's weights by name, as they are stored."""
        return self._read[1]

    @property
    def step(self) -> int:
        """Steps of training that the checkpoint has seen."""
        return self.checkpoint.step

    @cached_property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.checkpoint.config()

    # what it learned

    @cached_property
    def task(self) -> Task:
        """The task it was trained on, with the changes of `fields`; its data may be elsewhere or missing."""
        state = self.checkpoint.state
        with naming(self.checkpoint.path / STATE):
            task = override(self.config, self.fields).build_task()
        # other data that was named on purpose may differ
        task.expected, task.trained = None if self.fields else state.get("data"), str(self.checkpoint.path)
        if facts := state.get("facts"):
            task.facts = SavedFacts(facts, self.checkpoint.path / STATE)
        elif labels := state.get("labels"):
            task.labels = tuple(labels)
        return task

    @cached_property
    def model(self) -> nn.Module:
        """The model, in eval mode on the CPU."""
        path = self.checkpoint.path
        # the number of classes comes from the checkpoint: the training data may be elsewhere
        with naming(path / STATE):
            model = build_within(
                lambda: self.config.build_model(self.task, classes=self.checkpoint.state.get("classes")),
                sum(value.numel() for value in self.weights.values()),
                self.config.model.num_layers,
                len(self.weights),
                str(path),
            )
        try:
            expect_codes(model, self.weights)
            load_model_tensors(model, self.weights)
        except ValueError as error:
            raise ValueError(f"{path / MODEL}: {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path / MODEL}: {error}") from error
        return model.eval()

    @property
    def language_model(self) -> LanguageModel:
        """The model, if it is a language model of bytes; a ValueError otherwise."""
        model = self.model
        kinds = {Classifier: "a classifier", Tagger: "a tagger", Matcher: "a matcher of two sequences"}
        kind = kinds.get(type(model), "")
        vocab = None if kind else model.backbone.config.vocab  # type: ignore[union-attr]
        found = kind or f"a language model of {vocab} token ids"
        if not isinstance(model, LanguageModel) or vocab != BYTES:
            raise ValueError(f"{self} must be the run of a language model of bytes, got {found}")
        return model

    # what it recorded

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl; a packed run has none."""
        path = self.folder / "metrics.jsonl"
        return list(iterate_metrics(path)) if path.is_file() else []

    @cached_property
    def about(self) -> dict[str, Any]:
        """What run.json says: seed, parameters, versions, commit; a packed run has none."""
        try:
            found = read_json(self.folder / "run.json")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    # what can be done with it

    def evaluate(
        self,
        split: Split = "test",
        *,
        batch_size: int | None = None,
        limit: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        reading: Windows | Streaming | None = None,
        device: torch.device | None = None,
        control: Callable[[nn.Module], AbstractContextManager[None]] | None = None,
        details: bool = False,
    ) -> dict[str, Any]:
        """Score the model on a split; returns what `seqboat eval --json` prints.

        Args:
            split: of the task.
            batch_size: examples at a time; by default as many as during training.
            limit: at most this many examples, drawn at random but always the same.
            progress: called with the number of batches done and of all batches.
            reading: how a language model reads a long text; by default as during training, in segments of the task
                or with a carried state in as many sequences as the batch has.
            device: where to compute; the CPU by default.
            control: may override the model's decisions while the context that it returns is open.
            details: whether to add the scores of every class, confusions and the worst errors (`Outcomes.result`).
        """
        config, task, model = self.config, self.task, self.model
        usual = config.evaluation.batch_size
        if isinstance(reading, Streaming):
            # one sequence reads the whole text: with more, each would start somewhere in it without any context
            usual = 1
        elif reading is not None:
            # about as many tokens at a time as the run itself evaluates
            usual = max(1, usual * task.max_length // reading.window)
        world = World(0, 1, device or torch.device("cpu"))
        outcomes = Outcomes(task)

        def observe(numbers: Sequence[int], batch: Batch, logits: Tensor) -> None:
            check_outputs(split, numbers, batch, logits)
            if details:
                outcomes.add(numbers, batch, logits)

        with nullcontext() if control is None else control(model):
            result = evaluate(
                model.to(world.device),
                task,
                split,
                world,
                batch_size=batch_size or usual,
                limit=limit,
                carry_state=config.training.carry_state,
                reading=reading,
                progress=progress,
                observe=observe,
            )
        read: dict[str, Any] = {}
        if reading is not None:
            tokens = len(task.text(split)) - 1
            read = {
                "mode": MODES[type(reading)],
                **dataclasses.asdict(reading),
                "tokens": min(limit or tokens, tokens),
            }
        return {
            "run": str(self),
            "recipe": config.recipe,
            "step": self.step,
            "split": split,
            **read,
            "examples": result.examples,
            **result.metrics,
            "activation": result.activation,
            **outcomes.result(),
        }

    def pack(self, folder: Path | str, dtype: torch.dtype = torch.float16) -> Path:
        """Write the model in compact form: a run without what only training needs.

        Args:
            folder: to make; must be empty if it exists.
            dtype: of the stored weights; the model is still loaded in its own precision. With torch.int8 the weights
                of linear layers and embeddings are rounded as `quantize` does; other weights are kept as they are.

        Returns:
            The folder.
        """
        folder = Path(folder)
        require(not folder.exists() or not any(folder.iterdir()), f"{folder} must be empty or not exist")
        weights = quantize_tensors(self.model, self.weights) if dtype == torch.int8 else dict(self.weights)
        for name, value in self.weights.items() if dtype.is_floating_point else ():
            weights[name] = value.to(dtype) if value.is_floating_point() else value
            fits = bool(weights[name].isfinite().all())
            require(
                fits, f"{name} does not fit into {dtype}: it holds values up to {float(value.abs().max()):g}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        state = {key: self.checkpoint.state[key] for key in PACKED if key in self.checkpoint.state}
        # where its weights came from is a folder of this machine
        state["config"] = to_dict(self.config.replace(start=""))
        saved = CheckpointStore(folder).save(self.step, {MODEL: weights}, state, best=True)
        # checkpoints are readable by their owner alone, but a package is for everyone on the machine
        (saved / MODEL).chmod(0o644)
        return folder
