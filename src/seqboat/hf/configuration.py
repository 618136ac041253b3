"""The configuration of a model for transformers: that of the backbone, and what the library asks for."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from seqboat.core.checks import require
from seqboat.models.backbone import BackboneConfig
from seqboat.training.settings_io import part_from_dict, to_dict


class SeqBoatModelConfig(PreTrainedConfig):
    """A stack of mixers that reads token ids or real values; a causal stack of SeqBoat layers by default.

    >>> SeqBoatModelConfig(backbone={"mixer": {"name": "mega", "causal": True}, "d_model": 64}).hidden_size
    64
    """

    model_type = "seqboat"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - the library's own spelling

    backbone: dict[str, Any] | None = None
    """The settings of the stack; those that are missing get their defaults, and all are stored."""
    input_facts: dict[str, Any] | None = None
    """How real-valued inputs were normalized before training: mean, std, gaps and the like."""
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
        require("mixer" not in kwargs, "config.json is that of an earlier version: export the run again")
        given = {"vocab": 256} if self.backbone is None else self.backbone
        if "mixer" not in given:
            given = {**given, "mixer": {"name": "seqboat", "causal": True}}
        # store every field: a default that changes later must not change this model
        self.backbone = to_dict(part_from_dict(BackboneConfig, given, "backbone"))
        # what a configuration of another model says besides
        for name in ("vocab_size", "channels", "hidden_size", "num_hidden_layers"):
            kwargs.pop(name, None)
        super().__post_init__(**kwargs)

    @classmethod
    def from_backbone(cls, config: BackboneConfig, **changes: Any) -> SeqBoatModelConfig:
        """The configuration of a backbone.

        Args:
            config: of the backbone.
            changes: further fields, such as num_labels.
        """
        return cls(backbone=to_dict(config), **changes)

    def stack(self) -> BackboneConfig:
        """The configuration of the backbone."""
        found: BackboneConfig = part_from_dict(BackboneConfig, self.backbone, "backbone")
        return found

    def _get(self, name: str) -> Any:
        return None if self.backbone is None else self.backbone[name]

    # names that the library reads

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None for models of real values."""
        size: int | None = self._get("vocab")
        return size

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        assert self.backbone is not None
        self.backbone = {**self.backbone, "vocab": size}

    @property
    def channels(self) -> int | None:
        """Channels of real-valued inputs; None for models that read token ids."""
        return None if self.vocab_size is not None else self._get("channels")

    @property
    def hidden_size(self) -> int:
        """Width of the model."""
        size: int = self._get("d_model")
        return size

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        count: int = self._get("num_layers")
        return count
