"""Models: a backbone with a head.

- `Classifier`: mean over the real tokens, one hidden layer of width 2 d_model, class scores.
- `Tagger`: class scores for every token, from the same head.
- `Matcher`: two sequences through the same backbone, features [a, b, a * b, a - b].
- `LanguageModel`: next-token scores, with tied embeddings; carries a recurrent state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqboat.core.checks import (
    check_positive,
    require,
)
from seqboat.core.layout import find_layout
from seqboat.core.mixer import Routing
from seqboat.core.nn import init_linear, masked_max, masked_mean
from seqboat.models.backbone import Backbone, BackboneConfig, BackboneState, backbone_config


class ClassifierOutput(NamedTuple):
    """What a classifier, a tagger or a matcher returns."""

    logits: Tensor
    """(batch, classes); of a tagger (batch, time, classes)"""
    routings: tuple[Routing | None, ...]
    """one per layer; of a matcher, those of the first sequence, then those of the second"""


class Head(nn.Module):
    """One hidden layer of width 2 d_model with GELU, unless the configuration has none, then class scores.

    Args:
        config: of the backbone.
        features: how many vectors of width d_model describe an example.
        classes: number of classes.
    """

    def __init__(self, config: BackboneConfig, features: int, classes: int) -> None:
        super().__init__()
        check_positive("classes", classes)
        d_model = config.d_model
        deep = config.head_hidden or features > 1
        self.hidden = nn.Linear(features * d_model, 2 * d_model) if deep else None
        self.out = nn.Linear(2 * d_model if deep else d_model, classes, bias=config.head_bias)
        self.dropout, self.init = config.dropout, config.head_init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: weights as `head_init` says, biases 0."""
        init_linear(self)
        if self.init == "xavier":
            for part in self.children():
                nn.init.xavier_uniform_(part.weight)  # type: ignore[arg-type]
        if self.init == "zero":
            nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is None:
            return self.out(F.dropout(x, self.dropout, self.training))
        hidden = F.dropout(self.hidden(x), self.dropout, self.training)
        return self.out(F.gelu(hidden))


def pool_tokens(y: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """What a head reads of (batch, time, d_model): the mean over real tokens, or also the largest values."""
    mean = masked_mean(y, mask)
    return mean if how == "mean" else torch.cat([mean, masked_max(y, mask)], dim=-1)


def check_exportable(model: nn.Module) -> None:
    """Refuse a model whose answers are not those of its network alone."""
    require(
        getattr(model, "offset", None) is None,
        "the answers of this model begin with those of a baseline, which has no other form: train it with "
        "--set baseline=false",
    )


def _add(logits: Tensor, offset: nn.Module | None, inputs: Tensor, mask: Tensor | None) -> Tensor:
    return logits if offset is None else logits + offset(inputs, mask)


class Classifier(nn.Module):
    """One label for a sequence.

    Args:
        config: every setting as one `BackboneConfig`.
        classes: number of classes.
        options: settings by name: fields of `BackboneConfig` and of the mixer, which may be a name in MIXERS.

    Calling it with token ids or real values returns a `ClassifierOutput` with logits of shape (batch, classes).
    """

    def __init__(self, config: BackboneConfig | None = None, classes: int = 2, **options: Any) -> None:
        super().__init__()
        config = backbone_config(config, options, self)
        self.backbone = Backbone(config)
        self.head = Head(config, 1 if config.pool == "mean" else 2, classes)
        self.offset: nn.Module | None = None
        """scores of the same inputs and mask that are added"""

    def forward(
        self, inputs: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> ClassifierOutput:
        """Class scores of token ids or real values (batch, time); of packed documents, (documents, classes)."""
        out = self.backbone(inputs, mask, cu_seqlens=cu_seqlens)
        pool = self.backbone.config.pool
        if cu_seqlens is None:
            logits = self.head(pool_tokens(out.y, mask, pool))
            return ClassifierOutput(_add(logits, self.offset, inputs, mask), out.routings)
        require(self.offset is None, "packed documents need a model without an offset")
        layout = find_layout(inputs, mask, cu_seqlens)
        documents = layout.documents
        assert documents is not None
        pooled = pool_tokens(documents.spread(layout.pull(out.y)), documents.real, pool)
        return ClassifierOutput(self.head(pooled), out.routings)


class Tagger(nn.Module):
    """One label for every token: with the tokens on both sides, or where the mixer is causal with those before.

    Args:
        config: every setting as one `BackboneConfig`.
        classes: number of classes.
        options: settings by name: fields of `BackboneConfig` and of the mixer, which may be a name in MIXERS.

    Calling it with token ids or real values returns a `ClassifierOutput` with logits of shape (batch, time, classes).
    """

    def __init__(self, config: BackboneConfig | None = None, classes: int = 2, **options: Any) -> None:
        super().__init__()
        config = backbone_config(config, options, self)
        self.backbone = Backbone(config)
        self.head = Head(config, 1, classes)
        self.offset: nn.Module | None = None
        """scores of the same inputs and mask that are added"""

    def forward(
        self, inputs: Tensor, mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> ClassifierOutput:
        """Class scores (batch, time, classes) of token ids or real values (batch, time)."""
        out = self.backbone(inputs, mask, cu_seqlens=cu_seqlens)
        return ClassifierOutput(_add(self.head(out.y), self.offset, inputs, mask), out.routings)


class Matcher(nn.Module):
    """One label for a pair of sequences.

    Args:
        config: every setting as one `BackboneConfig`.
        classes: number of classes.
        options: settings by name: fields of `BackboneConfig` and of the mixer, which may be a name in MIXERS.

    Calling it with two batches of sequences returns a `ClassifierOutput` with logits of shape (batch, classes).
    """

    def __init__(self, config: BackboneConfig | None = None, classes: int = 2, **options: Any) -> None:
        super().__init__()
        config = backbone_config(config, options, self)
        self.backbone = Backbone(config)
        self.head = Head(config, 4, classes)

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        first_mask: Tensor | None = None,
        second_mask: Tensor | None = None,
    ) -> ClassifierOutput:
        """Class scores of pairs (batch, time) and (batch, other time)."""
        require(
            first.shape[:1] == second.shape[:1],
            f"first and second must hold the same number of sequences, got {first.shape[0]} and {second.shape[0]}",
        )
        one = self.backbone(first, first_mask)
        two = self.backbone(second, second_mask)
        a, b = masked_mean(one.y, first_mask), masked_mean(two.y, second_mask)
        logits = self.head(torch.cat([a, b, a * b, a - b], dim=-1))
        return ClassifierOutput(logits, one.routings + two.routings)


class LanguageModelOutput(NamedTuple):
    """What a language model returns."""

    logits: Tensor
    """(batch, time, vocab): scores of the token after each token; (batch, vocab) from `step`"""
    state: BackboneState
    """after the last real token"""
    routings: tuple[Routing | None, ...]
    """one per layer"""


class LanguageModel(nn.Module):
    """Scores the next token, with tied input and output embeddings.

    Args:
        config: every setting as one `BackboneConfig`.
        options: settings by name: fields of `BackboneConfig` and of the mixer, which may be a name in MIXERS.

    Calling it with token ids (batch, time) returns a `LanguageModelOutput` with logits of shape (batch, time, vocab)
    and the state after the last token; `step` takes one token per sequence.

    >>> import torch
    >>> from seqboat import LanguageModel
    >>> model = LanguageModel(vocab=256, d_model=16, num_layers=2, window=32)
    >>> out = model(torch.randint(0, 256, (1, 50)))
    >>> token = out.logits[:, -1].argmax(dim=-1)
    >>> model.step(token, out.state).logits.shape
    torch.Size([1, 256])
    """

    def __init__(self, config: BackboneConfig | None = None, **options: Any) -> None:
        super().__init__()
        config = backbone_config(config, options, self, causal=True)
        require(config.vocab is not None, "a language model needs a vocab, got None")
        self.backbone = Backbone(config)
        require(self.backbone.causal, "a language model needs causal mixers: set causal=True")

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        state: BackboneState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> LanguageModelOutput:
        """Scores after every token of (batch, time); pass the state back to continue the sequences.

        With `cu_seqlens` the tokens are packed documents, see `Backbone.forward`: no score depends on an earlier
        document, and the target of a document's last token is not the next document's first.
        """
        out = self.backbone(tokens, mask, state, cu_seqlens=cu_seqlens)
        return LanguageModelOutput(self._score(out.y), out.state, out.routings)

    def init_state(self, batch: int) -> BackboneState:
        """The state before the first token."""
        return self.backbone.init_state(batch)

    def step(self, tokens: Tensor, state: BackboneState) -> LanguageModelOutput:
        """Scores after one more token (batch,) per sequence; overwrites the state, and returns it."""
        out = self.backbone.step(tokens, state)
        assert out.state is not None
        return LanguageModelOutput(self._score(out.y), out.state, out.routings)

    def _score(self, y: Tensor) -> Tensor:
        embedding: Any = self.backbone.embedding
        # int8 weights have a product of their own
        return embedding.multiply(y) if hasattr(embedding, "multiply") else F.linear(y, embedding.weight)
