"""Models for Hugging Face transformers: importing this registers them with the Auto classes.

    import seqboat.hf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = AutoTokenizer.from_pretrained("exported")

`seqboat export --to hf RUN DIR` writes such a folder; docs/transformers.md says what works and what does not.
"""

from seqboat.core.extras import missing

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(missing("transformers", "seqboat.hf"), name=error.name) from error

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from seqboat.hf.cache import SeqBoatCache
from seqboat.hf.configuration import SeqBoatModelConfig
from seqboat.hf.heads import SeqBoatForSequenceClassification, SeqBoatForTokenClassification
from seqboat.hf.model import SeqBoatForCausalLM, SeqBoatModel
from seqboat.hf.tokenizer import byte_tokenizer

AutoConfig.register("seqboat", SeqBoatModelConfig)
AutoModel.register(SeqBoatModelConfig, SeqBoatModel)
AutoModelForCausalLM.register(SeqBoatModelConfig, SeqBoatForCausalLM)
AutoModelForSequenceClassification.register(SeqBoatModelConfig, SeqBoatForSequenceClassification)
AutoModelForTokenClassification.register(SeqBoatModelConfig, SeqBoatForTokenClassification)
AutoTokenizer.register(SeqBoatModelConfig, fast_tokenizer_class=PreTrainedTokenizerFast)

SeqBoatConfig = SeqBoatModelConfig
"""The former name; `seqboat.SeqBoatConfig` is the configuration of a layer."""

__all__ = [
    "SeqBoatCache",
    "SeqBoatConfig",
    "SeqBoatForCausalLM",
    "SeqBoatForSequenceClassification",
    "SeqBoatForTokenClassification",
    "SeqBoatModel",
    "SeqBoatModelConfig",
    "byte_tokenizer",
]
