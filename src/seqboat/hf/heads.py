"""Models of transformers that answer for a sequence or for each of its tokens.

    SeqBoatForSequenceClassification    a class, several labels or a number for a sequence
    SeqBoatForTokenClassification       a class for every token

Models trained on real values take `input_values` (batch, time, channels) instead of `input_ids`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from seqboat.core.checks import require
from seqboat.hf.configuration import SeqBoatModelConfig
from seqboat.hf.model import IGNORE, SeqBoatModel, SeqBoatPreTrainedModel, read_mask
from seqboat.models.heads import Head, pool_tokens


class _WithHead(SeqBoatPreTrainedModel):
    """The stack, and one hidden layer that scores the labels of a vector."""

    @property
    def parts(self) -> int:
        """Vectors that the head reads."""
        return 1

    def __init__(self, config: SeqBoatModelConfig) -> None:
        super().__init__(config)
        self.model = SeqBoatModel(config)
        self.head = Head(config.stack(), self.parts, config.num_labels)
        self.post_init()

    def _read(self, inputs: dict[str, Any]) -> BaseModelOutputWithPast:
        out: BaseModelOutputWithPast = self.model(**inputs, use_cache=False, return_dict=True)
        return out


class SeqBoatForSequenceClassification(_WithHead):
    """One answer for a sequence, from the mean over its real tokens, or also their largest values."""

    @property
    def parts(self) -> int:
        """Vectors that the head reads."""
        return 1 if self.config.stack().pool == "mean" else 2

    # losses are means over examples: `Trainer` divides those of micro-batches by their number
    accepts_loss_kwargs = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutput:
        """Score the labels of each sequence; see `SeqBoatModel.forward` for all inputs.

        Args:
            labels: (batch,) classes or values, or (batch, num_labels) of 0 and 1, depending on `config.problem_type`.
            num_items_in_batch: not read: the loss is the mean over these sequences.
        """
        require(
            inputs.get("position_ids") is None,
            "SeqBoatForSequenceClassification takes no packed documents (position_ids): one answer for a sequence",
        )
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        out = self._read(inputs)
        y = out.last_hidden_state
        assert y is not None
        logits = self.head(pool_tokens(y, read_mask(attention_mask, y.shape[1]), self.config.stack().pool))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class SeqBoatForTokenClassification(_WithHead):
    """One class for every token."""

    accepts_loss_kwargs = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **inputs: Any,
    ) -> TokenClassifierOutput:
        """Score the classes of each token; see `SeqBoatModel.forward` for all inputs.

        Args:
            labels: (batch, time) classes; -100 for tokens that are not scored. Padding never is.
            num_items_in_batch: divisor of the summed loss; the number of scored tokens by default.
        """
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        out = self._read(inputs)
        logits = self.head(out.last_hidden_state)
        loss = None
        if labels is not None:
            mask = read_mask(attention_mask, logits.shape[1])
            wanted = labels if mask is None else labels.masked_fill(~mask, IGNORE)
            scores = logits.flatten(0, 1).float()
            total = F.cross_entropy(scores, wanted.flatten(), ignore_index=IGNORE, reduction="sum")
            count = (wanted != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
            loss = total / torch.as_tensor(count, device=total.device).clamp(min=1)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
