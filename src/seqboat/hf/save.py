"""A model of the core as one of transformers; its own `save_pretrained` writes the folder."""

from __future__ import annotations

from typing import Any

from torch import nn

from seqboat.core.checks import require
from seqboat.export.int8 import float_tensors
from seqboat.hf.configuration import SeqBoatModelConfig
from seqboat.hf.heads import SeqBoatForSequenceClassification, SeqBoatForTokenClassification
from seqboat.hf.model import SeqBoatForCausalLM, SeqBoatPreTrainedModel
from seqboat.models.heads import Classifier, LanguageModel, Tagger, check_exportable


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
    check_exportable(model)
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
