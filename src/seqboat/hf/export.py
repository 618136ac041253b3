"""Export a trained run to a folder that transformers loads: configuration, weights, tokenizer, model card."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers import GenerationConfig

from seqboat.checks import require
from seqboat.hf.configuration import SeqBoatModelConfig
from seqboat.hf.model import SeqBoatForCausalLM, SeqBoatForSequenceClassification, SeqBoatPreTrainedModel
from seqboat.hf.tokenizer import PAD, byte_tokenizer
from seqboat.models.backbone import BackboneConfig, Classifier, LanguageModel, MixerConfig
from seqboat.runs import Run
from seqboat.training.checkpoint import Checkpoint
from seqboat.training.config import RunConfig, to_dict


class Exported(NamedTuple):
    """What was written."""

    model: SeqBoatPreTrainedModel
    folder: Path
    tokenizer: bool
    """whether it includes a tokenizer"""


def to_transformers(model: nn.Module, **settings: Any) -> SeqBoatPreTrainedModel:
    """A language model or classifier of the core as a model of transformers, with copies of its weights.

    Args:
        model: reads token ids.
        settings: further fields of the configuration, such as pad_token_id or id2label.
    """
    require(
        isinstance(model, LanguageModel | Classifier),
        f"only language models and classifiers can be exported, not a {type(model).__name__}",
    )
    assert isinstance(model, LanguageModel | Classifier)
    backbone = model.backbone.config
    if isinstance(model, LanguageModel):
        ours = SeqBoatForCausalLM(SeqBoatModelConfig.from_backbone(backbone, **settings))
    else:
        labels = {} if "id2label" in settings else {"num_labels": model.head.out.out_features}
        ours = SeqBoatForSequenceClassification(
            SeqBoatModelConfig.from_backbone(backbone, **labels, **settings)
        )
        ours.head.load_state_dict(model.head.state_dict())
    ours.to(model.backbone.embedding.weight.dtype)
    ours.model.backbone.load_state_dict(model.backbone.state_dict())
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
        require(folder.is_dir(), f"{folder} is a file: name a folder that does not exist yet")
        require(not any(folder.iterdir()), f"{folder} is not empty: name a folder that does not exist yet")
    source = Run(run, which)
    checkpoint, config, core = source.checkpoint, source.config, source.model
    name = to_dict(config)["task"]["name"]
    readable = source.task.text_bytes
    settings: dict[str, Any] = {"pad_token_id": PAD}
    labels = checkpoint.state.get("labels") or ()
    if labels and isinstance(core, Classifier):
        settings["id2label"] = dict(enumerate(labels))
        settings["label2id"] = {label: place for place, label in enumerate(labels)}
    try:
        model = to_transformers(core, **settings)
    except ValueError as error:
        raise ValueError(f"{run} cannot be exported (task {name}): {error}") from error
    if isinstance(model, SeqBoatForCausalLM):
        model.generation_config = GenerationConfig(pad_token_id=PAD, use_cache=True)
    stage = folder.absolute().with_name(f".{folder.name}-{os.getpid()}")
    stage.mkdir(parents=True)
    try:
        model.save_pretrained(stage)
        if readable:
            byte_tokenizer("left" if isinstance(model, SeqBoatForCausalLM) else "right").save_pretrained(
                stage
            )
        card = model_card(model, config, checkpoint, readable)
        (stage / "README.md").write_text(card, encoding="utf-8")
        os.rename(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return Exported(model, folder, readable)


def model_card(
    model: SeqBoatPreTrainedModel, config: RunConfig, checkpoint: Checkpoint, readable: bool
) -> str:
    """README.md of an export: how to load it, what it is, what it was trained on."""
    lm = isinstance(model, SeqBoatForCausalLM)
    backbone: BackboneConfig = model.model.backbone.config
    mixer = to_dict(backbone.mixer, MixerConfig)
    count = sum(parameter.numel() for parameter in model.parameters())
    task = config.build_task()
    best = checkpoint.state.get("progress", {}).get("best")
    score = "" if best is None else f"; best {task.metric} on held-out data during training: {best:.4g}"
    auto = "AutoModelForCausalLM" if lm else "AutoModelForSequenceClassification"
    if readable:
        use = (
            'inputs = tokenizer("The history of", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))"
            if lm
            else 'print(model(**tokenizer("Some text", return_tensors="pt")).logits)'
        )
        names = f"{auto}, AutoTokenizer"
        load = f'tokenizer = AutoTokenizer.from_pretrained("{{folder}}")\n{use}'
        tokens = "Token ids are the bytes of UTF-8."
    else:
        names, load = auto, "print(model(input_ids).logits)  # token ids as the task numbers them"
        tokens = f"There is no tokenizer: token ids are those of the task `{task.name}`."
    return f"""---
library_name: transformers
pipeline_tag: {"text-generation" if lm else "text-classification"}
tags:
- seqboat
---

# {config.recipe or task.name}

A {"language model" if lm else "classifier"} of {backbone.num_layers} `{mixer["name"]}` layers of width \
{backbone.d_model}, {count:,} parameters, made with seqboat. {tokens}

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
