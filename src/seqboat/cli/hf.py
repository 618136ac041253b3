"""A run as a folder that Hugging Face transformers loads: configuration, weights, tokenizer, model card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from seqboat.hf.model import SeqBoatPreTrainedModel
    from seqboat.run import Run

TokenizerKind = Literal["bytes"] | None


class Exported(NamedTuple):
    """What was written."""

    model: SeqBoatPreTrainedModel
    folder: Path
    tokenizer: TokenizerKind
    """what it includes: a tokenizer of bytes, or none"""


def export_run(run: Path | str, folder: Path | str, which: str = "best") -> Exported:
    """Export a trained run to a folder that transformers loads. The folder appears complete or not at all.

    Args:
        run: the run's folder, or one checkpoint in it.
        folder: must not exist, or be empty.
        which: "best" or "latest".
    """
    from transformers import GenerationConfig

    from seqboat.cli.export import in_own_units
    from seqboat.core.checks import require
    from seqboat.data.files import making_folder
    from seqboat.hf.model import SeqBoatForCausalLM
    from seqboat.hf.save import to_transformers
    from seqboat.hf.tokenizer import PAD, byte_tokenizer
    from seqboat.run import Run
    from seqboat.training.settings_io import to_dict

    folder = Path(folder)
    if folder.exists():
        require(folder.is_dir(), f"{folder} is a file: choose a folder that does not exist yet")
        require(not any(folder.iterdir()), f"{folder} is not empty: choose a folder that does not exist yet")
    source = Run(run, which)
    name = to_dict(source.config)["task"]["name"]
    pad = PAD
    kind: TokenizerKind = None
    if source.task.text_bytes:
        kind = "bytes"
    try:
        model = to_transformers(source.model, pad_token_id=pad, **head_settings(source))
        in_own_units(model, source)
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
        card = model_card(model, source, kind)
        (stage / "README.md").write_text(card, encoding="utf-8")
    return Exported(model, folder, kind)


def head_settings(run: Run) -> dict[str, Any]:
    """Fields of the configuration that say what the outputs of a run's model mean, and what its inputs are."""
    from seqboat.cli.export import input_facts
    from seqboat.models.heads import Classifier, Tagger
    from seqboat.own.targets import LabelsTarget, NumberTarget
    from seqboat.own.task import OwnTask

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
            settings["input_facts"] = input_facts(run.task.facts)
    return settings


def model_card(model: SeqBoatPreTrainedModel, run: Run, tokenizer: TokenizerKind) -> str:
    """README.md of an export: how to load it, what it is, what it was trained on."""
    from seqboat.hf.heads import SeqBoatForTokenClassification
    from seqboat.hf.model import SeqBoatForCausalLM

    lm = isinstance(model, SeqBoatForCausalLM)
    config, checkpoint = run.config, run.checkpoint
    stack = model.config.backbone
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
    elif stack["vocab"] is None:
        names, load = auto, "print(model(input_values=values).logits)  # (batch, time, channels)"
        tokens = (
            f"Inputs are real values, normalized as `input_facts` of the configuration says ({task.name})."
        )
    else:
        names, load = auto, "print(model(input_ids).logits)  # token ids as the task numbers them"
        tokens = f"There is no tokenizer: token ids are those of the task `{task.name}`."
    what = "A language model" if lm else "A tagger" if tagger else "A classifier"
    return f"""---
library_name: transformers
pipeline_tag: {"text-generation" if lm else "token-classification" if tagger else "text-classification"}
tags:
- seqboat
---

# {config.recipe or task.name}

{what} of {stack["num_layers"]} `{stack["mixer"]["name"]}` layers \
of width {stack["d_model"]}, {count:,} parameters, made with seqboat. {tokens}

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
