"""Export a trained run to a folder that transformers loads: configuration, weights, tokenizer, model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import GenerationConfig

from seqboat.core.checks import require
from seqboat.data.files import making_folder
from seqboat.export.int8 import float_tensors
from seqboat.hf.configuration import SeqBoatModelConfig
from seqboat.hf.heads import SeqBoatForSequenceClassification, SeqBoatForTokenClassification
from seqboat.hf.model import SeqBoatForCausalLM, SeqBoatPreTrainedModel
from seqboat.hf.tokenizer import PAD, byte_tokenizer
from seqboat.models.backbone import BackboneConfig, MixerConfig
from seqboat.models.heads import Classifier, LanguageModel, Tagger
from seqboat.own.inputs import Tokens
from seqboat.own.targets import LabelsTarget, NumberTarget
from seqboat.own.task import OwnTask
from seqboat.run import Run
from seqboat.training.checkpoint import Checkpoint
from seqboat.training.config import RunConfig
from seqboat.training.settings_io import to_dict

TokenizerKind = Literal["bytes", "own"] | None


class Exported(NamedTuple):
    """What was written."""

    model: SeqBoatPreTrainedModel
    folder: Path
    tokenizer: TokenizerKind
    """what it includes: a tokenizer of bytes, the one of the run, or none"""


def to_transformers(model: nn.Module, **settings: Any) -> SeqBoatPreTrainedModel:
    """A language model, classifier or tagger of the core as a model of transformers, with copies of its weights.

    Args:
        model: reads token ids or real values.
        settings: further fields of the configuration, such as pad_token_id or id2label.
    """
    require(
        isinstance(model, LanguageModel | Classifier | Tagger),
        f"only language models, classifiers and taggers can be exported, not a {type(model).__name__}",
    )
    assert isinstance(model, LanguageModel | Classifier | Tagger)
    backbone = model.backbone.config
    if isinstance(model, LanguageModel):
        ours = SeqBoatForCausalLM(SeqBoatModelConfig.from_backbone(backbone, **settings))
    else:
        labels = {} if "id2label" in settings else {"num_labels": model.head.out.out_features}
        kind = (
            SeqBoatForTokenClassification if isinstance(model, Tagger) else SeqBoatForSequenceClassification
        )
        ours = kind(SeqBoatModelConfig.from_backbone(backbone, **labels, **settings))
        ours.head.load_state_dict(float_tensors(model.head))
    ours.to(model.backbone.embedding.weight.dtype)
    # the library's model has weights in floating point: those that int8 codes stand for
    ours.model.backbone.load_state_dict(float_tensors(model.backbone))
    return ours.train(model.training)


def export_run(run: Path | str, folder: Path | str, which: str = "best") -> Exported:
    """Export a trained run to a folder that transformers loads. The folder appears complete or not at all.

    Args:
        run: the run's folder, or one checkpoint in it.
        folder: must not exist, or be empty.
        which: "best" or "latest".
    """
    folder = Path(folder)
    if folder.exists():
        require(folder.is_dir(), f"{folder} is a file: choose a folder that does not exist yet")
        require(not any(folder.iterdir()), f"{folder} is not empty: choose a folder that does not exist yet")
    source = Run(run, which)
    checkpoint, config, core = source.checkpoint, source.config, source.model
    name = to_dict(config)["task"]["name"]
    tokens = source.task.source if isinstance(source.task, OwnTask) else None
    pad = PAD
    kind: TokenizerKind = None
    if source.task.text_bytes:
        kind = "bytes"
    elif isinstance(tokens, Tokens):
        kind = "own"
        pad = tokens.tokenizer.pad_token_id or PAD
    try:
        model = to_transformers(core, pad_token_id=pad, **head_settings(source))
        if isinstance(source.task, OwnTask) and isinstance(source.task.target, NumberTarget):
            _in_own_units(model, source.task.facts)
    except ValueError as error:
        raise ValueError(f"{run} cannot be exported (task {name}): {error}") from error
    if isinstance(model, SeqBoatForCausalLM):
        model.generation_config = GenerationConfig(pad_token_id=PAD, use_cache=True)
    with making_folder(folder) as stage:
        model.save_pretrained(stage)
        if kind == "bytes":
            lm = isinstance(model, SeqBoatForCausalLM)
            side, longest = ("left", None) if lm else ("right", source.task.max_length)
            byte_tokenizer(side, longest).save_pretrained(stage)
        elif isinstance(tokens, Tokens):
            tokens.tokenizer.model_max_length = tokens.max_length
            tokens.tokenizer.save_pretrained(stage)
        card = model_card(model, config, checkpoint, kind)
        (stage / "README.md").write_text(card, encoding="utf-8")
    return Exported(model, folder, kind)


def head_settings(run: Run) -> dict[str, Any]:
    """Fields of the configuration that say what the outputs of a run's model mean, and what its inputs are."""
    settings: dict[str, Any] = {}
    labels = run.checkpoint.state.get("labels") or ()
    if labels and isinstance(run.model, Classifier | Tagger):
        settings["id2label"] = dict(enumerate(labels))
        settings["label2id"] = {label: place for place, label in enumerate(labels)}
    if isinstance(run.task, OwnTask):
        if isinstance(run.task.target, NumberTarget):
            settings["problem_type"] = "regression"
        elif isinstance(run.task.target, LabelsTarget):
            settings["problem_type"] = "multi_label_classification"
        if run.task.vocab is None:
            names = ("input", "mean", "std", "gaps", "rate")
            settings["input_facts"] = {name: run.task.facts[name] for name in names if name in run.task.facts}
    return settings


def _in_own_units(model: SeqBoatPreTrainedModel, facts: dict[str, Any]) -> None:
    """Let a regression model answer in the units of its targets, not in standard deviations from their mean."""
    out = model.head.out
    require(out.bias is not None, "a number needs a head with a bias (model.head_bias)")
    with torch.no_grad():
        out.weight.mul_(facts["target_std"])
        out.bias.mul_(facts["target_std"]).add_(facts["target_mean"])


def model_card(
    model: SeqBoatPreTrainedModel, config: RunConfig, checkpoint: Checkpoint, tokenizer: TokenizerKind
) -> str:
    """README.md of an export: how to load it, what it is, what it was trained on."""
    lm = isinstance(model, SeqBoatForCausalLM)
    backbone: BackboneConfig = model.model.backbone.config
    mixer = to_dict(backbone.mixer, MixerConfig)
    count = sum(parameter.numel() for parameter in model.parameters())
    task = config.build_task()
    best = checkpoint.state.get("progress", {}).get("best")
    score = "" if best is None else f"; best {task.metric} on held-out data during training: {best:.4g}"
    tagger = isinstance(model, SeqBoatForTokenClassification)
    auto = "AutoModelForTokenClassification" if tagger else "AutoModelForSequenceClassification"
    auto = "AutoModelForCausalLM" if lm else auto
    if tokenizer is not None:
        use = (
            'inputs = tokenizer("The history of", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))"
            if lm
            else 'print(model(**tokenizer("Some text", return_tensors="pt")).logits)'
        )
        names = f"{auto}, AutoTokenizer"
        load = f'tokenizer = AutoTokenizer.from_pretrained("{{folder}}")\n{use}'
        tokens = "Token ids are " + (
            "the bytes of UTF-8." if tokenizer == "bytes" else "those of its tokenizer."
        )
    elif backbone.vocab is None:
        names, load = auto, "print(model(input_values=values).logits)  # (batch, time, channels)"
        tokens = (
            f"Inputs are real values, normalized as `input_facts` of the configuration says ({task.name})."
        )
    else:
        names, load = auto, "print(model(input_ids).logits)  # token ids as the task numbers them"
        tokens = f"There is no tokenizer: token ids are those of the task `{task.name}`."
    return f"""---
library_name: transformers
pipeline_tag: {"text-generation" if lm else "token-classification" if tagger else "text-classification"}
tags:
- seqboat
---

# {config.recipe or task.name}

A {"language model" if lm else "tagger" if tagger else "classifier"} of {backbone.num_layers} `{mixer["name"]}` \
layers of width {backbone.d_model}, {count:,} parameters, made with seqboat. {tokens}

```python
import seqboat.hf  # pip install 'seqboat[hf]'; tells transformers what this model is
from transformers import {names}

model = {auto}.from_pretrained("{{folder}}")
{load}
```

Without the first line transformers says that it does not know the model type `seqboat`.

- Trained on: task `{task.name}`, recipe `{config.recipe or "none"}`, {checkpoint.step:,} steps{score}.
- The weights come from that data; check its license before you share them.
""".replace("{folder}", "path/to/this/folder")
