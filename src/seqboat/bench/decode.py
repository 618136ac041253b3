"""Decoding token by token: time per token and state size after contexts of different lengths.

Single layers (`run_decode`), and the paper's language model of enwik8 against an equally large Transformer with a
key-value cache (`run_decode_lm`). States are prefilled with random tokens in chunks; every round starts from the same
state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from seqboat.bench.candidates import LOWER_BOUND, PUBLISHED, Candidate, build
from seqboat.bench.measure import Quartiles, available_memory, human_bytes, quartiles, time_rounds
from seqboat.bench.rates import meet_rate
from seqboat.bench.setting import LayerSetting
from seqboat.bench.tables import (
    Column,
    median_text,
    print_machine,
    print_table,
    quartiles_text,
    ratio_text,
)
from seqboat.core.checks import require
from seqboat.core.state import map_state, state_bytes
from seqboat.inference.int8 import float_tensors, quantize
from seqboat.inference.lean import lean_model
from seqboat.layers.gau import GAUConfig
from seqboat.mixers import RecurrentMixer, SeqBoatConfig, TransformerConfig
from seqboat.models.backbone import BackboneConfig, BackboneState
from seqboat.models.cost import count_parameters
from seqboat.models.heads import LanguageModel
from seqboat.ssm.ema import EMAConfig

if TYPE_CHECKING:
    from rich.console import Console

PREFILL = 1024
"""Tokens per chunk of the prefill."""


class DecodeRow(NamedTuple):
    """One candidate, decoding token by token after a context."""

    candidate: str
    context: int
    batch: int
    parameters: int
    seconds: Quartiles
    """per step, which decodes one token of every sequence"""
    tokens_per_second: float
    """of the whole batch"""
    ratio: float
    """time relative to the first candidate at the same context"""
    growth: float
    """time relative to this candidate at the first context"""
    state_bytes: int


COLUMNS = (
    Column("candidate", lambda row: row.candidate),
    Column("context", lambda row: str(row.context)),
    Column("parameters", lambda row: f"{row.parameters:,}"),
    Column("per token", lambda row: median_text(row.seconds)),
    Column("quartiles", lambda row: quartiles_text(row.seconds)),
    Column("tokens/s", lambda row: f"{row.tokens_per_second:.1f}"),
    Column("ratio", lambda row: ratio_text(row.ratio)),
    Column("growth", lambda row: ratio_text(row.growth)),
    Column("state", lambda row: human_bytes(row.state_bytes)),
)
"""Columns of the table."""


def print_decode(console: Console, rows: Sequence[DecodeRow], what: str) -> None:
    """One table of all candidates and contexts."""
    print_machine(console)
    print_table(console, f"decoding, {what}", COLUMNS, rows)


class Decoder(NamedTuple):
    """A state after its context, and a function that decodes from it."""

    parameters: int
    state_bytes: int
    run: Callable[[], Any]
    """decodes the tokens of one round, always from the same state"""


def run_decode(
    candidates: Sequence[Candidate],
    setting: LayerSetting,
    contexts: Sequence[int],
    *,
    steps: int = 64,
    rounds: int = 5,
    warmup: int = 1,
    progress: Callable[[str], None] = lambda message: None,
) -> list[DecodeRow]:
    """Time per token of single layers after contexts of several lengths.

    Args:
        candidates: causal mixers with a state.
        setting: its length is ignored.
        contexts: numbers of tokens to read first.
        steps: tokens per round.
        rounds, warmup, progress: see `run_layers`.
    """
    for candidate in candidates:
        require(
            candidate.name not in (LOWER_BOUND, PUBLISHED), f"{candidate.name} has no state to decode with"
        )
        require(
            not candidate.overrides.get("compiled"),
            f"{candidate.label}: decoding steps cannot be compiled here",
        )
    decoders: dict[tuple[str, int], Decoder] = {}
    for context in contexts:
        for candidate in candidates:
            progress(f"reading {context} tokens with {candidate.label}")
            here = replace(setting, causal=True, length=context)
            _refuse_cache(here)
            layer = build(candidate, here).eval()
            require(isinstance(layer, RecurrentMixer), f"{candidate.label} has no state to decode with")
            assert isinstance(layer, RecurrentMixer)
            decoders[candidate.label, context] = _layer_decoder(layer, here, steps)
    return _time_decoders(decoders, setting, steps, rounds, warmup, progress)


def _refuse_cache(setting: LayerSetting) -> None:
    """Reject a context if two copies of its keys and values do not fit in memory."""
    need = 4 * setting.tokens * setting.d_model * getattr(torch, setting.dtype).itemsize
    free = available_memory(setting.device)
    require(
        need <= free,
        f"decoding after {setting.length} tokens would need about {human_bytes(need)} for keys and values, "
        f"{human_bytes(free)} are available",
    )


@torch.inference_mode()
def _layer_decoder(layer: RecurrentMixer, setting: LayerSetting, steps: int) -> Decoder:
    generator = torch.Generator().manual_seed(setting.seed)
    dtype = getattr(torch, setting.dtype)

    def draw(count: int) -> Tensor:
        shape = (setting.batch, count, setting.d_model)
        return torch.randn(shape, generator=generator).to(setting.device, dtype)

    state = layer.init_state(setting.batch)
    for begin in range(0, setting.length, PREFILL):
        state = layer(draw(min(PREFILL, setting.length - begin)), None, state).state
    tokens = draw(steps)

    @torch.inference_mode()
    def run() -> None:
        now = map_state(Tensor.clone, state)
        for t in range(steps):
            now = layer.step(tokens[:, t], now, inplace=True).state

    return Decoder(count_parameters(layer), state_bytes(state), run)


def _time_decoders(
    decoders: Mapping[tuple[str, int], Decoder],
    setting: LayerSetting,
    steps: int,
    rounds: int,
    warmup: int,
    progress: Callable[[str], None],
) -> list[DecodeRow]:
    progress(f"decoding {steps} tokens per round, {rounds} rounds")
    named = {f"{label}@{context}": decoder.run for (label, context), decoder in decoders.items()}
    times = time_rounds(named, rounds, warmup, setting.device)
    seconds = {
        key: Quartiles(*(value / steps for value in quartiles(times[f"{key[0]}@{key[1]}"])))
        for key in decoders
    }
    first_label, first_context = next(iter(decoders))
    return [
        DecodeRow(
            candidate=label,
            context=context,
            batch=setting.batch,
            parameters=decoder.parameters,
            seconds=seconds[label, context],
            tokens_per_second=setting.batch / seconds[label, context].median,
            ratio=seconds[label, context].median / seconds[first_label, context].median,
            growth=seconds[label, context].median / seconds[label, first_context].median,
            state_bytes=decoder.state_bytes,
        )
        for (label, context), decoder in decoders.items()
    ]


@dataclass(frozen=True, kw_only=True)
class LanguageModelSize:
    """Size of a byte-level language model; the defaults are the paper's for enwik8."""

    num_layers: int = 14
    d_model: int = 616
    d_z: int = 128
    d_v: int = 1232
    d_state: int = 16
    window: int = 1024
    heads: int = 11
    vocab: int = 256


def run_decode_lm(
    size: LanguageModelSize | None = None,
    *,
    context: int = 8192,
    rate: float | None = 0.5,
    steps: int = 16,
    rounds: int = 5,
    warmup: int = 1,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> list[DecodeRow]:
    """Decoding speed of a SeqBoat language model and of an equally large Transformer with a cache.

    The Transformer is Llama from transformers if that library is installed, else ours. Both read the same random
    tokens and then decode greedily with batch size 1.

    Args:
        size: of the model.
        context: number of tokens to read first.
        rate: activation rate to force; None for the decisions of the untrained routers.
        steps: tokens per round.
        rounds, warmup, progress: see `run_layers`.
        seed: of weights and tokens.
    """
    size = size or LanguageModelSize()
    torch.manual_seed(seed)
    prompt = torch.randint(0, size.vocab, (1, context + steps))
    gau = GAUConfig(d_z=size.d_z, d_v=size.d_v, window=size.window, positions="rotary")
    mixer = SeqBoatConfig(
        ssm=EMAConfig(d_state=size.d_state), gau=gau, causal=True, prenorm=True, init="paper"
    )

    def stack(mixer: Any) -> LanguageModel:
        return LanguageModel(
            BackboneConfig(mixer=mixer, d_model=size.d_model, num_layers=size.num_layers, vocab=size.vocab)
        ).eval()

    ours = stack(mixer)
    count = count_parameters(ours)
    if rate is not None:
        meet_rate(ours, prompt[:, :PREFILL], rate)
    progress(f"reading {context} tokens with seqboat")
    state = _read(ours, prompt[:, :context])
    decoders = {("seqboat", context): _lean_decoder(ours, state, prompt, steps)}
    rounded = copy.deepcopy(ours)
    quantize(rounded)
    decoders["seqboat int8", context] = _lean_decoder(rounded, state, prompt, steps)
    decoders["seqboat general step", context] = _model_decoder(ours, state, prompt, steps)
    try:
        import transformers
    except ImportError:
        progress(f"reading {context} tokens with our Transformer (transformers is not installed)")

        def plain(d_ff: int) -> LanguageModel:
            return stack(
                TransformerConfig(heads=size.heads, d_ff=d_ff, causal=True, prenorm=True, positions="rotary")
            )

        rival = plain(_match(lambda d_ff: count_parameters(plain(d_ff)), count))
        decoders["transformer", context] = _model_decoder(
            rival, _read(rival, prompt[:, :context]), prompt, steps
        )
    else:
        progress(f"reading {context} tokens with transformers {transformers.__version__}")

        def llama(d_ff: int) -> Any:
            config = transformers.LlamaConfig(
                vocab_size=size.vocab,
                hidden_size=size.d_model,
                intermediate_size=d_ff,
                num_hidden_layers=size.num_layers,
                num_attention_heads=size.heads,
                num_key_value_heads=size.heads,
                max_position_embeddings=context + steps,
                tie_word_embeddings=True,
            )
            return transformers.LlamaForCausalLM(config).eval()

        rival = llama(_match(lambda d_ff: count_parameters(llama(d_ff)), count))
        decoders["llama", context] = _llama_decoder(rival, transformers.DynamicCache, prompt, steps)
    return _time_decoders(decoders, LayerSetting(batch=1), steps, rounds, warmup, progress)


def _match(count: Callable[[int], int], wanted: int) -> int:
    """The feed-forward width at which a model has about the wanted number of parameters."""
    small, large = count(8), count(16)
    return max(8, 8 + round((wanted - small) / ((large - small) / 8)))


@torch.inference_mode()
def _read(model: LanguageModel, prompt: Tensor) -> BackboneState:
    state = model.init_state(1)
    for piece in prompt.split(PREFILL, dim=1):
        state = model(piece, None, state).state
    return state


def _lean_decoder(model: LanguageModel, state: BackboneState, prompt: Tensor, steps: int) -> Decoder:
    lean = lean_model(model)
    assert lean is not None
    lean.join(state)

    def run() -> None:
        # later rounds read on: the state has the same size and the step the same cost
        for token in prompt[:, -steps:].unbind(1):
            lean.step(token)

    return Decoder(count_numbers(model), state_bytes(state), run)


@torch.inference_mode()
def _model_decoder(model: LanguageModel, state: BackboneState, prompt: Tensor, steps: int) -> Decoder:
    @torch.inference_mode()
    def run() -> None:
        now = map_state(Tensor.clone, state)
        for token in prompt[:, -steps:].unbind(1):
            now = model.step(token, now, inplace=True).state

    return Decoder(count_parameters(model), state_bytes(state), run)


@torch.inference_mode()
def _llama_decoder(model: Any, cache_class: Any, prompt: Tensor, steps: int) -> Decoder:
    cache = cache_class(config=model.config)
    context = prompt.shape[1] - steps
    for piece in prompt[:, :context].split(PREFILL, dim=1):
        model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    config = model.config
    size = 2 * context * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize

    @torch.inference_mode()
    def run() -> None:
        for token in prompt[:, -steps:].unbind(1):
            model(token[:, None], past_key_values=cache, use_cache=True)
        cache.crop(-steps)  # the tokens of this round

    return Decoder(count_parameters(model), size, run)


def count_numbers(model: LanguageModel) -> int:
    """Parameters, also where they are stored as int8 codes; their scales do not count."""
    return sum(part.numel() for part in float_tensors(model).values())
