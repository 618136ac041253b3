"""Decoding token by token: time per token and state size after contexts of different lengths.

States are prefilled with random tokens in chunks; every round starts from the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqboat.bench.cost import count_parameters
from seqboat.bench.layers import (
    Column,
    median_text,
    print_machine,
    print_table,
    quartiles_text,
    ratio_text,
)
from seqboat.bench.measure import Quartiles, available_memory, quartiles, time_rounds
from seqboat.bench.setting import LOWER_BOUND, PUBLISHED, Candidate, LayerSetting, build
from seqboat.console import format_bytes
from seqboat.core.checks import require
from seqboat.core.mixer import Mixer
from seqboat.core.state import map_state, state_bytes

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
    Column("state", lambda row: format_bytes(row.state_bytes)),
)
"""Columns of the table."""


def print_decode(rows: Sequence[DecodeRow]) -> None:
    """One table of all candidates and contexts."""
    print_machine()
    print_table("decoding, one layer", COLUMNS, rows)


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
            require(layer.decodes, f"{candidate.label} has no state to decode with")
            assert isinstance(layer, Mixer)
            decoders[candidate.label, context] = _layer_decoder(layer, here, steps)
    return _time_decoders(decoders, setting, steps, rounds, warmup, progress)


def _refuse_cache(setting: LayerSetting) -> None:
    """Reject a context if two copies of its keys and values do not fit in memory."""
    need = 4 * setting.tokens * setting.d_model * getattr(torch, setting.dtype).itemsize
    free = available_memory(setting.device)
    require(
        need <= free,
        f"decoding after {setting.length} tokens would need about {format_bytes(need)} for keys and values, "
        f"{format_bytes(free)} are available",
    )


@torch.inference_mode()
def _layer_decoder(layer: Mixer, setting: LayerSetting, steps: int) -> Decoder:
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
            layer.step(tokens[:, t], now)

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
