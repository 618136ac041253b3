"""Runs of language models that nobody had to train: fresh weights in the folder that training would leave."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from seqboat.layers.gau import GAUConfig
from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.models.backbone import BackboneConfig
from seqboat.own.text import LMTextTaskConfig
from seqboat.ssm.diagonal import EMAConfig
from seqboat.tasks.task import TaskConfig
from seqboat.training.checkpoint import MODEL, CheckpointStore, model_tensors
from seqboat.training.config import RunConfig
from seqboat.training.settings_io import to_dict

TEXT = "Ein schöner Text € mit Zeilen,\nund noch einer.\n" * 60


def lm_config(text: Path, window: int = 8, truncation: int | None = None) -> RunConfig:
    """A small language model of a text file."""
    mixer = SeqBoatConfig(
        init="paper",
        ssm=EMAConfig(d_state=2, truncation=truncation),
        gau=GAUConfig(d_z=4, d_v=8, window=window, positions="rotary"),
        causal=True,
        prenorm=True,
    )
    return RunConfig(
        task=LMTextTaskConfig(text=(str(text),), segment=32),
        model=BackboneConfig(mixer=mixer, d_model=8, num_layers=2, scaled_embedding=True),
    )


def write_run(folder: Path, config: RunConfig, seed: int = 0, noise: float = 0.0) -> Path:
    """The folder of a run of this configuration, with fresh weights; noise on them makes every part count."""
    torch.manual_seed(seed)
    task = config.build_task()
    model = config.build_model(task)
    if noise:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=noise)
    if model.backbone.norm is not None:
        with (
            torch.no_grad()
        ):  # or the model would only say the last byte again: input and output share their weights
            model.backbone.norm.weight.normal_()  # type: ignore[union-attr, operator]
    folder.mkdir(parents=True, exist_ok=True)
    state = {"config": to_dict(config), "classes": task.classes, "versions": {}}
    CheckpointStore(folder).save(1, {MODEL: model_tensors(model)}, state, best=True)
    return folder


def write_lm_run(folder: Path, seed: int = 0) -> Path:
    """A text file and the run of a language model of it, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return write_run(folder / "run", lm_config(folder / "text.txt"), seed)


def with_task(config: RunConfig, task: TaskConfig) -> RunConfig:
    """The same model on another task."""
    return dataclasses.replace(config, task=task)
