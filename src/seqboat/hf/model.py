"""The core's models as models of transformers: the same numbers behind the library's calling conventions.

    SeqBoatModel          the stack: last_hidden_state and a cache
    SeqBoatForCausalLM    scores of the next token; `generate`

`seqboat.hf.heads` has the models that answer for a sequence or for its tokens. For every mixer, padding may be
anywhere (attention_mask marks it) and does not affect real tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from seqboat.core.checks import check_dtype, require
from seqboat.core.layout import find_layout
from seqboat.core.mixer import MixerOutput
from seqboat.hf.cache import SeqBoatCache
from seqboat.hf.configuration import SeqBoatModelConfig
from seqboat.hf.weights import build_backbone, check_weights, loading, write_checksums
from seqboat.models.backbone import Backbone

IGNORE = -100
"""The label of what is not scored."""


@contextmanager
def keep_hidden(backbone: Backbone, kept: list[Tensor]) -> Iterator[None]:
    """Append the input of the first layer and the output of every layer, real tokens first in each sequence."""

    def keep_input(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        kept.append(inputs[0])

    def keep_output(_: nn.Module, __: Any, output: MixerOutput) -> None:
        kept.append(output.y)

    handles = [backbone.layers[0].register_forward_pre_hook(keep_input)]
    handles += [layer.register_forward_hook(keep_output) for layer in backbone.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def read_vectors(backbone: Backbone, vectors: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
    """Make a backbone read these vectors instead of its embeddings; yields the ids to call it with.

    Args:
        backbone: reads tokens.
        vectors: (batch, time, d_model), as its embedding returns them.
        mask: (batch, time), True on real tokens.
    """
    weight = backbone.embedding.weight
    shape = tuple(vectors.shape)
    require(
        vectors.dim() == 3 and vectors.shape[2] == weight.shape[1],
        f"inputs_embeds must have shape (batch, time, {weight.shape[1]}), got {shape}",
    )
    check_dtype(vectors, weight, "inputs_embeds", "model")
    first = vectors if mask is None else find_layout(vectors, mask).pull(vectors)
    handle = backbone.embedding.register_forward_hook(lambda *_: first)
    try:
        yield torch.zeros(shape[:2], dtype=torch.int64, device=vectors.device)
    finally:
        handle.remove()


def read_mask(attention_mask: Tensor | None, time: int) -> Tensor | None:
    """The (batch, time) bool mask of the current tokens, from the last columns of the library's mask."""
    if attention_mask is None:
        return None
    return attention_mask[:, attention_mask.shape[1] - time :] != 0


def check_attention_mask(attention_mask: Tensor | None, batch: int, time: int, past: int) -> None:
    """Reject a mask that covers neither the current tokens nor, as in `generate`, the cache plus them."""
    if attention_mask is None:
        return
    shape, fits = tuple(attention_mask.shape), [(batch, time), (batch, past + time)]
    require(
        shape in fits,
        f"attention_mask must have shape {' or '.join(str(s) for s in dict.fromkeys(fits))}, got {shape}",
    )


def document_starts(position_ids: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """(batch, time): True on tokens at position 0, which begin a document; None without positions."""
    if position_ids is None:
        return None
    starts = position_ids == 0
    return starts if mask is None else starts & mask


def document_borders(starts: Tensor | None, continues: bool) -> Tensor | None:
    """cu_seqlens from the tokens that begin a document; None if every sequence is one, as it is without packing.

    Args:
        starts: from `document_starts`.
        continues: whether there is a state to continue from.
    """
    if starts is None:
        return None
    batch, time = starts.shape
    if not continues:
        # padding may come before the first document
        if not bool((starts.sum(dim=1) > 1).any()):
            return None
    elif not bool(starts.any()):
        return None
    rows = torch.arange(batch + 1, device=starts.device) * time
    return torch.cat([rows, starts.flatten().nonzero().squeeze(1)]).sort().values


def next_token_loss(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    num_items_in_batch: Tensor | int | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of each token given those before it, in at least float32; 0 if nothing is scored.

    Neither padding, nor the token after padding, nor the first token of a document is scored, whatever their labels:
    the loss of a sequence does not depend on where it is padded or packed.

    Args:
        logits: (batch, time, vocab).
        labels: (batch, time), usually the inputs; IGNORE for tokens that are not scored.
        mask: (batch, time), True on real tokens.
        num_items_in_batch: divisor of the sum; the number of scored tokens by default.
        starts: (batch, time), True on the first tokens of packed documents.
    """
    require(
        labels.shape == logits.shape[:2],
        f"labels must have shape {tuple(logits.shape[:2])}, got {tuple(labels.shape)}",
    )
    targets = labels[:, 1:]
    if mask is not None:
        targets = torch.where(mask[:, 1:] & mask[:, :-1], targets, IGNORE)
    if starts is not None:
        targets = torch.where(starts[:, 1:], IGNORE, targets)
    scores = logits[:, :-1].flatten(0, 1)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    total = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    count = (targets != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
    return total / torch.as_tensor(count, device=total.device).clamp(min=1)


class SeqBoatPreTrainedModel(PreTrainedModel):
    """The common part of the models: loading, saving, initial values of weights that a file lacks."""

    config_class = SeqBoatModelConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    # not split over devices: the state stays with its weights
    _no_split_modules = ["SeqBoatModel"]  # noqa: RUF012 - the library's own spelling
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # a state cannot be rewound to an earlier token
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initial values of a new head and of new embedding rows; other modules initialize themselves.

        Linear       N(0, 0.02), truncated at two standard deviations, biases 0
        Embedding    N(0, 1 / hidden_size)
        """
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Like the library's, but strict: local weights are verified, and no weight of the stack may be missing."""
        place, size = pretrained_model_name_or_path, None
        kwargs["trust_remote_code"] = False
        if place is not None and Path(place).is_dir():
            size = check_weights(Path(place) / (kwargs.get("subfolder") or ""))
        with loading(size):
            model, info = super().from_pretrained(place, *args, output_loading_info=True, **kwargs)
        # a head may be new, as in fine-tuning
        missing = sorted(key for key in info["missing_keys"] if not key.startswith("head."))
        require(
            not missing,
            f"{place} does not hold the weights of this {cls.__name__}: {len(missing)} are missing, "
            f"{missing[0] if missing else ''} first",
        )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        """Like the library's, but also writes the sha256 of the weights."""
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            write_checksums(Path(save_directory))

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.backbone.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        backbone = self.base_model.backbone
        backbone.embedding = value
        backbone.config = dataclasses.replace(backbone.config, vocab=value.weight.shape[0])


class SeqBoatModel(SeqBoatPreTrainedModel):
    """The stack without a head."""

    def __init__(self, config: SeqBoatModelConfig) -> None:
        super().__init__(config)
        # the library builds models on the meta device before loading, but some mixers draw random numbers when built
        meta = torch.get_default_device().type == "meta"
        with torch.device("cpu") if meta else nullcontext():
            self.backbone = build_backbone(config.stack())
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: SeqBoatCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        input_values: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> BaseModelOutputWithPast:
        """Run the stack.

        Args:
            input_ids: (batch, time).
            attention_mask: (batch, time), or (batch, cached + time); 1 on real tokens.
            past_key_values: the cache to continue from, updated in place.
            inputs_embeds: (batch, time, hidden_size) instead of input_ids.
            use_cache: whether to return a cache; only causal models have one.
            output_hidden_states: whether to return the inputs and outputs of all layers.
            output_attentions: not supported: no layer has a (time, time) matrix.
            input_values: (batch, time, channels) instead of input_ids, for models that read real values.
            position_ids: (batch, time); every token at position 0 begins a packed document, which is computed as if
                it were alone. Other values are not read: positions follow from the order of the tokens.
        """
        ids = self.config.channels is None
        given = [x for x in (input_ids, inputs_embeds, input_values) if x is not None]
        require(
            len(given) == 1 and (input_values is None) == ids,
            "exactly one of input_ids and inputs_embeds must be given"
            if ids
            else "input_values must be given",
        )
        require(
            not (output_attentions or self.config.output_attentions),
            "output_attentions is not supported: there is no (time, time) matrix of attention",
        )
        inputs = given[0]
        batch, time = inputs.shape[:2]
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        cache = self._cache(past_key_values, use_cache)
        past = 0 if cache is None else cache.get_seq_length()
        check_attention_mask(attention_mask, batch, time, past)
        mask = read_mask(attention_mask, time)
        cu_seqlens = self._borders(position_ids, mask, (batch, time), past > 0)
        require(
            cu_seqlens is None or (inputs_embeds is None and not hidden),
            "packed documents (position_ids) need input_ids or input_values, and no output_hidden_states",
        )
        whole = None if cache is None else cache.whole
        single = time == 1 and not (inputs_embeds is not None or hidden or self.training)
        single = single and cu_seqlens is None and past > 0
        if single and whole is not None and (mask is None or bool(mask.all())):
            found = whole.step(self.backbone, inputs[:, 0])
            if found is not None:
                return BaseModelOutputWithPast(last_hidden_state=found[:, None], past_key_values=cache)
        kept: list[Tensor] = []
        state = None if whole is None else whole.state
        with ExitStack() as changed:
            if inputs_embeds is not None:
                inputs = changed.enter_context(read_vectors(self.backbone, inputs_embeds, mask))
            if hidden:
                changed.enter_context(keep_hidden(self.backbone, kept))
            out = self.backbone(inputs, mask, state, cu_seqlens=cu_seqlens)
        if whole is not None and out.state is not None:
            whole.put(out.state, time)
        return BaseModelOutputWithPast(
            last_hidden_state=out.y,
            past_key_values=None if out.state is None else cache,
            hidden_states=self._hidden(kept, mask, out.y) if hidden else None,
        )

    @staticmethod
    def _borders(
        position_ids: Tensor | None, mask: Tensor | None, shape: tuple[int, int], continues: bool
    ) -> Tensor | None:
        if position_ids is None:
            return None
        found = tuple(position_ids.shape)
        require(found in (shape, (1, shape[1])), f"position_ids must have shape {tuple(shape)}, got {found}")
        return document_borders(document_starts(position_ids.expand(shape), mask), continues)

    def _cache(self, given: SeqBoatCache | None, use_cache: bool | None) -> SeqBoatCache | None:
        wanted = self.config.use_cache if use_cache is None else use_cache
        if given is None:
            return SeqBoatCache() if wanted and self.backbone.causal else None
        require(
            isinstance(given, SeqBoatCache),
            f"past_key_values must be a SeqBoatCache, as the model returns it; got {type(given).__name__}",
        )
        return given

    @staticmethod
    def _hidden(kept: list[Tensor], mask: Tensor | None, last: Tensor) -> tuple[Tensor, ...]:
        # a second stream may run in front of the sequence
        inner = [part[:, part.shape[1] - last.shape[1] :] for part in kept[:-1]]
        if mask is not None:
            layout = find_layout(last, mask)
            inner = [layout.push(part) for part in inner]
        # by the library's convention, the last one is the input of the head
        return (*inner, last)


class SeqBoatForCausalLM(SeqBoatPreTrainedModel, GenerationMixin):
    """Scores the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.backbone.embedding.weight"}  # noqa: RUF012
    # the loss takes num_items_in_batch: accumulated micro-batches average over tokens
    accepts_loss_kwargs = True

    def __init__(self, config: SeqBoatModelConfig) -> None:
        super().__init__(config)
        self.model = SeqBoatModel(config)
        require(self.model.backbone.causal, "a language model needs causal mixers: set causal in mixer")
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size or 0, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # the model keeps a state, not the keys and values of all tokens
        return False

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        # meant for stopping criteria, but `generate` passes it on
        kwargs.pop("tokenizer", None)
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        # positions follow from the state; prompts are not packed
        inputs.pop("position_ids", None)
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        # not earlier: by now the library has computed the mask, and dropped it if nothing is padded
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            require(
                bool((mask[:, -1] != 0).all()),
                "generate needs every sequence to end with a real token: pad on the left (padding_side='left')",
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = SeqBoatCache()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: SeqBoatCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        position_ids: Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        """Score the token after each token; see `SeqBoatModel.forward`.

        Args:
            labels: (batch, time), usually the inputs; -100 for tokens that are not scored. They are shifted here.
            logits_to_keep: compute logits only for this many last tokens, or for the tokens at these indices; 0 for
                all.
            num_items_in_batch: divisor of the summed loss; the number of scored tokens by default.
        """
        out = self.model(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            position_ids=position_ids,
            return_dict=True,
        )
        y = out.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            y = y[:, logits_to_keep]
        elif logits_to_keep:
            y = y[:, -logits_to_keep:]
        logits = self.lm_head(y)
        loss = None
        if labels is not None:
            require(
                not isinstance(logits_to_keep, Tensor) and not logits_to_keep,
                "labels need the logits of all tokens: leave logits_to_keep at 0",
            )
            mask = read_mask(attention_mask, y.shape[1])
            starts = document_starts(position_ids, mask)
            loss = next_token_loss(logits, labels, mask, num_items_in_batch, starts)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
        )
