"""The configuration of a model for transformers: that of the backbone, with the library's field names."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from seqboat.layers.seqboat import SeqBoatConfig
from seqboat.models.backbone import BackboneConfig, MixerConfig
from seqboat.training.settings_io import part_from_dict, to_dict


class SeqBoatModelConfig(PreTrainedConfig):
    """A stack of mixers over a vocabulary.

    A mixer is given by its configuration or as a dictionary with its `name` (`seqboat paper list mixers`); fields
    that the dictionary lacks get their defaults, and all fields are stored.
    """

    model_type = "seqboat"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - the library's own spelling

    vocab_size: int = 256
    """Number of token ids."""
    channels: int | None = None
    """Channels of real-valued inputs; None for models that read token ids."""
    input_facts: dict[str, Any] | None = None
    """How real-valued inputs were normalized before training: mean, std, gaps and the like."""
    hidden_size: int = 128
    """Width of the model."""
    num_hidden_layers: int = 4
    """Number of layers."""
    mixer: dict[str, Any] | None = None
    """The layer that is stacked; a causal SeqBoat layer by default."""
    scaled_embedding: bool = False
    """Whether to multiply token embeddings by sqrt(hidden_size)."""
    absolute_positions: bool | None = None
    """Whether to add sinusoidal positions with a learned scale to the inputs; None: if the mixer needs them."""
    dropout: float = 0.0
    """Dropout rate on the input of the first layer; mixers have separate rates."""
    final_norm_affine: bool = True
    """Whether the norm that a pre-norm stack ends with has a learned scale and shift."""
    head_hidden: bool = True
    """Whether the head of a classifier has a hidden layer."""
    head_bias: bool = True
    """Whether the class scores of a classifier have a bias."""
    head_init: str = "normal"
    """Initial weights of a classifier's head: "normal" or "xavier"."""
    use_cache: bool = True
    """Whether causal models return their state."""
    tie_word_embeddings: bool = True
    """Whether the embedding also scores the next token."""
    pad_token_id: int | None = None
    """Token that pads finished sequences; attention_mask marks padding."""
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    """Token that ends generation; models of plain text have none."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        mixer: Any = self.mixer
        if mixer is None:
            mixer = SeqBoatConfig(causal=True)
        if not dataclasses.is_dataclass(mixer):
            mixer = part_from_dict(MixerConfig, mixer, "mixer")
        # store every field: a default that changes later must not change this model
        self.mixer = to_dict(mixer, MixerConfig)
        self.backbone()

    @classmethod
    def from_backbone(cls, config: BackboneConfig, **changes: Any) -> SeqBoatModelConfig:
        """The configuration of a backbone.

        Args:
            config: of the backbone.
            changes: further fields, such as num_labels.
        """
        real = config.vocab is None
        return cls(
            vocab_size=256 if config.vocab is None else config.vocab,
            channels=config.channels if real else None,
            hidden_size=config.d_model,
            num_hidden_layers=config.num_layers,
            mixer=to_dict(config.mixer, MixerConfig),
            scaled_embedding=config.scaled_embedding,
            absolute_positions=config.absolute_positions,
            dropout=config.dropout,
            final_norm_affine=config.final_norm_affine,
            head_hidden=config.head_hidden,
            head_bias=config.head_bias,
            head_init=config.head_init,
            **changes,
        )

    def backbone(self) -> BackboneConfig:
        """The configuration of the backbone; a ValueError names the field that does not fit."""
        return BackboneConfig(
            mixer=part_from_dict(MixerConfig, self.mixer or {}, "mixer"),
            d_model=self.hidden_size,
            num_layers=self.num_hidden_layers,
            vocab=self.vocab_size if self.channels is None else None,
            channels=1 if self.channels is None else self.channels,
            scaled_embedding=self.scaled_embedding,
            absolute_positions=self.absolute_positions,
            dropout=self.dropout,
            final_norm_affine=self.final_norm_affine,
            head_hidden=self.head_hidden,
            head_bias=self.head_bias,
            head_init=self.head_init,  # type: ignore[arg-type]
        )
