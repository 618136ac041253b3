"""`seqboat bench`: time and memory of mixers, side by side in one run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from seqboat.cli.main import UsageError
from seqboat.cli.parser import Count, Size

LAYERS = (
    "seqboat",
    "published",
    "mega-chunk",
    "transformer",
    "lower-bound",
)
DECODERS = ("seqboat", "mega-chunk", "transformer")


def run(
    what: Literal["layer", "decode"] = "layer",
    *,
    mixers: tuple[str, ...] = (),
    preset: Literal["text", "enwik8"] = "text",
    length: Count | None = None,
    window: Count | None = None,
    rate: str = "0.5",
    batch: Count | None = None,
    modes: tuple[Literal["training", "inference"], ...] = (),
    context: tuple[Count, ...] = (),
    steps: Count | None = None,
    rounds: Count = 5,
    warmup: Size = 1,
    threads: Count | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    seed: int = 0,
    no_memory: bool = False,
    json: Path | None = None,
) -> int:
    """Measure time and memory of layers side by side in one run, or of decoding token by token.

    Args:
        what: a training step and inference of a layer, or token by token.
        mixers: NAME or NAME:FIELD=VALUE,... compared with the first one; any mixer has d_model and compiled.
        preset: sizes of the layer.
        length: tokens per sequence.
        window: size of the working memory.
        rate: fraction of tokens to activate, or natural to let the routers decide.
        batch: sequences per batch (default: keeps the number of tokens constant).
        modes: what to measure of a layer (default: both).
        context: decode: tokens of context.
        steps: decode: tokens per round.
        rounds: timed rounds.
        warmup: rounds before these.
        threads: of the CPU (default: torch decides).
        device: cpu, cuda or cuda:N.
        dtype: type of weights and inputs.
        seed: of weights and inputs.
        no_memory: do not measure memory.
        json: write all measurements to a file.

    examples:
      seqboat bench                                         the paper's Text layer and all baselines
      seqboat bench --mixers seqboat --rate 0.1             how cost falls with the fraction of active tokens
      seqboat bench --mixers seqboat seqboat:gau.window=64 published lower-bound
    """
    if json is not None and not (json.parent.is_dir() and os.access(json.parent, os.W_OK)):
        raise UsageError(f"--json: cannot write to the folder {json.parent}")
    for name, value in {"length": length, "modes": modes}.items() if what == "decode" else ():
        if value:
            raise UsageError(f"--{name} cannot be used with 'decode'")
    if what == "layer" and (context or steps):
        raise UsageError("--context and --steps need 'decode'")
    active = _rate(rate)
    from dataclasses import replace

    import torch

    from seqboat.bench.decode import print_decode, run_decode
    from seqboat.bench.layers import print_layers, run_layers
    from seqboat.bench.measure import as_record
    from seqboat.bench.setting import MODES, PRESETS, parse_candidate
    from seqboat.data.files import write_json

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: torch sees no CUDA device")
    if threads:
        torch.set_num_threads(threads)
    usual = PRESETS[preset]
    size = length or usual.length
    setting = replace(
        usual,
        length=size,
        batch=batch or max(1, usual.tokens // size),
        window=window or usual.window,
        rate=active,
        device=device,
        dtype=dtype,
        seed=seed,
    )
    if what == "decode":
        setting = replace(setting, batch=batch or 1, causal=True)
    names = mixers or (DECODERS if what == "decode" else _default_layers())
    candidates = [parse_candidate(text) for text in names]
    if len({candidate.label for candidate in candidates}) < len(candidates):
        raise UsageError("--mixers: the same candidate is given twice")
    turns: Any = {"rounds": rounds, "warmup": warmup, "progress": _show_step}
    found: Sequence[Any]
    if what == "decode":
        contexts = context or (1024, 8192, 32768)
        found = tokens = run_decode(candidates, setting, contexts, steps=steps or 64, **turns)
        _show_step("")
        print_decode(tokens)
    else:
        chosen = tuple(mode for mode in MODES if mode in (modes or MODES))
        found = layers = run_layers(candidates, setting, chosen, memory=not no_memory, **turns)
        _show_step("")
        print_layers(layers, setting)
    if json is not None:
        write_json(json, as_record(found, setting, what=what, rounds=rounds))
        print(f"wrote {json}")
    return 0


def _rate(text: str) -> float | None:
    if text == "natural":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise UsageError(f"--rate must be a number from 0 to 1 or 'natural', got {text!r}")
    return rate


def _default_layers() -> Sequence[str]:
    """The usual candidates, without the published algorithm where this installation does not have it."""
    from seqboat.bench import setting

    if setting.PUBLISHED_SOURCE.is_file():
        return LAYERS
    print("skipping 'published', which needs a clone of the repository", file=sys.stderr)
    return tuple(name for name in LAYERS if name != setting.PUBLISHED)


def _show_step(message: str) -> None:
    """What is being measured, on one line of the terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)
